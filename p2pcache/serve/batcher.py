"""Continuous batching: many requests, one engine, one thread that runs it.

1. `submit` refuses what cannot be taken, and has `engine.begin` called at once by a thread of a small pool:
   the request's KV is on its way from the mesh while it queues.
2. The worker admits what fits into memory, prefills one sequence, decodes all that run, and so on; between
   any two calls into the engine it takes in what has arrived or was given up.
3. Tokens go to the event loop of whoever asked, and are read from a `Stream`. A stream that is closed,
   cancelled or dropped takes its sequence out before the next call into the engine.

The worker alone owns the admission and the sequences, and alone calls `prefill`, `decode` and `finish`.
Others reach it through its inbox, on which it sleeps when there is nothing to run. Every sequence that
was begun is finished exactly once, also where the engine fails.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import logging
import math
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from p2pcache.serve.admission import Admission, AdmissionConfig, Busy, Refused
from p2pcache.serve.engine import Engine, Generation, Running
from p2pcache.serve.stream import Accepted, Closing, End, EngineFailed, Outbox, Prefilled, Stream, Token
from p2pcache.types import ConfigError

_log = logging.getLogger(__name__)


class _Stage(enum.Enum):
    BEGINNING = enum.auto()  # `engine.begin` is under way, or about to be
    WAITING = enum.auto()  # in the admission's queue
    ADMITTED = enum.auto()  # has its memory, not its prefill
    DECODING = enum.auto()
    ENDED = enum.auto()


@dataclass(eq=False, slots=True)
class _Sequence:
    number: int
    request: Generation
    loop: asyncio.AbstractEventLoop
    outbox: Outbox
    submitted_s: float
    cancelled: bool = False  # set from any thread, ahead of the message that says so
    # The worker's own:
    stage: _Stage = _Stage.BEGINNING
    running: Running | None = None  # from `begin` until `finish`
    completion_tokens: int = 0
    prefill_s: float = 0.0
    first_token_s: float = 0.0
    cached_tokens: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Begun:
    sequence: _Sequence
    running: Running | None  # None: `begin` was not called, or raised
    kv_bytes: int
    error: Exception | None


@dataclass(frozen=True, slots=True)
class _Cancel:
    sequence: _Sequence


@dataclass(frozen=True, slots=True)
class _Close:
    pass


class Batcher:
    """Runs an engine for many requests. `close` ends its threads; until then it owns the engine's calls."""

    def __init__(
        self,
        engine: Engine,
        admission: AdmissionConfig,
        *,
        decode_steps_between_prefills: int = 1,
        begin_threads: int = 4,
        stuck_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Raises ConfigError.

        decode_steps_between_prefills: for the running streams while requests wait for their prefill; 0: all
        prefills first. begin_threads: `engine.begin` calls at once. stuck_s: a longer call into the engine
        fails `check_health`. clock: seconds, must not go back.
        """
        if decode_steps_between_prefills < 0 or begin_threads < 1:
            raise ConfigError("decode_steps_between_prefills must not be negative, begin_threads at least 1")
        if not 0 < stuck_s < math.inf:
            raise ConfigError(f"stuck_s must be above 0 and not infinite, is {stuck_s!r}")
        self._engine = engine
        self._ready: Callable[[Running], bool] = getattr(engine, "ready", lambda running: True)
        self._limits = admission
        self._decode_steps_between_prefills = decode_steps_between_prefills
        self._stuck_s = stuck_s
        self._clock = clock
        self._calls: dict[int, tuple[str, float]] = {}  # thread -> the engine's method it is in, since when
        self._inbox: queue.SimpleQueue[_Begun | _Cancel | _Close] = queue.SimpleQueue()
        # Shared by all threads, changed under the lock; the worker never holds it while it calls anything.
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._live: dict[int, _Sequence] = {}  # submitted and not ended
        self._queued = 0  # of these, not yet admitted
        self._closing: str = ""  # why no more requests are taken; "": they are
        self._died: BaseException | None = None
        # The worker's own:
        self._admission = Admission(admission)
        self._admitted: deque[_Sequence] = deque()  # to be prefilled, in order
        self._decoding: dict[int, _Sequence] = {}
        self._room_changed = False  # somebody came or went since admission was last asked
        self._steps_since_prefill = 0
        self._counts: Counter[str] = Counter()
        self._failed_steps_in_row = 0

        self._pool = ThreadPoolExecutor(begin_threads, thread_name_prefix="p2pcache-begin")
        self._ended: Future[None] = Future()
        self._worker = threading.Thread(target=self._run, name="p2pcache-batcher", daemon=True)
        self._worker.start()

    # --- called on an event loop, or any thread ---

    async def submit(self, request: Generation) -> Stream:
        """Take a request; returns when it was begun, before it is admitted.

        Raises ConfigError (no prompt, no answer wanted, or what `engine.begin` finds wrong), Busy, TooLarge,
        Closing, EngineFailed. Cancelling this call gives the request up.
        """
        if request.tokens_max < 1:
            raise ConfigError(f"tokens_max must be at least 1, is {request.tokens_max}")
        if len(request.tokens) == 0:
            raise ConfigError("the prompt is empty")
        loop = asyncio.get_running_loop()
        sequence = _Sequence(next(self._numbers), request, loop, Outbox(loop), self._clock())
        with self._lock:
            if self._closing:
                raise Closing(self._closing)
            if self._queued >= self._limits.queue_max:
                raise Busy(f"{self._queued} requests are waiting (queue_max)", limit="queue_max")
            self._queued += 1
            self._live[sequence.number] = sequence
        stream = Stream(sequence.outbox, lambda: self._cancel(sequence))
        try:
            self._pool.submit(self._begin, sequence)
            await sequence.outbox.accepted
        except BaseException:
            stream.cancel()
            raise
        return stream

    def check_health(self) -> None:
        """Raises EngineFailed where the worker died or the engine is stuck in a call, Closing when closed."""
        if self._died is not None:
            raise EngineFailed(f"the batcher's thread died: {self._died!r}") from self._died
        if not self._worker.is_alive():
            raise Closing("the batcher is closed")
        now_s = self._clock()
        for method, since_s in list(self._calls.values()):
            if now_s - since_s > self._stuck_s:
                raise EngineFailed(f"engine.{method} has not returned for {now_s - since_s:.1f} s")

    def stats(self) -> dict[str, int]:
        """Counters and gauges of now, for metrics.

        Now: waiting (not admitted yet, begun or not), running, bytes, peak_bytes, target_bytes,
        failed_steps_in_row (0 after a step that went well). Since the start: prefills, decode_steps,
        decode_tokens (without those of prefills), completed, cancelled, failed (by the engine), refused (by
        `begin` with ConfigError, or TooLarge), finish_failed.
        """
        names = "prefills decode_steps decode_tokens completed cancelled failed refused finish_failed"
        return {
            "waiting": self._queued,
            "running": self._admission.running,
            "bytes": self._admission.bytes,
            "peak_bytes": self._admission.peak_bytes,
            "target_bytes": self._limits.target_bytes,
            "failed_steps_in_row": self._failed_steps_in_row,
            **{name: self._counts[name] for name in names.split()},
        }

    async def close(self, drain_s: float) -> None:
        """Take no more requests, let the accepted ones end for up to `drain_s`, then give the rest up.

        Returns when no thread is left. Raises EngineFailed where the engine does not return from a call
        within `stuck_s` more; its thread is left behind then. May be called again.
        """
        self._refuse("the batcher is closing")
        ended = asyncio.wrap_future(self._ended)
        await asyncio.wait({ended}, timeout=drain_s)
        if not ended.done():
            self._give_all_up(lambda: Closing("the batcher was closed before the answer ended"))
            await asyncio.wait({ended}, timeout=self._stuck_s)
        if not ended.done():
            calls = ", ".join(method for method, _ in list(self._calls.values())) or "no call"
            raise EngineFailed(f"the batcher does not end, its engine is in: {calls}")
        self._worker.join()
        self._pool.shutdown()

    def _cancel(self, sequence: _Sequence) -> None:
        """From any thread, also from a destructor: takes no lock."""
        sequence.cancelled = True
        self._inbox.put(_Cancel(sequence))

    def _refuse(self, why: str) -> None:
        with self._lock:
            self._closing = self._closing or why
        self._inbox.put(_Close())

    def _give_all_up(self, error: Callable[[], Exception]) -> None:
        """Fail all that is live at once for its reader, whatever the worker is in."""
        with self._lock:
            live = list(self._live.values())
        for sequence in live:
            self._cancel(sequence)
        self._post((sequence, error()) for sequence in live)

    def _post(self, events: Iterable[tuple[_Sequence, Accepted | Token | End | Exception]]) -> None:
        """Hand events to their readers' loops: one wake-up a loop, however many sequences."""
        by_loop: dict[asyncio.AbstractEventLoop, list] = {}
        for sequence, event in events:
            by_loop.setdefault(sequence.loop, []).append((sequence, event))
        for loop, its_events in by_loop.items():
            try:
                loop.call_soon_threadsafe(_deliver, its_events)
            except RuntimeError:  # the loop is closed, so nobody reads
                for sequence, _ in its_events:
                    self._cancel(sequence)

    # --- a thread of the pool ---

    def _begin(self, sequence: _Sequence) -> None:
        running, kv_bytes, error = None, 0, None
        if not sequence.cancelled:
            try:
                with self._calling("begin"):
                    running = self._engine.begin(sequence.request)
                kv_bytes = int(running.kv_bytes)
                if kv_bytes < 1:
                    raise ValueError(f"kv_bytes is {kv_bytes}")
                self._limits.check(kv_bytes)
            except (ConfigError, Refused) as refusal:
                error = refusal
            except BaseException as cause:  # also what is no Exception: the request's reader waits for it
                error = _failed("begin", cause)
        # The worker hears of it first: who awaits one `submit` before the next is served in that order.
        self._inbox.put(_Begun(sequence, running, kv_bytes, error))
        self._post([(sequence, error or Accepted())])

    @contextmanager
    def _calling(self, method: str) -> Iterator[None]:
        thread = threading.get_ident()
        self._calls[thread] = (method, self._clock())
        try:
            yield
        finally:
            del self._calls[thread]

    # --- the worker ---

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            self._died = error
            _log.exception("the batcher's thread died; what it ran is given up")
            why = f"the batcher's thread died: {error!r}"
            self._refuse(why)
            self._give_all_up(lambda: EngineFailed(why))
            try:
                self._serve()  # only to finish what was begun: all that is live has been cancelled
            except BaseException:
                _log.exception("and could not clean up")
        finally:
            self._ended.set_result(None)

    def _serve(self) -> None:
        """Until the batcher is closing and nothing is live: a turn is at most one call into the engine."""
        while True:
            with self._lock:
                if self._closing and not self._live:
                    return
            idle = not (self._admitted or self._decoding or self._room_changed)
            self._take_messages(wait=idle)
            if self._room_changed:
                self._room_changed = False
                for sequence in self._admission.admit(self._clock()):
                    self._to_prefill(sequence)
            sequence = self._next_to_prefill()
            if sequence is not None:
                self._prefill(sequence)
            elif self._decoding:
                self._decode(list(self._decoding.values()))

    def _take_messages(self, wait: bool) -> None:
        try:
            while True:
                message = self._inbox.get(block=wait)
                wait = False
                if isinstance(message, _Begun):
                    self._begun(message)
                elif isinstance(message, _Cancel):
                    # One that is still in `begin` ends when it comes out of it.
                    if message.sequence.stage not in (_Stage.BEGINNING, _Stage.ENDED):
                        self._counts["cancelled"] += 1
                        self._end(message.sequence)
        except queue.Empty:
            pass

    def _begun(self, message: _Begun) -> None:
        sequence = message.sequence
        sequence.running = message.running
        if message.error is None and not sequence.cancelled:
            sequence.stage = _Stage.WAITING
            self._admission.submit(sequence, message.kv_bytes, self._clock())
            self._room_changed = True
            return
        failed = isinstance(message.error, EngineFailed)
        self._counts["failed" if failed else "refused" if message.error else "cancelled"] += 1
        self._end(sequence)

    def _to_prefill(self, sequence: _Sequence) -> None:
        sequence.stage = _Stage.ADMITTED
        self._admitted.append(sequence)
        with self._lock:
            self._queued -= 1

    def _next_to_prefill(self) -> _Sequence | None:
        """The first whose bytes are here; where none is, the first of all, unless others can go on."""
        if not self._admitted:
            return None
        if self._decoding and self._steps_since_prefill < self._decode_steps_between_prefills:
            return None
        chosen = next((s for s in self._admitted if self._ready(s.running)), None)
        if chosen is None and not self._decoding:
            chosen = self._admitted[0]
        if chosen is not None:
            self._admitted.remove(chosen)
        return chosen

    def _prefill(self, sequence: _Sequence) -> None:
        self._steps_since_prefill = 0
        sequence.prefill_s = self._clock()
        try:
            with self._calling("prefill"):
                token = int(self._engine.prefill(sequence.running))
            sequence.cached_tokens = dict(sequence.running.cached_tokens)
        except Exception as cause:
            self._step_failed("prefill", [sequence], cause)
            return
        self._failed_steps_in_row = 0
        self._counts["prefills"] += 1
        sequence.first_token_s = self._clock()
        sequence.stage = _Stage.DECODING
        self._decoding[sequence.number] = sequence
        self._answer([sequence], [token], sequence.first_token_s)

    def _decode(self, sequences: list[_Sequence]) -> None:
        self._steps_since_prefill += 1
        try:
            with self._calling("decode"):
                tokens = [int(token) for token in self._engine.decode([s.running for s in sequences])]
            if len(tokens) != len(sequences):
                raise EngineFailed(f"decode returned {len(tokens)} tokens for {len(sequences)} sequences")
        except Exception as cause:
            self._step_failed("decode", sequences, cause)
            return
        self._failed_steps_in_row = 0
        self._counts["decode_steps"] += 1
        self._counts["decode_tokens"] += len(tokens)
        self._answer(sequences, tokens, self._clock())

    def _answer(self, sequences: list[_Sequence], tokens: list[int], now_s: float) -> None:
        events: list[tuple[_Sequence, Token | End]] = []
        ended = []
        for sequence, token in zip(sequences, tokens, strict=True):
            reason = "stop" if token in sequence.request.stop else ""
            if not reason:
                sequence.completion_tokens += 1
                events.append((sequence, Token(token, now_s, _prefilled(sequence))))
                if sequence.completion_tokens == sequence.request.tokens_max:
                    reason = "length"
            if reason:
                events.append((sequence, _end_event(sequence, reason, now_s)))
                ended.append(sequence)
        self._counts["completed"] += len(ended)
        self._post(events)  # before the engine stores what has ended: no reader waits for that
        for sequence in ended:
            self._end(sequence)

    def _step_failed(self, method: str, sequences: list[_Sequence], cause: Exception) -> None:
        _log.warning("engine.%s failed for %d sequences", method, len(sequences), exc_info=cause)
        self._failed_steps_in_row += 1
        self._counts["failed"] += len(sequences)
        self._post((sequence, _failed(method, cause)) for sequence in sequences)
        for sequence in sequences:
            self._end(sequence)

    def _end(self, sequence: _Sequence) -> None:
        """Take a sequence out at whatever stage it is. Its memory counts as taken until it is finished."""
        if sequence.stage is _Stage.ADMITTED and sequence in self._admitted:
            self._admitted.remove(sequence)
        self._decoding.pop(sequence.number, None)
        was_queued = sequence.stage in (_Stage.BEGINNING, _Stage.WAITING)
        sequence.stage = _Stage.ENDED
        running, sequence.running = sequence.running, None
        try:
            if running is not None:
                with self._calling("finish"):
                    self._engine.finish(running)
        except Exception:
            self._counts["finish_failed"] += 1
            _log.exception("engine.finish failed; its memory counts as free")
        finally:
            self._admission.cancel(sequence)
            self._room_changed = True
            with self._lock:
                self._queued -= was_queued
                del self._live[sequence.number]


def _deliver(events: list[tuple[_Sequence, Accepted | Token | End | Exception]]) -> None:
    for sequence, event in events:
        sequence.outbox.put(event)


def _prefilled(sequence: _Sequence) -> Prefilled | None:
    if sequence.completion_tokens > 1:
        return None
    return Prefilled(sequence.cached_tokens, sequence.prefill_s - sequence.submitted_s)


def _end_event(sequence: _Sequence, reason: str, now_s: float) -> End:
    return End(
        finish_reason=reason,
        prompt_tokens=len(sequence.request.tokens),
        completion_tokens=sequence.completion_tokens,
        cached_tokens=sequence.cached_tokens,
        submitted_s=sequence.submitted_s,
        prefill_s=sequence.prefill_s,
        first_token_s=sequence.first_token_s,
        ended_s=now_s,
    )


def _failed(method: str, cause: BaseException) -> EngineFailed:
    """A new one for each reader: a raised exception carries its reader's traceback."""
    error = EngineFailed(f"the engine failed in {method}: {cause!r}")
    error.__cause__ = cause
    return error
