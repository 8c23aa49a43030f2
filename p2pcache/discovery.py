"""Finding this host's node: by name, by environment, by Ray, or because there is only one."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from p2pcache.io.engine_socket import listens
from p2pcache.types import NodeDown

SOCKET_VARIABLE = "P2PCACHE_SOCKET"


def find_socket(given: str | None = None) -> str:
    """Path of the engine socket to connect to. Raises NodeDown with what to do about it."""
    if given:
        return given
    if os.environ.get(SOCKET_VARIABLE):
        return os.environ[SOCKET_VARIABLE]
    found = _from_ray()
    if found:
        return found
    sockets = sockets_here()
    if len(sockets) == 1:
        return sockets[0]
    if not sockets:
        raise NodeDown(
            "no p2pcache node is known on this host: start one with `p2pcache start` (on a Ray cluster) or"
            " `p2pcache start --alone`; one with a runtime_dir of its own is found by its socket only"
            f" (connect(socket=...), --socket, or {SOCKET_VARIABLE})"
        )
    raise NodeDown(f"several nodes are on this host; choose one with {SOCKET_VARIABLE}: {', '.join(sockets)}")


def sockets_here() -> list[str]:
    """Engine sockets in this user's runtime folder that somebody listens on, by name."""
    folder = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"p2pcache-{os.geteuid()}"
    return sorted(str(p) for p in folder.glob("*.sock") if listens(str(p)))


def _from_ray() -> str | None:
    """The socket of the node actor on this Ray node, if this process is one of Ray's."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    from p2pcache.actor import socket_on_this_node

    return socket_on_this_node()
