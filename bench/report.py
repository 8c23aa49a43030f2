"""What every benchmark shares: pairs measured in turn, a table, and one shape of JSON.

A figure of one run says little on a shared machine. So two things to compare are run in turn, A B B A ...,
and the *median of the ratios* of neighbours is what counts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PAIRS = 7


@dataclass
class Report:
    """Rows for the table, ratios with their targets, and why something could not be measured."""

    name: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    ratios: dict[str, float | None] = field(default_factory=dict)  # None: not measured, see `missing`
    targets: dict[str, str] = field(default_factory=dict)  # ">= 0.9", "<= 2"
    missing: dict[str, str] = field(default_factory=dict)  # a ratio, or a peer -> why it is not here
    details: list[dict[str, Any]] = field(default_factory=list)  # in the JSON, not in the table

    def row(self, **cells: Any) -> None:
        self.rows.append(cells)

    def ratio(self, name: str, value: float | None, target: str = "", why_missing: str = "") -> None:
        self.ratios[name] = value
        if target:
            self.targets[name] = target
        if value is None:
            self.missing[name] = why_missing or "not measured"

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "rows": self.rows,
            "ratios": self.ratios,
            "targets": self.targets,
            "missing": self.missing,
            "details": self.details,
            "machine": machine(),
        }

    def print(self, console: Console | None = None) -> None:
        console = console or Console()
        if self.rows:
            columns = list(dict.fromkeys(key for row in self.rows for key in row))
            table = Table(title=f"bench.{self.name}")
            for column in columns:
                left = isinstance(next((r[column] for r in self.rows if column in r), ""), str)
                table.add_column(column, justify="left" if left else "right")
            for row in self.rows:
                table.add_row(*(_cell(row.get(column)) for column in columns))
            console.print(table)
        for name, value in self.ratios.items():
            target = f"   target {self.targets[name]}" if name in self.targets else ""
            shown = f"missing: {self.missing[name]}" if value is None else f"{value:.3g}"
            console.print(f"{name:36} {shown}{target}", markup=False, highlight=False)


def parser(description: str, name: str) -> argparse.ArgumentParser:
    """With `--json FILE`; without it figures go to out/NAME.json."""
    made = argparse.ArgumentParser(prog=f"python -m bench.{name}", description=description)
    made.add_argument("--json", type=Path, default=Path(f"out/{name}.json"), help="where figures go")
    return made


def finish(report: Report, path: Path) -> None:
    """Print the table and write the JSON."""
    report.print()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report.as_json(), indent=1) + "\n")


def paired(ours: Callable[[], float], theirs: Callable[[], float], pairs: int = PAIRS) -> tuple[float, ...]:
    """Run both in turn, which one first taking turns too, after one warm-up of each.

    Both return seconds. Returns (median of ours, median of theirs, median of ours / theirs).
    """
    ours(), theirs()
    mine, other = [], []
    for index in range(pairs):
        if index % 2:
            other.append(theirs())
            mine.append(ours())
        else:
            mine.append(ours())
            other.append(theirs())
    ratio = statistics.median(a / b for a, b in zip(mine, other, strict=True))
    return statistics.median(mine), statistics.median(other), ratio


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of all are not above. values: at least one."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model, memory_kib = "", 0
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    with open("/proc/meminfo") as file:
        memory_kib = int(file.readline().split()[1])
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_kib / (1 << 20), 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
