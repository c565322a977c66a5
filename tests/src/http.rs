//! A small HTTP/1.1 client that sends exactly what it is told, also what is wrong.

use std::io::{Error, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Time for an answer on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A request on a connection of its own.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct Request {
    pub method: String,
    pub path: String,
    pub headers: Vec<(String, String)>,
    pub body: Option<Vec<u8>>,
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Request {
    /// A request with a method, a path and perhaps a body, which is JSON unless a header of the
    /// caller says otherwise.
    pub fn new(method: &str, path: &str, body: Option<Vec<u8>>) -> Self {
        Self {
            method: method.to_owned(),
            path: path.to_owned(),
            headers: Vec::new(),
            body,
        }
    }

    /// `GET`.
    pub fn get(path: &str) -> Self {
        Self::new("GET", path, None)
    }

    /// `PUT` of a JSON value.
    pub fn put(path: &str, body: &serde_json::Value) -> Self {
        Self::new("PUT", path, Some(body.to_string().into_bytes()))
    }

    /// `POST` of a JSON value.
    pub fn post(path: &str, body: &serde_json::Value) -> Self {
        Self::new("POST", path, Some(body.to_string().into_bytes()))
    }

    /// The request's bytes.
    pub fn bytes(&self, host: impl std::fmt::Display) -> Vec<u8> {
        let mut text = format!("{} {} HTTP/1.1\r\nHost: {host}\r\n", self.method, self.path);
        let has = |name: &str| {
            self.headers
                .iter()
                .any(|(key, _)| key.eq_ignore_ascii_case(name))
        };
        if self.body.is_some() && !has("content-type") {
            text.push_str("Content-Type: application/json\r\n");
        }
        for (name, value) in &self.headers {
            text.push_str(&format!("{name}: {value}\r\n"));
        }
        let length = self.body.as_ref().map_or(0, Vec::len);
        if self.body.is_some() || ["PUT", "POST"].contains(&self.method.as_str()) {
            text.push_str(&format!("Content-Length: {length}\r\n"));
        }
        text.push_str("Connection: close\r\n\r\n");
        let mut bytes = text.into_bytes();
        bytes.extend(self.body.iter().flatten());
        bytes
    }

    /// Sends it and reads the answer.
    ///
    /// # Errors
    /// When the server cannot be reached or does not answer in HTTP.
    pub fn send(&self, address: SocketAddr) -> std::io::Result<Reply> {
        let answer = exchange(address, &self.bytes(address))?;
        Ok(Reply::parse(&answer, self.method == "HEAD")?.0)
    }

    /// As [`send`](Self::send), over a Unix socket.
    ///
    /// # Errors
    /// When the server cannot be reached or does not answer in HTTP.
    pub fn send_unix(&self, path: &Path) -> std::io::Result<Reply> {
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        self.send_over(stream)
    }

    /// As [`send`](Self::send), over a connection that is open, for example of TLS.
    ///
    /// # Errors
    /// When the server does not answer in HTTP.
    pub fn send_over(&self, mut stream: impl Read + Write) -> std::io::Result<Reply> {
        stream.write_all(&self.bytes("ferry"))?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer)?;
        Ok(Reply::parse(&answer, self.method == "HEAD")?.0)
    }
}

/// Sends bytes and reads until the server closes.
///
/// # Errors
/// When the server cannot be reached, or says nothing for too long.
pub fn exchange(address: SocketAddr, bytes: &[u8]) -> std::io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    // A server that refuses a request early closes before it has read it all; its answer counts.
    let written = stream.write_all(bytes);
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Ok(_) => {}
        Err(_) if !answer.is_empty() => {}
        Err(error) => return Err(error),
    }
    if answer.is_empty() {
        written?;
    }
    Ok(answer)
}

/// Sends bytes, closes the sending side, and reads what comes; for bytes that are no request.
///
/// # Errors
/// When the server cannot be reached.
pub fn exchange_and_hang_up(address: SocketAddr, bytes: &[u8]) -> std::io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    // The server may have closed already.
    let _ = stream.write_all(bytes);
    let _ = stream.shutdown(Shutdown::Write);
    let mut answer = Vec::new();
    // A reset is an answer, too: the server has closed.
    let _ = stream.read_to_end(&mut answer);
    Ok(answer)
}

impl Reply {
    /// The body as JSON.
    ///
    /// # Panics
    /// When it is none.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    /// Reads one answer from the front of some bytes, and says how many it took.
    ///
    /// # Errors
    /// When they are no complete answer.
    pub fn parse(bytes: &[u8], no_body: bool) -> std::io::Result<(Self, usize)> {
        let wrong = |what: &str| {
            let shown = String::from_utf8_lossy(bytes);
            Error::new(ErrorKind::InvalidData, format!("{what} in {shown:?}"))
        };
        let end = bytes.windows(4).position(|window| window == b"\r\n\r\n");
        let end = end.ok_or_else(|| wrong("no end of the head"))?;
        let head = String::from_utf8_lossy(&bytes[..end]).into_owned();
        let mut lines = head.split("\r\n");
        let status = lines
            .next()
            .and_then(|line| line.split(' ').nth(1)?.parse().ok());
        let status = status.ok_or_else(|| wrong("no status"))?;
        let headers: Vec<(String, String)> = lines
            .filter_map(|line| line.split_once(':'))
            .map(|(name, value)| (name.trim().to_ascii_lowercase(), value.trim().to_owned()))
            .collect();
        let mut reply = Self {
            status,
            headers,
            body: Vec::new(),
        };
        let begin = end + 4;
        if no_body {
            return Ok((reply, begin));
        }
        let length = match reply.header("content-length") {
            Some(length) => length.parse().map_err(|_| wrong("no number as length"))?,
            None => bytes.len() - begin,
        };
        let body = bytes
            .get(begin..begin + length)
            .ok_or_else(|| wrong("a short body"))?;
        reply.body = body.to_vec();
        Ok((reply, begin + length))
    }

    /// A header's value.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(key, _)| key == name)
            .map(|(_, value)| value.as_str())
    }

    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}
