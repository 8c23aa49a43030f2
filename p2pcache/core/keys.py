"""Identity: what must be equal for two bodies to be interchangeable, and how a chunk is named.

A `Namespace` holds every field that shapes KV bytes. Each *present* field is written as

    u16 tag | u32 length | value            (big endian, fields in the order of their tags)

so no two fields can be confused, an absent field is absent and not some value that another field
could take, and nothing depends on Python's `hash`. BLAKE3 `derive_key` over it is the 32-byte
namespace key. Then, for the chunks of a prompt in order:

    content digest = BLAKE3(key=namespace, "content" | u64 LE count of tokens | tokens as u32 LE | extras)
    content key    = the first 16 of its 32 bytes
    exact key      = BLAKE3(key=namespace, "exact" | parent exact key | content digest)[:16]

The parent of a chain's first chunk is sixteen zero bytes. Tokens are hashed once. Bodies that are not what an
exact key promises have keys of their own, made of it: see `body_key` and `lossy_key`.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from blake3 import blake3

from p2pcache import _native
from p2pcache.core.layout import KVLayout
from p2pcache.types import KEY_BYTES, ConfigError, ContentKey, ExactKey, Provenance

KEY_VERSION = 1
CHAIN_ROOT = ExactKey(bytes(KEY_BYTES))
_CONTEXT = "p2pcache 2026-11 namespace"
_LOSSY_CONTEXT = "p2pcache 2026-11 lossy body"
_FIELD_BYTES_MAX = 4096


def hash_salt(tenant: str) -> bytes:
    """A tenant's salt as it may leave the process: hashed at the boundary, 32 bytes."""
    return blake3(tenant.encode(), derive_key_context="p2pcache 2026-11 tenant salt").digest()


@dataclass(frozen=True, slots=True)
class Namespace:
    """All that must be equal for two bodies to be interchangeable.

    model: a name for people, such as `SmolLM2-135M-Instruct`.
    weights: fingerprint of the weights (hex of a hash over them).
    layout: geometry and dtype of the KV.
    rope: fingerprint of the rotary embedding, or None where keys carry no position.
    adapter: fingerprint of a LoRA or other adapter.
    tenant: the *hashed* salt (see `hash_salt`); None is the tenant without a name.
    extras: further (name, value) pairs an integration needs, such as its quantisation scales.
    """

    model: str
    weights: str
    layout: KVLayout
    rope: bytes | None = None
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    adapter: str | None = None
    tenant: bytes | None = None
    extras: tuple[tuple[str, bytes], ...] = ()

    def __post_init__(self) -> None:
        if not self.model or not self.weights:
            raise ConfigError("a namespace needs a model name and a weights fingerprint")
        for rank, size in ((self.tp_rank, self.tp_size), (self.pp_rank, self.pp_size)):
            if not 0 <= rank < size:
                raise ConfigError(f"rank {rank} is outside a group of {size}")
        if len({name for name, _ in self.extras}) != len(self.extras):
            raise ConfigError("a namespace's extras must have distinct names")

    def encode(self) -> bytes:
        """The field-tagged, length-prefixed form that is hashed (format in the module docstring)."""
        layout = self.layout
        fields: list[tuple[int, bytes | None]] = [
            (1, _uint(KEY_VERSION)),
            (2, self.model.encode()),
            (3, self.weights.encode()),
            (4, b"L2THD"),  # order of axes of the canonical body
            (5, _uint(layout.layers)),
            (6, _uint(layout.kv_heads)),
            (7, _uint(layout.head_dim)),
            (8, layout.dtype.encode()),
            (9, self.rope),
            (10, _uint(self.tp_rank) + _uint(self.tp_size)),
            (11, _uint(self.pp_rank) + _uint(self.pp_size)),
            (12, None if self.adapter is None else self.adapter.encode()),
            (13, self.tenant),
        ]
        for name, value in sorted(self.extras):
            fields.append((14, _framed(name.encode()) + _framed(value)))
        out = bytearray()
        for tag, value in fields:
            if value is None:
                continue
            if len(value) > _FIELD_BYTES_MAX:
                raise ConfigError(f"namespace field {tag} is over {_FIELD_BYTES_MAX} bytes")
            out += struct.pack(">H", tag) + _framed(value)
        return bytes(out)

    def describe(self) -> bytes:
        """What other nodes may know of this namespace: all but the tenant (see `from_description`)."""
        return dataclasses.replace(self, tenant=None).encode()

    @staticmethod
    def from_description(raw: bytes, tenant: bytes | None = None) -> Namespace:
        """Read a description, as the given tenant's. Raises ConfigError on anything malformed."""
        fields: dict[int, bytes] = {}
        extras: list[tuple[str, bytes]] = []
        at = 0
        try:
            while at < len(raw):
                tag, length = struct.unpack_from(">HI", raw, at)
                value, at = raw[at + 6 : at + 6 + length], at + 6 + length
                if len(value) != length or length > _FIELD_BYTES_MAX:
                    raise ConfigError("a namespace description is cut off")
                if tag == 14:
                    size = struct.unpack_from(">I", value)[0]
                    extras.append((value[4 : 4 + size].decode(), value[8 + size :]))
                else:
                    fields[tag] = value
            numbers = {tag: int.from_bytes(fields[tag], "big") for tag in (1, 5, 6, 7)}
            if numbers[1] != KEY_VERSION:
                raise ConfigError(f"a namespace of key version {numbers[1]}, not {KEY_VERSION}")
            (tp_rank, tp_size), (pp_rank, pp_size) = (struct.unpack(">QQ", fields[tag]) for tag in (10, 11))
            layout = KVLayout(numbers[5], numbers[6], numbers[7], fields[8].decode())
            adapter = fields[12].decode() if 12 in fields else None
            names = fields[2].decode(), fields[3].decode()
        except (KeyError, struct.error, UnicodeDecodeError) as error:
            raise ConfigError(f"not a namespace description: {error!r}") from None
        described = Namespace(
            *names, layout, fields.get(9), tp_rank, tp_size, pp_rank, pp_size, adapter, None, tuple(extras)
        )
        # A namespace has one description. What was overlooked here (another order of axes, an unknown or
        # doubled field) would otherwise pass for a namespace that it is not.
        if described.encode() != raw:
            raise ConfigError("a namespace description holds something that this version does not know")
        return dataclasses.replace(described, tenant=tenant)

    def key(self) -> bytes:
        """The 32-byte namespace key."""
        return blake3(self.encode(), derive_key_context=_CONTEXT).digest()

    def differences(self, held: Namespace) -> list[str]:
        """Why a body held under `held` does not serve this namespace, in words."""
        words = self.layout.differences(held.layout)
        for name in ("weights", "rope", "adapter", "tp_rank", "tp_size", "pp_rank", "pp_size", "extras"):
            mine, theirs = getattr(self, name), getattr(held, name)
            if mine != theirs:
                words.append(f"{name}: held {_shown(theirs)}, asked {_shown(mine)}")
        return words


def _shown(value: object) -> object:
    return value.hex()[:12] if isinstance(value, bytes) else value


def _uint(value: int) -> bytes:
    return struct.pack(">Q", value)


def _framed(value: bytes) -> bytes:
    return struct.pack(">I", len(value)) + value


class ChunkKeys(NamedTuple):
    """One chunk of a prompt: its span of tokens `[start, stop)`, its content digest, its two keys.

    A tuple, because a long prompt has hundreds and frozen dataclasses take five times as long to make.
    """

    start: int
    stop: int
    digest: bytes  # 32 bytes
    content: ContentKey
    exact: ExactKey

    @property
    def tokens(self) -> int:
        return self.stop - self.start


def chunk_keys(
    namespace_key: bytes,
    tokens: np.ndarray,
    spans: Sequence[tuple[int, int]],
    *,
    parent: ExactKey = CHAIN_ROOT,
    extras: Sequence[bytes] = (),
) -> list[ChunkKeys]:
    """Name the chunks of one chain.

    tokens: uint32 `[n]`, contiguous. spans: consecutive chunks. parent: the exact key that stands
    before the first span. extras: per chunk, what its tokens do not show (full-width digests of
    the images behind placeholder tokens, with their shape); empty where there is nothing.
    """
    rows = _native.name_chunks(namespace_key, np.ascontiguousarray(tokens, np.uint32), spans, parent, extras)
    return [tuple.__new__(ChunkKeys, row) for row in rows]


def chunk_keys_py(
    namespace_key: bytes,
    tokens: np.ndarray,
    spans: Sequence[tuple[int, int]],
    *,
    parent: ExactKey = CHAIN_ROOT,
    extras: Sequence[bytes] = (),
) -> list[ChunkKeys]:
    """The twin of the native `chunk_keys`, on the reference implementation of BLAKE3."""
    raw = memoryview(np.ascontiguousarray(tokens, dtype="<u4")).cast("B")
    keys: list[ChunkKeys] = []
    for i, (start, stop) in enumerate(spans):
        # The count comes first and always, so that no extra can pass for further tokens.
        hasher = blake3(b"content" + struct.pack("<Q", stop - start), key=namespace_key)
        hasher.update(raw[4 * start : 4 * stop])
        if extras:
            hasher.update(extras[i])
        digest = hasher.digest()
        parent = exact_key(namespace_key, parent, digest)
        keys.append(ChunkKeys(start, stop, digest, ContentKey(digest[:KEY_BYTES]), parent))
    return keys


def exact_key(namespace_key: bytes, parent: ExactKey, digest: bytes) -> ExactKey:
    """The exact key of a chunk with this content digest, computed right behind `parent`."""
    return ExactKey(blake3(b"exact" + parent + digest, key=namespace_key).digest(KEY_BYTES))


def body_key(namespace_key: bytes, exact: ExactKey, provenance: Provenance) -> ExactKey:
    """The name of the body that was computed for a chunk with this exact key.

    Only KV computed behind all the tokens that the exact key names may carry it. What attended to
    reused KV, or to less than the whole prompt, gets a name that can never equal an exact key, so it
    is found by content and never as exact.
    """
    if provenance is Provenance.IN_CONTEXT:
        return exact
    tag = b"approximate" if provenance is Provenance.APPROXIMATE else b"isolated"
    return ExactKey(blake3(tag + exact, key=namespace_key).digest(KEY_BYTES))


def lossy_key(exact: ExactKey, codec: str) -> ExactKey:
    """The name of what a lossy codec makes of the body with this key.

    It needs no namespace, since the body's own key is bound to one; so a node can make it, which knows none.
    Another mode of BLAKE3 than that of all other keys keeps it apart from them.
    """
    hashed = blake3(_framed(codec.encode()) + exact, derive_key_context=_LOSSY_CONTEXT)
    return ExactKey(hashed.digest(KEY_BYTES))


def named_key(namespace_key: bytes, name: int | str, version: int) -> ExactKey:
    """The key of one version of a value that a caller stores under its own name."""
    if isinstance(name, bool) or not isinstance(name, int | str):
        raise ConfigError(f"a key is an int or a str, not {type(name).__name__}")
    tagged = b"i" + str(name).encode() if isinstance(name, int) else b"s" + name.encode()
    return ExactKey(blake3(b"named" + _uint(version) + tagged, key=namespace_key).digest(KEY_BYTES))
