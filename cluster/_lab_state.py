"""The record of a lab: all that it has made, in a file that outlives the command that made it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster import _lab_machine as machine
from cluster._lab_machine import LabError


@dataclass
class Host:
    """One host as recorded: its address, and its processes while it is up."""

    address: str
    supervisor: machine.Process | None = None  # outside: `unshare`, which waits for PID 1
    init: machine.Process | None = None  # PID 1 inside, by its pid outside


@dataclass
class State:
    """All that a lab has made; what down() may remove."""

    subnet: str
    shm_bytes: int
    image: str | None
    wheels: str | None
    boot_id: str
    hosts: dict[str, Host] = field(default_factory=dict)
    namespaces: dict[str, machine.Identity] = field(default_factory=dict)
    folders: dict[str, machine.Identity] = field(default_factory=dict)
    cgroups: dict[str, machine.Identity] = field(default_factory=dict)

    @classmethod
    def of(cls, fields: dict[str, Any]) -> State:
        """From what `dataclasses.asdict` made of one, by way of JSON."""
        fields["hosts"] = {
            name: Host(host["address"], *(host[key] and tuple(host[key]) for key in ("supervisor", "init")))
            for name, host in fields["hosts"].items()
        }
        for kind in ("namespaces", "folders", "cgroups"):
            fields[kind] = {name: tuple(identity) for name, identity in fields[kind].items()}
        return cls(**fields)


@dataclass(frozen=True)
class Record:
    """Where a lab keeps its state and its files, and how its things are named."""

    name: str
    folder: Path

    def named(self, part: str = "") -> str:
        """The name of a namespace or cgroup of this lab; these are global to the machine."""
        return f"p2pcache-lab-{self.name}" + (part and f"-{part}")

    def files(self, host: str) -> Path:
        """The folder of a host's files, the private folders among them."""
        return self.folder / host

    @property
    def etc(self) -> Path:
        """The folder of what stands in for files in every host's /etc."""
        return self.folder / "etc"

    @property
    def key(self) -> Path:
        """The launcher's private key, which every host takes; the public one lies beside it."""
        return self.folder / "keys" / "id_ed25519"

    @property
    def path(self) -> Path:
        """The file that holds the state."""
        return self.folder / "state.json"

    @property
    def lock(self) -> Path:
        """The file that whoever changes the lab holds locked."""
        return self.folder / "lock"

    def read(self) -> State:
        """The state. Raises LabError if there is no such lab."""
        try:
            return State.of(json.loads(self.path.read_text()))
        except FileNotFoundError:
            raise LabError(f"there is no lab {self.name} ({self.folder})") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise LabError(f"{self.path} is no record of a lab") from None

    def write(self, state: State) -> None:
        """Replace the state; whoever reads meanwhile gets the old one or the new one."""
        unfinished = self.path.with_suffix(".new")
        unfinished.write_text(json.dumps(dataclasses.asdict(state), indent=1))
        unfinished.replace(self.path)

    @contextlib.contextmanager
    def changing(self) -> Iterator[State]:
        """The state, under the lock; written back in the end, whatever happens. Raises LabError."""
        self.read()  # the lock must not make a file where there is no lab
        with machine.locked(self.lock):
            state = self.read()
            if state.boot_id != machine.boot_id():
                raise LabError(f"the machine was restarted since lab {self.name} was made: take it down")
            try:
                yield state
            finally:
                self.write(state)

    def host(self, state: State, name: str) -> Host:
        """What is recorded of a host. Raises LabError if there is none of that name."""
        if name not in state.hosts:
            raise LabError(f"lab {self.name} has no host {name}, only {', '.join(state.hosts)}")
        return state.hosts[name]

    def init(self, state: State, name: str) -> machine.Process:
        """PID 1 of a host. Raises LabError if the host is down."""
        init = self.host(state, name).init
        if init is None or not machine.alive(init):
            raise LabError(f"{name} is down")
        return init
