"""Scores over HTTP: the shapes of vLLM and text-embeddings-inference, and the numbers of the model itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

import weft
from weft.frontends.app.serve.server import Server

from .....e2e.head_models import save
from ..serving import served

DOCUMENTS = ["the cat sat on the mat .", "a dog ran", "who was it ?"]


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranker")
    save(folder, "BertForSequenceClassification", num_labels=1)
    weft.compile(folder, folder / "out")
    return folder / "out"


@pytest.fixture(scope="module")
def server(ranker: Path) -> Iterator[Server]:
    with served(ranker) as running:
        yield running


def post(server: Server, path: str, **body: Any) -> Any:
    return httpx2.post(f"http://127.0.0.1:{server.port}{path}", json=body)


def test_rerank_has_the_shape_of_vllm(server: Server, ranker: Path) -> None:
    want = weft.load(ranker).rank("a dog", DOCUMENTS)
    got = post(server, "/v1/rerank", query="a dog", documents=DOCUMENTS, top_n=2).json()
    assert got["id"].startswith("rerank-") and got["usage"]["total_tokens"] > 0
    assert [r["index"] for r in got["results"]] == [r.index for r in want[:2]]
    assert [r["relevance_score"] for r in got["results"]] == pytest.approx([r.score for r in want[:2]], abs=1e-6)
    assert got["results"][0]["document"] == {"text": DOCUMENTS[want[0].index]}


def test_rerank_with_texts_has_the_shape_of_tei(server: Server, ranker: Path) -> None:
    want = weft.load(ranker).rank("a dog", DOCUMENTS)
    got = post(server, "/rerank", query="a dog", texts=DOCUMENTS, return_text=True).json()
    assert [(r["index"], r["text"]) for r in got] == [(r.index, DOCUMENTS[r.index]) for r in want]
    assert [r["score"] for r in got] == pytest.approx([r.score for r in want], abs=1e-6)


def test_predict_has_the_shape_of_tei(tmp_path: Path) -> None:
    save(tmp_path, "BertForSequenceClassification", num_labels=3)
    weft.compile(tmp_path, tmp_path / "out")
    model, pair = weft.load(tmp_path / "out"), ["a dog", "who was it ?"]
    wanted = [model.classify(text)[0] for text in (DOCUMENTS[0], tuple(pair))]

    def scores(entries: list[dict[str, Any]]) -> dict[str, float]:
        assert [e["score"] for e in entries] == sorted((e["score"] for e in entries), reverse=True)
        return {entry["label"]: entry["score"] for entry in entries}

    with served(tmp_path / "out") as server:
        for inputs, alone in ((DOCUMENTS[0], 0), (pair, 1)):
            assert scores(post(server, "/predict", inputs=inputs).json()) == pytest.approx(wanted[alone], abs=1e-6)
        several = post(server, "/predict", inputs=[[DOCUMENTS[0]], pair], truncate=True).json()
        assert [scores(entries) for entries in several] == [pytest.approx(want, abs=1e-6) for want in wanted]
        raw = scores(post(server, "/predict", inputs=DOCUMENTS[0], raw_scores=True).json())
        powers = {label: np.exp(logit) for label, logit in raw.items()}
        shares = {label: power / sum(powers.values()) for label, power in powers.items()}
        assert shares == pytest.approx(wanted[0], abs=1e-6) and raw != pytest.approx(wanted[0], abs=0.01)
        for inputs in ([], [[]], ["a", "b", "c"], [["a"], "b"], 3, None):
            assert post(server, "/predict", inputs=inputs).status_code == 400


def test_scores_and_labels(server: Server, ranker: Path) -> None:
    model = weft.load(ranker)
    got = post(server, "/v1/score", text_1="a dog", text_2=DOCUMENTS).json()
    want = model.scores([("a dog", text) for text in DOCUMENTS])
    assert [r["score"] for r in got["data"]] == pytest.approx(want, abs=1e-6)
    got = post(server, "/v1/classify", input=DOCUMENTS[0]).json()
    (scores,) = model.classify(DOCUMENTS[0])
    (line,) = got["data"]
    assert (line["label"], line["num_classes"]) == ("LABEL_0", 1)
    assert line["probs"] == pytest.approx([scores["LABEL_0"]], abs=1e-6)


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/rerank", {"query": "a"}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": []}, "the array is empty"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "the same number as in"),
        ("/v1/classify", {"input": "the " * 40}, "longer than the maximum"),
        ("/v1/classify", {"input": "a", "model": "other"}, "other"),
        ("/v1/classify", {"input": "a", "what": 1}, "what"),
        ("/v1/classify", {"input": "a", "metadata": {}}, "Unrecognized request argument supplied: metadata"),
        ("/rerank", {"query": "a", "texts": ["b"], "top_n": 1}, "Unrecognized request argument supplied: top_n"),
    ],
)
def test_wrong_requests_are_refused(server: Server, path: str, body: dict[str, Any], said: str) -> None:
    answer = post(server, path, **body)
    assert answer.status_code in (400, 404) and said in answer.json()["error"]["message"]


def test_a_model_without_a_head_scores_nothing(folder: Path) -> None:
    with served(folder) as server:
        answer = post(server, "/v1/rerank", query="a", documents=["b"])
        assert answer.status_code == 400 and "no classification head" in answer.json()["error"]["message"]
