"""One XXH3-64 a layer of a body, seeded with the body's exact key and the layer's number.

A body is `layers` equal contiguous parts. Each part has its own checksum, so that a layer can be
checked and used while the next is still on its way. The seed ties the bytes to their name and
place: whole and undamaged bytes of another body, or of another layer, fail just as flipped bits do.
This guards against faults, not against an adversary: XXH3 is no MAC.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from p2pcache.types import KEY_BYTES, LayoutError, P2PCacheError

SEED_MASK = (1 << 64) - 1
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
    part_bytes = _part_bytes(view, layers)
    return tuple(
        checksum_layer(view[layer * part_bytes : (layer + 1) * part_bytes], exact, layer)
        for layer in range(layers)
    )


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
