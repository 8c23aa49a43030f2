"""Streams: order, events and errors, on the CPU twin and on CUDA."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from p2pcache.io.streams import CpuStream, CudaStream, Stream, default_stream
from p2pcache.types import ConfigError

PATIENCE_S = 20.0


def _cuda() -> Stream:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device is here")
    return CudaStream()


@pytest.fixture(params=[CpuStream, pytest.param(_cuda, marks=pytest.mark.gpu)], ids=["cpu", "cuda"])
def stream(request: pytest.FixtureRequest) -> Iterator[Stream]:
    made = request.param()
    yield made
    made.close()


def test_work_runs_in_the_order_it_was_submitted_beside_the_caller(stream: Stream) -> None:
    gate, done = threading.Event(), []
    first = stream.submit(lambda: done.append(gate.wait(PATIENCE_S)))
    events = [stream.submit(lambda i=i: done.append(i)) for i in range(100)]
    assert done == [] and not first.ready() and not events[-1].ready()
    gate.set()
    events[-1].wait(PATIENCE_S)
    assert done == [True, *range(100)]
    assert all(event.ready() for event in events)


def test_an_event_comes_after_its_own_work_and_not_after_later_work(stream: Stream) -> None:
    gate, ran = threading.Event(), []
    first = stream.submit(lambda: ran.append(1))
    later = stream.submit(lambda: gate.wait(PATIENCE_S))
    first.wait(PATIENCE_S)
    assert ran == [1] and not later.ready()
    gate.set()
    later.wait(PATIENCE_S)


def test_waiting_for_an_event_has_a_limit(stream: Stream) -> None:
    gate = threading.Event()
    event = stream.submit(lambda: gate.wait(PATIENCE_S))
    with pytest.raises(TimeoutError):
        event.wait(0.01)
    gate.set()
    event.wait(PATIENCE_S)


def test_an_error_comes_out_at_its_own_event_each_time_and_the_stream_goes_on(stream: Stream) -> None:
    def fail() -> None:
        raise ValueError("in the work")

    failed, after = stream.submit(fail), stream.submit(lambda: None)
    for _ in range(2):
        with pytest.raises(ValueError, match="in the work"):
            failed.wait(PATIENCE_S)
    after.wait(PATIENCE_S)


def test_an_event_may_be_waited_for_by_many_threads(stream: Stream) -> None:
    gate, woke = threading.Event(), []
    event = stream.submit(lambda: gate.wait(PATIENCE_S))

    def wait() -> None:
        event.wait(PATIENCE_S)
        woke.append(1)

    threads = [threading.Thread(target=wait) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert woke == []
    gate.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(woke) == 8


def test_closing_finishes_what_was_submitted_and_leaves_no_thread() -> None:
    before, stream, done = set(threading.enumerate()), CpuStream(), []
    gate = threading.Event()
    stream.submit(lambda: gate.wait(PATIENCE_S))
    stream.submit(lambda: done.append(1))
    gate.set()
    stream.close()
    assert done == [1]
    assert set(threading.enumerate()) == before
    with pytest.raises(RuntimeError):
        stream.submit(lambda: None)


def test_the_default_stream_of_a_device_is_one_for_all_threads() -> None:
    found: list[Stream] = []
    start = threading.Barrier(8)

    def ask() -> None:
        start.wait(PATIENCE_S)
        found.append(default_stream())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(found) == 8 and len(set(map(id, found))) == 1
    assert found[0].device == torch.device("cpu") and default_stream("cpu") is found[0]


def test_a_cuda_stream_where_there_is_no_cuda_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA device"):
        CudaStream()


@pytest.mark.gpu
def test_a_cuda_event_orders_the_current_stream_without_blocking_the_host() -> None:
    stream = _cuda()
    source = torch.arange(1 << 24, dtype=torch.float32).pin_memory()
    dest = torch.zeros(1 << 24, device=stream.device)

    def upload() -> None:
        torch.cuda._sleep(200_000_000)
        dest.copy_(source, non_blocking=True)

    event = stream.submit(upload)
    event.wait(PATIENCE_S)
    total = dest.double().sum()  # on the current stream, behind the event
    assert total.item() == source.double().sum().item()
    assert event.ready()
    stream.close()
