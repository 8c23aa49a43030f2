"""Our side of `bench.pull`: a node with bodies in a process of its own, and readers in this one."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Iterator

import torch

from p2pcache import FixedChunker, KVLayout, Namespace, NodeConfig
from p2pcache.api import Client
from p2pcache.core.membership import Member
from p2pcache.io.ports import Ticket, Transport
from p2pcache.node.wireform import body_from_wire
from p2pcache.runtime import NodeRuntime
from p2pcache.types import BodyInfo, ExactKey, Holder, Tier

MIB = 1 << 20
LAYOUT = KVLayout(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16")  # of an 8B model: 128 KiB a token
TOKENS = {256 << 10: 2, MIB: 8, 16 * MIB: 128, 64 * MIB: 512}
SETTINGS = {"host_bytes_max": 256 * MIB, "remote_lease_s": 600.0, "pull_bytes_in_flight_max": 256 * MIB}
TRANSPORTS = ("shm", "tcp")


class Ours:
    """The holder's process and one reader a transport. Use as a context."""

    def __enter__(self) -> Ours:
        with contextlib.ExitStack() as stack:
            self._readers = {}
            for name in TRANSPORTS:
                node = NodeRuntime.start(NodeConfig(name=f"reader-{name}", transports=(name,), **SETTINGS))
                stack.callback(node.close)
                self._readers[name] = node
            holder = stack.enter_context(_holder_process())
            print(
                json.dumps([n.member.to_wire() for n in self._readers.values()]),
                file=holder.stdin,
                flush=True,
            )
            said = json.loads(holder.stdout.readline())
            self._holder = Member.from_wire(said["member"])
            for node in self._readers.values():
                node.apply_view([node.member, self._holder])
            self._bodies = {b.nbytes: b for b in self._ask_for(map(bytes.fromhex, said["bodies"]))}
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def transport(self, name: str, nbytes: int, count: int, verify: bool = True) -> float:
        """Seconds a body, from a ticket to bytes in the slab; verified or not."""
        node = self._readers[name]
        return node.call(self._move(node, nbytes, count, verify), 120)

    def whole(self, name: str, nbytes: int, count: int) -> float:
        """Seconds until a body is served here: ticket, room, transfer, check, commit."""
        node = self._readers[name]
        return node.call(self._pull(node, self._bodies[nbytes], count), 120)

    def _ask_for(self, keys: Iterator[bytes]) -> list[BodyInfo]:
        node = self._readers[TRANSPORTS[0]]

        async def ask() -> list[BodyInfo]:
            leases = [await self._open(node, ExactKey(key)) for key in keys]
            return [body_from_wire(held) for *_, held in leases]

        return node.call(ask())

    async def _open(self, node: NodeRuntime, key: ExactKey) -> list:
        loop = asyncio.get_running_loop()
        request = {"bodies": [key], "transport": "tcp", "deadline_s": 5.0}
        reply = await node.node.ports.control.request(self._holder, "pull.open", request, loop.time() + 5)
        ((status, lease),) = reply["tickets"]
        if status != "ok":
            raise RuntimeError(f"no ticket: {status}")
        return lease

    async def _move(self, node: NodeRuntime, nbytes: int, count: int, verify: bool) -> float:
        body = self._bodies[nbytes]
        token, offset, generation, sums, meta, _ = await self._open(node, body.exact)
        ticket = Ticket(token, offset, nbytes, generation, tuple(sums), body.exact, meta)
        if not verify:
            ticket = dataclasses.replace(ticket, checksums=())
        (transport,) = node.node.ports.transports
        dest = node.node.ports.slab.view(0, nbytes)  # nothing is resident in a reader now
        started_s = time.perf_counter()
        for _ in range(count):
            await _moved(transport, self._holder, ticket, dest)
        seconds = (time.perf_counter() - started_s) / count
        loop = asyncio.get_running_loop()
        await node.node.ports.control.request(
            self._holder, "pull.close", {"tokens": [token]}, loop.time() + 5
        )
        return seconds

    async def _pull(self, node: NodeRuntime, body: BodyInfo, count: int) -> float:
        loop = asyncio.get_running_loop()
        holders = (Holder(self._holder.name, self._holder.incarnation, Tier.HOST),)
        taken_s = 0.0
        for _ in range(count):
            started_s = time.perf_counter()
            pulled = await node.node.puller.pull(body, holders, loop.time() + 30)
            taken_s += time.perf_counter() - started_s
            if pulled.slot is None:
                raise RuntimeError(f"a pull missed: {pulled.miss}")
            await node.node.residency.forget(body.exact)
            await node.node.publisher.flushed()  # what owners are told afterwards is not the pull's
        return taken_s / count


async def _moved(transport: Transport, peer: Member, ticket: Ticket, dest: memoryview) -> None:
    pull = transport.pull(peer, ticket, dest, lambda nbytes: None)
    await pull.done
    await pull.settled


@contextlib.contextmanager
def _holder_process() -> Iterator[subprocess.Popen]:
    command = [sys.executable, "-m", "bench.pull_ours"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.stdin.close()


def main() -> None:
    """The holder: stores a body of each size, says what it is, and serves until its input ends."""
    node = NodeRuntime.start(NodeConfig(name="holder", transports=TRANSPORTS, **SETTINGS))
    try:
        readers = [Member.from_wire(m) for m in json.loads(sys.stdin.readline())]
        node.apply_view([node.member, *readers])
        keys = []
        with Client(node.socket_path, 10.0) as client:
            cache = client.open(Namespace("bench", "weights", LAYOUT))
            for tokens in TOKENS.values():
                run = torch.arange(tokens) + 10_000 * tokens
                chunks = cache.chunks(run, FixedChunker(tokens))
                kv = torch.randn(LAYOUT.shape(tokens), dtype=torch.bfloat16)
                if not cache.store(chunks, kv).stored:
                    raise RuntimeError("the holder could not store")
                keys.append(chunks[0].exact.hex())
        print(json.dumps({"member": node.member.to_wire(), "bodies": keys}), flush=True)
        sys.stdin.read()
    finally:
        node.close()


if __name__ == "__main__":
    main()
