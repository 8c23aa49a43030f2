"""A body from one process to another: ours beside plain sockets, memcpy, ucx_perftest and other systems.

"transport" is a transfer for which the ticket is at hand, "whole" all until the body is served here: a ticket
from the holder, room in the tier, the transfer, the check of every layer, commit. Bodies are of an 8B model's
KV, with 32 layers. Ours is verified where it stands beside a peer; theirs is not. Mooncake's and Ray's `get`
ask somebody where the object is, so they stand beside the whole pull; NIXL's READ has that at hand.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter

import numpy as np

from bench import pull_ucx
from bench.pull_ours import MIB, TOKENS, Ours
from bench.report import PAIRS, Report, finish, paired, parser
from cluster import private_network
from p2pcache.io.transport_ucx import ucx_available

SIZES = tuple(TOKENS)
RUN_BYTES = 256 * MIB  # moved in one measurement
PEERS_PYTHON = Path(os.environ.get("P2PCACHE_PEERS_PYTHON", ".venv-peers/bin/python"))
PEERS = {  # ratio of throughputs -> its target, the peer's script, what of ours stands beside it
    "tcp_vs_mooncake_16MiB": (">= 1.5", "mooncake_get.py", "whole"),
    "tcp_vs_nixl_16MiB": (">= 1.5", "nixl_read.py", "transport"),
    "vs_ray_object_16MiB": (">= 4", "ray_object.py", "whole"),
}


def main() -> None:
    options = parser(__doc__, "pull")
    options.add_argument("--pairs", type=int, default=PAIRS)
    options.add_argument("--no-peers", action="store_true", help="only sockets, memcpy and ours")
    asked = options.parse_args()
    with contextlib.suppress(OSError):
        private_network.enter()  # some peers listen on every interface
    report = Report("pull")
    with Ours() as ours:
        _tcp(report, ours, asked.pairs)
        _shm(report, ours, asked.pairs)
        if not asked.no_peers:
            for ratio, (target, script, what) in PEERS.items():
                _peer(report, ours, asked.pairs, ratio, target, script, what)
    if not asked.no_peers:
        _ucx(report, asked.pairs)
    finish(report, asked.json)


def _count(nbytes: int) -> int:
    return max(min(RUN_BYTES // nbytes, 200), 4)


def _row(
    report: Report, nbytes: int, what: str, seconds: float, beside: str, theirs_s: float, ratio: float
) -> None:
    report.row(
        MiB=nbytes / MIB,
        what=what,
        GB_s=nbytes / seconds / 1e9,
        us=seconds * 1e6,
        beside=beside,
        theirs_GB_s=nbytes / theirs_s / 1e9,
        ratio=1 / ratio,
    )


def _tcp(report: Report, ours: Ours, pairs: int) -> None:
    arms: dict[str, Callable[[int, int], float]] = {
        "tcp transport, not verified": lambda n, c: ours.transport("tcp", n, c, verify=False),
        "tcp transport": lambda n, c: ours.transport("tcp", n, c),
        "tcp whole": lambda n, c: ours.whole("tcp", n, c),
    }
    with PlainSockets() as plain:
        for nbytes in SIZES:
            for what, arm in arms.items():
                count = _count(nbytes)
                mine, theirs, ratio = paired(
                    partial(arm, nbytes, count), partial(plain, nbytes, count), pairs
                )
                _row(report, nbytes, what, mine, "sockets", theirs, ratio)
                size = f"{nbytes // MIB}MiB"
                if nbytes >= 16 * MIB and what == "tcp transport, not verified":
                    report.ratio(f"tcp_vs_socket_{size}", 1 / ratio, ">= 0.9")
                elif nbytes >= 16 * MIB and what == "tcp transport":
                    report.ratio(f"tcp_verified_vs_socket_{size}", 1 / ratio, ">= 0.75")


def _shm(report: Report, ours: Ours, pairs: int) -> None:
    source, dest = (np.frombuffer(mmap.mmap(-1, max(SIZES)), np.uint8) for _ in range(2))
    source[:] = 7
    dest[:] = 0

    def memcpy(nbytes: int, count: int) -> float:
        started_s = perf_counter()
        for _ in range(count):
            np.copyto(dest[:nbytes], source[:nbytes])
        return (perf_counter() - started_s) / count

    for nbytes in SIZES:
        for what in ("transport", "whole"):
            arm, count = getattr(ours, what), _count(nbytes)
            mine, theirs, ratio = paired(
                partial(arm, "shm", nbytes, count), partial(memcpy, nbytes, count), pairs
            )
            _row(report, nbytes, f"shm {what}", mine, "memcpy", theirs, ratio)
            if nbytes == 16 * MIB and what == "transport":
                report.ratio("shm_vs_memcpy_16MiB", 1 / ratio, ">= 0.8")


def _peer(report: Report, ours: Ours, pairs: int, name: str, target: str, script: str, what: str) -> None:
    python = Path(sys.executable) if script.startswith("ray") else PEERS_PYTHON
    if not python.exists():
        return report.ratio(name, None, target, "not installed: make bench-peers")
    arm = getattr(ours, what)
    try:
        with Peer(python, script) as peer:
            for nbytes in SIZES:
                count = max(_count(nbytes) // 8, 2)
                mine, theirs, ratio = paired(
                    partial(arm, "tcp", nbytes, count), partial(peer, nbytes, count), pairs
                )
                _row(report, nbytes, f"tcp {what}", mine, script.split("_")[0], theirs, ratio)
                if nbytes == 16 * MIB:
                    report.ratio(name, 1 / ratio, target)
    except RuntimeError as error:
        report.ratio(name, None, target, str(error))


def _ucx(report: Report, pairs: int) -> None:
    name, target = "ucx_vs_perftest_16MiB", ">= 0.85"
    if why := ucx_available() or pull_ucx.why_no_perftest():
        return report.ratio(name, None, target, why)
    with pull_ucx.Ours() as ours:
        for nbytes in SIZES:
            count = _count(nbytes)
            mine, theirs, ratio = paired(
                partial(ours, nbytes, count), partial(pull_ucx.perftest, nbytes, count), pairs
            )
            _row(report, nbytes, "ucx transport, not verified", mine, "tag_bw", theirs, ratio)
            if nbytes == 16 * MIB:
                report.ratio(name, 1 / ratio, target)


class PlainSockets:
    """Blocking sockets with `recv_into`, tuned: what the kernel takes to move the bytes. Use as a context."""

    PIECE_BYTES = 1 * MIB
    BUFFER_BYTES = 4 * MIB

    def __enter__(self) -> PlainSockets:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._tune(listener)
            port = listener.getsockname()[1]
            self._process = subprocess.Popen([sys.executable, "-c", _SENDER, str(port), str(max(SIZES))])
            self._socket, _ = listener.accept()
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._dest = memoryview(mmap.mmap(-1, max(SIZES)))
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.wait()

    def _tune(self, sock: socket.socket) -> None:
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, self.BUFFER_BYTES)

    def __call__(self, nbytes: int, count: int) -> float:
        sock, dest = self._socket, self._dest
        started_s = perf_counter()
        for _ in range(count):
            sock.sendall(nbytes.to_bytes(8, "big"))
            landed = 0
            while landed < nbytes:
                piece = dest[landed : min(landed + self.PIECE_BYTES, nbytes)]
                landed += sock.recv_into(piece, 0, socket.MSG_WAITALL)
        return (perf_counter() - started_s) / count


_SENDER = """
import mmap, socket, sys
memory = memoryview(mmap.mmap(-1, int(sys.argv[2])))
memory[:] = bytes(len(memory))
with socket.socket() as sock:
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, 4 << 20)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.connect(("127.0.0.1", int(sys.argv[1])))
    while len(asked := sock.recv(8, socket.MSG_WAITALL)) == 8:
        sock.sendall(memory[:int.from_bytes(asked, "big")])
"""


class Peer:
    """Another system's processes; `bench/peers` has its script. Use as a context. Raises RuntimeError."""

    def __init__(self, python: Path, script: str):
        self._command = [str(python), str(Path(__file__).parent / "peers" / script)]

    def __enter__(self) -> Peer:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            self._command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
        )
        if not self._process.stdout.readline():
            self.__exit__()
            raise RuntimeError(f"does not start: {' '.join(self._command)} says why")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        self._process.kill()
        self._process.wait()

    def __call__(self, nbytes: int, count: int) -> float:
        print(nbytes, count, file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": "it died"}
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["seconds"]


if __name__ == "__main__":
    main()
