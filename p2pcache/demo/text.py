"""Real prose without a network: the Python reference manual, as the standard library carries it.

`pydoc_data.topics` is there in every CPython. Its prose is cut into passages for retrieval-style
prompts and into user turns for a conversation. All of it is deterministic for one Python version.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any

from p2pcache.types import ConfigError

SYSTEM_PROMPT = (
    "You are a careful assistant. Read the documents that the user gives you, and answer the question"
    " that follows them in a few plain sentences, using what the documents say and nothing else."
)

PARAGRAPH_CHARS_MIN = 80  # shorter ones are captions, signatures and labels
HEADING = re.compile(r"[*=\-~^+\"]{3,}")
SENTENCE_END = re.compile(r"(?<=[.?!)])\s+(?=[A-Z\"“*(])")


@dataclass(frozen=True, slots=True)
class Passage:
    """A few paragraphs on one topic, and a question that they answer."""

    title: str
    text: str
    token_ids: tuple[int, ...]  # of the text alone
    question: str


def passages(tokenizer: Any, count: int, tokens_min: int = 400, tokens_max: int = 700) -> list[Passage]:
    """The first `count` passages of whole sentences, each of `tokens_min` to `tokens_max` tokens.

    One a topic first, then the topics' second ones, and so on; no paragraph twice. `tokenizer` is a
    transformers tokenizer. Raises `ConfigError` when the manual has not that much prose.
    """
    by_topic = [list(_topic_passages(tokenizer, *topic, tokens_min, tokens_max)) for topic in prose_topics()]
    rounds = max(map(len, by_topic))
    found = [cuts[index] for index in range(rounds) for cuts in by_topic if index < len(cuts)]
    if len(found) < count:
        raise ConfigError(
            f"the manual has {len(found)} passages of {tokens_min} to {tokens_max} tokens, not {count}"
        )
    return found[:count]


def prompt_parts(tokenizer: Any, documents: Sequence[Passage], question: str) -> list[list[int]]:
    """A ChatML prompt as token ids: `[system, document, .., document, question]`, to be concatenated.

    Each part is tokenised by itself, so that a document's ids do not depend on its neighbours: byte
    pairs merge across a seam of text, and the document would not be found again.
    """
    texts = [
        f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n<|im_start|>user\n",
        *(f"Document: {document.title}\n{document.text}\n\n" for document in documents),
        f"Question: {question}<|im_end|>\n<|im_start|>assistant\n",
    ]
    return [_encode(tokenizer, text) for text in texts]


def conversation(turns: int = 6) -> list[str]:
    """User turns of a growing chat, each quoting a paragraph of another topic and asking about it."""
    quotes = [(title, max(paragraphs[:4], key=len)) for title, paragraphs in prose_topics()]
    if turns > len(quotes):
        raise ConfigError(f"the manual has {len(quotes)} topics, not {turns}")
    opening = ["First", *["Now"] * (turns - 1)]
    return [
        f'{word}, about {title.lower()}. The manual says:\n\n"{quote}"\n\nWhat does that mean?'
        for word, (title, quote) in zip(opening, quotes[:turns], strict=True)
    ]


def _topic_passages(
    tokenizer: Any, title: str, paragraphs: Sequence[str], tokens_min: int, tokens_max: int
) -> Iterator[Passage]:
    number = 0
    for text in _cut(tokenizer, paragraphs, tokens_max):
        ids = tuple(_encode(tokenizer, text))
        if tokens_min <= len(ids) <= tokens_max:
            number += 1
            name = title if number == 1 else f"{title} ({number})"
            yield Passage(name, text, ids, f"What do the documents say about {title.lower()}?")


def prose_topics() -> list[tuple[str, list[str]]]:
    """`(title, prose paragraphs)` of every topic that has some, by name; no paragraph twice.

    Some topics quote others whole, hence the check.
    """
    seen: set[str] = set()
    result = []
    for name in sorted(topics):
        title = topics[name].strip().partition("\n")[0].replace('"', "")
        paragraphs = [p for p in _prose(topics[name]) if p not in seen]
        seen.update(paragraphs)
        if paragraphs:
            result.append((title, paragraphs))
    return result


def _prose(topic: str) -> Iterator[str]:
    """A topic's paragraphs of plain prose, each on one line: no headings, code, grammar, lists or tables."""
    for block in re.split(r"\n\s*\n", topic.split("-[ Footnotes ]-")[0]):
        lines = block.strip("\n").splitlines()
        plain = not any(
            line.startswith((" ", "*  ", "* ", "|", "+")) or HEADING.fullmatch(line) for line in lines
        )
        text = " ".join(lines)
        if plain and len(text) >= PARAGRAPH_CHARS_MIN and "::=" not in text and text.endswith("."):
            yield text


def _cut(tokenizer: Any, paragraphs: Sequence[str], tokens_max: int) -> Iterator[str]:
    """Cut paragraphs into texts of at most `tokens_max` tokens, greedily, at the ends of sentences."""
    pieces: list[str] = []
    size = 0
    for paragraph in paragraphs:
        for index, sentence in enumerate(SENTENCE_END.split(paragraph)):
            piece = (" " if index else "\n\n") + sentence
            # An upper bound of what the sentence adds: byte pairs only merge further in context.
            tokens = len(_encode(tokenizer, piece))
            if pieces and size + tokens > tokens_max:
                yield "".join(pieces).strip()
                pieces, size = [], 0
            pieces.append(piece)
            size += tokens
    yield "".join(pieces).strip()


def _encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]
