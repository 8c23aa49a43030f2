"""The network-namespace lab: what it makes, how its hosts fail, and that nothing of it stays."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster import _lab_host as inside
from cluster import _lab_machine as machine
from cluster.lab import LAUNCHER, Lab, LabError

NAME = f"test-{os.getpid()}"
TOOL = Path(machine.__file__).with_name("lab.py")

pytestmark = pytest.mark.cluster
# What only looks at text needs neither root nor tools.
needs_machine = pytest.mark.skipif(bool(machine.missing()), reason=f"needs {', '.join(machine.missing())}")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    if machine.missing():
        pytest.skip(f"needs {', '.join(machine.missing())}")
    with Lab.up(NAME, hosts=2, folder=tmp_path_factory.mktemp("lab") / "lab") as lab:
        yield lab


def traces(name: str) -> list[str]:
    """What there is on the machine under the name of a lab: namespaces, mounts, cgroups, processes."""
    named = f"p2pcache-lab-{name}-"
    found = [
        entry for entry in (os.listdir(machine.NETNS) if machine.NETNS.exists() else []) if named in entry
    ]
    found += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if named in line]
    if (cgroup := machine.freezer(named)) is not None:
        found += [entry for entry in os.listdir(cgroup.parent) if named in entry]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if named.encode() in (process / "cmdline").read_bytes():
                found.append(process.name)
        except OSError:
            pass
    return found


def interfaces() -> list[str]:
    return [link["ifname"] for link in json.loads(machine.call("ip", "-j", "link"))]


def greets(lab: Lab, source: str, target: str, timeout_s: float = 1.0) -> bool:
    """Whether the sshd of one host answers another one."""
    script = f"exec 3<>/dev/tcp/{lab.address(target)}/22 && read -r -n 4 -u 3 word && [ $word = SSH- ]"
    argv = ["timeout", str(timeout_s), "bash", "-c", script]
    return lab.run(source, argv, capture_output=True).returncode == 0


def eventually(what: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    until_s = time.monotonic() + timeout_s
    while not (value := what()):
        assert time.monotonic() < until_s, f"not within {timeout_s} s"
        time.sleep(0.05)
    return value


def command(*argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
    run = [sys.executable, str(TOOL), *argv]
    return subprocess.run(run, capture_output=True, text=True, timeout=60, **options)


def test_hosts_reach_each_other_by_name_with_the_launchers_key(lab: Lab) -> None:
    assert lab.hosts() == ["h1", "h2"]
    ssh = ["ssh", "-o", "StrictHostKeyChecking=no", "-o", "BatchMode=yes", "h2", "hostname; echo $UCX_TLS"]
    done = lab.run(LAUNCHER, ssh, capture_output=True, text=True)
    assert done.stdout.split() == ["h2", "tcp"], done.stderr
    assert greets(lab, "h1", "h2") and greets(lab, "h2", "h1")


def test_hosts_do_not_reach_the_machine(lab: Lab) -> None:
    with socket.create_server(("0.0.0.0", 0)) as server:
        links = json.loads(machine.call("ip", "-j", "-4", "address"))
        addresses = [entry["local"] for link in links for entry in link["addr_info"]] or ["127.0.0.1"]
        for address in addresses:
            connect = f"exec 3<>/dev/tcp/{address}/{server.getsockname()[1]}"
            done = lab.run("h1", ["timeout", "1", "bash", "-c", connect], capture_output=True)
            assert done.returncode != 0, address
    assert not {"h1", "h2", LAUNCHER, "bridge"} & set(interfaces())
    # The machine's gateway may accept connections to any address, but it is no sshd.
    heard = b""
    with contextlib.suppress(OSError), socket.create_connection((lab.address("h1"), 22), 0.5) as connection:
        heard = connection.recv(4)
    assert heard == b""


def test_what_a_host_holds_is_private_to_it(lab: Lab) -> None:
    script = "touch ~/mine /tmp/mine /var/tmp/mine /run/mine /dev/shm/mine; ls /sys/class/net; echo $$ $HOME"
    names = lab.run("h1", ["bash", "-c", script], capture_output=True, text=True).stdout.split()
    assert names[:2] == ["eth0", "lo"] and names[-1] == "/root" and int(names[-2]) < 10_000
    see = ["bash", "-c", "ls ~/mine /tmp/mine /var/tmp/mine /run/mine /dev/shm/mine"]
    assert lab.run("h2", see, capture_output=True, text=True).stdout == ""
    assert lab.run("h1", see, capture_output=True, text=True).stdout.count("mine") == 5
    boot_ids = {
        lab.run(name, ["cat", "/proc/sys/kernel/random/boot_id"], capture_output=True).stdout
        for name in ("h1", "h2")
    }
    assert len(boot_ids) == 2
    assert lab.folder.stat().st_mode & 0o777 == 0o700


def test_a_command_ends_with_the_process_that_runs_it(lab: Lab) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        lab.run("h1", ["sleep", "1234.5"], timeout=0.3)
    eventually(lambda: "1234.5" not in lab.run("h1", ["ps", "ax"], capture_output=True, text=True).stdout)


def test_a_cut_host_is_silent_until_healed(lab: Lab) -> None:
    lab.cut("h2")
    assert lab.status()["hosts"]["h2"]["link"] == "cut"
    assert not greets(lab, "h1", "h2", timeout_s=0.5)
    lab.heal("h2")
    assert lab.status()["hosts"]["h2"]["link"] == "up"
    eventually(lambda: greets(lab, "h1", "h2"))


@pytest.mark.parametrize("way", ["cgroup", "signals"])
def test_a_frozen_host_answers_nothing_until_thawed(
    lab: Lab, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "signals":
        monkeypatch.setattr(machine, "freezer", lambda name: None)
    elif machine.freezer("any") is None:
        pytest.skip("no writable cgroup file system, version 2")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(lab.command("h2", ["cat"]), **pipes) as echo:
        eventually(
            lambda: "cat" in lab.run("h2", ["ps", "-eo", "comm"], capture_output=True, text=True).stdout
        )
        lab.freeze("h2")
        assert lab.status()["hosts"]["h2"]["state"] == "frozen"
        assert not greets(lab, "h1", "h2", timeout_s=0.5)
        lab.thaw("h2")
        assert lab.status()["hosts"]["h2"]["state"] == "up"
        assert greets(lab, "h1", "h2", timeout_s=5)
        assert echo.communicate(b"still here", timeout=5)[0] == b"still here"


@pytest.mark.parametrize("before", ["up", "frozen"])
def test_a_killed_host_boots_with_its_address_and_home(lab: Lab, before: str) -> None:
    (lab.home("h2") / "kept").write_text("yes")
    lab.run("h2", ["touch", "/tmp/scratch"], check=True)
    address = lab.address("h2")
    init = lab._record.read().hosts["h2"].init
    assert init is not None
    processes = machine.members(init)
    if before == "frozen":
        lab.freeze("h2")
    lab.kill("h2")
    assert not any(map(machine.alive, processes))
    assert lab.status()["hosts"]["h2"] | {"home": ""} == {
        "address": address,
        "state": "down",
        "link": "absent",
        "pid": None,
        "home": "",
    }
    assert not greets(lab, "h1", "h2", timeout_s=0.5)
    for call in (lab.kill, lab.cut, lab.freeze):
        with pytest.raises(LabError, match="h2 is down"):
            call("h2")
    lab.boot("h2")
    assert lab.address("h2") == address and lab.status()["hosts"]["h2"]["state"] == "up"
    assert lab.run("h2", ["cat", "kept"], capture_output=True).stdout == b"yes"
    assert lab.run("h2", ["ls", "/tmp"], capture_output=True).stdout == b""
    eventually(lambda: greets(lab, "h1", "h2"))
    with pytest.raises(LabError, match="h2 is up"):
        lab.boot("h2")


def test_a_host_that_is_added_is_like_the_others(lab: Lab) -> None:
    assert lab.add() == "h3"
    assert greets(lab, "h3", "h1") and greets(lab, "h1", "h3")
    assert lab.run("h1", ["getent", "hosts", "h3"], capture_output=True).returncode == 0


@needs_machine
def test_the_command_line_from_up_to_down(tmp_path: Path) -> None:
    name, before = NAME + "-tool", interfaces()
    which = ["--name", name, "--folder", str(tmp_path / "lab")]
    up = command("up", *which, "--hosts", "1", "--image", "none", "--json")
    try:
        assert up.returncode == 0, up.stderr
        assert [*json.loads(up.stdout)["hosts"]] == [LAUNCHER, "h1"]
        assert traces(name) and interfaces() == before
        again = command("up", *which, "--image", "none")
        assert again.returncode == 2 and "is up already" in again.stderr
        script = 'read word; echo "$word on $(hostname)"; exit 7'
        done = command("exec", "h1", *which, "--", "bash", "-c", script, input="hello\n")
        assert (done.returncode, done.stdout) == (7, "hello on h1\n")
        assert command("cut", "h9", *which).stderr.startswith("lab: lab ")
    finally:
        down = command("down", *which)
    assert (down.returncode, down.stderr) == (0, "")
    eventually(lambda: not traces(name))
    assert interfaces() == before and not (tmp_path / "lab").exists()
    assert command("down", *which).returncode == 0
    assert command("status", *which).returncode == 2


@needs_machine
def test_of_two_that_make_the_same_lab_one_is_refused(tmp_path: Path) -> None:
    name = NAME + "-twice"
    which = ["--name", name, "--folder", str(tmp_path / "lab"), "--hosts", "1", "--image", "none"]
    run = [sys.executable, str(TOOL), "up", *which]
    both = [subprocess.Popen(run, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for _ in range(2)]
    try:
        errors = b"".join(one.communicate(timeout=60)[1] for one in both)
        assert sorted(one.returncode for one in both) == [0, 2], errors
        assert b"is up already" in errors
    finally:
        assert Lab(name, tmp_path / "lab").down() == []
    eventually(lambda: not traces(name))


@needs_machine
def test_a_name_that_another_has_taken_is_refused_and_left_alone(tmp_path: Path) -> None:
    name = NAME + "-clash"
    theirs = f"p2pcache-lab-{name}-h2"
    identity = machine.add_namespace(theirs)
    try:
        with pytest.raises(LabError, match=theirs):
            Lab.up(name, hosts=2, folder=tmp_path / "lab")
        assert machine.namespace_identity(theirs) == identity
    finally:
        assert machine.delete_namespace(theirs, identity)
    assert not traces(name) and not (tmp_path / "lab").exists()


@needs_machine
def test_an_up_that_fails_half_way_undoes_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, script = NAME + "-half", inside.init_script

    def broken(folder: Path, hostname: str, *others: Any) -> str:
        return "echo no disk; exit 3" if hostname == "h2" else script(folder, hostname, *others)

    monkeypatch.setattr(inside, "init_script", broken)
    with pytest.raises(LabError, match="h2 did not start: no disk"):
        Lab.up(name, hosts=3, folder=tmp_path / "lab")
    assert not traces(name) and not (tmp_path / "lab").exists()


@needs_machine
def test_down_removes_only_what_is_still_the_labs(tmp_path: Path) -> None:
    name, folder = NAME + "-own", tmp_path / "lab"
    lab = Lab.up(name, hosts=2, folder=folder)
    bystander = subprocess.Popen(["sleep", "60"])
    theirs = f"p2pcache-lab-{name}-h2"
    lab.kill("h2")
    identity = machine.add_namespace(theirs)  # another takes the name that has become free
    try:
        state = lab._record.read()
        state.namespaces[theirs] = (identity[0], identity[1] + 1)
        state.hosts["h2"].init = (bystander.pid, 1)  # a pid that has come to mean another process
        lab._record.write(state)
        (folder / "h1").rename(folder / "moved")
        (folder / "h1").mkdir()
        left = lab.down()
        assert left == [f"network namespace {theirs}", str(folder / "h1"), str(folder)]
        assert bystander.poll() is None
        assert machine.namespace_identity(theirs) == identity
        assert sorted(os.listdir(folder)) == ["h1", "moved"]
        assert lab.down() == [], "what is left is known to nobody"
    finally:
        bystander.kill()
        bystander.wait()
        assert machine.delete_namespace(theirs, identity)
    assert not traces(name)


@needs_machine
def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    for folder, reason in ((tmp_path / "open", "0700"), (Path("/run/lab"), "/run")):
        with pytest.raises(LabError, match=reason):
            Lab.up(NAME + "-folder", folder=folder)
    with pytest.raises(LabError, match="no name"):
        Lab("../x")
    with pytest.raises(LabError, match="room for at most 4"):
        Lab.up(NAME + "-folder", hosts=5, subnet="10.0.0.0/29", folder=tmp_path / "lab")


@needs_machine
@pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="needs to run in a virtual environment")
def test_a_hosts_environment_finds_the_images_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inside, "build_wheels", lambda venv: tmp_path)  # no build here
    with Lab.up(NAME + "-image", hosts=1, image=sys.prefix, folder=tmp_path / "lab") as lab:
        script = """
            python3 -m venv ~/p2pcache-venv && cd / &&
            ~/p2pcache-venv/bin/pip install -q pytest &&
            ~/p2pcache-venv/bin/python -c 'import sys, pytest; print(sys.prefix, pytest.__file__)'
            ! touch "$1/new" 2>/dev/null
        """
        done = lab.run("h1", ["bash", "-c", script, "-", sys.prefix], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        prefix, module = done.stdout.split()
        assert prefix == "/root/p2pcache-venv" and module.startswith(sys.prefix)
        # An editable install of the image is not what hosts run.
        find = "import importlib.util as u; print(u.find_spec('_editable_skbc_p2pcache') and sys.meta_path)"
        hooks = lab.run("h1", ["python3", "-c", f"import sys; {find}"], capture_output=True, text=True)
        assert "ScikitBuild" not in hooks.stdout


def test_the_yaml_differs_from_the_projects_only_where_it_must() -> None:
    yaml = pytest.importorskip("yaml")
    text = (inside.REPOSITORY / "ray_cluster.yaml").read_text()
    ours = yaml.safe_load(inside.cluster_yaml(text, "try", "10.87.0.1", ["10.87.0.3"], 123))
    theirs = yaml.safe_load(text)
    assert ours.pop("cluster_name") == "try" != theirs.pop("cluster_name")
    assert {ours.pop("min_workers"), ours.pop("max_workers")} == {1}
    assert {theirs.pop("min_workers"), theirs.pop("max_workers")} == {2}
    theirs["provider"] |= {"head_ip": "10.87.0.1", "worker_ips": ["10.87.0.3"]}
    theirs["auth"] |= {"ssh_user": "root", "ssh_private_key": "~/.ssh/id_ed25519"}
    for there, here in theirs["file_mounts"].items():
        theirs["file_mounts"][there] = str((inside.REPOSITORY / here).resolve())
    head = theirs["head_start_ray_commands"]
    assert any("host_bytes_max=" in line for line in head)
    ours_head = ours.pop("head_start_ray_commands")
    assert any("host_bytes_max=123" in line.split() for line in ours_head)
    assert [line.rsplit("host_bytes_max=")[0] for line in ours_head] == [
        line.rsplit("host_bytes_max=")[0] for line in theirs.pop("head_start_ray_commands")
    ]
    assert ours == theirs


def test_the_yaml_of_a_lab_names_its_hosts(lab: Lab) -> None:
    yaml = pytest.importorskip("yaml")
    cluster = yaml.safe_load(lab.yaml(workers=["h2"]))
    assert cluster["provider"] == {"type": "local", "head_ip": "10.87.0.1", "worker_ips": ["10.87.0.2"]}
    with pytest.raises(LabError, match="no host h9"):
        lab.yaml(workers=["h9"])


def test_the_state_survives_its_file() -> None:
    from cluster._lab_state import Host, State

    hosts = {"h1": Host("10.0.0.1", (1, 2), (3, 4)), "h2": Host("10.0.0.2")}
    state = State("10.0.0.0/24", 1, None, None, "id", hosts, {"a": (1, 2)}, {"b": (3, 4)}, {"c": (5, 6)})
    assert State.of(json.loads(json.dumps(dataclasses.asdict(state)))) == state


def test_down_leaves_alone_what_has_no_record_of_a_lab(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir(mode=0o700)
    for name in ("lock", "state.new"):
        (folder / name).write_text("mine")
    assert Lab("x", folder=folder).down() == []
    assert sorted(os.listdir(folder)) == ["lock", "state.new"]
    (folder / "state.json").write_text('{"a": 1}')
    with pytest.raises(LabError, match="no record of a lab"):
        Lab("x", folder=folder).down()
    assert len(os.listdir(folder)) == 3
