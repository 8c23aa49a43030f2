"""Admission by memory against fixed batch sizes, on the engine alone: short prompts and long ones mixed."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from p2pcache.integrations.transformers import TransformersEngine
from p2pcache.integrations.transformers_serving import ServingEngine
from p2pcache.serve.admission import AdmissionConfig
from p2pcache.serve.batcher import Batcher
from p2pcache.serve.engine import Generation
from p2pcache.serve.stream import End

SHORT, LONG = 32, 4  # requests of each
SHORT_TOKENS, LONG_TOKENS = 96, 1500
ANSWER_TOKENS = 48
TARGET_BYTES = 200 << 20
FIXED = (1, 4, 16)


def run(folder: Path, console: Console) -> dict[str, Any]:
    """The same requests, all at once, under each rule. Figures by rule."""
    from p2pcache.demo.model import load_model

    torch.set_num_threads(torch.get_num_threads())
    model, _ = load_model(folder)
    rules = {"by_memory": AdmissionConfig(TARGET_BYTES, sequences_max=64)}
    rules |= {f"fixed_{n}": AdmissionConfig(1 << 40, sequences_max=n) for n in FIXED}
    requests = _requests(model.config.vocab_size)
    found = {}
    for name, config in rules.items():
        engine = ServingEngine(TransformersEngine(model, None, weights="-"))
        found[name] = asyncio.run(_serve(engine, config, requests))
        engine.close()
        console.print(f"admission, {name}: {found[name]['answer_tokens_per_s']:.0f} answer tokens/s")
    return {"target_bytes": TARGET_BYTES, "rules": found}


def _requests(vocabulary: int) -> list[Generation]:
    rng = np.random.default_rng(1)
    lengths = [SHORT_TOKENS] * SHORT + [LONG_TOKENS] * LONG
    random.Random(1).shuffle(lengths)
    return [Generation(rng.integers(10, vocabulary, n).astype(np.uint32), ANSWER_TOKENS) for n in lengths]


async def _serve(
    engine: ServingEngine, config: AdmissionConfig, requests: list[Generation]
) -> dict[str, Any]:
    batcher = Batcher(engine, config)
    most_running = 0

    async def one(request: Generation) -> End:
        nonlocal most_running
        async with await batcher.submit(request) as stream:
            async for event in stream:
                most_running = max(most_running, batcher.stats()["running"])
                if isinstance(event, End):
                    return event
        raise AssertionError("a stream ends with its end")

    started_s = time.monotonic()
    ends = await asyncio.gather(*map(one, requests))
    seconds = time.monotonic() - started_s
    stats = batcher.stats()
    await batcher.close(0.0)
    return {
        "seconds": seconds,
        "answer_tokens_per_s": sum(e.completion_tokens for e in ends) / seconds,
        "peak_bytes": stats["peak_bytes"],
        "most_running": most_running,
        "ttft_max_s": max(e.ttft_s for e in ends),
    }


def show(result: dict[str, Any], console: Console) -> None:
    table = Table("", "answer tokens/s", "peak KV", "most at once", title="Admission, all requests at once")
    for name, row in result["rules"].items():
        rate, peak = f"{row['answer_tokens_per_s']:.0f}", f"{row['peak_bytes'] / (1 << 20):.0f} MiB"
        table.add_row(name, rate, peak, str(row["most_running"]))
    console.print(table)
    console.print(f"target: {result['target_bytes'] / (1 << 20):.0f} MiB")
