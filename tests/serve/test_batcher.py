"""The batcher over a fake engine: order, streams, cancellation at every stage, faults, health, closing."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections import Counter
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from p2pcache.serve.admission import AdmissionConfig, Busy, TooLarge
from p2pcache.serve.batcher import Batcher
from p2pcache.serve.engine import Engine, Generation
from p2pcache.serve.stream import Closing, End, EngineFailed, Stream, Token
from p2pcache.types import ConfigError, NodeDown

BOUND_S = 20.0  # no test takes as long, unless it hangs


class FakeSequence:
    """Its n-th token is 1000 times its name plus n; its name is the first token of the prompt."""

    def __init__(self, request: Generation):
        self.name = int(request.tokens[0])
        self.kv_bytes = len(request.tokens) + request.tokens_max
        self.cached_tokens: dict[str, int] = {}
        self.made = 0
        self.finished = False

    def next_token(self) -> int:
        self.made += 1
        return 1000 * self.name + self.made - 1


class FakeEngine:
    """Records its calls and checks its contract. Hooks run inside a call: they block, raise or look."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[int, ...]]] = []  # method, names; as the call begins
        self.ended: list[tuple[str, tuple[int, ...]]] = []  # as it returns or raises
        self.hooks: dict[str, Callable[[list[FakeSequence]], None]] = {}
        self.wrong: list[str] = []
        self.sequences: list[FakeSequence] = []
        self.begin_threads: set[int] = set()
        self.far: set[int] = set()  # sequences whose bytes have not come
        self._changed = threading.Condition()
        self._inside: threading.Thread | None = None
        self._thread: threading.Thread | None = None

    def begin(self, request: Generation) -> FakeSequence:
        sequence = FakeSequence(request)
        self.begin_threads.add(threading.get_ident())
        self._call("begin", [sequence])
        self.sequences.append(sequence)
        return sequence

    def ready(self, sequence: FakeSequence) -> bool:
        return sequence.name not in self.far

    def prefill(self, sequence: FakeSequence) -> int:
        self.expect(not sequence.finished and not sequence.made, "prefilled once, and not after its end")
        self._call("prefill", [sequence])
        sequence.cached_tokens = {"local": 1, "peer": len(self.sequences[0].cached_tokens)}
        return sequence.next_token()

    def decode(self, sequences: list[FakeSequence]) -> list[int]:
        self.expect(bool(sequences), "decode has something to do")
        self.expect(all(s.made and not s.finished for s in sequences), "decode gets prefilled ones")
        self._call("decode", sequences)
        return [s.next_token() for s in sequences]

    def finish(self, sequence: FakeSequence) -> None:
        self.expect(not sequence.finished, "finish comes once")
        sequence.finished = True
        self._call("finish", [sequence])

    def _call(self, method: str, sequences: list[FakeSequence]) -> None:
        names = tuple(s.name for s in sequences)
        me = threading.current_thread()
        if method != "begin":
            self._thread = self._thread or me
            self.expect(me is self._thread, f"{method} comes from the one thread")
            self.expect(self._inside is None, f"{method} comes alone")
            self._inside = me
        self._record(self.calls, (method, names))
        try:
            if method in self.hooks:
                self.hooks[method](sequences)
        finally:
            if method != "begin":
                self._inside = None
            self._record(self.ended, (method, names))

    def _record(self, where: list, entry: tuple[str, tuple[int, ...]]) -> None:
        with self._changed:
            where.append(entry)
            self._changed.notify_all()

    def expect(self, holds: bool, what: str) -> None:
        if not holds:
            self.wrong.append(what)

    async def until(self, method: str, name: int, *, ended: bool = False) -> None:
        """Wait until a call with this sequence in it has begun (or ended)."""
        where = self.ended if ended else self.calls

        def seen() -> bool:
            return any(m == method and name in names for m, names in where)

        def wait() -> bool:
            with self._changed:
                return self._changed.wait_for(seen, BOUND_S / 2)

        assert await asyncio.to_thread(wait), f"no {method} of {name} in {where}"

    def methods(self, *which: str) -> list[tuple[str, tuple[int, ...]]]:
        return [call for call in self.calls if call[0] in which]

    def check(self) -> None:
        assert not self.wrong
        begun, finished = Counter(s.name for s in self.sequences), Counter()
        for _, names in self.methods("finish"):
            finished.update(names)
        assert begun == finished, "every sequence that was begun is finished, once"


class Gate:
    """A hook that holds the call of one sequence (None: of any, every time) until it is opened."""

    def __init__(self, name: int | None = None):
        self.name = name
        self._reached = threading.Event()
        self._open = threading.Event()

    def __call__(self, sequences: list[FakeSequence]) -> None:
        if self.name is None or self.name in [s.name for s in sequences]:
            self._reached.set()
            assert self._open.wait(BOUND_S), "a gate was never opened"

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, BOUND_S / 2)

    def open(self) -> None:
        self._open.set()


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


Scenario = Callable[[Batcher, FakeEngine], Awaitable[None]]


def play(scenario: Scenario, *, check: bool = True, target_bytes: int = 10_000, **options) -> FakeEngine:
    """Run a scenario within bounds; then all is finished, nothing is reserved, no thread is left."""
    engine = FakeEngine()
    limits = {k: options.pop(k) for k in ("sequences_max", "queue_max", "overtake_bytes_max") if k in options}
    batcher = Batcher(engine, AdmissionConfig(target_bytes, **limits), **options)

    async def main() -> None:
        async with asyncio.timeout(BOUND_S):
            try:
                await scenario(batcher, engine)
            except BaseException:
                for hook in engine.hooks.values():
                    if isinstance(hook, Gate):
                        hook.open()
                raise
            finally:
                await batcher.close(0)

    asyncio.run(main())
    assert not [t.name for t in threading.enumerate() if t.name.startswith("p2pcache-b")], "a thread is left"
    if check:
        engine.check()
        stats = batcher.stats()
        assert (stats["waiting"], stats["running"], stats["bytes"]) == (0, 0, 0)
        assert stats["peak_bytes"] <= stats["target_bytes"]
    return engine


def ask(name: int, tokens_max: int = 3, *, prompt: int = 4, stop: tuple[int, ...] = ()) -> Generation:
    tokens = np.full(prompt, name, np.uint32)
    return Generation(tokens=tokens, tokens_max=tokens_max, stop=frozenset(stop))


async def read(stream: Stream) -> tuple[list[int], End]:
    events = [event async for event in stream]
    assert all(isinstance(event, Token) for event in events[:-1]) and isinstance(events[-1], End)
    return [event.id for event in events[:-1]], events[-1]


async def answer(batcher: Batcher, request: Generation) -> tuple[list[int], End]:
    return await read(await batcher.submit(request))


def expected(name: int, count: int) -> list[int]:
    return [1000 * name + n for n in range(count)]


class TestAnswers:
    def test_tokens_in_order_and_the_usage_at_the_end(self):
        clock = Clock()

        def pass_s(seconds: float) -> Callable:
            def hook(_: object) -> None:
                clock.now_s += seconds

            return hook

        async def scenario(batcher: Batcher, engine: FakeEngine) -> None:
            engine.hooks |= {"begin": pass_s(3), "prefill": pass_s(2), "decode": pass_s(0.5)}
            events = [event async for event in await batcher.submit(ask(7, 3, prompt=5))]
            assert events[:-1] == [Token(7000, 105.0), Token(7001, 105.5), Token(7002, 106.0)]
            end = events[-1]
            assert end == End("length", 5, 3, {"local": 1, "peer": 0}, 100.0, 103.0, 105.0, 106.0)
            assert (end.queue_s, end.ttft_s) == (3.0, 5.0)

        play(scenario, clock=clock)

    @pytest.mark.parametrize("at", [0, 1, 2])
    def test_a_stop_token_ends_the_answer_and_is_no_part_of_it(self, at: int):
        async def scenario(batcher: Batcher, engine: FakeEngine) -> None:
            tokens, end = await answer(batcher, ask(1, 3, stop=(1000 + at, 99)))
            assert tokens == expected(1, at)
            assert (end.finish_reason, end.completion_tokens) == ("stop", at)

        engine = play(scenario)
        assert len(engine.methods("decode")) == at

    def test_an_answer_of_one_token_needs_no_decode(self):
        async def scenario(batcher: Batcher, engine: FakeEngine) -> None:
            tokens, end = await answer(batcher, ask(1, 1))
            assert (tokens, end.finish_reason) == ([1000], "length")

        assert not play(scenario).methods("decode")

    @pytest.mark.parametrize("request_", [ask(1, 0), ask(1, -1), ask(1, 3, prompt=0)])
    def test_no_prompt_or_no_answer_is_a_config_error(self, request_: Generation):
        async def scenario(batcher: Batcher, engine: FakeEngine) -> None:
            with pytest.raises(ConfigError):
                await batcher.submit(request_)
            assert not engine.calls

        play(scenario)

    def test_many_at_once_are_decoded_together_and_counted(self):
        async def scenario(batcher: Batcher, engine: FakeEngine) -> None:
            gate = engine.hooks["prefill"] = Gate(1)
            streams = [await batcher.submit(ask(1, 5))]
            await gate.reached()
            streams += [await batcher.submit(ask(n, 5)) for n in range(2, 9)]
            gate.open()
            answers = await asyncio.gather(*map(read, streams))
            assert [tokens for tokens, _ in answers] == [expected(n, 5) for n in range(1, 9)]
            stats = batcher.stats()
            assert (stats["prefills"], stats["decode_tokens"], stats["completed"]) == (8, 32, 8)
            assert stats["decode_steps"] == len(engine.methods("decode")) == 4
            assert stats["peak_bytes"] == 8 * (4 + 5)

        play(scenario, decode_steps_between_prefills=0)

    def test_a_slow_reader_slows_nobody_and_misses_nothing(self):
        async def scenario(batcher: Batcher, engine: FakeEngine) -> None:
            slow = await batcher.submit(ask(1, 50))
            assert (await answer(batcher, ask(2, 100)))[0] == expected(2, 100)
            await engine.until("finish", 1)  # it ran to its end, unread
            assert (await read(slow))[0] == expected(1, 50)

        play(scenario)

    def test_reading_on_after_the_end_stays_at_the_end(self):
        async def scenario(batcher: Batcher, engine: FakeEngine) -> None:
            stream = await batcher.submit(ask(1, 1))
            await read(stream)
            assert [event async for event in stream] == []

        play(scenario)

    def test_tokens_that_overtake_the_word_of_acceptance_are_kept(self):
        async def scenario(batcher: Batcher, engine: FakeEngine) -> None:
            loop = asyncio.get_running_loop()
            finished, on_time = threading.Event(), loop.call_soon_threadsafe
            engine.hooks["finish"] = lambda _: finished.set()

            def late(*args) -> None:
                if threading.current_thread().name.startswith("p2pcache-begin"):
                    assert finished.wait(BOUND_S / 2)
                on_time(*args)

            loop.call_soon_threadsafe = late
            assert (await answer(batcher, ask(1)))[0] == expected(1, 3)

        play(scenario)

    def test_a_stream_has_one_reader(self):
        async def scenario(batcher: Batcher, engine: FakeEngine) -> None:
            gate = engine.hooks["prefill"] = Gate()
            stream = await batcher.submit(ask(1))
            first = asyncio.ensure_future(anext(stream))
            await gate.reached()
            with pytest.raises(RuntimeError, match="one reader"):
                await anext(stream)
            gate.open()
            assert (await first).id == 1000

        play(scenario)

    def test_the_fake_is_an_engine(self):
        assert isinstance(FakeEngine(), Engine)


class TestQueue:
    def test_begin_is_called_while_the_request_waits_and_not_on_the_event_loop(self):
        async def scenario(batcher: Batcher, engine: FakeEngine) -> None:
            gate = engine.hooks["prefill"] = Gate(1)
            first = await batcher.submit(ask(1))
            await gate.reached()
            second = await batcher.submit(ask(2))
            assert ("begin", (2,)) in engine.ended and batcher.stats()["waiting"] == 1
            gate.open()
            await asyncio.gather(read(first), read(second))
            assert threading.get_ident() not in engine.begin_threads

        play(scenario, sequences_max=1)

    def test_a_slow_begin_holds_nobody_up(self):
        async def scenario(batcher: Batcher, engine: FakeEngine) -> None:
            gate = engine.hooks["begin"] = Gate(1)
            slow = asyncio.ensure_future(answer(batcher, ask(1)))
            await gate.reached()
            assert (await answer(batcher, ask(2)))[0] == expected(2, 3)
            gate.open()
            assert (await slow)[0] == expected(1, 3)

        play(scenario)

    def test_a_request_over_the_target_is_refused_at_once_and_let_go_of(self):
        async def scenario(batcher: Batcher, engine: FakeEngine) -> None:
            gate = engine.hooks["prefill"] = Gate(1)
            running = await batcher.submit(ask(1))
            await gate.reached()  # the worker is busy: the refusal does not wait for it
            with pytest.raises(TooLarge) as refused:
                await batcher.submit(ask(2, 100))
            assert refused.value.limit == "target_bytes"
            gate.open()
            await read(running)
            await engine.until("finish", 2)
            assert batcher.stats()["refused"] == 1

        assert ("prefill", (2,)) not in play(scenario, target_bytes=50).calls

    def test_busy_where_the_queue_is_full_before_anything_is_begun(self):
        async def scenario(batcher: Batcher, engine: FakeEngine) -> None:
            gate = engine.hooks["prefill"] = Gate(1)
            streams = [await batcher.submit(ask(1))]
            await gate.reached()
            streams += [await batcher.submit(ask(n)) for n in (2, 3)]
            with pytest.raises(Busy) as refused:
                await batcher.submit(ask(4))
            assert refused.value.limit == "queue_max"
            gate.open()
            await asyncio.gather(*map(read, streams))
            await answer(batcher, ask(5))  # there is room again

        engine = play(scenario, sequences_max=1, queue_max=2)
        assert ("begin", (4,)) not in engine.calls

    def test_memory_decides_how_many_run(self):
        """Of 120 bytes: eight of 15 at once, or two of 60. What runs never has more."""

        def batches(prompt: int) -> int:
            largest = 0

            async def scenario(batcher: Batcher, engine: FakeEngine) -> None:
                gate = engine.hooks["prefill"] = Gate(1)
                streams = [await batcher.submit(ask(1, 10, prompt=prompt))]
                await gate.reached()
                streams += [await batcher.submit(ask(n, 10, prompt=prompt)) for n in range(2, 12)]

                def look(sequences: list[FakeSequence]) -> None:
                    nonlocal largest
                    largest = max(largest, len(sequences))
                    prefilled = [s for s in engine.sequences if s.made and not s.finished]
                    engine.expect(sum(s.kv_bytes for s in prefilled) <= 120, "memory passed its target")

                engine.hooks["decode"] = look
                gate.open()
                await asyncio.gather(*map(read, streams))

            play(scenario, target_bytes=120)
            return largest

        assert batches(5) == 8
        assert batches(50) == 2

    @pytest.mark.parametrize(
        ("steps", "order"),
        [
            (0, "prefill 2, prefill 3, prefill 4, decode 4"),
            (1, "prefill 2, decode 2, prefill 3, decode 3, prefill 4, decode 4"),
            (
                2,
                "decode 1, prefill 2, decode 2, decode 2, prefill 3, decode 3, decode 3, prefill 4, decode 4",
            ),
        ],
    )
    def test_decode_steps_come_between_a_burst_of_prefills(self, steps: int, order: str):
        async def scenario(batcher: Batcher, engine: FakeEngine) -> None:
            gate = engine.hooks["decode"] = Gate()
            streams = [await batcher.submit(ask(1, 30))]
            await gate.reached()
            streams += [await batcher.submit(ask(n, 30)) for n in (2, 3, 4)]
            gate.open()
            await asyncio.gather(*map(read, streams))

        calls = play(scenario, decode_steps_between_prefills=steps).methods("prefill", "decode")
        seen = [f"{m} {len(names) if m == 'decode' else names[0]}" for m, names in calls[2:]]
        assert ", ".join(seen).startswith(order)


STAGES = ("waiting", "prefilling", "decoding")


class TestReadiness:
    def test_whose_bytes_are_here_is_prefilled_before_whose_are_not(self):
        async def scenario(batcher: Batcher, engine: FakeEngine) -> None:
            gate = engine.hooks["prefill"] = Gate(1)
            engine.far = {2}
            asked = [asyncio.create_task(answer(batcher, ask(name, 2))) for name in (1,)]
            await gate.reached()
            streams = [await batcher.submit(ask(name, 2)) for name in (2, 3)]
            gate.open()
            for stream in streams:
                await read(stream)
            await asked[0]
            assert engine.methods("prefill") == [("prefill", (1,)), ("prefill", (3,)), ("prefill", (2,))]

        play(scenario)

    def test_where_no_bytes_are_here_the_first_is_prefilled_all_the_same(self):
        async def scenario(batcher: Batcher, engine: FakeEngine) -> None:
            engine.far = {1, 2}
            first = await batcher.submit(ask(1, 1))
            assert (await read(first))[0] == expected(1, 1)
            assert (await answer(batcher, ask(2, 1)))[0] == expected(2, 1)

        play(scenario)


class TestCancellation:
    async def to_stage(self, stage: str, batcher: Batcher, engine: FakeEngine) -> tuple[Stream, Gate, list]:
        """Request 9 is at the stage, and the worker is held in a call."""
        gate, others = Gate(9 if stage != "waiting" else 1), []
        engine.hooks["decode" if stage == "decoding" else "prefill"] = gate
        if stage == "waiting":
            others.append(await batcher.submit(ask(1)))
            await gate.reached()
        stream = await batcher.submit(ask(9, 50))
        await gate.reached()
        return stream, gate, others

    @pytest.mark.parametrize("way", ["aclose", "cancelled read", "leave", "drop"])
    @pytest.mark.parametrize("stage", STAGES)
    def test_whoever_hangs_up_is_taken_out_before_the_next_call(self, stage: str, way: str):
        async def scenario(batcher: Batcher, engine: FakeEngine) -> None:
            stream, gate, others = await self.to_stage(stage, batcher, engine)
            if way == "aclose":
                await stream.aclose()
                assert [event async for event in stream] == []
            elif way == "cancelled read":
                reader = asyncio.ensure_future(read(stream))
                await asyncio.sleep(0)
                reader.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await reader
            elif way == "leave":
                async with stream:
                    pass
            else:
                del stream
                gc.collect()
            calls = len(engine.calls)
            gate.open()
            await engine.until("finish", 9)
            since = [call for call in engine.calls[calls:] if call[0] != "finish" and 9 in call[1]]
            assert not since, "no call with it after it was given up"
            for other in others:
                assert (await read(other))[0] == expected(1, 3)
            assert (await answer(batcher, ask(2)))[0] == expected(2, 3)
            assert batcher.stats()["cancelled"] == 1

        # One at a time, so that the later ones need the memory of the one that was given up.
        play(scenario, sequences_max=1)

    def test_one_that_has_its_memory_and_waits_for_its_prefill(self):
        async def scenario(batcher: Batcher, engine: FakeEngine) -> None:
            gate = engine.hooks["prefill"] = Gate()
            streams = [await batcher.submit(ask(1))]
            await gate.reached()
            streams += [await batcher.submit(ask(n)) for n in (2, 3)]
            prefills = engine.hooks["prefill"] = Gate(2)
            gate.open()
            await prefills.reached()
            assert batcher.stats()["running"] == 3
            streams[2].cancel()
            prefills.open()
            await asyncio.gather(*map(read, streams[:2]))

        assert ("prefill", (3,)) not in play(scenario).calls

    def test_in_begin(self):
        async def scenario(batcher: Batcher, engine: FakeEngine) -> None:
            gate = engine.hooks["begin"] = Gate(9)
            task = asyncio.ensure_future(batcher.submit(ask(9)))
            await gate.reached()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            gate.open()
            await engine.until("finish", 9)
            assert (await answer(batcher, ask(1)))[0] == expected(1, 3)
            assert batcher.stats()["cancelled"] == 1

        assert ("prefill", (9,)) not in play(scenario).calls

    def test_before_begin(self):
        async def scenario(batcher: Batcher, engine: FakeEngine) -> None:
            gate = engine.hooks["begin"] = Gate(1)
            first = asyncio.ensure_future(answer(batcher, ask(1)))
            await gate.reached()
            second = asyncio.ensure_future(batcher.submit(ask(9)))
            await asyncio.sleep(0)
            assert batcher.stats()["waiting"] == 2
            second.cancel()
            await asyncio.gather(second, return_exceptions=True)
            gate.open()
            await first

        assert ("begin", (9,)) not in play(scenario, begin_threads=1).calls

    def test_again_and_after_the_end_is_harmless(self):
        async def scenario(batcher: Batcher, engine: FakeEngine) -> None:
            stream = await batcher.submit(ask(1))
            await read(stream)
            stream.cancel()
            await stream.aclose()
            gate = engine.hooks["decode"] = Gate()
            stream = await batcher.submit(ask(2))
            await gate.reached()
            stream.cancel()
            stream.cancel()
            gate.open()
            await engine.until("finish", 2, ended=True)
            stream.cancel()
            await answer(batcher, ask(3))
            assert (batcher.stats()["cancelled"], batcher.stats()["completed"]) == (1, 2)

        play(scenario)

    def test_a_stream_closed_beside_its_reader_ends_the_reading(self):
        async def scenario(batcher: Batcher, engine: FakeEngine) -> None:
            gate = engine.hooks["prefill"] = Gate()
            stream = await batcher.submit(ask(1))
            reading = asyncio.ensure_future(anext(stream, None))
            await gate.reached()
            await stream.aclose()
            assert await reading is None
            gate.open()

        play(scenario)

    def test_an_event_loop_that_is_gone_gives_its_requests_up(self):
        engine, kept = FakeEngine(), []
        gate = engine.hooks["decode"] = Gate()
        batcher = Batcher(engine, AdmissionConfig(1000))

        async def first() -> None:
            kept.append(await batcher.submit(ask(1, 500)))
            await gate.reached()

        async def second() -> None:
            gate.open()
            await engine.until("finish", 1)
            await batcher.close(5)

        asyncio.run(asyncio.wait_for(first(), BOUND_S))
        asyncio.run(asyncio.wait_for(second(), BOUND_S))
        engine.check()
        assert len(engine.methods("decode")) < 10 and batcher.stats()["cancelled"] == 1


def fails(name: int, error: BaseException) -> Callable[[list[FakeSequence]], None]:
    def hook(sequences: list[FakeSequence]) -> None:
        if name in [s.name for s in sequences]:
            raise error

    return hook


class TestFaults:
    def test_a_failed_prefill_fails_that_request_only(self):
        async def scenario(batcher: Batcher, engine: FakeEngine) -> None:
            engine.hooks["prefill"] = fails(2, ValueError("nan"))
            one, two, three = [await batcher.submit(ask(n, 20)) for n in (1, 2, 3)]
            with pytest.raises(EngineFailed, match="prefill.*nan") as failed:
                await read(two)
            assert isinstance(failed.value.__cause__, ValueError)
            assert [event async for event in two] == []
            assert (await read(one))[0] == expected(1, 20) and (await read(three))[0] == expected(3, 20)
            assert (batcher.stats()["failed"], batcher.stats()["prefills"]) == (1, 2)

        play(scenario)

    def test_a_failed_decode_fails_its_step_and_the_worker_goes_on(self):
        async def scenario(batcher: Batcher, engine: FakeEngine) -> None:
            gate = engine.hooks["prefill"] = Gate(1)
            streams = [await batcher.submit(ask(1))]
            await gate.reached()
            streams += [await batcher.submit(ask(2))]
            engine.hooks["decode"] = fails(2, RuntimeError("device lost"))
            gate.open()
            results = await asyncio.gather(*map(read, streams), return_exceptions=True)
            assert all(isinstance(r, EngineFailed) and "device lost" in str(r) for r in results)
            assert results[0] is not results[1]
            assert batcher.stats()["failed"] == 2 and batcher.stats()["failed_steps_in_row"] == 1
            assert (await answer(batcher, ask(3)))[0] == expected(3, 3)
            assert batcher.stats()["failed_steps_in_row"] == 0

        play(scenario, decode_steps_between_prefills=0)

    def test_tokens_before_the_fault_are_still_read(self):
        async def scenario(batcher: Batcher, engine: FakeEngine) -> None:
            engine.hooks["decode"] = fails(1, RuntimeError("x"))
            stream = await batcher.submit(ask(1))
            await engine.until("finish", 1)
            assert (await anext(stream)).id == 1000
            with pytest.raises(EngineFailed):
                await anext(stream)

        play(scenario)

    def test_a_decode_with_too_few_tokens_is_a_fault(self):
        async def scenario(batcher: Batcher, engine: FakeEngine) -> None:
            engine.decode = lambda sequences: []
            with pytest.raises(EngineFailed, match="0 tokens for 1"):
                await answer(batcher, ask(1))

        play(scenario)

    def test_a_failed_finish_frees_the_memory_and_the_worker_goes_on(self):
        async def scenario(batcher: Batcher, engine: FakeEngine) -> None:
            engine.hooks["finish"] = fails(1, RuntimeError("cannot store"))
            assert (await answer(batcher, ask(1)))[0] == expected(1, 3)
            assert (await answer(batcher, ask(2)))[0] == expected(2, 3)
            assert batcher.stats()["finish_failed"] == 1

        play(scenario, sequences_max=1)

    @pytest.mark.parametrize(
        ("error", "raised", "counted"),
        [
            (ConfigError("too long for the model"), ConfigError, "refused"),
            (NodeDown("gone"), EngineFailed, "failed"),
            (RuntimeError("x"), EngineFailed, "failed"),
            (SystemExit(), EngineFailed, "failed"),
        ],
    )
    def test_what_begin_raises_comes_out_of_submit(self, error, raised, counted):
        async def scenario(batcher: Batcher, engine: FakeEngine) -> None:
            engine.hooks["begin"] = fails(1, error)
            with pytest.raises(raised):
                await batcher.submit(ask(1))
            await answer(batcher, ask(2))
            assert batcher.stats()[counted] == 1

        play(scenario)

    def test_a_sequence_without_a_size_is_the_engines_fault(self):
        async def scenario(batcher: Batcher, engine: FakeEngine) -> None:
            engine.hooks["begin"] = lambda sequences: setattr(sequences[0], "kv_bytes", 0)
            with pytest.raises(EngineFailed, match="kv_bytes"):
                await batcher.submit(ask(1))

        play(scenario)


class TestHealth:
    @pytest.mark.parametrize("method", ["begin", "prefill", "decode", "finish"])
    def test_stuck_in_a_call_is_unhealthy_until_it_returns(self, method: str):
        clock = Clock()

        async def scenario(batcher: Batcher, engine: FakeEngine) -> None:
            batcher.check_health()
            gate = engine.hooks[method] = Gate()
            answered = asyncio.ensure_future(answer(batcher, ask(1)))
            await gate.reached()
            clock.now_s += 9.9
            batcher.check_health()
            clock.now_s += 0.2
            with pytest.raises(EngineFailed, match=f"engine.{method} has not returned for 10.1 s"):
                batcher.check_health()
            gate.open()
            await answered
            await engine.until("finish", 1, ended=True)
            await answer(batcher, ask(2))
            batcher.check_health()

        play(scenario, clock=clock, stuck_s=10)

    def test_idle_is_healthy_however_long(self):
        clock = Clock()

        async def scenario(batcher: Batcher, engine: FakeEngine) -> None:
            await answer(batcher, ask(1))
            clock.now_s += 1e6
            batcher.check_health()

        play(scenario, clock=clock, stuck_s=10)

    @pytest.mark.parametrize("method", ["prefill", "decode", "finish"])
    def test_a_dead_worker_fails_all_finishes_all_and_takes_no_more(self, method: str):
        async def scenario(batcher: Batcher, engine: FakeEngine) -> None:
            begin = engine.hooks["begin"] = Gate(3)
            gate = engine.hooks["prefill"] = Gate(1)
            streams = [await batcher.submit(ask(1))]
            await gate.reached()
            streams += [await batcher.submit(ask(n)) for n in (2, 4)]
            in_begin = asyncio.ensure_future(batcher.submit(ask(3)))
            await begin.reached()
            engine.hooks[method] = fails(2 if method == "prefill" else 1, SystemExit("out"))
            gate.open()
            results = await asyncio.gather(in_begin, *map(read, streams), return_exceptions=True)
            died = [result for result in results if isinstance(result, EngineFailed)]
            assert len(died) == (3 if method == "finish" else 4), "1 had its answer before its finish"
            with pytest.raises(EngineFailed, match="died"):
                batcher.check_health()
            with pytest.raises(Closing, match="died"):
                await batcher.submit(ask(5))
            begin.open()

        play(scenario)

    def test_a_closed_batcher_is_not_healthy(self):
        async def scenario(batcher: Batcher, engine: FakeEngine) -> None:
            await batcher.close(1)
            with pytest.raises(Closing):
                batcher.check_health()

        play(scenario)


class TestClose:
    def test_what_was_accepted_ends_and_nothing_new_is_taken(self):
        async def scenario(batcher: Batcher, engine: FakeEngine) -> None:
            gate = engine.hooks["prefill"] = Gate(1)
            streams = [await batcher.submit(ask(1))]
            await gate.reached()
            streams.append(await batcher.submit(ask(2)))
            closing = asyncio.ensure_future(batcher.close(BOUND_S))
            await asyncio.sleep(0)
            with pytest.raises(Closing) as refused:
                await batcher.submit(ask(3))
            assert refused.value.limit == "closing"
            batcher.check_health()  # draining is healthy
            gate.open()
            await closing
            assert [tokens for tokens, _ in [await read(s) for s in streams]] == [
                expected(1, 3),
                expected(2, 3),
            ]

        play(scenario, sequences_max=1)

    def test_an_idle_one_closes_at_once_and_again(self):
        async def scenario(batcher: Batcher, engine: FakeEngine) -> None:
            await asyncio.gather(batcher.close(BOUND_S), batcher.close(BOUND_S))
            await batcher.close(0)

        play(scenario)

    def test_after_the_deadline_the_rest_is_given_up(self):
        async def scenario(batcher: Batcher, engine: FakeEngine) -> None:
            gate = engine.hooks["decode"] = Gate()
            begin = engine.hooks["begin"] = Gate(4)
            streams = [await batcher.submit(ask(n, 500)) for n in (1, 2, 3)]
            await gate.reached()
            in_begin = asyncio.ensure_future(batcher.submit(ask(4)))
            await begin.reached()
            closing = asyncio.ensure_future(batcher.close(0.01))
            # Readers learn it at the deadline, though the worker and a `begin` are still held.
            results = await asyncio.gather(in_begin, *map(read, streams), return_exceptions=True)
            assert all(isinstance(result, Closing) for result in results), results
            assert not closing.done()
            gate.open()
            begin.open()
            await closing
            assert batcher.stats()["cancelled"] == 4

        engine = play(scenario, sequences_max=2)
        assert len(engine.methods("decode")) == 1

    def test_a_stuck_engine_is_reported_and_closing_can_be_tried_again(self):
        async def scenario(batcher: Batcher, engine: FakeEngine) -> None:
            gate = engine.hooks["prefill"] = Gate()
            stream = await batcher.submit(ask(1))
            await gate.reached()
            with pytest.raises(EngineFailed, match="in: prefill"):
                await batcher.close(0)
            with pytest.raises(Closing):
                await read(stream)
            gate.open()
            await batcher.close(BOUND_S / 2)
            assert [event async for event in stream] == [], "what the engine made after that comes too late"

        play(scenario, stuck_s=0.05)


@pytest.mark.parametrize(
    "options", [{"decode_steps_between_prefills": -1}, {"begin_threads": 0}, {"stuck_s": 0}]
)
def test_a_bad_setting_is_a_config_error(options):
    with pytest.raises(ConfigError):
        Batcher(FakeEngine(), AdmissionConfig(10), **options)


@pytest.mark.parametrize("seed", range(8))
def test_many_clients_that_read_hang_up_and_meet_faults(seed: int):
    """Whatever happens to the others, an answer that ends is right, and nothing is left."""
    chance = random.Random(seed)
    outcomes: Counter[str] = Counter()

    async def client(batcher: Batcher, name: int, plan: random.Random) -> None:
        request = ask(name, plan.randint(1, 30), prompt=plan.randint(1, 60))
        for _ in range(plan.randint(0, 20)):
            await asyncio.sleep(0)
        got: list[int] = []
        hang_up = plan.randint(0, 30) if plan.random() < 0.3 else None
        try:
            async with await batcher.submit(request) as stream:
                async for event in stream:
                    if isinstance(event, Token):
                        got.append(event.id)
                    if len(got) == hang_up:
                        outcomes["hung up"] += 1
                        return
            assert got == expected(name, request.tokens_max)
            outcomes["ended"] += 1
        except EngineFailed:
            outcomes["failed"] += 1
        except TooLarge:
            outcomes["too large"] += 1
        assert got == expected(name, len(got))

    async def scenario(batcher: Batcher, engine: FakeEngine) -> None:
        def sometimes(share: float) -> Callable:
            def hook(_: object) -> None:
                if chance.random() < share:
                    raise RuntimeError("by chance")

            return hook

        engine.hooks |= {"prefill": sometimes(0.1), "decode": sometimes(0.01), "finish": sometimes(0.05)}
        async with asyncio.TaskGroup() as clients:
            for name in range(1, 151):
                task = clients.create_task(client(batcher, name, random.Random(1000 * seed + name)))
                if name % 10 == 0:
                    asyncio.get_running_loop().call_later(chance.random() / 20, task.cancel)
        stats = batcher.stats()
        assert stats["peak_bytes"] > 40

    play(scenario, target_bytes=80, sequences_max=6)
    assert outcomes["ended"] and outcomes["hung up"] and outcomes["failed"]
