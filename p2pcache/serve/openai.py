"""OpenAI's shapes as far as they are served: requests in, completions and chunks out, errors in their form.

Source: OpenAI's API reference for `/v1/completions` and `/v1/chat/completions`. What this server cannot
do (several choices, log probabilities, tools) is refused by name rather than ignored; parameters that
change nothing here (user, metadata, store, ...) are ignored.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from p2pcache.serve.engine import Sampling

STOPS_MAX = 4
ROLES = ("system", "developer", "user", "assistant")


class BadRequest(Exception):
    """The client's mistake. status: of HTTP."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.status = status
        kind = _KINDS.get(status, "invalid_request_error")
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


_KINDS = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, checked. prompt: text or token ids for a completion, messages for a chat."""

    model: str
    chat: bool
    prompt: Any
    answer_tokens: int | None
    sampling: Sampling
    stops: tuple[str, ...]
    stream: bool
    with_usage: bool


def read(body: Any, *, chat: bool) -> Asked:
    """Check a request's JSON. Raises BadRequest."""
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise BadRequest("the body holds half of a surrogate pair, which is no text") from None
    for name, neutral in _UNSERVED.items():
        if name in body and body[name] not in neutral:
            raise BadRequest(f"{name} is not served", param=name, code="unsupported_parameter")
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise BadRequest("model must name the model", param="model")
    prompt = _messages(body) if chat else _prompt(body)
    tokens = body.get("max_completion_tokens")
    tokens = body.get("max_tokens") if tokens is None else tokens
    if tokens is not None and (type(tokens) is not int or tokens < 1):
        raise BadRequest("max_tokens must be a whole number above 0", param="max_tokens")
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise BadRequest("stream_options must be an object", param="stream_options")
    return Asked(
        model,
        chat,
        prompt,
        tokens,
        _sampling(body),
        _stops(body),
        bool(body.get("stream", False)),
        bool(options.get("include_usage", False)),
    )


_NONE = (None, False, 0, "", [], {})
_UNSERVED: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "logprobs": _NONE,
    "top_logprobs": _NONE,
    "echo": _NONE,
    "suffix": _NONE,
    "tools": _NONE,
    "tool_choice": (None, "none", "auto"),
    "functions": _NONE,
    "logit_bias": _NONE,
    "frequency_penalty": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "response_format": (None, {"type": "text"}),
    "audio": _NONE,
}


def _prompt(body: Mapping[str, Any]) -> Any:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(type(t) is int for t in prompt):
        return prompt
    if prompt in ("", [], None):
        raise BadRequest("the prompt is empty", param="prompt")
    raise BadRequest("prompt must be one text, or one list of token ids", param="prompt")


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list with at least one message", param="messages")
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise BadRequest(f"{where} must be an object with a role of {', '.join(ROLES)}", param=where)
        content = message.get("content")
        if isinstance(content, list):
            if not all(isinstance(part, dict) for part in content):
                raise BadRequest(f"{where}.content must hold objects", param=where)
        elif not isinstance(content, str | None):
            raise BadRequest(f"{where}.content must be text, or a list of parts", param=where)
    return messages


def _sampling(body: Mapping[str, Any]) -> Sampling:
    temperature = _number(body, "temperature", 1.0, 0.0, 2.0)
    top_p = _number(body, "top_p", 1.0, 0.0, 1.0)
    if top_p == 0:
        raise BadRequest("top_p must be above 0", param="top_p")
    seed = body.get("seed")
    if seed is not None and type(seed) is not int:
        raise BadRequest("seed must be a whole number", param="seed")
    return Sampling(temperature, top_p, seed)


def _number(body: Mapping[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if type(value) not in (int, float) or not low <= value <= high:  # NaN is in no order
        raise BadRequest(f"{name} must be a number from {low:g} to {high:g}", param=name)
    return float(value)


def _stops(body: Mapping[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else stop or []
    if (
        not isinstance(stops, list)
        or len(stops) > STOPS_MAX
        or not all(isinstance(s, str) and s for s in stops)
    ):
        raise BadRequest(f"stop must be a text, or a list of up to {STOPS_MAX}", param="stop")
    return tuple(stops)


def model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "p2pcache"}


class Writer:
    """The answer to one request, whole or in server-sent events."""

    def __init__(self, asked: Asked):
        self._asked = asked
        kind = "chat.completion" if asked.chat else "text_completion"
        self._head = {
            "id": ("chatcmpl-" if asked.chat else "cmpl-") + secrets.token_hex(12),
            "object": kind + (".chunk" if asked.stream and asked.chat else ""),
            "created": int(time.time()),
            "model": asked.model,
        }

    def whole(self, text: str, finish: str, usage: Mapping[str, Any]) -> dict[str, Any]:
        if self._asked.chat:
            choice: dict[str, Any] = {"index": 0, "message": {"role": "assistant", "content": text}}
        else:
            choice = {"index": 0, "text": text}
        return self._head | {
            "choices": [choice | {"logprobs": None, "finish_reason": finish}],
            "usage": usage,
        }

    def start(self) -> bytes:
        """The first event of a stream: a chat names the role there."""
        return self._event([self._delta({"role": "assistant", "content": ""})]) if self._asked.chat else b""

    def piece(self, text: str) -> bytes:
        return self._event([self._delta({"content": text}, text)])

    def end(self, finish: str, usage: Mapping[str, Any]) -> bytes:
        out = self._event([self._delta({}, "", finish)])
        if self._asked.with_usage:
            out += self._event([], usage)
        return out + b"data: [DONE]\n\n"

    def failed(self, message: str) -> bytes:
        """The last event of a stream that cannot go on."""
        error = {"error": {"message": message, "type": "server_error", "param": None, "code": None}}
        return b"data: " + json.dumps(error).encode() + b"\n\n"

    def _delta(self, delta: dict[str, Any], text: str = "", finish: str | None = None) -> dict[str, Any]:
        shown = {"delta": delta} if self._asked.chat else {"text": text}
        return {"index": 0, **shown, "logprobs": None, "finish_reason": finish}

    def _event(self, choices: list[Any], usage: Mapping[str, Any] | None = None) -> bytes:
        body = self._head | {"choices": choices}
        if self._asked.with_usage:
            body["usage"] = usage
        return b"data: " + json.dumps(body).encode() + b"\n\n"


def usage(prompt_tokens: int, answer_tokens: int, cached: Mapping[str, int]) -> dict[str, Any]:
    """Token counts in OpenAI's form; `cached_by_source` is ours."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": answer_tokens,
        "total_tokens": prompt_tokens + answer_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(cached.values()),
            "cached_by_source": dict(cached),
        },
    }
