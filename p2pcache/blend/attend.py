"""Attention of a sparse forward: each run of recomputed tokens over the slots that it can see.

One mask over all queries and all slots would have every query pay for the whole prompt, where causal
attention pays for half, and would have K and V copied out to every query head. So queries are cut into
*blocks* of tokens that stand together, and a block is attended over `k[:, :, lo:hi]`, the slots that at
least one of its queries sees, with a mask of that size. Query heads of one KV head stand together as
its queries, so that K and V are read once a KV head. A block of a prompt's first tokens, all of them
computed, needs no mask and keeps the causal fast path.

A transformers model asks its config which attention to use at every forward; under a name without a
mask function transformers builds no mask. Which queries run, and in which layer, is known to the cache,
which sees the keys just before; it says so in `Runs`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from p2pcache.types import ConfigError

ATTENTION_NAME = "p2pcache_runs"
BLOCK_TOKENS = 64  # a block's queries; on average half of its own slots are masked in vain
GAP_TOKENS = 32  # slots between two runs below which they share a block
MASK_VALUES_KEPT_MAX = 1 << 24  # of all blocks' masks, kept for all layers in the form that SDPA adds
# What models hand to their attention and what changes nothing where slots are seen by position.
WITHOUT_EFFECT = frozenset(
    """dropout is_causal sliding_window position_ids cache_position use_cache output_attentions
    output_hidden_states return_dict""".split()
)


class AttentionUnknown(ConfigError):
    """A model's attention wants something that ours does not do."""


def without_effect(others: dict[str, Any]) -> None:
    """Raise `AttentionUnknown` for arguments of an attention that would change what it computes."""
    unknown = sorted(
        n for n, v in others.items() if n not in WITHOUT_EFFECT and v is not None and v is not False
    )
    if unknown:
        raise AttentionUnknown(f"attention with {unknown} is known only to the model itself")


@dataclass(frozen=True, slots=True)
class Block:
    """Queries `first .. last-1` of a forward, and the slots `lo .. hi-1` that they see."""

    first: int
    last: int
    lo: int
    hi: int
    mask: torch.Tensor | None  # [queries, hi - lo] bool, true = attend; None: causal from slot 0 on


def blocks_of(
    positions: np.ndarray,
    window: int | None,
    device: Any = None,
    *,
    block_tokens: int = BLOCK_TOKENS,
    gap_tokens: int = GAP_TOKENS,
) -> list[Block]:
    """Cut queries at `positions` (`[n]` int64, sorted) into blocks that cover each query once.

    window: how many last slots a query sees, itself included; None for all.
    """
    n = len(positions)
    # All tokens up to a gap are there: the causal fast path, as long as no window cuts in.
    dense = int(np.argmax(np.append(positions != np.arange(n), True)))
    if window is not None:
        dense = min(dense, window)
    blocks = [Block(0, dense, 0, dense, None)] if dense else []
    first = dense
    while first < n:
        last = min(first + block_tokens, n)
        gaps = np.flatnonzero(np.diff(positions[first:last]) > gap_tokens)
        if len(gaps):
            last = first + int(gaps[0]) + 1
        hi = int(positions[last - 1]) + 1
        lo = 0 if window is None else max(int(positions[first]) + 1 - window, 0)
        at, slots = torch.from_numpy(positions[first:last])[:, None], torch.arange(lo, hi)[None]
        mask = slots <= at
        if window is not None:
            mask &= slots > at - window
        blocks.append(Block(first, last, lo, hi, mask.to(device)))
        first = last
    return blocks


def additive(mask: torch.Tensor, group: int, dtype: torch.dtype) -> torch.Tensor:
    """A bool mask `[n, slots]`, once for each query head of a group, as 0 and -inf `[group * n, slots]`.

    The form that SDPA would turn a bool mask into at every call.
    """
    return (
        torch.zeros(mask.shape, dtype=dtype, device=mask.device)
        .masked_fill_(~mask, float("-inf"))
        .repeat(group, 1)
    )


@dataclass
class Runs:
    """What the attention must know of the forward under way. One a forward, changed by the cache."""

    windows: Sequence[int | None]  # a layer
    device: Any
    question: int = 0  # rows from the end whose attention is added up in `attended`; 0: none
    attended: torch.Tensor | None = None  # [slots] fp32: attention mass, a mean over heads and rows
    positions: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    layer: int | None = None  # whose keys came and were not attended to yet
    _blocks: dict[int | None, list[tuple[Block, torch.Tensor | None]]] = field(default_factory=dict)

    def set_positions(self, positions: np.ndarray) -> None:
        """The tokens that run from now on, `[n]` int64 sorted."""
        self.positions, self._blocks = positions, {}

    def keys_came(self, layer: int | None) -> None:
        """A layer's keys are complete; None at the end. Raises `AttentionUnknown` where the layer before
        has not been attended to: its model then goes a way of its own, without a mask."""
        if self.layer is not None:
            raise AttentionUnknown(f"layer {self.layer} does not use transformers' attention interface")
        self.layer = layer

    def blocks(self, layer: int, group: int, dtype: torch.dtype) -> list[tuple[Block, torch.Tensor | None]]:
        """A layer's blocks, each with its mask as `additive` gives it, or None where that is not kept."""
        window = self.windows[layer]
        if window not in self._blocks:
            blocks = blocks_of(self.positions, window, self.device)
            values = group * sum(b.mask.numel() for b in blocks if b.mask is not None)
            kept = values <= MASK_VALUES_KEPT_MAX
            self._blocks[window] = [
                (b, additive(b.mask, group, dtype) if kept and b.mask is not None else None) for b in blocks
            ]
        return self._blocks[window]

    def counts(self, layer: int) -> bool:
        """Whether a layer's attention says what a question looks at: sliding layers see only what is near."""
        return self.attended is not None and (self.windows[layer] is None or None not in self.windows)


_runs: ContextVar[Runs] = ContextVar("p2pcache_runs")


@contextmanager
def attending(runs: Runs) -> Iterator[None]:
    """Let the attention of forwards of this thread follow `runs`."""
    token = _runs.set(runs)
    try:
        yield
    finally:
        _runs.reset(token)


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of queries `[1, heads, n, d]` over slots `[1, kv_heads, slots, d]`, to `[1, n, heads, d]`."""
    without_effect(others)
    runs = _runs.get()
    layer, runs.layer = runs.layer, None
    if layer is None or attention_mask is not None or query.shape[2] != len(runs.positions):
        raise AttentionUnknown("attention over other than the tokens that run")
    heads, kv_heads = query.shape[1], key.shape[1]
    out = query.new_empty(1, query.shape[2], heads, value.shape[3])
    group = heads // kv_heads
    for block, mask in runs.blocks(layer, group, query.dtype):
        q = query[:, :, block.first : block.last]
        k, v = key[:, :, block.lo : block.hi], value[:, :, block.lo : block.hi]
        if block.mask is None and softcap is None:
            seen = scaled_dot_product_attention(
                q, k, v, scale=scaling, is_causal=True, enable_gqa=heads != kv_heads
            )
            out[:, block.first : block.last] = seen.transpose(1, 2)
            continue
        if mask is None:
            seen_by = block.mask
            if seen_by is None:
                seen_by = torch.ones(block.last, block.last, dtype=torch.bool, device=q.device).tril()
            mask = additive(seen_by, group, query.dtype)
        q = q.reshape(1, kv_heads, group * q.shape[2], q.shape[3])
        seen = attend_masked(q, k, v, mask, scaling, softcap)
        out[:, block.first : block.last] = seen.reshape(1, heads, -1, value.shape[3]).transpose(1, 2)
    if runs.counts(layer):
        _count(runs, query, key, scaling)
    return out, None


def attend_masked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention `[b, h, n, d]` with `mask` (`[n, slots]`, added to the scores) and Gemma 2's softcap."""
    if softcap is None:
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    scores = query @ key.transpose(2, 3) * (scaling or query.shape[-1] ** -0.5)  # SDPA has no softcap
    scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    return scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype) @ value


def _count(runs: Runs, query: torch.Tensor, key: torch.Tensor, scaling: float | None) -> None:
    """Add what the question's tokens attend to in one layer to `runs.attended`."""
    heads, kv_heads, rows = query.shape[1], key.shape[1], runs.question
    q = query[0, :, -rows:].reshape(kv_heads, -1, query.shape[3])
    scores = (q @ key[0].transpose(1, 2)).float() * (scaling or query.shape[-1] ** -0.5)
    at = torch.from_numpy(runs.positions[-rows:]).to(key.device)
    seen = torch.arange(key.shape[2], device=key.device)[None] <= at[:, None]
    scores.masked_fill_(~seen.repeat(heads // kv_heads, 1), float("-inf"))
    runs.attended += scores.softmax(dim=-1).mean(dim=(0, 1))


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attend)
