"""The demo's front door: settles the environment before Ray and transformers are imported."""

from __future__ import annotations

import logging
import os
from pathlib import Path


def demo(cache_dir: Path, out: Path) -> int:
    """Run the demo and show its table. Returns the exit status."""
    # Ray's name for "this cluster stays on this machine": it then binds its ports to loopback alone.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Bars of libraries would tear ours apart, in this process and in the engines'.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    logging.getLogger("ray").setLevel(logging.ERROR)
    from rich.console import Console

    from p2pcache.demo.run import run_demo

    # A log file has no width of its own; the table needs some.
    console = Console() if os.isatty(1) else Console(width=140)
    result = run_demo(cache_dir, out, console)
    console.print(f"All figures are in {out}.")
    summary = result["summary"]
    return 0 if summary["wrong_bytes"] == 0 and summary["leaked_leases"] == 0 else 1
