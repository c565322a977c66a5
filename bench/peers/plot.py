#!/usr/bin/env python3
"""Draws the throughput of a results file as an SVG: for each case, a bar for each path."""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from run import CASES, Results

# Path: colour. Limits are grey; what is compared has one hue each.
PATHS = {
    "limit-shm-2": "#b8b8b8",
    "ferry-shm-2": "#0b6e4f",
    "limit-cma-2": "#cfcfcf",
    "ferry-cma-2": "#2a9d74",
    "limit-tcp-2": "#e0e0e0",
    "ferry-tcp-2": "#7cc6a4",
    "nixl": "#a23b2a",
    "nixl-posix": "#c96f4a",
    "nixl-tcp-quiet": "#e0a07a",
    "mooncake": "#4a5fa2",
}
BAR, GAP, HEIGHT, LEFT, TOP = 16, 34, 260, 60, 50


def text(x, y, words, anchor="middle", size=11) -> str:
    """One line of text."""
    style = f'font-family="sans-serif" font-size="{size}" text-anchor="{anchor}"'
    return f'<text x="{x:.0f}" y="{y:.0f}" {style}>{words}</text>'


def draw(written: dict) -> str:
    """The whole picture."""
    results = Results(written["records"])
    cases = [case for case in CASES if not case.startswith("lat")]
    names = [name for name in PATHS if results.median(name, cases[0], "GBps_median")]
    values = {
        (case, name): results.median(name, case, "GBps_median") or 0.0
        for case in cases
        for name in names
    }
    top = max(values.values())
    group = len(names) * BAR + GAP
    width = LEFT + len(cases) * group + 20
    legend_rows = (len(names) + 4) // 5
    height = TOP + HEIGHT + 40 + legend_rows * 18
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">']
    parts.append(f'<rect width="{width}" height="{height}" fill="white"/>')
    machine = written["machine"]
    title = f"GB/s between two processes, {machine['cores']} cores, {machine['cpu']}"
    parts.append(text(width / 2, 22, title, size=14))
    for step in range(5):
        y = TOP + HEIGHT - HEIGHT * step / 4
        parts.append(f'<line x1="{LEFT}" x2="{width - 20}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(text(LEFT - 8, y + 4, f"{top * step / 4:.1f}", anchor="end"))
    for place, case in enumerate(cases):
        x = LEFT + place * group + GAP / 2
        for at, name in enumerate(names):
            bar = HEIGHT * values[case, name] / top
            corner = f'x="{x + at * BAR:.0f}" y="{TOP + HEIGHT - bar:.1f}"'
            size = f'width="{BAR - 2}" height="{bar:.1f}"'
            parts.append(f'<rect {corner} {size} fill="{PATHS[name]}"/>')
        label = case.replace("contig_", "1 x ").replace("pages_", "").replace("x", " x ", 1)
        parts.append(text(x + len(names) * BAR / 2, TOP + HEIGHT + 18, label))
    for at, name in enumerate(names):
        x = LEFT + (at % 5) * (width - LEFT) / 5
        y = TOP + HEIGHT + 44 + (at // 5) * 18
        parts.append(
            f'<rect x="{x:.0f}" y="{y - 10}" width="12" height="12" fill="{PATHS[name]}"/>'
        )
        parts.append(text(x + 18, y, name, anchor="start"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def main():
    """Draws beside the results file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    args = parser.parse_args()
    written = json.loads(args.results.read_text(encoding="utf-8"))
    target = args.results.with_suffix(".svg")
    target.write_text(draw(written), encoding="utf-8")
    print(f"written to {target}")


if __name__ == "__main__":
    main()
