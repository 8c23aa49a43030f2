"""Where a prompt is cut into chunks. One interface, three ways.

`FixedChunker` for engines that match prefixes, `SegmentChunker` where the caller knows where
documents begin, `ContentChunker` where nobody does: its cuts depend on the tokens alone, so a
document is cut alike at any offset and the cuts meet again after a seam.

Splice token ids, never text: byte pairs merge across a separator and nothing is found again.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from p2pcache import _native
from p2pcache.types import ConfigError

Span = tuple[int, int]
TOKEN_MAX = 2**32 - 1
_GEAR_SHIFT = 8  # bits a token; 64 of them hold 8 tokens


class Chunker(Protocol):
    """A way to cut. Equal chunkers cut equal runs alike, in every process."""

    def spans(self, tokens: np.ndarray) -> list[Span]:
        """Chunks `[start, stop)` of a run (uint32 `[n]`), in order, without gaps; none for no tokens."""


@dataclass(frozen=True, slots=True)
class FixedChunker:
    """Chunks of `tokens` tokens from the start of the prompt; the last may be shorter."""

    tokens: int = 256

    def __post_init__(self) -> None:
        _positive(tokens=self.tokens)

    def spans(self, tokens: np.ndarray) -> list[Span]:
        return _every(0, len(tokens), self.tokens)


@dataclass(frozen=True, slots=True)
class SegmentChunker:
    """One chunk a segment; one over `max_tokens` is cut every `max_tokens` from its own start.

    boundaries: offsets at which segments begin, ascending; 0 is implied.
    """

    boundaries: tuple[int, ...]
    max_tokens: int = 1024

    def __init__(self, boundaries: Sequence[int], max_tokens: int = 1024):
        object.__setattr__(self, "boundaries", tuple(_offset(b) for b in boundaries))
        object.__setattr__(self, "max_tokens", max_tokens)
        _positive(max_tokens=max_tokens)
        if any(b < 0 for b in self.boundaries) or any(a >= b for a, b in itertools.pairwise(self.boundaries)):
            raise ConfigError("segment boundaries must be ascending offsets from 0 on")

    @property
    def segment_starts(self) -> tuple[int, ...]:
        """Where a segment begins, 0 first: where a chain of exact keys may start anew."""
        return self.boundaries if self.boundaries[:1] == (0,) else (0, *self.boundaries)

    def spans(self, tokens: np.ndarray) -> list[Span]:
        if self.boundaries and self.boundaries[-1] > len(tokens):
            raise ConfigError(
                f"a segment begins at {self.boundaries[-1]}, behind a prompt of {len(tokens)} tokens"
            )
        edges = sorted({0, *self.boundaries, len(tokens)})
        return [
            span for start, stop in itertools.pairwise(edges) for span in _every(start, stop, self.max_tokens)
        ]


@dataclass(frozen=True, slots=True)
class ContentChunker:
    """Cuts where a Gear hash of the last 8 tokens is small (see `gear_cuts_py`).

    Of a known document the chunk across each of its two ends is not found again. So chunks should be short
    beside documents: `ContentChunker(16, 64, 256)` where these have a few hundred tokens.
    """

    min_tokens: int = 64
    average_tokens: int = 256
    max_tokens: int = 1024

    def __post_init__(self) -> None:
        _positive(min_tokens=self.min_tokens, average_tokens=self.average_tokens, max_tokens=self.max_tokens)
        if not self.min_tokens < self.average_tokens < self.max_tokens:
            raise ConfigError("content chunks need min_tokens < average_tokens < max_tokens")

    @property
    def threshold(self) -> int:
        """A place is a cut where the hash is below this: one in `average - min` places, after the minimum."""
        # 2**64 - 1: the quotient must fit 64 bits even where the average is the minimum plus one.
        return (2**64 - 1) // (self.average_tokens - self.min_tokens)

    def spans(self, tokens: np.ndarray) -> list[Span]:
        ends = _native.gear_cuts(tokens, self.min_tokens, self.threshold, self.max_tokens).tolist()
        return list(itertools.pairwise([0, *ends]))


def gear_cuts_py(tokens: Sequence[int], min_tokens: int, threshold: int, max_tokens: int) -> list[int]:
    """The native chunker's twin: ends of chunks, the last one `len(tokens)`.

    `h = 256h + mix(token)` modulo 2**64, so a token is shifted out after 8 more. The hash is never
    reset: whether a place can be a cut does not depend on where the chunk before it ended.
    """
    cuts: list[int] = []
    hash_, start, mask = 0, 0, 2**64 - 1
    for i, token in enumerate(tokens, start=1):
        hash_ = ((hash_ << _GEAR_SHIFT) + _mix(int(token))) & mask
        if (hash_ < threshold and i - start >= min_tokens) or i - start == max_tokens:
            cuts.append(i)
            start = i
    return cuts if start == len(tokens) else [*cuts, len(tokens)]


def as_tokens(tokens: Any) -> np.ndarray:
    """Token ids as uint32 `[n]`, contiguous; without a copy where they already are.

    Takes numpy arrays, torch tensors and sequences of integers. Raises ConfigError for anything
    else: floats, bools, more than one axis, ids outside 32 bits.
    """
    if getattr(getattr(tokens, "device", None), "type", "") == "meta":
        raise ConfigError("token ids are on the meta device: they have no values")
    if hasattr(tokens, "detach"):  # a torch tensor, of which this module knows nothing
        tokens = tokens.detach().cpu().numpy()
    elif isinstance(tokens, (list, tuple)) and {bool, np.bool_} & set(map(type, tokens)):
        raise ConfigError("token ids must be integers; there is a bool among them")  # numpy reads True as 1
    try:
        run = np.asarray(tokens)
    except (ValueError, TypeError, OverflowError) as error:
        raise ConfigError(f"token ids must be one row of integers: {error}") from None
    if run.shape == (0,):  # of any dtype: numpy makes [] a float array
        return np.zeros(0, dtype=np.uint32)
    if run.ndim != 1 or run.dtype.kind not in "iu":
        raise ConfigError(
            f"token ids must be one row of integers, not {run.dtype} of shape {list(run.shape)}"
        )
    if run.dtype != np.uint32 and (int(run.min()) < 0 or int(run.max()) > TOKEN_MAX):
        raise ConfigError("token ids must be from 0 to 2**32 - 1")
    if run.dtype == np.int32:
        run = run.view(np.uint32)  # none is negative, so the bits are the same: no copy
    return np.ascontiguousarray(run, dtype=np.uint32)


def _mix(token: int) -> int:
    mask = 2**64 - 1
    x = (token + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 33)) * 0xFF51AFD7ED558CCD) & mask
    x = ((x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53) & mask
    return x ^ (x >> 33)


def _offset(boundary: Any) -> int:
    try:
        return operator.index(boundary)
    except TypeError:
        raise ConfigError(f"a segment boundary is a token offset, not {boundary!r}") from None


def _every(start: int, stop: int, step: int) -> list[Span]:
    return [(at, min(at + step, stop)) for at in range(start, stop, step)]


def _positive(**sizes: int) -> None:
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} must be a whole number above 0, not {value!r}")
