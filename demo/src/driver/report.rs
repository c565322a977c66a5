//! Adds up what the engines report, and the table at the end.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::time::Duration;

use anyhow::{Result, bail};
use transfer_actor::config::Verify;

use super::plan::{RunPlan, component_order, human_bytes};
use crate::engine::{Checked, Moved};

/// What is known of one component.
#[derive(Debug, Default)]
struct ComponentTotals {
    transports: BTreeSet<String>,
    /// Seconds of each transfer: one component of one room from one rank to one rank.
    seconds: Vec<f64>,
    /// Bytes that the service says it moved.
    sent_bytes: u64,
    /// Bytes that the decode engines compared when their requests had finished.
    received_bytes: u64,
    /// Bytes of the idle decode pools that hold what arrived last.
    idle_placed_bytes: u64,
    /// Bytes of the idle decode pools that nothing may have touched.
    idle_untouched_bytes: u64,
}

/// What a whole run did.
pub struct Totals {
    requests: usize,
    elapsed: Duration,
    components: BTreeMap<usize, (String, ComponentTotals)>,
    /// Bytes of the idle prefill pools, all of them still what the prefill left there.
    source_bytes: u64,
}

impl Totals {
    /// Nothing yet.
    pub fn new(plan: &RunPlan) -> Self {
        Self {
            requests: plan.requests.len(),
            elapsed: Duration::ZERO,
            components: BTreeMap::new(),
            source_bytes: 0,
        }
    }

    fn component(&mut self, label: &str) -> &mut ComponentTotals {
        let entry = self.components.entry(component_order(label));
        &mut entry
            .or_insert_with(|| (label.to_owned(), ComponentTotals::default()))
            .1
    }

    /// Adds one finished request: what the prefill's service reported, what the decode verified.
    pub fn add(&mut self, sent: Vec<Moved>, received: Vec<Moved>) -> Result<()> {
        for moved in sent {
            // A rank whose part another rank sends reports a transfer of nothing.
            if moved.bytes == 0 {
                continue;
            }
            let totals = self.component(&moved.component);
            totals.transports.insert(moved.transport);
            totals.seconds.push(moved.seconds);
            totals.sent_bytes += moved.bytes;
        }
        for moved in received {
            self.component(&moved.component).received_bytes += moved.bytes;
        }
        Ok(())
    }

    /// The run is over.
    pub fn finish(&mut self, elapsed: Duration) {
        self.elapsed = elapsed;
    }

    /// Takes in the check of the idle pools. Every component of the model must have moved, or the
    /// run has proved less than it says.
    pub fn with_idle(mut self, plan: &RunPlan, idle: &[Vec<Checked>; 2]) -> Result<Self> {
        let [prefill, decode] = idle;
        let all = prefill.iter().flat_map(|rank| &rank.components);
        self.source_bytes = all
            .map(|(_, checked)| checked.placed + checked.untouched)
            .sum();
        for (component, checked) in decode.iter().flat_map(|rank| &rank.components) {
            let totals = self.component(component.label());
            totals.idle_placed_bytes += checked.placed;
            totals.idle_untouched_bytes += checked.untouched;
        }
        for component in plan.components() {
            let totals = self.component(component.label());
            let moved = totals.received_bytes > 0 && totals.idle_placed_bytes > 0;
            if !moved || totals.idle_untouched_bytes == 0 {
                bail!("nothing of component {component} was moved, or none of its pools was left");
            }
        }
        Ok(self)
    }

    /// Bytes verified so far in finished requests.
    pub fn received_bytes(&self) -> u64 {
        self.components
            .values()
            .map(|(_, totals)| totals.received_bytes)
            .sum()
    }

    /// The table for each component. It is only asked for once every check has passed.
    pub fn table(&self) -> String {
        let header = [
            "component",
            "transport",
            "bytes",
            "transfers",
            "MB/s each",
            "p50 ms",
            "p99 ms",
            "untouched",
            "verified",
        ];
        let mut rows = vec![header.map(str::to_owned).to_vec()];
        let mut all_seconds = Vec::new();
        let mut untouched = 0;
        for (label, totals) in self.components.values() {
            let transports: Vec<_> = totals.transports.iter().cloned().collect();
            all_seconds.extend_from_slice(&totals.seconds);
            untouched += totals.idle_untouched_bytes;
            rows.push(row(
                label,
                &transports.join(","),
                totals.received_bytes,
                &totals.seconds,
                totals.idle_untouched_bytes,
            ));
        }
        rows.push(row(
            "total",
            "",
            self.received_bytes(),
            &all_seconds,
            untouched,
        ));
        let mut text = String::from("\n");
        text.push_str(&aligned(&rows));
        let seconds = self.elapsed.as_secs_f64();
        let rate = self.received_bytes() as f64 / seconds / 1e6;
        let _ = writeln!(
            text,
            "bytes: arrived and compared when each request finished; transfers: one component of one request\n\
             from one rank to another; MB/s each: a transfer's own rate, from submitting to completing, with\n\
             all others in flight beside it; untouched: bytes of the idle decode pools that still hold what\n\
             they held at the start\n\
             {} requests in {seconds:.1} s, {rate:.0} MB/s with filling and checking; {} of prefill pools unchanged",
            self.requests,
            human_bytes(self.source_bytes),
        );
        text
    }

    /// Compares the service's counters with the bytes counted here; both must agree to the byte.
    pub fn compare_with_metrics(
        &self,
        before: &BTreeMap<String, u64>,
        after: &BTreeMap<String, u64>,
    ) -> Result<String> {
        let mut text = String::new();
        let mut wrong = Vec::new();
        let known: BTreeSet<_> = self.components.values().map(|(label, _)| label).collect();
        let labels: BTreeSet<_> = known.into_iter().chain(after.keys()).collect();
        for label in labels {
            let value = |sums: &BTreeMap<String, u64>| sums.get(label).copied().unwrap_or(0);
            let metric = value(after).saturating_sub(value(before));
            let totals = self.components.get(&component_order(label));
            let counted = totals.map_or(0, |(_, totals)| totals.received_bytes);
            let reported = totals.map_or(0, |(_, totals)| totals.sent_bytes);
            if metric == counted && reported == counted {
                let _ = writeln!(text, "metrics: {label} {metric} bytes, as counted here");
            } else {
                wrong.push(format!(
                    "{label}: counted here {counted}, reported for the rooms {reported}, metrics {metric}"
                ));
            }
        }
        if !wrong.is_empty() {
            bail!(
                "the service's byte counts are not those counted here: {}",
                wrong.join("; ")
            );
        }
        Ok(text)
    }

    /// What the services compared with checksums must be what they were told to: all of the bytes
    /// that arrived, some of each component, or none.
    pub fn check_verified(
        &self,
        verify: Verify,
        compared: &BTreeMap<String, u64>,
    ) -> Result<String> {
        let mut text = String::new();
        for (label, totals) in self.components.values() {
            let bytes = compared.get(label).copied().unwrap_or(0);
            let arrived = totals.received_bytes;
            let is_right = match verify {
                Verify::Off => bytes == 0,
                Verify::Sampled => (1..=arrived).contains(&bytes),
                Verify::Full => bytes == arrived,
            };
            if !is_right {
                bail!(
                    "--verify {}: {bytes} of {arrived} bytes of {label} were compared with checksums",
                    verify.name()
                );
            }
            if verify != Verify::Off {
                let _ = writeln!(
                    text,
                    "checksums: {label} {bytes} of {arrived} bytes compared by the services"
                );
            }
        }
        Ok(text)
    }

    /// The last line.
    pub fn conclusion(&self) -> String {
        format!(
            "all bytes verified: {} bytes of {} requests arrived, {} bytes were left untouched",
            self.received_bytes(),
            self.requests,
            self.components
                .values()
                .map(|(_, totals)| totals.idle_untouched_bytes)
                .sum::<u64>(),
        )
    }
}

fn row(label: &str, transport: &str, bytes: u64, seconds: &[f64], untouched: u64) -> Vec<String> {
    let sum: f64 = seconds.iter().sum();
    let rate = if sum > 0.0 {
        format!("{:.0}", bytes as f64 / sum / 1e6)
    } else {
        "-".to_owned()
    };
    vec![
        label.to_owned(),
        transport.to_owned(),
        bytes.to_string(),
        seconds.len().to_string(),
        rate,
        milliseconds(percentile(seconds, 0.50)),
        milliseconds(percentile(seconds, 0.99)),
        untouched.to_string(),
        "yes".to_owned(),
    ]
}

/// The smallest value that at least this share of the values does not exceed.
fn percentile(values: &[f64], share: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied()
}

fn milliseconds(seconds_opt: Option<f64>) -> String {
    seconds_opt.map_or_else(|| "-".to_owned(), |seconds| format!("{:.2}", seconds * 1e3))
}

/// Rows as columns: the first two flush left, numbers flush right, a rule below the header.
fn aligned(rows: &[Vec<String>]) -> String {
    let columns = rows.first().map_or(0, Vec::len);
    let widths: Vec<_> = (0..columns)
        .map(|column| {
            rows.iter()
                .filter_map(|row| row.get(column))
                .map(String::len)
                .max()
        })
        .map(Option::unwrap_or_default)
        .collect();
    let mut text = String::new();
    for (index, row) in rows.iter().enumerate() {
        let mut line = String::new();
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            let _ = if column < 2 {
                write!(line, "{cell:<width$}  ")
            } else {
                write!(line, "{cell:>width$}  ")
            };
        }
        let _ = writeln!(text, "{}", line.trim_end());
        if index == 0 || index + 2 == rows.len() {
            let _ = writeln!(text, "{}", "-".repeat(line.trim_end().len()));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_occurred() {
        let values: Vec<_> = (1..=200).rev().map(f64::from).collect();
        assert_eq!(percentile(&values, 0.50), Some(100.0));
        assert_eq!(percentile(&values, 0.99), Some(198.0));
        assert_eq!(percentile(&[3.0], 0.99), Some(3.0));
        assert_eq!(percentile(&[], 0.5), None);
    }
}
