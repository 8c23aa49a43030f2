"""Nodes in processes of their own, on loopback or at the two ends of a link of a given rate.

The link is a veth pair between two network namespaces with a token bucket (`tc tbf`) at each end, which
needs root. As a program (`python -m bench.shaped SETTINGS`) this file is such a node: it prints how it is
known as a line of JSON, then follows the Views it is told, a line each, until its input ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from p2pcache import NodeConfig
from p2pcache.core.membership import Member
from p2pcache.runtime import NodeRuntime

REPOSITORY = Path(__file__).parents[1]
_PATIENCE_S = 60.0
_BURST_S = 0.002  # what a token bucket lets through at once, in seconds of its rate


class Link:
    """Two namespaces, `ends`, with an address each, and the rate between them."""

    def __init__(self, prefix: str):
        self.ends = (f"{prefix}-a", f"{prefix}-b")
        self.addresses = ("10.213.7.1", "10.213.7.2")  # in namespaces of their own: they meet nobody's

    def shape(self, gbit_per_s: float) -> None:
        """Set the rate, both ways."""
        burst = max(int(gbit_per_s * 1e9 / 8 * _BURST_S), 128 << 10)
        for end in self.ends:
            rate = f"{gbit_per_s * 1000:g}mbit"
            tbf = f"tbf rate {rate} burst {burst} latency 50ms".split()
            _run("tc", "-n", end, "qdisc", "replace", "dev", "p2pbench", "root", *tbf)


def why_no_link() -> str:
    """What keeps this process from making a link; empty where nothing does."""
    lacking = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if lacking:
        return f"{' and '.join(lacking)} not installed"
    return "" if os.geteuid() == 0 else "a link of a given rate needs root"


@contextlib.contextmanager
def link() -> Iterator[Link]:
    """A link, unshaped at first; its namespaces go with it."""
    made = Link(f"p2pbench-{os.getpid()}")
    try:
        for end in made.ends:
            _run("ip", "netns", "add", end)
        a, b = made.ends
        peer = ["peer", "name", "p2pbench", "netns", b]
        _run("ip", "-n", a, "link", "add", "p2pbench", "type", "veth", *peer)
        for end, address in zip(made.ends, made.addresses, strict=True):
            _run("ip", "-n", end, "addr", "add", f"{address}/24", "dev", "p2pbench")
            for device in ("lo", "p2pbench"):
                _run("ip", "-n", end, "link", "set", device, "up")
        yield made
    finally:
        for end in made.ends:
            subprocess.run(["ip", "netns", "delete", end], check=False, capture_output=True)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


class NodeProcess:
    """A node in a process of its own; `namespace` is that of a link's end, or empty for here."""

    def __init__(self, settings: dict[str, Any], namespace: str = ""):
        command = [sys.executable, "-m", "bench.shaped", json.dumps(settings)]
        if namespace:
            command = ["ip", "netns", "exec", namespace, *command]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, cwd=REPOSITORY
        )
        said = self._hear()
        self.member = Member.from_wire(said["member"])
        self.socket_path: str = said["socket"]

    def follow(self, members: Sequence[Member]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([m.to_wire() for m in members]) + "\n")
        self._hear()

    def _hear(self) -> Any:
        stdout = self._process.stdout
        assert stdout is not None
        if not select.select([stdout], [], [], _PATIENCE_S)[0]:
            raise TimeoutError(f"a node said nothing for {_PATIENCE_S:g} s")
        return json.loads(stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()


@contextlib.contextmanager
def mesh(nodes: Sequence[tuple[dict[str, Any], str]]) -> Iterator[list[NodeProcess]]:
    """Nodes of (settings, namespace) that all know each other."""
    with contextlib.ExitStack() as stack:
        started = []
        for settings, namespace in nodes:
            started.append(NodeProcess(settings, namespace))
            stack.callback(started[-1].close)
        members = [node.member for node in started]
        for _ in range(2):  # again, so that each hears of all once all of them listen to all
            for node in started:
                node.follow(members)
        yield started


def main(settings: dict[str, Any]) -> None:
    node = NodeRuntime.start(NodeConfig.of(settings))
    print(json.dumps({"member": node.member.to_wire(), "socket": node.socket_path}), flush=True)
    for line in sys.stdin:
        node.apply_view([Member.from_wire(m) for m in json.loads(line)])
        node.flush()
        print("{}", flush=True)
    node.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
