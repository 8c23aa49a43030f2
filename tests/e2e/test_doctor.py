"""`p2pcache doctor`: its checks on hosts that are not at hand, and all of it on this one."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from p2pcache import cli, doctor
from p2pcache.config import GIB, MIB, NodeConfig
from p2pcache.doctor import ERROR, OK, WARNING, Finding
from p2pcache.io.transport_ucx import UcxTransport, ucx_available

ROOT = Path(__file__).parents[2]
NO_UCX = {"available": False, "reason": "ucxx is not installed"}
OF_WHEEL = {
    "available": True,
    "version": "1.21.0",
    "library": "/venv/libucx/lib/libucp.so",
    "wheel": True,
    "modules": ["cma", "cuda"],
    "verbs": False,
}
WITH_VERBS = OF_WHEEL | {"library": "/opt/ucx/lib/libucp.so", "wheel": False, "verbs": True}
TCP, RDMA = ["tcp/eth0"], ["mlx5_0"]


def levels(findings: list[Finding] | Iterator[Finding]) -> dict[str, str]:
    """Level of each; and who finds fault says what to do about it."""
    found = list(findings)
    assert all(bool(f.remedy) == (f.level != OK) for f in found), found
    return {f.name: f.level for f in found}


def level(finding: Finding) -> str:
    return levels([finding])[finding.name]


@pytest.mark.parametrize(
    ("facts", "resources", "devices", "prefer_system", "expected"),
    [
        (NO_UCX, [], [], False, {"ucx": OK}),
        (NO_UCX, [], RDMA, False, {"ucx": WARNING}),
        (OF_WHEEL, TCP, [], False, {"ucx": OK, "ucx transports": OK}),
        (OF_WHEEL, TCP, RDMA, False, {"ucx": OK, "ucx transports": WARNING}),
        (OF_WHEEL, TCP, [], True, {"ucx": OK, "ucx loader": WARNING, "ucx transports": OK}),
        (WITH_VERBS, [*TCP, "rc_mlx5/mlx5_0:1"], RDMA, True, {"ucx": OK, "ucx transports": OK}),
        (WITH_VERBS, TCP, RDMA, True, {"ucx": OK, "ucx transports": WARNING}),
        (WITH_VERBS | {"version": "1.13.1"}, TCP, [], True, {"ucx": WARNING, "ucx transports": OK}),
    ],
)
def test_ucx(facts, resources, devices, prefer_system, expected) -> None:
    assert levels(doctor.check_ucx(facts, resources, devices, prefer_system)) == expected


def test_locked_memory_matters_to_rdma_alone() -> None:
    assert level(doctor.check_locked_memory(8 * MIB, GIB, [])) == OK
    assert level(doctor.check_locked_memory(8 * MIB, GIB, RDMA)) == ERROR
    assert level(doctor.check_locked_memory(float("inf"), GIB, RDMA)) == OK


def test_memory() -> None:
    assert level(doctor.check_memory(2 * GIB, GIB, "")) == OK
    assert level(doctor.check_memory(GIB, 2 * GIB, "")) == ERROR
    assert level(doctor.check_memory(2 * GIB, GIB, "Function not implemented")) == ERROR
    assert level(doctor.check_shm(64 * MIB)) == WARNING
    assert level(doctor.check_shm(8 * GIB)) == OK


def test_addresses_and_ports() -> None:
    here = {"127.0.0.1": "lo", "10.0.0.2": "eth0"}
    assert level(doctor.check_address("127.0.0.1", here)) == OK
    assert "eth0" in doctor.check_address("10.0.0.2", here).text
    assert level(doctor.check_address("10.0.0.3", here)) == ERROR
    port = ("control_port", "127.0.0.1", 7000)
    assert level(doctor.check_port(*port, "", 0, "another")) == OK
    assert level(doctor.check_port(*port, "Address already in use", 0, "another")) == ERROR
    assert level(doctor.check_port(*port, "Address already in use", 1, "another")) == OK


def test_a_taken_port_is_seen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert "in use" in doctor.bind_problem("127.0.0.1", port)
    assert doctor.bind_problem("127.0.0.1", port) == ""
    assert doctor.bind_problem("192.0.2.77", 0)


def test_versions() -> None:
    tested = dict(doctor.TESTED)
    assert levels(doctor.check_versions((3, 11), tested)) == {"python": OK, "packages": OK}
    assert levels(doctor.check_versions((3, 10), tested))["python"] == ERROR
    assert levels(doctor.check_versions((3, 12), tested | {"torch": "2.13.1+cpu"}))["packages"] == OK
    assert levels(doctor.check_versions((3, 12), tested | {"torch": "2.6.0"}))["packages"] == WARNING
    del tested["pyzmq"]
    assert levels(doctor.check_versions((3, 12), tested))["packages"] == ERROR


def test_the_tested_versions_are_those_of_the_constraints() -> None:
    pinned = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    )
    assert doctor.TESTED == {name: pinned[name] for name in doctor.TESTED}


def test_limits() -> None:
    assert level(doctor.check_socket_buffers({"net.core.rmem_max": 212_992})) == WARNING
    assert level(doctor.check_socket_buffers({"net.core.rmem_max": 64 * MIB})) == OK
    assert level(doctor.check_descriptors(1024)) == WARNING
    assert level(doctor.check_descriptors(65_536)) == OK
    assert level(doctor.check_io_uring("Operation not permitted")) == WARNING
    assert level(doctor.check_io_uring("")) == OK
    assert level(doctor.check_clock(True, 1e-9)) == OK
    assert level(doctor.check_clock(True, 0.016)) == ERROR


def test_nvme() -> None:
    assert levels(doctor.check_nvme("", "", "", 0, 0)) == {"nvme": OK}
    assert levels(doctor.check_nvme("/x", "Permission denied", "", 0, 0)) == {"nvme": ERROR}
    assert levels(doctor.check_nvme("/x", "", "", GIB, 2 * GIB)) == {"nvme": ERROR, "direct IO": OK}
    assert levels(doctor.check_nvme("/x", "", "Invalid argument", 2 * GIB, GIB)) == {
        "nvme": OK,
        "direct IO": WARNING,
    }


def test_nvme_is_probed_where_a_node_would_make_it_and_nothing_is_left(tmp_path: Path) -> None:
    problem, _, free_bytes, needed_bytes = doctor.nvme_state(str(tmp_path / "a/b"), GIB)
    assert not problem and free_bytes and needed_bytes == GIB
    for name in ("000000.seg", "notes.txt"):
        with open(tmp_path / name, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, MIB)
    taken_bytes = (tmp_path / "000000.seg").stat().st_blocks * 512
    assert taken_bytes >= MIB
    assert doctor.nvme_state(str(tmp_path), GIB)[3] == GIB - taken_bytes  # what is not a segment stays
    assert sorted(os.listdir(tmp_path)) == ["000000.seg", "notes.txt"]
    assert doctor.nvme_state("/proc/nothing", GIB)[0]


def test_a_folder_that_the_store_would_refuse_is_a_problem(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    state = doctor.nvme_state(str(tmp_path), GIB)
    assert "mode 755" in state[0]
    assert levels(doctor.check_nvme(str(tmp_path), *state)) == {"nvme": ERROR}


def test_this_host(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    found = doctor.examine(NodeConfig(host_bytes_max=64 * MIB, nvme_path=str(tmp_path), nvme_bytes_max=GIB))
    assert {"python", "ucx", "slab", "address", "nvme", "clock"} <= levels(found).keys()

    words = ["doctor", "--set", "host_bytes_max=67108864", "--json"]
    status = cli.main(words)
    told = [Finding(**finding) for finding in json.loads(capsys.readouterr().out)]
    assert status == any(finding.level == ERROR for finding in told)
    assert cli.main(words[:-1]) == status
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith((OK, WARNING, ERROR))]) == len(told)


def test_what_no_node_could_have_is_an_error(capsys: pytest.CaptureFixture) -> None:
    words = [
        "--set",
        "host=192.0.2.77",
        "--set",
        "allow_plaintext_network=true",
        "--set",
        f"host_bytes_max={1 << 60}",
    ]
    assert cli.main(["doctor", *words, "--json"]) == 1
    told = {f["name"]: f["level"] for f in json.loads(capsys.readouterr().out)}
    assert told["address"] == told["slab"] == ERROR
    assert cli.main(["doctor", "--set", "host_bytes=1"]) == 2
    assert "host_bytes_max" in capsys.readouterr().err


@pytest.mark.ucx
@pytest.mark.skipif(bool(ucx_available()), reason="UCX is not installed")
def test_it_shows_the_ucx_that_was_loaded(tmp_path: Path) -> None:
    """A copy of the wheel's libraries stands for the system's: the loader's switch is what is tested."""
    copy = tmp_path / "lib"
    shutil.copytree(
        Path(find_spec("libucx").origin).parent / "lib", copy, ignore=shutil.ignore_patterns("*.a")
    )

    def told(**environ: str) -> dict[str, dict[str, str]]:
        words = [sys.executable, "-m", "p2pcache.cli", "doctor", "--json", "--set", "host_bytes_max=67108864"]
        ran = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **environ}, cwd=ROOT)
        return {finding["name"]: finding for finding in json.loads(ran.stdout)}

    assert str(copy) not in told()["ucx"]["text"]
    switched = told(LD_LIBRARY_PATH=str(copy), RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY="1")
    assert str(copy) in switched["ucx"]["text"] and "ucx loader" not in switched
    assert "tcp/lo" in switched["ucx transports"]["text"]
    in_vain = told(RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY="1")
    if "/libucx/lib/" in in_vain["ucx"]["text"]:  # or this host has a UCX of its own
        assert in_vain["ucx loader"]["level"] == WARNING


def test_a_closed_ucx_transport_says_what_it_is() -> None:
    described = UcxTransport("127.0.0.1").description()
    assert described["available"] == (ucx_available() is None)
