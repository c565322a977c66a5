//! What programs need to start.

use std::process::Command;

use tests::process::program;

/// Their drivers are opened when somebody asks for them.
#[test]
fn programs_need_no_driver_of_devices_or_network_devices() {
    for name in [
        "bootstrap-server",
        "transfer-actor",
        "ferry-demo",
        "ferry-chaos",
    ] {
        let output = Command::new("ldd").arg(program(name)).output().unwrap();
        let needed = String::from_utf8(output.stdout).unwrap().to_lowercase();
        assert!(output.status.success(), "{name}: {needed}");
        assert!(needed.contains("libc.so"), "{name}: {needed}");
        for foreign in ["verbs", "rdmacm", "mlx", "cuda", "hip", "hsa", "rocm"] {
            assert!(!needed.contains(foreign), "{name}: {needed}");
        }
    }
}
