"""The supervisor: the only writer of Views. It follows Ray's nodes and keeps a node actor on each member.

It polls the GCS, asks every node who it is, and hands the View to whoever follows another one. While
the GCS does not answer, the View stays as it is, and nodes are asked all the same. What it decides is in
`core/roster.py`; here are the hands. It is detached, found by its name, and stands on the head's host,
so that a worker that dies does not take it along; restarted, it finds the node actors by their names and
goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from p2pcache.actor import existing_actors, node_actor
from p2pcache.core.membership import Member
from p2pcache.core.roster import Roster, Told
from p2pcache.dashboard.server import Dashboard
from p2pcache.io.members_ray import RayNode, alive_nodes
from p2pcache.types import ConfigError, NodeDown

_log = logging.getLogger(__name__)
SUPERVISOR = "p2pcache-supervisor"
POLL_S = 0.5
_STOP_S = 10.0
_START_S = 30.0
_TOLD_S = 2.0


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
        self._roster = Roster()
        self._actors: dict[str, Any] = {}  # Ray node id -> handle
        self._asking: dict[str, Any] = {}  # Ray node id -> a `describe` that has not ended
        self._telling: dict[str, Any] = {}  # Ray node id -> the last View that was handed to it
        self._changing: set[str] = set()  # Ray node ids whose node is being drained or revived
        self._nodes: dict[str, RayNode] = {}  # as the GCS named them last
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=follow, name=f"p2pcache-{follow.__name__}", daemon=True)
            for follow in (self._follow_ray, self._follow_nodes)
        ]
        for thread in self._threads:
            thread.start()
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

    def settings(self) -> tuple[dict[str, Any], dict[str, dict[str, Any]], bool]:
        """What the nodes were started with: common settings, those of single nodes, labelled only."""
        return dict(self._settings), dict(self._by_node), self._labelled_only

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
        for an unknown name, NodeDown where the node is not up, or on its way out or in.
        """
        with self._lock:
            node_id, actor = self._to_change(name)
            if name not in self._roster.view().members:
                why = self._roster.absent().get(name, "it is not up yet")
                raise NodeDown(f"{name} is not in the mesh: {why}")
            self._changing.add(node_id)
        try:
            handed = ray.get(actor.drain.remote(budget_s), timeout=budget_s + _STOP_S)
            with self._lock:
                self._roster.drained(node_id)
                self._asking.pop(node_id, None)  # an answer from before would make it a member again
                told = self._push()
            if told:  # readers turn to others first, then the node goes
                ray.wait(told, num_returns=len(told), timeout=_TOLD_S)
            ray.get(actor.retire.remote(), timeout=_STOP_S)
            return handed
        except RayError as error:
            actor.stay.remote()
            raise NodeDown(f"{name} did not end its drain: {type(error).__name__}") from None
        finally:
            with self._lock:
                self._changing.discard(node_id)

    def revive(self, name: str) -> None:
        """Bring a drained node back. Raises ConfigError, NodeDown."""
        with self._lock:
            node_id, actor = self._to_change(name)
            self._changing.add(node_id)
        try:
            ray.get(actor.revive.remote(), timeout=_START_S)
        except RayTaskError as error:
            raise NodeDown(f"{name} does not come back: {error.cause}") from None
        except RayError as error:
            raise NodeDown(f"{name} does not come back: {type(error).__name__}") from None
        finally:
            with self._lock:
                self._changing.discard(node_id)

    def stop(self) -> None:
        """Stop every node of the mesh. The supervisor itself is then killed."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        if self._dashboard is not None:
            self._dashboard.close()
        actors = existing_actors() | self._actors  # also one that this supervisor keeps out of the mesh
        ending = [actor.stop.remote() for actor in actors.values()]
        if ending:
            ray.wait(ending, num_returns=len(ending), timeout=_STOP_S)
        for actor in actors.values():
            ray.kill(actor)

    def _to_change(self, name: str) -> tuple[str, Any]:
        """A node that may be drained or revived now: its host's id and its actor."""
        if not self._roster.settled(time.monotonic()):
            raise NodeDown("the supervisor has just started and does not know all nodes yet; try again")
        node_id = self._known(name)
        if node_id in self._changing:
            raise NodeDown(f"{name} is on its way out or in already")
        if node_id not in self._actors:
            raise NodeDown(f"{name} is not in the mesh: {self._roster.absent().get(name, 'not up yet')}")
        return node_id, self._actors[node_id]

    def _known(self, name: str) -> str:
        node_id = self._roster.id_of(name)
        if node_id is None:
            names = ", ".join(self._roster.names()) or "none"
            raise ConfigError(f"no node is called {name!r}; the hosts' nodes are: {names}")
        return node_id

    # -- what is followed ------------------------------------------------------------------------

    def _follow_ray(self) -> None:
        """All that asks the GCS, which may hang: who is alive, and the actors of those that have none."""
        while not self._stopping.is_set():
            try:
                nodes = {n.node_id: n for n in alive_nodes(self._labelled_only)}
                with self._lock:
                    new = nodes.keys() - self._nodes.keys()
                there = existing_actors() if new else {}
                with self._lock:
                    self._nodes = nodes
                    gone = self._roster.seen(
                        {i: n.name for i, n in nodes.items()}, time.monotonic(), there.keys()
                    )
                    ended = [actor for node_id in gone if (actor := self._forget(node_id)) is not None]
                    due = self._roster.due(time.monotonic())
                    missing = [nodes[i] for i in due if i in nodes and i not in self._actors]
                for actor in ended:  # or Ray would wait for its host for ever, to restart it there
                    ray.kill(actor)
                for node in missing:
                    actor = node_actor(node, self._settings | self._by_node.get(node.name, {}))
                    with self._lock:
                        self._actors[node.node_id] = actor
            except RayError as error:  # the GCS does not answer: the View freezes
                _log.warning("membership is not followed for now: %s", error)
            except Exception:
                _log.exception("the supervisor met an error of its own; it goes on")
            self._stopping.wait(POLL_S)

    def _follow_nodes(self) -> None:
        """Asks every node who it is, twice a second: to it that is the word that it is no outcast."""
        while not self._stopping.is_set():
            started_s = time.monotonic()
            try:
                self._ask_all()
            except Exception:
                _log.exception("the supervisor met an error of its own; it goes on")
            self._stopping.wait(max(POLL_S - (time.monotonic() - started_s), 0.05))

    def _ask_all(self) -> None:
        with self._lock:
            for node_id in self._roster.due(time.monotonic()):
                if node_id in self._actors and node_id not in self._asking:
                    self._asking[node_id] = self._actors[node_id].describe.remote()
            waiting = list(self._asking.values())
        ready = ray.wait(waiting, num_returns=len(waiting), timeout=POLL_S / 2)[0] if waiting else []
        done = set(ready)
        with self._lock:
            for node_id in [i for i, reference in self._asking.items() if reference in done]:
                self._hear(node_id, self._asking.pop(node_id))
            if self._roster.settled(time.monotonic()):
                self._push()

    def _hear(self, node_id: str, reference: Any) -> None:
        """Take in what a node said of itself, or why it could not."""
        if node_id in self._changing:
            return  # an answer from before would make it a member again
        try:
            answer = ray.get(reference)
        except ActorUnavailableError:
            return  # whether its host is alive is Ray's to say, and Ray restarts an actor that died
        except RayError as error:
            # Dead for good, or never up. Asking again, with a new handle, finds out.
            why, hopeless = _reason(str(error))
            self._roster.failed(node_id, why, hopeless=hopeless, now_s=time.monotonic())
            self._actors.pop(node_id, None)
            return
        if answer["member"] is None:
            self._roster.drained(node_id)
        else:
            told = answer["told"]
            self._roster.heard(node_id, Member.from_wire(answer["member"]), _told_from_wire(told))

    def _forget(self, node_id: str) -> Any:
        """Drop what is known of a host that is gone; returns its node's actor, if there was one."""
        for table in (self._asking, self._telling):
            table.pop(node_id, None)
        return self._actors.pop(node_id, None)

    def _push(self) -> list[Any]:
        """Hand the View to every member that follows another one. Returns what says that they have it."""
        members = [m.to_wire() for m in self._roster.view().members.values()]
        view_id, absent = self._roster.told()
        told = [view_id, [list(pair) for pair in absent]]
        for node_id in self._roster.behind():
            before = self._telling.get(node_id)
            # One that hangs is told once, not twice a second: all of it would run when it wakes.
            if before is not None and not ray.wait([before], timeout=0)[0]:
                continue
            if node_id in self._actors:
                self._telling[node_id] = self._actors[node_id].apply_view.remote(members, told)
        return list(self._telling.values())


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
