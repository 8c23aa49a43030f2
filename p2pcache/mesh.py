"""A mesh on Ray as the process that started or joined it sees it: start, find, wait, drain, stop."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from p2pcache.actor import RAY_NAMESPACE
from p2pcache.config import NodeConfig
from p2pcache.core.membership import Member
from p2pcache.io.members_ray import HEAD_RESOURCE, NAME_LABEL
from p2pcache.supervisor import POLL_S, SUPERVISOR, Supervisor
from p2pcache.types import ConfigError, NodeDown, P2PCacheError

_ANSWER_S = 60.0


class Mesh:
    """The mesh of one Ray cluster. Needs `ray.init` before."""

    def __init__(self, supervisor: Any, made_here: bool = False):
        """made_here: whether this process has started it, rather than found it."""
        self._supervisor = supervisor
        self.made_here = made_here

    @staticmethod
    def ensure(
        settings: Mapping[str, Any] | None = None,
        *,
        by_node: Mapping[str, Mapping[str, Any]] | None = None,
        labelled_only: bool = True,
        dashboard: str | None = None,
    ) -> Mesh:
        """Start the mesh of this Ray cluster, or find the one that runs. Raises ConfigError.

        labelled_only: only nodes started with `--labels=p2pcache=1` become members. dashboard:
        `address:port` of the mesh's web page, on the supervisor's host.
        """
        settings = dict(settings or {})
        if any("name" in own for own in (settings, *(by_node or {}).values())):
            raise ConfigError(f"on Ray a node has its host's name, or that of --labels={NAME_LABEL}=NAME")
        for own in ({}, *(by_node or {}).values()):  # a misspelt setting fails here, in front of the user
            NodeConfig.of({k: v for k, v in {**settings, **own}.items() if (k, v) != ("host", "node-ip")})
        with suppress(NodeDown):
            return Mesh.find()._with(settings, by_node or {}, labelled_only)
        supervisor = Supervisor.options(  # type: ignore[attr-defined]
            name=SUPERVISOR,
            namespace=RAY_NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            # A worker that dies must not take the supervisor along. (A soft node affinity is not kept.)
            resources={HEAD_RESOURCE: 0.001},
        ).remote(settings, by_node or {}, labelled_only, dashboard)
        return Mesh(supervisor, made_here=True)

    def _with(
        self, settings: Mapping[str, Any], by_node: Mapping[str, Mapping[str, Any]], labelled_only: bool
    ) -> Mesh:
        """This running mesh, provided that it runs with these settings."""
        running, own, labelled = self._ask("settings")
        if labelled != labelled_only:
            which = "labelled nodes only" if labelled else "all nodes"
            raise ConfigError(f"the mesh already runs on {which}; `p2pcache stop` it first")
        if by_node and {n: dict(s) for n, s in by_node.items()} != own:
            raise ConfigError("the mesh already runs with other settings of single nodes")
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

    def wait_for(self, nodes: int, timeout_s: float = _ANSWER_S) -> list[Member]:
        """Wait until so many nodes are members and all of them agree on it. Raises NodeDown."""
        until_s = time.monotonic() + timeout_s
        state: dict[str, Any] = {"members": [], "errors": {}, "hopeless": []}
        while time.monotonic() < until_s:
            with suppress(RayActorError):  # it is on its way up, or up again
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
        return self._ask("members")

    def node_statuses(self) -> list[dict[str, Any]]:
        """What every node says of itself; of one that does not answer, its name and why."""
        return self._ask("statuses")

    def drain(self, name: str, budget_s: float = 30.0) -> dict[str, int]:
        """Have a node hand its hottest bodies to its peers and leave the mesh.

        Returns how many `bodies` and `bytes` went over and how many were `left`. Engines on its host
        compute everything themselves from then on. Raises ConfigError, NodeDown.
        """
        return self._ask("drain", name, budget_s, timeout_s=budget_s + _ANSWER_S)

    def revive(self, name: str) -> None:
        """Bring a drained node back. Raises ConfigError, NodeDown."""
        self._ask("revive", name)

    def stop(self) -> None:
        """Stop all nodes and the supervisor."""
        self._ask("stop")
        ray.kill(self._supervisor)

    def _ask(self, what: str, *arguments: Any, timeout_s: float = _ANSWER_S) -> Any:
        try:
            return ray.get(getattr(self._supervisor, what).remote(*arguments), timeout=timeout_s)
        except RayTaskError as error:
            if isinstance(error.cause, P2PCacheError):
                raise error.cause from None
            raise
        except GetTimeoutError:
            raise NodeDown(f"the supervisor did not answer within {timeout_s:.0f} s") from None
        except RayActorError as error:
            raise NodeDown(f"the supervisor does not answer ({type(error).__name__}); try again") from None
