"""A transformers model as a server's engine: many sequences, batched decode, KV from the mesh.

    engine = ServingEngine(TransformersEngine(model, client, weights="<fingerprint>"))
    sequence = engine.begin(request)        # any thread: looks up, starts to pull
    token = engine.prefill(sequence)        # one thread from here on: computes what did not come
    tokens = engine.decode([sequence, ...]) # one step for all of them
    engine.finish(sequence)                 # stores what is new, beside the caller
    engine.close()

A fault of the cache costs time, never an answer: without a node, or with one that stops half-way,
everything is computed. With `TransformersEngine(model, None, ...)` this is the same engine without a
mesh, a baseline to measure against.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from p2pcache.blend.batch import BatchDecoder
from p2pcache.core.chunking import Chunker
from p2pcache.integrations.sampling import Sampler, sample
from p2pcache.integrations.transformers import Prefill, Pull, TransformersEngine
from p2pcache.results import Lookup, Stored
from p2pcache.serve.engine import SEGMENT_TOKENS_MIN, Generation, chunker_of
from p2pcache.types import ConfigError, Source

_log = logging.getLogger(__name__)
PULL_BUDGET_S = 2.0
STORING_BYTES_MAX = 1 << 30
_NODES_SHARE = 0.9  # of a pull's budget; the rest is for the node's answer, which also says what did come
_CLOSERS = 4
SOURCES = (Source.LOCAL, Source.NVME, Source.PEER)


@dataclass(eq=False)
class ServingSequence:
    """One sequence, from `begin` to `finish`; made and changed by the engine alone.

    kv_bytes: of the KV of prompt and whole answer in the model's dtype, allocated by `prefill` at once.
    cached_tokens: prompt tokens whose KV came from the mesh and was not computed again, by source
    ("local", "nvme", "peer"); the rest of the prompt was computed. answer: the tokens so far.
    """

    request: Generation
    kv_bytes: int
    pull_by_s: float  # of `time.monotonic`
    sampler: Sampler
    pull: Pull | None
    cached_tokens: dict[str, int] = field(default_factory=dict)
    answer: list[int] = field(default_factory=list)
    finished: bool = False
    _prefill: Prefill | None = field(default=None, repr=False)


class ServingEngine:
    """Implements `p2pcache.serve.engine.Engine` on a `TransformersEngine`.

    The model runs in the one thread that calls `prefill`, `decode` and `finish`. Beside it run the
    pulls, the ends of pulls that were given up, and one thread that stores: a sequence's KV stays in
    memory until it is stored, though `finish` has returned. That memory is at most `storing_bytes_max`
    (or one sequence), is told as `storing_bytes` in `stats`, and must be left free beside what the
    server admits; what finishes while so much waits is dropped instead of stored.
    """

    def __init__(
        self,
        engine: TransformersEngine,
        *,
        content_reuse: bool = True,
        pull_budget_s: float = PULL_BUDGET_S,
        storing_bytes_max: int = STORING_BYTES_MAX,
    ):
        """engine: stays the caller's, like the client under it. pull_budget_s: from `begin` on; what
        has not come by then is computed. content_reuse: whether KV may come from another position.
        """
        if not pull_budget_s > 0 or storing_bytes_max < 0:
            raise ConfigError(f"budgets are above 0: {pull_budget_s=}, {storing_bytes_max=}")
        self.engine = engine
        self.content_reuse = content_reuse
        self.pull_budget_s = pull_budget_s
        self.storing_bytes_max = storing_bytes_max
        self._decoder = BatchDecoder(engine.model)
        if self._decoder.why_one_by_one:
            _log.warning("decoding one by one: %s", self._decoder.why_one_by_one)
        self._storer = ThreadPoolExecutor(1, thread_name_prefix="p2pcache-store")
        self._closers = ThreadPoolExecutor(_CLOSERS, thread_name_prefix="p2pcache-close")
        self._changed = threading.Condition()  # over everything below
        self._closed = False
        self._beside = 0  # stores and closes that are under way
        self._storing_bytes = 0
        self._last_stored: Stored | None = None
        self._counts: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()

    # -- the four calls --------------------------------------------------------------------------

    def begin(self, request: Generation) -> ServingSequence:
        """Check a request, look its prompt up and start the pull. Any thread; no KV memory yet.

        Takes a round trip to the node, within the lookup's budget. Raises ConfigError for what the
        model cannot take; whatever is wrong with the cache is not an error.
        """
        pull_by_s = time.monotonic() + self.pull_budget_s
        prompt = self.engine.checked(request.tokens)
        total, context = len(prompt) + request.tokens_max, self.engine.context_tokens
        if request.tokens_max < 1:
            raise ConfigError(f"an answer has at least one token, not {request.tokens_max}")
        if context and total > context:
            raise ConfigError(
                f"a prompt of {len(prompt)} tokens and an answer of up to {request.tokens_max}"
                f" are over the model's context of {context}"
            )
        chunker = chunker_of(request.boundaries)
        chunker.spans(prompt)  # raises for boundaries behind the prompt
        sampler = Sampler(request.sampling, request.drawn)
        pull = self._start(prompt, chunker)
        kv_bytes = self.engine.layout.body_bytes(total)
        return ServingSequence(request, kv_bytes, pull_by_s, sampler, pull)

    def ready(self, sequence: ServingSequence) -> bool:
        """Whether `prefill` would wait for no bytes. For a batcher that can choose whom to prefill."""
        return sequence.pull is None or sequence.pull.ended() or time.monotonic() >= sequence.pull_by_s

    def prefill(self, sequence: ServingSequence) -> int:
        """Compute what did not come within the pull's budget; return the answer's first token.

        The leases on what came end here. Where it raises (the model's own error), `finish` the sequence.
        """
        pull = sequence.pull
        if sequence.finished or sequence.answer or pull is None:
            raise ConfigError("a sequence is prefilled once, before it is finished")
        room = sequence.request.tokens_max
        try:
            wait_s = max(sequence.pull_by_s - time.monotonic(), 0.0)
            prefill = self.engine.complete(pull, wait_s=wait_s, spare_tokens=room)
        except Exception as error:
            if pull.empty:
                raise
            # Whose fault it was shows when the model runs without a byte from the cache.
            self._fault("a prefill with reused KV", error)
            prefill = self.engine.complete_alone(pull, spare_tokens=room)
        (token,) = sample([sequence.sampler], prefill.logits[None])
        # Sampling has waited for the device: nothing reads the slab any more.
        sequence.pull = None
        self._let_go(pull)
        sequence.cached_tokens = _by_source(prefill)
        sequence._prefill = prefill
        sequence.answer.append(token)
        self._count_prefill(sequence, prefill)
        return token

    def decode(self, sequences: Sequence[ServingSequence]) -> list[int]:
        """One more token for each, in one forward. Where it raises, no sequence has changed."""
        if not sequences:
            return []
        for sequence in sequences:
            if sequence._prefill is None:
                raise ConfigError("a sequence is decoded between its prefill and its finish")
            if len(sequence.answer) >= sequence.request.tokens_max:
                raise ConfigError(f"a sequence has all its {sequence.request.tokens_max} answer tokens")
        caches = [sequence._prefill.sparse.cache for sequence in sequences]
        logits = self._decoder.decode(caches, [sequence.answer[-1] for sequence in sequences])
        tokens = sample([sequence.sampler for sequence in sequences], logits)
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.answer.append(token)
        with self._changed:
            self._counts.update(decode_steps=1, answer_tokens=len(tokens))
        return tokens

    def finish(self, sequence: ServingSequence) -> None:
        """Let go of a sequence at any stage; hand what is new of a prefilled one to the storing thread.

        Waits neither for a pull under way nor for the store. Never raises for a fault of the cache.
        Idempotent.
        """
        if sequence.finished:
            return
        sequence.finished = True
        pull, sequence.pull = sequence.pull, None
        prefill, sequence._prefill = sequence._prefill, None
        if pull is not None:
            self._let_go(pull)
        if prefill is not None and self.engine.cache is not None:
            # The last token of the answer has no KV: nothing was computed behind it.
            answer = np.asarray(sequence.answer[:-1], dtype=np.uint32)
            prefill.tokens = np.concatenate([prefill.tokens, answer])
            if len(answer) >= SEGMENT_TOKENS_MIN:  # as the next turn will cut it, where it is a message
                boundaries = [b for b in sequence.request.boundaries if b < prefill.prompt_tokens]
                prefill.chunker = chunker_of([*boundaries, prefill.prompt_tokens])
            self._store_beside(prefill, sequence.kv_bytes)

    # -- around them -----------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """What an ingress must know: the namespace of the KV (None without a mesh), the longest prompt with
        its answer, the size of the vocabulary, and which tokens end an answer.
        """
        model, cache = self.engine.model, self.engine.cache
        ends = model.generation_config.eos_token_id
        return {
            "namespace": cache.namespace if cache is not None else None,
            "context_tokens": self.engine.context_tokens or 2**31,
            "vocabulary": model.config.get_text_config().vocab_size,
            "stop": [ends] if isinstance(ends, int) else list(ends or []),
        }

    def stats(self) -> dict[str, Any]:
        """Counts since the start.

        tokens: of all prompts, by where their KV came from, "recomputed" among them; they add up to
        prompt_tokens, and so do exact_tokens and approximate_tokens (whose KV was moved, or attended to
        such). refused: chunks that could not be stored, by reason. stores_dropped: sequences not stored
        because too much waited. pulls_given_up: ended by their budget or by `finish` before all bytes had
        come. cache_faults: errors that the cache should not have raised. storing_bytes: KV of finished
        sequences that is in memory now.
        """
        with self._changed:
            names = """prefills prompt_tokens answer_tokens decode_steps exact_tokens approximate_tokens
                stored_chunks resident_chunks stores_dropped pulls_given_up cache_faults""".split()
            return {name: self._counts[name] for name in names} | {
                "tokens": {name: self._tokens[name] for name in (*map(str, SOURCES), "recomputed")},
                "refused": dict(self._refused),
                "storing_bytes": self._storing_bytes,
                "batched": self._decoder.batched,
            }

    def flush(self, budget_s: float = 10.0) -> bool:
        """Wait until what was finished is stored and published, and given-up pulls have ended.

        False where that was not so within the budget.
        """
        by_s = time.monotonic() + budget_s
        with self._changed:
            done = self._changed.wait_for(lambda: self._beside == 0, budget_s)
            stored = self._last_stored
        return done and (stored is None or stored.published(max(by_s - time.monotonic(), 0.0)))

    def close(self) -> None:
        """Wait for stores and given-up pulls (each within its own budget). Idempotent.

        Sequences may still be finished afterwards; they are not stored any more.
        """
        with self._changed:
            self._closed = True
        self._storer.shutdown(wait=True)
        self._closers.shutdown(wait=True)

    # -- inside ----------------------------------------------------------------------------------

    def _start(self, prompt: np.ndarray, chunker: Chunker) -> Pull:
        budget_s = _NODES_SHARE * self.pull_budget_s
        try:
            return self.engine.start(prompt, chunker, content_reuse=self.content_reuse, budget_s=budget_s)
        except Exception as error:
            self._fault("a lookup", error)
            return Pull(prompt, chunker, Lookup(prompt, (), 0.0), time.perf_counter())

    def _let_go(self, pull: Pull) -> None:
        """End a pull's leases: here where it has ended, beside the caller where bytes may still come."""
        ended = pull.ended()
        with self._changed:
            self._counts["pulls_given_up"] += not ended
            if not ended and not self._closed:
                self._beside += 1
                self._closers.submit(self._counted, "ending a pull", pull.close, 0)
                return
        self._guarded("ending a pull", pull.close)

    def _store_beside(self, prefill: Prefill, kv_bytes: int) -> None:
        with self._changed:
            # One sequence alone may always wait, however large it is.
            full = self._storing_bytes and self._storing_bytes + kv_bytes > self.storing_bytes_max
            if full or self._closed:
                self._counts["stores_dropped"] += 1
                return
            self._storing_bytes += kv_bytes
            self._beside += 1
            self._storer.submit(self._counted, "a store", lambda: self._store(prefill), kv_bytes)

    def _store(self, prefill: Prefill) -> None:
        stored = self.engine.store(prefill)
        with self._changed:
            self._counts.update(stored_chunks=stored.stored, resident_chunks=stored.resident)
            self._refused.update({str(reason): count for reason, count in stored.refused.items()})
            self._last_stored = stored

    def _counted(self, what: str, work: Callable[[], None], kv_bytes: int) -> None:
        try:
            self._guarded(what, work)
        finally:
            with self._changed:
                self._storing_bytes -= kv_bytes
                self._beside -= 1
                self._changed.notify_all()

    def _guarded(self, what: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._fault(what, error)

    def _fault(self, what: str, error: Exception) -> None:
        _log.warning("%s failed: %r", what, error)
        with self._changed:
            self._counts["cache_faults"] += 1

    def _count_prefill(self, sequence: ServingSequence, prefill: Prefill) -> None:
        exact = min(prefill.sparse.exact_tokens, prefill.prompt_tokens)
        with self._changed:
            self._tokens.update(sequence.cached_tokens)
            self._tokens["recomputed"] += prefill.recomputed_tokens
            self._counts.update(
                prefills=1,
                answer_tokens=1,
                prompt_tokens=prefill.prompt_tokens,
                exact_tokens=exact,
                approximate_tokens=prefill.prompt_tokens - exact,
            )


def _by_source(prefill: Prefill) -> dict[str, int]:
    """Tokens of a prompt whose KV came from the mesh and was not computed again."""
    computed = np.zeros(prefill.prompt_tokens, dtype=bool)
    computed[prefill.sparse.recomputed] = True
    tokens = {str(source): 0 for source in SOURCES}
    for c in prefill.chunks:
        if c.kv is not None:
            span = slice(c.found.keys.start, c.found.keys.stop)
            tokens[str(c.source)] += int((~computed[span]).sum())
    return tokens
