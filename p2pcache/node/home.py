"""What a node answers out of its own host tier, without a step that waits.

A prompt that this host has seen before is the cache's common case. So it takes no tasks, no directory and
no objects a chunk: packed records in, packed records out. Whatever is not at home goes the long way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from p2pcache.core.directory import BODIES_PER_KEY_MAX
from p2pcache.core.planner import LOCAL_S, Costs, rank_bodies
from p2pcache.core.records import Bodies, HomeAnswers
from p2pcache.core.tiers import Slot
from p2pcache.core.wire import WANT
from p2pcache.node.counters import Counters
from p2pcache.node.residency import Residency
from p2pcache.node.session import Session
from p2pcache.node.sight import Sight
from p2pcache.types import ContentKey, ExactKey, TierFull


class Home:
    """The host tier's side of lookup and fetch. Belongs to the node's loop."""

    def __init__(
        self,
        name: str,
        incarnation: int,
        residency: Residency,
        costs: Costs,
        counters: Counters,
        sight: Sight,
        clock: Callable[[], float],
    ):
        self._name = name
        self._incarnation = incarnation
        self._residency = residency
        self._costs = costs
        self._counters = counters
        self._sight = sight
        self._clock = clock

    def lookup(self, chunks: Sequence[tuple[ContentKey, ExactKey]]) -> dict[str, Any] | None:
        """The reply to a lookup, as `Node.lookup` would give it; None unless all of it is at home."""
        started_s = self._clock()
        get, by_content = self._residency.tier.get, self._residency.tier.by_content
        with_nvme = self._residency.has_nvme
        prefill = self._costs.prefill
        if prefill.known and prefill.seconds(1, 0) < LOCAL_S:
            return None  # a short chunk may be sooner computed than looked at
        answers = HomeAnswers(self._name, self._incarnation, LOCAL_S)
        for content, exact in chunks:
            slot = get(exact)
            if slot is None:
                return None
            facts = slot.facts
            if facts[0] != content:
                return None
            if not with_nvme and len(by_content(content)) == 1:
                answers.add(facts)
            else:
                answers.add_among(rank_bodies(self._residency.find(content), exact)[:BODIES_PER_KEY_MAX])
        self._counters["lookups"] += 1
        self._counters["chunks"] += len(chunks)
        self._counters["hits_exact"] += len(chunks)
        self._sight.looked_up_at_home(len(chunks), answers.tokens, self._clock() - started_s)
        return answers.reply()

    def lease(self, session: Session, wants: Bodies) -> list[Slot | None]:
        """Lease to an engine what it wants and the host tier has; None for what must be looked at again."""
        tier, names, out = self._residency.tier, wants.names, []
        for content, exact, tokens, nbytes, provenance, base, codec, _ in WANT.iter_unpack(wants.bodies):
            slot = tier.lease(exact)
            if slot is not None:
                told = content, exact, tokens, nbytes, provenance, base
                as_told = codec < len(names) and slot.facts == (*told, names[codec])
                if not as_told:
                    tier.release(slot)
                    slot = None
                else:
                    try:
                        session.adopt(slot)
                    except TierFull:
                        slot = None
            out.append(slot)
        return out
