"""What is known of a prompt means the same whether it stays columns or is looked at as objects."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pcache.core.found import Writer
from p2pcache.core.planner import Costs
from p2pcache.core.records import MISS_CODE, Answer, unpack_answers
from p2pcache.node.gather import Heard, Known, Sightings
from p2pcache.types import BodyInfo, ContentKey, ExactKey, Found, Holder, Match, Miss, Source, Tier

ME = "me"
CONTENTS = [ContentKey(bytes([i]) * 16) for i in range(5)]
MEASURED = dict(ways={"a": "tcp", "b": "shm"}, busy_bytes={}, costs=Costs(1e4), content_reuse=True, now_s=0.0)
peers = st.lists(
    st.builds(Holder, st.sampled_from(["a", "a", "b", "b", "c", ME]), st.just(1), st.sampled_from(Tier)),
    min_size=1,
    max_size=3,
    unique_by=lambda h: h.node,
)


class AsObjects(Known):
    def _is_single(self) -> bool:
        return False


def body(content: ContentKey, context: int) -> BodyInfo:
    return BodyInfo(content, ExactKey(bytes([context]) + content[1:]), 256, 1 << 20)


def heard(asked: list[ContentKey], places: list[int], found: dict[ContentKey, list[Found]]) -> Heard:
    writer = Writer()
    for place in places:
        writer.add(found.get(asked[place], ()))
    return Heard(np.array(places, np.int64), writer.table())


@st.composite
def knowledge(draw) -> dict:
    contents = draw(st.lists(st.sampled_from(CONTENTS), min_size=1, max_size=6))
    contents = contents if draw(st.booleans()) else list(dict.fromkeys(contents))
    chunks = [(c, body(c, draw(st.sampled_from([100, 100, 101]))).exact) for c in contents]
    usual = draw(st.booleans())  # most prompts; the others try what is odd
    home: dict[ContentKey, list[Found]] = {}
    for content, exact in chunks:
        if draw(st.booleans()):
            tier = Tier.HOST if usual else draw(st.sampled_from([Tier.HOST, Tier.NVME]))
            contexts = [exact[0]] if usual else draw(st.lists(st.integers(99, 101), min_size=1, unique=True))
            home[content] = [Found(body(content, n), (Holder(ME, 1, tier),)) for n in contexts]
    everywhere = not usual and draw(st.booleans())
    asked = [c for c, e in chunks if everywhere or all(f.body.exact != e for f in home.get(c, ()))]
    asked = list(dict.fromkeys(asked))
    found: dict[ContentKey, list[Found]] = {}
    for content in asked:
        contexts = draw(st.lists(st.integers(99, 101), max_size=1 if usual else 3, unique=True))
        holders = peers.filter(lambda held: not usual or all(h.node != ME for h in held)).map(tuple)
        found[content] = [Found(body(content, n), draw(holders)) for n in contexts]
    order = draw(st.permutations(range(len(asked))))
    cut = draw(st.integers(0, len(order)))
    silent = draw(st.booleans())
    said = [heard(asked, p, found) for p in (order[:cut], order[cut:]) if p][: 1 if silent else 2]
    absent = [MISS_CODE[draw(st.sampled_from([Miss.ABSENT, Miss.UNKNOWN]))] for _ in asked]
    starts = np.arange(0, 256 * len(chunks), 256)
    return dict(
        me=ME,
        keys=b"".join(c + e for c, e in chunks),
        chunks=chunks,
        starts=starts,
        home=home,
        asked=asked,
        heard=said,
        absent=np.array(absent, np.uint8),
    )


def plain(answer: Answer) -> tuple:
    """Without the order of holders, which is the planner's in columns."""
    found = [(f.body, sorted(f.holders, key=repr)) for f in answer.found]
    return (*answer[:5], found, answer.cost_s)


@settings(max_examples=400, deadline=None)
@given(knowledge())
def test_columns_and_objects_say_the_same(known):
    tally, reply = Known(**known).planned(**MEASURED)
    long_tally, long_reply = AsObjects(**known).planned(**MEASURED)
    assert list(map(plain, unpack_answers(reply))) == list(map(plain, unpack_answers(long_reply)))
    assert reply["patience_s"] == long_reply["patience_s"]
    assert (tally.chunks, tally.hits, tally.misses) == (long_tally.chunks, long_tally.hits, long_tally.misses)
    assert Counter(tally.tokens) == Counter(long_tally.tokens)


def test_a_prompt_that_is_partly_at_home_stays_columns():
    chunks = [(c, body(c, 100).exact) for c in CONTENTS]
    home = {CONTENTS[1]: [Found(body(CONTENTS[1], 100), (Holder(ME, 1, Tier.HOST),))]}
    asked = [CONTENTS[i] for i in (0, 2, 3, 4)]
    both = Holder("a", 1, Tier.HOST), Holder("b", 1, Tier.HOST)
    away = {c: [Found(body(c, 100), both)] for c in asked[:2]}
    known = Known(
        ME,
        b"".join(c + e for c, e in chunks),
        chunks,
        np.arange(0, 5 * 256, 256),
        home,
        asked,
        [heard(asked, [1, 3], away), heard(asked, [0], away)],
        np.array([MISS_CODE[m] for m in (Miss.ABSENT, Miss.ABSENT, Miss.DEADLINE, Miss.ABSENT)], np.uint8),
    )
    assert known._is_single()
    _, reply = known.planned(**MEASURED)
    answers = unpack_answers(reply)
    assert [a.source for a in answers] == [
        Source.PEER,
        Source.LOCAL,
        Source.PEER,
        Source.RECOMPUTE,
        Source.RECOMPUTE,
    ]
    assert [a.miss for a in answers] == [None, None, None, Miss.DEADLINE, Miss.ABSENT]
    assert [a.match for a in answers[:3]] == [Match.EXACT] * 3


def test_what_others_say_of_this_node_counts_only_while_it_is_so():
    here = Found(body(CONTENTS[0], 100), (Holder(ME, 1, Tier.HOST), Holder("a", 1, Tier.HOST)))
    for at_home, holders in (({here.body.exact}, {ME, "a"}), (set(), {"a"})):
        sightings = Sightings(ME, at_home)
        sightings.add(CONTENTS[0], [here])
        (found,) = sightings.under(CONTENTS[0], here.body.exact)
        assert {h.node for h in found.holders} == holders
