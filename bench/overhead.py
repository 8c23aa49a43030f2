"""Memory of the metadata: what a node takes for what it knows, holds and is asked for, bodies apart.

Every figure is the growth of a fresh process's resident memory, through the objects that a node is made of.
`python -m bench.overhead --json FILE` runs all; each part is a process of its own (`--part`).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.report import Report, finish, parser
from p2pcache.config import NodeConfig
from p2pcache.core import wire
from p2pcache.core.keys import ChunkKeys, Namespace
from p2pcache.core.layout import KVLayout
from p2pcache.core.membership import Member, View
from p2pcache.types import BodyInfo, Found, Holder, Match, Provenance, Source, Tier

KNOWN = 1_000_000
RESIDENT = 100_000
TRACED = 20_000
FLOOD, FLOOD_STEP = 200_000, 500
FLOOD_S = 12.0
CROWD, CROWD_STEP = 8, 8_000
LAYERS = 30  # of SmolLM2-135M: a checksum of 8 bytes each
BODY_BYTES = 3840  # 128 bytes a layer
BATCH = 2000
MIB = 1 << 20


def memory() -> dict[str, int]:
    """This process's resident bytes: `VmRSS` in all, `RssShmem` of the slab, `VmHWM` the peak, and so on."""
    return memory_of(os.getpid())


def memory_of(pid: int) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    rows = (line.split() for line in lines if line.startswith(("VmRSS", "VmHWM", "Rss")))
    return {name.rstrip(":"): int(kib) << 10 for name, kib, _ in rows}


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


# -- the directory ---------------------------------------------------------------------------------


def directory() -> dict[str, float]:
    """A shard that has been told of KNOWN bodies, one holder each, in messages as they come off the wire."""
    from p2pcache.node.shard import Shard

    shard = Shard("owner", NodeConfig(), time.monotonic)
    shard.on_view(View.of([Member("holder", 7, "", "", {})]))

    def tell(first: int) -> None:
        bodies = [[_wire_body(i), int(Tier.HOST), i + 1] for i in range(first, first + BATCH)]
        body = {"bodies": bodies, "resync": None}
        raw = wire.encode(wire.Message("q", 1, "directory.publish", body, 1, "holder", 7))
        told = shard.handle("directory.publish", wire.decode(raw).body, "holder", 7)
        assert told["accepted"] == BATCH

    tell(0)
    gc.collect()
    before, table = memory()["VmRSS"], shard.directory.nbytes
    started_s = time.perf_counter()
    for first in range(BATCH, BATCH + KNOWN, BATCH):
        tell(first)
    seconds = time.perf_counter() - started_s
    gc.collect()
    grown = memory()["VmRSS"] - before
    return {
        "rss_bytes": grown / KNOWN,
        "table_bytes": (shard.directory.nbytes - table) / KNOWN,
        "publish_us": seconds / KNOWN * 1e6,
    }


def _wire_body(index: int) -> list[Any]:
    return [os.urandom(16), os.urandom(16), 200 + index % 800, BODY_BYTES, 1, 256 * (index % 4096), "raw"]


# -- what is resident ------------------------------------------------------------------------------


def node_process() -> None:
    """A node that says what memory it takes whenever a line comes in."""
    from p2pcache.runtime import NodeRuntime

    config = NodeConfig.of(json.loads(sys.stdin.readline()))
    runtime = NodeRuntime.start(config)
    if tracing := bool(os.environ.get("PYTHONTRACEMALLOC")):
        tracemalloc.stop()  # what came before is not of interest
        tracemalloc.start(1)
    print(json.dumps({"socket": runtime.socket_path}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "members" in request:
            runtime.apply_view([runtime.member, *map(Member.from_wire, request["members"])])
        runtime.flush()
        gc.collect()
        tier, node = runtime.node.residency.tier, runtime.node
        said = memory() | {
            "directory": node.shard.directory.nbytes,
            "traced": tracemalloc.get_traced_memory()[0] if tracing else 0,
            "bodies": len(tier),
            "taken": tier.taken_bytes,
        }
        if request.get("forget_peak"):
            forget_peak()
        print(json.dumps(said), flush=True)
    runtime.close()


@contextmanager
def node(traced: bool = False, **settings: Any) -> Iterator[tuple[str, Callable[..., dict[str, Any]]]]:
    """A node's process: its socket, and a call that asks it."""
    environ = os.environ | ({"PYTHONTRACEMALLOC": "1"} if traced else {})
    command = [sys.executable, "-m", "bench.overhead", "--part", "node_process"]
    with tempfile.TemporaryDirectory(prefix="p2pcache-bench-") as folder:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
        )

        def ask(**request: Any) -> dict[str, Any]:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        try:
            started = ask(runtime_dir=folder, **settings)
            yield started["socket"], ask
        finally:
            process.stdin.close()
            process.wait(30)


def resident(count: int, layers: int, traced: bool = False) -> dict[str, float]:
    """A node that holds `count` bodies which an engine has stored, and has published them to itself."""
    from p2pcache.core.checksum import checksum_body
    from p2pcache.io.link import Link

    step = 500
    with node(traced, host_bytes_max=(count + step) * 4096) as (path, ask):
        link = Link(path, 10.0)

        def store(first: int) -> None:
            bodies = [_wire_body(i) for i in range(first, first + step)]
            slots = link.call("reserve", {"bodies": bodies, "deadline_s": 60.0}, 60.0)["slots"]
            ready = []
            for body, (status, offset, generation) in zip(bodies, slots, strict=True):
                assert status == "ok", status
                view = link.slab.view(offset, BODY_BYTES)
                view[:] = os.urandom(BODY_BYTES)
                ready.append([generation, list(checksum_body(view, body[1], layers)), b""])
            assert link.call("commit", {"slots": ready}, 60.0)["committed"] == step

        store(0)
        before = ask()
        for first in range(step, step + count, step):
            store(first)
        after = ask()
        link.close()
    grown = {name: after[name] - before[name] for name in after}
    assert grown["bodies"] == count
    private = grown["VmRSS"] - grown["RssShmem"]
    return {
        "rss_bytes": (private - grown["directory"]) / count,
        "with_directory_bytes": private / count,
        "traced_bytes": grown["traced"] / count,
        "slab_bytes": grown["taken"] / count,
    }


# -- the queue of prefetches -----------------------------------------------------------------------


def flooding_engine() -> None:
    """Ask for FLOOD chunks of a peer that never answers, without waiting for one of them."""
    from p2pcache.api import connect
    from p2pcache.results import Lookup, LookupChunk

    request = json.loads(sys.stdin.readline())
    client = connect(request["socket"])
    cache = client.open(Namespace("model", "weights", KVLayout(LAYERS, 1, 32, "uint8")))

    def lookup(first: int) -> Lookup:
        chunks = []
        for i in range(first, first + FLOOD_STEP):
            keys = ChunkKeys(2 * i, 2 * i + 2, os.urandom(32), os.urandom(16), os.urandom(16))
            body = BodyInfo(keys.content, keys.exact, 2, BODY_BYTES, Provenance.IN_CONTEXT, 2 * i)
            found = (Found(body, (Holder("silent", 1, Tier.HOST),)),)
            chunks.append(LookupChunk(keys, Match.EXACT, Source.PEER, body, "silent", found, 0.1, None))
        return Lookup(None, tuple(chunks), 0.0)

    cache.prefetch(lookup(0), budget_s=0.1).close()
    gc.collect()
    before = memory()["VmRSS"]
    forget_peak()
    refused = 0
    until_s = time.monotonic() + FLOOD_S
    for first in range(FLOOD_STEP, FLOOD_STEP + FLOOD, FLOOD_STEP):
        handle = cache.prefetch(lookup(first), budget_s=FLOOD_S)
        refused += FLOOD_STEP * handle.wait(0)
    time.sleep(max(until_s - time.monotonic(), 0.0) + 1.0)  # the peak is what counts; now all are answered
    peak = memory()["VmHWM"] - before
    client.close()
    print(json.dumps({"peak_bytes": peak, "refused": refused}), flush=True)


def crowd(path: str) -> None:
    """Engines that go round the limit of a client: CROWD of them, each with one large message."""
    from p2pcache.io.link import Link

    silent = [["silent", 1, int(Tier.HOST)]]
    body = {"wants": [[_wire_body(i), silent] for i in range(CROWD_STEP)], "deadline_s": 2.0}
    links = [Link(path, 10.0) for _ in range(CROWD)]
    with ThreadPoolExecutor(CROWD) as threads:
        replies = list(threads.map(lambda link: link.call("fetch", body, 20.0), links))
    assert all(len(reply["grants"]) == CROWD_STEP for reply in replies)
    for link in links:
        link.close()


def flood() -> dict[str, float]:
    """Peak growth of an engine's and its node's memory while prefetches pile up behind a silent peer."""
    with socket.create_server(("127.0.0.1", 0)) as silent, node(host_bytes_max=2048 * MIB) as (path, ask):
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        peer = Member("silent", 1, address, "another boot", {"tcp": address})
        ask(members=[peer.to_wire()])
        time.sleep(0.5)
        before = ask(forget_peak=True)
        command = [sys.executable, "-m", "bench.overhead", "--part", "flooding_engine"]
        said = subprocess.run(
            command, input=json.dumps({"socket": path}) + "\n", text=True, stdout=subprocess.PIPE, check=True
        )
        after = ask()
        ask(forget_peak=True)
        crowd(path)
        crowded = ask()
    engine = json.loads(said.stdout)
    return {
        "crowd_peak_mb": (crowded["VmHWM"] - before["VmRSS"]) / 1e6,
        "engine_peak_mb": engine["peak_bytes"] / 1e6,
        "node_peak_mb": (after["VmHWM"] - before["VmRSS"]) / 1e6,
        "refused": engine["refused"],
    }


# -- the actor -------------------------------------------------------------------------------------


def idle() -> dict[str, float]:
    """Resident memory of an idle node actor, and of an actor that does nothing."""
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # all on loopback
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    from p2pcache.actor import NodeActor

    class Empty:
        def look(self) -> dict[str, Any]:
            import os
            import sys

            return {"pid": os.getpid(), "torch": "torch" in sys.modules}

    class Node(NodeActor.__ray_metadata__.modified_class):  # the actor itself, and a way to look at it
        look = Empty.look

    ray.init(num_cpus=1, include_dashboard=False, object_store_memory=80 * MIB, log_to_driver=False)
    try:
        with tempfile.TemporaryDirectory(prefix="p2pcache-bench-") as folder:
            settings = {"runtime_dir": folder, "host_bytes_max": 64 * MIB}
            empty = ray.remote(num_cpus=0)(Empty).remote()
            ours = ray.remote(num_cpus=0, max_concurrency=4)(Node).remote(settings, "0" * 16)
            looks = ray.get([empty.look.remote(), ours.look.remote()])
            ray.get(ours.status.remote())
            time.sleep(3.0)  # the exporter's first round
            base, all_of_it = (memory_of(look["pid"]) for look in looks)
            ray.get(ours.stop.remote())
    finally:
        ray.shutdown()
    return {
        "empty_mb": base["VmRSS"] / 1e6,
        "node_mb": all_of_it["VmRSS"] / 1e6,
        "torch": looks[1]["torch"],
    }


# -- all of it -------------------------------------------------------------------------------------

PARTS: dict[str, Callable[..., Any]] = {
    "directory": directory,
    "resident_1": lambda: resident(RESIDENT, 1),
    "resident_30": lambda: resident(RESIDENT, LAYERS),
    "resident_30_traced": lambda: resident(TRACED, LAYERS, traced=True),
    "flood": flood,
    "idle": idle,
}
_INNER = {"node_process": node_process, "flooding_engine": flooding_engine}


def part(name: str) -> dict[str, float]:
    """One part, in a process of its own."""
    command = [sys.executable, "-m", "bench.overhead", "--part", name]
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    arguments: argparse.ArgumentParser = parser(__doc__, "overhead")
    arguments.add_argument("--part", choices=[*PARTS, *_INNER], help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.part in _INNER:
        return _INNER[options.part]()
    if options.part:
        return print(json.dumps(PARTS[options.part]()))
    report = Report("overhead")
    known = part("directory")
    report.row(what="known in the directory", count=KNOWN, bytes_each=known["rss_bytes"])
    report.row(what="... by the table's own count", count=KNOWN, bytes_each=known["table_bytes"])
    for layers in (1, LAYERS):
        held = part(f"resident_{layers}")
        report.row(what=f"resident, {layers} layers", count=RESIDENT, bytes_each=held["rss_bytes"])
        report.row(
            what="... with its entry in this node's directory",
            count=RESIDENT,
            bytes_each=held["with_directory_bytes"],
        )
    traced = part("resident_30_traced")
    report.row(
        what=f"resident, {LAYERS} layers, Python's own count", count=TRACED, bytes_each=traced["traced_bytes"]
    )
    report.row(
        what="slab beyond the bodies (whole pages)",
        count=RESIDENT,
        bytes_each=held["slab_bytes"] - BODY_BYTES,
    )
    queue = part("flood")
    report.row(what="flood of prefetches: engine's peak", count=FLOOD, mb=queue["engine_peak_mb"])
    report.row(what="flood of prefetches: node's peak", count=FLOOD, mb=queue["node_peak_mb"])
    report.row(
        what="node's peak, engines without a limit of their own",
        count=CROWD * CROWD_STEP,
        mb=queue["crowd_peak_mb"],
    )
    report.row(what="flood of prefetches: chunks refused", count=queue["refused"])
    report.ratio("directory_bytes_per_chunk", known["rss_bytes"], "<= 128")
    report.ratio("resident_bytes_per_chunk", held["rss_bytes"], "<= 512")
    report.ratio("prefetch_queue_peak_mb", queue["engine_peak_mb"] + queue["node_peak_mb"], "<= 100")
    try:
        actor = part("idle")
    except (subprocess.CalledProcessError, ImportError) as error:
        report.ratio("idle_rss_mb", None, why_missing=f"no Ray actor could be measured: {error}")
    else:
        report.row(what="an empty Ray actor", mb=actor["empty_mb"])
        report.row(what=f"an idle node actor (torch in it: {actor['torch']})", mb=actor["node_mb"])
        report.ratio("idle_rss_mb", actor["node_mb"] - actor["empty_mb"])
    finish(report, options.json)


if __name__ == "__main__":
    main()
