"""From the ingress to a replica and back: who answers, and what if it dies or falls silent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from p2pcache.serve.config import ServeConfig
from p2pcache.serve.engine import Generation
from p2pcache.serve.route import Route

_log = logging.getLogger(__name__)
_AGAIN = ("busy", "closing", "engine")  # kinds of errors that another replica may not have


class Unavailable(Exception):
    """No replica could answer. busy: because all have enough to do."""

    def __init__(self, message: str, busy: bool = False):
        super().__init__(message)
        self.busy = busy


class Refused(Exception):
    """The engine finds the request itself wrong."""


@dataclass
class Answer:
    """What is known of an answer so far."""

    tokens: list[int] = field(default_factory=list)
    finish: str = ""
    cached: dict[str, int] = field(default_factory=dict)
    attempts: int = 0
    replica: str = ""
    node: str = ""  # p2pcache's, beside that replica
    queue_s: float = 0.0


async def generate(
    handle: Any, request: Generation, route: Route | None, config: ServeConfig, answer: Answer
) -> AsyncIterator[list[int]]:
    """Tokens of an answer as they come; `answer` is filled in along the way.

    A replica that dies, or is silent for `silent_s`, is left for another one, which goes on behind the
    tokens that have come. Raises Refused, Unavailable. Closing the iterator gives the rest up.
    """
    route = route or Route(len(request.tokens), request.tokens_max)
    avoid: set[str] = set()
    why, busy = "", False
    while answer.attempts < config.attempts_max:
        if len(answer.tokens) >= request.tokens_max:  # all but the end has come
            answer.finish = "length"
            return
        answer.attempts += 1
        rest = continued(request, answer.tokens)
        asked = replace(route, avoid=frozenset(avoid), chosen="", over=False)
        response = handle.generate.remote(rest, route=asked)
        try:
            async for event in _events(response, config.silent_s):
                answer.replica = event.get("replica") or asked.chosen or answer.replica
                if "started" in event and answer.attempts == 1:
                    started = event["started"]
                    answer.cached, answer.queue_s = started["cached"], started["queue_s"]
                if "error" not in event:
                    answer.node = event.get("node", answer.node)
                    answer.tokens += event.get("tokens", [])
                    if event.get("tokens"):
                        yield event["tokens"]
                    if "end" in event:
                        answer.finish = event["end"]["finish"]
                        return
                    continue
                error = event["error"]
                if error["kind"] not in _AGAIN:
                    raise Refused(error["message"])
                why, busy = error["message"], error["kind"] == "busy"
                break
            else:
                why = "the replica ended its answer without an end"
        except (RayActorError, RayTaskError, DeploymentUnavailableError) as error:
            why, busy = f"{type(error).__name__}", False
        except BackPressureError:
            why, busy = "all replicas have enough to do", True
        except TimeoutError:
            why = f"the replica was silent for {config.silent_s:g} s"
            busy = not asked.chosen  # none could even be chosen: all are full
        finally:
            asked.over = True
            response.cancel()
        _log.warning("attempt %d on replica %s failed: %s", answer.attempts, asked.chosen, why)
        if asked.chosen:
            avoid.add(asked.chosen)
    raise Unavailable(f"no replica answered in {answer.attempts} attempts: {why}", busy)


def continued(request: Generation, tokens: list[int]) -> Generation:
    """What is left of a request of whose answer these tokens have come."""
    if not tokens:
        return request
    longer = np.concatenate([request.tokens, np.asarray(tokens, dtype=np.uint32)])
    left = request.tokens_max - len(tokens)
    return replace(request, tokens=longer, tokens_max=left, drawn=request.drawn + len(tokens))


async def _events(response: Any, silent_s: float) -> AsyncIterator[dict[str, Any]]:
    """A replica's events. Raises TimeoutError where none comes for so long."""
    while True:
        async with asyncio.timeout(silent_s):
            try:
                event = await anext(response)
            except StopAsyncIteration:
                return
        yield event
