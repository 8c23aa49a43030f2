"""One XXH3-64 a layer of a body, seeded with the body's exact key and the layer's number.

A body is `layers` equal contiguous parts. Each part has its own checksum, so that a layer can be
checked and used while the next is still on its way. The seed ties the bytes to their name and
place: whole and undamaged bytes of another body, or of another layer, fail just as flipped bits do.
This guards against faults, not against an adversary: XXH3 is no MAC.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from p2pcache import _native
from p2pcache.types import KEY_BYTES, LayoutError, P2PCacheError

SEED_MASK = (1 << 64) - 1
_NATIVE_ABOVE_BYTES = 240  # XXH3 goes other ways up to there, which the native code leaves to `xxhash`
LAYER_STRIDE = 0x9E3779B97F4A7C15
"""Distance between the seeds of two layers. Odd, so that no two layers of a body share one."""


class CorruptBody(P2PCacheError):
    """A body's bytes could not be had as they were stored. To the caller: a miss (`Miss.CORRUPT`)."""


def layer_seed(exact: bytes, layer: int) -> int:
    """The 64-bit seed of layer `layer` of body `exact` (16 bytes; the first 8, little endian, count)."""
    if len(exact) != KEY_BYTES:
        raise LayoutError(f"an exact key has {KEY_BYTES} bytes, not {len(exact)}")
    return (int.from_bytes(exact[:8], "little") + layer * LAYER_STRIDE) & SEED_MASK


def checksum_layer(data: memoryview | bytes | bytearray, exact: bytes, layer: int) -> int:
    """XXH3-64 of one layer's bytes (any contiguous buffer), as an unsigned integer."""
    return xxhash.xxh3_64_intdigest(data, layer_seed(exact, layer))


def checksum_body(view: memoryview, exact: bytes, layers: int) -> tuple[int, ...]:
    """The checksums of all layers of a body, in order. Raises LayoutError unless they are equal parts."""
    if _part_bytes(view, layers) > _NATIVE_ABOVE_BYTES:
        return tuple(_native.layer_checksums(view, layer_seed(exact, 0), layers))
    return plain_checksums(view, exact, layers)


def plain_checksums(view: memoryview, exact: bytes, layers: int) -> tuple[int, ...]:
    """The oracle of `checksum_body`."""
    part_bytes = _part_bytes(view, layers)
    return tuple(
        checksum_layer(view[layer * part_bytes : (layer + 1) * part_bytes], exact, layer)
        for layer in range(layers)
    )


def layer_check(
    body: memoryview, exact: bytes, checksums: Sequence[int], first: int = 0
) -> LayerCheck | _native.LayerCheck:
    """What checks `len(checksums)` equal layers, from layer `first` on, while their bytes arrive in `body`.

    The native one where layers are long enough for it. Raises LayoutError unless layers are equal parts.
    """
    long = not checksums or _part_bytes(body, len(checksums)) > _NATIVE_ABOVE_BYTES
    key = layer_seed(exact, first)
    return (_native.LayerCheck if long else LayerCheck)(body, key, list(checksums))


class LayerCheck:
    """A body that arrives from its first byte to its last, and what is known to be right of it.

    Used by one thread at a time. Keeps `body` exported until it is itself let go of. Without checksums bytes
    are moved and not checked.
    """

    def __init__(self, body: memoryview, key: int, checksums: Sequence[int]):
        """key: the seed of layer 0."""
        self._body = body
        self._key = key
        self._expected = tuple(checksums)
        self._layer_bytes = body.nbytes // len(checksums) if checksums else 0
        self.landed_bytes = 0
        self.bad_layer: int | None = None
        self._good = 0

    @property
    def good_bytes(self) -> int:
        """The layers from the first on that are whole and right, in bytes."""
        return self._good * self._layer_bytes if self._expected else self.landed_bytes

    def advance(self, landed_bytes: int) -> None:
        """The first `landed_bytes` are in `body` now: check the layers that this makes whole.

        Raises ValueError for a number that goes back, or beyond the body.
        """
        if not self.landed_bytes <= landed_bytes <= self._body.nbytes:
            raise ValueError("bytes land in order, and within the body")
        self.landed_bytes = landed_bytes
        while self.bad_layer is None and self._good < len(self._expected):
            start = self._good * self._layer_bytes
            if start + self._layer_bytes > landed_bytes:
                return
            data = self._body[start : start + self._layer_bytes]
            seed = (self._key + self._good * LAYER_STRIDE) & SEED_MASK
            if xxhash.xxh3_64_intdigest(data, seed) != self._expected[self._good]:
                self.bad_layer = self._good
                return
            self._good += 1

    def copy(self, source: memoryview, landed_bytes: int) -> None:
        """Copy on from `source` (as long as the body) up to `landed_bytes`, and check that."""
        begin = self.landed_bytes
        self._body[begin:landed_bytes] = source[begin:landed_bytes]
        self.advance(landed_bytes)


def first_bad_layer(view: memoryview, exact: bytes, checksums: Sequence[int]) -> int | None:
    """The first layer whose bytes do not match, or None when the whole body is as it was stored.

    `len(checksums)` is the number of layers. Raises LayoutError unless they are equal parts.
    """
    part_bytes = _part_bytes(view, len(checksums))
    for layer, expected in enumerate(checksums):
        if checksum_layer(view[layer * part_bytes : (layer + 1) * part_bytes], exact, layer) != expected:
            return layer
    return None


def _part_bytes(view: memoryview, layers: int) -> int:
    if view.ndim != 1 or view.itemsize != 1:
        raise LayoutError("a body is checked as a flat view of bytes: cast it with .cast('B')")
    if layers < 1 or view.nbytes < layers or view.nbytes % layers:
        raise LayoutError(f"a body of {view.nbytes} bytes is not {layers} equal layers")
    return view.nbytes // layers
