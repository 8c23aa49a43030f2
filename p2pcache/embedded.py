"""p2pcache in one process, without Ray: a cache for a plain inference loop, and meshes for tests.

    manager = KVCacheManager(cpu_memory_gb=4, nvme_path="/nvme/kv")
    manager.put(step, kv)           # any int or str key; a tensor, or nested lists or tuples of them
    kv = manager.get(step)          # None if it has been evicted

The same node and the same code paths as in a cluster: a mesh of one.
"""

from __future__ import annotations

import dataclasses
import itertools
import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack
import torch

from p2pcache.api import Client
from p2pcache.config import GIB, NodeConfig
from p2pcache.core.checksum import checksum_body
from p2pcache.core.keys import Namespace, named_key
from p2pcache.core.layout import KVLayout
from p2pcache.core.records import pack_bodies, unpack_grants
from p2pcache.core.wire import META_BYTES_MAX
from p2pcache.io.link import Link
from p2pcache.io.store_device import DeviceStore
from p2pcache.node.wireform import body_to_wire
from p2pcache.runtime import NodeRuntime
from p2pcache.types import (
    BodyInfo,
    ConfigError,
    ContentKey,
    LayoutError,
    Miss,
    NodeDown,
    Provenance,
    RemoteError,
    TierFull,
)
from p2pcache.values import describe, map_tensors, pack_into, size_bytes, unpack

# Named values have a namespace of their own, so no name can ever meet a content key.
_NAMED = Namespace("p2pcache named values", "1", KVLayout(1, 1, 1, "uint8"))
_BUDGET_S = 5.0


class KVCacheManager:
    """Device, host and NVMe tiers in this process, behind `put` and `get`. Close it when done."""

    def __init__(
        self,
        *,
        gpu_memory_gb: float = 0.0,
        cpu_memory_gb: float = 1.0,
        nvme_path: str | None = None,
        nvme_gb: float = 4.0,
        device: str | torch.device = "cuda",
        **settings: Any,
    ):
        """Sizes in GiB. `settings` are `NodeConfig`'s. Raises ConfigError where one cannot be had.

        gpu_memory_gb: device memory that may hold recently used values; 0 for none. device: where
        that is (`cpu` works too, and is what tests use). nvme_path: a folder in which `nvme_gb` is
        allocated at once. Values live as long as the manager; `close` gives the space back.
        """
        merged: dict[str, Any] = {"host_bytes_max": _gib("cpu_memory_gb", cpu_memory_gb), **settings}
        if nvme_path is not None:
            merged |= {"nvme_path": str(nvme_path), "nvme_bytes_max": _gib("nvme_gb", nvme_gb)}
        device_bytes = _gib("gpu_memory_gb", gpu_memory_gb)
        self._device = DeviceStore(device_bytes, device) if device_bytes else None
        fresh = nvme_path is not None and not _segments(nvme_path)
        self._segments: Path | None = None
        self._folder = (
            tempfile.TemporaryDirectory(prefix="p2pcache-") if "runtime_dir" not in settings else None
        )
        if self._folder is not None:
            merged["runtime_dir"] = self._folder.name
        try:
            self.runtime = NodeRuntime.start(NodeConfig.of(merged))
            # Not before: where the start is refused, the segments may be another's who was faster.
            self._segments = Path(nvme_path) if nvme_path is not None and fresh else None
            try:
                self.client = Client(self.runtime.socket_path, timeout_s=_BUDGET_S)
            except BaseException:
                self.runtime.close()
                raise
        except BaseException:
            self._cleanup()
            raise
        # A key of this manager's own: what another left behind in the mesh is not ours to return.
        self._key = dataclasses.replace(_NAMED, tenant=secrets.token_bytes(32)).key()
        self._versions = itertools.count()
        self._current: dict[int | str, BodyInfo] = {}

    def put(self, key: int | str, kv: Any) -> None:
        """Keep a copy of a value under a key; the last value put under it is what `get` returns.

        kv: a tensor of any shape, strides, dtype and device, or nested lists and tuples of tensors
        (`past_key_values`). Raises TierFull where it is larger than the host tier (and the key's old
        value is gone), LayoutError for anything else than tensors.
        """
        _check_key(key)
        tensors: list[torch.Tensor] = []
        manifest = describe(kv, tensors)
        meta = msgpack.packb(manifest)
        if len(meta) > META_BYTES_MAX:
            raise LayoutError(
                f"{len(tensors)} tensors in one value are too many: stack them, or put them one by one"
            )
        # Each put has a key of its own, so a late copy of an old value can never pass for the new one.
        exact = named_key(self._key, key, next(self._versions))
        old = self._current.pop(key, None)
        nbytes = max(sum(map(size_bytes, tensors)), 1)
        body = BodyInfo(ContentKey(exact), exact, 1, nbytes, Provenance.ISOLATED)
        link = self.client.link()
        if old is not None:
            self._forget(link, old)
        request = {"bodies": [body_to_wire(body)], "deadline_s": _BUDGET_S}
        (status, offset, generation), *_ = link.call("reserve", request, 2 * _BUDGET_S)["slots"]
        if status != "ok":
            raise TierFull(f"no room for {nbytes:,} bytes in the host tier: {status}")
        try:
            with link.writing():
                view = link.slab.view(offset, nbytes)
                pack_into(tensors, view)
                sums = list(checksum_body(view, exact, 1))
        except BaseException:
            link.notify("abort", {"generations": [generation]})
            raise
        link.call("commit", {"slots": [[generation, sums, meta]]}, _BUDGET_S)
        self._current[key] = body
        if self._device is not None:
            self._device.put(exact, kv)

    def get(self, key: int | str, device: str | torch.device | None = None) -> Any:
        """The value last put under a key, as fresh tensors the caller owns; None where it is gone.

        device: where the tensors shall be; default: the device tier's device, or the CPU.
        """
        _check_key(key)
        body = self._current.get(key)
        if body is None:
            return None
        target = torch.device(device or (self._device.device if self._device is not None else "cpu"))
        if self._device is not None and (kept := self._device.get(body.exact)) is not None:
            return map_tensors(kept, lambda t: t.to(target, copy=True))
        wants = pack_bodies([(body, ())])
        request = {"names": wants.names, "wants": wants.bodies, "holders": b"", "deadline_s": _BUDGET_S}
        try:
            link = self.client.link()
            reply = link.call("fetch", request, _BUDGET_S)
            (grant,) = unpack_grants(reply["names"], reply["grants"])
        except (NodeDown, RemoteError):
            return None
        if not grant.generation:
            if grant.miss is Miss.HOLDER_GONE:  # for good; any other reason may pass
                if self._current.get(key) is body:  # and not a newer one, put meanwhile
                    del self._current[key]
            return None
        ((_, meta),) = reply["metas"]
        try:
            value = unpack(msgpack.unpackb(meta), link.slab.view(grant.offset, grant.nbytes), target)
        finally:
            link.notify("release", {"generations": [grant.generation]})
        if self._device is not None:
            self._device.put(body.exact, value)
        return value

    def forget(self, key: int | str) -> None:
        """Drop a value. Nothing happens where there is none."""
        _check_key(key)
        old = self._current.pop(key, None)
        if old is not None:
            self._forget(self.client.link(), old)

    def _forget(self, link: Link, body: BodyInfo) -> None:
        if self._device is not None:
            self._device.drop(body.exact)
        link.notify("forget", {"bodies": [body.exact]})

    def status(self) -> dict[str, Any]:
        """Tiers, bytes and counts of the node."""
        return self.runtime.status() | ({"device": self._device.status()} if self._device is not None else {})

    def close(self) -> None:
        """Let go of memory and files. Idempotent."""
        self.client.close()
        self.runtime.close()
        self._cleanup()

    def __enter__(self) -> KVCacheManager:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _cleanup(self) -> None:
        for segment in _segments(self._segments) if self._segments is not None else []:
            segment.unlink(missing_ok=True)
        if self._folder is not None:
            self._folder.cleanup()


def _segments(folder: str | Path) -> list[Path]:
    """The NVMe log's files in a folder. What was there before this manager is not its to remove."""
    return sorted(Path(folder).glob("[0-9]*.seg"))


def _gib(name: str, gib: float) -> int:
    """A size in GiB as bytes. Raises ConfigError."""
    if isinstance(gib, bool) or not isinstance(gib, int | float) or not 0 <= gib < float("inf"):
        raise ConfigError(f"{name} must be a number of GiB, not {gib!r}")
    return int(gib * GIB)


def _check_key(key: object) -> None:
    """True and 1.0 equal 1 in a dict, and are no keys."""
    if isinstance(key, bool) or not isinstance(key, int | str):
        raise ConfigError(f"a key is an int or a str, not {type(key).__name__}")


class EmbeddedMesh:
    """Several nodes in this process, over loopback: real sockets, real slabs, no Ray."""

    def __init__(self, configs: Sequence[NodeConfig]):
        self._folder = tempfile.TemporaryDirectory(prefix="p2pcache-")
        self.nodes: list[NodeRuntime] = []
        try:
            for config in configs:
                where = config.runtime_dir or self._folder.name
                self.nodes.append(NodeRuntime.start(config.replace(runtime_dir=where)))
            self.share_view()
        except BaseException:
            self.close()
            raise

    def share_view(self) -> None:
        """Tell all nodes who is in the mesh, and wait until all of them know what the others hold."""
        members = [n.member for n in self.nodes]
        for node in self.nodes:
            node.apply_view(members)
        for node in self.nodes:
            node.flush()

    def client(self, index: int, timeout_s: float = _BUDGET_S) -> Client:
        """A connection to one of the nodes. The caller closes it."""
        return Client(self.nodes[index].socket_path, timeout_s)

    def close(self) -> None:
        for node in self.nodes:
            node.close()
        self._folder.cleanup()

    def __enter__(self) -> EmbeddedMesh:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
