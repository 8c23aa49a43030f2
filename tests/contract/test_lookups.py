"""Asking peers' directories: one suite for both ways, and what strangers may try on the native one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import struct
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import pytest

from p2pcache.core import wire
from p2pcache.core.directory import Directory
from p2pcache.core.membership import Member, View
from p2pcache.io.control_zmq import ZmqControl
from p2pcache.io.lookups import ControlLookups, NativeLookups
from p2pcache.types import (
    BodyInfo,
    ContentKey,
    DeadlineExceeded,
    ExactKey,
    Fenced,
    Holder,
    RemoteError,
    Tier,
)

PATIENCE_S = 20.0
KEYS = [ContentKey(bytes([i]) * 16) for i in range(4)]
HOLDER = Holder("keeper", 7, Tier.HOST)


class Side:
    """One node's part: a shard that is asked, and a way to ask others."""

    def __init__(self, kind: str, name: str, incarnation: int):
        self.name, self.incarnation = name, incarnation
        self.directory = Directory(ttl_s=60.0, tombstone_s=10.0)
        self.view, self.past, self.unknown = View(), set(), False
        self.control = ZmqControl("127.0.0.1", 0, lambda: (name, incarnation, self.view.view_id))
        if kind == "native":
            self.lookups: Any = NativeLookups("127.0.0.1", name, incarnation, self.control)
        else:
            self.lookups = ControlLookups(self.control)

    async def start(self) -> None:
        await self.control.start(self.answer)
        await self.lookups.start(self.directory)

    def answer(self, op: str, body: Mapping[str, Any], sender: str, incarnation: int) -> Mapping[str, Any]:
        """What the control plane's handler does with a lookup."""
        if (sender, incarnation) in self.past and not self.view.has(sender, incarnation):
            raise Fenced("this incarnation is not a member any more")
        now_s = asyncio.get_running_loop().time()
        table = self.directory.table(body["contents"], now_s, self.view.has)
        return {"found": table, "unknown": self.unknown}

    @property
    def member(self) -> Member:
        return Member(self.name, self.incarnation, self.control.address, directory=self.lookups.address)

    def follow(self, view: View, *past: tuple[str, int], unknown: bool = False) -> None:
        self.view, self.past, self.unknown = view, set(past), unknown
        self.lookups.follow(view, past)
        self.lookups.unknown_until(float("inf") if unknown else 0.0)

    def holds(self, *keys: ContentKey, holder: Holder = HOLDER) -> None:
        bodies = [(BodyInfo(key, ExactKey(key[::-1]), 16, 1024), 1) for key in keys]
        now_s = asyncio.get_running_loop().time()
        assert self.directory.publish(holder, bodies, now_s) == len(keys)

    async def ask(self, peer: Member, *keys: ContentKey, within_s: float = PATIENCE_S) -> Any:
        by_s = asyncio.get_running_loop().time() + within_s
        (outcome,) = await self.lookups.ask([(peer, b"".join(keys))], by_s)
        return outcome

    async def close(self) -> None:
        await self.lookups.close()
        await self.control.close()


@contextlib.asynccontextmanager
async def mesh(kind: str, *names: str) -> AsyncIterator[list[Side]]:
    sides = [Side(kind, name, 100 + i) for i, name in enumerate(names)]
    try:
        for side in sides:
            await side.start()
        view = View.of([*(s.member for s in sides), Member(HOLDER.node, HOLDER.incarnation, "")])
        for side in sides:
            side.follow(view)
        yield sides
    finally:
        for side in sides:
            await side.close()


@pytest.fixture(params=["native", "control"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


# -- both ways -------------------------------------------------------------------------------------


def test_a_peer_says_what_it_knows_and_whether_the_rest_is_unknown(kind: str) -> None:
    async def test() -> None:
        async with mesh(kind, "a", "b") as (a, b):
            b.holds(KEYS[0], KEYS[2])
            table, unknown = await a.ask(b.member, *KEYS)
            assert not unknown and list(table.counts) == [1, 0, 1, 0] and table.names == [HOLDER.node]
            found = list(table.objects(KEYS))
            assert found[0][0].body.exact == KEYS[0][::-1] and found[0][0].holders == (HOLDER,)
            b.follow(b.view, unknown=True)
            assert (await a.ask(b.member, KEYS[1]))[1]

    run(test)


def test_holders_that_are_no_members_are_not_named(kind: str) -> None:
    async def test() -> None:
        async with mesh(kind, "a", "b") as (a, b):
            b.holds(KEYS[0], holder=Holder("keeper", 6, Tier.HOST))  # an incarnation before this one
            b.holds(KEYS[1], holder=Holder("stranger", 1, Tier.HOST))
            b.holds(KEYS[2])
            table, _ = await a.ask(b.member, *KEYS)
            assert list(table.counts) == [0, 0, 1, 0]

    run(test)


def test_another_incarnation_than_the_one_asked_refuses(kind: str) -> None:
    async def test() -> None:
        async with mesh(kind, "a", "b") as (a, b):
            b.holds(KEYS[0])
            m = b.member
            late = Member(m.name, m.incarnation + 1, m.control, directory=m.directory)
            assert "incarnation" in str(await a.ask(late, KEYS[0]))
            assert isinstance(await a.ask(late, KEYS[0]), RemoteError)
            assert list((await a.ask(m, KEYS[0]))[0].counts) == [1]

    run(test)


def test_an_incarnation_that_has_left_is_fenced(kind: str) -> None:
    async def test() -> None:
        async with mesh(kind, "a", "b") as (a, b):
            b.follow(View.of([b.member]), ("a", a.incarnation))
            assert isinstance(await a.ask(b.member, KEYS[0]), Fenced)

    run(test)


def test_who_is_silent_costs_the_deadline_and_others_nothing(kind: str) -> None:
    async def test() -> None:
        async with mesh(kind, "a", "b") as (a, b):
            b.holds(KEYS[0])
            with socket.create_server(("127.0.0.1", 0)) as silent:  # its backlog accepts, nobody answers
                address = f"127.0.0.1:{silent.getsockname()[1]}"
                directory = f"{address}#{'00' * 16}" if kind == "native" else ""
                mute = Member("mute", 1, address, directory=directory)
                by_s = asyncio.get_running_loop().time() + 0.3
                asked = [(mute, KEYS[0]), (b.member, KEYS[0])]
                first, second = await a.lookups.ask(asked, by_s)
                assert isinstance(first, DeadlineExceeded) and list(second[0].counts) == [1]
                assert asyncio.get_running_loop().time() < by_s + 1.0

    run(test)


def test_close_while_a_question_is_open_ends_it(kind: str) -> None:
    async def test() -> None:
        before = threading.active_count()
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            mute = Member("mute", 1, address, directory=f"{address}#{'00' * 16}" if kind == "native" else "")
            async with mesh(kind, "a") as (a,):
                open_ = asyncio.ensure_future(a.ask(mute, KEYS[0]))
                await asyncio.sleep(0)
            with contextlib.suppress(RemoteError):
                assert isinstance(await open_, RemoteError)
        assert threading.active_count() <= before

    run(test)


def test_questions_from_many_tasks_each_get_their_own_answer_while_the_shard_changes(kind: str) -> None:
    async def test() -> None:
        async with mesh(kind, "a", "b", "c") as (a, b, c):
            for side in (b, c):
                side.holds(*KEYS)

            async def asks(seed: int) -> None:
                rng = random.Random(seed)
                for _ in range(30):
                    keys = rng.sample(KEYS, rng.randint(1, 4))
                    for outcome in await a.lookups.ask(
                        [(b.member, b"".join(keys)), (c.member, b"".join(keys[:1]))], PATIENCE_S + loop.time()
                    ):
                        table, _ = outcome
                        for key, found in zip(keys, table.objects(keys[: len(table.counts)]), strict=False):
                            assert all(f.body.content == key for f in found)

            loop, churning = asyncio.get_running_loop(), True

            async def churn() -> None:
                seq = 2
                while churning:
                    for side in (b, c):
                        side.directory.withdraw(HOLDER, [(KEYS[0], KEYS[0][::-1], seq)], loop.time())
                        body = BodyInfo(KEYS[0], ExactKey(KEYS[0][::-1]), 16, 1024)
                        side.directory.publish(HOLDER, [(body, seq + 1)], loop.time())
                        side.directory.expire(loop.time())
                    seq += 2
                    await asyncio.sleep(0)

            churner = asyncio.create_task(churn())
            await asyncio.gather(*(asks(seed) for seed in range(16)))
            churning = False
            await churner

    run(test)


# -- the native way, and strangers -----------------------------------------------------------------


def pass_of(member: Member) -> tuple[tuple[str, int], bytes]:
    address, _, secret = member.directory.partition("#")
    host, port = address.rsplit(":", 1)
    return (host, int(port)), bytes.fromhex(secret)


def question(to: int, *, op: str = "directory.lookup", keys: bytes = KEYS[0]) -> bytes:
    return wire.encode(wire.Message("q", 1, op, {"contents": keys}, to, "stranger", 5, b"12345678"))


def framed(message: bytes) -> bytes:
    return struct.pack("<I", len(message)) + message


def heard(sent: bytes, member: Member, patience_s: float = 3.0) -> bytes | None:
    """What comes back for raw bytes: a message, b"" where the connection was closed, None for silence."""
    with socket.create_connection(pass_of(member)[0], patience_s) as stranger:
        with contextlib.suppress(OSError):
            stranger.sendall(sent)
        stranger.settimeout(patience_s)
        try:
            head = stranger.recv(4, socket.MSG_WAITALL)
            return stranger.recv(struct.unpack("<I", head)[0], socket.MSG_WAITALL) if len(head) == 4 else b""
        except TimeoutError:
            return None
        except ConnectionError:
            return b""


def test_strangers_without_the_pass_are_closed_and_members_go_on() -> None:
    async def test() -> None:
        async with mesh("native", "a", "b") as (a, b):
            b.holds(KEYS[0])
            member, secret = b.member, pass_of(b.member)[1]
            wrong = bytes([secret[0] ^ 1]) + secret[1:]
            loop = asyncio.get_running_loop()
            for sent in (
                wrong + framed(question(b.incarnation)),
                os.urandom(5000),
                b"GET / HTTP/1.1\r\n\r\n" * 9,
            ):
                assert await loop.run_in_executor(None, heard, sent, member) == b""
            right = await loop.run_in_executor(None, heard, secret + framed(question(b.incarnation)), member)
            assert right and wire.decode(right).kind == "r"
            assert list((await a.ask(member, KEYS[0]))[0].counts) == [1]

    run(test)


@pytest.mark.parametrize("length", [0, 2**32 - 1, 17 << 20])
def test_an_announced_length_that_cannot_be_closes_the_connection(length: int) -> None:
    async def test() -> None:
        async with mesh("native", "a", "b") as (a, b):
            secret = pass_of(b.member)[1]
            sent = secret + struct.pack("<I", length) + b"x" * 100
            got = await asyncio.get_running_loop().run_in_executor(None, heard, sent, b.member)
            assert got == b"" or wire.decode(got).kind == "e"
            assert list((await a.ask(b.member, KEYS[0]))[0].counts) == [0]

    run(test)


def test_every_truncation_and_change_of_a_question_is_an_error_or_an_answer_and_never_the_end() -> None:
    async def test() -> None:
        async with mesh("native", "a", "b") as (a, b):
            secret, whole = pass_of(b.member)[1], question(b.incarnation)
            rng, loop = random.Random(1), asyncio.get_running_loop()
            damaged = [whole[:n] for n in range(1, len(whole), 7)]
            for _ in range(150):
                at = rng.randrange(len(whole))
                damaged.append(whole[:at] + bytes([rng.randrange(256)]) + whole[at + 1 :])
            for message in damaged:
                got = await loop.run_in_executor(None, heard, secret + framed(message), b.member)
                assert got is not None and (got == b"" or wire.decode(got).kind in "er")
            assert list((await a.ask(b.member, KEYS[0]))[0].counts) == [0]

    run(test)


class Impostor:
    """Stands where a directory should, and answers every question with the same bytes."""

    def __init__(self, answer: bytes, *, close: bool = False):
        self._answer, self._close = answer, close
        self._server = socket.create_server(("127.0.0.1", 0))
        self.directory = f"127.0.0.1:{self._server.getsockname()[1]}#{'00' * 16}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._server.accept()
                with caller:
                    caller.recv(16, socket.MSG_WAITALL)
                    while len(head := caller.recv(4, socket.MSG_WAITALL)) == 4:
                        raw = caller.recv(struct.unpack("<I", head)[0], socket.MSG_WAITALL)
                        id_ = wire.decode(raw).id
                        caller.sendall(
                            self._answer.replace(b"\xcd\xee\xee", b"\xcd" + struct.pack(">H", id_))
                        )
                        if self._close:
                            break

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join(10)


def reply(incarnation: int, body: Mapping[str, Any], op: str = "directory.lookup") -> bytes:
    """A reply under the number that an `Impostor` puts right."""
    return wire.encode(wire.Message("r", 0xEEEE, op, body, 0, "mute", incarnation, b"12345678"))


NOTHING = {"found": [[], [], [], bytes(1), b"", b""], "unknown": False}
ANSWERS = {
    "garbage": framed(b"\xc1" * 40),
    "cut off": framed(reply(1, NOTHING))[:-3],
    "too long": struct.pack("<I", 2**31) + b"x" * 64,
    "nothing at all": b"",
    "another incarnation": framed(reply(2, NOTHING)),
    "another operation": framed(reply(1, {"accepted": 1}, op="directory.withdraw")),
    "an answer to more keys": framed(reply(1, NOTHING | {"found": [[], [], [], bytes(3), b"", b""]})),
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
@pytest.mark.parametrize("close", [False, True])
def test_whatever_a_peer_answers_is_an_error_in_time_and_the_next_question_works(
    answer: bytes, close: bool
) -> None:
    async def test() -> None:
        async with mesh("native", "a", "b") as (a, b):
            b.holds(KEYS[0])
            impostor = Impostor(answer, close=close)
            try:
                mute = Member("mute", 1, "127.0.0.1:1", directory=impostor.directory)
                for _ in range(3):
                    by_s = asyncio.get_running_loop().time() + 0.5
                    first, second = await a.lookups.ask([(mute, KEYS[0]), (b.member, KEYS[0])], by_s)
                    assert isinstance(first, RemoteError), first
                    assert list(second[0].counts) == [1]
                    assert asyncio.get_running_loop().time() < by_s + 1.0
            finally:
                impostor.close()

    run(test)


def test_peers_that_close_at_once_never_make_later_questions_busy() -> None:
    """A connection may be lost in the very call that sends the last question of a batch."""

    async def test() -> None:
        async with mesh("native", "a", "b") as (a, b):
            b.holds(KEYS[0])
            impostor = Impostor(b"", close=True)
            try:
                mute = Member("mute", 1, "127.0.0.1:1", directory=impostor.directory)
                for _ in range(300):
                    assert isinstance(await a.ask(mute, KEYS[0], within_s=5.0), RemoteError)
                assert list((await a.ask(b.member, KEYS[0]))[0].counts) == [1]
            finally:
                impostor.close()

    run(test)


def test_connections_come_and_go_without_a_descriptor_left() -> None:
    async def test() -> None:
        async with mesh("native", "a", "b") as (a, b):
            await a.ask(b.member, KEYS[0])
            before, address = len(os.listdir("/proc/self/fd")), pass_of(b.member)[0]

            def come_and_go() -> None:
                for _ in range(1000):
                    socket.create_connection(address, 5).close()

            await asyncio.get_running_loop().run_in_executor(None, come_and_go)
            assert list((await a.ask(b.member, KEYS[0]))[0].counts) == [0]
            for _ in range(100):  # the server closes its ends as it reads that they are over
                if len(os.listdir("/proc/self/fd")) <= before + 2:
                    break
                await asyncio.sleep(0.05)
            assert len(os.listdir("/proc/self/fd")) <= before + 2

    run(test)
