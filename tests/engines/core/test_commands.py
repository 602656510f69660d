"""Commands of weft take a folder as a source, and say what to do where they cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import weft

from ...backends.torch.transformers.folders import graph_of
from ...frontends.command import done, refused
from ...frontends.formats.hf.peft_models import write_tokenizer
from ..compiled import compiled


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(compiled("preset/smollm2-135m", tmp_path / "folder"))
    return tmp_path / "folder"


def test_eval_and_viz_read_the_graph_next_to_the_weights(folder: Path, tmp_path: Path) -> None:
    """Score and draw a folder as its source, which need not be there any more."""
    (tmp_path / "text.txt").write_text(text := "w3 w5 w7 w9 w11 w2 w4")
    told = done("eval", "--against", folder, "--text", tmp_path / "text.txt", "--json").stdout
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert abs(json.loads(told)["scores"][0]["nll"] - model(ids, labels=ids).loss.item()) < 1e-5
    done("viz", folder, "-o", tmp_path / "picture.svg")
    assert "embed" in (tmp_path / "picture.svg").read_text()


@pytest.mark.parametrize("command", [("run", "--prompt", "w3"), ("verify",)])
def test_run_on_a_folder_names_the_compile_command(folder: Path, command: tuple[str, ...]) -> None:
    assert f"or compile it again with `weft compile {folder} -o OUT`" in refused(command[0], folder, *command[1:])


@pytest.mark.parametrize(("pooling", "normalize"), [("mean", True), ("cls", False), ("", True)])
def test_encoder_folders_record_their_pooling(pooling: str, normalize: bool, tmp_path: Path) -> None:
    """In the files of sentence-transformers, as weft reads them itself."""
    graph = graph_of("preset/bert-base")
    graph.meta |= {"pooling": pooling, "normalize": normalize} if pooling else {}
    weft.compile(graph, tmp_path / "folder", target="transformers", class_name="Tiny")
    facts = {"pooling": pooling, "normalize": normalize} if pooling else {}
    meta = weft.load_source(tmp_path / "folder").graph.meta
    assert {key: meta[key] for key in ("pooling", "normalize") if key in meta} == facts
