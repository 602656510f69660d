"""Counters, gauges and histograms in Prometheus' text format, version 0.0.4."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from threading import Lock

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
ROWS = (1, 2, 4, 8, 16, 32, 64)


class Counter:
    """A counter, which only grows; with a label, one counter per label value."""

    kind = "counter"

    def __init__(self, name: str, help: str, label: str = "") -> None:
        self.name, self.help, self._label = name, help, label
        self._values: dict[str, float] = {} if label else {"": 0}

    def add(self, amount: float = 1, value: str = "") -> None:
        """Add `amount` to the counter, or to that of the label's `value`."""
        self._values[value] = self._values.get(value, 0) + amount

    def format_samples(self) -> Iterator[str]:
        """Yield the lines of the samples."""
        for value, number in sorted(self._values.items()):
            label = f'{{{self._label}="{value}"}}' if self._label else ""
            yield f"{self.name}{label} {number:g}"


class Gauge:
    """A metric whose value a function returns on request; its `kind` is counter if the value only grows."""

    def __init__(self, name: str, help: str, read: Callable[[], float], kind: str = "gauge") -> None:
        self.name, self.help, self._read, self.kind = name, help, read, kind

    def format_samples(self) -> Iterator[str]:
        """Yield the line of the sample."""
        yield f"{self.name} {self._read():g}"


class Histogram:
    """Counts of observations by upper bounds."""

    kind = "histogram"

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        self.name, self.help, self._bounds = name, help, bounds
        self._counts, self._sum = [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        """Count an observation."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def format_samples(self) -> Iterator[str]:
        """Yield the lines of the samples: counts up to each bound, sum and count."""
        total = 0
        for bound, count in zip((*(f"{bound:g}" for bound in self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            yield f'{self.name}_bucket{{le="{bound}"}} {total}'
        yield f"{self.name}_sum {self._sum:g}"
        yield f"{self.name}_count {total}"


class Metrics:
    """The metrics of /metrics. Threads update them under one lock, so that sums are consistent."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.requests = Counter("weft_requests_total", "Requests by how they ended.", "state")
        self.answers = Counter("weft_answers_total", "Answers by how they ended.", "finish")
        self.prompt_tokens = Counter("weft_prompt_tokens_total", "Tokens of prompts that were read.")
        self.generated_tokens = Counter("weft_generated_tokens_total", "Tokens that were generated.")
        self.first_token = Histogram(
            "weft_time_to_first_token_seconds", "Time from a request to the first token of an answer.", SECONDS
        )
        self.answer_time = Histogram("weft_answer_seconds", "Time from a request to the end of an answer.", SECONDS)
        self.batch = Histogram("weft_batch_rows", "Rows of a decoding step, or sequences per call of an encoder.", ROWS)
        self._gauges: list[Gauge] = []

    def add_gauge(self, name: str, help: str, read: Callable[[], float], kind: str = "gauge") -> None:
        """Add a gauge (or, by `kind`, a counter) with description `help`, whose value `read` returns."""
        self._gauges.append(Gauge(name, help, read, kind))

    def format_text(self) -> str:
        """Return all metrics in Prometheus' text format."""
        fixed = (self.requests, self.answers, self.prompt_tokens, self.generated_tokens)
        with self.lock:
            lines = []
            metrics: list[Counter | Gauge | Histogram] = [*fixed, *self._gauges]
            for metric in (*metrics, self.first_token, self.answer_time, self.batch):
                lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"]
                lines += metric.format_samples()
        return "\n".join(lines) + "\n"
