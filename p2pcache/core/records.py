"""Packed records: what an engine and its node say of the chunks of one prompt, many at a time.

A prompt has hundreds of chunks. As lists of values each would cost several microseconds on both sides, so
`lookup` and `fetch` carry tables: bytes of records of one size, little endian, without padding.

    ASK     content key 16s | exact key 16s
    WANT    content key 16s | exact key 16s | tokens u32 | bytes u64 | provenance u8 | base position u32
            | codec u16 (index into the names) | holders u16 (how many)
    HOLDER  node u16 (index into the names) | incarnation u64 | tier u8
    ANSWER  match u8 | source u8 | peer u16 (name) | miss u8 | chosen u8 (of its found; NONE) | found u8
            (how many) | expected cost in seconds f64
    GRANT   source u8 | peer u16 (name) | transport u16 (name) | miss u8 | offset u64 | bytes u64
            | generation u64 | seconds f64

An enum is its place in its class; a miss counts from one, and zero is none. Names are a list of texts
beside the tables, of which the first is empty. Answers take their found bodies, and bodies their holders,
one after the other from the next table. Like all that arrives, records are a stranger's: `WireError` where a
value is out of bounds or the tables do not add up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from p2pcache.core.keys import ChunkKeys
from p2pcache.core.slot import Facts, Slot
from p2pcache.core.wire import ANSWER, ASK, GRANT, HOLDER_RECORD, HOLDERS_MAX, WANT, WireError
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

NONE = 255
MATCHES, SOURCES = tuple(Match), tuple(Source)
MISSES: tuple[Miss | None, ...] = (None, *Miss)
MATCH_CODE = {match: code for code, match in enumerate(MATCHES)}
SOURCE_CODE = {source: code for code, source in enumerate(SOURCES)}
_LOCAL = SOURCE_CODE[Source.LOCAL]
MISS_CODE = {miss: code for code, miss in enumerate(MISSES)}
WANT_FIELDS = np.dtype(
    [
        ("keys", "V32"),
        ("tokens", "<u4"),
        ("nbytes", "<u8"),
        ("provenance", "u1"),
        ("base_position", "<u4"),
        ("codec", "<u2"),
        ("holders", "<u2"),
    ]
)
_GRANT_FIELDS = np.dtype(
    [
        ("source", "u1"),
        ("peer", "<u2"),
        ("transport", "<u2"),
        ("miss", "u1"),
        ("offset", "<u8"),
        ("nbytes", "<u8"),
        ("generation", "<u8"),
        ("seconds", "<f8"),
    ]
)
HOLDER_FIELDS = np.dtype([("node", "<u2"), ("incarnation", "<u8"), ("tier", "u1")])
ANSWER_FIELDS = np.dtype(
    [
        ("match", "u1"),
        ("source", "u1"),
        ("peer", "<u2"),
        ("miss", "u1"),
        ("chosen", "u1"),
        ("found", "u1"),
        ("cost_s", "<f8"),
    ]
)
assert (WANT_FIELDS.itemsize, _GRANT_FIELDS.itemsize) == (WANT.size, GRANT.size)
assert (HOLDER_FIELDS.itemsize, ANSWER_FIELDS.itemsize) == (HOLDER_RECORD.size, ANSWER.size)


def pack_asked(chunks: Iterable[ChunkKeys]) -> bytes:
    """What a lookup asks for."""
    return b"".join([k.content + k.exact for k in chunks])


def unpack_asked(chunks: bytes) -> list[tuple[ContentKey, ExactKey]]:
    return list(ASK.iter_unpack(chunks))  # type: ignore[arg-type]


def pack_starts(starts: Sequence[int]) -> bytes:
    """Where each chunk begins in the prompt, in tokens."""
    return np.asarray(starts, dtype="<u4").tobytes()


def unpack_starts(starts: bytes) -> np.ndarray:
    """int64 `[chunks]`."""
    return np.frombuffer(starts, dtype="<u4").astype(np.int64)


def asked_tokens(wants: Bodies) -> list[int]:
    """How many tokens each body has."""
    return np.frombuffer(wants.bodies, WANT_FIELDS)["tokens"].tolist()


NAMES_MAX = 1 << 16  # a record's name has 16 bits


class Names:
    """Texts that records refer to by number."""

    def __init__(self) -> None:
        self.texts = [""]
        self._codes = {"": 0}

    def code(self, text: str) -> int:
        code = self._codes.get(text)
        if code is None:
            code = self._codes[text] = len(self.texts)
            self.texts.append(text)
        return code


class Bodies(NamedTuple):
    """Bodies with their holders, as tables."""

    names: list[str]
    bodies: bytes  # WANT
    holders: bytes  # HOLDER

    @property
    def count(self) -> int:
        return len(self.bodies) // WANT.size

    def first(self, count: int) -> Bodies:
        """The first `count` of them, with their holders."""
        if count >= self.count:
            return self
        bodies = self.bodies[: count * WANT.size]
        holders = sum(row[-1] for row in WANT.iter_unpack(bodies))
        return Bodies(self.names, bodies, self.holders[: holders * HOLDER_RECORD.size])

    def found(self) -> list[Found]:
        """As objects. Raises WireError."""
        names, out, at = self.names, [], 0
        try:
            holders = _holders(self.holders, names)
            for content, exact, tokens, nbytes, provenance, base, codec, count in WANT.iter_unpack(
                self.bodies
            ):
                if tokens >> 31 or nbytes >> 63 or base >> 31 or count > HOLDERS_MAX:
                    raise WireError("a number of a body is out of bounds")
                body = BodyInfo(
                    ContentKey(content),
                    ExactKey(exact),
                    tokens,
                    nbytes,
                    Provenance(provenance),
                    base,
                    names[codec],
                )
                out.append(Found(body, tuple(holders[at : at + count])))
                at += count
        except (ValueError, IndexError) as error:
            raise WireError(f"not a table of bodies: {error!r}") from None
        if at != len(holders):
            raise WireError(f"{at} holders were spoken of, and there are {len(holders)}")
        return out


def pack_bodies(found: Iterable[tuple[BodyInfo, Sequence[Holder]]], names: Names | None = None) -> Bodies:
    """Tables of bodies with their holders. names: of other records beside them."""
    names = names or Names()
    bodies, holders = [], []
    for body, held_by in found:
        bodies.append(pack_body(body, names, len(held_by)))
        holders += [HOLDER_RECORD.pack(names.code(h.node), h.incarnation, h.tier) for h in held_by]
    return Bodies(names.texts, b"".join(bodies), b"".join(holders))


def pack_body(body: BodyInfo, names: Names, holders: int) -> bytes:
    b = body
    codec = names.code(b.codec)
    return WANT.pack(b.content, b.exact, b.tokens, b.nbytes, b.provenance, b.base_position, codec, holders)


class Answer(NamedTuple):
    """What a lookup says of one chunk: the plan, and every body and holder known."""

    match: Match
    source: Source
    peer: str
    miss: Miss | None
    body: BodyInfo | None
    found: tuple[Found, ...]
    cost_s: float


def pack_answers(answers: Iterable[Answer], patience_s: float | None = None) -> dict[str, Any]:
    """A lookup's reply. patience_s: a fetch that takes longer is slower than computing.

    An answer that no name is left for says that nothing was found: other nodes choose most of these names.
    """
    names, rows, found = Names(), [], []
    spoken = {""}
    for a in answers:
        fresh = set(_texts(a)) - spoken
        if len(spoken) + len(fresh) <= NAMES_MAX:
            spoken |= fresh
        else:
            a = Answer(Match.NONE, Source.RECOMPUTE, "", Miss.BUSY, None, (), a.cost_s)
        chosen = NONE
        if a.body is not None:
            chosen = next(i for i, f in enumerate(a.found) if f.body.exact == a.body.exact)
        rows.append(
            ANSWER.pack(
                MATCH_CODE[a.match],
                SOURCE_CODE[a.source],
                names.code(a.peer),
                MISS_CODE[a.miss],
                chosen,
                len(a.found),
                a.cost_s,
            )
        )
        found += [(f.body, f.holders) for f in a.found]
    tables = pack_bodies(found, names)
    return {
        "names": tables.names,
        "answers": b"".join(rows),
        "found": tables.bodies,
        "holders": tables.holders,
        "patience_s": patience_s,
    }


def _texts(answer: Answer) -> Iterator[str]:
    """The names that an answer needs."""
    yield answer.peer
    for found in answer.found:
        yield found.body.codec
        yield from (holder.node for holder in found.holders)


def unpack_answers(reply: Mapping[str, Any]) -> list[Answer]:
    """The answers of a lookup's reply. Raises WireError."""
    names = reply["names"]
    found = Bodies(names, reply["found"], reply["holders"]).found()
    out, at = [], 0
    try:
        for match, source, peer, miss, chosen, count, cost_s in ANSWER.iter_unpack(reply["answers"]):
            known = tuple(found[at : at + count])
            at += count
            body = None if chosen == NONE else known[chosen].body
            plan = MATCHES[match], SOURCES[source], names[peer], MISSES[miss]
            out.append(Answer(*plan, body, known, cost_s))
    except IndexError as error:
        raise WireError(f"not a table of answers: {error!r}") from None
    if at != len(found):
        raise WireError(f"{at} bodies were spoken of, and there are {len(found)}")
    return out


class HomeAnswers:
    """A lookup's reply of which every chunk's exact body lies in the asked node's host tier."""

    def __init__(self, node: str, incarnation: int, cost_s: float):
        self.tokens = 0
        self._names = Names()
        me = self._names.code(node)
        self._holder = HOLDER_RECORD.pack(me, incarnation, Tier.HOST)
        self._codes = MATCH_CODE[Match.EXACT], SOURCE_CODE[Source.LOCAL], me, 0, 0
        self._cost_s = cost_s
        self._alone = ANSWER.pack(*self._codes, 1, cost_s)
        self._answers: list[bytes] = []
        self._found: list[bytes] = []
        self._holders: list[bytes] = []

    def add(self, facts: Facts) -> None:
        """The next chunk's body, when no other is known under its content key."""
        content, exact, tokens, nbytes, provenance, base_position, codec = facts
        self.tokens += tokens
        self._answers.append(self._alone)
        self._holders.append(self._holder)
        code = self._names.code(codec)
        self._found.append(WANT.pack(content, exact, tokens, nbytes, provenance, base_position, code, 1))

    def add_among(self, found: Sequence[Found]) -> None:
        """The next chunk's body, first of several."""
        self.tokens += found[0].body.tokens
        self._answers.append(ANSWER.pack(*self._codes, len(found), self._cost_s))
        for f in found:
            self._found.append(pack_body(f.body, self._names, len(f.holders)))
            self._holders += [
                HOLDER_RECORD.pack(self._names.code(h.node), h.incarnation, h.tier) for h in f.holders
            ]

    def reply(self) -> dict[str, Any]:
        return {
            "names": self._names.texts,
            "answers": b"".join(self._answers),
            "found": b"".join(self._found),
            "holders": b"".join(self._holders),
            "patience_s": None,
        }


def chosen_alone(reply: Mapping[str, Any], asked: bytes, tokens: Sequence[int]) -> Bodies | None:
    """The bodies that a lookup chose, where that is each chunk's exact one and no other is known; else None.

    They are then what `fetch` asks for as they stand, the chosen holder first, and `unpack_answers` will not
    fail. asked: the table of keys. tokens: of each chunk.
    """
    names, count = reply["names"], len(asked) // ASK.size
    answers = np.frombuffer(reply["answers"], ANSWER_FIELDS)
    rows = np.frombuffer(reply["found"], WANT_FIELDS)
    holders = np.frombuffer(reply["holders"], HOLDER_FIELDS)
    if not count or (len(answers), len(rows)) != (count, count):
        return None
    held = rows["holders"].astype(np.int64)
    if held.min() < 1 or held.max() > HOLDERS_MAX or held.sum() != len(holders):
        return None
    sound = (
        not answers["miss"].any()
        and not answers["chosen"].any()
        and (answers["match"] == MATCH_CODE[Match.EXACT]).all()
        and (answers["found"] == 1).all()
        and answers["source"].max() < len(SOURCES)
        and (answers["peer"] == holders["node"][held.cumsum() - held]).all()
        and holders["node"].max() < len(names)
        and holders["incarnation"].max() < 2**63
        and holders["tier"].max() <= max(Tier)
        and rows["keys"].tobytes() == asked
        and np.array_equal(rows["tokens"], tokens)
        and rows["provenance"].max() <= max(Provenance)
        and rows["codec"].max() < len(names)
        and rows["nbytes"].max() < 2**63
        and max(rows["tokens"].max(), rows["base_position"].max()) < 2**31
    )
    return Bodies(names, reply["found"], reply["holders"]) if sound else None


def pack_leased(slot: Slot) -> bytes:
    """The grant of a slot that lay at hand."""
    generation, nbytes, offset = slot.place
    return GRANT.pack(_LOCAL, 0, 0, 0, offset, nbytes, generation, 0.0)


class GrantRow(NamedTuple):
    """What became of one body that was asked for. generation: 0 without a lease."""

    source: Source
    peer: str
    transport: str
    miss: Miss | None
    offset: int
    nbytes: int
    generation: int
    seconds: float


def unpack_grants(names: Sequence[str], grants: bytes) -> list[GrantRow]:
    """The rows of a fetch's reply. Raises WireError."""
    new = tuple.__new__  # half the time of calling the class
    try:
        return [
            new(GrantRow, (SOURCES[source], names[peer], names[transport], MISSES[miss], *rest))
            for source, peer, transport, miss, *rest in GRANT.iter_unpack(grants)
        ]
    except IndexError:
        raise WireError("a grant names what there is not") from None


def leased(grants: bytes) -> list[int]:
    """The generations of the slots that a fetch leased."""
    generations = np.frombuffer(grants, _GRANT_FIELDS)["generation"]
    return generations[generations != 0].tolist()


def check_grants(names: Sequence[str], grants: bytes, count: int) -> None:
    """Raise WireError unless there are so many grants and `unpack_grants` will not fail."""
    rows = np.frombuffer(grants, _GRANT_FIELDS)
    if len(rows) != count:
        raise WireError(f"there are {len(rows)} grants for {count} bodies")
    sound = (
        rows["source"].max() < len(SOURCES)
        and rows["miss"].max() < len(MISSES)
        and max(rows["peer"].max(), rows["transport"].max()) < len(names)
    )
    if not sound:
        raise WireError("a grant names what there is not")


def _holders(table: bytes, names: Sequence[str]) -> list[Holder]:
    made: dict[tuple[int, ...], Holder] = {}  # the same few, many times
    out = []
    for row in HOLDER_RECORD.iter_unpack(table):
        holder = made.get(row)
        if holder is None:
            name, incarnation, tier = row
            if incarnation >> 63:
                raise WireError("an incarnation is out of bounds")
            holder = made[row] = Holder(names[name], incarnation, Tier(tier))
        out.append(holder)
    return out
