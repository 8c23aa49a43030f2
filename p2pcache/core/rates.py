"""What a node has measured, for the planner: how fast each way brings bytes and its engine computes.

Estimates are robust (the median of a few), hold still under noise, and fade: what has not been measured for
a while drifts back to what is usual, so that no peer is shunned for ever for one bad moment. The clock is the
caller's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

from p2pcache.core.histogram import Histogram, quantile

MEASURABLE_BYTES = 64 * 1024
"""Fewer say nothing of a bandwidth."""
HOLD = 0.05
"""An estimate in use is replaced when the measured one differs by more than this share (hysteresis)."""
FRESH_S = 60.0
FADE_S = 600.0  # once no longer fresh, an estimate is half-way to the usual one after so long,
FADE_STALLED_S = 30.0  # or so long, where all that is known is that nothing came for a while
PERIOD_S = 0.5  # transfers that never pause are measured in parts, each at least so long ...
_ROUNDS = 8  # ... in which every transfer has reported so often: reports come in bursts
_REMEMBERED, _STRAYS_REMEMBERED = 5, 40
_CAUTION_MIN, _CAUTION_MAX = 1.25, 4.0
_LOST_SHARE = 0.5


class _Estimate:
    """The median of the last few measurements, held still under noise, fading towards what is usual."""

    def __init__(self) -> None:
        self._measured: deque[float] = deque(maxlen=_REMEMBERED)
        self._in_use: float | None = None
        self._measured_s, self._fade_s = 0.0, FADE_S

    @property
    def known(self) -> bool:
        return self._in_use is not None

    def add(self, value: float, now_s: float, fade_s: float = FADE_S) -> None:
        self._measured.append(value)
        self._measured_s, self._fade_s = now_s, fade_s
        median = sorted(self._measured)[len(self._measured) // 2]
        if self._in_use is None or abs(median / self._in_use - 1) > HOLD:
            self._in_use = median

    def forget(self) -> None:
        self._measured.clear()

    def at(self, usual: float, now_s: float) -> float:
        if self._in_use is None:
            return usual
        kept = self.kept(now_s)  # by ratio: rates differ by orders of magnitude
        return self._in_use**kept * usual ** (1 - kept)

    def kept(self, now_s: float) -> float:
        """The share of what was measured that still counts: 1 while fresh, then towards 0."""
        return 0.5 ** (max(now_s - self._measured_s - FRESH_S, 0.0) / self._fade_s)


class Rate:
    """Latency and pace (seconds a byte) of one way to get bytes."""

    def __init__(self, latency_s: float, bytes_per_s: float, usual: Rate | None = None):
        """The values before anything was measured. usual: the rate of all of this kind, better than those."""
        self._prior = latency_s, 1 / bytes_per_s
        self._usual = usual
        self._latency, self._pace = _Estimate(), _Estimate()
        self._strays: deque[float] = deque(maxlen=_STRAYS_REMEMBERED)  # measured over expected
        self.seconds = Histogram()  # of single bodies, for people

    def at(self, now_s: float) -> tuple[float, float]:
        """(latency in seconds, seconds a byte) as far as known now."""
        latency_s, pace = self._usual.at(now_s) if self._usual is not None else self._prior
        return self._latency.at(latency_s, now_s), self._pace.at(pace, now_s)

    def cost_s(self, nbytes: int, now_s: float) -> float:
        """Expected seconds for so many bytes with nothing else under way."""
        latency_s, pace = self.at(now_s)
        return latency_s + nbytes * pace

    def caution_at(self, now_s: float) -> float:
        """By what factor 95 % of transfers stayed within what was expected: for who has a deadline.

        It fades with the age of the last measurement, as the pace does.
        """
        if not self._strays:
            return _CAUTION_MIN if self._usual is None else self._usual.caution_at(now_s)
        strays = sorted(self._strays)
        caution = min(max(strays[int(0.95 * len(strays))], _CAUTION_MIN), _CAUTION_MAX)
        return _CAUTION_MIN * (caution / _CAUTION_MIN) ** self._pace.kept(now_s)

    def observe_latency(self, seconds: float, now_s: float) -> None:
        """Learn how long it took until bytes could come."""
        if seconds > 0:
            self._latency.add(seconds, now_s)

    def observe(self, nbytes: int, seconds: float, now_s: float, fade_s: float = FADE_S) -> None:
        """Learn from bytes that took so long, all of them together, latency not counted."""
        if nbytes < MEASURABLE_BYTES or seconds <= 0:
            return
        if self._pace.known:
            self._strays.append(seconds / nbytes / self.at(now_s)[1])
        self._pace.add(seconds / nbytes, now_s, fade_s)

    def observe_late(self, came: int, lost: int, seconds: float, now_s: float) -> None:
        """Learn from transfers that were given up: what they show is that this way is no faster.

        lost: bytes whose coming was not reported by then. Where none was, some may have come unreported:
        counting half of them makes the estimate halve with every such surprise.
        """
        stalled = came < MEASURABLE_BYTES
        nbytes = max(int(lost * _LOST_SHARE), MEASURABLE_BYTES) if stalled else came
        if seconds > nbytes * self.at(now_s)[1]:
            self._pace.forget()  # the median of a rosier past would take several more surprises
            self.observe(nbytes, seconds, now_s, FADE_STALLED_S if stalled else FADE_S)

    def observe_shared(self, nbytes: int, seconds: float, now_s: float) -> None:
        """Learn from a time in which others used the same line: this way is at least so fast."""
        if seconds < nbytes * self.at(now_s)[1]:
            self.observe(nbytes, seconds, now_s)

    def plain(self, now_s: float) -> dict[str, Any]:
        """For a status."""
        latency_s, pace = self.at(now_s)
        seconds = self.seconds.plain()
        return {
            "latency_s": latency_s,
            "bytes_per_s": 1 / pace,
            "bodies": self.seconds.count,
            "p50_s": quantile(seconds, 0.5),
            "p99_s": quantile(seconds, 0.99),
        }


@dataclass(slots=True)
class Period:
    """Bytes over the time in which at least one transfer was under way.

    Bodies that come side by side share a line, so the time of each says little; that of all of them says how
    fast the line is.
    """

    active: int = 0
    since_s: float = 0.0
    came: int = 0
    largest: int = 0  # report
    lost: int = 0
    void: bool = False  # a fault in it: its time says nothing of the line
    shared: bool = False  # others used the same line meanwhile

    def begin(self, now_s: float) -> None:
        if not self.active:
            self.since_s = now_s
        self.active += 1

    def report(self, nbytes: int) -> None:
        self.came += nbytes
        self.largest = max(self.largest, nbytes)

    def over(self, now_s: float) -> bool:
        """Whether what has come so far can be measured now."""
        enough = self.came >= max(_ROUNDS * self.active * self.largest, MEASURABLE_BYTES)
        return not self.active or (enough and now_s - self.since_s >= PERIOD_S)

    def restart(self, now_s: float) -> None:
        self.since_s, self.came, self.largest, self.lost = now_s, 0, 0, 0
        self.void = self.shared = False


@dataclass(slots=True)
class Meter:
    """What comes from one peer by one way.

    learners: the rate of this very way, and others that learn from it. inlet: the line that it shares with
    other peers; None: none.
    """

    learners: tuple[Rate, ...]
    inlet: Inlet | None
    period: Period = field(default_factory=Period)
    came_s: float = float("-inf")  # when bytes last came

    @property
    def rate(self) -> Rate:
        return self.learners[0]

    def opened(self, seconds: float, now_s: float) -> None:
        """So long it took until bytes could come."""
        for rate in self.learners:
            rate.observe_latency(seconds, now_s)

    def brought(self, seconds: float) -> None:
        """One body took so long, all in all."""
        for rate in self.learners:
            rate.seconds.observe(seconds)

    def begin(self, now_s: float) -> None:
        """A transfer starts: its bytes may come from now on."""
        self.period.begin(now_s)
        if self.inlet is not None:
            self.inlet.begin(self, now_s)

    def came(self, nbytes: int, now_s: float) -> None:
        """More bytes of a transfer under way."""
        self.came_s = now_s
        self.period.report(nbytes)
        if self.inlet is not None:
            self.inlet.period.report(nbytes)
        self._close(now_s)

    def end(self, now_s: float, *, lost: int = 0, fault: bool = False) -> None:
        """A transfer is over. lost: bytes that did not come in time. fault: not for want of time."""
        for period in (self.period, *((self.inlet.period,) if self.inlet is not None else ())):
            period.active -= 1
            period.lost += lost
            period.void |= fault
        if self.inlet is not None and not self.period.active:
            self.inlet.using.remove(self)
        self._close(now_s)

    def _close(self, now_s: float) -> None:
        if self.period.over(now_s):
            done, seconds = self.period, now_s - self.period.since_s
            if not done.void:
                for rate in self.learners:
                    if done.lost:
                        rate.observe_late(done.came, done.lost, seconds, now_s)
                    elif done.shared:
                        rate.observe_shared(done.came, seconds, now_s)
                    else:
                        rate.observe(done.came, seconds, now_s)
            shared = self.inlet is not None and len(self.inlet.using) > 1
            self.period.restart(now_s)
            self.period.shared = shared and self.period.active > 0
        if self.inlet is not None:
            self.inlet.close(now_s)


class Inlet:
    """This node's own line, which all peers beyond the host share. Known once two were at it together."""

    def __init__(self) -> None:
        self.rate: Rate | None = None
        self.period = Period()
        self.using: list[Meter] = []

    def begin(self, meter: Meter, now_s: float) -> None:
        self.period.begin(now_s)
        if meter not in self.using:
            self.using.append(meter)
        if len(self.using) > 1:
            self.period.shared = True
            for other in self.using:
                other.period.shared = True

    def close(self, now_s: float) -> None:
        if not self.period.over(now_s):
            return
        done, seconds = self.period, now_s - self.period.since_s
        if done.shared and not done.void and not done.lost and done.came >= MEASURABLE_BYTES and seconds > 0:
            if self.rate is None:
                self.rate = Rate(0.0, done.came / seconds)
            self.rate.observe(done.came, seconds, now_s)
        self.period.restart(now_s)
        self.period.shared = len(self.using) > 1


class Prefill:
    """Seconds that the engine takes to compute tokens: `start + token * n + pair * attended`.

    attended: the sum, over the computed tokens, of the tokens before each; attention costs that. Fitted to
    what the engine reports, recent reports counting most, with no coefficient below zero.
    """

    _UNITS = np.array([1.0, 1e3, 1e6])
    # A single length cannot tell the three apart: then it is laid to the tokens.
    _RIDGE = np.array([1e-2, 1e-4, 1e-2])
    _FORGET = 0.95
    _SECONDS = 1e-6, 1e6  # what is not between them is no prefill
    _STRAY, _STRAY_AFTER = 3.0, 5  # once so many are known, one report moves the rate by no more

    def __init__(self, tokens_per_s: float = 0.0) -> None:
        self.say(tokens_per_s)

    def say(self, tokens_per_s: float) -> None:
        """State a flat rate, and forget what was reported. 0: unknown; nothing is then computed by choice."""
        self._gram, self._right, self._reports = np.zeros((3, 3)), np.zeros(3), 0
        self._start_s = self._pair_s = 0.0
        self._token_s = 1 / tokens_per_s if tokens_per_s > 0 else float("inf")

    @property
    def known(self) -> bool:
        return self._token_s < float("inf")

    def seconds(self, tokens: int, before: int = 0) -> float:
        """What computing a run of tokens behind `before` others adds to a prefill; infinite if unknown."""
        if not self.known:
            return float("inf")
        return self._token_s * tokens + self._pair_s * attended(tokens, before)

    def observe(self, tokens: int, attended: int, seconds: float) -> None:
        """The engine computed so many tokens in so many seconds, in one prefill."""
        if tokens <= 0 or attended < 0 or not self._SECONDS[0] <= seconds <= self._SECONDS[1]:
            return
        if self._reports >= self._STRAY_AFTER:
            expected_s = max(self._total_s(tokens, attended), self._SECONDS[0])
            seconds = min(max(seconds, expected_s / self._STRAY), expected_s * self._STRAY)
        # Relative errors count, so that a short prompt is fitted as well as a long one.
        row = np.array([1.0, tokens, attended]) / self._UNITS / seconds
        self._gram = self._FORGET * self._gram + np.outer(row, row)
        self._right = self._FORGET * self._right + row
        self._reports += 1
        fitted = (
            _non_negative(self._gram + np.diag(self._RIDGE * self._gram.diagonal() + 1e-12), self._right)
            / self._UNITS
        )
        before_s, now_s = self._total_s(tokens, attended), fitted @ (1, tokens, attended)
        if not self.known or abs(now_s - before_s) > HOLD * before_s:
            self._start_s, self._token_s, self._pair_s = map(float, fitted)

    def _total_s(self, tokens: int, attended: int) -> float:
        return self._start_s + self._token_s * tokens + self._pair_s * attended

    def plain(self) -> dict[str, Any]:
        """For a status; `tokens_per_s` is that of a prompt's first thousand tokens, 0 if unknown."""
        per_s = 1000 / self.seconds(1000) if self.known and self.seconds(1000) > 0 else 0.0
        return {"tokens_per_s": per_s, "reports": self._reports}


def attended(tokens: int, before: int) -> float:
    """Of a run of tokens, the sum of how many stand before each."""
    return tokens * (before + (tokens - 1) / 2)


def _non_negative(gram: np.ndarray, right: np.ndarray) -> np.ndarray:
    """x >= 0 that minimises x·gram·x - 2·right·x. With three unknowns every support can be tried."""
    best, best_x = 0.0, np.zeros(len(right))
    for size in range(1, len(right) + 1):
        for chosen in combinations(range(len(right)), size):
            at: Sequence[int] = list(chosen)
            part = np.linalg.solve(gram[np.ix_(at, at)], right[at])
            value = -float(part @ right[at])
            if part.min() >= 0 and value < best:
                best, best_x = value, np.zeros(len(right))
                best_x[at] = part
    return best_x
