"""From the ingress to a replica and back: where a prompt's KV is, who answers, and what if it dies."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from p2pcache.api import Cache
from p2pcache.core.keys import ContentKey
from p2pcache.io.members_ray import alive_nodes
from p2pcache.results import Lookup
from p2pcache.serve.config import ServeConfig
from p2pcache.serve.engine import Generation, chunker_of
from p2pcache.serve.route import Route

_log = logging.getLogger(__name__)
_NODES_EVERY_S = 2.0
_LOOKUP_S = 0.05
_LOOKUPS_AT_ONCE = 8
_LOOKUPS_WAITING_MAX = 32
_AGAIN = ("busy", "closing", "engine")  # kinds of errors that another replica may not have


class Unavailable(Exception):
    """No replica could answer. busy: because all have enough to do."""

    def __init__(self, message: str, busy: bool = False):
        super().__init__(message)
        self.busy = busy


class Refused(Exception):
    """The engine finds the request itself wrong."""


class Locator:
    """Asks the directory, through this host's node, where the KV of prompts lies."""

    def __init__(self, cache: Cache, config: ServeConfig):
        self._cache = cache
        self._config = config
        self._pool = ThreadPoolExecutor(_LOOKUPS_AT_ONCE, thread_name_prefix="p2pcache-locate")
        self._looking = 0
        self._ids: dict[str, str] = {}  # p2pcache's name of a node -> Ray's
        self._looked_s = float("-inf")
        self.counts: Counter[str] = Counter()  # located, late

    async def route(self, request: Generation) -> Route:
        """What the router should know; without `held` where the directory took longer than its budget."""
        route = Route(len(request.tokens), request.tokens_max, pull_share=self._config.pull_share)
        if self._looking >= _LOOKUPS_WAITING_MAX:
            self.counts["late"] += 1
            return route
        self._looking += 1
        looking = asyncio.get_running_loop().run_in_executor(self._pool, self._look, request)
        done, _ = await asyncio.wait({looking}, timeout=self._config.route_budget_s)
        looking.add_done_callback(self._looked)
        if not done or looking.exception() is not None:
            looking.cancel()
            self.counts["late"] += 1
            return route
        self.counts["located"] += 1
        return locate(route, looking.result(), self._ids)

    def _looked(self, looking: asyncio.Future[Lookup]) -> None:
        self._looking -= 1
        if not looking.cancelled():
            looking.exception()

    def _look(self, request: Generation) -> Lookup:
        self._follow_nodes()
        return self._cache.lookup(
            request.tokens,
            chunker=chunker_of(request.boundaries),
            content_reuse=self._config.content_reuse,
            everywhere=True,
            budget_s=_LOOKUP_S,
        )

    def _follow_nodes(self) -> None:
        now_s = time.monotonic()
        if now_s < self._looked_s + _NODES_EVERY_S:
            return
        self._looked_s = now_s
        try:
            self._ids = {n.name: n.node_id for n in alive_nodes(labelled_only=False)}
        except Exception as error:  # the GCS does not answer: what was known stays
            _log.info("the nodes of the cluster are not known anew: %s", error)


def locate(route: Route, lookup: Lookup, ids: Mapping[str, str]) -> Route:
    """Add up who holds how many tokens of a prompt. ids: p2pcache's name of a node -> Ray's."""
    held: Counter[str] = Counter()
    anywhere, key = 0, b""
    for chunk in lookup.chunks:
        nodes = {h.node for found in chunk.found for h in found.holders}
        if nodes:
            anywhere += chunk.keys.tokens
        elif not key:
            key = bytes(ContentKey(chunk.keys.content))
        for node in nodes:
            if node in ids:
                held[ids[node]] += chunk.keys.tokens
    if not key and lookup.chunks:
        key = bytes(lookup.chunks[0].keys.content)
    return replace(route, held=dict(held), anywhere=anywhere, key=key)


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
