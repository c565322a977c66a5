//! Bearer tokens: read from a file, kept as digests, compared in constant time.

use std::path::Path;
use std::sync::Arc;

use actix_web::http::header::HeaderValue;
use ring::digest::{SHA256, digest};
use subtle::{Choice, ConstantTimeEq};

use super::watched::Watched;

/// One token.
#[derive(Clone, Debug)]
struct Token {
    name: Arc<str>,
    digest: Vec<u8>,
}

/// The tokens of one kind of caller, in one file or one environment variable.
#[derive(Debug)]
pub(super) struct Tokens {
    /// Whose they are; also the name of a token whose line has none.
    pub(super) kind: &'static str,
    tokens: Watched<Vec<Token>>,
}

/// Why a caller is not let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Denied {
    /// It sent no token.
    Missing,
    /// It sent one that is not known.
    Wrong,
}

impl Tokens {
    /// Reads a file: one token a line, with a name and blanks before it where one is wanted;
    /// empty lines and those with a `#` at their beginning are skipped.
    pub(super) fn from_file(kind: &'static str, file: &Path) -> Result<Self, String> {
        let tokens = Watched::open(vec![file.to_owned()], move |contents| {
            parse(kind, contents.first().map_or(&[], Vec::as_slice))
        })?;
        Ok(Self { kind, tokens })
    }

    /// Tokens that never change.
    pub(super) fn fixed(kind: &'static str, text: &str) -> Result<Self, String> {
        let fixed = parse(kind, text.as_bytes())?;
        let tokens = Watched::open(Vec::new(), move |_| Ok(fixed.clone()))?;
        Ok(Self { kind, tokens })
    }

    /// Whose token an `Authorization` header carries.
    pub(super) fn owner(&self, header_opt: Option<&HeaderValue>) -> Result<Arc<str>, Denied> {
        let sent = header_opt.ok_or(Denied::Missing)?.as_bytes();
        let (scheme, token) = sent.split_at_checked(7).ok_or(Denied::Wrong)?;
        if !scheme.eq_ignore_ascii_case(b"bearer ") {
            return Err(Denied::Wrong);
        }
        // Digests are of one length, and each is compared, so that the time tells nothing.
        let sent = digest(&SHA256, token.trim_ascii());
        let mut owner_opt = None;
        for token in self.tokens.value().iter() {
            let is_equal: Choice = token.digest.as_slice().ct_eq(sent.as_ref());
            if bool::from(is_equal) {
                owner_opt = Some(Arc::clone(&token.name));
            }
        }
        owner_opt.ok_or(Denied::Wrong)
    }

    pub(super) fn reload(&self) {
        self.tokens.reload();
    }

    pub(super) fn trouble(&self) -> Option<String> {
        self.tokens.trouble()
    }
}

fn parse(kind: &str, contents: &[u8]) -> Result<Vec<Token>, String> {
    let text = str::from_utf8(contents).map_err(|_| "it is no text".to_owned())?;
    let mut tokens = Vec::new();
    for (at, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let words: Vec<&str> = line.split_whitespace().collect();
        let (name, token) = match words[..] {
            [token] => (kind, token),
            [name, token] => (name, token),
            _ => {
                return Err(format!("line {} has more than a name and a token", at + 1));
            }
        };
        tokens.push(Token {
            name: name.into(),
            digest: digest(&SHA256, token.as_bytes()).as_ref().to_vec(),
        });
    }
    // An empty file would let nobody in, or everybody: neither is meant.
    if tokens.is_empty() {
        return Err("there is no token in it".to_owned());
    }
    Ok(tokens)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_have_names_and_nothing_else_is_let_in() {
        let text = "# ranks\nprefill-a  first-token\n\nsecond-token\n";
        let tokens = Tokens::fixed("rank", text).unwrap();
        let owner = |sent: &str| {
            let header = HeaderValue::from_str(sent).unwrap();
            tokens.owner(Some(&header)).map(|owner| owner.to_string())
        };
        assert_eq!(owner("Bearer first-token"), Ok("prefill-a".to_owned()));
        assert_eq!(owner("bearer second-token"), Ok("rank".to_owned()));
        for wrong in [
            "",
            "Bearer",
            "Bearer ",
            "Bearer first-toke",
            "Bearer first-tokens",
            "Bearer prefill-a  first-token",
            "Basic first-token",
            "first-token",
        ] {
            assert_eq!(owner(wrong), Err(Denied::Wrong), "{wrong:?}");
        }
        assert_eq!(tokens.owner(None), Err(Denied::Missing));
    }

    #[test]
    fn a_file_without_a_token_is_refused() {
        for wrong in ["", "\n# nothing\n", "a b c\n"] {
            assert!(Tokens::fixed("rank", wrong).is_err(), "{wrong:?}");
        }
    }
}
