"""One way in for all codecs: encode within an error, decode a body or one layer of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from p2pcache.codecs.container import BadEncoding, Head, head_bytes, read_head, write_head
from p2pcache.codecs.lossless import Lossless
from p2pcache.codecs.quantised import Quantised
from p2pcache.core.layout import KVLayout
from p2pcache.types import ConfigError, LayoutError

RAW = "raw"


class Codec(Protocol):
    """A way to code layers. The container around them is not its business."""

    name: str
    dtypes: frozenset[str]  # of layouts that it can code

    def room(self, layout: KVLayout, tokens: int) -> int:
        """Bytes that `encode_layers` may need."""

    def encode_layers(
        self, body: np.ndarray, layout: KVLayout, tokens: int, out: np.ndarray
    ) -> tuple[list[int], float] | None:
        """Code all layers of `body` (uint8) into `out` (uint8 of `room`), back to back.

        Returns where each ends, and the error; None for values that this codec cannot hold.
        """

    def decode_layers(
        self, encoded: np.ndarray, ends: list[int], layout: KVLayout, tokens: int, out: np.ndarray
    ) -> int | None:
        """Decode `len(ends)` layers, back to back in `encoded`, into `out` (uint8, as long as they are raw).

        Returns the first layer that is malformed, of which `out` then holds anything; None: all are well.
        """


CODECS: dict[str, Codec] = {c.name: c for c in (Lossless(), Quantised("int8", 8), Quantised("int4", 4))}
"""All codecs but raw, which is no codec."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """An encoded body. `data` is the body itself, not a copy, where `codec` is raw."""

    codec: str
    data: memoryview
    error: float = 0.0
    """The worst channel's, of all layers, K and V, heads and dimensions; see `quantised.worst_channel`."""
    refused: float | None = None
    """Where the body was left raw for its error: that error; infinite where it could not be coded at all."""


def encode(
    name: str | Codec,
    body: memoryview,
    layout: KVLayout,
    tokens: int,
    *,
    error_max: float = math.inf,
) -> Encoded:
    """Code a body (flat bytes, canonical form) unless it costs more than `error_max` or saves nothing.

    `name` is one of CODECS or "raw", or a codec. Raises ConfigError for another name, LayoutError for a body
    of another length.
    """
    raw = _bytes(body, layout.body_bytes(tokens), "body")
    if name == RAW:
        return Encoded(RAW, memoryview(body))
    codec = _codec(name)
    if layout.dtype not in codec.dtypes or not raw.size:
        return Encoded(RAW, memoryview(body))
    head = head_bytes(layout.layers)
    out = np.empty(head + codec.room(layout, tokens), np.uint8)
    coded = codec.encode_layers(raw, layout, tokens, out[head:])
    if coded is None:
        return Encoded(RAW, memoryview(body), refused=math.inf)
    ends, error = coded
    if error > error_max:
        return Encoded(RAW, memoryview(body), refused=error)
    if head + ends[-1] >= raw.size:
        return Encoded(RAW, memoryview(body))
    out[:head] = np.frombuffer(write_head(codec.name, layout, tokens, ends), np.uint8)
    return Encoded(codec.name, memoryview(out)[: head + ends[-1]], error)


def decode_into(
    name: str | Codec, encoded: memoryview, dest: memoryview, layout: KVLayout, tokens: int
) -> None:
    """Decode a whole body into `dest` (flat, writable, as long as the raw body).

    Raises BadEncoding where `encoded` is not exactly one body of that codec and layout; `dest` may then hold
    anything, and nothing beside it was written. LayoutError: `dest` has another length.
    """
    out = _bytes(dest, layout.body_bytes(tokens), "destination")
    if name == RAW:
        if len(encoded) != out.size:
            raise BadEncoding(f"a raw body of {len(encoded)} bytes, not {out.size}")
        out[:] = np.asarray(encoded)
        return
    codec = _codec(name)
    head = read_head(encoded, codec.name, layout, tokens)
    if len(encoded) != head.span(layout.layers - 1)[1]:
        raise BadEncoding(f"an encoded body of {len(encoded)} bytes, not {head.span(layout.layers - 1)[1]}")
    bad = codec.decode_layers(np.asarray(encoded)[head.nbytes :], list(head.ends), layout, tokens, out)
    if bad is not None:
        raise BadEncoding(f"layer {bad} of a body in {codec.name} is malformed")


def decode_layer_into(
    head: Head, layer: int, encoded: memoryview, dest: memoryview, layout: KVLayout, tokens: int
) -> None:
    """Decode one layer, given its bytes alone (`head.span(layer)`), into `dest`. Raises as above."""
    out = _bytes(dest, layout.layer_bytes(tokens), "destination")
    start, stop = head.span(layer)
    if len(encoded) != stop - start:
        raise BadEncoding(f"layer {layer} has {len(encoded)} bytes, its head says {stop - start}")
    codec = _codec(head.codec)
    bad = codec.decode_layers(np.asarray(encoded), [len(encoded)], layout, tokens, out)
    if bad is not None:
        raise BadEncoding(f"layer {layer} of a body in {codec.name} is malformed")


def _codec(name: str | Codec) -> Codec:
    if not isinstance(name, str):
        return name
    if name not in CODECS:
        raise ConfigError(f"no codec {name!r}: there are {', '.join([RAW, *CODECS])}")
    return CODECS[name]


def _bytes(buffer: memoryview, nbytes: int, what: str) -> np.ndarray:
    view = memoryview(buffer).cast("B") if memoryview(buffer).nbytes else memoryview(buffer)
    if view.nbytes != nbytes:
        raise LayoutError(f"the {what} has {view.nbytes} bytes, not {nbytes}")
    return np.asarray(view) if nbytes else np.zeros(0, np.uint8)
