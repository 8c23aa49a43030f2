"""A node: its tiers, its shard of the directory, and what its engines and peers ask of it."""

from p2pcache.node.node import Node, Ports
from p2pcache.node.session import Session

__all__ = ["Node", "Ports", "Session"]
