"""Packed records: what is packed is understood, and damage is a WireError or another valid table."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pcache.core import records, wire
from p2pcache.core.keys import ChunkKeys
from p2pcache.core.records import (
    Answer,
    Bodies,
    HomeAnswers,
    check_grants,
    chosen_alone,
    leased,
    pack_answers,
    pack_asked,
    pack_bodies,
    unpack_answers,
    unpack_asked,
    unpack_grants,
)
from p2pcache.core.wire import ANSWER, GRANT, HOLDER_RECORD, WANT, WireError
from p2pcache.types import BodyInfo, Found, Holder, Match, Miss, Provenance, Source, Tier

keys = st.binary(min_size=16, max_size=16)
names = st.sampled_from(["", "a", "node-1", "Zürich"])
u31, u63 = st.integers(0, 2**31 - 1), st.integers(0, 2**63 - 1)
bodies = st.builds(
    BodyInfo, keys, keys, u31, u63, st.sampled_from(Provenance), u31, st.sampled_from(["raw", "int8"])
)
holders = st.builds(Holder, names, u63, st.sampled_from(Tier))
founds = st.builds(Found, bodies, st.lists(holders, max_size=3).map(tuple))
costs = st.floats(0, 1e6)


def facts(b: BodyInfo) -> tuple[Any, ...]:
    """A body as a slot says it."""
    return b.content, b.exact, b.tokens, b.nbytes, int(b.provenance), b.base_position, b.codec


@st.composite
def answers(draw) -> Answer:
    found = draw(st.lists(founds, max_size=4, unique_by=lambda f: f.body.exact))
    body = draw(st.sampled_from([None, *(f.body for f in found)]))
    return Answer(
        draw(st.sampled_from(Match)),
        draw(st.sampled_from(Source)),
        draw(names),
        draw(st.sampled_from([None, *Miss])),
        body,
        tuple(found),
        draw(costs),
    )


def test_codes_are_what_they_are():
    """Both ends are of one version, and a version's codes stay: enums grow at their ends."""
    assert [m.value for m in records.MATCHES] == ["exact", "content", "none"]
    assert [s.value for s in records.SOURCES] == ["local", "nvme", "peer", "recompute"]
    assert records.MISSES[:3] == (None, Miss.ABSENT, Miss.UNKNOWN)


@given(st.lists(st.tuples(keys, keys), max_size=4))
def test_what_is_asked_comes_back(pairs):
    chunks = [ChunkKeys(0, 1, bytes(32), content, exact) for content, exact in pairs]
    assert unpack_asked(pack_asked(chunks)) == pairs


@settings(max_examples=200, deadline=None)
@given(st.lists(founds, max_size=5))
def test_bodies_make_a_round_trip(found):
    packed = pack_bodies([(f.body, f.holders) for f in found])
    assert packed.found() == found and packed.count == len(found)


@settings(max_examples=200, deadline=None)
@given(st.lists(answers(), max_size=5))
def test_answers_make_a_round_trip(given_answers):
    reply = pack_answers(given_answers)
    wire.OPS["lookup"][1](reply)
    assert unpack_answers(reply) == given_answers


@settings(max_examples=300, deadline=None)
@given(st.lists(answers(), min_size=1, max_size=3), st.data())
def test_damage_is_a_wire_error_or_another_table(given_answers, data):
    reply = dict(pack_answers(given_answers))
    table = data.draw(st.sampled_from(["answers", "found", "holders", "names"]))
    raw = bytearray(reply[table]) if table != "names" else reply[table]
    if table == "names" or not raw or data.draw(st.booleans()):
        size = {"answers": ANSWER.size, "found": WANT.size, "holders": HOLDER_RECORD.size, "names": 1}[table]
        reply[table] = reply[table][: -size or None]
    else:
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
        reply[table] = bytes(raw)
    asked = bytes(32 * len(given_answers))
    assert chosen_alone(reply, asked, [1] * len(given_answers)) is None or unpack_answers(reply)
    try:
        read = unpack_answers(reply)
    except WireError:
        return
    assert all(isinstance(a, Answer) for a in read)


@settings(max_examples=100, deadline=None)
@given(st.lists(bodies, min_size=1, max_size=4), u63, costs, st.data())
def test_answers_from_home_are_those_of_the_long_way(at_home, incarnation: int, cost_s: float, data):
    home, expected = HomeAnswers("me", incarnation, cost_s), []
    me = Holder("me", incarnation, Tier.HOST)
    for body in at_home:
        others = data.draw(st.lists(founds, max_size=2, unique_by=lambda f: f.body.exact))
        others = [f for f in others if f.body.exact != body.exact]
        found = (Found(body, (me,)), *others)
        if others:
            home.add_among(found)
        else:
            home.add(facts(body))
        expected.append(Answer(Match.EXACT, Source.LOCAL, "me", None, body, found, cost_s))
    assert home.tokens == sum(b.tokens for b in at_home)
    assert unpack_answers(home.reply()) == expected
    asked = b"".join(b.content + b.exact for b in at_home)
    alone = chosen_alone(home.reply(), asked, [b.tokens for b in at_home])
    if all(len(a.found) == 1 for a in expected):
        assert alone is not None and alone.found() == [a.found[0] for a in expected]
    else:
        assert alone is None


def test_what_another_body_answers_is_not_taken_as_it_stands():
    body = BodyInfo(bytes(16), b"e" * 16, 7, 70)
    home = HomeAnswers("me", 1, 0.0)
    home.add(facts(body))
    asked = body.content + body.exact
    assert chosen_alone(home.reply(), asked, [7]) is not None
    assert chosen_alone(home.reply(), body.content + b"f" * 16, [7]) is None
    assert chosen_alone(home.reply(), b"c" * 16 + body.exact, [7]) is None
    assert chosen_alone(home.reply(), asked, [8]) is None
    assert chosen_alone(home.reply(), asked * 2, [7, 7]) is None
    found = home.reply()["found"]
    for at, value in ((32, 0xFFFFFFFF), (44, 3), (45, 0xFFFFFFFF), (49, 9), (51, 2), (51, 0)):
        damaged = bytearray(found)
        width = {32: 4, 44: 1, 45: 4, 49: 2, 51: 2}[at]
        damaged[at : at + width] = value.to_bytes(width, "little")
        tokens = [value] if at == 32 else [7]
        assert chosen_alone(home.reply() | {"found": bytes(damaged)}, asked, tokens) is None, at


def test_grants():
    texts = ["", "peer", "tcp"]
    rows = [(2, 1, 2, 0, 4096, 10, 5, 0.5), (3, 1, 0, 6, 0, 0, 0, 0.0)]
    table = b"".join(GRANT.pack(*row) for row in rows)
    check_grants(texts, table, 2)
    first, second = unpack_grants(texts, table)
    assert first == (Source.PEER, "peer", "tcp", None, 4096, 10, 5, 0.5)
    assert (second.miss, second.generation) == (Miss.DEADLINE, 0)
    assert leased(table) == [5]
    for wrong in ((9, 1, 2, 0), (2, 3, 2, 0), (2, 1, 3, 0), (2, 1, 2, 99)):
        bad = GRANT.pack(*wrong, 0, 0, 0, 0.0)
        with pytest.raises(WireError):
            check_grants(texts, bad, 1)
        with pytest.raises(WireError):
            list(unpack_grants(texts, bad))
    with pytest.raises(WireError):
        check_grants(texts, table, 3)


def test_bodies_are_bounded():
    body = BodyInfo(bytes(16), bytes(16), 1, 1)
    for packed in (
        Bodies([""], *pack_bodies([(body, ())])[1:]),
        pack_bodies([(body, [Holder("n", 1, Tier.HOST)] * 1025)]),
        pack_bodies([(body, [Holder("n", 2**63, Tier.HOST)])]),
        Bodies(["", "raw"], WANT.pack(bytes(16), bytes(16), 2**31, 1, 0, 0, 1, 0), b""),
        Bodies(["", "raw"], WANT.pack(bytes(16), bytes(16), 1, 2**63, 0, 0, 1, 0), b""),
        Bodies(["", "raw"], WANT.pack(bytes(16), bytes(16), 1, 1, 3, 0, 1, 0), b""),
        Bodies(["", "raw"], WANT.pack(bytes(16), bytes(16), 1, 1, 0, 0, 1, 1), HOLDER_RECORD.pack(0, 1, 3)),
    ):
        with pytest.raises(WireError):
            packed.found()


def test_answers_beyond_the_last_name_are_misses_and_all_before_them_stand(monkeypatch):
    monkeypatch.setattr(records, "NAMES_MAX", 5)

    def answer(number: int) -> Answer:
        body = BodyInfo(bytes([number]) * 16, bytes([number]) * 16, 16, 64)
        found = Found(body, (Holder(f"node-{number}", 1, Tier.HOST),))
        return Answer(Match.EXACT, Source.PEER, f"node-{number}", None, body, (found,), 0.5)

    told = unpack_answers(pack_answers([answer(1), answer(2), answer(3), answer(4), answer(1)]))
    miss = Answer(Match.NONE, Source.RECOMPUTE, "", Miss.BUSY, None, (), 0.5)
    assert told == [answer(1), answer(2), answer(3), miss, answer(1)]


def test_more_names_than_a_record_can_number_are_no_error():
    def answer(number: int) -> Answer:
        body = BodyInfo(bytes(16), bytes(16), 16, 64)
        found = Found(body, tuple(Holder(f"{number}-{i}", 1, Tier.HOST) for i in range(60)))
        return Answer(Match.EXACT, Source.PEER, f"{number}-0", None, body, (found,), 0.5)

    told = unpack_answers(pack_answers([answer(number) for number in range(1200)]))
    assert told[1000] == answer(1000) and told[-1].miss is Miss.BUSY
