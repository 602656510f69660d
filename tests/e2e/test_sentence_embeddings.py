"""Folders of sentence-transformers: the vector of a text is an output of the graph, on every target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPooling

import weft
from weft import WeftError
from weft.frontends import load_source
from weft.frontends.dsl import Block, Dense, Encoder, FourierMixing, SentencePooling

from ..backends.torch.transformers.folders import lowered, model_of
from .families import ROWS, encoder_case, error
from .test_families import encoded

MODES = {  # how sentence-transformers pools: h [batch, seq, dim], m [batch, seq, 1] of ones and zeros
    "mean_tokens": lambda h, m: (h * m).sum(1) / m.sum(1),
    "cls_token": lambda h, m: h[:, 0],
    "max_tokens": lambda h, m: h.masked_fill(m == 0, -1e9).amax(1),
    "lasttoken": lambda h, m: h[torch.arange(len(h)), m.sum((1, 2)).long() - 1],
    "weightedmean_tokens": lambda h, m: _weighted(h, m),
}


def _weighted(h: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    weights = m * torch.arange(1, h.shape[1] + 1)[None, :, None]
    return (h * weights).sum(1) / weights.sum(1)


def save(name: str, folder: Path, mode: str, normalize: bool) -> Any:
    """Row `name` as sentence-transformers stores it; the model of transformers."""
    model = ROWS[name].save(folder)
    kinds = {"Transformer": "", "Pooling": "1_Pooling"} | ({"Normalize": "2_Normalize"} if normalize else {})
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    config = {f"pooling_mode_{known}": known == mode for known in MODES}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **config}))
    return model


@pytest.mark.halved
@pytest.mark.parametrize("target", ["onnx", "ort-cpu", "torch", "transformers"])
@pytest.mark.parametrize(
    ("name", "mode", "normalize"),
    [
        ("mpnet", "mean_tokens", True),
        ("bert", "cls_token", False),
        ("modernbert", "max_tokens", True),
        ("nomic_bert", "lasttoken", False),
        ("xlm-roberta", "weightedmean_tokens", True),
    ],
)
def test_sentence_embeddings_equal_transformers(
    name: str, mode: str, normalize: bool, target: str, tmp_path: Path
) -> None:
    model = save(name, tmp_path / "hf", mode, normalize)
    arguments, want, mask = encoder_case(ROWS[name], model)
    vectors = MODES[mode](torch.from_numpy(want["last_hidden_state"]), torch.from_numpy(mask[..., None]).float())
    expected = (F.normalize(vectors) if normalize else vectors).numpy()
    if target == "transformers":
        folder = model_of(lowered(load_source(tmp_path / "hf").graph), tmp_path / "out")
        with torch.inference_mode():
            made = folder(**{name: torch.from_numpy(array) for name, array in arguments.items()})
        assert made[0] is made.last_hidden_state and isinstance(made, BaseModelOutput | BaseModelOutputWithPooling)
        got = {name: value.numpy() for name, value in made.items()}
    else:
        got = encoded(tmp_path / "hf", target, arguments, tmp_path / "out")
    assert set(got) == {*want, "sentence_embedding"}
    assert error(got["sentence_embedding"], expected) < 1e-5
    if target == "transformers" or ("token_type_ids" in arguments and arguments["token_type_ids"].any()):
        return
    if target == "torch":
        weft.compile(tmp_path / "hf", tmp_path / "out", target=target)
    loaded = weft.load(tmp_path / "out", trust=True)
    texts = [row[keep].tolist() for row, keep in zip(arguments["input_ids"], mask, strict=True)]
    assert error(loaded.encode(texts), expected) < 1e-5
    short = {"cls_token": "cls", "max_tokens": "max", "mean_tokens": "mean", "lasttoken": "last"}.get(mode, "weighted")
    assert error(loaded.encode(texts, pooling=short, normalize=normalize), expected) < 1e-5


def test_sentence_embeddings_run_in_half_precision(tmp_path: Path) -> None:
    save("mpnet", tmp_path / "hf", "mean_tokens", True)
    ids = np.arange(5, 17).tolist()
    vectors = []
    for dtype in ("f32", "f16"):
        weft.compile(tmp_path / "hf", tmp_path / dtype, dtype=dtype)
        vectors.append(weft.load(tmp_path / dtype).encode([ids]))
    assert error(vectors[1], vectors[0]) < 1e-2


@pytest.mark.parametrize("mode", ["cls", "max", "mean", "mean_sqrt_len", "weighted", "last", "token", "end"])
def test_vectors_have_the_dtype_of_the_weights(mode: str) -> None:
    """In bf16 too, so that layers after the pooling take them."""
    model = Encoder(9, 8, 1, Block(FourierMixing()), sentence=SentencePooling(mode, after=(Dense(4),)))
    vectors = weft.torch(model).bfloat16()(torch.tensor([[1, 2, 3]]), torch.ones(1, 3, dtype=torch.long))[1]
    assert vectors.dtype == torch.bfloat16 and vectors.shape == (1, 4)


def test_written_folders_keep_their_model(tmp_path: Path) -> None:
    save("mpnet", tmp_path / "hf", "lasttoken", False)
    graph = load_source(tmp_path / "hf").graph
    assert (graph.meta["pooling"], graph.meta["normalize"]) == ("last", False)
    assert list(graph.outputs) == ["last_hidden_state", "pooler_output", "sentence_embedding"]


def test_unknown_pooling_modes_are_refused() -> None:
    with pytest.raises(WeftError, match="mode='sum'"):
        SentencePooling("sum")
    with pytest.raises(WeftError, match=r"must be of cls, max, mean, weighted, last, mean_sqrt_len$"):
        SentencePooling(("cls", "token"))
    wrong: Any = 3
    with pytest.raises(WeftError, match="sentence="):
        Encoder(9, 4, 1, Block(FourierMixing()), sentence=wrong)
