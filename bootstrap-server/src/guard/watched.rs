//! Files that may be replaced while the server runs: tokens and certificates.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

/// Reads the contents of the files, in their order.
type Parse<T> = Box<dyn Fn(&[Vec<u8>]) -> Result<T, String> + Send + Sync>;

/// What some files say. A change that cannot be read leaves the last good value in force.
pub(crate) struct Watched<T> {
    files: Vec<PathBuf>,
    parse: Parse<T>,
    value: RwLock<Arc<T>>,
    /// The contents seen last, and what is wrong with them.
    seen: Mutex<(Vec<Vec<u8>>, Option<String>)>,
}

impl<T> std::fmt::Debug for Watched<T> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Neither contents nor value: they are secrets.
        formatter
            .debug_struct("Watched")
            .field("files", &self.files)
            .finish_non_exhaustive()
    }
}

impl<T> Watched<T> {
    /// Reads the files for the first time.
    pub(crate) fn open(
        files: Vec<PathBuf>,
        parse: impl Fn(&[Vec<u8>]) -> Result<T, String> + Send + Sync + 'static,
    ) -> Result<Self, String> {
        let contents = read(&files)?;
        let value = parse(&contents).map_err(|reason| named(&files, &reason))?;
        Ok(Self {
            files,
            parse: Box::new(parse),
            value: RwLock::new(Arc::new(value)),
            seen: Mutex::new((contents, None)),
        })
    }

    /// The value in force.
    pub(crate) fn value(&self) -> Arc<T> {
        Arc::clone(&self.value.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Looks at the files again. Contents are compared, not times, so that a replaced link or a
    /// clock that jumps does not matter; the files are small.
    pub(crate) fn reload(&self) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let parsed = match read(&self.files) {
            Ok(contents) if contents == seen.0 => return,
            Ok(contents) => {
                let parsed = (self.parse)(&contents);
                seen.0 = contents;
                parsed.map_err(|reason| named(&self.files, &reason))
            }
            Err(reason) => {
                // The good contents may come back as they were.
                seen.0.clear();
                Err(reason)
            }
        };
        let failure = match parsed {
            Ok(value) => {
                *self.value.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(value);
                tracing::info!(files = ?self.files, "files were read again");
                None
            }
            Err(reason) => Some(reason),
        };
        if seen.1 != failure
            && let Some(reason) = &failure
        {
            tracing::error!(
                reason,
                "changed files cannot be used, what they said before stays in force"
            );
        }
        seen.1 = failure;
    }

    /// What is wrong with the files as they are now.
    pub(crate) fn trouble(&self) -> Option<String> {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.1.clone()
    }
}

fn read(files: &[PathBuf]) -> Result<Vec<Vec<u8>>, String> {
    let contents = files
        .iter()
        .map(|file| std::fs::read(file).map_err(|error| format!("{}: {error}", file.display())));
    contents.collect()
}

fn named(files: &[PathBuf], reason: &str) -> String {
    let files: Vec<String> = files
        .iter()
        .map(|file| file.display().to_string())
        .collect();
    format!("{}: {reason}", files.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_good_change_counts_and_a_bad_one_leaves_what_was() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("number");
        let write = |text: &str| std::fs::write(&file, text).unwrap();
        let parse = |contents: &[Vec<u8>]| {
            let text = String::from_utf8_lossy(&contents[0]).into_owned();
            text.parse::<u32>().map_err(|error| error.to_string())
        };
        write("1");
        let watched = Watched::open(vec![file.clone()], parse).unwrap();
        write("2");
        assert_eq!(*watched.value(), 1);
        watched.reload();
        assert_eq!((*watched.value(), watched.trouble()), (2, None));
        write("two");
        watched.reload();
        assert_eq!(*watched.value(), 2);
        assert!(watched.trouble().unwrap().contains("number"));
        std::fs::remove_file(&file).unwrap();
        watched.reload();
        assert_eq!(*watched.value(), 2);
        write("2");
        watched.reload();
        assert_eq!((*watched.value(), watched.trouble()), (2, None));
        assert!(Watched::open(vec![folder.path().join("absent")], parse).is_err());
    }
}
