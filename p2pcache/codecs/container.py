"""The form of an encoded body: a head that says what it is and where each layer ends, then the layers.

All integers are little endian.

    offset  bytes
    0       4      magic "p2kv"
    4       1      format version, 1
    5       1      codec: 1 lossless, 2 int8, 3 int4
    6       1      dtype: 1 bfloat16, 2 float16, 3 float32
    7       1      zero
    8       4      layers
    12      4      tokens
    16      4      kv_heads
    20      4      head_dim
    24      8 each layers times: where the layer ends, counted from the end of the head
    ...            the layers back to back

A layer is decoded by itself: its bytes and the head are enough, so it can be used while the next one is on
its way. The codec modules say what a layer holds.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from p2pcache.core.checksum import CorruptBody
from p2pcache.core.coding import DTYPE_IDS
from p2pcache.core.layout import KVLayout

MAGIC = b"p2kv"
VERSION = 1
CODEC_IDS = {"lossless": 1, "int8": 2, "int4": 3}
_FIXED = struct.Struct("<4sBBBBIIII")


class BadEncoding(CorruptBody):
    """Encoded bytes that are not what they should be. To the caller: a miss (`Miss.CORRUPT`)."""


@dataclass(frozen=True, slots=True)
class Head:
    """Where an encoded body's layers lie: layer i ends `ends[i]` bytes behind the head."""

    codec: str
    ends: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return head_bytes(len(self.ends))

    def span(self, layer: int) -> tuple[int, int]:
        """`[start, stop)` of a layer in the encoded body."""
        start = self.ends[layer - 1] if layer else 0
        return self.nbytes + start, self.nbytes + self.ends[layer]


def head_bytes(layers: int) -> int:
    return _FIXED.size + 8 * layers


def write_head(codec: str, layout: KVLayout, tokens: int, ends: list[int]) -> bytes:
    fixed = _FIXED.pack(
        MAGIC,
        VERSION,
        CODEC_IDS[codec],
        DTYPE_IDS[layout.dtype],
        0,
        layout.layers,
        tokens,
        layout.kv_heads,
        layout.head_dim,
    )
    return fixed + struct.pack(f"<{layout.layers}Q", *ends)


def read_head(encoded: memoryview, codec: str, layout: KVLayout, tokens: int) -> Head:
    """The head of a body of `codec`, of which `encoded` holds at least the head. Raises BadEncoding.

    Everything in it must be as expected, and the layers must lie in order. Whether the body's bytes are all
    there is for those who have them to compare with `span(layers - 1)`.
    """
    expected = write_head(codec, layout, tokens, [0] * layout.layers)[: _FIXED.size]
    if len(encoded) < head_bytes(layout.layers) or bytes(encoded[: _FIXED.size]) != expected:
        raise BadEncoding(f"not the head of a body of {tokens} tokens in {codec}")
    ends = struct.unpack_from(f"<{layout.layers}Q", encoded, _FIXED.size)
    # Each layer takes at most one byte more than raw: it never has to.
    layer_bytes_max = layout.layer_bytes(tokens) + 1
    start = 0
    for layer, end in enumerate(ends):
        if not start <= end <= start + layer_bytes_max:
            raise BadEncoding(f"layer {layer} of an encoded body ends at {end}, having begun at {start}")
        start = end
    return Head(codec, ends)
