"""The lab: hosts made of namespaces on this one machine, to try real `ray up` and real faults on.

    python cluster/lab.py up --hosts 3          # as root; -h lists the commands
    python cluster/lab.py exec h1 -- hostname
    python cluster/lab.py down

A host has its own network, processes, host name, IPC, /root, /var/tmp, /tmp, /run and /dev/shm, and an
sshd as PID 1. All hosts and a launcher, which holds the key, hang on one bridge. That bridge is in a
network namespace too: the machine's own interfaces and firewall are never touched, and nothing in the
lab can be reached from outside of it or reaches anything outside.

It needs the standard library only. All that it makes is recorded in a folder of mode 0700, with the
identity of each thing, and `down` removes what is recorded and still the same, nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cluster import _lab_build as build
from cluster import _lab_host as inside
from cluster import _lab_machine as machine
from cluster._lab_build import LAUNCHER
from cluster._lab_machine import LabError
from cluster._lab_state import Record, State

MIB = 1 << 20
SUBNET = "10.87.0.0/24"


class Lab:
    """A lab that is up. Make one with `Lab.up`, find one again with `Lab(name)`.

    As a context manager it is taken down at the end. Every call raises LabError when it cannot do what
    it says; calls that change the lab, from whatever process, take turns.
    """

    def __init__(self, name: str = "main", folder: Path | str | None = None) -> None:
        if not machine.valid_name(name):
            raise LabError(f"{name!r} is no name for a lab: use up to 31 of a-z, 0-9 and -")
        if lacking := machine.missing():
            raise LabError(f"a lab needs {', '.join(lacking)}")
        default = Path(tempfile.gettempdir()) / f"p2pcache-lab-{name}"
        self._record = Record(name, Path(folder or default).absolute())

    @property
    def folder(self) -> Path:
        """Where the record of the lab and the files of its hosts lie; of mode 0700."""
        return self._record.folder

    @classmethod
    def up(
        cls,
        name: str = "main",
        *,
        hosts: int = 3,
        subnet: str = SUBNET,
        image: Path | str | None = None,
        shm_bytes: int = 512 * MIB,
        folder: Path | str | None = None,
    ) -> Lab:
        """Make a lab with hosts h1, h2 and so on, and return once all of them take logins.

        `image`: a virtual environment that all hosts have (see `_lab_host.Image`); without one they
        have only the machine's own Python. `shm_bytes`: the size of each host's /dev/shm. `folder`:
        where the lab keeps its record and the hosts' files. A failure on the way undoes all of it.
        """
        lab = cls(name, folder)
        record = lab._record
        build.check_room(subnet, hosts)
        if any(record.folder.resolve().is_relative_to(path) for path in ("/run", "/dev", "/proc", "/sys")):
            raise LabError(f"{record.folder}: a lab's folder must not be below /run, /dev, /proc or /sys")
        venv = None if image is None else Path(image).absolute()
        wheels = None if venv is None else inside.build_wheels(venv)
        machine.private_folder(record.folder)
        with machine.locked(record.lock):
            if record.path.exists():
                raise LabError(f"lab {name} is up already, or half down ({record.folder}): take it down")
            boot_id = machine.boot_id()
            state = State(subnet, shm_bytes, venv and str(venv), wheels and str(wheels), boot_id)
            try:
                build.build(record, state, hosts)
            except BaseException:
                build.remove(record, state)
                raise
        return lab

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def down(self) -> list[str]:
        """Remove the lab; nothing if there is none. Returns what was left, for not being the lab's."""
        record = self._record
        if not record.path.is_file():  # without a record nothing in the folder is known to be a lab's
            return []
        machine.private_folder(record.folder)  # checks whose it is
        with machine.locked(record.lock):
            return build.remove(record, record.read())

    def add(self) -> str:
        """Make one more host and return its name once it takes logins."""
        with self._record.changing() as state:
            number = 1 + max(int(name[1:]) for name in state.hosts if name != LAUNCHER)
            build.check_room(state.subnet, number)
            name = f"h{number}"
            build.make(self._record, state, name)
            build.start(self._record, state, name)
            build.wait(self._record, state, name)
            return name

    def cut(self, host: str) -> None:
        """Take a host off the network: what it and others send to each other is lost without a word."""
        self._set_link(host, "down")

    def heal(self, host: str) -> None:
        """Put a host back on the network."""
        self._set_link(host, "up")

    def _set_link(self, host: str, to: str) -> None:
        with self._record.changing() as state:
            self._record.init(state, host)
            machine.call("ip", "-n", self._record.named(build.BRIDGE), "link", "set", host, to)

    def freeze(self, host: str) -> None:
        """Stop every process of a host. Its network stays, so peers' connections just get no answer.

        What `run` starts on it afterwards is not frozen.
        """
        with self._record.changing() as state:
            init, cgroup = self._record.init(state, host), self._cgroup(host)
            try:
                machine.freeze(init, cgroup)
            finally:
                if cgroup is not None and (identity := machine.folder_identity(cgroup)):
                    state.cgroups[str(cgroup)] = identity

    def thaw(self, host: str) -> None:
        """Let a frozen host run on."""
        with self._record.changing() as state:
            machine.thaw(self._record.init(state, host), self._cgroup(host))

    def _cgroup(self, host: str) -> Path | None:
        return machine.freezer(self._record.named(host))

    def kill(self, host: str) -> None:
        """A host loses power: all its processes end at once, and its peers hear nothing of it."""
        with self._record.changing() as state:
            self._record.init(state, host)
            build.stop(self._record, state, host)

    def boot(self, host: str) -> None:
        """Start a killed host again: same name, address, keys, /root and /var/tmp; all else is empty."""
        with self._record.changing() as state:
            init = self._record.host(state, host).init
            if init is not None and machine.alive(init):
                raise LabError(f"{host} is up")
            build.stop(self._record, state, host)  # what is left of one that was not killed by us
            scratch = self._record.files(host) / "tmp"
            shutil.rmtree(scratch)
            scratch.mkdir()
            scratch.chmod(inside.PRIVATE["tmp"])
            build.start(self._record, state, host)
            build.wait(self._record, state, host)

    def status(self) -> dict[str, Any]:
        """The lab as it is now; a host's `state` is up, frozen or down, its `link` up, cut or absent."""
        record, state = self._record, self._record.read()
        bridge, ports = record.named(build.BRIDGE), {}
        if machine.namespace_identity(bridge):
            links = json.loads(machine.call("ip", "-j", "-n", bridge, "link"))
            ports = {link["ifname"]: "up" if "UP" in link["flags"] else "cut" for link in links}
        hosts = {}
        for name, host in state.hosts.items():
            init = host.init if host.init is not None and machine.alive(host.init) else None
            frozen = init is not None and machine.frozen(init, self._cgroup(name))
            hosts[name] = {
                "address": host.address,
                "state": "down" if init is None else "frozen" if frozen else "up",
                "link": ports.get(name, "absent"),
                "pid": init and init[0],  # of PID 1, as seen from outside
                "home": str(self.home(name)),
            }
        return {"name": record.name, "folder": str(record.folder), "subnet": state.subnet, "hosts": hosts}

    def hosts(self) -> list[str]:
        """Names of the hosts, without the launcher, whether up or not."""
        return [name for name in self._record.read().hosts if name != LAUNCHER]

    def address(self, host: str) -> str:
        """A host's IPv4 address."""
        return self._record.host(self._record.read(), host).address

    def home(self, host: str) -> Path:
        """Where a host's /root lies on the machine, to put files there or read them."""
        return self._record.files(host) / "root"

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` on a host, in a login shell's environment and in /root.

        For `subprocess`, with `env=login_environment()`. It runs beside sshd, so on a host that is cut
        or frozen too. It ends when the process that was started with it does.
        """
        init = self._record.init(self._record.read(), host)
        enter = ["-t", str(init[0]), "--mount", "--net", "--pid", "--uts", "--ipc"]
        # nsenter alone would leave the command behind when it is killed, as by a timeout.
        leash = ["setpriv", "--pdeathsig", "KILL", "bash", "--login", "-c", 'cd && exec "$@"', "lab"]
        return [machine.tool("nsenter"), *enter, *leash, *argv]

    def run(self, host: str, argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        """`subprocess.run` on a host; the options are that function's."""
        return subprocess.run(self.command(host, argv), env=login_environment(), **options)

    def yaml(
        self,
        *,
        head: str = "h1",
        workers: Sequence[str] | None = None,
        cluster_name: str | None = None,
        host_bytes_max: int = 256 * MIB,
    ) -> str:
        """ray_cluster.yaml for this lab, for `ray up` on the launcher. Needs PyYAML.

        `workers`: all hosts but the head by default. `host_bytes_max`: the host tier of each node.
        """
        record, state = self._record, self._record.read()
        if workers is None:
            workers = [name for name in state.hosts if name not in (LAUNCHER, head)]
        addresses = [record.host(state, name).address for name in [head, *workers]]
        text = (inside.REPOSITORY / "ray_cluster.yaml").read_text()
        name = cluster_name or record.named()
        return inside.cluster_yaml(text, name, addresses[0], addresses[1:], host_bytes_max)


def login_environment() -> dict[str, str]:
    """The environment that sshd gives a login of root; its shell profile adds the rest."""
    fixed = {"HOME": "/root", "USER": "root", "LOGNAME": "root", "SHELL": "/bin/bash", "PATH": machine.PATH}
    return fixed | {name: os.environ[name] for name in ("TERM",) if name in os.environ}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lab.py", description="hosts made of namespaces on this machine")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--name", default="main", help="of the lab, for several side by side")
    common.add_argument("--folder", help="of the lab's record and files (default: in the temporary folder)")
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, parents=[common], help=text, description=text)

    up = command("up", "make a lab")
    up.add_argument("--hosts", type=int, default=3, help="how many, beside the launcher")
    up.add_argument("--subnet", default=SUBNET, help="of the hosts' addresses; only the lab sees it")
    up.add_argument(
        "--image",
        default=str(inside.REPOSITORY / ".venv"),
        help="virtual environment that every host has, or `none` (default: the project's .venv)",
    )
    up.add_argument("--shm-mib", type=int, default=512, help="size of each host's /dev/shm")
    up.add_argument("--json", action="store_true", help="print the status as JSON")
    status = command("status", "show the hosts")
    status.add_argument("--json", action="store_true", help="as JSON")
    command("down", "remove the lab")
    command("add", "make one more host and print its name")
    run = command("exec", "run a command on a host: exec HOST -- COMMAND ...")
    run.add_argument("host")
    run.add_argument("argv", nargs="+", metavar="COMMAND")
    for name, text in (
        ("cut", "take a host off the network"),
        ("heal", "put it back"),
        ("freeze", "stop every process of a host"),
        ("thaw", "let them run on"),
        ("kill", "cut a host's power"),
        ("boot", "start a killed host again"),
    ):
        command(name, text).add_argument("host")
    yaml = command("yaml", "print ray_cluster.yaml for this lab")
    yaml.add_argument("--head", default="h1")
    yaml.add_argument("--workers", help="such as h2,h3 (default: all hosts but the head)")
    yaml.add_argument("--cluster-name")
    return parser


def _print_status(status: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(status, indent=1))
        return
    print(f"lab {status['name']} in {status['folder']}")
    for name, host in status["hosts"].items():
        print(f"{name:<9} {host['address']:<15} {host['state']:<6} link {host['link']}")


def _run(options: argparse.Namespace) -> int:
    name, folder, command = options.name, options.folder, options.command
    if command == "up":
        image = None if options.image == "none" else options.image
        size = {"hosts": options.hosts, "shm_bytes": options.shm_mib * MIB}
        lab = Lab.up(name, subnet=options.subnet, image=image, folder=folder, **size)
        _print_status(lab.status(), options.json)
        return 0
    lab = Lab(name, folder)
    if command == "down":
        for left in lab.down():
            print(f"lab: left alone, not this lab's: {left}", file=sys.stderr)
    elif command == "status":
        _print_status(lab.status(), options.json)
    elif command == "add":
        print(lab.add())
    elif command == "exec":
        argv = lab.command(options.host, options.argv)
        os.execve(argv[0], argv, login_environment())
    elif command == "yaml":
        workers = None if options.workers is None else options.workers.split(",")
        print(lab.yaml(head=options.head, workers=workers, cluster_name=options.cluster_name), end="")
    else:
        getattr(lab, command)(options.host)
    return 0


def main() -> int:
    """Run one command line. Returns 0, or 2 with a message for what cannot be done."""
    # So that an `up` that is told to end undoes what it has made.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return _run(_parser().parse_args())
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
