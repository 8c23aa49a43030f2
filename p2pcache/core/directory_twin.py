"""The directory shard in plain Python: what `core/directory.py` must answer, and the oracle of its tests.

    content key -> exact key -> (BodyInfo, (holder, incarnation) -> Entry)

Incarnations are apart, since numbers of one say nothing about another: what an old one says late
neither hides nor revives what the new one holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from p2pcache.core.directory import BODIES_PER_KEY_MAX, SWEEP_MAX
from p2pcache.core.found import Table, Writer, split_keys
from p2pcache.types import BodyInfo, ContentKey, ExactKey, Found, Holder, Tier


@dataclass(slots=True)
class _Entry:
    tier: Tier
    seq: int
    expires_s: float
    gone: bool = False  # a tombstone


@dataclass(slots=True)
class _Body:
    info: BodyInfo | None  # None: only a withdrawal of it has been heard of so far
    holders: dict[tuple[str, int], _Entry]  # (name, incarnation) -> what it said last


class PlainDirectory:
    """The shard, method by method as `Directory` has them."""

    def __init__(self, *, ttl_s: float, tombstone_s: float, bodies_max: int = BODIES_PER_KEY_MAX):
        self._ttl_s = ttl_s
        self._tombstone_s = tombstone_s
        self._bodies_max = bodies_max
        self._keys: dict[ContentKey, dict[ExactKey, _Body]] = {}
        self._unswept: list[ContentKey] = []

    def __len__(self) -> int:
        """Content keys known, tombstones included."""
        return len(self._keys)

    def publish(self, holder: Holder, bodies: Iterable[tuple[BodyInfo, int]], now_s: float) -> int:
        """Record that `holder` has each `(body, seq)`. Returns how many were accepted."""
        accepted = 0
        for info, seq in bodies:
            body = self._body(info.content, info.exact, drop_held=True)
            if body is not None and self._put(body, holder, seq, now_s + self._ttl_s, gone=False):
                body.info = info
                accepted += 1
        return accepted

    def withdraw(
        self, holder: Holder, bodies: Iterable[tuple[ContentKey, ExactKey, int]], now_s: float
    ) -> int:
        """Record that `holder` no longer has each `(content, exact, seq)`. Returns how many counted."""
        accepted = 0
        for content, exact, seq in bodies:
            # Even where nothing is known to withdraw: the publish may still be on its way here.
            body = self._body(content, exact, drop_held=False)
            if body is not None and self._put(body, holder, seq, now_s + self._tombstone_s, gone=True):
                accepted += 1
        return accepted

    def lookup_many(
        self, contents: Iterable[ContentKey], now_s: float, is_live: Callable[[str, int], bool]
    ) -> list[list[Found]]:
        return [self.lookup(content, now_s, is_live) for content in contents]

    def table(self, contents: bytes, now_s: float, is_live: Callable[[str, int], bool]) -> Table:
        """What `lookup` says of keys, joined, as records."""
        writer = Writer()
        for content in split_keys(contents):
            writer.add(self.lookup(content, now_s, is_live))
        return writer.table()

    def lookup(self, content: ContentKey, now_s: float, is_live: Callable[[str, int], bool]) -> list[Found]:
        """Bodies under a content key with at least one live holder; never a tombstone."""
        found = []
        for body in self._keys.get(content, {}).values():
            holders = tuple(
                Holder(name, incarnation, e.tier)
                for (name, incarnation), e in body.holders.items()
                if not e.gone and e.expires_s > now_s and is_live(name, incarnation)
            )
            if holders and body.info is not None:
                found.append(Found(body.info, holders))
        return found

    def expire(self, now_s: float, batch_max: int = SWEEP_MAX) -> int:
        """Forget what has run out; returns how many entries went. Looks at `batch_max` keys at most."""
        if not self._unswept:
            self._unswept = list(self._keys)
        batch, self._unswept = self._unswept[-batch_max:], self._unswept[:-batch_max]
        dropped = 0
        for content in batch:
            per_key = self._keys.get(content, {})
            for exact in list(per_key):
                holders = per_key[exact].holders
                for who in list(holders):
                    if holders[who].expires_s <= now_s:
                        del holders[who]
                        dropped += 1
                if not holders:
                    del per_key[exact]
            if not per_key:
                self._keys.pop(content, None)
        return dropped

    def _body(self, content: ContentKey, exact: ExactKey, *, drop_held: bool) -> _Body | None:
        """The record of a body, made if need be; None where a full key has nothing to drop for it."""
        per_key = self._keys.setdefault(content, {})
        body = per_key.get(exact)
        if body is None:
            if len(per_key) >= self._bodies_max and not self._make_room(per_key, drop_held):
                return None
            body = per_key[exact] = _Body(None, {})
        return body

    def _put(self, body: _Body, holder: Holder, seq: int, expires_s: float, *, gone: bool) -> bool:
        who = holder.node, holder.incarnation
        entry = body.holders.get(who)
        if entry is not None and seq <= entry.seq:
            return False
        body.holders[who] = _Entry(holder.tier, seq, expires_s, gone)
        return True

    @staticmethod
    def _make_room(per_key: dict[ExactKey, _Body], drop_held: bool) -> bool:
        """Forget the body heard of longest ago: one that nobody holds, or if need be one that is held."""

        def keep(exact: ExactKey) -> tuple[bool, float]:
            held = [e.expires_s for e in per_key[exact].holders.values() if not e.gone]
            return bool(held), max(held, default=0.0)

        oldest = min(per_key, key=keep)
        if keep(oldest)[0] and not drop_held:
            return False
        del per_key[oldest]
        return True
