"""How much of a load is found again: eviction policies and meshes, on traces and on shuffled documents.

Requests are replayed against the project's own tiers (`core/tiers`), without bytes, clocks or sockets: eight
nodes take turns (round robin). *local*: each node for itself. *mesh*: what a peer holds is pulled and kept
here as a replica; the directory is taken to be right. *pool*: one tier as large as all eight together.

What counts: *hit*, the share of tokens found; *saved*, the share of prefill time, where a token at position p
costs `1 + p / 30,000` (an 8B model: the attention of a token there costs as much as its weights do);
*local*, the share of tokens found on the node itself. A trace's ids are chained, so only the leading run
of a prompt that is found counts. Documents are found at any place, or, to compare, as a prefix only.

    python -m bench.replay [--trace conversation_trace.jsonl --trace synthetic_trace.jsonl]

Traces: JSON lines with `hash_ids`, one id for each 512 tokens, as in `FAST25-release/traces/` of
https://github.com/kvcache-ai/Mooncake (Qin et al., "Mooncake", FAST 2025). None is bundled.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.report import Report, finish, parser
from p2pcache.core.chunking import SegmentChunker
from p2pcache.core.eviction import POLICIES, Policy
from p2pcache.core.keys import chunk_keys
from p2pcache.core.tiers import ALIGN_BYTES, HostTier
from p2pcache.types import BodyInfo, ContentKey, ExactKey

NODES = 8
BLOCK_TOKENS = 512
POSITION_OF_TWICE_THE_COST = 30_000
BLOCKS_A_NODE = 5_000
OTHER_BLOCKS_A_NODE = (1_000, 20_000)  # the mesh alone, by both policies
TOKEN_BYTES = 1 << 17  # an 8B model's KV in 16 bits: 32 layers, 8 heads of 128
GIB = 1 << 30

CEILINGS = {
    "conversation": {"infinite": 36.6, "local": 10.6, "mesh": 33.5, "pool": 35.1},
    "synthetic": {"infinite": 64.0, "local": 18.1, "mesh": 61.2, "pool": 63.9},
}
"""In per cent of blocks: LRU, 5,000 blocks a node, a plain mesh; figures that are given with the traces."""

Request = Sequence[BodyInfo]


@dataclass(frozen=True)
class Setup:
    """One way to run. replicas_first: off, a pulled body is like any other, and no use where it came from."""

    mode: str
    node_bytes: int
    policy: type[Policy]
    weighs_cost: bool = True
    leading_only: bool = True
    replicas_first: bool = True


@dataclass(frozen=True)
class Score:
    """Shares of all, in per cent."""

    hit: float
    saved: float
    local: float


class Mesh:
    """Tiers, and who holds what."""

    def __init__(self, setup: Setup):
        count = 1 if setup.mode == "pool" else NODES
        node_bytes = setup.node_bytes * (NODES if setup.mode == "pool" else 1)
        self.tiers = [HostTier(node_bytes, setup.policy, setup.weighs_cost) for _ in range(count)]
        self._setup = setup
        self._holders: dict[ExactKey, dict[int, None]] = {}  # who has had it longest, first

    def serve(self, here: int, request: Request) -> tuple[list[bool], list[bool]]:
        """Serve one request on a node. Returns for each body whether it was found, and whether at home.

        Where only the leading run counts, what is behind the first miss is computed anew.
        """
        tier, pulls, setup = self.tiers[here], self._setup.mode == "mesh", self._setup
        found = [tier.get(b.exact) is not None or (pulls and b.exact in self._holders) for b in request]
        if setup.leading_only and not all(found):
            found[found.index(False) :] = [False] * (len(found) - found.index(False))
        at_home = [hit and tier.get(b.exact) is not None for hit, b in zip(found, request, strict=True)]
        for hit, body in zip(found, request, strict=True):
            if tier.get(body.exact) is not None:
                self._use(here, body)
                continue
            holders = self._holders.get(body.exact)
            replica = hit and holders is not None and setup.replicas_first
            if replica:
                self._use(next(iter(holders)), body)  # the lease for the pull
            self._put(here, body, replica)
            if replica:
                self._use(here, body)
        return found, at_home

    def _use(self, node: int, body: BodyInfo) -> None:
        slot = self.tiers[node].lease(body.exact)
        self.tiers[node].release(slot)

    def _put(self, here: int, body: BodyInfo, replica: bool) -> None:
        tier = self.tiers[here]
        while (slot := tier.reserve(body, "")) is None:
            for victim in tier.victims(body.nbytes, 0.0):
                holders = self._holders[victim.body.exact]
                del holders[here]
                if not holders:
                    del self._holders[victim.body.exact]
                tier.evict(victim)
        tier.commit(slot, (), replica=replica)
        self._holders.setdefault(body.exact, {})[here] = None


def replay(requests: Sequence[Request], setup: Setup) -> Score:
    """Serve all requests, the nodes in turn."""
    mesh = Mesh(setup)
    tokens = hit = local = 0
    seconds = saved = 0.0
    for i, request in enumerate(requests):
        found, at_home = mesh.serve(i % len(mesh.tiers), request)
        for body, was_found, was_home in zip(request, found, at_home, strict=True):
            cost = recompute_cost(body)
            tokens += body.tokens
            seconds += cost
            if was_found:
                hit += body.tokens
                saved += cost
            local += body.tokens * was_home
    for tier in mesh.tiers:
        tier.validate()
    return Score(100 * hit / tokens, 100 * saved / seconds, 100 * local / tokens)


def recompute_cost(body: BodyInfo) -> float:
    """Prefill time of a chunk, in that of a token at position 0."""
    return body.tokens * (1 + (body.base_position + body.tokens / 2) / POSITION_OF_TWICE_THE_COST)


def by_position(policy: type[Policy]) -> type[Policy]:
    """The same policy, weighing as well that a chunk far behind costs more. For comparison only."""

    class ByPosition(policy):  # type: ignore[valid-type, misc]
        def cost_class(self, entry):
            return round(math.log2(recompute_cost(entry.body) / entry.extent_bytes * ALIGN_BYTES))

    return ByPosition


def infinite(requests: Sequence[Request], leading_only: bool) -> float:
    """The share of tokens, in per cent, that one shared cache without bounds finds."""
    known: set[ExactKey] = set()
    hit = tokens = 0
    for request in requests:
        leads = True
        for body in request:
            leads = body.exact in known and (leads or not leading_only)
            hit += body.tokens * leads
            tokens += body.tokens
        known.update(body.exact for body in request)
    return 100 * hit / tokens


# -- loads ---------------------------------------------------------------------------------------


def trace(path: Path) -> list[Request]:
    """A trace's requests; a block is one page, so that a tier of n pages holds n blocks."""

    @functools.cache
    def block(number: int, index: int) -> BodyInfo:
        key = (number + 1).to_bytes(16, "little")
        position = index * BLOCK_TOKENS
        content, exact = ContentKey(key), ExactKey(key)
        return BodyInfo(content, exact, BLOCK_TOKENS, ALIGN_BYTES, base_position=position)

    with path.open() as file:
        return [[block(n, i) for i, n in enumerate(json.loads(line)["hash_ids"])] for line in file]


def documents(anywhere: bool, coded_share: float, requests: int = 3000, seed: int = 1) -> list[Request]:
    """System prompt, 2 to 8 documents in random order, question; cut and named as the project does.

    600 documents of 256 to 2,048 tokens, of a popularity that falls as rank to the 0.8 (Zipf).
    anywhere: bodies go by their content, else by all that stands before them too. coded_share: of the
    documents that are kept in half the bytes.
    """
    rng, noise = random.Random(seed), np.random.default_rng(seed)
    texts = [_tokens(noise, rng.choice((256, 512, 1024, 2048))) for _ in range(600)]
    coded = [rng.random() < coded_share for _ in texts]
    weights = [(rank + 1) ** -0.8 for rank in range(len(texts))]
    system, made = _tokens(noise, 512), []
    for _ in range(requests):
        chosen = list(dict.fromkeys(rng.choices(range(len(texts)), weights, k=rng.randint(2, 8))))
        rng.shuffle(chosen)
        parts = [system, *(texts[i] for i in chosen), _tokens(noise, 64)]
        token_bytes = [TOKEN_BYTES // (1 + coded[i]) for i in chosen]
        made.append(_request(parts, [TOKEN_BYTES, *token_bytes, TOKEN_BYTES], anywhere))
    return made


def _request(parts: list[np.ndarray], token_bytes: list[int], anywhere: bool) -> Request:
    starts = np.cumsum([0, *(len(part) for part in parts)])[:-1].tolist()
    run = np.concatenate(parts)
    request, part = [], 0
    for chunk in chunk_keys(bytes(32), run, SegmentChunker(starts).spans(run)):
        while part + 1 < len(starts) and chunk.start >= starts[part + 1]:
            part += 1
        exact = ExactKey(chunk.content) if anywhere else chunk.exact
        nbytes = chunk.tokens * token_bytes[part]
        request.append(BodyInfo(chunk.content, exact, chunk.tokens, nbytes, base_position=chunk.start))
    return request


def _tokens(noise: np.random.Generator, count: int) -> np.ndarray:
    return noise.integers(0, 150_000, count, dtype=np.uint32)


# -- what is compared ----------------------------------------------------------------------------


def measure_trace(report: Report, path: Path) -> None:
    name = path.stem.removesuffix("_trace")
    requests = trace(path)
    best, given = infinite(requests, leading_only=True), CEILINGS.get(name, {})
    report.row(load=name, mode="infinite", hit=best, given=given.get("infinite"))

    def run(mode: str, policy: type[Policy], label: str, blocks: int = BLOCKS_A_NODE, **more) -> Score:
        score = replay(requests, Setup(mode, blocks * ALIGN_BYTES, policy, **more))
        note = given.get(mode) if label.startswith("lru, plain") else None
        _row(report, name, f"{blocks:,} blocks", mode, label, score, note)
        return score

    lru, s3 = POLICIES["lru"], POLICIES["s3-fifo"]
    plain = {m: run(m, lru, "lru, plain", replicas_first=False) for m in ("local", "mesh", "pool")}
    scores = {("s3-fifo", mode): run(mode, s3, "s3-fifo") for mode in ("local", "mesh", "pool")}
    scores |= {("lru", "local"): plain["local"], ("lru", "pool"): plain["pool"]}
    scores["lru", "mesh"] = run("mesh", lru, "lru")
    weighed = {
        label: run("pool", by_position(POLICIES[label]), f"{label}, by position") for label in POLICIES
    }
    for blocks in OTHER_BLOCKS_A_NODE:
        for label, policy in POLICIES.items():
            run("mesh", policy, label, blocks)

    if given:
        off = max(abs(plain[mode].hit - given[mode]) for mode in plain)
        report.ratio(f"points_off_what_is_given_{name}", max(off, abs(best - given["infinite"])), "<= 0.06")
    report.ratio(f"replicas_first_points_{name}", scores["lru", "mesh"].hit - plain["mesh"].hit)
    for mode in ("local", "mesh", "pool"):
        ratio = scores["s3-fifo", mode].hit / scores["lru", mode].hit
        report.ratio(f"s3fifo_vs_lru_{mode}_{name}", ratio)
    for label in POLICIES:
        mesh, pool = scores[label, "mesh"].hit, scores[label, "pool"].hit
        report.ratio(f"mesh_vs_pool_{name}_{label}", mesh / pool)
        report.ratio(f"points_below_pool_{name}_{label}", pool - mesh, "<= 2")
        report.ratio(f"by_position_saved_{name}_{label}", weighed[label].saved / scores[label, "pool"].saved)


def measure_documents(report: Report) -> None:
    for load, anywhere, coded_share in (
        ("documents, prefix", False, 0.0),
        ("documents", True, 0.0),
        ("documents, half coded", True, 0.5),
    ):
        requests = documents(anywhere, coded_share)
        leading = not anywhere
        best = infinite(requests, leading)
        report.row(load=load, mode="infinite", hit=best)
        scores: dict[tuple[str, str, bool], Score] = {}
        for mode in ("local", "mesh", "pool"):
            for label, policy in POLICIES.items():
                for weighs in (True, False) if coded_share else (True,):
                    setup = Setup(mode, 4 * GIB, policy, weighs, leading)
                    score = scores[mode, label, weighs] = replay(requests, setup)
                    _row(report, load, "4 GiB", mode, label + ("" if weighs else ", cost not weighed"), score)
        tag = load.replace(", ", "_").replace(" ", "_")
        for mode in ("local", "mesh", "pool"):
            ratio = scores[mode, "s3-fifo", True].hit / scores[mode, "lru", True].hit
            report.ratio(f"s3fifo_vs_lru_{mode}_{tag}", ratio)
        for label in POLICIES:
            below = scores["pool", label, True].hit - scores["mesh", label, True].hit
            report.ratio(f"points_below_pool_{tag}_{label}", below, "<= 2")
            if coded_share:
                flat = scores["mesh", label, False].saved
                report.ratio(
                    f"cost_weighed_saved_{tag}_{label}", scores["mesh", label, True].saved / flat, ">= 1"
                )


def _row(
    report: Report, load: str, node: str, mode: str, policy: str, score: Score, given: float | None = None
) -> None:
    cells = {"hit": score.hit, "saved": score.saved, "local": score.local, "given": given}
    report.row(load=load, node=node, mode=mode, policy=policy, **cells)


def main() -> None:
    options: argparse.ArgumentParser = parser(__doc__.split("\n", 1)[0], "replay")
    options.add_argument(
        "--trace", type=Path, action="append", default=[], help="JSON lines; may be repeated"
    )
    args = options.parse_args()
    report = Report("replay")
    measure_documents(report)
    for path in args.trace:
        measure_trace(report, path)
    if not args.trace:
        why = "no --trace: get FAST25-release/traces/*.jsonl of https://github.com/kvcache-ai/Mooncake"
        report.ratio("mesh_vs_pool_conversation_s3-fifo", None, why_missing=why)
        report.ratio("mesh_vs_pool_synthetic_s3-fifo", None, why_missing=why)
    finish(report, args.json)


if __name__ == "__main__":
    main()
