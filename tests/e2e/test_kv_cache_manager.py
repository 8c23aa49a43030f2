"""`KVCacheManager`: a cache of named values for a plain inference loop."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import tempfile
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from p2pcache import KVCacheManager
from p2pcache.types import ConfigError, LayoutError, NodeDown, TierFull
from tests.fault.node_process import at_rest, state, until

GIB = 1 << 30
MIB = 1 << 20
SMALL = {"cpu_memory_gb": 1 / 1024}  # a MiB


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose contents are ours alone; short, for the path of a unix socket."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("t")))


@pytest.fixture
def manager() -> Iterator[Callable[..., KVCacheManager]]:
    """Makes managers; at the end of every test each has no lease left and its bytes add up."""
    with contextlib.ExitStack() as stack:

        def start(**how: Any) -> KVCacheManager:
            made = KVCacheManager(**({"cpu_memory_gb": 16 / 1024} | how))
            stack.callback(check, made)
            return made

        yield start


def check(made: KVCacheManager) -> None:
    try:
        with contextlib.suppress(NodeDown):  # closed by the test
            until(lambda: at_rest(state(made.runtime)), f"at rest: {state(made.runtime)}")
    finally:
        made.close()


def private(folder: Path) -> str:
    folder.mkdir(mode=0o700)
    return str(folder)


def same(a: Any, b: Any) -> bool:
    """Equal nesting, dtypes, shapes and bits."""
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor)
            and (a.dtype, a.shape) == (b.dtype, b.shape)
            and bits(a).tolist() == bits(b).tolist()
        )
    return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


# -- keys and values -------------------------------------------------------------------------------


def test_keys_are_ints_and_strings_and_never_meet(manager: Callable) -> None:
    m = manager()
    keys = [0, 1, -1, 10**30, "", "1", "0", "i1", "s1", "-1", "a" * 10_000, "ключ", "\0"]
    for i, key in enumerate(keys):
        m.put(key, torch.tensor([i]))
    assert [m.get(key).item() for key in keys] == list(range(len(keys)))
    assert m.get(2) is m.get("2") is m.get("absent") is None


@pytest.mark.parametrize("key", [True, False, 1.0, None, (1,), b"1", torch.tensor(1)])
def test_any_other_key_is_refused_and_touches_no_value(manager: Callable, key: Any) -> None:
    m = manager()
    m.put(1, torch.tensor([1]))
    m.put(0, torch.tensor([0]))
    for call in (lambda: m.put(key, torch.tensor([2])), lambda: m.get(key), lambda: m.forget(key)):
        with pytest.raises(ConfigError, match="int or a str"):
            call()
    assert m.get(1).item() == 1 and m.get(0).item() == 0


VALUES = {
    "bfloat16": torch.randn(3, 4).to(torch.bfloat16),
    "float16": torch.randn(3, 4).half(),
    "float64": torch.randn(3, 4).double(),
    "fp8": torch.randint(0, 256, (16,), dtype=torch.uint8).view(torch.float8_e4m3fn),
    "int64": torch.tensor([2**63 - 1, -(2**63)]),
    "bool": torch.tensor([True, False]),
    "complex": torch.randn(3, dtype=torch.complex64),
    "a conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    "negative by a flag": torch.randn(3, dtype=torch.complex64).conj().imag,
    "nan and minus zero": torch.tensor([float("nan"), -0.0, float("inf")]),
    "0-d": torch.tensor(3.5),
    "empty": torch.zeros(0, 5),
    "empty, of two tensors": [torch.zeros(0), torch.zeros(2, 0)],
    "transposed": torch.arange(12).view(3, 4).t(),
    "strided": torch.arange(24)[::3],
    "expanded": torch.arange(3).expand(4, 3),
    "of another's storage": torch.arange(100)[7:9],
    "with a gradient": torch.randn(3, requires_grad=True),
    "a parameter": torch.nn.Parameter(torch.randn(3)),
    "one pair": (torch.arange(3), torch.arange(4.0)),
    "no tensor at all": [],
    "nested": ((torch.arange(3), [torch.tensor(1), (torch.zeros(0),)]), [], ()),
    "odd sizes": [torch.zeros(n, dtype=torch.uint8) + n for n in (1, 3, 5)] + [torch.tensor([1.0])],
    "as past_key_values": tuple((torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)) for _ in range(6)),
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
@pytest.mark.parametrize("tiers", ["host", "device"])
def test_a_value_comes_back_as_it_was_and_is_the_callers_own(
    manager: Callable, value: Any, tiers: str
) -> None:
    m = manager(gpu_memory_gb=1 / 1024, device="cpu") if tiers == "device" else manager()
    m.put("k", value)
    first, second = m.get("k"), m.get("k")
    assert same(first, value) and same(second, value)
    for leaf in tensors(first):
        assert not leaf.requires_grad
        leaf.zero_()
    assert same(second, value) and same(m.get("k"), value)


def tensors(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else [t for part in value for t in tensors(part)]


@pytest.mark.parametrize("tiers", ["host", "device"])
def test_a_value_is_a_copy_and_what_happens_to_the_original_does_not_reach_it(
    manager: Callable, tiers: str
) -> None:
    m = manager(gpu_memory_gb=1 / 1024, device="cpu") if tiers == "device" else manager()
    mine = torch.arange(4)
    m.put("k", [mine])
    mine.zero_()
    assert m.get("k")[0].tolist() == [0, 1, 2, 3]


def test_a_named_tuple_comes_back_as_a_tuple(manager: Callable) -> None:
    pair = namedtuple("pair", "k v")(torch.arange(2), torch.arange(3))
    for m in (manager(), manager(gpu_memory_gb=1 / 1024, device="cpu")):
        m.put(1, pair)
        for _ in range(2):
            assert same(m.get(1), tuple(pair))


@pytest.mark.parametrize(
    "value",
    [
        None,
        1,
        "text",
        {"k": torch.zeros(1)},
        [torch.zeros(1), None],
        torch.zeros(1, device="meta"),
        torch.zeros(4, 4).to_sparse(),
        [torch.zeros(1)] * 5000,
    ],
)
def test_what_is_no_tensors_is_refused_in_words_and_leaves_the_old_value(
    manager: Callable, value: Any
) -> None:
    m = manager()
    m.put("k", torch.tensor([1]))
    with pytest.raises(LayoutError, match="tensor"):
        m.put("k", value)
    assert m.get("k").item() == 1


def test_put_again_replaces_and_forget_drops(manager: Callable) -> None:
    m = manager()
    for i in range(100):
        m.put("k", torch.tensor([i]))
        assert m.get("k").item() == i
    until(lambda: m.status()["host"]["bodies"] == 1, "the old ones are gone")
    m.forget("k")
    m.forget("k")
    assert m.get("k") is None
    until(lambda: m.status()["host"]["bodies"] == 0, "forgotten")


def test_two_managers_do_not_see_each_others_values(manager: Callable) -> None:
    a, b = manager(), manager()
    a.put(1, torch.tensor([1]))
    b.put(1, torch.tensor([2]))
    assert (a.get(1).item(), b.get(1).item()) == (1, 2)


# -- tiers -----------------------------------------------------------------------------------------


def test_the_least_recently_used_go_first_and_get_says_none(manager: Callable) -> None:
    m = manager(**SMALL)
    for i in range(16):
        m.put(i, torch.full((64 << 10,), i, dtype=torch.uint8))
    assert all(m.get(i) is not None for i in range(4))
    m.put("more", torch.zeros(256 << 10, dtype=torch.uint8))
    assert [i for i in range(16) if m.get(i) is None] == [4, 5, 6, 7]
    assert m.status()["host"]["bytes"] <= MIB


@pytest.mark.parametrize("nvme", [False, True])
def test_a_value_larger_than_the_host_tier_is_refused_and_the_rest_stays(
    manager: Callable, tmp_path: Path, nvme: bool
) -> None:
    more = {"nvme_path": private(tmp_path / "nvme"), "nvme_gb": 8 / 1024, "nvme_segment_bytes": 2 * MIB}
    m = manager(**SMALL, **(more if nvme else {}))
    m.put("small", torch.tensor([1]))
    with pytest.raises(TierFull, match="1,048,577"):
        m.put("large", torch.zeros(MIB + 1, dtype=torch.uint8))
    assert m.get("large") is None and m.get("small").item() == 1
    m.put("whole", torch.ones(MIB, dtype=torch.uint8))
    assert m.get("whole").sum() == MIB


def test_what_went_to_nvme_comes_back_and_an_overwritten_value_never_does(
    manager: Callable, tmp_path: Path
) -> None:
    m = manager(
        **SMALL,
        nvme_path=private(tmp_path / "nvme"),
        nvme_gb=16 / 1024,
        nvme_segment_bytes=2 * MIB,
        demote_above=0.0,
    )
    for version in range(2):
        for i in range(32):
            m.put(i, torch.full((64 << 10,), 100 * version + i, dtype=torch.uint8))
    assert m.status()["nvme"]["records"] > 16
    for i in range(32):
        value = m.get(i)
        assert value is not None and set(value.tolist()) == {100 + i}
    assert m.status()["counters"]["served_nvme"] >= 16


def test_the_device_tier_keeps_within_its_cap_and_falls_back_to_the_host(manager: Callable) -> None:
    m = manager(gpu_memory_gb=256 / MIB, device="cpu")  # 256 KiB
    values = {i: torch.full((64 << 10,), i, dtype=torch.uint8) for i in range(8)}
    for i, value in values.items():
        m.put(i, value)
        assert m.status()["device"]["bytes"] <= 256 << 10
    status = m.status()["device"]
    assert status == {"device": "cpu", "bytes": 256 << 10, "bytes_max": 256 << 10, "values": 4}
    served = m.status()["counters"]["served_local"]
    assert all(torch.equal(m.get(i), values[i]) for i in range(4, 8))
    assert m.status()["counters"]["served_local"] == served, "the device tier had them"
    assert all(torch.equal(m.get(i), values[i]) for i in range(4))
    assert m.status()["device"]["values"] == 4
    m.put(9, torch.zeros(512 << 10, dtype=torch.uint8))
    assert m.get(9).numel() == 512 << 10, "too large for the device tier, not for the host's"
    m.put(0, torch.tensor([7]))
    assert m.get(0).item() == 7
    m.forget(0)
    assert m.get(0) is None


def test_a_device_tier_without_a_device_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="gpu_memory_gb.*no CUDA device"):
        KVCacheManager(gpu_memory_gb=1)


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how, words",
    [
        ({"nvme_segment_byte": 1}, "nvme_segment_bytes"),
        ({"demote_abov": 0.5}, "demote_above"),
        ({"demote_above": 2.0}, "demote_above"),
        ({"cpu_memory_gb": -1}, "cpu_memory_gb"),
        ({"cpu_memory_gb": 1 << 20}, "host_bytes_max"),
        ({"cpu_memory_gb": float("nan")}, "cpu_memory_gb"),
        ({"cpu_memory_gb": float("inf")}, "cpu_memory_gb"),
        ({"cpu_memory_gb": "1"}, "cpu_memory_gb"),
        ({"gpu_memory_gb": -1, "device": "cpu"}, "gpu_memory_gb"),
        ({"nvme_path": "x", "nvme_gb": float("nan")}, "nvme_gb"),
        ({"device": "no such device", "gpu_memory_gb": 1}, "device"),
    ],
)
def test_a_setting_that_cannot_hold_is_a_config_error_that_names_it(
    how: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = traces()
    with pytest.raises(ConfigError, match=words):
        KVCacheManager(**(SMALL | how))
    assert traces() == before


def test_an_nvme_path_that_cannot_be_used_is_a_config_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "open").chmod(0o755)
    before = traces()
    for path in (tmp_path / "file", tmp_path / "open", Path("/proc/nvme")):
        with pytest.raises(ConfigError, match=str(path)):
            KVCacheManager(**SMALL, nvme_path=str(path), nvme_gb=1)
    space = private(tmp_path / "too large")
    wanted_gb = shutil.disk_usage(space).free / GIB + 100
    with pytest.raises(ConfigError, match="too large"):
        KVCacheManager(**SMALL, nvme_path=space, nvme_gb=wanted_gb, nvme_segment_bytes=GIB)
    assert traces() == before and not any(name.endswith(".seg") for name in os.listdir(space))


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only to root")
def test_a_read_only_nvme_path_is_a_config_error(tmp_path: Path) -> None:
    folder = private(tmp_path / "read only")
    os.chmod(folder, 0o500)
    with pytest.raises(ConfigError, match="read only"):
        KVCacheManager(**SMALL, nvme_path=folder, nvme_gb=1)


def test_an_nvme_path_in_use_by_another_manager_is_a_config_error(manager: Callable, tmp_path: Path) -> None:
    more = {"nvme_path": private(tmp_path / "nvme"), "nvme_gb": 8 / 1024, "nvme_segment_bytes": 2 * MIB}
    manager(**SMALL, **more)
    with pytest.raises(ConfigError, match="nvme"):
        KVCacheManager(**SMALL, **more)


# -- closing ---------------------------------------------------------------------------------------


def traces() -> tuple[list[str], list[str], list[str]]:
    """What this process has: descriptors, threads and temporary folders of ours."""
    gc.collect()
    descriptors = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            descriptors.append(os.readlink(f"/proc/self/fd/{fd}"))
    threads = sorted(t.name for t in threading.enumerate())
    folders = sorted(p.name for p in Path(tempfile.gettempdir()).glob("p2pcache-*"))
    return (
        sorted(d for d in descriptors if "anon_inode" in d or "socket" in d or "memfd" in d or "/" in d),
        threads,
        folders,
    )


def test_closing_is_idempotent_and_leaves_no_thread_descriptor_or_file(tmp_path: Path) -> None:
    with KVCacheManager(**SMALL) as first:  # what is made once a process
        first.put(1, torch.zeros(1))
    del first
    before = traces()
    nvme = private(tmp_path / "nvme")
    m = KVCacheManager(
        **SMALL, nvme_path=nvme, nvme_gb=8 / 1024, nvme_segment_bytes=2 * MIB, demote_above=0.0
    )
    for i in range(32):
        m.put(i, torch.zeros(64 << 10, dtype=torch.uint8))
        m.get(i // 2)
    m.close()
    m.close()
    assert traces() == before
    assert m.get(1) is None
    with pytest.raises(NodeDown):
        m.put(1, torch.zeros(1))
    m.close()


def test_a_manager_in_a_folder_of_the_callers_leaves_it_empty(tmp_path: Path) -> None:
    folder = private(tmp_path / "run")
    with KVCacheManager(**SMALL, runtime_dir=folder) as m:
        m.put(1, torch.zeros(1))
        assert len(os.listdir(folder)) == 1
    assert os.listdir(folder) == []


def test_a_manager_that_does_not_start_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from p2pcache.io.engine_socket import EngineSocket

    before = traces()

    async def refuse(*_: object) -> None:
        raise ConfigError("as the test wants")

    monkeypatch.setattr(EngineSocket, "start", refuse)
    with pytest.raises(ConfigError, match="as the test wants"):
        KVCacheManager(**SMALL)
    assert traces() == before


# -- any sequence of calls -------------------------------------------------------------------------

KEYS = st.one_of(st.integers(0, 4), st.sampled_from(["0", "1", "2"]))
SIZES = st.sampled_from([0, 1, 4096, 100_000, 300_000, MIB])


class Sequences(RuleBasedStateMachine):
    """Against a dict: `get` returns the last value put, or None; never another."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.manager = KVCacheManager(
            **SMALL,
            gpu_memory_gb=256 / MIB,
            device="cpu",
            nvme_path=private(Path(self.folder.name) / "nvme"),
            nvme_gb=2 / 1024,
            nvme_segment_bytes=MIB // 2,
            demote_above=0.3,
        )
        self.model: dict[int | str, tuple[int, int]] = {}
        self.puts = 0

    @rule(key=KEYS, size=SIZES)
    def put(self, key: int | str, size: int) -> None:
        self.puts += 1
        self.manager.put(key, self.value(self.puts, size))
        self.model[key] = (self.puts, size)
        assert same(self.manager.get(key), self.value(self.puts, size)), "what was just put is there"

    @rule(key=KEYS)
    def put_too_large(self, key: int | str) -> None:
        with pytest.raises(TierFull):
            self.manager.put(key, torch.zeros(MIB + 1, dtype=torch.uint8))
        self.model.pop(key, None)

    @rule(key=KEYS)
    def get(self, key: int | str) -> None:
        value = self.manager.get(key)
        if value is None:
            self.model.pop(key, None)  # and it never comes back
        else:
            assert key in self.model and same(value, self.value(*self.model[key]))

    @rule(key=KEYS)
    def forget(self, key: int | str) -> None:
        self.manager.forget(key)
        self.model.pop(key, None)
        assert self.manager.get(key) is None

    @invariant()
    def within_its_caps(self) -> None:
        status = state(self.manager.runtime)  # validates the tier
        assert status["host"]["bytes"] <= MIB
        assert self.manager.status()["device"]["bytes"] <= 256 << 10
        assert status["nvme"]["used_bytes"] <= 2 * MIB

    @staticmethod
    def value(number: int, size: int) -> torch.Tensor:
        return torch.full((size,), number % 251, dtype=torch.uint8)

    def teardown(self) -> None:
        try:
            until(lambda: at_rest(state(self.manager.runtime)), "no lease is left")
        finally:
            self.manager.close()
            self.folder.cleanup()


TestSequences = Sequences.TestCase
TestSequences.settings = settings(
    max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_close_gives_the_nvme_space_back_and_spares_what_was_there(tmp_path: Path):
    nvme = private(tmp_path / "nvme")
    more = {"nvme_path": nvme, "nvme_gb": 8 / 1024, "nvme_segment_bytes": 2 * MIB}
    with KVCacheManager(**SMALL, **more) as manager:
        manager.put(1, torch.zeros(4))
        assert list(Path(nvme).glob("*.seg"))
    assert not list(Path(nvme).iterdir())
    with KVCacheManager(**SMALL, **more) as first:
        first._segments = None  # as if a node had made them
    with KVCacheManager(**SMALL, **more):
        pass
    assert len(list(Path(nvme).glob("*.seg"))) == 4
