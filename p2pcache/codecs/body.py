"""Whole bodies into the form that tiers and peers keep (`core.coding`), and back, bit for bit.

Only a codec that gives back the very bytes takes part: what is found by an exact key has to be exact. Nothing
but a body's length, tokens and layers is needed for that. `lossless` is meant for bfloat16; other values
come through it as well, but save nothing and are kept raw.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from p2pcache.codecs.codec import decode_into, encode
from p2pcache.codecs.container import BadEncoding, read_head
from p2pcache.core.checksum import CorruptBody, checksum_body
from p2pcache.core.coding import Coding
from p2pcache.core.layout import KVLayout
from p2pcache.core.nvmelog import PAGE_BYTES
from p2pcache.types import BodyInfo, ConfigError

EXACT_CODECS = frozenset({"lossless"})
_HEAD_DIM_MAX = 65_536


class Packed(NamedTuple):
    """An encoded body; data: its bytes, on a page of their own. error: of the worst channel."""

    coding: Coding
    data: memoryview
    error: float


def pack(codec: str, raw: memoryview, body: BodyInfo, layers: int, *, saving_min: float) -> Packed | str:
    """Encode a body's bytes, or say why they are kept raw: its `shape`, or too little `saving`.

    saving_min: the share of the bytes that has to be saved.
    """
    layout = _layout(body, layers)
    if layout is None:
        return "shape"
    encoded = encode(codec, raw, layout, body.tokens)
    nbytes = -(-len(encoded.data) // layers) * layers
    if encoded.codec != codec or nbytes >= body.nbytes or nbytes > (1 - saving_min) * body.nbytes:
        return "saving"
    data = page_aligned(nbytes)
    data[: len(encoded.data)] = encoded.data
    data[len(encoded.data) :] = bytes(nbytes - len(encoded.data))
    checksums = checksum_body(data, body.exact, layers)
    return Packed(Coding(codec, nbytes, checksums), data.toreadonly(), encoded.error)


def unpack(
    coding: Coding, data: memoryview, body: BodyInfo, checksums: tuple[int, ...], dest: memoryview
) -> None:
    """Decode a body into `dest` (flat, writable, `body.nbytes` long) and check it by its raw checksums.

    data: `coding.nbytes` bytes, which may be anything. Raises CorruptBody unless `dest` holds the very
    body; it may then hold anything.
    """
    layers = len(checksums)
    layout = _layout(body, layers)
    if coding.codec not in EXACT_CODECS or layout is None:
        raise BadEncoding(f"no body of {body.nbytes} bytes in {coding.codec}")
    head = read_head(data, coding.codec, layout, body.tokens)
    end = head.span(layers - 1)[1]
    if not end <= len(data) < end + layers:
        raise BadEncoding(f"{len(data)} bytes of an encoded body of {end}")
    decode_into(coding.codec, data[:end], dest, layout, body.tokens)
    found = checksum_body(dest, body.exact, layers)
    if found != checksums:
        bad = next(i for i, (a, b) in enumerate(zip(found, checksums, strict=True)) if a != b)
        raise CorruptBody(f"decoded layer {bad} of {body.exact.hex()} does not match its checksum")


def page_aligned(nbytes: int) -> memoryview:
    """Memory that starts on a page, so that it may go to a disk without a copy. Its content is undefined."""
    whole = np.empty(nbytes + PAGE_BYTES, np.uint8)
    start = -whole.__array_interface__["data"][0] % PAGE_BYTES
    return memoryview(whole)[start : start + nbytes]


def _layout(body: BodyInfo, layers: int) -> KVLayout | None:
    """A geometry of as many 16-bit values: how they are parted into heads is nothing to an exact codec."""
    dim, rest = divmod(body.nbytes, 4 * layers * max(body.tokens, 1))
    if rest or not body.tokens:
        return None
    heads = -(-dim // _HEAD_DIM_MAX)
    try:
        return KVLayout(layers, heads, dim // heads, "bfloat16") if dim and dim % heads == 0 else None
    except ConfigError:
        return None
