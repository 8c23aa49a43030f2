"""`p2pcache demo`, whole: three Ray nodes, the real model, every figure that the README promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.cluster, pytest.mark.timeout(1500)]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> dict:
    out = tmp_path_factory.mktemp("demo") / "demo.json"
    before = _ours()
    command = [
        sys.executable,
        "-m",
        "p2pcache.cli",
        "demo",
        "--json",
        str(out),
        "--cache",
        str(ROOT / ".cache"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1400)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    print(done.stdout)
    return json.loads(out.read_text()) | {"left_over": _ours() - before, "printed": done.stdout}


def _ours() -> set[str]:
    """Processes of Ray or p2pcache, as `pid command`."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                command = (
                    (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                )
            except OSError:
                continue
            if any(word in command for word in ("ray::", "raylet", "gcs_server", "p2pcache.cli demo")):
                found.add(f"{folder.name} {command[:80]}")
    return found


def test_passages_are_reused_at_other_positions_and_from_other_nodes(demo: dict):
    assert demo["nodes"] == 3
    assert demo["summary"]["peer_tokens"] > 0
    assert demo["summary"]["content_tokens"] > 0
    crossed = [r for r in demo["requests"] if r["content_tokens"] and r["peer_tokens"]]
    assert len(crossed) >= 3


def test_no_byte_was_wrong_and_every_byte_was_checked(demo: dict):
    assert demo["summary"]["wrong_bytes"] == 0
    assert all(r["unchecked_chunks"] == 0 for r in demo["requests"])


def test_no_lease_and_no_process_is_left(demo: dict):
    assert demo["summary"]["leaked_leases"] == 0
    assert not demo["left_over"]


def test_exact_reuse_is_exact_and_fast(demo: dict):
    summary = demo["summary"]
    assert 0 < summary["exact_max_abs_logit_diff"] < 1e-3
    assert summary["speedup_exact"] >= 3


def test_moved_reuse_is_nearer_to_full_prefill_than_both_controls(demo: dict):
    summary = demo["summary"]
    assert 0 < summary["kl_content_mean"] < summary["kl_content_unrotated"]
    assert summary["kl_content_mean"] < summary["kl_content_without_documents"]


def test_all_transports_and_all_tiers_took_part(demo: dict):
    from p2pcache.io.transport_ucx import ucx_available

    expected = {"shm", "tcp"} | ({"ucx"} if ucx_available() is None else set())
    assert set(demo["summary"]["transports"]) == expected
    assert all(sum(r[f"{tier}_tokens"] for r in demo["requests"]) > 0 for tier in ("local", "nvme", "peer"))


def test_tokens_add_up(demo: dict):
    for r in demo["requests"]:
        reused = r["local_tokens"] + r["nvme_tokens"] + r["peer_tokens"]
        assert reused == r["exact_tokens"] + r["content_tokens"]
        # The heads of moved passages and the last token are reused and recomputed, so the sum is above.
        assert r["tokens"] <= reused + r["recomputed_tokens"] <= r["tokens"] + 16 * 8 + 1


def test_the_table_can_be_read(demo: dict):
    assert "Every request" in demo["printed"] and "times faster" in demo["printed"]
