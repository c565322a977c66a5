//! Certificates that tests make for themselves.

use rcgen::{
    BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    date_time_ymd,
};

/// An authority, and what it signs.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    /// Its own certificate, PEM.
    pub certificate: String,
}

impl Authority {
    pub fn new(name: &str) -> Self {
        let mut params = CertificateParams::new(vec![name.to_owned()]).expect("a name");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key");
        let certificate = params.self_signed(&key).expect("a certificate").pem();
        let issuer = Issuer::new(params, key);
        Self {
            issuer,
            certificate,
        }
    }

    /// A certificate and its key, in PEM.
    pub fn sign(&self, name: &str, last_year: i32) -> (String, String) {
        let names = vec![name.to_owned(), "127.0.0.1".to_owned()];
        let mut params = CertificateParams::new(names).expect("names");
        params.not_before = date_time_ymd(2020, 1, 1);
        params.not_after = date_time_ymd(last_year, 1, 1);
        params.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        let key = KeyPair::generate().expect("a key");
        let signed = params.signed_by(&key, &self.issuer).expect("a certificate");
        (signed.pem(), key.serialize_pem())
    }
}
