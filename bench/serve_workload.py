"""What the Serve benchmark asks: conversations that grow, and questions over shuffled documents."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from p2pcache.demo.text import SYSTEM_PROMPT, conversation, passages

POOL, DOCUMENTS = 8, 4  # documents there are, and in one prompt
OPENING = 3  # documents in a conversation's first turn
QUOTED = 5  # topics that a conversation's later turns quote


@dataclass
class Ask:
    """One chat request. texts: its parts in order, for counting what repeats."""

    kind: str
    messages: list[dict[str, Any]]
    texts: list[str] = field(default_factory=list)


@dataclass
class Script:
    """A client's requests. One in a conversation needs the answers before it."""

    kind: str
    turns: list[list[str]]  # per request: the texts of its last user message
    history: bool  # whether a request holds those before it, with their answers

    def ask(self, turn: int, answers: Sequence[str]) -> Ask:
        messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM_PROMPT}]
        texts = [SYSTEM_PROMPT]
        first = 0 if self.history else turn
        for i in range(first, turn + 1):
            parts = self.turns[i]
            messages.append({"role": "user", "content": [{"type": "text", "text": t} for t in parts]})
            texts += parts
            if i < turn:
                messages.append({"role": "assistant", "content": answers[i]})
                texts.append(answers[i])
        return Ask(self.kind, messages, texts)


def scripts(tokenizer: Any, clients: int, retrievals: int, turns: int, seed: int) -> list[Script]:
    """Of each client one script of each kind; the same for every arm of the benchmark."""
    rng = random.Random(seed)
    pool = passages(tokenizer, POOL + clients * OPENING)
    shared, own = pool[:POOL], pool[POOL:]
    made = []
    for client in range(clients):
        asked = []
        for _ in range(retrievals):
            chosen = rng.sample(shared, DOCUMENTS)
            asked.append([*(_document(p) for p in chosen), f"Question: {rng.choice(chosen).question}"])
        made.append(Script("retrieval", asked, history=False))
        opening = own[client * OPENING : (client + 1) * OPENING]
        quotes = conversation(clients * (turns - 1) + 1)[1:]
        spoken = [[*(_document(p) for p in opening), f"Question: {opening[0].question}"]]
        spoken += [[text] for text in quotes[client * (turns - 1) : (client + 1) * (turns - 1)]]
        made.append(Script("conversation", spoken, history=True))
    return made


def repeated_share(asked: Sequence[Ask], tokenizer: Any) -> float:
    """Share of prompt tokens in texts that an earlier request had: the best that a cache can do."""
    seen: set[str] = set()
    repeated = total = 0
    for ask in asked:
        for text in ask.texts:
            count = len(tokenizer(text, add_special_tokens=False)["input_ids"])
            total += count
            repeated += count if text in seen else 0
        seen.update(ask.texts)
    return repeated / total if total else 0.0


def _document(passage: Any) -> str:
    return f"Document: {passage.title}\n{passage.text}\n\n"
