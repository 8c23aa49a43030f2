"""The canonical body's geometry: byte counts follow from the shape, impossible layouts are refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcache.core.layout import DTYPE_BYTES, KVLayout
from p2pcache.types import ConfigError


@given(
    st.integers(1, 1024),
    st.integers(1, 4096),
    st.integers(1, 65536),
    st.sampled_from(list(DTYPE_BYTES)),
    st.integers(0, 2048),
)
def test_bytes_follow_from_the_shape(layers: int, kv_heads: int, head_dim: int, dtype: str, tokens: int):
    layout = KVLayout(layers, kv_heads, head_dim, dtype)
    assert layout.body_bytes(tokens) == math.prod(layout.shape(tokens)) * DTYPE_BYTES[dtype]
    assert layout.layer_bytes(tokens) * layers == layout.body_bytes(tokens)


def test_smollm2_takes_23040_bytes_a_token():
    assert KVLayout(30, 3, 64, "bfloat16").body_bytes(1) == 23_040


@pytest.mark.parametrize(
    "wrong",
    [
        (0, 1, 1, "float32"),
        (1025, 1, 1, "float32"),
        (1, 0, 1, "float32"),
        (1, 1, -1, "float32"),
        (1, 1, 65537, "float32"),
        (1.0, 1, 1, "float32"),
        (1, 1, 1, "float64"),
        (1, 1, 1, "torch.float32"),
    ],
)
def test_an_impossible_layout_is_the_users_error(wrong):
    with pytest.raises(ConfigError):
        KVLayout(*wrong)


def test_differences_say_what_is_held_and_what_was_asked():
    asked, held = KVLayout(2, 3, 4, "float16"), KVLayout(2, 1, 4, "bfloat16")
    assert asked.differences(held) == ["kv_heads: held 1, asked 3", "dtype: held bfloat16, asked float16"]
    assert asked.differences(asked) == []
