"""The demo's engine: serves a request through the mesh, and measures it against full prefill.

What a server would do is in `_serve`; all else is the measuring: the same prompt in full in the same
process, the distance of the logits, two controls, and the bytes that came against a ledger of BLAKE3
digests that is kept outside the cache.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from blake3 import blake3

import p2pcache
from p2pcache.blend.quality import kl_divergence
from p2pcache.blend.select import Piece
from p2pcache.blend.sparse import decode, extract_kv, full_prefill, sparse_prefill
from p2pcache.core.chunking import FixedChunker, SegmentChunker
from p2pcache.demo.model import load_model, weights_fingerprint
from p2pcache.demo.workload import Request
from p2pcache.integrations.transformers import Prefill, TransformersEngine, pieces_of
from p2pcache.types import Match, Source

ANSWER_TOKENS = 16
WARM_UP_TOKENS = 1024
MODEL_NAME = "SmolLM2-135M-Instruct"


class DemoEngine:
    """One model beside one node. Runs in a process of its own."""

    def __init__(self, model_path: str, threads: int):
        torch.set_num_threads(threads)
        self._model, self._tokenizer = load_model(model_path)
        self._client = p2pcache.connect()
        self._engine = TransformersEngine(
            self._model, self._client, weights=weights_fingerprint(model_path), name=MODEL_NAME
        )

    def warm_up(self) -> str:
        """Run both paths once, so that neither pays for first use. Returns the node's name."""
        tokens = [1] * WARM_UP_TOKENS
        _, cache = full_prefill(self._model, tokens)
        half = WARM_UP_TOKENS // 2
        kv = extract_kv(cache, 0, half)
        piece = Piece(0, half, 0, exact=True)
        sparse_prefill(self._model, tokens, [piece], _Given([piece], kv), self._engine.rope)
        return self._client.node

    def handle(self, request: Request, ledger: Mapping[bytes, str], full_first: bool) -> dict[str, Any]:
        """Serve and measure one request. Returns its row, its answer, and additions to the ledger."""
        full = self._full(request) if full_first else None
        prefill = self._serve(request)
        try:
            full = full or self._full(request)
            row = self._row(request, prefill, full, ledger)
            answer = self._engine.generate(prefill, ANSWER_TOKENS)
            added = {
                self._engine.cache.body(k, p).exact: _digest(
                    extract_kv(prefill.sparse.cache, k.start, k.stop)
                )
                for k, p in self._engine.new_chunks(prefill)
            }
            stored = self._engine.store(prefill)
            stored.published()
        finally:
            prefill.close()
        row["stored_chunks"] = stored.stored
        self._client.report_prefill_rate(row["tokens"] / row["ttft_recompute_s"])
        return {"row": row, "answer": answer, "ledger": added}

    def close(self) -> None:
        self._client.close()

    def _serve(self, request: Request) -> Prefill:
        # Half of the usual chunk: what a turn adds is short, and an unfinished chunk is computed again.
        chunker = SegmentChunker(request.boundaries) if request.boundaries else FixedChunker(128)
        return self._engine.prefill(request.tokens, chunker)

    # -- measuring -------------------------------------------------------------------------------

    def _full(self, request: Request) -> tuple[float, torch.Tensor, list[int]]:
        """(seconds to the first token, logits [answer, vocab], answer) of a full prefill."""
        started_s = time.perf_counter()
        first, cache = full_prefill(self._model, request.tokens)
        seconds = time.perf_counter() - started_s
        logits, answer = [first], [int(first.argmax())]
        while len(answer) < ANSWER_TOKENS:
            logits.append(decode(self._model, cache, answer[-1:])[-1])
            answer.append(int(logits[-1].argmax()))
        return seconds, torch.stack(logits), answer

    def _row(
        self,
        request: Request,
        prefill: Prefill,
        full: tuple[float, torch.Tensor, list[int]],
        ledger: Mapping[bytes, str],
    ) -> dict[str, Any]:
        seconds, reference, answer = full
        forced = self._forced(prefill.logits, prefill.sparse.cache, answer)
        came = [c for c in prefill.chunks if c.kv is not None]

        def tokens(*sources: Source) -> int:
            return sum(c.found.keys.tokens for c in came if c.source in sources)

        row = {
            "kind": request.kind,
            "node": self._client.node,
            "tokens": len(request.tokens),
            "exact_tokens": sum(c.found.keys.tokens for c in came if c.found.match is Match.EXACT),
            "content_tokens": sum(c.found.keys.tokens for c in came if c.found.match is Match.CONTENT),
            "local_tokens": tokens(Source.LOCAL),
            "nvme_tokens": tokens(Source.NVME),
            "peer_tokens": tokens(Source.PEER),
            "recomputed_tokens": prefill.recomputed_tokens,
            "peers": {c.peer: c.transport for c in came if c.source is Source.PEER},
            "transports": sorted({c.transport for c in came if c.source is Source.PEER}),
            "misses": sorted({str(c.miss) for c in prefill.chunks if c.miss is not None}),
            "ttft_cached_s": prefill.ttft_s,
            "ttft_recompute_s": seconds,
            "kl_to_full": float(kl_divergence(reference, forced).mean()),
            "max_abs_logit_diff": float((reference - forced).abs().max()),
            "wrong_bytes": _wrong_bytes(came, ledger),
            "unchecked_chunks": sum(c.found.body.exact not in ledger for c in came),
        }
        if row["content_tokens"]:
            row |= self._controls(request, prefill, reference, answer)
        return row

    def _controls(
        self, request: Request, prefill: Prefill, reference: torch.Tensor, answer: list[int]
    ) -> dict[str, float]:
        """The same reuse without turning keys, and the same question without its documents."""
        pieces = pieces_of(prefill.chunks)
        unturned = {start: replace(p, base_position=p.start, follows=False) for start, p in pieces.items()}
        layers = _Fetched(prefill, unturned)
        sparse = sparse_prefill(
            self._model,
            request.tokens,
            list(unturned.values()),
            layers,
            self._engine.rope,
            self._engine.head_tokens,
        )
        unrotated = self._forced(sparse.logits_last, sparse.cache, answer)
        first, cache = full_prefill(self._model, request.without_documents)
        bare = self._forced(first, cache, answer)
        return {
            "kl_unrotated": float(kl_divergence(reference, unrotated).mean()),
            "kl_without_documents": float(kl_divergence(reference, bare).mean()),
        }

    def _forced(self, first: torch.Tensor, cache: Any, answer: list[int]) -> torch.Tensor:
        """Logits `[answer, vocab]` of this cache along a given answer; the cache is as before."""
        rest = decode(self._model, cache, answer[:-1])
        cache.crop(-(len(answer) - 1))
        return torch.cat([first[None], rest])


class _Given:
    """A `LayerSource` of one body `[layers, 2, tokens, kv_heads, head_dim]` per piece."""

    def __init__(self, pieces: list[Piece], *bodies: torch.Tensor):
        self._pieces, self._bodies = pieces, bodies

    def layer(self, index: int) -> Iterable[tuple[Piece, torch.Tensor]]:
        return [(p, b[index]) for p, b in zip(self._pieces, self._bodies, strict=True)]


class _Fetched(_Given):
    """The same over what a prefill fetched, for other pieces of the same starts."""

    def __init__(self, prefill: Prefill, pieces: Mapping[int, Piece]):
        came = [c for c in prefill.chunks if c.kv is not None]
        super().__init__([pieces[c.found.keys.start] for c in came], *(c.kv for c in came))


def _digest(kv: torch.Tensor) -> str:
    return blake3(kv.contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()


def _wrong_bytes(came: Iterable[Any], ledger: Mapping[bytes, str]) -> int:
    """Bytes of the bodies that are not what their engine stored."""
    return sum(
        c.kv.numel() * c.kv.element_size()
        for c in came
        if ledger.get(c.found.body.exact, "never stored") != _digest(c.kv)
    )


def summarise(rows: list[dict[str, Any]], leaked_leases: int, long_tokens: int = 2000) -> dict[str, Any]:
    """The demo's figures over all requests. Speed-ups are medians over requests of at least `long_tokens`."""
    reused = [r for r in rows if r["exact_tokens"] or r["content_tokens"]]
    exact = [r for r in reused if not r["content_tokens"]]
    content = [r for r in reused if r["content_tokens"]]

    def speedup(some: list[dict[str, Any]]) -> float:
        ratios = [r["ttft_recompute_s"] / r["ttft_cached_s"] for r in some if r["tokens"] >= long_tokens]
        return statistics.median(ratios) if ratios else 0.0

    def mean(name: str) -> float:
        return statistics.fmean(r[name] for r in content) if content else 0.0

    return {
        "peer_tokens": sum(r["peer_tokens"] for r in rows),
        "content_tokens": sum(r["content_tokens"] for r in rows),
        "nvme_tokens": sum(r["nvme_tokens"] for r in rows),
        "wrong_bytes": sum(r["wrong_bytes"] for r in rows),
        "speedup_exact": speedup([r for r in exact if r["kind"] == "conversation"]),
        "speedup_content": speedup(content),
        "exact_max_abs_logit_diff": max((r["max_abs_logit_diff"] for r in exact), default=0.0),
        "kl_content_mean": mean("kl_to_full"),
        "kl_content_unrotated": mean("kl_unrotated"),
        "kl_content_without_documents": mean("kl_without_documents"),
        "transports": sorted({t for r in rows for t in r["transports"]}),
        "leaked_leases": leaked_leases,
    }
