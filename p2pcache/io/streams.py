"""Where copies to the engine's device run: a CUDA side stream, or a worker thread that looks alike.

Work submitted to a stream runs in order, beside the caller. An event marks a point of that order; a
consumer waits for the event of the layer it is about to use and for nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from p2pcache.types import ConfigError


class Event(Protocol):
    """A point in a stream's order."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Make what follows see what came before the event. Raises the work's own error, or TimeoutError."""

    def ready(self) -> bool:
        """Whether `wait` would return at once."""


class Stream(Protocol):
    """Runs copies beside the caller, in order."""

    device: torch.device

    def submit(self, work: Callable[[], None]) -> Event:
        """Run `work` after all that was submitted before it; the event comes after it."""

    def close(self) -> None:
        """Finish what was submitted, then stop."""


class CpuStream:
    """The twin for engines on the CPU: one worker thread."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="p2pcache-stream")

    def submit(self, work: Callable[[], None]) -> Event:
        return _CpuEvent(self._worker.submit(work))

    def close(self) -> None:
        self._worker.shutdown(wait=True)


class _CpuEvent:
    def __init__(self, future: Future[None]):
        self._future = future

    def wait(self, timeout_s: float | None = None) -> None:
        self._future.result(timeout_s)

    def ready(self) -> bool:
        return self._future.done()


class CudaStream:
    """A side stream. Work is issued by a worker thread, so that waiting for bytes blocks no engine.

    `wait` first waits until the work has been issued (the bytes are there), then makes the current
    stream wait for its event; the host does not wait for the device.
    """

    def __init__(self, device: torch.device | str = "cuda"):
        """Raises ConfigError where there is no CUDA device."""
        if not torch.cuda.is_available():
            raise ConfigError("a CUDA stream was asked for, and no CUDA device is here")
        self.device = torch.device(device)
        self._stream = torch.cuda.Stream(self.device)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="p2pcache-stream")

    def submit(self, work: Callable[[], None]) -> Event:
        event = torch.cuda.Event()

        def issue() -> None:
            with torch.cuda.stream(self._stream):
                work()
                event.record()

        return _CudaEvent(self._worker.submit(issue), event)

    def close(self) -> None:
        self._worker.shutdown(wait=True)
        self._stream.synchronize()


class _CudaEvent:
    def __init__(self, issued: Future[None], event: torch.cuda.Event):
        self._issued = issued
        self._event = event

    def wait(self, timeout_s: float | None = None) -> None:
        self._issued.result(timeout_s)
        torch.cuda.current_stream().wait_event(self._event)

    def ready(self) -> bool:
        return self._issued.done() and self._event.query()


_default: dict[torch.device, Stream] = {}
_default_lock = threading.Lock()


def default_stream(device: torch.device | str = "cpu") -> Stream:
    """This process's stream for a device, made when first asked for."""
    device = torch.device(device)
    with _default_lock:
        if device not in _default:
            _default[device] = CpuStream() if device.type == "cpu" else CudaStream(device)
        return _default[device]
