"""Telling the owners what this node holds: in batches, again before they forget, and after a View.

Messages to one owner go out one batch at a time; sequence numbers make their order safe. A lost
batch is not repeated: entries are hints. The next re-publish repairs a lost publish; what a lost
withdrawal leaves behind costs a refused ticket until its time to live is over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from random import Random

from p2pcache.config import NodeConfig
from p2pcache.core.membership import View
from p2pcache.io.ports import Control
from p2pcache.node.counters import Counters
from p2pcache.node.shard import Shard
from p2pcache.node.wireform import body_to_wire
from p2pcache.types import BodyInfo, ContentKey, ExactKey, Fenced, RemoteError, Tier

_log = logging.getLogger(__name__)
BATCH_MAX = 2048
SILENT_MIN_S = 1.0

_Held = tuple[BodyInfo, Tier, int]
_Gone = tuple[ContentKey, ExactKey, int]


class Publisher:
    """One node's outgoing hints. `held` and `gone` only queue; `run` sends."""

    def __init__(
        self,
        config: NodeConfig,
        control: Control,
        shard: Shard,
        counters: Counters,
        rng: Random,
        holdings: Callable[[], Iterable[tuple[BodyInfo, Tier]]],
    ):
        """holdings: everything this node holds now, best tier each."""
        self._config = config
        self._control = control
        self._shard = shard
        self._counters = counters
        self._rng = rng
        self._holdings = holdings
        self._view = View()
        self._seq = 0
        self._held: dict[str, list[_Held]] = {}
        self._gone: dict[str, list[_Gone]] = {}
        self._resync: set[str] = set()  # owners to tell that they now know all we hold
        self._wake = asyncio.Event()
        self._sent = 0  # rounds that have ended
        self._sending = False  # a round is under way
        self._silent = False  # what was queued has been dropped since the owners last heard all
        self._silent_s = float("-inf")  # when that began
        self.cut_off: Callable[[], bool] = lambda: False
        self.on_fenced: Callable[[], None] = lambda: None
        self._round_ended = asyncio.Condition()
        self._task: asyncio.Task | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def held(self, body: BodyInfo, tier: Tier) -> None:
        """This node now has the body, whole, in this tier (law 2: after the bytes)."""
        self._seq += 1
        for owner in self._view.ring.owners(body.content):
            self._held.setdefault(owner, []).append((body, tier, self._seq))
        self._wake.set()

    def gone(self, body: BodyInfo) -> None:
        """This node is about to lose the body (law 2: before the bytes)."""
        self._seq += 1
        for owner in self._view.ring.owners(body.content):
            self._gone.setdefault(owner, []).append((body.content, body.exact, self._seq))
        self._wake.set()

    def on_view(self, view: View) -> None:
        """Re-publish what has other owners now, or the same owner as a new incarnation."""
        old, self._view = self._view, view
        came, _ = view.changed_since(old)
        for body, tier in self._holdings():
            before = old.ring.owners(body.content)
            now = view.ring.owners(body.content)
            changed = [o for o in now if o in came or o not in before]
            if changed:
                self._seq += 1
            for owner in changed:
                self._held.setdefault(owner, []).append((body, tier, self._seq))
        self._resync = set(view.members)
        for queue in (self._held, self._gone):
            for owner in [o for o in queue if o not in view.members]:
                del queue[owner]
        self._wake.set()

    def look_again(self) -> None:
        """This node may speak again, perhaps: if so, publish all it holds, since nobody heard the rest."""
        # An owner that lags behind may tell this node off for a moment: do not answer each time with all.
        waited_s = asyncio.get_running_loop().time() - self._silent_s
        if self._silent and not self.cut_off() and waited_s >= SILENT_MIN_S:
            self._silent = False
            for body, tier in self._holdings():
                self.held(body, tier)
            self._resync = set(self._view.members)
            self._wake.set()

    @property
    def lost(self) -> int:
        """Batches to owners that were lost so far."""
        return self._counters["unpublished"]

    async def flushed(self, deadline_s: float | None = None) -> bool:
        """Wait until all that is queued now has been sent, or lost. False: not by the deadline."""
        pending = bool(self._held or self._gone or self._resync)
        # A round under way may have begun before the last of it was queued; the next one has it all.
        target = self._sent + pending + self._sending
        try:
            async with asyncio.timeout_at(deadline_s), self._round_ended:
                await self._round_ended.wait_for(lambda: self._sent >= target)
        except TimeoutError:
            return False
        return True

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        again_s = loop.time() + self._pause_s()
        while True:
            try:
                async with asyncio.timeout_at(again_s):
                    await self._wake.wait()
            except TimeoutError:
                again_s = loop.time() + self._pause_s()
                for body, tier in self._holdings():
                    self.held(body, tier)
            held, gone, resync = self._held, self._gone, self._resync
            self._held, self._gone, self._resync = {}, {}, set()
            if self._silent or self.cut_off():
                self._silent = True
                self._counters["unpublished"] += bool(held or gone)
                held, gone, resync = {}, {}, set()
            owners = held.keys() | gone.keys() | resync
            self._sending = True
            await asyncio.gather(
                *(self._tell(o, held.get(o, []), gone.get(o, []), o in resync) for o in sorted(owners))
            )
            if not (self._held or self._gone or self._resync):
                self._wake.clear()
            self._sent, self._sending = self._sent + 1, False
            async with self._round_ended:
                self._round_ended.notify_all()

    def _pause_s(self) -> float:
        # Jitter, so that a mesh that started together does not publish together for ever.
        return self._config.republish_s * (0.8 + 0.2 * self._rng.random())

    async def _tell(self, owner: str, held: list[_Held], gone: list[_Gone], resync: bool) -> None:
        view = self._view
        batches = [held[i : i + BATCH_MAX] for i in range(0, len(held), BATCH_MAX)] or [[]]
        try:
            for i in range(0, len(gone), BATCH_MAX):
                part = [list(g) for g in gone[i : i + BATCH_MAX]]
                await self._send(owner, "directory.withdraw", {"bodies": part})
            for i, batch in enumerate(batches):
                last = resync and i == len(batches) - 1
                if not batch and not last:
                    continue
                bodies = [[body_to_wire(body), int(tier), seq] for body, tier, seq in batch]
                mark = view.view_id if last else None
                await self._send(owner, "directory.publish", {"bodies": bodies, "resync": mark})
        except Fenced:
            # Nobody keeps what was in it, so all has to be told anew once this node may speak again.
            self._counters["unpublished"] += 1
            self._silent, self._silent_s = True, asyncio.get_running_loop().time()
            self.on_fenced()
        except RemoteError:
            self._counters["unpublished"] += 1
        except Exception:  # without this loop nothing would be published any more
            self._counters["unpublished"] += 1
            _log.exception("publishing to %s met an error of its own; it goes on", owner)

    async def _send(self, owner: str, op: str, body: dict) -> None:
        peer = self._view.members.get(owner)
        if peer is None:
            return
        if owner == self._shard.me:
            self._shard.handle(op, body, owner, peer.incarnation)
            return
        deadline_s = asyncio.get_running_loop().time() + self._config.rpc_timeout_s
        await self._control.request(peer, op, body, deadline_s)
