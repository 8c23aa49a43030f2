"""Serve's request router by locality: what `route.py` decides, in Ray Serve's terms.

It runs in the ingress's process. The ingress has asked the directory before and hands the answer over
as the keyword argument `route`; nothing here waits for anybody but Serve's own queue lengths.
"""

from __future__ import annotations

import time
from random import Random
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from p2pcache.serve.route import Backlog, Candidate, Route, rank


class LocalityRouter(RequestRouter):
    """Sends a prompt where its KV is, unless that replica has too much to do."""

    def initialize_state(self, **_: Any) -> None:
        self._backlog = Backlog()
        self._rng = Random()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        route, now_s = _route_of(pending_request), time.monotonic()
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # or Serve asks again without a pause
        if route is not None:
            self._backlog.suspect(route.avoid, now_s)
        by_id = {r.replica_id.unique_id: r for r in candidate_replicas}
        candidates = [
            Candidate(name, r.node_id or "", self._backlog.wait(name), self._backlog.recent(name, now_s))
            for name, r in by_id.items()
        ]
        ranks = rank(route, candidates, self._rng, self._backlog.suspects(now_s))
        return [[by_id[name] for name in names] for names in ranks]

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        # Serve's own hook, `on_request_routed`, comes when the replica has accepted; a frozen one never does,
        # and the ingress must know whom to leave.
        replica = await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        self._give(pending_request, replica.replica_id, replica.node_id or "")
        return replica

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult
    ) -> None:
        replica = self.curr_replicas.get(replica_id)
        self._give(pending_request, replica_id, replica.node_id or "" if replica is not None else "")

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._backlog.keep(r.replica_id.unique_id for r in replicas)

    def _give(self, pending_request: PendingRequest, replica_id: ReplicaID, node_id: str) -> None:
        route, name = _route_of(pending_request), replica_id.unique_id
        if route is not None and route.chosen != name:
            self._backlog.give(name, node_id, route, time.monotonic())


def _route_of(pending: PendingRequest | None) -> Route | None:
    route = pending.kwargs.get("route") if pending is not None else None
    return route if isinstance(route, Route) else None
