"""p2pcache: a peer-to-peer cache mesh for the KV tensors of LLM attention.

    client = p2pcache.connect()         # this host's node
    cache = client.open(namespace)      # one model, layout, dtype, adapter, tenant
    lookup = cache.lookup(tokens)       # who holds which chunk of this prompt

See `p2pcache.api` for the calls, `p2pcache.KVCacheManager` for a cache inside one process.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any

try:
    __version__ = version("p2pcache")
except PackageNotFoundError:  # a source tree that was not installed
    __version__ = "0.0.0"

_PUBLIC = {
    "connect": "p2pcache.api",
    "Cache": "p2pcache.api",
    "Client": "p2pcache.api",
    "KVCacheManager": "p2pcache.embedded",
    "EmbeddedMesh": "p2pcache.embedded",
    "KVLayout": "p2pcache.core.layout",
    "Namespace": "p2pcache.core.keys",
    "hash_salt": "p2pcache.core.keys",
    "ContentChunker": "p2pcache.core.chunking",
    "FixedChunker": "p2pcache.core.chunking",
    "SegmentChunker": "p2pcache.core.chunking",
    "NodeConfig": "p2pcache.config",
    "Match": "p2pcache.types",
    "Miss": "p2pcache.types",
    "Provenance": "p2pcache.types",
    "Source": "p2pcache.types",
    "Tier": "p2pcache.types",
}
__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    """Load what is asked for when it is asked for: `import p2pcache` alone brings no torch and no zmq."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'p2pcache' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
