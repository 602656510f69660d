"""Every class of transformers with a head, for families that weft reads: equal scores, or an error that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner
from safetensors.torch import load_file
from transformers.models.auto import modeling_auto

import weft
from weft.frontends import load_source
from weft.frontends.app.cli import cli
from weft.frontends.models.families import FAMILIES
from weft.ir.errors import WeftError

from .. import sampling
from .families import LENGTH, ROWS, Row, error, randomized
from .images import TOWERS
from .seq2seq import SEQ2SEQ
from .sounds import SOUNDS
from .test_families import encoded

TASKS = ("SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION", "QUESTION_ANSWERING", "MULTIPLE_CHOICE", "MASKED_LM")
TASKS += ("NEXT_SENTENCE_PREDICTION", "PRETRAINING", "IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION", "CTC")
TARGETS = ("onnx", "ort-cpu", "torch")
GENERATES = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
# Global attention to the first token or the question, a mask of the question, a decoder of images, codes of sounds; a
# decoder that begins with the last token of the text.
REFUSED = {
    *(f"Longformer{name}" for name in ("ForSequenceClassification", "ForQuestionAnswering", "ForMultipleChoice")),
    *("BigBirdForQuestionAnswering", "ViTMAEForPreTraining", "Wav2Vec2ForPreTraining"),
    *(
        "T5GemmaForTokenClassification",
        "T5GemmaForSequenceClassification",
        "MBartForSequenceClassification",
        "MBartForQuestionAnswering",
        "PLBartForSequenceClassification",
    ),
}
BY_LAST_PLACE = ("xlnet", "convbert", "roformer")  # in transformers a padding token, where there is one


def rows() -> dict[str, tuple[Row, str]]:
    """The classes with a head of all families, with a row of the family, by their names."""
    found: dict[str, tuple[Row, str]] = {}
    for row in (*ROWS.values(), *SEQ2SEQ.values(), *TOWERS.values(), *SOUNDS.values()):
        for task in TASKS:
            names: Any = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").get(row.family, ())
            for name in (names,) if isinstance(names, str) else names:
                if not name.endswith(GENERATES) or (name == "XLNetLMHeadModel"):
                    found.setdefault(name, (row, task))
    return found


CLASSES = rows()
KNOWN = [name for name in CLASSES if name not in REFUSED and not name.endswith("WithTeacher")]
CHOSEN = [
    (name, target)
    for i, name in enumerate(KNOWN)
    for j, target in enumerate(TARGETS)
    if sampling.ALL or (i % 13 == 0 and i // 13 % len(TARGETS) == j)
]


def model_of(name: str, folder: Path, **more: Any) -> torch.nn.Module:
    """A tiny model of the class `name`, saved in `folder`."""
    row, _ = CLASSES[name]
    more = more or {"num_labels": 2 if "Question" in name else 3}
    config = row.config_class(**{**row.config, **more})
    config._attn_implementation = row.attention
    if getattr(config, "pad_token_id", 0) is None:
        config.pad_token_id = 0
    model = randomized(getattr(transformers, name)(config), fixed=row.fixed)
    model.save_pretrained(folder)
    return model


def inputs_of(folder: Path, model: torch.nn.Module) -> dict[str, np.ndarray]:
    """Two texts, the second padded, or noise, for the graph that weft reads from `folder`."""
    rng, graph = np.random.default_rng(1), load_source(folder).graph
    config: Any = model.config
    if "input_ids" not in graph.inputs:
        sizes = {"batch": 2}
        shapes = {
            name: [sizes.get(str(n), n if isinstance(n, int) else 4000) for n in v.shape]
            for name, v in graph.inputs.items()
        }
        noise = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        return {name: np.ones(x.shape, np.int64) if "mask" in name else x for name, x in noise.items()}
    short = LENGTH if config.model_type in BY_LAST_PLACE else 9
    mask = (np.arange(LENGTH) < np.array([[LENGTH], [short]])).astype(np.int64)
    ids = np.where(mask, rng.integers(3, 90, (2, LENGTH)), config.pad_token_id)
    if config.is_encoder_decoder:
        ids[ids == config.eos_token_id] = 3
        ids[np.arange(2), mask.sum(1) - 1] = config.eos_token_id
    arguments = {"input_ids": ids, "attention_mask": mask}
    if "token_type_ids" in graph.inputs:
        arguments["token_type_ids"] = rng.integers(0, getattr(config, "type_vocab_size", 2), ids.shape)
    return arguments


def scores(model: torch.nn.Module, arguments: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the scores of `model` for one text in each row."""
    given = {name: torch.from_numpy(x) for name, x in arguments.items()}
    if type(model).__name__.endswith("ForMultipleChoice"):
        given = {name: x[:, None] for name, x in given.items()}
    with torch.inference_mode():
        return {name: x.numpy() for name, x in model(**given).items() if name.endswith("logits")}


def assert_equal(got: dict[str, np.ndarray], want: dict[str, np.ndarray], mask: np.ndarray | None) -> None:
    assert {name for name in got if name.endswith("logits")} == set(want)
    for name, value in want.items():
        seen = mask is not None and value.shape[:2] == mask.shape
        chosen = mask.astype(bool) if mask is not None and seen else slice(None)
        assert error(got[name][chosen], value[chosen]) <= 2e-5, name


@pytest.mark.halved
@pytest.mark.parametrize(("name", "target"), CHOSEN)
def test_scores_equal_transformers(name: str, target: str, tmp_path: Path) -> None:
    model = model_of(name, tmp_path / "hf")
    arguments = inputs_of(tmp_path / "hf", model)
    got = encoded(tmp_path / "hf", target, arguments, tmp_path / "out")
    assert_equal(got, scores(model, arguments), arguments.get("attention_mask"))


@pytest.mark.parametrize("name", sorted(REFUSED - {"PLBartForSequenceClassification"})[:: 1 if sampling.ALL else 3])
def test_unread_heads_are_refused_until_left_out(name: str, tmp_path: Path) -> None:
    model_of(name, tmp_path / "hf")
    with pytest.raises(WeftError, match=rf"{name}; weft reads .*head.*accept it by --without \w+") as refusal:
        weft.compile(tmp_path / "hf", tmp_path / "out")
    head = str(refusal.value).split("--without ")[1].split()[0]
    with pytest.raises(WeftError, match=f"--without {head}"):
        weft.torch(tmp_path / "hf")
    weft.compile(tmp_path / "hf", tmp_path / "out", without=[head])
    recorded, *_ = json.loads((tmp_path / "out" / "weft.json").read_text())["left_out"]
    assert (recorded["kind"], recorded["name"], recorded["changes"]) == ("head", head, True)
    if not name.startswith(("ViT", "Wav")):  # which read no text that verify could give them
        result = CliRunner().invoke(cli, ["verify", str(tmp_path / "out")])
        assert f"passed, without: {head}" in result.output


def test_every_head_of_a_table_has_a_tested_class() -> None:
    suffixes = {(CLASSES[name][0].family, name[name.rindex("For") :]) for name in KNOWN if "For" in name}
    for family in ("bert", "roberta", "distilbert", "albert", "electra", "deberta-v2", "mpnet", "modernbert", "xlnet"):
        for suffix in FAMILIES[family].tasks:
            assert (family, suffix) in suffixes or suffix.endswith("LMHeadModel"), (family, suffix)


HEADED = [
    "BertForSequenceClassification",
    "DebertaV2ForMultipleChoice",
    "AlbertForMaskedLM",
    "LlamaForQuestionAnswering",
]
HEADED += ["Gemma2ForSequenceClassification", "ModernBertForTokenClassification", "BertForNextSentencePrediction"]


@pytest.mark.usefixtures("own_code")
@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("name", HEADED)
def test_compiled_folders_have_the_head_class_and_its_loss(name: str, tmp_path: Path) -> None:
    names = {"id2label": {0: "bad", 1: "good"}} if "SequenceClass" in name else {}
    model = model_of(name, tmp_path / "hf", **names)
    weft.compile(tmp_path / "hf", tmp_path / "out", target="transformers")
    auto = f"AutoModel{name[name.rindex('For') :]}"
    ours = getattr(transformers, auto).from_pretrained(tmp_path / "out", trust_remote_code=True)
    arguments = inputs_of(tmp_path / "hf", model)
    assert_equal(scores(ours, arguments), scores(model, arguments), arguments["attention_mask"])
    if names:
        assert ours.config.id2label == names["id2label"]
        given = {key: torch.from_numpy(x) for key, x in arguments.items()}
        losses = [float(net(**given, labels=torch.tensor([1, 0])).loss) for net in (ours.eval(), model)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("name", HEADED)
def test_exported_folder_keeps_its_head_class(name: str, tmp_path: Path) -> None:
    model = model_of(name, tmp_path / "hf")
    weft.export(tmp_path / "hf", tmp_path / "out")
    ours, loading = getattr(transformers, name).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading.values())
    arguments = inputs_of(tmp_path / "hf", model)
    assert_equal(scores(ours.eval(), arguments), scores(model, arguments), arguments["attention_mask"])
    with pytest.raises(WeftError, match="has a head for"):
        weft.export(tmp_path / "hf", tmp_path / "model.gguf")


def test_rewritten_classifier_is_exported_as_its_class(tmp_path: Path) -> None:
    model_of("LlamaForSequenceClassification", tmp_path / "hf", id2label={0: "bad", 1: "good"})
    weft.export(tmp_path / "hf", tmp_path / "out", passes="mha-to-gqa{kv_heads=1}")
    ours, loading = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(loading.values())
    assert (type(ours).__name__, ours.config.id2label) == ("LlamaForSequenceClassification", {0: "bad", 1: "good"})
    assert "score.weight" in load_file(tmp_path / "out" / "model.safetensors")


def test_sentence_transformers_folders_ignore_the_head_class(tmp_path: Path) -> None:
    model_of("BertForMaskedLM", tmp_path)
    kinds = {"Transformer": "", "Pooling": "1_Pooling"}
    home = "sentence_transformers.models"
    modules = [{"idx": i, "path": path, "type": f"{home}.{kind}"} for i, (kind, path) in enumerate(kinds.items())]
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    pooling = {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    assert set(load_source(tmp_path).graph.outputs) == {"last_hidden_state", "sentence_embedding"}


def test_head_without_tensors_is_refused_until_left_out(tmp_path: Path) -> None:
    model_of("BertForMaskedLM", tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("BertForMaskedLM", "BertForQuestionAnswering"))
    with pytest.raises(WeftError, match=r"lacks qa_outputs\.weight, which .* at random.*--without qa_outputs"):
        weft.compile(tmp_path, tmp_path / "out")
    base = weft.compile(tmp_path, tmp_path / "out", without=["qa_outputs"]).model
    assert set(base.graph.outputs) == {"last_hidden_state"}
    weft.export(tmp_path, tmp_path / "exported", without=["qa_outputs"])
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["architectures"] == ["BertModel"]
