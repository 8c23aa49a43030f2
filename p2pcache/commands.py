"""What each `p2pcache` command does: arguments in, text or JSON out, an exit status back."""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from p2pcache.types import ConfigError, NodeDown, RemoteError

CHUNKERS = "`content`, `fixed:N`, or `segments:OFFSET,OFFSET,...`"


def demo(arguments: argparse.Namespace) -> int:
    from p2pcache.demo.main import demo

    return demo(arguments.cache, arguments.json)


def start(arguments: argparse.Namespace) -> int:
    from p2pcache.config import parse_settings

    pairs = dict(_pair(text) for text in arguments.set)
    settings = {"host": pairs.pop("host")} if pairs.get("host") == "node-ip" else {}
    settings |= parse_settings(pairs)
    if arguments.alone:
        return _run_alone(settings, _addresses(arguments.peers), arguments.json)
    if arguments.peers:
        raise ConfigError("--peers goes with --alone; on Ray the mesh finds its nodes by itself")
    from p2pcache.io.members_ray import LABEL, alive_nodes
    from p2pcache.mesh import Mesh

    _join_ray(arguments.address)
    nodes = alive_nodes(labelled_only=not arguments.all_nodes)
    if not nodes:
        raise ConfigError(
            f"no Ray node carries the label: start Ray with --labels={LABEL}=1, or pass --all-nodes"
        )
    if arguments.dashboard and len(_addresses(arguments.dashboard, "--dashboard")) != 1:
        raise ConfigError(f"--dashboard takes one address, not {arguments.dashboard!r}")
    mesh = Mesh.ensure(settings, labelled_only=not arguments.all_nodes, dashboard=arguments.dashboard or None)
    try:
        members = mesh.wait_for(arguments.wait or len(nodes))
    except NodeDown:
        if mesh.made_here and not mesh.status()["members"]:  # leave nothing that the next try would find
            mesh.stop()
        raise
    if arguments.json:
        print(json.dumps([m.to_wire() for m in members]))
    else:
        print(f"{len(members)} nodes are in the mesh: {', '.join(sorted(m.name for m in members))}")
    return 0


def _run_alone(settings: dict[str, Any], peers: list[str], as_json: bool) -> int:
    from p2pcache.config import NodeConfig
    from p2pcache.runtime import NodeRuntime

    ended = threading.Event()
    runtime = NodeRuntime.start(NodeConfig.of(settings))
    # After the start: a library that it loads may have set handlers of its own.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: ended.set())
    try:
        runtime.follow(peers)
        if as_json:
            print(json.dumps(runtime.member.to_wire() | {"socket": runtime.socket_path}), flush=True)
        else:
            print(f"node {runtime.member.name} serves {runtime.socket_path}; interrupt to stop", flush=True)
        ended.wait()
    finally:
        runtime.close()
    return 0


def stop(arguments: argparse.Namespace) -> int:
    from p2pcache.mesh import Mesh

    _join_ray(arguments.address)
    Mesh.find().stop()
    print(json.dumps({"stopped": True}) if arguments.json else "the mesh is stopped")
    return 0


def drain(arguments: argparse.Namespace) -> int:
    if not 0 <= arguments.budget < float("inf"):
        raise ConfigError(f"--budget takes a number of seconds, not {arguments.budget}")
    if arguments.cluster is not None:
        from p2pcache.remote import Cluster

        how = ["--undo"] if arguments.undo else ["--budget", str(arguments.budget)]
        words = ["drain", *how, *(["--json"] if arguments.json else []), "--", arguments.node]
        said = Cluster.load(arguments.cluster).ask_head(words, arguments.budget + 90)
        print(said.out, end="")
        if said.status:
            print(said.error, file=sys.stderr)
        return said.status
    from p2pcache.mesh import Mesh

    _join_ray(arguments.address)
    mesh = Mesh.find()
    if arguments.undo:
        mesh.revive(arguments.node)
        print(json.dumps({"revived": arguments.node}) if arguments.json else f"{arguments.node} is back")
        return 0
    handed = mesh.drain(arguments.node, arguments.budget)
    if arguments.json:
        print(json.dumps(handed))
    else:
        print(
            f"{arguments.node} has left the mesh; peers took over {handed['bodies']:,} bodies"
            f" ({_size(handed['bytes'])}), {handed['left']:,} were left behind"
        )
    return 0


def down(arguments: argparse.Namespace) -> int:
    from p2pcache.remote import Cluster

    return 0 if Cluster.load(arguments.cluster).down(say=print) else 1


def status(arguments: argparse.Namespace) -> int:
    nodes = _statuses(arguments)
    if arguments.json:
        print(json.dumps(nodes))
        return 1 if any("error" in n for n in nodes) else 0
    for node in nodes:
        if "error" in node:
            print(f"{_plain(node['name'])}: not in the mesh: {_plain(node['error'])}")
            continue
        count = node["counters"]
        hits, chunks = count["hits_exact"] + count["hits_content"], count["chunks"]
        nvme = node["nvme"]
        below = (
            f"NVMe {_size(nvme['used_bytes'])} of {_size(nvme['capacity_bytes'])}" if nvme else "no NVMe tier"
        )
        share = f"{hits / chunks:.0%} of {chunks:,} chunks found" if chunks else "nothing asked yet"
        name = _plain(node["name"])
        print(
            f"{name}: host {_size(node['host']['bytes'])} of {_size(node['host']['bytes_max'])}"
            f" ({node['host']['bodies']:,} bodies), {below}; {share}; {node['leases']} leases"
        )
        served = [f"{count['served_' + s]:,} {s}" for s in ("local", "nvme", "peer") if count["served_" + s]]
        missed = [
            f"{n:,} {name.removeprefix('miss_')}"
            for name, n in count.items()
            if name.startswith("miss_") and n
        ]
        if served or missed:
            print(f"    served: {', '.join(served) or 'nothing'}; missed: {', '.join(missed) or 'nothing'}")
        means = [_transport(*transport) for transport in node.get("transports", {}).items()]
        print(f"    pulls by {', '.join(means) or 'nothing'}")
    views = {n.get("view_id") for n in nodes if "error" not in n}
    if len(views) > 1:
        print("the nodes do not agree on who is in the mesh (yet)")
    return 1 if any("error" in n for n in nodes) else 0


def doctor(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from p2pcache.config import NodeConfig, parse_settings
    from p2pcache.doctor import ERROR, examine

    found = examine(NodeConfig.of(parse_settings(dict(_pair(text) for text in arguments.set))))
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in found]))
    else:
        for finding in found:
            print(f"{finding.level:7}  {finding.name}: {_plain(finding.text)}")
            if finding.remedy:
                print(f"{'':9}-> {_plain(finding.remedy)}")
    return 1 if any(finding.level == ERROR for finding in found) else 0


def _transport(name: str, facts: dict[str, Any]) -> str:
    if name != "ucx":
        return _plain(name)
    if not facts.get("available"):
        return _plain(f"ucx ({facts.get('reason')})")
    means = ", ".join(facts["resources"]) or "no device"
    return _plain(f"ucx ({facts['version']} of {facts['library']}, over {means})")


def top(arguments: argparse.Namespace) -> int:
    from p2pcache.top import run

    return run(lambda: _statuses(arguments), arguments.interval, once=arguments.once)


def _statuses(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Of the whole mesh: through a node of this host, through Ray where none is up, or over SSH."""
    if arguments.cluster is not None:
        from p2pcache.remote import Cluster

        return Cluster.load(arguments.cluster).statuses()
    try:
        with _any_client(arguments.socket) as client:
            return client.mesh()
    except NodeDown as error:
        if arguments.socket is not None or not _ray_runs_here():
            raise
        from p2pcache.mesh import Mesh

        _join_ray("auto")
        try:
            return Mesh.find().node_statuses()
        except NodeDown:
            raise error from None


def _ray_runs_here() -> bool:
    """Whether a Ray cluster was started on this host; looks at Ray's own note of it, without joining."""
    try:
        from ray._private.utils import read_ray_address
    except ImportError:
        return False
    return bool(os.environ.get("RAY_ADDRESS") or read_ray_address())


def lookup(arguments: argparse.Namespace) -> int:
    from p2pcache.core.keys import hash_salt

    tokens = _read_tokens(arguments.tokens)
    tenant = hash_salt(arguments.tenant) if arguments.tenant is not None else None
    with _any_client(arguments.socket) as client:
        everything = client.namespaces(tenant)
        known = [n for n in everything if arguments.model in (None, n.model)]
        known = [n for n in known if arguments.dtype in (None, n.layout.dtype)]
        if len(known) != 1:
            names = ", ".join(sorted(f"{n.model} ({n.layout.dtype})" for n in everything)) or "none"
            raise ConfigError(f"name one namespace with --model and --dtype; the mesh knows: {names}")
        cache = client.open(known[0])
        found = cache.explain(tokens, chunker=_chunker(arguments.chunker), content_reuse=not arguments.exact)
    rows = [_chunk_row(c) for c in found.chunks]
    if arguments.json:
        print(json.dumps({"tokens": len(tokens), "seconds": found.seconds, "chunks": rows}))
        return 0
    for row in rows:
        print(_chunk_line(row))
    print(
        f"{found.exact_tokens:,} tokens exact, {found.content_tokens:,} by content,"
        f" of {len(tokens):,}; {found.seconds * 1e3:.1f} ms"
    )
    return 0


def _chunk_row(c: Any) -> dict[str, Any]:
    """One chunk of a lookup as plain values."""
    return {
        "start": c.keys.start,
        "stop": c.keys.stop,
        "match": c.match.value,
        "source": c.source.value,
        "node": c.peer,
        "bytes": c.body.nbytes if c.body else 0,
        "expected_s": c.expected_s,
        "miss": str(c.miss) if c.miss else "",
        "detail": c.detail,
        "holders": [
            {"node": h.node, "tier": h.tier.name.lower(), "exact": f.body.exact == c.keys.exact}
            for f in c.found
            for h in f.holders
        ],
    }


def _chunk_line(row: dict[str, Any]) -> str:
    """The same for a person."""
    span = f"[{row['start']:>6}, {row['stop']:>6})"
    held = ", ".join(sorted({f"{h['node']} ({h['tier']})" for h in row["holders"]}))
    if row["match"] == "none":
        why = row["miss"] + (f": {row['detail']}" if row["detail"] else "")
        return f"{span}  miss     {why}" + (f"; held by {held}" if held else "")
    size = _size(row["bytes"])
    return f"{span}  {row['match']:<7}  from {row['node']} by {row['source']}, {size}; held by {held}"


# -- reading arguments, reaching nodes -------------------------------------------------------------


def _addresses(text: str, option: str = "--peers") -> list[str]:
    found = [part for part in text.split(",") if part]
    for address in found:
        host, colon, port = address.rpartition(":")
        try:
            ipaddress.ip_address(host.strip("[]"))
            right = bool(colon) and 0 < int(port) <= 65_535
        except ValueError:
            right = False
        if not right:
            raise ConfigError(f"{option} takes addresses such as 10.0.0.2:7000, not {address!r}")
    return found


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set takes SETTING=VALUE, not {text!r}")
    return name, value


def _plain(text: object) -> str:
    """What others say, safe for a terminal."""
    return "".join(c if c.isprintable() else "?" for c in str(text))


def _join_ray(address: str) -> None:
    import logging

    import ray
    from ray._private.utils import read_ray_address

    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or read_ray_address() or "auto"
    host, colon, port = address.rpartition(":")
    if (
        colon and "://" not in address
    ):  # ask by ourselves first: Ray would try for a minute, and log all of it
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=3).close()
        except (OSError, ValueError, OverflowError):
            raise NodeDown(f"no Ray cluster answers at {address!r}") from None
    try:
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False, ignore_reinit_error=True)
    except (ConnectionError, ValueError):
        raise NodeDown(
            "no Ray cluster runs on this host: start one with `ray start --head --labels=p2pcache=1`"
        ) from None


def _any_client(path: str | None) -> Any:
    """A connection to a node on this host: the one named, or any that answers, if all are of one mesh."""
    from p2pcache.api import connect
    from p2pcache.discovery import sockets_here

    if path is not None:
        return connect(path)
    sockets = sockets_here()
    chosen, known = None, set()
    for candidate in sockets:
        try:
            client = connect(candidate)
        except (NodeDown, RemoteError):
            continue
        if len(sockets) == 1:
            return client
        try:
            mesh = {(n["name"], n.get("incarnation")) for n in client.mesh()}
        except (NodeDown, RemoteError):
            client.close()
            continue
        if chosen is None:
            chosen, known = client, mesh
            continue
        client.close()
        if not mesh & known:
            chosen.close()
            raise ConfigError(f"several meshes run on this host; choose with --socket: {', '.join(sockets)}")
        known |= mesh
    return chosen or connect()


def _read_tokens(path: str) -> list[int]:
    if path == "-" and sys.stdin is None:
        raise ConfigError("there is no standard input to read token ids from")
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    try:
        tokens = json.loads(text) if text.lstrip().startswith("[") else [int(word) for word in text.split()]
    except (ValueError, RecursionError):
        raise ConfigError(
            f"{path} holds no token ids: give integers between spaces, or a JSON list"
        ) from None
    if not isinstance(tokens, list) or not all(type(t) is int for t in tokens):
        raise ConfigError(f"{path} holds no list of token ids")
    return tokens


def _chunker(text: str) -> Any:
    from p2pcache.core.chunking import ContentChunker, FixedChunker, SegmentChunker

    kind, _, rest = text.partition(":")
    try:
        if kind == "content" and not rest:
            return ContentChunker()
        if kind == "fixed":
            return FixedChunker(int(rest) if rest else 256)
        if kind == "segments":
            return SegmentChunker([int(offset) for offset in rest.split(",")])
    except ValueError as error:
        raise ConfigError(f"--chunker {text!r}: {error}") from None
    raise ConfigError(f"--chunker takes {CHUNKERS}, not {text!r}")


def _size(nbytes: int) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:,.0f} {unit}" if unit == "B" else f"{nbytes:,.1f} {unit}"
        nbytes /= 1024
    raise AssertionError
