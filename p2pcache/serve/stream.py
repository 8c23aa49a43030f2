"""Answers on their way from the batcher to whoever asked: the events, and the two ends of a stream."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from p2pcache.serve.admission import Refused
from p2pcache.types import P2PCacheError


class Closing(Refused):
    """The batcher takes no more requests, or gave this one up because it was closed."""

    def __init__(self, message: str):
        super().__init__(message, limit="closing")


class EngineFailed(P2PCacheError):
    """The engine raised, is stuck, or broke its contract. `__cause__` is its own error, where it raised."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What is known once the prompt's KV is whole. cached_tokens: of the prompt, by source."""

    cached_tokens: dict[str, int]
    queue_s: float


@dataclass(frozen=True, slots=True)
class Token:
    """One token of the answer, and when the engine had it, in seconds of the batcher's clock.

    prefilled: comes with the first one.
    """

    id: int
    at_s: float
    prefilled: Prefilled | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class End:
    """The last event of an answer. Times are of the batcher's clock."""

    finish_reason: str  # "stop": a stop token, which is not part of the answer; "length": tokens_max
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: dict[str, int]  # of the prompt, by source
    submitted_s: float
    prefill_s: float  # when prefill began
    first_token_s: float
    ended_s: float

    @property
    def queue_s(self) -> float:
        """From submission to the start of prefill."""
        return self.prefill_s - self.submitted_s

    @property
    def ttft_s(self) -> float:
        """From submission to the first token."""
        return self.first_token_s - self.submitted_s


class Accepted:
    """The event that `submit` waits for: the sequence was begun, and will be queued."""


class Outbox:
    """A sequence's events on their way to its reader. Used on the reader's event loop alone.

    Holds at most tokens_max tokens and one last event: the worker makes no more.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.accepted: asyncio.Future[None] = loop.create_future()
        self.over = False  # the last event is in, or nobody reads any more
        self._events: deque[Token | End | Exception] = deque()
        self._reader: asyncio.Future[None] | None = None

    def put(self, event: Accepted | Token | End | Exception) -> None:
        if self.over:
            return
        failed = isinstance(event, Exception)
        self.over = failed or isinstance(event, End)
        if not self.accepted.done():
            if failed:
                self.accepted.set_exception(event)
                return
            self.accepted.set_result(None)  # the worker's first token may overtake the word of acceptance
        if not isinstance(event, Accepted):
            self._events.append(event)
            self._wake()

    def shut(self) -> None:
        """Nobody reads any more."""
        self.over = True
        self._events.clear()
        self._wake()

    async def get(self) -> Token | End | Exception | None:
        """The next event; None after the last."""
        if self._reader is not None:
            raise RuntimeError("a stream has one reader at a time")
        while not self._events and not self.over:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self._events.popleft() if self._events else None

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class Stream:
    """An answer on its way: an async iterator of `Token`, ..., `End`; read on the loop that submitted it.

    Raises EngineFailed where the engine fails, Closing where the batcher gave the request up. `cancel`,
    `aclose`, leaving `async with`, a cancelled read and dropping the stream all give the rest of the answer
    up. A slow reader slows nobody: what it has not read yet is kept, at most tokens_max tokens.
    """

    def __init__(self, outbox: Outbox, give_up: Callable[[], None]):
        self._outbox = outbox
        self._give_up = give_up

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Token | End:
        try:
            event = await self._outbox.get()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if event is None:
            raise StopAsyncIteration
        if isinstance(event, Exception):
            raise event
        return event

    def cancel(self) -> None:
        """Give the rest of the answer up; returns at once. Harmless at any time, any number of times."""
        if not self._outbox.over:
            self._give_up()
        self._outbox.shut()

    async def aclose(self) -> None:
        """`cancel`, as `contextlib.aclosing` calls it."""
        self.cancel()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        # Comes in any thread, at any point of it: so no lock, and the outbox is left alone.
        if not self._outbox.over:
            self._give_up()
