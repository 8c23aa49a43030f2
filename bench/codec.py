"""Codecs on the KV of a real model: ratio, speed on one core beside memcpy, error; and turning keys.

The KV is a prefill of about 2,000 tokens of prose by SmolLM2-135M, rounded to bf16 and cut into bodies of 256
tokens. (Computed in fp32: CPUs without bf16 arithmetic take a minute for it otherwise.)
Bodies are worked on one after another, so that neither their bytes nor their destinations are in a cache.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from bench.report import Report, finish, paired, parser
from p2pcache import _native
from p2pcache.blend.forward import run_model
from p2pcache.blend.rotate import RopeSpec, rotate_keys_torch
from p2pcache.codecs import decode_into, encode
from p2pcache.codecs.lossless import Lossless
from p2pcache.codecs.quantised import Quantised
from p2pcache.core.layout import KVLayout
from p2pcache.demo.model import load_model, prepare_model
from p2pcache.demo.text import passages

BODY_TOKENS = 256


def main() -> None:
    arguments = parser(__doc__.splitlines()[0], "codec")
    arguments.add_argument("--cache", default=".cache", help="where the model is, or is put")
    arguments.add_argument("--tokens", type=int, default=2048)
    measure(arguments.parse_args())


def measure(arguments: argparse.Namespace) -> None:
    layout, bodies, rope = real_kv(arguments.cache, arguments.tokens)
    torch.set_num_threads(1)  # all figures are of one core
    report = Report("codec")
    for level in _native.simd_levels():
        for codec in (Lossless(level), Quantised("int8", 8, level), Quantised("int4", 4, level)):
            measure_codec(report, codec, layout, bodies)
    measure_rotation(report, layout, bodies, rope)
    finish(report, arguments.json)


@torch.no_grad()
def real_kv(cache: str, tokens: int) -> tuple[KVLayout, list[np.ndarray], RopeSpec]:
    """Bodies (uint8, flat) of `BODY_TOKENS` tokens each."""
    from transformers import DynamicCache

    model, tokenizer = load_model(prepare_model(cache))
    ids = [token for passage in passages(tokenizer, tokens // 400 + 1) for token in passage.token_ids]
    tokens = min(tokens, len(ids)) // BODY_TOKENS * BODY_TOKENS
    kv = DynamicCache()
    run_model(model, torch.tensor(ids[:tokens]), torch.arange(tokens), kv)
    stacked = torch.stack([torch.stack([a.keys[0], a.values[0]]) for a in kv.layers]).bfloat16()
    # [layers, 2, heads, tokens, dim]
    layers, _, heads, _, dim = stacked.shape
    bits = stacked.transpose(2, 3).contiguous().view(torch.int16).numpy()
    bodies = [
        np.ascontiguousarray(bits[:, :, at : at + BODY_TOKENS]).view(np.uint8).ravel()
        for at in range(0, tokens, BODY_TOKENS)
    ]
    return KVLayout(layers, heads, dim, "bfloat16"), bodies, RopeSpec.from_model(model)


def measure_codec(
    report: Report, codec: Lossless | Quantised, layout: KVLayout, bodies: list[np.ndarray]
) -> None:
    encoded = [encode(codec, body.data, layout, BODY_TOKENS) for body in bodies]
    dests = [np.zeros_like(body) for body in bodies]
    rooms = [np.zeros(codec.room(layout, BODY_TOKENS), np.uint8) for _ in bodies]
    raw_bytes = sum(body.nbytes for body in bodies)

    def seconds(work: Callable[[int], None]) -> Callable[[], float]:
        def once() -> float:
            start = time.perf_counter()
            for index in range(len(bodies)):
                work(index)
            return time.perf_counter() - start

        return once

    copy = seconds(lambda i: np.copyto(dests[i], bodies[i]))
    # Into memory that is there: what a page fault costs is the allocator's.
    encoding = seconds(lambda i: codec.encode_layers(bodies[i], layout, BODY_TOKENS, rooms[i]) and None)
    decoding = seconds(lambda i: decode_into(codec, encoded[i].data, dests[i].data, layout, BODY_TOKENS))
    encode_s, _, encode_ratio = paired(encoding, copy)
    decode_s, copy_s, decode_ratio = paired(decoding, copy)
    ratio = raw_bytes / sum(len(e.data) for e in encoded)
    best = codec.level == _native.simd_levels()[-1]
    report.row(
        codec=codec.name,
        level=codec.level,
        ratio=ratio,
        enc_GB_s=raw_bytes / encode_s / 1e9,
        dec_GB_s=raw_bytes / decode_s / 1e9,
        copy_GB_s=raw_bytes / copy_s / 1e9,
        error=max(e.error for e in encoded),
        raw=sum(e.codec == "raw" for e in encoded),
    )
    if best:
        is_lossless = codec.name == "lossless"
        report.ratio(f"{codec.name}_ratio", ratio, ">= 1.3" if is_lossless else "")
        report.ratio(f"{codec.name}_decode_vs_memcpy", 1 / decode_ratio, ">= 0.8" if is_lossless else "")
        report.ratio(f"{codec.name}_encode_vs_memcpy", 1 / encode_ratio)
        if is_lossless:
            for body, dest in zip(bodies, dests, strict=True):
                assert (body == dest).all(), "lossless decoding changed a body"


def measure_rotation(report: Report, layout: KVLayout, bodies: list[np.ndarray], rope: RopeSpec) -> None:
    """All layers' keys of a body at a time, as they lie in the slab, into a cache's layout."""
    shape = layout.shape(BODY_TOKENS)
    keys = [torch.from_numpy(b).view(torch.bfloat16).view(shape)[:, 0] for b in bodies]
    out = torch.empty(shape[0], shape[3], len(bodies) * BODY_TOKENS, shape[4], dtype=torch.bfloat16)
    angle = 777 * torch.tensor(rope.inv_freq, dtype=torch.float64)
    cos, sin = angle.cos().float(), angle.sin().float()

    def turn_all(turn: Callable[[torch.Tensor, torch.Tensor], None]) -> Callable[[], float]:
        def once() -> float:
            start = time.perf_counter()
            for index, k in enumerate(keys):
                for layer, layer_keys in enumerate(k):
                    place = out[layer, :, index * BODY_TOKENS : (index + 1) * BODY_TOKENS].transpose(0, 1)
                    turn(layer_keys, place)
            return time.perf_counter() - start

        return once

    by_torch = turn_all(lambda k, place: rotate_keys_torch(k, cos, sin, place, interleaved=rope.interleaved))
    nbytes = sum(k.numel() for k in keys) * 2
    for level in _native.simd_levels():
        native = turn_all(
            lambda k, place, level=level: _native.rotate_keys(
                k, cos.numpy(), sin.numpy(), "bfloat16", rope.interleaved, place, level
            )
        )
        native_s, torch_s, ratio = paired(native, by_torch)
        report.row(
            codec="rotation",
            level=level,
            native_GB_s=nbytes / native_s / 1e9,
            torch_GB_s=nbytes / torch_s / 1e9,
        )
    report.ratio("rotation_native_vs_torch", 1 / ratio)


if __name__ == "__main__":
    main()
