"""The device tier, first form: values kept on the engine's device, least recently used out first.

It lives in the engine's process, so a node that dies never takes memory from under a kernel. Bytes
are counted exactly and never pass the cap.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

from p2pcache.types import ConfigError, ExactKey


class DeviceStore:
    """Tensors on one device within a hard cap. Not thread-safe: it belongs to the engine's loop."""

    def __init__(self, bytes_max: int, device: str | torch.device):
        """Raises ConfigError where the device is not there."""
        try:
            self.device = torch.device(device)
        except RuntimeError:
            raise ConfigError(f"device {device!r} is none that this torch knows") from None
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError("gpu_memory_gb asks for a device tier, and no CUDA device is here; set it to 0")
        self._bytes_max = bytes_max
        self._bytes = 0
        self._values: OrderedDict[ExactKey, tuple[Any, int]] = OrderedDict()

    def put(self, exact: ExactKey, value: Any) -> bool:
        """Keep a copy of a value (nested tensors). False where it is larger than the tier."""
        self.drop(exact)
        nbytes = sum(t.numel() * t.element_size() for t in _tensors(value))
        if nbytes > self._bytes_max:
            return False
        while self._bytes + nbytes > self._bytes_max:
            _, (_, gone) = self._values.popitem(last=False)
            self._bytes -= gone
        self._values[exact] = (_copied(value, self.device), nbytes)
        self._bytes += nbytes
        return True

    def get(self, exact: ExactKey) -> Any:
        """The kept value, still the store's own, or None."""
        kept = self._values.get(exact)
        if kept is None:
            return None
        self._values.move_to_end(exact)
        return kept[0]

    def drop(self, exact: ExactKey) -> None:
        kept = self._values.pop(exact, None)
        if kept is not None:
            self._bytes -= kept[1]

    def status(self) -> dict[str, Any]:
        return {
            "device": str(self.device),
            "bytes": self._bytes,
            "bytes_max": self._bytes_max,
            "values": len(self._values),
        }


def _tensors(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else [t for part in value for t in _tensors(part)]


def _copied(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to(device, copy=True)
    parts = [_copied(part, device) for part in value]
    return tuple(parts) if isinstance(value, tuple) else parts
