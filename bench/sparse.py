"""What a sparse prefill costs, against a full one and against the share of tokens that it computes.

A prompt of 256-token chunks, all of them moved, and a question; a model of SmolLM2-135M's shape with
random weights, 2 threads. A sparse forward that computed its tokens at the price of a full prefill's
would take `share x full`; the ratio to that is what counts. `masked` is the same forward with the
model's own attention and one mask over everything.

    python -m bench.sparse --layers 10
"""

from __future__ import annotations

import time

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.report import Report, finish, paired, parser
from p2pcache.blend.rotate import RopeSpec
from p2pcache.blend.select import Piece, Selection
from p2pcache.blend.sparse import full_prefill, sparse_prefill

THREADS = 2
CHUNK_TOKENS = 256
QUESTION_TOKENS = 32
SHAPE = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
}  # fmt: skip
TARGETS = {"head-16": "<= 1.5"}


class Bodies:
    """A layer source of one random body a piece, the same for all: time does not depend on values."""

    def __init__(self, pieces: list[Piece], layers: int, dtype: torch.dtype) -> None:
        self.pieces = pieces
        shape = (layers, 2, CHUNK_TOKENS, SHAPE["num_key_value_heads"], SHAPE["head_dim"])
        self.bodies = [torch.randn(shape).to(dtype) for _ in pieces]

    def layer(self, index: int) -> list[tuple[Piece, torch.Tensor]]:
        return [(piece, body[index]) for piece, body in zip(self.pieces, self.bodies, strict=True)]


def seconds(run) -> float:
    started_s = time.perf_counter()
    run()
    return time.perf_counter() - started_s


def measure(report: Report, name: str, layers: int, chunks: int, selections: list[str], pairs: int) -> None:
    dtype = getattr(torch, name)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=layers)).to(dtype).eval()
    rope = RopeSpec.from_model(model)
    total = chunks * CHUNK_TOKENS + QUESTION_TOKENS
    tokens = np.random.default_rng(1).integers(0, SHAPE["vocab_size"], total)
    starts = range(0, chunks * CHUNK_TOKENS, CHUNK_TOKENS)
    pieces = [Piece(s, s + CHUNK_TOKENS, 7 + 3 * s, exact=False) for s in starts]
    source = Bodies(pieces, layers, dtype)

    def full() -> float:
        return seconds(lambda: full_prefill(model, tokens))

    for text in selections:
        selection = Selection.parse(text)
        recomputed = 0

        def sparse(masked: bool = False, selection: Selection = selection) -> float:
            nonlocal recomputed
            started_s = time.perf_counter()
            done = sparse_prefill(model, tokens, pieces, source, rope, selection=selection, masked=masked)
            recomputed = len(done.recomputed)
            return time.perf_counter() - started_s

        ours_s, full_s, of_full = paired(sparse, full, pairs)
        share = recomputed / total
        _, masked_s, of_masked = (0.0, 0.0, None)
        if not selection.needs_kv:
            _, masked_s, of_masked = paired(sparse, lambda: sparse(masked=True), 2 * pairs + 1)
        report.row(
            dtype=name, selection=text, tokens=total, share=share, sparse_ms=ours_s * 1e3,
            masked_ms=masked_s * 1e3 or None, full_ms=full_s * 1e3, speedup=1 / of_full,
        )  # fmt: skip
        report.ratio(f"{name}_{text}_of_share", of_full / share, TARGETS.get(text, ""))
        if of_masked is not None:
            report.ratio(f"{name}_{text}_of_masked", of_masked, "<= 1")


def main() -> None:
    args = parser(__doc__.splitlines()[0], "sparse")
    args.add_argument("--layers", type=int, default=30)
    args.add_argument("--chunks", type=int, default=12, help="of 256 tokens")
    args.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    args.add_argument("--selections", nargs="+", default=["head-16", "deviation-15%"])
    args.add_argument("--pairs", type=int, default=3)
    args = args.parse_args()
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    report = Report("sparse")
    for dtype in args.dtypes:
        measure(report, dtype, args.layers, args.chunks, args.selections, args.pairs)
    report.row(dtype="cpu", selection=torch.backends.cpu.get_cpu_capability())
    finish(report, args.json)


if __name__ == "__main__":
    main()
