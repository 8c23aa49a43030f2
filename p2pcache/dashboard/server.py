"""The page over HTTP: `/` and `/api/mesh.json`, and nothing else.

Read only: no request changes anything, and nothing of a request comes back in an answer. There is no
login, so it binds to loopback unless it is told otherwise; put a proxy in front where others shall see it.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from socketserver import TCPServer
from typing import Any
from urllib.parse import urlsplit

from p2pcache.dashboard.history import History
from p2pcache.dashboard.summary import checked, summary
from p2pcache.types import ConfigError

_log = logging.getLogger(__name__)
POLL_S = 2.0
"""How often the mesh is asked while somebody watches."""
IDLE_POLL_S = 10.0
"""And while nobody does, so that there is a history when somebody comes."""
WATCHED_S = 60.0
_FRESH_WAIT_S = 1.0
_REQUEST_TIMEOUT_S = 10.0
_REQUESTS_MAX = 32

Read = Callable[[], Sequence[Mapping[str, Any]]]


class Dashboard:
    """A web page of a mesh. `start` it, show `url` to somebody, `close` it."""

    def __init__(self, read: Read, host: str = "127.0.0.1", port: int = 0):
        """read: the status of every node, as `Mesh.node_statuses`; called from a thread of ours, one
        call at a time, and may take seconds or raise. port: 0 for a free one.
        """
        self._read = read
        self._host = host
        self._port = port
        self._history = History()
        self._summary: dict[str, Any] = {"nodes": []}  # of the last read that brought something
        self._body = b'{"nodes":[]}'  # that and what is wrong now, as JSON
        self._read_s: float | None = None  # when that read ended
        self._tried_s: float | None = None  # when the last read ended, whatever it brought
        self._rounds = 0
        self._watched_s = float("-inf")
        self._changed = threading.Condition()
        self._wake = threading.Event()
        self._closing = False
        self._server: _Server | None = None
        self._threads: list[threading.Thread] = []

    def start(self) -> Dashboard:
        """Bind and serve. Raises ConfigError where the address cannot be had."""
        try:
            self._server = _Server((self._host, self._port), self)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"the dashboard cannot listen on {self._host}:{self._port}: {error}") from None
        jobs = {"poll": self._poll, "http": self._server.serve_forever}
        for name, job in jobs.items():
            thread = threading.Thread(target=job, name=f"p2pcache-dashboard-{name}", daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    @property
    def url(self) -> str:
        """Where the page is. Raises ConfigError before `start`."""
        if self._server is None:
            raise ConfigError("the dashboard has not been started")
        host, port = self._server.server_address[:2]
        return f"http://{f'[{host}]' if ':' in str(host) else host}:{port}/"

    def close(self) -> None:
        """Stop serving and let go of the port. Idempotent. A `read` that hangs is not waited for."""
        if self._server is None or self._closing:
            return
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._wake.set()
        self._server.shutdown()
        self._server.server_close()
        for thread in self._threads:
            thread.join(timeout=1.0)

    def __enter__(self) -> Dashboard:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def mesh_json(self) -> bytes:
        """The answer of `/api/mesh.json`: the last that is known of the mesh, and `age_s`, how old it is.

        At most POLL_S and one read old where `read` keeps up. `error`: why the mesh cannot be asked now.
        """
        with self._changed:
            self._watched_s = time.monotonic()
            if self._tried_s is None or self._watched_s - self._tried_s > POLL_S:
                rounds = self._rounds
                self._wake.set()
                self._changed.wait_for(lambda: self._rounds > rounds or self._closing, _FRESH_WAIT_S)
            age_s = None if self._read_s is None else round(time.monotonic() - self._read_s, 2)
            return b'{"age_s":%s,' % json.dumps(age_s).encode() + self._body[1:]

    def _poll(self) -> None:
        pause_s = 0.0
        while not self._closing:
            self._wake.wait(pause_s)
            if self._closing:
                return
            started_s = time.monotonic()
            self._wake.clear()
            self._look()
            # Whoever wakes us in between has found the last look too old; but never faster than POLL_S.
            rest_s = POLL_S - (time.monotonic() - started_s)
            watched = time.monotonic() - self._watched_s < WATCHED_S
            if rest_s > 0:
                self._nap(rest_s)
            pause_s = 0.0 if watched else IDLE_POLL_S - POLL_S

    def _nap(self, seconds: float) -> None:
        """Sleep, but not past `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing, seconds)

    def _look(self) -> None:
        error: dict[str, str] = {}
        now_s = None
        try:
            statuses = checked(self._read())
            now_s = time.monotonic()
            self._history.observe(statuses, now_s)
            self._summary = summary(statuses, self._history, now_s)
        except Exception as fault:  # of Ray, of the network: the page says so and shows what it knew
            error = {"error": f"the mesh cannot be asked: {type(fault).__name__}: {fault}"[:300]}
            _log.debug("the dashboard could not read the mesh", exc_info=True)
        body = json.dumps(self._summary | error, separators=(",", ":")).encode()
        with self._changed:
            self._body, self._tried_s = body, time.monotonic()
            self._read_s = self._read_s if now_s is None else now_s
            self._rounds += 1
            self._changed.notify_all()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], dashboard: Dashboard):
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self.dashboard = dashboard
        self.page, self.policy = _page()
        self.slots = threading.BoundedSemaphore(_REQUESTS_MAX)
        super().__init__(address, _Handler)
        self.loopback_only = ipaddress.ip_address(self.server_address[0]).is_loopback

    def server_bind(self) -> None:
        """Bind without asking DNS for our own name, as `HTTPServer` would."""
        TCPServer.server_bind(self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away in the middle is no event."""
        _log.debug("a request to the dashboard failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "p2pcache"
    sys_version = ""
    timeout = _REQUEST_TIMEOUT_S

    def do_GET(self) -> None:
        if not self.server.slots.acquire(blocking=False):
            self._answer(503, "text/plain", b"too many requests at once\n")
            return
        try:
            self._get()
        finally:
            self.server.slots.release()

    def do_HEAD(self) -> None:
        self.do_GET()

    def _get(self) -> None:
        if not self._is_for_us():
            self._answer(421, "text/plain", b"this host name is not served here\n")
        elif self.path == "/":
            self._answer(200, "text/html; charset=utf-8", self.server.page)
        elif self.path == "/api/mesh.json":
            self._answer(200, "application/json", self.server.dashboard.mesh_json())
        else:
            self._answer(404, "text/plain", b"there is only / and /api/mesh.json\n")

    def _is_for_us(self) -> bool:
        """On loopback only names of loopback are answered, so that no web site can point its own name
        here and read the mesh with its visitor's browser (DNS rebinding)."""
        if not self.server.loopback_only:
            return True
        try:
            host = urlsplit("//" + self.headers.get("Host", "")).hostname or ""
            return host == "localhost" or ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Content-Security-Policy": self.server.policy,
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "Cross-Origin-Resource-Policy": "same-origin",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Errors of the protocol, such as another method than GET, without echoing the request."""
        self.close_connection = True
        self._answer(code, "text/plain", b"this request is not understood here\n")

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug("dashboard: " + format, *args)


def _page() -> tuple[bytes, str]:
    """The page, and a policy by which a browser runs its own script and style and nothing else."""
    page = files("p2pcache.dashboard").joinpath("page.html").read_bytes()
    sums = {}
    for tag in ("script", "style"):
        match = re.search(rb"<%b>(.*?)</%b>" % (tag.encode(), tag.encode()), page, re.DOTALL)
        assert match is not None, f"the page has one <{tag}>"
        sums[tag] = base64.b64encode(hashlib.sha256(match[1]).digest()).decode()
    return page, (
        f"default-src 'none'; script-src 'sha256-{sums['script']}'; style-src 'sha256-{sums['style']}';"
        " connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
