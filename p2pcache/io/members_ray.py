"""Which Ray nodes are alive, as Ray's GCS tells it: the only input to a cluster's View."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ray

LABEL = "p2pcache"
NAME_LABEL = "p2pcache-name"
HEAD_RESOURCE = "node:__internal_head__"  # which Ray gives to the head's host alone


@dataclass(frozen=True, slots=True)
class RayNode:
    """One live Ray node."""

    node_id: str  # hex
    name: str  # of the p2pcache node that belongs on it
    labels: Mapping[str, str]


def alive_nodes(labelled_only: bool) -> list[RayNode]:
    """Live nodes; with `labelled_only` those started with `--labels=p2pcache=1`.

    A node's name is its label `p2pcache-name`, or its host's name and the start of its id. Raises
    whatever Ray raises where the GCS does not answer: the caller keeps the View it has.
    """
    found = []
    for node in ray.nodes():
        labels = node.get("Labels") or {}
        if not node["Alive"] or (labelled_only and labels.get(LABEL) != "1"):
            continue
        name = labels.get(NAME_LABEL) or f"{node['NodeManagerHostname']}-{node['NodeID'][:6]}"
        found.append(RayNode(node["NodeID"], name, labels))
    return found
