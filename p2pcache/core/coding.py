"""What a body's encoded bytes are, beside the body itself, which is raw wherever it is named.

An encoded body is the codec's container, padded with zeros to as many equal parts as the body has layers. So
whatever moves and checks raw bodies, a layer and a checksum at a time, does the same with encoded ones.

What a lossy codec makes of a body is *another* body (`lossy_body`): its values are others, so it has a key of
its own. To make it takes the values' geometry, which a body's name does not tell. An engine says it when it
stores a body, in the body's meta (`layout_meta`), which goes wherever the body goes:

    offset  bytes
    0       1      0xC1, with which no msgpack begins: other metas are msgpack
    1       1      dtype: 1 bfloat16, 2 float16, 3 float32
    2       2      kv_heads, little endian
    4       4      head_dim, little endian
"""

from __future__ import annotations

import dataclasses
import struct
from dataclasses import dataclass

from p2pcache.core.keys import lossy_key
from p2pcache.core.layout import KVLayout
from p2pcache.types import BodyInfo, ConfigError, LayoutError, Provenance

CODEC_BYTES_MAX = 32
RAW = "raw"
EXACT_CODECS = ("lossless",)
"""Codecs that give back the very bytes."""
LOSSY_CODECS = ("int8", "int4")
DTYPE_IDS = {"bfloat16": 1, "float16": 2, "float32": 3}
"""Of dtypes that a codec may work on."""
CHANNELS_MAX = 1 << 18
"""Of one layer's K: a coder needs about 40 bytes for each, whatever a stranger says of a body."""
_LAYOUT_MARK = 0xC1
_LAYOUT = struct.Struct("<BBHI")


@dataclass(frozen=True, slots=True)
class Coding:
    """The encoded form: `nbytes` in `len(checksums)` equal parts, each with the checksum of a layer of that
    number (see `core.checksum`). Raises LayoutError for parts that are not equal, or a name out of bounds."""

    codec: str
    nbytes: int
    checksums: tuple[int, ...]

    def __post_init__(self) -> None:
        codec, parts = self.codec, len(self.checksums)
        if not codec.isascii() or "\0" in codec or not 1 <= len(codec) <= CODEC_BYTES_MAX:
            raise LayoutError(f"codec {codec!r} is not 1 to {CODEC_BYTES_MAX} ASCII characters")
        if not parts or not parts <= self.nbytes or self.nbytes % parts:
            raise LayoutError(f"{self.nbytes} encoded bytes are not {parts} equal parts")
        if not all(0 <= checksum < 1 << 64 for checksum in self.checksums):
            raise LayoutError("a part's checksum is an unsigned 64-bit integer")

    def check_fits(self, body: BodyInfo, layers: int) -> None:
        """Raises LayoutError unless this may be the encoded form of a body: a part a layer, and shorter."""
        if len(self.checksums) != layers:
            raise LayoutError(f"{len(self.checksums)} encoded parts of a body of {layers} layers")
        if self.nbytes >= body.nbytes:
            raise LayoutError(f"{self.nbytes} encoded bytes of a body of {body.nbytes}")


def lossy_body(body: BodyInfo, codec: str) -> BodyInfo:
    """The body that a lossy codec makes of another one: found by its content, and never as exact."""
    exact = lossy_key(body.exact, codec)
    return dataclasses.replace(body, exact=exact, provenance=Provenance.APPROXIMATE, codec=codec)


def may_be_lossy(body: BodyInfo) -> bool:
    """Whether a lossy codec may be used on a body.

    Not on one that a lossy codec has made already: errors would add up. And not on an isolated one: what it
    makes is approximate, so nobody could tell any more that it shows no one else's words.
    """
    return body.codec == RAW and body.provenance is not Provenance.ISOLATED


def layout_meta(layout: KVLayout) -> bytes:
    """What an engine says of the values of its bodies; empty where no codec works on them."""
    dtype = DTYPE_IDS.get(layout.dtype)
    return b"" if dtype is None else _LAYOUT.pack(_LAYOUT_MARK, dtype, layout.kv_heads, layout.head_dim)


def is_layout_meta(meta: bytes) -> bool:
    """Whether a meta is about a body's values, and so is for nodes, not for the engine that fetches it."""
    return meta[:1] == bytes([_LAYOUT_MARK])


def layout_of(body: BodyInfo, layers: int, meta: bytes) -> KVLayout | None:
    """The geometry of a body's values; None where its meta does not say one that fits it."""
    if len(meta) != _LAYOUT.size or not is_layout_meta(meta):
        return None
    _, dtype_id, heads, dim = _LAYOUT.unpack(meta)
    dtype = next((name for name, number in DTYPE_IDS.items() if number == dtype_id), None)
    if dtype is None or heads * dim > CHANNELS_MAX:
        return None
    try:
        layout = KVLayout(layers, heads, dim, dtype)
    except ConfigError:
        return None
    return layout if layout.body_bytes(body.tokens) == body.nbytes else None
