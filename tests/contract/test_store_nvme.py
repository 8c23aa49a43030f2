"""The NVMe store on real files: round trips, restarts, damage, its cap, its lock, and SIGKILL.

All of it on every way to move bytes: io_uring and threads past the page cache, and threads through it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import mmap
import os
import random
import signal
import stat
import subprocess
import sys
import threading
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest

from p2pcache.core.checksum import CorruptBody, checksum_body
from p2pcache.core.coding import Coding
from p2pcache.core.nvmelog import PAGE_BYTES, RECORD_MAGIC, Record, round_up
from p2pcache.io import _nvme_files, _nvme_io
from p2pcache.io.store_nvme import Appended, NvmeStore
from p2pcache.types import (
    BodyInfo,
    ConfigError,
    ContentKey,
    ExactKey,
    LayoutError,
    NodeDown,
    Provenance,
    TierFull,
)

MIB = 1 << 20
CHUNK_BYTES = 3_098_112  # 756.375 pages
ROOT = Path(__file__).parents[2]
MODE = "NVME_TEST_MODE"  # in the environment, so that child processes have it too


@pytest.fixture(autouse=True, params=["uring", "threads", "buffered"])
def mode(request, monkeypatch):
    if request.param == "uring":
        try:
            _nvme_io.UringIo()
        except OSError as error:
            pytest.skip(f"io_uring is refused here: {error}")
    monkeypatch.setenv(MODE, request.param)
    return request.param


def make(number: int, nbytes: int = 60_000, layers: int = 3, meta: bytes = b"") -> tuple[Record, memoryview]:
    """A record and its body, the same ones for the same arguments in every process."""
    body = memoryview(random.Random(number).randbytes(nbytes))
    exact = ExactKey(number.to_bytes(16, "little"))
    content = ContentKey((number % 1000).to_bytes(16, "big"))
    info = BodyInfo(
        content, exact, tokens=256, nbytes=nbytes, provenance=Provenance.ISOLATED, base_position=77
    )
    return Record(info, checksum_body(body, exact, layers), meta), body


@asynccontextmanager
async def opened(path, capacity_bytes=4 * MIB, segment_bytes=MIB, **options):
    mode = os.environ[MODE]
    with pytest.MonkeyPatch.context() as patch:
        if mode == "buffered":
            patch.setattr(_nvme_files, "set_direct", lambda fd: False)
        io = "uring" if mode == "uring" else "threads"
        store = await NvmeStore.open(
            path, capacity_bytes=capacity_bytes, segment_bytes=segment_bytes, io=io, **options
        )
    assert (store.status()["io"], store.status()["direct"]) == (io, mode != "buffered")
    try:
        yield store
        store._index.validate()
    finally:
        await store.close()


async def put(store: NvmeStore, record: Record, body: memoryview) -> list[ExactKey]:
    evicted = await store.make_room(record)
    assert await store.append(record, body) is Appended.STORED
    return [gone.exact for gone in evicted]


async def get(store: NvmeStore, record: Record) -> bytes | None:
    dest = memoryview(bytearray(record.stored_bytes))
    found = await store.read_into(record.body.exact, dest)
    assert found in (None, record)
    return bytes(dest) if found else None


async def fill(path, numbers, **options):
    """A store that has been closed, with records `numbers`; where they lie, by number."""
    async with opened(path, **options) as store:
        for number in numbers:
            await put(store, *make(number))
        return {number: store._index.lookup(make(number)[0].body.exact) for number in numbers}


class Tampered:
    """A backend that calls `before(piece, write)` as each piece is about to move."""

    def __init__(self, inner, before):
        self._inner = inner
        self._before = before
        self.name = inner.name

    def move(self, fd, pieces, *, write):
        def told():
            for piece in pieces:
                self._before(piece, write)
                yield piece

        return self._inner.move(fd, told(), write=write)


@contextmanager
def tampered(store: NvmeStore, before):
    files = store._files
    inner, files.backend = files.backend, Tampered(files.backend, before)
    try:
        yield
    finally:
        files.backend = inner


def failing(*, reads: bool = False, writes: bool = False):
    """A device that answers with an error."""

    def before(_piece, write):
        if writes if write else reads:
            raise OSError(errno.EIO, "device error")

    return before


def flip(path: Path, segment: int, at: int) -> None:
    with open(path / f"{segment:06d}.seg", "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 16]))


def file_bytes(path: Path) -> int:
    return sum(entry.stat().st_size for entry in path.iterdir())


@pytest.mark.parametrize("meta", [b"", b"\0opaque\xff" * 300])
@pytest.mark.parametrize(
    ("nbytes", "layers"), [(1, 1), (4095, 3), (4096, 1), (4097, 1), (CHUNK_BYTES, 3), (61_440, 1024)]
)
def test_what_was_appended_is_read_back_now_and_after_a_restart(tmp_path, nbytes, layers, meta):
    async def scenario():
        record, body = make(1, nbytes, layers, meta)
        neighbour = make(2, 4097, 17)
        async with opened(tmp_path, 16 * MIB, 8 * MIB) as store:
            assert await get(store, record) is None and store.lookup(record.body.exact) is None
            assert await put(store, record, body) == []
            await put(store, *neighbour)
            assert await get(store, record) == body
        async with opened(tmp_path, 16 * MIB, 8 * MIB) as store:
            assert store.lookup(record.body.exact) == record
            assert store.by_content(record.body.content) == [record]
            assert list(store.records()) == [record, neighbour[0]]
            assert await get(store, record) == body and await get(store, neighbour[0]) == neighbour[1]
            assert store.stats().flipped == store.stats().torn == store.stats().corrupt == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, MIB - 1, MIB + 1, CHUNK_BYTES, 5 * MIB + 7])
@pytest.mark.parametrize("shift", [0, 1, 512, 4095])
def test_memory_of_any_alignment_is_read_and_written_to_the_byte(tmp_path, nbytes, shift):
    """Whole pages of the caller's that start on a page move in place; no byte beside them is touched."""

    async def scenario():
        record, body = make(1, nbytes, 1)
        memory = memoryview(mmap.mmap(-1, round_up(nbytes) + 3 * PAGE_BYTES))
        start = PAGE_BYTES + shift
        async with opened(tmp_path, 32 * MIB, 8 * MIB) as store:
            memory[start : start + nbytes] = body
            await put(store, record, memory[start : start + nbytes])
            memory[:] = b"\xee" * memory.nbytes
            assert await store.read_into(record.body.exact, memory[start : start + nbytes]) == record
            assert memory[start : start + nbytes] == body
            beside = bytes(memory[:start]) + bytes(memory[start + nbytes :])
            assert beside == b"\xee" * len(beside)
            place = store._index.lookup(record.body.exact)
        with open(tmp_path / "000000.seg", "rb") as file:
            file.seek(place.body_offset)
            assert file.read(round_up(nbytes)) == bytes(body).ljust(round_up(nbytes), b"\0")

    asyncio.run(scenario())


def test_what_one_backend_wrote_another_reads(tmp_path):
    async def scenario():
        made = [make(number, 3 * MIB + number, 1) for number in range(6)]
        async with opened(tmp_path, 64 * MIB, 16 * MIB) as store:
            for record, body in made[:3]:
                await put(store, record, body)
        sizes = {"capacity_bytes": 64 * MIB, "segment_bytes": 16 * MIB}
        for io in ("threads", "auto"):
            store = await NvmeStore.open(tmp_path, io=io, **sizes)
            assert [await get(store, record) for record, _ in made[:3]] == [body for _, body in made[:3]]
            await put(store, *made.pop())
            await store.close()

    asyncio.run(scenario())


def test_a_key_that_is_there_or_on_its_way_is_not_written_again(tmp_path):
    async def scenario():
        async with opened(tmp_path) as store:
            record, body = make(1)
            both = await asyncio.gather(store.append(record, body), store.append(record, body))
            assert sorted(both) == [Appended.IN_FLIGHT, Appended.STORED]
            used = store.used_bytes
            assert await store.append(record, body) is Appended.PRESENT
            assert store.used_bytes == used and store.stats().appended == 1

    asyncio.run(scenario())


def test_concurrent_appends_and_reads_keep_to_their_own_bytes(tmp_path):
    async def scenario():
        made = [make(number, 1000 * number + 1000, 1) for number in range(40)]
        async with opened(tmp_path, depth=4) as store:
            await asyncio.gather(*(put(store, *one) for one in made))
            assert await asyncio.gather(*(get(store, record) for record, _ in made)) == [
                body for _, body in made
            ]
        async with opened(tmp_path) as store:
            assert [await get(store, record) for record, _ in made] == [body for _, body in made]

    asyncio.run(scenario())


def test_eviction_is_first_in_first_out_and_the_cap_is_never_exceeded(tmp_path):
    async def scenario():
        gone, cap = [], 4 * MIB + 1234
        async with opened(tmp_path, cap, MIB) as store:
            for number in range(200):
                gone += await put(store, *make(number))
                assert file_bytes(tmp_path) <= cap and store.used_bytes <= store.capacity_bytes == cap
            assert gone == [make(number)[0].body.exact for number in range(len(gone))]
            assert store.stats().records == 200 - len(gone) > 40
            assert store.stats().evicted == len(gone)
            assert await get(store, make(199)[0]) == make(199)[1] and await get(store, make(0)[0]) is None
        assert sum(entry.stat().st_blocks * 512 for entry in tmp_path.iterdir()) >= 4 * MIB  # not sparse
        async with opened(tmp_path, cap, MIB) as store:
            assert store.stats().records == 200 - len(gone) and store.used_bytes > 3 * MIB  # at once
            assert store.stats().flipped == store.stats().torn == 0
            for number in range(200, 260):
                gone += await put(store, *make(number))
            assert gone == [make(number)[0].body.exact for number in range(len(gone))]

    asyncio.run(scenario())


def test_room_is_reclaimed_only_for_a_caller_that_was_told_what_to_withdraw(tmp_path):
    async def scenario():
        async with opened(tmp_path, 2 * MIB, MIB) as store:
            number = 0
            while not (told := await store.make_room(make(number)[0])):
                assert await store.append(*make(number)) is Appended.STORED
                number += 1
            with pytest.raises(TierFull, match="make_room"):
                await store.append(*make(1000))
            assert await store.make_room(make(1001)[0]) == told
            assert await store.append(*make(1001)) is Appended.STORED
            assert await store.append(*make(number)) is Appended.STORED  # its room had been made already

    asyncio.run(scenario())


def test_a_record_that_fits_no_segment_is_refused_at_once(tmp_path):
    async def scenario():
        async with opened(tmp_path) as store:
            record, body = make(1, MIB, 1)
            with pytest.raises(TierFull, match="fits no NVMe segment"):
                await store.make_room(record)
            with pytest.raises(TierFull, match="fits no NVMe segment"):
                await store.append(record, body)

    asyncio.run(scenario())


def test_a_segment_that_is_being_read_is_not_reused(tmp_path):
    async def scenario():
        async with opened(tmp_path, 2 * MIB, MIB) as store:
            record, body = make(0)
            await put(store, record, body)
            reading, go_on = threading.Event(), threading.Event()

            def slow_read(_piece, write):
                if not write:
                    reading.set()
                    go_on.wait()

            with tampered(store, slow_read):
                task = asyncio.ensure_future(get(store, record))
                await asyncio.to_thread(reading.wait)
                evicted = []
                for number in range(1, 60):
                    evicted += await put(store, *make(number))
                assert record.body.exact not in evicted and len(evicted) > 20
                go_on.set()
                assert await task == body

    asyncio.run(scenario())


class Dying:
    """A backend of a process that dies in its `last`-th piece, of which some pages are written."""

    def __init__(self, inner, last: int, pages_of):
        self._inner = inner
        self._left = last
        self._pages_of = pages_of
        self.name = inner.name

    def move(self, fd, pieces, *, write):
        for piece in pieces:
            if self._left == 0:
                data = b"".join(piece.parts)
                for at in self._pages_of(len(data) // PAGE_BYTES):
                    page = mmap.mmap(-1, PAGE_BYTES)
                    page[:] = data[at * PAGE_BYTES :][:PAGE_BYTES]
                    os.pwritev(fd, [page], piece.offset + at * PAGE_BYTES)
            self._left -= 1
            if self._left < 0:
                raise OSError(errno.EIO, "dead")
            yield from self._inner.move(fd, [piece], write=write)


TEARS = {
    "nothing": lambda pages: [],
    "front": lambda pages: range(pages // 2),
    "back": lambda pages: range(pages // 2, pages),
    "first page": lambda pages: [0],
    "all but one": lambda pages: range(pages - 1),
    "all": range,
}


@pytest.mark.parametrize("tear", TEARS)
@pytest.mark.parametrize("last", range(11))
def test_wherever_a_writer_dies_a_restart_finds_what_was_whole_alone(tmp_path, monkeypatch, last, tear):
    """Bodies of one piece, of several, and of no whole page, over what an earlier life has left there."""
    monkeypatch.setattr(_nvme_io, "PIECE_BYTES", 64 << 10)
    sizes = [100, (192 << 10) + 4096, 5_000, 64 << 10, (128 << 10) + 17]
    made = [make(number, nbytes, 1) for number, nbytes in enumerate(sizes * 3)]
    earlier, new = made[:10], made[10:]

    async def scenario():
        async with opened(tmp_path, MIB, MIB // 2, depth=1) as store:
            for record, body in earlier:
                await put(store, record, body)
            gone = {body.exact for body in await store.make_room(new[1][0])}
            kept = {record.body.exact for record in store.records()}
            assert gone and kept
            store._files.backend = Dying(store._files.backend, last, TEARS[tear])
            for record, body in new:
                with suppress(TierFull):
                    await store.make_room(record)
                    if await store.append(record, body) is Appended.STORED:
                        kept.add(record.body.exact)
            assert not all(record.body.exact in kept for record, _ in new)
        async with opened(tmp_path, MIB, MIB // 2, depth=1) as store:
            found = {record.body.exact for record in store.records()}
            for record, body in made:
                assert await get(store, record) == (body if record.body.exact in found else None)
        beyond = found - kept
        assert kept <= found and beyond & gone in (set(), gone)  # all of a segment, or none of it
        assert len(beyond - gone) <= 1  # whole, and not told of

    asyncio.run(scenario())


@pytest.mark.parametrize("call", ["read", "append"])
def test_a_cancelled_call_returns_only_when_nothing_moves_in_its_buffer(tmp_path, call):
    """It has had a piece moved, another one is about to be; the third never is."""

    async def scenario():
        async with opened(tmp_path, 32 * MIB, 8 * MIB) as store:
            here, new = make(1, 3 * MIB, 1), make(2, 3 * MIB, 1)
            await put(store, *here)
            working, go_on, moved = threading.Event(), threading.Event(), []

            def slow(piece, write):
                moved.append(piece)
                if len(moved) == 2:
                    working.set()
                    go_on.wait()

            with tampered(store, slow):
                task = asyncio.ensure_future(get(store, here[0]) if call == "read" else store.append(*new))
                await asyncio.to_thread(working.wait)
                for _ in range(3):  # however often
                    task.cancel()
                    await asyncio.sleep(0.01)
                    assert not task.done()
                go_on.set()
                with pytest.raises(asyncio.CancelledError):
                    await task
                # The stop is looked at before a piece is handed on, so at most this one went out late.
                assert len(moved) <= 3
            assert await get(store, here[0]) == here[1] and await get(store, new[0]) is None
            await put(store, *new)
            assert await get(store, new[0]) == new[1]

    asyncio.run(scenario())


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_flipped_bit_in_a_body_is_found_when_it_is_read_and_stays_dropped(tmp_path, layer):
    async def scenario():
        async with opened(tmp_path) as store:
            for number in range(5):
                await put(store, *make(number))
            place = store._index.lookup(make(2)[0].body.exact)
            flip(tmp_path, place.segment, place.body_offset + layer * 20_000 + 19_999)
            with pytest.raises(CorruptBody, match=f"layer {layer}"):
                await get(store, make(2)[0])
            assert await get(store, make(2)[0]) is None and store.stats().corrupt == 1
            assert [await get(store, make(n)[0]) == make(n)[1] for n in (0, 1, 3, 4)] == [True] * 4
        async with opened(tmp_path) as store:
            assert store.stats().records == 4 and store.lookup(make(2)[0].body.exact) is None
            await put(store, *make(2))
            assert await get(store, make(2)[0]) == make(2)[1]

    asyncio.run(scenario())


def test_bodies_are_verified_at_the_start_on_demand(tmp_path):
    async def scenario():
        places = await fill(tmp_path, range(5))
        flip(tmp_path, places[2].segment, places[2].body_offset + 5)
        for _ in range(2):
            async with opened(tmp_path, verify_bodies=True) as store:
                assert store.stats().records == 4 and store.lookup(make(2)[0].body.exact) is None
        assert store.stats().corrupt == 0  # it had been marked dead the first time

    asyncio.run(scenario())


@pytest.mark.parametrize("victim", [0, 2, 4])
@pytest.mark.parametrize("at", [0, 9, 17, 18, 40, 100, 128, 4000, 4095])
def test_a_flipped_bit_in_a_header_costs_that_record_only(tmp_path, victim, at):
    async def scenario():
        places = await fill(tmp_path, range(5))
        flip(tmp_path, places[victim].segment, places[victim].offset + at)
        async with opened(tmp_path) as store:
            assert store.stats().flipped == 1 and store.stats().records == 4
            for number in range(5):
                expected = None if number == victim else make(number)[1]
                assert await get(store, make(number)[0]) == expected

    asyncio.run(scenario())


def test_a_flipped_segment_header_costs_that_segment_only_and_its_epoch_is_not_used_again(tmp_path):
    async def scenario():
        places = await fill(tmp_path, range(40))
        youngest = max(place.segment for place in places.values())
        flip(tmp_path, youngest, 8)
        kept = [number for number, place in places.items() if place.segment != youngest]
        for _ in range(2):  # the lost segment's records must not come back at the second start
            async with opened(tmp_path) as store:
                assert [number for number in places if store.lookup(make(number)[0].body.exact)] == kept
                assert min(s.epoch for s in store._index._segments if s.number == youngest) > places[0].epoch
        assert store.stats().flipped == 0

    asyncio.run(scenario())


def test_a_torn_append_is_counted_dropped_and_written_behind(tmp_path):
    async def scenario():
        async with opened(tmp_path) as store:
            await put(store, *make(1))

            def die_before_the_last_header(piece, write):
                if write and bytes(piece.parts[0][:8]) == RECORD_MAGIC:
                    raise OSError(errno.EIO, "as if killed here")

            with tampered(store, die_before_the_last_header):
                with pytest.raises(TierFull, match="write failed"):
                    await store.append(*make(2))
            await put(store, *make(3))
        async with opened(tmp_path) as store:
            assert (store.stats().torn, store.stats().flipped, store.stats().records) == (1, 0, 2)
            assert await get(store, make(2)[0]) is None and await get(store, make(3)[0]) == make(3)[1]
            await put(store, *make(2))
            assert await get(store, make(2)[0]) == make(2)[1] and await get(store, make(1)[0]) == make(1)[1]

    asyncio.run(scenario())


@pytest.mark.parametrize("torn", [0, 3, 4, 9])
def test_a_committed_header_before_a_torn_body_is_found_at_the_start_or_at_the_read(tmp_path, torn):
    """What a power loss can leave, since nothing is flushed: the youngest bodies are looked at."""

    async def scenario():
        places = await fill(tmp_path, range(10))
        end = places[torn].offset + places[torn].record.record_bytes
        with open(tmp_path / f"{places[torn].segment:06d}.seg", "r+b") as file:
            file.seek(end - 5 * PAGE_BYTES)
            file.write(bytes(5 * PAGE_BYTES))
        async with opened(tmp_path, depth=3) as store:
            if torn < 4:
                with pytest.raises(CorruptBody):
                    await get(store, make(torn)[0])
            assert (store.stats().records, store.stats().corrupt) == (9, 1)
            for number in range(10):
                assert await get(store, make(number)[0]) == (make(number)[1] if number != torn else None)
        async with opened(tmp_path, depth=3) as store:
            assert (store.stats().records, store.stats().corrupt) == (9, 0)

    asyncio.run(scenario())


def test_a_failing_device_costs_the_record_and_not_the_store(tmp_path):
    async def scenario():
        async with opened(tmp_path) as store:
            await put(store, *make(1))
            with tampered(store, failing(writes=True)):
                with pytest.raises(TierFull, match="device error"):
                    await store.append(*make(2))
            with tampered(store, failing(reads=True)):
                with pytest.raises(CorruptBody, match="device error"):
                    await get(store, make(1)[0])
            assert await get(store, make(1)[0]) is None
            assert (store.stats().write_errors, store.stats().read_errors, store.stats().corrupt) == (1, 1, 0)
            await put(store, *make(1))
            await put(store, *make(2))
            assert await get(store, make(2)[0]) == make(2)[1]

    asyncio.run(scenario())


@pytest.mark.parametrize("failed", range(6))
def test_a_device_that_fails_within_a_record_leaves_the_callers_memory_alone(tmp_path, failed):
    """A piece of many fails while others are on their way: none of them writes after the call."""

    async def scenario():
        async with opened(tmp_path, 32 * MIB, 8 * MIB) as store:
            await put(store, *make(1, 6 * MIB, 6))
            drawn = []

            def fail_one(piece, write):
                drawn.append(piece)
                if len(drawn) == failed + 1:
                    raise OSError(errno.EIO, "device error")

            dest = memoryview(mmap.mmap(-1, 6 * MIB))
            with tampered(store, fail_one), pytest.raises(CorruptBody):
                await store.read_into(make(1)[0].body.exact, dest)
            dest[:] = bytes(6 * MIB)
            await put(store, *make(2))
            assert await get(store, make(2)[0]) == make(2)[1] and dest == bytes(6 * MIB)

    asyncio.run(scenario())


@pytest.mark.parametrize("bytes_left", [0, PAGE_BYTES, MIB + 100, 2 * MIB])
def test_a_file_that_is_cut_short_under_us_costs_the_record(tmp_path, bytes_left):
    async def scenario():
        async with opened(tmp_path, 32 * MIB, 8 * MIB) as store:
            record, body = make(1, 3 * MIB, 3)
            await put(store, record, body)
            os.truncate(tmp_path / "000000.seg", bytes_left)
            with pytest.raises(CorruptBody):
                await get(store, record)
            assert await get(store, record) is None and store.stats().read_errors == 1

    asyncio.run(scenario())


def test_files_that_are_removed_under_us_serve_on_and_are_made_anew_at_the_next_start(tmp_path):
    async def scenario():
        async with opened(tmp_path) as store:
            await put(store, *make(1))
            for entry in tmp_path.iterdir():
                entry.unlink()
            await put(store, *make(2))
            assert await get(store, make(1)[0]) == make(1)[1] and await get(store, make(2)[0]) == make(2)[1]
        async with opened(tmp_path) as store:
            assert store.stats().records == 0
            await put(store, *make(1))

    asyncio.run(scenario())


def test_a_full_or_failing_disk_behind_the_kernel_is_a_typed_error(tmp_path):
    """Not injected above the kernel but met in it: the descriptor cannot be written."""

    async def scenario():
        async with opened(tmp_path) as store:
            files = store._files
            read_only = [os.open(f"/proc/self/fd/{fd}", os.O_RDONLY) for fd in files._segment_fds]
            files._segment_fds, writable = read_only, files._segment_fds
            with pytest.raises(TierFull, match="Bad file descriptor"):
                await store.append(*make(1, 700_000, 1))
            files._segment_fds = writable
            for fd in read_only:
                os.close(fd)
            await put(store, *make(2))
            assert await get(store, make(2)[0]) == make(2)[1]

    asyncio.run(scenario())


def test_a_segment_that_cannot_be_reused_is_retired(tmp_path):
    async def scenario():
        async with opened(tmp_path, 3 * MIB, MIB) as store:
            number = 0
            while not await store.make_room(make(number)[0]):
                assert await store.append(*make(number)) is Appended.STORED
                number += 1
            with tampered(store, failing(writes=True)):
                with pytest.raises(TierFull, match="cannot be written"):
                    await store.append(*make(number))
            for number in range(100, 160):
                await put(store, *make(number))
            assert 20 < store.stats().records < 35

    asyncio.run(scenario())


def test_a_dropped_record_stays_dropped(tmp_path):
    async def scenario():
        await fill(tmp_path, range(3))
        async with opened(tmp_path) as store:
            assert await store.drop(make(1)[0].body.exact) and not await store.drop(make(1)[0].body.exact)
        async with opened(tmp_path) as store:
            assert store.lookup(make(1)[0].body.exact) is None and store.stats().records == 2
            assert store.stats().flipped == store.stats().torn == 0

    asyncio.run(scenario())


def test_buffers_of_the_wrong_length_are_typed_errors_and_cost_nothing(tmp_path):
    async def scenario():
        async with opened(tmp_path) as store:
            record, body = make(1)
            with pytest.raises(LayoutError):
                await store.append(record, body[:-1])
            await put(store, record, body)
            for dest in (memoryview(bytearray(10)), memoryview(bytes(record.body.nbytes))):
                with pytest.raises(LayoutError):
                    await store.read_into(record.body.exact, dest)
            assert await get(store, record) == body

    asyncio.run(scenario())


def test_a_closed_store_says_so(tmp_path):
    async def scenario():
        async with opened(tmp_path) as store:
            pass
        await store.close()
        with pytest.raises(NodeDown):
            await store.append(*make(1))
        with pytest.raises(NodeDown):
            await store.read_into(make(1)[0].body.exact, memoryview(bytearray(1)))

    asyncio.run(scenario())


def test_a_close_that_is_cancelled_goes_on_and_the_next_one_waits_for_it(tmp_path):
    async def scenario():
        working, go_on = threading.Event(), threading.Event()

        def slow(_piece, _write):
            working.set()
            go_on.wait()

        async with opened(tmp_path) as store:
            with tampered(store, slow):
                task = asyncio.ensure_future(store.append(*make(1)))
                await asyncio.to_thread(working.wait)
                closing = asyncio.ensure_future(store.close())
                await asyncio.sleep(0)
                closing.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await closing
                go_on.set()
                assert await task is Appended.STORED
            await store.close()
            async with opened(tmp_path) as again:
                assert await get(again, make(1)[0]) == make(1)[1]

    asyncio.run(scenario())


def test_a_cancelled_call_that_never_began_does_not_wait_for_a_thread(tmp_path):
    async def scenario():
        working, go_on = threading.Event(), threading.Event()

        def slow(_piece, _write):
            working.set()
            go_on.wait()

        async with opened(tmp_path, depth=1) as store:
            record, body = make(1)
            await put(store, record, body)
            with tampered(store, slow):
                first = asyncio.ensure_future(get(store, record))
                await asyncio.to_thread(working.wait)
                second = asyncio.ensure_future(get(store, record))
                await asyncio.sleep(0)
                second.cancel()
                ended, _ = await asyncio.wait([second], timeout=10)
                go_on.set()
                assert ended == {second} and second.cancelled()
                assert await first == body
            assert await get(store, record) == body

    asyncio.run(scenario())


def test_a_drop_that_is_cancelled_before_its_turn_holds_for_the_next_process_too(tmp_path):
    async def scenario():
        working, go_on = threading.Event(), threading.Event()

        def slow(_piece, write):
            if not write:
                working.set()
                go_on.wait()

        (record, body), (other, _) = make(1), make(2)
        async with opened(tmp_path, depth=1) as store:
            await put(store, record, body)
            await put(store, *make(2))
            with tampered(store, slow):
                reading = asyncio.ensure_future(get(store, other))
                await asyncio.to_thread(working.wait)
                dropping = asyncio.ensure_future(store.drop(record.body.exact))
                await asyncio.sleep(0)
                dropping.cancel()
                await asyncio.sleep(0)
                go_on.set()
                with pytest.raises(asyncio.CancelledError):
                    await dropping
                await reading
            assert store.lookup(record.body.exact) is None
        async with opened(tmp_path) as store:
            assert [found.body.exact for found in store.records()] == [other.body.exact]

    asyncio.run(scenario())


def test_a_dropped_record_does_not_come_back_from_an_append_cancelled_before(tmp_path):
    async def scenario():
        record, body = make(1)
        async with opened(tmp_path) as store:
            written, go_on, write = threading.Event(), threading.Event(), store._files.write_record

            def whole_on_disk(*args):
                write(*args)
                written.set()
                go_on.wait()

            store._files.write_record = whole_on_disk
            task = asyncio.ensure_future(store.append(record, body))
            await asyncio.to_thread(written.wait)
            task.cancel()
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            store._files.write_record = write
            assert await store.append(record, body) is Appended.PRESENT  # it is there, as after a restart
            assert await get(store, record) == body
            assert await store.drop(record.body.exact)
        async with opened(tmp_path) as store:
            assert store.lookup(record.body.exact) is None

    asyncio.run(scenario())


def test_another_cap_keeps_what_still_fits_and_another_segment_size_starts_afresh(tmp_path):
    async def scenario():
        await fill(tmp_path, range(60))
        async with opened(tmp_path, 2 * MIB) as store:
            assert file_bytes(tmp_path) == 2 * MIB and 25 < store.stats().records < 35
        async with opened(tmp_path, 6 * MIB) as store:
            assert file_bytes(tmp_path) == 6 * MIB and 25 < store.stats().records < 35
        async with opened(tmp_path, 6 * MIB, 2 * MIB) as store:
            assert file_bytes(tmp_path) == 6 * MIB and store.stats().records == 0

    asyncio.run(scenario())


def test_files_are_private_named_by_number_and_strangers_are_left_alone(tmp_path):
    async def scenario():
        path = tmp_path / "a" / "b"
        async with opened(path) as store:
            await put(store, *make(1))
            assert sorted(os.listdir(path)) == [f"{number:06d}.seg" for number in range(4)]
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
            assert {stat.S_IMODE(entry.stat().st_mode) for entry in path.iterdir()} == {0o600}
        (path / "notes.txt").write_text("mine")
        async with opened(path, 2 * MIB):
            assert (path / "notes.txt").read_text() == "mine"

    asyncio.run(scenario())


def refusal(path, capacity_bytes=4 * MIB, segment_bytes=MIB) -> str:
    async def scenario():
        async with opened(path, capacity_bytes, segment_bytes):
            pass

    with pytest.raises(ConfigError) as caught:
        asyncio.run(scenario())
    return str(caught.value)


class TestPathsThatCannotBeUsed:
    """Each is a ConfigError that names the path and what is wrong with it."""

    def test_a_file(self, tmp_path):
        path = tmp_path / "file"
        path.write_text("")
        assert f"{path} is not a directory" in refusal(path)
        assert f"{path / 'sub'} is not a directory" in refusal(path / "sub")

    def test_one_that_cannot_be_written(self):
        assert "/proc/sys/p2pcache cannot be made" in refusal("/proc/sys/p2pcache")

    def test_one_where_no_file_can_be_made(self, tmp_path, monkeypatch):
        tmp_path.joinpath("notes").write_text("mine")
        monkeypatch.setattr(os, "posix_fallocate", self.failing(errno.EROFS))
        assert f"{tmp_path} cannot be written" in refusal(tmp_path)
        assert os.listdir(tmp_path) == ["notes"]

    def test_one_that_is_open_to_others(self, tmp_path):
        tmp_path.chmod(0o755)
        assert "open to other users (mode 755)" in refusal(tmp_path)

    def test_one_with_a_link_in_the_place_of_a_segment(self, tmp_path):
        (tmp_path / "target").write_bytes(b"precious")
        (tmp_path / "000001.seg").symlink_to(tmp_path / "target")

        async def scenario():
            async with opened(tmp_path):
                assert not (tmp_path / "000001.seg").is_symlink()

        asyncio.run(scenario())
        assert (tmp_path / "target").read_bytes() == b"precious"

    def test_one_on_too_small_a_device(self, tmp_path):
        words = refusal(tmp_path, 1 << 60, 1 << 52)
        assert str(tmp_path) in words and str(1 << 60) in words and "are free" in words
        assert os.listdir(tmp_path) == []

    def test_one_on_a_device_that_fills_up_meanwhile(self, tmp_path, monkeypatch):
        asyncio.run(fill(tmp_path, range(3), capacity_bytes=2 * MIB))
        allocate = self.failing(errno.ENOSPC, after=4)
        monkeypatch.setattr(os, "posix_fallocate", allocate)
        words = refusal(tmp_path, 6 * MIB)
        assert str(tmp_path) in words and f"{4 * MIB} bytes are asked for" in words
        assert sorted(os.listdir(tmp_path)) == ["000000.seg", "000001.seg"]  # no more than before

    @staticmethod
    def failing(code, after=0):
        calls = []

        def fallocate(*_args):
            calls.append(1)
            if len(calls) > after:
                raise OSError(code, os.strerror(code))

        return fallocate


def child(script: str, *args: object) -> subprocess.Popen:
    """This module's helpers in another process; `script` is the body of a coroutine."""
    lines = "\n".join("    " + line for line in script.splitlines())
    source = (
        "import asyncio, sys, time\nfrom test_store_nvme import *\n"
        f"async def main():\n{lines}\nasyncio.run(main())"
    )
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-c", source, *map(str, args)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )


def test_a_store_that_another_process_holds_is_refused_until_it_dies(tmp_path):
    holder = child(
        "async with opened(sys.argv[1]):\n    print('open', flush=True)\n    await asyncio.sleep(600)",
        tmp_path,
    )
    try:
        assert holder.stdout.readline() == "open\n"
        assert f"{tmp_path} is held by another live process" in refusal(tmp_path)
    finally:
        holder.kill()
        holder.communicate()
    asyncio.run(fill(tmp_path, range(2)))


def test_a_store_is_held_within_one_process_too(tmp_path):
    async def scenario():
        async with opened(tmp_path):
            with pytest.raises(ConfigError, match="held"):
                await NvmeStore.open(tmp_path, capacity_bytes=4 * MIB, segment_bytes=MIB)

    asyncio.run(scenario())


WRITER = """
first = int(sys.argv[2])
async with opened(sys.argv[1], 12 * MIB, 3 * MIB) as store:
    async def write(number):
        record, body = make(number, 30 * (1 + number * 7919 % 20_000), 30)
        for key in [b.exact for b in await store.make_room(record)]:
            print('-', int.from_bytes(key, 'little'), flush=True)
        try:
            await store.append(record, body)
        except TierFull:
            return
        print('+', number, flush=True)
    rng = random.Random(first)
    def slow(piece, write):  # so that most kills fall within a record
        time.sleep(rng.random() / 200)
    with tampered(store, slow):
        for number in range(first, first + 100_000, 6):
            await asyncio.gather(*(write(number + ahead) for ahead in range(6)))
"""


def test_after_sigkill_every_committed_record_is_found_whole(tmp_path):
    """Lives of a writer, with evictions, each killed at some moment; six, or until one was torn."""
    rng = random.Random(7)
    expected: set[int] = set()
    torn = evicted = first = lives = 0
    while lives < 6 or not (torn and evicted):
        lives += 1
        assert lives <= 30, "no life ended in the middle of an append"
        writer = child(WRITER, tmp_path, first)
        lines = [writer.stdout.readline() for _ in range(rng.randrange(20, 160))]
        writer.send_signal(signal.SIGKILL)
        lines += writer.communicate()[0].splitlines(keepends=True)
        for line in (line for line in lines if line.endswith("\n")):
            sign, number = line.split()
            (expected.add if sign == "+" else expected.discard)(int(number))
            evicted += sign == "-"
            first = max(first, int(number) + 6)

        async def restart():
            async with opened(tmp_path, 12 * MIB, 3 * MIB) as store:
                found = {int.from_bytes(record.body.exact, "little"): record for record in store.records()}
                assert expected <= found.keys()
                # Beyond them, only what was whole and not yet told, or not yet reclaimed.
                for number, record in found.items():
                    wanted, body = make(number, 30 * (1 + number * 7919 % 20_000), 30)
                    assert record == wanted and await get(store, record) == body
                assert file_bytes(tmp_path) <= 12 * MIB and store.stats().flipped == 0
                return store.stats().torn

        torn += asyncio.run(restart())


def make_encoded(number: int, nbytes: int = 30_000) -> tuple[Record, memoryview]:
    """A record whose stored bytes stand for a longer body; to the store they may be anything."""
    record, _ = make(number)
    body = memoryview(random.Random(-number).randbytes(nbytes))
    coding = Coding("lossless", nbytes, checksum_body(body, record.body.exact, 3))
    return dataclasses.replace(record, coding=coding), body


def test_encoded_bodies_lie_beside_raw_ones_and_take_the_room_of_their_own_bytes(tmp_path):
    async def scenario():
        async with opened(tmp_path / "log") as store:
            raw, encoded = make(1), make_encoded(2)
            for record, body in (raw, encoded):
                await put(store, record, body)
            assert encoded[0].record_bytes < raw[0].record_bytes - 20_000
            with pytest.raises(LayoutError):  # the length of the raw body
                await store.read_into(encoded[0].body.exact, memoryview(bytearray(encoded[0].body.nbytes)))
            with pytest.raises(LayoutError):
                await store.append(make_encoded(3)[0], make(3)[1])
        async with opened(tmp_path / "log") as store:
            for record, body in (raw, encoded):
                assert store.lookup(record.body.exact) == record
                assert await get(store, record) == bytes(body)

    asyncio.run(scenario())


def test_a_damaged_part_of_an_encoded_body_is_corrupt_and_gone(tmp_path):
    async def scenario():
        record, body = make_encoded(1)
        async with opened(tmp_path / "log") as store:
            await put(store, record, body)
            place = store._index.lookup(record.body.exact)
            flip(tmp_path / "log", place.segment, place.body_offset + 25_000)
            with pytest.raises(CorruptBody, match="layer 2"):
                await get(store, record)
            assert store.lookup(record.body.exact) is None
        async with opened(tmp_path / "log", verify_bodies=True) as store:
            assert store.lookup(record.body.exact) is None

    asyncio.run(scenario())
