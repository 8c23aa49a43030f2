"""The one place that calls a transformers model: ids, positions, mask and cache, spelled out.

Positions are always passed: a model left to guess them counts cached tokens, which is wrong for
every token computed out of order.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from p2pcache.types import ConfigError


def run_model(
    model: Any,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    cache: Any,
    mask: torch.Tensor | dict[str, torch.Tensor] | None = None,
    logits_to_keep: int = 0,
) -> torch.Tensor:
    """One forward of `tokens` at `positions` (both `[n]`, int64). Returns logits `[kept, vocab]`.

    `cache` is changed. Without a `mask` the model attends causally behind what the cache holds.
    `logits_to_keep` counts from the end; 0 keeps all n.
    """
    # transformers renamed this argument in 5.x; older models know only the old name.
    keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    outputs = model(
        input_ids=tokens[None],
        position_ids=positions[None],
        attention_mask=mask,
        use_cache=True,
        logits_to_keep=logits_to_keep,
        **{keyword: cache},
    )
    return outputs.logits[0]


def attention_mask(config: Any, positions: torch.Tensor, length: int, dtype: torch.dtype) -> Any:
    """Who may attend to whom when tokens at `positions` `[n]` run against slots `0 .. length-1`.

    A slot's index is its position, so causality and sliding windows are comparisons of positions.
    Returns `[1, 1, n, length]`, bool with true = attend (what SDPA takes; a float 0/1 mask would be
    *added* to the scores and silently mean nothing), or additive 0/-inf for eager attention. A dict
    of one a layer type where a model mixes full and sliding layers.
    """
    implementation = getattr(config, "_attn_implementation", None)
    if implementation not in ("sdpa", "eager"):
        raise ConfigError(f"sparse prefill needs sdpa or eager attention, not {implementation!r}")
    slots = torch.arange(length, device=positions.device)
    causal = slots[None, :] <= positions[:, None]
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())

    def shaped(mask: torch.Tensor) -> torch.Tensor:
        if implementation == "eager":
            mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
        return mask[None, None]

    if not window or kinds == {"full_attention"}:
        return shaped(causal)
    sliding = causal & (slots[None, :] > positions[:, None] - window)
    if kinds == {"full_attention", "sliding_attention"}:
        return {"full_attention": shaped(causal), "sliding_attention": shaped(sliding)}
    if kinds <= {"sliding_attention"}:
        return shaped(sliding)
    raise ConfigError(f"sparse prefill knows full and sliding attention, not {sorted(kinds)}")
