"""A served model with and without the cache, and with and without the router: `python -m bench.serve`.

Three apps in turn on the same two Ray nodes of this machine, each with two replicas of SmolLM2-135M behind
the OpenAI ingress, asked the same things by the same number of clients: without p2pcache, with it under
Serve's default routing, with it and the locality router. Then admission by memory against fixed batches.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests
from rich.console import Console
from rich.table import Table

from bench import serve_admission
from bench.serve_workload import Ask, Script, repeated_share, scripts
from cluster import private_network
from p2pcache.demo.model import prepare_model
from p2pcache.io.members_ray import LABEL, NAME_LABEL

NODES = ("a", "b")
PORT = 8175
MODEL = "SmolLM2-135M-Instruct"
ANSWER_TOKENS = 16
HOST_BYTES = 448 << 20  # less than what all requests have to store, so that it matters where they go
MIB = 1 << 20
ARMS: dict[str, dict[str, Any]] = {
    "no_cache": {"cache": False, "routing": "default"},
    "default_routing": {"cache": True, "routing": "default"},
    "locality": {"cache": True, "routing": "locality"},
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.serve", description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, default=Path("out/serve.json"), help="where figures go")
    parser.add_argument("--clients", type=int, default=2, help="asking at once (default: 2)")
    parser.add_argument("--retrievals", type=int, default=10, help="a client (default: 10)")
    parser.add_argument("--turns", type=int, default=6, help="of each client's conversation (default: 6)")
    parser.add_argument("--cache", type=Path, default=Path(".cache"), help="where the model is kept")
    parser.add_argument("--only", choices=[*ARMS, "admission"], help="a part of it")
    arguments = parser.parse_args()
    console = Console()
    # Before anything is imported that starts threads: they would stay in the old network.
    try:
        private_network.enter()
    except OSError as error:
        console.print(f"[yellow]no network of its own ({error}): Serve's replicas listen on all interfaces")
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # Ray's name for: stay on loopback
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    folder = prepare_model(arguments.cache).resolve()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    result: dict[str, Any] = {"arms": {}}
    for arm, settings in ARMS.items():
        if arguments.only in (None, arm):
            plan = scripts(tokenizer, arguments.clients, arguments.retrievals, arguments.turns, seed=1)
            with _app(settings | {"model": str(folder), "name": MODEL}):
                rows, asked = _run(plan, console, arm)
            result["arms"][arm] = _figures(rows) | {"repeated_share": repeated_share(asked, tokenizer)}
            result["arms"][arm]["requests"] = rows
    if arguments.only is None:
        result["summary"] = _summary(result["arms"])
    if arguments.only in (None, "admission"):
        result["admission"] = serve_admission.run(folder, console)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    show(result, console)
    return 0


@contextmanager
def _app(settings: dict[str, Any]) -> Iterator[None]:
    """A Ray cluster with a mesh and the app on it, all new, so that no arm finds what another left."""
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    from p2pcache.mesh import Mesh
    from p2pcache.serve.app import deployment

    cluster = Cluster()
    with tempfile.TemporaryDirectory(prefix="p2pcache-bench-") as folder:
        try:
            for name in NODES:
                cluster.add_node(
                    num_cpus=1,
                    labels={LABEL: "1", NAME_LABEL: name},
                    object_store_memory=80 * MIB,
                    include_dashboard=False,
                )
            ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
            mesh = Mesh.ensure({"host_bytes_max": HOST_BYTES, "runtime_dir": f"{folder}/run"})
            mesh.wait_for(len(NODES))
            serve.start(http_options={"host": "127.0.0.1", "port": PORT}, proxy_location="HeadOnly")
            app = deployment(replicas=len(NODES), threads=1, dtype="float32", **settings)
            serve.run(app, name="p2pcache")
            _warm_up()
            yield
            serve.shutdown()
            mesh.stop()
        finally:
            ray.shutdown()
            cluster.shutdown()


def _warm_up() -> None:
    """Both replicas have run, and the ingress knows the model; nothing that the workload asks is stored."""
    seen: set[str] = set()
    for i in range(40):
        text = f"Warm up number {i}. " + "It is warm. " * 100
        seen.add(_ask(Ask("", [{"role": "user", "content": text}]))["replica"])
        if i >= 5 and (len(seen) == len(NODES) or "" in seen):
            return


def _run(plan: list[Script], console: Console, arm: str) -> tuple[list[dict[str, Any]], list[Ask]]:
    """Each client works through its two scripts, a request of each in turn, waiting for every answer."""
    rows: list[dict[str, Any]] = []
    asked: list[Ask] = []
    lock = threading.Lock()
    failed: list[BaseException] = []

    def client(mine: list[Script]) -> None:
        try:
            answers: dict[int, list[str]] = {i: [] for i in range(len(mine))}
            for turn in range(max(len(s.turns) for s in mine)):
                for i, script in enumerate(mine):
                    if turn >= len(script.turns):
                        continue
                    ask = script.ask(turn, answers[i])
                    with lock:
                        asked.append(ask)
                    row = _ask(ask)
                    answers[i].append(row.pop("answer"))
                    with lock:
                        rows.append(row)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=client, args=(plan[i : i + 2],)) for i in range(0, len(plan), 2)]
    started_s = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    console.print(f"{arm}: {len(rows)} requests in {time.monotonic() - started_s:.0f} s")
    return rows, asked


def _ask(ask: Ask) -> dict[str, Any]:
    """One streamed request: time to its first piece of text, and where its prompt's KV came from."""
    body = {
        "model": MODEL,
        "messages": ask.messages,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started_s = time.monotonic()
    ttft_s, text, usage = 0.0, "", {}
    with requests.post(
        f"http://127.0.0.1:{PORT}/v1/chat/completions", json=body, stream=True, timeout=300
    ) as r:
        if r.status_code != 200:
            raise RuntimeError(f"{r.status_code}: {r.text}")
        for line in r.iter_lines():
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            for choice in event["choices"]:
                piece = choice["delta"].get("content") or ""
                if piece and not ttft_s:
                    ttft_s = time.monotonic() - started_s
                text += piece
            usage = event["usage"] or usage
    return {
        "kind": ask.kind,
        "tokens": usage["prompt_tokens"],
        "cached": usage["prompt_tokens_details"]["cached_by_source"],
        "replica": usage["p2pcache"]["replica"],
        "routed": usage["p2pcache"]["routed"],
        "queue_s": usage["p2pcache"]["queue_s"],
        "ttft_s": ttft_s,
        "total_s": time.monotonic() - started_s,
        "answer": text,
    }


def _figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    ttft = sorted(r["ttft_s"] for r in rows)
    tokens = sum(r["tokens"] for r in rows)
    cached: Counter[str] = Counter()
    for row in rows:
        cached.update(row["cached"])
    work: Counter[str] = Counter()
    for row in rows:
        work[row["replica"]] += 1
    reused = sum(cached.values())
    mean = len(rows) / len(NODES)
    return {
        "count": len(rows),
        "prompt_tokens": tokens,
        "prompt_tokens_median": statistics.median(r["tokens"] for r in rows),
        "ttft_p50_s": statistics.median(ttft),
        "ttft_p99_s": ttft[min(len(ttft) - 1, int(0.99 * len(ttft)))],
        "hit_share": reused / tokens,
        "share_by_source": {source: n / tokens for source, n in cached.items()},
        "local_share": (cached["local"] + cached["nvme"]) / reused if reused else 0.0,
        "imbalance": max(work.values()) / mean,
        "routed": dict(Counter(r["routed"] for r in rows)),
        "located_share": sum(r["routed"] == "located" for r in rows) / len(rows),
        "remembered_share": sum(r["routed"] == "remembered" for r in rows) / len(rows),
    }


def _summary(arms: dict[str, Any]) -> dict[str, Any]:
    none, default, local = arms["no_cache"], arms["default_routing"], arms["locality"]
    return {
        "ttft_p50_vs_no_cache": none["ttft_p50_s"] / local["ttft_p50_s"],
        "ttft_p99_vs_no_cache": none["ttft_p99_s"] / local["ttft_p99_s"],
        "ttft_p50_vs_default_routing": default["ttft_p50_s"] / local["ttft_p50_s"],
        "local_share": local["local_share"],
        "local_share_default_routing": default["local_share"],
        "imbalance": local["imbalance"],
    }


def show(result: dict[str, Any], console: Console) -> None:
    if result["arms"]:
        table = Table("", *result["arms"], title="A served model, same requests")
        for name, label in _ROWS.items():
            table.add_row(label, *(_cell(name, arm) for arm in result["arms"].values()))
        console.print(table)
    for name, value in result.get("summary", {}).items():
        console.print(f"{name}: {value:.2f}")
    if "admission" in result:
        serve_admission.show(result["admission"], console)


_ROWS = {
    "count": "requests",
    "prompt_tokens_median": "prompt tokens, median",
    "repeated_share": "repeated in earlier requests",
    "ttft_p50_s": "time to first token, p50",
    "ttft_p99_s": "time to first token, p99",
    "hit_share": "prompt tokens from the cache",
    "local_share": "... of these from the replica's own node",
    "imbalance": "requests, busiest replica over mean",
    "located_share": "routed by the directory's answer within 2 ms",
    "remembered_share": "... by what it had said a while before",
}


def _cell(name: str, arm: dict[str, Any]) -> str:
    if name.endswith("_s"):
        return f"{arm[name]:.2f} s"
    if "share" in name:
        return f"{arm[name]:.0%}"
    return f"{arm[name]:.2f}" if isinstance(arm[name], float) else f"{arm[name]:,}"


if __name__ == "__main__":
    raise SystemExit(main())
