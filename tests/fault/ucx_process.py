"""UCX readers and holders in processes of their own, to be killed by the hundred.

As a program (`python -m tests.fault.ucx_process ROLE`) this file answers one line of JSON with another. A
*nursery* forks victims that have already imported everything, in milliseconds each. A *survivor* serves and
pulls while its peers die, and says how it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from p2pcache.core.membership import Member
from p2pcache.io import _ucp
from p2pcache.io._ucx_engine import import_ucx
from p2pcache.io.ports import Ticket
from p2pcache.io.transport_ucx import UcxTransport
from tests.contract.transports import POISON, FakeTickets, ended, member
from tests.fault.node_process import MIB, PATIENCE_S, Lines

BODY_BYTES = 64 * MIB
SMALL_BYTES = MIB
LARGE, SMALL = b"the large body's", b"the small body's"
TICKETS = {LARGE: BODY_BYTES, SMALL: SMALL_BYTES}


class UcxProcess(Lines):
    """role: `nursery` or `survivor`. namespace: a network namespace to run in, where it listens on `host`."""

    def __init__(self, role: str, host: str = "127.0.0.1", namespace: str = ""):
        inside = ["ip", "netns", "exec", namespace] if namespace else []
        super().__init__(*inside, sys.executable, "-m", "tests.fault.ucx_process", role, host)


def _memory() -> mmap.mmap:
    """What every holder of a test holds: shared with those forked later, and the same in other processes."""
    memory = mmap.mmap(-1, BODY_BYTES)
    np.frombuffer(memory, np.uint64)[:] = np.random.default_rng(1).integers(0, 2**64, BODY_BYTES // 8, "u8")
    return memory


async def _serve(
    memory: mmap.mmap, host: str = "127.0.0.1", port: int = 0
) -> tuple[UcxTransport, FakeTickets, Member]:
    tickets = FakeTickets(memoryview(memory))
    for token, nbytes in TICKETS.items():
        tickets.grant(nbytes, token=token)
    transport = UcxTransport(host, port)
    return transport, tickets, member("ucx", await transport.start(tickets))


async def _pull(
    transport: UcxTransport,
    peer: Member,
    token: bytes,
    dest: mmap.mmap,
    at_bytes: int,
    do: Callable[[], None],
    budget_s: float = PATIENCE_S,
) -> BaseException | None:
    """`do` something once, when so many bytes have come; with 0, before it is known whether any will.

    Given up after `budget_s`. Returns, once the destination is free again, how it ended.
    """
    todo = [do]

    def progress(nbytes: int) -> None:
        if nbytes >= at_bytes and todo:
            todo.pop()()

    nbytes = TICKETS[token]
    pull = transport.pull(peer, Ticket(token, 0, nbytes, 1, ()), memoryview(dest)[:nbytes], progress)
    if not at_bytes:
        await asyncio.sleep(0)  # the engine's thread has been told
        progress(0)
    await asyncio.wait({pull.done}, timeout=budget_s)
    pull.abandon()
    await ended(pull.settled, PATIENCE_S)
    return pull.done.exception()


# Victims.


def _fork(life: Callable[[], Any]) -> int:
    """A child that lives so, and ends at the latest when nobody can be waiting for it any more."""
    pid = os.fork()
    if pid:
        return pid
    status = 3
    with contextlib.suppress(BaseException):
        signal.alarm(int(4 * PATIENCE_S))
        status = asyncio.run(life())
    os._exit(status)


async def _be_holder(memory: mmap.mmap, port: int) -> int:
    _, _, known_as = await _serve(memory, port=port)
    print(json.dumps({"pid": os.getpid(), "member": known_as.to_wire()}), flush=True)
    await asyncio.Event().wait()
    return 0


async def _be_reader(memory: mmap.mmap, peer: Member, at_bytes: int | None) -> int:
    """Kills itself when so many bytes have come. None: lives on; 0 says that all of them are right."""
    dest = mmap.mmap(-1, BODY_BYTES)
    transport = UcxTransport("127.0.0.1")
    if at_bytes is None:
        error = await _pull(transport, peer, LARGE, dest, BODY_BYTES, lambda: None)
        right = np.array_equal(np.frombuffer(dest, np.uint64), np.frombuffer(memory, np.uint64))
        await transport.close()
        return 0 if error is None and right else 1
    await _pull(transport, peer, LARGE, dest, at_bytes, partial(os.kill, os.getpid(), signal.SIGKILL))
    return 2


def _nursery() -> None:
    import_ucx()
    memory = _memory()
    for line in sys.stdin:
        asked = json.loads(line)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # holders that were killed
                pass
        if asked["do"] == "holder":
            _fork(partial(_be_holder, memory, asked.get("port", 0)))  # which answers by itself
            continue
        peer = Member.from_wire(asked["member"])
        readers = [_fork(partial(_be_reader, memory, peer, at_bytes)) for at_bytes in asked["at_bytes"]]
        ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in readers]
        print(json.dumps(ends), flush=True)


# The survivor.


async def _survive(host: str) -> None:
    memory, dest = _memory(), mmap.mmap(-1, BODY_BYTES)
    source, landed = np.frombuffer(memory, np.uint8), np.frombuffer(dest, np.uint8)
    landed[:] = POISON
    transport, tickets, known_as = await _serve(memory, host)
    print(json.dumps({"member": known_as.to_wire()}), flush=True)
    last_bytes = 0

    async def answer(asked: dict[str, Any]) -> dict[str, Any]:
        if asked["do"] == "state":
            gc.collect()
            pages = int(open("/proc/self/statm").read().split()[1])
            return {
                "rss_bytes": pages * mmap.PAGESIZE,
                "fds": len(os.listdir("/proc/self/fd")),
                "endpoints": len(_ucp._endpoints),
                "begins": tickets.begins,
                "ends": tickets.ends,
            }
        nonlocal last_bytes
        late = not (landed[:last_bytes] == POISON).all()  # after the last pull had settled
        peer, token = Member.from_wire(asked["member"]), asked["token"].encode()

        def strike() -> None:
            if "kill" in asked:
                os.kill(asked["kill"], signal.SIGKILL)
            if "run" in asked:
                subprocess.run(asked["run"], check=True)

        budget_s = asked.get("budget_s", PATIENCE_S)
        began_s = time.monotonic()
        error = await _pull(transport, peer, token, dest, asked.get("at_bytes", 0), strike, budget_s)
        took_s = time.monotonic() - began_s
        last_bytes = nbytes = TICKETS[token]
        right = bool(np.array_equal(landed[:nbytes], source[:nbytes]))
        landed[:nbytes] = POISON
        return {
            "error": type(error).__name__ if error else "",
            "right": right,
            "late": late,
            "took_s": took_s,
        }

    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    _nursery() if sys.argv[1] == "nursery" else asyncio.run(_survive(sys.argv[2]))
