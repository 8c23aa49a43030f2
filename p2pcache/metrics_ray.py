"""A node's metrics on Ray's own metrics endpoint, from within its actor's process.

Ray puts `ray_` in front of every name and adds labels of its own (`WorkerId`, `NodeAddress`, ...).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from ray.util.metrics import Counter, Gauge

from p2pcache.metrics import Sample, samples

_log = logging.getLogger(__name__)
EXPORT_S = 2.0

_Key = tuple[str, tuple[tuple[str, str], ...]]  # a series: its name and labels


class RayExporter:
    """Turns one node's statuses into Ray's counters and gauges. One a process: names are global there."""

    def __init__(self) -> None:
        self._series: dict[str, Counter | Gauge] = {}
        self._incarnation: Any = None
        self._counted: dict[_Key, float] = {}
        self._levels: set[_Key] = set()  # gauges that were not 0 when last set

    def update(self, status: Mapping[str, Any]) -> None:
        """Export what has changed since the last status. Counts of a new incarnation begin at zero.

        A state that the status does not speak of any more, as of a node that has been drained, is 0.
        """
        if status.get("incarnation") != self._incarnation and "error" not in status:
            self._incarnation = status.get("incarnation")
            self._counted.clear()
        gone, self._levels = self._levels, set()
        for sample in samples(status):
            tags = dict(sample.labels)
            series = self._of(sample)
            if isinstance(series, Gauge):
                series.set(sample.value, tags=tags)
                if sample.value and not sample.suffix:
                    self._levels.add((sample.name, sample.labels))
                continue
            before = self._counted.get((sample.name, sample.labels), 0.0)
            # A count that fell has started anew, whatever the incarnation says.
            more = sample.value - before if sample.value >= before else sample.value
            self._counted[sample.name, sample.labels] = sample.value
            if more > 0:
                series.inc(more, tags=tags)
        for name, labels in gone - self._levels:
            self._series[name].set(0, tags=dict(labels))

    def run(
        self, read: Callable[[], Mapping[str, Any]], stopping: threading.Event, every_s: float = EXPORT_S
    ) -> None:
        """`update` with what `read` returns, every so often, until `stopping` is set. For a thread."""
        while not stopping.wait(every_s):
            try:
                self.update(read())
            except Exception as error:  # a node that is closing, or a fault of ours: metrics can wait
                _log.debug("metrics were not exported this time: %r", error)

    def _of(self, sample: Sample) -> Counter | Gauge:
        """The Ray metric of a sample. A histogram's series are gauges: Ray would rename counters."""
        series = self._series.get(sample.name)
        if series is None:
            metric = sample.metric
            kind = Counter if metric.kind == "counter" else Gauge
            keys = ("node", *metric.labels, *(["le"] if sample.suffix == "_bucket" else []))
            series = self._series[sample.name] = kind(sample.name, metric.help, tag_keys=keys)
        return series
