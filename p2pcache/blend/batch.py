"""One decode step for several sequences, each with a cache of its own.

The batch runs packed: one row of B tokens, each at its own position. Everything that works token by
token (projections, norms, MLP, the vocabulary) sees `[1, B, hidden]` and reads the weights once for
all; attention alone is done sequence by sequence, over views of each one's own K and V. So nothing is
padded, and no cache is ever copied together or sorted by length (the packed form is the one of
Dao, *FlashAttention*, 2022, for sequences of different lengths).

A `transformers` model asks its config which attention to use at every forward. For the length of one
step the config names ours, to which K and V come as a list with one entry a sequence; under a name
without a mask function transformers builds no mask, and none is needed: a sequence's one query sees
all of its own tokens, or the last ones of them in a sliding layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from p2pcache.blend.attend import attend_masked, without_effect
from p2pcache.blend.forward import layer_windows, run_model, using_attention
from p2pcache.blend.sparse import decode, sparse_prefill
from p2pcache.types import ConfigError, LayoutError

ATTENTION_NAME = "p2pcache_ragged"
PROBE_WINDOW_MAX = 512  # tokens; a longer sliding window is not reached by the probe


class BatchDecoder:
    """Decode steps for one model: batched where its attention allows, else one by one.

    Whether it does is tried out at construction, on a batch of three short sequences: configs do not
    say whether a model keeps to transformers' attention interface.
    """

    def __init__(self, model: Any):
        self.model = model
        self.why_one_by_one = _why_not_ragged(model)

    @property
    def batched(self) -> bool:
        """Whether a step is one forward for all sequences; `why_one_by_one` says why not."""
        return not self.why_one_by_one

    def decode(self, caches: Sequence[Cache], tokens: Sequence[int]) -> torch.Tensor:
        """Append `tokens[b]` to `caches[b]`. Returns logits `[B, vocab]`.

        Where it raises, no cache has changed its length.
        """
        # A batch of one gains nothing, and keeps the model's own attention.
        if self.batched and len(caches) > 1:
            return decode_batch(self.model, caches, tokens)
        _check_batch(caches, tokens)
        with _all_or_nothing(caches):
            rows = [
                decode(self.model, cache, [token])[-1] for cache, token in zip(caches, tokens, strict=True)
            ]
        return torch.stack(rows)


@torch.no_grad()
def decode_batch(model: Any, caches: Sequence[Cache], tokens: Sequence[int]) -> torch.Tensor:
    """Append `tokens[b]` to `caches[b]`, all in one forward. Returns logits `[B, vocab]`.

    Args:
        caches: of B different sequences, each of one row and any length of at least 1, that hold
            every token (`ScatterCache`, or a `DynamicCache()` made without the model's config).
        tokens: `[B]` ids.

    Equal to B calls of `decode`, up to rounding. While it runs, the model's config names another
    attention: nothing else may use the model, or another one that shares its config, meanwhile.
    Raises ConfigError for a model whose attention cannot be done so (`BatchDecoder` finds out
    beforehand); where it raises, no cache has changed its length.
    """
    _check_batch(caches, tokens)
    config = model.config.get_text_config()
    batch = _RaggedCache(caches, layer_windows(config))
    device = model.get_input_embeddings().weight.device
    ids = torch.as_tensor(tokens, dtype=torch.int64, device=device)
    positions = torch.tensor([cache.get_seq_length() for cache in caches], device=device)
    with _all_or_nothing(caches), using_attention(config, ATTENTION_NAME):
        return run_model(model, ids, positions, batch)


class _Rows(list[torch.Tensor]):
    """K or V of one layer: `[1, kv_heads, length, head_dim]` for each sequence."""


class _RaggedLayer(CacheLayerMixin):
    """One layer of all sequences: token b goes to sequence b. Holds no memory."""

    is_sliding = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, layers: Sequence[CacheLayerMixin], window: int | None) -> None:
        super().__init__()
        self._layers = layers
        self._window = window

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[_Rows, _Rows]:
        """Take in K/V `[1, kv_heads, B, head_dim]`; return all K and V that each sequence's query sees."""
        keys, values = _Rows(), _Rows()
        new = zip(key_states.split(1, dim=2), value_states.split(1, dim=2), strict=True)
        for layer, (key, value) in zip(self._layers, new, strict=True):
            key, value = layer.update(key, value)
            if self._window is not None and key.shape[2] > self._window:
                key, value = key[:, :, -self._window :], value[:, :, -self._window :]
            keys.append(key)
            values.append(value)
        return keys, values

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass  # every sequence has its own

    def get_seq_length(self) -> int:
        return max(layer.get_seq_length() for layer in self._layers)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


class _RaggedCache(Cache):
    """The caches of a batch, as one for the length of a step."""

    def __init__(self, caches: Sequence[Cache], windows: Sequence[int | None]) -> None:
        layers = zip(zip(*(cache.layers for cache in caches), strict=True), windows, strict=True)
        super().__init__(layers=[_RaggedLayer(of_all, window) for of_all, window in layers])


def _attend(
    module: Any,
    query: torch.Tensor,
    key: _Rows,
    value: _Rows,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of B queries `[1, heads, B, head_dim]`, each over its own K and V, to `[1, B, heads, d]`.

    Query heads of one KV head stand together as its queries, so that K and V are read once a KV head.
    """
    without_effect(others)
    if not isinstance(key, _Rows) or attention_mask is not None:
        raise ConfigError("attention with a mask, or over other than the batch is not batched")
    heads, rows = query.shape[1], query.shape[2]
    grouped = query[0].unflatten(0, (key[0].shape[1], -1)).unbind(2)
    out = query.new_empty(1, rows, heads, value[0].shape[3])
    for row, (q, k, v) in enumerate(zip(grouped, key, value, strict=True)):
        seen = attend_masked(q[None], k, v, None, scaling, softcap)
        out[0, row] = seen.reshape(heads, -1)
    return out, None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attend)


@contextmanager
def _all_or_nothing(caches: Sequence[Cache]) -> Iterator[None]:
    """A step that fails half-way leaves every layer of every sequence as long as it was."""
    lengths = [cache.get_seq_length() for cache in caches]
    try:
        yield
    except BaseException:
        for cache, length in zip(caches, lengths, strict=True):
            for layer in cache.layers:
                if layer.get_seq_length() > length:
                    layer.crop(length - layer.get_seq_length())
        raise


def _check_batch(caches: Sequence[Cache], tokens: Sequence[int]) -> None:
    if not caches or len(caches) != len(tokens):
        raise LayoutError(f"a step takes one token for each sequence, not {len(tokens)} for {len(caches)}")
    if len({id(cache) for cache in caches}) != len(caches):
        raise LayoutError("a step takes each sequence once")


@torch.no_grad()
def _why_not_ragged(model: Any) -> str:
    """Why a model's batched step is not the same as single ones, or "" where it is."""
    try:
        windows = layer_windows(model.config.get_text_config())
        reach = max((w for w in windows if w and w <= PROBE_WINDOW_MAX), default=0)
        lengths = (reach + 9, 1, 4)
        vocabulary = model.get_input_embeddings().weight.shape[0]
        prompts = [[(7 * i + n) % vocabulary for i in range(n)] for n in lengths]
        tokens = [n % vocabulary for n in lengths]
        together = [sparse_prefill(model, p, [], None, None).cache for p in prompts]
        alone = [sparse_prefill(model, p, [], None, None).cache for p in prompts]
        got = decode_batch(model, together, tokens).float()
        want = torch.cat([decode(model, c, [t]) for c, t in zip(alone, tokens, strict=True)]).float()
    except Exception as error:  # whatever a model's own code makes of lists of tensors
        return f"{type(model).__name__} cannot decode a batch: {type(error).__name__}: {error}"
    tolerance = 1e-3 if model.dtype == torch.float32 else 0.1
    if not (got - want).norm() <= tolerance * want.norm():
        return f"{type(model).__name__}: a batched step gives other logits than single ones"
    return ""
