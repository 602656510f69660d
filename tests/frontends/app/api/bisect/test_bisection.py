"""`weft.bisect`: tokens, tolerances, outputs, and the result as data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import weft
from weft.frontends.app.api.bisect.bisection import LOG_PROBABILITIES, bisect
from weft.frontends.app.api.verify.verification import PROMPT, verify_folder
from weft.ir import WeftError

IDS = [3, 1, 4, 1, 5, 9, 2, 6]


def test_tokens_are_those_of_the_prompt_the_built_in_sentence_or_random(llamas: tuple[Path, Path], tiny: Path) -> None:
    words = weft.load_source(llamas[0])
    assert bisect(llamas[0], words, prompt="the fox").tokens == [19, 7, 4, 5, 14, 23]
    encode = words.graph.tokenize
    assert encode is not None and bisect(llamas[0], words).tokens == encode([PROMPT])[0][:16]
    random = bisect(tiny, tiny).tokens
    assert len(set(random)) > 8 and random == bisect(tiny, tiny).tokens
    assert bisect(tiny, tiny, ids=[1, 2]).tokens == [1, 2]


def test_wrong_tokens_are_refused(llamas: tuple[Path, Path], tiny: Path) -> None:
    with pytest.raises(WeftError, match=r"token ids from 0 to 28, not \[1, 29\]"):
        bisect(llamas[0], llamas[1], ids=[1, 29])
    with pytest.raises(WeftError, match="one or more token ids"):
        bisect(tiny, tiny, ids=[])
    with pytest.raises(WeftError, match="neither model has a tokenizer"):
        bisect(tiny, tiny, prompt="words")


def test_tolerance_is_that_of_verify(tiny: Path, compiled_tiny: Path) -> None:
    found = bisect(tiny, compiled_tiny)
    assert found.tolerance == verify_folder(compiled_tiny, trust=True, tokens=1).tolerance


def test_result_is_plain_data(llamas: tuple[Path, Path]) -> None:
    same, other = bisect(llamas[0], llamas[0], ids=IDS), bisect(*llamas, ids=IDS)
    assert same.json() == json.loads(json.dumps(same.json())) and not same.json()["differs"]
    data = json.loads(json.dumps(other.json()))
    assert data["differs"] and data["values"] == ["embed", "embed"] and data["places"][0]["op"] == "embedding"
    assert data["errors"]["logits"] > data["tolerance"]


class Named(torch.nn.Module):
    """A module with one output, which is the embedding or the logits of the source."""

    def __init__(self, source: Path, path: str | None) -> None:
        super().__init__()
        self.net, self.path = weft.torch(source), path

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.net(input_ids)
        return {"scores": logits} if self.path is None else {"scores": self.net.get_submodule(self.path)(input_ids)}


def test_outputs_of_other_names_are_paired_by_their_shapes(llamas: tuple[Path, Path]) -> None:
    assert bisect(llamas[0], Named(llamas[0], None), ids=IDS).errors["logits"] < 1e-5
    with pytest.raises(WeftError, match=r"no output in common: .* has logits, Named has scores"):
        bisect(llamas[0], Named(llamas[0], "embed"), ids=IDS)


def test_sides_without_inner_values_are_compared_by_log_probabilities(
    llamas: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from .fake_llama import install

    requests = install(monkeypatch)
    found = bisect(llamas[0], f"llama.cpp:{llamas[0]}", ids=IDS)
    assert found.outputs_only and found.difference is None and [*found.errors] == [LOG_PROBABILITIES]
    assert found.differs and requests[0]["prompt"] == IDS and found.tolerance < 1e-3


TINY = """
from weft import Attention, Block, Decoder, GatedMLP, RMSNorm, RoPE

def build(window):
    return Decoder(97, 32, 2, Block(Attention(4, 2, rope=RoPE(), window=window), GatedMLP(48), RMSNorm()), context=64)

right, wrong = build(8), build(7)
"""


def test_page_marks_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.py").write_text(TINY)
    weft.compile("tiny.py:right", "out")
    for source, count in (("tiny.py:wrong", 1), ("tiny.py:right", 0)):
        found = bisect(source, "optimized:out", viz="place.html")
        assert found.differs == bool(count)
        text = Path("place.html").read_text(encoding="utf-8")
        assert ("window is 8 instead of 7" in text) == bool(count)
        assert f'"changed": {count}' in text or f'"changed":{count}' in text


def test_what_cannot_be_drawn_is_refused(llamas: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(WeftError, match=r"name a file that ends in \.html, not place\.svg"):
        bisect(*llamas, viz=tmp_path / "place.svg")
    net: torch.nn.Module = weft.torch(llamas[0])
    with pytest.raises(WeftError, match="a PyTorch module cannot be drawn"):
        bisect(llamas[0], net, ids=[1, 2], viz=tmp_path / "place.html")
    assert not any(tmp_path.iterdir())
