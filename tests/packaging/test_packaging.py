"""What is shipped: a complete sdist, and a wheel that runs where there is no compiler."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path, PurePosixPath

import pytest

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
EXTRAS = {"ray", "ucx-cu12", "ucx-cu13", "transformers", "serve", "vllm", "demo", "dev"}


def run(*command: str | Path, **options) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist, and the wheel built *from it*: a file that the sdist lacks fails here."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (wheel,) = dist.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def test_the_wheel_says_what_it_is(metadata: Message) -> None:
    assert (metadata["Name"], metadata["Version"]) == ("p2pcache", "0.1.0")
    assert (metadata["License-Expression"], metadata["License-File"]) == ("Apache-2.0", "LICENSE")
    assert metadata["Requires-Python"] == ">=3.11"
    assert set(metadata.get_all("Provides-Extra")) == EXTRAS


def test_ray_and_ucx_are_extras(metadata: Message) -> None:
    base = {r.split(">")[0] for r in metadata.get_all("Requires-Dist") if "extra ==" not in r}
    assert base == {"blake3", "msgpack", "numpy", "pyzmq", "torch", "xxhash"}


def test_the_wheel_has_the_native_module_and_every_source_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [PurePosixPath(name) for name in archive.namelist() if not name.endswith("/")]
    assert {name.parts[0] for name in names} == {"p2pcache", "p2pcache-0.1.0.dist-info"}
    assert len([n for n in names if n.match("p2pcache/_native*.so")]) == 1
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "p2pcache").rglob("*.py")}
    assert sources <= set(map(str, names))
    assert not [n for n in names if n.suffix in {".pyc", ".cpp"}]


def test_the_sdist_has_what_it_takes_to_build_and_no_more(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {PurePosixPath(name).relative_to("p2pcache-0.1.0") for name in archive.getnames()}
    assert {n.parts[0] for n in names if n.parts} <= {
        "LICENSE",
        "PKG-INFO",
        "README.md",
        "constraints.txt",
        "native",
        "p2pcache",
        "pyproject.toml",
    }
    assert not [n for n in names if n.suffix in {".so", ".pyc"}]
    assert sdist.stat().st_size < 2 << 20


def test_the_wheel_runs_in_a_clean_environment_without_a_compiler(wheel: Path, tmp_path: Path) -> None:
    # An empty PATH has no cc, c++, gcc or g++, so nothing here can be building anything.
    nothing = tmp_path / "bin"
    nothing.mkdir()
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    env = {k: v for k, v in keep.items() if k not in ("CC", "CXX")} | {"PATH": str(nothing)}

    clean = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", clean)
    python = clean / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, env=env)
    # The dependencies are this environment's: torch alone is half a GB. A path in a .pth file is put
    # *behind* the clean site-packages, and .pth files in it are not read, so p2pcache's own editable
    # install stays out of sight.
    (site,) = clean.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    script = (
        "import numpy as np, p2pcache\n"
        "from p2pcache.core.chunking import ContentChunker\n"
        "spans = ContentChunker().spans(np.arange(5000, dtype=np.uint32))\n"
        "assert spans[0][0] == 0 and spans[-1][1] == 5000, spans\n"
        "print(p2pcache.__version__, p2pcache._native.__file__, p2pcache.__file__)\n"
    )
    version, *files = run(python, "-c", script, cwd=tmp_path, env=env).split()
    assert version == "0.1.0"
    assert all(Path(file).is_relative_to(clean) for file in files)
    assert run(clean / "bin" / "p2pcache", "--version", cwd=tmp_path, env=env) == "p2pcache 0.1.0\n"
