"""Identity: no field left out, none confused with another, nothing that depends on the process."""

from __future__ import annotations

import dataclasses
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pcache import _native
from p2pcache.core.keys import (
    CHAIN_ROOT,
    Namespace,
    body_key,
    chunk_keys,
    chunk_keys_py,
    exact_key,
    hash_salt,
    lossy_key,
    named_key,
)
from p2pcache.core.layout import DTYPE_BYTES, KVLayout
from p2pcache.types import ConfigError, Provenance

LAYOUT = KVLayout(30, 3, 64, "bfloat16")
BASE = Namespace("SmolLM2", "00ff", LAYOUT)
KEY = BASE.key()

words = st.text(st.characters(codec="utf-8"), max_size=6)
blobs = st.binary(max_size=8)
groups = st.integers(1, 2**40).flatmap(lambda size: st.tuples(st.integers(0, size - 1), st.just(size)))


@st.composite
def namespaces(draw) -> Namespace:
    layout = KVLayout(
        draw(st.integers(1, 1024)),
        draw(st.integers(1, 4096)),
        draw(st.integers(1, 65536)),
        draw(st.sampled_from(list(DTYPE_BYTES))),
    )
    tp, pp = draw(groups), draw(groups)
    extras = draw(st.dictionaries(words, blobs, max_size=3))
    return Namespace(
        draw(words.filter(bool)),
        draw(words.filter(bool)),
        layout,
        draw(st.none() | blobs),
        *tp,
        *pp,
        draw(st.none() | words),
        draw(st.none() | blobs),
        tuple(sorted(extras.items())),
    )


# One difference each. What is absent, empty or zero stands beside what it could be taken for.
VARIANTS = {
    "base": BASE,
    "model": dataclasses.replace(BASE, model="SmolLM"),
    "weights": dataclasses.replace(BASE, weights="00fe"),
    "model and weights swapped": dataclasses.replace(BASE, model="00ff", weights="SmolLM2"),
    "model runs into weights": dataclasses.replace(BASE, model="SmolLM20", weights="0ff"),
    "layers": dataclasses.replace(BASE, layout=KVLayout(31, 3, 64, "bfloat16")),
    "kv_heads": dataclasses.replace(BASE, layout=KVLayout(30, 4, 64, "bfloat16")),
    "head_dim": dataclasses.replace(BASE, layout=KVLayout(30, 3, 128, "bfloat16")),
    "heads and dim swapped": dataclasses.replace(BASE, layout=KVLayout(30, 64, 3, "bfloat16")),
    "dtype": dataclasses.replace(BASE, layout=KVLayout(30, 3, 64, "float16")),
    "rope empty": dataclasses.replace(BASE, rope=b""),
    "rope zero": dataclasses.replace(BASE, rope=b"\0"),
    "tp_size": dataclasses.replace(BASE, tp_size=2),
    "tp_rank": dataclasses.replace(BASE, tp_rank=1, tp_size=2),
    "pp_size": dataclasses.replace(BASE, pp_size=2),
    "pp_rank": dataclasses.replace(BASE, pp_rank=1, pp_size=2),
    "adapter empty": dataclasses.replace(BASE, adapter=""),
    "adapter None in words": dataclasses.replace(BASE, adapter="None"),
    "adapter zero": dataclasses.replace(BASE, adapter="\0"),
    "tenant empty": dataclasses.replace(BASE, tenant=b""),
    "tenant zero": dataclasses.replace(BASE, tenant=b"\0"),
    "tenant": dataclasses.replace(BASE, tenant=hash_salt("")),
    "other tenant": dataclasses.replace(BASE, tenant=hash_salt("acme")),
    "extra empty": dataclasses.replace(BASE, extras=(("", b""),)),
    "extra name": dataclasses.replace(BASE, extras=(("ab", b""),)),
    "extra value": dataclasses.replace(BASE, extras=(("a", b"b"),)),
    "extra value only": dataclasses.replace(BASE, extras=(("", b"ab"),)),
    "two extras": dataclasses.replace(BASE, extras=(("a", b""), ("b", b""))),
}


def test_every_field_makes_another_key():
    for field in dataclasses.fields(Namespace):
        varied = {repr(getattr(namespace, field.name)) for namespace in VARIANTS.values()}
        assert len(varied) > 1, f"{field.name} needs a variant"
    keys = {namespace.key() for namespace in VARIANTS.values()}
    assert len(keys) == len(VARIANTS)


@settings(max_examples=150, deadline=None)
@given(namespaces(), namespaces(), st.data())
def test_encoding_is_injective(one: Namespace, other: Namespace, data):
    field = data.draw(st.sampled_from(["model", "weights", "layout", "rope", "adapter", "tenant", "extras"]))
    near = dataclasses.replace(one, **{field: getattr(other, field)})
    assert (one.encode() == other.encode()) == (one == other)
    assert (one.encode() == near.encode()) == (one == near)


def test_the_order_in_which_extras_are_given_does_not_matter():
    there = dataclasses.replace(BASE, extras=(("a", b"1"), ("b", b"2")))
    back = dataclasses.replace(BASE, extras=(("b", b"2"), ("a", b"1")))
    assert there.key() == back.key()


def test_keys_of_version_1_stay_what_they_are():
    """Bodies on disk are found by these. Where this fails on purpose, KEY_VERSION must change too."""
    full = dataclasses.replace(BASE, rope=b"r", adapter="a", tenant=hash_salt("t"), extras=(("s", b"v"),))
    first, second = chunk_keys(full.key(), np.arange(10, dtype=np.uint32), [(0, 6), (6, 10)])
    image = chunk_keys(full.key(), np.arange(10, dtype=np.uint32), [(0, 6)], extras=[b"image"])[0]
    assert full.key().hex() == "cddb85b2723971a9c752c22a99841e3e08d299ee6c4199f4ca0c42e0be78f8d8"
    assert first.content.hex() == "9df40bbc14bbe7b1259deb80d3e3ca86"
    assert second.exact.hex() == "4a4162a29c36abd91b97c02fdbdca289"
    assert image.content.hex() == "d44c0e3e9bcb4f162bf424f31b051dc0"
    assert lossy_key(second.exact, "int8").hex() == "66938f0b3a6d1dfb256c25b868682f74"


def test_equal_in_another_process_under_another_hash_seed():
    script = (
        "import numpy as np\n"
        "from p2pcache.core.keys import *\n"
        "from p2pcache.core.layout import KVLayout\n"
        "n = Namespace('m', 'w', KVLayout(2, 3, 4, 'float32'), b'r', 1, 2, 0, 1, 'a', b't',"
        " (('x', b'1'), ('y', b'2')))\n"
        "c = chunk_keys(n.key(), np.arange(9, dtype=np.uint32), [(0, 4), (4, 9)])\n"
        "print(n.key().hex(), [(k.digest.hex(), k.exact.hex()) for k in c])\n"
        "print(named_key(n.key(), 'q', 3).hex())\n"
    )
    root = str(Path(sys.modules["p2pcache"].__file__).parents[1])
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": root},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1 and len(outputs.pop()) > 200


@settings(max_examples=100, deadline=None)
@given(namespaces())
def test_a_description_tells_everything_but_the_tenant(namespace: Namespace):
    raw = namespace.describe()
    assert Namespace.from_description(raw) == dataclasses.replace(namespace, tenant=None)
    assert Namespace.from_description(raw, namespace.tenant) == namespace
    assert raw == dataclasses.replace(namespace, tenant=b"someone else's").describe()


@settings(max_examples=300, deadline=None)
@given(namespaces(), st.data())
def test_a_damaged_description_is_refused_or_names_another_namespace(namespace: Namespace, data):
    raw = bytearray(namespace.describe())
    damage = data.draw(st.sampled_from(["cut", "flip", "insert", "append"]))
    at = data.draw(st.integers(0, len(raw) - 1))
    if damage == "cut":
        del raw[at:]
    elif damage == "flip":
        raw[at] ^= data.draw(st.integers(1, 255))
    else:
        at = len(raw) if damage == "append" else at
        raw[at:at] = data.draw(st.binary(min_size=1, max_size=8))
    try:
        read = Namespace.from_description(bytes(raw))
    except ConfigError:
        return
    assert read != dataclasses.replace(namespace, tenant=None) or bytes(raw) == namespace.describe()
    assert read.describe() == bytes(raw), "a description has one form, so nothing in it was overlooked"


def field(tag: int, value: bytes) -> bytes:
    return struct.pack(">HI", tag, len(value)) + value


WHOLE = dataclasses.replace(BASE, extras=(("s", b"v"),)).describe()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        WHOLE + field(15, b"unknown"),
        WHOLE + field(2, b"SmolLM2"),
        WHOLE + field(13, b"a tenant"),
        WHOLE + field(14, b""),
        WHOLE + field(14, b"\0\0\0\1s\0\0\0\1v"),
        WHOLE.replace(b"L2THD", b"2LTHD"),
        WHOLE.replace(field(5, bytes([0] * 7 + [30])), field(5, b"\x1e")),
        WHOLE.replace(b"\0\0\0\1v", b"\0\0\0\2v"),
        WHOLE.replace(field(1, bytes([0] * 7 + [1])), field(1, bytes([0] * 7 + [2]))),
        WHOLE.replace(field(2, b"SmolLM2"), field(2, b"\xff")),
        WHOLE.replace(field(2, b"SmolLM2"), b""),
    ],
)
def test_a_description_has_one_form(raw: bytes):
    assert raw != WHOLE
    with pytest.raises(ConfigError):
        Namespace.from_description(raw)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_no_description(raw: bytes):
    with pytest.raises(ConfigError):
        Namespace.from_description(raw)


@pytest.mark.parametrize(
    "wrong",
    [
        {"model": ""},
        {"weights": ""},
        {"tp_rank": 1},
        {"tp_rank": -1},
        {"pp_size": 0},
        {"extras": (("a", b"1"), ("a", b"2"))},
    ],
)
def test_a_namespace_that_cannot_be_is_the_users_error(wrong: dict):
    with pytest.raises(ConfigError):
        dataclasses.replace(BASE, **wrong)


def test_a_namespace_field_is_bounded():
    with pytest.raises(ConfigError):
        dataclasses.replace(BASE, adapter="a" * 5000).key()


# -- chunks ----------------------------------------------------------------------------------------

token_runs = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=24).map(
    lambda ids: np.array(ids, dtype=np.uint32)
)


@st.composite
def chunked(draw) -> tuple[np.ndarray, list[tuple[int, int]]]:
    tokens = draw(token_runs)
    cuts = sorted(draw(st.sets(st.integers(1, len(tokens)), max_size=4)) | {0, len(tokens)})
    return tokens, list(zip(cuts, cuts[1:], strict=False))


@settings(max_examples=80, deadline=None)
@given(chunked(), token_runs, st.binary(max_size=9))
def test_content_depends_on_the_chunk_alone_and_exact_on_all_before(prompt, before, extra: bytes):
    tokens, spans = prompt
    extras = [extra] * len(spans)
    plain = chunk_keys(KEY, tokens, spans, extras=extras)
    shift = len(before)
    moved = chunk_keys(
        KEY,
        np.concatenate([before, tokens]),
        [(0, shift), *((start + shift, stop + shift) for start, stop in spans)],
        extras=[b"", *extras],
    )[1:]
    assert [k.content for k in plain] == [k.content for k in moved]
    assert [k.digest for k in plain] == [k.digest for k in moved]
    assert all(a.exact != b.exact for a, b in zip(plain, moved, strict=True))


@settings(max_examples=80, deadline=None)
@given(chunked(), st.data())
def test_a_changed_token_changes_its_content_key_and_every_exact_key_behind_it(prompt, data):
    tokens, spans = prompt
    at = data.draw(st.integers(0, len(tokens) - 1))
    other = tokens.copy()
    other[at] ^= 1
    for old, new in zip(chunk_keys(KEY, tokens, spans), chunk_keys(KEY, other, spans), strict=True):
        assert (old.content == new.content) == (not old.start <= at < old.stop)
        assert (old.exact == new.exact) == (at >= old.stop)


@settings(max_examples=60, deadline=None)
@given(chunked(), st.data())
def test_a_prompt_can_be_named_in_two_goes(prompt, data):
    tokens, spans = prompt
    cut = data.draw(st.integers(0, len(spans)))
    whole = chunk_keys(KEY, tokens, spans)
    head = chunk_keys(KEY, tokens, spans[:cut])
    parent = head[-1].exact if head else CHAIN_ROOT
    assert head + chunk_keys(KEY, tokens, spans[cut:], parent=parent) == whole


BLAKE3_SEAMS = [0, 1, 11, 12, 13, 28, 29, 252, 253, 508, 509, 764, 765, 1020, 1021, 1276, 2045, 5000]
"""Counts of tokens (four bytes each, behind fifteen others) around the ends of BLAKE3's blocks and chunks."""


def implementations() -> list[str]:
    """The native ones that this CPU can run."""
    try:
        _native.name_chunks(KEY, np.zeros(0, np.uint32), [], CHAIN_ROOT, (), "avx2")
    except ValueError:
        return ["portable"]
    return ["portable", "avx2"]


@pytest.mark.parametrize("use", implementations())
@settings(max_examples=120, deadline=None)
@given(
    st.lists(st.sampled_from(BLAKE3_SEAMS) | st.integers(0, 1400), max_size=24),
    st.integers(0, 2**32),
    st.binary(min_size=32, max_size=32),
    st.binary(min_size=16, max_size=16),
    st.data(),
)
def test_native_names_are_those_of_the_reference(use: str, counts, seed: int, namespace_key, parent, data):
    tokens = np.random.default_rng(seed).integers(0, 2**32, sum(counts), dtype=np.uint32)
    ends = np.cumsum([0, *counts]).tolist()
    spans = list(zip(ends, ends[1:], strict=False))
    extra = st.binary(max_size=70) | st.sampled_from([b"x" * 1009, b"y" * 1024, b"z" * 3000])
    n = len(spans)
    extras = data.draw(st.just([]) | st.lists(extra, min_size=n, max_size=n))
    expected = chunk_keys_py(namespace_key, tokens, spans, parent=parent, extras=extras)
    assert _native.name_chunks(namespace_key, tokens, spans, parent, extras, use) == expected
    assert chunk_keys(namespace_key, tokens, spans, parent=parent, extras=extras) == expected


@pytest.mark.parametrize("use", implementations())
def test_a_long_input_is_one_tree(use: str):
    """More chunks of BLAKE3 than a batch holds, and counts around the powers of two."""
    tokens = np.random.default_rng(1).integers(0, 2**32, 100_000, dtype=np.uint32)
    for count in (16 * 256, 16 * 256 + 1, 31 * 256 - 4, 33 * 256, 100_000):
        spans = [(0, count), (7, count), (3, 4)]
        assert _native.name_chunks(KEY, tokens, spans, CHAIN_ROOT, (), use) == chunk_keys_py(
            KEY, tokens, spans
        )


def test_native_naming_refuses_what_it_would_misread():
    tokens = np.arange(8, dtype=np.uint32)
    for wrong in (
        (KEY[:31], tokens, [(0, 8)], CHAIN_ROOT),
        (KEY, tokens, [(0, 8)], CHAIN_ROOT[:15]),
        (KEY, tokens, [(0, 9)], CHAIN_ROOT),
        (KEY, tokens, [(5, 4)], CHAIN_ROOT),
        (KEY, tokens, [(0, 4), (4, 8)], CHAIN_ROOT, [b"one"]),
        (KEY, tokens, [(0, 8)], CHAIN_ROOT, (), "avx9"),
    ):
        with pytest.raises(ValueError):
            _native.name_chunks(*wrong)
    for wrong in (
        (KEY, tokens.astype(np.int64), [(0, 8)], CHAIN_ROOT),
        (KEY, tokens, [(-1, 8)], CHAIN_ROOT),
        (KEY, tokens, [(0, 8)], CHAIN_ROOT, ["text"]),
    ):
        with pytest.raises(TypeError):
            _native.name_chunks(*wrong)


def test_another_namespace_shares_no_key():
    tokens, spans = np.arange(8, dtype=np.uint32), [(0, 4), (4, 8)]
    ours = chunk_keys(KEY, tokens, spans)
    theirs = chunk_keys(VARIANTS["dtype"].key(), tokens, spans)
    assert not {k for c in ours for k in (c.content, c.exact)} & {
        k for c in theirs for k in (c.content, c.exact)
    }


def naming(tokens: list[int], extra: bytes) -> bytes:
    return chunk_keys(KEY, np.array(tokens, dtype=np.uint32), [(0, len(tokens))], extras=[extra])[0].digest


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=6),
    st.lists(st.integers(0, 3), min_size=1, max_size=6),
    st.binary(max_size=8),
    st.binary(max_size=8),
)
def test_tokens_and_extras_are_not_confused(tokens, others, extra: bytes, other: bytes):
    assert (naming(tokens, extra) == naming(others, other)) == ((tokens, extra) == (others, other))


def test_no_extra_passes_for_tokens_however_its_length_is_written():
    """Tokens that spell out another chunk's length field and extra must still be another chunk."""
    extra = (7).to_bytes(4, "little")
    assert naming([5], extra) != naming([5, 1, 0, 7], b"")
    assert naming([5], extra) != naming([1, 0, 5, 7], b"")
    assert naming([5, 7], b"") != naming([5], extra)


def test_approximate_and_named_keys_are_apart_from_all_others():
    (chunk,) = chunk_keys(KEY, np.arange(4, dtype=np.uint32), [(0, 4)])
    keys = [
        chunk.content,
        chunk.exact,
        body_key(KEY, chunk.exact, Provenance.APPROXIMATE),
        body_key(KEY, chunk.exact, Provenance.ISOLATED),
        body_key(KEY, body_key(KEY, chunk.exact, Provenance.APPROXIMATE), Provenance.APPROXIMATE),
        exact_key(KEY, chunk.exact, chunk.digest),
        named_key(KEY, 1, 0),
        named_key(KEY, 1, 1),
        named_key(KEY, -1, 1),
        named_key(KEY, "1", 1),
        named_key(KEY, "11", 0),
        named_key(KEY, "", 0),
        named_key(VARIANTS["dtype"].key(), 1, 0),
        lossy_key(chunk.exact, "int8"),
        lossy_key(chunk.exact, "int4"),
        lossy_key(chunk.exact, ""),
        lossy_key(lossy_key(chunk.exact, "int8"), "int8"),
        lossy_key(body_key(KEY, chunk.exact, Provenance.APPROXIMATE), "int8"),
    ]
    assert len(set(keys)) == len(keys) and {len(k) for k in keys} == {16}
    assert body_key(KEY, chunk.exact, Provenance.IN_CONTEXT) == chunk.exact


@pytest.mark.parametrize("name", [True, None, 1.0, b"x"])
def test_a_name_is_an_int_or_a_text(name):
    with pytest.raises(ConfigError):
        named_key(KEY, name, 0)


def test_namespaces_tell_their_differences_in_words():
    held = dataclasses.replace(BASE, layout=KVLayout(30, 3, 64, "float16"), adapter="lora", tenant=b"t")
    assert BASE.differences(held) == [
        "dtype: held float16, asked bfloat16",
        "adapter: held lora, asked None",
    ]
    assert BASE.differences(BASE) == []
