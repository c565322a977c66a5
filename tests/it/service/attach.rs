//! Attaching: whatever is wrong is refused with a reason, and changes nothing.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, SealFlags};
use serde_json::{Value, json};
use tests::process::{BootstrapServer, program, wait_for};
use tests::service::{TransferService, attach_bytes, attach_reply, framed, memfd, memfd_with};

use crate::certificates::Authority;

use super::{
    POOL_BYTES, SmallEngine, attach_raw, attach_request, bootstrap, cross, lend, refusal, tensor,
};

/// Nothing is kept of what was refused: no rank, thread or descriptor, and the next engine is
/// served.
fn assert_unchanged(service: &TransferService, act: impl FnOnce()) {
    let attach_and_leave = || {
        let pool = memfd(POOL_BYTES);
        let (reply, stream) = attach_raw(service, &attach_request("decode", None), &lend(&pool));
        assert!(reply["attached"]["rank"].is_u64(), "{reply}");
        drop(stream);
        wait_for("the rank to go", || {
            service.ranks().is_empty().then_some(())
        });
    };
    // The first attachment starts what stays for all.
    attach_and_leave();
    wait_for_quiet(service);
    let before = service.resources();
    act();
    assert_eq!(
        service.ranks(),
        [0; 0],
        "a refused engine left a rank behind"
    );
    attach_and_leave();
    wait_for("threads and descriptors to be given back", || {
        let (threads, descriptors) = service.resources();
        (threads <= before.0 && descriptors <= before.1).then_some(())
    });
}

/// The end of a rank's threads comes a little after the end of the rank.
fn wait_for_quiet(service: &TransferService) {
    let mut last = service.resources();
    let mut same = 0;
    wait_for("the service to settle", || {
        let now = service.resources();
        same = if now == last { same + 1 } else { 0 };
        last = now;
        (same >= 50).then_some(())
    });
}

#[test]
fn every_kind_of_bad_request_is_refused_with_what_is_wrong() {
    type Change = fn(&mut Value);
    let cases: [(&str, Change); 29] = [
        ("page_size: it is 0", |r| {
            r["layout"]["page_size"] = json!(0)
        }),
        ("missing field `page_size`", |r| {
            r["layout"]
                .as_object_mut()
                .map(|layout| layout.remove("page_size"));
        }),
        ("unknown field `colour`", |r| {
            r["layout"]["colour"] = json!(1)
        }),
        ("unknown variant `router`", |r| r["role"] = json!("router")),
        ("overlaps kv tensor 0 in pool 0", |r| {
            r["layout"]["kv"]["tensors"][1] = tensor(1023, 1024);
        }),
        (
            "aux tensor 0: 256 bytes at offset 4032 leave pool 0 of 4096 bytes",
            |r| {
                r["layout"]["aux"][0] = tensor(4032, 256);
            },
        ),
        ("leave pool 0", |r| {
            r["layout"]["aux"][0]["offset"] = json!(u64::MAX)
        }),
        ("invalid value: integer `-1`", |r| {
            r["layout"]["aux"][0]["offset"] = json!(-1)
        }),
        ("aux tensor 0: pool 1 does not exist, there are 1", |r| {
            r["layout"]["aux"][0]["pool"] = json!(1);
        }),
        ("no whole number of items of 64", |r| {
            r["layout"]["aux"][0]["bytes"] = json!(255);
        }),
        ("aux tensor 0: 256 bytes with items of 0 bytes", |r| {
            r["layout"]["aux"][0]["item_len"] = json!(0);
        }),
        ("type \"wamba\" is unknown; known: ", |r| {
            r["layout"]["states"][0]["type"] = json!("wamba");
        }),
        ("mamba dims: 2 elements for 1 tensors", |r| {
            r["layout"]["states"][0]["dims"] = json!([4, 4]);
        }),
        ("mamba outer_counts: 2 elements for 1 tensors", |r| {
            r["layout"]["states"][0]["outer_counts"] = json!([4, 4]);
        }),
        ("mamba conv_shard_groups: 2 elements for 1 tensors", |r| {
            r["layout"]["states"][0]["conv_shard_groups"] = json!([null, null]);
        }),
        ("mamba layer_ids: 2 elements for 1 tensors", |r| {
            r["layout"]["states"][0]["layer_ids"] = json!([4, 4]);
        }),
        ("kv layer_ids: 3 elements for 2 tensors", |r| {
            r["layout"]["kv"]["layer_ids"] = json!([0, 1, 2]);
        }),
        ("kv: 1 tensors; k and v lists need an even number", |r| {
            r["layout"]["kv"]["tensors"] = json!([tensor(0, 1024)]);
        }),
        ("every kv tensor needs a buffer", |r| {
            r["layout"]["kv"]["tensors"][1]["bytes"] = json!(0);
        }),
        ("unknown variant `mqa`", |r| {
            r["layout"]["kv"]["attention"] = json!("mqa")
        }),
        (
            "16388 tensors and 1 components, at most 16384 and 64",
            |r| {
                r["layout"]["aux"] = json!(vec![tensor(2560, 0); 16_385]);
            },
        ),
        ("65 components, at most", |r| {
            let states = vec![json!({ "type": "mamba", "tensors": [] }); 65];
            r["layout"]["states"] = json!(states);
        }),
        ("tp", |r| {
            r["parallel"] = json!({ "attn_tp_size": 2, "attn_tp_rank": 2 })
        }),
        ("context parallel size 2", |r| {
            r["parallel"] = json!({ "attn_cp_size": 2 })
        }),
        ("unknown field `tp_size`", |r| {
            r["parallel"] = json!({ "tp_size": 2 })
        }),
        (
            "decode allocation policy \"sometimes\": there are early and prefill_complete",
            |r| {
                r["engine"]["decode_allocation_policy"] = json!("sometimes");
            },
        ),
        ("needs its bootstrap server", |r| {
            r["role"] = json!("prefill")
        }),
        ("bootstrap server no host at all", |r| {
            r["role"] = json!("prefill");
            r["bootstrap"] = json!("no host at all");
        }),
        ("needs tp, cp and pp of 1", |r| {
            r["role"] = json!("prefill");
            r["bootstrap"] = json!("127.0.0.1:1");
            r["parallel"] = json!({ "attn_tp_size": 2 });
            r["engine"]["decode_allocation_policy"] = json!("prefill_complete");
        }),
    ];
    let service = TransferService::start(&["--bootstrap-timeout", "1"]);
    assert_unchanged(&service, || {
        for (expected, change) in cases {
            let mut request = attach_request("decode", None);
            change(&mut request);
            let pool = memfd(POOL_BYTES);
            let (reply, _stream) = attach_raw(&service, &request, &lend(&pool));
            let message = refusal(&reply);
            assert!(message.contains(expected), "{message:?} says {expected:?}");
        }
    });
}

#[test]
fn a_pool_that_cannot_be_used_is_refused() {
    let service = TransferService::start(&[]);
    assert_unchanged(&service, || {
        let no_sealing = memfd_with(POOL_BYTES, MemfdFlags::empty());
        let no_writing = memfd(POOL_BYTES);
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE;
        rustix::fs::fcntl_add_seals(&no_writing, seals).expect("it is sealed");
        let ordinary = tempfile::tempfile().expect("a file");
        ordinary.set_len(POOL_BYTES).expect("it grows");
        let short = memfd(POOL_BYTES - 1);
        let (pipe, _writer) = std::io::pipe().expect("a pipe");
        let cases = [
            (
                no_sealing.as_fd(),
                "sealed with F_SEAL_SHRINK and F_SEAL_GROW",
            ),
            (no_writing.as_fd(), "must not be sealed against writing"),
            (ordinary.as_fd(), "a pool must be"),
            (
                short.as_fd(),
                "a pool of 4096 bytes cannot be in a file of 4095 bytes",
            ),
            (pipe.as_fd(), "cannot be in a file of 0 bytes"),
        ];
        for (pool, expected) in cases {
            let (reply, _stream) = attach_raw(&service, &attach_request("decode", None), &[pool]);
            let message = refusal(&reply);
            assert!(
                message.starts_with("pool 0: "),
                "{message:?} names the pool"
            );
            assert!(message.contains(expected), "{message:?} says {expected:?}");
        }
    });
}

#[test]
fn a_pool_without_a_descriptor_and_a_descriptor_without_a_pool_are_refused() {
    let service = TransferService::start(&[]);
    assert_unchanged(&service, || {
        let pool = memfd(POOL_BYTES);
        for count in [0, 2, 253] {
            let pools = vec![pool.as_fd(); count];
            let (reply, _stream) = attach_raw(&service, &attach_request("decode", None), &pools);
            let expected = format!(
                "{count} file descriptors came beside a request that names 1 pools of 1 parts"
            );
            assert_eq!(refusal(&reply), expected);
        }
        let mut request = attach_request("decode", None);
        request["pools"] = json!([]);
        let (reply, _stream) = attach_raw(&service, &request, &lend(&pool));
        assert!(refusal(&reply).contains("names 0 pools"), "{reply}");
        request["pools"] = json!([0]);
        let (reply, _stream) = attach_raw(&service, &request, &lend(&pool));
        assert!(
            refusal(&reply).contains("leave pool 0 of 0 bytes"),
            "{reply}"
        );
        request["pools"] = json!([1_u64 << 62]);
        let (reply, _stream) = attach_raw(&service, &request, &lend(&pool));
        assert!(
            refusal(&reply).contains("cannot be in a file of 4096 bytes"),
            "{reply}"
        );
    });
}

#[test]
fn bytes_that_are_no_request_are_refused() {
    let service = TransferService::start(&[]);
    assert_unchanged(&service, || {
        let nested = "[".repeat(100_000);
        let cases: [(Vec<u8>, &str); 9] = [
            (vec![], "length, four bytes"),
            (vec![5, 0], "length, four bytes"),
            (vec![0; 4], "the request: EOF while parsing"),
            (
                framed(b"not json"),
                "the request: expected ident at line 1 column 2",
            ),
            (framed(&[0xff; 64]), "the request: expected value"),
            (framed(nested.as_bytes()), "the request: "),
            (framed(b"{}"), "missing field `role`"),
            (
                [&1000_u32.to_le_bytes()[..], b"0123456789"].concat(),
                "ended after 10 of 1000 bytes",
            ),
            (
                [&u32::MAX.to_le_bytes()[..], &[b'x'; 4096]].concat(),
                "at most 16777216 are possible",
            ),
        ];
        for (bytes, expected) in cases {
            let mut stream = if bytes.is_empty() {
                UnixStream::connect(service.attach_socket()).expect("it is served")
            } else {
                attach_bytes(&service.attach_socket(), &bytes, &[])
            };
            // Nothing more comes; the answer still can.
            stream.shutdown(Shutdown::Write).expect("it is open");
            let reply = attach_reply(&mut stream);
            let message = refusal(&reply);
            assert!(message.contains(expected), "{message:?} says {expected:?}");
        }
        // One that goes away in the middle is told nothing.
        drop(attach_bytes(
            &service.attach_socket(),
            &1000_u32.to_le_bytes(),
            &[],
        ));
    });
}

/// More of them than a pool of threads has.
#[test]
fn engines_that_say_nothing_hold_nobody_up() {
    const SILENT: usize = 600;
    /// Well below the time after which silent engines are refused.
    const PROMPT: Duration = Duration::from_secs(20);
    let service = TransferService::start(&[]);
    let silent: Vec<UnixStream> = (0..SILENT)
        .map(|_| UnixStream::connect(service.attach_socket()).expect("it is served"))
        .collect();
    let half: Vec<UnixStream> = (0..10)
        .map(|_| attach_bytes(&service.attach_socket(), &1000_u32.to_le_bytes(), &[]))
        .collect();
    let begun = Instant::now();
    let pool = memfd(POOL_BYTES);
    let (reply, _stream) = attach_raw(&service, &attach_request("decode", None), &lend(&pool));
    assert!(reply["attached"]["rank"].is_u64(), "{reply}");
    assert_eq!(service.ranks(), [0]);
    assert!(
        begun.elapsed() < PROMPT,
        "attaching took {:?}",
        begun.elapsed()
    );
    let (threads, _) = service.resources();
    assert!(
        threads < 100,
        "{threads} threads for engines that say nothing"
    );
    drop((silent, half));
}

#[test]
fn a_second_engine_with_the_rank_of_a_live_one_is_refused() {
    let (server, _folder) = bootstrap(&[]);
    let service = TransferService::start(&[]);
    let decode = SmallEngine::decode(&service, &server);
    let prefill = SmallEngine::prefill(&service, &server);
    let address = server.address().to_string();
    let second = SmallEngine::attach(&service, "prefill", &address);
    let message = second.err().expect("it is refused").to_string();
    let place = format!("prefill rank dp0 cp0 tp0 pp0 of bootstrap server {address}");
    for part in [
        place.as_str(),
        "attached to this service already",
        "end the engine",
    ] {
        assert!(message.contains(part), "{message:?} says {part:?}");
    }
    assert_eq!(service.ranks().len(), 2);
    assert_eq!(server.json("/v1/engines/default")["generation"], 1);
    cross(&prefill, &decode, 1);
    // Decode ranks are found by their own keys: engines of two models may share numbers.
    let other_decode = SmallEngine::decode(&service, &server);
    cross(&prefill, &other_decode, 2);
    drop(prefill);
    wait_for("the first engine's end", || {
        SmallEngine::attach(&service, "prefill", &address).ok()
    });
}

#[test]
fn a_rank_shows_the_token_of_its_environment() {
    const VARIABLE: &str = "SGLANG_DISAGGREGATION_BOOTSTRAP_AUTH_TOKEN";
    let tokens = tempfile::tempdir().expect("a temporary folder");
    let file = tokens.path().join("token");
    std::fs::write(&file, "secret\n").expect("the token is written");
    let (server, _folder) = bootstrap(&["--auth-token-file", file.to_str().expect("a path")]);
    let address = server.address().to_string();
    for (token, is_right) in [("secret", true), ("wrong", false)] {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mut command = TransferService::command(folder.path(), &[]);
        let service = TransferService::spawn(folder, command.env(VARIABLE, token));
        let attached = SmallEngine::attach(&service, "prefill", &address);
        assert_eq!(attached.is_ok(), is_right, "{token}");
        if let Err(refused) = attached {
            let message = refused.to_string();
            assert!(
                message.contains("401") && message.contains("token"),
                "{message}"
            );
        }
    }
}

/// Over TLS with certificates on both sides, and with the server's own file of tokens.
#[test]
fn a_rank_speaks_tls_where_authorities_are_given() {
    let files = tempfile::tempdir().expect("a temporary folder");
    let write = |name: &str, text: &str| {
        let file = files.path().join(name);
        std::fs::write(&file, text).expect("a file is written");
        file.to_str().expect("a path").to_owned()
    };
    let (authority, stranger) = (Authority::new("fleet"), Authority::new("stranger"));
    let [server, rank] = ["server.fleet", "rank.fleet"].map(|name| {
        let (certificate, key) = authority.sign(name, 2100);
        [
            write(&format!("{name}.pem"), &certificate),
            write(&format!("{name}.key"), &key),
        ]
    });
    let authorities = write("ca.pem", &authority.certificate);
    let others = write("others.pem", &stranger.certificate);
    let tokens = write("tokens", "# of the fleet\nranks secret\n");
    let data = tempfile::tempdir().expect("a temporary folder");
    let mut command = Command::new(program("bootstrap-server"));
    command.args([
        "--listen",
        "https://127.0.0.1:0",
        "--admin-listen",
        "127.0.0.1:0",
    ]);
    command.args(["--tls-cert", &server[0], "--tls-key", &server[1]]);
    command.args([
        "--tls-client-ca",
        &authorities,
        "--auth-token-file",
        &tokens,
    ]);
    let server = BootstrapServer::spawn(command.arg("--data-dir").arg(data.path()));
    for (trusted, identity_opt, refused_opt) in [
        (&authorities, Some(&rank), None),
        (&authorities, None, Some("CertificateRequired")),
        (&others, Some(&rank), Some("certificate")),
    ] {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mut command = TransferService::command(folder.path(), &["--bootstrap-timeout", "2"]);
        command.env("FERRY_BOOTSTRAP_TOKEN_FILE", &tokens);
        command.env("FERRY_BOOTSTRAP_CA_FILE", trusted);
        if let Some([certificate, key]) = identity_opt {
            command.env("FERRY_BOOTSTRAP_CERT_FILE", certificate);
            command.env("FERRY_BOOTSTRAP_KEY_FILE", key);
        }
        let service = TransferService::spawn(folder, &mut command);
        let attached = SmallEngine::attach(&service, "prefill", &server.address().to_string());
        match (attached, refused_opt) {
            (Ok(_), None) => {}
            (Err(error), Some(named)) => {
                let text = error.to_string();
                assert!(text.contains(named), "{named} is not in {text}");
            }
            (Ok(_), Some(named)) => panic!("it registered in spite of {named}"),
            (Err(error), None) => panic!("it was refused: {error}"),
        }
    }
}

#[test]
fn a_bootstrap_server_that_is_absent_or_refuses_is_named() {
    let service = TransferService::start(&["--bootstrap-timeout", "1"]);
    assert_unchanged(&service, || {
        let nobody = TcpListener::bind("127.0.0.1:0").expect("a listener");
        let address = nobody.local_addr().expect("an address").to_string();
        drop(nobody);
        let refused = SmallEngine::attach(&service, "prefill", &address);
        let message = refused.err().expect("it is refused").to_string();
        let expected = format!("bootstrap server {address}: ");
        assert!(message.contains(&expected), "{message:?} says {expected:?}");
    });
    let refusing = TcpListener::bind("127.0.0.1:0").expect("a listener");
    let address = refusing.local_addr().expect("an address").to_string();
    let answering = std::thread::spawn(move || {
        let (mut asked, _) = refusing.accept().expect("it is asked");
        let mut request = [0; 64];
        asked.read_exact(&mut request).expect("a request");
        let answer = "HTTP/1.1 409 Conflict\r\nContent-Length: 11\r\n\r\nrestart it!";
        asked.write_all(answer.as_bytes()).expect("it is read");
        // Closing at once could cost the answer.
        let mut rest = Vec::new();
        let _ = asked.read_to_end(&mut rest);
    });
    let refused = SmallEngine::attach(&service, "prefill", &address);
    let message = refused.err().expect("it is refused").to_string();
    for part in [address.as_str(), "409", "restart it!"] {
        assert!(message.contains(part), "{message:?} says {part:?}");
    }
    assert_eq!(service.ranks(), [0; 0]);
    drop(service);
    answering.join().expect("it answered");
}

/// It would register an address at which nobody listens, over that of the engine's next start.
#[test]
fn an_engine_that_goes_while_its_bootstrap_server_is_awaited_is_never_registered() {
    let silent = TcpListener::bind("127.0.0.1:0").expect("a listener");
    let address = silent.local_addr().expect("an address").to_string();
    let service = TransferService::start(&[]);
    let pool = memfd(POOL_BYTES);
    let bytes = framed(
        attach_request("prefill", Some(&address))
            .to_string()
            .as_bytes(),
    );
    let stream = attach_bytes(&service.attach_socket(), &bytes, &lend(&pool));
    let (mut asked, _) = silent.accept().expect("it is asked");
    let mut first = [0; 10];
    asked.read_exact(&mut first).expect("a request");
    assert_eq!(&first, b"PUT /route");
    let ranks = || service.metric("ferry_rank_current_count", &["prefill"]);
    wait_for("the rank to be counted", || (ranks() == 1.0).then_some(()));
    drop(stream);
    wait_for("the rank to end", || (ranks() == 0.0).then_some(()));
    // Its place is free for the engine's next start.
    let (server, _folder) = bootstrap(&[]);
    let _next = SmallEngine::prefill(&service, &server);
}
