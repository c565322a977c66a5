//! What engines tell each other when they are asked: who they are and what memory they have.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::wire::EngineEntry;

/// Begins an answer.
const MAGIC: &[u8; 4] = b"FRYM";
/// The longest answer that is read; a descriptor has some 230 bytes.
const MAX_ANSWER: u32 = 16 << 20;
/// How long a connection, an answer, and whoever takes one may take.
const TIMEOUT: Duration = Duration::from_secs(5);

/// A listener that answers with the entry as it is at the time.
pub(super) struct Directory {
    address: SocketAddr,
    has_ended: Arc<AtomicBool>,
}

impl Directory {
    pub(super) fn serve(
        bind: IpAddr,
        entry: impl Fn() -> EngineEntry + Send + 'static,
    ) -> io::Result<Self> {
        let listener = TcpListener::bind((bind, 0))?;
        let address = listener.local_addr()?;
        let has_ended = Arc::new(AtomicBool::new(false));
        let ends = Arc::clone(&has_ended);
        std::thread::Builder::new()
            .name("ferry-directory".to_owned())
            .spawn(move || {
                for stream in listener.incoming() {
                    if ends.load(Ordering::Acquire) {
                        return;
                    }
                    let told = stream.and_then(|stream| tell(stream, &entry()));
                    if let Err(error) = told {
                        tracing::info!(%error, "a peer was not told of this engine's memory");
                    }
                }
            })?;
        Ok(Self { address, has_ended })
    }

    pub(super) fn port(&self) -> u16 {
        self.address.port()
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        self.has_ended.store(true, Ordering::Release);
        let mut address = self.address;
        if address.ip().is_unspecified() {
            address.set_ip(match address {
                SocketAddr::V4(_) => IpAddr::from([127, 0, 0, 1]),
                SocketAddr::V6(_) => IpAddr::from([0u16, 0, 0, 0, 0, 0, 0, 1]),
            });
        }
        // Wakes the thread; if that fails, it ends with the process.
        let _ = TcpStream::connect_timeout(&address, TIMEOUT);
    }
}

fn tell(mut stream: TcpStream, entry: &EngineEntry) -> io::Result<()> {
    stream.set_write_timeout(Some(TIMEOUT))?;
    let body = entry.pack().map_err(io::Error::other)?;
    let len = u32::try_from(body.len()).map_err(io::Error::other)?;
    stream.write_all(MAGIC)?;
    stream.write_all(&len.to_be_bytes())?;
    stream.write_all(&body)
}

fn connect(session: &str) -> io::Result<TcpStream> {
    let mut failed = io::Error::new(io::ErrorKind::NotFound, "it has no address");
    for address in session.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, TIMEOUT) {
            Ok(stream) => return Ok(stream),
            Err(error) => failed = error,
        }
    }
    Err(failed)
}

/// Asks the engine behind a session (`host:port`).
pub(super) fn ask(session: &str) -> io::Result<EngineEntry> {
    let mut stream = connect(session)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    let invalid = |what: &str| {
        let text = format!("{session} is no Ferry engine with Mooncake's face: {what}");
        io::Error::new(io::ErrorKind::InvalidData, text)
    };
    let mut head = [0; 8];
    stream.read_exact(&mut head)?;
    let (magic, len) = head.split_at(4);
    let len = len.try_into().map(u32::from_be_bytes);
    let len = len.map_err(|_| invalid("it sent no length"))?;
    if magic != MAGIC || len > MAX_ANSWER {
        return Err(invalid("its answer begins otherwise"));
    }
    let mut body = vec![0; len as usize];
    stream.read_exact(&mut body)?;
    EngineEntry::unpack(&body).map_err(|error| invalid(&error.to_string()))
}
