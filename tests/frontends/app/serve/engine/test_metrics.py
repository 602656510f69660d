"""Metrics in the text format of Prometheus."""

from __future__ import annotations

import openai

from weft.frontends.app.serve.server import Server

from ..serving import NAME, http


def test_health_and_metrics_after_requests(server: Server, client: openai.OpenAI) -> None:
    client.completions.create(model=NAME, prompt="once", max_tokens=3)
    with http(server) as plain:
        assert plain.get("/health").json() == {"status": "ok"}
        response = plain.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = response.text.splitlines()
    samples = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}
    assert samples['weft_requests_total{state="ok"}'] >= 1 and samples["weft_running"] == samples["weft_waiting"] == 0
    answers = sum(value for name, value in samples.items() if name.startswith("weft_answers_total"))
    assert answers == samples["weft_time_to_first_token_seconds_count"] == samples["weft_answer_seconds_count"]
    assert samples["weft_generated_tokens_total"] >= 3 and samples["weft_prompt_tokens_total"] >= 4
    buckets = [value for name, value in samples.items() if name.startswith("weft_batch_rows_bucket")]
    assert buckets == sorted(buckets) and buckets[-1] == samples["weft_batch_rows_count"]
    kinds = {line.split()[2]: line.split()[3] for line in lines if line.startswith("# TYPE")}
    assert kinds["weft_batch_rows"] == "histogram" and kinds["weft_running"] == "gauge"
