//! The receiving socket.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::codec::{
    self, CodecError, Command, GREETING_BYTES, Limits, MessageBuilder, check_greeting,
};
use crate::silence::end_when_silent;

const BACKLOG: u32 = 1024;
/// Connections at once; each needs a descriptor.
const MAX_CONNECTIONS: usize = 16_384;
/// Large enough for the small messages of a control plane, small enough for thousands of peers.
const READ_BUFFER_BYTES: usize = 16 << 10;
/// How long to leave a listener alone that cannot accept (out of descriptors, for example).
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A message and who sent it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// The sender's address.
    pub peer: SocketAddr,
    /// The frames; at least one.
    pub frames: Vec<Vec<u8>>,
}

/// Counts of a [`PullSocket`].
#[derive(Debug, Default)]
pub struct PullStats {
    accepted: AtomicU64,
    rejected: AtomicU64,
}

impl PullStats {
    /// Connections that were accepted.
    pub fn accepted(&self) -> u64 {
        self.accepted.load(Ordering::Relaxed)
    }

    /// Connections that were ended because the peer broke the protocol or a limit.
    pub fn rejected(&self) -> u64 {
        self.rejected.load(Ordering::Relaxed)
    }
}

/// Receives from any number of PUSH sockets. Dropping it closes all connections.
#[derive(Debug)]
pub struct PullSocket {
    local_addr: SocketAddr,
    messages: mpsc::Receiver<Received>,
    stats: Arc<PullStats>,
    _connections: JoinSet<()>,
}

impl PullSocket {
    /// Binds an address; port 0 takes a free one.
    ///
    /// # Errors
    /// When the address cannot be bound.
    pub fn bind(address: SocketAddr, limits: Limits) -> io::Result<Self> {
        let socket = if address.is_ipv6() {
            TcpSocket::new_v6()
        } else {
            TcpSocket::new_v4()
        }?;
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        let listener = socket.listen(BACKLOG)?;
        let local_addr = listener.local_addr()?;
        let (sender, messages) = mpsc::channel(limits.queued_messages.max(1));
        let stats = Arc::new(PullStats::default());
        let mut connections = JoinSet::new();
        connections.spawn(accept(listener, limits, sender, Arc::clone(&stats)));
        Ok(Self {
            local_addr,
            messages,
            stats,
            _connections: connections,
        })
    }

    /// Binds the first free port of a range.
    ///
    /// # Errors
    /// When none is free; the last port's error.
    pub fn bind_range(
        host: IpAddr,
        ports: RangeInclusive<u16>,
        limits: Limits,
    ) -> io::Result<Self> {
        let mut last = io::Error::new(io::ErrorKind::InvalidInput, "an empty range of ports");
        for port in ports {
            match Self::bind(SocketAddr::new(host, port), limits) {
                Ok(socket) => return Ok(socket),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// The bound address, with its real port.
    pub const fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// What was accepted and rejected so far.
    pub fn stats(&self) -> Arc<PullStats> {
        Arc::clone(&self.stats)
    }

    /// The next message of any peer. `None` never comes while the socket lives.
    pub async fn recv(&mut self) -> Option<Received> {
        self.messages.recv().await
    }
}

async fn accept(
    listener: TcpListener,
    limits: Limits,
    messages: mpsc::Sender<Received>,
    stats: Arc<PullStats>,
) {
    let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    // Dropped with this task, and its tasks with it.
    let mut connections = JoinSet::new();
    loop {
        while connections.try_join_next().is_some() {}
        let Ok(permit) = Arc::clone(&permits).acquire_owned().await else {
            return;
        };
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        stats.accepted.fetch_add(1, Ordering::Relaxed);
        let (messages, stats) = (messages.clone(), Arc::clone(&stats));
        connections.spawn(async move {
            let _permit = permit;
            match Connection::open(stream, peer, limits).await {
                Ok(mut connection) => {
                    if let Err(end) = connection.run(&messages).await {
                        end.report(peer, &stats);
                    }
                }
                Err(end) => end.report(peer, &stats),
            }
        });
    }
}

/// Why a connection ended.
enum End {
    Io(io::Error),
    Protocol(CodecError),
    Refused(String),
    Stalled(&'static str),
}

impl From<io::Error> for End {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<CodecError> for End {
    fn from(error: CodecError) -> Self {
        Self::Protocol(error)
    }
}

impl End {
    fn report(self, peer: SocketAddr, stats: &PullStats) {
        match self {
            // A peer that leaves is nothing to look at.
            Self::Io(error) => tracing::debug!(%peer, %error, "a peer's connection ended"),
            Self::Refused(reason) => tracing::info!(%peer, reason, "a peer refused this socket"),
            Self::Protocol(error) => {
                stats.rejected.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(%peer, %error, kind = error.kind(), "a peer broke the protocol");
            }
            Self::Stalled(during) => {
                stats.rejected.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(%peer, during, "a peer stalled");
            }
        }
    }
}

struct Connection {
    stream: BufReader<TcpStream>,
    peer: SocketAddr,
    limits: Limits,
}

impl Connection {
    async fn open(stream: TcpStream, peer: SocketAddr, limits: Limits) -> Result<Self, End> {
        stream.set_nodelay(true)?;
        end_when_silent(&stream, limits.silence_timeout)?;
        let stream = BufReader::with_capacity(READ_BUFFER_BYTES, stream);
        let mut connection = Self {
            stream,
            peer,
            limits,
        };
        timeout(limits.handshake_timeout, connection.handshake())
            .await
            .map_err(|_| End::Stalled("handshake"))??;
        Ok(connection)
    }

    async fn handshake(&mut self) -> Result<(), End> {
        self.stream.get_mut().write_all(&codec::greeting()).await?;
        let mut greeting = [0; GREETING_BYTES];
        // The first byte decides, so that a client of another protocol is not waited for.
        self.stream.read_exact(&mut greeting[..1]).await?;
        if greeting[0] != 0xff {
            return Err(CodecError::Greeting.into());
        }
        self.stream.read_exact(&mut greeting[1..]).await?;
        check_greeting(&greeting)?;
        self.stream
            .get_mut()
            .write_all(&codec::ready("PULL"))
            .await?;
        let header = self.read_header().await?;
        if !header.is_command {
            return Err(CodecError::Command.into());
        }
        match self.read_command(header.size).await? {
            Command::Ready { socket_type } if socket_type == "PUSH" => Ok(()),
            Command::Ready { socket_type } => Err(CodecError::SocketType {
                seen: socket_type,
                expected: "PUSH",
            }
            .into()),
            Command::Error { reason } => Err(End::Refused(reason)),
            Command::Ping { .. } | Command::Other => Err(CodecError::Command.into()),
        }
    }

    async fn run(&mut self, messages: &mpsc::Sender<Received>) -> Result<(), End> {
        loop {
            // Between messages a peer may be silent for as long as it likes; its host may not.
            let flags = self.stream.read_u8().await?;
            let message = timeout(self.limits.message_timeout, self.read_message(flags))
                .await
                .map_err(|_| End::Stalled("message"))??;
            let Some(frames) = message else { continue };
            let received = Received {
                peer: self.peer,
                frames,
            };
            if messages.send(received).await.is_err() {
                return Ok(());
            }
        }
    }

    /// Reads on from a first flags byte to the end of a message; `None` when it was a command.
    async fn read_message(&mut self, flags: u8) -> Result<Option<Vec<Vec<u8>>>, End> {
        let mut builder = MessageBuilder::default();
        let mut header = self.read_header_behind(flags).await?;
        loop {
            if header.is_command {
                if let Command::Ping { context } = self.read_command(header.size).await? {
                    self.stream
                        .get_mut()
                        .write_all(&codec::pong(&context))
                        .await?;
                }
                if !builder.is_partial() {
                    return Ok(None);
                }
            } else {
                let size = builder.admit(&header, &self.limits)?;
                let mut frame = vec![0; size];
                self.stream.read_exact(&mut frame).await?;
                if let Some(frames) = builder.push(frame, header.has_more) {
                    return Ok(Some(frames));
                }
            }
            header = self.read_header().await?;
        }
    }

    async fn read_header(&mut self) -> Result<codec::FrameHeader, End> {
        let flags = self.stream.read_u8().await?;
        self.read_header_behind(flags).await
    }

    async fn read_header_behind(&mut self, flags: u8) -> Result<codec::FrameHeader, End> {
        let mut header = vec![flags; codec::header_bytes(flags)?];
        if let Some(size) = header.get_mut(1..) {
            self.stream.read_exact(size).await?;
        }
        Ok(codec::parse_header(&header)?)
    }

    async fn read_command(&mut self, size: u64) -> Result<Command, End> {
        // `parse_header` bounded it.
        let mut body = vec![0; size as usize];
        self.stream.read_exact(&mut body).await?;
        Ok(codec::parse_command(&body)?)
    }
}
