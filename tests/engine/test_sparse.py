"""Sparse prefill on small models with random weights: what is reused exactly must change nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from p2pcache.blend.quality import kl_divergence, top1_agreement
from p2pcache.blend.rotate import RopeSpec
from p2pcache.blend.select import Piece, Selection
from p2pcache.blend.sparse import decode, extract_kv, full_prefill, sparse_prefill
from p2pcache.types import ConfigError, LayoutError

TOKENS = np.random.default_rng(7).integers(1, 128, 96)
SHAPE = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip
MODELS = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),  # QK-norm, and a head_dim of its own
    "qwen2-mixed": (
        "Qwen2",  # full and sliding layers in one model
        {"use_sliding_window": True, "sliding_window": 24,
         "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    ),
    "mistral-sliding": ("Mistral", {"sliding_window": 24}),
    "llama-eager": ("Llama", {"attn_implementation": "eager"}),
    "gemma3": (  # QK-norm, and a theta and a mask a layer type
        "Gemma3",
        {"sliding_window": 24, "head_dim": 16, "query_pre_attn_scalar": 16,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "phi3-partial": ("Phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                                  "partial_rotary_factor": 0.5}}),
    "gpt-neox": ("GPTNeoX", {}),
    "glm-interleaved": ("Glm", {"head_dim": 16}),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Matrices this small lose more to waking threads than they gain."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    name, settings = MODELS[request.param]
    torch.manual_seed(3)
    names = {"Gemma3": "Gemma3Text"}
    config = getattr(transformers, f"{names.get(name, name)}Config")(**(SHAPE | settings))
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(3)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).eval()


class Bodies:
    """A layer source over bodies in memory, that notes the order it was asked in."""

    def __init__(self, *items: tuple[Piece, torch.Tensor]) -> None:
        self.items = items
        self.asked: list[int] = []

    @property
    def pieces(self) -> list[Piece]:
        return [piece for piece, _ in self.items]

    def layer(self, index: int):
        self.asked.append(index)
        return [(piece, body[index]) for piece, body in self.items]


def stored(cache, *spans: tuple[int, int]) -> Bodies:
    """Exact bodies of the prompt's own KV."""
    return Bodies(*((Piece(a, b, a, exact=True), extract_kv(cache, a, b)) for a, b in spans))


def close(got: torch.Tensor, want: torch.Tensor, atol: float = 1e-4) -> None:
    torch.testing.assert_close(got, want, atol=atol, rtol=0)


def same_kv(got, want, start: int, stop: int, atol: float = 1e-4) -> None:
    """Equal KV in these slots, but for those that no later token of a sliding layer sees."""
    for mine, other in zip(got.layers, want.layers, strict=True):
        kept = torch.ones(stop, dtype=torch.bool)
        kept[: len(mine.holes)] = ~torch.from_numpy(mine.holes)[:stop]
        kept[:start] = False
        assert kept.any()
        for axis in ("keys", "values"):
            a, b = (getattr(layer, axis)[0, :, :stop][:, kept] for layer in (mine, other))
            close(a, b, atol)


def test_without_pieces_it_is_a_full_prefill(model) -> None:
    logits, cache = full_prefill(model, TOKENS)
    sparse = sparse_prefill(model, TOKENS, [], None, None)
    close(sparse.logits_last, logits)
    close(extract_kv(sparse.cache, 0, 96), extract_kv(cache, 0, 96))
    assert sparse.recomputed.tolist() == list(range(96)) and sparse.exact_tokens == 96


@pytest.mark.parametrize(
    "spans", [[(0, 95)], [(0, 96)], [(0, 32), (32, 60)], [(0, 16), (40, 64), (70, 80)], [(3, 4)]]
)
def test_exact_pieces_change_nothing(model, spans) -> None:
    logits, cache = full_prefill(model, TOKENS)
    source = stored(cache, *spans)
    sparse = sparse_prefill(model, TOKENS, source.pieces, source, None)
    close(sparse.logits_last, logits)
    same_kv(sparse.cache, cache, 0, 96)
    assert source.asked == [0, 1, 2]
    assert sparse.recomputed[-1] == 95 and len(sparse.recomputed) == max(96 - sum(b - a for a, b in spans), 1)


def test_an_answer_goes_on_as_after_a_full_prefill(model) -> None:
    logits, cache = full_prefill(model, TOKENS)
    source = stored(cache, (0, 50), (60, 90))
    # A capacity of exactly the prompt: the first token of the answer already makes the cache grow.
    sparse = sparse_prefill(model, TOKENS, source.pieces, source, None, capacity=96)
    mine, other = sparse.logits_last, logits
    for _ in range(40):
        assert mine.argmax() == other.argmax()
        mine, other = (decode(model, c, [int(other.argmax())])[-1] for c in (sparse.cache, cache))
        close(mine, other)


def test_several_tokens_at_once_are_as_one_at_a_time(model) -> None:
    answer = TOKENS[:30]
    _, cache = full_prefill(model, TOKENS)
    source = stored(cache, (0, 90))
    at_once, single = (sparse_prefill(model, TOKENS, source.pieces, source, None).cache for _ in range(2))
    want = torch.cat([decode(model, single, [token]) for token in answer])
    close(decode(model, at_once, answer), want)
    close(decode(model, cache, answer), want)


def test_generate_of_the_model_itself_takes_the_cache(llama) -> None:
    logits, cache = full_prefill(llama, TOKENS)
    source = stored(cache, (0, 90))
    answers = []
    for past in (cache, sparse_prefill(llama, TOKENS, source.pieces, source, None).cache):
        ids = torch.tensor([[*TOKENS.tolist(), int(logits.argmax())]])
        answers.append(llama.generate(ids, cache=past, max_new_tokens=12, do_sample=False).tolist())
    assert answers[0] == answers[1]


def test_a_cropped_cache_goes_on_from_there(llama) -> None:
    sparse = sparse_prefill(llama, TOKENS, [], None, None)
    first = decode(llama, sparse.cache, [5, 6, 7])
    sparse.cache.crop(-3)
    close(decode(llama, sparse.cache, [5, 6, 7]), first)


def test_a_body_moves_by_turning_its_keys_and_leaving_its_values(model) -> None:
    """The same tokens at p and p': V equal, K equal once turned, in every layer."""
    from p2pcache.blend.forward import run_model

    rope = RopeSpec.from_model(model)
    ids = torch.from_numpy(TOKENS[:20])
    bodies = []
    for base in (4, 700):
        cache = transformers.DynamicCache()
        with torch.no_grad():
            run_model(model, ids, torch.arange(base, base + 20), cache)
        bodies.append(extract_kv(cache, 0, 20))
    near, far = bodies
    for layer in range(3):
        close(
            rope.layer(layer).rotate(near[layer, 0], 696),
            far[layer, 0],
            atol=1e-5 * float(far[layer, 0].abs().max()) + 1e-5,
        )
        close(near[layer, 1], far[layer, 1], atol=1e-5)


def moved_prompt(model):
    """A body of tokens 20..60 computed at 20, for a prompt in which they stand at 33."""
    _, cache = full_prefill(model, TOKENS)
    prompt = np.concatenate([TOKENS[60:93], TOKENS[20:60], TOKENS[5:15]])
    return prompt, Bodies((Piece(33, 73, 20, exact=False), extract_kv(cache, 20, 60)))


def test_a_moved_piece_fills_its_place_turned_and_only_its_head_is_recomputed(model) -> None:
    prompt, source = moved_prompt(model)
    rope = RopeSpec.from_model(model)
    sparse = sparse_prefill(model, prompt, source.pieces, source, rope, head_tokens=4)
    assert sparse.recomputed.tolist() == [*range(37), *range(73, 83)] and sparse.exact_tokens == 33
    body = source.items[0][1]
    for index, layer in enumerate(sparse.cache.layers):
        kept = ~layer.holes[37:73]
        want = rope.layer(index).rotate(body[index, 0, 4:], 13), body[index, 1, 4:]
        for got, whole in zip((layer.keys, layer.values), want, strict=True):
            assert torch.equal(got[0, :, 37:73].transpose(0, 1)[kept], whole[kept])
    _, full = full_prefill(model, prompt)
    close(extract_kv(sparse.cache, 0, 37), extract_kv(full, 0, 37))  # all that stands before it, and its head


def test_later_kv_never_reaches_earlier_tokens(model) -> None:
    prompt, source = moved_prompt(model)
    rope = RopeSpec.from_model(model)
    piece, body = source.items[0]
    changed = body.clone()
    changed[:, :, 10:] += 1  # positions 43 and later
    before, after = (
        sparse_prefill(model, prompt, [piece], Bodies((piece, b)), rope, head_tokens=8)
        for b in (body, changed)
    )
    same_kv(before.cache, after.cache, 0, 43, atol=0)
    assert not torch.equal(before.logits_last, after.logits_last)


def test_the_whole_head_recomputed_is_a_full_prefill(model) -> None:
    prompt, source = moved_prompt(model)
    logits, _ = full_prefill(model, prompt)
    sparse = sparse_prefill(model, prompt, source.pieces, source, RopeSpec.from_model(model), head_tokens=40)
    close(sparse.logits_last, logits)


SELECTIONS = ["none", "head-4", "deviation-30%", "deviation-v-30%@2", "query-30%", "query-30%@1",
              "random-30%", "head-4+query-20%", "head-4+deviation-k-20%"]  # fmt: skip


@pytest.mark.parametrize("text", SELECTIONS)
def test_every_selection_recomputes_its_share_and_what_is_not_covered(model, text: str) -> None:
    prompt, source = moved_prompt(model)
    rope, selection = RopeSpec.from_model(model), Selection.parse(text)
    sparse = sparse_prefill(model, prompt, source.pieces, source, rope, selection=selection)
    chosen = set(sparse.recomputed.tolist())
    assert chosen >= set(selection.fixed_positions(len(prompt), source.pieces).tolist())
    assert len(chosen) == 33 + 10 + selection.head_tokens + round(selection.share * 40)
    assert source.asked == sorted(set(source.asked))  # in order, and once at most
    # Whatever was chosen: the forward is that over a set that was known beforehand.
    _, again = moved_prompt(model)
    given = Given(sparse.recomputed)
    same = sparse_prefill(model, prompt, again.pieces, again, rope, selection=given)
    if not selection.rank.deviates:
        close(same.logits_last, sparse.logits_last)
        same_kv(same.cache, sparse.cache, 0, len(prompt))
    decode(model, sparse.cache, [1, 2, 3])


class Given(Selection):
    """A selection of given positions."""

    def __init__(self, positions: np.ndarray) -> None:
        super().__init__()
        object.__setattr__(self, "given", positions)

    __slots__ = ("given",)

    def positions(self, total, pieces, scores=None):
        return self.given


@pytest.mark.parametrize("text", ["deviation-100%", "deviation-100%@2", "query-100%", "random-100%"])
@pytest.mark.parametrize("masked", [False, True])
def test_all_recomputed_is_a_full_prefill(model, text: str, masked: bool) -> None:
    prompt, source = moved_prompt(model)
    if masked and "query" in text:
        pytest.skip("the model's own attention does not say what it looked at")
    logits, cache = full_prefill(model, prompt)
    selection, rope = Selection.parse(text), RopeSpec.from_model(model)
    sparse = sparse_prefill(model, prompt, source.pieces, source, rope, selection=selection, masked=masked)
    close(sparse.logits_last, logits)
    close(extract_kv(sparse.cache, 0, 83), extract_kv(cache, 0, 83))
    assert sparse.recomputed.tolist() == list(range(83))


@pytest.mark.parametrize("text", ["head-6", "deviation-25%", "head-4+deviation-25%@2", "random-50%"])
def test_blocks_attend_as_one_mask_does(model, text: str) -> None:
    selection, rope = Selection.parse(text), RopeSpec.from_model(model)
    ours, masked = (
        sparse_prefill(model, prompt, source.pieces, source, rope, selection=selection, masked=flag)
        for flag in (False, True)
        for prompt, source in [moved_prompt(model)]
    )
    assert ours.recomputed.tolist() == masked.recomputed.tolist()
    close(ours.logits_last, masked.logits_last)
    same_kv(ours.cache, masked.cache, 0, 83)
    assert model.config._attn_implementation in ("sdpa", "eager")


def test_deviation_finds_the_tokens_whose_kv_is_wrong(model) -> None:
    prompt, source = moved_prompt(model)
    rope, spoilt = RopeSpec.from_model(model), source.items[0][1].clone()
    spoilt[:, 1, [3, 17, 30]] += 5
    for text, wrong in (("deviation-7.5%", True), ("deviation-v-7.5%", True), ("deviation-k-7.5%", False)):
        bodies = Bodies((source.pieces[0], spoilt))
        sparse = sparse_prefill(model, prompt, bodies.pieces, bodies, rope, selection=Selection.parse(text))
        assert ({36, 50, 63} <= set(sparse.recomputed.tolist())) == wrong


def test_deviation_needs_no_inexact_kv_of_the_layers_before(model) -> None:
    prompt, source = moved_prompt(model)
    rope = RopeSpec.from_model(model)
    sparse_prefill(model, prompt, source.pieces, source, rope, selection=Selection.parse("deviation-10%@2"))
    assert source.asked == [2]


def test_a_query_ranks_what_the_question_attends_to(llama) -> None:
    """Ranked by the whole attention of an eager model over the same KV."""
    prompt, source = moved_prompt(llama)
    rope = RopeSpec.from_model(llama)
    sparse = sparse_prefill(
        llama, prompt, source.pieces, source, rope, selection=Selection.parse("query-20%")
    )
    plain = sparse_prefill(llama, prompt, source.pieces, source, rope, selection=Selection())
    mass = attention_of_the_last(llama, prompt, plain.cache, 10)
    want = set((mass[33:73].topk(8).indices + 33).tolist())
    assert set(sparse.recomputed.tolist()) - set(plain.recomputed.tolist()) == want


def attention_of_the_last(llama, prompt, cache, count: int) -> torch.Tensor:
    """Attention mass `[slots]` of a prompt's last tokens over a cache, by the model's eager attention."""
    n = len(prompt)
    past = transformers.DynamicCache()
    for index, layer in enumerate(cache.layers):
        past.update(layer.keys[:, :, : n - count], layer.values[:, :, : n - count], index)
    eager = transformers.LlamaForCausalLM(
        llama.config.__class__(**(SHAPE | {"attn_implementation": "eager"}))
    )
    eager.load_state_dict(llama.state_dict())
    with torch.no_grad():
        out = eager.eval()(
            input_ids=torch.from_numpy(prompt[None, n - count :]),
            position_ids=torch.arange(n - count, n)[None], cache=past, output_attentions=True,
        )  # fmt: skip
    return sum(layer[0].mean(dim=(0, 1)) for layer in out.attentions)


def test_bodies_of_another_dtype_are_converted(llama) -> None:
    logits, cache = full_prefill(llama, TOKENS)
    out = torch.empty(3, 2, 90, 2, 16, dtype=torch.float16)
    body = extract_kv(cache, 0, 90, out=out)
    assert body is out
    piece = Piece(0, 90, 0, exact=True)
    close(sparse_prefill(llama, TOKENS, [piece], Bodies((piece, body)), None).logits_last, logits, atol=1e-2)


def test_a_failing_source_reaches_the_caller(llama) -> None:
    class Broken:
        def layer(self, index: int):
            raise TimeoutError("layer did not arrive")

    with pytest.raises(TimeoutError):
        sparse_prefill(llama, TOKENS, [Piece(0, 8, 0, exact=True)], Broken(), None)


def test_refuses_what_would_read_uninitialised_memory_or_misplace_bytes(llama) -> None:
    _, cache = full_prefill(llama, TOKENS)
    piece, body = Piece(0, 8, 0, exact=True), extract_kv(cache, 0, 8)
    with pytest.raises(LayoutError, match="gave no KV"):
        sparse_prefill(llama, TOKENS, [piece, Piece(8, 9, 8, exact=True)], Bodies((piece, body)), None)
    with pytest.raises(LayoutError, match="not"):
        sparse_prefill(llama, TOKENS, [piece], Bodies((piece, body[:, :, :7])), None)
    with pytest.raises(ConfigError, match="RopeSpec"):
        sparse_prefill(llama, TOKENS, [Piece(4, 8, 9, exact=False)], Bodies(), None)
    with pytest.raises(ConfigError, match="capacity"):
        sparse_prefill(llama, TOKENS, [], None, None, capacity=95)
    with pytest.raises(LayoutError):
        extract_kv(cache, 90, 97)
    with pytest.raises(LayoutError):
        sparse_prefill(llama, [], [], None, None)


def test_kl_is_zero_for_equal_logits_shifts_included_and_positive_otherwise() -> None:
    p = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    assert kl_divergence(p, p + 3.0).abs().max() < 1e-6
    assert (kl_divergence(p, p.flip(-1)) > 0.1).all()
    uniform, pair = torch.zeros(1, 4), torch.tensor([[0.0, 0.0, -1e9, -1e9]])
    assert kl_divergence(pair, uniform).item() == pytest.approx(np.log(2))
    assert top1_agreement(p, p) == 1.0
