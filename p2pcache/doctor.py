"""Whether this host is fit for a node, and what to do where it is not.

Each check is a function of what was found on the host, so that it can be tested without such a host;
`examine` looks, and has all of them judge.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import importlib.metadata
import mmap
import os
import platform
import resource
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2pcache.config import GIB, MIB, NodeConfig
from p2pcache.discovery import sockets_here
from p2pcache.io._memory import available_bytes
from p2pcache.io._nvme_files import SEGMENT_NAME, directory_problem
from p2pcache.io.transport_ucx import ucx_facts, ucx_resources
from p2pcache.types import ConfigError

OK, WARNING, ERROR = "ok", "warning", "error"
TESTED = {  # the versions of constraints.txt
    "blake3": "1.0.11",
    "msgpack": "1.2.4",
    "numpy": "2.4.6",
    "pyzmq": "27.3.0",
    "ray": "2.60.0",
    "torch": "2.13.0",
    "transformers": "5.24.0",
    "ucxx-cu12": "0.52.0",
    "ucxx-cu13": "0.52.0",
    "xxhash": "4.1.0",
}
REQUIRED = ("blake3", "msgpack", "numpy", "pyzmq", "torch", "xxhash")
PYTHON_MIN = (3, 11)
SOCKET_BUFFER_BYTES_MIN = 4 * MIB  # what one stream needs at 25 Gb/s and 1 ms
DESCRIPTORS_MIN = 4096
SHM_BYTES_MIN = 1 * GIB  # Ray's object store lies there
DASHBOARD = ("127.0.0.1", 8299)  # where `p2pcache start` puts it
PREFER_SYSTEM = "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY"  # read by the libucx wheel's loader
UCX_VERSIONS = ((1, 19), (1, 21))  # ucxx 0.52 was built for these
RDMA_DOC = "docs/rdma.md"


@dataclass(frozen=True, slots=True)
class Finding:
    """level: `ok`, `warning` or `error`. remedy: what to do; empty where all is well."""

    name: str
    level: str
    text: str
    remedy: str = ""


# -- what was found, judged --------------------------------------------------------------------------


def check_versions(python: tuple[int, ...], found: Mapping[str, str]) -> Iterator[Finding]:
    """found: package -> installed version."""
    text = ".".join(map(str, python))
    if python < PYTHON_MIN:
        yield Finding("python", ERROR, f"Python {text}", "install Python 3.11 or later")
    else:
        yield Finding("python", OK, f"Python {text}")
    for name in REQUIRED:
        if name not in found:
            yield Finding(
                "packages", ERROR, f"{name} is not installed", f"pip install '{name}=={TESTED[name]}'"
            )
    others = [
        f"{n} {v} (tested: {TESTED[n]})" for n, v in found.items() if _release(v) != _release(TESTED[n])
    ]
    if others:
        remedy = "pip install -c constraints.txt, if something does not work"
        yield Finding("packages", WARNING, f"of other versions: {', '.join(others)}", remedy)
    elif all(name in found for name in REQUIRED):
        yield Finding("packages", OK, f"as tested: {', '.join(f'{n} {v}' for n, v in found.items())}")


def check_ucx(
    facts: Mapping[str, Any], resources: Sequence[str], rdma_devices: Sequence[str], prefer_system: bool
) -> Iterator[Finding]:
    """facts: of `ucx_facts`. resources: of `ucx_resources`. rdma_devices: that the kernel knows."""
    rdma = f"the host has RDMA devices ({', '.join(rdma_devices)})"
    if not facts["available"]:
        text = f"not available: {facts['reason']}"
        if rdma_devices:
            yield Finding("ucx", WARNING, f"{text}; {rdma}", "install the extra ucx-cu12 or ucx-cu13")
        else:
            yield Finding("ucx", OK, f"{text}. Bodies go by shm and tcp")
        return
    library, means = facts["library"], ", ".join(resources) or "none"
    release = tuple(int(part) for part in facts["version"].split(".")[:2])
    text = f"UCX {facts['version']} of {library}, {'with' if facts['verbs'] else 'without'} verbs"
    if not UCX_VERSIONS[0] <= release <= UCX_VERSIONS[1]:
        yield Finding("ucx", WARNING, text, "install UCX 1.19 to 1.21, which is what ucxx was built for")
    else:
        yield Finding("ucx", OK, text)
    if prefer_system and facts["wheel"]:
        remedy = (
            f"make libucp.so and the others findable *by these names* (ldconfig, -dev package): {RDMA_DOC}"
        )
        yield Finding("ucx loader", WARNING, f"{PREFER_SYSTEM} is set, but the wheel's was loaded", remedy)
    uses_rdma = any(means_of.split("/")[0] not in _NOT_RDMA for means_of in resources)
    if rdma_devices and not facts["verbs"]:
        remedy = f"load a UCX with verbs: {RDMA_DOC}"
        yield Finding("ucx transports", WARNING, f"{means}; {rdma} that this UCX cannot use", remedy)
    elif rdma_devices and not uses_rdma:
        remedy = f"compare `ucx_info -d` and UCX_TLS, UCX_NET_DEVICES: {RDMA_DOC}"
        yield Finding("ucx transports", WARNING, f"{means}; {rdma}, but UCX uses none", remedy)
    else:
        yield Finding("ucx transports", OK, means)


def check_locked_memory(limit_bytes: float, slab_bytes: int, rdma_devices: Sequence[str]) -> Finding:
    """limit_bytes: of RLIMIT_MEMLOCK; inf: none."""
    shown = "unlimited" if limit_bytes == float("inf") else f"{limit_bytes / MIB:,.1f} MiB"
    if not rdma_devices:
        return Finding("locked memory", OK, f"{shown}; only RDMA needs it, and there is no such device")
    if limit_bytes < slab_bytes:
        remedy = "`ulimit -l unlimited` for the user of `ray start` (limits.conf, LimitMEMLOCK=, or IPC_LOCK)"
        return Finding("locked memory", ERROR, f"{shown}, less than the slab's {slab_bytes:,} bytes", remedy)
    return Finding("locked memory", OK, shown)


def check_memory(available_bytes: int, slab_bytes: int, memfd_error: str) -> Finding:
    """memfd_error: why none can be made and sealed, or nothing."""
    if memfd_error:
        remedy = "allow memfd_create with seals (a kernel of 3.17 or later; a seccomp profile may forbid it)"
        return Finding("slab", ERROR, f"no memfd: {memfd_error}", remedy)
    text = f"{slab_bytes / GIB:,.2f} GiB asked for, {available_bytes / GIB:,.2f} GiB available"
    if slab_bytes > available_bytes:
        return Finding("slab", ERROR, text, "lower host_bytes_max, or run on a host with more memory")
    return Finding("slab", OK, text)


def check_shm(size_bytes: int) -> Finding:
    """size_bytes: of /dev/shm; 0: there is none."""
    text = f"/dev/shm has {size_bytes / GIB:,.2f} GiB (the slab does not lie there; Ray's objects do)"
    if size_bytes < SHM_BYTES_MIN:
        return Finding(
            "shared memory", WARNING, text, "in a container: --shm-size=1g or more, or a tmpfs volume"
        )
    return Finding("shared memory", OK, text)


def check_address(host: str, addresses: Mapping[str, str]) -> Finding:
    """addresses: IPv4 address -> interface, of this host."""
    others = ", ".join(f"{a} ({i})" for a, i in addresses.items() if a != host) or "none"
    if host.startswith("127."):
        text = f"{host}: peers on this host alone, unless host is set. Other addresses: {others}"
        return Finding("address", OK, text)
    if host not in addresses and ":" not in host:
        text = f"{host} is not an address of this host. It has: {others}"
        return Finding("address", ERROR, text, "set host to one of them, or to node-ip")
    return Finding("address", OK, f"{host} ({addresses.get(host, 'IPv6')}) is advertised. Others: {others}")


def check_port(name: str, host: str, port: int, problem: str, nodes: int, remedy: str) -> Finding:
    """problem: why it cannot be bound, or nothing. nodes: that run on this host, and may have it."""
    if not port:
        return Finding(name, OK, "any free one")
    if not problem:
        return Finding(name, OK, f"{host}:{port} is free")
    if nodes:
        return Finding(name, OK, f"{host}:{port} is taken ({problem}), maybe by the mesh that runs here")
    return Finding(name, ERROR, f"{host}:{port}: {problem}", remedy)


def check_socket_buffers(limits: Mapping[str, int]) -> Finding:
    """limits: sysctl -> bytes."""
    low = {name: limit for name, limit in limits.items() if limit < SOCKET_BUFFER_BYTES_MIN}
    if low:
        text = ", ".join(f"{name} = {limit:,}" for name, limit in low.items())
        remedy = "; ".join(f"sysctl -w {name}={SOCKET_BUFFER_BYTES_MIN}" for name in low)
        return Finding("socket buffers", WARNING, f"small for a fast network: {text}", remedy)
    return Finding("socket buffers", OK, ", ".join(f"{name} = {limit:,}" for name, limit in limits.items()))


def check_descriptors(limit: int) -> Finding:
    if limit < DESCRIPTORS_MIN:
        remedy = f"ulimit -n {DESCRIPTORS_MIN} or more for whoever starts the node"
        return Finding("open files", WARNING, f"{limit:,} at most", remedy)
    return Finding("open files", OK, f"{limit:,} at most")


def check_io_uring(problem: str) -> Finding:
    if problem:
        remedy = "sysctl kernel.io_uring_disabled=0, or let the container's seccomp profile allow it"
        return Finding("io_uring", WARNING, f"not allowed: {problem}; NVMe goes without", remedy)
    return Finding("io_uring", OK, "allowed")


def check_nvme(
    path: str, problem: str, direct_problem: str, free_bytes: int, needed_bytes: int
) -> Iterator[Finding]:
    """path: of nvme_path; empty: no such tier. needed_bytes: that are not allocated there yet."""
    if not path:
        yield Finding("nvme", OK, "no NVMe tier is set (nvme_path)")
        return
    if problem:
        yield Finding("nvme", ERROR, f"{path} cannot be used: {problem}", "set another nvme_path")
        return
    text = f"{path}: {free_bytes / GIB:,.1f} GiB free, {needed_bytes / GIB:,.1f} GiB to be taken"
    if needed_bytes > free_bytes:
        yield Finding("nvme", ERROR, text, "lower nvme_bytes_max, or make room")
    else:
        yield Finding("nvme", OK, text)
    if direct_problem:
        remedy = "put nvme_path on a local file system, not on tmpfs or overlayfs"
        yield Finding("direct IO", WARNING, f"no O_DIRECT there: {direct_problem}", remedy)
    else:
        yield Finding("direct IO", OK, "O_DIRECT works there")


def check_clock(monotonic: bool, resolution_s: float) -> Finding:
    """All deadlines are on this clock. No host's clock is compared with another's."""
    if not monotonic or resolution_s > 1e-3:
        return Finding(
            "clock", ERROR, f"its steps are of {resolution_s:g} s", "run on a host with a steady clock"
        )
    return Finding("clock", OK, f"monotonic, in steps of {resolution_s:g} s; hosts need no common time")


_NOT_RDMA = {"tcp", "self", "sysv", "posix", "cma", "xpmem", "knem", "cuda_copy", "cuda_ipc", "gdr_copy"}


def _release(version: str) -> tuple[str, ...]:
    """Without a build's tag: torch 2.13.0+cpu is torch 2.13.0."""
    return tuple(version.partition("+")[0].split(".")[:2])


# -- looking -----------------------------------------------------------------------------------------


def examine(config: NodeConfig) -> list[Finding]:
    """Look at this host as a node with these settings would find it. Takes about a second; starts nothing."""
    rdma, nodes = rdma_devices(), len(sockets_here())
    facts = ucx_facts()
    try:
        resources = ucx_resources() if facts["available"] else []
    except ConfigError as error:
        facts, resources = {"available": False, "reason": str(error)}, []
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    control = (config.host, config.control_port)
    clock = time.get_clock_info("monotonic")
    prefer_system = os.environ.get(PREFER_SYSTEM, "false").lower() != "false"
    return [
        *check_versions(tuple(map(int, platform.python_version_tuple()[:2])), installed()),
        *check_ucx(facts, resources, rdma, prefer_system),
        check_locked_memory(float("inf") if locked < 0 else locked, config.host_bytes_max, rdma),
        check_memory(available_bytes(), config.host_bytes_max, memfd_problem()),
        check_shm(shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0),
        check_address(config.host, addresses()),
        check_port(
            "control_port", *control, bind_problem(*control), nodes, "set another control_port, or 0 for any"
        ),
        check_port(
            "dashboard", *DASHBOARD, bind_problem(*DASHBOARD), nodes, "start --dashboard ADDRESS:PORT, or ''"
        ),
        check_socket_buffers(socket_buffers()),
        check_descriptors(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        check_io_uring(io_uring_problem()),
        *check_nvme(config.nvme_path, *nvme_state(config.nvme_path, config.nvme_bytes_max)),
        check_clock(clock.monotonic, clock.resolution),
        Finding("nodes", OK, f"{nodes} of this user's on this host" if nodes else "none runs on this host"),
    ]


def installed() -> dict[str, str]:
    found = {}
    for name in TESTED:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def rdma_devices() -> list[str]:
    with suppress(OSError):
        return sorted(os.listdir("/sys/class/infiniband"))
    return []


def memfd_problem() -> str:
    try:
        fd = os.memfd_create("p2pcache-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        return error.strerror
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError as error:
        return error.strerror
    finally:
        os.close(fd)
    return ""


def addresses() -> dict[str, str]:
    """First IPv4 address of each interface -> its name."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none
                asked = struct.pack("256s", name.encode()[:15])
                found[socket.inet_ntoa(fcntl.ioctl(sock, _SIOCGIFADDR, asked)[20:24])] = name
    return found


def bind_problem(host: str, port: int) -> str:
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, port))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def socket_buffers() -> dict[str, int]:
    found = {}
    for name in ("net.core.rmem_max", "net.core.wmem_max", "net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem"):
        with suppress(OSError):  # a network namespace shows fewer
            found[name] = int(Path("/proc/sys", *name.split(".")).read_text().split()[-1])
    return found


def io_uring_problem() -> str:
    """Whether a ring can be set up; it is closed at once."""
    libc = ctypes.CDLL(None, use_errno=True)
    params = ctypes.create_string_buffer(120)  # struct io_uring_params
    fd = libc.syscall(_IO_URING_SETUP, 1, params)
    if fd < 0:
        return os.strerror(ctypes.get_errno() or errno.ENOSYS)
    os.close(fd)
    return ""


def nvme_state(path: str, capacity_bytes: int) -> tuple[str, str, int, int]:
    """Problem, problem with O_DIRECT, free bytes, bytes still to be taken. Leaves nothing there."""
    if not path:
        return "", "", 0, 0
    folder = Path(path)
    while not folder.exists() and folder != folder.parent:  # a node would make it
        folder = folder.parent
    try:
        there = Path(path).is_dir()
        if there and (problem := directory_problem(os.stat(path))):
            return f"it {problem}", "", 0, 0
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".p2pcache-doctor-") as file:
            direct_problem = _direct_problem(file.name)
        free_bytes = shutil.disk_usage(folder).free
        segments = [f for f in Path(path).iterdir() if SEGMENT_NAME.fullmatch(f.name)] if there else []
        taken_bytes = sum(f.stat().st_blocks * 512 for f in segments)
    except OSError as error:
        return error.strerror, "", 0, 0
    return "", direct_problem, free_bytes, max(capacity_bytes - taken_bytes, 0)


def _direct_problem(path: str) -> str:
    try:
        fd = os.open(path, os.O_RDWR | os.O_DIRECT)
        try:
            with mmap.mmap(-1, mmap.PAGESIZE) as page:  # aligned, as O_DIRECT wants it
                os.pwrite(fd, page, 0)
        finally:
            os.close(fd)
    except OSError as error:
        return error.strerror
    return ""


_SIOCGIFADDR = 0x8915
_IO_URING_SETUP = 425  # the same number on every architecture
