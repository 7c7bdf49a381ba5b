"""What the connector did, as vLLM's own logs and Prometheus metrics show it."""

from __future__ import annotations

import threading
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

__all__ = ["COUNTERS", "Counters", "KitePromMetrics", "KiteStats"]

COUNTERS: Final = {
    "lookups": "Requests that were looked up in KITE's pool",
    "lookups_late": "Lookups given up because the tiers took too long to answer",
    "loaded_blocks": "KV blocks loaded from KITE's pool",
    "loaded_tokens": "Tokens whose KV was loaded from KITE's pool",
    "failed_blocks": "KV blocks that could not be loaded and were computed again",
    "skipped_blocks": "KV blocks that are in KITE's pool, but slower to load than to compute",
    "load_seconds": "Seconds that loads took, added up",
    "saved_blocks": "KV blocks given to KITE's pool",
    "known_blocks": "KV blocks that KITE's pool had already when they were computed",
    "dropped_blocks": "KV blocks that were not kept because too much was on its way to KITE's pool",
}
"""Name of each counter, and what it counts."""


class Counters:
    """Adds up in any thread, and gives what came since it was last asked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}
        self._totals: dict[str, float] = {}

    def add(self, name: str, value: float = 1) -> None:
        """Adds to a counter of `COUNTERS`."""
        with self._lock:
            self._values[name] = self._values.get(name, 0) + value
            self._totals[name] = self._totals.get(name, 0) + value

    def totals(self) -> dict[str, float]:
        """All counters since the start."""
        with self._lock:
            return dict(self._totals)

    def take(self) -> dict[str, float]:
        """The counters that moved, which start from 0 again."""
        with self._lock:
            taken, self._values = self._values, {}
        return taken


class KiteStats(KVConnectorStats):  # type: ignore[misc]
    """Counters of one interval, in `data`."""

    def reset(self) -> None:
        """Starts from 0."""
        self.data: dict[str, float] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Adds those of another worker, or of a later interval."""
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log."""
        return {name: self.data[name] for name in COUNTERS if name in self.data}

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not self.data


class KitePromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """``vllm:kite_...`` counters, one series per engine."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._series: dict[str, dict[int, Any]] = {}
        for name, text in COUNTERS.items():
            counter = self._counter_cls(name=f"vllm:kite_{name}", documentation=f"{text}.", labelnames=labelnames)
            values = per_engine_labelvalues.items()
            self._series[name] = {engine: counter.labels(*labels) for engine, labels in values}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds the counters of one interval."""
        for name, value in transfer_stats_data.items():
            if name in self._series and engine_idx in self._series[name]:
                self._series[name][engine_idx].inc(value)
