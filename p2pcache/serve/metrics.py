"""What a served model counts, on Ray's own metrics endpoint beside the nodes' (see `p2pcache.metrics`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.util.metrics import Counter, Gauge, Histogram

TTFT_BOUNDS_S = [0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0]


class IngressMetrics:
    """Of one ingress. Cheap enough to be told of every request."""

    def __init__(self, model: str):
        self._model = {"model": model}
        self._requests = Counter(
            "p2pcache_serve_requests_total", "Requests by outcome, an HTTP status", ("model", "status")
        )
        self._attempts = Counter(
            "p2pcache_serve_failovers_total", "Answers that another replica had to go on with", ("model",)
        )
        self._routes = Counter(
            "p2pcache_serve_routes_total",
            "Requests by what the router knew: located, remembered (the directory was late), late, unasked",
            ("model", "knew"),
        )
        self._tokens = Counter(
            "p2pcache_serve_prompt_tokens_total",
            "Prompt tokens by where their KV came from: local, nvme, peer, computed",
            ("model", "source"),
        )
        self._ttft = Histogram(
            "p2pcache_serve_ttft_seconds", "Time to the first token", TTFT_BOUNDS_S, ("model",)
        )

    def routed(self, knew: str) -> None:
        self._routes.inc(1, self._model | {"knew": knew})

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds, self._model)

    def ended(self, status: int) -> None:
        """A request is over, for better or worse."""
        self._requests.inc(1, self._model | {"status": str(status)})

    def answered(self, attempts: int, prompt_tokens: int, cached: Mapping[str, int]) -> None:
        """An answer is whole. cached: prompt tokens by source; the rest was computed."""
        if attempts > 1:
            self._attempts.inc(attempts - 1, self._model)
        computed = prompt_tokens - sum(cached.values())
        for source, tokens in (*cached.items(), ("computed", computed)):
            if tokens > 0:
                self._tokens.inc(tokens, self._model | {"source": source})


class ReplicaMetrics:
    """Of one replica: what its batcher and its engine say, set now and then."""

    _GAUGES = {
        "waiting": "Requests that wait for memory or their turn",
        "running": "Sequences that run",
        "bytes": "KV bytes of the sequences that run, at their longest",
        "peak_bytes": "The most that has been so far",
        "target_bytes": "What it may be at most",
    }

    def __init__(self, model: str):
        self._model = {"model": model}
        self._gauges = {
            name: Gauge(f"p2pcache_serve_batch_{name}", said, ("model",))
            for name, said in self._GAUGES.items()
        }
        self._approximate = Gauge(
            "p2pcache_serve_approximate_share",
            "Share of prompt tokens whose KV attended to, or is, KV computed at another position",
            ("model",),
        )

    def update(self, batcher: Mapping[str, Any], engine: Mapping[str, Any]) -> None:
        for name, gauge in self._gauges.items():
            gauge.set(batcher[name], self._model)
        total = engine.get("prompt_tokens", 0)
        if total:
            self._approximate.set(engine["approximate_tokens"] / total, self._model)
