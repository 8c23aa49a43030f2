"""Moving stored K to another position: re-rotation by the position difference.

RoPE (Su et al., *RoFormer*, 2021) turns pair j of a key by `position * inv_freq[j]`. Rotations
compose, so a key stored for position p serves at p' after a turn by `(p' - p) * inv_freq[j]`. V has
no position. Every scaling that only changes `inv_freq` (linear, NTK-by-parts, YaRN, Llama-3) is
covered by the vector alone; YaRN's attention factor is a length, which a rotation keeps, so it is
never applied twice. Scalings that change `inv_freq` with the prompt's length are refused.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import blake3
import torch

from p2pcache import _native
from p2pcache.blend.forward import run_model
from p2pcache.types import ConfigError, LayoutError

FINGERPRINT_CONTEXT = "p2pcache 2025 rope fingerprint v1"
LENGTH_DEPENDENT_TYPES = ("dynamic", "longrope")
PROBE_SHIFT = 997  # tokens; a prime, so that no pair of usual frequencies comes round to where it was
PROBE_TOKENS = 4
NATIVE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def rotate_keys(
    k: torch.Tensor,
    delta: int,
    inv_freq: Sequence[float] | torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    interleaved: bool = False,
) -> torch.Tensor:
    """Turn keys from the position they were made for to `delta` tokens further on.

    Args:
        k: `[tokens, kv_heads, head_dim]` keys after RoPE, any float dtype; read only.
        delta: new position minus old, in tokens; may be negative. 0 copies without arithmetic.
        inv_freq: `[rotary_dim / 2]` radians a token. Dimensions from `rotary_dim` on have no position.
        out: where to write, same shape; any strides and float dtype; may be `k` itself. A new
            tensor of k's dtype otherwise, so the result never aliases `k` unasked.
        interleaved: pairs are `(2j, 2j+1)`, as in GPT-J, instead of `(j, j + rotary_dim/2)`.

    Angles are fp64, since positions reach 1e6; the turn is fp32 and rounds to out's dtype once. On the CPU,
    and where out has k's dtype, it is done in native code, to the same bits and several times as fast.
    """
    if out is None:
        out = torch.empty_like(k)
    if out.shape != k.shape:
        raise LayoutError(f"rotate_keys: out is {tuple(out.shape)}, keys are {tuple(k.shape)}")
    if delta == 0:
        return out.copy_(k)
    angle = delta * torch.as_tensor(inv_freq, dtype=torch.float64, device=k.device)
    half = angle.numel()
    if 2 * half > k.shape[-1]:
        raise LayoutError(f"rotate_keys: {half} frequencies need a head_dim of {2 * half}, not {k.shape[-1]}")
    cos, sin = angle.cos().float(), angle.sin().float()
    if _native_can(k, out):
        name = str(k.dtype).removeprefix("torch.")
        _native.rotate_keys(k.detach(), cos.numpy(), sin.numpy(), name, interleaved, out.detach())
    else:
        rotate_keys_torch(k, cos, sin, out, interleaved=interleaved)
    return out


def rotate_keys_torch(
    k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor, *, interleaved: bool
) -> None:
    """The turn itself, by torch: on any device, between any dtypes. The native one's twin."""
    half = len(cos)
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    x, y = k[..., first].float(), k[..., second].float()
    # Both are computed before either is written, because out may be k.
    turned = x * cos - y * sin, y * cos + x * sin
    out[..., first], out[..., second] = turned
    if 2 * half < k.shape[-1] and out.data_ptr() != k.data_ptr():
        out[..., 2 * half :] = k[..., 2 * half :]


def _native_can(k: torch.Tensor, out: torch.Tensor) -> bool:
    return (
        k.device.type == out.device.type == "cpu"
        and k.dtype == out.dtype
        and k.dtype in NATIVE_DTYPES
        and k.dim() == 3
        and k.stride(-1) == out.stride(-1) == 1
    )


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """How one model turns its keys: all that re-rotation needs, and part of a namespace's identity."""

    inv_freq: tuple[float, ...]  # radians a token, exactly the model's own (fp32) values
    interleaved: bool = False
    attention_scaling: float = 1.0  # already in the stored keys; told apart, never applied

    @property
    def rotary_dim(self) -> int:
        """How many leading dimensions of a head are rotated; the rest pass."""
        return 2 * len(self.inv_freq)

    def rotate(self, k: torch.Tensor, delta: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """`rotate_keys` with this model's frequencies and pairing."""
        return rotate_keys(k, delta, self.inv_freq, out, interleaved=self.interleaved)

    def layer(self, index: int) -> RopeSpec:
        """How layer `index` turns its keys: all alike."""
        return self

    def fingerprint(self) -> bytes:
        """32 bytes: BLAKE3 over the float64 bytes of every frequency, and the flags."""
        head = struct.pack("<?dI", self.interleaved, self.attention_scaling, len(self.inv_freq))
        body = struct.pack(f"<{len(self.inv_freq)}d", *self.inv_freq)
        return blake3.blake3(head + body, derive_key_context=FINGERPRINT_CONTEXT).digest()

    @classmethod
    def from_model(cls, model: Any) -> RopeSpec | LayerRopes:
        """Read a transformers model's rotary embeddings, and prove them on the model.

        Configs do not say all that matters (which pairs turn, which layers have no rotation, whether K
        is latent), so the model is asked: a few tokens run at two positions, and in every layer the
        keys of one run, turned, must be the keys of the other. Of several embeddings a layer has the one
        that says so best: with another's theta its keys are far off. Two forwards of 4 tokens.

        Returns one spec where all layers turn alike. Raises `ConfigError`, with the reason, for a model
        whose keys cannot be moved.
        """
        found = _read_rotary(model)
        near, far = _probe_keys(model, 0), _probe_keys(model, PROBE_SHIFT)
        candidates = [cls(v, pairs, scaling) for v, scaling in found for pairs in (False, True)]
        candidates.append(cls(()))  # a layer without positions, between others: its keys stay as they are
        tolerance = 0.01 if near[0].dtype == torch.float32 else 0.1
        specs = []
        for index, (a, b) in enumerate(zip(near, far, strict=True)):
            best = min(candidates, key=lambda spec: spec._error(a, b))
            if not best._error(a, b) <= tolerance:
                raise ConfigError(
                    f"{type(model).__name__}: layer {index}'s keys at a later position are not a rotation of"
                    " those at an earlier one, so its KV can be reused only at the same position"
                )
            specs.append(best)
        return specs[0] if len(set(specs)) == 1 else LayerRopes(tuple(specs))

    def _error(self, near: torch.Tensor, far: torch.Tensor) -> float:
        """How far turned keys are from those they should be, relative to their length; inf where they differ
        in shape."""
        if self.rotary_dim > near.shape[-1]:
            return float("inf")
        error = (self.rotate(near, PROBE_SHIFT).float() - far.float()).norm()
        return float(error / far.float().norm())


@dataclass(frozen=True, slots=True)
class LayerRopes:
    """How a model turns its keys where its layers differ: one spec a layer."""

    specs: tuple[RopeSpec, ...]

    def layer(self, index: int) -> RopeSpec:
        """How layer `index` turns its keys."""
        return self.specs[index]

    def fingerprint(self) -> bytes:
        """32 bytes: BLAKE3 over the layers' fingerprints, in order. Never that of a single spec."""
        body = b"".join(spec.fingerprint() for spec in self.specs)
        return blake3.blake3(b"layers" + body, derive_key_context=FINGERPRINT_CONTEXT).digest()


def length_dependent(model: Any) -> str:
    """Why a model's keys depend on how long the prompt is, or "": such KV fits no other prompt at all."""
    for module in model.modules():
        types = getattr(module, "rope_type", "default")
        for rope_type in types.values() if isinstance(types, dict) else [types]:
            if any(word in str(rope_type) for word in LENGTH_DEPENDENT_TYPES):
                return f"rope type {rope_type!r} changes with the prompt's length"
    return ""


def _read_rotary(model: Any) -> list[tuple[tuple[float, ...], float]]:
    """`(inv_freq, attention_scaling)` of every rotary embedding of a model, each once.

    A module keeps one as `inv_freq`, or one a layer type as `TYPE_inv_freq`.
    """
    name = type(model).__name__
    why = length_dependent(model)
    if why:
        raise ConfigError(f"{name}: its {why}, so keys cannot be moved")
    found = {}
    for module in model.modules():
        for key, buffer in module.named_buffers(recurse=False):
            if key.endswith("inv_freq") and not key.endswith("original_inv_freq"):
                prefix = key.removesuffix("inv_freq")
                scaling = float(getattr(module, f"{prefix}attention_scaling", 1.0))
                found[tuple(buffer.detach().double().flatten().tolist()), scaling] = None
    if not found:
        raise ConfigError(
            f"{name} has no rotary embedding (learned positions or ALiBi?), so keys cannot be moved"
        )
    return list(found)


@torch.no_grad()
def _probe_keys(model: Any, position: int) -> list[torch.Tensor]:
    """Every layer's keys, `[tokens, kv_heads, head_dim]`, of a few tokens computed from `position` on."""
    from transformers import DynamicCache  # here, so that turning keys needs torch alone

    name = type(model).__name__
    cache = DynamicCache()
    device = model.get_input_embeddings().weight.device
    tokens = torch.arange(1, 1 + PROBE_TOKENS, device=device)
    positions = torch.arange(position, position + PROBE_TOKENS, device=device)
    try:
        run_model(model, tokens, positions, cache)
        keys = [layer.keys[0].transpose(0, 1) for layer in cache.layers]
    except Exception as error:  # whatever a model's own code makes of a cache of keys and values alone
        raise ConfigError(f"{name}: its cache holds no plain keys in every layer: {error}") from error
    layers = model.config.get_text_config().num_hidden_layers
    if len(keys) != layers:
        raise ConfigError(f"{name}: {len(keys)} of its {layers} layers have keys in the cache")
    return keys
