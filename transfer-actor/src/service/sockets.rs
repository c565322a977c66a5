//! Unix sockets in the file system: a dead process's is replaced, a live one's is not.

use std::io::ErrorKind;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// Only the owner may attach pools and drive rooms.
const MODE: u32 = 0o600;

/// The place of a bound socket, which is removed when this is dropped: also when the service does
/// not come up after all.
#[derive(Debug)]
pub(super) struct BoundPath(PathBuf);

impl Drop for BoundPath {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.0) {
            tracing::debug!(path = %self.0.display(), %error, "a socket was gone already");
        }
    }
}

/// Binds a path.
///
/// # Errors
/// When another process listens there, something else than a socket is there, or the path cannot
/// be used; it is named.
pub(super) fn bind(path: &Path) -> Result<(UnixListener, BoundPath)> {
    make_way(path)?;
    let listener =
        UnixListener::bind(path).with_context(|| format!("binding {}", path.display()))?;
    let bound = BoundPath(path.to_owned());
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(MODE))
        .with_context(|| format!("setting the mode of {}", path.display()))?;
    Ok((listener, bound))
}

/// Removes the socket of a dead process. Nothing else is ever removed.
fn make_way(path: &Path) -> Result<()> {
    let shown = path.display();
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).with_context(|| format!("looking for {shown}")),
        Ok(found) if !found.file_type().is_socket() => {
            bail!("{shown} exists and is no socket; remove it or choose another path");
        }
        Ok(_) => {}
    }
    match UnixStream::connect(path) {
        Ok(_) => bail!("{shown} is in use by another process; end it or choose another path"),
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => {}
        Err(error) => {
            return Err(error).with_context(|| {
                format!("{shown} exists, and whether a process listens there cannot be seen")
            });
        }
    }
    std::fs::remove_file(path)
        .with_context(|| format!("removing the socket {shown} of a dead process"))
}
