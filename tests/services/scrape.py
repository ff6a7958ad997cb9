"""What Prometheus would read from a process, checked against the table of metrics."""

from __future__ import annotations

import asyncio
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from jigsawrl.metrics import METRICS, Metric

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]

SCRAPE_TIMEOUT_S = 10.0


class Scraped:
    """The samples of one scrape."""

    def __init__(self, text: str) -> None:
        self._samples: Samples = {}
        known = {metric.name: metric for metric in METRICS}
        families = list(text_string_to_metric_families(text))
        assert len({family.name for family in families}) == len(families), "a family came twice"
        for family in families:
            if not family.name.startswith("jigsaw_"):
                continue
            name = family.name + ("_total" if family.type == "counter" else "")
            metric = known[name]
            assert family.type == metric.kind, name
            assert family.documentation, name
            for sample in family.samples:
                assert sample.name in metric.series, sample.name
                assert set(sample.labels) - {"le"} == set(metric.labels), sample
                key = sample.name, frozenset(sample.labels.items())
                assert key not in self._samples, f"told twice: {sample}"
                self._samples[key] = sample.value

    def value(self, metric: Metric, *, part: str = "", **labels: str) -> float | None:
        """Of one series; `part` of a histogram is ``_count``, ``_sum`` or ``_bucket``."""
        return self._samples.get((metric.name + part, frozenset(labels.items())))

    def sum(self, metric: Metric, *, part: str = "", **labels: str) -> float:
        """Over all series that have these labels."""
        wanted = set(labels.items())
        return sum(
            value
            for (name, found), value in self._samples.items()
            if name == metric.name + part and wanted <= found
        )

    def names(self) -> set[str]:
        """Metrics that were told."""
        told = {name for name, _ in self._samples}
        return {metric.name for metric in METRICS if told & set(metric.series)}


def scrape_now(url: str) -> Scraped:
    """As Prometheus does it."""
    with urllib.request.urlopen(url, timeout=SCRAPE_TIMEOUT_S) as response:
        return Scraped(response.read().decode())


async def scrape(url: str) -> Scraped:
    """The same beside the loop that answers."""
    return await asyncio.to_thread(scrape_now, url)
