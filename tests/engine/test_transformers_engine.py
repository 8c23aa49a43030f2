"""A transformers model beside each node of a mesh: what it serves, and what it stores, is right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from p2pcache import EmbeddedMesh, FixedChunker, NodeConfig, Provenance, SegmentChunker
from p2pcache.blend.sparse import decode, full_prefill
from p2pcache.integrations.transformers import TransformersEngine
from p2pcache.types import ConfigError, Match, Miss
from tests.fault.node_process import until

MIB = 1 << 20
VOCAB = 300


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def mesh() -> Iterator[EmbeddedMesh]:
    with EmbeddedMesh([NodeConfig(name=n, host_bytes_max=32 * MIB) for n in "abc"]) as mesh:
        yield mesh


@pytest.fixture
def engines(mesh: EmbeddedMesh, model: LlamaForCausalLM) -> Iterator[list[TransformersEngine]]:
    clients = [mesh.client(i) for i in range(3)]
    yield [TransformersEngine(model, c, weights="w", name="tiny", head_tokens=4) for c in clients]
    for client in clients:
        client.close()
    # A node hears of it a moment later: a closed socket, a message that closes a peer's ticket.
    until(
        lambda: not sum(s["leases"] + s["tickets"] for s in (n.status() for n in mesh.nodes)), "no lease left"
    )


def run(seed: int, tokens: int) -> list[int]:
    return torch.randint(1, VOCAB, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def served(engine: TransformersEngine, tokens: list[int], chunker=None, **options):
    """Prefill, store, close. Returns the prefill."""
    prefill = engine.prefill(tokens, chunker, **options)
    assert engine.store(prefill).published()
    prefill.close()
    return prefill


def test_a_prompt_served_on_one_node_costs_only_its_end_on_another(engines, model):
    prompt = run(1, 200)
    first = served(engines[0], prompt, FixedChunker(32))
    assert first.recomputed_tokens == 200
    longer = prompt + run(2, 20)
    second = served(engines[1], longer, FixedChunker(32))
    assert second.lookup.exact_tokens == 192 and second.recomputed_tokens == 28 and second.exact
    assert {c.peer for c in second.chunks if c.kv is not None} == {"a"}
    expected, _ = full_prefill(model, longer)
    assert (second.logits - expected).abs().max() < 1e-4


def test_an_answer_is_stored_with_its_prompt_and_found_by_the_next_turn(engines, model):
    prompt = run(3, 60)
    prefill = engines[0].prefill(prompt, FixedChunker(16))
    answer = engines[0].generate(prefill, 40)
    assert engines[0].store(prefill).published()
    prefill.close()
    turn = prompt + answer + run(4, 5)
    second = served(engines[1], turn, FixedChunker(16))
    assert second.lookup.exact_tokens == 96  # of 99 tokens with KV, six whole chunks
    expected, _ = full_prefill(model, turn)
    assert (second.logits - expected).abs().max() < 1e-4


def test_generation_equals_full_prefills(engines, model):
    prompt = run(5, 100)
    served(engines[0], prompt, FixedChunker(32))
    prefill = engines[1].prefill(prompt, FixedChunker(32))
    answer = engines[1].generate(prefill, 12)
    prefill.close()
    logits, cache = full_prefill(model, prompt)
    expected = []
    for _ in range(12):
        expected.append(int(logits.argmax()))
        logits = decode(model, cache, [expected[-1]])[-1]
    assert answer == expected


def test_documents_are_found_in_another_order_and_nothing_moved_is_stored_again(engines):
    system, documents = run(6, 20), [run(7 + i, 60) for i in range(3)]

    def prompt(order: list[int]) -> tuple[list[int], SegmentChunker]:
        parts = [system, *(documents[i] for i in order), run(20 + order[0], 10)]
        starts = [sum(map(len, parts[:i])) for i in range(len(parts))]
        return [t for p in parts for t in p], SegmentChunker(starts)

    served(engines[0], *prompt([0, 1, 2]))
    moved = served(engines[1], *prompt([2, 0, 1]))
    matches = [c.match for c in moved.lookup.chunks]
    assert matches == [Match.EXACT, Match.CONTENT, Match.CONTENT, Match.CONTENT, Match.NONE]
    assert [c.follows for c in moved.lookup.chunks] == [False, False, False, True, False]
    # Heads of the two runs, the question, and no head for the document that follows its old neighbour.
    assert moved.recomputed_tokens == 4 + 4 + 10
    found = engines[2].cache.lookup(prompt([2, 0, 1])[0], chunker=prompt([2, 0, 1])[1], everywhere=True)
    provenances = {f.body.provenance for c in found.chunks for f in c.found}
    assert provenances == {Provenance.IN_CONTEXT, Provenance.APPROXIMATE}
    question = found.chunks[-1]
    assert question.match is Match.CONTENT  # it attended to moved KV, so it is never offered as exact
    assert [f.body.provenance for f in question.found] == [Provenance.APPROXIMATE]


def test_exact_only_recomputes_what_moved(engines, model):
    system, document = run(30, 20), run(31, 60)
    served(engines[0], system + document, SegmentChunker([0, 20]))
    prompt = run(32, 20) + document
    prefill = served(engines[1], prompt, SegmentChunker([0, 20]), content_reuse=False)
    assert prefill.recomputed_tokens == 80 and prefill.lookup.chunks[1].miss is Miss.EXACT_ONLY
    expected, _ = full_prefill(model, prompt)
    assert (prefill.logits - expected).abs().max() < 1e-4


def test_a_prompt_that_is_all_cached_still_computes_its_last_token(engines, model):
    prompt = run(40, 64)
    served(engines[0], prompt, FixedChunker(32))
    prefill = served(engines[1], prompt, FixedChunker(32))
    assert prefill.recomputed_tokens == 1
    expected, _ = full_prefill(model, prompt)
    assert (prefill.logits - expected).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("first", "second"),
    [([0, 0], [0, 0]), ([0, 1], [1, 0, 1]), ([0], [0, 0, 0]), ([0, 1, 2], [2, 1, 0])],
    ids=["twice", "again behind", "three times", "reversed"],
)
def test_odd_orders_give_finite_logits_near_full_prefill(engines, model, first, second):
    documents = [run(50 + i, 40) for i in range(3)]
    for engine, order in ((engines[0], first), (engines[1], second)):
        tokens = run(60, 8) + [t for i in order for t in documents[i]] + run(61, 4)
        starts = [0, *(8 + 40 * i for i in range(len(order))), 8 + 40 * len(order)]
        prefill = served(engine, tokens, SegmentChunker(starts))
    assert torch.isfinite(prefill.logits).all()
    assert prefill.recomputed_tokens < len(tokens)


def test_a_peer_that_goes_away_after_the_lookup_costs_a_recompute(engines, mesh, model):
    prompt = run(70, 128)
    served(engines[0], prompt, FixedChunker(32))
    cache = engines[1].cache
    lookup = cache.lookup(prompt, chunker=FixedChunker(32))
    assert lookup.exact_tokens == 128
    engines[0].cache.client.close()
    mesh.nodes[0].close()
    with cache.fetch(lookup, budget_s=2.0) as fetched:
        assert all(c.kv is None and c.miss is not None for c in fetched)
    prefill = engines[1].prefill(prompt, FixedChunker(32), budget_s=2.0)
    expected, _ = full_prefill(model, prompt)
    assert prefill.recomputed_tokens == 128 and (prefill.logits - expected).abs().max() < 1e-4
    prefill.close()
    mesh.nodes.pop(0)


def test_a_node_that_is_down_costs_the_cache_and_nothing_else(engines, mesh, model):
    for node in mesh.nodes:
        node.close()
    prompt = run(71, 50)
    prefill = engines[1].prefill(prompt)
    expected, _ = full_prefill(model, prompt)
    assert (prefill.logits - expected).abs().max() < 1e-4
    assert {c.miss for c in prefill.lookup.chunks} == {Miss.NODE_DOWN}
    assert engines[1].store(prefill).refused[Miss.NODE_DOWN] > 0
    prefill.close()
    mesh.nodes.clear()


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([], "at least one"),
        ([1] * 513, "context"),
        ([VOCAB], "vocabulary"),
        ([1.5], "integers"),
        ([[1]], "one row"),
    ],
)
def test_a_bad_prompt_is_refused_in_words(engines, tokens, words):
    with pytest.raises(ConfigError, match=words):
        engines[0].prefill(tokens)


def test_a_prompt_of_one_token(engines, model):
    prefill = served(engines[0], [5])
    expected, _ = full_prefill(model, [5])
    assert (prefill.logits - expected).abs().max() < 1e-5
    assert served(engines[1], [5]).recomputed_tokens == 1


def test_a_model_whose_keys_cannot_move_gets_exact_reuse_only(mesh):
    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=2, n_positions=256)
    ).eval()
    with mesh.client(0) as a, mesh.client(1) as b:
        first, second = (TransformersEngine(gpt2, c, weights="g") for c in (a, b))
        assert not first.content_reuse and "rotary" in first.why_exact_only
        document = run(80, 64)
        served(first, document, FixedChunker(32))
        same = served(second, document + run(81, 5), FixedChunker(32))
        assert same.recomputed_tokens == 5
        expected, _ = full_prefill(gpt2, document + run(81, 5))
        assert (same.logits - expected).abs().max() < 1e-4
        moved = served(second, run(82, 32) + document, FixedChunker(32))
        assert moved.recomputed_tokens == 96


def test_a_model_whose_keys_depend_on_the_prompts_length_is_refused(mesh):
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    )  # fmt: skip
    with mesh.client(0) as client, pytest.raises(ConfigError, match="changes with the prompt's length"):
        TransformersEngine(LlamaForCausalLM(config).eval(), client, weights="w")


def test_equal_weights_under_another_config_are_another_namespace(mesh):
    def engine(client, **changes) -> TransformersEngine:
        shape = {
            "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
            "num_attention_heads": 4,
        }  # fmt: skip
        torch.manual_seed(0)
        return TransformersEngine(
            LlamaForCausalLM(LlamaConfig(**shape | changes)).eval(), client, weights="same", name="same"
        )

    with mesh.client(0) as client:
        plain = engine(client).cache.namespace
        assert engine(client, max_position_embeddings=4096, bos_token_id=7).cache.namespace == plain
        for change in ({"rope_theta": 500.0}, {"rms_norm_eps": 1e-3}, {"hidden_act": "gelu"}):
            if "rope_theta" in change:
                change = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
            assert engine(client, **change).cache.namespace != plain


def test_the_answers_first_chunk_is_stored_though_the_prompts_last_one_was_served(engines):
    prompt = run(90, 60)  # three whole chunks of 16, and 12 tokens
    served(engines[0], prompt, FixedChunker(16))
    prefill = engines[1].prefill(prompt, FixedChunker(16))
    assert prefill.lookup.exact_tokens == 60
    answer = engines[1].generate(prefill, 20)
    assert engines[1].store(prefill).published()
    prefill.close()
    again = engines[2].cache.lookup(prompt + answer[:4], chunker=FixedChunker(16))
    assert again.exact_tokens == 64
