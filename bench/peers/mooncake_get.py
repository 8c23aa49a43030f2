"""Mooncake's store: `get_into` of an object that another process put, over its tcp transport."""

from __future__ import annotations

import ctypes
import mmap
import socket
import subprocess
import sys
import time
from pathlib import Path

import protocol

SIZES = [256 << 10, 1 << 20, 16 << 20, 64 << 20]
SEGMENT_BYTES, BUFFER_BYTES = 512 << 20, 128 << 20
SLICE = bytes(range(251))


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def pattern(nbytes: int) -> bytes:
    return (SLICE * (nbytes // len(SLICE) + 1))[:nbytes]


def store(segment_bytes: int, master: str):
    from mooncake.store import MooncakeDistributedStore

    made = MooncakeDistributedStore()
    name = f"127.0.0.1:{free_port()}"
    status = made.setup(name, "P2PHANDSHAKE", segment_bytes, BUFFER_BYTES, "tcp", "", master)
    if status:
        raise RuntimeError(f"setup failed: {status}")
    return made


def be_holder(read, write) -> None:
    holder = store(SEGMENT_BYTES, read())
    for nbytes in SIZES:
        if holder.put(f"body-{nbytes}", pattern(nbytes)):
            raise RuntimeError(f"put of {nbytes} bytes failed")
    write("stored")
    read()  # end of file: the reader is done


def main() -> None:
    import mooncake

    with protocol.child() as (pid, read, write):
        if pid == 0:
            be_holder(read, write)
            return
        port = free_port()
        master = [str(Path(mooncake.__file__).parent / "mooncake_master"), f"-rpc_port={port}"]
        master += [f"-metrics_port={free_port()}", "-rpc_address=127.0.0.1", "-default_kv_lease_ttl=600000"]
        with subprocess.Popen(master, stdout=sys.stderr, stderr=sys.stderr) as process:
            try:
                wait_for(port, process)
                write(f"127.0.0.1:{port}")
                if read() != "stored":
                    raise RuntimeError("the holder did not store")
                serve(store(0, f"127.0.0.1:{port}"))
            finally:
                process.terminate()


def wait_for(port: int, process: subprocess.Popen) -> None:
    for _ in range(200):
        with socket.socket() as sock:
            if not sock.connect_ex(("127.0.0.1", port)):
                return
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise RuntimeError("mooncake_master does not listen")


def serve(reader) -> None:
    dest = mmap.mmap(-1, max(SIZES))
    address = ctypes.addressof(ctypes.c_char.from_buffer(dest))
    reader.register_buffer(address, max(SIZES))

    def measure(nbytes: int, count: int) -> float:
        started_s = time.perf_counter()
        for _ in range(count):
            got = reader.get_into(f"body-{nbytes}", address, nbytes)
            if got != nbytes:
                raise RuntimeError(f"get_into returned {got}")
        seconds = (time.perf_counter() - started_s) / count
        if dest[:nbytes] != pattern(nbytes):
            raise RuntimeError("wrong bytes")
        return seconds

    protocol.serve(measure)


main()
