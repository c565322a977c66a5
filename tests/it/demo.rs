//! The main job in small: it passes for every model, transport and pair of TP sizes, it finds
//! every kind of damage in every component, and it leaves nothing behind.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use tests::process::children;

/// A run in an unoptimised build on a busy machine.
const RUN_TIMEOUT: Duration = Duration::from_secs(180);

/// How long processes may take to be gone after the driver is.
const GONE_TIMEOUT: Duration = Duration::from_secs(20);

/// Small, but still with several chunks, unaligned ends and pages that are used again.
const SMALL: [&str; 10] = [
    "--scale",
    "0.01",
    "--requests",
    "24",
    "--concurrency",
    "4",
    "--page-size",
    "8",
    "--chunk-tokens",
    "24",
];

/// The program, which cargo puts one folder above the test's own executable.
fn demo_program() -> PathBuf {
    let test = std::env::current_exe().expect("the test has a path");
    let folder = test
        .parent()
        .and_then(|deps| deps.parent())
        .expect("it lies in target/debug/deps");
    let program = folder.join("ferry-demo");
    assert!(
        program.is_file(),
        "{} is missing: run `cargo build --bins`",
        program.display()
    );
    program
}

/// The library in the place of a device's driver, which cargo puts beside the test.
fn stand_in() -> PathBuf {
    let test = std::env::current_exe().expect("the test has a path");
    test.with_file_name("libdevice_stand_in.so")
}

fn demo(arguments: &[&str]) -> Command {
    let mut command = Command::new(demo_program());
    command.args(SMALL).args(arguments).stdin(Stdio::null());
    // Only runs with device memory look for it.
    command.env("FERRY_CUDA_LIBRARY", stand_in());
    command
}

/// Runs the demo to its end.
fn run(arguments: &[&str]) -> Output {
    let mut command = demo(arguments);
    let child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    let pid = child.id();
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || sender.send(child.wait_with_output()));
    match receiver.recv_timeout(RUN_TIMEOUT) {
        Ok(output) => output.expect("its output can be read"),
        Err(_) => {
            signal(pid, "KILL");
            panic!(
                "`ferry-demo {}` did not end in {RUN_TIMEOUT:?}",
                arguments.join(" ")
            );
        }
    }
}

fn signal(pid: u32, name: &str) {
    let sent = Command::new("sh")
        .args(["-c", &format!("kill -{name} {pid}")])
        .status();
    assert!(
        sent.expect("sh starts").success(),
        "{pid} takes signal {name}"
    );
}

fn assert_passes(arguments: &[&str], components: &[&str], transport: &str) {
    let output = run(arguments);
    let stdout = String::from_utf8_lossy(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{arguments:?} failed:\n{stdout}\n{stderr}"
    );
    assert!(stdout.contains("all bytes verified"), "{stdout}");
    for component in components {
        let row = stdout
            .lines()
            .find(|line| line.split_whitespace().next() == Some(component));
        let row = row.unwrap_or_else(|| panic!("no row for {component}:\n{stdout}"));
        assert_eq!(row.split_whitespace().nth(1), Some(transport), "{row}");
        assert!(row.trim_end().ends_with("yes"), "{row}");
        assert!(
            stdout
                .lines()
                .any(|line| line.starts_with(&format!("metrics: {component} "))),
            "no comparison with the metrics of {component}:\n{stdout}"
        );
    }
}

const HYBRID: [&str; 4] = ["kv", "mamba", "swa", "aux"];

#[test]
fn a_hybrid_model_crosses_from_tp_4_to_2_over_cma() {
    assert_passes(
        &[
            "--transport",
            "cma",
            "--prefill-tp",
            "4",
            "--decode-tp",
            "2",
        ],
        &HYBRID,
        "cma",
    );
}

#[test]
fn a_hybrid_model_crosses_in_device_memory_over_shared_handles() {
    let arguments = [
        "--memory",
        "device",
        "--prefill-tp",
        "4",
        "--decode-tp",
        "2",
    ];
    // Of the service's own order: it is what reaches device memory first.
    assert_passes(&arguments, &HYBRID, "shm");
}

#[test]
fn a_hybrid_model_crosses_in_device_memory_staged_over_tcp() {
    let tcp = [
        "--memory",
        "device",
        "--transport",
        "tcp",
        "--prefill-tp",
        "2",
        "--decode-tp",
        "4",
    ];
    assert_passes(&tcp, &HYBRID, "tcp");
}

#[test]
fn device_memory_without_a_driver_is_an_error_that_says_so() {
    let mut command = demo(&["--memory", "device"]);
    command.env("FERRY_CUDA_LIBRARY", "/nowhere/libcuda.so.1");
    command.env("FERRY_HIP_LIBRARY", "/nowhere/libamdhip64.so");
    let output = command.output().expect("it runs");
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stderr);
    for runtime in ["cuda", "hip"] {
        let words = format!("no driver of {runtime} was found");
        assert!(said.contains(&words), "{said}");
    }
}

#[test]
fn a_hybrid_model_crosses_from_tp_2_to_4_over_cma() {
    assert_passes(
        &[
            "--transport",
            "cma",
            "--prefill-tp",
            "2",
            "--decode-tp",
            "4",
        ],
        &HYBRID,
        "cma",
    );
}

#[test]
fn a_hybrid_model_crosses_from_tp_4_to_2_over_tcp() {
    assert_passes(
        &[
            "--transport",
            "tcp",
            "--prefill-tp",
            "4",
            "--decode-tp",
            "2",
        ],
        &HYBRID,
        "tcp",
    );
}

#[test]
fn a_hybrid_model_crosses_from_tp_2_to_4_over_tcp() {
    assert_passes(
        &[
            "--transport",
            "tcp",
            "--prefill-tp",
            "2",
            "--decode-tp",
            "4",
        ],
        &HYBRID,
        "tcp",
    );
}

#[test]
fn a_hybrid_model_crosses_between_equal_tp_sizes() {
    assert_passes(
        &[
            "--transport",
            "cma",
            "--prefill-tp",
            "2",
            "--decode-tp",
            "2",
        ],
        &HYBRID,
        "cma",
    );
}

#[test]
fn a_dense_model_crosses() {
    for transport in ["shm", "cma", "tcp"] {
        assert_passes(
            &["--model", "qwen3-8b", "--transport", transport],
            &["kv", "aux"],
            transport,
        );
    }
}

/// The services compare what they moved, too: every byte, or a part of every component.
#[test]
fn what_arrives_is_compared_with_checksums() {
    for verify in ["full", "sampled"] {
        assert_passes(&["--transport", "shm", "--verify", verify], &HYBRID, "shm");
    }
}

/// Before the demo's own check can find it.
#[test]
fn a_write_that_was_left_out_is_found_by_checksums() {
    let output = run(&["--verify", "full", "--inject", "drop-write:kv"]);
    assert!(!output.status.success());
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("kv is not what was sent"), "{error}");
}

/// Two KV heads and four ranks: half of the prefill's ranks hold replicas.
#[test]
fn a_large_hybrid_model_with_replicated_heads_crosses() {
    for transport in ["cma", "tcp"] {
        let arguments = [
            "--model",
            "qwen3.5-122b",
            "--transport",
            transport,
            "--requests",
            "8",
        ];
        assert_passes(&arguments, &["kv", "mamba", "aux"], transport);
    }
    let other_way = [
        "--model",
        "qwen3.5-122b",
        "--transport",
        "cma",
        "--requests",
        "8",
    ];
    let other_way = [&other_way[..], &["--prefill-tp", "2", "--decode-tp", "4"]].concat();
    assert_passes(&other_way, &["kv", "mamba", "aux"], "cma");
}

/// The damage must be found, and its place named.
fn assert_finds(kind: &str) {
    for component in HYBRID {
        let injection = format!("{kind}:{component}");
        // Each decode rank is fed by one prefill rank here, so that no second write of the same
        // bytes can mend a missing one.
        let output = run(&[
            "--prefill-tp",
            "2",
            "--decode-tp",
            "4",
            "--inject",
            injection.as_str(),
        ]);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{injection} was not found");
        assert!(
            stderr.contains("verification failed on decode rank"),
            "{injection}:\n{stderr}"
        );
        assert!(
            stderr.contains(&format!("component {component}, tensor ")),
            "{injection}:\n{stderr}"
        );
        let offset = stderr
            .split("offset ")
            .nth(1)
            .and_then(|rest| rest.split(':').next());
        let offset = offset.and_then(|text| text.parse::<u64>().ok());
        assert!(offset.is_some(), "{injection} names no offset:\n{stderr}");
    }
}

#[test]
fn a_flipped_byte_that_was_delivered_is_found() {
    assert_finds("flip-delivered");
}

#[test]
fn a_flipped_byte_that_nothing_may_touch_is_found() {
    assert_finds("flip-untouched");
}

#[test]
fn a_write_that_was_left_out_is_found() {
    assert_finds("drop-write");
}

#[test]
fn a_write_that_went_to_a_wrong_place_is_found() {
    assert_finds("misdirect");
}

#[test]
fn what_cannot_work_is_refused_before_anything_starts() {
    for (arguments, expected) in [
        (vec!["--prefill-tp", "3"], "--prefill-tp 3 cannot work"),
        (
            vec!["--model", "qwen3-8b", "--inject", "drop-write:mamba"],
            "has no mamba",
        ),
        (
            vec![
                "--concurrency",
                "1024",
                "--model",
                "qwen3.5-122b",
                "--scale",
                "16",
            ],
            "to spare",
        ),
    ] {
        let output = Command::new(demo_program())
            .args(&arguments)
            .output()
            .expect("it starts");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{arguments:?} was not refused");
        assert!(stderr.contains(expected), "{arguments:?}: {stderr}");
    }
}

/// A demo that was left running, and the processes that it started.
struct Kept {
    driver: Child,
    children: Vec<u32>,
}

impl Kept {
    fn start() -> Self {
        let mut command = demo(&["--keep", "--requests", "2"]);
        let mut driver = command
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("starts");
        let stdout = driver.stdout.take().expect("it is piped");
        let (sender, receiver) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if line.contains("left running") {
                    // The receiver may have given up; then nobody is interested.
                    let _ = sender.send(());
                }
            }
        });
        let pid = driver.id();
        if receiver.recv_timeout(RUN_TIMEOUT).is_err() {
            signal(pid, "KILL");
            panic!("the demo was not up in {RUN_TIMEOUT:?}");
        }
        let children = children(pid);
        assert_eq!(
            children.len(),
            5,
            "a bootstrap server, two services, two engines"
        );
        Self { driver, children }
    }

    /// Waits until every process is gone.
    fn assert_all_gone(&self) {
        let deadline = Instant::now() + GONE_TIMEOUT;
        let is_running = |pid: &&u32| {
            // A zombie has ended: whoever inherited it has yet to take note.
            let status = std::fs::read_to_string(format!("/proc/{pid}/stat"));
            status.is_ok_and(|status| !status.contains(") Z "))
        };
        while let Some(pid) = self.children.iter().find(is_running) {
            assert!(
                Instant::now() < deadline,
                "process {pid} outlives the driver"
            );
            std::thread::yield_now();
        }
    }
}

#[test]
fn a_signal_ends_the_driver_and_everything_it_started() {
    for name in ["INT", "TERM"] {
        let mut kept = Kept::start();
        signal(kept.driver.id(), name);
        let status = kept.driver.wait().expect("it can be waited for");
        assert_eq!(status.code(), Some(130), "after SIG{name}");
        kept.assert_all_gone();
    }
}

#[test]
fn nothing_outlives_a_driver_that_was_killed() {
    let mut kept = Kept::start();
    kept.driver.kill().expect("it is running");
    kept.driver.wait().expect("it can be waited for");
    kept.assert_all_gone();
}
