"""Admission by memory: how many sequences run at once follows from their KV, not from a fixed number.

A sequence reserves the bytes that its KV takes at its longest when it is admitted and gives them back when
it ends, so that memory never passes its target: short prompts run in large batches, long ones in small.

First come, first served, with bounded overtaking. A request that fits now may pass others that do not, but
each waiting request is passed by at most `overtake_bytes_max` bytes in all, and by nobody once it has waited
`patience_s`. Then what is free is set aside until it fits. So with p requests in front of it, while every
running sequence ends within D, it is admitted within `patience_s + (p + 1) * D`.

Pure: no clock and no threads. Not thread-safe: one thread owns it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

from p2pcache.types import ConfigError, InvariantError, P2PCacheError


class Refused(P2PCacheError):
    """A request was not taken, and nothing was done for it. `limit` names what it ran into."""

    def __init__(self, message: str, *, limit: str):
        super().__init__(message)
        self.limit = limit


class TooLarge(Refused):
    """The request's KV alone is over the byte target: no waiting would help."""


class Busy(Refused):
    """The queue is full: try later, or another replica."""


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """Every limit of admission. Raises ConfigError at construction."""

    target_bytes: int  # KV of all running sequences together, at their longest; hard cap
    sequences_max: int = 64  # running at once, however short
    queue_max: int = 1024  # waiting at once; above: Busy
    overtake_bytes_max: int | None = None  # of later requests that pass one in all; None: target_bytes
    patience_s: float = 5.0  # a request that has waited so long is passed by nobody

    def __post_init__(self) -> None:
        for name, least in (("target_bytes", 1), ("sequences_max", 1), ("queue_max", 1)):
            _check_whole(name, getattr(self, name), least)
        if self.overtake_bytes_max is not None:
            _check_whole("overtake_bytes_max", self.overtake_bytes_max, 0)
        patience_s = self.patience_s
        if isinstance(patience_s, bool) or not isinstance(patience_s, int | float):
            raise ConfigError(f"patience_s must be a number, not {patience_s!r}")
        if not 0 <= patience_s < math.inf:
            raise ConfigError(f"patience_s must not be negative or infinite, is {patience_s!r}")

    @property
    def passing_bytes_max(self) -> int:
        """`overtake_bytes_max`, chosen where the user did not."""
        return self.target_bytes if self.overtake_bytes_max is None else self.overtake_bytes_max

    def check(self, nbytes: int) -> None:
        """Raises TooLarge for a request that could never be admitted, ConfigError for no size at all."""
        _check_whole("kv_bytes", nbytes, 1)
        if nbytes > self.target_bytes:
            raise TooLarge(
                f"the request's KV takes {nbytes:,} bytes at its longest, which is over target_bytes"
                f" ({self.target_bytes:,})",
                limit="target_bytes",
            )


@dataclass(slots=True)
class _Waiting:
    nbytes: int
    since_s: float
    passed_by_bytes: int = 0


class Admission:
    """The queue, and what runs. Ids are the caller's own, unique among those that wait or run.

    `now_s` is the time of any clock that does not go back.
    """

    def __init__(self, config: AdmissionConfig):
        self._config = config
        self._waiting: dict[Hashable, _Waiting] = {}  # in order of arrival
        self._running: dict[Hashable, int] = {}  # id -> its bytes
        self._bytes = 0
        self._peak_bytes = 0

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Sequences admitted and not yet released."""
        return len(self._running)

    @property
    def bytes(self) -> int:
        """Bytes reserved by running sequences; at most `target_bytes`."""
        return self._bytes

    @property
    def peak_bytes(self) -> int:
        """The most that `bytes` has ever been."""
        return self._peak_bytes

    def submit(self, id: Hashable, nbytes: int, now_s: float) -> None:
        """Put a request at the end of the queue. Raises TooLarge or Busy, and then keeps nothing of it."""
        if id in self._waiting or id in self._running:
            raise InvariantError(f"request {id!r} was submitted twice")
        self._config.check(nbytes)
        if len(self._waiting) >= self._config.queue_max:
            raise Busy(f"{len(self._waiting)} requests are waiting (queue_max)", limit="queue_max")
        self._waiting[id] = _Waiting(nbytes, now_s)

    def admit(self, now_s: float) -> list[Hashable]:
        """Let in what may run now; returns the ids in order of arrival. Their bytes are reserved.

        Time alone lets nobody in: worth calling after a `submit`, `release` or `cancel`.
        """
        admitted: list[Hashable] = []
        stays: list[_Waiting] = []  # requests in front of the one looked at that do not run yet
        may_pass_bytes: float = math.inf  # the least that any of them may still be passed by
        for id, request in self._waiting.items():
            free_bytes = self._config.target_bytes - self._bytes
            if len(self._running) >= self._config.sequences_max or min(free_bytes, may_pass_bytes) <= 0:
                break
            if request.nbytes <= min(free_bytes, may_pass_bytes):
                self._reserve(id, request.nbytes)
                admitted.append(id)
                for other in stays:
                    other.passed_by_bytes += request.nbytes
                may_pass_bytes -= request.nbytes
            else:
                stays.append(request)
                may_pass_bytes = min(may_pass_bytes, self._may_pass_bytes(request, now_s))
        for id in admitted:
            del self._waiting[id]
        return admitted

    def release(self, id: Hashable) -> None:
        """A running sequence ended: its bytes are free. Raises InvariantError where it does not run."""
        if id not in self._running:
            raise InvariantError(f"request {id!r} was released, which does not run")
        self._bytes -= self._running.pop(id)

    def cancel(self, id: Hashable) -> bool:
        """Take a request out, whether it waits or runs. False where it does neither (any more)."""
        if id in self._running:
            self.release(id)
            return True
        return self._waiting.pop(id, None) is not None

    def validate(self) -> None:
        """Raises InvariantError where bytes are not conserved or a cap is passed."""
        config, total = self._config, sum(self._running.values())
        if self._bytes != total:
            raise InvariantError(f"{self._bytes:,} bytes are reserved, running sequences have {total:,}")
        if not total <= self._peak_bytes <= config.target_bytes:
            raise InvariantError(f"{total:,} bytes, peak {self._peak_bytes:,}, of {config.target_bytes:,}")
        if len(self._running) > config.sequences_max or len(self._waiting) > config.queue_max:
            raise InvariantError(f"{len(self._running)} sequences run, {len(self._waiting)} wait: too many")
        if self._running.keys() & self._waiting.keys():
            raise InvariantError("a request both waits and runs")

    def _reserve(self, id: Hashable, nbytes: int) -> None:
        self._running[id] = nbytes
        self._bytes += nbytes
        self._peak_bytes = max(self._peak_bytes, self._bytes)

    def _may_pass_bytes(self, request: _Waiting, now_s: float) -> int:
        if now_s - request.since_s >= self._config.patience_s:
            return 0
        return self._config.passing_bytes_max - request.passed_by_bytes


def _check_whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be a whole number, not {value!r}")
    if value < least:
        raise ConfigError(f"{name} must be at least {least}, is {value}")
