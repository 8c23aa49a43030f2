"""Documents and prompts for the reuse benchmark: real prose, without a network.

The text is the Python reference manual (as `pydoc_data.topics` carries it) and the docstrings of the standard
library. Both are in every CPython; all is deterministic for one version of it.
"""

from __future__ import annotations

import ast
import random
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2pcache.demo.text import PARAGRAPH_CHARS_MIN, SENTENCE_END, SYSTEM_PROMPT, prose_topics
from p2pcache.types import ConfigError

GOLD_TOKENS = 32
SEAM_TOKENS = 16
QUESTIONS = (
    "What do the documents say about {}?",
    "Explain {} in your own words.",
    "Summarise what is said about {}.",
    "Why does {} matter, according to the documents?",
)


@dataclass(frozen=True, slots=True)
class Document:
    """A passage of whole sentences, and how its text really goes on. Token ids, not to be re-encoded."""

    title: str
    part: tuple[int, ...]  # as it stands in a prompt, heading included
    gold: tuple[int, ...]  # GOLD_TOKENS that follow the passage in its source
    sentences: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Prompt:
    """System part, documents, question. tails: other endings, measured on the same documents' KV."""

    system: tuple[int, ...]
    documents: tuple[Document, ...]
    question: tuple[int, ...]
    gold_tail: tuple[int, ...]  # an ending after which `gold` is what really follows
    gold: tuple[int, ...]
    seam_tail: tuple[int, ...]  # the end of one document again, after which the next one's start follows
    seam: tuple[int, ...]

    @property
    def tokens(self) -> list[int]:
        return [*self.system, *(t for d in self.documents for t in d.part), *self.question]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """`[start, stop)` of each document in `tokens`."""
        at, spans = len(self.system), []
        for document in self.documents:
            spans.append((at, at + len(document.part)))
            at += len(document.part)
        return spans


class Format:
    """How prompts look to one tokenizer: ChatML where it has its marks, else plain text behind `<bos>`."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        chatml = tokenizer.convert_tokens_to_ids("<|im_start|>") not in (None, tokenizer.unk_token_id)
        bos = () if chatml or tokenizer.bos_token_id is None else (tokenizer.bos_token_id,)
        self.bos: tuple[int, ...] = bos
        if chatml:
            self._system = f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n<|im_start|>user\n"
            self._question = "Question: {}<|im_end|>\n<|im_start|>assistant\n"
        else:
            self._system = f"{SYSTEM_PROMPT}\n\n"
            self._question = "Question: {}\nAnswer:"
        self.system = (*self.bos, *self.encode(self._system))

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def document(self, title: str, sentences: Sequence[str]) -> tuple[int, ...]:
        return self.encode(f"Document: {title}\n{' '.join(sentences)}\n\n")

    def prompt(self, documents: Sequence[Document], rng: random.Random) -> Prompt:
        asked, continued = rng.choice(documents), rng.choice(documents)
        question = self.encode(self._question.format(rng.choice(QUESTIONS).format(asked.title.lower())))
        # The last sentence again, and how the source goes on: a model with the document in view knows more.
        gold_tail = self.encode(f"Document: {continued.title} (continued)\n{continued.sentences[-1]} ")
        seam = rng.randrange(1, len(documents))
        return Prompt(
            self.system,
            tuple(documents),
            question,
            gold_tail,
            continued.gold,
            documents[seam - 1].part[-SEAM_TOKENS:],
            documents[seam].part[:SEAM_TOKENS],
        )


def documents(form: Format, count: int, tokens: int) -> list[Document]:
    """The first `count` documents of about `tokens` tokens, one of each topic first; no sentence twice.

    Raises ConfigError where there is not so much text.
    """
    by_topic = [list(_of_topic(form, *topic, tokens)) for topic in (*prose_topics(), *_docstrings())]
    rounds = max(map(len, by_topic))
    found = [cuts[i] for i in range(rounds) for cuts in by_topic if i < len(cuts)]
    if len(found) < count:
        raise ConfigError(f"there are {len(found)} documents of {tokens} tokens, not {count}")
    return found[:count]


def changed(form: Format, document: Document, share: float, rng: random.Random) -> Document:
    """The same document with a share of its words replaced by others of it."""
    words = [w for s in document.sentences for w in s.split(" ")]
    sentences = tuple(
        " ".join(rng.choice(words) if rng.random() < share else word for word in s.split(" "))
        for s in document.sentences
    )
    return Document(document.title, form.document(document.title, sentences), document.gold, sentences)


def _of_topic(form: Format, title: str, paragraphs: Sequence[str], tokens: int) -> Iterator[Document]:
    sentences = [s for p in paragraphs for s in SENTENCE_END.split(p)]
    sizes = [len(form.encode(" " + s)) for s in sentences]
    at = number = 0
    while True:
        stop, size = at, 0
        while stop < len(sentences) and size < tokens:
            size += sizes[stop]
            stop += 1
        gold = form.encode(" ".join(sentences[stop : stop + 8]))[:GOLD_TOKENS]
        if size < tokens or len(gold) < GOLD_TOKENS:
            return
        if size < 1.3 * tokens:
            number += 1
            name = title if number == 1 else f"{title} ({number})"
            taken = tuple(sentences[at:stop])
            yield Document(name, form.document(name, taken), gold, taken)
        at = stop


def _docstrings() -> Iterator[tuple[str, list[str]]]:
    """`(module, prose paragraphs)` of the standard library's documented modules, by name."""
    seen: set[str] = set()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if path.name.startswith("_"):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
        nodes = (n for n in ast.walk(tree) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef))
        paragraphs = []
        for text in (ast.get_docstring(n) for n in nodes):
            for block in re.split(r"\n\s*\n", text or ""):
                lines = block.strip().splitlines()
                flat = " ".join(line.strip() for line in lines)
                plain = not any(line.startswith((" ", ">>>", "*", "-", "|")) for line in lines)
                if plain and len(flat) >= PARAGRAPH_CHARS_MIN and flat.endswith(".") and flat not in seen:
                    seen.add(flat)
                    paragraphs.append(flat)
        if paragraphs:
            yield f"The module {path.stem}", paragraphs
