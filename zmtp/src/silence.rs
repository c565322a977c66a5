//! How a host that vanished without a word is noticed.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::net::sockopt;

/// A connection that carries nothing is probed after this time, and again after each interval.
const PROBE_AFTER_IDLE: Duration = Duration::from_secs(5);
const PROBE_INTERVAL: Duration = Duration::from_secs(2);
/// Where the kernel takes no limit in time, so many probes without an answer end a connection.
const PROBES_UNTIL_DEAD: u32 = 3;

/// Lets the kernel end a connection whose host has acknowledged nothing for so long, whether
/// something was sent to it or not. The least is what a first probe takes to be answered.
pub(crate) fn end_when_silent(stream: impl AsFd, timeout: Duration) -> io::Result<()> {
    sockopt::set_socket_keepalive(&stream, true)?;
    sockopt::set_tcp_keepidle(&stream, PROBE_AFTER_IDLE)?;
    sockopt::set_tcp_keepintvl(&stream, PROBE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(&stream, PROBES_UNTIL_DEAD)?;
    // The kernel keeps it in an `int`.
    let milliseconds = i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX);
    Ok(sockopt::set_tcp_user_timeout(
        &stream,
        milliseconds.unsigned_abs(),
    )?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_has_a_limit_in_time_whether_it_is_idle_or_not() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        let stream = std::net::TcpStream::connect(address).expect("it listens");
        let timeout = Duration::from_millis(12_345);
        end_when_silent(&stream, timeout).expect("the options are known");
        assert_eq!(sockopt::socket_keepalive(&stream), Ok(true));
        assert_eq!(sockopt::tcp_keepidle(&stream), Ok(PROBE_AFTER_IDLE));
        assert_eq!(sockopt::tcp_keepintvl(&stream), Ok(PROBE_INTERVAL));
        assert_eq!(sockopt::tcp_user_timeout(&stream), Ok(12_345));
        end_when_silent(&stream, Duration::MAX).expect("the longest there is");
        assert_eq!(sockopt::tcp_user_timeout(&stream), Ok(i32::MAX as u32));
    }
}
