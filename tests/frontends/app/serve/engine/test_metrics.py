"""Metrics in the text format of Prometheus."""

from __future__ import annotations

from pathlib import Path

import openai

from weft.backends.runtime.core.prefixes import BLOCK
from weft.frontends.app.serve.engine.metrics import Counter, Gauge, Histogram, Metrics
from weft.frontends.app.serve.server import Server

from ..serving import NAME, http, served
from ..serving import client as official


def test_health_and_metrics_after_requests(server: Server, client: openai.OpenAI) -> None:
    client.completions.create(model=NAME, prompt="once", max_tokens=3, temperature=0)
    with http(server) as plain:
        assert plain.get("/health").json() == {"status": "ok"}
        response = plain.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = response.text.splitlines()
    samples = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}
    assert samples['weft_requests_total{state="ok"}'] >= 1 and samples["weft_running"] == samples["weft_waiting"] == 0
    answers = sum(value for name, value in samples.items() if name.startswith("weft_answers_total"))
    assert answers == samples["weft_time_to_first_token_seconds_count"] == samples["weft_answer_seconds_count"]
    assert samples["weft_generated_tokens_total"] == 3 and samples["weft_prompt_tokens_total"] == 4
    buckets = [value for name, value in samples.items() if name.startswith("weft_batch_rows_bucket")]
    assert buckets == sorted(buckets) and buckets[-1] == samples["weft_batch_rows_count"]
    kinds = {line.split()[2]: line.split()[3] for line in lines if line.startswith("# TYPE")}
    assert kinds["weft_batch_rows"] == "histogram" and kinds["weft_running"] == "gauge"


def test_stored_prefixes_are_counted(folder: Path) -> None:
    """The second prompt begins with two blocks of the first; of its three answers, only the first is counted."""
    with served(folder) as server, official(server) as client, http(server) as plain:
        usages = [
            client.completions.create(model=NAME, prompt=prompt, max_tokens=3, temperature=0, n=n).usage
            for prompt, n in (("a" * 150, 1), ("a" * 140, 3))
        ]
        samples = dict(line.rsplit(" ", 1) for line in plain.get("/metrics").text.splitlines())
    assert [usage.prompt_tokens_details.cached_tokens for usage in usages if usage] == [0, 128]  # type: ignore[union-attr]  # weft's own server fills it
    assert samples["# TYPE weft_prefix_tokens_total"] == samples["# TYPE weft_prefix_hits_total"] == "counter"
    assert (samples["weft_prefix_hits_total"], samples["weft_prefix_tokens_total"]) == ("3", str(3 * 128))
    assert int(samples["weft_prefix_bytes"]) == 2 * 2 * 2 * 2 * BLOCK * 12 * 4  # blocks, layers, keys and values, heads


def test_drafted_tokens_are_counted(folder: Path) -> None:
    fields = {"model": NAME, "prompt": "x", "max_tokens": 60, "temperature": 0, "logit_bias": {"70": 100}}
    for most in (8, 0):
        with served(folder, prompt_lookup=most) as server, http(server) as plain:
            assert plain.post("/v1/completions", json=fields).status_code == 200
            lines = plain.get("/metrics").text.splitlines()
        samples = {
            line.split()[0]: int(line.split()[1]) for line in lines if "ed_tokens_total " in line and line[0] != "#"
        }
        assert (samples["weft_accepted_tokens_total"] > 20) == (most > 0)
        assert samples["weft_drafted_tokens_total"] >= samples["weft_accepted_tokens_total"]


def test_counters_with_and_without_a_label() -> None:
    plain, labelled = Counter("n", "Help."), Counter("ends", "Help.", "state")
    assert [*plain.format_samples()] == ["n 0"] and [*labelled.format_samples()] == []
    plain.add(2.5)
    for state in ("ok", "failed", "ok"):
        labelled.add(1, state)
    assert [*plain.format_samples()] == ["n 2.5"]
    assert [*labelled.format_samples()] == ['ends{state="failed"} 1', 'ends{state="ok"} 2']


def test_histogram_counts_observations_up_to_each_bound() -> None:
    histogram = Histogram("t", "Help.", (0.5, 1))
    for value in (0.25, 0.5, 0.75, 4):  # a bound belongs to its own bucket
        histogram.observe(value)
    assert [*histogram.format_samples()] == [
        't_bucket{le="0.5"} 2',
        't_bucket{le="1"} 3',
        't_bucket{le="+Inf"} 4',
        "t_sum 5.5",
        "t_count 4",
    ]


def test_gauges_are_read_when_metrics_are_formatted() -> None:
    metrics, values = Metrics(), [1, 7]
    metrics.add_gauge("weft_running", "Answers in work.", lambda: values.pop())
    lines = metrics.format_text().splitlines()
    at = lines.index("weft_running 7")
    assert lines[at - 2 : at] == ["# HELP weft_running Answers in work.", "# TYPE weft_running gauge"]
    assert "weft_running 1" in metrics.format_text() and [*Gauge("g", "", lambda: 0.5).format_samples()] == ["g 0.5"]
