"""`weft train` reads folders that the library datasets wrote."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest

import weft
from weft import Attention, Block, Decoder, GatedMLP, RMSNorm, TrainingSettings
from weft.frontends.app.api.training.corpus import Corpus, attach_tokenizer, read_sequence
from weft.ir.errors import WeftError

MODEL = weft.load_source(Decoder(300, 32, 1, Block(Attention(4), GatedMLP(32), RMSNorm()), context=64))
TEXTS = [f"it was day {n} of april" for n in range(200)]


def test_folders_of_datasets_are_read_as_documents(tmp_path: Path) -> None:
    table = datasets.Dataset.from_dict({"text": TEXTS, "title": TEXTS})
    table.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(str(tmp_path / "splits"))
    ids = {}
    for name in ("one", "splits"):
        corpora = [Corpus(tmp_path / name)]
        model = attach_tokenizer(MODEL, "bytes", corpora)
        ids[name] = read_sequence(model, corpora).tolist()
    (end,) = model.graph.meta["eos_token_ids"]
    assert ids["one"] == ids["splits"] and ids["one"].count(end) == len(TEXTS)
    run = weft.train(MODEL, tmp_path / "one", tmp_path / "run", TrainingSettings(steps=3, batch=4, context=32))
    assert run.steps == 3
    with pytest.raises(WeftError, match="has no text called 'body', but only text, title"):
        read_sequence(model, [Corpus(tmp_path / "one", "body")])
    datasets.DatasetDict({"test": table}).save_to_disk(str(tmp_path / "test"))
    with pytest.raises(WeftError, match="has no split called train, but test"):
        read_sequence(model, [Corpus(tmp_path / "test")])
