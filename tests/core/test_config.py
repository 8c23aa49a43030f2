"""Settings: every one checked, a misspelt one named, every one explained where it stands."""

from __future__ import annotations

import dataclasses
import inspect
import re

import pytest

from p2pcache.config import NodeConfig
from p2pcache.types import ConfigError


def of(environ: dict[str, str] | None = None, **settings) -> NodeConfig:
    return NodeConfig.of(settings, environ or {})


def test_the_defaults_are_a_working_node():
    assert of() == NodeConfig()
    assert NodeConfig.of(NodeConfig().to_dict(), {}) == NodeConfig()


def test_an_unknown_setting_names_the_nearest():
    with pytest.raises(ConfigError, match="'host_byte_max'.*did you mean 'host_bytes_max'"):
        of(host_byte_max=1)
    with pytest.raises(ConfigError, match="did you mean"):
        NodeConfig.of({7: 1}, {})


def test_an_unknown_eviction_names_the_nearest():
    assert of().eviction == "s3-fifo" and of(eviction="lru").eviction == "lru"
    with pytest.raises(ConfigError, match="'s3fifo'.*did you mean 's3-fifo'"):
        of(eviction="s3fifo")


def test_an_unknown_variable_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'republish_s'"):
        of({"P2PCACHE_REPUBLISHS": "1"})


def test_the_environment_overrides_defaults_and_the_user_overrides_it():
    environ = {"P2PCACHE_HOST_BYTES_MAX": "4096", "P2PCACHE_TRANSPORTS": "tcp,shm", "HOME": "/"}
    assert of(environ).host_bytes_max == 4096
    assert of(environ).transports == ("tcp", "shm")
    assert of(environ, host_bytes_max=8192).host_bytes_max == 8192


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("NAME", "node-7", "node-7"),
        ("CONTROL_PORT", "7000", 7000),
        ("RPC_TIMEOUT_S", "2.5", 2.5),
        ("ALLOW_PLAINTEXT_NETWORK", "TRUE", True),
        ("ALLOW_PLAINTEXT_NETWORK", "0", False),
    ],
)
def test_variables_are_read_as_their_setting_s_type(variable: str, text: str, value):
    read = getattr(of({f"P2PCACHE_{variable}": text}), variable.lower())
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("CONTROL_PORT", "seven"),
        ("CONTROL_PORT", "7.5"),
        ("RPC_TIMEOUT_S", ""),
        ("RPC_TIMEOUT_S", "nan"),
        ("ALLOW_PLAINTEXT_NETWORK", "maybe"),
        ("TRANSPORTS_BY_PEER", "a=tcp"),
    ],
)
def test_a_variable_of_the_wrong_type_is_named(variable: str, text: str):
    with pytest.raises(ConfigError, match=variable.lower()):
        of({f"P2PCACHE_{variable}": text})


def test_the_engines_socket_variable_is_no_setting():
    assert of({"P2PCACHE_SOCKET": "/run/x.sock"}) == NodeConfig()


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("host_bytes_max", "1GiB"),
        ("host_bytes_max", 1.5),
        ("host_bytes_max", True),
        ("host_bytes_max", -1),
        ("rpc_timeout_s", None),
        ("rpc_timeout_s", "fast"),
        ("rpc_timeout_s", float("inf")),
        ("rpc_timeout_s", float("nan")),
        ("name", 7),
        ("nvme_path", None),
        ("allow_plaintext_network", "false"),
        ("allow_plaintext_network", 1),
        ("control_port", 65_536),
        ("demote_above", 1.1),
        ("nvme_io", "mmap"),
        ("nvme_admit", "some"),
        ("nvme_depth", 0),
        ("nvme_depth", 65),
        ("transports", None),
        ("transports", 7),
        ("transports", ["tcp", 7]),
        ("transports_by_peer", ["tcp"]),
        ("transports_by_peer", None),
        ("transports_by_peer", {"node-1": 7}),
    ],
)
def test_a_value_of_the_wrong_type_or_range_is_named(setting: str, value):
    with pytest.raises(ConfigError, match=setting.removesuffix("_by_peer")):
        of(**{setting: value})


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_wildcard_is_no_address_to_advertise(host: str):
    with pytest.raises(ConfigError, match="wildcard"):
        of(host=host, allow_plaintext_network=True)


def test_an_address_outside_loopback_must_be_allowed():
    with pytest.raises(ConfigError, match="not encrypted"):
        of(host="10.0.0.1")
    assert of(host="10.0.0.1", allow_plaintext_network=True).host == "10.0.0.1"
    assert of(host="::1").host == "::1"
    assert of(host="127.8.8.8").host == "127.8.8.8"


@pytest.mark.parametrize("host", ["", "localhost", "127.0.0.1:80"])
def test_a_host_is_an_ip_address(host: str):
    with pytest.raises(ConfigError, match="IP address"):
        of(host=host)


def test_a_directory_entry_outlives_one_lost_message():
    with pytest.raises(ConfigError, match="twice republish_s"):
        of(directory_ttl_s=79.9, republish_s=40)
    assert of(directory_ttl_s=80, republish_s=40).directory_ttl_s == 80


def test_the_disk_holds_at_least_two_segments():
    with pytest.raises(ConfigError, match="two segments"):
        of(nvme_path="/data", nvme_bytes_max=100, nvme_segment_bytes=51)
    assert of(nvme_bytes_max=100, nvme_segment_bytes=51).nvme_path == "", "no disk, no rule"


def test_a_misspelt_transport_names_the_nearest():
    with pytest.raises(ConfigError, match="'tpc'; did you mean 'tcp'"):
        of(transports=["tpc"])
    with pytest.raises(ConfigError, match="'ucxx'; did you mean 'ucx'"):
        of(transports_by_peer={"node-1": "shm,ucxx"})


def test_transports_may_be_a_list_or_a_text():
    assert of(transports=["tcp", "shm"]).transports == of(transports="tcp,shm").transports == ("tcp", "shm")
    assert of(transports_by_peer={"a": "tcp"}).transports_by_peer == {"a": ("tcp",)}


def test_a_changed_config_is_checked_again():
    with pytest.raises(ConfigError):
        NodeConfig().replace(control_port=-1)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(NodeConfig)])
def test_every_setting_is_explained_beside_it(field: str):
    line = re.search(rf"^    {field}: .*$", inspect.getsource(NodeConfig), re.MULTILINE).group()
    assert re.search(r"# \S.{4,}$", line), f"{field} has no comment"


def test_a_segment_size_is_chosen_for_every_size_of_the_nvme_tier():
    from p2pcache.config import NVME_SEGMENTS_MAX
    from p2pcache.core.nvmeindex import SEGMENTS_MAX, LogIndex

    assert NVME_SEGMENTS_MAX == SEGMENTS_MAX
    for nbytes in (1 << 20, 100 << 20, 4 << 30, 33 << 30, 4 << 40):
        config = NodeConfig(nvme_path="/x", nvme_bytes_max=nbytes)
        LogIndex(nbytes, config.segment_bytes)
    with pytest.raises(ConfigError, match="nvme_segment_bytes"):
        NodeConfig(nvme_path="/x", nvme_bytes_max=1 << 40, nvme_segment_bytes=64 << 20)


@pytest.mark.parametrize("name", ["pulls_in_flight_max", "client_leases_max"])
def test_a_limit_of_nothing_is_refused(name):
    with pytest.raises(ConfigError, match=name):
        NodeConfig(**{name: 0})
