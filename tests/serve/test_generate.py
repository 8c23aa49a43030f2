"""From the ingress to replicas that answer, refuse, die and fall silent: every token once, in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import RayActorError

from p2pcache.core.keys import ChunkKeys
from p2pcache.serve.config import ServeConfig
from p2pcache.serve.engine import Generation
from p2pcache.serve.generate import Answer, Refused, Unavailable, continued, generate
from p2pcache.serve.locator import Memory, locate
from p2pcache.serve.route import Route
from p2pcache.types import ContentKey, ExactKey

PROMPT = np.arange(5, dtype=np.uint32)
CONFIG = ServeConfig(silent_s=0.2, attempts_max=3)
ANSWER = [10, 11, 12, 13, 14, 15]


def request(tokens_max: int = len(ANSWER)) -> Generation:
    return Generation(PROMPT, tokens_max, boundaries=(2,))


class Response:
    """One replica's stream: it says the rest of ANSWER, unless a fault comes first."""

    def __init__(self, asked: Generation, fault: Callable[[int], Any] | None):
        self.cancelled = False
        self._said = len(asked.tokens) - len(PROMPT)
        assert asked.tokens.tolist() == [*PROMPT.tolist(), *ANSWER[: self._said]]
        assert asked.tokens_max == len(ANSWER) - self._said
        self._events = self._say(fault)

    async def _say(self, fault: Callable[[int], Any] | None) -> AsyncIterator[dict[str, Any]]:
        for i in range(self._said, len(ANSWER)):
            if fault is not None and (event := await asyncio.wait_for(ready(fault(i)), 5)) is not None:
                yield event
                return
            started = {"started": {"cached": {"local": 3}, "queue_s": 0.5}, "node": "n"}
            yield {"tokens": [ANSWER[i]]} | (started if i == self._said else {})
            yield {"tokens": []}
        if fault is not None and fault(len(ANSWER)) is not None:
            return
        yield {"end": {"finish": "length"}}

    def __aiter__(self) -> Response:
        return self

    def __anext__(self) -> Any:
        return anext(self._events)

    def cancel(self) -> None:
        self.cancelled = True


async def ready(value: Any) -> Any:
    return await value if asyncio.iscoroutine(value) else value


class Handle:
    """Replicas r0, r1, ... in turn, each with its fault."""

    def __init__(self, *faults: Callable[[int], Any] | None):
        self._faults = iter(faults)
        self.responses: list[Response] = []
        self.routes: list[Route] = []
        self.generate = SimpleNamespace(remote=self._remote)

    def _remote(self, asked: Generation, *, route: Route) -> Response:
        self.routes.append(route)
        route.chosen = f"r{len(self.responses)}"
        self.responses.append(Response(asked, next(self._faults)))
        return self.responses[-1]


def at(index: int, what: Callable[[], Any]) -> Callable[[int], Any]:
    return lambda i: what() if i == index else None


def dies() -> None:
    raise RayActorError


async def silence() -> None:
    await asyncio.sleep(3600)


def error(kind: str) -> dict[str, Any]:
    return {"error": {"kind": kind, "message": f"it says {kind}"}}


def run(handle: Handle, config: ServeConfig = CONFIG) -> tuple[list[int], Answer]:
    answer = Answer()

    async def read() -> list[int]:
        tokens = generate(handle, request(), None, config, answer)
        return [t for part in [p async for p in tokens] for t in part]

    return asyncio.run(asyncio.wait_for(read(), 20)), answer


def test_an_answer_without_a_fault():
    tokens, answer = run(handle := Handle(None))
    assert tokens == ANSWER == answer.tokens
    assert (answer.finish, answer.cached, answer.queue_s) == ("length", {"local": 3}, 0.5)
    assert (answer.attempts, answer.replica) == (1, "r0") and handle.responses[0].cancelled


@pytest.mark.parametrize("index", range(len(ANSWER)))
@pytest.mark.parametrize(
    "fault", [dies, silence, lambda: error("engine"), lambda: error("closing"), lambda: error("busy")]
)
def test_another_replica_goes_on_behind_the_tokens_that_have_come(index: int, fault: Callable):
    tokens, answer = run(handle := Handle(at(index, fault), None))
    assert tokens == ANSWER == answer.tokens and answer.finish == "length"
    assert answer.attempts == 2 and answer.replica == "r1"
    assert [r.avoid for r in handle.routes] == [frozenset(), frozenset({"r0"})]
    assert all(r.cancelled for r in handle.responses) and all(r.over for r in handle.routes)


def test_an_answer_that_lacks_only_its_end_is_whole():
    tokens, answer = run(handle := Handle(at(len(ANSWER), dies)))
    assert tokens == ANSWER and (answer.finish, answer.attempts) == ("length", 1)
    assert answer.cached == {"local": 3} and len(handle.responses) == 1


def test_where_no_replica_could_even_be_chosen_all_are_busy():
    class Full(Handle):
        def _remote(self, asked: Generation, *, route: Route) -> Response:
            response = super()._remote(asked, route=route)
            route.chosen = ""
            return response

    with pytest.raises(Unavailable) as caught:
        run(Full(*[at(0, silence)] * 3))
    assert caught.value.busy


def test_faults_one_after_the_other_lose_and_double_nothing():
    tokens, answer = run(Handle(at(1, dies), at(3, silence), None))
    assert tokens == ANSWER and answer.attempts == 3


def test_the_attempts_are_counted_and_the_last_reason_is_told():
    with pytest.raises(Unavailable, match=r"in 3 attempts: it says engine") as caught:
        run(Handle(at(0, dies), at(0, silence), at(0, lambda: error("engine"))))
    assert not caught.value.busy
    with pytest.raises(Unavailable) as caught:
        run(Handle(*[at(0, lambda: error("busy"))] * 3))
    assert caught.value.busy


@pytest.mark.parametrize("kind", ["request", "too_large"])
def test_what_no_replica_could_answer_is_asked_of_one_only(kind: str):
    handle = Handle(at(0, lambda: error(kind)))
    with pytest.raises(Refused, match=kind):
        run(handle)
    assert handle.responses[0].cancelled


def test_who_stops_reading_gives_the_rest_up():
    handle = Handle(None)

    async def hang_up() -> None:
        tokens = generate(handle, request(), None, CONFIG, Answer())
        assert await anext(tokens) == [10]
        await tokens.aclose()

    asyncio.run(hang_up())
    assert handle.responses[0].cancelled


def test_what_is_left_of_a_request():
    whole = request()
    assert continued(whole, []) is whole
    left = continued(request(6), [10, 11])
    assert left.tokens.dtype == np.uint32 and left.tokens.tolist() == [0, 1, 2, 3, 4, 10, 11]
    assert left.tokens_max == 4 and left.boundaries == (2,) and left.drawn == 2
    assert continued(left, [12]).drawn == 3


# -- where the KV is -------------------------------------------------------------------------------


def place(*chunks: tuple[int, list[str]], ids: dict[str, str]) -> Route:
    """Of a prompt with chunks of so many tokens, each held by these nodes."""
    keys, nodes, start = [], {}, 0
    for number, (tokens, holders) in enumerate(chunks):
        content = ContentKey(bytes([number]) * 16)
        keys.append(ChunkKeys(start, start + tokens, bytes(32), content, ExactKey(bytes(16))))
        nodes[content], start = holders, start + tokens
    return locate(Route(start), keys, nodes.__getitem__, ids)


def test_tokens_are_added_up_by_node_and_the_key_is_the_first_chunk_that_nobody_holds():
    chunks = [(100, ["a", "b"]), (50, ["b"]), (30, []), (20, ["stranger"])]
    route = place(*chunks, ids={"a": "ray-a", "b": "ray-b"})
    assert route.held == {"ray-a": 100, "ray-b": 150}
    assert route.anywhere == 170 and route.key == bytes([2]) * 16


def test_a_prompt_that_is_held_whole_or_not_at_all_has_a_key_too():
    assert place((100, ["a"]), ids={"a": "x"}).key == bytes(16)
    cold = place((60, []), (40, []), ids={})
    assert cold.held == {} and cold.anywhere == 0 and cold.key == bytes(16)
    assert place(ids={}).key == b""


def test_what_was_heard_is_remembered_for_a_while_and_no_more_than_so_much():
    memory = Memory(keys_max=2, age_s=10.0)
    one, two, three = (ContentKey(bytes([i]) * 16) for i in range(3))
    memory.hear(one, frozenset({"a"}), 0.0)
    memory.add(one, "b", 5.0)
    assert memory.nodes(one, 15.0) == {"a", "b"} and memory.nodes(one, 15.1) == frozenset()
    memory.add(one, "c", 20.0)
    assert memory.nodes(one, 20.0) == {"c"}, "what is too old is not carried along"
    memory.hear(two, frozenset({"a"}), 20.0)
    memory.hear(three, frozenset(), 20.0)
    assert [memory.nodes(k, 20.0) for k in (one, two, three)] == [frozenset(), {"a"}, frozenset()]
