"""The vocabulary of p2pcache: ids, tiers, matches, answers and errors.

Standard library only; every other module may import this one. Ordinary outcomes (a miss, a
holder that is gone, a deadline) are *values* here; exceptions are for faults, and their type says
whose fault it is: `ConfigError` the user's, `RemoteError` a peer's, `InvariantError` our own.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NewType

KEY_BYTES = 16
"""Width of a content or exact key. 128 bits of BLAKE3: no accidental collision at any scale."""

ContentKey = NewType("ContentKey", bytes)
"""Names a chunk's tokens alone. The chunk's address in the directory."""

ExactKey = NewType("ExactKey", bytes)
"""Names a chunk and every token that stood before it when its KV was computed. Names one body."""


class Tier(enum.IntEnum):
    """Where a body lies, fastest first."""

    DEVICE = 0
    HOST = 1
    NVME = 2


class Match(enum.StrEnum):
    """How a chunk of a prompt was found."""

    EXACT = "exact"  # same tokens, same tokens before them: bit-exact reuse
    CONTENT = "content"  # same tokens, other tokens before them: non-prefix reuse
    NONE = "none"


class Provenance(enum.IntEnum):
    """What a body's tokens attended to when they were computed."""

    ISOLATED = 0  # only their own segment, or a declared primer in front of it: never offered as exact
    IN_CONTEXT = 1  # all tokens before them, computed in full
    APPROXIMATE = 2  # a prompt that itself contained reused KV: never offered as exact


class Source(enum.StrEnum):
    """Where the planner takes a chunk's KV from."""

    LOCAL = "local"  # this node's host tier
    NVME = "nvme"  # this node's NVMe tier
    PEER = "peer"
    RECOMPUTE = "recompute"


class Miss(enum.StrEnum):
    """Why a chunk was not served from the cache. Every miss has one (law 9)."""

    ABSENT = "absent"  # its owner knows no holder
    UNKNOWN = "unknown"  # its owner has just taken over and has not heard from all holders yet
    OWNER_UNREACHABLE = "owner-unreachable"
    HOLDER_GONE = "holder-gone"  # withdrawn, restarted, or evicted between lookup and pull
    HOLDER_UNREACHABLE = "holder-unreachable"
    DEADLINE = "deadline"
    CORRUPT = "corrupt"  # bytes arrived and did not match their checksum
    NO_ROOM = "no-room"  # nothing in this node's host tier could be evicted for it
    BUSY = "busy"  # a limit on work in flight
    LAYOUT = "layout"  # held, but in another dtype or layout
    EXACT_ONLY = "exact-only"  # held at another position, and the caller asked for exact reuse
    CHEAPER_TO_RECOMPUTE = "cheaper-to-recompute"
    NODE_DOWN = "node-down"  # this process has lost its own node


@dataclass(frozen=True, slots=True)
class BodyInfo:
    """What a body is, apart from its bytes and from who holds it."""

    content: ContentKey
    exact: ExactKey
    tokens: int
    nbytes: int
    provenance: Provenance = Provenance.IN_CONTEXT
    base_position: int = 0  # position of its first token when K was rotated
    codec: str = "raw"


@dataclass(frozen=True, slots=True)
class Holder:
    """One node that has a body, in one tier, as far as the directory knows (a hint)."""

    node: str
    incarnation: int
    tier: Tier


@dataclass(frozen=True, slots=True)
class Found:
    """A body and its known holders."""

    body: BodyInfo
    holders: tuple[Holder, ...]


class P2PCacheError(Exception):
    """Base of every error that p2pcache raises on purpose."""


class ConfigError(P2PCacheError, ValueError):
    """The user's fault: a setting is unknown, out of range, or cannot be satisfied here."""


class LayoutError(P2PCacheError, ValueError):
    """The user's fault: a tensor's shape, dtype or device is not what its namespace says."""


class TierFull(P2PCacheError):
    """No room in a tier: the body is larger than the tier, or nothing in it may be evicted."""


class RemoteError(P2PCacheError):
    """A peer's fault, or the network's: it answered with an error, nonsense, or nothing."""


class DeadlineExceeded(RemoteError):
    """A remote step did not end within the caller's budget."""


class VersionMismatch(RemoteError):
    """The other side speaks another version of the p2pcache protocol."""


class Fenced(RemoteError):
    """The asking incarnation is not a member of the mesh any more: another has its place, or none."""


class NodeDown(P2PCacheError):
    """This process's own node is not there, or has gone away."""


class InvariantError(P2PCacheError):
    """Our own fault: a law of the design was about to be broken. Please report it."""
