"""What /metrics says, parsed by Prometheus' own parser, and what documents say about it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.api.conftest import Server

PATH = "/metrics"
_SUFFIXES = ("_bucket", "_sum", "_count")


@dataclass(frozen=True)
class Scrape:
    """One reply, by family; the parser leaves `_total` out of counters' names, and keeps it in those of samples."""

    families: Mapping[str, Metric]

    @property
    def names(self) -> set[str]:
        """As they are asked for in queries, without the suffixes of histograms."""
        return {f"{name}_total" if metric.type == "counter" else name for name, metric in self.families.items()}

    def value(self, name: str, **labels: str) -> float:
        """The value of one sample."""
        found = [
            sample.value
            for family in self.families.values()
            for sample in family.samples
            if sample.name == name and sample.labels == labels
        ]
        assert len(found) == 1, (name, labels, found)
        return found[0]

    def values(self, name: str, label: str) -> dict[str, float]:
        """The values of all samples of a name, by the value of a label."""
        samples = [sample for family in self.families.values() for sample in family.samples if sample.name == name]
        return {sample.labels[label]: sample.value for sample in samples}


async def scrape(server: Server) -> Scrape:
    """What a Prometheus server would get now."""
    async with aiohttp.ClientSession() as http, http.get(server.url + PATH) as response:
        assert response.status == 200
        text = await response.text()
    return Scrape({family.name: family for family in text_string_to_metric_families(text)})


def metrics_named_in(text: str) -> set[str]:
    """Names of metrics that a text speaks of, without the suffixes of histograms."""
    found = re.findall(r"\b(?:chairlift|process)_[a-z_]*[a-z]\b", text)
    return {next((name.removesuffix(end) for end in _SUFFIXES if name.endswith(end)), name) for name in found}
