//! The sending socket, to one peer.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout, timeout_at};

use crate::codec::{self, CodecError, Command, GREETING_BYTES, check_greeting};
use crate::silence::end_when_silent;

/// How a [`PushPeer`] behaves.
#[derive(Clone, Copy, Debug)]
pub struct PushOptions {
    /// Time for a connection and its handshake.
    pub connect_timeout: Duration,
    /// Time for one message, from [`PushPeer::send`] until the kernel has all of it.
    pub send_timeout: Duration,
    /// Messages that wait.
    pub outbox_messages: usize,
    /// Bytes that wait.
    pub outbox_bytes: usize,
    /// A connection that carried nothing for this long is closed; the next message opens one.
    pub idle_timeout: Duration,
    /// A connection whose other host acknowledges nothing for so long has ended.
    pub silence_timeout: Duration,
}

impl Default for PushOptions {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(1),
            send_timeout: Duration::from_secs(1),
            outbox_messages: 4096,
            outbox_bytes: 64 << 20,
            idle_timeout: Duration::from_secs(600),
            silence_timeout: Duration::from_secs(10),
        }
    }
}

/// Why a message was not sent. Whether a peer took a message that was sent, only the peer can say.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SendError {
    /// The peer could not be reached.
    #[error("connecting to {endpoint}: {reason}")]
    Connect {
        /// The peer.
        endpoint: String,
        /// What the operating system or the peer said.
        reason: String,
    },
    /// The connection broke, or the peer took nothing for too long; the message may have left in
    /// part, and such a message is never completed by the receiver.
    #[error("sending to {endpoint}: {reason}")]
    Broken {
        /// The peer.
        endpoint: String,
        /// What happened.
        reason: String,
    },
    /// The outbox is full.
    #[error("the outbox of {endpoint} is full ({messages} messages, {bytes} bytes)")]
    Full {
        /// The peer.
        endpoint: String,
        /// Messages that wait.
        messages: usize,
        /// Bytes that wait.
        bytes: usize,
    },
}

impl SendError {
    /// A short fixed word.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Connect { .. } => "connect",
            Self::Broken { .. } => "broken",
            Self::Full { .. } => "full",
        }
    }
}

struct Outgoing {
    bytes: Vec<u8>,
    deadline: Instant,
    done: oneshot::Sender<Result<(), SendError>>,
}

/// Sends to one PULL socket. Clones share the connection, which ends when the last is dropped and
/// the outbox is empty.
#[derive(Clone, Debug)]
pub struct PushPeer {
    endpoint: Arc<str>,
    options: PushOptions,
    outbox: mpsc::Sender<Outgoing>,
    waiting_bytes: Arc<AtomicUsize>,
}

impl PushPeer {
    /// A peer at `host:port` (IPv6 in brackets). Connects when there is something to send. Must be
    /// called within a tokio runtime.
    pub fn new(endpoint: &str, options: PushOptions) -> Self {
        Self::watched(endpoint, options, || {})
    }

    /// As [`PushPeer::new`]. When the peer ends a connection on which nothing is being sent,
    /// `on_end` is called, on the runtime's threads; a send that fails says so to its caller.
    pub fn watched(
        endpoint: &str,
        options: PushOptions,
        on_end: impl Fn() + Send + Sync + 'static,
    ) -> Self {
        let (outbox, receiver) = mpsc::channel(options.outbox_messages.max(1));
        let endpoint: Arc<str> = endpoint.into();
        let waiting_bytes = Arc::new(AtomicUsize::new(0));
        let worker = Worker {
            endpoint: Arc::clone(&endpoint),
            options,
            receiver,
            waiting_bytes: Arc::clone(&waiting_bytes),
            on_end: Box::new(on_end),
        };
        tokio::spawn(worker.run());
        Self {
            endpoint,
            options,
            outbox,
            waiting_bytes,
        }
    }

    /// Where the peer is.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Sends a message; returns when the kernel has all of it. Messages leave in the order in
    /// which this is called.
    ///
    /// # Errors
    /// A [`SendError`] within [`PushOptions::send_timeout`].
    pub async fn send(&self, frames: &[Vec<u8>]) -> Result<(), SendError> {
        self.enqueue(frames)?
            .await
            .unwrap_or_else(|_| Err(self.broken("the socket was closed")))
    }

    /// Puts a message into the outbox at once; the returned future tells how it went.
    ///
    /// # Errors
    /// [`SendError::Full`] when the outbox has no room.
    pub fn enqueue(
        &self,
        frames: &[Vec<u8>],
    ) -> Result<oneshot::Receiver<Result<(), SendError>>, SendError> {
        let bytes = codec::encode_message(frames);
        let length = bytes.len();
        let waiting = self.waiting_bytes.fetch_add(length, Ordering::AcqRel);
        let full = || {
            self.waiting_bytes.fetch_sub(length, Ordering::AcqRel);
            SendError::Full {
                endpoint: self.endpoint.to_string(),
                messages: self.outbox.max_capacity() - self.outbox.capacity(),
                bytes: waiting,
            }
        };
        if waiting > 0 && waiting + length > self.options.outbox_bytes {
            return Err(full());
        }
        let (done, result) = oneshot::channel();
        let deadline = Instant::now() + self.options.send_timeout;
        match self.outbox.try_send(Outgoing {
            bytes,
            deadline,
            done,
        }) {
            Ok(()) => Ok(result),
            Err(mpsc::error::TrySendError::Full(_)) => Err(full()),
            Err(mpsc::error::TrySendError::Closed(_)) => {
                self.waiting_bytes.fetch_sub(length, Ordering::AcqRel);
                Err(self.broken("the socket was closed"))
            }
        }
    }

    fn broken(&self, reason: &str) -> SendError {
        SendError::Broken {
            endpoint: self.endpoint.to_string(),
            reason: reason.to_owned(),
        }
    }
}

struct Worker {
    endpoint: Arc<str>,
    options: PushOptions,
    receiver: mpsc::Receiver<Outgoing>,
    waiting_bytes: Arc<AtomicUsize>,
    on_end: Box<dyn Fn() + Send + Sync>,
}

impl Worker {
    async fn run(mut self) {
        let mut connection: Option<Link> = None;
        loop {
            let outgoing = match &mut connection {
                None => self.receiver.recv().await,
                Some(link) => {
                    let idle = tokio::time::sleep(self.options.idle_timeout);
                    tokio::select! {
                        biased;
                        outgoing = self.receiver.recv() => outgoing,
                        event = link.watch() => {
                            if !self.answer(link, event).await {
                                connection = None;
                                (self.on_end)();
                            }
                            continue;
                        }
                        () = idle => { connection = None; continue }
                    }
                }
            };
            let Some(outgoing) = outgoing else { break };
            let result = self.deliver(&mut connection, &outgoing).await;
            self.finish(outgoing, result.clone());
            if let Err(error) = result {
                connection = None;
                self.drop_outbox(&error);
            }
        }
        if let Some(mut link) = connection {
            // What was written is on its way; a peer that is gone does not matter any more.
            let _ = link.stream.shutdown().await;
        }
    }

    /// Whether the connection goes on.
    async fn answer(&self, link: &mut Link, event: PeerEvent) -> bool {
        match event {
            PeerEvent::Gone => false,
            PeerEvent::Ping(context) => {
                let pong = codec::pong(&context);
                let written =
                    timeout(self.options.send_timeout, link.stream.write_all(&pong)).await;
                matches!(written, Ok(Ok(())))
            }
        }
    }

    fn finish(&self, outgoing: Outgoing, result: Result<(), SendError>) {
        self.waiting_bytes
            .fetch_sub(outgoing.bytes.len(), Ordering::AcqRel);
        // A sender that does not wait for the result is told nothing.
        let _ = outgoing.done.send(result);
    }

    /// What waits for a dead peer would only be late: its senders are told at once.
    fn drop_outbox(&mut self, error: &SendError) {
        while let Ok(outgoing) = self.receiver.try_recv() {
            self.finish(outgoing, Err(error.clone()));
        }
    }

    async fn deliver(
        &self,
        connection: &mut Option<Link>,
        outgoing: &Outgoing,
    ) -> Result<(), SendError> {
        let endpoint = || self.endpoint.to_string();
        // A peer that left while nothing was sent is noticed before a message is lost to it.
        if connection.as_mut().is_some_and(Link::is_gone) {
            *connection = None;
        }
        let link = match connection {
            Some(link) => link,
            None => {
                let limit = outgoing
                    .deadline
                    .min(Instant::now() + self.options.connect_timeout);
                let opened =
                    timeout_at(limit, connect(&self.endpoint, self.options.silence_timeout)).await;
                let opened = opened.unwrap_or_else(|_| Err("timed out".to_owned()));
                let opened = opened.map_err(|reason| SendError::Connect {
                    endpoint: endpoint(),
                    reason,
                })?;
                connection.insert(Link {
                    stream: opened,
                    inbound: Vec::new(),
                })
            }
        };
        let written = timeout_at(outgoing.deadline, link.stream.write_all(&outgoing.bytes)).await;
        let written = written.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
        written.map_err(|error| SendError::Broken {
            endpoint: endpoint(),
            reason: error.to_string(),
        })
    }
}

/// Connects and shakes hands.
async fn connect(endpoint: &str, silence_timeout: Duration) -> Result<TcpStream, String> {
    let text = |error: io::Error| error.to_string();
    let protocol = |error: CodecError| error.to_string();
    let mut stream = TcpStream::connect(endpoint).await.map_err(text)?;
    stream.set_nodelay(true).map_err(text)?;
    end_when_silent(&stream, silence_timeout).map_err(text)?;
    stream.write_all(&codec::greeting()).await.map_err(text)?;
    let mut greeting = [0; GREETING_BYTES];
    stream.read_exact(&mut greeting).await.map_err(text)?;
    check_greeting(&greeting).map_err(protocol)?;
    stream
        .write_all(&codec::ready("PUSH"))
        .await
        .map_err(text)?;
    match read_command(&mut stream).await.map_err(text)? {
        Ok(Command::Ready { socket_type }) if socket_type == "PULL" => Ok(stream),
        Ok(Command::Ready { socket_type }) => Err(protocol(CodecError::SocketType {
            seen: socket_type,
            expected: "PULL",
        })),
        Ok(Command::Error { reason }) => Err(reason),
        Ok(_) => Err(protocol(CodecError::Command)),
        Err(error) => Err(protocol(error)),
    }
}

async fn read_command(stream: &mut TcpStream) -> io::Result<Result<Command, CodecError>> {
    let flags = stream.read_u8().await?;
    let length = match codec::header_bytes(flags) {
        Ok(length) => length,
        Err(error) => return Ok(Err(error)),
    };
    let mut header = vec![flags; length];
    if let Some(size) = header.get_mut(1..) {
        stream.read_exact(size).await?;
    }
    let header = match codec::parse_header(&header) {
        Ok(header) if header.is_command => header,
        Ok(_) => return Ok(Err(CodecError::Command)),
        Err(error) => return Ok(Err(error)),
    };
    // `parse_header` bounded it.
    let mut body = vec![0; header.size as usize];
    stream.read_exact(&mut body).await?;
    Ok(codec::parse_command(&body))
}

/// An open connection, and bytes of a command that has not come whole.
struct Link {
    stream: TcpStream,
    inbound: Vec<u8>,
}

/// What a peer did that is to be acted on.
enum PeerEvent {
    /// It wants this answered.
    Ping(Vec<u8>),
    /// It closed the connection or broke the protocol.
    Gone,
}

impl Link {
    /// Waits for the peer to do something. Can be abandoned at any time: bytes are taken without
    /// waiting and kept until a command is whole.
    async fn watch(&mut self) -> PeerEvent {
        loop {
            match self.next_command() {
                Ok(Some(Command::Ping { context })) => return PeerEvent::Ping(context),
                Ok(Some(Command::Error { .. })) | Err(_) => return PeerEvent::Gone,
                Ok(Some(Command::Other | Command::Ready { .. })) => continue,
                Ok(None) => {}
            }
            if self.stream.readable().await.is_err() {
                return PeerEvent::Gone;
            }
            let mut buffer = [0; 512];
            match self.stream.try_read(&mut buffer) {
                Ok(0) => return PeerEvent::Gone,
                Ok(length) => self.inbound.extend(buffer.iter().take(length)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return PeerEvent::Gone,
            }
        }
    }

    /// Whether the peer has closed the connection, as far as is known here.
    fn is_gone(&mut self) -> bool {
        let mut buffer = [0; 512];
        match self.stream.try_read(&mut buffer) {
            Ok(0) => true,
            Ok(length) => {
                self.inbound.extend(buffer.iter().take(length));
                false
            }
            Err(error) => error.kind() != io::ErrorKind::WouldBlock,
        }
    }

    /// Takes a whole command out of what has come. The codec bounds commands, so this is bounded.
    fn next_command(&mut self) -> Result<Option<Command>, CodecError> {
        let Some(flags) = self.inbound.first() else {
            return Ok(None);
        };
        let header_length = codec::header_bytes(*flags)?;
        let Some(header) = self.inbound.get(..header_length) else {
            return Ok(None);
        };
        let header = codec::parse_header(header)?;
        if !header.is_command {
            return Err(CodecError::Command);
        }
        let end = header_length + header.size as usize;
        let Some(body) = self.inbound.get(header_length..end) else {
            return Ok(None);
        };
        let command = codec::parse_command(body)?;
        self.inbound.drain(..end);
        Ok(Some(command))
    }
}
