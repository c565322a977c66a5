//! The service as an engine in Rust sees it: attach a rank's pools, then drive its rooms.
//!
//! [`RankClient::attach`] sends one [`AttachRequest`] over the attach socket with the pools' file
//! descriptors beside it and keeps the connection: the rank lives as long as the client. Rooms are
//! driven over HTTP on the API socket. An engine in another language does the same with a dozen
//! lines; everything on the wire is in [`crate::api`].

use std::io::{self, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::api::{
    AbortRoom, Announce, AttachReply, AttachRequest, Chunk, Drain, Drained, ErrorBody, OpenRoom,
    RoomStatus, RoomView,
};
use crate::bootstrap_access::plain_http;

/// Most file descriptors that the kernel passes in one message (`SCM_MAX_FD`).
pub const MAX_POOLS: usize = 253;

/// Longest answer to an attach request, in bytes.
const MAX_REPLY_BYTES: u32 = 64 * 1024;

/// Longest time that one request of a long poll asks for; a longer wait is several requests.
const MAX_POLL: Duration = Duration::from_secs(30);

/// How much longer than asked for an answer may take before the service counts as gone.
const ANSWER_GRACE: Duration = Duration::from_secs(30);

/// Why a call did not do what it was asked to.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// A socket could not be used.
    #[error("{what} {}: {source}", path.display())]
    Socket {
        /// What was tried.
        what: &'static str,
        /// The socket.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The service did not take the rank; nothing was kept.
    #[error("the service refused the rank: {0}")]
    Refused(String),
    /// The service answered with an error.
    #[error("{} ({status}): {}", body.code, body.message)]
    Api {
        /// The HTTP status.
        status: u16,
        /// A stable code and a message.
        body: ErrorBody,
    },
    /// No answer came, or one that cannot be understood.
    #[error("the service cannot be asked: {0}")]
    Http(#[from] reqwest::Error),
    /// The attach socket carried something else than the protocol says.
    #[error("attaching: {0}")]
    Protocol(String),
}

impl ClientError {
    /// The stable code of an answer with an error, for example `unknown_room`.
    pub fn code(&self) -> Option<&str> {
        match self {
            Self::Api { body, .. } => Some(&body.code),
            Self::Socket { .. } | Self::Refused(_) | Self::Http(_) | Self::Protocol(_) => None,
        }
    }
}

/// A rank that is attached to a service. When it is dropped, the service fails the rank's rooms
/// and forgets the rank.
#[derive(Debug)]
pub struct RankClient {
    http: reqwest::Client,
    rank: u32,
    engine_key: String,
    control: String,
    /// Held open, never used again: its end is the rank's end.
    _attachment: UnixStream,
}

impl RankClient {
    /// Hands a rank to the service behind two sockets. `pools` run parallel to `request.pools`; one in
    /// device memory has the descriptors of its parts there.
    /// Returns once the rank is up and, for a prefill, registered at its bootstrap server.
    ///
    /// # Errors
    /// [`ClientError::Refused`] with what the service found wrong; nothing is kept then.
    pub async fn attach(
        attach_socket: &Path,
        api_socket: &Path,
        request: &AttachRequest,
        pools: &[impl AsFd],
    ) -> Result<Self, ClientError> {
        let body = serde_json::to_vec(request)
            .map_err(|error| ClientError::Protocol(format!("writing the request: {error}")))?;
        let mut fds = Vec::with_capacity(pools.len());
        for pool in pools {
            fds.push(
                pool.as_fd()
                    .try_clone_to_owned()
                    .map_err(|source| ClientError::Socket {
                        what: "duplicating a pool for",
                        path: attach_socket.to_owned(),
                        source,
                    })?,
            );
        }
        let path = attach_socket.to_owned();
        let exchanged = tokio::task::spawn_blocking(move || exchange(&path, &body, &fds)).await;
        let (reply, attachment) = exchanged
            .map_err(|error| ClientError::Protocol(format!("the exchange ended: {error}")))??;
        let (rank, engine_key, control) = match reply {
            AttachReply::Attached {
                rank,
                engine_key,
                control,
            } => (rank, engine_key, control),
            AttachReply::Refused { message } => return Err(ClientError::Refused(message)),
        };
        let http = plain_http().unix_socket(api_socket.to_owned()).build()?;
        Ok(Self {
            http,
            rank,
            engine_key,
            control,
            _attachment: attachment,
        })
    }

    /// Number of the rank in the HTTP API.
    pub const fn rank(&self) -> u32 {
        self.rank
    }

    /// Key of the rank's io engine.
    pub fn engine_key(&self) -> &str {
        &self.engine_key
    }

    /// The rank's control socket, `host:port`.
    pub fn control(&self) -> &str {
        &self.control
    }

    /// Opens a room.
    ///
    /// # Errors
    /// [`ClientError::Api`] with the service's code and message; so for every call below.
    pub async fn open(&self, open: OpenRoom) -> Result<RoomView, ClientError> {
        self.post(&format!("/v1/ranks/{}/rooms", self.rank), &open)
            .await
    }

    /// Decode: says where the state must land.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub async fn announce(&self, room: u64, announce: Announce) -> Result<RoomView, ClientError> {
        self.post(&self.room_path(room, "/announce"), &announce)
            .await
    }

    /// Prefill, policy `prefill_complete`: says that the prompt has been read.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub async fn prefill_complete(&self, room: u64) -> Result<RoomView, ClientError> {
        self.post(
            &self.room_path(room, "/prefill-complete"),
            &serde_json::json!({}),
        )
        .await
    }

    /// Prefill: sends the next pages. Returns once they are accepted, not once they have moved:
    /// their bytes must stay until the room has ended.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub async fn send_chunk(&self, room: u64, chunk: Chunk) -> Result<RoomView, ClientError> {
        self.post(&self.room_path(room, "/chunks"), &chunk).await
    }

    /// Waits until a room has reached a status, or an end, or the time is over; the room as it is
    /// then. Without `wait_for` it answers at once.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub async fn wait(
        &self,
        room: u64,
        wait_for: Option<RoomStatus>,
        timeout: Duration,
    ) -> Result<RoomView, ClientError> {
        let deadline = Instant::now() + timeout;
        loop {
            let left = deadline
                .saturating_duration_since(Instant::now())
                .min(MAX_POLL);
            let mut suffix = format!("?timeout_ms={}", left.as_millis());
            if let Some(status) = wait_for {
                suffix.push_str("&wait_for=");
                suffix.push_str(&status_word(status)?);
            }
            let url = url(&self.room_path(room, &suffix));
            let request = self.http.get(url).timeout(left + ANSWER_GRACE);
            let view: RoomView = answer(request.send().await?).await?;
            let reached = wait_for.is_none_or(|status| view.status >= status);
            if reached || view.status == RoomStatus::Failed || Instant::now() >= deadline {
                return Ok(view);
            }
        }
    }

    /// Fails a room; no new write starts for it.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub async fn abort(&self, room: u64, reason: Option<String>) -> Result<RoomView, ClientError> {
        self.post(&self.room_path(room, "/abort"), &AbortRoom { reason })
            .await
    }

    /// Forgets a room that has ended.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub async fn clear(&self, room: u64) -> Result<(), ClientError> {
        let request = self
            .http
            .delete(url(&self.room_path(room, "")))
            .timeout(ANSWER_GRACE);
        let response = request.send().await?;
        if response.status().is_success() {
            return Ok(());
        }
        answer::<serde_json::Value>(response).await.map(|_| ())
    }

    /// Lets the rank finish its rooms and end: it takes no new ones, and after this time those that
    /// are open fail. How many those were. The engine may attach again then, in the other role.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub async fn drain(&self, timeout: Duration) -> Result<usize, ClientError> {
        let drain = Drain {
            timeout_s: Some(u32::try_from(timeout.as_secs()).unwrap_or(u32::MAX)),
        };
        let path = format!("/v1/ranks/{}/drain", self.rank);
        let request = self.http.post(url(&path)).json(&drain);
        let request = request.timeout(timeout + ANSWER_GRACE);
        let drained: Drained = answer(request.send().await?).await?;
        Ok(drained.unfinished)
    }

    fn room_path(&self, room: u64, suffix: &str) -> String {
        format!("/v1/ranks/{}/rooms/{room}{suffix}", self.rank)
    }

    async fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T, ClientError> {
        let request = self.http.post(url(path)).json(body).timeout(ANSWER_GRACE);
        answer(request.send().await?).await
    }
}

/// The host is not looked at: the socket says who is asked.
fn url(path: &str) -> String {
    format!("http://ferry{path}")
}

/// A status as it stands in a query.
fn status_word(status: RoomStatus) -> Result<String, ClientError> {
    match serde_json::to_value(status) {
        Ok(serde_json::Value::String(word)) => Ok(word),
        Ok(_) | Err(_) => Err(ClientError::Protocol(format!("{status:?} has no word"))),
    }
}

async fn answer<T: DeserializeOwned>(response: reqwest::Response) -> Result<T, ClientError> {
    let status = response.status();
    if status.is_success() {
        return Ok(response.json().await?);
    }
    let bytes = response.bytes().await?;
    let body = serde_json::from_slice(&bytes).unwrap_or_else(|_| ErrorBody {
        code: "unknown".to_owned(),
        message: String::from_utf8_lossy(&bytes).into_owned(),
    });
    Err(ClientError::Api {
        status: status.as_u16(),
        body,
    })
}

/// Sends the request with the descriptors beside its first bytes, and reads the answer.
fn exchange(
    path: &Path,
    body: &[u8],
    fds: &[impl AsFd],
) -> Result<(AttachReply, UnixStream), ClientError> {
    let at = |what: &'static str| {
        move |source: io::Error| ClientError::Socket {
            what,
            path: path.to_owned(),
            source,
        }
    };
    if fds.len() > MAX_POOLS {
        return Err(ClientError::Protocol(format!(
            "{} pools cannot be passed at once: at most {MAX_POOLS}",
            fds.len()
        )));
    }
    let len = u32::try_from(body.len())
        .map_err(|_| ClientError::Protocol(format!("a request of {} bytes", body.len())))?;
    let mut stream = UnixStream::connect(path).map_err(at("connecting to"))?;

    let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_POOLS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !borrowed.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(&borrowed)) {
        return Err(ClientError::Protocol(
            "the pools do not fit one message".to_owned(),
        ));
    }
    let header = len.to_le_bytes();
    let sent = rustix::net::sendmsg(
        &stream,
        &[io::IoSlice::new(&header)],
        &mut ancillary,
        SendFlags::NOSIGNAL,
    );
    let sent = sent
        .map_err(io::Error::from)
        .map_err(at("sending pools to"))?;
    let rest = header.get(sent..).unwrap_or_default();
    stream
        .write_all(rest)
        .and_then(|()| stream.write_all(body))
        .map_err(at("writing to"))?;

    let mut header = [0_u8; 4];
    stream.read_exact(&mut header).map_err(at("reading from"))?;
    let len = u32::from_le_bytes(header);
    if len > MAX_REPLY_BYTES {
        return Err(ClientError::Protocol(format!("an answer of {len} bytes")));
    }
    let mut reply = vec![0_u8; len as usize];
    stream.read_exact(&mut reply).map_err(at("reading from"))?;
    let reply = serde_json::from_slice(&reply)
        .map_err(|error| ClientError::Protocol(format!("reading the answer: {error}")))?;
    Ok((reply, stream))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixListener;

    use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};

    use super::*;

    /// Takes one request as a service does, and answers it.
    fn serve_once(listener: UnixListener, reply: &AttachReply) -> (Vec<u8>, Vec<OwnedFd>) {
        let (mut stream, _) = listener.accept().expect("a client comes");
        let mut header = [0_u8; 4];
        let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_POOLS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [io::IoSliceMut::new(&mut header)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let received = rustix::net::recvmsg(&stream, &mut parts, &mut ancillary, flags);
        assert_eq!(received.expect("a message comes").bytes, 4);
        let fds = ancillary
            .drain()
            .filter_map(|message| match message {
                RecvAncillaryMessage::ScmRights(fds) => Some(fds),
                _ => None,
            })
            .flatten()
            .collect();
        let mut body = vec![0_u8; u32::from_le_bytes(header) as usize];
        stream.read_exact(&mut body).expect("the body comes");
        let reply = serde_json::to_vec(reply).expect("it is json");
        stream
            .write_all(&(reply.len() as u32).to_le_bytes())
            .expect("it is read");
        stream.write_all(&reply).expect("it is read");
        (body, fds)
    }

    #[test]
    fn pools_travel_beside_the_request() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("attach.sock");
        let listener = UnixListener::bind(&path).expect("it binds");
        let reply = AttachReply::Attached {
            rank: 7,
            engine_key: "key".to_owned(),
            control: "127.0.0.1:1".to_owned(),
        };
        let expected = reply.clone();
        let service = std::thread::spawn(move || serve_once(listener, &reply));
        let mut pools = vec![
            tempfile::tempfile().expect("a file"),
            tempfile::tempfile().expect("a file"),
        ];
        for (index, pool) in pools.iter_mut().enumerate() {
            write!(pool, "pool {index}").expect("it can be written");
        }
        // Larger than a socket's buffer, so that it goes out in several pieces.
        let body = vec![b'x'; 1 << 20];
        let (answer, _stream) = exchange(&path, &body, &pools).expect("it is answered");
        assert_eq!(answer, expected);
        let (seen, fds) = service.join().expect("the service ends");
        assert_eq!(seen, body);
        let contents = fds.into_iter().map(|fd| {
            let mut text = String::new();
            let mut file = File::from(fd);
            io::Seek::rewind(&mut file).expect("it is a file");
            file.read_to_string(&mut text).expect("it is text");
            text
        });
        assert_eq!(contents.collect::<Vec<_>>(), ["pool 0", "pool 1"]);
    }

    #[test]
    fn a_service_that_is_absent_or_goes_away_is_an_error() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("attach.sock");
        let none: [File; 0] = [];
        assert!(matches!(
            exchange(&path, b"{}", &none),
            Err(ClientError::Socket { .. })
        ));
        let listener = UnixListener::bind(&path).expect("it binds");
        let service = std::thread::spawn(move || drop(listener.accept()));
        assert!(matches!(
            exchange(&path, b"{}", &none),
            Err(ClientError::Socket { .. })
        ));
        service.join().expect("the service ends");
    }

    #[test]
    fn statuses_travel_by_their_words() {
        let word = status_word(RoomStatus::WaitingForInput).expect("it has a word");
        assert_eq!(word, "waiting_for_input");
    }
}
