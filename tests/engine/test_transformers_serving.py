"""The engine behind a server: what it answers is the model's answer, however the mesh behaves."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from p2pcache import EmbeddedMesh, NodeConfig
from p2pcache.blend.sparse import decode, full_prefill
from p2pcache.integrations.sampling import Sampler, probabilities
from p2pcache.integrations.transformers import TransformersEngine
from p2pcache.integrations.transformers_serving import ServingEngine
from p2pcache.results import Prefetch
from p2pcache.serve.engine import Engine, Generation, Sampling
from p2pcache.types import ConfigError

pytestmark = pytest.mark.engine
MIB = 1 << 20
VOCAB = 300
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "initializer_range": 0.2,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def any_model(request):
    torch.manual_seed(0)
    if request.param == "llama":
        return LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16)).eval()


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()


@pytest.fixture
def mesh() -> Iterator[EmbeddedMesh]:
    with EmbeddedMesh([NodeConfig(name=n, host_bytes_max=32 * MIB) for n in "ab"]) as mesh:
        yield mesh


@pytest.fixture
def engines(mesh: EmbeddedMesh, model) -> Iterator[list[ServingEngine]]:
    """One a node. At the end no lease and no ticket may be left anywhere, while both still run."""
    clients = [mesh.client(i) for i in range(2)]
    engines = [
        ServingEngine(TransformersEngine(model, c, weights="w", name="tiny", head_tokens=4)) for c in clients
    ]
    yield engines
    for engine in engines:
        engine.close()
    assert held(mesh) == 0
    assert all(e.stats()["storing_bytes"] == 0 for e in engines)
    for client in clients:
        client.close()


@pytest.fixture
def alone(model) -> Iterator[ServingEngine]:
    engine = ServingEngine(TransformersEngine(model, None, weights="w"))
    yield engine
    engine.close()


def held(mesh: EmbeddedMesh) -> int:
    """Leases and tickets on all nodes that still run, once what is on its way to them has come."""
    for _ in range(100):
        count = sum(s["leases"] + s["tickets"] for s in (n.status() for n in mesh.nodes))
        if count == 0:
            break
        time.sleep(0.02)
    return count


def run(seed: int, tokens: int) -> list[int]:
    return torch.randint(1, VOCAB, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def request(tokens: list[int], tokens_max: int = 8, **settings) -> Generation:
    return Generation(np.asarray(tokens, dtype=np.uint32), tokens_max, **settings)


def greedy(model, prompt: list[int], tokens: int) -> list[int]:
    logits, cache = full_prefill(model, prompt)
    answer = [int(logits.argmax())]
    while len(answer) < tokens:
        answer.append(int(decode(model, cache, answer[-1:])[-1].argmax()))
    return answer


def answered(engine: ServingEngine, asked: Generation):
    """Serve one request alone. Returns its sequence, stored."""
    sequence = engine.begin(asked)
    engine.prefill(sequence)
    while len(sequence.answer) < asked.tokens_max:
        engine.decode([sequence])
    engine.finish(sequence)
    assert engine.flush()
    return sequence


# -- answers ---------------------------------------------------------------------------------------


def test_it_is_the_engine_that_a_server_wants(alone) -> None:
    assert isinstance(alone, Engine)


def test_a_batch_of_sequences_that_come_and_go_answers_as_each_alone(any_model) -> None:
    engine = ServingEngine(TransformersEngine(any_model, None, weights="w"))
    assert engine.stats()["batched"]
    asked = [request(run(i, n), m) for i, (n, m) in enumerate([(5, 9), (200, 4), (1, 12), (90, 1), (33, 7)])]
    waiting, running, done = [engine.begin(a) for a in asked], [], []
    while waiting or running:
        if waiting:
            running.append(waiting.pop(0))
            engine.prefill(running[-1])
        for sequence in [s for s in running if len(s.answer) == s.request.tokens_max]:
            running.remove(sequence)
            engine.finish(sequence)
            done.append(sequence)
        engine.decode(running)
    for sequence in done:
        prompt = sequence.request.tokens.tolist()
        assert sequence.answer == greedy(any_model, prompt, sequence.request.tokens_max)
    engine.close()


def test_the_same_prefix_is_served_from_the_mesh_with_the_same_answer(engines, model) -> None:
    prompt = run(1, 300)
    first = answered(engines[0], request(prompt))
    assert first.cached_tokens == {"local": 0, "nvme": 0, "peer": 0}
    again = answered(engines[0], request(prompt))
    assert again.cached_tokens["local"] == 256 and again.answer == first.answer
    longer = answered(engines[1], request(prompt + run(2, 20)))
    assert longer.cached_tokens == {"local": 0, "nvme": 0, "peer": 256}
    assert longer.answer == greedy(model, prompt + run(2, 20), 8)
    stats = engines[1].stats()
    assert stats["tokens"] == {"local": 0, "nvme": 0, "peer": 256, "recomputed": 64}
    assert stats["exact_tokens"] == stats["prompt_tokens"] == 320 and stats["approximate_tokens"] == 0
    assert engines[0].stats()["stored_chunks"] == 3 and engines[0].stats()["cache_faults"] == 0


def test_an_answer_is_stored_behind_its_prompt(engines) -> None:
    prompt = run(3, 120)
    first = answered(engines[0], request(prompt, 20))  # 139 tokens have KV: a whole chunk, and 11
    turn = answered(engines[1], request(prompt + first.answer + run(4, 5)))
    assert turn.cached_tokens["peer"] == 128


def test_moved_documents_are_found_by_content_and_never_pass_for_exact(engines, mesh) -> None:
    system, documents = run(6, 20), [run(7 + i, 60) for i in range(3)]

    def prompt(order: list[int]) -> Generation:
        parts = [system, *(documents[i] for i in order), run(20 + order[0], 10)]
        starts = tuple(sum(map(len, parts[:i])) for i in range(len(parts)))
        return request([t for p in parts for t in p], boundaries=starts)

    answered(engines[0], prompt([0, 1, 2]))
    moved = answered(engines[1], prompt([2, 0, 1]))
    # Heads of the two runs and the question are computed; document 1 follows its old neighbour.
    assert moved.cached_tokens == {"local": 0, "nvme": 0, "peer": 200 - 4 - 4}
    stats = engines[1].stats()
    assert stats["tokens"]["recomputed"] == 18 and stats["exact_tokens"] == 20
    assert stats["approximate_tokens"] == 190 and stats["stored_chunks"] == 1
    again = answered(engines[0], prompt([2, 0, 1]))
    # Only the system prompt is exact, though every chunk of this very prompt is in the mesh by now.
    assert engines[0].stats()["exact_tokens"] == 210 + 20
    assert sum(again.cached_tokens.values()) > 180


def test_content_reuse_can_be_switched_off(mesh, model) -> None:
    document = run(31, 60)
    with mesh.client(0) as client:
        engine = ServingEngine(TransformersEngine(model, client, weights="w"), content_reuse=False)
        answered(engine, request(run(30, 20) + document, boundaries=(0, 20)))
        moved = answered(engine, request(run(32, 20) + document, boundaries=(0, 20)))
        assert sum(moved.cached_tokens.values()) == 0
        engine.close()


def test_without_a_client_everything_is_computed_and_nothing_stored(alone, model) -> None:
    prompt = run(40, 150)
    for _ in range(2):
        assert answered(alone, request(prompt)).answer == greedy(model, prompt, 8)
    stats = alone.stats()
    assert stats["tokens"] == {"local": 0, "nvme": 0, "peer": 0, "recomputed": 300}
    assert stats["prefills"] == 2 and stats["stored_chunks"] == 0 and stats["refused"] == {}


def test_begin_comes_from_many_threads(engines, model) -> None:
    prompt = run(41, 200)
    answered(engines[0], request(prompt))
    sequences = [None] * 12

    def begin(i: int) -> None:
        sequences[i] = engines[i % 2].begin(request(prompt + [i + 1]))

    threads = [threading.Thread(target=begin, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, sequence in enumerate(sequences):
        assert engines[i % 2].prefill(sequence) == greedy(model, prompt + [i + 1], 1)[0]
        assert sum(sequence.cached_tokens.values()) == 128
        engines[i % 2].finish(sequence)


# -- memory ----------------------------------------------------------------------------------------


def test_kv_bytes_are_what_the_caches_take(alone) -> None:
    sequence = alone.begin(request(run(50, 37), 11))
    alone.prefill(sequence)
    while len(sequence.answer) < 11:
        alone.decode([sequence])
    layers = sequence._prefill.sparse.cache.layers
    taken = sum(t.untyped_storage().nbytes() for layer in layers for t in (layer.keys, layer.values))
    assert taken == sequence.kv_bytes == 3 * 2 * 2 * 16 * 4 * 48
    with pytest.raises(ConfigError, match="all its 11"):
        alone.decode([sequence])
    alone.finish(sequence)


def test_what_waits_to_be_stored_is_bounded_and_the_rest_dropped(engines, monkeypatch) -> None:
    engine, go_on = engines[0], threading.Event()
    store = engine.engine.store
    monkeypatch.setattr(engine.engine, "store", lambda prefill: (go_on.wait(10), store(prefill))[1])
    sequences = [engine.begin(request(run(60 + i, 130))) for i in range(3)]
    engine.storing_bytes_max = 2 * sequences[0].kv_bytes
    for sequence in sequences:
        engine.prefill(sequence)
    for sequence in sequences:
        engine.finish(sequence)  # does not wait for the store
    assert engine.stats()["storing_bytes"] == 2 * sequences[0].kv_bytes
    assert engine.stats()["stores_dropped"] == 1 and not engine.flush(0.05)
    go_on.set()
    assert engine.flush() and engine.stats()["stored_chunks"] == 4


def test_a_store_without_room_is_told_by_reason(model) -> None:
    with EmbeddedMesh([NodeConfig(name="a", host_bytes_max=MIB // 4)]) as mesh, mesh.client(0) as client:
        small = ServingEngine(TransformersEngine(model, client, weights="w"))
        answered(small, request(run(70, 500), 2))  # four chunks, of which two fit
        stats = small.stats()
        assert stats["stored_chunks"] == 2 and stats["refused"] == {"no-room": 2}
        assert stats["cache_faults"] == 0
        small.close()


# -- faults and cancellation -----------------------------------------------------------------------


@pytest.fixture
def slow(engines, monkeypatch) -> Iterator[threading.Event]:
    """Pulls of the second engine last until this is set."""
    go_on = threading.Event()
    fetch = engines[1].engine.cache.fetch
    monkeypatch.setattr(
        engines[1].engine.cache, "fetch", lambda *args, **named: (go_on.wait(20), fetch(*args, **named))[1]
    )
    yield go_on
    go_on.set()


@pytest.mark.parametrize("stage", ["begun", "pulled", "prefilled", "decoded", "finished"])
def test_a_sequence_that_is_cancelled_leaves_no_lease(engines, mesh, stage: str) -> None:
    prompt = run(80, 300)
    answered(engines[0], request(prompt))
    sequence = engines[1].begin(request(prompt))
    if stage != "begun":
        assert sequence.pull.ended(10) and engines[1].ready(sequence)
        assert sum(n.status()["leases"] for n in mesh.nodes) > 0
    if stage not in ("begun", "pulled"):
        engines[1].prefill(sequence)
        assert held(mesh) == 0  # already: the KV is the engine's own by now
    if stage in ("decoded", "finished"):
        engines[1].decode([sequence])
    engines[1].finish(sequence)
    if stage == "finished":
        engines[1].finish(sequence)
        for use in (engines[1].prefill, lambda s: engines[1].decode([s])):
            with pytest.raises(ConfigError):
                use(sequence)
    assert engines[1].flush() and held(mesh) == 0


def test_a_pull_under_way_holds_up_neither_finish_nor_its_lease_for_ever(engines, mesh, slow) -> None:
    prompt = run(81, 300)
    answered(engines[0], request(prompt))
    sequence = engines[1].begin(request(prompt))
    assert not engines[1].ready(sequence)
    started_s = time.monotonic()
    engines[1].finish(sequence)
    assert time.monotonic() - started_s < 1.0
    assert engines[1].stats()["pulls_given_up"] == 1 and not engines[1].flush(0.05)
    slow.set()
    assert engines[1].flush() and held(mesh) == 0


def test_a_pull_that_comes_late_is_computed_instead(engines, mesh, model, slow) -> None:
    prompt = run(82, 300)
    answered(engines[0], request(prompt))
    engines[1].pull_budget_s = 0.3
    sequence = engines[1].begin(request(prompt))
    started_s = time.monotonic()
    token = engines[1].prefill(sequence)
    assert time.monotonic() - started_s < 5.0
    assert token == greedy(model, prompt, 1)[0] and sum(sequence.cached_tokens.values()) == 0
    engines[1].finish(sequence)
    slow.set()
    assert engines[1].flush() and held(mesh) == 0
    assert engines[1].stats()["pulls_given_up"] == 1


def test_a_prefill_that_fails_leaves_no_lease(engines, mesh, model, monkeypatch) -> None:
    prompt = run(83, 300)
    answered(engines[0], request(prompt))
    sequence = engines[1].begin(request(prompt))
    with monkeypatch.context() as patch:
        patch.setattr(model.model, "forward", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("memory")))
        with pytest.raises(RuntimeError, match="memory"):
            engines[1].prefill(sequence)
    engines[1].finish(sequence)
    assert engines[1].flush() and held(mesh) == 0
    assert engines[1].stats()["stored_chunks"] == 0 and engines[1].stats()["prefills"] == 0


def test_a_step_that_fails_can_be_tried_again(engines, model, monkeypatch) -> None:
    prompts = [run(84, 50), run(85, 9)]
    sequences = [engines[0].begin(request(p)) for p in prompts]
    for sequence in sequences:
        engines[0].prefill(sequence)
    with monkeypatch.context() as patch:
        patch.setattr(model.model.norm, "forward", lambda hidden: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engines[0].decode(sequences)
    for _ in range(7):
        engines[0].decode(sequences)
    assert [s.answer for s in sequences] == [greedy(model, p, 8) for p in prompts]
    for sequence in sequences:
        engines[0].finish(sequence)


def test_faults_of_the_cache_cost_time_and_no_answer(engines, model, monkeypatch) -> None:
    prompt = run(86, 300)
    answered(engines[0], request(prompt))
    want = greedy(model, prompt, 8)

    def broken(*args, **named):
        raise ValueError("a fault of ours")

    cache = engines[1].engine.cache
    for name in ("lookup", "prefetch", "fetch", "store"):
        with monkeypatch.context() as patch:
            patch.setattr(cache, name, broken)
            assert answered(engines[1], request(prompt)).answer == want
        assert engines[1].stats()["cache_faults"] > 0
    assert answered(engines[1], request(prompt)).answer == want


def test_kv_that_cannot_be_read_is_computed(engines, model, monkeypatch) -> None:
    prompt = run(87, 300)
    answered(engines[0], request(prompt))
    monkeypatch.setattr(Prefetch, "layer", lambda self, index: [])
    sequence = answered(engines[1], request(prompt))
    assert sequence.answer == greedy(model, prompt, 8) and sum(sequence.cached_tokens.values()) == 0
    assert engines[1].stats()["cache_faults"] == 1


def test_a_node_that_stops_between_begin_and_prefill_costs_a_recompute(mesh, model) -> None:
    prompt = run(88, 300)
    want = greedy(model, prompt, 8)
    clients = [mesh.client(i) for i in range(2)]
    first, second = (ServingEngine(TransformersEngine(model, c, weights="w", name="t")) for c in clients)
    answered(first, request(prompt))
    begun = [second.begin(request(prompt)) for _ in range(2)]
    assert all(s.pull.ended(10) for s in begun)
    second.prefill(begun[0])
    mesh.nodes.pop(1).close()  # the second engine's own node
    # The slab lives on as long as the engine holds it, so what has come can still be used.
    second.prefill(begun[1])
    for _ in range(7):
        second.decode(begun)
    late = second.begin(request(prompt))
    second.prefill(late)
    for _ in range(7):
        second.decode([late])
    for sequence in (*begun, late):
        assert sequence.answer == want
        second.finish(sequence)
    assert sum(late.cached_tokens.values()) == 0
    second.flush()
    assert second.stats()["refused"].keys() <= {"node-down"} and second.stats()["refused"]
    second.close()
    first.close()
    assert held(mesh) == 0
    for client in clients:
        client.close()


def test_a_peer_that_stops_before_the_pull_costs_a_recompute(engines, mesh, model, slow) -> None:
    prompt = run(89, 300)
    answered(engines[0], request(prompt))
    sequence = engines[1].begin(request(prompt))
    mesh.nodes.pop(0).close()
    slow.set()
    engines[1].prefill(sequence)
    while len(sequence.answer) < 8:
        engines[1].decode([sequence])
    engines[1].finish(sequence)
    assert sequence.answer == greedy(model, prompt, 8) and sum(sequence.cached_tokens.values()) == 0


def test_it_still_answers_once_closed(engines, model) -> None:
    engines[0].close()
    sequence = engines[0].begin(request(run(90, 200), 2))
    engines[0].prefill(sequence)
    engines[0].finish(sequence)
    assert engines[0].stats()["stored_chunks"] == 0 and engines[0].stats()["stores_dropped"] == 1


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (request([]), "at least one token"),
        (request([1] * 513), "context of 512"),
        (request([1] * 505, 8), "505 tokens and an answer of up to 8"),
        (request([VOCAB]), "vocabulary"),
        (request([1, 2], 0), "at least one token, not 0"),
        (request([1, 2], boundaries=(0, 5)), "begins at 5"),
        (request([1, 2], boundaries=(1, 0)), "ascending"),
        (request([1, 2], sampling=Sampling(temperature=-1.0)), "temperature"),
        (request([1, 2], sampling=Sampling(temperature=float("nan"))), "temperature"),
        (request([1, 2], sampling=Sampling(top_p=0.0)), "top_p"),
        (request([1, 2], sampling=Sampling(top_p=1.5)), "top_p"),
    ],
)
def test_a_request_that_the_model_cannot_take_is_refused_in_words(alone, asked, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        alone.begin(asked)


# -- sampling --------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_answer_alone_and_in_a_batch(alone) -> None:
    asked = request(run(100, 30), 12, sampling=Sampling(temperature=1.5, top_p=0.9, seed=7))
    want = answered(alone, asked).answer
    others = [
        alone.begin(request(run(101 + i, 40 + i), 12, sampling=Sampling(1.0, seed=i))) for i in range(3)
    ]
    batch = [others[0], alone.begin(asked), *others[1:]]
    for sequence in batch:
        alone.prefill(sequence)
    for _ in range(11):
        alone.decode(batch)
    assert batch[1].answer == want
    other = request(run(100, 30), 12, sampling=Sampling(temperature=1.5, top_p=0.9, seed=8))
    assert answered(alone, other).answer != want


def test_a_seed_goes_on_where_another_replica_left_off(alone) -> None:
    asked = request(run(100, 30), 12, sampling=Sampling(temperature=1.5, top_p=0.9, seed=7))
    want = answered(alone, asked).answer
    tokens = np.concatenate([asked.tokens, np.asarray(want[:5], np.uint32)])
    rest = dataclasses.replace(asked, tokens=tokens, tokens_max=7, drawn=5)
    assert answered(alone, rest).answer == want[5:]


def test_no_seed_gives_another_answer_each_time(alone) -> None:
    asked = request(run(110, 30), 16, sampling=Sampling(temperature=2.0))
    assert len({tuple(answered(alone, asked).answer) for _ in range(4)}) > 1


def test_temperature_zero_is_the_likeliest() -> None:
    logits = torch.randn(50)
    for temperature in (0.0, 1e-9, 1e-4):
        assert Sampler(Sampling(temperature, seed=1)).choose(logits) == int(logits.argmax())


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    logits = torch.tensor([0.1, 0.5, 0.15, 0.25]).log()
    for top_p, kept in (
        (0.4, [1]),
        (0.6, [1, 3]),
        (0.8, [1, 2, 3]),
        (0.95, [0, 1, 2, 3]),
        (1e-9, [1]),
        (1e-320, [1]),
    ):
        assert probabilities(logits, 1.0, top_p).nonzero().flatten().tolist() == kept
    torch.testing.assert_close(probabilities(logits, 1.0, 1.0), logits.exp())
    torch.testing.assert_close(probabilities(logits, 0.5, 1.0), (2 * logits).softmax(-1))


def test_choices_come_as_often_as_their_chances() -> None:
    logits = torch.tensor([0.6, 0.3, 0.1]).log()
    sampler = Sampler(Sampling(1.0, top_p=0.85, seed=3))
    often = np.bincount([sampler.choose(logits) for _ in range(3000)], minlength=3) / 3000
    assert often[2] == 0 and abs(often[0] - 2 / 3) < 0.04


def test_logits_that_are_not_finite_do_not_fail_a_batch() -> None:
    inf = float("inf")
    for logits in ([0.0, float("nan"), 1.0], [-inf, 2.0, -inf], [inf, 1.0, 0.0], [-inf] * 3):
        token = Sampler(Sampling(1.0, top_p=0.9, seed=1)).choose(torch.tensor(logits))
        assert 0 <= token < 3
    assert Sampler(Sampling(1.0, seed=1)).choose(torch.tensor([-inf, 2.0, -inf])) == 1
