//! Who may write: bearer tokens, read from files that may change while the server runs.

use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::SystemTime;

use subtle::ConstantTimeEq;

/// SGLang's variable for the ranks' token.
pub const SGLANG_TOKEN_VARIABLE: &str = "SGLANG_DISAGGREGATION_BOOTSTRAP_AUTH_TOKEN";
/// A longer file is not a token.
const MAX_TOKEN_BYTES: usize = 4096;

/// A secret that a caller must show.
#[derive(Debug)]
pub struct Token {
    /// Whose it is, for the audit log.
    pub name: &'static str,
    file_opt: Option<PathBuf>,
    current: RwLock<Current>,
}

struct Current {
    secret: Arc<[u8]>,
    changed_at_opt: Option<SystemTime>,
}

impl std::fmt::Debug for Current {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("(secret)")
    }
}

impl Token {
    /// Reads a token from a file; white space around it does not count.
    ///
    /// # Errors
    /// When the file cannot be read, is empty or too long.
    pub fn from_file(name: &'static str, file: &Path) -> Result<Self, String> {
        let current = read(file)?;
        Ok(Self {
            name,
            file_opt: Some(file.to_owned()),
            current: RwLock::new(current),
        })
    }

    /// A token that never changes.
    ///
    /// # Errors
    /// When it is empty or too long.
    pub fn fixed(name: &'static str, text: &str) -> Result<Self, String> {
        let secret = secret(text).map_err(|reason| format!("the {name} token {reason}"))?;
        Ok(Self {
            name,
            file_opt: None,
            current: RwLock::new(Current {
                secret,
                changed_at_opt: None,
            }),
        })
    }

    /// Whether an `Authorization` header shows it. Takes the same time whatever bytes differ.
    pub fn is_shown(&self, header_opt: Option<&[u8]>) -> bool {
        let Some((scheme, shown)) = header_opt.and_then(|header| header.split_at_checked(7)) else {
            return false;
        };
        let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
        scheme.eq_ignore_ascii_case(b"bearer ") && bool::from(shown.ct_eq(&current.secret))
    }

    /// Reads the file again if it has changed. A file that cannot be read leaves the token as it is.
    pub fn reload(&self) {
        let Some(file) = &self.file_opt else {
            return;
        };
        let changed_at_opt = changed_at(file);
        let known = {
            let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
            current.changed_at_opt
        };
        if changed_at_opt == known {
            return;
        }
        match read(file) {
            Ok(current) => {
                *self.current.write().unwrap_or_else(PoisonError::into_inner) = current;
                tracing::info!(token = self.name, file = %file.display(), "token reloaded");
            }
            Err(reason) => {
                let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
                current.changed_at_opt = changed_at_opt;
                tracing::error!(token = self.name, reason, "the token stays as it was");
            }
        }
    }
}

fn changed_at(file: &Path) -> Option<SystemTime> {
    std::fs::metadata(file)
        .and_then(|about| about.modified())
        .ok()
}

fn secret(text: &str) -> Result<Arc<[u8]>, &'static str> {
    match text.trim().as_bytes() {
        [] => Err("is empty"),
        bytes if bytes.len() > MAX_TOKEN_BYTES => Err("is longer than 4096 bytes"),
        bytes => Ok(bytes.into()),
    }
}

fn read(file: &Path) -> Result<Current, String> {
    let shown = file.display();
    let changed_at_opt = changed_at(file);
    let text = std::fs::read_to_string(file).map_err(|error| format!("{shown}: {error}"))?;
    let secret = secret(&text).map_err(|reason| format!("the token in {shown} {reason}"))?;
    Ok(Current {
        secret,
        changed_at_opt,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_whole_token_counts() {
        let token = Token::fixed("rank", " secret\n").unwrap();
        for (header, is_right) in [
            (Some("Bearer secret"), true),
            (Some("bearer secret"), true),
            (Some("Bearer secre"), false),
            (Some("Bearer secret2"), false),
            (Some("Bearer  secret"), false),
            (Some("Basic secret"), false),
            (Some("secret"), false),
            (Some(""), false),
            (None, false),
        ] {
            assert_eq!(
                token.is_shown(header.map(str::as_bytes)),
                is_right,
                "{header:?}"
            );
        }
        assert!(Token::fixed("rank", " \n").is_err());
    }

    #[test]
    fn a_changed_file_is_read_again_and_a_bad_one_is_not_taken() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("token");
        let change = |text: &str, seconds: u64| {
            std::fs::write(&file, text).unwrap();
            let changed = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(seconds);
            let opened = std::fs::File::options().write(true).open(&file).unwrap();
            opened.set_modified(changed).unwrap();
        };
        change("one", 1);
        let token = Token::from_file("rank", &file).unwrap();
        let is_shown = |text: &str| token.is_shown(Some(text.as_bytes()));
        change("two", 2);
        assert!(is_shown("Bearer one"), "not before it is reloaded");
        token.reload();
        assert!(is_shown("Bearer two") && !is_shown("Bearer one"));
        change("", 3);
        token.reload();
        assert!(is_shown("Bearer two"), "an empty file is a mistake");
        std::fs::remove_file(&file).unwrap();
        token.reload();
        assert!(is_shown("Bearer two"));
        assert!(Token::from_file("rank", &file).is_err());
    }
}
