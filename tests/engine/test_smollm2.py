"""Reuse on a real model: exact reuse is exact, and a moved passage is worth having."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch

from p2pcache.blend.quality import kl_divergence
from p2pcache.blend.rotate import RopeSpec
from p2pcache.blend.select import Piece
from p2pcache.blend.sparse import decode, extract_kv, full_prefill, sparse_prefill
from p2pcache.demo.model import load_model, prepare_model, weights_fingerprint
from p2pcache.demo.text import conversation, passages, prompt_parts

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
CACHE_DIR = Path(__file__).parents[2] / ".cache"
ANSWER_TOKENS = 12


@pytest.fixture(scope="module")
def path() -> Path:
    return prepare_model(CACHE_DIR)


@pytest.fixture(scope="module")
def smollm2(path: Path):
    return load_model(path)


class Bodies:
    def __init__(self, items: list[tuple[Piece, torch.Tensor]]) -> None:
        self.items = items
        self.pieces = [piece for piece, _ in items]

    def layer(self, index: int):
        return [(piece, body[index]) for piece, body in self.items]


def joined(parts: list[list[int]]) -> tuple[list[int], list[int]]:
    """`(token ids, where each part starts, and the end)`."""
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + len(part))
    return [token for part in parts for token in part], starts


def answer_logits(model, logits_last: torch.Tensor, cache, answer: list[int]) -> torch.Tensor:
    """Logits `[answer, vocab]` for each token of a given answer (teacher forcing)."""
    return torch.cat([logits_last[None], decode(model, cache, answer[:-1])])


def greedy(model, logits: torch.Tensor, cache) -> list[int]:
    answer = [int(logits.argmax())]
    while len(answer) < ANSWER_TOKENS:
        answer.append(int(decode(model, cache, answer[-1:])[-1].argmax()))
    return answer


def test_it_knows_the_capital_of_france(smollm2) -> None:
    """The conversion is right: names, layout and the rotary order of Q and K rows."""
    model, tokenizer = smollm2
    text = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    logits, cache = full_prefill(model, tokenizer(text)["input_ids"])
    assert "The capital of France is Paris" in tokenizer.decode(greedy(model, logits, cache))


def test_exact_reuse_is_exact(smollm2) -> None:
    model, tokenizer = smollm2
    prompt, starts = joined(prompt_parts(tokenizer, passages(tokenizer, 2), "What is a statement?"))
    logits, cache = full_prefill(model, prompt)
    body = extract_kv(cache, 0, starts[-2])
    source = Bodies([(Piece(0, starts[-2], 0, exact=True), body)])
    sparse = sparse_prefill(model, prompt, source.pieces, source, None)
    assert len(sparse.recomputed) == starts[-1] - starts[-2]
    assert (sparse.logits_last - logits).abs().max() < 1e-3
    assert greedy(model, sparse.logits_last, sparse.cache) == greedy(model, logits, cache)


def test_a_moved_passage_beats_one_not_turned_and_no_documents(smollm2) -> None:
    """Three passages, each taken from a request in which it stood behind some other passage."""
    model, tokenizer = smollm2
    *documents, other = passages(tokenizer, 4)
    prompt, starts = joined(prompt_parts(tokenizer, documents, documents[1].question))
    logits, full = full_prefill(model, prompt)
    system = (Piece(0, starts[1], 0, exact=True), extract_kv(full, 0, starts[1]))
    answer = greedy(model, logits, full)
    full.crop(1 - ANSWER_TOKENS)
    want = answer_logits(model, logits, full, answer)

    turned, not_turned = [system], [system]
    for index, document in enumerate(documents, start=1):
        request, at = joined(prompt_parts(tokenizer, [other, document], "What is this about?"))
        body = extract_kv(full_prefill(model, request)[1], at[2], at[3])
        start, stop = starts[index], starts[index + 1]
        turned.append((Piece(start, stop, at[2], exact=False), body))
        not_turned.append((Piece(start, stop, start, exact=False), body))

    def kl(prefill) -> float:
        got = answer_logits(model, *prefill, answer)
        return kl_divergence(want, got).mean().item()

    def reused(items, head_tokens: int = 16) -> float:
        source = Bodies(items)
        sparse = sparse_prefill(model, prompt, source.pieces, source, RopeSpec.from_model(model), head_tokens)
        return kl((sparse.logits_last, sparse.cache))

    no_documents, _ = joined(prompt_parts(tokenizer, [], documents[1].question))
    moved = reused(turned)
    assert moved < 0.5 * reused(not_turned)
    assert moved < 0.2 * kl(full_prefill(model, no_documents))


def test_its_rotation_is_llamas(smollm2) -> None:
    spec = RopeSpec.from_model(smollm2[0])
    assert (spec.rotary_dim, spec.interleaved, spec.attention_scaling) == (64, False, 1.0)
    assert spec.inv_freq[1] == pytest.approx(100_000 ** (-1 / 32), rel=1e-6)


def test_passages_are_distinct_whole_and_of_the_size_asked_for(smollm2) -> None:
    _, tokenizer = smollm2
    found = passages(tokenizer, 24, 400, 700)
    assert found == passages(tokenizer, 24, 400, 700)
    assert len({passage.text for passage in found}) == 24
    assert all(400 <= len(passage.token_ids) <= 700 for passage in found)
    assert tokenizer.decode(found[0].token_ids) == found[0].text
    assert len(set(conversation(6))) == 6


def test_documents_have_the_same_ids_wherever_they_stand(smollm2) -> None:
    _, tokenizer = smollm2
    a, b, c = passages(tokenizer, 3)
    assert prompt_parts(tokenizer, [a, b, c], "?")[2] == prompt_parts(tokenizer, [c, b], "?")[2]


def test_processes_that_prepare_at_once_find_one_whole_model(path: Path, tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert set(pool.map(prepare_model, [tmp_path] * 2)) == {tmp_path / path.name}
    assert not list(tmp_path.glob(".*partial*"))
    assert weights_fingerprint(tmp_path / path.name) == weights_fingerprint(path)
