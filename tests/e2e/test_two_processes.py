"""The smallest mesh: two nodes in two processes that know each other by address, over TCP."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

import p2pcache
from p2pcache import cli

NAMESPACE = p2pcache.Namespace("m", "w", p2pcache.KVLayout(4, 2, 16, "float32"))
CHUNKER = p2pcache.FixedChunker(64)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@contextmanager
def node(name: str, folder: Path, port: int, *peers: int) -> Iterator[dict]:
    """`p2pcache start --alone` in a process of its own; yields what it says of itself."""
    settings = {
        "name": name,
        "runtime_dir": folder / name,
        "control_port": port,
        "host_bytes_max": 32 << 20,
        "transports": "tcp",
    }
    command = [sys.executable, "-m", "p2pcache.cli", "start", "--alone", "--json"]
    command += [a for k, v in settings.items() for a in ("--set", f"{k}={v}")]
    if peers:
        command += ["--peers", ",".join(f"127.0.0.1:{p}" for p in peers)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        assert line, "the node did not come up"
        yield json.loads(line)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    assert not list((folder / name).glob("*.sock"))


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[dict, dict]]:
    ports = free_port(), free_port()
    with ExitStack() as stack:
        a = stack.enter_context(node("a", tmp_path, ports[0]))  # learns of b when b greets it
        b = stack.enter_context(node("b", tmp_path, ports[1], ports[0]))
        for one in (a, b):
            wait_for_members(one["socket"], 2)
        yield a, b


def wait_for_members(path: str, count: int, timeout_s: float = 20.0) -> None:
    """Until a node's View has so many members; other processes give no event for it."""
    until_s = time.monotonic() + timeout_s
    with p2pcache.connect(path) as client:
        while any(len(s.get("members", ())) != count for s in client.mesh()) or len(client.mesh()) != count:
            assert time.monotonic() < until_s, client.mesh()
            time.sleep(0.05)


def test_kv_stored_beside_one_node_is_read_beside_the_other(pair):
    a, b = pair
    tokens = torch.arange(300)
    kv = torch.randn(4, 2, 300, 2, 16)
    with p2pcache.connect(a["socket"]) as writer, p2pcache.connect(b["socket"]) as reader:
        cache = writer.open(NAMESPACE)
        assert cache.store(cache.chunks(tokens, CHUNKER), kv).published()
        other = reader.open(NAMESPACE)
        lookup = other.lookup(tokens, chunker=CHUNKER, budget_s=2.0)
        with other.fetch(lookup) as fetched:
            assert [(c.source, c.peer, c.transport) for c in fetched] == [("peer", "a", "tcp")] * 5
            assert all(torch.equal(c.kv, kv[:, :, c.found.keys.start : c.found.keys.stop]) for c in fetched)
        assert other.lookup(tokens, chunker=CHUNKER).chunks[0].source == "local"


def test_the_command_line_shows_the_mesh_and_what_it_holds(
    pair, tmp_path: Path, capsys: pytest.CaptureFixture
):
    a, b = pair
    tokens = list(range(300))
    with p2pcache.connect(a["socket"]) as writer:
        cache = writer.open(NAMESPACE)
        assert cache.store(cache.chunks(tokens, CHUNKER), torch.randn(4, 2, 300, 2, 16)).published()
    file = tmp_path / "tokens"
    file.write_text(" ".join(map(str, [9, 9, 9, *tokens])))
    capsys.readouterr()

    assert cli.main(["status", "--socket", b["socket"], "--json"]) == 0
    assert [n["name"] for n in json.loads(capsys.readouterr().out)] == ["a", "b"]
    assert cli.main(["status", "--socket", b["socket"]]) == 0
    shown = capsys.readouterr().out
    assert "a: host" in shown and "pulls by " in shown

    call = ["lookup", str(file), "--chunker", "segments:3,67", "--socket", b["socket"]]
    assert cli.main([*call, "--json"]) == 0
    chunks = json.loads(capsys.readouterr().out)["chunks"]
    assert [c["match"] for c in chunks] == ["none", "content", "none"]
    assert chunks[1]["node"] == "a" and chunks[0]["miss"] == "absent"
    assert cli.main(call) == 0
    assert "from a by peer" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["lookup", "/does/not/exist"], 2, "cannot be read"),
        (["start", "--alone", "--set", "host_byte_max=1"], 2, "host_bytes_max"),
        (["start", "--alone", "--set", "host_bytes_max"], 2, "SETTING=VALUE"),
        (["start", "--alone", "--set", "host_bytes_max=much"], 2, "whole number"),
        (["start", "--peers", "127.0.0.1:1"], 2, "--alone"),
        (["start", "--alone", "--set", "host=0.0.0.0"], 2, "wildcard"),
        (["status", "--socket", "/does/not/exist"], 1, "no p2pcache node answers"),
        (["start", "--alone", "--peers", "somewhere"], 2, "10.0.0.2:7000"),
        (["start", "--alone", "--peers", "127.0.0.1:99999"], 2, "10.0.0.2:7000"),
        (["start", "--alone", "--set", "name=two\nlines"], 2, "letters"),
        (["start", "--alone", "--set", "allow_plaintext_network=yes"], 2, "true or false"),
        (["start", "--address", "127.0.0.1:1"], 1, "no Ray cluster answers"),
    ],
)
def test_a_mistake_in_a_call_is_said_in_a_sentence(arguments, status, words, capsys: pytest.CaptureFixture):
    assert cli.main(arguments) == status
    error = capsys.readouterr().err
    assert words in error and "Traceback" not in error


def test_a_port_in_use_is_named(tmp_path: Path, capsys: pytest.CaptureFixture):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = [
            "--set",
            f"control_port={port}",
            "--set",
            f"runtime_dir={tmp_path / 'run'}",
            "--set",
            "host_bytes_max=1048576",
        ]
        assert cli.main(["start", "--alone", *settings]) == 2
        assert str(port) in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[" * 100_000, "one two", "[1, 2.5]", '{"a": 1}', "\0"])
def test_a_file_that_holds_no_tokens_is_said_to(text: str, tmp_path: Path, capsys: pytest.CaptureFixture):
    (tmp_path / "tokens").write_text(text)
    assert cli.main(["lookup", str(tmp_path / "tokens")]) == 2
    assert "token ids" in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_traceback(pair):
    command = [sys.executable, "-m", "p2pcache.cli", "status", "--socket", pair[0]["socket"]]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.wait(30) == 141
    assert process.stderr.read() == ""


def test_what_a_killed_node_left_behind_is_cleared_by_the_next(tmp_path: Path):
    with pytest.raises(AssertionError), node("a", tmp_path, free_port()) as a:
        process = next(p for p in Path("/proc").glob("[0-9]*/cmdline") if _is(p, a["socket"], "name=a"))
        os.kill(int(process.parent.name), signal.SIGKILL)
    left = Path(a["socket"])
    assert left.exists()
    os.utime(left, (0, 0))
    with node("b", tmp_path, free_port()):
        pass
    folder = left.parent.rename(tmp_path / "c")
    with node("c", tmp_path, free_port()) as c:
        assert [str(p) for p in folder.glob("*.sock")] == [c["socket"]]


def _is(cmdline: Path, socket_path: str, word: str) -> bool:
    try:
        text = cmdline.read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return False
    return word in text and f"runtime_dir={Path(socket_path).parent}" in text
