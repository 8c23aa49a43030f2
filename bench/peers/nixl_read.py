"""NIXL: READ of another process's registered memory through its UCX backend."""

from __future__ import annotations

import base64
import ctypes
import mmap
import os
import time

os.environ.setdefault("UCX_TLS", "tcp")

import protocol  # noqa: E402 - after the settings that UCX reads as it is loaded

BYTES_MAX = 64 << 20
SLICE = bytes(range(251))


def address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def agent(name: str):
    from nixl_cu12._api import nixl_agent, nixl_agent_config

    return nixl_agent(name, nixl_agent_config(backends=["UCX"]))


def be_holder(read, write) -> None:
    memory = mmap.mmap(-1, BYTES_MAX)
    memory[:] = (SLICE * (BYTES_MAX // len(SLICE) + 1))[:BYTES_MAX]
    holder = agent("holder")
    holder.register_memory([(address_of(memory), BYTES_MAX, 0, "")], mem_type="DRAM")
    write(base64.b64encode(holder.get_agent_metadata()).decode())
    write(str(address_of(memory)))
    read()  # end of file: the reader is done


def main() -> None:
    with protocol.child() as (pid, read, write):
        if pid == 0:
            be_holder(read, write)
            return
        dest = mmap.mmap(-1, BYTES_MAX)
        reader = agent("reader")
        reader.register_memory([(address_of(dest), BYTES_MAX, 0, "")], mem_type="DRAM")
        peer = reader.add_remote_agent(base64.b64decode(read()))
        peer = peer.decode() if isinstance(peer, bytes) else peer
        source = int(read())

        def measure(nbytes: int, count: int) -> float:
            here = reader.get_xfer_descs([(address_of(dest), nbytes, 0)], mem_type="DRAM")
            there = reader.get_xfer_descs([(source, nbytes, 0)], mem_type="DRAM")
            handle = reader.initialize_xfer("READ", here, there, peer)
            started_s = time.perf_counter()
            for _ in range(count):
                state = reader.transfer(handle)
                while state == "PROC":
                    state = reader.check_xfer_state(handle)
                if state != "DONE":
                    raise RuntimeError(f"the transfer ended in {state}")
            seconds = (time.perf_counter() - started_s) / count
            reader.release_xfer_handle(handle)
            if dest[:nbytes] != (SLICE * (nbytes // len(SLICE) + 1))[:nbytes]:
                raise RuntimeError("wrong bytes")
            return seconds

        protocol.serve(measure)


main()
