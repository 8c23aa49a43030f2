"""Making and removing the parts of a lab, each recorded as soon as it is there."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import sys
from pathlib import Path

from cluster import _lab_host as inside
from cluster import _lab_machine as machine
from cluster._lab_machine import LabError
from cluster._lab_state import Host, Record, State

LAUNCHER = "launcher"
BRIDGE = "bridge"  # the namespace that holds the bridge, and the bridge in it
HOSTS_MAX = 64
READY_TIMEOUT_S = 20.0


def check_room(subnet: str, hosts: int) -> None:
    """Raise LabError unless a subnet has addresses for so many hosts."""
    try:
        network = ipaddress.IPv4Network(subnet)
    except ValueError as error:
        raise LabError(f"subnet: {error}") from None
    # Besides the hosts: the network's own address, launcher, gateway, broadcast.
    if not 1 <= hosts <= min(HOSTS_MAX, network.num_addresses - 4):
        raise LabError(
            f"{hosts} hosts: {subnet} has room for at most {network.num_addresses - 4}"
            f", and a lab has 1 to {HOSTS_MAX}"
        )


def build(record: Record, state: State, hosts: int) -> None:
    """Make the bridge, the launcher and h1 to h`hosts`, and wait until they are ready."""
    record.write(state)
    _add_folder(record, state, record.etc)
    _add_folder(record, state, record.key.parent)
    machine.call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", record.named(), "-f", record.key)
    _add_namespace(record, state, BRIDGE)
    bridge = record.named(BRIDGE)
    machine.call("ip", "-n", bridge, "link", "add", BRIDGE, "type", "bridge")
    machine.call("ip", "-n", bridge, "link", "set", BRIDGE, "up")
    names = [LAUNCHER, *(f"h{number}" for number in range(1, hosts + 1))]
    for name in names:
        make(record, state, name)
    for name in names:
        start(record, state, name)
    for name in names:
        wait(record, state, name)


def _add_folder(record: Record, state: State, path: Path) -> None:
    path.mkdir(mode=0o700)
    identity = machine.folder_identity(path)
    assert identity is not None
    state.folders[str(path)] = identity
    record.write(state)


def _add_namespace(record: Record, state: State, part: str) -> None:
    state.namespaces[record.named(part)] = machine.add_namespace(record.named(part))
    record.write(state)


def _image(state: State) -> inside.Image | None:
    if state.image is None or state.wheels is None:
        return None
    return inside.Image(Path(state.image), Path(state.wheels))


def make(record: Record, state: State, name: str) -> None:
    """The parts of a host that outlive a kill: its address, folders, keys and image."""
    network = ipaddress.IPv4Network(state.subnet)
    # From the end: broadcast, the default route's gateway, the launcher.
    address = network[-3] if name == LAUNCHER else network[int(name[1:])]
    state.hosts[name] = Host(str(address))
    files, image, launcher = record.files(name), _image(state), name == LAUNCHER
    _add_folder(record, state, files)
    variables = inside.environment(image, launcher, state.shm_bytes)
    inside.furnish(files, record.key, variables, launcher)
    if image is not None and not launcher:
        inside.install(image, files)
    inside.etc_files(record.etc, {name: host.address for name, host in state.hosts.items()})


def start(record: Record, state: State, name: str) -> None:
    """Plug a host in and start its processes; `wait` says when it is ready."""
    _plug(record, state, name)
    files, launcher = record.files(name), name == LAUNCHER
    folders = inside.shown(_image(state), launcher)
    script = inside.init_script(files, name, record.etc, folders, state.shm_bytes, launcher)
    (files / "init.sh").write_text(script)
    enter = ["nsenter", f"--net={machine.NETNS / record.named(name)}"]
    share = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--uts", "--ipc"]
    supervisor = machine.spawn([*enter, *share, "bash", str(files / "init.sh")], files / "log")
    state.hosts[name].supervisor = supervisor
    record.write(state)


def _plug(record: Record, state: State, name: str) -> None:
    network = ipaddress.IPv4Network(state.subnet)
    address = ipaddress.IPv4Address(state.hosts[name].address)
    # The same address has the same MAC after every boot, so that neighbours need not learn it anew.
    mac = "02:70:" + ":".join(f"{byte:02x}" for byte in address.packed)
    _add_namespace(record, state, name)
    bridge, own = record.named(BRIDGE), record.named(name)
    end = ["peer", "name", "eth0", "address", mac, "netns", own]
    machine.call("ip", "-n", bridge, "link", "add", name, "type", "veth", *end)
    machine.call("ip", "-n", bridge, "link", "set", name, "master", BRIDGE, "up")
    machine.call("ip", "-n", own, "address", "add", f"{address}/{network.prefixlen}", "dev", "eth0")
    machine.call("ip", "-n", own, "link", "set", "eth0", "up")
    # Nobody has that address. But without a default route Ray takes 127.0.0.1 for the host's.
    machine.call("ip", "-n", own, "route", "add", "default", "via", str(network[-2]))


def wait(record: Record, state: State, name: str) -> None:
    """Wait until a host that was started is as it should be, up to its sshd. Raises LabError."""
    host, log = state.hosts[name], record.files(name) / "log"
    supervisor = host.supervisor
    assert supervisor is not None, "start() comes before"

    def ready() -> bool:
        host.init = machine.only_child(supervisor)
        if host.init is None and not machine.alive(supervisor):
            raise LabError(f"{name} did not start: {log.read_text().strip()[-500:]}")
        return host.init is not None and os.path.exists(f"/proc/{host.init[0]}/root/run/lab-ready")

    machine.wait_for(ready, READY_TIMEOUT_S, f"{name} did not start; see {log}")
    record.write(state)
    if name != LAUNCHER:
        own = f"--net={machine.NETNS / record.named(name)}"
        wait = [sys.executable, "-I", "-c", inside.WAIT_FOR_SSHD, host.address, str(READY_TIMEOUT_S)]
        machine.call("nsenter", own, *wait)


def stop(record: Record, state: State, name: str) -> list[str]:
    """End a host's processes and its network, as far as they are there and the lab's.

    The link goes first, so that no closing of connections gets out; with its namespace go the
    connections, which must not come back to life after a boot. Returns what was left.
    """
    host, left = state.hosts[name], []
    bridge, own = record.named(BRIDGE), record.named(name)
    if bridge in state.namespaces and machine.namespace_identity(bridge) == state.namespaces[bridge]:
        with contextlib.suppress(LabError):  # it is gone already
            machine.call("ip", "-n", bridge, "link", "delete", name)
    for who in (host.init, host.supervisor):
        if who is not None:
            machine.kill(who)
    host.init = host.supervisor = None
    if own in state.namespaces:
        if not machine.delete_namespace(own, state.namespaces.pop(own)) and machine.namespace_identity(own):
            left.append(f"network namespace {own}")
    cgroup = machine.freezer(record.named(name))
    if cgroup is not None and str(cgroup) in state.cgroups:
        if machine.folder_identity(cgroup) == state.cgroups.pop(str(cgroup)):
            os.rmdir(cgroup)
    record.write(state)
    return left


def remove(record: Record, state: State) -> list[str]:
    """Remove all that is recorded and still the same. Returns what was left."""
    left: list[str] = []
    if state.boot_id == machine.boot_id():
        for name in state.hosts:
            left += stop(record, state, name)
        for name, identity in state.namespaces.items():
            if not machine.delete_namespace(name, identity) and machine.namespace_identity(name):
                left.append(f"network namespace {name}")
    for path, identity in state.folders.items():
        if not machine.delete_folder(Path(path), identity) and machine.folder_identity(Path(path)):
            left.append(path)
    for path in (record.path.with_suffix(".new"), record.path, record.lock):
        path.unlink(missing_ok=True)
    try:
        record.folder.rmdir()
    except OSError:
        left.append(str(record.folder))
    return left
