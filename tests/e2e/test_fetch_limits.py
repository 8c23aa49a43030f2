"""Floods of fetches and prefetches: what is over a limit is BUSY at once, and nothing is left behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pcache import EmbeddedMesh, FixedChunker, KVLayout, Miss, Namespace, NodeConfig, Source
from p2pcache.api import Cache, Client
from p2pcache.node.node import FETCH_BYTES
from p2pcache.results import PREFETCH_BYTES, PREFETCH_CHUNK_BYTES, Fetched, Lookup, PullQueue
from tests.fault.node_process import PATIENCE_S, at_rest, state, until

MIB = 1 << 20
LAYOUT = KVLayout(layers=4, kv_heads=2, head_dim=16, dtype="float32")  # 1 KiB a token
NAMESPACE = Namespace("model", "weights", LAYOUT)
CHUNKS = FixedChunker(64)  # of 64 KiB


class Pair:
    """A node that holds a prompt of eight chunks, and one that fetches it under limits."""

    def __init__(self, folder: Path, **limits: Any):
        common = {"host_bytes_max": 8 * MIB, "resync_s": 0.0, "runtime_dir": str(folder)}
        self.mesh = EmbeddedMesh([NodeConfig(name="a", **common), NodeConfig(name="b", **common, **limits)])
        self.clients: list[Client] = [self.mesh.client(i, PATIENCE_S) for i in range(2)]
        holder, self.reader = (client.open(NAMESPACE) for client in self.clients)
        run = torch.arange(512)
        stored = holder.store(holder.chunks(run, CHUNKS), torch.randn(LAYOUT.shape(512)))
        assert stored.stored == 8 and stored.published(PATIENCE_S)
        self.found: Lookup = self.reader.lookup(run, chunker=CHUNKS, budget_s=PATIENCE_S)

    def status(self) -> dict[str, Any]:
        return state(self.mesh.nodes[1])

    def close(self) -> None:
        for client in self.clients:
            client.close()
        until(lambda: all(at_rest(state(node)) for node in self.mesh.nodes), "both nodes at rest")
        assert (self.status()["fetch_queue_bytes"], self.status()["pull_line_bytes"]) == (0, 0)
        self.mesh.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Any]:
    made = []
    tmp_path.chmod(0o700)

    def make(**limits: Any) -> Pair:
        made.append(Pair(tmp_path, **limits))
        return made[-1]

    yield make
    for one in made:
        one.close()


def outcome(cache: Cache, found: Lookup) -> list[Miss | None]:
    with cache.fetch(found, budget_s=PATIENCE_S) as fetched:
        return [c.miss for c in fetched]


def test_chunks_of_a_fetch_over_the_limit_on_memory_are_busy_and_the_first_ones_come(pair) -> None:
    p = pair(fetch_queue_bytes_max=3 * FETCH_BYTES)
    assert outcome(p.reader, p.found) == [None] * 3 + [Miss.BUSY] * 5
    assert outcome(p.reader, p.found) == [None] * 3 + [Miss.BUSY] * 5, "and there is room again"
    status = p.status()
    assert status["counters"]["miss_busy"] == 10 and status["sight"]["fetch_misses"] == {"busy": 10}


def test_no_fetch_at_all_fits_a_limit_of_nothing(pair) -> None:
    p = pair(fetch_queue_bytes_max=0)
    assert outcome(p.reader, p.found) == [Miss.BUSY] * 8


def test_bodies_over_the_limit_on_the_line_are_busy_and_the_others_come(pair) -> None:
    p = pair(pulls_in_flight_max=1, pull_line_bytes_max=2 * 64 * 1024)
    assert outcome(p.reader, p.found) == [None] * 3 + [Miss.BUSY] * 5, "one flies, two wait"
    assert outcome(p.reader, p.found) == [None] * 6 + [Miss.BUSY] * 2, "what is here needs no place in it"


def test_a_line_is_as_long_as_the_host_tier_is_large_by_default(pair) -> None:
    p = pair(pulls_in_flight_max=1)
    assert outcome(p.reader, p.found) == [None] * 8


def test_a_prefetch_over_the_limit_of_the_process_is_answered_at_once(pair, monkeypatch) -> None:
    p = pair()
    queue = PullQueue(PREFETCH_BYTES + 8 * PREFETCH_CHUNK_BYTES, threads=1)
    monkeypatch.setattr("p2pcache.results._pulls", queue)
    go, fetch = threading.Event(), p.reader.fetch
    monkeypatch.setattr(p.reader, "fetch", lambda *a, **k: (go.wait(PATIENCE_S), fetch(*a, **k))[1])
    first, second = (p.reader.prefetch(p.found, budget_s=PATIENCE_S) for _ in range(2))
    assert [(c.miss, c.source, c.kv) for c in second.chunks()] == [(Miss.BUSY, Source.RECOMPUTE, None)] * 8
    assert second.layer(0) == []
    go.set()
    assert [c.miss for c in first.chunks()] == [None] * 8
    first.close(), second.close()
    assert queue.nbytes == 0
    with p.reader.prefetch(p.found) as third:
        assert [c.miss for c in third.chunks()] == [None] * 8, "there is room again"


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 200), st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=12))
def test_the_line_of_prefetches_never_counts_more_than_it_may(chunks_max, asked):
    """Whatever is asked, and whether pulls end well or not; afterwards nothing is counted."""
    bytes_max = chunks_max * PREFETCH_CHUNK_BYTES
    queue, go, waiting, counted = PullQueue(bytes_max, threads=2), threading.Event(), [], 0

    def pull(fails: bool) -> Fetched:
        go.wait(PATIENCE_S)
        if fails:
            raise RuntimeError("no luck")
        return Fetched([], lambda now: None)

    for chunks, fails in asked:
        cost = PREFETCH_BYTES + chunks * PREFETCH_CHUNK_BYTES
        pulled = queue.submit(chunks, lambda fails=fails: pull(fails))
        assert (pulled is None) == (counted + cost > bytes_max)
        if pulled is not None:
            waiting.append(pulled)
            counted += cost
        assert queue.nbytes == counted
    go.set()
    assert not futures.wait(waiting, PATIENCE_S).not_done
    assert queue.nbytes == 0
