"""`python -m bench.nvme`: the NVMe tier beside fio, on the same filesystem.

Both move records of one size with O_DIRECT and the same number under way, over a range as large as the
other's. Ours are whole: index, checksummed headers, commit, and every byte read is verified. Both take turns,
and the median of the ratios of neighbours counts, since a disk's speed on a shared machine wanders.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from bench.report import Report, finish, paired, parser, quantile
from p2pcache.core.checksum import checksum_body
from p2pcache.core.nvmelog import Record
from p2pcache.io.slab import HostSlab
from p2pcache.io.store_nvme import NvmeStore
from p2pcache.types import BodyInfo, ContentKey, ExactKey, Provenance, TierFull

MIB = 1 << 20
CASES = ((1 * MIB, 8), (16 * MIB, 4))  # bytes of a record, records under way
ROUND_BYTES = 512 * MIB
LAYERS = 32
SINGLE_READS = 300
SMALL_RECORDS, SMALL_BYTES = 50_000, 4096
NO_FIO = "fio is not installed (apt-get install fio)"


class Ours:
    """A store that holds a round of records and one to spare; bodies lie in a slab, as a node's do."""

    def __init__(self, loop: asyncio.AbstractEventLoop, path: Path, nbytes: int, depth: int, io: str):
        self.loop, self.nbytes, self.depth = loop, nbytes, depth
        self.count = ROUND_BYTES // nbytes
        self.slab = HostSlab(nbytes * depth)
        self.store = self.run(
            NvmeStore.open(path, capacity_bytes=2 * ROUND_BYTES, segment_bytes=128 * MIB, depth=depth, io=io)
        )
        body = random.Random(1).randbytes(nbytes)
        self.views = [self.slab.view(nbytes * lane, nbytes) for lane in range(depth)]
        for view in self.views:
            view[:] = body
        self.written = 0
        self.newest: list[Record] = []
        for _ in range(2):  # once around: a fresh file's first writes cost the filesystem more
            self.write()

    def run(self, work):
        return self.loop.run_until_complete(work)

    def write(self) -> float:
        """Seconds to append a round of new records. Their checksums are an engine's, taken before."""
        records = []
        for _ in range(self.count):
            self.written += 1
            exact = ExactKey(self.written.to_bytes(16, "little"))
            info = BodyInfo(ContentKey(exact), exact, 256, self.nbytes, Provenance.ISOLATED, 0)
            records.append(Record(info, checksum_body(self.views[0], exact, LAYERS)))
        queue = iter(records)

        async def append(view: memoryview) -> None:
            for record in queue:
                while True:  # as a node does: another lane may have taken the room that was made
                    await self.store.make_room(record)
                    with contextlib.suppress(TierFull):
                        await self.store.append(record, view)
                        break

        self.newest = records
        return self._timed(append)

    def read(self) -> float:
        """Seconds to read, and verify, the newest round."""
        queue = iter(self.newest)

        async def read(view: memoryview) -> None:
            for record in queue:
                if await self.store.read_into(record.body.exact, view) is None:
                    raise RuntimeError("a record that was appended is not there")

        return self._timed(read)

    def single_reads(self) -> list[float]:
        """Seconds of each of some reads, one at a time, in random order."""

        async def each() -> list[float]:
            took = []
            for record in random.Random(2).choices(self.newest, k=SINGLE_READS):
                began = time.perf_counter()
                await self.store.read_into(record.body.exact, self.views[0])
                took.append(time.perf_counter() - began)
            return took

        return self.run(each())

    def close(self) -> None:
        self.run(self.store.close())
        self.views.clear()
        self.slab.close()

    def _timed(self, lane: Callable[[memoryview], Awaitable[None]]) -> float:
        async def all_lanes() -> None:
            await asyncio.gather(*(lane(view) for view in self.views))

        began = time.perf_counter()
        self.run(all_lanes())
        return time.perf_counter() - began


def fio(path: Path, rw: str, nbytes: int, depth: int) -> float:
    """Seconds that fio takes for a round, as it says itself. Its file is twice as large, like our log."""
    options = {
        "name": "round",
        "filename": path / "fio",
        "rw": rw,
        "bs": nbytes,
        "iodepth": depth,
        "size": 2 * ROUND_BYTES,
        "io_size": ROUND_BYTES,
        "ioengine": "io_uring",
        "direct": 1,
        "output-format": "json",
    }
    command = ["fio", *(f"--{name}={value}" for name, value in options.items())]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    return job[rw]["io_bytes"] / job[rw]["bw_bytes"] * ROUND_BYTES / job[rw]["io_bytes"]


def compare(report: Report, ours: Ours, path: Path) -> None:
    """One size of record: rows, and the ratios to fio's throughput."""
    size = f"{ours.nbytes // MIB}MiB"
    status = ours.store.status()
    there = shutil.which("fio") is not None
    for rw, mine in (("write", ours.write), ("read", ours.read)):
        if there:
            seconds, theirs, ratio = paired(mine, lambda rw=rw: fio(path, rw, ours.nbytes, ours.depth))
        else:
            mine()
            seconds, theirs, ratio = statistics.median(mine() for _ in range(5)), math.nan, math.nan
        report.row(
            what=rw,
            record=size,
            under_way=ours.depth,
            io=status["io"] + (", O_DIRECT" if status["direct"] else ", page cache"),
            ours_mib_s=ROUND_BYTES / MIB / seconds,
            fio_mib_s=ROUND_BYTES / MIB / theirs if there else None,
        )
        report.ratio(f"{rw}_vs_fio_{size}", 1 / ratio if there else None, ">= 0.9", NO_FIO)


def restart(report: Report, loop: asyncio.AbstractEventLoop, path: Path) -> None:
    """How long a store takes to find small records again."""
    sizes = {"capacity_bytes": 512 * MIB, "segment_bytes": 8 * MIB}
    body = memoryview(bytes(SMALL_BYTES))

    async def fill() -> None:
        store = await NvmeStore.open(path, **sizes)

        async def append(lane: int) -> None:
            for number in range(lane, SMALL_RECORDS, 8):
                exact = ExactKey(number.to_bytes(16, "little"))
                info = BodyInfo(ContentKey(exact), exact, 16, SMALL_BYTES, Provenance.ISOLATED, 0)
                await store.append(Record(info, checksum_body(body, exact, 1)), body)

        await asyncio.gather(*(append(lane) for lane in range(8)))
        await store.close()

    async def again() -> float:
        began = time.perf_counter()
        store = await NvmeStore.open(path, **sizes)
        seconds, found = time.perf_counter() - began, store.status()["records"]
        await store.close()
        if found != SMALL_RECORDS:
            raise RuntimeError(f"{found} of {SMALL_RECORDS} records were found again")
        return seconds

    loop.run_until_complete(fill())
    seconds = statistics.median(loop.run_until_complete(again()) for _ in range(3))
    report.row(what="restart", record=f"{SMALL_RECORDS} of 4KiB", seconds=seconds)
    report.ratio("recover_records_per_s", SMALL_RECORDS / seconds)


def main() -> None:
    arguments = parser("The NVMe tier beside fio.", "nvme")
    arguments.add_argument("--path", type=Path, default=Path("out"), help="a folder of the disk to measure")
    arguments.add_argument("--io", default="auto", help="uring, threads, or auto")
    args = arguments.parse_args()
    args.path.mkdir(parents=True, exist_ok=True)
    report, loop = Report("nvme"), asyncio.new_event_loop()
    with tempfile.TemporaryDirectory(prefix="nvme-", dir=args.path) as folder:
        for nbytes, depth in CASES:
            path = Path(folder) / str(nbytes)
            ours = Ours(loop, path, nbytes, depth, args.io)
            try:
                compare(report, ours, path)
                if nbytes == MIB:
                    took = ours.single_reads()
                    ms = {f"p{share}_ms": quantile(took, share / 100) * 1e3 for share in (50, 99)}
                    report.row(what="one read", record="1MiB", under_way=1, **ms)
            finally:
                ours.close()
            shutil.rmtree(path)
        restart(report, loop, Path(folder) / "restart")
    finish(report, args.json)


if __name__ == "__main__":
    main()
