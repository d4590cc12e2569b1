"""Prometheus: metrics for a scraper, by prometheus-client (``pip install 'kafka-exactly-once[prometheus]'``).

metrics = PrometheusMetrics()
consumer = ExactlyOnceConsumer(..., metrics=metrics)
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import Any

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.metrics_core import GaugeMetricFamily
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError(f"{error}\nInstall it: pip install 'kafka-exactly-once[prometheus]'") from error

from exactly_once._log import about

from .table import METRICS, Metric, Read

logger = logging.getLogger(__name__)


class PrometheusMetrics(Collector):
    """Takes the measurements of every consumer of this process; make it once per registry.

    Consumers of one group in one process need different names (``name=``), or their gauges have the same labels.

    :raises ValueError: when the registry has these metrics already.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
            # Its collector merges files that only counters and histograms write.
            logger.warning(
                "PROMETHEUS_MULTIPROC_DIR is set: a registry of several processes serves the counters of this one, and "
                "none of its gauges, such as exactly_once_bad_partitions; serve them by Endpoints, at a port for each "
                "process",
                extra=about("gauges_unserved"),
            )
        self._registry = registry
        # Of counters and histograms; gauges are made anew whenever they are read.
        self._parents: dict[Metric, Counter | Histogram] = {}
        # Filled as labels are met, by consumers' threads: two that meet at one get the same child from its parent.
        self._children: dict[tuple[Metric, tuple[str, ...]], Any] = {}
        # Replaced, never changed: a scraper's thread goes through it meanwhile.
        self._readers: tuple[Read, ...] = ()
        registry.register(self)
        for metric in METRICS:
            if metric.kind == "counter":
                self._parents[metric] = Counter(metric.name, metric.help, metric.labels, registry=registry)
            elif metric.kind == "histogram":
                self._parents[metric] = Histogram(
                    metric.name, metric.help, metric.labels, registry=registry, buckets=metric.buckets
                )

    def add(self, metric: Metric, amount: float, labels: tuple[str, ...]) -> None:
        """Raise a counter."""
        self._child(metric, labels).inc(amount)

    def observe(self, metric: Metric, value: float, labels: tuple[str, ...]) -> None:
        """Add a value to a histogram."""
        self._child(metric, labels).observe(value)

    def attach(self, read: Read) -> None:
        """Read a consumer's gauges whenever the registry is collected."""
        self._readers = (*self._readers, read)

    def detach(self, read: Read) -> None:
        """Read them no more."""
        self._readers = tuple(r for r in self._readers if r != read)

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Return the gauges without samples, so that the registry has their names."""
        return [_family(metric) for metric in METRICS if metric.kind == "gauge"]

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Read the gauges of every consumer."""
        # The same labels twice would make the whole page invalid; the later consumer wins.
        samples = {(s.metric, s.labels): s.value for read in self._readers for s in read()}
        for metric in METRICS:
            if metric.kind == "gauge":
                family = _family(metric)
                for (of, labels), value in samples.items():
                    if of is metric:
                        family.add_metric(labels, value)
                yield family

    def render(self, accept: str = "") -> tuple[str, bytes]:
        """Return content type and text of the whole registry, in the format that an Accept header asks for."""
        encode, content_type = choose_encoder(accept)
        return content_type, encode(self._registry)

    def _child(self, metric: Metric, labels: tuple[str, ...]) -> Any:
        """Return the series of these labels. They are few, and to have them found costs more than to count."""
        child = self._children.get((metric, labels))
        if child is None:
            child = self._children[metric, labels] = self._parents[metric].labels(*labels)
        return child


def _family(metric: Metric) -> GaugeMetricFamily:
    return GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
