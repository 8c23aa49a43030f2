"""Nodes and engines in processes of their own, to be killed, frozen and restarted by tests.

As a program (`python -m tests.fault.node_process '{"name": "a"}'`) this file is a node: it prints how
it is known as one line of JSON, then answers one line of JSON with another until its input ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from p2pcache import KVLayout, Namespace, NodeConfig
from p2pcache.api import Cache, Client
from p2pcache.core.chunking import FixedChunker
from p2pcache.core.membership import Member
from p2pcache.node.report import status
from p2pcache.runtime import NodeRuntime

REPOSITORY = Path(__file__).parents[2]
PATIENCE_S = 30.0  # for what should take milliseconds, on a loaded machine
MIB = 1 << 20
LAYOUT = KVLayout(layers=4, kv_heads=2, head_dim=16, dtype="float32")  # 1 KiB a token
NAMESPACE = Namespace("model", "weights", LAYOUT)


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.arange(count) + seed * 1_000_003


def kv_of(run: torch.Tensor, layout: KVLayout = LAYOUT) -> torch.Tensor:
    """The KV that every process of a test computes for a run of tokens; each token's is its own."""
    shape = torch.arange(layout.layers * 2 * layout.kv_heads * layout.head_dim, dtype=torch.float32)
    shape = shape.view(layout.layers, 2, 1, layout.kv_heads, layout.head_dim)
    return (run.to(torch.float32).view(1, 1, -1, 1, 1) + shape / 1024).contiguous()


def until(true: Callable[[], bool], what: str, within_s: float = PATIENCE_S) -> None:
    """Wait for another process or thread that gives no event."""
    end_s = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end_s, f"not within {within_s} s: {what}"
        time.sleep(0.01)


def check(node: NodeRuntime) -> dict[str, Any]:
    """A node's status, once its tier and its sessions have been found consistent."""

    async def validated() -> dict[str, Any]:
        node.node.residency.tier.validate()
        for session in node.node.sessions:
            session.validate()
        return status(node.node)

    return node.call(validated())


def at_rest(status: dict[str, Any]) -> bool:
    """Nothing is leased and nothing is under way; what is taken is resident."""
    return not (status["leases"] or status["tickets"] or status["pulls_under_way"] or status["unfinished"])


def state(node: NodeRuntime) -> dict[str, Any]:
    """`check`, and the number of slots that are being written or in quarantine."""
    return check(node) | {"unfinished": len(node.node.residency.tier._others)}


class Lines:
    """A process that talks in lines of JSON; every wait is bounded."""

    def __init__(self, *command: str):
        environ = dict(os.environ, PYTHONPATH=f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}")
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY, env=environ
        )
        self._ready = selectors.DefaultSelector()
        self._ready.register(self.process.stdout, selectors.EVENT_READ)
        self._buffer = b""

    def read(self, within_s: float = 2 * PATIENCE_S) -> Any:
        end_s = time.monotonic() + within_s
        while b"\n" not in self._buffer:
            assert self._ready.select(end_s - time.monotonic()), f"the process said nothing for {within_s} s"
            part = os.read(self.process.stdout.fileno(), 1 << 16)
            assert part, f"the process ended with {self.process.wait(PATIENCE_S)}"
            self._buffer += part
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)

    def write(self, message: Any) -> None:
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def ask(self, do: str, **more: Any) -> Any:
        self.write({"do": do, **more})
        return self.read()

    def freeze(self) -> None:
        """Stop it, and wait until it has."""
        os.kill(self.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End it at once, and let go of its pipes. Idempotent."""
        self.process.kill()
        self.process.wait()
        self._ready.close()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()


class NodeProcess(Lines):
    """A node in a process of its own. `ready` waits until it is up."""

    def __init__(self, settings: dict[str, Any]):
        super().__init__(sys.executable, "-m", "tests.fault.node_process", json.dumps(settings))
        self.member: Member
        self.socket_path: str

    def ready(self) -> NodeProcess:
        said = self.read()
        self.member, self.socket_path = Member.from_wire(said["member"]), said["socket"]
        return self

    def store(self, count: int, chunk: int, seed: int = 0) -> None:
        """Have an engine beside the node store `kv_of(tokens(count, seed))`, and publish it."""
        assert self.ask("store", count=count, chunk=chunk, seed=seed) == {"stored": -(-count // chunk)}

    def state(self) -> dict[str, Any]:
        return self.ask("state")


class EngineProcess(Lines):
    """Inline code of an engine. It gets `client`, `say(value)`, `hear()` and this module's names."""

    PRELUDE = """
import json, sys, threading
import torch
from tests.fault.node_process import *
from p2pcache.api import Client
client = Client(sys.argv[1], timeout_s=PATIENCE_S)
def say(value): print(json.dumps(value), flush=True)
def hear(): return json.loads(sys.stdin.readline())
"""

    def __init__(self, socket_path: str, code: str):
        super().__init__(sys.executable, "-c", self.PRELUDE + code, socket_path)


@contextlib.contextmanager
def mesh(
    folder: Path, here: list[dict[str, Any]], elsewhere: list[dict[str, Any]]
) -> Iterator[tuple[list[NodeRuntime], list[NodeProcess]]]:
    """Nodes in this process and in others, who all know each other; nothing is left at its end."""
    folder.chmod(0o700)
    others = [NodeProcess({"runtime_dir": str(folder), **settings}) for settings in elsewhere]
    mine: list[NodeRuntime] = []
    try:
        for settings in here:
            mine.append(NodeRuntime.start(NodeConfig.of({"runtime_dir": str(folder), **settings})))
        for other in others:
            other.ready()
        share_view(mine, others)
        yield mine, others
        for node in mine:
            until(lambda node=node: at_rest(state(node)), f"{node.member.name} at rest: {state(node)}")
    finally:
        for other in others:
            other.kill()
        for node in mine:
            node.close()


def share_view(mine: list[NodeRuntime], others: list[NodeProcess]) -> None:
    """Tell all of them who is in the mesh, and wait until each knows what the others hold."""
    members = [n.member for n in (*mine, *others)]
    for node in mine:
        node.apply_view(members)
    for other in others:
        other.ask("view", members=[m.to_wire() for m in members])
    for node in mine:
        node.flush()
    for other in others:
        other.ask("flush")


# The other process.


def _answer(node: NodeRuntime, cache: Cache, asked: dict[str, Any]) -> dict[str, Any]:
    match asked.pop("do"):
        case "view":
            node.apply_view([Member.from_wire(m) for m in asked["members"]])
        case "flush":
            node.flush()
        case "store":
            run = tokens(asked["count"], asked["seed"])
            chunks = cache.chunks(run, FixedChunker(asked["chunk"]))
            stored = cache.store(chunks, kv_of(run))
            assert stored.published(PATIENCE_S), stored
            return {"stored": stored.stored}
        case "state":
            return {k: v for k, v in state(node).items() if k != "nvme"}
        case other:
            raise ValueError(other)
    return {}


def main(settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    node = NodeRuntime.start(NodeConfig.of(settings))
    client = Client(node.socket_path, PATIENCE_S)
    cache = client.open(NAMESPACE)
    print(json.dumps({"member": node.member.to_wire(), "socket": node.socket_path}), flush=True)
    for line in sys.stdin:
        print(json.dumps(_answer(node, cache, json.loads(line))), flush=True)
    client.close()
    node.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
