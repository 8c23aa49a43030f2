"""What a server needs of an engine: four methods, called by the batcher.

An engine that fills this in gets the rest from `p2pcache.serve`: admission by memory, continuous
batching, streaming, cancellation, prefetch while a request queues, and a router that knows where the
KV is. `begin` may come from any thread; the other three come from one thread alone, one at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from p2pcache.core.chunking import Chunker, FixedChunker, SegmentChunker

CHUNK_TOKENS = 128
"""Half of the usual: what a turn adds is short, and an unfinished chunk is computed again."""

SEGMENT_TOKENS_MIN = 32
"""A shorter part of a prompt is no segment of its own: a chunk that small costs more than it saves."""


def chunker_of(boundaries: Sequence[int]) -> Chunker:
    """How a server cuts prompts; whoever looks them up must cut alike."""
    return SegmentChunker(boundaries, CHUNK_TOKENS) if boundaries else FixedChunker(CHUNK_TOKENS)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How answer tokens are chosen. temperature 0: the likeliest."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """One request as it reaches a replica.

    tokens: uint32 [n]. boundaries: ascending offsets at which segments of the prompt (documents,
    messages) begin; empty where the caller knows none. stop: token ids that end the answer. drawn: how many
    of these tokens are of the answer already, drawn by a replica that has failed: seeds go on behind them.
    """

    tokens: np.ndarray
    tokens_max: int
    boundaries: tuple[int, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    stop: frozenset[int] = frozenset()
    drawn: int = 0


class Running(Protocol):
    """One sequence of an engine, from `begin` to `finish`.

    kv_bytes: memory that its KV takes at its longest, prompt and whole answer; fixed at `begin`.
    cached_tokens: prompt tokens that came from the mesh, by source ("local", "nvme", "peer"); known
    after `prefill`.
    """

    kv_bytes: int
    cached_tokens: dict[str, int]


@runtime_checkable
class Engine(Protocol):
    """A model that can run several sequences at once.

    Besides these four it may have:

    - `ready(sequence) -> bool`: whether `prefill` would not have to wait for bytes. Others go first then.
    - `describe() -> dict` with any of `namespace` (of its KV; without it requests are not routed by
      locality), `context_tokens` (the longest prompt and answer), `vocabulary`, `stop` (token ids that
      end an answer). Where it says nothing, the tokenizer's word counts.
    - `stats() -> dict`, `close()`.
    """

    def begin(self, request: Generation) -> Running:
        """Take a request in: look its prompt up and start to pull what the mesh holds.

        Returns at once: the pull hides behind the queue. Allocates no KV memory. Raises ConfigError
        for a prompt that the model cannot take.
        """
        ...

    def prefill(self, sequence: Running) -> int:
        """Have the whole KV of the prompt; return the first token of the answer."""
        ...

    def decode(self, sequences: Sequence[Running]) -> list[int]:
        """One more token for each of these sequences, all of which have been prefilled."""
        ...

    def finish(self, sequence: Running) -> None:
        """Let go of a sequence, at whatever stage it is: its leases end, its memory is free.

        One that was prefilled is stored in the mesh first, as far as it is new.
        """
        ...
