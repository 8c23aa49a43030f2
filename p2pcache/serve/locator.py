"""Where the KV of prompts lies, within a budget: the directory's word, or what was heard of it lately.

The directory is asked for every prompt. An answer that comes after the budget is too late for that
prompt and still worth keeping: documents come again. So is what follows from an answer that was given:
the node beside the replica holds the prompt now. All of it is a hint for the router, and nothing more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from p2pcache.api import Cache
from p2pcache.core.keys import ChunkKeys
from p2pcache.io.members_ray import alive_nodes
from p2pcache.results import Lookup
from p2pcache.serve.config import ServeConfig
from p2pcache.serve.engine import Generation, chunker_of
from p2pcache.serve.route import Route
from p2pcache.types import ContentKey

_log = logging.getLogger(__name__)
_NODES_EVERY_S = 2.0
_LOOKUP_S = 0.05
_LOOKUPS_AT_ONCE = 8
_LOOKUPS_WAITING_MAX = 32
REMEMBERED_MAX = 65_536  # chunks
REMEMBERED_S = 30.0

Nodes = frozenset[str]


class Memory:
    """Content key -> names of the nodes that hold it, as heard lately. Bounded in number and age."""

    def __init__(self, keys_max: int = REMEMBERED_MAX, age_s: float = REMEMBERED_S):
        self._keys_max, self._age_s = keys_max, age_s
        self._known: OrderedDict[ContentKey, tuple[Nodes, float]] = OrderedDict()  # oldest first

    def hear(self, content: ContentKey, nodes: Nodes, now_s: float) -> None:
        self._known[content] = nodes, now_s
        self._known.move_to_end(content)
        while len(self._known) > self._keys_max:
            self._known.popitem(last=False)

    def add(self, content: ContentKey, node: str, now_s: float) -> None:
        self.hear(content, self.nodes(content, now_s) | {node}, now_s)

    def nodes(self, content: ContentKey, now_s: float) -> Nodes:
        nodes, heard_s = self._known.get(content, (frozenset(), 0.0))
        return nodes if now_s <= heard_s + self._age_s else frozenset()


class Locator:
    """Asks through this host's node. Belongs to the ingress's event loop."""

    def __init__(self, cache: Cache, config: ServeConfig):
        self._cache = cache
        self._config = config
        self._memory = Memory()
        self._pool = ThreadPoolExecutor(_LOOKUPS_AT_ONCE, thread_name_prefix="p2pcache-locate")
        self._looking = 0
        self._ids: dict[str, str] = {}  # p2pcache's name of a node -> Ray's
        self._followed_s = float("-inf")

    async def route(self, request: Generation) -> tuple[Route, str]:
        """What the router should know, and how it is known: `located`, `remembered`, or `late`.

        Without `held` where the directory took longer than its budget and nothing of the prompt was heard of
        lately.
        """
        route = Route(len(request.tokens), request.tokens_max, pull_share=self._config.pull_share)
        lookup = await self._look(request)
        if lookup is not None:
            nodes = {c.keys.content: _holders(c) for c in lookup.chunks}
            return locate(route, [c.keys for c in lookup.chunks], nodes.__getitem__, self._ids), "located"
        now_s = time.monotonic()
        chunks = self._chunks(request)
        remembered = locate(route, chunks, lambda c: self._memory.nodes(c, now_s), self._ids)
        return (remembered, "remembered") if remembered.anywhere else (route, "late")

    def served(self, request: Generation, node: str) -> None:
        """A replica beside this node has answered: the prompt's KV is there now, or soon."""
        now_s = time.monotonic()
        for chunk in self._chunks(request):
            self._memory.add(chunk.content, node, now_s)

    def _chunks(self, request: Generation) -> list[ChunkKeys]:
        return self._cache.chunks(request.tokens, chunker_of(request.boundaries))

    async def _look(self, request: Generation) -> Lookup | None:
        """The directory's answer if it comes in time; a later one is remembered."""
        if self._looking >= _LOOKUPS_WAITING_MAX:
            return None
        self._looking += 1
        looking = asyncio.get_running_loop().run_in_executor(self._pool, self._ask, request)
        looking.add_done_callback(self._hear)
        done, _ = await asyncio.wait({looking}, timeout=self._config.route_budget_s)
        return looking.result() if done and looking.exception() is None else None

    def _hear(self, looking: asyncio.Future[Lookup]) -> None:
        self._looking -= 1
        if looking.cancelled() or looking.exception() is not None:
            return
        now_s = time.monotonic()
        for chunk in looking.result().chunks:
            self._memory.hear(chunk.keys.content, _holders(chunk), now_s)
        if now_s > self._followed_s + _NODES_EVERY_S:
            self._followed_s = now_s
            self._pool.submit(self._follow_nodes)

    def _ask(self, request: Generation) -> Lookup:
        if not self._ids:
            self._follow_nodes()
        return self._cache.lookup(
            request.tokens,
            chunker=chunker_of(request.boundaries),
            content_reuse=self._config.content_reuse,
            everywhere=True,
            budget_s=_LOOKUP_S,
        )

    def _follow_nodes(self) -> None:
        try:
            self._ids = {n.name: n.node_id for n in alive_nodes(labelled_only=False)}
        except Exception as error:  # the GCS does not answer: what was known stays
            _log.info("the nodes of the cluster are not known anew: %s", error)


def _holders(chunk: object) -> Nodes:
    return frozenset(h.node for found in chunk.found for h in found.holders)


def locate(
    route: Route,
    chunks: Sequence[ChunkKeys],
    nodes_of: Callable[[ContentKey], Iterable[str]],
    ids: Mapping[str, str],
) -> Route:
    """Add up who holds how many tokens of a prompt. ids: p2pcache's name of a node -> Ray's."""
    held: Counter[str] = Counter()
    anywhere, key = 0, b""
    for chunk in chunks:
        nodes = nodes_of(chunk.content)
        if nodes:
            anywhere += chunk.tokens
        elif not key:
            key = bytes(chunk.content)
        for node in nodes:
            if node in ids:
                held[ids[node]] += chunk.tokens
    if not key and chunks:
        key = bytes(chunks[0].content)
    return replace(route, held=dict(held), anywhere=anywhere, key=key)
