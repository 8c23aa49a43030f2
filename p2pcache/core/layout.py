"""KV geometry: the canonical body `[layers, 2, tokens, kv_heads, head_dim]` and its byte counts.

Axis 1 is K then V. The form is what an engine's blocks hold once unpacked, so engines with other
block sizes or packed layouts can use each other's bodies. A layer's bytes are contiguous, which is
what lets a layer be checked and used while the next one is still on its way.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from p2pcache.types import ConfigError

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "uint8": 1}
LAYERS_MAX = 1024


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Geometry of one model's KV on one rank. Equal layouts mean interchangeable bytes."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str

    def __post_init__(self) -> None:
        for name, limit in (("layers", LAYERS_MAX), ("kv_heads", 4096), ("head_dim", 65536)):
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value <= limit:
                raise ConfigError(f"KVLayout.{name} must be an integer from 1 to {limit}, not {value!r}")
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"KVLayout.dtype {self.dtype!r} is none of {', '.join(DTYPE_BYTES)}")

    @property
    def token_layer_bytes(self) -> int:
        """Bytes of K and V of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    def layer_bytes(self, tokens: int) -> int:
        return tokens * self.token_layer_bytes

    def body_bytes(self, tokens: int) -> int:
        return self.layers * self.layer_bytes(tokens)

    def shape(self, tokens: int) -> tuple[int, int, int, int, int]:
        return (self.layers, 2, tokens, self.kv_heads, self.head_dim)

    def differences(self, other: KVLayout) -> list[str]:
        """What sets two layouts apart, in words: `held in bfloat16, asked in float16`."""
        return [
            f"{f.name}: held {getattr(other, f.name)}, asked {getattr(self, f.name)}"
            for f in fields(self)
            if getattr(self, f.name) != getattr(other, f.name)
        ]
