//! Reads the service's metrics.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};
use transfer_actor::bootstrap_access::plain_http;

/// The counter of moved bytes.
const TRANSFER_BYTES: &str = "ferry_transfer_bytes_total";
/// The counter of bytes that were compared with checksums.
const VERIFY_BYTES: &str = "ferry_verify_bytes_total";

/// Bytes that the service has moved so far, by component.
pub async fn transfer_bytes(url: &str) -> Result<BTreeMap<String, u64>> {
    bytes_by_component(url, TRANSFER_BYTES).await
}

/// Bytes that the service has compared with checksums so far, by component.
pub async fn verified_bytes(url: &str) -> Result<BTreeMap<String, u64>> {
    bytes_by_component(url, VERIFY_BYTES).await
}

async fn bytes_by_component(url: &str, counter: &str) -> Result<BTreeMap<String, u64>> {
    let client = plain_http().no_proxy().build()?;
    let response = client
        .get(url)
        .send()
        .await
        .with_context(|| format!("reading {url}"))?;
    let text = response.error_for_status()?.text().await?;
    sum_by_component(&text, counter)
}

fn sum_by_component(text: &str, counter: &str) -> Result<BTreeMap<String, u64>> {
    let mut sums = BTreeMap::new();
    for line in text.lines() {
        let Some(rest) = line.strip_prefix(counter) else {
            continue;
        };
        let Some((labels, value)) = rest
            .strip_prefix('{')
            .and_then(|rest| rest.split_once("} "))
        else {
            bail!("the metric line {line:?} has another shape than expected");
        };
        let component = label(labels, "component")
            .with_context(|| format!("the metric line {line:?} has no component"))?;
        let number: f64 = value
            .trim()
            .parse()
            .with_context(|| format!("reading {line:?}"))?;
        // Counters are doubles: beyond 2^53 they would no longer count single bytes.
        if number.fract() != 0.0 || !(0.0..9.0e15).contains(&number) {
            bail!("the metric line {line:?} is not a number of bytes");
        }
        *sums.entry(component.to_owned()).or_insert(0) += number as u64;
    }
    Ok(sums)
}

fn label<'text>(labels: &'text str, name: &str) -> Option<&'text str> {
    labels.split(',').find_map(|pair| {
        let value = pair.trim().strip_prefix(name)?.strip_prefix('=')?;
        value.strip_prefix('"')?.strip_suffix('"')
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_over_transports_and_ignores_other_metrics() {
        let text = "\
# TYPE ferry_transfer_bytes_total counter
ferry_transfer_bytes_total{component=\"kv\",role=\"prefill\",transport=\"cma\"} 100
ferry_transfer_bytes_total{component=\"kv\",role=\"prefill\",transport=\"tcp\"} 23
ferry_transfer_bytes_total{component=\"mamba\",role=\"prefill\",transport=\"cma\"} 7
ferry_transfer_ranges_total{component=\"kv\",role=\"prefill\",transport=\"cma\"} 9
";
        let sums = sum_by_component(text, TRANSFER_BYTES).expect("it is well formed");
        assert_eq!(
            sums,
            BTreeMap::from([("kv".to_owned(), 123), ("mamba".to_owned(), 7)])
        );
        for bad in ["{role=\"x\"} 1", "{component=\"x\"} 1.5"] {
            let line = format!("{TRANSFER_BYTES}{bad}");
            assert!(sum_by_component(&line, TRANSFER_BYTES).is_err(), "{bad}");
        }
    }
}
