"""Metrics as Prometheus reads them."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families


class Exposition:
    """Samples by name and label value, types by family, as prometheus_client's own parser reads them."""

    def __init__(self, text: str) -> None:
        self.samples: dict[str, dict[str, float]] = {}
        self.types: dict[str, str] = {}
        for family in text_string_to_metric_families(text):
            assert family.name not in self.types
            self.types[family.name] = family.type
            assert family.documentation
            for sample in family.samples:
                shown = self.samples.setdefault(sample.name.removeprefix("dflash_"), {})
                shown["".join(sample.labels.values())] = sample.value
        for name, kind in self.types.items():
            if kind == "histogram":
                self._check_histogram(name.removeprefix("dflash_"))

    def _check_histogram(self, name: str) -> None:
        buckets = self.samples[f"{name}_bucket"]
        bounds = [float(bound) for bound in buckets]
        assert bounds == sorted(bounds)
        assert bounds[-1] == float("inf")
        assert list(buckets.values()) == sorted(buckets.values())
        assert buckets["+Inf"] == self[f"{name}_count"]

    def __getitem__(self, name: str) -> float:
        return self.samples[name][""]
