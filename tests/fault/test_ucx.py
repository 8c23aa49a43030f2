"""What a UCX peer that dies, freezes or restarts costs: its reader a miss, everybody else nothing."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import random
import signal
import socket
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from p2pcache import Miss
from p2pcache.api import Cache, Client
from p2pcache.core.membership import Member
from p2pcache.io import _pulls
from p2pcache.io._ucp import Endpoint
from p2pcache.io._ucx_pulls import Arrival, IdleLinks
from p2pcache.io.ports import Ticket
from p2pcache.io.transport_ucx import UcxTransport, ucx_available
from p2pcache.results import Lookup
from tests.contract.transports import Watched, member
from tests.fault.node_process import MIB, NAMESPACE, PATIENCE_S, at_rest, mesh, state, until
from tests.fault.test_peers import GRACE_S, fetch, find
from tests.fault.ucx_process import BODY_BYTES, LARGE, SMALL, SMALL_BYTES, UcxProcess

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


def pull(reader: UcxProcess, member: dict[str, Any], token: bytes = SMALL, **more: Any) -> dict[str, Any]:
    """Have a survivor pull: the bytes are right, or it failed; and none come once it has settled."""
    told = reader.ask("pull", member=member, token=token.decode(), **more)
    assert not told["late"], "bytes came after the pull before had settled"
    assert told["right"] or told["error"] == "TransportError", told
    return told


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

    for count, at_bytes in enumerate(moments(rng, KILLS)):
        if count == WARM:
            warm = reader.ask("state")
        victim = nursery.ask("holder")
        errors += bool(pull(reader, victim["member"], LARGE, kill=victim["pid"], at_bytes=at_bytes)["error"])
        assert pull(reader, healthy)["error"] == ""
    assert errors > KILLS * 0.8  # what was in the kernel's buffers when one died comes all the same
    check_not_grown(warm, reader.ask("state"))
    assert pull(reader, healthy, LARGE)["error"] == ""


def test_a_first_contact_before_the_listener_exists_poisons_nothing(peers: tuple) -> None:
    nursery, reader, _ = peers
    with socket.socket() as taken:  # bound and deaf, so that nobody else gets this port meanwhile
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        nobody = member("ucx", f"127.0.0.1:{port}").to_wire()
        for _ in range(3):
            assert pull(reader, nobody)["error"] == "TransportError"
        for _ in range(3):  # and it restarts there, as another one or under the name that its reader knows
            holder = nursery.ask("holder", port=port)
            assert pull(reader, nobody)["error"] == ""
            assert pull(reader, holder["member"])["error"] == ""
            os.kill(holder["pid"], signal.SIGKILL)
            until(lambda pid=holder["pid"]: has_ended(pid), "the holder has let go of its port")


def has_ended(pid: int) -> bool:
    """Killed, whether or not its parent has looked: its descriptors are closed by then."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
    except FileNotFoundError:
        return True


def test_a_hundred_connects_and_disconnects(peers: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    _, holder, known_as = peers
    # Each link is closed after its pull.
    monkeypatch.setattr(IdleLinks, "give", lambda idle, key, link: idle._engine.discard(link))
    connected = []
    connect = Endpoint.connected
    monkeypatch.setattr(Endpoint, "connected", lambda *where: connected.append(where) or connect(*where))

    async def come_and_go() -> None:
        transport = UcxTransport("127.0.0.1")
        for count in range(100):
            ticket = Ticket(SMALL, 0, SMALL_BYTES, 1, ())
            watched = Watched(transport, Member.from_wire(known_as), ticket)
            assert await watched.done() is None
            await watched.settled()
            if count == WARM:
                warm.update(await asyncio.to_thread(holder.ask, "state"))
        await transport.close()

    warm: dict[str, int] = {}
    asyncio.run(come_and_go())
    assert len(connected) == 100
    until(lambda: holder.ask("state")["endpoints"] <= 2, "the endpoints closed")
    check_not_grown(warm, holder.ask("state"))


def test_a_frozen_holder_costs_its_reader_the_deadline_and_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = {"host_bytes_max": 192 * MIB, "transports": ["ucx"]}
    large_tokens, small_tokens, each, budget_s = 128 << 10, 64, 60, 2.0
    others = [common | {"name": "victim"}, common | {"name": "other"}]
    with mesh(tmp_path, [common | {"name": "reader"}], others) as ((reader,), (victim, other)):
        victim.store(large_tokens, large_tokens)
        other.store(2 * each * small_tokens, small_tokens, seed=1)
        with Client(reader.socket_path, PATIENCE_S) as client, ThreadPoolExecutor(1) as thread:
            cache = client.open(NAMESPACE)
            large = find(cache, large_tokens, large_tokens)
            small = find(cache, 2 * each * small_tokens, small_tokens, seed=1)
            ones = [dataclasses.replace(small, chunks=(chunk,)) for chunk in small.chunks]
            frozen, settling = threading.Event(), threading.Event()
            hold_back(monkeypatch, settling)
            on_first_bytes(monkeypatch, lambda: (victim.freeze(), frozen.set()))

            healthy_s = [timed(cache, one) for one in ones[:each]]
            failing = thread.submit(fetch, cache, large, budget_s)
            assert frozen.wait(PATIENCE_S)
            beside_s = [timed(cache, one) for one in ones[each:]]
            assert failing.result() == ([Miss.DEADLINE], True)

            held = state(reader)
            assert held["unfinished"] == 1, "the destination was free before its transport let go of it"
            beside_s += [timed(cache, find(cache, small_tokens, small_tokens, seed=1)) for _ in range(3)]
            settling.set()
            until(lambda: state(reader)["unfinished"] == 0, "the destination free again")
            assert held["host"]["bytes"] - state(reader)["host"]["bytes"] >= 128 * MIB
            p99_s = [statistics.quantiles(seconds, n=100)[98] for seconds in (healthy_s, beside_s)]
            print("p99 from a healthy holder before and beside a frozen one, ms:", [s * 1e3 for s in p99_s])
            assert p99_s[1] < max(5 * p99_s[0], 0.25)

            victim.thaw()
            until(lambda: fetch(cache, large, 10.0) == ([None], True), "the thawed holder serves again")
            until(lambda: at_rest(victim.state()), "the holder at rest")


def timed(cache: Cache, lookup: Lookup) -> float:
    """Seconds that a fetch takes, which must work."""
    began_s = time.monotonic()
    assert fetch(cache, lookup, PATIENCE_S) == ([None] * len(lookup.chunks), True)
    return time.monotonic() - began_s


def hold_back(monkeypatch: pytest.MonkeyPatch, settling: threading.Event) -> None:
    """No pull that has been given up settles before the event is set."""
    is_quiet = Arrival._is_quiet
    monkeypatch.setattr(
        Arrival, "_is_quiet", lambda a: (settling.is_set() or not a._stopping) and is_quiet(a)
    )


def on_first_bytes(monkeypatch: pytest.MonkeyPatch, do: Callable[[], Any]) -> None:
    """`do` something once, when the first bytes of a large body have arrived at this process."""
    todo, report = [do], _pulls.LoopPull._report

    def told(pull: _pulls.LoopPull, nbytes: int) -> None:
        if todo and pull.ticket.nbytes > 64 * MIB:
            todo.pop()()
        report(pull, nbytes)

    monkeypatch.setattr(_pulls.LoopPull, "_report", told)


@pytest.fixture
def two_hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a cable between them: 10.77.0.1 in the first, 10.77.0.2 in the second."""
    names = tuple(f"p2pcache-ucx-{os.getpid()}-{end}" for end in "ab")

    def ip(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["ip", *words], capture_output=True, text=True)

    try:
        made = [ip("netns", "add", name) for name in names]
        if any(done.returncode for done in made):
            pytest.skip(f"no network namespaces here: {made[0].stderr.strip()}")
        cable = ["link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable"]
        steps = [[*cable, "netns", names[1]]]
        for number, name in enumerate(names, 1):
            steps.append(["-n", name, "address", "add", f"10.77.0.{number}/24", "dev", "cable"])
            steps += [["-n", name, "link", "set", device, "up"] for device in ("lo", "cable")]
        for step in steps:
            done = ip(*step)
            assert not done.returncode, (step, done.stderr)
        yield names
    finally:
        for name in names:
            ip("netns", "delete", name)


def test_a_cut_cable_costs_the_reader_its_deadline_and_the_holder_nothing(two_hosts: tuple[str, str]) -> None:
    with contextlib.ExitStack() as stack:
        made = [UcxProcess("survivor", f"10.77.0.{n}", name) for n, name in enumerate(two_hosts, 1)]
        for process in made:
            stack.callback(process.kill)
        holder, reader = made
        known_as = holder.read()["member"]
        reader.read()
        cable = ["ip", "-n", two_hosts[0], "link", "set", "cable"]
        assert pull(reader, known_as, LARGE)["error"] == ""

        cut = pull(reader, known_as, LARGE, at_bytes=16 * MIB, run=[*cable, "down"], budget_s=1.0)
        assert cut["error"] == "TransportError" and 1.0 <= cut["took_s"] < 1.0 + GRACE_S
        subprocess.run([*cable, "up"], check=True)
        until(lambda: pull(reader, known_as, budget_s=2.0)["error"] == "", "the mended cable carries bodies")
        assert pull(reader, known_as, LARGE)["error"] == ""

        def settled() -> bool:
            state = holder.ask("state")
            return state["begins"] == state["ends"]

        until(settled, "the holder no longer sends to where the cable was cut")
