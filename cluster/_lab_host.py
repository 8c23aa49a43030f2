"""What is inside a host of the lab: its file system, its home, its sshd, and the machine image.

A host sees the machine's files, except for what is private to it: /root and /var/tmp, which outlive a
kill, /tmp, /run and /dev/shm, which do not, and a few files in /etc.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster._lab_machine import PATH, LabError, call, tool

REPOSITORY = Path(__file__).resolve().parents[1]
VENV = Path("/root/p2pcache-venv")  # where ray_cluster.yaml's setup commands install
MASKED = (Path("/root"), Path("/tmp"), Path("/run"), Path("/var/tmp"), Path("/dev/shm"))
PRIVATE = {"root": 0o700, "tmp": 0o1777, "var-tmp": 0o1777}  # folder of a host -> mode
SCRIPTS = ("pip", "ray", "serve")
DOWNLOAD_TIMEOUT_S = 600


@dataclass(frozen=True)
class Image:
    """A virtual environment that every host has, as a machine image would bring it: read-only.

    A host's own environment reads its packages, so that pip finds all requirements met and only builds
    and installs p2pcache itself; `wheels` holds what that build takes.
    """

    venv: Path
    wheels: Path

    @property
    def python(self) -> Path:
        """The interpreter that the environment was made with."""
        return Path(os.path.realpath(self.venv / "bin" / "python"))

    @property
    def prefix(self) -> Path:
        """The folder of that interpreter's installation, such as /usr."""
        return self.python.parents[1]

    @property
    def packages(self) -> Path:
        """Its site-packages. Raises LabError if it has none."""
        found = sorted(self.venv.glob("lib/python3.*/site-packages"))
        if not found:
            raise LabError(f"{self.venv} is not a virtual environment")
        return found[0]


def build_wheels(venv: Path) -> Path:
    """The folder of wheels for p2pcache's build, downloaded once per set of requirements.

    Raises LabError if they cannot be downloaded within DOWNLOAD_TIMEOUT_S.
    """
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    # The build backend asks for the last two where the machine's own are missing or too old.
    wanted = sorted([*project["build-system"]["requires"], "cmake", "ninja"])
    constraints = REPOSITORY / "constraints.txt"
    version = os.path.realpath(venv / "bin" / "python")
    key = hashlib.sha256(repr((wanted, constraints.read_text(), version)).encode()).hexdigest()[:16]
    folder = REPOSITORY / ".cache" / "lab-wheels" / key
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    print("lab: downloading the wheels of the build", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
        python = str(venv / "bin" / "python")
        argv = [python, "-m", "pip", "download", "-q", "--only-binary=:all:", "-d", unfinished + "/wheels"]
        try:
            done = subprocess.run(
                [*argv, "-c", str(constraints), *wanted],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=DOWNLOAD_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            raise LabError(f"no wheels for the build within {DOWNLOAD_TIMEOUT_S} s") from None
        if done.returncode:
            raise LabError(f"cannot download the wheels of the build: {done.stderr.strip()}")
        os.rename(unfinished + "/wheels", folder)
    return folder


def environment(image: Image | None, launcher: bool, shm_bytes: int) -> dict[str, str]:
    """What a login on a host has in its environment, beyond what sshd sets."""
    path = PATH
    if image is not None:
        venv = image.venv if launcher else VENV
        path = f"{venv / 'bin'}:{image.python.parent}:{path}"
    variables = {
        "PATH": path,
        "LANG": "C.UTF-8",
        "UCX_TLS": "tcp",  # UCX would try shared memory between hosts, which are one machine to it
        "RAY_USAGE_STATS_ENABLED": "0",
        # By itself Ray takes a share of the machine's memory, on every host, and up to 10 GB of it
        # without regard to the size of /dev/shm.
        "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(shm_bytes * 9 // 10),
    }
    if image is not None and not launcher:
        # The machine's pip configuration may name indexes, which a host cannot reach.
        variables |= {
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_FIND_LINKS": str(image.wheels),
            "PIP_NO_INDEX": "1",
        }
    return variables


def furnish(folder: Path, client_key: Path, variables: Mapping[str, str], launcher: bool) -> None:
    """Fill the private folders of a new host: shell profile, keys, and sshd's configuration."""
    for name, mode in PRIVATE.items():
        (folder / name).mkdir()
        (folder / name).chmod(mode)
    home = folder / "root"
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
    (home / ".bashrc").write_text(exports)  # read by shells that sshd starts, and by `bash -i`
    (home / ".profile").write_text(". ~/.bashrc\n")  # read by `bash --login`
    ssh = home / ".ssh"
    ssh.mkdir(mode=0o700)
    if launcher:
        for path in (client_key, client_key.with_suffix(".pub")):
            shutil.copy2(path, ssh / path.name)
        return
    shutil.copy2(client_key.with_suffix(".pub"), ssh / "authorized_keys")
    call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", ssh / "host_key")
    (ssh / "sshd_config").write_text(
        "Port 22\n"
        "HostKey /root/.ssh/host_key\n"
        "AuthorizedKeysFile /root/.ssh/authorized_keys\n"
        "PermitRootLogin prohibit-password\n"
        "PasswordAuthentication no\n"
        "KbdInteractiveAuthentication no\n"
        "UsePAM no\n"
        "UseDNS no\n"
        "PidFile none\n"
        "MaxStartups 100\n"
        "MaxSessions 100\n"
    )


def install(image: Image, folder: Path) -> None:
    """Prepare the virtual environment into which ray_cluster.yaml's setup commands will install.

    `python3 -m venv` keeps what is there. It installs no pip where one can be imported already, and
    pip writes no scripts of packages that it finds installed: hence the copies. Raises LabError.
    """
    venv = folder / VENV.relative_to("/")
    packages = venv / image.packages.relative_to(image.venv)
    packages.mkdir(parents=True)
    # One path only: the image's own .pth files, such as that of an editable p2pcache, are not read.
    (packages / "image.pth").write_text(f"{image.packages}\n")
    (venv / "bin").mkdir()
    for name in SCRIPTS:
        source = image.venv / "bin" / name
        if not source.exists():
            continue
        text = source.read_text()
        moved = text.replace(f"{image.venv}/bin/python", f"{VENV}/bin/python")
        if moved == text:
            raise LabError(f"{source} is not run by {image.venv}/bin/python")
        (venv / "bin" / name).write_text(moved)
        (venv / "bin" / name).chmod(0o755)


def shown(image: Image | None, launcher: bool) -> list[tuple[Path, bool]]:
    """The machine's folders that a host needs at their own places: (folder, read-only).

    What is not below a masked folder is there anyhow; the image is listed so that no host can write
    into an environment which it shares with the machine.
    """
    wanted = [] if image is None else [(image.venv, True), (image.prefix, True), (image.wheels, True)]
    if image is not None or launcher:
        wanted.append((REPOSITORY, True))  # `ray up` copies it from the launcher; tests run scripts of it
    return [
        (path, read_only)
        for path, read_only in wanted
        if path == getattr(image, "venv", None) or any(path.is_relative_to(masked) for masked in MASKED)
    ]


def init_script(
    folder: Path,
    hostname: str,
    etc: Path,
    folders: Sequence[tuple[Path, bool]],
    shm_bytes: int,
    launcher: bool,
) -> str:
    """The shell script that is PID 1 of a host until it becomes sshd.

    All sources are first bound below a new /run, where no mask can hide them whatever their paths, and
    moved to their places once the masks are on. `folder` holds the host's private folders, `etc` the
    files that stand in for those in /etc.
    """
    places = [(folder / name, Path("/") / name.replace("-", "/"), False) for name in PRIVATE]
    places += [(path, path, read_only) for path, read_only in folders]
    places += [(path, Path("/etc") / path.name, False) for path in sorted(etc.iterdir())]
    lines = [
        "set -eu; umask 022; cd /",
        "mount --make-rprivate /",
        # A copy of the machine's named namespaces here would keep them alive after their deletion.
        "umount -R -l /run/netns 2>/dev/null || true",
        "mount -t tmpfs -o mode=755,size=64m tmpfs /run",
        "mkdir -p /run/sshd /run/lock /run/stage/cgroup",
        "mount --rbind /sys/fs/cgroup /run/stage/cgroup",
    ]
    for number, (source, _, read_only) in enumerate(places):
        stage = f"/run/stage/{number}"
        lines.append(f"mkdir {stage}" if source.is_dir() else f": > {stage}")
        lines.append(f"mount --bind {shlex.quote(str(source))} {stage}")
        if read_only:
            lines.append(f"mount -o remount,bind,ro {stage}")
    lines += [
        # A sysfs of this namespace: UCX reads the interfaces from /sys/class/net.
        "mount -t sysfs sysfs /sys",
        "mount --move /run/stage/cgroup /sys/fs/cgroup",
        f"mount -t tmpfs -o mode=1777,size={shm_bytes} tmpfs /dev/shm",
    ]
    for number, (source, target, _) in enumerate(places):
        place = shlex.quote(str(target))
        if source.is_dir():
            lines.append(f"mkdir -p {place}")
        else:
            # It may be a link to a file below /run, which is empty now.
            lines.append(f'file=$(realpath -m {place}); mkdir -p "$(dirname "$file")"')
            lines.append('[ -e "$file" ] || : > "$file"')
            place = '"$file"'
        lines.append(f"mount --move /run/stage/{number} {place}")
    lines += [
        "rm -r /run/stage",
        # p2pcache, and UCX, take hosts with the same boot id for one machine.
        "cat /proc/sys/kernel/random/uuid > /run/boot-id",
        "mount --bind /run/boot-id /proc/sys/kernel/random/boot_id",
        f"echo {hostname} > /proc/sys/kernel/hostname",
        ": > /run/lab-ready",
    ]
    if launcher:
        # Bash collects orphans that end, as a PID 1 must; sshd does so too.
        lines.append("while :; do sleep infinity & wait $!; done")
    else:
        lines.append(f"exec {tool('sshd')} -D -e -f /root/.ssh/sshd_config")
    return "\n".join(lines) + "\n"


def etc_files(folder: Path, addresses: Mapping[str, str]) -> None:
    """Write what stands in for files in /etc: names of the hosts, and no name server to wait for.

    Files are rewritten in place, since the hosts that run have them bound.
    """
    hosts = "127.0.0.1 localhost\n::1 localhost\n"
    files = {
        "hosts": hosts + "".join(f"{address} {name}\n" for name, address in addresses.items()),
        "resolv.conf": "",
        # A locked password would make sshd refuse keys as well.
        "shadow": "root:*:1::::::\nsshd:!:1::::::\n",
    }
    for name, text in files.items():
        if Path("/etc", name).exists():
            (folder / name).write_text(text)
    if (folder / "shadow").exists():
        (folder / "shadow").chmod(0o600)


WAIT_FOR_SSHD = """
import socket, sys, time
address, until_s = sys.argv[1], time.monotonic() + float(sys.argv[2])
while True:
    try:
        with socket.create_connection((address, 22), timeout=1) as connection:
            if connection.recv(4) == b"SSH-":
                break
    except OSError:
        pass
    if time.monotonic() > until_s:
        sys.exit(f"sshd at {address} does not answer")
    time.sleep(0.02)
"""


def set_host_bytes(command: str, host_bytes_max: int) -> str:
    """A start command of the YAML with its setting `host_bytes_max` replaced."""
    return re.sub(r"\bhost_bytes_max=\d+", f"host_bytes_max={host_bytes_max}", command)


def cluster_yaml(
    text: str,
    cluster_name: str,
    head_ip: str,
    worker_ips: Sequence[str],
    host_bytes_max: int,
) -> str:
    """ray_cluster.yaml for a lab: the same but for addresses, login, name, size and absolute sources.

    Needs PyYAML. Raises LabError without it.
    """
    try:
        import yaml
    except ImportError:
        raise LabError("`yaml` needs PyYAML: run it with the python of the project's .venv") from None
    cluster = yaml.safe_load(text)
    cluster["cluster_name"] = cluster_name
    cluster["provider"] |= {"head_ip": head_ip, "worker_ips": list(worker_ips)}
    cluster["auth"] |= {"ssh_user": "root", "ssh_private_key": "~/.ssh/id_ed25519"}
    cluster["min_workers"] = cluster["max_workers"] = len(worker_ips)
    mounts = cluster["file_mounts"]
    cluster["file_mounts"] = {there: str((REPOSITORY / here).resolve()) for there, here in mounts.items()}
    for commands in ("head_start_ray_commands", "worker_start_ray_commands"):
        cluster[commands] = [set_host_bytes(command, host_bytes_max) for command in cluster[commands]]
    return yaml.safe_dump(cluster, sort_keys=False, width=200)
