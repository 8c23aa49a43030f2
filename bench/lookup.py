"""What a lookup of a long prompt costs in a mesh of 16 nodes: `python -m bench.lookup`.

Four processes with four nodes each. A prompt of 512 chunks lies, one or two holders a chunk, on all nodes
but the one that is asked. What a node's lookup takes (from an engine's request to the packed reply, every
owner asked) stands beside the least that any such exchange takes here: as many bare zmq and msgpack trips
there and back, of the same payloads, between the same processes. And beside one Ray actor call an owner.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgpack
import torch
import zmq

from bench.report import Report, finish, paired, parser, quantile
from p2pcache import KVLayout, Namespace, NodeConfig
from p2pcache.api import Client
from p2pcache.core.chunking import ContentChunker
from p2pcache.core.keys import chunk_keys
from p2pcache.core.membership import Member
from p2pcache.core.records import pack_asked, pack_starts
from p2pcache.node.engines import EngineDesk
from p2pcache.node.node import Node
from p2pcache.node.session import Session
from p2pcache.runtime import NodeRuntime

PROCESSES, NODES_EACH = 4, 4
CHUNKS = (512, 24)
"""Of a long prompt, and of one as the Serve router asks for (whose budget is 2 ms)."""
BUDGET_S = 30.0
LOOKUPS = 20  # of which the median is one figure of a pair
PAIRS = 15
LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=4, dtype="uint8")  # tiny: no body moves here
NAMESPACE = Namespace("bench", "weights", LAYOUT)


def main() -> int:
    made = parser(__doc__.split("\n")[0], "lookup")
    made.add_argument("--no-ray", action="store_true", help="leave the comparison with Ray out")
    arguments = made.parse_args()
    report = Report("lookup")
    with mesh() as hosts:
        tokens = prompt(CHUNKS[0])
        spread(hosts, tokens)
        with Client(hosts[0].sockets[0], BUDGET_S) as client:
            node_s = measure(report, hosts[0], client, tokens, CHUNKS[0])
            payloads = hosts[0].ask("payloads")
            for chunks in CHUNKS[1:]:
                measure(report, hosts[0], client, tokens, chunks)
    ray_s, why = ([], "--no-ray") if arguments.no_ray else ray_calls_s(payloads)
    ratio = statistics.median(ray_s) / statistics.median(node_s) if ray_s else None
    show(report, "Ray actor calls", CHUNKS[0], ray_s)
    report.ratio("lookup_vs_ray_calls", ratio, ">= 8", why)
    finish(report, arguments.json)
    return 0


def prompt(chunks: int) -> torch.Tensor:
    """Tokens that the default chunker cuts into exactly so many chunks."""
    run = torch.randint(0, 50_000, (chunks * 400,), generator=torch.Generator().manual_seed(1))
    spans = ContentChunker().spans(run.numpy().astype("uint32"))
    return run[: spans[chunks - 1][1]]


def spread(hosts: list[Host], tokens: torch.Tensor) -> None:
    """Have the prompt's chunks stored: each by one node, every second one by another one too."""
    nodes = [(h, i) for h in hosts for i in range(NODES_EACH)][1:]  # not by the one that is asked
    for n, (host, index) in enumerate(nodes):
        other = (n + 1) % len(nodes)
        host.ask("store", node=index, tokens=tokens.tolist(), takes=[n, other], of=len(nodes))
    for host in hosts:
        host.ask("flush")


def show(report: Report, what: str, chunks: int, seconds: Sequence[float], note: str = "") -> None:
    if seconds:
        p50_ms, p99_ms = 1e3 * statistics.median(seconds), 1e3 * quantile(seconds, 0.99)
        report.row(chunks=chunks, what=what, p50_ms=p50_ms, p99_ms=p99_ms, note=note)


def measure(report: Report, host: Host, client: Client, tokens: torch.Tensor, chunks: int) -> list[float]:
    """The rows of one prompt, and its ratios. Returns the seconds of the node's lookups."""
    run = tokens[: ContentChunker().spans(tokens.numpy().astype("uint32"))[chunks - 1][1]]
    cache = client.open(NAMESPACE)
    keys = cache.chunks(run)
    assert len(keys) == chunks
    found = cache.lookup(run, budget_s=BUDGET_S)
    assert all(c.body is not None and c.peer for c in found.chunks), "a chunk was not found on a peer"
    assert {len(c.found[0].holders) for c in found.chunks} == {1, 2}
    starts = pack_starts([k.start for k in keys])
    asked = host.ask("prepare", keys=pack_asked(keys).hex(), starts=starts.hex())
    node_s: list[float] = []
    bare_s: list[float] = []

    def one(do: str, out: list[float]) -> float:
        out += (seconds := host.ask(do, count=LOOKUPS))
        return statistics.median(seconds)

    _, _, ratio = paired(lambda: one("lookup", node_s), lambda: one("bare", bare_s), PAIRS)
    api_s, keys_s = [], []
    for _ in range(LOOKUPS * 3):
        started_s = time.perf_counter()
        chunk_keys(NAMESPACE.key(), found.tokens, ContentChunker().spans(found.tokens))
        keys_s.append(time.perf_counter() - started_s)
        api_s.append(cache.lookup(run, budget_s=BUDGET_S).seconds)
    engine_s = [api - keys - statistics.median(node_s) for api, keys in zip(api_s, keys_s, strict=True)]
    parts = host.ask("parts", count=LOOKUPS * 3)
    said = f"{asked['rpcs']} requests, {asked['request_bytes']:,} B out, {asked['reply_bytes']:,} B back"
    show(report, "the node's lookup", chunks, node_s, said)
    show(report, "  its requests", chunks, parts["rpc_s"], "until every owner has answered")
    show(report, "  its own part", chunks, parts["rest_s"], "looking at home, adding up, the plan, packing")
    show(report, "bare zmq", chunks, bare_s, "the same payloads, one thread that polls")
    show(report, "Cache.lookup", chunks, api_s, "all of it, from an engine's process")
    show(report, "  its keys", chunks, keys_s)
    show(report, "  the engine's end", chunks, engine_s, "socket and objects: the rest")
    suffix = "" if chunks == CHUNKS[0] else f"_{chunks}_chunks"
    report.ratio(f"lookup_vs_bare_zmq{suffix}", ratio, "" if suffix else "<= 2")
    report.ratio(f"rpcs_per_owner{suffix}", asked["rpcs"] / asked["owners"], "<= 1")
    return node_s


def ray_calls_s(payloads: list[list[str]]) -> tuple[list[float], str]:
    """Seconds of one actor call an owner, all at once, actors placed as the nodes are; or why not."""
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # Ray's name for: stay on loopback
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        return [], "Ray is not installed"

    class Owner:
        def __init__(self, replies: list[Any]):
            self.replies = replies

        def lookup(self, index: int, request: Any) -> Any:
            return self.replies[index]

    ray.init(address="local", num_cpus=PROCESSES, include_dashboard=False, log_to_driver=False)
    try:
        pairs = [tuple(msgpack.unpackb(bytes.fromhex(raw)) for raw in pair) for pair in payloads]
        replies = [reply for _, reply in pairs]
        actor = ray.remote(Owner)
        actors = [actor.remote(replies) for _ in range(PROCESSES)]
        seconds = []
        for _ in range(LOOKUPS * 5):
            started_s = time.perf_counter()
            ray.get([actors[i % PROCESSES].lookup.remote(i, ask) for i, (ask, _) in enumerate(pairs)])
            seconds.append(time.perf_counter() - started_s)
        return seconds[LOOKUPS:], ""
    finally:
        ray.shutdown()


# -- one process of nodes --------------------------------------------------------------------------


class Host:
    """A process with some nodes, and as many bare zmq servers; it answers lines of JSON."""

    def __init__(self, first: int, folder: str):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.lookup", "--nodes", str(first), folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.members: list[dict[str, Any]] = []
        self.sockets: list[str] = []
        self.bare: list[str] = []

    def ready(self) -> Host:
        said = self._read()
        self.members, self.sockets, self.bare = said["members"], said["sockets"], said["bare"]
        return self

    def ask(self, do: str, **more: Any) -> Any:
        self.process.stdin.write(json.dumps({"do": do, **more}).encode() + b"\n")
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process of nodes ended with {self.process.wait()}")
        return json.loads(line)


@contextlib.contextmanager
def mesh() -> Iterator[list[Host]]:
    with tempfile.TemporaryDirectory(prefix="p2pcache-bench-") as folder:
        hosts = [Host(p * NODES_EACH, folder) for p in range(PROCESSES)]
        try:
            for host in hosts:
                host.ready()
            members = [m for h in hosts for m in h.members]
            bare = {m["name"]: b for h in hosts for m, b in zip(h.members, h.bare, strict=True)}
            for host in hosts:
                host.ask("view", members=members, bare=bare)
            for host in hosts:
                host.ask("flush")
            yield hosts
        finally:
            for host in hosts:
                host.process.kill()
                host.process.wait()


class Nodes:
    """What a process of nodes does when asked. The first of its nodes is the one that looks up."""

    def __init__(self, first: int, folder: str):
        settings = {"runtime_dir": folder, "host_bytes_max": 64 << 20, "transports": ("shm", "tcp")}
        self.nodes = [
            NodeRuntime.start(NodeConfig.of(settings | {"name": f"n{first + i:02}"}))
            for i in range(NODES_EACH)
        ]
        self.context = zmq.Context()
        self.bare = [self._serve_bare() for _ in self.nodes]
        self.bare_at: dict[str, str] = {}
        self.replies: dict[bytes, Any] = {}  # bare request -> its reply
        self.asks: list[tuple[zmq.Socket, Any, bytes]] = []
        self.lookup_once: Callable[[], Any]

    def known_as(self) -> dict[str, Any]:
        return {
            "members": [n.member.to_wire() for n in self.nodes],
            "sockets": [n.socket_path for n in self.nodes],
            "bare": self.bare,
        }

    def do_view(self, members: list[dict[str, Any]], bare: dict[str, str]) -> None:
        self.bare_at = bare
        for node in self.nodes:
            node.apply_view([Member.from_wire(m) for m in members])

    def do_flush(self) -> None:
        for node in self.nodes:
            node.flush()

    def do_store(self, node: int, tokens: list[int], takes: list[int], of: int) -> None:
        """Store every `of`th chunk of the prompt, and every other one of those that its neighbour stores."""
        with Client(self.nodes[node].socket_path, BUDGET_S) as client:
            cache = client.open(NAMESPACE)
            mine, neighbours = takes
            keys = cache.chunks(tokens)
            parts = keys[mine::of] + keys[neighbours :: 2 * of]
            assert cache.store(parts, lambda chunk, out: out.zero_()).published(BUDGET_S)

    def do_prepare(self, keys: str, starts: str) -> dict[str, Any]:
        """Look up once, and keep what was said to whom for the bare exchange."""
        runtime = self.nodes[0]
        node, lookups = runtime.node, runtime.node.ports.lookups
        request = {
            "chunks": bytes.fromhex(keys),
            "starts": bytes.fromhex(starts),
            "content_reuse": True,
            "everywhere": False,
            "deadline_s": BUDGET_S,
            "bytes_within_s": None,
        }

        session = runtime.call(_open_session(node))

        async def lookup() -> Any:
            return await EngineDesk(node).handle(session, "lookup", request)

        said: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
        plain = lookups.ask

        async def listening(asked: Sequence[tuple[Member, bytes]], by_s: float) -> Any:
            answers = await plain(asked, by_s)
            for (peer, contents), (table, unknown) in zip(asked, answers, strict=True):
                said.append((peer.name, {"contents": contents}, {"found": table, "unknown": unknown}))
            return answers

        lookups.ask = listening
        runtime.call(lookup())
        del lookups.ask
        self.lookup_once = lookup
        for socket, *_ in self.asks:
            socket.close(0)
        self.asks = []
        for name, body, reply in said:
            socket = self.context.socket(zmq.DEALER)
            socket.connect(self.bare_at[name])
            self.asks.append((socket, body, msgpack.packb(reply)))
        for socket, _, reply in self.asks:  # the server learns what it shall answer
            socket.send_multipart([b"learn", reply])
        return {
            "owners": len({name for name, _, _ in said}),
            "rpcs": len(said),
            "request_bytes": sum(len(msgpack.packb(r)) for _, r, _ in said),
            "reply_bytes": sum(len(r) for _, _, r in self.asks),
        }

    def do_payloads(self) -> list[list[str]]:
        return [[msgpack.packb(request).hex(), reply.hex()] for _, request, reply in self.asks]

    def do_lookup(self, count: int) -> list[float]:
        async def run() -> list[float]:
            return [await _timed(self.lookup_once) for _ in range(count)]

        return self.nodes[0].call(run(), BUDGET_S)

    def do_parts(self, count: int) -> dict[str, list[float]]:
        """Of some lookups the time until all owners have answered, and the rest."""
        owners = self.nodes[0].node.owners
        plain, rpc_s = owners.ask, []

        async def timed(*arguments: Any) -> Any:
            started_s = time.perf_counter()
            try:
                return await plain(*arguments)
            finally:
                rpc_s.append(time.perf_counter() - started_s)

        owners.ask = timed
        all_s = self.do_lookup(count)
        del owners.ask
        return {"rpc_s": rpc_s, "rest_s": [whole - rpc for whole, rpc in zip(all_s, rpc_s, strict=True)]}

    def do_bare(self, count: int) -> list[float]:
        """The same requests and replies from one thread that polls: the fastest way that was found."""
        poller = zmq.Poller()
        for socket, *_ in self.asks:
            poller.register(socket, zmq.POLLIN)
        seconds = []
        for _ in range(count):
            started_s = time.perf_counter()
            for socket, request, _ in self.asks:
                socket.send(msgpack.packb(request))
            left = len(self.asks)
            while left:
                for socket, _ in poller.poll():
                    msgpack.unpackb(socket.recv())
                    left -= 1
            seconds.append(time.perf_counter() - started_s)
        return seconds

    def _serve_bare(self) -> str:
        router = self.context.socket(zmq.ROUTER)
        port = router.bind_to_random_port("tcp://127.0.0.1")

        def serve() -> None:
            replies: dict[bytes, Any] = {}  # who asks -> what to answer
            while True:
                who, *frames = router.recv_multipart()
                if len(frames) == 2:
                    replies[who] = msgpack.unpackb(frames[1])
                    continue
                msgpack.unpackb(frames[0])
                router.send_multipart([who, msgpack.packb(replies[who])])

        threading.Thread(target=serve, name="bare", daemon=True).start()
        return f"tcp://127.0.0.1:{port}"


async def _open_session(node: Node) -> Session:
    return node.open_session()


async def _timed(do: Callable[[], Any]) -> float:
    started_s = time.perf_counter()
    await do()
    return time.perf_counter() - started_s


def serve_nodes(first: int, folder: str) -> None:
    torch.set_num_threads(1)
    nodes = Nodes(first, folder)
    print(json.dumps(nodes.known_as()), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(getattr(nodes, "do_" + asked.pop("do"))(**asked)), flush=True)
    os._exit(0)  # the threads of the bare servers never end


def _nodes_arguments() -> argparse.Namespace | None:
    """`--nodes FIRST FOLDER`: this process is one of nodes."""
    made = argparse.ArgumentParser(add_help=False)
    made.add_argument("--nodes", nargs=2)
    known, _ = made.parse_known_args()
    return known if known.nodes else None


if __name__ == "__main__":
    if (inside := _nodes_arguments()) is not None:
        serve_nodes(int(inside.nodes[0]), str(Path(inside.nodes[1])))
    else:
        sys.exit(main())
