"""The control plane: requests between nodes over zmq."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any

import msgpack
import pytest
import zmq
import zmq.asyncio

from p2pcache import NodeConfig
from p2pcache.core import wire
from p2pcache.core.membership import Member
from p2pcache.io import control_zmq
from p2pcache.io.control_zmq import ZmqControl
from p2pcache.runtime import NodeRuntime
from p2pcache.types import ConfigError, DeadlineExceeded, InvariantError, RemoteError, VersionMismatch

PATIENCE_S = 20.0
KEYS = [bytes([i]) * 16 for i in range(3)]


class Peer:
    """A control plane with a handler that can be held up, and what it was asked."""

    def __init__(self, name: str, incarnation: int, port: int = 0):
        self.name, self.incarnation = name, incarnation
        self.control = ZmqControl("127.0.0.1", port, lambda: (name, incarnation, b"12345678"))
        self.asked: list[tuple[str, Mapping[str, Any], str, int]] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.error: Exception | None = None
        self.answer: Mapping[str, Any] = {"accepted": 3}

    async def handle(
        self, op: str, body: Mapping[str, Any], sender: str, incarnation: int
    ) -> Mapping[str, Any]:
        self.asked.append((op, body, sender, incarnation))
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return self.answer

    @property
    def member(self) -> Member:
        return Member(self.name, self.incarnation, self.control.address)

    async def withdraw(self, peer: Member, within_s: float = PATIENCE_S) -> Mapping[str, Any]:
        body = {"bodies": [[k, k, i] for i, k in enumerate(KEYS)]}
        deadline_s = asyncio.get_running_loop().time() + within_s
        return await self.control.request(peer, "directory.withdraw", body, deadline_s)


@contextlib.asynccontextmanager
async def peers(*made: Peer) -> AsyncIterator[tuple[Peer, ...]]:
    try:
        for peer in made:
            await peer.control.start(peer.handle)
        yield made
    finally:
        for peer in made:
            peer.may_answer.set()
            await peer.control.close()


def run(case: Callable[[], Coroutine]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await case()

    asyncio.run(bounded())


@contextlib.asynccontextmanager
async def stranger(kind: int, address: str) -> AsyncIterator[zmq.asyncio.Socket]:
    """A bare zmq socket; a ROUTER is bound, a DEALER connected."""
    context = zmq.asyncio.Context()
    sock = context.socket(kind)
    sock.setsockopt(zmq.LINGER, 0)
    (sock.bind if kind == zmq.ROUTER else sock.connect)(f"tcp://{address}")
    try:
        yield sock
    finally:
        sock.close(0)
        context.term()


def test_a_request_comes_back_with_its_answer_and_says_who_asked() -> None:
    async def case() -> None:
        async with peers(Peer("a", 11), Peer("b", 22)) as (a, b):
            assert await a.withdraw(b.member) == {"accepted": 3}
            ((op, body, sender, incarnation),) = b.asked
            assert (op, sender, incarnation) == ("directory.withdraw", "a", 11)
            assert body["bodies"] == [[k, k, i] for i, k in enumerate(KEYS)]

    run(case)


def test_many_requests_at_once_get_each_their_own_answer() -> None:
    async def case() -> None:
        async with peers(Peer("a", 1), Peer("b", 2)) as (a, b):

            async def echo(op: str, body: Mapping[str, Any], *_: object) -> Mapping[str, Any]:
                await asyncio.sleep(0)
                return {"accepted": len(body["bodies"])}

            b.control._handler = echo
            deadline_s = asyncio.get_running_loop().time() + PATIENCE_S
            answers = await asyncio.gather(
                *(
                    a.control.request(
                        b.member, "directory.withdraw", {"bodies": [[KEYS[0], KEYS[0], 0]] * n}, deadline_s
                    )
                    for n in range(300)
                )
            )
            assert [r["accepted"] for r in answers] == list(range(300))

    run(case)


def test_a_handler_may_answer_at_once_and_fail_at_once() -> None:
    async def case() -> None:
        async with peers(Peer("a", 1), Peer("b", 2)) as (a, b):

            def at_once(op: str, body: Mapping[str, Any], *_: object) -> Mapping[str, Any]:
                if not body["bodies"]:
                    raise RemoteError("nothing to withdraw")
                return {"accepted": len(body["bodies"])}

            b.control._handler = at_once
            deadline_s = asyncio.get_running_loop().time() + PATIENCE_S
            asked = [
                a.control.ask(
                    b.member, "directory.withdraw", {"bodies": [[KEYS[0], KEYS[0], 0]] * n}, deadline_s
                )
                for n in range(300)
            ]
            asked[7].cancel()
            refused, *answers = await asyncio.gather(*asked, return_exceptions=True)
            assert isinstance(refused, RemoteError) and "nothing to withdraw" in str(refused)
            assert isinstance(answers.pop(6), asyncio.CancelledError)
            assert [r["accepted"] for r in answers] == [n for n in range(1, 300) if n != 7]

    run(case)


def test_a_silent_peer_is_a_deadline_and_its_late_answer_disturbs_nobody() -> None:
    async def case() -> None:
        async with peers(Peer("a", 1), Peer("b", 2)) as (a, b):
            b.may_answer.clear()
            started_s = time.monotonic()
            with pytest.raises(DeadlineExceeded, match="b did not answer directory.withdraw"):
                await a.withdraw(b.member, 0.2)
            assert time.monotonic() - started_s < 2
            b.may_answer.set()
            assert await a.withdraw(b.member) == {"accepted": 3}
            assert a.control._waiting == {}

    run(case)


def test_nobody_at_an_address_is_a_deadline() -> None:
    async def case() -> None:
        async with peers(Peer("a", 1)) as (a,):
            with pytest.raises(DeadlineExceeded):
                await a.withdraw(Member("gone", 5, f"127.0.0.1:{free_port()}"), 0.2)

    run(case)


@pytest.mark.parametrize(
    "address", ["", "nonsense", "127.0.0.1", "127.0.0.1:", "127.0.0.1:99999999", "a b:1"]
)
def test_an_address_that_is_none_is_the_peers_fault(address: str) -> None:
    async def case() -> None:
        async with peers(Peer("a", 1)) as (a,):
            for _ in range(2):
                with pytest.raises(RemoteError):
                    await a.withdraw(Member("odd", 5, address), 0.2)

    run(case)


@pytest.mark.parametrize(
    "error, expected, words",
    [
        (RemoteError("no such thing"), RemoteError, "b: no such thing"),
        (DeadlineExceeded("too late here"), DeadlineExceeded, "too late here"),
        (InvariantError("ours"), RemoteError, "ours"),
        (ZeroDivisionError("secret words"), RemoteError, "an error of its own"),
        (RemoteError("x" * 100_000), RemoteError, "xxx"),
    ],
)
def test_an_error_at_the_peer_is_an_error_at_the_asker(error: Exception, expected: type, words: str) -> None:
    async def case() -> None:
        async with peers(Peer("a", 1), Peer("b", 2)) as (a, b):
            b.error = error
            with pytest.raises(expected, match=words) as caught:
                await a.withdraw(b.member)
            assert type(caught.value) is expected and "secret" not in str(caught.value)

    run(case)


def test_a_peer_with_too_much_to_do_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_zmq, "_HANDLERS_MAX", 2)

    async def case() -> None:
        async with peers(Peer("a", 1), Peer("b", 2)) as (a, b):
            b.may_answer.clear()
            first = [asyncio.ensure_future(a.withdraw(b.member)) for _ in range(2)]
            while len(b.asked) < 2:
                await asyncio.sleep(0.001)
            with pytest.raises(RemoteError, match="too many") as caught:
                await a.withdraw(b.member)
            assert not isinstance(caught.value, DeadlineExceeded)
            b.may_answer.set()
            assert await asyncio.gather(*first) == [{"accepted": 3}] * 2
            assert await a.withdraw(b.member) == {"accepted": 3}

    run(case)


def test_another_incarnation_is_refused_and_never_gets_to_the_handler() -> None:
    async def case() -> None:
        async with peers(Peer("a", 1), Peer("b", 2)) as (a, b):
            with pytest.raises(RemoteError, match="incarnation") as caught:
                await a.withdraw(Member("b", 3, b.control.address))
            assert not isinstance(caught.value, DeadlineExceeded)
            assert b.asked == []
            assert await a.withdraw(Member("b", 0, b.control.address)) == {"accepted": 3}, "0 is any"

    run(case)


def test_an_answer_of_another_incarnation_or_operation_is_refused() -> None:
    async def case() -> None:
        async with peers(Peer("a", 1)) as (a,):
            address = f"127.0.0.1:{free_port()}"
            async with stranger(zmq.ROUTER, address) as router:
                for op, incarnation, body in [
                    ("directory.withdraw", 99, {"accepted": 1}),
                    ("directory.publish", 5, {"accepted": 1}),
                    ("directory.withdraw", 5, {"accepted": -1}),
                    ("directory.withdraw", 5, {}),
                ]:
                    asking = asyncio.ensure_future(a.withdraw(Member("b", 5, address)))
                    who, raw = await router.recv_multipart()
                    asked = wire.decode(raw)
                    reply = wire.Message("r", asked.id, op, body, 0, "b", incarnation, b"")
                    await router.send_multipart([who, wire.encode(reply)])
                    with pytest.raises(RemoteError) as caught:
                        await asking
                    assert not isinstance(caught.value, DeadlineExceeded)

    run(case)


def in_version(raw: bytes, version: int) -> bytes:
    fields = msgpack.unpackb(raw)
    return msgpack.packb([version, *fields[1:]])


def test_an_asker_of_another_version_is_refused_with_both_numbers() -> None:
    ours, theirs = wire.PROTOCOL_VERSION, wire.PROTOCOL_VERSION + 6

    async def case() -> None:
        async with peers(Peer("b", 2)) as (b,):
            async with stranger(zmq.DEALER, b.control.address) as dealer:
                request = wire.encode(wire.Message("q", 77, "status", {}, 2, "a", 1))
                await dealer.send(in_version(request, theirs))
                reply = wire.decode(await asyncio.wait_for(dealer.recv(), PATIENCE_S))
                assert (reply.kind, reply.id, reply.body["code"]) == ("e", 77, "version")
                assert f"protocol {theirs}, this one speaks {ours}" in reply.body["text"]
            assert b.asked == []

    run(case)


def test_a_peer_of_another_version_is_told_apart_with_both_numbers() -> None:
    ours, theirs = wire.PROTOCOL_VERSION, wire.PROTOCOL_VERSION + 6

    async def case() -> None:
        async with peers(Peer("a", 1)) as (a,):
            address = f"127.0.0.1:{free_port()}"
            async with stranger(zmq.ROUTER, address) as router:
                asking = asyncio.ensure_future(a.withdraw(Member("b", 5, address)))
                who, raw = await router.recv_multipart()
                error = wire.Message("e", wire.decode(raw).id, "", {"code": "x", "text": "y"})
                await router.send_multipart([who, in_version(wire.encode(error), theirs)])
                with pytest.raises(VersionMismatch, match=f"protocol {theirs}, this one speaks {ours}"):
                    await asking
                # And so is one that refuses us in words of our own version.
                asking = asyncio.ensure_future(a.withdraw(Member("b", 5, address)))
                who, raw = await router.recv_multipart()
                refusal = {
                    "code": "version",
                    "text": f"the other side speaks p2pcache protocol {ours}, not {theirs}",
                }
                message = wire.Message("e", wire.decode(raw).id, "", refusal)
                await router.send_multipart([who, wire.encode(message)])
                with pytest.raises(VersionMismatch, match=f"{ours}.*{theirs}"):
                    await asking

    run(case)


GARBAGE = [
    [b""],
    [b"", b""],
    [b"\xc1"],
    [os.urandom(1000)],
    [b"GET / HTTP/1.1\r\n\r\n"],
    [b"\x9f" * 100_000],
    [msgpack.packb([wire.PROTOCOL_VERSION])],
    [msgpack.packb([wire.PROTOCOL_VERSION, "q", -1, "status", 0, "", 0, b"", {}])],
    [msgpack.packb([wire.PROTOCOL_VERSION, "q", 1, "no such op", 0, "", 0, b"", {}])],
    [msgpack.packb([wire.PROTOCOL_VERSION, "q", 1, "status", 0, "", 0, b"", {"more": 1}])],
    [msgpack.packb([wire.PROTOCOL_VERSION, "r", 1, "status", 0, "", 0, b"", {}])],
    [msgpack.packb([2**63, "q", 1])],
    [b"a", b"b", b"c", b"d"],
]


def test_garbage_does_not_stop_a_server_nor_reach_its_handler() -> None:
    async def case() -> None:
        async with peers(Peer("a", 1), Peer("b", 2)) as (a, b):
            async with stranger(zmq.DEALER, b.control.address) as dealer:
                for frames in GARBAGE:
                    await dealer.send_multipart(frames)
            # Bytes that are not even zmq's.
            _, writer = await asyncio.open_connection(*b.control.address.split(":"))
            writer.write(os.urandom(4096))
            with contextlib.suppress(OSError):
                await writer.drain()
            writer.close()
            assert await a.withdraw(b.member) == {"accepted": 3}
            assert [op for op, _, _, _ in b.asked] == ["directory.withdraw"]
            assert b.control._handlers == 0

    run(case)


def test_a_request_that_is_none_is_refused_at_once_and_not_left_to_its_deadline() -> None:
    async def case() -> None:
        async with peers(Peer("a", 1), Peer("b", 2)) as (a, b):
            deadline_s = asyncio.get_running_loop().time() + PATIENCE_S
            with pytest.raises(RemoteError, match="no such operation") as caught:
                await a.control.request(b.member, "no such operation", {}, deadline_s)
            assert not isinstance(caught.value, DeadlineExceeded)

    run(case)


def test_garbage_answers_do_not_stop_an_asker() -> None:
    async def case() -> None:
        async with peers(Peer("a", 1)) as (a,):
            address = f"127.0.0.1:{free_port()}"
            async with stranger(zmq.ROUTER, address) as router:
                asking = asyncio.ensure_future(a.withdraw(Member("b", 5, address)))
                who, raw = await router.recv_multipart()
                for garbage in (b"", b"\xc1", os.urandom(100), b"\x9f" * 1000):
                    await router.send_multipart([who, garbage])
                right = wire.Message(
                    "r", wire.decode(raw).id, "directory.withdraw", {"accepted": 1}, 0, "b", 5
                )
                await router.send_multipart([who, wire.encode(right)])
                assert await asking == {"accepted": 1}

    run(case)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def test_a_port_in_use_is_a_config_error_that_names_it() -> None:
    async def case() -> None:
        async with peers(Peer("a", 1)) as (a,):
            port = int(a.control.address.rpartition(":")[2])
            other = Peer("b", 2, port)
            with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*in use"):
                await other.control.start(other.handle)
            await other.control.close()

    run(case)


def test_a_node_whose_port_is_in_use_does_not_start_and_leaves_nothing(tmp_path) -> None:
    tmp_path.chmod(0o700)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=str(port)):
            NodeRuntime.start(
                NodeConfig(host_bytes_max=1 << 20, control_port=port, runtime_dir=str(tmp_path))
            )
    assert list(tmp_path.iterdir()) == []


def test_an_address_that_is_not_this_hosts_is_a_config_error() -> None:
    async def case() -> None:
        control = ZmqControl("192.0.2.1", 0, lambda: ("a", 1, b""))

        async def never(*_: object) -> Mapping[str, Any]:
            raise AssertionError

        with pytest.raises(ConfigError, match="192.0.2.1"):
            await control.start(never)
        await control.close()

    run(case)


def test_a_peer_that_restarts_on_its_port_is_reached_as_its_new_incarnation_only() -> None:
    async def case() -> None:
        async with peers(Peer("a", 1)) as (a,):
            port = free_port()
            async with peers(Peer("b", 2, port)) as (old,):
                assert await a.withdraw(old.member) == {"accepted": 3}
            with pytest.raises(DeadlineExceeded):
                await a.withdraw(old.member, 0.2)  # stays in the queue of the old incarnation
            async with peers(Peer("b", 3, port)) as (new,):
                assert await a.withdraw(new.member) == {"accepted": 3}
                with pytest.raises(RemoteError, match="incarnation"):
                    await a.withdraw(old.member)
                assert await a.withdraw(new.member) == {"accepted": 3}
                assert len(new.asked) == 2, "nothing that was meant for the old one reached the new one"

    run(case)


def test_an_ipv6_host_is_bound_and_reached() -> None:
    async def case() -> None:
        a, b = (ZmqControl("::1", 0, lambda name=name: (name, 1, b"")) for name in "ab")

        async def handle(*_: object) -> Mapping[str, Any]:
            return {"accepted": 1}

        try:
            await a.start(handle)
            await b.start(handle)
            assert b.address.startswith("[::1]:")
            deadline_s = asyncio.get_running_loop().time() + PATIENCE_S
            body = {"bodies": []}
            assert await a.request(Member("b", 1, b.address), "directory.withdraw", body, deadline_s) == {
                "accepted": 1
            }
        finally:
            await a.close()
            await b.close()

    with contextlib.closing(socket.socket(socket.AF_INET6)) as sock:
        try:
            sock.bind(("::1", 0))
        except OSError as error:
            pytest.skip(f"no IPv6 loopback here: {error}")
    run(case)


def test_a_message_over_the_limit_fails_at_the_asker() -> None:
    async def case() -> None:
        async with peers(Peer("a", 1), Peer("b", 2)) as (a, b):
            deadline_s = asyncio.get_running_loop().time() + PATIENCE_S
            descriptors = [bytes(1 << 16)] * 300
            with pytest.raises(wire.WireError, match="limit"):
                await a.control.request(b.member, "namespaces", {"descriptors": descriptors}, deadline_s)

    run(case)


def test_closing_while_requests_are_under_way_ends() -> None:
    async def case() -> None:
        a, b = Peer("a", 1), Peer("b", 2)
        await a.control.start(a.handle)
        await b.control.start(b.handle)
        b.may_answer.clear()
        asking = [asyncio.ensure_future(a.withdraw(b.member, 1.0)) for _ in range(10)]
        while len(b.asked) < 10:
            await asyncio.sleep(0.001)
        await asyncio.wait_for(b.control.close(), PATIENCE_S)
        await asyncio.wait_for(a.control.close(), PATIENCE_S)
        for result in await asyncio.gather(*asking, return_exceptions=True):
            assert isinstance(result, RemoteError)

    run(case)
