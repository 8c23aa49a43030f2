"""The demo's two workloads, as prompts: retrieval over shuffled passages, and a growing conversation."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from p2pcache.demo.text import conversation, passages, prompt_parts

POOL = 8
PASSAGES_PER_PROMPT = 4
QUOTED_FIRST = 3  # passages in a conversation's first turn, so that it is long from the start


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt. boundaries: where its documents begin, for the segment chunker; empty: fixed chunks."""

    kind: str  # "retrieval" or "conversation"
    tokens: list[int]
    boundaries: tuple[int, ...] = ()
    without_documents: list[int] = field(default_factory=list)  # the same question with nothing to read


def retrieval(tokenizer: Any, count: int, seed: int = 1) -> Iterator[Request]:
    """Prompts of a system prompt, four passages in an order of their own, and a question."""
    rng = random.Random(seed)
    pool = passages(tokenizer, POOL)
    for _ in range(count):
        chosen = rng.sample(pool, PASSAGES_PER_PROMPT)
        parts = prompt_parts(tokenizer, chosen, chosen[rng.randrange(len(chosen))].question)
        starts, tokens = [], []
        for part in parts:
            starts.append(len(tokens))
            tokens += part
        yield Request("retrieval", tokens, tuple(starts), parts[0] + parts[-1])


class Conversation:
    """A chat that grows turn by turn: `next_prompt`, then `answered` with what the model said."""

    def __init__(self, tokenizer: Any, turns: int):
        self._encode = lambda text: list(tokenizer.encode(text, add_special_tokens=False))
        pool = passages(tokenizer, POOL + QUOTED_FIRST)[POOL:]
        self._tokens = [t for part in prompt_parts(tokenizer, pool, pool[0].question) for t in part]
        self._turns = iter(conversation(turns)[1:])
        self._first = True

    def next_prompt(self) -> Request:
        """The whole chat so far with the next question."""
        if not self._first:
            turn = next(self._turns)
            text = f"<|im_end|>\n<|im_start|>user\n{turn}<|im_end|>\n<|im_start|>assistant\n"
            self._tokens += self._encode(text)
        self._first = False
        return Request("conversation", list(self._tokens))

    def answered(self, tokens: list[int]) -> None:
        self._tokens += tokens
