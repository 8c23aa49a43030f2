"""The Ray side: one actor a Ray node runs its p2pcache node, one supervisor keeps the mesh whole.

Ray is for lifecycle and membership; nothing hot goes through it. The supervisor is the only writer
of Views: it polls the GCS, keeps exactly one node actor on every member node, and pushes the View
to whoever does not have it yet. While the GCS does not answer, the View stays as it is.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from p2pcache.config import NodeConfig
from p2pcache.core.membership import Member, View
from p2pcache.io.members_ray import RayNode, alive_nodes
from p2pcache.types import ConfigError, NodeDown

_log = logging.getLogger(__name__)
RAY_NAMESPACE = "p2pcache"
SUPERVISOR = "p2pcache-supervisor"
POLL_S = 0.5
_START_TIMEOUT_S = 60.0
_HOPELESS_RETRY_S = 10.0


def node_actor_name(node_id: str) -> str:
    return f"p2pcache-node-{node_id}"


@ray.remote(num_cpus=0)
class NodeActor:
    """Holds one `NodeRuntime`. A restart by Ray is a new incarnation with an empty host tier."""

    def __init__(self, settings: Mapping[str, Any]):
        from p2pcache.runtime import NodeRuntime

        settings = dict(settings)
        if settings.get("host") == "node-ip":
            settings["host"] = ray.util.get_node_ip_address()
        self._runtime = NodeRuntime.start(NodeConfig.of(settings))

    def describe(self) -> tuple[dict[str, Any], bytes]:
        """This node as a member, and the id of the View it follows."""
        return self._runtime.member.to_wire(), self._runtime.node.view.view_id

    def socket_path(self) -> str:
        return self._runtime.socket_path

    def apply_view(self, members: list[dict[str, Any]]) -> None:
        self._runtime.apply_view([Member.from_wire(m) for m in members])

    def status(self) -> dict[str, Any]:
        return self._runtime.status()

    def stop(self) -> None:
        """Withdraw from the machine: sockets, memory, files. The actor itself is then killed."""
        self._runtime.close()


@ray.remote(num_cpus=0, max_concurrency=4, max_restarts=-1)
class Supervisor:
    """Follows Ray's nodes and pushes Views. Detached; found by its name."""

    def __init__(
        self, settings: Mapping[str, Any], by_node: Mapping[str, Mapping[str, Any]], labelled_only: bool
    ):
        """settings: of every node. by_node: name -> settings of that node over them."""
        self._settings = dict(settings)
        self._by_node = {name: dict(own) for name, own in by_node.items()}
        self._labelled_only = labelled_only
        self._actors: dict[str, Any] = {}  # Ray node id -> handle
        self._asking: dict[str, Any] = {}  # Ray node id -> a `describe` that has not ended
        self._members: dict[str, Member] = {}  # Ray node id -> as it last described itself
        self._following: dict[str, bytes] = {}  # Ray node id -> the view_id it last named
        self._errors: dict[str, str] = {}  # Ray node id -> why its node is not up
        self._hopeless: dict[str, float] = {}  # Ray node id -> when to try again in spite of it
        self._names: dict[str, str] = {}  # Ray node id -> name of the node that belongs there
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="p2pcache-supervisor", daemon=True)
        self._thread.start()

    def members(self) -> dict[str, Any]:
        """Who is in the mesh, whether all of them know it, and which nodes do not come up and why.

        `hopeless` names those that cannot come up with the settings they have.
        """
        view_id = View.of(self._members.values()).view_id
        agreed = bool(self._members) and all(self._following.get(n) == view_id for n in self._members)
        return {
            "members": [m.to_wire() for m in self._members.values()],
            "agreed": agreed,
            "errors": {self._names.get(i, i): why for i, why in self._errors.items()},
            "hopeless": [self._names.get(i, i) for i in self._hopeless],
        }

    def settings(self) -> dict[str, Any]:
        """What the nodes were started with."""
        return dict(self._settings)

    def statuses(self, timeout_s: float = 5.0) -> list[dict[str, Any]]:
        """The status of every node, by name; of one that does not answer, its name and why."""
        asked = {node_id: actor.status.remote() for node_id, actor in list(self._actors.items())}
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=timeout_s) if asked else None
        out = []
        for node_id, reference in asked.items():
            member = self._members.get(node_id)
            name = member.name if member is not None else node_id
            try:
                out.append(ray.get(reference, timeout=0))
            except RayError as error:
                out.append({"name": name, "error": self._errors.get(node_id) or type(error).__name__})
        return sorted(out, key=lambda s: s["name"])

    def stop(self) -> None:
        """Stop every node of the mesh. The supervisor itself is then killed."""
        self._stopping.set()
        self._thread.join()
        ending = [actor.stop.remote() for actor in self._actors.values()]
        if ending:
            ray.wait(ending, num_returns=len(ending), timeout=10)
        for actor in self._actors.values():
            ray.kill(actor)

    def _run(self) -> None:
        while not self._stopping.is_set():
            started_s = time.monotonic()
            try:
                self._tick()
            except RayError as error:  # the GCS does not answer: the View freezes
                _log.warning("membership is not followed for now: %s", error)
            except Exception:
                _log.exception("the supervisor met an error of its own; it goes on")
            self._stopping.wait(max(POLL_S - (time.monotonic() - started_s), 0.05))

    def _tick(self) -> None:
        started_s = time.monotonic()
        nodes = {n.node_id: n for n in alive_nodes(self._labelled_only)}
        for gone in [i for i in self._actors if i not in nodes]:
            self._forget(gone)
        for node in nodes.values():
            self._names[node.node_id] = node.name
            if self._hopeless.get(node.node_id, 0.0) > started_s:
                continue
            if node.node_id not in self._actors:
                self._actors[node.node_id] = self._ensure(node)
            if node.node_id not in self._asking:
                self._asking[node.node_id] = self._actors[node.node_id].describe.remote()
        ready, _ = (
            ray.wait(
                list(self._asking.values()),
                num_returns=len(self._asking),
                timeout=POLL_S / 2,
                fetch_local=True,
            )
            if self._asking
            else ([], [])
        )
        done = set(ready)
        for node_id in [i for i, ref in self._asking.items() if ref in done]:
            self._hear(node_id, self._asking.pop(node_id))
        self._push()

    def _ensure(self, node: RayNode) -> Any:
        """The node's actor, made where there is none. Its own settings lie over the common ones."""
        settings = {"name": node.name} | self._settings | self._by_node.get(node.name, {})
        return NodeActor.options(  # type: ignore[attr-defined]
            name=node_actor_name(node.node_id),
            namespace=RAY_NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False),
        ).remote(settings)

    def _hear(self, node_id: str, reference: Any) -> None:
        """Take in what a node said of itself, or why it could not."""
        try:
            raw, self._following[node_id] = ray.get(reference)
            self._members[node_id] = Member.from_wire(raw)
            self._errors.pop(node_id, None)
            self._hopeless.pop(node_id, None)
        except RayActorError as error:
            # Dead for good, unavailable, or its node gone while we asked. Asking again finds out.
            self._members.pop(node_id, None)
            self._following.pop(node_id, None)
            _, refused, words = str(error).strip().splitlines()[-1].rpartition("ConfigError: ")
            self._errors[node_id] = words[:500]
            if refused:  # the host may change (memory, a disk), the settings do not
                self._hopeless[node_id] = time.monotonic() + _HOPELESS_RETRY_S
            if "ActorUnavailable" not in type(error).__name__:
                self._forget(node_id, keep_error=True)

    def _forget(self, node_id: str, keep_error: bool = False) -> None:
        for table in (self._actors, self._asking, self._members, self._following):
            table.pop(node_id, None)
        if not keep_error:
            for table in (self._errors, self._hopeless, self._names):
                table.pop(node_id, None)

    def _push(self) -> None:
        """Hand the View to every member that follows another one."""
        view = View.of(self._members.values())
        members = [m.to_wire() for m in view.members.values()]
        for node_id in self._members:
            if self._following.get(node_id) != view.view_id:
                self._actors[node_id].apply_view.remote(members)


class Mesh:
    """A running mesh, as the process that started or joined it sees it. Needs `ray.init` before."""

    def __init__(self, supervisor: Any):
        self._supervisor = supervisor

    @staticmethod
    def ensure(
        settings: Mapping[str, Any] | None = None,
        *,
        by_node: Mapping[str, Mapping[str, Any]] | None = None,
        labelled_only: bool = True,
    ) -> Mesh:
        """Start the mesh of this Ray cluster, or find the one that runs. Raises ConfigError.

        labelled_only: only nodes started with `--labels=p2pcache=1` become members.
        """
        settings = dict(settings or {})
        for own in ({}, *(by_node or {}).values()):  # a misspelt setting fails here, in front of the user
            NodeConfig.of({k: v for k, v in {**settings, **own}.items() if (k, v) != ("host", "node-ip")})
        with suppress(NodeDown):
            return Mesh.find()._with(settings)
        supervisor = Supervisor.options(  # type: ignore[attr-defined]
            name=SUPERVISOR, namespace=RAY_NAMESPACE, lifetime="detached", get_if_exists=True
        ).remote(settings, by_node or {}, labelled_only)
        return Mesh(supervisor)

    def _with(self, settings: Mapping[str, Any]) -> Mesh:
        """This running mesh, provided that it runs with these settings."""
        running = ray.get(self._supervisor.settings.remote(), timeout=_START_TIMEOUT_S)
        other = {k: running.get(k, "the default") for k, v in settings.items() if running.get(k) != v}
        if other:
            words = ", ".join(f"{name}: {value}" for name, value in other.items())
            raise ConfigError(
                f"the mesh already runs with other settings ({words}); `p2pcache stop` it first"
            )
        return self

    @staticmethod
    def find() -> Mesh:
        """The mesh of this Ray cluster. Raises NodeDown where none was started."""
        try:
            return Mesh(ray.get_actor(SUPERVISOR, namespace=RAY_NAMESPACE))
        except ValueError:
            raise NodeDown("no mesh runs in this Ray cluster: start it with `p2pcache start`") from None

    def wait_for(self, nodes: int, timeout_s: float = _START_TIMEOUT_S) -> list[Member]:
        """Wait until so many nodes are members and all of them agree on it. Raises NodeDown."""
        until_s = time.monotonic() + timeout_s
        state: dict[str, Any] = {"members": [], "errors": {}, "hopeless": []}
        while time.monotonic() < until_s:
            try:
                state = ray.get(self._supervisor.members.remote(), timeout=timeout_s)
            except GetTimeoutError:
                break
            if len(state["members"]) >= nodes and state["agreed"]:
                return [Member.from_wire(m) for m in state["members"]]
            if state["hopeless"] and len(state["members"]) + len(state["hopeless"]) >= nodes:
                break
            time.sleep(POLL_S / 2)  # the supervisor itself polls; there is no event to wait for
        why = "; ".join(f"{n}: {e}" for n, e in state["errors"].items()) or "no error was reported"
        raise NodeDown(f"{len(state['members'])} of {nodes} nodes are up ({why})")

    def status(self) -> dict[str, Any]:
        """Members and errors, as the supervisor sees them."""
        return ray.get(self._supervisor.members.remote(), timeout=_START_TIMEOUT_S)

    def node_statuses(self) -> list[dict[str, Any]]:
        """What every node says of itself; of one that does not answer, its name and why."""
        return ray.get(self._supervisor.statuses.remote(), timeout=_START_TIMEOUT_S)

    def stop(self) -> None:
        """Stop all nodes and the supervisor."""
        ray.get(self._supervisor.stop.remote(), timeout=_START_TIMEOUT_S)
        ray.kill(self._supervisor)


def socket_on_this_node(timeout_s: float = 10.0) -> str | None:
    """The engine socket of this Ray node's actor; None where there is no such actor."""
    node_id = ray.get_runtime_context().get_node_id()
    try:
        actor = ray.get_actor(node_actor_name(node_id), namespace=RAY_NAMESPACE)
        return ray.get(actor.socket_path.remote(), timeout=timeout_s)
    except ValueError:
        return None
    except (RayActorError, GetTimeoutError) as error:
        raise NodeDown(f"this host's node does not answer: {type(error).__name__}") from None
