"""What the lossless codec saves where the link is slow: pulls over 1 Gbit/s, raw and encoded, end to end.

A holder and three readers, processes of their own, stand at the ends of a veth pair between two network
namespaces, as fast as it is at first (`Gbit/s` 0) and then shaped by `tc tbf`. All readers fetch prompts of
one kind by tcp: one takes raw bodies, one encoded ones, and one (`auto`) whatever it has measured to be
sooner there; that one has fetched a few bodies over the link as it is before it is measured. In rows `first`
only the holder has the prompt and nobody has asked for it before, so the time
of an encoded one includes encoding as well as decoding; in rows `again` the holder has encoded it before.
Bytes are what the reader's end of the link received, headers and control messages included.

The bodies are the KV of SmolLM2-135M in bf16, 256 tokens each (`bench.codec` says how it is computed).

What is saved is a share of what the raw pull takes, of a whole prompt asked for first.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bench.codec import BODY_TOKENS, real_kv
from bench.report import Report, finish, paired, parser
from bench.shaped import Link, link, mesh, why_no_link
from p2pcache import FixedChunker, KVLayout, Namespace
from p2pcache.api import Cache, Client

GBIT_PER_S = 1.0
MIB = 1 << 20
PATIENCE_S = 30.0
CHUNKS = FixedChunker(BODY_TOKENS)
HOLDER, RAW, LOSSLESS, AUTO = range(4)
WIRE_CODECS = ("lossless", "none", "lossless", "auto")
LEARNING_BODIES = 12
RATIOS = {
    "lossless_time_saved": ">= 0.2",
    "lossless_bytes_saved": ">= 0.2",
    "auto_time_saved": ">= 0.2",
    "auto_bytes_saved": ">= 0.2",
    "auto_fast_time_saved": ">= -0.1",
    "auto_fast_bytes_saved": "<= 0.02",
}


def main() -> None:
    options = parser(__doc__.splitlines()[0], "pull_link")
    options.add_argument("--cache", default=".cache", help="where the model is, or is put")
    options.add_argument("--tokens", type=int, default=2048)
    options.add_argument("--pairs", type=int, default=5)
    asked = options.parse_args()
    report = Report("pull_link")
    if why := why_no_link():
        for name, target in RATIOS.items():
            report.ratio(name, None, target, why)
    else:
        layout, bodies, _ = real_kv(asked.cache, asked.tokens)
        measure(report, layout, bodies, asked.pairs)
    finish(report, asked.json)


def measure(report: Report, layout: KVLayout, bodies: list[np.ndarray], pairs: int) -> None:
    kv = torch.cat([_as_kv(body, layout) for body in bodies], 2)
    with link() as line, tempfile.TemporaryDirectory(prefix="p2pbench-") as folder:
        with mesh(_at_the_ends(line, folder)) as nodes, contextlib.ExitStack() as stack:
            clients = [stack.enter_context(Client(n.socket_path, timeout_s=PATIENCE_S)) for n in nodes]
            ends = Ends(line, clients, layout, kv)
            whole = kv.shape[2]
            ends.learn(AUTO)
            saved = {"auto_fast": measure_prompts(report, ends, AUTO, 0.0, whole, pairs, again=False)}
            line.shape(GBIT_PER_S)
            for tokens in (BODY_TOKENS, whole):
                for again in (True, False):
                    last = measure_prompts(report, ends, LOSSLESS, GBIT_PER_S, tokens, pairs, again)
            ends.learn(AUTO)
            saved["lossless"] = last
            saved["auto"] = measure_prompts(report, ends, AUTO, GBIT_PER_S, whole, pairs, again=False)
    for name, target in RATIOS.items():
        who, what = name.rsplit("_", 2)[:2]
        report.ratio(name, saved[who][f"{what} saved"], target)


def _at_the_ends(line: Link, folder: str) -> list[tuple[dict[str, Any], str]]:
    """The holder and the readers: settings and namespace."""
    names = ("holder", "raw", "lossless", "auto")
    places = [(min(i, 1), name, WIRE_CODECS[i]) for i, name in enumerate(names)]
    return [
        (
            {
                "name": name,
                "runtime_dir": folder,
                "host": line.addresses[end],
                "allow_plaintext_network": True,
                "host_bytes_max": 512 * MIB,
                "transports": "tcp",
                "wire_codec": codec,
                "resync_s": 0.0,
            },
            line.ends[end],
        )
        for end, name, codec in places
    ]


def _as_kv(body: np.ndarray, layout: KVLayout) -> torch.Tensor:
    bits = torch.from_numpy(body.view(np.int16).copy()).view(layout.shape(BODY_TOKENS))
    return bits.view(torch.bfloat16)


class Ends:
    """The engines beside the holder and the readers, and what has crossed the link."""

    def __init__(self, line: Link, clients: list[Client], layout: KVLayout, kv: torch.Tensor):
        self._line = line
        self._clients = clients
        self._caches: list[Cache] = [c.open(Namespace("bench.pull_link", "weights", layout)) for c in clients]
        self._kv = kv
        self._prompts = itertools.count(1)

    def new_prompt(self, tokens: int) -> torch.Tensor:
        """A prompt that only the holder has."""
        run = torch.arange(tokens) + 100_000 * next(self._prompts)
        cache = self._caches[HOLDER]
        stored = cache.store(cache.chunks(run, CHUNKS), self._kv[:, :, :tokens], budget_s=PATIENCE_S)
        if stored.refused or not stored.published(PATIENCE_S):
            raise RuntimeError(f"the holder did not store a prompt: {stored}")
        return run

    def learn(self, reader: int) -> None:
        """Have a reader measure the link as it is now."""
        for _ in range(LEARNING_BODIES):
            self.fetch(reader, self.new_prompt(BODY_TOKENS))

    def fetch(self, reader: int, run: torch.Tensor) -> tuple[float, int]:
        """(seconds of the fetch, bytes received); the reader has forgotten the prompt when this returns."""
        cache = self._caches[reader]
        lookup = cache.lookup(run, chunker=CHUNKS, budget_s=PATIENCE_S)
        before, started_s = self._received(), time.perf_counter()
        with cache.fetch(lookup, budget_s=PATIENCE_S) as fetched:
            seconds = time.perf_counter() - started_s
            nbytes = self._received() - before
            whole = [c.kv for c in fetched if c.kv is not None and c.peer == "holder"]
            if len(whole) != len(fetched) or not _same_bits(torch.cat(whole, 2), self._kv[:, :, : len(run)]):
                raise RuntimeError("what came is not what was stored")
        forget = {"bodies": [k.exact for k in cache.chunks(run, CHUNKS)]}
        self._clients[reader].link().call("forget", forget, PATIENCE_S)
        self._clients[reader].link().call("published", {"lost": 0}, PATIENCE_S)
        return seconds, nbytes

    def _received(self) -> int:
        counter = "/sys/class/net/p2pbench/statistics/rx_bytes"
        command = ["ip", "netns", "exec", self._line.ends[1], "cat", counter]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.int16), other.contiguous().view(torch.int16))


def measure_prompts(
    report: Report, ends: Ends, reader: int, gbit_per_s: float, tokens: int, pairs: int, again: bool
) -> dict[str, Any]:
    """A reader's and raw fetches in turn; the row. again: of a prompt that the holder has sent so before."""
    moved: dict[int, list[int]] = {RAW: [], reader: []}

    def once(reader: int) -> Callable[[], float]:
        def run() -> float:
            prompt = ends.new_prompt(tokens)
            if again:
                ends.fetch(reader, prompt)
            seconds, nbytes = ends.fetch(reader, prompt)
            moved[reader].append(nbytes)
            return seconds

        return run

    its_s, raw_s, ratio = paired(once(reader), once(RAW), pairs)
    raw_bytes, its_bytes = (statistics.median(moved[who]) for who in (RAW, reader))
    row = {
        "Gbit/s": gbit_per_s,
        "wire codec": WIRE_CODECS[reader],
        "tokens": tokens,
        "asked": "again" if again else "first",
        "raw MB": raw_bytes / 1e6,
        "MB": its_bytes / 1e6,
        "bytes saved": 1 - its_bytes / raw_bytes,
        "raw ms": raw_s * 1e3,
        "ms": its_s * 1e3,
        "time saved": 1 - ratio,
    }
    report.row(**row)
    return row


if __name__ == "__main__":
    main()
