"""What non-prefix reuse costs in quality and saves in time: `python -m bench.reuse`.

Prompts of 4, 8 and 16 documents, whose KV was computed elsewhere and is put together in an order of its
own. Every mode of recomputing is measured against full prefill. The short form (the default) has a few
prompts and the modes that matter; `--long` has all modes and 200 prompts. Each row is kept in `--log`, and a
run that is started again goes on from there.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bench.report import Report, finish, parser
from bench.reuse import quality, results
from bench.reuse.sources import Bodies, Origin
from bench.reuse.text import Document, Format, Prompt, documents
from p2pcache.blend.rotate import RopeSpec
from p2pcache.demo.model import load_model, prepare_model, weights_fingerprint

POOL, PRIMERS, DOCUMENT_TOKENS = 60, 1, 280
SIZES = (4, 8, 16)
SHORT = ("none", "head-16", quality.UNTURNED)
LONG = (
    *("none", "head-8", "head-16", "head-32", quality.UNTURNED),
    *("deviation-5%", "deviation-15%", "deviation-30%", "deviation-15%@8"),
    *("query-15%", "head-16+query-10%", "head-16+deviation-5%", "random-15%"),
)
OF_THE_PROMPT = (quality.PREFIX, quality.FULL)  # the same whatever the documents' origin


@dataclass(frozen=True)
class Case:
    """One prefill to be measured."""

    documents: int
    prompt: int
    origin: Origin
    mode: str


def main() -> int:
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    folder = arguments.model or prepare_model(Path.home() / ".cache" / "p2pcache")
    model, tokenizer = load_model(folder, getattr(torch, arguments.dtype))
    report = Report("reuse")
    log = results.Log(
        arguments.log,
        {
            "weights": weights_fingerprint(folder)[:16],
            "dtype": arguments.dtype,
            "threads": arguments.threads,
            "document_tokens": DOCUMENT_TOKENS,
        },
    )
    measure(model, tokenizer, log, cases(arguments), Console(stderr=True))
    report.details = results.summary(log.rows)
    for row in report.details:
        report.row(**results.shown(row))
    ratios(report, arguments.long)
    missing = results.plot(report.details, Path("out/reuse.png"))
    if missing:
        report.missing["plot"] = missing
    finish(report, arguments.json)
    return 0


def cases(arguments: argparse.Namespace) -> Iterator[Case]:
    """All that is measured, prompt by prompt, so that a run that is stopped has whole prompts."""
    modes = LONG if arguments.long else SHORT
    for number in range(max(arguments.prompts)):
        for size, count in zip(SIZES, arguments.prompts, strict=True):
            if number < count:
                for mode in OF_THE_PROMPT if arguments.long else ():
                    yield Case(size, number, Origin.PRIMED, mode)
                for origin in Origin:
                    # All modes on the origin that is used, and on the one without help for comparison.
                    mine = modes if origin in (Origin.PRIMED, Origin.ALONE) else SHORT
                    yield from (Case(size, number, origin, mode) for mode in mine)


def measure(model: Any, tokenizer: Any, log: results.Log, wanted: Iterator[Case], console: Console) -> None:
    form = Format(tokenizer)
    texts = documents(form, POOL + PRIMERS, DOCUMENT_TOKENS)
    pool, primer = texts[:POOL], texts[POOL].part
    bodies, rope = Bodies(model, form, pool, primer), RopeSpec.from_model(model)
    last: tuple[int, int] | None = None
    prompt: Prompt
    full: quality.Reference
    for case in wanted:
        if log.has(case.documents, case.prompt, case.origin, case.mode):
            continue
        if last != (last := (case.documents, case.prompt)):
            prompt = _prompt(form, pool, case)
            for document in prompt.documents:  # beforehand: what computes them is not what is timed
                for origin in Origin:
                    bodies.of(origin, document)
            full = quality.refer(model, prompt)
            console.print(f"prompt {case.prompt} of {case.documents} documents, {len(prompt.tokens)} tokens")
        row = quality.judge(model, rope, prompt, bodies, case.origin, case.mode, full)
        log.add({"documents": case.documents, "prompt": case.prompt, "tokens": len(prompt.tokens)} | row)


def _prompt(form: Format, pool: list[Document], case: Case) -> Prompt:
    rng = random.Random(case.documents * 10_000 + case.prompt)
    return form.prompt(rng.sample(pool, case.documents), rng)


def ratios(report: Report, long: bool) -> None:
    """What the figures have to show, or the benchmark is blind; and what is aimed at."""
    by = {(r["documents"], r["origin"], r["mode"]): r for r in report.details}
    for size, target in ((4, ">= 0.95"), (8, ">= 0.93"), (16, "")):
        fast = [r for (n, *_), r in by.items() if n == size and r["speedup"] >= 4]
        best = [r for r in fast if r["mode"] != quality.UNTURNED]
        if best:
            top = max(best, key=lambda r: r["top1"])
            report.ratio(f"top1_agreement_{size}", top["top1"], target)
        turned, unturned = by.get((size, "primed", "head-16")), by.get((size, "primed", quality.UNTURNED))
        if turned and unturned:
            report.ratio(f"unturned_kl_vs_turned_{size}", unturned["kl"] / max(turned["kl"], 1e-9), ">= 3")
        deviation, chance = by.get((size, "alone", "deviation-15%")), by.get((size, "alone", "random-15%"))
        if deviation and chance:
            report.ratio(f"random_kl_vs_deviation_{size}", chance["kl"] / deviation["kl"], "> 1")
        elif long:
            report.ratio(f"random_kl_vs_deviation_{size}", None, "> 1")


def _arguments() -> argparse.Namespace:
    made = parser(__doc__.split("\n")[0], "reuse")
    made.add_argument("--model", type=Path, help="a folder with a transformers model; default: SmolLM2-135M")
    made.add_argument("--long", action="store_true", help="all modes, and 200 prompts of 4 documents")
    made.add_argument("--prompts", help="how many of 4, 8 and 16 documents, such as 200,60,24")
    made.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--log", type=Path, default=Path("out/reuse.jsonl"), help="rows that are kept")
    arguments = made.parse_args()
    given = arguments.prompts or ("200,60,24" if arguments.long else "6,3,0")
    arguments.prompts = [int(n) for n in given.split(",")]
    if len(arguments.prompts) != len(SIZES):
        made.error("--prompts takes three numbers")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
