"""One node's shard of the directory: which bodies exist under a content key, and who holds them.

Soft state. Every entry is a hint with a time to live; holders publish again before it runs out, so
a lost message costs a miss and never a wrong answer. Messages of one holder carry a sequence
number; a message that is not newer than the last one accepted for that (body, holder) is ignored,
and a withdrawal leaves a tombstone, so that a publish overtaken on the way cannot revive a body
that is gone.

The table is native (`native/directory.cpp`), about 112 bytes a body with one holder, because a shard
knows every chunk of its share of the mesh: in Python it took over a kilobyte. `directory_twin.py` says
in Python what it does, and is compared with it in the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from p2pcache import _native
from p2pcache.core.found import BODIES_MAX, Table
from p2pcache.types import BodyInfo, ContentKey, ExactKey, Found, Holder

BODIES_PER_KEY_MAX = BODIES_MAX
"""Bodies of one content key that a shard keeps: one a context it was computed in."""

SWEEP_MAX = 65_536
"""Records that one `expire` looks at: some milliseconds, and a million of them in 16 calls."""


class Directory:
    """The shard. Pure: the caller passes the time and says which incarnations are live.

    Keys are 16 bytes, integers fit 64 bits, names have at most 1024 bytes, times are finite: else
    ValueError or OverflowError, and what stands before a bad body in its message counts. `is_live` must
    not change the directory.
    """

    def __init__(self, *, ttl_s: float, tombstone_s: float, bodies_max: int = BODIES_PER_KEY_MAX):
        self._table = _native.Directory(ttl_s, tombstone_s, bodies_max)

    def __len__(self) -> int:
        """Content keys known, tombstones included."""
        return len(self._table)

    @property
    def nbytes(self) -> int:
        """Memory of the table, names of holders and codecs apart."""
        return self._table.nbytes

    @property
    def native(self) -> _native.Directory:
        """The table itself, for a native thread that reads it beside us."""
        return self._table

    def publish(self, holder: Holder, bodies: Iterable[tuple[BodyInfo, int]], now_s: float) -> int:
        """Record that `holder` has each `(body, seq)`. Returns how many were accepted."""
        return self._table.publish(holder.node, holder.incarnation, holder.tier, bodies, now_s)

    def withdraw(
        self, holder: Holder, bodies: Iterable[tuple[ContentKey, ExactKey, int]], now_s: float
    ) -> int:
        """Record that `holder` no longer has each `(content, exact, seq)`. Returns how many counted."""
        return self._table.withdraw(holder.node, holder.incarnation, bodies, now_s)

    def lookup(self, content: ContentKey, now_s: float, is_live: Callable[[str, int], bool]) -> list[Found]:
        """Bodies under a content key with at least one live holder; never a tombstone."""
        (found,) = self.lookup_many([content], now_s, is_live)
        return found

    def lookup_many(
        self, contents: Sequence[ContentKey], now_s: float, is_live: Callable[[str, int], bool]
    ) -> list[list[Found]]:
        """`lookup` of each key, in order. `is_live` is asked once a holder."""
        table = self.table(b"".join(contents), now_s, is_live)
        return [list(found) for found in table.objects(contents)]

    def table(self, contents: bytes, now_s: float, is_live: Callable[[str, int], bool]) -> Table:
        """The same as records, in one native call: without an object for each body and holder.

        contents: the keys, joined. What a table has no room for is left out.
        """
        return Table(*self._table.table(contents, now_s, is_live))

    def expire(self, now_s: float, batch_max: int = SWEEP_MAX) -> int:
        """Forget what has run out; returns how many entries went.

        Entries of holders that are not live stay until then: this node's View may be the one that
        lags, and `lookup` leaves them out meanwhile. One call looks at `batch_max` records at most
        and the next goes on from there, so that a large shard is swept without ever holding up an
        answer for long.
        """
        return self._table.expire(now_s, batch_max)
