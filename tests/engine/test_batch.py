"""A batched decode step is what single steps are, whatever the lengths of its sequences."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import DynamicCache

from p2pcache.blend import batch
from p2pcache.blend.batch import BatchDecoder, decode_batch
from p2pcache.blend.sparse import decode, extract_kv, full_prefill, sparse_prefill
from p2pcache.types import ConfigError, LayoutError

pytestmark = pytest.mark.engine
SHAPE = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "initializer_range": 0.2,
}  # fmt: skip
WINDOW = 24
MODELS = {
    "llama": ("Llama", {}),
    "llama-eager": ("Llama", {"attn_implementation": "eager"}),
    "llama-mha": ("Llama", {"num_key_value_heads": 4}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen2-mixed": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW,
         "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    ),
    "mistral-sliding": ("Mistral", {"sliding_window": WINDOW}),
    "gemma2": ("Gemma2", {"sliding_window": WINDOW, "head_dim": 16, "attn_logit_softcapping": 5.0,
                          "attn_implementation": "eager"}),
    "gemma3": (
        "Gemma3",
        {"sliding_window": WINDOW, "head_dim": 16,
         "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    ),
    "phi3": ("Phi3", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
}  # fmt: skip
LENGTHS = (3, 200, 1, 24, 25, 70, 23)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Matrices this small lose more to waking threads than they gain."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def made(name: str, **settings):
    torch.manual_seed(3)
    names = {"Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM")}
    config, model = names.get(name, (f"{name}Config", f"{name}ForCausalLM"))
    return getattr(transformers, model)(getattr(transformers, config)(**(SHAPE | settings))).eval()


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    name, settings = MODELS[request.param]
    return made(name, **settings)


@pytest.fixture(scope="module")
def llama():
    return made("Llama")


def caches(model, lengths, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(1, 128, (n,), generator=generator) for n in lengths]
    return [sparse_prefill(model, p, [], None, None, capacity=len(p) + 8).cache for p in prompts]


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_it_equals_single_steps(model, rows: int) -> None:
    together, alone = caches(model, LENGTHS[:rows]), caches(model, LENGTHS[:rows])
    for step in range(4):
        tokens = [(11 * row + step) % 127 + 1 for row in range(rows)]
        got = decode_batch(model, together, tokens)
        want = torch.cat([decode(model, c, [t]) for c, t in zip(alone, tokens, strict=True)])
        assert got.shape == (rows, 128)
        torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)
    for mine, other, length in zip(together, alone, LENGTHS, strict=False):
        assert mine.get_seq_length() == length + 4
        stored = [extract_kv(cache, 0, length + 4) for cache in (mine, other)]
        torch.testing.assert_close(*stored, atol=2e-4, rtol=1e-4)


def test_models_that_keep_to_the_interface_are_batched(model) -> None:
    decoder = BatchDecoder(model)
    assert decoder.batched, decoder.why_one_by_one
    assert model.config._attn_implementation != batch.ATTENTION_NAME


def test_sequences_come_and_go_between_steps(llama) -> None:
    decoder = BatchDecoder(llama)
    a, b, c = caches(llama, (40, 9, 90))
    decoder.decode([a, b], [1, 2])
    decoder.decode([b, c, a], [3, 4, 5])
    decoder.decode([c], [6])
    last = decoder.decode([c, a], [7, 8])
    x, _, z = caches(llama, (40, 9, 90))
    want = torch.stack([decode(llama, z, [4, 6, 7])[-1], decode(llama, x, [1, 5, 8])[-1]])
    torch.testing.assert_close(last, want, atol=1e-4, rtol=1e-4)


def test_a_dynamic_cache_is_taken_too(llama) -> None:
    prompts = [list(range(1, n)) for n in (30, 5)]
    together, alone = ([full_prefill(llama, p)[1] for p in prompts] for _ in range(2))
    assert isinstance(together[0], DynamicCache)
    got = decode_batch(llama, together, [9, 8])
    want = torch.cat([decode(llama, c, [t]) for c, t in zip(alone, [9, 8], strict=True)])
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_a_model_outside_the_interface_is_decoded_one_by_one(monkeypatch) -> None:
    model = made("Llama")
    attention = model.model.layers[1].self_attn
    inner = attention.forward

    def own_way(*args, **kwargs):  # as a model with attention code of its own
        if kwargs["hidden_states"].shape[1] > 1 and model.config._attn_implementation == batch.ATTENTION_NAME:
            raise AttributeError("'list' object has no attribute 'shape'")
        return inner(*args, **kwargs)

    monkeypatch.setattr(attention, "forward", own_way)
    decoder = BatchDecoder(model)
    assert not decoder.batched and "no attribute 'shape'" in decoder.why_one_by_one
    together, alone = caches(model, (5, 50)), caches(model, (5, 50))
    got = decoder.decode(together, [1, 2])
    want = torch.cat([decode(model, c, [t]) for c, t in zip(alone, [1, 2], strict=True)])
    assert torch.equal(got, want)


def test_a_model_that_gives_other_logits_is_decoded_one_by_one(monkeypatch) -> None:
    model = made("Llama")
    attend = batch.ALL_ATTENTION_FUNCTIONS[batch.ATTENTION_NAME]

    def other(*args, **kwargs):
        out, _ = attend(*args, **kwargs)
        return out * 1.01, None

    monkeypatch.setitem(batch.ALL_ATTENTION_FUNCTIONS._global_mapping, batch.ATTENTION_NAME, other)
    assert "other logits" in BatchDecoder(model).why_one_by_one


def test_unknown_kinds_of_layers_are_decoded_one_by_one(llama, monkeypatch) -> None:
    monkeypatch.setattr(llama.config, "layer_types", ["chunked_attention"] * 3, raising=False)
    assert "chunked_attention" in BatchDecoder(llama).why_one_by_one
    with pytest.raises(ConfigError, match="chunked_attention"):
        decode_batch(llama, caches(llama, (4, 5)), [1, 2])


@pytest.mark.parametrize("batched", [True, False])
def test_a_step_that_fails_half_way_changes_no_sequence(monkeypatch, batched: bool) -> None:
    model = made("Llama")
    decoder = BatchDecoder(model)
    if not batched:
        decoder.why_one_by_one = "for the test"
    together, alone = caches(model, (6, 60)), caches(model, (6, 60))
    mlp = model.model.layers[1].mlp
    inner, calls = mlp.forward, []

    def failing(hidden):
        calls.append(hidden.shape)
        if batched or len(calls) == 2:
            raise RuntimeError("out of memory")
        return inner(hidden)

    with monkeypatch.context() as patch:
        patch.setattr(mlp, "forward", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            decoder.decode(together, [1, 2])
    assert [layer.get_seq_length() for c in together for layer in c.layers] == [6] * 3 + [60] * 3
    assert model.config._attn_implementation == "sdpa"
    got = decoder.decode(together, [3, 4])
    want = torch.cat([decode(model, c, [t]) for c, t in zip(alone, [3, 4], strict=True)])
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_a_batch_that_makes_no_sense_is_refused(llama) -> None:
    a, b = caches(llama, (4, 5))
    for some, tokens, words in (
        ([a, b], [1], "one token for each"),
        ([], [], "one token"),
        ([a, a], [1, 2], "once"),
    ):
        with pytest.raises(LayoutError, match=words):
            BatchDecoder(llama).decode(some, tokens)
    assert a.get_seq_length() == 4
