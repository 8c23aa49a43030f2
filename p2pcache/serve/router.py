"""Serve's request router by locality: what `route.py` decides, in Ray Serve's terms.

It runs in the ingress's process. The ingress has asked the directory before and hands the answer over
as the keyword argument `route`; nothing here waits for anybody but Serve's own queue lengths.
"""

from __future__ import annotations

from random import Random
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from p2pcache.serve.route import DECODE_SHARE, Backlog, Candidate, Route, rank


class LocalityRouter(RequestRouter):
    """Sends a prompt where its KV is, unless that replica has too much to do."""

    def initialize_state(self, **_: Any) -> None:
        self._backlog = Backlog()
        self._rng = Random()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        by_id = {r.replica_id.unique_id: r for r in candidate_replicas}
        candidates = [Candidate(name, r.node_id or "", self._backlog.wait(name)) for name, r in by_id.items()]
        ranks = rank(_route_of(pending_request), candidates, self._rng)
        return [[by_id[name] for name in names] for names in ranks]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult
    ) -> None:
        route, name = _route_of(pending_request), replica_id.unique_id
        if route is None:
            return
        replica = self.curr_replicas.get(replica_id)
        work = route.work(replica.node_id or "" if replica is not None else "")
        request = pending_request.metadata.internal_request_id
        self._backlog.give(name, request, work + DECODE_SHARE * route.answer_tokens)
        route.chosen = name

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._backlog.ended(replica_id.unique_id, internal_request_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._backlog.keep(r.replica_id.unique_id for r in replicas)


def _route_of(pending: PendingRequest | None) -> Route | None:
    route = pending.kwargs.get("route") if pending is not None else None
    return route if isinstance(route, Route) else None
