"""The planner: what each tier costs, pull or recompute on links of three rates, and deadlines.

A holder and two readers stand at the ends of a link of 10, 1 and 0.1 Gbit/s. The engine beside the readers is
simulated: to compute tokens it waits as long as a fixed formula says (below), as an accelerator would have it
wait. *Time to KV ready* is lookup, fetch, and computing what did not come. Three strategies in turn, each on
a prompt that only the holder has:

- pull: a reader that has never heard how fast its engine is, so all is pulled;
- recompute: the engine alone, without asking anybody;
- planner: a reader whose engine reports what each prefill took. It has learnt on two passes, not counted.

`planner_vs_best_*` is the median ratio of the planner's time to that of the better strategy in the same turn,
at the worst length.

`deadline_100ms_met` is the share of lookups with a deadline whose lookup and fetch ended within it, on the
worst link. There the engine is said to be slow, so that all would be pulled if there were time. `came` in its
rows is the share of the chunks asked for that came, `kept` that of the chunks planned to come.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from bench.report import Report, finish, parser, quantile
from bench.shaped import Link, link, mesh, why_no_link
from p2pcache import KVLayout, Namespace
from p2pcache.api import Cache, Client
from p2pcache.core.chunking import FixedChunker
from p2pcache.core.rates import attended
from p2pcache.results import Fetched, Lookup
from p2pcache.types import Source

MIB = 1 << 20
LAYOUT = KVLayout(layers=8, kv_heads=4, head_dim=64, dtype="bfloat16")  # 8 KiB a token
NAMESPACE = Namespace("bench.planner", "weights", LAYOUT)
CHUNKS = FixedChunker(256)
LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
LINKS = {10.0: "10g", 1.0: "1g", 0.1: "01g"}
REPEATS, REPEATS_LONG = 9, 3  # long: where one pull takes seconds
LONG_S = 1.0
# The simulated engine: about 18,000 tokens a second, and attention on top. With 8 KiB a token a link of
# 1 Gbit/s carries 15,000 tokens a second, so there the better strategy changes with the length.
START_S, TOKEN_S, PAIR_S = 0.003, 5.5e-5, 5e-9
DEADLINE_S = 0.1
DEADLINE_LOOKUPS = 100
SLOW_TOKENS_PER_S = 500.0
TIER_BODIES, TIER_ROUNDS = 48, 6


def kv_of(tokens: int) -> torch.Tensor:
    return torch.randn(LAYOUT.shape(tokens)).to(torch.bfloat16)


class Prompts:
    """Prompts that differ from the first token on, so that none shares a chunk with another."""

    def __init__(self) -> None:
        self._next = itertools.count(1)

    def new(self, length: int) -> torch.Tensor:
        return torch.arange(length) + 100_000 * next(self._next)


class Reader:
    """An engine beside one node."""

    def __init__(self, client: Client, *, reports: bool):
        self.client = client
        self.cache: Cache = client.open(NAMESPACE)
        self._reports = reports

    def compute(self, spans: Sequence[tuple[int, int]]) -> None:
        """Compute these spans of a prompt in one prefill, simulated. The last token always is."""
        tokens = sum(stop - start for start, stop in spans)
        pairs = sum(attended(stop - start, start) for start, stop in spans)
        seconds = START_S + TOKEN_S * tokens + PAIR_S * pairs
        time.sleep(seconds)
        if self._reports and tokens:
            self.client.report_prefill(tokens, int(pairs), seconds)

    def ready(self, run: torch.Tensor) -> tuple[float, float]:
        """Have the KV of a prompt. Returns (seconds, share of its chunks that came)."""
        started_s = time.perf_counter()
        with self.fetch(self.cache.lookup(run, chunker=CHUNKS, budget_s=2.0)) as fetched:
            missing = [(c.found.keys.start, c.found.keys.stop) for c in fetched if c.kv is None]
            self.compute(missing)
            seconds = time.perf_counter() - started_s
            return seconds, 1 - len(missing) / len(fetched)

    def fetch(self, lookup: Lookup) -> Fetched:
        return self.cache.fetch(lookup, budget_s=60.0)

    def forget(self, run: torch.Tensor) -> None:
        """Have the prompt nowhere but at its holder again, and the directory know it."""
        keys = self.cache.chunks(run, CHUNKS)
        link = self.client.link()
        link.call("forget", {"bodies": [k.exact for k in keys]}, 5.0)
        link.call("published", {"lost": 0}, 5.0)


@contextlib.contextmanager
def readers(paths: Sequence[str], reports: Sequence[bool]) -> Iterator[list[Reader]]:
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Client(path, timeout_s=10.0)) for path in paths]
        yield [Reader(c, reports=r) for c, r in zip(clients, reports, strict=True)]


def store(holder: Reader, run: torch.Tensor) -> None:
    stored = holder.cache.store(holder.cache.chunks(run, CHUNKS), kv_of(len(run)), budget_s=10.0)
    if not stored.published(10.0) or stored.refused:
        raise RuntimeError(f"the holder did not store a prompt: {stored}")


# -- pull or recompute -----------------------------------------------------------------------------


def on_links(report: Report) -> None:
    why = why_no_link()
    if why:
        for label in LINKS.values():
            report.ratio(f"planner_vs_best_{label}", None, "<= 1.10", why)
        report.ratio("deadline_100ms_met", None, ">= 0.99", why)
        return
    met: list[float] = []
    for rate, label in LINKS.items():
        with link() as line, tempfile.TemporaryDirectory(prefix="p2pbench-") as folder:
            line.shape(rate)
            with mesh(_at_the_ends(line, folder)) as nodes:
                paths = [node.socket_path for node in nodes]
                with readers(paths, [False, False, True]) as (holder, pulls, plans):
                    worst = pull_or_recompute(report, rate, holder, pulls, plans)
                    report.ratio(f"planner_vs_best_{label}", worst, "<= 1.10")
                    met.append(deadlines(report, rate, holder, plans))
    report.ratio("deadline_100ms_met", min(met), ">= 0.99")


def _at_the_ends(line: Link, folder: str) -> list[tuple[dict[str, Any], str]]:
    def at(name: str, end: int) -> tuple[dict[str, Any], str]:
        settings = {
            "name": name,
            "host": line.addresses[end],
            "allow_plaintext_network": True,
            "transports": ["tcp"],  # the ends are on one host: shared memory would go around the link
            "host_bytes_max": 320 * MIB,
            "runtime_dir": folder,
            "resync_s": 0.0,
        }
        return settings, line.ends[end]

    return [at("holder", 0), at("pulls", 1), at("plans", 1)]


def pull_or_recompute(report: Report, rate: float, holder: Reader, pulls: Reader, plans: Reader) -> float:
    """Rows a length; returns the planner's time over the better strategy's, at the worst length."""
    prompts = Prompts()
    runs = {length: prompts.new(length) for length in LENGTHS}
    for run in runs.values():
        store(holder, run)
    for _ in range(2):  # the planner's reader learns the link and its engine
        for run in runs.values():
            plans.compute([(0, len(run))])
            plans.ready(run)
            plans.forget(run)
    worst = 0.0
    for length, run in runs.items():
        times: dict[str, list[float]] = defaultdict(list)
        came: list[float] = []

        def pull(run: torch.Tensor = run) -> float:
            return pulls.ready(run)[0]

        def recompute(length: int = length) -> float:
            started_s = time.perf_counter()
            pulls.compute([(0, length)])
            return time.perf_counter() - started_s

        def planned(run: torch.Tensor = run, came: list[float] = came) -> float:
            seconds, share = plans.ready(run)
            came.append(share)
            return seconds

        strategies: list[tuple[str, Callable[[], float]]] = [
            ("pull", pull),
            ("recompute", recompute),
            ("planner", planned),
        ]
        pull_s = LAYOUT.body_bytes(length) * 8 / (rate * 1e9)
        for index in range(REPEATS_LONG if pull_s > LONG_S else REPEATS):
            for name, run_it in strategies[index % 3 :] + strategies[: index % 3]:
                times[name].append(run_it())
                for reader in (pulls, plans):
                    reader.forget(run)
        medians = {name: statistics.median(values) for name, values in times.items()}
        best = times[min(("pull", "recompute"), key=medians.__getitem__)]
        ratio = statistics.median(ours / theirs for ours, theirs in zip(times["planner"], best, strict=True))
        worst = max(worst, ratio)
        report.row(
            what=f"KV ready, {LINKS[rate]}",
            tokens=length,
            pull=medians["pull"] * 1e3,
            recompute=medians["recompute"] * 1e3,
            planner=medians["planner"] * 1e3,
            vs_best=ratio,
            came=statistics.mean(came),
        )
    return worst


def deadlines(report: Report, rate: float, holder: Reader, plans: Reader) -> float:
    """The share of lookups whose bytes were here, or given up, by the deadline."""
    rng, prompts = random.Random(7), Prompts()
    runs = [prompts.new(length) for length in LENGTHS]  # those of before: still at the holder
    plans.client.report_prefill_rate(SLOW_TOKENS_PER_S)
    took, asked, planned, came = [], 0, 0, 0
    for _ in range(DEADLINE_LOOKUPS):
        run = rng.choice(runs)
        started_s = time.perf_counter()
        lookup = plans.cache.lookup(run, chunker=CHUNKS, deadline_s=DEADLINE_S)
        with plans.cache.fetch(lookup) as fetched:
            took.append(time.perf_counter() - started_s)
            asked += len(lookup.chunks)
            planned += sum(c.body is not None for c in lookup.chunks)
            came += sum(c.kv is not None for c in fetched)
        plans.forget(run)
    report.row(
        what=f"deadline, {LINKS[rate]}",
        came=came / asked,
        kept=came / planned if planned else None,
        p50_ms=statistics.median(took) * 1e3,
        p99_ms=quantile(took, 0.99) * 1e3,
        met=sum(t <= DEADLINE_S for t in took) / len(took),
    )
    return sum(t <= DEADLINE_S for t in took) / len(took)


# -- tiers -----------------------------------------------------------------------------------------


def tiers(report: Report) -> None:
    """Fetches of single chunks of 2 MiB from each tier, on one host."""
    with tempfile.TemporaryDirectory(prefix="p2pbench-") as folder:

        def node(name: str, host_mib: int = 256, **more: Any) -> tuple[dict[str, Any], str]:
            settings = {
                "name": name,
                "runtime_dir": folder,
                "host_bytes_max": host_mib * MIB,
                "resync_s": 0.0,
            }
            return settings | more, ""

        disk = {"nvme_path": folder + "/nvme", "nvme_bytes_max": 512 * MIB}
        described = [
            node("holder"),
            node("shm", transports=["shm"]),
            node("tcp", transports=["tcp"]),
            node("disk", host_mib=24, **disk),
        ]
        with mesh(described) as nodes, readers([n.socket_path for n in nodes], [False] * 4) as each:
            holder, by_shm, by_tcp, on_disk = each
            run = Prompts().new(256 * TIER_BODIES)
            store(holder, run)
            _tier(report, "host", holder, run, Source.LOCAL, evict=False)
            _tier(report, "peer, shm", by_shm, run, Source.PEER)
            _tier(report, "peer, tcp", by_tcp, run, Source.PEER)
            own = Prompts()
            own.new(1)
            mine = own.new(256 * TIER_BODIES) + 50_000_000
            for start in range(0, len(mine), 1024):  # in parts: the host tier is small
                part = on_disk.cache.chunks(mine, CHUNKS)[start // 256 : start // 256 + 4]
                on_disk.cache.store(part, kv_of(1024), offset=start, budget_s=10.0)
            _tier(report, "NVMe, cached", on_disk, mine, Source.NVME, evict=False)


def _tier(
    report: Report, name: str, reader: Reader, run: torch.Tensor, source: Source, evict: bool = True
) -> None:
    took: list[float] = []
    for _ in range(TIER_ROUNDS):
        lookup = reader.cache.lookup(run, chunker=CHUNKS, budget_s=2.0)
        for chunk in lookup.chunks:
            one = Lookup(lookup.tokens, (chunk,), 0.0)
            started_s = time.perf_counter()
            with reader.fetch(one) as fetched:
                seconds = time.perf_counter() - started_s
                if fetched[0].source is not source:
                    raise RuntimeError(f"a chunk came from {fetched[0].source}, not {source}")
                took.append(seconds)
        if evict:
            reader.forget(run)
    report.row(
        what=f"2 MiB: {name}",
        p50_ms=statistics.median(took) * 1e3,
        p99_ms=quantile(took, 0.99) * 1e3,
    )


def main() -> None:
    arguments = parser(__doc__.splitlines()[0], "planner").parse_args()
    torch.set_num_threads(1)
    report = Report("planner")
    tiers(report)
    on_links(report)
    finish(report, arguments.json)


if __name__ == "__main__":
    main()
