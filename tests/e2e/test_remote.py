"""A cluster's YAML as the launcher reads it, and what it runs over SSH; `ssh` itself is a script here."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest

from p2pcache.remote import Cluster
from p2pcache.types import ConfigError, NodeDown

ROOT = Path(__file__).parents[2]

# Answers as a host does: by its address, the last word but one; the command is the last.
SSH = """#!{python}
import json, sys
*_, dashes, host, command = sys.argv[1:]
assert dashes == "--", sys.argv
with open({log!r}, "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
answers = json.load(open({answers!r}))
for (address, word), (status, out) in ((k.split("|"), v) for k, v in answers.items()):
    if address in ("*", host) and word in command:
        print(out, end="")
        print("said by ssh", file=sys.stderr)
        sys.exit(status)
sys.exit("nothing to say to " + command)
"""


class Hosts:
    def __init__(self, folder: Path):
        self._answers, self._log = folder / "answers.json", folder / "log"
        self._log.touch()
        program = folder / "ssh"
        program.write_text(SSH.format(python=sys.executable, log=str(self._log), answers=str(self._answers)))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        self.say({})

    def say(self, answers: dict[str, tuple[int, str]]) -> None:
        """address|word of the command -> (exit status, output)"""
        self._answers.write_text(json.dumps(answers))

    def asked(self) -> list[list[str]]:
        return [json.loads(line) for line in self._log.read_text().splitlines()]


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hosts:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return Hosts(tmp_path)


@pytest.fixture
def cluster() -> Cluster:
    return Cluster.load(ROOT / "ray_cluster.yaml")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [", "cannot be read as YAML"),
        ("- a", "names no provider"),
        ("provider: local", "names no provider"),
        ("provider: {type: local}", "needs head_ip"),
        ("provider: {type: local, head_ip: 3}", "needs head_ip"),
        ("provider: {type: local, head_ip: a, worker_ips: 127.0.0.2}", "worker_ips must be a list"),
        ("provider: {type: local, head_ip: a, worker_ips: [3]}", "worker_ips must be a list"),
        ("provider: {type: local, head_ip: a}\nauth: [x]", "auth must map names to texts"),
        ("provider: {type: local, head_ip: a}\nauth: {ssh_user: 7}", "auth must map names to texts"),
        ("provider: {type: local, head_ip: a}\nworker_start_ray_commands: ray start", "list of commands"),
    ],
)
def test_what_describes_no_cluster_is_refused(tmp_path: Path, text: str, says: str):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        Cluster.load(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        Cluster.load(tmp_path / "none.yaml")


def test_the_projects_own_yaml_is_understood(cluster: Cluster):
    assert cluster.hosts() == ["10.0.0.1", "10.0.0.2", "10.0.0.3"] and cluster.local
    assert cluster.program("ray") == "~/p2pcache-venv/bin/ray"
    assert cluster.program("p2pcache") == "~/p2pcache-venv/bin/p2pcache"
    assert cluster.program("unknown") == "unknown"


def test_a_command_reaches_a_host_with_its_user_key_and_login_environment(cluster: Cluster, hosts: Hosts):
    hosts.say({"*|echo": (3, "out")})
    said = cluster.run("10.0.0.2", "echo 'it's' $HOME")
    assert (said.status, said.out, said.reached) == (3, "out", True) and "said by ssh" in said.error
    (words,) = hosts.asked()
    assert words[words.index("-l") + 1] == "ubuntu" and words[words.index("-i") + 1].endswith("/id_ed25519")
    assert words[-2] == "10.0.0.2" and words[-1].startswith("bash --login -c -i ")


def test_all_nodes_and_the_hosts_that_have_none_are_shown(cluster: Cluster, hosts: Hosts):
    node = {"name": "a", "host_address": "10.0.0.1"}
    hosts.say(
        {
            "10.0.0.1|status": (1, json.dumps([node, {"name": "c-1", "error": "no memory"}])),
            "10.0.0.2|ps": (255, ""),
            "10.0.0.3|ps": (0, "12 /x/raylet/raylet --node-ip-address=10.0.0.3\n"),
        }
    )
    assert cluster.statuses() == [
        node,
        {"name": "c-1", "error": "no memory"},
        {"name": "10.0.0.2", "error": "it cannot be reached: said by ssh"},
    ]
    hosts.say({"10.0.0.1|status": (0, json.dumps([node])), "*|ps": (0, "")})
    assert [n.get("error") for n in cluster.statuses()] == [None, *["Ray does not run there"] * 2]


def test_a_head_that_cannot_answer_is_an_error_that_says_why(cluster: Cluster, hosts: Hosts):
    hosts.say({"*|status": (255, "")})
    with pytest.raises(NodeDown, match=r"the head 10.0.0.1 cannot be reached: said by ssh"):
        cluster.statuses()
    hosts.say({"*|status": (127, "bash: p2pcache: command not found")})
    with pytest.raises(NodeDown, match=r"the head 10.0.0.1: said by ssh"):
        cluster.statuses()


def test_without_ssh_the_user_is_told(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no `ssh` on this host"):
        cluster.run("10.0.0.1", "true")


def test_down_stops_every_host_and_tells_of_those_that_it_could_not(
    tmp_path: Path, cluster: Cluster, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "executable", "/bin/true")  # in place of `ray down`
    said: list[str] = []
    hosts.say(
        {
            "10.0.0.2|ray stop": (0, "Stopped all 5 Ray processes.\n2\n"),
            "10.0.0.3|ray stop": (255, ""),
            "10.0.0.1|p2pcache stop": (0, ""),
            "10.0.0.1|ray stop": (0, "2\n 77 /x/gcs/gcs_server --port\n"),
        }
    )
    assert not cluster.down(said.append)
    assert said == [
        "10.0.0.1: still runs: 77 /x/gcs/gcs_server --port",
        "10.0.0.2: stopped",
        "10.0.0.3: cannot be reached: said by ssh",
    ]
    hosts.say({"*|stop": (0, "1\n")})
    assert not cluster.down(said.append) and "has no ~/p2pcache-venv/bin/ray, or no ps" in said[-1]
    hosts.say({"*|stop": (0, "Stopped all 5 Ray processes.\n2\n")})
    assert cluster.down(said.append)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert cluster.down(said.append), "`ray down` may fail where nothing of it is left in the end"
