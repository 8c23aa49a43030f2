"""What tests run on a host of the lab: an engine that knows which bytes are right. Prints JSON lines.

lab_client.py store SEED COUNT       keep COUNT bodies at this host's node
lab_client.py fetch SEED COUNT       have them from anywhere, each compared with what was stored
lab_client.py watch SEED COUNT       fetch one after the other, round and round, until standard input ends
lab_client.py follow                 who is alive for Ray and who is a member, whenever it changes
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections import Counter
from typing import Any

import torch

import p2pcache

TOKENS = 32
LAYOUT = p2pcache.KVLayout(layers=4, kv_heads=2, head_dim=16, dtype="float32")  # 1 KiB a token
NAMESPACE = p2pcache.Namespace("lab", "weights", LAYOUT)
LOOKUP_S, FETCH_S = 0.25, 1.0


def run_of(seed: int, index: int) -> torch.Tensor:
    return torch.arange(TOKENS) + 1_000_000 * seed + 1000 * index


def kv_of(seed: int, index: int) -> torch.Tensor:
    return torch.randn(LAYOUT.shape(TOKENS), generator=torch.Generator().manual_seed(seed * 100_003 + index))


def store(cache: p2pcache.api.Cache, seed: int, count: int) -> None:
    stored = 0
    for index in range(count):
        kept = cache.store(
            cache.chunks(run_of(seed, index), p2pcache.FixedChunker(TOKENS)), kv_of(seed, index)
        )
        stored += kept.stored + kept.resident
    say(node=cache.client.node, stored=stored, published=kept.published(10.0))


def fetch_one(cache: p2pcache.api.Cache, seed: int, index: int) -> dict[str, Any]:
    started_s = time.monotonic()
    lookup = cache.lookup(run_of(seed, index), chunker=p2pcache.FixedChunker(TOKENS), budget_s=LOOKUP_S)
    with cache.fetch(lookup, budget_s=FETCH_S) as fetched:
        (chunk,) = fetched
        seconds = time.monotonic() - started_s
        came = chunk.kv is not None
        wrong = came and not torch.equal(chunk.kv, kv_of(seed, index))
        return {
            "came": came,
            "wrong": wrong,
            "seconds": seconds,
            "how": chunk.transport or str(chunk.source) if came else str(chunk.miss),
            "peer": chunk.peer,
        }


def fetch(cache: p2pcache.api.Cache, seed: int, count: int) -> None:
    got = [fetch_one(cache, seed, index) for index in range(count)]
    say(**summary(got))


def summary(got: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "asked": len(got),
        "came": sum(g["came"] for g in got),
        "wrong": sum(g["wrong"] for g in got),
        "slowest_s": max((g["seconds"] for g in got), default=0.0),
        "how": Counter(g["how"] for g in got),
        "peers": Counter(g["peer"] for g in got if g["came"]),
    }


def watch(cache: p2pcache.api.Cache, seed: int, count: int) -> None:
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    got: list[dict[str, Any]] = []
    say(watching=True)
    while not ended.wait(0.02):
        got.append(fetch_one(cache, seed, len(got) % count))
    say(**summary(got))


def follow() -> None:
    import ray

    from p2pcache.io.members_ray import alive_nodes

    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    ray.init(address="auto", logging_level="ERROR", log_to_driver=False)
    last: tuple[Any, Any] | None = None
    with p2pcache.connect() as client:
        while not ended.wait(0.1):
            alive = sorted(n.name for n in alive_nodes(True))
            with contextlib.suppress(p2pcache.types.RemoteError):
                members = next(n["members"] for n in client.mesh(0.3) if n["name"] == client.node)
            if (alive, members) != last:
                last = (alive, members)
                say(at_s=time.monotonic(), alive=alive, members=members)


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    what, *numbers = sys.argv[1:]
    if what == "follow":
        follow()
    else:
        with p2pcache.connect(timeout_s=10.0) as client:
            {"store": store, "fetch": fetch, "watch": watch}[what](client.open(NAMESPACE), *map(int, numbers))
