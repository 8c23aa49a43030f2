"""Imports point down, the core is pure, and nothing of ours unpickles or evaluates.

Read from the source with `ast`, so that an import inside a function counts like any other.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[1] / "p2pcache"

# Bottom to top. A module may import its own layer and those below it.
LAYERS = (
    {"types", "_native"},
    {"config"},
    {"core"},
    {"codecs"},
    {"values"},
    {"io"},
    {"node"},
    {"runtime"},
    {"metrics", "metrics_ray", "dashboard"},
    {
        "results",
        "replies",
        "runs",
        "discovery",
        "connection",
        "storing",
        "api",
        "embedded",
        "actor",
        "",
    },  # "": the package itself
    {"supervisor", "mesh"},
    {"blend"},
    {"integrations", "demo", "serve", "top", "remote", "doctor"},
    {"commands", "cli", "__main__"},
)
LEVEL = {part: level for level, layer in enumerate(LAYERS) for part in layer}

# These parts import nothing else of ours, and nothing else at all (the standard library apart).
OURS = {
    "types": set(),
    "core": {"types", "core", "_native"},
    "codecs": {"types", "core", "_native", "codecs"},
    "blend": {"types", "core", "_native", "blend"},
}
THEIRS = {
    "types": set(),
    "core": {"numpy", "blake3", "xxhash", "msgpack"},
    "codecs": {"numpy"},
    "blend": {"torch", "transformers", "numpy", "blake3"},
}
# Of the standard library, what has no clock, no chance, no files, no sockets, no threads.
PURE_STDLIB = set(
    "__future__ abc array bisect collections copy dataclasses enum functools heapq itertools math numbers"
    " operator re string struct types typing".split()
)
BANNED = {"pickle", "marshal", "shelve", "cloudpickle", "dill"}
BANNED_CALLS = {"eval", "exec", "compile"}
# Where a heavy dependency may be imported; `lazy` places only inside a function.
KEPT_APART = {
    "ray": {
        "metrics_ray",
        "actor",
        "supervisor",
        "mesh",
        "io.members_ray",
        "serve",
        "demo",
        "commands",
        "remote",
        "discovery",
    },
    "vllm": {"integrations.vllm"},
}
LAZY = {
    ("discovery", "ray"),
    ("discovery", "p2pcache.actor"),
    ("commands", "ray"),
    ("commands", "p2pcache.mesh"),
    ("remote", "ray"),
}
IO_SHARED = {"ports", "slab"}


class Import(NamedTuple):
    name: str  # in full: `p2pcache.core.keys.Namespace`, `os.path`
    line: int
    lazy: bool


def imports(module: str, tree: ast.Module, is_package: bool) -> Iterator[Import]:
    def visit(node: ast.AST, lazy: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, child.lineno, lazy) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = absolute(child)
                yield from (Import(f"{base}.{alias.name}", child.lineno, lazy) for alias in child.names)
            elif isinstance(child, ast.Call) and (name := by_call(child)):
                yield Import(name, child.lineno, lazy)
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from visit(child, lazy or is_function)

    def absolute(node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module
        parts = module.split(".")
        base = parts[: len(parts) - node.level + is_package]
        return ".".join([*base, *([node.module] if node.module else [])])

    yield from visit(tree, False)


def by_call(call: ast.Call) -> str | None:
    """The module that `importlib.import_module("x")` or `__import__("x")` loads, if it is spelt out."""
    called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    spelt = call.args and isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, str)
    return call.args[0].value if spelt and called in ("import_module", "__import__") else None


def part_of(name: str) -> str:
    """`core` of `p2pcache.core.keys`; "" of the package and of what it exports."""
    part = (name.split(".") + [""])[1]
    return part if part in LEVEL else ""


def within(place: str, places: set[str]) -> bool:
    return any(place == p or place.startswith(p + ".") for p in places)


def violations(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """What is wrong with the imports of one module of `p2pcache`, in words; empty where nothing is."""
    tree = ast.parse(source)
    place = module.removeprefix("p2pcache").removeprefix(".")
    me = place.split(".")[0]
    if me not in LEVEL:
        return [f"{module} stands in no layer"]
    wrong = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BANNED_CALLS:
            wrong.append(f"{module}:{node.lineno} calls {node.func.id}")
    for name, line, lazy in imports(module, tree, is_package):
        top, here = name.split(".")[0], f"{module}:{line}"
        if top in BANNED:
            wrong.append(f"{here} imports {top}")
        if top in KEPT_APART and not within(place, KEPT_APART[top]):
            wrong.append(f"{here} imports {top}, which is kept apart")
        if not lazy and any(place == who and within(name, {what}) for who, what in LAZY):
            wrong.append(f"{here} imports {name} outside a function")
        if top == "p2pcache":
            part = part_of(name)
            if LEVEL[part] > LEVEL[me]:
                wrong.append(f"{here} imports {name}, which points up")
            elif me in OURS and part not in OURS[me]:
                wrong.append(f"{here} imports {name}, which {me} may not")
            elif me == part == "io" and not may_share(module, name):
                wrong.append(f"{here} imports {name}: shells do not know each other")
        elif top in sys.stdlib_module_names:
            if me == "core" and top not in PURE_STDLIB:
                wrong.append(f"{here} imports {top}, which is not pure")
        elif me in THEIRS and top not in THEIRS[me]:
            wrong.append(f"{here} imports {top}, which {me} may not")
    return wrong


def may_share(module: str, name: str) -> bool:
    other = (name.split(".") + [""])[2]
    return not other or other in IO_SHARED or other.startswith("_") or module == f"p2pcache.io.{other}"


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def test_the_whole_package_is_read():
    found = {module for module, _ in modules()}
    assert {"p2pcache", "p2pcache.types", "p2pcache.core.wire", "p2pcache.io.ports", "p2pcache.node"} <= found


@pytest.mark.parametrize(
    ("module", "path"), list(modules()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_imports_point_down(module: str, path: Path):
    assert violations(module, path.read_text(), is_package=path.name == "__init__.py") == []


@pytest.mark.parametrize(
    ("module", "source", "because"),
    [
        ("core.keys", "from p2pcache.io.ports import Control", "points up"),
        ("core.keys", "from p2pcache.io import ports", "points up"),
        ("core.keys", "from p2pcache import io", "points up"),
        ("core.keys", "import p2pcache.node.node as n", "points up"),
        ("core.keys", "from p2pcache import connect", "points up"),
        ("core.keys", "from ..io import ports", "points up"),
        ("core.keys", "from .. import api", "points up"),
        ("core.keys", "def f():\n    from p2pcache.node import Node", "points up"),
        ("core.keys", "class C:\n    async def f(self):\n        import p2pcache.api", "points up"),
        ("core.keys", "if TYPE_CHECKING:\n    from p2pcache.runtime import NodeRuntime", "points up"),
        ("core.keys", "try:\n    import p2pcache.cli\nexcept ImportError: pass", "points up"),
        ("core.keys", "importlib.import_module('p2pcache.node')", "points up"),
        ("core.keys", "from p2pcache.config import NodeConfig", "which core may not"),
        ("core.keys", "import time", "not pure"),
        ("core.keys", "from os import path", "not pure"),
        ("core.keys", "def f():\n    import random", "not pure"),
        ("core.keys", "import math, json", "not pure"),
        ("core.keys", "from pathlib import Path", "not pure"),
        ("core.keys", "from p2pcache.codecs import encode", "points up"),
        ("codecs.lossless", "from p2pcache.config import NodeConfig", "which codecs may not"),
        ("codecs.lossless", "import torch", "which codecs may not"),
        ("core.keys", "import torch", "which core may not"),
        ("core.keys", "import zmq", "which core may not"),
        ("core", "from . import keys\nimport socket", "not pure"),
        ("types", "import numpy", "which types may not"),
        ("types", "from p2pcache.config import GIB", "points up"),
        ("config", "from p2pcache.core.keys import Namespace", "points up"),
        ("values", "from p2pcache.io.slab import HostSlab", "points up"),
        ("io.slab", "from p2pcache.node import Node", "points up"),
        ("io.slab", "from p2pcache.runtime import NodeRuntime", "points up"),
        ("io.link", "from p2pcache.io.control_zmq import ZmqControl", "shells do not know"),
        ("io.link", "from p2pcache.io import store_nvme", "shells do not know"),
        ("io.link", "from . import store_nvme", "shells do not know"),
        ("io._private", "from p2pcache.io.control_zmq import ZmqControl", "shells do not know"),
        ("node.node", "from p2pcache.runtime import NodeRuntime", "points up"),
        ("node", "from ..api import connect", "points up"),
        ("runtime", "from p2pcache.api import connect", "points up"),
        ("api", "from p2pcache.cli import main", "points up"),
        ("api", "import p2pcache.integrations.transformers", "points up"),
        ("blend.rotate", "from p2pcache.values import describe", "which blend may not"),
        ("blend.rotate", "from p2pcache.api import Client", "which blend may not"),
        ("blend.rotate", "from p2pcache.integrations import transformers", "points up"),
        ("io.slab", "from p2pcache.blend.rotate import RopeSpec", "points up"),
        ("blend.rotate", "import zmq", "which blend may not"),
        ("commands", "from p2pcache.mesh import Mesh", "outside a function"),
        ("discovery", "import ray", "outside a function"),
        ("commands", "import ray", "outside a function"),
        ("api", "def f():\n    import ray", "kept apart"),
        ("io.slab", "from ray.util import state", "kept apart"),
        ("integrations.transformers", "from vllm.config import VllmConfig", "kept apart"),
        ("integrations.vllm_more", "import vllm", "kept apart"),
        ("demo.engine", "import pickle", "imports pickle"),
        ("api", "from marshal import loads", "imports marshal"),
        ("api", "__import__('cloudpickle')", "imports cloudpickle"),
        ("api", "x = eval('1')", "calls eval"),
        ("api", "def f(s):\n    exec(s)", "calls exec"),
        ("newcomer", "import os", "stands in no layer"),
    ],
)
def test_a_bad_import_is_caught(module: str, source: str, because: str):
    found = violations(f"p2pcache.{module}", source, is_package=module in ("core", "node"))
    assert len(found) == 1 and because in found[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("core.keys", "import struct\nfrom collections.abc import Sequence\nimport numpy as np"),
        (
            "core.keys",
            "from p2pcache import _native\nfrom .layout import KVLayout\nfrom p2pcache.types import Tier",
        ),
        ("blend.rotate", "import os\nimport torch\nfrom p2pcache.core.keys import Namespace"),
        (
            "io.link",
            "from p2pcache.io import ports, slab\nfrom p2pcache.io._private import x\nfrom . import _more",
        ),
        ("io.members_ray", "import ray"),
        ("actor", "from ray.util import state"),
        ("commands", "def f():\n    import ray\n    from p2pcache.mesh import Mesh"),
        ("commands", "from p2pcache import __version__, connect\nasync def f():\n    import ray"),
        ("integrations.vllm", "import vllm\nfrom p2pcache.api import Client"),
        ("demo.engine", "model.eval()\nawait_me = re.compile('x')\nimport p2pcache"),
    ],
)
def test_a_good_import_is_not(module: str, source: str):
    assert violations(f"p2pcache.{module}", source) == []
