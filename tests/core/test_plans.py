"""A prompt planned in columns is the prompt planned chunk by chunk, to the bit, and packed alike."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pcache import _native
from p2pcache.core.found import Table, Writer
from p2pcache.core.planner import Asked, Costs, plan
from p2pcache.core.plans import Tally, plan_singles
from p2pcache.core.rates import Rate
from p2pcache.core.records import MISS_CODE, chosen_alone, unpack_answers
from p2pcache.types import (
    BodyInfo,
    ContentKey,
    ExactKey,
    Found,
    Holder,
    Match,
    Miss,
    Provenance,
    Source,
    Tier,
)

ME = "me"
WAYS = {"far": "tcp", "other": "tcp", "ucx": "ucx", "near": "shm"}
speeds = st.floats(1e6, 1e10)
peers = st.lists(
    st.tuples(st.sampled_from([*WAYS, "unreached"]), st.integers(1, 2), st.sampled_from(Tier)),
    min_size=1,
    max_size=4,
    unique_by=lambda h: h[:2],
)


@st.composite
def prompts(draw) -> list[tuple[bytes, Asked]]:
    """Content key and chunk: known of not at all, at home, or in one body at peers."""
    out, start = [], 0
    for i in range(draw(st.integers(1, 12))):
        content, exact = bytes([i]) * 16, bytes([100 + i]) * 16
        tokens, nbytes = draw(st.integers(1, 2000)), draw(st.sampled_from([0, 1, 4096, 1 << 20, 7 << 20]))
        held = draw(st.sampled_from(["peers", "peers", "home", "nowhere"]))
        moved = held == "peers" and draw(st.sampled_from([False, False, True]))
        key = ExactKey(bytes([200 - i]) * 16 if moved else exact)
        kind = draw(st.sampled_from(Provenance))
        body = BodyInfo(
            ContentKey(content), key, tokens, nbytes, kind, start, draw(st.sampled_from(["raw", "int8"]))
        )
        holders = [(ME, 7, Tier.HOST)] if held == "home" else draw(peers)
        found = () if held == "nowhere" else (Found(body, tuple(Holder(*h) for h in holders)),)
        reason = draw(st.sampled_from([Miss.ABSENT, Miss.UNKNOWN, Miss.DEADLINE]))
        out.append((content, Asked(ExactKey(exact), start, found, reason)))
        start += tokens
    return out


@st.composite
def measured(draw) -> Costs:
    costs = Costs(draw(st.sampled_from([0.0, 1e2, 1e4, 1e5, 1e7])))
    for name, way in WAYS.items():
        if draw(st.booleans()):
            costs.rate(way, name).observe(1 << 26, (1 << 26) / draw(speeds), 0.0)
            costs.rate(way, name).observe_latency(draw(st.floats(1e-6, 1e-2)), 0.0)
    if draw(st.booleans()):
        costs.inlet.rate = Rate(0.0, draw(speeds))
    if costs.prefill.known and draw(st.booleans()):
        costs.prefill._pair_s = draw(st.floats(0, 1e-7))
    return costs


def parts_of(prompt: list[tuple[bytes, Asked]], parts: int) -> list[tuple[np.ndarray, Table]]:
    """As tables of several owners, of which each knows its share of the keys."""
    writers = [Writer() for _ in range(parts)]
    for i, (_, asked) in enumerate(prompt):
        writers[i % parts].add(asked.found)
    return [(np.arange(part, len(prompt), parts), w.table()) for part, w in enumerate(writers)]


@settings(max_examples=600, deadline=None)
@given(
    prompts(),
    measured(),
    st.booleans(),
    st.sampled_from([math.inf, math.inf, 1e-9, 1e-3, 0.05, 1.0]),
    st.dictionaries(st.sampled_from(list(WAYS)), st.integers(0, 1 << 28)),
    st.integers(1, 3),
    st.sampled_from([0.0, 100.0]),
)
def test_columns_are_planned_like_objects(prompt, costs, content_reuse, within_s, busy, parts, now_s):
    measured = dict(
        me=ME,
        ways=WAYS,
        busy_bytes=busy,
        costs=costs,
        content_reuse=content_reuse,
        now_s=now_s,
        within_s=within_s,
    )
    chunks = [asked for _, asked in prompt]
    wanted = plan(chunks, **measured)
    asked = b"".join(content + chunk.exact for content, chunk in prompt)
    absent = np.array([MISS_CODE[chunk.absent] for chunk in chunks], np.uint8)
    starts = np.array([c.start for c in chunks], np.int64)
    ours = plan_singles(asked, starts, parts_of(prompt, parts), absent, **measured)
    assert (ours.fetch_s, ours.patience_s) == (wanted.fetch_s, wanted.patience_s)
    tally, theirs = ours.tally, Tally.of(wanted.choices)
    assert (tally.chunks, tally.hits, tally.misses) == (theirs.chunks, theirs.hits, theirs.misses)
    assert {m: n for m, n in tally.tokens.items() if n} == {m: n for m, n in theirs.tokens.items() if n}

    reply = ours.reply
    for answer, choice, chunk in zip(unpack_answers(reply), wanted.choices, chunks, strict=True):
        assert (answer.match, answer.source, answer.miss) == (choice.match, choice.source, choice.miss)
        assert (answer.body, answer.cost_s) == (choice.body, choice.cost_s)
        assert [f.body for f in answer.found] == [f.body for f in chunk.found]
        for mine, theirs in zip(answer.found, chunk.found, strict=True):
            assert sorted(mine.holders, key=repr) == sorted(theirs.holders, key=repr)
        if choice.body is None:
            assert answer.peer == ""
            continue
        first, *others = answer.found[0].holders
        assert first == choice.holders[0] and answer.peer == first.node
        assert others == sorted(others, key=lambda h: (h.tier, h.node))
    tokens = [c.found[0].body.tokens if c.found else 1 for c in chunks]
    alone = chosen_alone(reply, asked, tokens)
    assert (alone is not None) == all(c.match is Match.EXACT for c in wanted.choices)
    if alone is not None:
        assert [(f.body, f.holders[0]) for f in alone.found()] == [
            (c.body, c.holders[0]) for c in wanted.choices
        ]


def test_lines_are_shared_in_the_prompts_order():
    """Two holders of one rate: they take turns, and the first by name begins."""
    writer, keys = Writer(), [bytes([i]) * 16 for i in range(4)]
    for key in keys:
        body = BodyInfo(ContentKey(key), ExactKey(key), 256, 1 << 20)
        writer.add([Found(body, (Holder("other", 1, Tier.HOST), Holder("far", 1, Tier.HOST)))])
    ours = plan_singles(
        b"".join(2 * key for key in keys),
        np.array([0, 256, 512, 768]),
        [(np.arange(4), writer.table())],
        np.zeros(4, np.uint8),
        me=ME,
        ways=WAYS,
        busy_bytes={},
        costs=Costs(),
        content_reuse=False,
        now_s=0.0,
    )
    answers = unpack_answers(ours.reply)
    assert [a.peer for a in answers] == ["far", "other", "far", "other"]
    assert all(a.source is Source.PEER for a in answers)
    assert ours.patience_s is None and ours.fetch_s == answers[-1].cost_s > answers[0].cost_s


def single(holders: int = 1) -> Table:
    writer, key = Writer(), bytes(16)
    body = BodyInfo(ContentKey(key), ExactKey(key), 256, 1 << 20)
    writer.add([Found(body, tuple(Holder(f"n{i}", 1, Tier.HOST) for i in range(holders)))])
    return writer.table()


ROW = np.arange(1)
MISFITS = {
    "a place that is none": [(ROW + 1, single())],
    "a place below zero": [(ROW - 1, single())],
    "a chunk known twice": [(ROW, single()), (ROW, single())],
    "not a count a place": [(np.arange(0), single())],
    "no bodies": [(ROW, single()._replace(bodies=b""))],
    "half a body": [(ROW, single()._replace(bodies=b"1"))],
    "no holders": [(ROW, single()._replace(holders=b""))],
    "two bodies": [(ROW, single()._replace(counts=b"\x02"))],
    "an unknown holder": [(ROW, single()._replace(names=[], incarnations=b""))],
    "an unknown codec": [(ROW, single()._replace(codecs=[]))],
    "too few incarnations": [(ROW, single()._replace(incarnations=b""))],
}


@pytest.mark.parametrize("parts", MISFITS.values(), ids=MISFITS)
def test_parts_that_do_not_fit_together_are_refused(parts):
    with pytest.raises(ValueError):
        _native.Singles(bytes(32), parts)
    singles = _native.Singles(bytes(32), [(ROW, single(2))])
    members, lines, absent = np.zeros(2, "<i8"), np.zeros((1, 5)), np.zeros(1, np.uint8)
    rest = False, 0.0, 0.0, 0.0, 1.0, True
    after = 1.5, 0.02, bytes(10)
    assert singles.plan(members, lines, *rest, absent, None, *after)
    for broken in (
        (members[1:], lines, *rest, absent, None, *after),
        (members + 5, lines, *rest, absent, None, *after),
        (members, lines[:0], True, *rest[1:], absent, None, *after),
        (members, lines, *rest, absent[:0], None, *after),
        (members, lines, *rest, absent, np.zeros(2), *after),
        (members, lines, *rest, absent, None, *after[:2], b""),
    ):
        with pytest.raises(ValueError):
            singles.plan(*broken)
