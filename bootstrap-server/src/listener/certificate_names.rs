//! Whose a certificate is, in words for the audit log.

use std::sync::Arc;

use x509_cert::Certificate;
use x509_cert::der::Decode;
use x509_cert::ext::pkix::SubjectAltName;
use x509_cert::ext::pkix::name::GeneralName;

/// Characters that are shown: what is refused may say anything.
const MAX_CHARACTERS: usize = 256;

/// The subject, and the first alternative name, which is where SPIFFE and most fleets put it.
pub(super) fn names_in(certificate: &[u8]) -> Arc<str> {
    let names = match Certificate::from_der(certificate) {
        Ok(certificate) => {
            let names = [
                Some(certificate.tbs_certificate.subject.to_string()),
                alternative_name(&certificate),
            ];
            let names = names.into_iter().flatten().filter(|name| !name.is_empty());
            names.collect::<Vec<_>>().join(" ")
        }
        Err(_) => String::new(),
    };
    match names.is_empty() {
        true => "nobody".into(),
        false => names
            .chars()
            .take(MAX_CHARACTERS)
            .collect::<String>()
            .into(),
    }
}

fn alternative_name(certificate: &Certificate) -> Option<String> {
    let found = certificate.tbs_certificate.get::<SubjectAltName>();
    let (_, names) = found.ok().flatten()?;
    names.0.iter().find_map(|name| match name {
        GeneralName::DnsName(name) => Some(name.to_string()),
        GeneralName::UniformResourceIdentifier(name) => Some(name.to_string()),
        _ => None,
    })
}
