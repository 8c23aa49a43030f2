"""Where a document's KV was computed: alone, behind the system prompt, behind a primer, or in context."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from bench.reuse.text import Document, Format
from p2pcache.blend.sparse import extract_kv, full_prefill


class Origin(StrEnum):
    """What stood before a document when its KV was computed."""

    ALONE = "alone"  # nothing but `<bos>`, where the model has one
    SYSTEM = "system"  # the system prompt
    PRIMED = "primed"  # the system prompt and one fixed passage, the same for all documents
    CONTEXT = "context"  # the system prompt and one to three other documents of the pool


@dataclass(frozen=True, slots=True)
class Body:
    """KV `[layers, 2, tokens, kv_heads, head_dim]` of a document, whose first token stood at `base`."""

    kv: torch.Tensor
    base: int


class Bodies:
    """The KV of a pool of documents, each computed once for each origin and kept."""

    def __init__(self, model: Any, form: Format, pool: Sequence[Document], primer: Sequence[int]):
        """primer: token ids that stand between the system prompt and a primed document."""
        self._model, self._form, self._pool = model, form, pool
        self._primer = tuple(primer)
        self._index = {document.part: i for i, document in enumerate(pool)}
        self._kept: dict[tuple[Origin, int], Body] = {}
        system_kv = full_prefill(model, form.system)[1]
        self.system = extract_kv(system_kv, 0, len(form.system))

    def of(self, origin: Origin, document: Document) -> Body:
        key = origin, self._index[document.part]
        if key not in self._kept:
            self._kept[key] = self.computed(origin, document, key[1])
        return self._kept[key]

    def computed(self, origin: Origin, document: Document, seed: int = 0) -> Body:
        """Compute one, also of a document outside the pool."""
        before = self._before(origin, document, random.Random(seed))
        tokens = [*before, *document.part]
        return Body(extract_kv(full_prefill(self._model, tokens)[1], len(before), len(tokens)), len(before))

    def _before(self, origin: Origin, document: Document, rng: random.Random) -> tuple[int, ...]:
        match origin:
            case Origin.ALONE:
                return self._form.bos
            case Origin.SYSTEM:
                return self._form.system
            case Origin.PRIMED:
                return self._form.system + self._primer
            case Origin.CONTEXT:
                others = [d for d in self._pool if d is not document]
                chosen = rng.sample(others, rng.randint(1, min(3, len(others))))
                return self._form.system + tuple(t for d in chosen for t in d.part)
