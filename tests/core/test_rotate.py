"""Re-rotation of keys against the definition of RoPE, and against models' own rotations."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pcache import _native
from p2pcache.blend.rotate import LayerRopes, RopeSpec, rotate_keys, rotate_keys_torch
from p2pcache.types import ConfigError, LayoutError

INV_FREQ = tuple(10000.0 ** (-j / 8) for j in range(8))


def keys(seed: int = 0, head_dim: int = 16, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(5, 2, head_dim, generator=torch.Generator().manual_seed(seed)).to(dtype)


def by_complex_numbers(k: torch.Tensor, delta: int, interleaved: bool) -> torch.Tensor:
    """The definition: every pair is a complex number, turned by its angle. All in fp64."""
    half = len(INV_FREQ)
    index = torch.arange(2 * half).view(half, 2) if interleaved else torch.arange(2 * half).view(2, half).T
    pairs = torch.view_as_complex(k.double()[..., index].contiguous())
    angle = delta * torch.tensor(INV_FREQ, dtype=torch.float64)
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle))
    out = k.double().clone()
    out[..., index] = turned
    return out


@settings(deadline=None)  # shared cores: wall time says nothing
@given(delta=st.integers(-100_000, 100_000), interleaved=st.booleans(), partial=st.booleans())
def test_turns_by_the_definition(delta: int, interleaved: bool, partial: bool) -> None:
    k = keys(head_dim=24 if partial else 16)
    got = rotate_keys(k, delta, INV_FREQ, interleaved=interleaved)
    torch.testing.assert_close(got.double(), by_complex_numbers(k, delta, interleaved), atol=2e-6, rtol=0)
    assert torch.equal(got[..., 16:], k[..., 16:])


@settings(deadline=None)  # shared cores: wall time says nothing
@given(there=st.integers(-50_000, 50_000), on=st.integers(-50_000, 50_000))
def test_moves_compose(there: int, on: int) -> None:
    k = keys()
    twice = rotate_keys(rotate_keys(k, there, INV_FREQ), on, INV_FREQ)
    torch.testing.assert_close(twice, rotate_keys(k, there + on, INV_FREQ), atol=5e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_move_by_zero_gives_equal_bytes_and_no_alias(dtype: torch.dtype) -> None:
    k = keys(dtype=dtype)
    got = rotate_keys(k, 0, INV_FREQ)
    assert torch.equal(got, k) and got.data_ptr() != k.data_ptr()


def test_writes_in_place_into_strided_buffers_and_other_dtypes() -> None:
    k = keys(dtype=torch.bfloat16)
    want = rotate_keys(k.float(), 77, INV_FREQ)
    buffer = torch.zeros(2, 9, 16)  # an engine's [kv_heads, capacity, head_dim]
    rotate_keys(k, 77, INV_FREQ, out=buffer[:, 2:7].transpose(0, 1))
    assert torch.equal(buffer[:, 2:7].transpose(0, 1), want)
    assert not buffer[:, :2].any() and not buffer[:, 7:].any()
    own = k.float()
    assert torch.equal(rotate_keys(own, 77, INV_FREQ, out=own), want)


@pytest.mark.parametrize("level", _native.simd_levels())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@settings(deadline=None, max_examples=60)
@given(
    half=st.integers(1, 70),
    passing=st.integers(0, 9),
    tokens=st.integers(0, 5),
    interleaved=st.booleans(),
    in_place=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_native_turns_to_the_bits_of_torch(
    level, dtype, half, passing, tokens, interleaved, in_place, seed
) -> None:
    random = torch.Generator().manual_seed(seed)
    k = (300 * torch.randn(3, tokens + 2, 2 * half + passing, generator=random)).to(dtype)
    k = k[:, 1 : tokens + 1].transpose(0, 1)  # as an engine's cache holds them: [heads, capacity, dim]
    angle = torch.rand(half, generator=random, dtype=torch.float64) * 1e4
    cos, sin = angle.cos().float(), angle.sin().float()
    want = k.clone()
    rotate_keys_torch(k, cos, sin, want, interleaved=interleaved)
    out = k if in_place else torch.empty_like(k)
    name = str(dtype).removeprefix("torch.")
    _native.rotate_keys(k, cos.numpy(), sin.numpy(), name, interleaved, out, level)
    assert torch.equal(out, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_native_rounds_and_carries_all_values_as_torch_does(dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    k = every[torch.randperm(2**16, generator=torch.Generator().manual_seed(1))].view(-1, 2, 64)
    angle = torch.linspace(0, 6, 32, dtype=torch.float64)
    cos, sin, want = angle.cos().float(), angle.sin().float(), torch.empty_like(k)
    rotate_keys_torch(k, cos, sin, want, interleaved=False)
    for level in _native.simd_levels():
        out = torch.empty_like(k)
        _native.rotate_keys(k, cos.numpy(), sin.numpy(), str(dtype).removeprefix("torch."), False, out, level)
        assert torch.equal(out.isnan(), want.isnan())
        assert torch.equal(out[~out.isnan()], want[~want.isnan()])


def test_native_refuses_what_does_not_fit() -> None:
    k, angles = torch.zeros(2, 3, 8), torch.zeros(4).numpy()
    for bad in (
        (k, angles[:3], angles, "float32", False, k.clone()),
        (k, torch.zeros(5).numpy(), torch.zeros(5).numpy(), "float32", False, k.clone()),
        (k, angles, angles, "bfloat16", False, k.clone()),
        (k, angles, angles, "float32", False, torch.zeros(2, 3, 9)),
        (k.transpose(1, 2), angles[:1], angles[:1], "float32", False, k.transpose(1, 2)),
    ):
        with pytest.raises(ValueError):
            _native.rotate_keys(*bad)


def test_refuses_shapes_that_do_not_fit() -> None:
    with pytest.raises(LayoutError):
        rotate_keys(keys(head_dim=8), 1, INV_FREQ)
    with pytest.raises(LayoutError):
        rotate_keys(keys(), 1, INV_FREQ, out=torch.empty(4, 2, 16))


def test_every_field_is_in_the_fingerprint() -> None:
    spec = RopeSpec(INV_FREQ)
    others = [
        dataclasses.replace(spec, interleaved=True),
        dataclasses.replace(spec, attention_scaling=1.1),
        dataclasses.replace(spec, inv_freq=INV_FREQ[:-1]),
        dataclasses.replace(spec, inv_freq=(*INV_FREQ[:-1], INV_FREQ[-1] * (1 + 1e-15))),
    ]
    assert len({s.fingerprint() for s in [spec, *others]}) == 5
    assert len(spec.fingerprint()) == 32 and spec.fingerprint() == RopeSpec(INV_FREQ).fingerprint()


GEMMA3 = {
    "head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "num_hidden_layers": 3,
    "sliding_window": 8,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    },
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip


def tiny(name: str, **fields):
    """A small model with random weights, of the named transformers architecture."""
    import transformers

    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    names = {"Gemma3": "Gemma3Text"}
    config = getattr(transformers, f"{names.get(name, name)}Config")(**(shape | heads | fields))
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


@pytest.mark.parametrize(
    ("model", "interleaved", "rotary_dim"),
    [
        (("Llama", {}), False, 8),
        (("Qwen3", {"head_dim": 16}), False, 16),
        (("Glm", {"head_dim": 16}), True, 8),  # partial rotary, interleaved
        (("StableLm", {}), False, 2),  # partial rotary, half-split
        (("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}), False, 8),
        (("Llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}), False, 8),
    ],
)
def test_reads_a_models_rotation(model, interleaved: bool, rotary_dim: int) -> None:
    name, fields = model
    spec = RopeSpec.from_model(tiny(name, **fields))
    assert (spec.interleaved, spec.rotary_dim) == (interleaved, rotary_dim)
    yarn = fields.get("rope_parameters", {}).get("rope_type") == "yarn"
    assert (spec.attention_scaling > 1) == yarn


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
            "length",
        ),
        (("OPT", {"max_position_embeddings": 2048, "ffn_dim": 48, "word_embed_proj_dim": 32}), "no rotary"),
    ],
)
def test_refuses_models_whose_keys_cannot_be_moved(model, reason: str) -> None:
    name, fields = model
    built = tiny(name, **fields)
    with pytest.raises(ConfigError, match=reason):
        RopeSpec.from_model(built)


MOVABLE = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "ntk": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4 * 4 ** (8 / 6)}}),
    "yarn": ("Llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "partial": ("StableLm", {}),
    "phi3": ("Phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                          "partial_rotary_factor": 0.5}}),
    "gpt-neox": ("GPTNeoX", {}),
    "interleaved": ("Glm", {"head_dim": 16}),
    "gemma3": ("Gemma3", GEMMA3),
    "some-layers-without": ("SmolLM3", {"no_rope_layers": [1, 0]}),
}  # fmt: skip


def body_at(model, base: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """K and V `[tokens, kv_heads, head_dim]` of each layer, of twelve tokens computed from `base` on."""
    import transformers

    from p2pcache.blend.forward import run_model

    cache = transformers.DynamicCache()
    with torch.no_grad():
        run_model(model, torch.arange(1, 13), torch.arange(base, base + 12), cache)
    return [(c.keys[0].transpose(0, 1), c.values[0].transpose(0, 1)) for c in cache.layers]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MOVABLE)
def test_a_chunk_at_another_position_has_the_same_values_and_turned_keys(name: str, dtype) -> None:
    architecture, fields = MOVABLE[name]
    model = tiny(architecture, **fields)
    # bf16 is judged by what a model in fp32 with keys rounded once gives: its own angles are rounded too.
    rope = RopeSpec.from_model(model)
    for index, ((k, v), (want_k, want_v)) in enumerate(
        zip(body_at(model, 5), body_at(model, 605), strict=True)
    ):
        got = rope.layer(index).rotate(k.to(dtype), 600).float()
        tolerance = 1e-5 if dtype == torch.float32 else 3e-3
        # Angles of a model are fp32: at 600 radians they err by 3e-5 of a turn themselves.
        rounding = 600 * 2**-24
        assert (got - want_k).norm() <= (tolerance + rounding) * want_k.norm()
        torch.testing.assert_close(v, want_v, atol=1e-5, rtol=1e-4)
        if name == "gemma3" and dtype == torch.float32:  # the other kind's theta would be garbage
            other = rope.layer((index + 1) % 3 if index else 1).rotate(k, 600)
            assert index == 2 or (other - want_k).norm() > 0.1 * want_k.norm()


def test_a_rope_for_each_layer_type_has_a_fingerprint_of_its_own() -> None:
    rope = RopeSpec.from_model(tiny("Gemma3", **GEMMA3))
    assert isinstance(rope, LayerRopes)
    local, global_, again = rope.specs
    assert local == again != global_ and local.inv_freq[1] == pytest.approx(1e4 ** (-1 / 8))
    assert global_.inv_freq[1] == pytest.approx(1e6 ** (-1 / 8) / 8)
    prints = {local.fingerprint(), global_.fingerprint(), rope.fingerprint()}
    prints.add(LayerRopes((global_, local, local)).fingerprint())
    prints.add(LayerRopes((local,)).fingerprint())
    assert len(prints) == 5
    plain = {**GEMMA3["rope_parameters"]["sliding_attention"]}
    uniform = {"rope_parameters": {"sliding_attention": plain, "full_attention": dict(plain)}}
    assert isinstance(RopeSpec.from_model(tiny("Gemma3", **(GEMMA3 | uniform))), RopeSpec)


def test_a_model_with_state_instead_of_keys_is_told_so() -> None:
    import transformers

    config = transformers.Lfm2Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, layer_types=["conv", "full_attention"],
    )  # fmt: skip
    with pytest.raises(ConfigError, match="plain keys"):
        RopeSpec.from_model(transformers.Lfm2ForCausalLM(config).eval())
