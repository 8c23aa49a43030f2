"""A transformers decoder beside a p2pcache node: prefill what the mesh lacks, store what is new.

    engine = TransformersEngine(model, client, weights="<fingerprint>")
    prefill = engine.prefill(tokens, chunker)       # looks up, pulls, computes only the rest
    answer = engine.generate(prefill, 32)
    engine.store(prefill)                           # prompt and answer, off the critical path
    prefill.close()

`prefill` is `start` (look up, begin to pull) and `complete` (compute the rest); a server calls them
apart, so that the pull hides behind its queue (`transformers_serving`).

Batch of one; eager or SDPA attention. Approximate KV (whatever attended to KV that was reused at
another position) is stored as such and never as exact.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from blake3 import blake3

from p2pcache.api import Cache, Client
from p2pcache.blend.rotate import RopeSpec, length_dependent
from p2pcache.blend.select import HEAD_TOKENS, Piece
from p2pcache.blend.sparse import LayerSource, SparsePrefill, decode, extract_kv, sparse_prefill
from p2pcache.core.chunking import Chunker, ContentChunker, as_tokens
from p2pcache.core.keys import ChunkKeys, Namespace
from p2pcache.core.layout import KVLayout
from p2pcache.results import FetchedChunk, Lookup, Prefetch, Stored
from p2pcache.types import ConfigError, Match, Miss, Provenance, Source

REPORTED_TOKENS_MIN = 256
"""A prefill of fewer says little of the engine's speed."""


@dataclass
class Pull:
    """A prompt that has been looked up, and what the mesh holds of it on its way here.

    Owns leases from the moment that bytes come, until `close`. Any thread may wait for it or close it.
    """

    tokens: np.ndarray  # uint32 [n]
    chunker: Chunker
    lookup: Lookup
    started_s: float  # of `time.perf_counter`, before the lookup
    _prefetch: Prefetch | None = field(default=None, repr=False)  # None: nothing was found

    @property
    def empty(self) -> bool:
        """Nothing of the prompt was found, or nothing was asked for."""
        return self._prefetch is None

    def ended(self, timeout_s: float = 0.0) -> bool:
        """Whether all that will come has come; waits for it at most so long."""
        if self._prefetch is None:
            return True
        return self._prefetch.wait(timeout_s)

    def chunks(self) -> list[FetchedChunk]:
        """What came of each chunk. Waits until the pull has ended."""
        return self.misses() if self._prefetch is None else list(self._prefetch.chunks())

    def misses(self, late: Miss | None = None) -> list[FetchedChunk]:
        """The chunks without any bytes; what was found is missed because of `late`."""
        chunks = self.lookup.chunks
        return [
            FetchedChunk(
                chunks, i, None, Source.RECOMPUTE, "", "", late if c.body is not None else c.miss, 0.0
            )
            for i, c in enumerate(chunks)
        ]

    def layers(self, pieces: dict[int, Piece]) -> LayerSource | None:
        """The KV of these pieces of it, for a sparse prefill."""
        return _MeshLayers(self._prefetch, pieces) if pieces and self._prefetch is not None else None

    def close(self) -> None:
        """Wait for what is under way, then end the leases. Idempotent."""
        if self._prefetch is not None:
            self._prefetch.close()


@dataclass
class Prefill:
    """A prompt whose KV is complete: the first logits, a cache to decode with, and where it came from.

    Owns leases until `close`; the cache itself is the engine's memory and stays valid.
    """

    tokens: np.ndarray  # uint32 [n], grows as answer tokens are generated
    prompt_tokens: int
    chunker: Chunker
    lookup: Lookup
    chunks: list[FetchedChunk]
    sparse: SparsePrefill
    logits: torch.Tensor  # [vocab] behind the last token
    ttft_s: float  # from the call to the first logits
    _pull: Pull | None = field(default=None, repr=False)

    @property
    def recomputed_tokens(self) -> int:
        return len(self.sparse.recomputed)

    @property
    def exact(self) -> bool:
        """Whether all KV of the prompt is what a full prefill gives."""
        return self.sparse.exact_tokens >= self.prompt_tokens

    def close(self) -> None:
        """End the leases on fetched chunks. Idempotent."""
        if self._pull is not None:
            self._pull.close()


class _MeshLayers:
    """A `LayerSource` over a prefetch: layer i as soon as its event has come."""

    def __init__(self, prefetch: Prefetch, pieces: dict[int, Piece]):
        self._prefetch = prefetch
        self._pieces = pieces

    def layer(self, index: int) -> Iterable[tuple[Piece, torch.Tensor]]:
        for chunk, kv in self._prefetch.layer(index):
            yield self._pieces[chunk.found.keys.start], kv


class TransformersEngine:
    """One model in this process, one namespace of the mesh."""

    def __init__(
        self,
        model: Any,
        client: Client | None,
        *,
        weights: str,
        name: str = "",
        tenant: bytes | None = None,
        head_tokens: int = HEAD_TOKENS,
    ):
        """client: None for an engine without a mesh, which computes everything and stores nothing.
        weights: fingerprint of the model's weights. tenant: a hashed salt (`hash_salt`).

        A model whose keys cannot be moved gets exact reuse only; `content_reuse` says which. Raises
        ConfigError for one whose keys depend on the length of the prompt: they cannot be reused at all.
        """
        why = length_dependent(model)
        if why:
            raise ConfigError(f"{type(model).__name__}: its {why}, so its KV cannot be reused")
        self.model = model
        self.head_tokens = head_tokens
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        self.layout = KVLayout(
            layers=config.num_hidden_layers,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            dtype=str(model.dtype).removeprefix("torch."),
        )
        try:
            self.rope: RopeSpec | None = RopeSpec.from_model(model)
            self.why_exact_only = ""
        except ConfigError as error:
            self.rope, self.why_exact_only = None, str(error)
        namespace = Namespace(
            name or getattr(config, "name_or_path", "") or type(model).__name__,
            weights,
            self.layout,
            rope=self.rope.fingerprint() if self.rope is not None else None,
            tenant=tenant,
            extras=(("config", _fingerprint(config)),),
        )
        self.cache: Cache | None = client.open(namespace) if client is not None else None
        self.context_tokens: int | None = getattr(config, "max_position_embeddings", None)
        self._vocab = config.vocab_size

    @property
    def content_reuse(self) -> bool:
        """Whether this model's KV may be reused at other positions."""
        return self.rope is not None

    def prefill(
        self,
        tokens: Any,
        chunker: Chunker | None = None,
        *,
        content_reuse: bool = True,
        budget_s: float = 5.0,
        spare_tokens: int = 256,
    ) -> Prefill:
        """Have the KV of a prompt, from the mesh as far as it has it. Raises ConfigError for a bad prompt.

        budget_s: for all pulls together; what is not here by then is computed. spare_tokens: room to
        decode into without growing the cache.
        """
        pull = self.start(tokens, chunker, content_reuse=content_reuse, budget_s=budget_s)
        try:
            return self.complete(pull, spare_tokens=spare_tokens)
        except BaseException:
            pull.close()
            raise

    def start(
        self,
        tokens: Any,
        chunker: Chunker | None = None,
        *,
        content_reuse: bool = True,
        budget_s: float = 5.0,
    ) -> Pull:
        """Look a prompt up and begin to pull what the mesh has of it. Any thread; runs no model.

        The caller closes the pull, whatever becomes of it. Raises ConfigError for a bad prompt.
        """
        started_s = time.perf_counter()
        run = self.checked(tokens)
        chunker = chunker or ContentChunker()
        if self.cache is None:
            return Pull(run, chunker, Lookup(run, (), 0.0), started_s)
        lookup = self.cache.lookup(run, chunker=chunker, content_reuse=content_reuse and self.content_reuse)
        found = any(c.body is not None for c in lookup.chunks)
        prefetch = self.cache.prefetch(lookup, budget_s=budget_s) if found else None
        return Pull(run, chunker, lookup, started_s, prefetch)

    def complete(self, pull: Pull, *, wait_s: float | None = None, spare_tokens: int = 256) -> Prefill:
        """Compute what the pull has not brought.

        wait_s: where the pull has not ended by then, all is computed; None waits until it has. The pull
        stays open, also where this raises. spare_tokens: room to decode into. `ttft_s` of what returns
        counts from `start`.
        """
        late = wait_s is not None and not pull.ended(wait_s)
        return self._complete(pull, pull.misses(Miss.DEADLINE) if late else pull.chunks(), spare_tokens)

    def complete_alone(self, pull: Pull, *, spare_tokens: int = 256) -> Prefill:
        """Compute the whole prompt, because what the pull has brought cannot be read."""
        return self._complete(pull, pull.misses(Miss.CORRUPT), spare_tokens)

    def _complete(self, pull: Pull, chunks: list[FetchedChunk], spare_tokens: int) -> Prefill:
        run, pieces = pull.tokens, pieces_of(chunks)
        started_s = time.perf_counter()
        sparse = sparse_prefill(
            self.model,
            run,
            list(pieces.values()),
            pull.layers(pieces),
            self.rope,
            self.head_tokens,
            capacity=len(run) + spare_tokens,
        )
        if sparse.logits_last.is_cuda:
            torch.cuda.synchronize(sparse.logits_last.device)  # whoever samples from them waits anyhow
        ended_s = time.perf_counter()
        if self.cache is not None and len(sparse.recomputed) >= REPORTED_TOKENS_MIN:
            attended = int(sparse.recomputed.sum())
            self.cache.client.report_prefill(len(sparse.recomputed), attended, ended_s - started_s)
        ttft_s = ended_s - pull.started_s
        return Prefill(
            run, len(run), pull.chunker, pull.lookup, chunks, sparse, sparse.logits_last, ttft_s, pull
        )

    def generate(self, prefill: Prefill, tokens_max: int, stop: Iterable[int] = ()) -> list[int]:
        """Greedy decoding behind a prefill. Returns the answer; its KV is in the prefill's cache.

        The last token of the answer has no KV yet: nothing was computed behind it.
        """
        ends, answer = set(stop), []
        while len(answer) < tokens_max:
            token = int(prefill.logits.argmax())
            answer.append(token)
            if token in ends or len(answer) == tokens_max:
                break
            prefill.logits = decode(self.model, prefill.sparse.cache, [token])[-1]
            prefill.tokens = np.append(prefill.tokens, np.uint32(token))
        return answer

    def new_chunks(self, prefill: Prefill) -> list[tuple[ChunkKeys, Provenance]]:
        """What the mesh lacks of a prompt and its answer, and how each chunk was computed.

        A chunk that was served from the mesh is not new, not even where parts of it were recomputed:
        a moved copy is no source for others.
        """
        if self.cache is None:
            return []
        reused = {c.found.keys.exact for c in prefill.chunks if c.kv is not None}
        exact_until = len(prefill.tokens) if prefill.exact else prefill.sparse.exact_tokens
        return [
            (k, Provenance.IN_CONTEXT if k.stop <= exact_until else Provenance.APPROXIMATE)
            for k in self.cache.chunks(prefill.tokens, prefill.chunker)
            if k.exact not in reused
        ]

    def store(self, prefill: Prefill) -> Stored:
        """Store the new chunks of a prompt and its answer (see `new_chunks`)."""
        new = self.new_chunks(prefill)
        if self.cache is None or not new:
            return Stored(0, 0, Counter())

        def write(chunk: ChunkKeys, out: torch.Tensor) -> None:
            extract_kv(prefill.sparse.cache, chunk.start, chunk.stop, out=out)

        return self.cache.store([k for k, _ in new], write, provenance=[p for _, p in new])

    def checked(self, tokens: Any) -> np.ndarray:
        """A prompt as uint32 `[n]`. Raises ConfigError for one that the model cannot take."""
        run = as_tokens(tokens)
        if len(run) == 0:
            raise ConfigError("a prompt has at least one token")
        if self.context_tokens and len(run) > self.context_tokens:
            raise ConfigError(
                f"a prompt of {len(run)} tokens is over the model's context of {self.context_tokens}"
            )
        if int(run.max()) >= self._vocab:
            raise ConfigError(f"token {int(run.max())} is outside the model's vocabulary of {self._vocab}")
        return run


def _fingerprint(config: Any) -> bytes:
    """A digest of all that a config says of the computation: equal weights can mean other KV.

    What is left out says nothing of it; anything unknown counts.
    """
    said = {k: v for k, v in config.to_dict().items() if k not in _NOT_COMPUTATION}
    return blake3(json.dumps(said, sort_keys=True, default=str).encode()).digest()


_NOT_COMPUTATION = frozenset(
    """_name_or_path architectures bos_token_id dtype eos_token_id id2label label2id max_position_embeddings
    output_attentions output_hidden_states pad_token_id return_dict task_specific_params torch_dtype
    transformers_version use_cache""".split()
)


def pieces_of(chunks: Iterable[FetchedChunk]) -> dict[int, Piece]:
    """What was fetched, as pieces for the sparse prefill, by start. Ordered."""
    pieces: dict[int, Piece] = {}
    before: FetchedChunk | None = None
    for c in chunks:
        if c.kv is None or c.found.body is None:
            before = None
            continue
        keys, body = c.found.keys, c.found.body
        exact = c.found.match is Match.EXACT
        # The one before must itself have come: a run is only a run as far as it is there.
        follows = c.found.follows and before is not None and before.found.keys.stop == keys.start
        pieces[keys.start] = Piece(keys.start, keys.stop, body.base_position, exact, follows and not exact)
        before = c
    return pieces
