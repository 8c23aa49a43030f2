"""What clients may send, what they are told when they may not, and what they get."""

from __future__ import annotations

import json

import pytest

from p2pcache.serve import openai
from p2pcache.serve.config import ServeConfig
from p2pcache.serve.openai import BadRequest, Writer, read
from p2pcache.types import ConfigError

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "hi"}


@pytest.mark.parametrize(
    ("body", "chat", "says"),
    [
        ([], False, "JSON object"),
        ({"prompt": "x"}, False, "model must name"),
        ({"model": "m"}, False, "the prompt is empty"),
        ({"model": "m", "prompt": ""}, False, "the prompt is empty"),
        ({"model": "m", "prompt": []}, False, "the prompt is empty"),
        ({"model": "m", "prompt": ["a", "b"]}, False, "one text"),
        ({"model": "m", "prompt": [1, "b"]}, False, "one text"),
        ({"model": "m", "prompt": [True]}, False, "one text"),
        ({"model": "m", "prompt": 3}, False, "one text"),
        ({"model": "m"}, True, "messages must be a list"),
        ({"model": "m", "messages": []}, True, "messages must be a list"),
        ({"model": "m", "messages": ["hi"]}, True, r"messages\[0\] must be an object"),
        ({"model": "m", "messages": [{"content": "hi"}]}, True, "with a role"),
        (
            {"model": "m", "messages": [{"role": "user<|end|>", "content": "hi"}]},
            True,
            "with a role of system",
        ),
        (TEXT | {"prompt": "half \ud800"}, False, "half of a surrogate"),
        ({"model": "m", "messages": [{"role": "user", "content": "\udfff"}]}, True, "half of a surrogate"),
        (TEXT | {"temperature": 10**400}, False, "temperature must be a number"),
        ({"model": "m", "messages": [{"role": "user", "content": 3}]}, True, "must be text"),
        ({"model": "m", "messages": [{"role": "user", "content": ["x"]}]}, True, "must hold objects"),
        (TEXT | {"max_tokens": 0}, False, "above 0"),
        (TEXT | {"max_tokens": 1.5}, False, "above 0"),
        (TEXT | {"temperature": -1}, False, "temperature must be a number from 0 to 2"),
        (TEXT | {"temperature": float("nan")}, False, "temperature"),
        (TEXT | {"top_p": 0}, False, "top_p must be above 0"),
        (TEXT | {"seed": "x"}, False, "seed"),
        (TEXT | {"stop": ["a", "b", "c", "d", "e"]}, False, "up to 4"),
        (TEXT | {"stop": [""]}, False, "up to 4"),
        (TEXT | {"n": 2}, False, "n is not served"),
        (TEXT | {"logprobs": 5}, False, "logprobs is not served"),
        (CHAT | {"tools": [{"type": "function"}]}, True, "tools is not served"),
        (CHAT | {"response_format": {"type": "json_object"}}, True, "response_format is not served"),
        (TEXT | {"stream_options": 1}, False, "stream_options"),
    ],
)
def test_a_bad_request_is_told_what_is_wrong(body, chat: bool, says: str):
    with pytest.raises(BadRequest, match=says) as caught:
        read(body, chat=chat)
    error = caught.value.body["error"]
    assert caught.value.status == 400 and error["type"] == "invalid_request_error" and error["message"]


def test_a_good_request_is_read():
    asked = read(
        CHAT
        | {
            "max_completion_tokens": 7,
            "temperature": 0,
            "top_p": 0.5,
            "seed": 3,
            "stop": "x",
            "stream": True,
            "stream_options": {"include_usage": True},
            "user": "somebody",
            "n": 1,
            "tools": [],
            "frequency_penalty": 0,
        },
        chat=True,
    )
    assert (asked.answer_tokens, asked.stops, asked.stream, asked.with_usage) == (7, ("x",), True, True)
    assert (asked.sampling.temperature, asked.sampling.top_p, asked.sampling.seed) == (0.0, 0.5, 3)
    plain = read(TEXT, chat=False)
    assert plain.sampling.temperature == 1.0 and plain.answer_tokens is None and not plain.stream
    assert read(TEXT | {"max_completion_tokens": None, "max_tokens": 5}, chat=False).answer_tokens == 5
    assert read(TEXT | {"prompt": ["hi"]}, chat=False).prompt == "hi"
    assert read(TEXT | {"prompt": [[1, 2]]}, chat=False).prompt == [1, 2]
    assert read(TEXT | {"prompt": [1, 2]}, chat=False).prompt == [1, 2]


def events(raw: bytes) -> list[dict | str]:
    out = []
    for line in raw.decode().split("\n\n"):
        if line:
            assert line.startswith("data: ")
            out.append("[DONE]" if line == "data: [DONE]" else json.loads(line[6:]))
    return out


def test_a_streamed_chat_is_a_role_pieces_and_an_end():
    writer = Writer(read(CHAT | {"stream": True, "stream_options": {"include_usage": True}}, chat=True))
    usage = openai.usage(10, 2, {"local": 4, "peer": 3})
    role, piece, end, counts, done = events(writer.start() + writer.piece("hé") + writer.end("stop", usage))
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert piece["choices"][0]["delta"] == {"content": "hé"} and piece["object"] == "chat.completion.chunk"
    assert end["choices"][0]["finish_reason"] == "stop" and end["usage"] is None
    assert counts["choices"] == [] and counts["usage"]["total_tokens"] == 12
    assert counts["usage"]["prompt_tokens_details"]["cached_tokens"] == 7
    assert done == "[DONE]" and len({e["id"] for e in (role, piece, end, counts)}) == 1


def test_a_streamed_completion_has_text():
    writer = Writer(read(TEXT | {"stream": True}, chat=False))
    assert writer.start() == b""
    piece, end, done = events(writer.piece("x") + writer.end("length", {}))
    assert piece["choices"][0]["text"] == "x" and "usage" not in piece and done == "[DONE]"
    assert end["choices"][0]["finish_reason"] == "length"
    assert events(writer.failed("gone"))[0]["error"]["type"] == "server_error"


def test_whole_answers():
    whole = Writer(read(CHAT, chat=True)).whole("yes", "stop", {})
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": "yes"}
    assert whole["object"] == "chat.completion"
    whole = Writer(read(TEXT, chat=False)).whole("yes", "stop", {})
    assert whole["choices"][0]["text"] == "yes" and whole["object"] == "text_completion"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"replica": 2}, "did you mean 'replicas'"),
        ({"replicas": 0}, "replicas must be above 0"),
        ({"replicas": "two"}, "replicas takes a whole number"),
        ({"replicas": True}, "replicas must be a number"),
        ({"cache": "maybe"}, "cache takes true or false"),
        ({"routing": "fast"}, "routing must be one of locality, default"),
        ({"engine": "x"}, "engine must be one of"),
        ({"silent_s": -1}, "silent_s must be a number"),
        ({"memory_bytes_max": float("inf")}, "memory_bytes_max must be a number"),
        ({"model": 3}, "model must be text"),
    ],
)
def test_settings_are_checked_where_they_are_given(settings: dict, says: str):
    with pytest.raises(ConfigError, match=says):
        ServeConfig.of(settings)


def test_settings_come_as_text_too():
    config = ServeConfig.of({"replicas": "3", "cache": "False", "route_budget_s": "0.01", "model": "/m/x/"})
    assert (config.replicas, config.cache, config.route_budget_s) == (3, False, 0.01)
    assert config.model_name == "x" and ServeConfig().model_name == "SmolLM2-135M-Instruct"
