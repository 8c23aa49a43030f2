"""The `p2pcache` command."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from p2pcache import __version__, commands
from p2pcache.types import ConfigError, P2PCacheError


def main(argv: list[str] | None = None) -> int:
    """Entry point. Returns the exit status: 0, 1 for a fault, 2 for a mistake in the call."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return 2
    try:
        status = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except ConfigError as error:
        print(f"p2pcache: {error}", file=sys.stderr)
        return 2
    except P2PCacheError as error:
        print(f"p2pcache: {error}", file=sys.stderr)
        return 1
    except ImportError as error:
        print(
            f"p2pcache: this needs a package that is not installed ({error.name});"
            " see the extras in the README",
            file=sys.stderr,
        )
        return 1
    except BrokenPipeError:  # whoever read our output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        print(f"p2pcache: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="p2pcache", description="A peer-to-peer cache mesh for the KV tensors of LLM attention."
    )
    parser.add_argument("--version", action="version", version=f"p2pcache {__version__}")
    verbs = parser.add_subparsers(dest="command", metavar="COMMAND")

    demo = verbs.add_parser(
        "demo", help="run three nodes with a real model on this machine and show what the cache does"
    )
    demo.add_argument(
        "--json",
        metavar="FILE",
        type=Path,
        default=Path("out/demo.json"),
        help="where figures go (default: %(default)s)",
    )
    demo.add_argument(
        "--cache",
        metavar="DIR",
        type=Path,
        default=Path(".cache"),
        help="where the converted model is kept (default: %(default)s)",
    )
    demo.set_defaults(run=commands.demo)

    start = verbs.add_parser(
        "start",
        help="start the mesh of this host's Ray cluster, or one node alone",
        description="Puts a node on every Ray node started with --labels=p2pcache=1, and keeps it there."
        " Run it on any one host of the cluster; run again, it finds the mesh that runs.",
    )
    start.add_argument("--all-nodes", action="store_true", help="on every Ray node, labelled or not")
    start.add_argument(
        "--alone", action="store_true", help="one node in the foreground, without Ray, until interrupted"
    )
    start.add_argument(
        "--peers",
        metavar="HOST:PORT,...",
        default="",
        help="with --alone: control addresses of other nodes, which need a fixed control_port;"
        " of any two nodes one has to know the other",
    )
    start.add_argument("--address", default="auto", help="of the Ray cluster (default: the one on this host)")
    start.add_argument(
        "--set",
        metavar="SETTING=VALUE",
        action="append",
        default=[],
        help="a setting of every node (see the README); may be repeated",
    )
    start.add_argument(
        "--wait", metavar="NODES", type=int, default=0, help="nodes to wait for (default: those alive now)"
    )
    start.add_argument(
        "--dashboard",
        metavar="ADDRESS:PORT",
        default="127.0.0.1:8299",
        help="of the mesh's web page, on the head; it has no login; empty: none (default: %(default)s)",
    )
    start.add_argument("--json", action="store_true", help="print JSON")
    start.set_defaults(run=commands.start)

    stop = verbs.add_parser("stop", help="stop the mesh of this host's Ray cluster")
    stop.add_argument("--address", default="auto", help="of the Ray cluster (default: the one on this host)")
    stop.add_argument("--json", action="store_true", help="print JSON")
    stop.set_defaults(run=commands.stop)

    drain = verbs.add_parser(
        "drain",
        help="have a node hand its hottest bodies to its peers and leave the mesh",
        description="Its host stays in Ray. Engines there compute everything themselves from then on.",
    )
    drain.add_argument("node", metavar="NODE", help="its name, as `p2pcache status` shows it")
    drain.add_argument(
        "--budget", metavar="SECONDS", type=float, default=30.0, help="for handing on (default: %(default)g)"
    )
    drain.add_argument("--undo", action="store_true", help="bring a drained node back")
    drain.add_argument("--address", default="auto", help="of the Ray cluster (default: the one on this host)")
    _cluster(drain)
    drain.add_argument("--json", action="store_true", help="print JSON")
    drain.set_defaults(run=commands.drain)

    down = verbs.add_parser(
        "down",
        help="stop a cluster that `ray up` started: the mesh, Ray, and what `ray down` leaves on workers",
    )
    down.add_argument("cluster", metavar="YAML", type=Path, help="the file that `ray up` was given")
    down.set_defaults(run=commands.down)

    status = verbs.add_parser("status", help="nodes, tiers, bytes and hit rates of the whole mesh")
    status.add_argument("--socket", help="engine socket of the node to ask (default: any on this host)")
    _cluster(status)
    status.add_argument("--json", action="store_true", help="print JSON")
    status.set_defaults(run=commands.status)

    top = verbs.add_parser(
        "top", help="the mesh live in this terminal: nodes, tiers, rates, why lookups missed"
    )
    top.add_argument("--interval", metavar="SECONDS", type=float, default=2.0, help="between readings (2)")
    top.add_argument("--once", action="store_true", help="print one frame and end")
    top.add_argument("--socket", help="engine socket of the node to ask (default: any on this host)")
    _cluster(top)
    top.set_defaults(run=commands.top)

    doctor = verbs.add_parser(
        "doctor",
        help="whether this host is fit for a node: UCX, memory, network, NVMe; and what to do where not",
        description="Looks at this host as a node with these settings would. Starts nothing. Status 1 where"
        " something keeps a node from working.",
    )
    doctor.add_argument(
        "--set",
        metavar="SETTING=VALUE",
        action="append",
        default=[],
        help="a setting that the node is to have (see the README); may be repeated",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.set_defaults(run=commands.doctor)

    lookup = verbs.add_parser(
        "lookup",
        help="which chunks of a prompt the mesh holds, where, and why not",
        description="Looks a prompt up as an engine would, without fetching anything.",
    )
    lookup.add_argument(
        "tokens",
        metavar="FILE",
        help="token ids, separated by white space or as a JSON list; - for standard input",
    )
    lookup.add_argument("--model", help="of the namespace to ask in (default: the only one the mesh knows)")
    lookup.add_argument("--dtype", help="of the namespace, where a model has several")
    lookup.add_argument("--tenant", help="the tenant's salt")
    lookup.add_argument("--chunker", default="content", help=f"{commands.CHUNKERS} (default: content)")
    lookup.add_argument("--exact", action="store_true", help="exact reuse only")
    lookup.add_argument("--socket", help="engine socket of the node to ask (default: any on this host)")
    lookup.add_argument("--json", action="store_true", help="print JSON")
    lookup.set_defaults(run=commands.lookup)
    return parser


def _cluster(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--cluster", metavar="YAML", type=Path, help="of the cluster that this file describes, over SSH"
    )


if __name__ == "__main__":
    sys.exit(main())
