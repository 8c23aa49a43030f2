"""Cutting and naming a prompt of 128k tokens: the whole of `Cache.chunks`, beside BLAKE3 alone.

The yardstick is the `blake3` package, one call a chunk over the same bytes of tokens, keyed as ours is, in
as tight a loop as Python allows. Ours also cuts, adds the exact keys and makes the objects. One core.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from blake3 import blake3

from bench.report import Report, finish, paired, parser
from p2pcache.core.chunking import ContentChunker, as_tokens
from p2pcache.core.keys import ChunkKeys, Namespace, chunk_keys, chunk_keys_py
from p2pcache.core.layout import KVLayout

TOKENS = 128 * 1024
PAIRS = 41
VOCABULARY = 128_256


def prose(count: int) -> np.ndarray:
    """Token ids with a Zipf-like distribution, as text has."""
    ids = np.random.default_rng(1).zipf(1.1, count)
    return np.minimum(ids, VOCABULARY - 1).astype(np.uint32)


def main() -> None:
    args = parser(__doc__ or "", "chunking").parse_args()
    key = Namespace("bench", "0", KVLayout(30, 3, 64, "bfloat16")).key()
    chunker = ContentChunker()
    run = prose(TOKENS)
    spans = chunker.spans(run)
    raw = memoryview(run).cast("B")
    parts = [raw[4 * start : 4 * stop] for start, stop in spans]
    rows = [tuple.__new__(ChunkKeys, k) for k in chunk_keys_py(key, run, spans)]

    def reference() -> float:
        started_s = time.perf_counter()
        for part in parts:
            blake3(part, key=key).digest()
        return time.perf_counter() - started_s

    def whole(tokens: object) -> float:  # what `Cache.chunks` does
        started_s = time.perf_counter()
        taken = as_tokens(tokens)
        named = chunk_keys(key, taken, chunker.spans(taken))
        seconds = time.perf_counter() - started_s
        assert named == rows, "keys differ from those of the Python twin"
        return seconds

    def twin() -> float:
        started_s = time.perf_counter()
        chunk_keys_py(key, run, chunker.spans(run))
        return time.perf_counter() - started_s

    def cuts() -> float:
        started_s = time.perf_counter()
        chunker.spans(run)
        return time.perf_counter() - started_s

    report = Report("chunking")
    report.row(
        what="blake3, one call a chunk", ms=paired(reference, reference, PAIRS)[0] * 1e3, chunks=len(spans)
    )
    given = {
        "uint32 array": run,
        "int64 tensor": torch.from_numpy(run.astype(np.int64)),
        "int32 tensor": torch.from_numpy(run.view(np.int32)),
        "list of ints": run.tolist(),
    }
    for name, tokens in given.items():
        ours_s, _, ratio = paired(lambda tokens=tokens: whole(tokens), reference, PAIRS)
        report.row(
            what=f"cut and name, {name}",
            ms=ours_s * 1e3,
            us_per_chunk=ours_s / len(spans) * 1e6,
            mtok_per_s=TOKENS / ours_s / 1e6,
            vs_blake3=ratio,
        )
        if name == "uint32 array":
            report.ratio("chunking_vs_blake3", ratio, "<= 2")
    for name, other in (("of it, cuts alone", cuts), ("Python twin of it", twin)):
        other_s, _, ratio = paired(other, reference, PAIRS)
        report.row(what=name, ms=other_s * 1e3, mtok_per_s=TOKENS / other_s / 1e6, vs_blake3=ratio)
    finish(report, args.json)


if __name__ == "__main__":
    main()
