"""Checksums tie a layer's bytes to their body and to their place in it."""

from __future__ import annotations

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from p2pcache.core.checksum import (
    LAYER_STRIDE,
    checksum_body,
    checksum_layer,
    first_bad_layer,
    layer_seed,
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
