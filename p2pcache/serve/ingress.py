"""The OpenAI-compatible front: checks, encodes, routes, streams. It holds no model."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from ray import serve
from ray.exceptions import RayError

import p2pcache
from p2pcache.runtime import stay_responsive
from p2pcache.serve import openai
from p2pcache.serve.config import ServeConfig
from p2pcache.serve.engine import Generation
from p2pcache.serve.generate import Answer, Refused, Unavailable, generate
from p2pcache.serve.locator import Locator
from p2pcache.serve.metrics import IngressMetrics
from p2pcache.serve.models import load_tokenizer
from p2pcache.serve.openai import Asked, BadRequest
from p2pcache.serve.prompt import Detokenizer, Prompt, Prompts, StopText, TooLong
from p2pcache.types import ConfigError

_log = logging.getLogger(__name__)
_PARSED_AT_ONCE_BYTES = 256 << 10  # a larger body is parsed beside the event loop
_VOCABULARY_MAX = 2**31
app = FastAPI(title="p2pcache", openapi_url=None)


@dataclass(frozen=True, slots=True)
class _Model:
    """What a replica says of its model."""

    context_tokens: int
    vocabulary: int
    stop: frozenset[int]
    locator: Locator | None


class _Run:
    """One request on its way."""

    def __init__(self, ingress: "Ingress", asked: Asked, request: Generation):
        self._ingress = ingress
        self._asked = asked
        self._request = request
        self._answer = Answer()
        self._writer = openai.Writer(asked)
        self._knew = "unasked"
        self._started_s = time.monotonic()

    async def response(self) -> Any:
        pieces = self._pieces()
        try:
            first = await anext(pieces)
        except StopAsyncIteration:
            first = ""
        except BaseException:
            await pieces.aclose()
            raise
        if self._asked.stream:
            return StreamingResponse(self._events(first, pieces), media_type="text/event-stream")
        text = first + "".join([piece async for piece in pieces])
        return JSONResponse(self._writer.whole(text, self._answer.finish, self._usage()))

    async def _pieces(self) -> AsyncIterator[str]:
        """Text as it may be shown. The first one comes with the first token, even where it is empty."""
        locator = self._ingress._model.locator
        route = None
        if locator is not None:
            route, self._knew = await locator.route(self._request)
        metrics = self._ingress._metrics
        metrics.routed(self._knew)
        detokenizer, stop = Detokenizer(self._ingress._tokenizer), StopText(self._asked.stops)
        tokens = generate(self._ingress._replicas, self._request, route, self._ingress._config, self._answer)
        try:
            first = True
            async for ids in tokens:
                text = stop.add("".join(detokenizer.add(token) for token in ids))
                if first:
                    metrics.first_token(time.monotonic() - self._started_s)
                if text or first:
                    first = False
                    yield text
                if stop.found:
                    self._answer.finish = "stop"
                    break
            yield stop.add(detokenizer.rest()) + stop.rest()
            if stop.found:
                self._answer.finish = "stop"
            if locator is not None and self._answer.node:
                locator.served(self._request, self._answer.node)
            metrics.answered(self._answer.attempts, len(self._request.tokens), self._answer.cached)
        finally:
            await tokens.aclose()

    async def _events(self, first: str, pieces: AsyncIterator[str]) -> AsyncIterator[bytes]:
        try:
            yield self._writer.start()
            if first:
                yield self._writer.piece(first)
            async for piece in pieces:
                if piece:
                    yield self._writer.piece(piece)
            yield self._writer.end(self._answer.finish, self._usage())
            self._ingress._metrics.ended(200)
        except (Refused, Unavailable) as error:  # the headers have gone: it can only be said in the stream
            self._ingress._metrics.ended(503)
            yield self._writer.failed(str(error))
        except Exception:
            _log.exception("a stream cannot go on")
            self._ingress._metrics.ended(500)
            yield self._writer.failed("the server met an error of its own")
        finally:
            await pieces.aclose()

    def _usage(self) -> dict[str, Any]:
        answer = self._answer
        usage = openai.usage(len(self._request.tokens), len(answer.tokens), answer.cached)
        return usage | {
            "p2pcache": {
                "replica": answer.replica,
                "node": answer.node,
                "attempts": answer.attempts,
                "queue_s": round(answer.queue_s, 6),
                "routed": self._knew,
            }
        }


async def _json(request: Request, bytes_max: int) -> Any:
    """A request's body. Raises BadRequest for one that is too large or no JSON."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > bytes_max:
            raise BadRequest(f"the body is over {bytes_max:,} bytes", status=413)
    try:
        if len(body) > _PARSED_AT_ONCE_BYTES:
            return await asyncio.to_thread(json.loads, body)
        return json.loads(body)
    except (ValueError, RecursionError):
        raise BadRequest("the body is not JSON") from None


def _not_served(served: str, asked: str) -> BadRequest:
    words = f"this server serves {served!r}, not {asked!r}"
    return BadRequest(words, param="model", code="model_not_found", status=404)


# Last in this module: Serve takes a copy of `app`, and of what its methods refer to, right here.
@serve.ingress(app)
class Ingress:
    """`/v1/completions`, `/v1/chat/completions`, `/v1/models`."""

    def __init__(self, config: ServeConfig, replicas: Any):
        stay_responsive()
        self._config = config
        self._replicas = replicas.options(stream=True)
        self._describe = replicas.describe
        # One for each thread: what a tokenizer is told for one call changes it for others.
        self._tokenizer, self._encoder, self._plain = (load_tokenizer(config) for _ in range(3))
        self._prompts: Prompts | None = None
        self._encoding = ThreadPoolExecutor(1, thread_name_prefix="p2pcache-encode")
        self._client = p2pcache.connect(required=False) if config.cache else None
        self._metrics = IngressMetrics(config.model_name)
        self._learning = asyncio.Lock()
        self._model: _Model | None = None

    @app.get("/v1/models")
    async def models(self) -> Any:
        return {"object": "list", "data": [openai.model(self._config.model_name)]}

    @app.get("/v1/models/{name:path}")
    async def model(self, name: str) -> Any:
        if name != self._config.model_name:
            error = _not_served(self._config.model_name, name)
            return JSONResponse(error.body, error.status)
        return openai.model(name)

    @app.post("/v1/completions")
    async def completions(self, request: Request) -> Any:
        return await self._answered(request, chat=False)

    @app.post("/v1/chat/completions")
    async def chat_completions(self, request: Request) -> Any:
        return await self._answered(request, chat=True)

    async def _answered(self, request: Request, *, chat: bool) -> Any:
        response = await self._response(request, chat=chat)
        if not isinstance(response, StreamingResponse):  # a stream counts itself, at its end
            self._metrics.ended(response.status_code)
        return response

    async def _response(self, request: Request, *, chat: bool) -> Any:
        try:
            asked = openai.read(await _json(request, self._config.body_bytes_max), chat=chat)
            if asked.model != self._config.model_name:
                raise _not_served(self._config.model_name, asked.model)
            run = _Run(self, asked, await self._generation(asked))
            # The first piece comes before the headers go: what fails until then has a status of its own.
            return await run.response()
        except BadRequest as error:
            return JSONResponse(error.body, error.status)
        except Refused as error:
            return JSONResponse(BadRequest(str(error)).body, 400)
        except Unavailable as error:
            status = 429 if error.busy else 503
            return JSONResponse(BadRequest(str(error), status=status).body, status, {"Retry-After": "1"})
        except Exception:
            _log.exception("a request met an error of the server's own")
            return JSONResponse(BadRequest("the server met an error of its own", status=500).body, 500)

    async def _generation(self, asked: Asked) -> Generation:
        model = await self._known()
        try:
            prompt = await asyncio.get_running_loop().run_in_executor(self._encoding, self._prompt, asked)
        except TooLong as error:
            raise BadRequest(str(error), code="context_length_exceeded") from None
        except ConfigError as error:
            raise BadRequest(str(error), param="messages" if asked.chat else "prompt") from None
        count = len(prompt.tokens)
        if int(prompt.tokens.max()) >= model.vocabulary:
            raise BadRequest(f"a token id is outside the vocabulary of {model.vocabulary}", param="prompt")
        room = model.context_tokens - count
        wanted = asked.answer_tokens or max(min(self._config.answer_tokens, room), 1)
        if wanted > room:
            raise BadRequest(
                f"a prompt of {count} tokens and an answer of up to {wanted} are over the model's context of"
                f" {model.context_tokens}",
                code="context_length_exceeded",
            )
        return Generation(prompt.tokens, wanted, prompt.boundaries, asked.sampling, model.stop)

    def _prompt(self, asked: Asked) -> Prompt:
        return self._prompts.chat(asked.prompt) if asked.chat else self._prompts.completion(asked.prompt)

    async def _known(self) -> _Model:
        """What a replica says of the model; asked once, of the first that is up."""
        async with self._learning:
            if self._model is None:
                try:
                    async with asyncio.timeout(self._config.silent_s):
                        said = await self._describe.remote()
                except (TimeoutError, RayError) as error:
                    raise Unavailable(f"no replica is up yet ({type(error).__name__})") from None
                context = self._config.context_tokens or said.get("context_tokens") or _VOCABULARY_MAX
                self._prompts = Prompts(self._encoder, self._plain, context)
                locator = None
                routed = self._config.routing == "locality" and said.get("namespace") is not None
                if self._client is not None and routed:
                    # Announcing a namespace is a round trip, so not on this loop.
                    cache = await asyncio.to_thread(self._client.open, said["namespace"])
                    locator = Locator(cache, self._config)
                ends = said.get("stop", [self._tokenizer.eos_token_id])
                self._model = _Model(
                    context,
                    said.get("vocabulary", len(self._tokenizer)),
                    frozenset(e for e in ends if e is not None),
                    locator,
                )
            return self._model

    async def check_health(self) -> None:
        """Nothing here can be stuck that Serve would not see."""
