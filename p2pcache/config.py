"""Settings: frozen, validated once, with the unit in the name. A misspelt one names the nearest.

`NodeConfig()` is a working node. `NodeConfig.of({...})` reads settings from a user (YAML, Ray,
the command line); `P2PCACHE_<SETTING>` in the environment overrides a default.
"""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import os
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from p2pcache.types import ConfigError

ENV_PREFIX = "P2PCACHE_"
TRANSPORTS = ("shm", "ucx", "tcp")
EVICTIONS = ("s3-fifo", "lru")
GIB = 1 << 30
MIB = 1 << 20
_PAGE_BYTES = 4096
_NAME = re.compile(r"[A-Za-z0-9._-]{0,128}")
NVME_SEGMENTS_MAX = 512  # one open file each
NVME_DEPTH_MAX = 64  # one thread each
CODEC_WORKERS_MAX = 64
_CHOICES = {
    "nvme_io": ("auto", "uring", "threads"),
    "nvme_admit": ("all", "used"),
    "nvme_codec": ("none", "lossless", "int8", "int4"),
    "wire_codec": ("none", "lossless", "auto"),
}
_ABOVE_ZERO = (
    "pulls_in_flight_max",
    "pull_bytes_in_flight_max",
    "serve_bytes_in_flight_max",
    "serve_bytes_per_peer_max",
    "client_leases_max",
    "nvme_depth",
    "codec_workers",
)


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """Every limit of a node, with its meaning beside it."""

    name: str = ""  # of this node in the mesh; empty: made from the host's name
    runtime_dir: str = ""  # 0700 folder of the engine socket; empty: $XDG_RUNTIME_DIR or /tmp
    host: str = "127.0.0.1"  # address that control and data sockets bind and advertise
    control_port: int = 0  # 0: any free one
    allow_plaintext_network: bool = False  # permit `host` outside loopback; sockets are not encrypted

    host_bytes_max: int = 1 * GIB  # host tier: the slab, hard cap
    eviction: str = "s3-fifo"  # which bodies leave it first: `s3-fifo` or `lru`
    eviction_weighs_cost: bool = True  # keep longer what has more tokens a byte; false for unlike models
    nvme_path: str = ""  # folder of the NVMe tier; empty: no such tier
    nvme_bytes_max: int = 4 * GIB  # NVMe tier, hard cap, preallocated
    nvme_segment_bytes: int = 0  # unit of reclaim; no body is larger. 0: 64 MiB, more for a large tier
    nvme_io: str = "auto"  # uring, threads, or auto: io_uring where the kernel allows it
    nvme_depth: int = 8  # bodies written to and read from the NVMe tier at once
    nvme_write_bytes_per_s_max: int = 0  # spares the disk: bodies beyond this rate are dropped; 0: no limit
    nvme_admit: str = "all"  # what goes to NVMe within that rate: all bodies, or those used since they came
    demote_above: float = 0.75  # share of the host tier taken, above which cold bodies go to NVMe

    nvme_codec: str = "none"  # of bodies in the NVMe tier: `none`, `lossless` (bf16 in 3/4), `int8` or `int4`
    wire_codec: str = "none"  # between hosts, not over shm: `none`, `lossless`, `auto`: where it saves time
    wire_codec_bytes_max: int = 256 * MIB  # encoded bodies kept to be sent again; above: sent raw
    codec_saving_min: float = 0.05  # share of its bytes that encoding must save, or a body is kept raw
    codec_error_max: float = 0.5  # relative, of the worst channel: above, int8 and int4 leave a body as it is
    codec_workers: int = 2  # threads that encode and decode

    transports: tuple[str, ...] = TRANSPORTS  # in order of preference
    transports_by_peer: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # peer -> likewise
    pulls_in_flight_max: int = 8  # bodies under way to this node at once
    pull_bytes_in_flight_max: int = 256 * MIB  # and their bytes; a larger body comes alone
    pull_line_bytes_max: int = 0  # bodies that wait for their turn; above: busy. 0: as the host tier holds
    fetch_queue_bytes_max: int = 32 * MIB  # memory of (pre)fetches not answered yet; above: busy
    serve_bytes_in_flight_max: int = 512 * MIB  # leased to remote readers at once; above: busy
    serve_bytes_per_peer_max: int = 256 * MIB  # and to one of them; a larger body goes alone
    serve_bytes_per_s_min: int = 256 << 10  # a tcp reader that takes a body slower is dropped; 0: none is
    tcp_streams_max: int = 0  # connections that carry one large body; 0: half the cores, at most 4
    silent_after_s: float = 0.5  # a peer that let a deadline of at least this pass ...
    silent_retry_s: float = 5.0  # ... is not asked again for so long
    transport_retry_s: float = 30.0  # a transport that failed with a peer is left alone so long

    rpc_timeout_s: float = 1.0  # budget of a control message that no caller waits for
    remote_lease_s: float = 10.0  # how long a peer may read a slot
    client_leases_max: int = 65_536  # leases one engine may hold at once

    directory_ttl_s: float = 120.0  # an owner forgets a holder that has not published for so long
    republish_s: float = 40.0  # holders publish again this often
    tombstone_s: float = 30.0  # how long a withdrawal outlives messages that it overtook
    contact_lost_s: float = 10.0  # a node that its supervisor left alone so long stops publishing; 0: never
    resync_s: float = 5.0  # at most this long after a View change an owner answers `unknown`

    def __post_init__(self) -> None:
        for name, hint in _HINTS.items():
            value = getattr(self, name)
            if hint in (int, float) and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise ConfigError(f"{name} must be a number, not {value!r}")
            if hint in (int, float) and not (0 <= value < float("inf")):
                raise ConfigError(f"{name} must not be negative or infinite, is {value!r}")
            if hint is int and not isinstance(value, int):
                raise ConfigError(f"{name} must be a whole number, not {value!r}")
            if hint in (str, bool) and not isinstance(value, hint):
                kind = "text" if hint is str else "true or false"
                raise ConfigError(f"{name} must be {kind}, not {value!r}")
        if self.eviction not in EVICTIONS:
            raise ConfigError(f"unknown eviction {self.eviction!r}{_nearest(self.eviction, EVICTIONS)}")
        self._check_transports()
        self._check_host()
        if self.directory_ttl_s < 2 * self.republish_s:
            raise ConfigError(
                f"directory_ttl_s ({self.directory_ttl_s}) must be at least twice republish_s"
                f" ({self.republish_s}): one lost message must not hide a body"
            )
        if not 0 <= self.demote_above <= 1:
            raise ConfigError(f"demote_above is a share from 0 to 1, not {self.demote_above}")
        if not 0 <= self.codec_saving_min < 1:
            raise ConfigError(f"codec_saving_min is a share from 0 to below 1, not {self.codec_saving_min}")
        if self.codec_workers > CODEC_WORKERS_MAX:
            raise ConfigError(f"codec_workers is at most {CODEC_WORKERS_MAX}, not {self.codec_workers}")
        if self.control_port > 65_535:
            raise ConfigError(f"control_port {self.control_port} is no port")
        if self.nvme_path and self.nvme_bytes_max < 2 * self.segment_bytes:
            raise ConfigError(
                f"nvme_bytes_max ({self.nvme_bytes_max:,}) must hold at least two segments of"
                f" {self.segment_bytes:,} bytes (nvme_segment_bytes)"
            )
        if self.segment_bytes * NVME_SEGMENTS_MAX < self.nvme_bytes_max:
            raise ConfigError(
                f"nvme_bytes_max ({self.nvme_bytes_max:,}) is over {NVME_SEGMENTS_MAX} segments of"
                f" {self.segment_bytes:,} bytes: raise nvme_segment_bytes, or leave it 0"
            )
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"name {self.name[:80]!r} must be up to 128 letters, digits, dots, dashes or _")
        for name in _ABOVE_ZERO:
            if not getattr(self, name):
                raise ConfigError(f"{name} must be above 0")
        if self.nvme_depth > NVME_DEPTH_MAX:
            raise ConfigError(f"nvme_depth is at most {NVME_DEPTH_MAX}, not {self.nvme_depth}")
        if self.wire_codec in ("int8", "int4"):
            raise ConfigError(
                f"wire_codec {self.wire_codec} is not there: a reader is sent the very body that it asked"
                " for; nvme_codec takes it, and what it makes is sent as a body of its own"
            )
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} is one of {', '.join(choices)}, not {getattr(self, name)!r}")

    @property
    def segment_bytes(self) -> int:
        """The NVMe tier's segment size, chosen where the user did not; whole pages."""
        if self.nvme_segment_bytes:
            return self.nvme_segment_bytes
        largest = min(64 * MIB, self.nvme_bytes_max // 2) // _PAGE_BYTES * _PAGE_BYTES
        smallest = -(-self.nvme_bytes_max // NVME_SEGMENTS_MAX // _PAGE_BYTES) * _PAGE_BYTES
        return max(largest, smallest)

    @property
    def tcp_streams(self) -> int:
        """Connections that carry one large body. Both ends of each take a core to move the bytes."""
        return self.tcp_streams_max or max(1, min(4, len(os.sched_getaffinity(0)) // 2))

    def _check_transports(self) -> None:
        for names in (self.transports, *self.transports_by_peer.values()):
            for name in names:
                if name not in TRANSPORTS:
                    raise ConfigError(f"unknown transport {name!r}{_nearest(name, TRANSPORTS)}")

    def _check_host(self) -> None:
        try:
            address = ipaddress.ip_address(self.host)
        except ValueError:
            raise ConfigError(f"host must be an IP address, not {self.host!r}") from None
        if address.is_unspecified:
            raise ConfigError(f"host {self.host} is a wildcard; peers need an address they can reach")
        if not address.is_loopback and not self.allow_plaintext_network:
            raise ConfigError(
                f"host {self.host} is outside loopback and the sockets are not encrypted;"
                " set allow_plaintext_network if the network is trusted"
            )

    @classmethod
    def of(cls, settings: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> NodeConfig:
        """Settings of a user over those of the environment. Raises ConfigError."""
        merged = _from_environment(os.environ if environ is None else environ)
        for name, value in settings.items():
            if name not in _HINTS:
                raise ConfigError(f"unknown setting {name!r}{_nearest(name, _HINTS)}")
            merged[name] = value
        if "transports" in merged:
            merged["transports"] = _names(merged["transports"])
        if "transports_by_peer" in merged:
            by_peer = merged["transports_by_peer"]
            if not isinstance(by_peer, Mapping):
                raise ConfigError(f"transports_by_peer must map peers to transports, not {by_peer!r}")
            merged["transports_by_peer"] = {peer: _names(names) for peer, names in by_peer.items()}
        return cls(**merged)

    def replace(self, **changes: Any) -> NodeConfig:
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}


_HINTS = typing.get_type_hints(NodeConfig)


def _names(value: Any) -> tuple[str, ...]:
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"transports must be a list of names, not {value!r}")
    return tuple(names)


def _nearest(name: Any, known: typing.Iterable[str]) -> str:
    near = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.0)
    return f"; did you mean {near[0]!r}?" if near else ""


def parse_settings(texts: Mapping[str, str]) -> dict[str, Any]:
    """Settings from text, as the command line and the environment give them. Raises ConfigError."""
    found: dict[str, Any] = {}
    for name, text in texts.items():
        if name not in _HINTS:
            raise ConfigError(f"unknown setting {name!r}{_nearest(name, _HINTS)}")
        hint = _HINTS[name]
        try:
            if hint is bool:
                found[name] = {"1": True, "true": True, "0": False, "false": False}[text.lower()]
            elif hint in (int, float, str):
                found[name] = hint(text)
            elif name == "transports":
                found[name] = _names(text)
            else:
                raise ConfigError(f"{name} cannot be set by text")
        except (KeyError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            wanted = {int: "a whole number", float: "a number", bool: "true or false"}[hint]
            raise ConfigError(f"{name} takes {wanted}, not {text!r}") from None
    return found


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    named = {
        v.removeprefix(ENV_PREFIX).lower(): text for v, text in environ.items() if v.startswith(ENV_PREFIX)
    }
    try:
        return parse_settings({name: text for name, text in named.items() if name not in _NOT_SETTINGS})
    except ConfigError as error:
        raise ConfigError(f"in the environment ({ENV_PREFIX}*): {error}") from None


_NOT_SETTINGS = frozenset({"socket"})  # P2PCACHE_SOCKET: read by connect(), not by a node
