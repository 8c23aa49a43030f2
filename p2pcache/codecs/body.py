"""Whole bodies into the form that tiers and peers keep (`core.coding`), and back.

`pack` takes a codec that gives back the very bytes, for which a body's length, tokens and layers are enough.
`lossless` is meant for bfloat16; other values come through it as well, but save nothing and are kept raw.
`pack_lossy` takes int8 or int4 and makes another body, whose bytes are what decoding gives: with a key and
checksums of its own it is moved, checked and named like any other.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from p2pcache.codecs.codec import decode_into, decode_layer_into, encode
from p2pcache.codecs.container import BadEncoding, read_head
from p2pcache.core.checksum import CorruptBody, checksum_body, checksum_layer
from p2pcache.core.coding import EXACT_CODECS, LOSSY_CODECS, Coding, lossy_body
from p2pcache.core.layout import KVLayout
from p2pcache.core.nvmelog import PAGE_BYTES
from p2pcache.types import BodyInfo, ConfigError

_HEAD_DIM_MAX = 65_536


class Packed(NamedTuple):
    """An encoded body.

    body, checksums: what it decodes to, and the checksums of that one's raw layers. data: the encoded bytes,
    on a page of their own. error: of the worst channel.
    """

    body: BodyInfo
    checksums: tuple[int, ...]
    coding: Coding
    data: memoryview
    error: float = 0.0


class Kept(NamedTuple):
    """Why a body was not encoded: its `shape`, too little `saving`, or too large an `error`.

    error: of the worst channel, where it was encoded before that was known; infinite where it cannot be.
    """

    reason: str
    error: float | None = None


def pack(
    codec: str, raw: memoryview, body: BodyInfo, checksums: tuple[int, ...], *, saving_min: float
) -> Packed | Kept:
    """Encode a body's bytes so that the very same come back.

    checksums: of `raw`. saving_min: the share of the bytes that has to be saved.
    """
    layout = _any_layout(body, len(checksums))
    if codec not in EXACT_CODECS:
        raise ConfigError(f"{codec!r} does not give back the very bytes")
    if layout is None:
        return Kept("shape")
    encoded = encode(codec, raw, layout, body.tokens)
    if encoded.codec != codec:
        return Kept("saving")
    return _parcelled(body, checksums, codec, encoded.data, encoded.error, saving_min)


def pack_lossy(
    codec: str,
    raw: memoryview,
    body: BodyInfo,
    checksums: tuple[int, ...],
    layout: KVLayout,
    *,
    error_max: float,
    saving_min: float,
) -> Packed | Kept:
    """Make another body of a body, of which less has to be kept.

    layout: of the values. error_max: of the worst channel. Raises CorruptBody where `raw` is not what
    `checksums` are of: what is damaged must not get sound checksums.
    """
    if codec not in LOSSY_CODECS:
        raise ConfigError(f"{codec!r} is none of {', '.join(LOSSY_CODECS)}")
    encoded = encode(codec, raw, layout, body.tokens, error_max=error_max)
    _check(raw, body, checksums, "a body")  # behind the encoding: what was damaged before it is found
    if encoded.refused is not None:
        return Kept("error", encoded.refused)
    if encoded.codec != codec:
        return Kept("saving")
    made = lossy_body(body, codec)
    sums = _decoded_checksums(encoded.data, made, layout)
    return _parcelled(made, sums, codec, encoded.data, encoded.error, saving_min)


def unpack(
    coding: Coding,
    data: memoryview,
    body: BodyInfo,
    checksums: tuple[int, ...],
    dest: memoryview,
    layout: KVLayout | None = None,
) -> None:
    """Decode a body into `dest` (flat, writable, `body.nbytes` long) and check it by its raw checksums.

    data: `coding.nbytes` bytes, which may be anything. layout: of the values, where it is known. A lossy
    codec is taken only for a body that is said to be made by it. Raises CorruptBody unless `dest` holds the
    very body; it may then hold anything.
    """
    layers = len(checksums)
    if coding.codec in EXACT_CODECS:
        layout = _any_layout(body, layers)
    elif coding.codec not in LOSSY_CODECS or coding.codec != body.codec:
        layout = None
    if layout is None:
        raise BadEncoding(f"no body of {body.nbytes} bytes in {coding.codec}")
    head = read_head(data, coding.codec, layout, body.tokens)
    end = head.span(layers - 1)[1]
    if not end <= len(data) < end + layers:
        raise BadEncoding(f"{len(data)} bytes of an encoded body of {end}")
    decode_into(coding.codec, data[:end], dest, layout, body.tokens)
    _check(dest, body, checksums, "a decoded body")


def page_aligned(nbytes: int) -> memoryview:
    """Memory that starts on a page, so that it may go to a disk without a copy. Its content is undefined."""
    whole = np.empty(nbytes + PAGE_BYTES, np.uint8)
    start = -whole.__array_interface__["data"][0] % PAGE_BYTES
    return memoryview(whole)[start : start + nbytes]


def _parcelled(
    body: BodyInfo,
    checksums: tuple[int, ...],
    codec: str,
    encoded: memoryview,
    error: float,
    saving_min: float,
) -> Packed | Kept:
    """Padded to equal parts with a checksum each, if that saves enough."""
    layers = len(checksums)
    nbytes = -(-len(encoded) // layers) * layers
    if nbytes >= body.nbytes or nbytes > (1 - saving_min) * body.nbytes:
        return Kept("saving", error)
    data = page_aligned(nbytes)
    data[: len(encoded)] = encoded
    data[len(encoded) :] = bytes(nbytes - len(encoded))
    parts = checksum_body(data, body.exact, layers)
    return Packed(body, checksums, Coding(codec, nbytes, parts), data.toreadonly(), error)


def _decoded_checksums(encoded: memoryview, body: BodyInfo, layout: KVLayout) -> tuple[int, ...]:
    """Of what an encoded body decodes to, with memory for one layer."""
    head = read_head(encoded, body.codec, layout, body.tokens)
    layer_bytes = memoryview(np.empty(layout.layer_bytes(body.tokens), np.uint8))
    sums = []
    for layer in range(layout.layers):
        start, stop = head.span(layer)
        decode_layer_into(head, layer, encoded[start:stop], layer_bytes, layout, body.tokens)
        sums.append(checksum_layer(layer_bytes, body.exact, layer))
    return tuple(sums)


def _check(data: memoryview, body: BodyInfo, checksums: tuple[int, ...], what: str) -> None:
    found = checksum_body(data, body.exact, len(checksums))
    if found != checksums:
        bad = next(i for i, (a, b) in enumerate(zip(found, checksums, strict=True)) if a != b)
        raise CorruptBody(f"layer {bad} of {what} {body.exact.hex()} does not match its checksum")


def _any_layout(body: BodyInfo, layers: int) -> KVLayout | None:
    """A geometry of as many 16-bit values: how they are parted into heads is nothing to an exact codec."""
    dim, rest = divmod(body.nbytes, 4 * layers * max(body.tokens, 1))
    if rest or not body.tokens:
        return None
    heads = -(-dim // _HEAD_DIM_MAX)
    try:
        return KVLayout(layers, heads, dim // heads, "bfloat16") if dim and dim % heads == 0 else None
    except ConfigError:
        return None
