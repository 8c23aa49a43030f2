"""Whether bodies of one line are better encoded on their way: where that has them here sooner.

Encoded, fewer bytes come, and time goes into encoding and decoding. On a slow line that pays, on a fast one
it does not. Of a prompt's bodies one is encoded and another decoded while a third is on the line, so the
slowest of the three sets the pace; a body that comes alone takes all three. All is reckoned in seconds a raw
byte, by what was measured; a choice is held still until another is clearly better, since the line's pace is
only known with noise.
"""

from __future__ import annotations

MARGIN = 0.1
"""Encoding starts where it saves this share of the time, and ends where it saves nothing."""


class WireChoice:
    """Of one line, from one peer by one transport."""

    __slots__ = ("encoded",)

    def __init__(self) -> None:
        self.encoded = False

    def update(self, pace_s: float, ratio: float, coding_s: float) -> bool:
        """Choose anew; True: encoded.

        pace_s: what a raw byte takes to come, as bodies come now. ratio: bytes that an encoded body has for
        each raw one. coding_s: what the slower of encoding and decoding takes for a raw byte.
        """
        line_s = pace_s / ratio if self.encoded else pace_s  # what a byte takes that is really moved
        encoded_s = max(ratio * line_s, coding_s)
        self.encoded = encoded_s < line_s * (1.0 if self.encoded else 1 - MARGIN)
        return self.encoded
