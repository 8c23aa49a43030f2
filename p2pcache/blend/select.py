"""Which tokens of a prompt are recomputed when parts of its KV are reused.

A reused chunk has not attended to what now stands before it. Its first tokens mend most of that:
computed at a chunk's start, they drew the attention that belongs to the start of a prompt (an
*attention sink*, Xiao et al., *Efficient Streaming Language Models with Attention Sinks*, 2023), so
they are the ones whose KV is most wrong in the middle. They are also known before any byte arrives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from p2pcache.types import ConfigError

HEAD_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Piece:
    """A span of a prompt whose KV is at hand, and where that KV comes from."""

    start: int  # first token in this prompt
    stop: int  # one past its last
    base_position: int  # the position its first key was rotated for
    exact: bool  # computed behind these very tokens: bit-exact reuse
    follows: bool = (
        False  # computed right behind the piece before it in this prompt, so it has attended to it
    )

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop or self.base_position < 0:
            raise ConfigError(f"a piece needs 0 <= start < stop and a base position >= 0: {self}")
        if self.exact and self.delta:
            raise ConfigError(f"a piece with the same tokens before it stands at the same position: {self}")

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    @property
    def delta(self) -> int:
        """How far its keys must be turned, in positions."""
        return self.start - self.base_position


def check_pieces(total: int, pieces: Sequence[Piece]) -> None:
    """Raise `ConfigError` unless pieces lie in order, apart and within a prompt of `total` tokens."""
    if total < 1:
        raise ConfigError("a prompt has at least one token")
    before: Piece | None = None
    for piece in pieces:
        if before and piece.start < before.stop:
            raise ConfigError(f"pieces overlap or are out of order: {before}, {piece}")
        if piece.stop > total:
            raise ConfigError(f"{piece} reaches past the prompt's {total} tokens")
        if piece.follows and (before is None or before.stop != piece.start or before.delta != piece.delta):
            raise ConfigError(f"{piece} cannot have been computed right behind {before}")
        before = piece


def recompute_positions(total: int, pieces: Sequence[Piece], head_tokens: int = HEAD_TOKENS) -> np.ndarray:
    """Positions to run through the model: int64, sorted, never empty.

    Every token that no piece covers; the first `head_tokens` of each piece that is not exact, unless
    it `follows` the one before; and always the last token, whose logits are what a prefill is for.
    """
    check_pieces(total, pieces)
    if head_tokens < 0:
        raise ConfigError(f"head_tokens must be 0 or more, not {head_tokens}")
    recompute = np.ones(total, dtype=bool)
    for piece in pieces:
        recompute[piece.start : piece.stop] = False
        if not piece.exact and not piece.follows:
            recompute[piece.start : min(piece.start + head_tokens, piece.stop)] = True
    recompute[-1] = True
    return np.flatnonzero(recompute)
