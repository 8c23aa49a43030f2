"""Memory for bodies that come encoded, until they have been decoded into their slots."""

from __future__ import annotations

import asyncio

from p2pcache.codecs import page_aligned


class Inbox:
    """Counts it, up to a cap. No buffer is used twice, so a late write harms nobody; its bytes count until
    its transport says that none will come (law 5)."""

    def __init__(self, bytes_max: int):
        self._bytes_max = bytes_max
        self.nbytes = 0

    def take(self, nbytes: int) -> memoryview | None:
        """A buffer, to be given back; None over the cap. A larger one goes alone rather than never."""
        if self.nbytes and self.nbytes + nbytes > self._bytes_max:
            return None
        buffer = page_aligned(nbytes)
        self.nbytes += nbytes  # once it is there
        return buffer

    def give_back(self, nbytes: int, settled: asyncio.Future[None] | None) -> None:
        """settled: of the pull that had it; None where there was none."""
        if settled is None or settled.done():
            self.nbytes -= nbytes
        else:
            settled.add_done_callback(lambda _: self.give_back(nbytes, None))
