"""Tables of findings: the same as the objects they are written from, and no broken one is taken."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from p2pcache import _native
from p2pcache.core.found import (
    BODIES_MAX,
    CODECS_MAX,
    HOLDERS_MAX,
    Table,
    Writer,
    defect,
    records_defect,
)
from p2pcache.types import BodyInfo, ContentKey, ExactKey, Found, Holder, Provenance, Tier

key = st.binary(min_size=16, max_size=16)
u31, u63 = st.integers(0, 2**31 - 1), st.integers(0, 2**63 - 1)
holder = st.builds(
    Holder, st.sampled_from(["a", "b", "ü" * 9]), st.integers(0, 1) | u63, st.sampled_from(Tier)
)
holders = st.lists(holder, min_size=1, max_size=4, unique_by=lambda h: (h.node, h.incarnation)).map(tuple)


@st.composite
def findings(draw, low: int = 0) -> dict[ContentKey, tuple[Found, ...]]:
    """What is known of some keys, in a table's order."""
    out = {}
    for content in draw(st.lists(key, min_size=low, max_size=4, unique=True)):
        exacts = draw(st.lists(key, max_size=BODIES_MAX, unique=True))
        codec = st.sampled_from(["raw", "bf16", "int8"])
        rest = st.tuples(u31, u63, st.sampled_from(Provenance), u31, codec)
        out[content] = tuple(Found(BodyInfo(content, e, *draw(rest)), draw(holders)) for e in exacts)
    return out


def table_of(known: dict[ContentKey, tuple[Found, ...]]) -> Table:
    writer = Writer()
    for found in known.values():
        writer.add(found)
    return writer.table()


@settings(max_examples=100, deadline=None)
@given(findings())
def test_a_table_says_what_it_was_written_from(known):
    table = table_of(known)
    assert defect(table) == ""
    assert dict(zip(known, table.objects(known), strict=True)) == known


@settings(max_examples=100, deadline=None)
@given(findings(1), st.data())
def test_every_truncation_of_a_column_is_found(known, data):
    table = table_of(known)
    column = data.draw(st.sampled_from(["incarnations", "counts", "bodies", "holders"]))
    whole = getattr(table, column)
    if whole:
        stop = data.draw(st.integers(0, len(whole) - 1))
        cut = defect(table._replace(**{column: whole[:stop]}))
        assert cut or (column == "counts" and not any(whole[stop:]))  # keys that nothing is known of


@settings(max_examples=300, deadline=None)
@given(findings(1), st.data())
def test_the_native_check_finds_what_its_twin_finds(known, data):
    table = table_of(known)
    columns = {c: bytearray(getattr(table, c)) for c in ("counts", "bodies", "holders")}
    for _ in range(data.draw(st.integers(1, 3))):
        column = columns[data.draw(st.sampled_from(list(columns)))]
        if column:
            column[data.draw(st.integers(0, len(column) - 1))] = data.draw(
                st.sampled_from([0, 1, 2, 3, 127, 128, 255])
            )
    raw = [bytes(c) for c in columns.values()]
    limits = len(table.names), len(table.codecs), data.draw(st.sampled_from([2, HOLDERS_MAX]))
    found = _native.found_defect(*raw, *limits)
    assert found == records_defect(*raw, *limits)
    if not found and limits[2] == HOLDERS_MAX:  # what passes can be used
        for bodies in table._replace(counts=raw[0], bodies=raw[1], holders=raw[2]).objects(known):
            assert len(bodies) <= BODIES_MAX
            assert all(len(set((h.node, h.incarnation) for h in f.holders)) == len(f.holders) for f in bodies)


@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=6), st.binary(max_size=80), st.binary(max_size=9), st.integers(0, 3), st.integers(0, 3)
)
def test_random_records_are_judged_alike(counts, bodies, holders, members, codecs):
    raw = counts, bodies, holders, members, codecs, HOLDERS_MAX
    assert _native.found_defect(*raw) == records_defect(*raw)


def test_what_there_is_no_room_for_is_left_out():
    writer = Writer()
    for i in range(CODECS_MAX + 2):
        body = BodyInfo(ContentKey(bytes(16)), ExactKey(i.to_bytes(16, "big")), 1, 1, codec=f"codec {i}")
        writer.add([Found(body, (Holder("a", 1, Tier.HOST),))])
    table = writer.table()
    assert defect(table) == "" and list(table.counts) == [1] * CODECS_MAX + [0, 0]

    crowd = tuple(Holder(f"n{i}", 1, Tier.HOST) for i in range(HOLDERS_MAX + 1))
    bodies = [BodyInfo(ContentKey(bytes(16)), ExactKey(bytes([i]) * 16), 1, 1) for i in range(BODIES_MAX + 1)]
    writer = Writer()
    writer.add(Found(body, crowd) for body in bodies)
    (found,) = writer.table().objects([ContentKey(bytes(16))])
    assert [f.body for f in found] == bodies[:BODIES_MAX] and found[0].holders == crowd[:HOLDERS_MAX]
