"""Ray Serve applications: `serve run p2pcache.serve.app:build model=... replicas=2`, or `deployment(...)`."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from p2pcache.serve.config import ServeConfig
from p2pcache.serve.ingress import Ingress
from p2pcache.serve.models import MAKERS
from p2pcache.serve.replica import Make, Replica
from p2pcache.serve.router import LocalityRouter

_HEALTH_S = 5.0
_HEALTH_TIMEOUT_S = 30.0
# A request ends with its ingress: no proxy of Serve's tries a second one. So a single ingress stands on the
# head, without which there is no cluster, and not on a worker that may go at any time.
_ON_HEAD = {"node:__internal_head__": 0.001}


def build(settings: dict[str, Any]) -> Application:
    """For `serve run` and Serve's YAML files: NAME=VALUE as in `ServeConfig`. Raises ConfigError."""
    return deployment(**settings)


def deployment(
    engine: str | Make | None = None, config: ServeConfig | None = None, **settings: Any
) -> Application:
    """An engine with the cache behind an OpenAI-compatible ingress, as a Serve application.

    engine: `"transformers"`, or a function `(ServeConfig, Client | None) -> Engine` of yours (see
    `p2pcache.serve.engine`), which runs in every replica. settings: as in `ServeConfig`, over `config`.
    Raises ConfigError.
    """
    if isinstance(engine, str):
        settings["engine"], engine = engine, None
    base = {} if config is None else {f: getattr(config, f) for f in config.__dataclass_fields__}
    config = ServeConfig.of(base | settings)
    make = engine or MAKERS[config.engine]
    replicas = serve.deployment(Replica).options(
        name="Replica",
        num_replicas=config.replicas,
        # The queue is the replica's, where a request that waits has its pull under way. So the replica says
        # when it is full; Serve's own limits lie above.
        max_ongoing_requests=2 * (config.sequences_max + config.queue_max),
        max_queued_requests=config.replicas * config.queue_max,
        ray_actor_options={"num_cpus": config.replica_cpus, "num_gpus": config.replica_gpus},
        graceful_shutdown_timeout_s=config.drain_s,
        health_check_period_s=_HEALTH_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        request_router_config=_router(config),
    )
    ingress = serve.deployment(Ingress).options(
        name="Ingress",
        num_replicas=config.ingress_replicas,
        max_ongoing_requests=4 * config.replicas * (config.sequences_max + config.queue_max),
        ray_actor_options={"num_cpus": 0, "resources": _ON_HEAD if config.ingress_replicas == 1 else {}},
        graceful_shutdown_timeout_s=config.drain_s,
    )
    return ingress.bind(config, replicas.bind(config, make))


def _router(config: ServeConfig) -> RequestRouterConfig:
    if config.routing == "default":
        return RequestRouterConfig()
    return RequestRouterConfig(request_router_class=LocalityRouter)
