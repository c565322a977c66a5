//! Requests that a generator makes up from the OpenAPI document, right ones and wrong ones: no
//! answer may be a 5xx, and every answer must be as the document says.

use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::json;
use tests::http::Request;
use tests::process::{BootstrapServer, skip};
use tests::registrations::{registration_body, registration_path, route_body};

const SECONDS: u32 = 40;
const TOKEN: &str = "a-token-of-operators";

#[test]
fn every_answer_is_as_the_document_says() {
    let python = std::env::var("FERRY_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let has_generator = Command::new(&python)
        .args(["-c", "import schemathesis"])
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    if !has_generator {
        let reason = format!("{python} has no schemathesis: run `make python`, set FERRY_PYTHON");
        return skip("bootstrap_generated", &reason);
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let token_file = folder.path().join("token");
    std::fs::write(&token_file, TOKEN).expect("the file is written");
    let token_file = token_file.to_str().expect("a plain path");
    let options = [
        "--listen",
        "127.0.0.1:0=a,127.0.0.1:0=b",
        "--probe-interval",
        "0",
        "--admin-token-file",
        token_file,
    ];
    let server = BootstrapServer::start(&folder.path().join("data"), &options);
    for (rank, port) in [(0, 41000), (1, 41001)] {
        let put = Request::put("/route", &route_body(3, rank, port, 64));
        assert_eq!(server.send(&put).status, 200);
    }
    let body = registration_body("io-engine", 41002);
    let put = Request::put(&registration_path("io-engine"), &body);
    assert_eq!(server.send(&put).status, 200);
    let bind = json!({ "bootstrap_room": 7, "dp_rank": 0 });
    assert_eq!(
        server
            .send(&Request::post("/register_dp_rank", &bind))
            .status,
        200
    );
    let configuration = Path::new(env!("CARGO_MANIFEST_DIR")).join("conformance/schemathesis.toml");
    let generated = Command::new(&python)
        .args(["-m", "schemathesis.cli", "--config-file"])
        .arg(configuration)
        .args(["run", "--no-color", "--request-timeout", "20", "--max-time"])
        .args([&SECONDS.to_string(), "--header"])
        .arg(format!("Authorization: Bearer {TOKEN}"))
        // Its database of examples would be left behind.
        .args(["--generation-database", "none"])
        .arg(format!("http://{}/v1/openapi.json", server.admin()))
        .current_dir(folder.path())
        .output()
        .expect("the interpreter starts");
    let text = String::from_utf8_lossy(&generated.stdout);
    let errors = String::from_utf8_lossy(&generated.stderr);
    // The seed stands at the end of it.
    assert!(generated.status.success(), "{text}\n{errors}");
    let count = text.lines().find(|line| line.contains(" generated"));
    println!("{}", count.unwrap_or_default().trim());
    assert_eq!(
        server.send(&Request::get("/health")).status,
        200,
        "it lives"
    );
}
