"""From what a client sends to tokens with the places where segments begin, and from tokens back to text.

Segments (messages, and the parts of a message) are encoded apart and their token ids spliced: a
tokenizer merges across a seam, so the same document in another place would otherwise be other tokens,
and would never be found again.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from p2pcache.serve.engine import SEGMENT_TOKENS_MIN
from p2pcache.types import ConfigError

MARK_END = "\x04"
UNDECODED_MAX = 8
"""Tokens without text to show, after which a detokenizer stops waiting for the rest of a character."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """uint32 [n], and the ascending offsets at which its segments begin (0 is not among them)."""

    tokens: np.ndarray
    boundaries: tuple[int, ...] = ()


class TooLong(ConfigError):
    """More text than any prompt within the context can be."""


class Prompts:
    """Builds prompts for one tokenizer. Not thread-safe: one call at a time."""

    def __init__(self, tokenizer: Any, plain: Any, tokens_max: int):
        """plain: a tokenizer of the same model, this object's own, for text in which the model's control
        tokens are only words. tokens_max: what is surely longer is refused before it is encoded.
        """
        self._tokenizer = tokenizer
        self._plain = plain
        self._tokens_max = tokens_max
        # What one token can stand for at most, in characters: no text over this is within the context.
        self._chars_max = tokens_max * max(map(len, tokenizer.get_vocab()), default=1)

    def completion(self, prompt: str | Sequence[int]) -> Prompt:
        """Of `/v1/completions`: text, or token ids. Raises ConfigError."""
        self._check(len(prompt), self._chars_max if isinstance(prompt, str) else self._tokens_max)
        if isinstance(prompt, str):
            return Prompt(_array(self._encode(prompt, special=True)))
        return Prompt(_array(list(prompt)))

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> Prompt:
        """Of `/v1/chat/completions`. Content is text, or a list of text parts, each a segment.

        What a message says is text: control tokens of the model in it are not obeyed. A template that does
        something with contents, trims them say, gets its way, without segments. Raises ConfigError where
        the model has no chat template, or the template refuses the messages.
        """
        if not messages:
            raise ConfigError("messages is empty")
        mark = f"\x02{secrets.token_hex(8)}\x03"  # found again in the rendered text, and in nobody's message
        plain, marked, parts = [], [], []
        for message in messages:
            texts = _parts(message)
            numbers = range(len(parts), len(parts) + len(texts))
            marked.append({**message, "content": "".join(f"{mark}{n}{MARK_END}" for n in numbers)})
            plain.append({**message, "content": "".join(texts)})
            parts += texts
        self._check(sum(map(len, parts)), self._chars_max)
        rendered, as_marked = self._render(plain), self._render(marked)
        pieces = _pieces(as_marked, mark, parts)
        if pieces is None or "".join(text for _, text in pieces) != rendered:
            return Prompt(_array(self._encode(rendered)))
        return self._spliced(pieces)

    def _check(self, length: int, length_max: int) -> None:
        if length > length_max:
            raise TooLong(f"the prompt is longer than any within the context of {self._tokens_max} tokens")

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        try:
            return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template raises what it likes
            raise ConfigError(f"the model's chat template refuses these messages: {error}") from None

    def _spliced(self, pieces: Sequence[tuple[bool, str]]) -> Prompt:
        """Encode each piece apart. pieces: (whether it is a part of a message, text)."""
        tokens: list[int] = []
        edges: set[int] = set()
        for is_part, text in pieces:
            ids = self._encode_plain(text) if is_part else self._encode(text)
            if is_part and len(ids) >= SEGMENT_TOKENS_MIN:
                edges |= {len(tokens), len(tokens) + len(ids)}
            tokens += ids
        return Prompt(_array(tokens), tuple(sorted(edges - {0, len(tokens)})))

    def _encode_plain(self, text: str) -> list[int]:
        if not text:
            return []
        return self._plain(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]

    def _encode(self, text: str, special: bool = False) -> list[int]:
        return self._tokenizer(text, add_special_tokens=special)["input_ids"] if text else []


def _pieces(rendered: str, mark: str, parts: Sequence[str]) -> list[tuple[bool, str]] | None:
    """What stands between marks, and the parts in their place; None where one is lost or doubled."""
    first, *rest = rendered.split(mark)
    pieces, numbers = [(False, first)], []
    for piece in rest:
        number, end, text = piece.partition(MARK_END)
        if not end or not number.isdecimal() or int(number) >= len(parts):
            return None
        numbers.append(int(number))
        pieces += [(True, parts[int(number)]), (False, text)]
    return pieces if sorted(numbers) == list(range(len(parts))) else None


def _parts(message: Mapping[str, Any]) -> list[str]:
    content = message.get("content")
    if content is None:
        return [""]
    if isinstance(content, str):
        return [content]
    texts = []
    for part in content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ConfigError(f"only parts of type text are served, not {part.get('type')!r}")
        texts.append(part["text"])
    return texts


def _array(tokens: list[int]) -> np.ndarray:
    if not tokens:
        raise ConfigError("the prompt is empty")
    if min(tokens) < 0 or max(tokens) >= 2**32:
        raise ConfigError("token ids must be from 0 to 2**32 - 1")
    return np.asarray(tokens, dtype=np.uint32)


class Detokenizer:
    """Text of an answer as its tokens come, never half a character. One an answer."""

    def __init__(self, tokenizer: Any, skip_special: bool = True):
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._ids: list[int] = []
        self._context = 0  # decoding starts here: a tokenizer looks at what stands before
        self._shown = 0  # ids whose text has been given out

    def add(self, token: int) -> str:
        """The text that this token completes; empty in the middle of a character."""
        self._ids.append(token)
        before = self._decode(self._ids[self._context : self._shown])
        now = self._decode(self._ids[self._context :])
        waiting = len(self._ids) - self._shown
        if (now.endswith("\ufffd") or len(now) <= len(before)) and waiting < UNDECODED_MAX:
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        return now[len(before) :]

    def rest(self) -> str:
        """What is left at the end, whole characters or not."""
        before = self._decode(self._ids[self._context : self._shown])
        now = self._decode(self._ids[self._context :])
        self._context = self._shown = len(self._ids)
        return now[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(
            ids, skip_special_tokens=self._skip_special, clean_up_tokenization_spaces=False
        )


class StopText:
    """Cuts an answer at the first of some texts; holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]):
        self._stops = [s for s in stops if s]
        self._held = ""
        self.found = False

    def add(self, text: str) -> str:
        """What of the answer may be shown now."""
        if not self._stops or self.found:
            return "" if self.found else text
        self._held += text
        places = [(i, s) for s in self._stops if (i := self._held.find(s)) >= 0]
        if places:
            self.found = True
            shown, self._held = self._held[: min(places)[0]], ""
            return shown
        keep = max((_overlap(self._held, s) for s in self._stops), default=0)
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return shown

    def rest(self) -> str:
        """What was held back, at an end without a stop."""
        held, self._held = self._held, ""
        return "" if self.found else held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that a stop begins with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
