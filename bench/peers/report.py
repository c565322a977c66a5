#!/usr/bin/env python3
"""What a results file of run.py says: medians, and ratios beside their goals.

  report.py FILE               prints the tables
  report.py FILE --markdown    prints them for a page, only ratios that have a goal

A ratio is the median over rounds of the ratio of two paths that took their turns side by side.
"""

import argparse
import json
import statistics
from pathlib import Path

BANDWIDTH = [
    "contig_256MiB",
    "contig_64MiB",
    "pages_512x64KiB",
    "pages_1024x16KiB",
    "pages_4096x4KiB",
]
LATENCY = ["lat_4KiB", "lat_64KiB"]
PAGES = [case for case in BANDWIDTH if case.startswith("pages")]
SMALL_PAGES = ["pages_1024x16KiB", "pages_4096x4KiB"]
TITLES = {
    "contig_256MiB": "256 MiB",
    "contig_64MiB": "64 MiB",
    "pages_512x64KiB": "512 x 64 KiB",
    "pages_1024x16KiB": "1024 x 16 KiB",
    "pages_4096x4KiB": "4096 x 4 KiB",
    "lat_4KiB": "4 KiB, us",
    "lat_64KiB": "64 KiB, us",
}
# What counts as NIXL's best on one host, and over TCP.
NIXL_LOCAL = ["nixl", "nixl-quiet", "nixl-repost", "nixl-posix"]
NIXL_TCP = ["nixl-tcp", "nixl-tcp-quiet"]
SPEED, MEDIAN_US, P99_US = "GBps_median", "us_median", "us_p99"
# Not a field of a record: both sides' CPU-seconds for each GB.
CPU = "cpu_s_per_GB"


class Results:
    """The records of a run: one for each path, case and round."""

    def __init__(self, records: list[dict]):
        self.records = records
        self.found = {}
        for record in records:
            self.found.setdefault((record["name"], record["case"]), []).append(record)
        self.names = list(dict.fromkeys(record["name"] for record in records))

    def values(self, name: str, case: str, field: str) -> dict[int, float]:
        """A field by round."""
        values = {}
        for record in self.found.get((name, case), []):
            if "error" in record:
                continue
            both = ("init_cpu_s_per_GB", "tgt_cpu_s_per_GB")
            value = sum(record[side] for side in both) if field == CPU else record[field]
            values[record["round"]] = value
        return values

    def median(self, name: str, case: str, field: str) -> float | None:
        """The median over the rounds."""
        values = self.values(name, case, field).values()
        return statistics.median(values) if values else None

    def ratio(self, name: str, other: str, case: str, field: str) -> float | None:
        """The median of the rounds' ratios."""
        ours, theirs = self.values(name, case, field), self.values(other, case, field)
        ratios = [ours[at] / theirs[at] for at in ours if theirs.get(at)]
        return statistics.median(ratios) if ratios else None

    def best_of(self, names: list[str], case: str) -> str | None:
        """The fastest path of several, by its median."""
        medians = {name: self.median(name, case, SPEED) for name in names}
        known = {name: median for name, median in medians.items() if median}
        return max(known, key=known.get) if known else None

    def failures(self) -> list[str]:
        """Turns that broke, and bytes that were wrong."""
        return [
            f"{record['name']} {record['case']}: {record.get('error', 'the bytes are wrong')}"
            for record in self.records
            if record.get("verified") is False
        ]


class Goals:
    """The ratios that are promised, each with what was measured."""

    def __init__(self, results: Results):
        self.results = results
        self.rows = []
        for threads in (1, 2):
            for case in BANDWIDTH:
                self.beside_limits(threads, case)
        for case in PAGES:
            self.beside_peers(case)
        self.add("ferry-shm-2", "nixl", "lat_4KiB", MEDIAN_US, 0.5)
        for threads in (1, 2):
            self.add(f"ferry-tcp-{threads}", f"limit-tcp-{threads}", "lat_4KiB", MEDIAN_US, 1.3)

    def add(self, ours: str, other: str, case: str, field: str, goal: float | None):
        """A ratio of two paths, if both were measured; without a goal it is only shown."""
        measured = self.results.ratio(ours, other, case, field)
        if measured is None:
            return
        at_least = field == SPEED
        is_met = goal is None or (measured >= goal if at_least else measured <= goal)
        row = {"ours": ours, "other": other, "case": case, "field": field, "measured": measured}
        self.rows.append(row | {"goal": goal, "at_least": at_least, "met": is_met})

    def beside_limits(self, threads: int, case: str):
        """Ours beside the raw limit with as many threads."""
        is_smallest = case == "pages_4096x4KiB"
        goals = (("shm", 0.85 if is_smallest else 0.9), ("cma", 0.95), ("tcp", 0.9))
        for way, goal in goals:
            ours, limit = f"ferry-{way}-{threads}", f"limit-{way}-{threads}"
            if way == "shm":
                # Of memcpy and streaming stores the limit is whichever is faster here.
                both = [limit, f"limit-streaming-{threads}"]
                limit = self.results.best_of(both, case) or limit
            self.add(ours, limit, case, SPEED, goal)
            self.add(ours, limit, case, CPU, 1.15 if way == "shm" else None)
        self.add(f"ferry-local-{threads}", f"limit-memcpy-{threads}", case, SPEED, None)

    def beside_peers(self, case: str):
        """Ours at its defaults beside Mooncake and NIXL."""
        self.add("ferry-shm-2", "nixl", case, SPEED, 3.0)
        if best := self.results.best_of(NIXL_LOCAL, case):
            self.add("ferry-shm-2", best, case, SPEED, 1.5)
        is_small = case in SMALL_PAGES
        self.add("ferry-tcp-2", "mooncake", case, SPEED, 4.0 if is_small else 2.0)
        if best := self.results.best_of(NIXL_TCP, case):
            self.add("ferry-tcp-2", best, case, SPEED, 2.0 if is_small else None)


def cell(results: Results, name: str, case: str) -> str:
    """GB/s, or p50 and p99 in microseconds."""
    if case in LATENCY:
        p50, p99 = (results.median(name, case, field) for field in (MEDIAN_US, P99_US))
        return "-" if p50 is None else f"{p50:.1f} / {p99:.1f}"
    value = results.median(name, case, SPEED)
    if value is None:
        return "fails" if (name, case) in results.found else "-"
    return f"{value:.2f}"


def cpu_cell(results: Results, name: str, case: str) -> str:
    """CPU-seconds for each GB."""
    value = results.median(name, case, CPU)
    return "-" if value is None else f"{value:.2f}"


def rows_of(results: Results, cases: list[str], make) -> list[list[str]]:
    """A header and a row for each path that has one of the cases."""
    cases = [case for case in cases if any(record["case"] == case for record in results.records)]
    rows = [["path", *(TITLES[case] for case in cases)]]
    rows += [[name, *(make(results, name, case) for case in cases)] for name in results.names]
    return rows


def goal_rows(goals: list[dict], is_short: bool) -> list[list[str]]:
    """The ratios beside their goals, those that were missed first; at last, unless it is to be
    short, those without a goal."""
    units = {SPEED: "GB/s", CPU: "CPU-s/GB", MEDIAN_US: "p50"}

    def merit(row):
        if row["goal"] is None:
            return (2, 0.0)
        share = row["measured"] / row["goal"]
        return (int(row["met"]), share if row["at_least"] else 1 / share)

    rows = [["ours / other", "of", "case", "ratio", "goal", ""]]
    for row in sorted(goals, key=merit):
        if row["goal"] is None and is_short:
            continue
        sign = ">=" if row["at_least"] else "<="
        goal = "" if row["goal"] is None else f"{sign} {row['goal']}"
        what = f"{row['ours']} / {row['other']}"
        verdict = "" if row["met"] else "missed"
        title = TITLES[row["case"]].removesuffix(", us")
        rows.append([what, units[row["field"]], title, f"{row['measured']:.2f}", goal, verdict])
    return rows


def text_table(rows: list[list[str]]) -> str:
    """Columns of text."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [f"{row[0]:{widths[0]}}"]
        cells += [f"{text:>{width}}" for text, width in zip(row[1:], widths[1:])]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def markdown_table(rows: list[list[str]]) -> str:
    """A table of Markdown."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|" + " --- |" * len(rows[0]))
    return "\n".join(lines)


def machine_line(written: dict) -> str:
    """What it was measured on."""
    machine = written["machine"]
    noise = statistics.median(
        record["noise_cores"] for record in written["records"] if "noise_cores" in record
    )
    return (
        f"{written['date']}, {machine['cores']} cores of {machine['cpu']}, Linux"
        f" {machine['kernel']}; {written['rounds']} rounds, {written['op']}s; others used"
        f" {noise:.2f} cores (median of turns)"
    )


def report(written: dict, is_markdown: bool) -> str:
    """Everything that is printed."""
    results = Results(written["records"])
    table = markdown_table if is_markdown else text_table
    parts = [
        machine_line(written),
        "GB/s, medians; latency p50 / p99:",
        table(rows_of(results, BANDWIDTH + LATENCY, cell)),
        "CPU-seconds for each GB, both sides:",
        table(rows_of(results, BANDWIDTH, cpu_cell)),
        "Ratios within rounds, missed goals first:",
        table(goal_rows(Goals(results).rows, is_markdown)),
    ]
    parts += [f"NOT VERIFIED: {failure}" for failure in results.failures()]
    if probes := written.get("probes"):
        lines = [json.dumps(probe) for probe in probes]
        parts += ["Probes:", "\n".join(f"    {line}" if is_markdown else line for line in lines)]
    return "\n\n".join(parts)


def main():
    """Prints the tables."""
    keep_lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=keep_lines)
    parser.add_argument("file", type=Path)
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    print(report(json.loads(args.file.read_text(encoding="utf-8")), args.markdown))


if __name__ == "__main__":
    main()
