"""A cluster as its YAML describes it, from a launcher that is no part of it: ask its head, stop all of it.

The YAML is `ray up`'s. Hosts are reached by SSH with the user and key that it names, as Ray does.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from p2pcache.types import ConfigError, NodeDown

_CONNECT_S = 5
_ASK_S = 60.0
_STOP_S = 60.0
_RAY_DOWN_S = 180.0
_SSH_FAILED = 255  # ssh's own exit status for a host that it could not reach or log in to
_PARALLEL = 16

# What Ray runs on a host, by its command line: whatever is still there after a stop. The [x] keep the
# pattern from finding the shell that it is written in.
_RAY = (
    "/raylet/[r]aylet|/gcs/[g]cs_server|ray/dashboard/[d]ashboard|ray/dashboard/[a]gent"
    "|ray/_[p]rivate/|autoscaler/_private/[m]onitor|[r]ay::"
)
_LEFT = f"ps -eo pid=,args= | grep -E '{_RAY}' || true"


_START_COMMANDS = ("head_start_ray_commands", "worker_start_ray_commands")
_NO_TERMINAL = re.compile(r"bash: (cannot set terminal process group|no job control)")


def _texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(v, str) for v in values)


@dataclass(frozen=True, slots=True)
class Said:
    """What a command on a host came to."""

    status: int
    out: str
    error: str

    @property
    def reached(self) -> bool:
        return self.status != _SSH_FAILED


@dataclass(frozen=True)
class Cluster:
    """A `ray up` YAML that has been read. path: of the file."""

    path: Path
    config: dict[str, Any]

    @staticmethod
    def load(path: Path) -> Cluster:
        """Raises ConfigError for what is no cluster description."""
        try:
            config = yaml.safe_load(path.read_text())
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"{path} cannot be read as YAML: {error}") from None
        provider = config.get("provider") if isinstance(config, dict) else None
        if not isinstance(provider, dict) or "type" not in provider:
            raise ConfigError(f"{path} is no description of a Ray cluster: it names no provider")
        if provider["type"] == "local":
            if not isinstance(provider.get("head_ip"), str):
                raise ConfigError(f"{path}: the local provider needs head_ip")
            if not _texts(provider.get("worker_ips") or []):
                raise ConfigError(f"{path}: worker_ips must be a list of addresses")
        auth = config.get("auth") or {}
        if not isinstance(auth, dict) or not _texts(list(auth.values())):
            raise ConfigError(f"{path}: auth must map names to texts")
        for key in _START_COMMANDS:
            if not _texts(config.get(key) or []):
                raise ConfigError(f"{path}: {key} must be a list of commands")
        return Cluster(path, config)

    @property
    def local(self) -> bool:
        """Whether its hosts are ours to stop, and not a cloud's to end."""
        return self.config["provider"]["type"] == "local"

    def head(self) -> str:
        """The head's address. Raises NodeDown where the cloud knows none."""
        if self.local:
            return self.config["provider"]["head_ip"]
        from ray.autoscaler.sdk import get_head_node_ip

        try:
            return get_head_node_ip(str(self.path))
        except Exception as error:  # each cloud's library has its own
            raise NodeDown(f"{self.path.name}: no head is up ({error})") from None

    def hosts(self) -> list[str]:
        """All addresses that the YAML itself names, the head's first."""
        provider = self.config["provider"]
        return [provider["head_ip"], *(provider.get("worker_ips") or [])] if self.local else [self.head()]

    def program(self, name: str) -> str:
        """How the hosts call `ray` or `p2pcache`: as the YAML's own start commands do."""
        for key in _START_COMMANDS:
            for command in self.config.get(key) or []:
                found = re.search(rf"(?:^|\s)(\S*/)?{name}\s+(?:start|stop)\b", command)
                if found:
                    return (found[1] or "") + name
        return name

    def run(self, host: str, command: str, timeout_s: float = _ASK_S) -> Said:
        """Run a shell command on a host, with the environment of a login there."""
        auth = self.config.get("auth") or {}
        ssh = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_S}", "-o", "LogLevel=ERROR"]
        ssh += ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"]
        ssh += ["-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"]
        if auth.get("ssh_private_key"):
            ssh += ["-i", os.path.expanduser(auth["ssh_private_key"]), "-o", "IdentitiesOnly=yes"]
        if auth.get("ssh_proxy_command"):
            ssh += ["-o", f"ProxyCommand={auth['ssh_proxy_command']}"]
        if auth.get("ssh_user"):
            ssh += ["-l", str(auth["ssh_user"])]
        # As Ray does: ~/.bashrc counts, whatever guards it against shells that are not interactive.
        command = f"source ~/.bashrc; {command}"
        words = [*ssh, "--", host, f"bash --login -c -i {shlex.quote(command)}"]
        try:
            ended = subprocess.run(
                words, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired:
            return Said(_SSH_FAILED, "", f"no answer within {timeout_s:.0f} s")
        except FileNotFoundError:
            raise ConfigError("there is no `ssh` on this host") from None
        error = "\n".join(line for line in ended.stderr.splitlines() if not _NO_TERMINAL.match(line))
        return Said(ended.returncode, ended.stdout, error.strip())

    def ask_head(self, arguments: list[str], timeout_s: float = _ASK_S) -> Said:
        """Run a `p2pcache` command on the head. Raises NodeDown where the head cannot be reached."""
        said = self.run(self.head(), f"{self.program('p2pcache')} {shlex.join(arguments)}", timeout_s)
        if not said.reached:
            raise NodeDown(f"the head {self.head()} cannot be reached: {said.error}")
        return said

    def statuses(self) -> list[dict[str, Any]]:
        """The status of every node, and of every host of the YAML that has none, the reason."""
        said = self.ask_head(["status", "--json"])
        try:
            nodes = json.loads(said.out)
        except json.JSONDecodeError:
            raise NodeDown(f"the head {self.head()}: {said.error or said.out.strip()}") from None
        there = {node.get("host_address") for node in nodes}
        missing = [host for host in self.hosts() if host not in there]
        if not self.local or not missing:
            return nodes
        with ThreadPoolExecutor(_PARALLEL) as pool:
            probes = dict(
                zip(missing, pool.map(lambda h: self.run(h, _LEFT, _CONNECT_S * 2), missing), strict=True)
            )
        for host, probe in probes.items():
            if not probe.reached:
                why = f"it cannot be reached: {probe.error}"
            elif "raylet" not in probe.out:
                why = "Ray does not run there"
            else:
                continue  # its node is listed already, with its own reason
            nodes.append({"name": host, "error": why})
        return nodes

    def down(self, say: Callable[[str], None]) -> bool:
        """Stop the mesh, Ray, and all that Ray leaves on the hosts. Returns whether nothing is left.

        `ray down` of the local provider stops the head alone; its workers are stopped here by SSH. A
        cloud's hosts are ended by `ray down` itself.
        """
        if self.local:
            self.run(self.head(), f"{self.program('p2pcache')} stop", _STOP_S)  # so that nodes end in order
        words = [sys.executable, "-m", "ray.scripts.scripts", "down", "-y", str(self.path)]
        try:
            ended = subprocess.run(
                words, capture_output=True, text=True, timeout=_RAY_DOWN_S, stdin=subprocess.DEVNULL
            )
            clean = ended.returncode == 0
            if not clean:
                say(f"ray down: {(ended.stderr or ended.stdout).strip()[-500:]}")
        except subprocess.TimeoutExpired:
            clean = False
            say(f"ray down did not end within {_RAY_DOWN_S:.0f} s")
        if not self.local:
            return clean
        with ThreadPoolExecutor(_PARALLEL) as pool:
            left = dict(zip(self.hosts(), pool.map(self._stop_host, self.hosts()), strict=True))
        for host, why in left.items():
            say(f"{host}: {why or 'stopped'}")
        return not any(left.values())

    def _stop_host(self, host: str) -> str:
        """Stop Ray on one host. Returns what is wrong, or nothing."""
        ray = self.program("ray")
        stop = f"{ray} stop --grace-period 5; {ray} stop --force; command -v {ray} ps | wc -l; {_LEFT}"
        said = self.run(host, stop, _STOP_S)
        if not said.reached:
            return f"cannot be reached: {said.error}"
        if "2" not in said.out.splitlines():
            return f"has no {ray}, or no ps: {said.error}"
        left = [line for line in said.out.splitlines() if re.match(r"\s*\d+ .*(raylet|gcs_server|ray)", line)]
        return f"still runs: {'; '.join(line.strip()[:120] for line in left)}" if left else ""
