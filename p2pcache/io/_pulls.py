"""What the transports share: a pull's futures, the threads that pulls run on, and addresses."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import queue
import threading
from collections.abc import Callable
from functools import lru_cache

from p2pcache.core.checksum import CorruptBody, LayerCheck
from p2pcache.io.ports import Ticket, TicketGone, TransportError
from p2pcache.types import ConfigError, InvariantError, RemoteError

log = logging.getLogger(__name__)

Address = tuple[str, int]
PeerKey = tuple[str, int, Address]  # name, incarnation, address: what an idle connection is kept under


class LoopPull:
    """See `ports.Pull`. Futures and `progress` belong to the loop that made it; others post to it.

    `done` ends once, and `progress` is never called after it. `dest` is let go of, and None, once
    the pull has settled: the slab is its owner's again.
    """

    def __init__(self, peer: str, ticket: Ticket, dest: memoryview, progress: Callable[[int], None]) -> None:
        """Raises InvariantError for a destination that does not fit."""
        if dest.readonly or dest.ndim != 1 or dest.itemsize != 1 or dest.nbytes != ticket.nbytes:
            raise InvariantError(f"a destination must be {ticket.nbytes:,} writable bytes")
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self._loop.create_future()
        self.settled: asyncio.Future[None] = self._loop.create_future()
        self.done.add_done_callback(lambda f: f.cancelled() or f.exception())  # not always awaited
        self.peer = peer
        self.ticket = ticket
        self.dest: memoryview | None = dest
        self._progress = progress
        self._told_bytes = 0

    def abandon(self) -> None:
        if not self.settled.done():
            self._end(TransportError("abandoned"))
            self._stop()

    def _stop(self) -> None:
        """Have whoever moves the bytes give up, and `finish` then. On the loop."""
        raise NotImplementedError

    # From any thread.

    def landed(self, nbytes: int) -> None:
        """The first `nbytes` are whole and right."""
        self._post(self._report, nbytes)

    def fail(self, error: Exception) -> None:
        """`done`, while something may still write to the destination."""
        self._post(self._end, error)

    def finish(self, error: Exception | None) -> None:
        """`done` and `settled`. None, where `done` has not ended yet: all bytes are whole."""
        self._post(self._finish, error)

    def _post(self, call: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has gone, and with it who would listen
            self._loop.call_soon_threadsafe(call, *args)

    # On the loop.

    def _report(self, nbytes: int) -> None:
        if nbytes > self._told_bytes and not self.done.done():
            self._told_bytes = nbytes
            self._progress(nbytes)

    def _end(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None) if error is None else self.done.set_exception(error)

    def _finish(self, error: Exception | None) -> None:
        self.dest = None
        try:
            if error is None:
                self._report(self.ticket.nbytes)
        finally:
            self._end(error)
            if not self.settled.done():
                self.settled.set_result(None)


def check_sound(check: LayerCheck, peer: str) -> None:
    """Raises CorruptBody where what came from `peer` is not what was stored."""
    if check.bad_layer is not None:
        raise CorruptBody(f"layer {check.bad_layer} from {peer} does not match its checksum")


class ThreadPull(LoopPull):
    """A pull that threads of `Workers` run, by `work`."""

    def __init__(self, peer: str, ticket: Ticket, dest: memoryview, progress: Callable[[int], None]) -> None:
        super().__init__(peer, ticket, dest, progress)
        self._lock = threading.Lock()
        self._running = 0
        self._begun = self._stopped = self._over = False
        self._error: Exception | None = None

    def run_on(self, workers: Workers, job: Callable[[], None], times: int = 1) -> None:
        """Queue `job`, fewer times where threads fail us; where none can be had, the pull has failed."""
        for queued in range(times):
            try:
                workers.submit(job)
            except RuntimeError as exc:
                if not queued:
                    self.finish(TransportError(f"{self.peer}: {exc}"))
                return

    def work(self, job: Callable[[], None]) -> None:
        """What a thread does for the pull. What has begun ends in `end`, so that `settled` always comes."""
        if not self.begin():
            return
        error: Exception | None = None
        try:
            job()
        except (TransportError, TicketGone, CorruptBody) as exc:
            error = exc
        except (OSError, RemoteError) as exc:
            error = TransportError(f"{self.peer}: {exc}")
        except Exception as exc:
            log.exception("a pull failed on our side")
            error = TransportError(f"{self.peer}: {exc!r}")
        finally:
            self.end(error)

    def begin(self) -> bool:
        """False where there is nothing left to do: abandoned, or done by other threads."""
        with self._lock:
            if self._stopped or self._over or not self._is_left():
                return False
            self._running += 1
            self._begun = True
            return True

    def end(self, error: Exception | None) -> None:
        """The first error stops the other threads; the last one to end finishes the pull."""
        if error is not None:
            error.__traceback__ = None  # its frames would hold on to the destination
        with self._lock:
            self._running -= 1
            if error is not None and not self._stopped:
                self._stopped, self._error = True, error
                self._interrupt()
            self._over = not self._running and (self._stopped or not self._is_left())
            if not self._over:
                return
        self.finish(self._error)

    def check_wanted(self) -> None:
        """Raises TransportError once the pull is abandoned, or another thread of it has failed."""
        if self._stopped:
            raise TransportError("abandoned")

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
            queued = not self._running and not self._over
            self._over = self._over or queued
            self._interrupt()
        if queued:
            self._finish(None)  # `done` has its error already

    def _is_left(self) -> bool:
        """Whether there is work that no thread has taken yet. Under the lock."""
        return not self._begun

    def _interrupt(self) -> None:
        """Wake the threads that wait for the peer. Under the lock."""


class Workers:
    """Up to `threads_max` daemon threads, started when first needed, that run jobs in order."""

    def __init__(self, name: str, threads_max: int) -> None:
        if threads_max < 1:
            raise ConfigError(f"threads_max must be at least 1, not {threads_max}")
        self._name, self._threads_max = name, threads_max
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._unfinished = 0

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job`, which should not raise, on some thread. Raises RuntimeError where none can be had."""
        with self._lock:
            if len(self._threads) < min(self._unfinished + 1, self._threads_max):
                name = f"{self._name}-{len(self._threads)}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    if not self._threads:
                        raise
                else:
                    self._threads.append(thread)
            self._unfinished += 1
            self._jobs.put(job)

    def stop(self) -> list[threading.Thread]:
        """Threads leave when the jobs submitted so far are done. Returns them, to be joined."""
        with self._lock:
            threads, self._threads = self._threads, []
        for _ in threads:
            self._jobs.put(None)
        return threads

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:  # or this thread would be counted on, and be gone
                log.exception("a job of %s raised", self._name)
            del job  # it refers to a destination, and the next may be long in coming
            with self._lock:
                self._unfinished -= 1


JOIN_POLL_S = 0.01


async def join(threads: list[threading.Thread]) -> None:
    """Join without blocking the loop, and without a thread that the loop's executor would keep."""
    loop = asyncio.get_running_loop()
    joined = loop.create_future()

    def wait() -> None:
        try:
            for thread in threads:
                thread.join()
        finally:
            loop.call_soon_threadsafe(lambda: joined.done() or joined.set_result(None))

    waiter = threading.Thread(target=wait, name="p2pcache-join", daemon=True)
    try:
        waiter.start()
    except RuntimeError:  # no thread can be had: look now and then instead
        while any(thread.is_alive() for thread in threads):
            await asyncio.sleep(JOIN_POLL_S)
        return
    await joined
    waiter.join()


@lru_cache(maxsize=4096)  # every lookup asks of every peer
def parse_address(text: str) -> Address | None:
    """`host:port` or `[host]:port`. The host is a literal, so that no pull waits for a name service."""
    host, _, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return None
    valid_port = port.isascii() and port.isdecimal() and 0 < int(port) < 65_536
    return (host, int(port)) if valid_port and bracketed == (version == 6) else None


def check_host(host: str) -> None:
    """Raises ConfigError unless `host` is an address that a listener may bind to, and advertise."""
    try:
        wildcard = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        raise ConfigError(f"a transport listens on an IP address, not on {host!r}") from None
    if wildcard:
        raise ConfigError(f"a transport does not listen on the wildcard {host}: give it one address")
