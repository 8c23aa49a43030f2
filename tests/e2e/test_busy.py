"""A holder with enough to do says so, and when to ask again; readers go to another one, or come back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from p2pcache import EmbeddedMesh, FixedChunker, KVLayout, Miss, Namespace, NodeConfig
from p2pcache.api import Cache
from p2pcache.runtime import NodeRuntime
from tests.fault.node_process import PATIENCE_S, at_rest, state, until

LAYOUT = KVLayout(layers=4, kv_heads=2, head_dim=16, dtype="float32")  # 1 KiB a token
NAMESPACE = Namespace("model", "weights", LAYOUT)
CHUNK = 64
BODY_BYTES = CHUNK << 10
CHUNKS = FixedChunker(CHUNK)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Callable[..., tuple[list[NodeRuntime], list[Cache]]]]:
    tmp_path.chmod(0o700)
    made: list[NodeRuntime] = []
    with contextlib.ExitStack() as stack:

        def start(nodes: Sequence[dict[str, Any]]) -> tuple[list[NodeRuntime], list[Cache]]:
            common = {"host_bytes_max": 8 << 20, "resync_s": 0.0, "runtime_dir": str(tmp_path)}
            configs = [NodeConfig(**common, name=f"n{i}", **own) for i, own in enumerate(nodes)]
            embedded = stack.enter_context(EmbeddedMesh(configs))
            made.extend(embedded.nodes)
            clients = [stack.enter_context(embedded.client(i, PATIENCE_S)) for i in range(len(nodes))]
            return embedded.nodes, [client.open(NAMESPACE) for client in clients]

        yield start
        for node in made:
            until(lambda node=node: at_rest(state(node)), f"{node.member.name} at rest")


def keep(cache: Cache, count: int) -> torch.Tensor:
    run, kv = torch.arange(count), torch.randn(LAYOUT.shape(count))
    assert cache.store(cache.chunks(run, CHUNKS), kv).published(PATIENCE_S)
    return kv


def take_ticket(reader: NodeRuntime, holder: NodeRuntime, exact: bytes) -> Callable[[], None]:
    """Have `holder` lease a body to `reader`; returns what ends that."""

    def ask(op: str, body: dict[str, Any]) -> Any:
        async def request() -> Any:
            deadline_s = asyncio.get_running_loop().time() + PATIENCE_S
            return await reader.node.ports.control.request(holder.member, op, body, deadline_s)

        return reader.call(request())

    reply = ask("pull.open", {"bodies": [exact], "transport": "tcp", "deadline_s": 5.0})
    ((status, lease),) = reply["tickets"]
    assert status == "ok"
    return lambda: ask("pull.close", {"tokens": [lease[0]]})


def test_a_busy_holder_is_passed_over_for_another(mesh: Callable) -> None:
    nodes, caches = mesh([{"serve_bytes_in_flight_max": BODY_BYTES}, {}, {}])
    kv = keep(caches[0], 2 * CHUNK)
    lookup = caches[1].lookup(torch.arange(2 * CHUNK), chunker=CHUNKS, budget_s=PATIENCE_S)
    caches[1].fetch(lookup, budget_s=PATIENCE_S).release()
    nodes[1].flush()
    lookup = caches[2].lookup(torch.arange(2 * CHUNK), chunker=CHUNKS, budget_s=PATIENCE_S)
    end = take_ticket(nodes[1], nodes[0], lookup.chunks[0].keys.exact)
    with caches[2].fetch(lookup, budget_s=PATIENCE_S) as fetched:
        assert [c.miss for c in fetched] == [None, None] and {c.peer for c in fetched} == {"n1"}
        assert torch.equal(fetched[1].kv, kv[:, :, CHUNK:])
    end()


def test_a_reader_comes_back_when_the_only_holder_has_room_again(mesh: Callable) -> None:
    nodes, caches = mesh([{"serve_bytes_in_flight_max": BODY_BYTES}, {}, {}])
    kv = keep(caches[0], CHUNK)
    lookup = caches[1].lookup(torch.arange(CHUNK), chunker=CHUNKS, budget_s=PATIENCE_S)
    end = take_ticket(nodes[2], nodes[0], lookup.chunks[0].keys.exact)
    with ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(caches[1].fetch, lookup, budget_s=PATIENCE_S)
        until(lambda: state(nodes[1])["counters"].get("retried_pulls", 0) >= 2, "asked again")
        assert not fetching.done()
        end()
        with fetching.result(PATIENCE_S) as fetched:
            assert fetched[0].miss is None and torch.equal(fetched[0].kv, kv)
    assert state(nodes[0])["counters"]["tickets_refused"] >= 2


def test_who_waits_for_a_busy_holder_holds_up_nobody_else(mesh: Callable) -> None:
    nodes, caches = mesh([{"serve_bytes_in_flight_max": BODY_BYTES}, {}, {"pulls_in_flight_max": 2}])
    keep(caches[0], 4 * CHUNK)
    other = torch.arange(CHUNK) + 1_000_000
    assert caches[1].store(caches[1].chunks(other, CHUNKS), torch.randn(LAYOUT.shape(CHUNK))).published(5.0)
    waits = caches[2].lookup(torch.arange(4 * CHUNK), chunker=CHUNKS, budget_s=PATIENCE_S)
    idle = caches[2].lookup(other, chunker=CHUNKS, budget_s=PATIENCE_S)
    end = take_ticket(nodes[1], nodes[0], waits.chunks[0].keys.exact)
    with ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(caches[2].fetch, waits, budget_s=PATIENCE_S)
        until(lambda: state(nodes[2])["counters"].get("retried_pulls", 0) >= 4, "all have asked")
        with caches[2].fetch(idle, budget_s=PATIENCE_S) as fetched:
            assert fetched[0].miss is None and not fetching.done()
        end()
        with fetching.result(PATIENCE_S) as fetched:
            assert [c.miss for c in fetched] == [None] * 4


def test_a_passenger_that_knows_of_another_holder_does_not_share_its_pilots_miss(mesh: Callable) -> None:
    nodes, caches = mesh([{"serve_bytes_in_flight_max": BODY_BYTES}, {}, {}])
    keep(caches[0], CHUNK)
    early = caches[2].lookup(torch.arange(CHUNK), chunker=CHUNKS, budget_s=PATIENCE_S)
    caches[1].fetch(
        caches[1].lookup(torch.arange(CHUNK), chunker=CHUNKS, budget_s=PATIENCE_S), budget_s=PATIENCE_S
    ).release()
    nodes[1].flush()
    late = caches[2].lookup(torch.arange(CHUNK), chunker=CHUNKS, budget_s=PATIENCE_S)
    assert len(early.chunks[0].found[0].holders) == 1 and len(late.chunks[0].found[0].holders) == 2
    end = take_ticket(nodes[1], nodes[0], late.chunks[0].keys.exact)
    with ThreadPoolExecutor(1) as pool:
        pilot = pool.submit(caches[2].fetch, early, budget_s=PATIENCE_S)
        until(lambda: state(nodes[2])["counters"].get("retried_pulls", 0) >= 1, "the pilot has asked")
        with caches[2].fetch(late, budget_s=PATIENCE_S) as fetched:
            assert fetched[0].miss is None and fetched[0].peer in ("n1", "")
        pilot.result(PATIENCE_S).release()  # what the other one brought serves it too
    end()


def test_a_holder_that_stays_busy_costs_the_deadline_and_says_busy(mesh: Callable) -> None:
    nodes, caches = mesh([{"serve_bytes_in_flight_max": BODY_BYTES}, {}])
    keep(caches[0], CHUNK)
    lookup = caches[1].lookup(torch.arange(CHUNK), chunker=CHUNKS, budget_s=PATIENCE_S)
    end = take_ticket(nodes[1], nodes[0], lookup.chunks[0].keys.exact)
    with caches[1].fetch(lookup, budget_s=0.2) as fetched:
        assert fetched[0].miss in (Miss.BUSY, Miss.DEADLINE)
    assert len(nodes[1].node.residency.tier) == 0 and state(nodes[1])["unfinished"] == 0
    end()


def test_one_reader_does_not_take_all_that_a_holder_gives(mesh: Callable) -> None:
    nodes, caches = mesh([{"serve_bytes_per_peer_max": BODY_BYTES}, {}, {}])
    keep(caches[0], 2 * CHUNK)
    lookup = caches[2].lookup(torch.arange(2 * CHUNK), chunker=CHUNKS, budget_s=PATIENCE_S)
    end = take_ticket(nodes[1], nodes[0], lookup.chunks[0].keys.exact)
    with pytest.raises(AssertionError):
        take_ticket(nodes[1], nodes[0], lookup.chunks[1].keys.exact)
    with caches[2].fetch(lookup, budget_s=PATIENCE_S) as fetched:  # another reader is served
        assert [c.miss for c in fetched] == [None, None]
    end()


def test_a_body_over_the_limit_goes_alone(mesh: Callable) -> None:
    nodes, caches = mesh([{"serve_bytes_in_flight_max": 1000, "serve_bytes_per_peer_max": 1000}, {}])
    kv = keep(caches[0], 4 * CHUNK)
    lookup = caches[1].lookup(torch.arange(4 * CHUNK), chunker=CHUNKS, budget_s=PATIENCE_S)
    with caches[1].fetch(lookup, budget_s=PATIENCE_S) as fetched:
        assert [c.miss for c in fetched] == [None] * 4
        assert torch.equal(torch.cat([c.kv for c in fetched], 2), kv)
    until(lambda: nodes[0].node.desk.office.leased_bytes == 0, "all tickets have ended")


def test_a_fault_in_one_ticket_leaves_no_other_open(mesh: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, caches = mesh([{}, {}])
    keep(caches[0], 2 * CHUNK)
    first, second = (k.exact for k in caches[0].chunks(torch.arange(2 * CHUNK), CHUNKS))
    desk = nodes[0].node.desk
    issue = desk._ticket

    async def faulty(exact: bytes, *others: Any) -> list[Any]:
        if exact == second:
            raise RuntimeError("made up")
        return await issue(exact, *others)

    async def open_both() -> None:
        monkeypatch.setattr(desk, "_ticket", faulty)
        deadline_s = asyncio.get_running_loop().time() + PATIENCE_S
        with pytest.raises(RuntimeError, match="made up"):
            await desk._open_later([first, second], [bytes(16)] * 2, "n1", deadline_s, False)

    nodes[0].call(open_both())
    assert state(nodes[0])["tickets"] == 0 and state(nodes[0])["leases"] == 0
