"""The memory that is available, as made-up hosts and control groups state it."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pcache.io import _memory as memory

MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A writer of files below made-up `proc` and `cgroup` folders."""
    monkeypatch.setattr(memory, "PROC", tmp_path / "proc")
    monkeypatch.setattr(memory, "CGROUPS", tmp_path / "cgroup")

    def write(name: str, text: object) -> None:
        path: Path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    return write


def test_without_any_figure_nothing_is_known_to_be_available(host):
    assert memory.available_bytes() == 0


@pytest.mark.parametrize("unlimited", ["max", None])
def test_without_a_limit_it_is_what_the_host_has(host, unlimited):
    host("proc/meminfo", "MemTotal: 9999999 kB\nMemAvailable: 2048 kB")
    assert memory.available_bytes() == 2 * MIB
    if unlimited:
        host("cgroup/memory.max", unlimited)
        host("cgroup/memory.current", 5 * MIB)
    assert memory.available_bytes() == 2 * MIB


@pytest.mark.parametrize(
    ("line", "folder", "names"),
    [
        ("0::/", "cgroup", ("max", "current", "inactive_file")),
        ("0::/outer/inner", "cgroup/outer", ("max", "current", "inactive_file")),
        ("0::/outer/inner", "cgroup/outer/inner", ("max", "current", "inactive_file")),
        ("0::/not/visible", "cgroup", ("max", "current", "inactive_file")),
        ("0::/inner", "cgroup/unified/inner", ("max", "current", "inactive_file")),
        ("4:cpu,memory:/a/b", "cgroup/memory/a", ("limit_in_bytes", "usage_in_bytes", "total_inactive_file")),
        ("4:memory:/docker/x", "cgroup/memory", ("limit_in_bytes", "usage_in_bytes", "total_inactive_file")),
    ],
)
def test_a_group_at_any_level_lowers_it_to_what_the_group_has_left(host, line, folder, names):
    limit, taken, cache = names
    host("proc/meminfo", "MemAvailable: 2097152 kB")
    host("proc/self/cgroup", f"9:name=systemd:/\n{line}")
    host(f"{folder}/memory.{limit}", GIB)
    host(f"{folder}/memory.{taken}", 600 * MIB)
    assert memory.available_bytes() == 424 * MIB
    host(f"{folder}/memory.stat", f"cache 1\n{cache} {100 * MIB}\nother_{cache} 7")
    assert memory.available_bytes() == 524 * MIB
    host(f"{folder}/memory.{limit}", 8 * GIB)
    assert memory.available_bytes() == 2 * GIB
    host(f"{folder}/memory.{limit}", MIB)
    assert memory.available_bytes() == 0
