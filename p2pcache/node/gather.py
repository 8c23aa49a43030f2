"""What this node and the owners know of a prompt's chunks, added up.

Of nearly every prompt each chunk is known from one place, in one body: it is at home, or one owner has said
where it is. That stays columns. Where two have something to say of a chunk, or there are several bodies, all
is looked at as objects.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from p2pcache.core import planner
from p2pcache.core.directory import BODIES_PER_KEY_MAX
from p2pcache.core.found import Table, Writer
from p2pcache.core.planner import Asked, rank_bodies
from p2pcache.core.plans import Tally, plan_singles
from p2pcache.core.records import MISS_CODE, MISSES, Answer, pack_answers
from p2pcache.types import BodyInfo, ContentKey, ExactKey, Found, Holder, Miss, Tier

_NAMES_MAX = 1 << 15  # records number names with 16 bits; nobody honest tells of half as many


class Heard(NamedTuple):
    """What one owner said. places: of the contents that its table is of, int64 `[keys]`."""

    places: np.ndarray
    table: Table


class Sightings:
    """Bodies and their holders as far as anybody has said so, by content key."""

    def __init__(self, me: str, here: Container[ExactKey]):
        """here: the bodies that this node has; what others say of this node counts only of these."""
        self._me = me
        self._here = here
        self._bodies: dict[ContentKey, dict[ExactKey, BodyInfo]] = {}
        self._holders: dict[ExactKey, dict[str, Holder]] = {}

    def add(self, content: ContentKey, found: Iterable[Found]) -> None:
        """Take in what was said under a content key. A body of another content is nonsense and left out."""
        for one in found:
            if one.body.content != content:
                continue
            for holder in one.holders:
                if holder.node == self._me and one.body.exact not in self._here:
                    continue
                # The first word stands: this node speaks first of itself, and knows its own tier best.
                self._holders.setdefault(one.body.exact, {}).setdefault(holder.node, holder)
                self._bodies.setdefault(content, {})[one.body.exact] = one.body

    def under(self, content: ContentKey, exact: ExactKey) -> tuple[Found, ...]:
        """What is known of a chunk, best first, a bounded few: popular passages stand in many contexts."""
        bodies = self._bodies.get(content, {})
        found = (Found(body, tuple(self._holders[key].values())) for key, body in bodies.items())
        return tuple(rank_bodies(found, exact)[:BODIES_PER_KEY_MAX])


@dataclass(frozen=True, slots=True)
class Known:
    """All that has been said of a prompt's chunks.

    keys: content and exact key of each chunk, joined; chunks: the same one by one. starts: int64
    `[chunks]`, where each begins. home: by content, what is here. asked: distinct contents that the owners
    were asked for, in the prompt's order. heard: what they said, by place among these. absent: of each of
    these what it means where nothing is known, u8 `[asked]` as MISS_CODE.
    """

    me: str
    keys: bytes
    chunks: Sequence[tuple[ContentKey, ExactKey]]
    starts: np.ndarray
    home: Mapping[ContentKey, Sequence[Found]]
    asked: Sequence[ContentKey]
    heard: Sequence[Heard]
    absent: np.ndarray

    def planned(self, **measured: Any) -> tuple[Tally, dict[str, Any]]:
        """The plan, counted and as a lookup's reply. measured: the rest of what `planner.plan` takes."""
        if self._is_single():
            parts, absent = self._parts()
            singles = plan_singles(self.keys, self.starts, parts, absent, me=self.me, **measured)
            return singles.tally, singles.reply
        sightings = self._sightings()
        reasons = dict(zip(self.asked, map(MISSES.__getitem__, self.absent.tolist()), strict=True))
        asked = [
            Asked(exact, start, sightings.under(content, exact), reasons.get(content) or Miss.ABSENT)
            for (content, exact), start in zip(self.chunks, self.starts.tolist(), strict=True)
        ]
        plan = planner.plan(asked, me=self.me, **measured)
        answers = [_answer(c, tuple(a.found)) for c, a in zip(plan.choices, asked, strict=True)]
        return Tally.of(plan.choices), pack_answers(answers, plan.patience_s)

    def _is_single(self) -> bool:
        """Whether each chunk is of another content, known in one body at most and from one place."""
        return (
            self.home.keys().isdisjoint(self.asked)
            and len(self.asked) + len(self.home) == len(self.chunks)  # no content twice
            and all(len(f) == 1 and f[0].holders[0].tier is Tier.HOST for f in self.home.values())
            and not any(self.me in h.table.names or max(h.table.counts, default=0) > 1 for h in self.heard)
            and sum(len(h.table.names) + len(h.table.codecs) for h in self.heard) <= _NAMES_MAX
        )

    def _parts(self) -> tuple[list[tuple[np.ndarray, Table]], np.ndarray]:
        """What is known, as tables with the chunks that each is of; and `absent` by chunk."""
        if not self.home:
            return [(h.places, h.table) for h in self.heard], self.absent
        at_home = Writer()
        here = [i for i, (content, _) in enumerate(self.chunks) if content in self.home]
        for i in here:
            at_home.add(self.home[self.chunks[i][0]])
        elsewhere = np.delete(np.arange(len(self.chunks)), here)
        absent = np.full(len(self.chunks), MISS_CODE[Miss.ABSENT], np.uint8)
        absent[elsewhere] = self.absent
        parts = [(elsewhere[h.places], h.table) for h in self.heard]
        return [*parts, (np.array(here, np.int64), at_home.table())], absent

    def _sightings(self) -> Sightings:
        sightings = Sightings(self.me, {f.body.exact for found in self.home.values() for f in found})
        for content, found in self.home.items():
            sightings.add(content, found)
        for places, table in self.heard:
            contents = [self.asked[place] for place in places.tolist()]
            for content, found in zip(contents, table.objects(contents), strict=True):
                sightings.add(content, found)
        return sightings


def _answer(choice: planner.Choice, found: tuple[Found, ...]) -> Answer:
    peer = choice.holders[0].node if choice.holders else ""
    return Answer(choice.match, choice.source, peer, choice.miss, choice.body, found, choice.cost_s)
