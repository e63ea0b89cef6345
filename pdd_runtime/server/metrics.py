"""What a server says of itself at /metrics, in Prometheus' text form."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from pdd_runtime.errors import EngineError


class Metrics:
    """One reading."""

    def __init__(self, samples: Mapping[str, list[tuple[dict[str, str], float]]]) -> None:
        self._samples = samples

    def __contains__(self, name: str) -> bool:
        """Whether there is any sample of this name, written as the server writes it: `…_total`, `…_bucket`."""
        return name in self._samples

    def value(self, name: str, **labels: str) -> float:
        """The sum of all samples of this name that have these labels, whatever others; 0 where there is none."""
        return sum(value for own, value in self._samples.get(name, ()) if labels.items() <= own.items())

    def labels(self, name: str) -> list[dict[str, str]]:
        """Those of each sample of this name: what is no number is said there."""
        return [own for own, _ in self._samples.get(name, ())]


def scrape(text: str) -> Metrics:
    """Raises `EngineError` for what is not in that form."""
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    except (ValueError, KeyError, IndexError) as error:
        raise EngineError("the server's metrics cannot be read", why=f"{type(error).__name__}: {error}") from error
    return Metrics(samples)
