"""Serving with the cache: engines behind Ray Serve, routed by locality, admitted by memory."""

from __future__ import annotations

from typing import Any


def deployment(engine: Any = None, config: Any = None, **settings: Any) -> Any:
    """An engine with the cache as a Ray Serve application; see `p2pcache.serve.app.deployment`."""
    # Here and not above: engines are written, and tested, where there is no Ray.
    from p2pcache.serve.app import deployment

    return deployment(engine, config, **settings)
