"""A mesh in one process over real sockets and slabs: what an engine gets through the public API."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from p2pcache import (
    ContentChunker,
    EmbeddedMesh,
    FixedChunker,
    KVLayout,
    Match,
    Miss,
    Namespace,
    NodeConfig,
    Provenance,
    SegmentChunker,
    Source,
    Tier,
    hash_salt,
)
from p2pcache.api import Cache, Client
from p2pcache.io.ports import TransportError
from p2pcache.io.streams import default_stream
from p2pcache.node.wireform import body_to_wire
from p2pcache.results import Fetched, FetchedChunk, Lookup, Prefetch, SingleChunks
from p2pcache.runtime import NodeRuntime
from p2pcache.types import ConfigError, LayoutError, NodeDown
from tests.fault.node_process import PATIENCE_S, at_rest, state, until

MIB = 1 << 20
LAYOUT = KVLayout(layers=4, kv_heads=2, head_dim=16, dtype="float32")  # 1 KiB a token
NAMESPACE = Namespace("model", "weights", LAYOUT, tenant=hash_salt("us"))
CHUNKS = FixedChunker(64)


class Mesh:
    """Nodes, and one cache a node in NAMESPACE."""

    def __init__(self, stack: contextlib.ExitStack, configs: Sequence[NodeConfig]):
        self.embedded = stack.enter_context(EmbeddedMesh(configs))
        self._stack = stack
        self.nodes = self.embedded.nodes
        self.caches = [self.cache(i) for i in range(len(configs))]

    def cache(self, index: int, namespace: Namespace = NAMESPACE) -> Cache:
        return self._stack.enter_context(self.embedded.client(index, PATIENCE_S)).open(namespace)

    def status(self, index: int) -> dict[str, Any]:
        return state(self.nodes[index])

    def counters(self, index: int) -> dict[str, int]:
        return self.status(index)["counters"]


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Callable[..., Mesh]]:
    """Makes meshes: `mesh(2, transports=("tcp",))`, or one dict of settings a node over common ones.

    At the end of every test no node has a lease, a ticket or an unfinished slot, and all bytes add up.
    """
    made: list[Mesh] = []
    tmp_path.chmod(0o700)
    with contextlib.ExitStack() as stack:

        def start(nodes: int | Sequence[dict[str, Any]], **common: Any) -> Mesh:
            each = [{}] * nodes if isinstance(nodes, int) else nodes
            common = {"host_bytes_max": 8 * MIB, "resync_s": 0.0, "runtime_dir": str(tmp_path)} | common
            configs = [NodeConfig(**({"name": f"n{i}"} | common | own)) for i, own in enumerate(each)]
            made.append(Mesh(stack, configs))
            return made[-1]

        yield start
        for mesh_ in made:
            for node in mesh_.nodes:
                with contextlib.suppress(NodeDown):  # the test has closed it
                    until(
                        lambda node=node: at_rest(state(node)), f"{node.member.name} at rest: {state(node)}"
                    )


def prompt(count: int, seed: int = 0) -> torch.Tensor:
    return torch.arange(count) + 100_000 * seed


def some_kv(count: int, layout: KVLayout = LAYOUT) -> torch.Tensor:
    return torch.randn(layout.shape(count))


def keep(cache: Cache, run: torch.Tensor, chunker: Any = CHUNKS, **how: Any) -> torch.Tensor:
    """Store random KV for a prompt, and wait until the owners know."""
    kv = some_kv(len(run))
    chunks = cache.chunks(run, chunker)
    stored = cache.store(chunks, kv, **how)
    assert (stored.stored, stored.refused) == (len(chunks), {}) and stored.published(PATIENCE_S)
    return kv


def find(cache: Cache, run: torch.Tensor, chunker: Any = CHUNKS, **how: Any) -> Lookup:
    return cache.lookup(run, chunker=chunker, **({"budget_s": PATIENCE_S} | how))


def same(c: FetchedChunk, kv: torch.Tensor, start: int = 0) -> bool:
    """Whether a chunk came, with the KV of tokens [start, ...) of the run it was stored for."""
    return c.kv is not None and torch.equal(c.kv, kv[:, :, start : start + c.found.keys.tokens])


def whole(fetched: Fetched, kv: torch.Tensor) -> bool:
    return all(same(c, kv, c.found.keys.start) for c in fetched)


# -- exact reuse -----------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_what_one_node_stored_is_exact_on_another_and_then_local(mesh: Callable, transport: str) -> None:
    m = mesh(2, transports=(transport,))
    run = prompt(1000)
    kv = keep(m.caches[0], run)

    lookup = find(m.caches[1], run)
    assert {(c.match, c.source, c.peer) for c in lookup.chunks} == {(Match.EXACT, Source.PEER, "n0")}
    assert lookup.exact_tokens == lookup.exact_prefix_tokens == 1000 and lookup.content_tokens == 0
    assert [c.keys.start for c in lookup.chunks] == list(range(0, 1000, 64)) and lookup.chunks[
        -1
    ].keys.tokens == 40
    with m.caches[1].fetch(lookup) as fetched:
        assert whole(fetched, kv)
        assert {(c.source, c.peer, c.transport) for c in fetched} == {(Source.PEER, "n0", transport)}
    again = find(m.caches[1], run)
    assert {(c.match, c.source) for c in again.chunks} == {(Match.EXACT, Source.LOCAL)}
    with m.caches[1].fetch(again) as fetched:
        assert whole(fetched, kv) and {c.source for c in fetched} == {Source.LOCAL}
    counters = m.counters(1)
    assert counters[f"pulls_{transport}"] == counters["served_peer"] == counters["served_local"] == 16
    assert counters["bytes_peer"] == 1000 * 1024 and counters["hits_exact"] == 32


def test_a_fetched_body_is_published_so_a_third_node_may_take_it_from_either(mesh: Callable) -> None:
    m = mesh(3)
    run = prompt(64)
    kv = keep(m.caches[0], run)
    with m.caches[1].fetch(find(m.caches[1], run)):
        pass
    m.nodes[1].flush()
    lookup = find(m.caches[2], run)
    assert {h.node for h in lookup.chunks[0].found[0].holders} == {"n0", "n1"}
    m.nodes[0].close()
    with m.caches[2].fetch(lookup) as fetched:
        assert whole(fetched, kv) and fetched[0].peer == "n1"


def test_everywhere_lists_the_other_holders_of_what_is_at_hand(mesh: Callable) -> None:
    m = mesh(2)
    run = prompt(64)
    keep(m.caches[0], run)
    with m.caches[1].fetch(find(m.caches[1], run)):
        pass
    m.nodes[1].flush()
    holders = [
        {h.node for h in find(m.caches[1], run, everywhere=e).chunks[0].found[0].holders}
        for e in (False, True)
    ]
    assert holders == [{"n1"}, {"n0", "n1"}]


def test_storing_what_is_there_writes_nothing(mesh: Callable) -> None:
    m = mesh(1)
    run = prompt(128)
    kv = keep(m.caches[0], run)
    again = m.caches[0].store(m.caches[0].chunks(run, CHUNKS), kv + 1)
    assert (again.stored, again.resident) == (0, 2)
    with m.caches[0].fetch(find(m.caches[0], run)) as fetched:
        assert whole(fetched, kv)


def test_two_prompts_with_one_beginning_share_it_and_nothing_behind_the_fork(mesh: Callable) -> None:
    m = mesh(2)
    first = prompt(256)
    second = torch.cat([first[:128], prompt(128, seed=1)])
    kv = keep(m.caches[0], first)
    lookup = find(m.caches[1], second)
    assert [c.match for c in lookup.chunks] == [Match.EXACT] * 2 + [Match.NONE] * 2
    assert [c.miss for c in lookup.chunks] == [None] * 2 + [Miss.ABSENT] * 2
    assert lookup.exact_prefix_tokens == 128
    with m.caches[1].fetch(lookup) as fetched:
        assert same(fetched[0], kv) and same(fetched[1], kv, 64)
        assert [(c.kv, c.miss, c.source) for c in fetched[2:]] == [(None, Miss.ABSENT, Source.RECOMPUTE)] * 2


def test_the_content_chunker_finds_a_document_again_behind_another_prefix(mesh: Callable) -> None:
    m = mesh(2)
    document = torch.randint(0, 50_000, (4000,), generator=torch.Generator().manual_seed(1))
    kv = keep(m.caches[0], document, ContentChunker())
    moved = torch.cat([prompt(777, seed=9), document])
    lookup = find(m.caches[1], moved, ContentChunker())
    assert lookup.exact_tokens == 0 and lookup.content_tokens > 2000
    with m.caches[1].fetch(lookup) as fetched:
        for c in fetched:
            if c.found.match is Match.CONTENT:
                assert same(c, kv, c.found.keys.start - 777)
                assert c.found.body.base_position == c.found.keys.start - 777


# -- reuse by content ------------------------------------------------------------------------------


def test_a_body_is_found_at_another_position_with_its_own_base_and_its_run(mesh: Callable) -> None:
    m = mesh(2)
    run = prompt(192)
    kv = keep(m.caches[0], run)
    moved = torch.cat([prompt(64, seed=5), run])
    lookup = find(m.caches[1], moved)
    assert [c.match for c in lookup.chunks] == [Match.NONE] + [Match.CONTENT] * 3
    assert [c.follows for c in lookup.chunks] == [False, False, True, True]
    assert [c.body.base_position for c in lookup.chunks[1:]] == [0, 64, 128]
    assert lookup.content_tokens == 192 and lookup.exact_prefix_tokens == 0
    with m.caches[1].fetch(lookup) as fetched:
        assert [same(c, kv, c.found.body.base_position) for c in fetched[1:]] == [True] * 3


def test_of_several_bodies_the_one_that_continues_the_run_is_taken(mesh: Callable) -> None:
    m = mesh(1)
    cache = m.caches[0]
    a, b, c = (prompt(64, seed=s) for s in (1, 2, 3))
    keep(cache, torch.cat([c, b]))  # b behind c
    kv = keep(cache, torch.cat([a, b]))  # b behind a
    lookup = find(cache, torch.cat([prompt(64, seed=7), a, b]))
    assert [(x.match, x.follows) for x in lookup.chunks[1:]] == [
        (Match.CONTENT, False),
        (Match.CONTENT, True),
    ]
    assert len(lookup.chunks[2].found) == 2
    with cache.fetch(lookup) as fetched:
        assert same(fetched[1], kv) and same(fetched[2], kv, 64)


def test_the_exact_body_is_preferred_to_another_of_the_same_content(mesh: Callable) -> None:
    m = mesh(2)
    a, b = prompt(64, seed=1), prompt(64, seed=2)
    keep(m.caches[1], torch.cat([b, a]))  # a is at hand here, behind b
    kv = keep(m.caches[0], torch.cat([a, b]))
    lookup = find(m.caches[1], torch.cat([a, b]))
    assert [(c.match, c.source) for c in lookup.chunks] == [(Match.EXACT, Source.PEER)] * 2
    with m.caches[1].fetch(lookup) as fetched:
        assert whole(fetched, kv)


def test_who_asks_for_exact_reuse_alone_is_told_that_it_is_held_elsewhere(mesh: Callable) -> None:
    m = mesh(2)
    run = prompt(64)
    keep(m.caches[0], run)
    lookup = find(m.caches[1], torch.cat([prompt(64, seed=5), run]), content_reuse=False)
    assert [(c.match, c.miss) for c in lookup.chunks] == [
        (Match.NONE, Miss.ABSENT),
        (Match.NONE, Miss.EXACT_ONLY),
    ]


def test_an_approximate_body_is_never_offered_as_exact(mesh: Callable) -> None:
    m = mesh(2)
    run = prompt(128)
    kv = keep(m.caches[0], run, provenance=Provenance.APPROXIMATE)
    for cache in m.caches:
        lookup = find(cache, run)
        assert [c.match for c in lookup.chunks] == [Match.CONTENT] * 2
        assert {c.body.provenance for c in lookup.chunks} == {Provenance.APPROXIMATE}
        assert {c.miss for c in find(cache, run, content_reuse=False).chunks} == {Miss.EXACT_ONLY}
        with cache.fetch(lookup) as fetched:
            assert whole(fetched, kv)
    # Computed in full later, it is another body, and the better one.
    kv = keep(m.caches[0], run)
    lookup = find(m.caches[1], run)
    assert {c.match for c in lookup.chunks} == {Match.EXACT}
    with m.caches[1].fetch(lookup) as fetched:
        assert whole(fetched, kv)


def test_each_chunk_may_have_its_own_provenance(mesh: Callable) -> None:
    m = mesh(1)
    run = prompt(128)
    keep(m.caches[0], run, provenance=[Provenance.IN_CONTEXT, Provenance.APPROXIMATE])
    assert [c.match for c in find(m.caches[0], run).chunks] == [Match.EXACT, Match.CONTENT]
    with pytest.raises(ConfigError, match="1 provenances for 2 chunks"):
        m.caches[0].store(m.caches[0].chunks(run, CHUNKS), some_kv(128), provenance=[Provenance.ISOLATED])


# -- tiers -----------------------------------------------------------------------------------------


def tiered(folder: Path, **more: Any) -> dict[str, Any]:
    folder.mkdir(mode=0o700, exist_ok=True)
    return {
        "host_bytes_max": MIB,
        "nvme_path": str(folder),
        "nvme_bytes_max": 16 * MIB,
        "nvme_segment_bytes": 2 * MIB,
        "demote_above": 0.5,
    } | more


def test_what_the_host_tier_cannot_keep_goes_to_nvme_and_is_served_from_there(
    mesh: Callable, tmp_path: Path
) -> None:
    m = mesh([tiered(tmp_path / f"nvme{i}") for i in range(3)])
    run = prompt(4096)  # 4 MiB into a host tier of one
    kv = some_kv(4096)
    writer, reader = m.caches[0], m.caches[1]
    for chunk in writer.chunks(run, CHUNKS):
        assert writer.store([chunk], kv).stored == 1
        assert m.status(0)["host"]["bytes"] <= MIB
    m.nodes[0].flush()
    status = m.status(0)
    assert status["host"]["bodies"] <= 16 and status["nvme"]["records"] >= 48
    assert status["counters"]["demoted"] >= 48 and status["counters"]["evicted"] >= 48

    lookup = find(writer, run)
    assert {c.match for c in lookup.chunks} == {Match.EXACT}
    assert {c.source for c in lookup.chunks} == {Source.LOCAL, Source.NVME}
    for first in range(0, 64, 8):  # what is leased at once must fit the host tier
        part = Lookup(lookup.tokens, lookup.chunks[first : first + 8], 0.0)
        with writer.fetch(part, budget_s=PATIENCE_S) as fetched:
            assert whole(fetched, kv)
        with reader.fetch(Lookup(lookup.tokens, find(reader, run).chunks[first : first + 8], 0.0)) as fetched:
            assert whole(fetched, kv) and {c.source for c in fetched} == {Source.PEER}
    assert m.counters(0)["served_nvme"] >= 40
    tiers = {h.tier for c in find(m.caches[2], run).chunks for f in c.found for h in f.holders}
    assert tiers == {Tier.HOST, Tier.NVME}


def test_beyond_the_nvme_tiers_write_rate_bodies_are_dropped_and_counted(
    mesh: Callable, tmp_path: Path
) -> None:
    # A credit of one body's worth, which comes back far too slowly for another one.
    m = mesh([tiered(tmp_path / "nvme", nvme_write_bytes_per_s_max=10, eviction="lru")])
    cache, run, kv = m.caches[0], prompt(4096), some_kv(4096)
    for i, chunk in enumerate(cache.chunks(run, CHUNKS)):
        assert cache.store([chunk], kv).stored == 1
        if i == 10:  # above the mark: the first one is on its way down
            until(lambda: m.counters(0)["demoted"] == 1, "the first body has been written")
    m.nodes[0].flush()
    status = m.status(0)
    written, dropped = status["counters"]["demoted"], status["counters"]["nvme_refused"]
    assert written == 1 and dropped == status["counters"]["evicted"] - 1 == 64 - 16 - 1
    lookup = find(cache, run)
    below = tuple(c for c in lookup.chunks if c.source is Source.NVME)
    assert len(below) == 1 and len([c for c in lookup.chunks if c.source is Source.LOCAL]) == 16
    with cache.fetch(Lookup(lookup.tokens, below, 0.0), budget_s=PATIENCE_S) as fetched:
        assert whole(fetched, kv)


def test_on_demand_only_bodies_that_were_used_go_to_nvme(mesh: Callable, tmp_path: Path) -> None:
    m = mesh([tiered(tmp_path / "nvme", nvme_admit="used", eviction="lru")])
    cache, used, unused = m.caches[0], prompt(256), prompt(2048, seed=1)
    kv = keep(cache, used)
    with cache.fetch(find(cache, used), budget_s=PATIENCE_S) as fetched:
        assert whole(fetched, kv)
    for chunk in cache.chunks(unused, CHUNKS):
        assert cache.store([chunk], some_kv(2048)).stored == 1
    assert m.status(0)["nvme"]["records"] == m.counters(0)["demoted"] == 4
    assert m.counters(0)["nvme_refused"] == 36 - 16 - 4
    assert {c.source for c in find(cache, used).chunks} == {Source.NVME}


def test_a_restarted_node_publishes_what_its_nvme_tier_kept(mesh: Callable, tmp_path: Path) -> None:
    m = mesh([tiered(tmp_path / "nvme", demote_above=0.0), {}, {}])
    run = prompt(256)
    kv = keep(m.caches[0], run)
    until(lambda: m.status(0)["nvme"]["records"] == 4, "all four demoted")
    old = m.nodes[0]
    old.close()
    m.nodes[0] = NodeRuntime.start(old.config)
    assert m.status(0)["nvme"]["records"] == 4 and m.status(0)["host"]["bodies"] == 0
    m.embedded.share_view()

    reader = m.caches[1]
    lookup = find(reader, run)
    assert {(c.match, c.source, c.peer) for c in lookup.chunks} == {(Match.EXACT, Source.PEER, "n0")}
    holders = {h for c in lookup.chunks for h in c.found[0].holders}
    assert {(h.incarnation, h.tier) for h in holders} == {(m.nodes[0].member.incarnation, Tier.NVME)}
    with reader.fetch(lookup, budget_s=PATIENCE_S) as fetched:
        assert whole(fetched, kv)


@pytest.mark.parametrize("eviction", ["s3-fifo", "lru"])
def test_what_was_pulled_leaves_before_what_is_kept_here_alone(mesh: Callable, eviction: str) -> None:
    m = mesh([{"host_bytes_max": MIB, "eviction": eviction}, {}])
    reader, writer = m.caches[0], m.caches[1]
    own, theirs = prompt(512, 1), prompt(512, 2)  # 8 bodies of 64 KiB each: together they fill the reader's
    keep(reader, own)
    keep(writer, theirs)
    with reader.fetch(find(reader, theirs), budget_s=PATIENCE_S) as fetched:
        assert {c.source for c in fetched} == {Source.PEER}
    keep(reader, prompt(512, 3))
    assert {c.source for c in find(reader, own).chunks} == {Source.LOCAL}
    assert {c.source for c in find(reader, theirs).chunks} == {Source.PEER}


def test_bodies_of_all_sizes_never_fill_the_tier_with_gaps(mesh: Callable) -> None:
    m = mesh([{"host_bytes_max": MIB}])
    for seed, tokens in enumerate([64, 64, 192, 64, 448, 128, 832, 64, 960, 320, 1024] * 3):
        run = prompt(tokens, seed)
        assert m.caches[0].store(m.caches[0].chunks(run, FixedChunker(1024)), some_kv(tokens)).stored == 1


def test_evicting_a_body_withdraws_it(mesh: Callable) -> None:
    m = mesh(2, host_bytes_max=256 << 10)
    first, second = prompt(256), prompt(256, seed=1)
    keep(m.caches[0], first)
    assert {c.peer for c in find(m.caches[1], first).chunks} == {"n0"}
    keep(m.caches[0], second)
    m.nodes[0].flush()
    assert {c.miss for c in find(m.caches[1], first).chunks} == {Miss.ABSENT}
    assert {c.peer for c in find(m.caches[1], second).chunks} == {"n0"}
    assert m.counters(0)["evicted"] == 4


def test_what_was_evicted_between_lookup_and_fetch_is_a_miss_that_says_so(mesh: Callable) -> None:
    m = mesh(2, host_bytes_max=256 << 10)
    first = prompt(256)
    keep(m.caches[0], first)
    lookups = [find(cache, first) for cache in m.caches]
    keep(m.caches[0], prompt(256, seed=1))
    for cache, lookup in zip(m.caches, lookups, strict=True):
        with cache.fetch(lookup) as fetched:
            assert {(c.kv, c.miss) for c in fetched} == {(None, Miss.HOLDER_GONE)}


def test_forgetting_a_body_withdraws_it_in_whichever_tier_it_is(mesh: Callable, tmp_path: Path) -> None:
    m = mesh([tiered(tmp_path / "nvme", demote_above=0.0), {}])
    run = prompt(1024)
    keep(m.caches[0], run, FixedChunker(1024))
    keep(m.caches[0], prompt(1024, seed=1), FixedChunker(1024))
    chunk = find(m.caches[1], run, FixedChunker(1024)).chunks[0]
    assert chunk.found[0].holders[0].tier is Tier.NVME
    m.caches[0].client.link().call("forget", {"bodies": [chunk.body.exact]}, PATIENCE_S)
    m.nodes[0].flush()
    assert find(m.caches[1], run, FixedChunker(1024)).chunks[0].miss is Miss.ABSENT


def test_a_host_tier_takes_what_fits_its_cap_and_refuses_the_rest_by_reason(mesh: Callable) -> None:
    m = mesh(1, host_bytes_max=256 << 10)
    cache = m.caches[0]
    run = prompt(512)
    stored = cache.store(cache.chunks(run, CHUNKS), some_kv(512))  # all of it is being written at once
    assert (stored.stored, dict(stored.refused)) == (4, {Miss.NO_ROOM: 4})
    assert m.status(0)["host"] == {"bytes": 256 << 10, "bytes_max": 256 << 10, "bodies": 4}


def test_a_body_larger_than_the_tier_is_refused_and_costs_nobody_a_place(mesh: Callable) -> None:
    m = mesh(2, host_bytes_max=256 << 10)
    cache = m.caches[0]
    keep(cache, prompt(256))
    stored = cache.store(cache.chunks(prompt(512, seed=1), FixedChunker(512)), some_kv(512))
    assert (stored.stored, dict(stored.refused)) == (0, {Miss.NO_ROOM: 1})
    assert m.status(0)["host"]["bodies"] == 4


def test_a_reader_whose_host_tier_is_too_small_misses_for_want_of_room(mesh: Callable) -> None:
    m = mesh([{}, {"host_bytes_max": 128 << 10}])
    run = prompt(256)
    kv = keep(m.caches[0], run)
    lookup = find(m.caches[1], run)
    with m.caches[1].fetch(lookup) as fetched:
        assert sorted(str(c.miss) for c in fetched) == ["None", "None", "no-room", "no-room"]
        assert all(same(c, kv, c.found.keys.start) for c in fetched if c.miss is None)
    with m.caches[1].fetch(Lookup(lookup.tokens, lookup.chunks[2:], 0.0)) as fetched:
        assert whole(fetched, kv), "released bodies make room"


def test_a_store_waits_for_what_is_being_demoted_and_is_not_refused(
    mesh: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    m = mesh([tiered(tmp_path / "nvme", demote_above=0.0)])
    cache, nvme = m.caches[0], m.nodes[0].node.ports.nvme
    gate, writing, append = asyncio.Event(), threading.Event(), nvme.append

    async def held_up(*args: Any) -> Any:
        writing.set()
        await gate.wait()
        return await append(*args)

    monkeypatch.setattr(nvme, "append", held_up)
    first, second = prompt(1024), prompt(1024, seed=1)
    keep(cache, first, FixedChunker(1024))
    assert writing.wait(PATIENCE_S), "the body is leased to its own demotion"
    with ThreadPoolExecutor(1) as pool:
        storing = pool.submit(keep, cache, second, FixedChunker(1024))
        until(lambda: m.status(0)["sessions"] == 1 and not storing.done(), "the store is under way")
        m.nodes[0]._loop.call_soon_threadsafe(gate.set)
        storing.result(PATIENCE_S)
    assert {c.source for run in (first, second) for c in find(cache, run, FixedChunker(1024)).chunks} == {
        Source.NVME,
        Source.LOCAL,
    }


def test_leased_and_pinned_bodies_stay(mesh: Callable) -> None:
    m = mesh(1, host_bytes_max=256 << 10)
    cache = m.caches[0]
    run = prompt(256)
    kv = keep(cache, run)
    lookup = find(cache, run)
    with cache.fetch(Lookup(lookup.tokens, lookup.chunks[:2], 0.0)) as leased:
        assert cache.pin(Lookup(lookup.tokens, lookup.chunks[2:3], 0.0), ttl_s=60.0) == 1
        assert cache.store(cache.chunks(prompt(256, seed=1), CHUNKS), some_kv(256)).stored == 1
        assert whole(leased, kv)
    assert [c.match for c in find(cache, run).chunks] == [Match.EXACT] * 3 + [Match.NONE]
    assert cache.pin(lookup, ttl_s=0.0) == 3, "pinning for no time unpins"
    assert cache.store(cache.chunks(prompt(256, seed=2), CHUNKS), some_kv(256)).stored == 4
    assert cache.pin(lookup, ttl_s=60.0) == 0, "nothing of it is here any more"


# -- prefetch --------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_prefetch_hands_out_each_layer_of_what_came(mesh: Callable, transport: str) -> None:
    m = mesh(2, transports=(transport,))
    run = prompt(192)
    kv = keep(m.caches[0], run[:128])
    with m.caches[1].prefetch(find(m.caches[1], run)) as handle:
        for layer in range(LAYOUT.layers):
            came = handle.layer(layer)
            assert [c.found.keys.start for c, _ in came] == [0, 64]
            for c, part in came:
                assert torch.equal(part, kv[layer, :, c.found.keys.start : c.found.keys.stop])
        assert [c.miss for c in handle.chunks()] == [None, None, Miss.ABSENT]


def test_prefetches_that_nobody_reads_give_their_leases_back(mesh: Callable) -> None:
    m = mesh(2)
    run = prompt(256)
    keep(m.caches[0], run)
    lookup = find(m.caches[1], run)
    handles = [m.caches[1].prefetch(lookup) for _ in range(4)]
    for handle in handles:
        handle.close()
    until(lambda: m.status(1)["leases"] == 0, "no lease is left")


def test_a_prefetch_that_fails_says_so_where_it_is_waited_for() -> None:
    def fetch() -> Fetched:
        raise RuntimeError("no luck")

    handle = Prefetch(fetch, layers=2, stream=default_stream())
    for wait in (lambda: handle.layer(0), handle.chunks, handle.close):
        with pytest.raises(RuntimeError, match="no luck"):
            wait()


# -- what is missing, and why ----------------------------------------------------------------------


def test_explain_names_the_difference_under_which_a_prompt_is_held(mesh: Callable) -> None:
    m = mesh(2)
    run = prompt(128)
    keep(m.caches[0], run)
    for other, words in [
        (Namespace("model", "weights", KVLayout(4, 2, 16, "float16"), tenant=hash_salt("us")), "float32"),
        (
            Namespace("model", "weights", KVLayout(4, 4, 16, "float32"), tenant=hash_salt("us")),
            "kv_heads: held 2",
        ),
        (Namespace("model", "newer", LAYOUT, tenant=hash_salt("us")), "weights: held weights, asked newer"),
    ]:
        lookup = m.cache(1, other).explain(run, chunker=CHUNKS)
        assert {c.miss for c in lookup.chunks} == {Miss.LAYOUT}
        assert all(words in c.detail for c in lookup.chunks)


def test_explain_says_nothing_of_another_tenant_or_model(mesh: Callable) -> None:
    m = mesh(2)
    run = prompt(128)
    keep(m.caches[0], run)
    half = KVLayout(4, 2, 16, "float16")
    for other in (
        Namespace("model", "weights", half, tenant=hash_salt("them")),
        Namespace("model", "weights", half),
        Namespace("model", "weights", LAYOUT, tenant=hash_salt("them")),
        Namespace("another", "weights", LAYOUT, tenant=hash_salt("us")),
    ):
        lookup = m.cache(1, other).explain(run, chunker=CHUNKS)
        assert {(c.miss, c.detail, c.found) for c in lookup.chunks} == {(Miss.ABSENT, "", ())}


def test_a_tenants_salt_is_in_no_descriptor_and_in_no_status(mesh: Callable) -> None:
    m = mesh(2)
    keep(m.caches[0], prompt(64))
    told = b"".join(d for node in m.nodes for d in node.node.namespaces) + repr(m.status(0)).encode()
    assert told and hash_salt("us") not in told and hash_salt("us").hex().encode() not in told


def test_a_tenant_finds_nothing_of_another(mesh: Callable) -> None:
    m = mesh(2)
    run = prompt(128)
    keep(m.caches[0], run)
    for tenant in (None, hash_salt("them")):
        other = m.cache(1, Namespace("model", "weights", LAYOUT, tenant=tenant))
        assert {(c.match, c.miss) for c in find(other, run).chunks} == {(Match.NONE, Miss.ABSENT)}


def test_a_fast_engine_recomputes_rather_than_pulls(mesh: Callable) -> None:
    m = mesh(2)
    run = prompt(128)
    kv = keep(m.caches[0], run)
    cache = m.caches[1]
    cache.client.report_prefill_rate(1e12)
    lookup = find(cache, run)
    assert {(c.match, c.source, c.miss) for c in lookup.chunks} == {
        (Match.NONE, Source.RECOMPUTE, Miss.CHEAPER_TO_RECOMPUTE)
    }
    assert {c.peer for c in lookup.chunks} == {""} and len(lookup.chunks[0].found) == 1, (
        "it still says who has it"
    )
    cache.client.report_prefill_rate(1.0)
    with cache.fetch(find(cache, run)) as fetched:
        assert whole(fetched, kv)


def test_a_deadline_of_the_caller_leaves_out_what_cannot_come_in_time(mesh: Callable) -> None:
    m = mesh(2, transports=("tcp",))
    run, cache = prompt(128), m.caches[1]
    kv = keep(m.caches[0], run)
    costs = m.nodes[1].node.costs

    def slow_peer() -> None:
        costs.rate("tcp", "n0").observe(1 << 20, 6000.0, m.nodes[1].node._loop.time())

    m.nodes[1].call(_run(slow_peer))
    lookup = find(cache, run, deadline_s=10.0)
    assert {c.miss for c in lookup.chunks} == {Miss.DEADLINE}
    with cache.fetch(find(cache, run)) as fetched:
        assert whole(fetched, kv), "without a deadline, and a prefill to compare with, it is waited for"
    at_hand = find(cache, run, deadline_s=10.0)
    assert {c.source for c in at_hand.chunks} == {Source.LOCAL}


async def _run(what: Callable[[], None]) -> None:
    what()


def test_a_fetch_ends_with_the_deadline_of_its_lookup(mesh: Callable) -> None:
    m = mesh(2)
    run, cache = prompt(128), m.caches[1]
    keep(m.caches[0], run)
    lookup = dataclasses.replace(find(cache, run), by_s=0.0)
    with cache.fetch(lookup) as fetched:
        assert {c.miss for c in fetched} == {Miss.DEADLINE}
    with cache.fetch(dataclasses.replace(lookup, by_s=None, patience_s=0.0)) as fetched:
        assert {c.miss for c in fetched} == {Miss.DEADLINE}


def test_chunks_of_several_holders_are_fetched_as_the_node_said_it(mesh: Callable) -> None:
    m = mesh(3)
    run, (first, second, cache) = prompt(512), m.caches
    kv = keep(first, run)
    chunks = second.chunks(run, chunker=CHUNKS)[::2]
    assert second.store(chunks, kv).published(PATIENCE_S)
    cache.client.report_prefill_rate(1.0)
    lookup = find(cache, run, deadline_s=30.0)
    assert isinstance(lookup.chunks, SingleChunks), "no object a chunk until somebody looks"
    assert lookup.patience_s == 1.5 * 512 and 0 < lookup.by_s - time.monotonic() < 30
    with cache.fetch(lookup) as fetched:
        assert whole(fetched, kv)
        assert [c.peer for c in fetched] == [c.peer for c in lookup.chunks]
        assert {len(c.found[0].holders) for c in lookup.chunks} == {1, 2}
        assert all(c.found[0].holders[0].node == c.peer for c in lookup.chunks)
    at_home = find(cache, run, deadline_s=30.0)
    assert {c.source for c in at_home.chunks} == {Source.LOCAL}
    assert at_home.patience_s is None and 0 < at_home.by_s - time.monotonic() < 30


def test_what_a_pull_and_a_prefill_took_is_in_the_status(mesh: Callable) -> None:
    m = mesh(2, transports=("tcp",))
    run, cache = prompt(512), m.caches[1]
    kv = keep(m.caches[0], run)
    with cache.fetch(find(cache, run)) as fetched:
        assert whole(fetched, kv)
    cache.client.report_prefill(1000, 499_500, 0.5)
    cache.client.mesh()  # an answer behind the report
    planner = m.status(1)["planner"]
    (peer,) = planner["peers"]
    assert (peer["way"], peer["peer"], peer["bodies"]) == ("tcp", "n0", len(fetched))
    assert peer["latency_s"] != 1e-3 and peer["bytes_per_s"] != 1e9, "measured, not assumed"
    assert 0 < peer["p50_s"] <= peer["p99_s"]
    assert planner["prefill"]["reports"] == 1 and 1500 < planner["prefill"]["tokens_per_s"] < 2500


def test_after_a_change_of_view_an_owner_says_unknown_until_it_has_heard_from_all(mesh: Callable) -> None:
    m = mesh(2, resync_s=600.0)
    run = prompt(64 * 32)
    assert {c.miss for c in find(m.caches[0], run).chunks} == {Miss.ABSENT}, "all have told all"
    # A member that never says anything.
    silent = m.nodes[1].member
    ghost = type(silent)("ghost", 1, "127.0.0.1:9", "", {})
    m.nodes[0].apply_view([m.nodes[0].member, m.nodes[1].member, ghost])
    lookup = find(m.caches[0], run, budget_s=1.0)
    owner = m.nodes[0].node.view.ring.owners
    own = [c for c in lookup.chunks if owner(c.keys.content)[0] == "n0"]
    assert own and {c.miss for c in own} == {Miss.UNKNOWN}


# -- tensors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kv, words",
    [
        (torch.zeros(LAYOUT.shape(64), dtype=torch.float16), "torch.float16.*float32"),
        (torch.zeros(LAYOUT.shape(64)).to("meta"), "meta"),
        (torch.zeros(LAYOUT.shape(64)).to_sparse(), "sparse"),
        (torch.zeros(3, 2, 64, 2, 16), r"\[3, 2, 64, 2, 16\], expected \[4, 2, tokens, 2, 16\]"),
        (torch.zeros(4, 2, 64, 16, 2), "expected"),
        (torch.zeros(4, 64, 2, 16), "expected"),
        (torch.zeros(LAYOUT.shape(63)), r"\[0, 64\) is outside the tokens \[0, 63\)"),
        (torch.zeros(0), "expected"),
    ],
)
def test_a_tensor_that_is_not_what_its_namespace_says_is_refused_in_words(
    mesh: Callable, kv: torch.Tensor, words: str
) -> None:
    m = mesh(1)
    cache = m.caches[0]
    with pytest.raises(LayoutError, match=words):
        cache.store(cache.chunks(prompt(64), CHUNKS), kv)
    assert m.status(0)["host"]["bytes"] == 0


def test_a_tensor_of_any_strides_is_stored_right_from_its_offset_on(mesh: Callable) -> None:
    m = mesh(2)
    run = prompt(128)
    base = torch.randn(16, 4, 128, 2, 2, requires_grad=True)
    kv = base.permute(1, 4, 2, 3, 0)  # [4, 2, 128, 2, 16]
    assert not kv.is_contiguous()
    chunks = m.caches[0].chunks(run, CHUNKS)
    assert m.caches[0].store(chunks[:1], kv).stored == 1
    assert m.caches[0].store(chunks[1:], kv[:, :, 60:], offset=60).published(PATIENCE_S)
    with m.caches[1].fetch(find(m.caches[1], run)) as fetched:
        assert whole(fetched, kv.detach()) and not fetched[0].kv.requires_grad
    with pytest.raises(LayoutError):
        m.caches[0].store(chunks, kv, offset=1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "uint8"])
def test_every_dtype_comes_back_bit_by_bit(mesh: Callable, dtype: str) -> None:
    m = mesh(2)
    namespace = Namespace("model", "weights", KVLayout(2, 1, 8, dtype))
    writer, reader = m.cache(0, namespace), m.cache(1, namespace)
    run = prompt(64)
    shape = namespace.layout.shape(64)
    kv = torch.randint(0, 256, (namespace.layout.body_bytes(64),), dtype=torch.uint8)
    kv = kv.view(getattr(torch, dtype)).view(shape)
    assert writer.store(writer.chunks(run, CHUNKS), kv).published(PATIENCE_S)
    with reader.fetch(find(reader, run)) as fetched:
        assert fetched[0].kv.dtype == kv.dtype and fetched[0].kv.shape == shape
        assert torch.equal(fetched[0].kv.view(torch.uint8), kv.view(torch.uint8))


def test_an_engine_may_write_straight_into_the_slab_and_a_writer_that_fails_leaves_nothing(
    mesh: Callable,
) -> None:
    m = mesh(1)
    cache, run, kv = m.caches[0], prompt(128), some_kv(128)
    chunks = cache.chunks(run, CHUNKS)

    def fails_at_the_second(chunk: Any, out: torch.Tensor) -> None:
        if chunk.start:
            raise ZeroDivisionError
        out.copy_(kv[:, :, chunk.start : chunk.stop])

    with pytest.raises(ZeroDivisionError):
        cache.store(chunks, fails_at_the_second)
    until(lambda: m.status(0)["host"]["bytes"] == 0, "both slots came back")
    assert cache.store(chunks, lambda c, out: out.copy_(kv[:, :, c.start : c.stop])).stored == 2
    with cache.fetch(find(cache, run)) as fetched:
        assert whole(fetched, kv)


def test_prompts_of_no_tokens_and_of_one_token_chunks(mesh: Callable) -> None:
    m = mesh(2)
    nothing = find(m.caches[0], torch.zeros(0, dtype=torch.int64))
    assert nothing.chunks == () and nothing.exact_prefix_tokens == 0
    with m.caches[0].fetch(nothing) as fetched:
        assert len(fetched) == 0
    with m.caches[0].prefetch(nothing) as handle:
        assert handle.layer(0) == []
    assert m.caches[0].store([], some_kv(0)).published(PATIENCE_S)
    for chunker in (FixedChunker(1), SegmentChunker(range(9))):
        run = prompt(9, seed=len(repr(chunker)))
        kv = keep(m.caches[0], run, chunker)
        with m.caches[1].fetch(find(m.caches[1], run, chunker)) as fetched:
            assert len(fetched) == 9 and whole(fetched, kv)


@pytest.mark.parametrize("tokens", [[1.5], [[1, 2]], ["a"], [-1], [2**32], [True, False], None])
def test_tokens_that_are_none_are_the_callers_mistake(mesh: Callable, tokens: Any) -> None:
    m = mesh(1)
    with pytest.raises(ConfigError):
        m.caches[0].lookup(tokens)


# -- transports ------------------------------------------------------------------------------------


def breaks(monkeypatch: pytest.MonkeyPatch, node: NodeRuntime, name: str) -> list[int]:
    """Make one transport of a node fail; returns a list that grows with each try."""
    tries: list[int] = []

    class Failing:
        def __init__(self) -> None:
            loop = asyncio.get_running_loop()
            self.done, self.settled = loop.create_future(), loop.create_future()
            self.done.set_exception(TransportError("as the test wants"))
            self.settled.set_result(None)

        def abandon(self) -> None: ...

    def pull(*_: object) -> Failing:
        tries.append(1)
        return Failing()

    monkeypatch.setattr(node.node.puller._transports[name], "pull", pull)
    return tries


def test_a_transport_that_fails_gives_way_to_the_next_and_is_left_alone(
    mesh: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    m = mesh(2, transports=("shm", "tcp"))
    first, second = prompt(64), prompt(64, seed=1)
    kvs = [keep(m.caches[0], run) for run in (first, second)]
    tries = breaks(monkeypatch, m.nodes[1], "shm")
    for run, kv in zip((first, second), kvs, strict=True):
        with m.caches[1].fetch(find(m.caches[1], run)) as fetched:
            assert whole(fetched, kv) and fetched[0].transport == "tcp"
    assert len(tries) == 1 and m.counters(1)["failed_shm"] == 1


def test_a_transport_that_failed_is_tried_again_in_its_time(
    mesh: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    m = mesh(2, transports=("shm", "tcp"), transport_retry_s=0.0)
    run = prompt(128)
    keep(m.caches[0], run)
    with monkeypatch.context() as broken:
        breaks(broken, m.nodes[1], "shm")
        lookup = find(m.caches[1], run)
        with m.caches[1].fetch(Lookup(lookup.tokens, lookup.chunks[:1], 0.0)) as fetched:
            assert fetched[0].transport == "tcp"
    with m.caches[1].fetch(Lookup(lookup.tokens, lookup.chunks[1:], 0.0)) as fetched:
        assert fetched[0].transport == "shm"


def test_a_peer_without_any_working_transport_is_unreachable_and_says_so(
    mesh: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    m = mesh(2, transports=("tcp",))
    run = prompt(64)
    keep(m.caches[0], run)
    breaks(monkeypatch, m.nodes[1], "tcp")
    lookup = find(m.caches[1], run)
    with m.caches[1].fetch(lookup) as fetched:
        assert (fetched[0].kv, fetched[0].miss) == (None, Miss.HOLDER_UNREACHABLE)
    again = find(m.caches[1], run).chunks[0]
    assert (again.match, again.miss) == (Match.NONE, Miss.HOLDER_UNREACHABLE)


def test_the_slab_of_a_node_that_has_gone_is_let_go_of(mesh: Callable) -> None:
    m = mesh(3, transports=("shm",))
    mapped = m.nodes[2].node.puller._transports["shm"]._peers
    runs = [prompt(64, seed=holder) for holder in (0, 1)]
    for cache, run in zip(m.caches, runs, strict=False):
        keep(cache, run)
    lookups = [find(m.caches[2], run) for run in runs]
    for holder, lookup in enumerate(lookups):
        with m.caches[2].fetch(lookup) as fetched:
            assert fetched[0].peer == f"n{holder}"
        assert list(mapped) == [f"n{holder}"]
        m.nodes[holder].close()
        until(lambda: not mapped, "the slab is let go of")


def test_each_pair_of_nodes_may_have_its_own_transports(mesh: Callable) -> None:
    m = mesh([{}, {"transports_by_peer": {"n0": ("tcp",), "n2": ("shm",)}}, {}])
    for holder, transport in ((0, "tcp"), (2, "shm")):
        run = prompt(64, seed=holder)
        keep(m.caches[holder], run)
        with m.caches[1].fetch(find(m.caches[1], run)) as fetched:
            assert (fetched[0].peer, fetched[0].transport) == (f"n{holder}", transport)


def test_many_readers_of_one_body_pull_it_once(mesh: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    m = mesh(2)
    run = prompt(64)
    kv = keep(m.caches[0], run)
    cache = m.caches[1]
    lookup = find(cache, run)
    handles = [cache.prefetch(lookup) for _ in range(8)] + [m.cache(1).prefetch(lookup) for _ in range(4)]
    for handle in handles:
        assert whole(handle.chunks(), kv)
    assert m.counters(1)["pulls_shm"] == 1
    for handle in handles:
        handle.close()


# -- people ----------------------------------------------------------------------------------------


def test_the_mesh_status_has_every_node_and_of_a_dead_one_why(mesh: Callable) -> None:
    m = mesh(3)
    run = prompt(64)
    keep(m.caches[0], run)
    client = m.caches[0].client
    nodes = client.mesh()
    assert [n["name"] for n in nodes] == ["n0", "n1", "n2"]
    assert len({n["view_id"] for n in nodes}) == 1 and {n["warm"] for n in nodes} == {True}
    for n in nodes:
        assert n["members"] == ["n0", "n1", "n2"]
        assert {
            "incarnation",
            "host",
            "nvme",
            "leases",
            "tickets",
            "sessions",
            "counters",
            "directory_keys",
        } <= n.keys()
    assert [n["host"]["bodies"] for n in nodes] == [1, 0, 0]
    assert sum(n["directory_keys"] for n in nodes) == 2, "two owners know it"
    m.nodes[2].close()
    nodes = client.mesh(budget_s=0.5)
    assert [("error" in n, n["name"]) for n in nodes] == [(False, "n0"), (False, "n1"), (True, "n2")]


def test_a_closed_client_stays_closed_and_only_misses(mesh: Callable) -> None:
    m = mesh(1)
    run = prompt(64)
    kv = keep(m.caches[0], run)
    cache = m.cache(0)
    lookup = find(cache, run)
    fetched = cache.fetch(lookup)
    cache.client.close()
    cache.client.close()
    assert find(cache, run).chunks[0].miss is Miss.NODE_DOWN
    assert cache.fetch(lookup)[0].miss is Miss.NODE_DOWN
    assert dict(cache.store(cache.chunks(run, CHUNKS), kv).refused) == {Miss.NODE_DOWN: 1}
    assert cache.pin(lookup, 1.0) == 0
    fetched.release()
    until(lambda: m.status(0)["sessions"] == 1, "its session ended")


def test_a_client_finds_its_node_again_after_a_restart(mesh: Callable) -> None:
    m = mesh(1)
    from p2pcache.api import Client

    where = [m.nodes[0].socket_path]
    with Client(where[0], PATIENCE_S, lambda: where[0]) as client:
        cache = client.open(NAMESPACE)
        run = prompt(64)
        old = m.nodes[0]
        old.close()
        until(lambda: find(cache, run).chunks[0].miss is Miss.NODE_DOWN, "the client knows")
        m.nodes[0] = NodeRuntime.start(old.config)
        where[0] = m.nodes[0].socket_path
        until(lambda: find(cache, run).chunks[0].miss is Miss.ABSENT, "the client is back")
        keep(cache, run)
        assert list(m.nodes[0].node.namespaces) == [NAMESPACE.describe()]


def test_a_node_of_another_boot_or_view_is_not_followed(mesh: Callable) -> None:
    m = mesh(2)
    view_id = m.status(0)["view_id"]
    m.nodes[0].apply_view([m.nodes[1].member])
    assert m.status(0)["view_id"] == view_id, "a View without this node is not its View"


# -- what an engine must not be able to break ------------------------------------------------------


def test_a_client_closed_in_the_middle_of_a_store_keeps_its_slot_until_the_writer_is_done(mesh: Callable):
    m = mesh(1)
    writing, go = threading.Event(), threading.Event()

    def slow(chunk: Any, out: torch.Tensor) -> None:
        writing.set()
        assert go.wait(PATIENCE_S)
        out.fill_(666.0)

    with ThreadPoolExecutor(1) as pool:
        victim = m.embedded.client(0, PATIENCE_S)
        cache = victim.open(NAMESPACE)
        late = pool.submit(cache.store, cache.chunks(prompt(64, 1), CHUNKS), slow)
        assert writing.wait(PATIENCE_S)
        victim.close()
        kv = keep(m.caches[0], prompt(64, 2))
        go.set()
        assert late.result(PATIENCE_S).stored == 0
    with m.caches[0].fetch(find(m.caches[0], prompt(64, 2))) as fetched:
        assert whole(fetched, kv)


def test_a_client_closed_while_others_use_it_gives_misses_and_no_error(mesh: Callable):
    m = mesh(1)
    run = prompt(256)
    keep(m.caches[0], run)
    for _ in range(20):
        client = m.embedded.client(0, PATIENCE_S)
        cache = client.open(NAMESPACE)
        lookup = find(cache, run)
        with ThreadPoolExecutor(2) as pool:
            fetching = pool.submit(lambda c=cache, x=lookup: [f.miss for f in c.fetch(x)])
            storing = pool.submit(cache.store, cache.chunks(prompt(64, 3), CHUNKS), some_kv(64))
            client.close()
            assert set(fetching.result(PATIENCE_S)) <= {None, Miss.NODE_DOWN}
            storing.result(PATIENCE_S)


def test_isolated_kv_is_found_by_content_and_never_offered_as_exact(mesh: Callable):
    m = mesh(2)
    run = prompt(128)
    keep(m.caches[0], run, provenance=Provenance.ISOLATED)
    assert {c.match for c in find(m.caches[1], run).chunks} == {Match.CONTENT}
    assert {c.miss for c in find(m.caches[1], run, content_reuse=False).chunks} == {Miss.EXACT_ONLY}


def test_a_passage_that_stands_in_many_contexts_is_found_in_the_newest_of_them(mesh: Callable):
    m = mesh(2)
    passage = prompt(64, 9)
    for i in range(12):
        keep(m.caches[0], torch.cat([prompt(64, 20 + i), passage]))
    for cache in m.caches:
        new = find(cache, torch.cat([prompt(64, 50), passage])).chunks[1]
        assert new.match is Match.CONTENT and 1 <= len(new.found) <= 8
        last = find(cache, torch.cat([prompt(64, 31), passage])).chunks[1]
        assert last.match is Match.EXACT


def test_a_directory_that_is_wrong_about_a_base_position_costs_a_miss(mesh: Callable):
    m = mesh(2)
    run = torch.cat([prompt(64, 1), prompt(64, 2)])
    keep(m.caches[0], run)
    moved = find(m.caches[1], torch.cat([prompt(64, 3), prompt(64, 2)]))
    chunk = moved.chunks[1]
    assert chunk.match is Match.CONTENT and chunk.body.base_position == 64
    lie = dataclasses.replace(chunk.body, base_position=7)
    found = tuple(dataclasses.replace(f, body=lie) for f in chunk.found)
    wrong = dataclasses.replace(
        moved, chunks=(moved.chunks[0], dataclasses.replace(chunk, body=lie, found=found))
    )
    for cache in m.caches:  # from the peer, and where it lies at hand
        with cache.fetch(wrong) as fetched:
            assert fetched[1].kv is None and fetched[1].miss in (Miss.HOLDER_GONE, Miss.LAYOUT)


def test_one_chunk_of_another_length_costs_that_chunk_and_no_lease(mesh: Callable):
    m = mesh(1)
    run = prompt(256)
    kv = keep(m.caches[0], run)
    lookup = find(m.caches[0], run)
    chunks = list(lookup.chunks)
    chunks[1] = dataclasses.replace(chunks[1], keys=chunks[1].keys._replace(stop=100))
    with m.caches[0].fetch(dataclasses.replace(lookup, chunks=tuple(chunks))) as fetched:
        assert [c.miss for c in fetched] == [None, Miss.LAYOUT, None, None]
        assert same(fetched[2], kv, 128)


def test_published_says_so_when_no_owner_could_be_told(mesh: Callable):
    m = mesh(3, rpc_timeout_s=0.3)
    for node in m.nodes[1:]:
        node.close()
    cache = m.caches[0]
    stored = cache.store(cache.chunks(prompt(640), CHUNKS), some_kv(640))
    assert stored.stored == 10 and not stored.published(PATIENCE_S)


def test_a_client_whose_search_for_a_node_fails_oddly_searches_again(mesh: Callable, monkeypatch: Any):
    m = mesh(1)
    found: list[str] = []

    def find_node() -> str:
        found.append("")
        if len(found) == 1:
            raise RuntimeError("something that nobody thought of")
        return m.nodes[0].socket_path

    monkeypatch.setattr("p2pcache.connection._RECONNECT_S", 0.01)
    client = Client(m.nodes[0].socket_path, PATIENCE_S, find_node)
    client.link().close()
    cache_works = lambda: find(client.open(NAMESPACE), prompt(64)).chunks[0].miss is Miss.ABSENT  # noqa: E731
    until(cache_works, "the client is connected again")
    assert len(found) == 2
    client.close()


def test_a_forked_child_does_not_keep_its_parents_connection(mesh: Callable):
    m = mesh(1)
    client = m.embedded.client(0, PATIENCE_S)
    keep(client.open(NAMESPACE), prompt(64))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)  # lives until the parent says so
        os._exit(0)
    try:
        client.close()
        until(lambda: m.status(0)["sessions"] == 1, "only the fixture's session is left")
    finally:
        os.close(read)
        os.close(write)
        os.waitpid(child, 0)


def test_a_node_that_takes_no_messages_for_a_while_keeps_no_lease_of_those_who_gave_up(mesh: Callable):
    m = mesh(1)
    client = m.embedded.client(0, PATIENCE_S)
    cache = client.open(NAMESPACE)
    keep(cache, prompt(64))
    fetched = cache.fetch(find(cache, prompt(64)))
    stalled, go_on = threading.Event(), threading.Event()
    m.nodes[0]._loop.call_soon_threadsafe(lambda: (stalled.set(), go_on.wait(PATIENCE_S)))
    assert stalled.wait(PATIENCE_S)
    # More than a socket's buffer takes: the send itself meets its limit.
    big = find(cache, prompt(30_000), FixedChunker(1), budget_s=0.1)
    assert {c.miss for c in big.chunks} == {Miss.NODE_DOWN}
    fetched.release()
    go_on.set()
    until(lambda: m.status(0)["sessions"] == 1, "the broken connection's session has ended")
    client.close()


def test_housekeeping_and_publishing_outlive_an_error_of_their_own(mesh: Callable, monkeypatch: Any):
    m = mesh(1)
    node, calls = m.nodes[0].node, []

    def broken(*arguments: Any) -> Any:
        calls.append(arguments)
        raise RuntimeError("a mistake of ours")

    with monkeypatch.context() as patch:
        patch.setattr(node.shard, "sweep", broken)
        until(lambda: len(calls) >= 2, "a second round of housekeeping")
        patch.setattr(node.shard, "handle", broken)
        cache = m.caches[0]
        stored = cache.store(cache.chunks(prompt(64, 1), CHUNKS), some_kv(64))
        assert stored.stored == 1 and not stored.published(PATIENCE_S)
    keep(m.caches[0], prompt(64, 2))


# -- what reviews of the code found ----------------------------------------------------------------


def test_a_lookups_patience_and_its_deadline_are_what_they_say_also_where_nothing_is_to_choose(
    mesh: Callable,
):
    m = mesh(2, transports=("tcp",))
    keep(m.caches[0], prompt(64))
    m.caches[1].client.report_prefill_rate(1000.0)
    lookup = find(m.caches[1], prompt(64))
    assert lookup.by_s is None and lookup.patience_s is not None and lookup.patience_s < 10
    with m.caches[1].fetch(lookup, budget_s=PATIENCE_S) as fetched:
        assert [c.miss for c in fetched] == [None]
    again = find(m.caches[1], prompt(64), deadline_s=PATIENCE_S)
    assert again.by_s is not None and again.by_s > time.monotonic()


@pytest.mark.parametrize("sums", [[], [1] * 3, [1] * 1000])
def test_a_commit_that_no_tier_could_keep_is_refused_and_hurts_nobody(
    mesh: Callable, tmp_path: Path, sums: list[int]
):
    m = mesh([tiered(tmp_path / "nvme")])
    cache = m.caches[0]
    (chunk,) = cache.chunks(prompt(64, seed=9), CHUNKS)
    link = cache.client.link()
    body = body_to_wire(cache.body(chunk, Provenance.IN_CONTEXT))
    ((ok, _, generation),) = link.call("reserve", {"bodies": [body], "deadline_s": 5.0}, 5.0)["slots"]
    assert ok == "ok"
    reply = link.call("commit", {"slots": [[generation, sums, b""]]}, 5.0)
    assert reply["committed"] == 0
    for seed in range(40):  # more than the tier holds
        run = prompt(64, seed=seed + 20)
        assert cache.store(cache.chunks(run, CHUNKS), some_kv(64)).stored == 1


def test_a_fault_of_the_nodes_own_in_one_chunk_leaves_no_lease_of_the_others(
    mesh: Callable, monkeypatch: pytest.MonkeyPatch
):
    m = mesh(2, transports=("tcp",))
    keep(m.caches[0], prompt(64))
    keep(m.caches[1], prompt(64, seed=1))
    both = torch.cat([prompt(64, seed=1), prompt(64)])

    async def broken(*_: Any) -> Any:
        raise RuntimeError("a bug")

    lookup = find(m.caches[1], both)
    assert [c.source for c in lookup.chunks] == [Source.LOCAL, Source.PEER]
    monkeypatch.setattr(m.nodes[1].node.puller, "pull", broken)
    with m.caches[1].fetch(lookup, budget_s=PATIENCE_S) as fetched:
        assert all(c.kv is None for c in fetched)
        assert m.status(1)["leases"] == 0


@pytest.mark.parametrize("budget_s", [1e10, float("inf")])
def test_a_budget_may_be_as_large_as_one_likes(mesh: Callable, budget_s: float):
    m = mesh(2)
    kv = keep(m.caches[0], prompt(128))
    lookup = m.caches[1].lookup(prompt(128), chunker=CHUNKS, budget_s=budget_s, deadline_s=budget_s)
    with m.caches[1].fetch(lookup, budget_s=budget_s) as fetched:
        assert whole(fetched, kv)
    other = prompt(64, seed=3)
    stored = m.caches[1].store(m.caches[1].chunks(other, CHUNKS), some_kv(64), budget_s=budget_s)
    assert stored.stored == 1 and stored.published(budget_s)


def test_a_budget_that_is_no_number_is_the_callers_mistake(mesh: Callable):
    m = mesh(1)
    with pytest.raises(ConfigError, match="NaN"):
        m.caches[0].lookup(prompt(64), chunker=CHUNKS, deadline_s=float("nan"))
    with pytest.raises(ConfigError, match="NaN"):
        m.caches[0].lookup(prompt(64), chunker=CHUNKS, budget_s=float("nan"))
