"""Ray's object store: `ray.get` on one raylet of an object that was put on another."""

from __future__ import annotations

import os
import time

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # stay on loopback

import protocol  # noqa: E402 - after the setting that Ray reads as it is loaded
import ray  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

STORE_BYTES = 1 << 30


@ray.remote(num_cpus=0)
class Holder:
    def put(self, nbytes: int, count: int) -> list:
        self.kept = [ray.put(bytearray([i % 251]) * nbytes) for i in range(count)]
        return self.kept


@ray.remote(num_cpus=0)
class Reader:
    def get(self, refs: list, nbytes: int) -> float:
        started_s = time.perf_counter()
        bodies = [ray.get(ref) for ref in refs]  # one after the other
        seconds = (time.perf_counter() - started_s) / len(refs)
        if any(len(b) != nbytes or b[-1] != i % 251 for i, b in enumerate(bodies)):
            raise RuntimeError("wrong bytes")
        return seconds


def main() -> None:
    node = {"num_cpus": 1, "object_store_memory": STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "resources": {"a": 1}})
    try:
        cluster.add_node(**node, resources={"b": 1})
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        holder = Holder.options(resources={"a": 0.1}).remote()
        reader = Reader.options(resources={"b": 0.1}).remote()

        def measure(nbytes: int, count: int) -> float:
            refs = ray.get(holder.put.remote(nbytes, count))
            return ray.get(reader.get.remote(refs, nbytes))

        protocol.serve(measure)
    finally:
        ray.shutdown()
        cluster.shutdown()


main()
