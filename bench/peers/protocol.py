"""How a peer's script talks with the benchmark: a line a measurement in, a line of JSON out.

Scripts here run in the peers' own environment, without p2pcache.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator

_answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what libraries and other processes print is no answer


def serve(measure: Callable[[int, int], float]) -> None:
    """Answer `NBYTES COUNT` with the seconds that one body of that size took, until the input ends."""
    print(json.dumps({"ready": True}), file=_answers, flush=True)
    for line in sys.stdin:
        nbytes, count = map(int, line.split())
        try:
            answer = {"seconds": measure(nbytes, count)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=_answers, flush=True)


@contextlib.contextmanager
def child() -> Iterator[tuple[int, Callable[[], str], Callable[[str], None]]]:
    """Fork. In the parent: (pid, read a line from the child, write one); in the child pid is 0."""
    down, up = os.pipe(), os.pipe()
    pid = os.fork()
    source, sink = (up[0], down[1]) if pid else (down[0], up[1])
    for unused in (down[0], up[1]) if pid else (down[1], up[0]):
        os.close(unused)
    with os.fdopen(source) as reader, os.fdopen(sink, "w") as writer:

        def write(line: str) -> None:
            print(line, file=writer, flush=True)

        try:
            yield pid, lambda: reader.readline().rstrip("\n"), write
        finally:
            if pid == 0:
                os._exit(0)
    os.waitpid(pid, 0)
