"""The one place that calls a transformers model: ids, positions, mask and cache, spelled out.

Positions are always passed: a model left to guess them counts cached tokens, which is wrong for
every token computed out of order.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from p2pcache.types import ConfigError

TOKEN_AXIS = {"position_embeddings": -2, "position_ids": -1, "cache_position": -1, "attention_mask": -2}
"""What models hand to each layer beside hidden states, and on which axis it has one entry a token."""


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
    windows = layer_windows(config)

    def shaped(mask: torch.Tensor) -> torch.Tensor:
        if implementation == "eager":
            mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
        return mask[None, None]

    if set(windows) == {None}:
        return shaped(causal)
    sliding = causal & (slots[None, :] > positions[:, None] - max(w for w in windows if w))
    if None in windows:
        return {"full_attention": shaped(causal), "sliding_attention": shaped(sliding)}
    return shaped(sliding)


def layer_windows(config: Any) -> list[int | None]:
    """How many last tokens a query of each layer sees, itself included; None for all. Raises ConfigError."""
    layers = config.num_hidden_layers
    window = getattr(config, "sliding_window", None) or None
    kinds = getattr(config, "layer_types", None) or (["sliding_attention"] * layers)
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ConfigError(f"sparse prefill knows full and sliding attention, not {sorted(unknown)}")
    return [window if kind == "sliding_attention" else None for kind in kinds[:layers]]


@contextmanager
def using_attention(config: Any, name: str | None) -> Iterator[None]:
    """Have a model's config name another attention meanwhile; None leaves it as it is.

    transformers reads the name at every forward. Nothing else may use the model, or another one that
    shares its config, meanwhile.
    """
    own = config._attn_implementation
    config._attn_implementation = name or own
    try:
        yield
    finally:
        config._attn_implementation = own


def decoder_layers(model: Any) -> torch.nn.ModuleList:
    """The list of a model's decoder layers. Raises ConfigError where there is not exactly one such list."""
    count = model.config.get_text_config().num_hidden_layers
    found = [
        module
        for module in model.get_decoder().children()
        if isinstance(module, torch.nn.ModuleList) and len(module) == count
    ]
    if len(found) != 1:
        raise ConfigError(f"{type(model).__name__} does not keep its decoder layers in one list")
    return found[0]


@contextmanager
def narrowing(model: Any, at: int, choose: Callable[[Callable[[], Any]], torch.Tensor]) -> Iterator[None]:
    """Have forwards meanwhile go on from layer `at` with fewer tokens, on an unchanged model.

    Before layer `at` runs, `choose(run)` says which of the tokens stay, as sorted indices int64 `[kept]`
    into those of the forward; `run()` runs the layer on all of them and may be cut short by an exception
    of the caller's own. From then on hidden states, positions and masks are those of the chosen tokens.
    """
    rows: list[torch.Tensor] = []

    def before(index: int) -> Callable[..., Any]:
        def hook(layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if index == at:
                rows[:] = [choose(lambda: layer.forward(*args, **kwargs))]
                # Later layers get what this one returns, which is narrow already.
                if args:
                    args = (args[0].index_select(1, rows[0]), *args[1:])
                else:
                    kwargs = kwargs | {"hidden_states": kwargs["hidden_states"].index_select(1, rows[0])}
            return args, kwargs | {
                name: _narrow(kwargs[name], rows[0], axis)
                for name, axis in TOKEN_AXIS.items()
                if kwargs.get(name) is not None
            }

        return hook

    handles = [
        layer.register_forward_pre_hook(before(index), with_kwargs=True)
        for index, layer in enumerate(decoder_layers(model))
        if index >= at
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _narrow(value: Any, rows: torch.Tensor, axis: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_narrow(part, rows, axis) for part in value)
    return value.index_select(value.dim() + axis, rows)
