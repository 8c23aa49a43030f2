"""One replica: an engine beside its host's node, behind a batcher."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from ray import serve

import p2pcache
from p2pcache.api import Client
from p2pcache.serve.admission import AdmissionConfig, Refused
from p2pcache.serve.batcher import Batcher
from p2pcache.serve.config import ServeConfig
from p2pcache.serve.engine import Engine, Generation
from p2pcache.serve.metrics import ReplicaMetrics
from p2pcache.serve.route import Route
from p2pcache.serve.stream import Closing, End, EngineFailed, Stream, Token
from p2pcache.types import ConfigError

_log = logging.getLogger(__name__)
SIGN_OF_LIFE_S = 1.0

Make = Callable[[ServeConfig, Client | None], Engine]


class Replica:
    """Runs generations. Each comes as a stream of dicts: `tokens`, then `end`, or `error`."""

    def __init__(self, config: ServeConfig, make: Make):
        """make: builds the engine. The node of this host may not be there yet: all is a miss till then."""
        self._config = config
        self._client = p2pcache.connect(required=False) if config.cache else None
        self._engine = make(config, self._client)
        limits = AdmissionConfig(
            target_bytes=config.memory_bytes_max,
            sequences_max=config.sequences_max,
            queue_max=config.queue_max,
        )
        self._batcher = Batcher(self._engine, limits, stuck_s=config.stuck_s)
        self._metrics = ReplicaMetrics(config.model_name)

    async def generate(
        self, request: Generation, *, route: Route | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """The answer to one request.

        `{"tokens": [ids]}` as they come, empty ones as signs of life; with the first `{"started": {cached,
        queue_s}, "node": name, "replica": id}`; at the end `{"end": {finish, ...}}`
        or `{"error": {kind, message}}` with kind `request`, `busy`, `too_large`, `closing` or `engine`.
        Whoever stops reading gives the rest up, and its leases end.
        """
        submitting = asyncio.ensure_future(self._batcher.submit(request))
        try:
            while not (await asyncio.wait({submitting}, timeout=SIGN_OF_LIFE_S))[0]:
                yield {"tokens": []}
            stream = submitting.result()
        except (ConfigError, Refused, EngineFailed) as error:
            yield {"error": {"kind": _kind(error), "message": str(error)}}
            return
        finally:
            submitting.cancel()
        async with stream:
            try:
                async for event in _with_signs_of_life(stream):
                    if "started" in event:
                        event |= self._where()
                    yield event
            except (Closing, EngineFailed) as error:
                yield {"error": {"kind": _kind(error), "message": str(error)}}

    def _where(self) -> dict[str, str]:
        node = self._client.node if self._client is not None else ""
        return {"node": node, "replica": serve.get_replica_context().replica_id.unique_id}

    async def describe(self) -> dict[str, Any]:
        """What an ingress must know of the model: the engine's own words, and this replica's node."""
        said = getattr(self._engine, "describe", dict)()
        return {"node": self._client.node if self._client is not None else "", **said}

    async def stats(self) -> dict[str, Any]:
        """The batcher's and the engine's counts."""
        engine = getattr(self._engine, "stats", dict)()
        return {"batcher": self._batcher.stats(), "engine": engine}

    async def check_health(self) -> None:
        """Serve asks every few seconds; an exception has this replica replaced."""
        self._metrics.update(self._batcher.stats(), getattr(self._engine, "stats", dict)())
        self._batcher.check_health()

    async def __del__(self) -> None:
        # Serve calls it when a replica goes: by then its requests have ended, or their time is up.
        try:
            await self._batcher.close(0.0)
        except EngineFailed as error:
            _log.warning("%s", error)
        await asyncio.to_thread(getattr(self._engine, "close", lambda: None))
        if self._client is not None:
            self._client.close()


async def _with_signs_of_life(stream: Stream) -> AsyncIterator[dict[str, Any]]:
    """A stream's events as dicts, never silent for longer than a second."""
    reading: asyncio.Task[Token | End] = asyncio.ensure_future(anext(stream))
    try:
        while True:
            done, _ = await asyncio.wait({reading}, timeout=SIGN_OF_LIFE_S)
            if not done:
                yield {"tokens": []}
                continue
            event = reading.result()
            if isinstance(event, End):
                yield {"end": _end_to_dict(event)}
                return
            reading = asyncio.ensure_future(anext(stream))
            yield {"tokens": [event.id]} | _started(event)
    finally:
        reading.cancel()


def _started(token: Token) -> dict[str, Any]:
    if token.prefilled is None:
        return {}
    return {"started": {"cached": dict(token.prefilled.cached_tokens), "queue_s": token.prefilled.queue_s}}


def _end_to_dict(end: End) -> dict[str, Any]:
    return {
        "finish": end.finish_reason,
        "prompt_tokens": end.prompt_tokens,
        "answer_tokens": end.completion_tokens,
        "cached": dict(end.cached_tokens),
        "queue_s": end.queue_s,
        "ttft_s": end.ttft_s,
    }


def _kind(error: Exception) -> str:
    if isinstance(error, ConfigError):
        return "request"
    if isinstance(error, Closing):
        return "closing"
    if isinstance(error, Refused):
        return "busy" if error.limit == "queue_max" else "too_large"
    return "engine"
