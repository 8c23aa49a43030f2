"""How a body's bytes look where bytes are scarce: `raw`, `lossless`, `int8`, `int4`.

`encode` names the codec that it ended with: a codec that cannot hold a body, would exceed the error that the
caller allows, or saves nothing, leaves the body raw. `decode_into` and `decode_layer_into` take bytes from a
disk or a peer, trust nothing in them, and write to their destination alone. `pack`, `pack_lossy` and `unpack`
do the same in the form that the NVMe tier and peers are given.
"""

from p2pcache.codecs.body import Kept, Packed, pack, pack_lossy, page_aligned, unpack
from p2pcache.codecs.codec import (
    CODECS,
    BadEncoding,
    Codec,
    Encoded,
    decode_into,
    decode_layer_into,
    encode,
)
from p2pcache.codecs.container import Head, head_bytes, read_head

__all__ = [
    "CODECS",
    "BadEncoding",
    "Codec",
    "Encoded",
    "Head",
    "Kept",
    "Packed",
    "decode_into",
    "decode_layer_into",
    "encode",
    "head_bytes",
    "pack",
    "pack_lossy",
    "page_aligned",
    "read_head",
    "unpack",
]
