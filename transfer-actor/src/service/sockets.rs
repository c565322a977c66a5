//! Unix sockets in the file system: a dead process's is replaced, a live one's is not.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use anyhow::{Context, Result, bail};

/// Only the owner may attach pools and drive rooms.
const MODE: u32 = 0o600;

/// Binds a path.
///
/// # Errors
/// When another process listens there, or the path cannot be used; it is named.
pub(super) fn bind(path: &Path) -> Result<UnixListener> {
    if path.exists() {
        if UnixStream::connect(path).is_ok() {
            bail!(
                "{} is in use by another process; end it or choose another path",
                path.display()
            );
        }
        std::fs::remove_file(path)
            .with_context(|| format!("removing the socket {} of a dead process", path.display()))?;
    }
    let listener =
        UnixListener::bind(path).with_context(|| format!("binding {}", path.display()))?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(MODE))
        .with_context(|| format!("setting the mode of {}", path.display()))?;
    Ok(listener)
}

/// Removes a path that was bound.
pub(super) fn remove(path: &Path) {
    if let Err(error) = std::fs::remove_file(path) {
        tracing::debug!(path = %path.display(), %error, "a socket was gone already");
    }
}
