"""The one thread that owns UCX: its worker, its endpoints and every request on them.

What UCX needs and does not say (measured with UCX 1.21):

- Cancelling a request that has met its peer does nothing; it may write later and call that a
  success. A transfer is given up by force-closing its endpoint (a flush comes first otherwise, which
  a frozen peer never lets end) and by then progressing until *every* request on it has completed. So
  one endpoint carries one transfer at a time.
- A receive that has not met its message is the worker's, and no closing ends it. It is cancelled.
- Only endpoints that began at a listener can be given up like that. With one made from a worker's
  address, up to 4 MB came in after its requests had completed: the peer's socket stays open.
- A peer that dies is told by `alive`, a frozen one by nobody.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from p2pcache.io._ucp import HALF_IN_S, Buffer, Endpoint, Listener, Request, Ucp
from p2pcache.types import ConfigError

log = logging.getLogger(__name__)

SWEEP_S = 1.0
DRAIN_POLL_S = 0.005  # not every completion after a forced close is told by an event
DRAIN_S = 10.0  # at close: requests complete within milliseconds of a forced close, or never

SETTINGS: Mapping[str, str] = {
    "TLS": "^shm",  # with error handling UCX would not use it, and across namespaces it gets lost
    "TCP_TX_SEG_SIZE": "256k",
    "TCP_RX_SEG_SIZE": "256k",
    "RNDV_SCHEME": "put_zcopy",
    "RNDV_THRESH": "64k",
    "TCP_CM_REUSEADDR": "y",  # a restarted node gets its port back
}
EXTRA = "pip install 'p2pcache[ucx-cu13]'"


def import_ucx() -> Any:
    """The module `libucxx`. Raises ConfigError that says what to install."""
    # These two belong to no context, so they cannot be passed to one. ucxx sets a variable that a UCX
    # without CUDA warns about; and UCX warns of every reader that gives up, which is ordinary here.
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    os.environ.setdefault("UCX_LOG_FILE", "stderr")  # standard output is the program's own
    try:
        from ucxx._lib import libucxx
    except (ImportError, OSError) as exc:
        raise ConfigError(f"the ucx transport needs ucxx ({exc}): {EXTRA}") from exc
    return libucxx


class Activity(Protocol):
    """Something under way on the engine's thread, stepped whenever UCX has made progress."""

    def step(self, now_s: float) -> bool:
        """Whether it is still under way. Harmless once it is not."""

    def stop(self, error: Exception) -> None:
        """Begin to give up. It is stepped on until its requests have completed."""


class Link:
    """An endpoint, and what is outstanding on it."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.idle_since_s = time.monotonic()
        self._outstanding: list[Request] = []
        self._closed = False

    @property
    def alive(self) -> bool:
        return not self._closed and not self.endpoint.failure

    @property
    def failure(self) -> str:
        return self.endpoint.failure or "closed"

    def hold(self, request: Request) -> Request:
        self._outstanding.append(request)
        return request

    def quiet(self) -> bool:
        """Whether every request has completed: nothing reads or writes their buffers any more."""
        self._outstanding = [request for request in self._outstanding if not request.completed]
        return not self._outstanding

    def force_close(self) -> None:
        """Its requests complete soon, with errors. By `Engine.force_close` only."""
        if not self._closed:
            self._closed = True
            closing = self.endpoint.force_close()
            for request in self._outstanding:
                request.cancel()
            self.hold(closing)


class Engine:
    """Starts its thread at once. `call`, `close`, `error` and `info` are for everyone; the rest is
    that thread's own.

    Commands run once UCX is open, or with `closing` set where it could not be opened, is being
    closed, or met an error of ours; then `error` says why.
    """

    def __init__(self, settings: Mapping[str, str]) -> None:
        self._settings = settings
        self._commands: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()  # guards the commands and the life of the eventfd
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._activities: list[Activity] = []
        self._added: list[Activity] = []
        self._discarded: list[Link] = []  # force-closed, not yet quiet
        self._stirred = self._draining = False
        self._listen_until_s = 0.0  # once closing
        self._drain_until_s = float("inf")
        self.closing = False
        self.error: Exception | None = None
        self.info = ""
        self._worker: Any = None
        self._ucp: Any = None
        self._listener: Listener | None = None
        self.thread = threading.Thread(target=self._run, name="p2pcache-ucx", daemon=True)
        try:
            self.thread.start()
        except RuntimeError:
            os.close(self._wake)
            raise

    def call(self, command: Callable[[], None]) -> bool:
        """Run `command` on the thread, soon. False: the thread has gone, and will not."""
        with self._lock:
            if self._wake < 0:
                return False
            self._commands.append(command)
            os.eventfd_write(self._wake, 1)
            return True

    def close(self) -> None:
        """Stop what is under way, then the thread; it can be joined afterwards."""
        self.call(self._begin_closing)

    # On the engine's thread.

    def add(self, activity: Activity) -> None:
        self._added.append(activity)

    def listen(self, host: str, port: int, on_request: Callable[[int], None]) -> int:
        """Returns the port. `on_request` gets connections for `accept` or `reject`. Raises UcpError."""

        def soon(connection: int) -> None:  # not inside UCX's callback
            self.call(partial(on_request, connection))

        self._listener = Listener(self._ucp, host, port, soon)
        return self._listener.port

    @property
    def listening(self) -> bool:
        return self._listener is not None

    def accept(self, connection: int) -> Link:
        """Raises UcpError."""
        return Link(Endpoint.accepted(self._ucp, connection))

    def reject(self, connection: int) -> None:
        if self._listener is not None:
            self._listener.reject(connection)

    def connect(self, host: str, port: int) -> Link:
        """Raises UcpError."""
        return Link(Endpoint.connected(self._ucp, host, port))

    def force_close(self, link: Link) -> None:
        self._stirred = True
        link.force_close()

    def discard(self, link: Link) -> None:
        """Close a link for good; its last requests are progressed to their end."""
        self.force_close(link)
        self._discarded.append(link)

    def is_quiet(self, link: Link) -> bool:
        """Whether every request on it has completed. If not, the engine sees to it that they do."""
        quiet = link.quiet()
        self._draining = self._draining or not quiet
        return quiet

    def send(self, link: Link, memory: Buffer, tag: int) -> Request:
        return self._posted(link, link.endpoint.send(memory, tag))

    def receive(self, link: Link, memory: Buffer, tag: int) -> Request:
        return self._posted(link, link.endpoint.receive(memory, tag))

    def send_stream(self, link: Link, memory: Buffer) -> Request:
        return self._posted(link, link.endpoint.send_stream(memory))

    def receive_stream(self, link: Link, memory: bytearray) -> Request:
        return self._posted(link, link.endpoint.receive_stream(memory))

    def _posted(self, link: Link, request: Request) -> Request:
        self._stirred = True
        return link.hold(request)

    def _run(self) -> None:
        try:
            self._open()
            self._progress_until_closed()
        except Exception as exc:
            if not isinstance(exc, ConfigError):
                log.exception("the ucx thread stops")
            self.error = exc
            try:
                self._begin_closing()
                if self._worker is not None:
                    self._progress_until_closed()
            except Exception:  # what has not settled stays quarantined: bytes may still be moving
                log.exception("the ucx thread could not stop cleanly")
        finally:
            with self._lock:
                os.close(self._wake)
                self._wake = -1
            for command in self._commands:  # they see `closing`
                command()
            self._commands.clear()
            self._activities.clear()
            self._discarded.clear()
            self._stop_listening()
            self._ucp = self._worker = None

    def _stop_listening(self) -> None:
        """Once deaf for a while. Readers who are neither accepted nor rejected would never be told."""
        if self._listener is not None:
            self._worker.progress()
            self._run_commands()
            self._listener.close()
            self._listener = None
            self._stirred = True

    def _open(self) -> None:
        ucx = import_ucx()
        if (version := ucx.get_ucx_version())[0] != 1:  # `_ucp` knows the structures of 1.x
            raise ConfigError(f"the ucx transport needs UCX 1, not {'.'.join(map(str, version))}")
        features = ucx.Feature
        try:
            context = ucx.UCXContext(
                dict(self._settings), feature_flags=(features.TAG, features.STREAM, features.WAKEUP)
            )
            worker = ucx.UCXWorker(context, enable_delayed_submission=False, enable_python_future=False)
            worker.init_blocking_progress_mode()
            self._ucp = Ucp(worker.handle)
        except (ucx.UCXError, OSError, AttributeError) as exc:
            raise ConfigError(f"UCX does not start with {dict(self._settings)}: {exc}") from exc
        self.info = context.info
        self._worker = worker

    def _progress_until_closed(self) -> None:
        with select.epoll() as events:
            events.register(self._wake, select.EPOLLIN)
            events.register(self._worker.epoll_file_descriptor, select.EPOLLIN)
            while True:
                self._stirred = self._draining = False
                self._run_commands()
                self._worker.progress()
                self._step()
                if self.closing and self.listening and time.monotonic() > self._listen_until_s:
                    self._stop_listening()
                if self.closing and not (
                    self.listening or self._activities or self._added or self._discarded
                ):
                    return
                if time.monotonic() > self._drain_until_s:
                    log.error("ucx requests did not complete in %.0f s; they stay quarantined", DRAIN_S)
                    return
                # A request may complete as it is posted, without an event: look again before sleep.
                # Arming fails while there is something to progress, so no event is slept through.
                if not (self._stirred or self._added) and self._worker.arm():
                    events.poll(DRAIN_POLL_S if self._draining or self.closing else SWEEP_S)

    def _run_commands(self) -> None:
        while self._commands:
            with self._lock:
                commands = list(self._commands)
                self._commands.clear()
                os.eventfd_read(self._wake)
            for command in commands:
                command()

    def _step(self) -> None:
        now_s = time.monotonic()
        self._activities += self._added
        self._added = []
        self._activities = [activity for activity in self._activities if self._steps(activity, now_s)]
        if self._discarded:
            self._discarded = [link for link in self._discarded if not self.is_quiet(link)]

    def _steps(self, activity: Activity, now_s: float) -> bool:
        try:
            return activity.step(now_s)
        except Exception:
            if self.error is None:
                raise  # the first stops the engine, whose other activities are then wound up
            log.exception("an activity could not be wound up; what it has not settled never settles")
            return False

    def _begin_closing(self) -> None:
        if self.closing:
            return
        self.closing = True
        if self._listener is not None:
            self._listener.deafen()
            self._listen_until_s = time.monotonic() + HALF_IN_S
        self._drain_until_s = time.monotonic() + DRAIN_S
        for activity in [*self._activities, *self._added]:
            activity.stop(self.error or ConnectionAbortedError("the transport is closed"))
