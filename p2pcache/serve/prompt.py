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

from p2pcache.types import ConfigError

SEGMENT_TOKENS_MIN = 32
"""A part shorter than this is no segment of its own: a chunk that small costs more than it saves."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """uint32 [n], and the ascending offsets at which its segments begin (0 is not among them)."""

    tokens: np.ndarray
    boundaries: tuple[int, ...] = ()


class Prompts:
    """Builds prompts for one tokenizer. Thread-safe as far as the tokenizer is."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def completion(self, prompt: str | Sequence[int]) -> Prompt:
        """Of `/v1/completions`: text, or token ids. Raises ConfigError."""
        if isinstance(prompt, str):
            return Prompt(_array(self._encode(prompt, special=True)))
        return Prompt(_array(list(prompt)))

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> Prompt:
        """Of `/v1/chat/completions`. Content is text, or a list of text parts, each a segment.

        Raises ConfigError where the model has no chat template, or the template refuses the messages.
        """
        if not messages:
            raise ConfigError("messages is empty")
        mark = f"\x02{secrets.token_hex(8)}\x03"  # found again in the rendered text, and in nobody's message
        marked, parts = [], []
        for message in messages:
            texts = _parts(message)
            marked.append(
                {**message, "content": "".join(f"{mark}{len(parts) + i}\x04" for i in range(len(texts)))}
            )
            parts += texts
        try:
            rendered = self._tokenizer.apply_chat_template(marked, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template raises what it likes
            raise ConfigError(f"the model's chat template refuses these messages: {error}") from None
        return self._spliced(rendered, mark, parts)

    def _spliced(self, rendered: str, mark: str, parts: list[str]) -> Prompt:
        """Encode what stands between the marks and each part apart. A part is a segment of its own."""
        pieces = rendered.split(mark)
        tokens = list(self._encode(pieces[0]))
        edges: set[int] = set()
        for piece in pieces[1:]:
            number, _, rest = piece.partition("\x04")
            part = self._encode(parts[int(number)])
            if len(part) >= SEGMENT_TOKENS_MIN:
                edges |= {len(tokens), len(tokens) + len(part)}
            tokens += part
            tokens += self._encode(rest)
        if len(pieces) - 1 != len(parts):
            raise ConfigError("the model's chat template leaves parts of these messages out")
        return Prompt(_array(tokens), tuple(sorted(edges - {0, len(tokens)})))

    def _encode(self, text: str, special: bool = False) -> list[int]:
        return self._tokenizer(text, add_special_tokens=special)["input_ids"] if text else []


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
        if now.endswith("\ufffd") or len(now) <= len(before):
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
