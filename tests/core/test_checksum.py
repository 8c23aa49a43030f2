"""Checksums tie a layer's bytes to their body and to their place in it."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from p2pcache import _native
from p2pcache.core.checksum import (
    LAYER_STRIDE,
    LayerCheck,
    checksum_body,
    checksum_layer,
    first_bad_layer,
    layer_seed,
    plain_checksums,
)
from p2pcache.types import LayoutError

keys = st.binary(min_size=16, max_size=16)
bodies = st.integers(1, 9).flatmap(
    lambda layers: st.tuples(
        st.just(layers),
        st.integers(1, 40).flatmap(lambda part: st.binary(min_size=part * layers, max_size=part * layers)),
    )
)


def test_the_seed_is_the_keys_first_eight_bytes_little_endian_plus_a_stride_a_layer():
    key = bytes([1, 0, 0, 0, 0, 0, 0, 0]) + b"rest of it"[:8]
    assert layer_seed(key, 0) == 1
    assert layer_seed(key, 1) == 1 + LAYER_STRIDE
    assert layer_seed(b"\xff" * 16, 1) == LAYER_STRIDE - 1  # modulo 2**64
    assert checksum_layer(b"abc", key, 1) == xxhash.xxh3_64_intdigest(b"abc", 1 + LAYER_STRIDE)


def test_no_two_layers_of_a_body_share_a_seed():
    assert len({layer_seed(b"k" * 16, layer) for layer in range(1024)}) == 1024


@given(keys, bodies)
def test_an_unchanged_body_has_no_bad_layer(key, body):
    layers, data = body
    checksums = checksum_body(memoryview(data), key, layers)
    assert len(checksums) == layers
    assert first_bad_layer(memoryview(data), key, checksums) is None


@given(keys, bodies, st.data())
def test_a_flipped_bit_is_found_in_its_layer(key, body, data):
    layers, content = body
    checksums = checksum_body(memoryview(content), key, layers)
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    flipped = bytearray(content)
    flipped[bit // 8] ^= 1 << bit % 8
    assert first_bad_layer(memoryview(flipped), key, checksums) == bit // 8 // (len(content) // layers)


def test_bytes_of_another_body_or_another_layer_fail():
    checksums = checksum_body(memoryview(b"same" * 2), b"a" * 16, 2)
    assert checksums[0] != checksums[1]
    assert first_bad_layer(memoryview(b"same" * 2), b"b" * 16, checksums) == 0
    assert first_bad_layer(memoryview(b"same" * 2), b"a" * 16, checksums[::-1]) == 0


@pytest.mark.parametrize(("nbytes", "layers"), [(10, 3), (0, 1), (2, 3), (4, 0)])
def test_unequal_layers_are_a_typed_error(nbytes, layers):
    with pytest.raises(LayoutError, match="equal layers"):
        checksum_body(memoryview(bytes(nbytes)), b"k" * 16, layers)
    with pytest.raises(LayoutError, match="equal layers"):
        first_bad_layer(memoryview(bytes(nbytes)), b"k" * 16, (1,) * layers)


def test_a_wrong_key_or_a_view_that_is_not_flat_bytes_is_a_typed_error():
    with pytest.raises(LayoutError, match="16 bytes"):
        layer_seed(b"short", 0)
    with pytest.raises(LayoutError, match="flat"):
        checksum_body(memoryview(bytes(8)).cast("I"), b"k" * 16, 1)


LEVELS = _native.checksum_levels()


@given(keys, st.integers(1, 4), st.integers(241, 3000), st.randoms())
@pytest.mark.parametrize("level", LEVELS)
def test_native_checksums_are_those_of_xxhash(level, key, layers, part, random):
    body = memoryview(random.randbytes(layers * part))
    native = _native.layer_checksums(body, layer_seed(key, 0), layers, level)
    assert tuple(native) == plain_checksums(body, key, layers) == checksum_body(body, key, layers)


def checks(body: memoryview, key: bytes, sums: tuple[int, ...]) -> list:
    native = [_native.LayerCheck(body, layer_seed(key, 0), list(sums), level) for level in LEVELS]
    return [LayerCheck(body, layer_seed(key, 0), sums), *native]


@given(keys, st.integers(1, 4), st.integers(241, 2500), st.randoms(), st.data())
def test_layers_are_checked_as_they_land_however_they_are_cut(key, layers, part, random, data):
    content = bytearray(random.randbytes(layers * part))
    sums = plain_checksums(memoryview(content), key, layers)
    wrong = data.draw(st.none() | st.integers(0, layers - 1))
    if wrong is not None:
        content[wrong * part + random.randrange(part)] ^= 1 << random.randrange(8)
    stops = sorted(random.randrange(len(content) + 1) for _ in range(random.randrange(6))) + [len(content)]
    for copies in (False, True):
        for made in range(1 + len(LEVELS)):
            body = memoryview(bytearray(len(content)) if copies else bytearray(content))
            check = checks(body, key, sums)[made]
            for stop in stops:
                check.copy(memoryview(content), stop) if copies else check.advance(stop)
                good = min(stop // part, layers if wrong is None else wrong)
                assert check.good_bytes == good * part and check.landed_bytes == stop
                assert check.bad_layer == (
                    wrong if wrong is not None and stop >= (wrong + 1) * part else None
                )
                if copies and check.bad_layer is None:
                    assert body[:stop] == content[:stop]


@pytest.mark.parametrize("part, layers", [(1 << 20, 3), ((1 << 19) + 7, 3), (300, 8000)])
def test_a_large_copy_is_exact_and_stays_within_its_bounds(part, layers):
    source = memoryview(os.urandom(part * layers))
    sums = checksum_body(source, b"k" * 16, layers)
    for level in LEVELS:
        for shift in (0, 1, 32):
            around = bytearray(b"\xee" * (source.nbytes + 128))
            body = memoryview(around)[shift : shift + source.nbytes]
            check = _native.LayerCheck(body, layer_seed(b"k" * 16, 0), list(sums), level)
            check.copy(source, 12_345)
            check.copy(source, source.nbytes)
            assert check.bad_layer is None and check.good_bytes == source.nbytes and body == source
            assert set(around[:shift]) | set(around[shift + source.nbytes :]) <= {0xEE}


def test_without_checksums_bytes_are_moved_and_not_checked():
    for check in checks(memoryview(body := bytearray(10)), b"k" * 16, ()):
        check.copy(memoryview(b"0123456789"), 4)
        assert (body[:4], check.good_bytes, check.bad_layer) == (b"0123", 4, None)
        body[:] = bytes(10)


def test_a_check_refuses_what_does_not_fit():
    sums = (1, 2)
    for check in checks(memoryview(bytearray(1000)), b"k" * 16, sums):
        check.advance(100)
        for upto in (99, 1001):
            with pytest.raises(ValueError):
                check.advance(upto)
    with pytest.raises(ValueError):
        _native.LayerCheck(bytearray(100), 0, [1])  # a layer that XXH3 treats in another way
    with pytest.raises(BufferError):
        _native.LayerCheck(bytes(1000), 0, [1])  # nothing may be written there
    with pytest.raises(ValueError):
        _native.layer_checksums(bytes(1000), 0, 1, "no such level")


def test_a_second_thread_is_turned_away():
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor(1) as pool:
        first, rest = 256 << 10, 1000  # the first comes in one piece
        body = bytearray(first + rest)
        check = _native.LayerCheck(body, 0, [])
        receiving = pool.submit(check.receive, ours.fileno(), len(body))
        theirs.sendall(bytes(first))
        while check.landed_bytes < first and not receiving.done():
            pass
        for call in (lambda: check.advance(first), lambda: check.copy(bytes(len(body)), len(body))):
            with pytest.raises(RuntimeError, match="another thread"):
                call()
        theirs.sendall(bytes(rest))
        receiving.result()
        check.advance(len(body))


def test_native_code_receives_up_to_where_it_is_told_and_says_when_the_other_side_has_ended():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        content = os.urandom(100_000)
        sums = checksum_body(memoryview(content), b"k" * 16, 4)
        body = bytearray(len(content))
        check = _native.LayerCheck(body, layer_seed(b"k" * 16, 0), list(sums))
        theirs.sendall(content[:60_000])
        assert check.receive(ours.fileno(), 50_000) is False
        assert (check.landed_bytes, check.good_bytes) == (50_000, 50_000)
        theirs.shutdown(socket.SHUT_WR)
        assert check.receive(ours.fileno(), len(content)) is True
        assert check.landed_bytes == 60_000 and body[:60_000] == content[:60_000]
        ours.setblocking(False)
    with pytest.raises(OSError):
        check.receive(ours.fileno(), len(content))
