"""What the lab needs of the machine: processes, network namespaces, folders and the cgroup freezer.

Pids, namespace names and paths can all come to mean something else while the lab is up. So each thing
is recorded with an identity of its own and is touched only while it is still the same thing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import select
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

NETNS = Path("/run/netns")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
TOOLS = ("bash", "ip", "mount", "nsenter", "setpriv", "ssh-keygen", "sshd", "unshare")
POLL_S = 0.01

Process = tuple[int, int]  # (pid, start time in clock ticks since boot): a reused pid differs
Identity = tuple[int, int]  # (device, inode) of a folder or of a namespace


class LabError(Exception):
    """What the lab was asked for cannot be done; the message says why."""


def missing() -> list[str]:
    """What keeps this process from making a lab: tools that are not installed, or not being root."""
    lacking = [tool for tool in TOOLS if shutil.which(tool, path=PATH) is None]
    return lacking + ([] if os.geteuid() == 0 else ["root's rights"])


def tool(name: str) -> str:
    """The absolute path of a tool, in sbin folders too. Raises LabError."""
    path = shutil.which(name, path=PATH)
    if path is None:
        raise LabError(f"{name} is not installed")
    return path


def call(*argv: str | Path) -> str:
    """Run a command of the machine to its end and return what it printed. Raises LabError."""
    command = [tool(str(argv[0])), *map(str, argv[1:])]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        words = [word if word.isprintable() else "..." for word in map(str, argv)]  # not a whole script
        raise LabError(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def wait_for(what: Callable[[], object], timeout_s: float, failure: str) -> None:
    """Poll until `what()` is true: for what the kernel gives no event for. Raises LabError."""
    until_s = time.monotonic() + timeout_s
    while not what():
        if time.monotonic() > until_s:
            raise LabError(f"{failure} (waited {timeout_s:g} s)")
        time.sleep(POLL_S)


def boot_id() -> str:
    """Names the machine's current boot; pids, start times and namespaces mean nothing beyond it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on (index 0: state, 1: parent, 19: start time)."""
    # The name, in parentheses, may itself hold spaces and parentheses.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def process(pid: int) -> Process | None:
    """The identity of a process, or None if there is none of that pid."""
    try:
        return pid, int(_stat(pid)[19])
    except OSError:
        return None


def alive(who: Process) -> bool:
    """Whether it is still the same process, and not a zombie."""
    try:
        fields = _stat(who[0])
    except OSError:
        return False
    return int(fields[19]) == who[1] and fields[0] not in "ZX"


@contextlib.contextmanager
def _pidfd(who: Process) -> Iterator[int | None]:
    """A handle that cannot come to mean another process; None if `who` is gone."""
    try:
        handle = os.pidfd_open(who[0])
    except ProcessLookupError:
        yield None
        return
    try:
        # Compared after opening: from here on the handle, unlike the pid, stays with one process.
        yield handle if process(who[0]) == who else None
    finally:
        os.close(handle)


def kill(who: Process, timeout_s: float = 20.0) -> bool:
    """SIGKILL a process and wait until it has ended (PID 1 of a namespace: with all others in it).

    False if it was not there any more. Raises LabError if it does not end in time.
    """
    with _pidfd(who) as handle:
        if handle is None:
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        if not select.select([handle], [], [], timeout_s)[0]:
            raise LabError(f"process {who[0]} did not end within {timeout_s:g} s of SIGKILL")
    reap(who)
    return True


def reap(who: Process) -> None:
    """Collect an ended process if it is a child of this one, so that it does not stay as a zombie."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(who[0], os.WNOHANG)


def only_child(who: Process) -> Process | None:
    """The first child of a process, or None while it has none."""
    try:
        pids = Path(f"/proc/{who[0]}/task/{who[0]}/children").read_text().split()
    except OSError:
        return None
    return process(int(pids[0])) if pids else None


def members(init: Process) -> list[Process]:
    """The processes in the PID namespace of `init`, itself included; not of namespaces below."""
    namespace = os.stat(f"/proc/{init[0]}/ns/pid").st_ino
    found = []
    for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}/ns/pid").st_ino == namespace and (who := process(pid)):
                found.append(who)
    return found


def freezer(name: str) -> Path | None:
    """Where the cgroup (version 2) of that name is or would be; None if the machine offers no such."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        mount_point = fields.split()[4]
        if rest.startswith("cgroup2 ") and os.access(mount_point, os.W_OK):
            return Path(mount_point) / name
    return None


def freeze(init: Process, cgroup: Path | None, timeout_s: float = 20.0) -> None:
    """Stop every process of a host at once; none of them, nor their parents, can notice.

    Without a cgroup it is done with SIGSTOP, one process after the other, which a parent that asks
    for stopped children does notice. Raises LabError if they are not all frozen in time.
    """
    if cgroup is None:
        _signal_all(init, signal.SIGSTOP, lambda state: state in "TtZX", timeout_s)
        return
    cgroup.mkdir(exist_ok=True)
    procs = cgroup / "cgroup.procs"

    def all_inside() -> bool:
        """Move those that are outside; true once there were none. Children are born beside parents."""
        inside = set(map(int, procs.read_text().split()))
        outside = [who for who in members(init) if who[0] not in inside and alive(who)]
        for pid, _ in outside:
            with contextlib.suppress(ProcessLookupError):
                procs.write_text(str(pid))
        return not outside

    wait_for(all_inside, timeout_s, f"the host's processes could not all be moved into {cgroup}")
    (cgroup / "cgroup.freeze").write_text("1")
    wait_for(lambda: cgroup_frozen(cgroup), timeout_s, f"the processes in {cgroup} did not freeze")


def thaw(init: Process, cgroup: Path | None, timeout_s: float = 20.0) -> None:
    """Let a frozen host run on. Raises LabError if it does not in time."""
    if cgroup is None:
        _signal_all(init, signal.SIGCONT, lambda state: state not in "Tt", timeout_s)
    elif cgroup.exists():
        (cgroup / "cgroup.freeze").write_text("0")
        wait_for(lambda: not cgroup_frozen(cgroup), timeout_s, f"the processes in {cgroup} did not thaw")


def cgroup_frozen(cgroup: Path) -> bool:
    """Whether all processes of a cgroup are frozen."""
    try:
        return "frozen 1" in (cgroup / "cgroup.events").read_text()
    except OSError:
        return False


def frozen(init: Process, cgroup: Path | None) -> bool:
    """Whether a host is frozen, in either way."""
    if cgroup is not None:
        return cgroup_frozen(cgroup)
    return alive(init) and _stat(init[0])[0] in "Tt"


def _signal_all(init: Process, number: int, done: Callable[[str], bool], timeout_s: float) -> None:
    def finished() -> bool:
        # nsenter stops itself when its child is stopped, from outside of the host's PID namespace.
        parents = {int(_stat(pid)[1]) for pid, _ in members(init)} if number == signal.SIGCONT else set()
        entered = [
            who
            for pid in parents
            if (who := process(pid)) and Path(f"/proc/{pid}/comm").read_text() == "nsenter\n"
        ]
        waiting = False
        for who in members(init) + entered:
            with contextlib.suppress(OSError), _pidfd(who) as handle:
                if handle is not None and not done(_stat(who[0])[0]):
                    signal.pidfd_send_signal(handle, number)
                    waiting = True
        return not waiting

    wait_for(finished, timeout_s, f"the host's processes did not all take signal {number}")


def namespace_identity(name: str) -> Identity | None:
    """The identity of a named network namespace, or None if there is no such name."""
    return folder_identity(NETNS / name)


def add_namespace(name: str) -> Identity:
    """Make a network namespace with `lo` up. Raises LabError if the name is taken."""
    if os.path.lexists(NETNS / name):
        raise LabError(f"network namespace {name} exists and is not this lab's; it is left alone")
    call("ip", "netns", "add", name)
    identity = namespace_identity(name)
    if identity is None:
        raise LabError(f"the network namespace {name} has vanished")
    call("ip", "-n", name, "link", "set", "lo", "up")
    return identity


def delete_namespace(name: str, identity: Identity) -> bool:
    """Delete a network namespace; False, and nothing done, if it is not the same one any more."""
    if namespace_identity(name) != identity:
        return False
    call("ip", "netns", "delete", name)
    return True


def folder_identity(path: Path) -> Identity | None:
    """(device, inode) of what is at a path, or None; a link is not followed."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def private_folder(path: Path) -> None:
    """Make a folder that only this user can enter, or check one that exists. Raises LabError."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        status = os.lstat(path)
        own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
        if not own or status.st_mode & 0o077:
            raise LabError(f"{path} exists and is not a folder of mode 0700 of this user") from None
    except OSError as error:
        raise LabError(f"cannot make {path}: {error.strerror}") from None


def delete_folder(path: Path, identity: Identity) -> bool:
    """Delete a folder and what is in it; False, and nothing done, if it is not the same one any more."""
    if folder_identity(path) != identity:
        return False
    shutil.rmtree(path)
    return True


@contextlib.contextmanager
def locked(path: Path, timeout_s: float = 120.0) -> Iterator[None]:
    """Hold the advisory lock on a file, which is made. Raises LabError if another holds it too long."""
    until_s = time.monotonic() + timeout_s
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            status = os.fstat(handle)
            # The holder before us may have deleted the file: then its lock excludes nobody.
            if folder_identity(path) == (status.st_dev, status.st_ino):
                break
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                os.close(handle)
                raise
        os.close(handle)
        if time.monotonic() > until_s:
            raise LabError(f"another call has been at work on this lab for over {timeout_s:g} s ({path})")
        time.sleep(POLL_S)
    try:
        yield
    finally:
        os.close(handle)


def spawn(argv: Sequence[str], log: Path) -> Process:
    """Start a process in a session of its own that outlives this one; it writes into `log`."""
    quiet = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
    output = (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    error = (os.POSIX_SPAWN_DUP2, 1, 2)
    actions = [quiet, output, error]
    pid = os.posix_spawn(tool(argv[0]), list(argv), {"PATH": PATH}, file_actions=actions, setsid=True)
    who = process(pid)
    assert who is not None, "a child that nobody has waited for has an entry in /proc"
    return who


def valid_name(name: str) -> bool:
    """Whether a name fits into names of namespaces, folders and hosts."""
    return re.fullmatch(r"[a-z0-9][a-z0-9-]{0,30}", name) is not None
