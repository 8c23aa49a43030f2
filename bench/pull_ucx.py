"""Bodies over UCX, slab to slab between two processes, beside `ucx_perftest -t tag_bw` of the same library.

Ours pulls one body after another over an established connection: a request, an answer, the body, and
what tells the caller. `tag_bw` keeps a window of sends in flight and never waits for anybody, so the
bodies on which ours spends mostly round trips are to be held against `tag_lat`. Both use the settings of
the transport, over tcp on the loopback interface, and neither verifies.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from bench.report import PAIRS, Report, finish, paired, parser
from p2pcache.core.membership import Member
from p2pcache.io._ucx_engine import SETTINGS
from p2pcache.io.ports import Ticket
from p2pcache.io.slab import HostSlab
from p2pcache.io.transport_ucx import UcxTransport, ucx_available

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 256 * KIB, MIB, 16 * MIB, 64 * MIB)
SLAB_BYTES = 64 * MIB
RUN_BYTES, RUN_COUNT_MAX = 512 * MIB, 400  # moved in one measurement, and bodies in it at most
PERFTEST_TIMEOUT_S = 60.0
PERFTEST_PORT = 13_337


class Ours:
    """A holder's process and a reader's, with a connection between them."""

    def __enter__(self) -> Ours:
        with contextlib.ExitStack() as stack:
            holder = stack.enter_context(_process("holder"))
            self._reader = stack.enter_context(_process("reader", holder.stdout.readline().strip()))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __call__(self, nbytes: int, count: int) -> float:
        """Seconds a body. nbytes: up to SLAB_BYTES, into the same destination each time."""
        print(nbytes, count, file=self._reader.stdin, flush=True)
        return float(self._reader.stdout.readline())


def perftest(nbytes: int, count: int, wait: str = "sleep", test: str = "tag_bw") -> float:
    """Seconds a message of `ucx_perftest`, with error handling as ours.

    wait: `sleep` blocks on events as we do, `poll` spins. test: `tag_bw` streams, `tag_lat` is half of a
    round trip. Raises RuntimeError where it does not run; `why_no_perftest` says so before.
    """
    # Its control port has no address to choose: a network namespace keeps it off the network.
    asked = f"-p {PERFTEST_PORT} 127.0.0.1 -t {test} -s {nbytes} -n {count} -w 2 -E {wait} -e -f"
    listening = f"ss -ltnH 'sport = :{PERFTEST_PORT}' | grep -q ."
    script = (
        f'ip link set lo up; "$0" -p {PERFTEST_PORT} >/dev/null & server=$!;'
        f' until {listening}; do kill -0 $server || exit 1; done; "$0" {asked}; wait'
    )
    ran = subprocess.run(
        ["unshare", "--net", "sh", "-c", script, str(_program())],
        env={**os.environ, **_environment()},
        capture_output=True,
        text=True,
        timeout=PERFTEST_TIMEOUT_S,
    )
    rows = re.findall(r"^\s*\d+((?:\s+[\d.]+){7})\s*$", ran.stdout, re.MULTILINE)
    if not rows:
        raise RuntimeError(f"ucx_perftest said nothing of use: {(ran.stderr or ran.stdout).strip()[-200:]}")
    return float(rows[-1].split()[2]) * 1e-6  # percentile, average, *overall* microseconds


def why_no_perftest() -> str:
    """Why `perftest` cannot be run here, or nothing. It takes the rights to make a network namespace."""
    if not _program().is_file():
        return f"the libucx wheel has no {_program()}"
    if missing := [name for name in ("unshare", "ip", "ss") if shutil.which(name) is None]:
        return f"no {', '.join(missing)} to keep ucx_perftest off the network with"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True)
    return f"no network namespace for ucx_perftest: {tried.stderr.strip()}" if tried.returncode else ""


def _program() -> Path:
    import libucx

    return Path(libucx.__file__).parent / "bin/ucx_perftest"


def _environment() -> dict[str, str]:
    """The transport's settings, and where the library is, which `ucx_perftest` does not find by itself."""
    settings = {f"UCX_{name}": value for name, value in SETTINGS.items()}
    quiet = {"UCX_WARN_UNUSED_ENV_VARS": "n", "UCX_LOG_LEVEL": "error"}
    here = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo", "LD_LIBRARY_PATH": str(_program().parents[1] / "lib")}
    return {**settings, **quiet, **here}


def _count(nbytes: int) -> int:
    return min(RUN_BYTES // nbytes, RUN_COUNT_MAX)


def measure(report: Report, pairs: int = PAIRS, sizes: tuple[int, ...] = SIZES) -> None:
    """Add rows and the ratio to a report: throughput of ours / `tag_bw`, both sleeping, of pairs in turn.

    Beside it, measured once: `tag_bw` polling, and the round trip of `tag_lat`.
    """
    target = {"name": "ucx_vs_perftest_16MiB", "target": ">= 0.85"}
    if why := ucx_available() or why_no_perftest():
        return report.ratio(**target, value=None, why_missing=why)
    with Ours() as ours:
        for nbytes in sizes:
            count = _count(nbytes)
            mine, theirs, ratio = paired(
                partial(ours, nbytes, count), partial(perftest, nbytes, count), pairs
            )
            polling = perftest(nbytes, count, "poll")
            round_trip_s = 2 * perftest(nbytes, count, test="tag_lat")
            report.row(
                bytes=nbytes,
                ours_us=mine * 1e6,
                tag_bw_us=theirs * 1e6,
                polling_us=polling * 1e6,
                round_trip_us=round_trip_s * 1e6,
                mib_s=nbytes / MIB / mine,
                ratio=1 / ratio,
            )
            if nbytes == 16 * MIB:
                report.ratio(**target, value=1 / ratio)


# The other processes.


@contextlib.contextmanager
def _process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """This file as a program, with the same transports as `ucx_perftest`."""
    command = [sys.executable, "-m", "bench.pull_ucx", *arguments]
    environment = {**os.environ, "UCX_TLS": "tcp"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            yield process
        finally:
            process.kill()


class _Bodies:
    """`Tickets` where the token says how many bytes, all from the start of one slab."""

    def __init__(self, slab: HostSlab) -> None:
        self._slab = slab

    def begin(self, token: bytes) -> memoryview:
        return self._slab.view(0, int.from_bytes(token)).toreadonly()

    def end(self, token: bytes) -> None:
        pass


async def _hold() -> None:
    slab = HostSlab(SLAB_BYTES)
    slab.view(0, SLAB_BYTES)[:] = os.urandom(SLAB_BYTES)
    address = await UcxTransport("127.0.0.1").start(_Bodies(slab))
    print(json.dumps(Member("holder", 1, "", "", {"ucx": address}).to_wire()), flush=True)
    await asyncio.to_thread(sys.stdin.read)


async def _read(holder: Member) -> None:
    slab, transport = HostSlab(SLAB_BYTES), UcxTransport("127.0.0.1")
    slab.view(0, SLAB_BYTES)[:] = bytes(SLAB_BYTES)

    async def pull(nbytes: int) -> None:
        ticket = Ticket(nbytes.to_bytes(16), 0, nbytes, 1, ())
        pull = transport.pull(holder, ticket, slab.view(0, nbytes), lambda _: None)
        await pull.done
        await pull.settled

    for line in sys.stdin:
        nbytes, count = map(int, line.split())
        await pull(nbytes)
        began_s = time.perf_counter()
        for _ in range(count):
            await pull(nbytes)
        print((time.perf_counter() - began_s) / count, flush=True)


def main() -> None:
    match sys.argv[1:]:
        case ["holder"]:
            asyncio.run(_hold())
        case ["reader", known_as]:
            asyncio.run(_read(Member.from_wire(json.loads(known_as))))
        case _:
            arguments = parser(__doc__.splitlines()[0], "pull_ucx").parse_args()
            report = Report("pull_ucx")
            measure(report)
            finish(report, arguments.json)


if __name__ == "__main__":
    main()
