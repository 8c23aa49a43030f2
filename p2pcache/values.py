"""Nested lists and tuples of tensors as flat bytes with a manifest, and back.

A manifest is a tree of plain values: a tensor is `[dtype, shape]`, a list or tuple one key (`l`, `t`)
over its parts. The bytes are the tensors', contiguous, one behind the other, in the tree's order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from p2pcache.types import ConfigError, LayoutError


def describe(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The shape of a nested value; its tensors are appended in order."""
    if isinstance(value, torch.Tensor):
        if value.device.type == "meta" or value.layout is not torch.strided or value.is_quantized:
            raise LayoutError("only plain strided tensors with bytes of their own can be kept")
        tensors.append(value)
        return [str(value.dtype).removeprefix("torch."), list(value.shape)]
    if isinstance(value, list | tuple):
        return {"t" if isinstance(value, tuple) else "l": [describe(v, tensors) for v in value]}
    raise LayoutError(
        f"a value is a tensor or nested lists and tuples of tensors, not {type(value).__name__}"
    )


def leaves(manifest: Any) -> list[tuple[torch.dtype, list[int]]]:
    """Dtype and shape of every tensor of a manifest, in order."""
    if isinstance(manifest, dict):
        return [leaf for part in next(iter(manifest.values())) for leaf in leaves(part)]
    dtype = getattr(torch, manifest[0], None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"a stored value has the dtype {manifest[0]!r}, which this torch does not know")
    return [(dtype, manifest[1])]


def rebuild(manifest: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """The nested value of a manifest, with these tensors as its leaves."""
    if isinstance(manifest, dict):
        ((kind, parts),) = manifest.items()
        built = [rebuild(part, tensors) for part in parts]
        return tuple(built) if kind == "t" else built
    return next(tensors)


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same nesting, each tensor replaced by `change` of it."""
    if isinstance(value, torch.Tensor):
        return change(value)
    parts = [map_tensors(v, change) for v in value]
    return tuple(parts) if isinstance(value, tuple) else parts


def size_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def pack_into(tensors: list[torch.Tensor], out: memoryview) -> None:
    """Copy tensors, of any strides and device, one behind the other into writable bytes."""
    at = 0
    for tensor in tensors:
        size = size_bytes(tensor)
        if size:
            torch.frombuffer(out[at : at + size], dtype=torch.uint8).copy_(
                tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
            )
        at += size


def unpack(manifest: Any, raw: memoryview, device: torch.device | str) -> Any:
    """The nested value of a manifest as fresh tensors on a device."""
    tensors, at = [], 0
    for dtype, shape in leaves(manifest):
        tensor = torch.empty(shape, dtype=dtype)
        size = size_bytes(tensor)
        if size:
            flat = torch.frombuffer(raw[at : at + size], dtype=torch.uint8)
            tensor.view(-1).view(torch.uint8).copy_(flat)
        tensors.append(tensor.to(device))
        at += size
    return rebuild(manifest, iter(tensors))
