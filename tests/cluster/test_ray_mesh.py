"""The mesh on Ray: one actor a node, Views that follow Ray's, and bodies that cross nodes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from p2pcache.types import ConfigError, NodeDown
from tests.cluster.conftest import NODES, add_node

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]
MIB = 1 << 20


@pytest.fixture
def mesh(cluster: Any, tmp_path: Any):
    from p2pcache.mesh import Mesh

    mesh = Mesh.ensure({"host_bytes_max": 64 * MIB, "runtime_dir": str(tmp_path / "run")})
    try:
        mesh.wait_for(len(NODES))
        yield mesh
    finally:
        mesh.stop()


def eventually(what: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    """The first true value of `what`, polled: Ray gives no event for what other processes do."""
    until_s = time.monotonic() + timeout_s
    while time.monotonic() < until_s:
        value = what()
        if value:
            return value
        time.sleep(0.1)
    raise AssertionError(f"not within {timeout_s} s")


def on_node(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function in a Ray worker on one node."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from p2pcache.io.members_ray import alive_nodes

    node_id = next(n.node_id for n in alive_nodes(True) if n.name == name)
    remote = ray.remote(num_cpus=0)(function)
    where = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.get(remote.options(scheduling_strategy=where).remote(*arguments), timeout=60)


def store(seed: int, tokens: int) -> tuple[str, int]:
    """In a worker: store KV made from a seed at this node. Returns (node, chunks stored)."""
    import torch

    import p2pcache

    namespace = p2pcache.Namespace("m", "w", p2pcache.KVLayout(4, 2, 16, "float32"))
    with p2pcache.connect() as client:
        cache = client.open(namespace)
        keys = cache.chunks(range(seed, seed + tokens), p2pcache.FixedChunker(64))
        kv = torch.randn(4, 2, tokens, 2, 16, generator=torch.Generator().manual_seed(seed))
        stored = cache.store(keys, kv)
        assert stored.published()
        return client.node, stored.stored


def fetch(seed: int, tokens: int) -> dict[str, Any]:
    """In a worker: look the same tokens up at this node, fetch them and compare every byte."""
    import torch

    import p2pcache

    namespace = p2pcache.Namespace("m", "w", p2pcache.KVLayout(4, 2, 16, "float32"))
    kv = torch.randn(4, 2, tokens, 2, 16, generator=torch.Generator().manual_seed(seed))
    with p2pcache.connect() as client:
        cache = client.open(namespace)
        lookup = cache.lookup(range(seed, seed + tokens), chunker=p2pcache.FixedChunker(64), budget_s=2.0)
        with cache.fetch(lookup) as fetched:
            came = [c for c in fetched if c.kv is not None]
            equal = all(torch.equal(c.kv, kv[:, :, c.found.keys.start : c.found.keys.stop]) for c in came)
            return {
                "node": client.node,
                "came": len(came),
                "equal": equal,
                "from": sorted({c.peer for c in came}),
                "misses": sorted({str(c.miss) for c in fetched if c.miss}),
            }


def test_a_body_stored_on_one_node_is_pulled_by_another(mesh: Any):
    assert on_node("a", store, 1, 256) == ("a", 4)
    assert on_node("c", fetch, 1, 256) == {"node": "c", "came": 4, "equal": True, "from": ["a"], "misses": []}
    statuses = {s["name"]: s for s in mesh.node_statuses()}
    assert set(statuses) == set(NODES)
    assert {s["view_id"] for s in statuses.values()} == {statuses["a"]["view_id"]}
    eventually(lambda: not sum(s["leases"] + s["tickets"] for s in mesh.node_statuses()))


def test_every_node_has_exactly_one_actor_and_a_second_start_finds_the_mesh(mesh: Any):
    from p2pcache.mesh import Mesh

    again = Mesh.ensure({"host_bytes_max": 64 * MIB})
    assert {m.incarnation for m in again.wait_for(3)} == {m.incarnation for m in mesh.wait_for(3)}


def test_other_settings_for_a_mesh_that_runs_are_refused(mesh: Any):
    from p2pcache.mesh import Mesh

    with pytest.raises(ConfigError, match="already runs with other settings"):
        Mesh.ensure({"host_bytes_max": 32 * MIB})


def test_a_killed_actor_comes_back_as_another_member(mesh: Any):
    import ray

    from p2pcache.actor import RAY_NAMESPACE, node_actor_name
    from p2pcache.io.members_ray import alive_nodes

    before = {m.name: m.incarnation for m in mesh.wait_for(3)}
    on_node("b", store, 2, 256)
    node_id = next(n.node_id for n in alive_nodes(True) if n.name == "b")
    ray.kill(ray.get_actor(node_actor_name(node_id), namespace=RAY_NAMESPACE), no_restart=False)
    after = eventually(
        lambda: (now := {m.name: m.incarnation for m in mesh.wait_for(3)}) != before and len(now) == 3 and now
    )
    assert after["a"] == before["a"] and after["b"] != before["b"]
    answer = on_node("c", fetch, 2, 256)  # what the old incarnation held is gone; nothing pretends otherwise
    assert answer["came"] == 0 and answer["misses"], answer
    on_node("b", store, 3, 256)
    assert on_node("c", fetch, 3, 256)["equal"]


def test_a_node_that_joins_becomes_a_member_and_one_that_leaves_is_forgotten(mesh: Any, cluster: Any):
    on_node("a", store, 4, 256)
    node = add_node(cluster, "d")
    try:
        assert {m.name for m in mesh.wait_for(4)} == {*NODES, "d"}
        answer = on_node("d", fetch, 4, 256)
        assert answer["came"] == 4, answer
    finally:
        cluster.remove_node(node, allow_graceful=True)
    eventually(
        lambda: {m["name"] for m in mesh.status()["members"]} == set(NODES) and mesh.status()["agreed"]
    )
    assert on_node("c", fetch, 4, 256)["came"] == 4


def test_a_drained_node_leaves_what_it_held_behind_and_can_come_back(mesh: Any):
    on_node("b", store, 7, 1024)
    handed = mesh.drain("b", budget_s=20)
    assert handed["bodies"] == 16 and handed["left"] == 0
    state = eventually(lambda: (s := mesh.status())["agreed"] and s)
    assert {m["name"] for m in state["members"]} == {"a", "c"} and state["errors"] == {"b": "drained"}
    answer = on_node("c", fetch, 7, 1024)
    assert answer["came"] == 16 and answer["equal"]
    with pytest.raises(NodeDown, match="drained"):
        on_node("b", fetch, 7, 1024)
    assert {"name": "b", "error": "drained"} in mesh.node_statuses()
    with pytest.raises(NodeDown, match="b is not in the mesh: drained"):
        mesh.drain("b")
    with pytest.raises(ConfigError, match="no node is called 'x'; the hosts' nodes are: a, b, c"):
        mesh.drain("x")
    mesh.revive("b")
    assert {m.name for m in mesh.wait_for(3)} == set(NODES)
    assert on_node("b", fetch, 7, 1024)["equal"]


def test_a_supervisor_that_died_goes_on_with_the_nodes_it_finds(mesh: Any):
    import ray

    from p2pcache.actor import RAY_NAMESPACE
    from p2pcache.supervisor import SUPERVISOR

    before = {m.name: m.incarnation for m in mesh.wait_for(3)}
    mesh.drain("b", budget_s=5)
    on_node("a", store, 8, 256)
    restart(ray.get_actor(SUPERVISOR, namespace=RAY_NAMESPACE))
    state = eventually(lambda: (s := state_of(mesh)) and s["agreed"] and s)
    assert {m["name"]: m["incarnation"] for m in state["members"]} == {n: before[n] for n in ("a", "c")}
    assert state["errors"] == {"b": "drained"}, "what had left on purpose stays out"
    assert on_node("c", fetch, 8, 256)["equal"]


def test_a_drained_node_stays_out_though_its_actor_is_restarted(mesh: Any):
    import ray

    from p2pcache.actor import RAY_NAMESPACE, node_actor_name
    from p2pcache.io.members_ray import alive_nodes

    mesh.drain("b", budget_s=5)
    node_id = next(n.node_id for n in alive_nodes(True) if n.name == "b")
    restart(ray.get_actor(node_actor_name(node_id), namespace=RAY_NAMESPACE))
    state = eventually(lambda: (s := mesh.status())["agreed"] and s)
    assert {m["name"] for m in state["members"]} == {"a", "c"} and state["errors"] == {"b": "drained"}
    mesh.revive("b")
    assert {m.name for m in mesh.wait_for(3)} == set(NODES)


def restart(actor: Any) -> None:
    """Kill an actor's process, and wait until Ray has started another."""
    import ray

    before = eventually(lambda: pid_of(actor))
    ray.kill(actor, no_restart=False)
    eventually(lambda: pid_of(actor) not in (None, before))


def pid_of(actor: Any) -> int | None:
    import ray
    from ray.exceptions import RayError

    try:
        return ray.get(actor.__ray_call__.remote(lambda self: os.getpid()), timeout=5)
    except RayError:
        return None


def test_a_restarted_supervisor_keeps_a_name_with_the_node_that_has_it(mesh: Any, cluster: Any):
    import ray

    from p2pcache.actor import RAY_NAMESPACE
    from p2pcache.supervisor import SUPERVISOR

    before = {m.name: m.incarnation for m in mesh.wait_for(3)}
    twins = [add_node(cluster, "a") for _ in range(2)]  # two, so that one sorts before the real one, perhaps
    try:
        eventually(lambda: len(mesh.status()["errors"]) == 2)
        restart(ray.get_actor(SUPERVISOR, namespace=RAY_NAMESPACE))
        state = eventually(lambda: (s := state_of(mesh)) and s["agreed"] and len(s["errors"]) == 2 and s)
        assert {m["name"]: m["incarnation"] for m in state["members"]} == before
    finally:
        for twin in twins:
            cluster.remove_node(twin, allow_graceful=True)


def test_the_name_of_a_node_is_its_hosts(cluster: Any):
    from p2pcache.mesh import Mesh

    with pytest.raises(ConfigError, match="p2pcache-name"):
        Mesh.ensure({"name": "x"})


def test_a_second_start_with_other_members_is_refused(mesh: Any):
    from p2pcache.mesh import Mesh

    with pytest.raises(ConfigError, match="already runs on labelled nodes only"):
        Mesh.ensure(labelled_only=False)
    assert not Mesh.ensure().made_here


def state_of(mesh: Any) -> Any:
    """The supervisor's view of it; None while it starts again."""
    from ray.exceptions import RayError

    try:
        return mesh.status()
    except (RayError, NodeDown):
        return None


def test_two_nodes_of_one_name_are_not_mixed_up(mesh: Any, cluster: Any):
    node = add_node(cluster, "a")
    try:
        state = eventually(lambda: (s := mesh.status())["errors"] and s)
        assert {m["name"] for m in state["members"]} == set(NODES)
        (named, why), *_ = state["errors"].items()
        assert named.startswith("a (") and "another host's node has the name 'a'" in why
    finally:
        cluster.remove_node(node, allow_graceful=True)
    eventually(lambda: not mesh.status()["errors"])


def test_a_misspelt_setting_fails_where_it_is_given(cluster: Any):
    from p2pcache.mesh import Mesh

    with pytest.raises(ConfigError, match="host_bytes_max"):
        Mesh.ensure({"host_byte_max": 1})


def test_a_node_that_cannot_start_is_named_with_its_reason(cluster: Any, tmp_path: Any):
    from p2pcache.mesh import Mesh

    own = {"b": {"host_bytes_max": 1 << 50}}
    mesh = Mesh.ensure({"host_bytes_max": 16 * MIB, "runtime_dir": str(tmp_path)}, by_node=own)
    try:
        with pytest.raises(NodeDown, match="b: host_bytes_max asks for a slab"):
            mesh.wait_for(3, timeout_s=600)  # said as soon as it is known, not after ten minutes
        assert {m["name"] for m in mesh.status()["members"]} == {"a", "c"}
    finally:
        mesh.stop()
