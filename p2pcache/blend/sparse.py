"""Sparse prefill: a forward over the tokens that must be recomputed, the rest from reused KV.

A prompt of n tokens is covered by *pieces* of stored KV and by tokens to recompute. The recomputed
tokens run at their true positions, attend to everything before them, reused or not, and scatter
their K/V into place (Yao et al., *CacheBlend*, 2024). Which they are is a `Selection`'s business:
where it must see KV first, the forward begins with more tokens and goes on with fewer (deviation), or
a short forward of the question alone goes before (query).

The cache that comes out is a transformers cache like any other: slot i holds position i, and later
tokens are appended, by `decode` or by the model's own `generate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicCache

from p2pcache.blend.attend import ATTENTION_NAME, AttentionUnknown, Runs, attending
from p2pcache.blend.forward import attention_mask, layer_windows, narrowing, run_model, using_attention
from p2pcache.blend.rotate import LayerRopes, RopeSpec
from p2pcache.blend.scatter import (
    DECODE_TOKENS_SPARE,
    KeysAreIn,
    LayerSource,
    Plan,
    ScatterCache,
    ScatterLayer,
    slots_needed,
)
from p2pcache.blend.select import HEAD_TOKENS, Piece, Rank, Selection, check_pieces
from p2pcache.types import ConfigError, LayoutError

QUESTION_TOKENS_MAX = 64
"""How many of a prompt's last tokens, behind the last piece, are taken for its question."""


@dataclass(frozen=True, slots=True)
class SparsePrefill:
    """What a sparse prefill leaves: the answer's first logits, and a cache to go on with."""

    logits_last: torch.Tensor  # [vocab] behind the prompt's last token
    cache: ScatterCache
    recomputed: np.ndarray  # int64 positions, sorted: what ran through all layers
    exact_tokens: int  # KV before this position is what a full prefill gives; later KV is approximate


@torch.no_grad()
def sparse_prefill(
    model: Any,
    tokens: torch.Tensor | np.ndarray | Sequence[int],
    pieces: Sequence[Piece],
    source: LayerSource | None,
    rope: RopeSpec | LayerRopes | None,
    head_tokens: int = HEAD_TOKENS,
    capacity: int | None = None,
    *,
    selection: Selection | None = None,
    masked: bool = False,
) -> SparsePrefill:
    """Prefill `tokens` (`[n]`), reusing `pieces` (in order) whose KV `source` gives.

    Args:
        model: a transformers decoder with rotary positions, in eval mode. While this runs its config may
            name another attention: nothing else may use the model, or one that shares its config.
        source: may be None when there are no pieces.
        rope: how keys are turned; may be None when no piece is moved.
        head_tokens: how many first tokens of an inexact piece are recomputed, without a selection.
        capacity: tokens to allocate for, at least n; n + 256 when None.
        selection: which tokens of inexact pieces are recomputed.
        masked: use the model's own attention with one mask over everything. Slower; it is what is done
            anyway where a model's attention wants more than ours can do.

    Raises `ConfigError` and `LayoutError` for arguments that do not fit, and what `source` raises.
    """
    ids = _as_ids(model, tokens)
    total = ids.numel()
    check_pieces(total, pieces)
    selection = Selection(head_tokens) if selection is None else selection
    if capacity is None:
        capacity = total + DECODE_TOKENS_SPARE
    if capacity < total:
        raise ConfigError(f"capacity {capacity} is less than the prompt's {total} tokens")
    if pieces and source is None:
        raise ConfigError("pieces need a source")
    if rope is None and any(piece.delta for piece in pieces):
        raise ConfigError("a piece at another position needs the model's RopeSpec")
    config = model.config.get_text_config()
    # What models without a piece attend to is their own business.
    windows = layer_windows(config) if pieces else [None] * config.num_hidden_layers
    plan = Plan(total, capacity, tuple(pieces), source, rope, windows, ids.device)
    prefill = _Prefill(model, ids, selection, plan, ScatterCache(len(windows), plan))
    try:
        logits, recomputed = prefill.run(masked)
    except AttentionUnknown:
        if masked or selection.rank is Rank.QUERY:
            raise
        # What was filled by then stays filled: no layer is asked for twice.
        logits, recomputed = prefill.run(masked=True)
    prefill.cache.finish()
    exact_tokens = next((piece.start for piece in pieces if not piece.exact), total)
    return SparsePrefill(logits[-1], prefill.cache, recomputed, exact_tokens)


@dataclass
class _Prefill:
    """One prefill under way."""

    model: Any
    ids: torch.Tensor
    selection: Selection
    plan: Plan
    cache: ScatterCache
    masked: bool = False

    def run(self, masked: bool) -> tuple[torch.Tensor, np.ndarray]:
        """Logits `[1, vocab]` behind the last token, and the positions that were recomputed."""
        self.masked = masked
        if not self.selection.needs_kv or all(piece.exact for piece in self.plan.pieces):
            positions = self._choose(np.zeros(self.plan.total))
            return self._forward(positions), positions
        return self._by_deviation() if self.selection.rank.deviates else self._by_query()

    def _choose(self, scores: np.ndarray) -> np.ndarray:
        return self.selection.positions(self.plan.total, self.plan.pieces, scores)

    def _forward(
        self,
        positions: np.ndarray,
        queries: np.ndarray | None = None,
        question: int = 0,
        narrow: tuple[int, Callable[[Callable[[], Any]], torch.Tensor]] | None = None,
    ) -> torch.Tensor:
        """Run the tokens at `positions`; returns logits `[1, vocab]` of the last.

        queries: which may run later over the layers that are filled now. question: how many last rows
        have their attention added up. narrow: the arguments of `forward.narrowing`.
        """
        plan, config = self.plan, self.model.config.get_text_config()
        self.cache.reset()  # what a forward before this one left is in place, but nothing is behind it
        # Nothing reused and nothing to see: the model's own attention, without a mask.
        own = len(positions) == plan.total and narrow is None and not question
        plan.runs = None if own or self.masked else Runs(plan.windows, plan.device, question)
        if plan.runs is not None and question:
            plan.runs.attended = torch.zeros(plan.total, device=plan.device)
        plan.run(positions, queries)
        mask = None
        if self.masked and not own:
            mask = attention_mask(config, plan.index, plan.total, self.model.dtype)
        with ExitStack() as stack:
            if narrow is not None:
                stack.enter_context(narrowing(self.model, *narrow))
            if plan.runs is not None:
                stack.enter_context(using_attention(config, ATTENTION_NAME))
                stack.enter_context(attending(plan.runs))
            logits = run_model(
                self.model, self.ids[plan.index], plan.index, self.cache, mask, logits_to_keep=1
            )
        if plan.runs is not None:
            plan.runs.keys_came(None)
        return logits

    def _by_deviation(self) -> tuple[torch.Tensor, np.ndarray]:
        """All tokens that are not exact up to the keys of one layer, then those that deviate there.

        What has been computed of the first layers stays: nothing reused is left in them.
        """
        plan = self.plan
        everything = inexact_positions(plan.total, plan.pieces)
        scores, chosen = np.zeros(plan.total), everything

        def watch(layer: ScatterLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
            scores[everything] = deviation(
                (layer.keys, layer.values), (keys, values), plan.index, self.selection.rank
            )

        def choose(run: Callable[[], Any]) -> torch.Tensor:
            nonlocal chosen
            plan.on_keys = watch
            with suppress(KeysAreIn):
                run()
            chosen = self._choose(scores)
            plan.run(chosen)
            return torch.from_numpy(np.searchsorted(everything, chosen)).to(plan.device)

        at = deviation_layer(self.selection, plan.windows)
        logits = self._forward(everything, narrow=(at, choose))
        return logits, chosen

    def _by_query(self) -> tuple[torch.Tensor, np.ndarray]:
        """A forward of what no piece covers, to see where the question looks; then the real one."""
        plan, last = self.plan, self.selection.layer
        base = Selection().positions(plan.total, plan.pieces)
        question = max(min(plan.total - plan.pieces[-1].stop, QUESTION_TOKENS_MAX), 1)

        def enough(run: Callable[[], Any]) -> torch.Tensor:
            raise KeysAreIn

        narrow = None
        if last is not None and last + 1 < len(plan.windows):
            narrow = last + 1, enough
        with suppress(KeysAreIn):
            self._forward(base, inexact_positions(plan.total, plan.pieces), question, narrow)
        if plan.runs is None:
            raise AttentionUnknown("ranking by the question's attention needs our own attention")
        chosen = self._choose(plan.runs.attended.double().cpu().numpy())
        return self._forward(chosen), chosen


def inexact_positions(total: int, pieces: Sequence[Piece]) -> np.ndarray:
    """Every position that may be recomputed: outside of exact pieces, and the last. int64, sorted."""
    some = np.ones(total, dtype=bool)
    for piece in pieces:
        some[piece.start : piece.stop] = not piece.exact
    some[-1] = True
    return np.flatnonzero(some)


def deviation_layer(selection: Selection, windows: Sequence[int | None]) -> int:
    """The layer at which deviation is measured; windows: of each layer, None for full attention.

    Layer 0 is always exact. Behind it the first will do, but a sliding layer sees only what is near:
    where a model mixes kinds it is the first full one. Raises ConfigError for one the model lacks.
    """
    layer = selection.layer
    if layer is None:
        full = [index for index, window in enumerate(windows) if index and window is None]
        layer = full[0] if full else 1
    if not 0 < layer < len(windows):
        raise ConfigError(f"{selection} measures at layer {layer} of a model with {len(windows)}")
    return layer


def deviation(
    stored: tuple[torch.Tensor, torch.Tensor],
    computed: tuple[torch.Tensor, torch.Tensor],
    index: torch.Tensor,
    rank: Rank,
) -> np.ndarray:
    """How far stored K and V are from computed ones, fp64 `[n]`: squared distance over mean squared length.

    stored: K and V `[1, kv_heads, slots, head_dim]`; computed: those of n tokens, at slots `index`.
    """
    parts = {Rank.DEVIATION_K: [0], Rank.DEVIATION_V: [1]}.get(rank, [0, 1])
    score = torch.zeros(len(index), dtype=torch.float32, device=index.device)
    for part in parts:
        new = computed[part][0].float()
        old = stored[part][0].index_select(1, index).float()
        score += (new - old).pow(2).sum(dim=(0, 2)) / new.pow(2).sum(dim=(0, 2)).mean()
    return score.double().cpu().numpy()


def pieces_needed(config: Any, total: int, pieces: Sequence[Piece], selection: Selection) -> np.ndarray:
    """Which pieces a prefill reads in which layer: bool `[layers, pieces]`. The rest need not be pulled.

    config: the model's text config. What a ranked selection will choose is not known yet: whatever it
    might need counts. Raises ConfigError for layers that sparse prefill does not know.
    """
    windows = layer_windows(config)
    inexact, fixed = inexact_positions(total, pieces), selection.fixed_positions(total, pieces)
    at = -1
    computed, queries = fixed, inexact
    if not selection.needs_kv:
        computed = queries = selection.positions(total, pieces)
    elif selection.rank.deviates:
        at = deviation_layer(selection, windows)
    else:
        computed = Selection().positions(total, pieces)
    nothing = np.zeros(0, dtype=np.int64)
    needed = np.zeros((len(windows), len(pieces)), dtype=bool)
    for index, window in enumerate(windows):
        of_layer = computed if index > at else nothing if index == at else inexact
        slots = slots_needed(total, pieces, of_layer, queries, window)
        needed[index] = [slots[piece.start : piece.stop].any() for piece in pieces]
    return needed


@torch.no_grad()
def full_prefill(
    model: Any, tokens: torch.Tensor | np.ndarray | Sequence[int]
) -> tuple[torch.Tensor, DynamicCache]:
    """The baseline: every token computed, causally. Returns `(logits of the last token [vocab], cache)`.

    The cache is made without the model's config, because one made with it drops tokens that
    sliding layers no longer see, and KV could then not be captured.
    """
    ids = _as_ids(model, tokens)
    cache = DynamicCache()
    logits = run_model(model, ids, torch.arange(ids.numel(), device=ids.device), cache, logits_to_keep=1)
    return logits[-1], cache


@torch.no_grad()
def decode(model: Any, cache: Cache, tokens: torch.Tensor | np.ndarray | Sequence[int]) -> torch.Tensor:
    """Append `tokens` (`[n]`) behind what `cache` holds, and change it. Returns logits `[n, vocab]`.

    Several at once are masked causally among themselves, as n calls with one token would be.
    """
    ids = _as_ids(model, tokens)
    past = cache.get_seq_length()
    return run_model(model, ids, torch.arange(past, past + ids.numel(), device=ids.device), cache)


@torch.no_grad()
def extract_kv(cache: Cache, start: int, stop: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """Copy the KV of tokens `start .. stop-1` into the canonical `[layers, 2, tokens, kv_heads, head_dim]`.

    `out` (of that shape, any float dtype, any device) is written in place: give a view of the slab
    and the bytes move once. Without it a new contiguous tensor of the cache's dtype is returned.
    """
    if not 0 <= start < stop <= cache.get_seq_length():
        raise LayoutError(f"tokens {start}..{stop} are not in a cache of {cache.get_seq_length()}")
    first = cache.layers[0].keys
    shape = (len(cache.layers), 2, stop - start, first.shape[1], first.shape[3])
    if out is None:
        out = torch.empty(shape, dtype=first.dtype, device=first.device)
    if tuple(out.shape) != shape:
        raise LayoutError(f"out is {tuple(out.shape)}, these tokens' KV is {shape}")
    for index, layer in enumerate(cache.layers):
        holes = getattr(layer, "holes", None)
        dropped = holes is not None and holes[start:stop].any()
        if dropped or layer.keys.shape[2] < stop or getattr(layer, "is_sliding", False):
            raise LayoutError(f"layer {index} of this cache has dropped tokens; capture KV with full_prefill")
        for axis, states in enumerate((layer.keys, layer.values)):
            out[index, axis].copy_(states[0, :, start:stop].transpose(0, 1))
    return out


def _as_ids(model: Any, tokens: torch.Tensor | np.ndarray | Sequence[int]) -> torch.Tensor:
    """Token ids as `[n]` int64 where the model's embeddings are; n of at least 1."""
    if isinstance(tokens, np.ndarray):
        tokens = tokens.astype(np.int64)  # uint32, the form of a token run, is poorly supported in torch
    ids = torch.as_tensor(tokens, dtype=torch.int64, device=model.get_input_embeddings().weight.device)
    if ids.ndim != 1 or ids.numel() == 0:
        raise LayoutError(f"tokens must be one row of at least one id, not {tuple(ids.shape)}")
    return ids
