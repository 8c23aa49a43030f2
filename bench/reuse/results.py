"""Rows of single prompts, added up: means, bootstrap intervals, the frontier and its plot."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

BOOTSTRAPS = 2000
Row = dict[str, Any]


class Log:
    """Rows on disk, a line each, so that a run of hours goes on where it was stopped."""

    def __init__(self, path: Path, settings: dict[str, Any]):
        """settings: of the run; rows of other settings in the same file are left alone and not counted."""
        self._path = path
        self._settings = settings
        self.rows: list[Row] = []
        if path.exists():
            for line in path.read_text().splitlines():
                row = json.loads(line)
                if row["settings"] == settings:
                    self.rows.append(row)
        self._done = {self._key(row) for row in self.rows}

    def has(self, documents: int, prompt: int, origin: str, mode: str) -> bool:
        return (documents, prompt, origin, mode) in self._done

    def add(self, row: Row) -> None:
        row = row | {"settings": self._settings}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self.rows.append(row)
        self._done.add(self._key(row))

    @staticmethod
    def _key(row: Row) -> tuple[int, int, str, str]:
        return row["documents"], row["prompt"], row["origin"], row["mode"]


def summary(rows: Iterable[Row]) -> list[Row]:
    """A row for each number of documents, origin and mode, best agreement first."""
    groups: dict[tuple[int, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["documents"], row["origin"], row["mode"]].append(row)
    made = [_added(*key, members) for key, members in groups.items()]
    return sorted(made, key=lambda r: (r["documents"], -r["top1"]))


def _added(documents: int, origin: str, mode: str, rows: Sequence[Row]) -> Row:
    top1 = [statistics.fmean(r["same"]) for r in rows]
    kl = [statistics.fmean(r["kl"]) for r in rows]
    every = np.concatenate([r["kl"] for r in rows])

    def mean(name: str) -> float:
        return statistics.fmean(r[name] for r in rows)

    return {
        "documents": documents,
        "origin": origin,
        "mode": mode,
        "n": len(rows),
        "top1": statistics.fmean(top1),
        "top1_low": interval(top1)[0],
        "top1_high": interval(top1)[1],
        "kl": statistics.fmean(kl),
        "kl_low": interval(kl)[0],
        "kl_high": interval(kl)[1],
        "kl_p99": float(np.quantile(every, 0.99)),
        "perplexity": float(np.exp(mean("gold_nll"))),
        "full_perplexity": float(np.exp(mean("full_gold_nll"))),
        "seam_top1": mean("seam_top1"),
        "full_seam_top1": mean("full_seam_top1"),
        "recomputed": mean("recomputed"),
        "speedup": statistics.median(r["full_s"] / r["seconds"] for r in rows),
        "tokens": mean("tokens"),
    }


def shown(row: Row) -> Row:
    """What of a row of `summary` fits into a table."""
    return {
        "docs": row["documents"],
        "origin": row["origin"],
        "mode": row["mode"],
        "n": row["n"],
        "top-1": f"{row['top1']:.3f} ({row['top1_low']:.3f}-{row['top1_high']:.3f})",
        "KL": f"{row['kl']:.4f}",
        "p99": f"{row['kl_p99']:.3f}",
        "perplexity": f"{row['perplexity'] / row['full_perplexity']:.3f}x",
        "seam": f"{row['seam_top1']:.2f} of {row['full_seam_top1']:.2f}",
        "speed-up": f"{row['speedup']:.1f}",
    }


def interval(values: Sequence[float], share: float = 0.95) -> tuple[float, float]:
    """A bootstrap interval of the mean, over prompts."""
    rng = np.random.default_rng(1)
    data = np.asarray(values)
    means = data[rng.integers(0, len(data), (BOOTSTRAPS, len(data)))].mean(1)
    low, high = np.quantile(means, [(1 - share) / 2, (1 + share) / 2])
    return float(low), float(high)


def frontier(rows: Sequence[Row]) -> list[Row]:
    """Of one number of documents, what nothing else beats in both agreement and speed, fastest first."""
    best: list[Row] = []
    for row in sorted(rows, key=lambda r: -r["speedup"]):
        if not best or row["top1"] > best[-1]["top1"]:
            best.append(row)
    return best


def plot(rows: Sequence[Row], path: Path) -> str:
    """Agreement over speed-up, a panel for each number of documents. Returns why there is none, or ""."""
    try:
        import matplotlib
    except ImportError:
        return "matplotlib is not installed"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    sizes = sorted({r["documents"] for r in rows})
    figure, axes = pyplot.subplots(1, len(sizes), figsize=(6 * len(sizes), 5), sharey=True, squeeze=False)
    origins = sorted({r["origin"] for r in rows})
    for axis, size in zip(axes[0], sizes, strict=True):
        here = [r for r in rows if r["documents"] == size]
        for number, origin in enumerate(origins):
            mine = [r for r in here if r["origin"] == origin]
            if mine:
                label = origin if size == sizes[0] else None
                axis.scatter(
                    [r["speedup"] for r in mine], [r["top1"] for r in mine], color=f"C{number}", label=label
                )
        best = frontier(here)
        axis.plot([r["speedup"] for r in best], [r["top1"] for r in best], color="black", linewidth=0.8)
        for row in best:
            place = row["speedup"], row["top1"]
            axis.annotate(row["mode"], place, fontsize=7, xytext=(3, 3), textcoords="offset points")
        axis.set(xscale="log", xlabel="times faster to the first token than full prefill")
        axis.set_title(f"{size} documents, n = {max(r['n'] for r in here)}")
    axes[0][0].set_ylabel("top-1 agreement with full prefill")
    figure.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return ""
