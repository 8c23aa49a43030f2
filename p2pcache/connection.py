"""The connection of an engine's process to its host's node, kept over restarts of the node."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from p2pcache.io.link import Link
from p2pcache.types import ConfigError, NodeDown

_log = logging.getLogger(__name__)
_RECONNECT_S = 1.0


class Connection:
    """A connection to this host's node. Reconnects by itself when the node has been restarted."""

    def __init__(self, path: str | None, timeout_s: float, find: Callable[[], str] | None = None):
        """path: None for a node that is not there yet. find: where the node is once the connection has
        broken; default: on the same path.
        """
        if path is None and find is None:
            raise ConfigError("a client needs a path, or a way to find one")
        self.socket_path = path or ""
        self.budget_s = timeout_s
        self._find = find or (lambda: self.socket_path)
        self._lock = threading.Lock()
        self._link = Link(path, timeout_s) if path is not None else None
        self._reconnecting = self._closed = False
        self._retry_at_s = 0.0

    @property
    def node(self) -> str:
        """The name of the node behind this connection; empty where there has been none yet."""
        return self._link.member.name if self._link is not None else ""

    def link(self) -> Link:
        """The live link. Raises NodeDown at once where there is none; another is then looked for."""
        with self._lock:
            if self._link is not None and not self._link.broken:
                return self._link
            if self._closed:
                raise NodeDown("this client has been closed")
            if not self._reconnecting and time.monotonic() >= self._retry_at_s:
                # Beside the caller: finding a node can take longer than a lookup may.
                self._reconnecting = True
                threading.Thread(target=self._reconnect, name="p2pcache-reconnect", daemon=True).start()
        raise NodeDown("this process's node is down")

    def ask(self, op: str, body: dict[str, Any], budget_s: float) -> Any:
        """One question to the node. Raises NodeDown, RemoteError, DeadlineExceeded."""
        return self.link().call(op, body, budget_s)

    def close(self) -> None:
        """End the connection and with it every lease. Fetched tensors must not be used any more."""
        with self._lock:
            self._closed = True
            link = self._link
        if link is not None:
            link.close()

    def _reconnect(self) -> None:
        link = None
        try:
            path = self._find()
            link = Link(path, self.budget_s)
        except Exception as error:  # whatever it is (Ray may raise anything), the next try is due
            _log.info("still without a node: %s", error)
        with self._lock:
            self._reconnecting = False
            self._retry_at_s = time.monotonic() + _RECONNECT_S
            if link is not None and not self._closed:
                self.socket_path, self._link, link = path, link, None
        if link is not None:
            link.close()
