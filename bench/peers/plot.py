#!/usr/bin/env python3
"""Draws the throughput of a results file as SVG: for each case a bar for each path.

plot.py FILE PLOT
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import report

# In pixels.
BAR, GAP, GROUP_GAP, LABELS, PLOT_WIDTH, TOP = 13, 3, 16, 120, 560, 64
BEST_OF = {"nixl-best": report.NIXL_LOCAL, "nixl-tcp-best": report.NIXL_TCP}
# Each series is one path: name, what the legend says, colour.
SERIES = [
    ("limit-shm-2", "limit: memcpy into a shared mapping", "#b9c6d3"),
    ("limit-streaming-2", "limit: the same with streaming stores", "#9fb2c4"),
    ("ferry-shm-2", "Ferry shm", "#1b5e9e"),
    ("ferry-cma-2", "Ferry cma", "#5b9bd5"),
    ("limit-tcp-2", "limit: bare TCP", "#cfd8c4"),
    ("ferry-tcp-2", "Ferry tcp", "#3f7f3f"),
    ("nixl", "NIXL as SGLang drives it", "#d98e2b"),
    ("nixl-best", "NIXL, its best setting", "#efc27b"),
    ("nixl-tcp-best", "NIXL over TCP, its best setting", "#a8642a"),
    ("mooncake", "Mooncake TCP, its best setting", "#a33b3b"),
]


def svg(written: dict) -> str:
    """Bars of throughput, a group for each case."""
    results = report.Results(written["records"])
    cases = [case for case in report.BANDWIDTH if any(key[1] == case for key in results.found)]

    def speed(name, case):
        if name in BEST_OF:
            name = results.best_of(BEST_OF[name], case)
        return results.median(name, case, report.SPEED) if name else None

    series = [one for one in SERIES if any(speed(one[0], case) for case in cases)]
    most = max(speed(name, case) or 0.0 for name, _, _ in series for case in cases)
    step = 1 if most <= 6 else 2
    top_value = (int(most / step) + 1) * step
    group = len(series) * (BAR + GAP) + GROUP_GAP
    legend_lines = (len(series) + 1) // 2
    plot_top = TOP + legend_lines * 18
    height = plot_top + len(cases) * group + 40
    width = LABELS + PLOT_WIDTH + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        f' viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        '<text x="12" y="24" font-size="16">Batches between two processes of one host, GB/s</text>',
        f'<text x="12" y="42" fill="#555">{report.machine_line(written).split(";")[0]};'
        " 2 threads or streams; page order random on both sides, data out of cache</text>",
    ]
    for at, (_, title, colour) in enumerate(series):
        x, y = 12 + at % 2 * (width // 2), TOP + at // 2 * 18
        parts.append(f'<rect x="{x}" y="{y - 9}" width="11" height="11" fill="{colour}"/>')
        parts.append(f'<text x="{x + 17}" y="{y + 1}">{title}</text>')
    bottom = plot_top + len(cases) * group
    for value in range(0, top_value + 1, step):
        x = LABELS + PLOT_WIDTH * value / top_value
        parts.append(f'<path d="M{x:.1f} {plot_top}V{bottom}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{value}</text>')
    for at, case in enumerate(cases):
        y = plot_top + at * group + GROUP_GAP / 2
        middle = y + (group - GROUP_GAP) / 2 + 4
        parts.append(
            f'<text x="{LABELS - 8}" y="{middle}" text-anchor="end">{report.TITLES[case]}</text>'
        )
        for name, _, colour in series:
            value = speed(name, case)
            length = PLOT_WIDTH * (value or 0.0) / top_value
            label = "-" if value is None else f"{value:.2f}"
            parts.append(
                f'<rect x="{LABELS}" y="{y:.1f}" width="{length:.1f}" height="{BAR}"'
                f' fill="{colour}"/>'
            )
            parts.append(
                f'<text x="{LABELS + length + 4:.1f}" y="{y + BAR - 3:.1f}" font-size="10"'
                f' fill="#444">{label}</text>'
            )
            y += BAR + GAP
    return "\n".join([*parts, "</svg>"]) + "\n"


def main():
    """Draws."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("plot", type=Path)
    args = parser.parse_args()
    args.plot.write_text(svg(json.loads(args.file.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
