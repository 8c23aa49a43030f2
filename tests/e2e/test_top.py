"""`p2pcache top`: what one frame says, and that the live view comes up and goes away."""

from __future__ import annotations

import copy
import io
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from p2pcache import EmbeddedMesh, FixedChunker, KVLayout, Namespace, NodeConfig
from p2pcache.types import ConfigError, NodeDown

pytest.importorskip("rich")

from rich.console import Console

from p2pcache.top import frame, run

LAYOUT = KVLayout(layers=4, kv_heads=2, head_dim=16, dtype="float32")
CHUNKS = FixedChunker(64)
PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def readings() -> list[list[dict[str, Any]]]:
    """Statuses of a real mesh of two, before and after 4 chunks were pulled and 2 were missed."""
    with EmbeddedMesh(
        [NodeConfig(name=f"n{i}", host_bytes_max=8 << 20, resync_s=0.0) for i in range(2)]
    ) as mesh:
        with mesh.client(0, PATIENCE_S) as one, mesh.client(1, PATIENCE_S) as two:
            caches = [c.open(Namespace("m", "w", LAYOUT)) for c in (one, two)]
            run_ = torch.arange(256)
            stored = caches[0].store(caches[0].chunks(run_, CHUNKS), torch.zeros(LAYOUT.shape(256)))
            assert stored.published(PATIENCE_S)
            before = [n.status() for n in mesh.nodes]
            longer = caches[1].lookup(torch.arange(384), chunker=CHUNKS, budget_s=PATIENCE_S)
            with caches[1].fetch(longer):
                pass
            return [before, [n.status() for n in mesh.nodes]]


def drawn(*arguments: Any, width: int = 140, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(frame(*arguments, width=width, **options))
    return console.file.getvalue()


def test_a_frame_shows_nodes_tiers_rates_and_misses(readings: list):
    text = drawn(readings[1], readings[0], 2.0)
    assert "2 nodes, all agree" in text
    assert "3.0 chunks/s" in text and "peer 2.0" in text and "missed 1.0" in text
    assert "misses: absent 1.0/s" in text and "to engines 128 KiB/s" in text
    (n1,) = [line for line in text.splitlines() if line.startswith("n1")]
    assert "67%" in n1 and "of 8.0 MiB" in n1
    assert "2 of 6: no node holds them" in text


def test_the_first_frame_has_no_rates(readings: list):
    text = drawn(readings[1], [], 0.0)
    assert "rates follow" in text and "67%" in text and "n0" in text


def test_a_restarted_node_has_no_negative_rates(readings: list):
    fresh = [dict(s, incarnation=1) for s in readings[0]]
    (rates,) = [line for line in drawn(fresh, readings[1], 1.0).splitlines() if "to engines" in line]
    assert rates.startswith("0 chunks/s") and "-" not in rates


def test_nodes_that_do_not_answer_are_named_with_their_reason(readings: list):
    text = drawn([*readings[1], {"name": "n2", "error": "DeadlineExceeded"}], readings[0], 1.0)
    assert "1 of 3 nodes do not answer" in text and "n2: no answer (DeadlineExceeded)" in text


def test_nodes_that_disagree_are_said_to(readings: list):
    other = [readings[1][0], dict(readings[1][1], view_id="00")]
    assert "do not agree" in drawn(other, [], 0.0)


def test_no_nodes_and_an_error_make_a_frame_too():
    assert "no nodes" in drawn([], [], 0.0)
    assert "the node is gone" in drawn([], [], 0.0, error="the node is gone")


@pytest.mark.parametrize("height", [10, 24, 50])
def test_a_mesh_of_64_fits_the_terminal(readings: list, height: int):
    many = [dict(copy.deepcopy(readings[1][1]), name=f"node-{i:02d}") for i in range(64)]
    many[7] = {"name": "node-07", "error": "gone"}
    for width in (80, 140):
        lines = drawn(many, many, 1.0, width=width, height=height).splitlines()
        assert len(lines) <= max(height, 12) and any("node-07: no answer" in line for line in lines)
        assert any("more" in line for line in lines)
        assert "…" not in "".join(line for line in lines if line.startswith("node"))


def test_names_are_neither_markup_nor_control_characters(readings: list):
    evil = [
        dict(readings[1][0], name="[red]x[/red]\x1b]0;title\x07"),
        {"name": "\x1b[2J", "error": "[bold]\x1b[2J"},
    ]
    text = drawn(evil, [], 0.0)
    assert "\x1b" not in text and "\x07" not in text and "[red]x[/red]" in text


def test_a_status_that_is_nonsense_is_one_bad_node(readings: list):
    nonsense = [readings[1][0], {"name": "n9", "counters": 3}, {"name": "n8", "sight": []}, {}]
    text = drawn(nonsense, readings[0], 1.0)
    assert "3 of 4 nodes do not answer" in text and "n0" in text


def test_once_prints_one_frame_without_a_terminal(readings: list):
    turns: Iterator[Sequence[Any]] = iter(readings)
    console = Console(file=io.StringIO(), width=140)
    assert run(lambda: next(turns), 0.01, once=True, console=console) == 0
    text = console.file.getvalue()
    assert text.count("p2pcache") == 1 and "chunks/s" in text and "\x1b" not in text
    console = Console(file=io.StringIO(), width=140)
    assert run(lambda: [{"name": "a", "error": "gone"}], 0, console=console) == 1
    assert "rates follow" in console.file.getvalue()


def test_once_leaves_a_fault_to_its_caller():
    def down() -> list:
        raise NodeDown("no node here")

    with pytest.raises(NodeDown):
        run(down, 0, once=True, console=Console(file=io.StringIO()))


@pytest.mark.parametrize("interval_s", [-1.0, float("nan"), float("inf")])
def test_an_interval_that_is_none_is_refused(interval_s: float):
    with pytest.raises(ConfigError, match="interval"):
        run(list, interval_s, once=True)


@pytest.mark.parametrize("end", [b"q", b"\x03"], ids=["q", "ctrl-c"])
def test_the_live_view_survives_a_fault_and_ends_cleanly(end: bytes):
    program = (
        "import itertools\n"
        "from p2pcache.top import run\n"
        "from p2pcache.types import NodeDown\n"
        "turns = itertools.count()\n"
        "def read():\n"
        "    if next(turns) == 0: raise NodeDown('not yet')\n"
        "    return [{'name': 'n0', 'error': 'gone for good'}]\n"
        "raise SystemExit(run(read, 0.2))\n"
    )
    controller, terminal = pty.openpty()
    environ = dict(os.environ, TERM="xterm", COLUMNS="100", LINES="30")
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        cwd=Path(__file__).parents[2],
        env=environ,
        start_new_session=True,
        preexec_fn=_own_terminal,
    )
    os.close(terminal)
    try:
        seen = _until(controller, b"gone for good")
        assert b"not yet" in seen
        os.write(controller, end)
        rest = _until(controller, None)
        assert process.wait(PATIENCE_S) == 0 and b"Traceback" not in seen + rest
        assert b"\x1b[?1049l" in rest, "the screen of before is back"
    finally:
        process.kill()
        process.wait()
        os.close(controller)


def _own_terminal() -> None:
    """In the child: make its standard input its controlling terminal, so that Ctrl-C is a signal."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _until(descriptor: int, mark: bytes | None) -> bytes:
    """What a terminal shows until `mark`, or (None) until its program has ended."""
    seen, end_s = b"", time.monotonic() + PATIENCE_S
    while mark is None or mark not in seen:
        assert time.monotonic() < end_s, seen
        if select.select([descriptor], [], [], 0.1)[0]:
            try:
                part = os.read(descriptor, 1 << 16)
            except OSError:  # the other end is closed
                part = b""
            if not part:
                return seen
            seen += part
    return seen
