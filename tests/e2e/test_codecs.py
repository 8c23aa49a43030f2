"""Codecs where bytes are scarce: below the host tier and between hosts. What comes back is the very body."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from p2pcache import EmbeddedMesh, FixedChunker, KVLayout, Match, Miss, Namespace, NodeConfig, Source, codecs
from p2pcache.api import Cache
from p2pcache.io.transport_ucx import ucx_available
from p2pcache.metrics import samples
from p2pcache.node.inbox import Inbox
from p2pcache.node.wireform import body_to_wire, leave_from_wire
from p2pcache.runtime import NodeRuntime
from p2pcache.types import BodyInfo, ConfigError, ContentKey, ExactKey
from tests.fault.node_process import PATIENCE_S, at_rest, state, until

MIB = 1 << 20
LAYOUT = KVLayout(layers=4, kv_heads=2, head_dim=32, dtype="bfloat16")  # 1 KiB a token
NAMESPACE = Namespace("model", "weights", LAYOUT)
NOT_BF16 = Namespace("model", "weights", dataclasses.replace(LAYOUT, dtype="float16"))
CHUNKS = FixedChunker(64)


class Mesh:
    """Nodes, and one cache a node."""

    def __init__(self, stack: contextlib.ExitStack, configs: Sequence[NodeConfig]):
        self.embedded = stack.enter_context(EmbeddedMesh(configs))
        self.nodes = self.embedded.nodes
        self._stack = stack

    def cache(self, index: int, namespace: Namespace = NAMESPACE) -> Cache:
        return self._stack.enter_context(self.embedded.client(index, PATIENCE_S)).open(namespace)

    def restart(self, index: int, **changes: Any) -> None:
        old = self.nodes[index]
        old.close()
        self.nodes[index] = NodeRuntime.start(old.config.replace(**changes))
        self.embedded.share_view()

    def status(self, index: int) -> dict[str, Any]:
        return state(self.nodes[index])

    def coded(self, index: int, tier: str, direction: str) -> tuple[int, int, int]:
        """(bodies, raw bytes, encoded bytes) of a node."""
        rows = [
            r
            for r in self.status(index)["codecs"]["coded"]
            if (r["tier"], r["direction"]) == (tier, direction)
        ]
        assert {(r["codec"], r["error"]) for r in rows} <= {("lossless", 0.0)}
        return tuple(sum(r[key] for r in rows) for key in ("bodies", "raw_bytes", "encoded_bytes"))


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Callable[..., Mesh]]:
    """Makes meshes of a dict of settings a node; in the end every node is at rest."""
    tmp_path.chmod(0o700)
    made: list[Mesh] = []
    with contextlib.ExitStack() as stack:

        def start(*each: dict[str, Any]) -> Mesh:
            common = {"host_bytes_max": 8 * MIB, "resync_s": 0.0, "runtime_dir": str(tmp_path)}
            configs = [NodeConfig(**({"name": f"n{i}"} | common | own)) for i, own in enumerate(each)]
            made.append(Mesh(stack, configs))
            return made[-1]

        yield start
        for node in (node for mesh_ in made for node in mesh_.nodes):
            until(lambda node=node: at_rest(state(node)), f"{node.member.name} at rest")


def tiered(folder: Path, **more: Any) -> dict[str, Any]:
    folder.mkdir(mode=0o700, exist_ok=True)
    tier = {"nvme_path": str(folder), "nvme_bytes_max": 16 * MIB, "nvme_segment_bytes": 2 * MIB}
    return tier | {"demote_above": 0.0, "nvme_codec": "lossless"} | more


def prompt(count: int, seed: int = 0) -> torch.Tensor:
    return torch.arange(count) + 100_000 * seed


def keep(cache: Cache, run: torch.Tensor, kv: torch.Tensor | None = None) -> torch.Tensor:
    kv = torch.randn(LAYOUT.shape(len(run))).to(torch.bfloat16) if kv is None else kv
    stored = cache.store(cache.chunks(run, CHUNKS), kv)
    assert stored.published(PATIENCE_S) and not stored.refused
    return kv


def same_bits(kv: torch.Tensor, stored: torch.Tensor) -> bool:
    return torch.equal(kv.contiguous().view(torch.int16), stored.contiguous().view(torch.int16))


def fetch_exact(cache: Cache, run: torch.Tensor, kv: torch.Tensor, source: Source) -> None:
    """Every chunk is there, found as the exact one, bit by bit what was stored."""
    found = cache.lookup(run, chunker=CHUNKS, budget_s=PATIENCE_S)
    assert {c.match for c in found.chunks} == {Match.EXACT}
    with cache.fetch(found, budget_s=PATIENCE_S) as fetched:
        assert [c.miss for c in fetched] == [None] * len(found.chunks)
        assert {c.source for c in fetched} == {source}
        for c in fetched:
            start = c.found.keys.start
            assert same_bits(c.kv, kv[:, :, start : start + c.found.keys.tokens])


# -- the NVMe tier ---------------------------------------------------------------------------------


def special() -> torch.Tensor:
    """Values that an arithmetic codec would not bring back: NaNs with payloads, infinities, zeros' signs."""
    bits = torch.randint(-(1 << 15), 1 << 15, LAYOUT.shape(256), dtype=torch.int16)
    kv = torch.randn(LAYOUT.shape(256)).to(torch.bfloat16)
    kv.view(torch.int16)[..., :1] = bits[..., :1]
    return kv


@pytest.mark.parametrize("made", [None, special])
def test_bodies_go_down_encoded_and_come_up_after_a_restart_bit_by_bit(
    mesh: Callable, tmp_path: Path, made: Callable | None
) -> None:
    m = mesh(tiered(tmp_path / "nvme"))
    run = prompt(256)
    kv = keep(m.cache(0), run, made() if made else None)
    until(lambda: m.status(0)["nvme"]["records"] == 4, "all four demoted")
    bodies, raw, encoded = m.coded(0, "nvme", "encode")
    assert (bodies, raw) == (4, 4 * 64 << 10) and encoded < 0.85 * raw
    assert m.status(0)["nvme"]["live_bytes"] < 0.9 * raw

    m.restart(0, nvme_codec="none")  # what lies there is read, whatever is written from now on
    fetch_exact(m.cache(0), run, kv, Source.NVME)
    assert m.coded(0, "nvme", "decode") == (4, raw, encoded)
    assert m.coded(0, "nvme", "encode") == (0, 0, 0)


def test_what_does_not_save_enough_lies_raw_and_is_counted(mesh: Callable, tmp_path: Path) -> None:
    m = mesh(tiered(tmp_path / "nvme"), tiered(tmp_path / "other", codec_saving_min=0.5))
    run = prompt(256)
    kv = keep(m.cache(0, NOT_BF16), run, torch.randn(LAYOUT.shape(256)).to(torch.float16))
    other = keep(m.cache(1), run)
    for index in range(2):
        until(lambda index=index: m.status(index)["nvme"]["records"] == 4, "all four demoted")
        assert m.status(index)["codecs"]["kept_raw"] == [{"tier": "nvme", "reason": "saving", "bodies": 4}]
        assert m.coded(index, "nvme", "encode") == (0, 0, 0)
        m.restart(index)
    fetch_exact(m.cache(0, NOT_BF16), run, kv, Source.NVME)
    fetch_exact(m.cache(1), run, other, Source.NVME)


def test_a_damaged_encoded_record_is_a_miss_and_never_served(mesh: Callable, tmp_path: Path) -> None:
    m = mesh(tiered(tmp_path / "nvme"))
    run = prompt(64)
    keep(m.cache(0), run)
    until(lambda: m.status(0)["nvme"]["records"] == 1, "demoted")
    (place,) = [s for s in m.nodes[0].node.ports.nvme._index._segments if s.live]
    (location,) = place.live.values()
    m.restart(0)
    with open(tmp_path / "nvme" / f"{location.segment:06d}.seg", "r+b") as file:
        file.seek(location.body_offset + 20_000)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 8]))
    assert _miss(m.cache(0), run) in (Miss.CORRUPT, Miss.HOLDER_GONE)
    assert m.status(0)["counters"]["corrupt"] == 1 and m.status(0)["nvme"]["records"] == 0


def test_a_record_that_is_whole_but_decodes_to_another_body_is_a_miss(mesh: Callable, tmp_path: Path) -> None:
    """The encoded parts' checksums are right, the raw ones are not: both ends of the way are checked."""
    m = mesh(tiered(tmp_path / "nvme", demote_above=1.0))
    run = prompt(64)
    keep(m.cache(0), run)
    node = m.nodes[0].node
    (slot,) = node.residency.tier.resident()

    async def demote_wrongly() -> None:
        node.ports.slab.view(slot.offset, slot.nbytes)[5000] ^= 1
        await node.residency._demote(slot)
        node.residency.tier.evict(slot)

    m.nodes[0].call(demote_wrongly())
    assert _miss(m.cache(0), run) in (Miss.CORRUPT, Miss.HOLDER_GONE)
    assert m.status(0)["counters"]["corrupt"] == 1 and m.status(0)["nvme"]["records"] == 0


def _miss(cache: Cache, run: torch.Tensor) -> Miss | None:
    found = cache.lookup(run, chunker=CHUNKS, budget_s=PATIENCE_S)
    assert found.chunks[0].source is Source.NVME
    with cache.fetch(found, budget_s=PATIENCE_S) as fetched:
        return fetched[0].miss


def test_a_cancelled_promotion_keeps_its_slot_until_the_decoder_has_let_go(
    mesh: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    m = mesh(tiered(tmp_path / "nvme"))
    run = prompt(64)
    kv = keep(m.cache(0), run)
    until(lambda: m.status(0)["nvme"]["records"] == 1, "demoted")
    m.restart(0)
    node, decoding, gate = m.nodes[0].node, threading.Event(), threading.Event()
    unpack = codecs.unpack

    def slowly(*of: Any) -> None:
        decoding.set()
        assert gate.wait(PATIENCE_S)
        unpack(*of)

    async def lease() -> asyncio.Future:
        (record,) = node.ports.nvme.records()
        return asyncio.ensure_future(node.residency.lease(record.body.exact))

    async def cancel(leasing: asyncio.Future) -> tuple[bool, int]:
        for _ in range(3):  # as often as anybody likes
            leasing.cancel()
            await asyncio.sleep(0.01)
        return leasing.done(), len(node.residency.tier._others)

    async def ended(leasing: asyncio.Future) -> None:
        await asyncio.wait([leasing])
        assert leasing.cancelled()

    with monkeypatch.context() as patch:
        patch.setattr(codecs, "unpack", slowly)
        leasing = m.nodes[0].call(lease())
        assert decoding.wait(PATIENCE_S)
        assert m.nodes[0].call(cancel(leasing)) == (False, 1)
        gate.set()
        m.nodes[0].call(ended(leasing))
    assert m.status(0)["unfinished"] == 0
    fetch_exact(m.cache(0), run, kv, Source.NVME)


# -- between hosts ---------------------------------------------------------------------------------

WIRE = {"wire_codec": "lossless"}
TRANSPORTS = [
    "tcp",
    pytest.param("ucx", marks=pytest.mark.skipif(bool(ucx_available()), reason=str(ucx_available()))),
]


def at_rest_on_the_wire(m: Mesh) -> None:
    for node in m.nodes:
        until(lambda node=node: at_rest(state(node)), "at rest")
        assert state(node)["wire_codec_bytes"]["in"] == 0
        assert all(not parcel.holds for parcel in node.node.desk.outbox._parcels.values())


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("made", [None, special])
def test_a_pull_moves_encoded_bytes_and_brings_every_bit(
    mesh: Callable, transport: str, made: Callable | None
) -> None:
    m = mesh(*[WIRE | {"transports": (transport,)}] * 3)
    run = prompt(256)
    kv = keep(m.cache(0), run, made() if made else None)
    fetch_exact(m.cache(1), run, kv, Source.PEER)
    bodies, raw, encoded = m.coded(1, "wire", "decode")
    assert (bodies, raw) == (4, 256 << 10) and encoded < 0.85 * raw
    assert m.coded(0, "wire", "encode") == (bodies, raw, encoded)
    m.nodes[1].close()  # so that the third one asks the first
    m.embedded.nodes.remove(m.nodes[1])
    m.embedded.share_view()
    fetch_exact(m.cache(1), run, kv, Source.PEER)
    assert m.coded(0, "wire", "encode")[0] == 4, "each body is encoded once"
    at_rest_on_the_wire(m)
    found = {s.name: s.value for s in samples(m.status(1)) if ("tier", "wire") in s.labels}
    assert found["p2pcache_codec_raw_bytes_total"] == raw
    assert found["p2pcache_codec_encoded_bytes_total"] == encoded


@pytest.mark.parametrize(
    "settings",
    [
        [WIRE, {}],  # a reader that knows no codecs
        [{}, WIRE],  # a holder that knows none
        [WIRE | {"transports": ("shm",)}] * 2,  # the slab itself is read
        [WIRE | {"wire_codec_bytes_max": 1000}, WIRE],  # no room to keep an encoded body
        [WIRE | {"codec_saving_min": 0.5}, WIRE],  # not worth it
    ],
)
def test_who_cannot_or_need_not_is_sent_raw_bodies(mesh: Callable, settings: list[dict[str, Any]]) -> None:
    m = mesh(*({"transports": ("tcp",)} | own for own in settings))
    run = prompt(256)
    kv = keep(m.cache(0), run)
    fetch_exact(m.cache(1), run, kv, Source.PEER)
    assert [m.coded(i, "wire", way)[0] for i in (0, 1) for way in ("encode", "decode")] == [0] * 4
    at_rest_on_the_wire(m)


def test_encoded_bodies_are_kept_within_a_cap(mesh: Callable) -> None:
    cap = 80 << 10  # one raw body and a little: one can be made at a time
    m = mesh(WIRE | {"transports": ("tcp",), "wire_codec_bytes_max": cap}, WIRE | {"transports": ("tcp",)})
    run = prompt(64 * 20)
    kv = keep(m.cache(0), run)
    reader = m.cache(1)
    for first in range(0, len(run), 64):
        found = reader.lookup(run[: first + 64], chunker=CHUNKS, budget_s=PATIENCE_S)
        with reader.fetch(dataclasses.replace(found, chunks=found.chunks[-1:]), budget_s=PATIENCE_S) as got:
            assert same_bits(got[0].kv, kv[:, :, first : first + 64])
        until(lambda: m.status(0)["tickets"] == 0, "the ticket has ended")
        assert 0 < m.status(0)["wire_codec_bytes"]["out"] <= cap
    assert m.coded(0, "wire", "encode")[0] == 20
    fetch_exact(reader, run, kv, Source.LOCAL)


def test_readers_that_come_at_once_have_a_body_encoded_once(mesh: Callable) -> None:
    m = mesh(*[WIRE | {"transports": ("tcp",)}] * 4)
    run = prompt(64)
    keep(m.cache(0), run)
    outbox, coder = m.nodes[0].node.desk.outbox, m.nodes[0].node.coder

    async def at_once() -> None:
        (slot,) = m.nodes[0].node.residency.tier.resident()
        parcels = await asyncio.gather(*(outbox.take(slot) for _ in range(5)))
        assert len({id(p) for p in parcels}) == 1 and parcels[0].holds == 5
        for parcel in parcels:
            outbox.give_back(parcel)
        packing = asyncio.ensure_future(outbox.take(slot))
        await asyncio.sleep(0)
        assert (await packing) is parcels[0]
        outbox.give_back(parcels[0])

    m.nodes[0].call(at_once())
    assert coder.plain()["coded"][0]["bodies"] == 1


def test_an_encoding_that_fails_costs_the_encoding_and_not_the_body(
    mesh: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first asker gives up while others wait for the same parcel: they are sent the raw body."""
    m = mesh(WIRE)
    run = prompt(64)
    keep(m.cache(0), run)
    node = m.nodes[0].node
    outbox = node.desk.outbox

    async def first_gives_up() -> None:
        (slot,) = node.residency.tier.resident()
        gate = asyncio.Event()

        async def stuck(*_: Any) -> None:
            await gate.wait()

        with monkeypatch.context() as patch:
            patch.setattr(node.coder, "pack", stuck)
            first, other = (asyncio.ensure_future(outbox.take(slot)) for _ in range(2))
            await asyncio.sleep(0)
            first.cancel()
            assert await other is None
        assert outbox.nbytes == 0 and not outbox._parcels
        parcel = await outbox.take(slot)  # the next one tries again
        assert parcel is not None and parcel.packed is not None
        outbox.give_back(parcel)

    m.nodes[0].call(first_gives_up())


@pytest.mark.parametrize("where", ["on the way", "before the way"])
def test_encoded_bytes_that_are_wrong_are_a_miss_and_never_served(
    mesh: Callable, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    m = mesh(*[WIRE | {"transports": ("tcp",)}] * 2)
    run = prompt(64)
    keep(m.cache(0), run)
    coder = m.nodes[0].node.coder
    pack = coder.pack

    async def wrongly(place: str, codec: str, raw: memoryview, *of: Any) -> Any:
        changed = memoryview(bytearray(raw))
        changed[5000] ^= where == "before the way"  # parts and their checksums fit, yet not the body
        packed = await pack(place, codec, changed, *of)
        data = memoryview(bytearray(packed.data))
        data[5000] ^= where == "on the way"
        return packed._replace(data=data)

    monkeypatch.setattr(coder, "pack", wrongly)
    found = m.cache(1).lookup(run, chunker=CHUNKS, budget_s=PATIENCE_S)
    with m.cache(1).fetch(found, budget_s=PATIENCE_S) as fetched:
        assert (fetched[0].kv, fetched[0].miss) == (None, Miss.CORRUPT)
    assert m.status(1)["counters"]["corrupt"] == 1 and m.status(1)["host"]["bodies"] == 0
    at_rest_on_the_wire(m)


def test_what_an_abandoned_pull_may_still_write_to_is_not_the_slot_and_counts_until_it_is_over(
    mesh: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    m = mesh(*[WIRE | {"transports": ("tcp",)}] * 2)
    run = prompt(64)
    kv = keep(m.cache(0), run)
    reader = m.nodes[1].node
    pulls = []

    class Stuck:
        def __init__(self, dest: memoryview) -> None:
            loop = asyncio.get_running_loop()
            self.dest, self.done, self.settled = dest, loop.create_future(), loop.create_future()

        def abandon(self) -> None: ...

    def pull(peer: Any, ticket: Any, dest: memoryview, progress: Any) -> Stuck:
        pulls.append(Stuck(dest))
        return pulls[-1]

    with monkeypatch.context() as patch:
        patch.setattr(reader.puller._transports["tcp"], "pull", pull)
        found = m.cache(1).lookup(run, chunker=CHUNKS, budget_s=PATIENCE_S)
        with m.cache(1).fetch(found, budget_s=0.1) as fetched:
            assert fetched[0].miss is Miss.DEADLINE
    until(lambda: at_rest(m.status(1)), "the slot is free at once")
    assert m.status(1)["wire_codec_bytes"]["in"] == pulls[0].dest.nbytes > 0
    fetch_exact(m.cache(1), run, kv, Source.PEER)
    pulls[0].dest[:] = b"\xff" * pulls[0].dest.nbytes  # the late write
    fetch_exact(m.cache(1), run, kv, Source.LOCAL)

    async def settle() -> None:
        pulls[0].settled.set_result(None)

    m.nodes[1].call(settle())
    at_rest_on_the_wire(m)


def test_a_reader_takes_no_more_encoded_bytes_at_once_than_it_has_room_for() -> None:
    inbox = Inbox(100)
    assert len(inbox.take(1000)) == 1000  # alone rather than never
    assert inbox.take(1) is None
    inbox.give_back(1000, None)
    assert [inbox.take(n) is None for n in (60, 40, 1)] == [False, False, True]
    inbox.give_back(60, None)
    inbox.give_back(40, None)
    assert inbox.nbytes == 0


@pytest.mark.parametrize(
    ("codec", "nbytes", "parts"),
    [
        ("int8", 400, 4),  # not the very bytes
        ("raw", 400, 4),
        ("", 400, 4),
        ("lossless", 1000, 4),  # as long as the body
        ("lossless", 1 << 62, 4),
        ("lossless", 401, 4),
        ("lossless", 0, 4),
        ("lossless", 3, 4),
        ("lossless", 400, 5),
        ("lossless", 0, 0),
    ],
)
def test_a_hostile_encoded_ticket_is_no_leave(codec: str, nbytes: int, parts: int) -> None:
    body = BodyInfo(ContentKey(bytes(16)), ExactKey(bytes(16)), 10, 1000)
    raw = [bytes(16), 0, 1, [1, 2, 3, 4], b"", body_to_wire(body)]
    good = leave_from_wire([*raw, ["lossless", 400, [5, 6, 7, 8]]], body, ("lossless",))
    assert good is not None and good.ticket.nbytes == 400 and good.ticket.checksums == (5, 6, 7, 8)
    assert good.checksums == (1, 2, 3, 4) == leave_from_wire(raw, body, ()).ticket.checksums
    assert leave_from_wire([*raw, ["lossless", 400, [5, 6, 7, 8]]], body, ()) is None, "not asked for"
    assert leave_from_wire([*raw, [codec, nbytes, list(range(parts))]], body, ("lossless",)) is None


# -- settings and metrics --------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["nvme_codec", "wire_codec"])
def test_only_a_codec_that_changes_no_bit_may_act_by_itself(setting: str) -> None:
    for lossy in ("int8", "int4", "raw"):
        with pytest.raises(ConfigError, match=f"{setting} is one of none, lossless, not '{lossy}'"):
            NodeConfig(**{setting: lossy})


def test_a_bound_out_of_range_is_refused() -> None:
    for wrong in ({"codec_saving_min": 1.0}, {"codec_workers": 0}, {"codec_workers": 65}):
        with pytest.raises(ConfigError):
            NodeConfig(**wrong)


def test_metrics_tell_bytes_by_tier_codec_and_direction(mesh: Callable, tmp_path: Path) -> None:
    m = mesh(tiered(tmp_path / "nvme"))
    keep(m.cache(0), prompt(128))
    until(lambda: m.status(0)["nvme"]["records"] == 2, "demoted")
    keep(m.cache(0, NOT_BF16), prompt(64), torch.randn(LAYOUT.shape(64)).to(torch.float16))
    until(lambda: m.status(0)["nvme"]["records"] == 3, "demoted")
    found = {(s.name, *s.labels[1:]): s.value for s in samples(m.status(0)) if "codec" in s.name}
    labels = ("tier", "nvme"), ("codec", "lossless"), ("direction", "encode")
    assert found["p2pcache_codec_bodies_total", *labels] == 2
    assert found["p2pcache_codec_raw_bytes_total", *labels] == 128 << 10
    assert 0 < found["p2pcache_codec_encoded_bytes_total", *labels] < 0.85 * (128 << 10)
    assert found["p2pcache_codec_error_ratio", ("tier", "nvme"), ("codec", "lossless")] == 0
    assert found["p2pcache_codec_kept_raw_total", ("tier", "nvme"), ("reason", "saving")] == 1
