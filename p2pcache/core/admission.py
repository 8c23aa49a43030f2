"""Whether a body that leaves the host tier is worth a write to the NVMe tier.

Flash wears with what is written to it, and writes take bandwidth from reads. Two plain rules hold them down:
a rate that is never passed for long, and, by choice, no write of what nobody has read since it came.
"""

from __future__ import annotations

BURST_S = 1.0
"""How much may be written at once after a pause: what the rate gives in this time."""


class Admission:
    """Admits writes to one tier: at most `bytes_per_s_max` (0: no limit), averaged over a second or so."""

    def __init__(self, bytes_per_s_max: float, *, used_only: bool):
        self._rate = bytes_per_s_max
        self._used_only = used_only
        self._credit_bytes = bytes_per_s_max * BURST_S
        self._filled_s = float("-inf")

    def admits(self, nbytes: int, now_s: float, *, used: bool) -> bool:
        """Whether to write a body of `nbytes`, which is then counted. used: it was read since it came.

        Where there is credit at all a body may be written and the credit go below zero, so that one
        larger than a second's worth is not shut out for ever: it is paid for by the time after it.
        """
        if self._used_only and not used:
            return False
        if not self._rate:
            return True
        idle_s = max(now_s - self._filled_s, 0.0)
        self._credit_bytes = min(self._credit_bytes + idle_s * self._rate, self._rate * BURST_S)
        self._filled_s = max(now_s, self._filled_s)
        if self._credit_bytes <= 0:
            return False
        self._credit_bytes -= nbytes
        return True

    def give_back(self, nbytes: int) -> None:
        """So much of a body that was admitted need not be written: it was encoded."""
        self._credit_bytes = min(self._credit_bytes + nbytes, self._rate * BURST_S)
