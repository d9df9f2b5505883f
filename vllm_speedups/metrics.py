"""Prometheus metrics of this process and those that it started, beside vLLM's own in the default registry."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Callable

from . import reporter

# What a cache holds rises and falls; every other number only rises.
_GAUGES = ("bytes", "grammars", "masks")


class Collector:
    """Reads the counters when somebody scrapes, and not before. `state()` is that of this process."""

    def __init__(self, state: Callable[[], dict]):
        self._state = state

    def describe(self) -> list:
        """The families without samples, so that registering asks nobody."""
        return list(self._families())

    def collect(self) -> Iterator:
        """The families of this process and its descendants: `process` is the process id."""
        applied, events, held = self._families()
        own = os.getpid()
        others = (reporter.ask(pid) for pid in reporter.pids(own) if pid != own)
        for state in (self._state(), *others):
            for patch in state["patches"] if state else ():
                labels = [patch["name"], str(state["pid"])]
                applied.add_metric(labels, patch["status"] == "applied")
                numbers = {name: patch[name] for name in ("verified", "differences", "failures")}
                for name, value in {**patch["counters"], **numbers}.items():
                    family = held if name in _GAUGES else events
                    family.add_metric([*labels, name.replace(" ", "_")], value)
        yield from (applied, events, held)

    @staticmethod
    def _families() -> tuple:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        return (
            GaugeMetricFamily("vllm_speedups_applied", "1 where the patch is in force", labels=["patch", "process"]),
            CounterMetricFamily(
                "vllm_speedups_events", "What a patch did, by kind", labels=["patch", "process", "event"]
            ),
            GaugeMetricFamily(
                "vllm_speedups_held", "What the caches of a patch hold", labels=["patch", "process", "what"]
            ),
        )
