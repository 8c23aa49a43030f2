"""`p2pcache demo`: three Ray nodes on this machine, one real model beside each, and a table.

Starts everything, runs the workloads of `workload.py` on the three nodes in turn, and stops
everything again, whatever happens.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from p2pcache.config import MIB
from p2pcache.demo.engine import DemoEngine, summarise
from p2pcache.demo.model import load_model, prepare_model
from p2pcache.demo.workload import Conversation, Request, retrieval
from p2pcache.io.members_ray import LABEL, NAME_LABEL, alive_nodes
from p2pcache.mesh import Mesh

NODES = ("a", "b", "c")
RETRIEVALS, TURNS = 12, 9
_REQUEST_TIMEOUT_S = 300.0
_OBJECT_STORE_BYTES = 80 * MIB  # Ray's own; nothing of ours goes through it

# a and b talk by shared memory, as nodes on one host do; the pairs with c are made to use a wire. The
# host tier of c is smaller than the workload, so that its NVMe tier comes into play.
SETTINGS: dict[str, Any] = {"host_bytes_max": 1024 * MIB}
BY_NODE: dict[str, dict[str, Any]] = {
    "a": {"transports_by_peer": {"c": ("ucx", "tcp")}},
    "b": {"transports_by_peer": {"c": ("tcp",)}},
    "c": {"transports_by_peer": {"a": ("ucx", "tcp"), "b": ("tcp",)}, "host_bytes_max": 192 * MIB},
}


def run_demo(cache_dir: Path, out: Path, console: Console) -> dict[str, Any]:
    """Run it all; writes `out` and returns what it wrote."""
    with ExitStack() as stack:
        progress = stack.enter_context(
            Progress(
                SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
                TimeElapsedColumn(), console=console,
            )
        )  # fmt: skip
        step = progress.add_task("preparing the model", total=4)
        model_path = prepare_model(cache_dir)
        _, tokenizer = load_model(model_path)
        progress.update(step, advance=1, description="starting three Ray nodes")
        stack.enter_context(_cluster())
        progress.update(step, advance=1, description="starting the mesh")
        mesh = stack.enter_context(_mesh())
        progress.update(step, advance=1, description="loading a model beside each node")
        engines = stack.enter_context(_engines(str(model_path)))
        progress.update(step, advance=1, description="ready")
        rows = _serve(engines, tokenizer, progress)
        leaked = _leases_left(mesh)
    result = {"nodes": len(NODES), "requests": rows, "summary": summarise(rows, leaked)}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    show(result, console)
    return result


def _serve(engines: list[Any], tokenizer: Any, progress: Progress) -> list[dict[str, Any]]:
    """Both workloads, one request at a time, on the nodes in turn."""
    ledger: dict[bytes, str] = {}
    rows: list[dict[str, Any]] = []
    task = progress.add_task("serving", total=RETRIEVALS + TURNS)

    def serve(request: Request) -> list[int]:
        engine = engines[len(rows) % len(engines)]
        # Alternating, so that neither side always runs on the caches that the other has warmed. By
        # pairs of rounds, or one node would always have the same order.
        full_first = (len(rows) // len(engines)) % 2 == 0
        done = ray.get(engine.handle.remote(request, ledger, full_first), timeout=_REQUEST_TIMEOUT_S)
        ledger.update(done["ledger"])
        rows.append(done["row"])
        row = done["row"]
        progress.update(task, advance=1, description=f"{request.kind} on {row['node']}")
        if not progress.console.is_terminal:  # where a bar cannot be drawn, a line a request
            speedup = row["ttft_recompute_s"] / row["ttft_cached_s"]
            progress.console.print(
                f"{len(rows)}: {request.kind} on {row['node']}, {row['tokens']} tokens, {speedup:.1f} x"
            )
        return done["answer"]

    # The last prompts come when the conversation has pushed their passages out of c's host tier.
    prompts = list(retrieval(tokenizer, RETRIEVALS))
    for request in prompts[: -len(engines)]:
        serve(request)
    chat = Conversation(tokenizer, TURNS)
    for _ in range(TURNS):
        chat.answered(serve(chat.next_prompt()))
    for request in prompts[-len(engines) :]:
        serve(request)
    return rows


@contextmanager
def _cluster() -> Iterator[None]:
    """A Ray cluster of three nodes on this machine, and this process connected to it."""
    cluster = Cluster()
    try:
        for name in NODES:
            labels = {LABEL: "1", NAME_LABEL: name}
            cluster.add_node(
                num_cpus=1, labels=labels, object_store_memory=_OBJECT_STORE_BYTES, include_dashboard=False
            )
        ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
        cluster.wait_for_nodes()
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


@contextmanager
def _mesh() -> Iterator[Mesh]:
    with tempfile.TemporaryDirectory(prefix="p2pcache-demo-") as folder:
        settings = SETTINGS | {"runtime_dir": str(Path(folder, "run"))}
        by_node = {name: dict(own) for name, own in BY_NODE.items()}
        by_node["c"] |= {"nvme_path": str(Path(folder, "nvme")), "nvme_bytes_max": 1024 * MIB}
        mesh = Mesh.ensure(settings, by_node=by_node)
        try:
            mesh.wait_for(len(NODES))
            yield mesh
        finally:
            mesh.stop()


@contextmanager
def _engines(model_path: str) -> Iterator[list[Any]]:
    """One engine process on each node, in the order of NODES, warmed up one after the other."""
    remote = ray.remote(num_cpus=0)(DemoEngine)
    by_name = {n.name: n.node_id for n in alive_nodes(labelled_only=True)}
    threads = os.cpu_count() or 1
    engines = [
        remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(by_name[name], soft=False)).remote(
            model_path, threads
        )
        for name in NODES
    ]
    try:
        for engine in engines:
            ray.get(engine.warm_up.remote(), timeout=_REQUEST_TIMEOUT_S)
        yield engines
    finally:
        ray.wait([e.close.remote() for e in engines], num_returns=len(engines), timeout=10)
        for engine in engines:
            ray.kill(engine)


def _leases_left(mesh: Mesh) -> int:
    """Leases and tickets still out after the last request, over all nodes, while engines are attached.

    The last release is a notice that may be on its way, so this asks until there are none, or 5 s.
    """
    until_s = time.monotonic() + 5.0
    while True:
        left = sum(s["leases"] + s["tickets"] for s in mesh.node_statuses())
        if not left or time.monotonic() > until_s:
            return left


def show(result: dict[str, Any], console: Console) -> None:
    """The table a person reads, and the summary under it."""
    table = Table(title="Every request, on three nodes in turn", title_justify="left")
    for name in (
        "request",
        "node",
        "tokens",
        "host",
        "nvme",
        "peer",
        "from",
        "recomputed",
        "TTFT",
        "full",
        "x",
        "KL",
    ):
        table.add_column(name, justify="left" if name in ("request", "node", "from") else "right")
    for row in result["requests"]:
        came = ", ".join(f"{peer} by {transport}" for peer, transport in row["peers"].items())
        table.add_row(
            row["kind"],
            row["node"],
            f"{row['tokens']:,}",
            f"{row['local_tokens']:,}",
            f"{row['nvme_tokens']:,}",
            f"{row['peer_tokens']:,}",
            came,
            f"{row['recomputed_tokens']:,}",
            f"{row['ttft_cached_s']:.2f} s",
            f"{row['ttft_recompute_s']:.2f} s",
            f"{row['ttft_recompute_s'] / row['ttft_cached_s']:.1f}",
            f"{row['kl_to_full']:.4f}",
        )
    console.print(table)
    s = result["summary"]
    console.print(
        f"Same prefix: {s['speedup_exact']:.1f} times faster to the first token on prompts of 2,000 tokens"
        f" and more; logits within {s['exact_max_abs_logit_diff']:.1e} of full prefill."
    )
    console.print(
        f"Moved passages: {s['speedup_content']:.1f} times faster; KL {s['kl_content_mean']:.4f} to full"
        f" prefill (keys not turned: {s['kl_content_unrotated']:.4f};"
        f" no documents: {s['kl_content_without_documents']:.4f})."
    )
    console.print(
        f"{s['peer_tokens']:,} tokens came from peers ({', '.join(s['transports'])}),"
        f" {s['content_tokens']:,} were found at another position, {s['wrong_bytes']} bytes were wrong,"
        f" {s['leaked_leases']} leases were left."
    )
