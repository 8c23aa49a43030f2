"""A local hit: 512 chunks that lie in this host's slab, from an engine's process to its node and back.

The node runs in a process of its own, as in a cluster. One round is what an engine does with a prompt of
128k tokens: `lookup` (cut, name, ask), `fetch` (leases), the tensor `.kv` of every chunk, `release`.

That no byte of KV is copied is checked and not assumed: each tensor's address must lie within this process's
mapping of the slab's memfd as the kernel lists it, and the bytes that crossed the socket are counted.

The floor is what remains without the cache: three bare round trips over a unix socket with as many bytes
to an asyncio peer in another process, naming the chunks, and one `torch.as_strided` a chunk.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from bench.chunking import prose
from bench.report import Report, finish, parser, quantile
from p2pcache import KVLayout, Namespace, NodeConfig
from p2pcache.api import Cache, Client
from p2pcache.core.chunking import ContentChunker
from p2pcache.io.link import Link
from p2pcache.runtime import NodeRuntime
from p2pcache.types import Match, Source

CHUNKS = 512
ROUNDS = 101
LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=64, dtype="bfloat16")  # 1 KiB a token
SLAB_BYTES = 256 << 20
STEPS = ("lookup", "fetch", "kv", "release")


def serve_node(folder: str) -> None:
    """The node's process: until its standard input ends."""
    config = NodeConfig(name="node", host_bytes_max=SLAB_BYTES, runtime_dir=folder)
    node = NodeRuntime.start(config)
    node.apply_view([node.member])
    print(node.socket_path, flush=True)
    sys.stdin.read()
    node.close()


def serve_echo(path: str) -> None:
    """The floor's peer: answers a message `u32 length, u32 wanted` with `wanted` bytes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                head = await reader.readexactly(8)
                await reader.readexactly(int.from_bytes(head[:4], "little"))
                writer.write(bytes(int.from_bytes(head[4:], "little")))

    async def serve() -> None:
        server = await asyncio.start_unix_server(answer, path)
        print(path, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        server.close()

    asyncio.run(serve())


@contextlib.contextmanager
def process(role: str, where: str) -> Iterator[str]:
    """A process of this module; yields what it says first."""
    command = [sys.executable, "-m", "bench.local_hit", role, where]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdin is not None
        try:
            yield child.stdout.readline().strip()
        finally:
            child.stdin.close()
            child.wait(30)


def slab_mappings() -> list[tuple[int, int]]:
    """Where this process has mapped a slab, as the kernel says: [start, end)."""
    with open("/proc/self/maps") as file:
        spans = [line.split()[0].split("-") for line in file if "memfd:p2pcache-slab" in line]
    return [(int(start, 16), int(end, 16)) for start, end in spans]


def one_round(cache: Cache, tokens: torch.Tensor) -> tuple[dict[str, float], list[torch.Tensor]]:
    """Seconds of each step, and the tensors (whose leases have ended)."""
    at = [time.perf_counter()]
    lookup = cache.lookup(tokens)
    at.append(time.perf_counter())
    fetched = cache.fetch(lookup)
    at.append(time.perf_counter())
    tensors = [c.kv for c in fetched]
    at.append(time.perf_counter())
    fetched.release()
    at.append(time.perf_counter())
    assert all(t is not None for t in tensors), "a chunk was missed"
    assert all(c.match is Match.EXACT and c.source is Source.LOCAL for c in lookup.chunks)
    return {name: end - start for name, start, end in zip(STEPS, at, at[1:], strict=False)}, tensors


def count_copies(cache: Cache, tokens: torch.Tensor, kv: torch.Tensor) -> int:
    """Chunks whose tensor lies outside the mapped slab. Their bytes are compared with what was stored."""
    copies = 0
    mappings = slab_mappings()
    with cache.fetch(cache.lookup(tokens)) as fetched:
        for c in fetched:
            first = c.kv.data_ptr()
            end = first + c.kv.numel() * c.kv.element_size()
            inside = any(low <= first and end <= high for low, high in mappings)
            copies += not (inside and c.kv.is_contiguous())
            assert torch.equal(c.kv, kv[:, :, c.found.keys.start : c.found.keys.stop])
    return copies


def floor_s(path: str, traffic: list[tuple[int, int]]) -> float:
    """Seconds for bare round trips of so many bytes there and back, one after the other."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        messages = [
            (there.to_bytes(4, "little") + back.to_bytes(4, "little") + bytes(there), back)
            for there, back in traffic
        ]
        seconds = []
        for _ in range(ROUNDS):
            started_s = time.perf_counter()
            for message, back in messages:
                sock.sendall(message)
                while back:
                    back -= len(sock.recv(back))
            seconds.append(time.perf_counter() - started_s)
    return quantile(seconds, 0.5)


def traffic_of(link: Link, call: Callable[[], object]) -> tuple[int, int]:
    before = link.bytes_sent, link.bytes_received
    call()
    return link.bytes_sent - before[0], link.bytes_received - before[1]


def measure(report: Report, cache: Cache, tokens: torch.Tensor, kv: torch.Tensor, echo: str) -> None:
    copies = count_copies(cache, tokens, kv)
    rounds = [one_round(cache, tokens)[0] for _ in range(ROUNDS)]
    link = cache.client.link()
    lookup = cache.lookup(tokens)
    held: list[object] = []
    traffic = {
        "lookup": traffic_of(link, lambda: cache.lookup(tokens)),
        "fetch": traffic_of(link, lambda: held.append(cache.fetch(lookup))),
        "release": traffic_of(link, lambda: held.pop().release()),
    }
    for name in STEPS:
        seconds = [r[name] for r in rounds]
        there, back = traffic.get(name, (0, 0))
        _row(report, name, quantile(seconds, 0.5), quantile(seconds, 0.99), (there + back) / CHUNKS)
    whole = [sum(r.values()) for r in rounds]
    crossed = sum(sum(t) for t in traffic.values()) / CHUNKS
    _row(report, "in all", quantile(whole, 0.5), quantile(whole, 0.99), crossed)

    slab = torch.frombuffer(link.slab.view(0, SLAB_BYTES // 2), dtype=torch.bfloat16)
    naming, views = [], []
    for _ in range(ROUNDS):
        started_s = time.perf_counter()
        cache.chunks(tokens)
        naming.append(time.perf_counter() - started_s)
        started_s = time.perf_counter()
        for _ in range(CHUNKS):
            torch.as_strided(slab, (2, 2, 256, 2, 64), (65536, 32768, 128, 64, 1), 0)
        views.append(time.perf_counter() - started_s)
    bare_s, naming_s, views_s = (
        floor_s(echo, list(traffic.values())),
        quantile(naming, 0.5),
        quantile(views, 0.5),
    )
    _row(report, "floor: bare round trips", bare_s)
    _row(report, "floor: naming the chunks", naming_s)
    _row(report, "floor: one as_strided a chunk", views_s)
    report.ratio("copies", copies, "== 0")
    report.ratio("p50_us_per_chunk", quantile(whole, 0.5) / CHUNKS * 1e6)
    report.ratio("p50_us_in_all", quantile(whole, 0.5) * 1e6)
    report.ratio("socket_bytes_per_chunk", crossed)
    report.ratio("kv_bytes_per_chunk", kv.numel() * kv.element_size() / CHUNKS)
    report.ratio("vs_floor", quantile(whole, 0.5) / (bare_s + naming_s + views_s))


def _row(report: Report, step: str, p50_s: float, p99_s: float | None = None, crossed: float = 0.0) -> None:
    report.row(
        step=step,
        p50_us=p50_s * 1e6,
        p99_us=None if p99_s is None else p99_s * 1e6,
        p50_us_per_chunk=p50_s / CHUNKS * 1e6,
        socket_bytes_per_chunk=crossed or None,
    )


def main() -> None:
    if sys.argv[1:2] == ["node"]:
        return serve_node(sys.argv[2])
    if sys.argv[1:2] == ["echo"]:
        return serve_echo(sys.argv[2])
    args = parser(__doc__ or "", "local_hit").parse_args()
    run = prose(2 * CHUNKS * ContentChunker().average_tokens)
    count = ContentChunker().spans(run)[CHUNKS - 1][1]
    tokens = torch.from_numpy(run[:count].astype("int64"))
    kv = torch.randn(LAYOUT.shape(count)).to(torch.bfloat16)
    report = Report("local_hit")
    with (
        tempfile.TemporaryDirectory(prefix="p2pcache-") as folder,
        process("node", folder) as node,
        process("echo", str(Path(folder) / "echo")) as echo,
        Client(node, timeout_s=10.0) as client,
    ):
        cache = client.open(Namespace("bench", "0", LAYOUT))
        stored = cache.store(cache.chunks(tokens), kv)
        assert stored.stored == CHUNKS, f"not stored: {stored}"
        measure(report, cache, tokens, kv, echo)
    finish(report, args.json)


if __name__ == "__main__":
    main()
