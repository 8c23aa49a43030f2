"""Codecs: what comes back, what it costs, and that bytes of strangers harm nobody."""

from __future__ import annotations

import dataclasses
import math
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from p2pcache import _native
from p2pcache.codecs import (
    BadEncoding,
    Encoded,
    Kept,
    decode_into,
    decode_layer_into,
    encode,
    pack,
    pack_lossy,
    page_aligned,
    read_head,
    unpack,
)
from p2pcache.codecs import lossless as lossless_module
from p2pcache.codecs import quantised as quantised_module
from p2pcache.codecs.lossless import Lossless
from p2pcache.codecs.quantised import EXACT_TOKENS, Quantised, worst_channel
from p2pcache.core.checksum import CorruptBody, checksum_body, layer_check
from p2pcache.core.coding import Coding, is_layout_meta, layout_meta, layout_of, lossy_body, may_be_lossy
from p2pcache.core.keys import lossy_key
from p2pcache.core.layout import KVLayout
from p2pcache.core.nvmelog import PAGE_BYTES
from p2pcache.types import BodyInfo, ConfigError, ContentKey, ExactKey, LayoutError, Provenance

LEVELS = _native.simd_levels()
QUANTISED = (("int8", 8), ("int4", 4))
FLOATS = ("bfloat16", "float16", "float32")
GUARD = 64  # bytes on either side of a destination, which nothing may touch


def bits_of(values: np.ndarray, dtype: str) -> np.ndarray:
    return quantised_module._store(np.ascontiguousarray(values, np.float32), dtype)


def kv(layout: KVLayout, tokens: int, seed: int = 0) -> np.ndarray:
    """A body's bits that look like KV: channels of K of all sizes, some with an offset."""
    rng = np.random.default_rng(seed)
    shape = layout.shape(tokens)
    values = rng.standard_normal(shape)
    values[:, 0] *= np.exp2(rng.integers(-4, 4, shape[3:]))
    values[:, 0] += 3 * rng.standard_normal(shape[3:])
    return bits_of(values, layout.dtype)


def flat(bits: np.ndarray) -> memoryview:
    return memoryview(np.ascontiguousarray(bits).view(np.uint8).ravel())


def decoded(encoded: Encoded, codec, layout: KVLayout, tokens: int) -> np.ndarray:
    """Decodes between two guards and looks at them."""
    nbytes = layout.body_bytes(tokens)
    room = np.full(nbytes + 2 * GUARD, 0xA5, np.uint8)
    try:
        decode_into(codec, encoded.data, memoryview(room)[GUARD : GUARD + nbytes], layout, tokens)
    finally:
        assert (room[:GUARD] == 0xA5).all() and (room[GUARD + nbytes :] == 0xA5).all()
    return room[GUARD : GUARD + nbytes]


layouts = st.builds(
    KVLayout,
    layers=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([1, 2, 3, 7, 16, 63, 64, 65]),
    dtype=st.just("bfloat16"),
)


# -- lossless -----------------------------------------------------------------------------------


@st.composite
def bf16_bodies(draw):
    """`(layout, tokens, bits)`: anything a bfloat16 can be, mixed with what compresses."""
    layout, tokens = draw(layouts), draw(st.integers(1, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    body = kv(layout, tokens, draw(st.integers(0, 2**32 - 1)))
    odd = rng.random(body.shape) < draw(st.sampled_from([0.0, 0.001, 0.02, 0.3, 1.0]))
    body[odd] = rng.integers(0, 2**16, odd.sum())
    return layout, tokens, body


@given(bf16_bodies())
@settings(deadline=None, max_examples=150)
def test_lossless_is_bit_exact_and_equal_at_every_level_to_its_twin(case):
    layout, tokens, body = case
    expected = [lossless_module.encode_layer_py(layer.ravel()) for layer in body]
    for level in LEVELS:
        codec = Lossless(level)
        room = np.full(codec.room(layout, tokens), 0xEE, np.uint8)
        ends, error = codec.encode_layers(np.asarray(flat(body)), layout, tokens, room)
        assert room[: ends[-1]].tobytes() == b"".join(expected) and error == 0
        out = np.zeros(layout.body_bytes(tokens), np.uint8)
        assert codec.decode_layers(room[: ends[-1]], ends, layout, tokens, out) is None
        assert out.tobytes() == body.tobytes()
    for layer, encoded in zip(body, expected, strict=True):
        twin = lossless_module.decode_layer_py(encoded, layer.size)
        assert twin is not None and twin.tobytes() == layer.tobytes()


@pytest.mark.parametrize("level", LEVELS)
def test_every_bfloat16_there_is_comes_back(level: str):
    """Infinities, NaNs with their payloads, subnormals and both zeros; beside values that compress."""
    layout = KVLayout(1, 1, 64, "bfloat16")
    body = np.full(16 * 2**16, 0x3F80, np.uint16)
    body[:: len(body) // 2**16] = np.arange(2**16)
    tokens = layout_tokens(layout, body)
    encoded = encode(Lossless(level), flat(body), layout, tokens)
    assert encoded.codec == "lossless" and len(encoded.data) < 0.85 * body.nbytes
    assert decoded(encoded, Lossless(level), layout, tokens).tobytes() == body.tobytes()


def layout_tokens(layout: KVLayout, body: np.ndarray) -> int:
    return body.nbytes // (layout.token_layer_bytes * layout.layers)


def test_kv_shrinks_by_a_quarter_and_noise_stays_raw():
    layout = KVLayout(4, 2, 64, "bfloat16")
    assert (
        1.32
        < layout.body_bytes(128) / len(encode("lossless", flat(kv(layout, 128)), layout, 128).data)
        < 4 / 3
    )
    noise = np.random.default_rng(1).integers(0, 2**16, layout.shape(128)).astype(np.uint16)
    kept = encode("lossless", flat(noise), layout, 128)
    assert kept.codec == "raw" and kept.data.tobytes() == noise.tobytes() and kept.refused is None


def test_one_layer_of_noise_is_kept_as_it_is_beside_others():
    layout = KVLayout(4, 2, 64, "bfloat16")
    body = kv(layout, 128)
    body[2] = np.random.default_rng(1).integers(0, 2**16, body[2].shape)
    encoded = encode("lossless", flat(body), layout, 128)
    assert encoded.codec == "lossless"
    start, stop = read_head(encoded.data, "lossless", layout, 128).span(2)
    assert stop - start == 1 + layout.layer_bytes(128)
    assert decoded(encoded, "lossless", layout, 128).tobytes() == body.tobytes()


# -- int8 and int4 --------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "bits"), QUANTISED)
@given(
    layout=layouts,
    dtype=st.sampled_from(FLOATS),
    tokens=st.integers(1, 200),
    seed=st.integers(0, 2**32 - 1),
    scale=st.sampled_from([1.0, 1e-40, 1e-7, 1e4, 1e30]),
    constant=st.booleans(),
)
@settings(deadline=None, max_examples=80)
def test_quantised_is_equal_at_every_level_to_its_twin(
    name: str, bits: int, layout: KVLayout, dtype: str, tokens: int, seed: int, scale: float, constant: bool
):
    layout = KVLayout(layout.layers, layout.kv_heads, layout.head_dim, dtype)
    values = quantised_module._load(kv(layout, tokens, seed), dtype) * np.float32(scale)
    if constant:
        values[0, :, :, :, 0] = -0.0 if seed % 2 else 1.5
    body = bits_of(values, dtype)
    expected = [quantised_module.encode_layer_py(layer, dtype, bits) for layer in body]
    for level in LEVELS:
        codec = Quantised(name, bits, level)
        room = np.full(codec.room(layout, tokens), 0xEE, np.uint8)
        got = codec.encode_layers(np.asarray(flat(body)), layout, tokens, room)
        if None in expected:
            assert got is None
            continue
        ends, error = got
        assert room.tobytes() == b"".join(encoded for encoded, _ in expected)
        assert error == pytest.approx(max(error for _, error in expected), rel=1e-9)
        out = np.zeros(layout.body_bytes(tokens), np.uint8)
        assert codec.decode_layers(room, ends, layout, tokens, out) is None
        twins = [quantised_module.decode_layer_py(e, dtype, bits, body.shape[1:]) for e, _ in expected]
        assert out.tobytes() == b"".join(twin.tobytes() for twin in twins)


@pytest.mark.parametrize(("name", "bits"), QUANTISED)
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_error_is_what_decoding_changes_and_no_value_is_off_by_more_than_a_step(name, bits, dtype):
    layout, tokens = KVLayout(3, 2, 64, dtype), 150
    body = kv(layout, tokens)
    encoded = encode(name, flat(body), layout, tokens)
    assert encoded.codec == name
    got = decoded(encoded, name, layout, tokens).view(body.dtype).reshape(body.shape)
    values, back = (quantised_module._load(x, dtype) for x in (body, got))
    worst = max(worst_channel(a, b) for a, b in zip(values, back, strict=True))
    assert encoded.error == pytest.approx(worst, rel=1e-9) and 0 < worst < (0.05, 0.6)[bits == 4]
    assert (got[:, :, :EXACT_TOKENS] == body[:, :, :EXACT_TOKENS]).all()
    spread = np.ptp(values[:, 1, EXACT_TOKENS:], axis=-1, keepdims=True)
    half_step = 0.51 * spread / (2**bits - 1) + np.abs(values[:, 1, EXACT_TOKENS:]) / 200
    assert (np.abs(back - values)[:, 1, EXACT_TOKENS:] <= half_step).all()


@pytest.mark.parametrize(("name", "bits"), QUANTISED)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [(0, 0, 1, 0, 3), (1, 0, 9, 1, 0), (1, 1, 39, 1, 7)])
def test_what_is_not_finite_stays_raw(name, bits, dtype, value, place):
    layout = KVLayout(2, 2, 8, dtype)
    body = kv(layout, 40)
    body[place] = bits_of(np.array([value]), dtype)[0]
    for level in LEVELS:
        kept = encode(Quantised(name, bits, level), flat(body), layout, 40)
        assert kept.codec == "raw" and kept.refused == math.inf and kept.data.tobytes() == body.tobytes()


def test_a_bound_on_the_error_decides_what_is_kept():
    layout = KVLayout(2, 2, 64, "bfloat16")
    body = flat(kv(layout, 64))
    error = encode("int8", body, layout, 64).error
    assert encode("int8", body, layout, 64, error_max=error).codec == "int8"
    kept = encode("int8", body, layout, 64, error_max=error * 0.999)
    assert kept.codec == "raw" and kept.refused == error and kept.error == 0


# -- the container --------------------------------------------------------------------------------

CODECS = ("raw", "lossless", "int8", "int4")


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("tokens", [0, 1, 4, 5, 17])
def test_short_bodies_and_none(name: str, tokens: int):
    layout = KVLayout(2, 1, 3, "bfloat16")
    body = kv(layout, tokens)
    encoded = encode(name, flat(body), layout, tokens)
    assert len(encoded.data) <= body.nbytes
    out = decoded(encoded, encoded.codec, layout, tokens)
    if encoded.codec in ("raw", "lossless"):
        assert out.tobytes() == body.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8", "float8_e4m3fn"])
def test_what_a_codec_is_not_for_stays_raw(dtype: str):
    layout = KVLayout(2, 1, 64, dtype)
    body = memoryview(bytes(layout.body_bytes(64)))
    assert encode("lossless", body, layout, 64).codec == "raw"
    assert encode("int8", body, layout, 64).codec == ("raw" if "8" in dtype else "int8")


@pytest.mark.parametrize("name", CODECS[1:])
def test_a_layer_is_decoded_by_itself(name: str):
    layout, tokens = KVLayout(3, 2, 16, "bfloat16"), 70
    encoded = encode(name, flat(kv(layout, tokens)), layout, tokens)
    whole = decoded(encoded, name, layout, tokens)
    head = read_head(encoded.data[: 24 + 8 * 3], name, layout, tokens)
    nbytes = layout.layer_bytes(tokens)
    for layer in (2, 0, 1):
        start, stop = head.span(layer)
        out = bytearray(nbytes)
        decode_layer_into(head, layer, encoded.data[start:stop], memoryview(out), layout, tokens)
        assert out == whole[layer * nbytes : (layer + 1) * nbytes].tobytes()
        with pytest.raises(BadEncoding):
            decode_layer_into(head, layer, encoded.data[start : stop - 1], memoryview(out), layout, tokens)


def test_wrong_calls_are_named():
    layout = KVLayout(2, 1, 16, "bfloat16")
    body = flat(kv(layout, 32))
    with pytest.raises(ConfigError, match="int8"):
        encode("int9", body, layout, 32)
    with pytest.raises(LayoutError):
        encode("int8", body, layout, 33)
    encoded = encode("int8", body, layout, 32)
    with pytest.raises(LayoutError):
        decode_into("int8", encoded.data, memoryview(bytearray(len(body) - 1)), layout, 32)
    with pytest.raises(ValueError, match="level"):
        encode(Lossless("avx1024"), body, layout, 32)


@pytest.mark.parametrize("layers", [1 << 62, (1 << 61) + 1, 1 << 60, (1 << 64) - 1])
@pytest.mark.parametrize("nbytes", [0, 8])
def test_layers_whose_sizes_would_wrap_are_refused_by_native_code(layers: int, nbytes: int):
    with pytest.raises(ValueError):
        _native.lossless_encode(np.zeros(nbytes, np.uint8), layers, np.zeros(64, np.uint8))


@pytest.mark.parametrize("huge", [1 << 49, 1 << 61, (1 << 62) + 1, (1 << 64) - 1])
@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("other", [0, 1, 4])
@pytest.mark.parametrize("bits", [4, 8])
def test_shapes_whose_sizes_would_wrap_are_refused_by_native_code(huge: int, place: int, other: int, bits):
    shape = [other or 1] * 4  # layers, tokens, heads, channels of a head
    shape[place - 1] = other  # an empty side hides no huge one
    shape[place] = huge
    nothing = np.zeros(0, np.uint8)
    for call in (_native.quantise, _native.dequantise):
        with pytest.raises(ValueError):
            call(nothing, *shape, "bfloat16", bits, nothing)
    if place:
        with pytest.raises(ValueError):
            _native.quantised_layer_bytes(*shape[1:], "bfloat16", bits)


@pytest.mark.parametrize("name", CODECS)
def test_every_truncation_and_extension_is_refused(name: str):
    layout, tokens = KVLayout(2, 1, 8, "bfloat16"), 20
    encoded = encode(name, flat(kv(layout, tokens)), layout, tokens)
    assert encoded.codec == name
    for length in range(len(encoded.data)):
        with pytest.raises(BadEncoding):
            decoded(Encoded(name, encoded.data[:length]), name, layout, tokens)
    with pytest.raises(BadEncoding):
        decoded(Encoded(name, memoryview(encoded.data.tobytes() + b"\0")), name, layout, tokens)


@pytest.mark.parametrize("name", CODECS[1:])
def test_a_head_of_another_body_is_refused(name: str):
    layout, tokens = KVLayout(2, 2, 8, "bfloat16"), 20
    encoded = encode(name, flat(kv(layout, tokens)), layout, tokens)
    for other, count in (
        (layout, 21),
        (KVLayout(2, 1, 16, "bfloat16"), 20),
        (KVLayout(2, 2, 8, "float16"), 20),
    ):
        with pytest.raises(BadEncoding):
            read_head(encoded.data, name, other, count)
    with pytest.raises(BadEncoding):
        read_head(encoded.data, "int4" if name == "int8" else "int8", layout, tokens)


@pytest.mark.parametrize("ends", [(0, 0), (5, 3), (2**64 - 1, 2**64 - 1), (2**63, 2**63 + 1), (0, 2**32)])
@pytest.mark.parametrize("name", CODECS[1:])
def test_layers_that_lie_nowhere_are_refused(name: str, ends: tuple[int, int]):
    layout, tokens = KVLayout(2, 2, 8, "bfloat16"), 20
    forged = bytearray(encode(name, flat(kv(layout, tokens)), layout, tokens).data)
    struct.pack_into("<2Q", forged, 24, *ends)
    with pytest.raises(BadEncoding):
        decoded(Encoded(name, memoryview(forged)), name, layout, tokens)


@pytest.mark.parametrize("name", CODECS[1:])
@given(seed=st.integers(0, 2**32 - 1), flips=st.integers(1, 40), behind_head=st.booleans())
@settings(deadline=None, max_examples=400, suppress_health_check=[HealthCheck.too_slow])
def test_damage_is_refused_or_stays_within_the_destination_alike_at_every_level(
    name, seed, flips, behind_head
):
    layout, tokens = KVLayout(2, 1, 67, "bfloat16"), 9
    rng = np.random.default_rng(seed)
    body = kv(layout, tokens, seed % 7)
    body.ravel()[rng.integers(0, body.size, 3)] = 0x0001 if name == "lossless" else 0x3F80
    damaged = np.array(encode(name, flat(body), layout, tokens).data)
    start = 24 + 8 * layout.layers if behind_head else 0
    near = damaged[start : start + 16] if rng.random() < 0.5 else damaged[start:]
    near[rng.integers(0, len(near), flips)] = rng.choice([0, 1, 15, 16, 0x7F, 0x80, 0xF0, 0xFF], flips)
    outcomes = set()
    for level in LEVELS:
        codec = Lossless(level) if name == "lossless" else Quantised(name, int(name[3:]), level)
        try:
            outcomes.add(decoded(Encoded(name, memoryview(damaged)), codec, layout, tokens).tobytes())
        except BadEncoding:
            outcomes.add(None)
    assert len(outcomes) == 1


# -- whole bodies, as tiers and peers keep them ----------------------------------------------------

EXACT = ExactKey(bytes(range(16)))


def body_of(raw: memoryview, tokens: int) -> BodyInfo:
    return BodyInfo(ContentKey(bytes(16)), EXACT, tokens, len(raw))


def unpacked(
    coding: Coding,
    data: memoryview,
    body: BodyInfo,
    checksums: tuple[int, ...],
    layout: KVLayout | None = None,
) -> bytes:
    """Decodes between two guards and looks at them."""
    room = np.full(body.nbytes + 2 * GUARD, 0xA5, np.uint8)
    try:
        unpack(coding, data, body, checksums, memoryview(room)[GUARD : GUARD + body.nbytes], layout)
    finally:
        assert (room[:GUARD] == 0xA5).all() and (room[GUARD + body.nbytes :] == 0xA5).all()
    return room[GUARD : GUARD + body.nbytes].tobytes()


packable = st.builds(
    KVLayout,
    layers=st.integers(1, 5),
    kv_heads=st.integers(1, 3),
    head_dim=st.integers(16, 64),
    dtype=st.just("bfloat16"),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(packable, st.integers(16, 80), st.integers(0, 9))
def test_a_packed_body_is_equal_parts_that_are_checked_as_they_come_and_comes_back(layout, tokens, seed):
    raw = flat(kv(layout, tokens, seed))
    body, checksums = body_of(raw, tokens), checksum_body(raw, EXACT, layout.layers)
    packed = pack("lossless", raw, body, checksums, saving_min=0.05)
    assert not isinstance(packed, Kept) and packed.body is body and packed.checksums == checksums
    _, _, coding, data, error = packed
    assert error == 0.0 and len(data) == coding.nbytes < 0.95 * len(raw) and len(data) % layout.layers == 0
    coding.check_fits(body, layout.layers)
    check = layer_check(memoryview(bytearray(len(data))), EXACT, coding.checksums)
    check.copy(data, len(data))  # as a transport does it
    assert check.bad_layer is None and check.good_bytes == len(data)
    assert unpacked(coding, data, body, checksums) == bytes(raw)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(packable, st.integers(16, 80), st.data())
def test_whatever_a_packed_body_turns_into_nothing_wrong_comes_out(layout, tokens, data):
    raw = flat(kv(layout, tokens))
    body, checksums = body_of(raw, tokens), checksum_body(raw, EXACT, layout.layers)
    packed = pack("lossless", raw, body, checksums, saving_min=0.0)
    damaged = bytearray(packed.data)
    at = data.draw(st.integers(0, len(damaged) - 1))
    patch = data.draw(st.binary(min_size=1, max_size=16))[: len(damaged) - at]
    damaged[at : at + len(patch)] = patch
    try:
        out = unpacked(packed.coding, memoryview(damaged), body, checksums)
    except CorruptBody:
        return
    assert out == bytes(raw)  # what was changed was its own, or padding


def test_a_packed_body_of_another_one_or_another_length_is_refused():
    layout = KVLayout(3, 2, 32, "bfloat16")
    raw, other = (flat(kv(layout, 64, seed)) for seed in (0, 1))
    body, checksums = body_of(raw, 64), checksum_body(raw, EXACT, 3)
    _, _, coding, data, _ = pack("lossless", other, body, checksums, saving_min=0.05)
    with pytest.raises(CorruptBody, match="layer 0 of a decoded body"):
        unpacked(coding, data, body, checksums)
    _, _, coding, data, _ = pack("lossless", raw, body, checksums, saving_min=0.05)
    for cut in (0, 10, len(data) - 3):
        with pytest.raises(BadEncoding):
            unpacked(coding, data[:cut], body, checksums)
    with pytest.raises(BadEncoding):
        unpacked(coding, memoryview(bytes(data) + bytes(3)), body, checksums)
    for codec in ("int8", "raw", "no-such"):  # none that is not exact is ever taken for the body
        with pytest.raises(BadEncoding):
            unpacked(Coding(codec, coding.nbytes, coding.checksums), data, body, checksums)


def test_what_does_not_save_enough_or_is_not_whole_values_is_kept_raw():
    layout = KVLayout(2, 2, 32, "bfloat16")
    raw = flat(kv(layout, 64))
    noise = memoryview(np.random.default_rng(0).bytes(len(raw)))
    tiny, odd = memoryview(bytes(4)), memoryview(bytes(2 * 5 * 30))
    for data, tokens, layers, saving_min, why in (
        (raw, 64, 2, 0.3, "saving"),
        (noise, 64, 2, 0.05, "saving"),
        (tiny, 1, 1, 0.0, "saving"),
        (odd, 5, 2, 0.0, "shape"),
        (odd, 0, 2, 0.0, "shape"),
    ):
        kept = pack("lossless", data, body_of(data, tokens), (0,) * layers, saving_min=saving_min)
        assert isinstance(kept, Kept) and kept.reason == why


# -- bodies that a lossy codec makes of others -----------------------------------------------------


def made(codec: str, raw: memoryview, body: BodyInfo, layout: KVLayout, **bounds: float):
    checksums = checksum_body(raw, body.exact, layout.layers)
    return pack_lossy(
        codec, raw, body, checksums, layout, **{"error_max": math.inf, "saving_min": 0.05} | bounds
    )


lossy_layouts = st.builds(
    KVLayout,
    layers=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    head_dim=st.integers(16, 64),
    dtype=st.sampled_from(FLOATS),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(QUANTISED), lossy_layouts, st.integers(40, 150), st.integers(0, 9))
def test_a_lossy_codec_makes_a_body_of_its_own_that_is_kept_and_checked_like_any(codec, layout, tokens, seed):
    name, bits = codec
    raw = flat(kv(layout, tokens, seed))
    body = body_of(raw, tokens)
    packed = made(name, raw, body, layout)
    assert not isinstance(packed, Kept)
    assert packed.body == lossy_body(body, name) and packed.body.exact == lossy_key(EXACT, name) != EXACT
    assert packed.body.provenance is Provenance.APPROXIMATE and packed.body.codec == name
    assert (packed.body.content, packed.body.base_position) == (body.content, body.base_position)
    shape = layout.shape(tokens)
    layers = np.frombuffer(raw, np.float32 if layout.dtype == "float32" else np.uint16).reshape(shape)
    twins = [quantised_module.encode_layer_py(layer, layout.dtype, bits) for layer in layers]
    decoded_py = [
        quantised_module.decode_layer_py(encoded, layout.dtype, bits, shape[1:]) for encoded, _ in twins
    ]
    out = unpacked(packed.coding, packed.data, packed.body, packed.checksums, layout)
    assert out == b"".join(layer.tobytes() for layer in decoded_py)
    assert packed.error == pytest.approx(max(error for _, error in twins), rel=1e-9)
    check = layer_check(memoryview(bytearray(len(packed.data))), packed.body.exact, packed.coding.checksums)
    check.copy(packed.data, len(packed.data))  # as a transport does it
    assert check.bad_layer is None and check.good_bytes == len(packed.data)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(QUANTISED), st.data())
def test_whatever_a_lossy_body_turns_into_nothing_wrong_comes_out(codec, data):
    layout = KVLayout(2, 2, 32, "bfloat16")
    raw = flat(kv(layout, 64))
    packed = made(codec[0], raw, body_of(raw, 64), layout)
    right = unpacked(packed.coding, packed.data, packed.body, packed.checksums, layout)
    damaged = bytearray(packed.data)
    at = data.draw(st.integers(0, len(damaged) - 1))
    patch = data.draw(st.binary(min_size=1, max_size=16))[: len(damaged) - at]
    damaged[at : at + len(patch)] = patch
    try:
        out = unpacked(packed.coding, memoryview(damaged), packed.body, packed.checksums, layout)
    except CorruptBody:
        return
    assert out == right


def test_a_lossy_codec_is_taken_for_no_body_but_one_that_is_made_by_it():
    layout = KVLayout(2, 2, 32, "bfloat16")
    raw = flat(kv(layout, 64))
    body = body_of(raw, 64)
    packed = made("int8", raw, body, layout)
    whole = packed.coding, packed.data
    unpacked(*whole, packed.body, packed.checksums, layout)
    other = dataclasses.replace(packed.body, exact=EXACT)
    for taken, sums, geometry in (
        (body, packed.checksums, layout),  # the exact body
        (dataclasses.replace(packed.body, codec="int4"), packed.checksums, layout),
        (other, packed.checksums, layout),  # under the exact body's key: checksums are bound to the key
        (packed.body, checksum_body(raw, EXACT, 2), layout),
        (packed.body, packed.checksums, None),
        (packed.body, packed.checksums, KVLayout(2, 1, 64, "bfloat16")),
        (packed.body, packed.checksums, KVLayout(2, 2, 32, "float16")),
    ):
        with pytest.raises(CorruptBody):
            unpacked(*whole, taken, sums, geometry)


def test_what_was_damaged_before_it_was_encoded_gets_no_sound_checksums():
    layout = KVLayout(2, 2, 32, "bfloat16")
    raw = flat(kv(layout, 64))
    checksums = checksum_body(raw, EXACT, 2)
    damaged = memoryview(bytearray(raw))
    damaged[len(raw) // 2 + 3] ^= 1
    with pytest.raises(CorruptBody, match="layer 1 of a body"):
        pack_lossy("int8", damaged, body_of(raw, 64), checksums, layout, error_max=1.0, saving_min=0.0)


def test_bounds_decide_whether_a_body_stays_as_it_is():
    layout = KVLayout(2, 2, 32, "bfloat16")
    bits = kv(layout, 64)
    raw = flat(bits)
    body = body_of(raw, 64)
    error = made("int4", raw, body, layout).error
    assert not isinstance(made("int4", raw, body, layout, error_max=error), Kept)
    assert made("int4", raw, body, layout, error_max=error * 0.999) == Kept("error", error)
    assert made("int4", raw, body, layout, saving_min=0.9).reason == "saving"
    bits[0, 0, 9, 0, 0] = 0x7F80  # infinite
    raw = flat(bits)
    assert made("int4", raw, body_of(raw, 64), layout) == Kept("error", math.inf)
    with pytest.raises(ConfigError):
        made("lossless", raw, body, layout)
    with pytest.raises(ConfigError):
        pack("int8", raw, body, (0, 0), saving_min=0.0)


def test_isolated_bodies_and_those_that_are_lossy_already_are_left_alone():
    body = BodyInfo(ContentKey(bytes(16)), EXACT, 1, 1)
    each = [dataclasses.replace(body, provenance=p) for p in Provenance]
    assert [may_be_lossy(b) for b in each] == [False, True, True]
    assert not may_be_lossy(lossy_body(body, "int8"))


# -- what an engine says of its values -------------------------------------------------------------


@given(lossy_layouts, st.integers(1, 99), st.binary(max_size=12))
def test_a_layout_comes_back_from_a_meta_and_from_no_other(layout: KVLayout, tokens: int, noise: bytes):
    body = BodyInfo(ContentKey(bytes(16)), EXACT, tokens, layout.body_bytes(tokens))
    meta = layout_meta(layout)
    assert is_layout_meta(meta) and layout_of(body, layout.layers, meta) == layout
    assert layout_of(body, layout.layers, meta[:-1]) is layout_of(body, layout.layers, meta + b"\0") is None
    assert layout_of(body, layout.layers + 1, meta) is None
    assert layout_of(dataclasses.replace(body, tokens=tokens + 1), layout.layers, meta) is None
    for other in (noise, meta[:1] + noise):
        said = layout_of(body, layout.layers, other)
        assert said is None or layout_meta(said) == other


def test_what_is_no_floats_has_no_layout_meta():
    assert [layout_meta(KVLayout(1, 1, 1, dtype)) for dtype in ("uint8", "float8_e5m2")] == [b"", b""]
    assert not is_layout_meta(b"")
    body = BodyInfo(ContentKey(bytes(16)), EXACT, 1, 4)
    for forged in ("c100010001000000", "c101000001000000", "c101010000000000"):
        assert layout_of(body, 1, bytes.fromhex(forged)) is None


def test_memory_for_a_disk_starts_on_a_page():
    for nbytes in (0, 1, 5000, 1 << 20):
        view = page_aligned(nbytes)
        assert len(view) == nbytes and not view.readonly
        assert not nbytes or np.frombuffer(view, np.uint8).__array_interface__["data"][0] % PAGE_BYTES == 0
