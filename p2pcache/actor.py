"""The Ray actor of one host: a `NodeRuntime` and the calls of the supervisor. Lifecycle, no policy.

Ray is for lifecycle and membership; nothing hot goes through it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from p2pcache.config import NodeConfig
from p2pcache.core.membership import Member
from p2pcache.io.members_ray import RayNode
from p2pcache.metrics_ray import RayExporter
from p2pcache.runtime import NodeRuntime, runtime_folder, stay_responsive
from p2pcache.types import NodeDown

RAY_NAMESPACE = "p2pcache"
_QUIET_S = 2.0


def node_actor_name(node_id: str) -> str:
    return f"p2pcache-node-{node_id}"


def node_actor(node: RayNode, settings: Mapping[str, Any]) -> Any:
    """The handle of a host's node actor, which is made where there is none."""
    return NodeActor.options(  # type: ignore[attr-defined]
        name=node_actor_name(node.node_id),
        namespace=RAY_NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False),
    ).remote({**settings, "name": node.name}, node.node_id)


def existing_actors() -> dict[str, Any]:
    """Ray node id -> handle, of all node actors that there are."""
    found = {}
    prefix = node_actor_name("")
    for known in ray.util.list_named_actors(all_namespaces=True):
        name = known["name"]
        if known["namespace"] == RAY_NAMESPACE and name.startswith(prefix):
            with suppress(ValueError):  # gone since
                found[name.removeprefix(prefix)] = ray.get_actor(name, namespace=RAY_NAMESPACE)
    return found


@ray.remote(num_cpus=0, max_concurrency=4)
class NodeActor:
    """Holds one `NodeRuntime`. A restart by Ray is a new incarnation with an empty host tier.

    Drained, it stays as an actor without a runtime, so that whoever supervises next knows that this host
    has left on purpose. A file in the runtime folder says so to a restarted actor; it is of this Ray node.
    """

    def __init__(self, settings: Mapping[str, Any], node_id: str):
        stay_responsive()
        settings = dict(settings)
        if settings.get("host") == "node-ip":
            settings["host"] = ray.util.get_node_ip_address()
        self._config = NodeConfig.of(settings)
        self._lock = threading.Lock()  # over starting and stopping the runtime
        self._told: list[Any] | None = None
        self._drained = runtime_folder(self._config) / f"{node_id}.drained"
        self._runtime: NodeRuntime | None = None
        if not self._drained.exists():
            self._runtime = NodeRuntime.start(self._config)
        self._stopping = threading.Event()
        threading.Thread(
            target=RayExporter().run, args=(self.status, self._stopping), name="p2pcache-metrics", daemon=True
        ).start()

    def describe(self) -> dict[str, Any]:
        """This node as a member and what it was told last; no member where it has been drained."""
        runtime = self._runtime
        if runtime is None:
            return {"member": None, "told": None}
        runtime.contact()
        follows = runtime.node.view.view_id
        told = self._told if self._told is not None and self._told[0] == follows else [follows, []]
        return {"member": runtime.member.to_wire(), "told": told}

    def socket_path(self) -> str | None:
        return self._runtime.socket_path if self._runtime is not None else None

    def apply_view(self, members: list[dict[str, Any]], told: list[Any]) -> None:
        """Follow this View. told: its id, and the absent hosts with the reason, as `(name, why)`."""
        runtime = self._runtime
        if runtime is not None:
            self._told = told
            runtime.apply_view([Member.from_wire(m) for m in members], dict(told[1]))

    def status(self) -> dict[str, Any]:
        if self._runtime is None:
            return {"name": self._config.name, "error": "drained"}
        return self._runtime.status()

    def drain(self, budget_s: float) -> dict[str, int]:
        """Hand on what is hot. The node stays a member until the supervisor retires it."""
        runtime = self._runtime
        return runtime.drain(budget_s) if runtime is not None else {"bodies": 0, "bytes": 0, "left": 0}

    def stay(self) -> None:
        """The drain has been called off."""
        runtime = self._runtime
        if runtime is not None:
            runtime.stay()

    def retire(self) -> None:
        """The mesh has gone on without this node: let its last readers end, then stop it."""
        with self._lock:
            self._drained.touch()
            runtime, self._runtime = self._runtime, None
            if runtime is not None:
                try:
                    runtime.quiet(_QUIET_S)
                finally:
                    runtime.close()

    def revive(self) -> None:
        """Come back after a drain, as a new incarnation. Raises ConfigError where it cannot."""
        with self._lock:
            if self._runtime is None:
                self._told = None
                self._runtime = NodeRuntime.start(self._config)
            self._drained.unlink(missing_ok=True)

    def stop(self) -> None:
        """Withdraw from the machine: sockets, memory, files. The actor itself is then killed."""
        self._stopping.set()
        with self._lock:
            self._drained.unlink(missing_ok=True)
            runtime, self._runtime = self._runtime, None
            if runtime is not None:
                runtime.close()


def socket_on_this_node(timeout_s: float = 10.0) -> str | None:
    """The engine socket of this Ray node's actor; None where there is no such actor. Raises NodeDown."""
    node_id = ray.get_runtime_context().get_node_id()
    try:
        actor = ray.get_actor(node_actor_name(node_id), namespace=RAY_NAMESPACE)
        path = ray.get(actor.socket_path.remote(), timeout=timeout_s)
    except ValueError:
        return None
    except (RayActorError, GetTimeoutError) as error:
        raise NodeDown(f"this host's node does not answer: {type(error).__name__}") from None
    if path is None:
        raise NodeDown("this host's node has been drained")
    return path
