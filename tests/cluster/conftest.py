"""One Ray cluster of three nodes on this machine, bound to loopback, for all cluster tests.

It stands in a network of its own where this process may make one: Serve's replicas listen on all
interfaces and have no setting for it, so without one the tests of Serve are skipped.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

import pytest

from cluster import _lab_host as inside
from cluster import _lab_machine as machine
from cluster import private_network

NODES = ("a", "b", "c")
IMAGE = Path(__file__).parents[2] / ".venv"

# Ray's name for "this cluster stays on this machine"; it must be set before Ray is imported.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
for name, value in (("initial_delay", 1000), ("period", 500), ("timeout", 1000)):
    os.environ.setdefault(f"RAY_health_check_{name}_ms", str(value))
os.environ.setdefault("RAY_health_check_failure_threshold", "3")


@pytest.fixture(scope="session")
def image() -> Path | None:
    """The virtual environment that hosts of the lab have; None where there can be no lab.

    What it takes to build the project on them is fetched here, before this process leaves the network.
    """
    if machine.missing() or not IMAGE.is_dir():
        return None
    inside.build_wheels(IMAGE)
    return IMAGE


_standing = contextlib.ExitStack()
"""What stands for all tests of this folder, and goes with the last of them: others need the network."""


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        _standing.close()


@pytest.fixture(scope="session")
def network(image: Path | None) -> bool:
    """Whether this process is now in a network of its own."""
    try:
        _standing.enter_context(private_network.entered())
    except OSError:
        return False
    return True


@pytest.fixture(scope="session")
def cluster(network: bool) -> object:
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    _standing.callback(cluster.shutdown)
    _standing.callback(ray.shutdown)
    for name in NODES:
        add_node(cluster, name)
    ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
    cluster.wait_for_nodes()
    return cluster


def add_node(cluster: object, name: str) -> object:
    labels = {"p2pcache": "1", "p2pcache-name": name}
    return cluster.add_node(num_cpus=1, labels=labels, object_store_memory=80 << 20, include_dashboard=False)
