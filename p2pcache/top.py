"""`p2pcache top`: the mesh live in a terminal: nodes, tiers, rates, and why lookups missed.

`frame` is pure and draws two successive readings of the mesh; `run` reads, waits and draws again. Texts
from the mesh are shown as they are: neither markup nor control characters of theirs reach the terminal.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from p2pcache.dashboard.history import SOURCES, changes, group, remember
from p2pcache.dashboard.summary import checked, node_row, recent_misses
from p2pcache.types import ConfigError, P2PCacheError

Statuses = Sequence[Mapping[str, Any]]
_COLOURS = {"local": "cyan", "nvme": "yellow", "peer": "blue", "missed": "bright_black"}
_RECENT_MAX = 8
_BAR = 8
_BARS_WIDTH = 125
_OTHER_LINES = 8  # of a frame: all but nodes and recent misses


def frame(
    statuses: Statuses,
    previous: Statuses,
    seconds: float,
    *,
    width: int = 132,
    height: int | None = None,
    error: str = "",
) -> RenderableType:
    """One picture of the mesh. Rates are what changed from `previous` to `statuses`, `seconds` apart.

    previous: empty where there is none; then there are no rates. width: columns there are. height: lines
    to stay within, as far as leaving out nodes and old misses does it. error: why there is nothing newer.
    """
    statuses, previous = checked(statuses), checked(previous)
    known = bool(previous) and seconds > 0
    grown = changes(remember({}, previous), statuses)
    rates = {n: {k: v / seconds for k, v in c.items()} if known else {} for n, c in grown.items()}
    total: Counter[str] = Counter()
    for counts in grown.values():
        total.update(counts)
    whole = {key: value / seconds for key, value in total.items()} if known else {}
    up, down = [s for s in statuses if "error" not in s], [s for s in statuses if "error" in s]
    shown = recent_misses(up)[: _RECENT_MAX if height is None else max(min(_RECENT_MAX, height // 4), 1)]
    down_shown = down if height is None else down[: max(height // 4, 1)]
    room = _OTHER_LINES + len(shown) + len(down_shown)
    nodes_max = len(up) if height is None else max(height - room, 1)
    parts: list[RenderableType] = [_state(statuses, error), _rates(whole, known), Text()]
    for status in down_shown:
        parts.append(Text(f"{_plain(status['name'])}: no answer ({_plain(status['error'])})", "red"))
    if up:
        parts.append(_nodes(up, rates, known, nodes_max, bars=width >= _BARS_WIDTH))
    if len(up) > nodes_max:
        parts.append(Text(f"and {len(up) - nodes_max} more, less busy", "dim"))
    if shown:
        parts += [Text(), _recent(shown)]
    return Group(*parts)


def _state(statuses: Statuses, error: str) -> Text:
    down = sum("error" in s for s in statuses)
    views = len({s["view_id"] for s in statuses if "error" not in s})
    line = Text("p2pcache  ", style="bold")
    if error:
        line.append(_plain(error), "bold red")
    elif not statuses:
        line.append("no nodes", "bold")
    elif down:
        line.append(f"{down} of {len(statuses)} nodes do not answer", "bold red")
    elif views > 1:
        line.append("the nodes do not agree on who is in the mesh (yet)", "bold yellow")
    else:
        line.append(f"{len(statuses)} node{'s' * (len(statuses) > 1)}, all agree", "green")
    return line


def _rates(whole: Mapping[str, float], known: bool) -> Text:
    """The mesh in a line or two: chunks a second by where they were found, bytes, misses by reason."""
    if not known:
        return Text("rates follow with the second reading", style="dim")
    hits, misses = group(whole, "hits"), group(whole, "miss")
    line = Text(f"{_rate(whole.get('chunks:', 0.0))} chunks/s  ")
    for source in SOURCES:
        line.append(f"{source} {_rate(hits.get(source, 0.0))}  ", _COLOURS[source])
    line.append(f"missed {_rate(sum(misses.values()))}", _COLOURS["missed"])
    line.append(f"   to engines {_size(sum(group(whole, 'bytes').values()))}/s")
    for label, found in (("misses", misses), ("misses at fetch", group(whole, "fetch-miss"))):
        words = [
            f"{_plain(reason)} {_rate(n)}/s"
            for reason, n in sorted(found.items(), key=lambda item: -item[1])
            if n
        ]
        if words:
            line.append(f"\n{label}: {', '.join(words)}")
    return line


def _nodes(
    statuses: Statuses, rates: Mapping[str, Mapping[str, float]], known: bool, nodes_max: int, bars: bool
) -> Table:
    """A row a node, of the busiest `nodes_max`."""
    table = Table(box=None, pad_edge=False, header_style="dim", expand=False)
    table.add_column("node", no_wrap=True, max_width=28 if bars else 14)
    for title in ("host", "NVMe"):
        table.add_column(title, no_wrap=True)
    wide = ("found", "chunks/s", "local", "nvme", "peer", "missed", "bytes/s", "leases")
    for title in wide if bars else ("found", "ask/s", "local", "nvme", "peer", "miss", "B/s"):
        table.add_column(title, justify="right", no_wrap=True)
    ranked = sorted(statuses, key=lambda s: -rates[s["name"]].get("chunks:", 0.0))
    ranked = sorted(ranked[:nodes_max], key=lambda s: s["name"])
    for status in ranked:
        own = rates[status["name"]]
        row, name = node_row(status, own), Text(_plain(status["name"]))
        if row["state"] or not row["warm"]:
            name.append(f" {row['state'] or 'warming up'}", "yellow")
        hits = group(own, "hits")
        figures = [own.get("chunks:", 0.0), *(hits.get(s, 0.0) for s in SOURCES)]
        figures.append(sum(group(own, "miss").values()))
        table.add_row(
            name,
            _tier(row["tiers"].get("host"), bars),
            _tier(row["tiers"].get("nvme"), bars),
            f"{row['hits'] / row['chunks']:.0%}" if row["chunks"] else "-",
            *(_rate(figure) if known else "-" for figure in figures),
            _size(row["bytes_per_s"]) if known else "-",
            *([f"{row['leases']:,.0f}"] if bars else []),
        )
    return table


def _tier(held: Mapping[str, float] | None, bars: bool) -> Text:
    if held is None:
        return Text("-", "dim")
    share = held["used"] / held["capacity"] if held["capacity"] else 0.0
    if not bars:
        return Text(f"{share:.0%}")
    full = round(min(share, 1.0) * _BAR)
    line = Text("█" * full, "green" if share < 0.9 else "yellow").append("░" * (_BAR - full), "bright_black")
    return line.append(f" {share:>4.0%} of {_size(held['capacity'])}")


def _recent(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("missed", no_wrap=True, justify="right")
    table.add_column("node", no_wrap=True, max_width=28)
    table.add_column("step", no_wrap=True)
    table.add_column("why", no_wrap=True, overflow="ellipsis")
    for row in rows:
        step = row["step"] + (f" x{row['times']}" if row["times"] > 1 else "")
        table.add_row(_ago(row["ago_s"]), *(Text(_plain(t)) for t in (row["node"], step, row["why"])))
    return table


def run(
    read: Callable[[], Statuses],
    interval_s: float = 2.0,
    *,
    once: bool = False,
    console: Console | None = None,
) -> int:
    """Show the mesh until q or Ctrl-C; return an exit status. read: may raise a P2PCacheError.

    once, or output that is no terminal: one frame, with the rates of one interval (none where that is 0);
    the status is 1 where a node does not answer. Raises ConfigError for an interval that is none.
    """
    if not 0 <= interval_s < float("inf"):
        raise ConfigError(f"the interval must be a number of seconds, not {interval_s}")
    console = console or Console()
    if once or not console.is_terminal:
        first, started_s = list(read()), time.monotonic()
        time.sleep(interval_s)
        statuses = list(read()) if interval_s else first
        seconds = time.monotonic() - started_s
        console.print(frame(statuses, first if interval_s else [], seconds, width=console.width))
        return 1 if any("error" in s for s in statuses) else 0
    statuses, previous, read_s, seconds, error = [], [], 0.0, 0.0, ""
    with (
        contextlib.suppress(KeyboardInterrupt),
        _keys() as pressed,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            try:
                new, error = list(read()), ""
            except P2PCacheError as fault:
                error = str(fault) or type(fault).__name__
            else:
                now_s = time.monotonic()
                previous, statuses, seconds, read_s = statuses, new, now_s - read_s, now_s
            size = {"width": console.width, "height": console.height}
            picture = frame(statuses, previous, seconds, **size, error=error)
            live.update(picture, refresh=True)
            if "q" in pressed(max(interval_s, 0.1)).lower():
                break
    return 0


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """A function that waits so many seconds for keys and returns them; `q` where the terminal is gone."""
    if not sys.stdin or not sys.stdin.isatty():
        yield lambda seconds: time.sleep(seconds) or ""
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        # Not through `sys.stdin`: what that has read ahead, `select` does not see.
        return (os.read(descriptor, 64).decode(errors="replace") or "q") if ready else ""

    try:
        tty.setcbreak(descriptor)
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _plain(text: Any) -> str:
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(text))


def _rate(value: float) -> str:
    return f"{value:,.1f}" if 0 < value < 10 else f"{value:,.0f}"


def _ago(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:,.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:,.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:,.1f} TiB"
