"""Which tokens of a prompt are recomputed when parts of its KV are reused.

A reused chunk has not attended to what now stands before it. A `Selection` says which of its tokens
mend that, in one of these modes:

| text | recomputed, beside what no piece covers | known |
| --- | --- | --- |
| `none` | nothing | before any byte arrives |
| `head-16` | the first 16 tokens of each piece | before any byte arrives |
| `deviation-15%` | the 15 % whose K and V differ most at an early layer | when that layer's KV is here |
| `query-15%` | the 15 % that the question attends to most | when all KV is here, or that of layers 0..l |
| `random-15%` | a control: any 15 % | before any byte arrives |
| `head-16+query-10%` | heads, and a share of the rest | as the second one |

Heads come first for a reason: computed at a chunk's start, they drew the attention that belongs to
the start of a prompt (an *attention sink*, Xiao et al., *Efficient Streaming Language Models with
Attention Sinks*, 2023), so their KV is most wrong in the middle. Deviation is that of Yao et al.,
*CacheBlend*, 2024.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

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


class Rank(Enum):
    """By what tokens are chosen from inexact pieces."""

    NONE = "none"
    DEVIATION = "deviation"  # of K and of V, each relative to its size in the prompt
    DEVIATION_K = "deviation-k"
    DEVIATION_V = "deviation-v"
    QUERY = "query"  # attention of the question's tokens
    RANDOM = "random"

    @property
    def deviates(self) -> bool:
        return self.value.startswith("deviation")


@dataclass(frozen=True, slots=True)
class Selection:
    """What is recomputed of inexact pieces. `parse` and `str` give and take the form of the table above."""

    head_tokens: int = 0  # first tokens of each inexact piece, unless it follows the one before
    share: float = 0.0  # of the tokens of inexact pieces, 0 to 1; what the heads took is not counted
    rank: Rank = Rank.NONE
    layer: int | None = None
    """Deviation: the layer it is measured at; None for 1, or for the first full-attention layer behind 0
    in a model that mixes kinds. Query: the last layer whose attention counts; None for all."""
    seed: int = 0  # of the control

    def __post_init__(self) -> None:
        if self.head_tokens < 0:
            raise ConfigError(f"head_tokens must be 0 or more, not {self.head_tokens}")
        if not 0 <= self.share <= 1 or (self.rank is Rank.NONE) != (self.share == 0):
            raise ConfigError(f"a ranked selection has a share in (0, 1], an unranked one has 0: {self!r}")
        if self.layer is not None and (
            self.layer < 0 or not self.needs_kv or (self.rank.deviates and self.layer == 0)
        ):
            raise ConfigError(f"deviation has a layer from 1 on, query one from 0 on, others none: {self!r}")

    @property
    def needs_kv(self) -> bool:
        """Whether reused KV must be here before the set is known."""
        return self.rank not in (Rank.NONE, Rank.RANDOM)

    def positions(self, total: int, pieces: Sequence[Piece], scores: np.ndarray | None = None) -> np.ndarray:
        """Positions to run through the model: int64, sorted, never empty.

        Every token that no piece covers; the heads; the share of tokens with the highest scores, of
        equal ones the earlier; and always the last token, whose logits are what a prefill is for.
        scores: `[total]`, where `needs_kv`.
        """
        recompute, inexact = self._fixed(total, pieces)
        if self.rank is not Rank.NONE:
            if self.rank is Rank.RANDOM:
                scores = np.random.default_rng(self.seed).random(total)
            if scores is None or scores.shape != (total,):
                raise ConfigError(f"{self} needs one score a token")
            candidates = np.flatnonzero(inexact & ~recompute)
            count = min(round(self.share * int(inexact.sum())), len(candidates))
            best = np.argsort(-scores[candidates], kind="stable")[:count]
            recompute[candidates[best]] = True
        return np.flatnonzero(recompute)

    def fixed_positions(self, total: int, pieces: Sequence[Piece]) -> np.ndarray:
        """The part of `positions` that is known without scores: int64, sorted, never empty."""
        return np.flatnonzero(self._fixed(total, pieces)[0])

    def _fixed(self, total: int, pieces: Sequence[Piece]) -> tuple[np.ndarray, np.ndarray]:
        """Which tokens `[total]` are recomputed whatever the scores, and which lie in inexact pieces."""
        check_pieces(total, pieces)
        recompute, inexact = np.ones(total, dtype=bool), np.zeros(total, dtype=bool)
        for piece in pieces:
            recompute[piece.start : piece.stop] = False
            inexact[piece.start : piece.stop] = not piece.exact
            if not piece.exact and not piece.follows:
                recompute[piece.start : min(piece.start + self.head_tokens, piece.stop)] = True
        recompute[-1] = True
        return recompute, inexact

    def __str__(self) -> str:
        parts = [f"head-{self.head_tokens}"] if self.head_tokens else []
        if self.rank is not Rank.NONE:
            at = f"@{self.layer}" if self.layer is not None else f"@{self.seed}" if self.seed else ""
            parts.append(f"{self.rank.value}-{self.share * 100:.12g}%{at}")
        return "+".join(parts) or "none"

    @classmethod
    def parse(cls, text: str) -> Selection:
        """`none`, `head-K`, `RANK-P%` or both with `+`; `@L` behind the share names the layer, or a seed.

        Raises ConfigError for anything else.
        """
        if text == "none":
            return cls()
        head, ranked = re.fullmatch(r"(?:head-(\d+))?\+?(.*)", text).groups()
        match = re.fullmatch(r"([a-z-]+)-([0-9.]+)%(?:@(\d+))?", ranked) if ranked else None
        ranks = {rank.value: rank for rank in Rank if rank is not Rank.NONE}
        if (ranked and (match is None or match[1] not in ranks)) or not (head or ranked):
            raise ConfigError(f"{text!r} is no selection: none, head-K, or one of {sorted(ranks)} with -P%")
        if (head is not None and bool(ranked)) != ("+" in text):
            raise ConfigError(f"{text!r}: heads and a ranked share are joined by one +")
        if match is None:
            return cls(int(head))
        rank, number = ranks[match[1]], int(match[3] or 0)
        layer = number if match[3] and rank is not Rank.RANDOM else None
        try:
            share = float(f"{match[2]}e-2")  # not divided: 16.7% is the nearest to 0.167
        except ValueError:
            raise ConfigError(f"{text!r}: {match[2]!r} is no number") from None
        return cls(int(head or 0), share, rank, layer, number if rank is Rank.RANDOM else 0)


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
    """`Selection(head_tokens).positions(total, pieces)`: int64, sorted, never empty."""
    return Selection(head_tokens).positions(total, pieces)
