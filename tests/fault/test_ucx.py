"""What a UCX peer that dies, freezes, restarts or comes too early costs: its reader a miss, others nothing."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import pytest

from p2pcache.io.transport_ucx import ucx_available
from tests.fault.node_process import MIB, until
from tests.fault.ucx_process import BODY_BYTES, LARGE, SMALL, UcxProcess

pytestmark = [
    pytest.mark.ucx,
    pytest.mark.skipif(bool(ucx_available()), reason=f"no UCX here: {ucx_available()}"),
]

AT_ONCE = 5
KILLS = 100  # of readers, and as many of holders
WARM = 20  # after so many, what UCX keeps for its own use has been taken
GROWTH_MAX = {"rss_bytes": 32 * MIB, "fds": 8, "endpoints": 2}


@pytest.fixture
def peers() -> Iterator[tuple[UcxProcess, UcxProcess, dict[str, Any]]]:
    """A nursery, a survivor, and how that is known."""
    with contextlib.ExitStack() as stack:
        made = [UcxProcess(role) for role in ("nursery", "survivor")]
        for process in made:
            stack.callback(process.kill)
        nursery, survivor = made
        yield nursery, survivor, survivor.read()["member"]


def moments(rng: random.Random, count: int) -> list[int]:
    """Where in a body to kill, in bytes that have come; now and then before any has."""
    return [0 if rng.random() < 0.1 else rng.randrange(1, BODY_BYTES * 3 // 4) for _ in range(count)]


def check_not_grown(before: dict[str, int], after: dict[str, int]) -> None:
    grown = {name: after[name] - before[name] for name in GROWTH_MAX}
    print("grown:", grown)
    assert all(grown[name] <= limit for name, limit in GROWTH_MAX.items()), grown


def test_readers_killed_in_mid_transfer_cost_the_holder_nothing(peers: tuple) -> None:
    nursery, holder, known_as = peers
    rng, warm = random.Random(1), {}

    def settled() -> bool:
        state = holder.ask("state")
        return state["begins"] == state["ends"]

    for killed in range(0, KILLS, AT_ONCE):
        if killed == WARM:
            warm = holder.ask("state")
        at_bytes = moments(rng, AT_ONCE)
        assert nursery.ask("readers", member=known_as, at_bytes=at_bytes) == [-9] * AT_ONCE
        until(settled, "no send under way at the holder")
        assert nursery.ask("readers", member=known_as, at_bytes=[None]) == [0]
    until(lambda: holder.ask("state")["endpoints"] <= warm["endpoints"] + 2, "the readers' endpoints closed")
    after = holder.ask("state")
    assert after["begins"] > KILLS
    check_not_grown(warm, after)


def test_holders_killed_in_mid_transfer_cost_the_reader_their_bodies_alone(peers: tuple) -> None:
    nursery, reader, _ = peers
    rng, warm, errors = random.Random(2), {}, 0
    healthy = nursery.ask("holder")["member"]

    def pull(member: dict[str, Any], token: bytes, kill: int = 0, at_bytes: int = BODY_BYTES) -> str:
        told = reader.ask("pull", member=member, token=token.decode(), kill=kill, at_bytes=at_bytes)
        assert not told["late"], "bytes came after a pull had settled"
        assert told["right"] or told["error"] == "TransportError", told
        return told["error"]

    for count, at_bytes in enumerate(moments(rng, KILLS)):
        if count == WARM:
            warm = reader.ask("state")
        victim = nursery.ask("holder")
        errors += bool(pull(victim["member"], LARGE, victim["pid"], at_bytes))
        assert pull(healthy, SMALL) == ""
    assert errors > KILLS * 0.8  # what was in the kernel's buffers when one died comes all the same
    check_not_grown(warm, reader.ask("state"))
    assert pull(healthy, LARGE) == ""
