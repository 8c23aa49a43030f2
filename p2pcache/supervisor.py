"""The supervisor: the only writer of Views. It follows Ray's nodes and keeps a node actor on each member.

It polls the GCS, asks every node who it is, and hands the View to whoever follows another one. While
the GCS does not answer, the View stays as it is. What it decides is in `core/roster.py`; here are the
hands. It is detached, found by its name, and stands on the head's host, so that a worker that dies does
not take it along; restarted, it finds the node actors by their names and goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from p2pcache.actor import node_actor
from p2pcache.core.membership import Member
from p2pcache.core.roster import Roster, Told
from p2pcache.dashboard.server import Dashboard
from p2pcache.io.members_ray import RayNode, alive_nodes
from p2pcache.types import ConfigError, NodeDown

_log = logging.getLogger(__name__)
SUPERVISOR = "p2pcache-supervisor"
POLL_S = 0.5
_STOP_S = 10.0


@ray.remote(num_cpus=0, max_concurrency=8, max_restarts=-1)
class Supervisor:
    """Follows Ray's nodes and pushes Views."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        by_node: Mapping[str, Mapping[str, Any]],
        labelled_only: bool,
        dashboard: str | None = None,
    ):
        """settings: of every node. by_node: name -> settings of that node over them. dashboard:
        `address:port` of the web page, where there shall be one.
        """
        self._settings = dict(settings)
        self._by_node = {name: dict(own) for name, own in by_node.items()}
        self._labelled_only = labelled_only
        self._lock = threading.RLock()  # over all below: calls come in beside the poll
        self._roster = Roster(time.monotonic())
        self._actors: dict[str, Any] = {}  # Ray node id -> handle
        self._asking: dict[str, Any] = {}  # Ray node id -> a `describe` that has not ended
        self._leaving: set[str] = set()  # Ray node ids whose node is being drained
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="p2pcache-supervisor", daemon=True)
        self._thread.start()
        self._dashboard = _start_dashboard(self.statuses, dashboard) if dashboard else None

    # -- what others ask -------------------------------------------------------------------------

    def members(self) -> dict[str, Any]:
        """Who is in the mesh, whether all of them know it, and which nodes do not come up and why.

        `hopeless` names those that cannot come up with the settings they have.
        """
        with self._lock:
            return {
                "members": [m.to_wire() for m in self._roster.view().members.values()],
                "agreed": self._roster.agreed(),
                "errors": self._roster.absent(),
                "hopeless": self._roster.hopeless(),
            }

    def settings(self) -> dict[str, Any]:
        """What the nodes were started with."""
        return dict(self._settings)

    def statuses(self, timeout_s: float = 5.0) -> list[dict[str, Any]]:
        """The status of every node, by name; of one that does not answer, its name and why."""
        with self._lock:
            asked = {i: actor.status.remote() for i, actor in self._actors.items()}
            names = {i: name for name in self._roster.names() if (i := self._roster.id_of(name))}
            out = [{"name": name, "error": why} for name, why in self._roster.absent().items()]
        absent = {row["name"] for row in out}
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=timeout_s) if asked else None
        for node_id, reference in asked.items():
            name = names.get(node_id, node_id)
            if name in absent:
                continue
            try:
                out.append(ray.get(reference, timeout=0))
            except RayError as error:
                out.append({"name": name, "error": f"it does not answer ({type(error).__name__})"})
        return sorted(out, key=lambda s: s["name"])

    def drain(self, name: str, budget_s: float) -> dict[str, int]:
        """Have a node hand on what is hot and leave the mesh; its host stays in Ray.

        Returns how many bodies and bytes peers took over, and how many were left. Raises ConfigError
        for an unknown name, NodeDown where the node is not up.
        """
        with self._lock:
            node_id = self._known(name)
            if name not in self._roster.view().members:
                why = self._roster.absent().get(name, "it is not up yet")
                raise NodeDown(f"{name} is not in the mesh: {why}")
            actor = self._actors[node_id]
            self._leaving.add(node_id)
        try:
            handed = ray.get(actor.drain.remote(budget_s), timeout=budget_s + _STOP_S)
            with self._lock:
                self._roster.drained(node_id)
                self._push()  # readers turn to others first, then the node goes
            ray.get(actor.retire.remote(), timeout=_STOP_S)
            return handed
        except RayError as error:
            raise NodeDown(f"{name} did not end its drain: {type(error).__name__}") from None
        finally:
            with self._lock:
                self._leaving.discard(node_id)

    def revive(self, name: str) -> None:
        """Bring a drained node back. Raises ConfigError, NodeDown."""
        with self._lock:
            actor = self._actors.get(self._known(name))
        if actor is None:
            raise NodeDown(f"{name} has no node that could come back")
        ray.get(actor.revive.remote(), timeout=_STOP_S)

    def stop(self) -> None:
        """Stop every node of the mesh. The supervisor itself is then killed."""
        self._stopping.set()
        self._thread.join()
        if self._dashboard is not None:
            self._dashboard.close()
        ending = [actor.stop.remote() for actor in self._actors.values()]
        if ending:
            ray.wait(ending, num_returns=len(ending), timeout=_STOP_S)
        for actor in self._actors.values():
            ray.kill(actor)

    def _known(self, name: str) -> str:
        node_id = self._roster.id_of(name)
        if node_id is None:
            names = ", ".join(self._roster.names()) or "none"
            raise ConfigError(f"no node is called {name!r}; the hosts' nodes are: {names}")
        return node_id

    # -- the poll --------------------------------------------------------------------------------

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
        nodes = {n.node_id: n for n in alive_nodes(self._labelled_only)}
        with self._lock:
            for gone in self._roster.seen({i: n.name for i, n in nodes.items()}):
                self._forget(gone)
            for node_id in self._roster.due(time.monotonic()):
                if node_id not in self._actors:
                    self._actors[node_id] = self._ensure(nodes[node_id])
                if node_id not in self._asking:
                    self._asking[node_id] = self._actors[node_id].describe.remote()
            waiting = list(self._asking.values())
        ready = ray.wait(waiting, num_returns=len(waiting), timeout=POLL_S / 2)[0] if waiting else []
        done = set(ready)
        with self._lock:
            for node_id in [i for i, reference in self._asking.items() if reference in done]:
                self._hear(node_id, self._asking.pop(node_id))
            if self._roster.settled(time.monotonic()):
                self._push()

    def _ensure(self, node: RayNode) -> Any:
        """The node's actor. Its own settings lie over the common ones."""
        return node_actor(node, self._settings | self._by_node.get(node.name, {}))

    def _hear(self, node_id: str, reference: Any) -> None:
        """Take in what a node said of itself, or why it could not."""
        if node_id in self._leaving:
            return  # an answer from before would make it a member again
        try:
            answer = ray.get(reference)
            if answer["member"] is None:
                self._roster.drained(node_id)
            else:
                told = answer["told"]
                self._roster.heard(node_id, Member.from_wire(answer["member"]), _told_from_wire(told))
        except RayActorError as error:
            # Dead for good, unavailable, or its node gone while we asked. Asking again finds out.
            why, hopeless = _reason(str(error))
            self._roster.failed(node_id, why, hopeless=hopeless, now_s=time.monotonic())
            if "ActorUnavailable" not in type(error).__name__:
                self._actors.pop(node_id, None)

    def _forget(self, node_id: str) -> None:
        self._actors.pop(node_id, None)
        self._asking.pop(node_id, None)

    def _push(self) -> None:
        """Hand the View to every member that follows another one."""
        members = [m.to_wire() for m in self._roster.view().members.values()]
        view_id, absent = self._roster.told()
        for node_id in self._roster.behind():
            if node_id in self._actors:
                self._actors[node_id].apply_view.remote(members, [view_id, [list(pair) for pair in absent]])


def _start_dashboard(read: Callable[[], list[dict[str, Any]]], address: str) -> Dashboard | None:
    host, _, port = address.rpartition(":")
    try:
        return Dashboard(read, host.strip("[]"), int(port)).start()
    except ConfigError as error:  # its port is taken, say: no reason to go without
        _log.warning("there is no dashboard at %s: %s", address, error)
        return None


def _told_from_wire(raw: list[Any]) -> Told:
    return raw[0], tuple((name, why) for name, why in raw[1])


def _reason(text: str) -> tuple[str, bool]:
    """Why an actor did not come up, in its last words, and whether its settings are to blame.

    The host may change (memory, a disk), the settings do not; nor does a host get our code by itself.
    """
    last = text.strip().splitlines()[-1] if text.strip() else ""
    _, refused, words = last.rpartition("ConfigError: ")
    if "No module named 'p2pcache" in last:
        return f"p2pcache is not installed on that host ({words[:200]})", True
    return words[:500], bool(refused) or "No module named" in last
