//! Certificates of TLS servers on loopback, made with the command `openssl`.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Validity of a certificate in days.
const DAYS: &str = "2";

/// A certificate and its private key, as PEM files.
#[derive(Clone, Debug)]
pub struct Certified {
    /// Path of the certificate.
    pub certificate: PathBuf,
    /// Path of the key.
    pub key: PathBuf,
}

/// Makes `<name>.crt` and `<name>.key` in a directory, with these additional arguments for `openssl req -x509`.
fn request(openssl: &Path, dir: &Path, name: &str, more: &[&str]) -> Certified {
    let [certificate, key] = ["crt", "key"].map(|end| dir.join(format!("{name}.{end}")));
    // The system's configuration would add its own extensions.
    let settings = dir.join("openssl.cnf");
    std::fs::write(&settings, "[req]\ndistinguished_name=name\n[name]\n").expect("our own directory");
    let mut command = Command::new(openssl);
    command.args(["req", "-x509", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]);
    command.args(["-days", DAYS, "-subj", &format!("/CN=heapbpf {name}")]).arg("-config").arg(settings).args(more);
    let output = command.arg("-keyout").arg(&key).arg("-out").arg(&certificate).output().expect("openssl runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Certified { certificate, key }
}

/// Makes a self-signed certificate for 127.0.0.1.
///
/// # Panics
/// If `openssl` cannot make it.
pub fn self_signed(openssl: &Path, dir: &Path, name: &str) -> Certified {
    request(openssl, dir, name, &["-addext", "subjectAltName=IP:127.0.0.1"])
}

/// A certificate authority that no system knows.
#[derive(Clone, Debug)]
pub struct Authority {
    openssl: PathBuf,
    dir: PathBuf,
    /// The authority's own certificate.
    pub own: Certified,
}

impl Authority {
    /// Makes an authority.
    ///
    /// # Panics
    /// If `openssl` cannot make it.
    pub fn new(openssl: &Path, dir: &Path, name: &str) -> Self {
        let more = ["-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign"];
        let own = request(openssl, dir, name, &more);
        Self { openssl: openssl.into(), dir: dir.into(), own }
    }

    /// Makes a server's certificate for `holder`, such as `IP:127.0.0.1`.
    ///
    /// # Panics
    /// If `openssl` cannot make it.
    pub fn certify(&self, name: &str, holder: &str) -> Certified {
        let path = |path: &Path| path.display().to_string();
        let (authority, key) = (path(&self.own.certificate), path(&self.own.key));
        let holder = format!("subjectAltName={holder}");
        let more = ["-CA", &authority, "-CAkey", &key, "-addext", &holder, "-addext", "basicConstraints=CA:FALSE"];
        request(&self.openssl, &self.dir, name, &more)
    }
}
