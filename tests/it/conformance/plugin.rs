//! SGLang's own classes with our plugin loaded as SGLang loads it: its bootstrap server, metrics by
//! component from all ranks behind one port.

use tests::http;
use tests::service::sum_of;

use super::*;
use crate::conformance::model::{List, Shape};

const ROOM: u64 = 2500;

/// A whole answer, its head included.
fn get(port: u16, path: &str) -> String {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let request = http::Request::get(path).bytes(address);
    let answer = http::exchange(address, &request).expect("somebody answers");
    String::from_utf8(answer).expect("it is text")
}

/// What one rank's tensors of a component move in a request.
fn bytes_of(shape: &Shape, request: &Request, component: &str) -> usize {
    let sizes = shape.buffers.iter().map(|buffer| {
        let (label, items) = match buffer.list {
            List::Kv => ("kv", request.source.pages.len()),
            List::Aux => ("aux", 1),
            List::State(0) => ("mamba", request.source.states[0].len()),
            List::State(position) => ("swa", request.source.states[position].len()),
        };
        match label == component {
            true => buffer.item_len() * items,
            false => 0,
        }
    });
    sizes.sum()
}

#[actix_rt::test]
async fn sglangs_classes_are_counted_by_component() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let port = free_address(IpAddr::V4(Ipv4Addr::LOCALHOST)).port();
    let named = |name: &str| folder.path().join(name).display().to_string();
    let setting = Setting {
        aux_by_write: true,
        environment: vec![
            ("SGLCONF_PLUGIN", "1".to_owned()),
            ("FERRY_METRICS_PORT", port.to_string()),
            ("FERRY_RUNTIME_DIR", named("run")),
            ("FERRY_BOOTSTRAP_DATA_DIR", named("store")),
        ],
        ..setting()
    };
    if !Direction::SglangToSglang.can_run("sglangs_classes_are_counted_by_component", &setting) {
        return;
    }
    let mut cluster = Cluster::start(&setting, Direction::SglangToSglang, tp(2, 2)).await;
    let request = Request::new(&setting.model, ROOM, &[2, 4]);
    cluster.transfer(&request).await;
    // Ours, with its folder for the port: SGLang's server keeps nothing.
    let stores: Vec<_> = std::fs::read_dir(folder.path().join("store"))
        .expect("a server has its folder there")
        .collect();
    assert_eq!(stores.len(), 1);
    let text = get(port, "/metrics");
    for component in ["kv", "mamba", "swa", "aux"] {
        // Both prefill ranks write their shards to one decode rank each.
        let label = format!("component=\"{component}\"");
        let counted = sum_of(&text, "ferry_transfer_bytes_total", &[&label]);
        let place = Place {
            tp_size: 2,
            ..Place::ALONE
        };
        let shape = Shape::new(&setting.model, place);
        let wanted = 2.0 * bytes_of(&shape, &request, component) as f64;
        assert!(
            (counted - wanted).abs() < 0.5,
            "{component}: {counted}, not {wanted}\n{text}"
        );
    }
    // Every rank of the host answers behind the one port.
    for rank in ["tp0", "tp1"] {
        assert!(
            text.contains(&format!("{rank}-pid")),
            "{rank} is missing\n{text}"
        );
    }
    assert!(get(port, "/nothing").starts_with("HTTP/1.0 404"));
}
