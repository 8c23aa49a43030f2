"""Engines by name: what `engine=` in a `ServeConfig` stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from p2pcache.api import Client
from p2pcache.demo.model import load_model, prepare_model, weights_fingerprint
from p2pcache.integrations.transformers import TransformersEngine
from p2pcache.integrations.transformers_serving import ServingEngine
from p2pcache.serve.config import ServeConfig
from p2pcache.types import ConfigError

STORING_SHARE = 0.25
"""Of the memory for running sequences, what finished ones may take until they are stored."""


def model_folder(config: ServeConfig) -> Path:
    """The model's folder on this host. Raises ConfigError where there is none."""
    if config.model == "smollm2":
        return prepare_model(config.model_cache)
    folder = Path(config.model).expanduser()
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model {config.model!r} is no folder with a config.json on this host")
    return folder


def load_tokenizer(config: ServeConfig) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_folder(config), local_files_only=True)


def make_transformers(config: ServeConfig, client: Client | None) -> ServingEngine:
    """A transformers model in this process."""
    if config.threads:
        torch.set_num_threads(config.threads)
    folder = model_folder(config)
    dtype = config.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
    model, _ = load_model(folder, dtype)
    engine = TransformersEngine(
        model.to(config.device),
        client,
        weights=weights_fingerprint(folder),
        name=config.model_name,
        tenant=_tenant(config),
    )
    return ServingEngine(
        engine,
        content_reuse=config.content_reuse,
        pull_budget_s=config.pull_budget_s,
        storing_bytes_max=int(STORING_SHARE * config.memory_bytes_max),
    )


def _tenant(config: ServeConfig) -> bytes | None:
    from p2pcache.core.keys import hash_salt

    return hash_salt(config.tenant) if config.tenant else None


MAKERS = {"transformers": make_transformers}
