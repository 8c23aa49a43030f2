"""One prompt, prefilled in full and from reused KV, and how far the two are apart.

All is teacher-forced along what full prefill answers. Behind one prefill several endings are tried, each on
the same documents' KV: the question's answer, the true continuation of a document, and a copy across the
seam of two documents, for which a token must have seen what stands before it now.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.reuse.sources import Bodies, Body, Origin
from bench.reuse.text import Prompt
from p2pcache.blend.quality import kl_divergence
from p2pcache.blend.rotate import RopeSpec
from p2pcache.blend.select import Piece, Selection
from p2pcache.blend.sparse import decode, full_prefill, sparse_prefill

ANSWER_TOKENS = 24
FULL, PREFIX = "full", "prefix-only"
UNTURNED = "head-16, not turned"


@dataclass(frozen=True, slots=True)
class Reference:
    """What full prefill says of a prompt: logits along its own greedy answer, and of the other endings."""

    seconds: float
    logits: torch.Tensor  # [answer, vocab]
    answer: list[int]
    gold_nll: float  # nats a token
    seam_nll: float
    seam_top1: float


def refer(model: Any, prompt: Prompt) -> Reference:
    started_s = time.perf_counter()
    first, cache = full_prefill(model, prompt.tokens)
    seconds = time.perf_counter() - started_s
    rows, answer = [first], [int(first.argmax())]
    while len(answer) < ANSWER_TOKENS:
        rows.append(decode(model, cache, answer[-1:])[-1])
        answer.append(int(rows[-1].argmax()))
    _crop(cache, len(prompt.tokens) - len(prompt.question))
    return Reference(seconds, torch.stack(rows), answer, *_endings(model, cache, prompt))


def judge(
    model: Any, rope: RopeSpec, prompt: Prompt, bodies: Bodies, origin: Origin, mode: str, full: Reference
) -> dict[str, Any]:
    """Prefill from reused KV and compare. Returns a row of figures; lists have one entry an answer token."""
    pieces, kv = _pieces(prompt, bodies, origin, mode)
    started_s = time.perf_counter()
    done = sparse_prefill(model, prompt.tokens, pieces, Given(pieces, kv), rope, selection=_selection(mode))
    seconds = time.perf_counter() - started_s
    rest = decode(model, done.cache, full.answer[:-1])
    forced = torch.cat([done.logits_last[None], rest])
    _crop(done.cache, len(prompt.tokens) - len(prompt.question))
    gold_nll, seam_nll, seam_top1 = _endings(model, done.cache, prompt)
    return {
        "origin": str(origin),
        "mode": mode,
        "seconds": seconds,
        "full_s": full.seconds,
        "recomputed": len(done.recomputed) / len(prompt.tokens),
        "kl": [round(v, 7) for v in kl_divergence(full.logits, forced).tolist()],
        "same": (full.logits.argmax(-1) == forced.argmax(-1)).int().tolist(),
        "gold_nll": gold_nll,
        "full_gold_nll": full.gold_nll,
        "seam_nll": seam_nll,
        "seam_top1": seam_top1,
        "full_seam_nll": full.seam_nll,
        "full_seam_top1": full.seam_top1,
    }


class Given:
    """A `LayerSource` of KV that lies in this process."""

    def __init__(self, pieces: Sequence[Piece], kv: Sequence[torch.Tensor]):
        self._pieces, self._kv = pieces, kv

    def layer(self, index: int) -> Iterable[tuple[Piece, torch.Tensor]]:
        return [(p, kv[index]) for p, kv in zip(self._pieces, self._kv, strict=True)]


def _selection(mode: str) -> Selection:
    return Selection.parse("none" if mode in (FULL, PREFIX) else mode.split(",")[0])


def _pieces(
    prompt: Prompt, bodies: Bodies, origin: Origin, mode: str
) -> tuple[list[Piece], list[torch.Tensor]]:
    """What is reused: the system prompt as an exact prefix, and each document from its origin."""
    if mode == FULL:
        return [], []
    pieces, kv = [Piece(0, len(prompt.system), 0, exact=True)], [bodies.system]
    if mode == PREFIX:
        return pieces, kv
    for (start, stop), document in zip(prompt.spans, prompt.documents, strict=True):
        body: Body = bodies.of(origin, document)
        # The first document behind the system prompt has been computed just there: an exact hit.
        exact = origin is Origin.SYSTEM and start == body.base
        pieces.append(Piece(start, stop, start if mode == UNTURNED else body.base, exact))
        kv.append(body.kv)
    return pieces, kv


def _endings(model: Any, cache: Any, prompt: Prompt) -> tuple[float, float, float]:
    """(nll of the true continuation, nll and top-1 of the copy across a seam), behind what a cache holds."""
    gold = _forced(model, cache, prompt.gold_tail, prompt.gold)
    seam = _forced(model, cache, prompt.seam_tail, prompt.seam)
    truth = torch.tensor(prompt.seam, device=seam.device)
    return _nll(gold, prompt.gold), _nll(seam, prompt.seam), (seam.argmax(-1) == truth).double().mean().item()


def _forced(model: Any, cache: Any, tail: Sequence[int], gold: Sequence[int]) -> torch.Tensor:
    """Logits `[gold, vocab]` that predict each token of `gold` behind `tail`; the cache is as before."""
    length = cache.get_seq_length()
    logits = decode(model, cache, [*tail, *gold[:-1]])
    _crop(cache, length)
    return logits[len(tail) - 1 :]


def _crop(cache: Any, length: int) -> None:
    cache.crop(length - cache.get_seq_length())


def _nll(logits: torch.Tensor, gold: Sequence[int]) -> float:
    picked = torch.log_softmax(logits.double(), -1)[range(len(gold)), list(gold)]
    return -picked.mean().item()
