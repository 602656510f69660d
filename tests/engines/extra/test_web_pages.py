"""Pages of target web in Chromium, from a server that sends nothing but their folders."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from playwright.sync_api import Browser, Page

import weft

from ...e2e.families import ROWS
from ...e2e.head_models import BERT, save, tokenizer
from ..folder_server import serve
from ..node import MODULES

ISOLATED = {"Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Embedder-Policy": "require-corp"}
MOST_BYTES = 115_000_000  # of the folder of SmolLM2
FIRST_TOKEN = 3.0  # seconds
Open = Callable[..., Page]


@pytest.fixture
def visit(browser: Browser) -> Iterator[Open]:
    """Opens the page of a folder and waits for its model; a request to another server, or a message, fails."""
    servers: list[ThreadingHTTPServer] = []
    said: list[str] = []
    page = browser.new_page()

    def visit(folder: Path, isolated: bool = True, query: str = "") -> Page:
        server, own = serve(folder, ISOLATED if isolated else {})
        servers.append(server)
        page.set_default_timeout(300_000)  # a watchdog only
        allowed = (own, f"blob:{own}", "data:")
        page.context.on("request", lambda asked: None if asked.url.startswith(allowed) else said.append(asked.url))
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(own + query)
        page.wait_for_function("!document.querySelector('#text').disabled || !document.querySelector('#error').hidden")
        assert page.inner_text("#error") == ""
        return page

    yield visit
    page.close()
    for server in servers:
        server.shutdown()
        server.server_close()
    assert said == []


def answer(page: Page, text: str, tokens: int = 24) -> str:
    """Ask with the keyboard alone; return the text of the answer."""
    page.fill("#tokens", str(tokens))
    page.focus("#text")
    page.keyboard.type(text)
    page.keyboard.press("Enter")
    page.wait_for_function("!document.querySelector('#send').disabled")
    assert page.inner_text("#error") == ""
    return page.locator(".turn.assistant").last.inner_text()


@pytest.fixture(scope="module")
def chat(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("web") / "site"
    weft.compile(smollm2_gguf, folder, target="web", javascript=str(MODULES))
    return folder


def test_smollm2_answers_as_weft_run_does(chat: Path, smollm2_gguf: Path, visit: Open, tmp_path: Path) -> None:
    assert sum(file.stat().st_size for file in chat.rglob("*") if file.is_file()) <= MOST_BYTES
    weft.compile(smollm2_gguf, tmp_path / "exact", target="ort-cpu")
    page, conversation = visit(chat), weft.load(tmp_path / "exact").conversation()
    assert "threads" in page.inner_text("#status")
    for question in ("What is the capital of France?", "And of Italy?"):  # the second continues the caches
        wanted = "".join(conversation.say(question, max_tokens=24, temperature=0))
        assert answer(page, question).strip() == wanted.strip()
        first = float(page.inner_text("#status").split("after ")[1].split(" s")[0])
        assert first <= FIRST_TOKEN


def test_stop_ends_an_answer_and_new_begins_a_conversation(chat: Path, visit: Open) -> None:
    page = visit(chat, isolated=False)
    assert "One thread only" in page.inner_text("#status")
    page.fill("#tokens", "2000")
    page.fill("#text", "Tell me a long story about a fox.")
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelector('.turn.assistant').textContent.length > 20")
    begin = time.monotonic()
    page.keyboard.press("Escape")
    page.wait_for_function("!document.querySelector('#send').disabled")
    assert time.monotonic() - begin < 20
    assert "tokens" in page.inner_text("#status")
    page.click("#clear")
    assert page.locator(".turn").count() == 0


def test_states_run_by_the_loader(tmp_path: Path, visit: Open) -> None:
    torch.manual_seed(0)  # transformers draws biases that `save` only changes; other models may answer nothing
    ROWS["mamba"].save(tmp_path / "hf")
    tokenizer().save_pretrained(tmp_path / "hf")
    weft.compile(tmp_path / "hf", tmp_path / "out", target="web", precisions="fp32", javascript=str(MODULES))
    wanted = weft.load(tmp_path / "out").generate("the cat sat", max_tokens=6, temperature=0)[0].text
    assert wanted.strip()
    # transformers.js removes spaces before punctuation.
    assert answer(visit(tmp_path / "out"), "the cat sat", 6).replace(" ", "") == wanted.replace(" ", "")


def test_sentences_are_compared_as_weft_embeds_them(minilm_folder: Path, tmp_path: Path, visit: Open) -> None:
    weft.compile(minilm_folder, tmp_path / "out", target="web", precisions="fp32", javascript=str(MODULES))
    page, texts = visit(tmp_path / "out"), ["A cat sat on the mat.", "A kitten rested on a rug.", "Stocks fell."]
    page.fill("#text", texts[0])
    page.fill("#lines", "\n".join(texts[1:]))
    page.click("#send")
    page.wait_for_selector("td.score")
    vectors = np.array(weft.load(tmp_path / "out").encode(texts))
    cosines = sorted((vectors[1:] @ vectors[0]).tolist(), reverse=True)
    assert [float(cell) for cell in page.locator("td.score").all_inner_texts()] == pytest.approx(cosines, abs=1e-3)


@pytest.mark.parametrize("activation", ["", "torch.nn.modules.linear.Identity"])
def test_pairs_get_the_scores_of_weft(activation: str, tmp_path: Path, visit: Open) -> None:
    more = {"sentence_transformers": {"activation_fn": activation}} if activation else {}
    save(tmp_path / "hf", "BertForSequenceClassification", BERT, num_labels=1, **more)
    weft.compile(tmp_path / "hf", tmp_path / "out", target="web", precisions="fp32", javascript=str(MODULES))
    page, texts = visit(tmp_path / "out"), ["the cat sat on the mat .", "a dog ran far away"]
    page.fill("#text", "where is the cat ?")
    page.fill("#lines", "\n".join(texts))
    page.click("#send")
    page.wait_for_selector("td.score")
    scores = [result.score for result in weft.load(tmp_path / "out").rank("where is the cat ?", texts)]
    assert [float(cell) for cell in page.locator("td.score").all_inner_texts()] == pytest.approx(scores, abs=1e-3)


def test_texts_are_classified_with_the_labels_of_the_model(tmp_path: Path, visit: Open) -> None:
    save(tmp_path / "hf", "BertForSequenceClassification", BERT, id2label={0: "bad", 1: "good"})
    weft.compile(tmp_path / "hf", tmp_path / "out", target="web", precisions="fp32", javascript=str(MODULES))
    page = visit(tmp_path / "out")
    page.fill("#text", "the cat sat on the mat .")
    page.click("#send")
    page.wait_for_selector("td.score")
    scores = dict(zip(*(page.locator(f"td:nth-child({i})").all_inner_texts() for i in (1, 2)), strict=True))
    wanted = weft.load(tmp_path / "out").classify("the cat sat on the mat .")
    assert {label: float(score) for label, score in scores.items()} == pytest.approx(wanted[0], abs=1e-3)
