"""What a body's encoded bytes are, beside the body itself, which is raw wherever it is named.

An encoded body is the codec's container, padded with zeros to as many equal parts as the body has layers. So
whatever moves and checks raw bodies, a layer and a checksum at a time, does the same with encoded ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from p2pcache.types import BodyInfo, LayoutError

CODEC_BYTES_MAX = 32


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
