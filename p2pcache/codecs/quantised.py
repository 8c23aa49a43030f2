"""`int8` and `int4`: 8 or 4 bits a value, K by channel and V by token.

K's channels differ in size by orders of magnitude and keep it over tokens, V's do not, so K shares a grid
along tokens and V along a head (Liu et al., *KIVI*, 2024). The first 4 tokens stay as they are: attention
leans on them, and they are unlike the others.

A layer of T tokens, H heads, D dimensions:

    the first min(4, T) tokens of K, then of V, as they are
    K: the other tokens in groups of 64, the last one up to 127. A group is `low` of every channel [H * D],
       `step` of every channel, then its tokens, a row of H * D quanta each
    V: `low` of every row [T, H], `step` of every row, then the rows of D quanta

`low` and `step` are bfloat16. A row of n quanta takes a byte each in int8; in int4 value i and value h + i
share byte i, in its low and high nibble, where h = ceil(n / 2). A value is `low + q * step` in single
precision, rounded to the layout's dtype (to nearest, ties to even).

An encoder takes for `low` the largest bfloat16 not above the least value, for `step` the smallest not below
`(greatest - low) / levels`, with levels 255 or 15, and for q the integer next to `(x - low) / step`, ties to
even. Values that are not finite, or too far apart for a finite step, cannot be coded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from p2pcache import _native
from p2pcache.core.layout import DTYPE_BYTES, KVLayout

EXACT_TOKENS = 4
GROUP_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Quantised:
    """The codec. `level`: which of `_native.simd_levels()` to use; "" is the best one."""

    name: str
    bits: int
    level: str = ""
    dtypes: frozenset[str] = frozenset({"bfloat16", "float16", "float32"})

    def layer_bytes(self, layout: KVLayout, tokens: int) -> int:
        return _native.quantised_layer_bytes(
            tokens, layout.kv_heads, layout.head_dim, layout.dtype, self.bits
        )

    def room(self, layout: KVLayout, tokens: int) -> int:
        return layout.layers * self.layer_bytes(layout, tokens)

    def encode_layers(
        self, body: np.ndarray, layout: KVLayout, tokens: int, out: np.ndarray
    ) -> tuple[list[int], float] | None:
        geometry = layout.layers, tokens, layout.kv_heads, layout.head_dim, layout.dtype, self.bits
        error = _native.quantise(body, *geometry, out, self.level)
        if error < 0:
            return None
        layer_bytes = len(out) // layout.layers
        return [layer_bytes * (i + 1) for i in range(layout.layers)], error

    def decode_layers(
        self, encoded: np.ndarray, ends: list[int], layout: KVLayout, tokens: int, out: np.ndarray
    ) -> int | None:
        layer_bytes = self.layer_bytes(layout, tokens)
        for layer, end in enumerate(ends):
            if end != layer_bytes * (layer + 1):
                return layer
        geometry = len(ends), tokens, layout.kv_heads, layout.head_dim, layout.dtype, self.bits
        bad = _native.dequantise(encoded, *geometry, out, self.level)
        return None if bad < 0 else bad


# The native functions' twins, on one layer `[2, tokens, kv_heads, head_dim]`.


def encode_layer_py(raw: np.ndarray, dtype: str, bits: int) -> tuple[bytes, float] | None:
    """`(bytes, error)` of a layer given as its bits (uint16 or float32); None where it cannot be coded."""
    exact = min(EXACT_TOKENS, raw.shape[1])
    values = _load(raw, dtype)
    if not np.isfinite(values).all():
        return None
    k, v = values[:, exact:]
    coded = _encode_k(k.reshape(len(k), k.shape[1] * k.shape[2]), bits), _encode_v(v, bits)
    if None in coded:
        return None
    encoded = raw[:, :exact].tobytes() + b"".join(coded)
    decoded = decode_layer_py(encoded, dtype, bits, raw.shape)
    with np.errstate(over="ignore"):
        error = worst_channel(values, _load(decoded, dtype))
    return (encoded, error) if np.isfinite(error) else None


def decode_layer_py(
    encoded: bytes, dtype: str, bits: int, shape: tuple[int, int, int, int]
) -> np.ndarray | None:
    """A layer's bits, or None where a grid is not finite. `encoded` has the right length."""
    _, tokens, heads, dim = shape
    exact = min(EXACT_TOKENS, tokens)
    out = np.empty(shape, np.float32 if dtype == "float32" else np.uint16)
    head_bytes = 2 * exact * heads * dim * DTYPE_BYTES[dtype]
    out[:, :exact] = np.frombuffer(encoded[:head_bytes], out.dtype).reshape(2, exact, heads, dim)
    data, at = np.frombuffer(encoded, np.uint8), head_bytes
    for start, stop in _groups(tokens - exact):
        rows, at = _decode_rows(data, at, heads * dim, stop - start, heads * dim, bits, by_row=False)
        if rows is None:
            return None
        out[0, exact + start : exact + stop] = _store(rows, dtype).reshape(-1, heads, dim)
    count = (tokens - exact) * heads
    rows, at = _decode_rows(data, at, count, count, dim, bits, by_row=True)
    if rows is None:
        return None
    out[1, exact:] = _store(rows, dtype).reshape(-1, heads, dim)
    return out


def worst_channel(values: np.ndarray, decoded: np.ndarray) -> float:
    """The greatest relative error of a channel of a layer `[2, tokens, kv_heads, head_dim]`.

    It is the root of the mean square, over tokens, of what decoding changes, over that of the channel itself.
    A channel that is all but silent beside its head counts as a sixteenth of the head's root mean square:
    what is lost there is little of what the head says.
    """
    error2 = ((decoded.astype(np.float64) - values) ** 2).sum(axis=1)
    power2 = (values.astype(np.float64) ** 2).sum(axis=1)
    power2 = np.maximum(power2, power2.mean(axis=-1, keepdims=True) / 256)
    return float(np.sqrt(error2[error2 > 0] / power2[error2 > 0]).max(initial=0.0))


def _groups(tokens: int) -> Iterator[tuple[int, int]]:
    count = max(1, tokens // GROUP_TOKENS) if tokens else 0
    for group in range(count):
        yield group * GROUP_TOKENS, tokens if group == count - 1 else (group + 1) * GROUP_TOKENS


def _encode_k(k: np.ndarray, bits: int) -> bytes | None:
    parts = []
    for start, stop in _groups(len(k)):
        rows = k[start:stop]
        grid = _grid(rows.min(axis=0), rows.max(axis=0), bits)
        if grid is None:
            return None
        low, step = grid
        parts += [_top(low), _top(step), _pack(_quanta(rows, low, step, bits), bits)]
    return b"".join(parts)


def _encode_v(v: np.ndarray, bits: int) -> bytes | None:
    rows = v.reshape(-1, v.shape[-1])
    grid = _grid(rows.min(axis=1), rows.max(axis=1), bits)
    if grid is None:
        return None
    low, step = grid
    return _top(low) + _top(step) + _pack(_quanta(rows, low[:, None], step[:, None], bits), bits)


def _grid(least: np.ndarray, greatest: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray] | None:
    with np.errstate(over="ignore", invalid="ignore"):
        u = (least + np.float32(0)).view(np.uint32)
        low = ((u >> 16) + ((u >> 31 == 1) & (u & 0xFFFF != 0)) << 16).astype(np.uint32).view(np.float32)
        u = ((greatest - low) / np.float32(2**bits - 1) + np.float32(0)).view(np.uint32)
        step = ((u >> 16) + (u & 0xFFFF != 0) << 16).astype(np.uint32).view(np.float32)
    return (low, step) if np.isfinite(low).all() and np.isfinite(step).all() else None


def _quanta(rows: np.ndarray, low: np.ndarray, step: np.ndarray, bits: int) -> np.ndarray:
    levels = np.float32(2**bits - 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        q = (rows - low) / step
    return np.rint(np.where(q < levels, q, levels)).astype(np.uint8)


def _pack(q: np.ndarray, bits: int) -> bytes:
    if bits == 8:
        return q.tobytes()
    half = -(-q.shape[1] // 2)
    high = np.pad(q[:, half:], ((0, 0), (0, q.shape[1] % 2)))
    return (q[:, :half] | high << 4).tobytes()


def _decode_rows(
    data: np.ndarray, at: int, grids: int, rows: int, width: int, bits: int, *, by_row: bool
) -> tuple[np.ndarray | None, int]:
    """`(rows of float32, where they end)`; a grid a row, or a column."""
    low, step = (
        (data[start : start + 2 * grids].copy().view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        for start in (at, at + 2 * grids)
    )
    at += 4 * grids
    half = width if bits == 8 else -(-width // 2)
    packed = data[at : at + rows * half].reshape(rows, half)
    q = packed if bits == 8 else np.concatenate([packed & 15, packed >> 4], axis=1)[:, :width]
    if not (np.isfinite(low).all() and np.isfinite(step).all()):
        return None, at
    if by_row:
        low, step = low[:, None], step[:, None]
    with np.errstate(over="ignore"):
        return low + q.astype(np.float32) * step, at + rows * half


def _top(numbers: np.ndarray) -> bytes:
    """bfloat16 numbers, held as float32."""
    return (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def _load(bits: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "float32":
        return bits
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _store(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "float32":
        return values
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    u = values.view(np.uint32)
    return ((u + 0x7FFF + (u >> 16 & 1)) >> 16).astype(np.uint16)
