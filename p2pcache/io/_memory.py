"""How much memory this process may still take: what the host has left, and what its control groups allow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")

_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def available_bytes() -> int:
    """Of the host and of every control group that this process is in (v1 or v2), the least; 0: unknown.

    A group's page cache that nobody uses counts as available, as it does in the host's own figure.
    """
    found = []
    with suppress(OSError):
        for line in (PROC / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    for folder, names in _groups():
        with suppress(OSError, ValueError):  # not there, or "max"
            limit, taken = (int((folder / name).read_text()) for name in names[:2])
            found.append(max(limit - taken + _unused_cache_bytes(folder, names[2]), 0))
    return min(found, default=0)


def _groups() -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """The folders of this process's groups and of all above them, and the names of the files in there.

    In a container the group's own path may not be visible: then the top of what is mounted is its group.
    """
    try:
        lines = (PROC / "self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in [*lines, "0::/"]:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            roots, names = (CGROUPS, CGROUPS / "unified"), _V2
        elif "memory" in controllers.split(","):
            roots, names = (CGROUPS / "memory",), _V1
        else:
            continue
        for root in roots:
            group = root / path.lstrip("/")
            yield from ((folder, names) for folder in (group, *group.parents) if folder.is_relative_to(root))


def _unused_cache_bytes(folder: Path, name: str) -> int:
    with suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text().splitlines():
            if line.startswith(name + " "):
                return int(line.split()[1])
    return 0
