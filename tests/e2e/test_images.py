"""Encoders of images, of texts beside them, and pairs of both, against transformers, all random."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
import transformers

import weft
from weft import WeftError

from ..backends.torch.transformers.folders import lowered, model_of
from ..supported import Errors
from .families import LENGTH, VOCAB, Row, error
from .images import IMAGES, PAIRS, TEXT, TEXTS
from .test_families import note
from .unknowns import check_left_out

TARGETS = ["onnx", "ort-cpu", "torch"]
FEATURES = ("image_embeds", "sentence_embedding")  # what transformers calls pooler_output


def check(row: Row, folder: Path, target: str, feeds: dict[str, np.ndarray], errors: Errors) -> None:
    """Check that the model of `row` makes of `feeds` what transformers makes."""
    model = row.save(folder / "hf")
    loaded = weft.load_source(folder / "hf")
    assert loaded.unread == []
    given = {name: torch.from_numpy(value) for name, value in feeds.items()}
    if row.family == "vit_mae":  # which shuffles patches by noise; masking none, it still would
        given["noise"] = torch.arange(9.0).expand(3, -1)
    with torch.inference_mode():
        made = model(**given)
    got = outputs(loaded, target, feeds, folder / "out")
    note(errors, row.family, target, "full", worst(got, made))
    if target == "torch":
        check_left_out(folder / "hf")


def outputs(loaded: weft.Model, target: str, feeds: dict[str, np.ndarray], out: Path) -> dict[str, np.ndarray]:
    """Return what the model makes of `feeds` on `target`."""
    given = [torch.from_numpy(feeds[name]) for name in loaded.graph.inputs]
    if target == "transformers":
        with torch.inference_mode():
            return {name: value.numpy() for name, value in model_of(lowered(loaded.graph), out)(*given).items()}
    if target == "torch":
        with torch.inference_mode():
            made = weft.torch(loaded)(*given)
        made = made if isinstance(made, tuple) else (made,)
        return dict(zip(loaded.graph.outputs, (o.numpy() for o in made), strict=True))
    weft.compile(loaded, out, target=target)
    session = ort.InferenceSession(out / "model.onnx", providers=["CPUExecutionProvider"])
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))


def worst(got: dict[str, np.ndarray], made: Any) -> float:
    """The largest error of the outputs `got` against those `made` by transformers."""
    return max(error(value, made["pooler_output" if name in FEATURES else name].numpy()) for name, value in got.items())


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", IMAGES)
def test_images_equal_transformers(name: str, target: str, errors: Errors, tmp_path: Path) -> None:
    row = IMAGES[name]
    channels = row.config.get("num_channels", 3)
    pixels = np.random.default_rng(1).standard_normal((3, channels, 24, 24)).astype(np.float32)
    check(row, tmp_path, target, {"pixel_values": pixels}, errors)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", TEXTS)
def test_multimodal_encoders_equal_transformers(name: str, target: str, errors: Errors, tmp_path: Path) -> None:
    ids = np.random.default_rng(1).integers(3, VOCAB, (3, LENGTH))
    check(TEXTS[name], tmp_path, target, {"input_ids": ids, "attention_mask": np.ones_like(ids)}, errors)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        *(("clip", "onnx"), ("clip", "torch"), ("clip", "transformers")),
        *(("clip-largest", "ort-cpu"), ("clip-largest", "torch")),
        *(("siglip", "ort-cpu"), ("siglip", "transformers")),
    ],
)
def test_dual_encoders_equal_transformers(name: str, target: str, tmp_path: Path) -> None:
    """Each encoder of a folder that has two, and alone where the other names it."""
    row, rng = PAIRS[name], np.random.default_rng(1)
    model: Any = row.save(tmp_path / "hf")
    ids = rng.integers(8, VOCAB - 1, (3, LENGTH))
    ids[:, 4:] = np.array([[7], [VOCAB - 1], [9]])  # the id of an end several times, or nowhere
    mask = (np.arange(LENGTH) < np.array([[LENGTH], [9], [3]])).astype(np.int64)
    texts, image = {"input_ids": ids, "attention_mask": mask}, rng.standard_normal((3, 3, 24, 24)).astype(np.float32)
    with torch.inference_mode():
        features = model.get_text_features(torch.from_numpy(ids), torch.from_numpy(mask))
        seen = model.get_image_features(torch.from_numpy(image))
    loaded = weft.load_source(tmp_path / "hf")
    assert loaded.unread == []
    assert [part.name for part in loaded.left_out] == ["vision_model"]
    got = outputs(loaded, target, texts, tmp_path / "out")
    assert list(got) == ["last_hidden_state", "sentence_embedding"]
    assert worst(got, features) < 1e-5
    loaded = weft.load_source(tmp_path / "hf", family=f"{row.family}_vision_model")
    if target == "transformers":
        with pytest.raises(
            WeftError, match=r"needs the input input_ids, but \w+ has pixel_values: choose target torch"
        ):
            weft.compile(loaded, tmp_path / "images", target=target)
        return
    got = outputs(loaded, target, {"pixel_values": image}, tmp_path / "images")
    assert error(got["image_embeds"], seen.pooler_output.numpy()) < 1e-5
    assert error(got["last_hidden_state"], seen.last_hidden_state.numpy()) < 1e-5


@pytest.mark.parametrize(
    ("name", "target"), [("clip", "torch"), ("clip-largest", "ort-cpu"), ("siglip", "ort-cpu"), ("siglip", "torch")]
)
def test_text_side_of_a_dual_encoder_encodes_texts(name: str, target: str, tmp_path: Path) -> None:
    """Texts of other lengths are run together; those of SigLIP are padded to the longest that it takes."""
    model: Any = PAIRS[name].save(tmp_path / "hf")
    texts = [[5, 9, 7], [8, 6, 5, 5, 9, 7], [9, 7]]
    weft.compile(tmp_path / "hf", tmp_path / "out", target=target)
    pad = [0] * TEXT["max_position_embeddings"] if name == "siglip" else []
    with torch.inference_mode():
        rows = [torch.tensor([(text + pad)[: max(len(text), len(pad))]]) for text in texts]
        want = np.concatenate([model.get_text_features(row).pooler_output.numpy() for row in rows])
    encoder = weft.load(tmp_path / "out", trust=True)
    for normalize in (None, False):
        assert error(encoder.encode(texts, normalize=normalize), want) < 1e-5
    unit = want / np.linalg.norm(want, axis=1, keepdims=True)
    assert error(encoder.encode(texts, normalize=True), unit) < 1e-5


@pytest.mark.parametrize("name", PAIRS)
def test_sides_of_a_dual_encoder_are_exported_separately(name: str, tmp_path: Path) -> None:
    row = PAIRS[name]
    model: Any = row.save(tmp_path / "hf")
    ids, image = torch.tensor([[5, 9, 7, 8, 7]]), torch.ones(1, 3, 24, 24)
    for side, given in (("text", ids), ("vision", image)):
        loaded = weft.load_source(tmp_path / "hf", family=f"{row.family}_{side}_model")
        weft.export(loaded, tmp_path / side)
        kind = json.loads((tmp_path / side / "config.json").read_text())["architectures"][0]
        alone = getattr(transformers, kind).from_pretrained(tmp_path / side).eval()
        with torch.inference_mode():
            features = alone(given)
            want = (model.get_text_features if side == "text" else model.get_image_features)(given).pooler_output
        got = next(features[k] for k in ("text_embeds", "image_embeds", "pooler_output") if k in features)
        assert error(got.numpy(), want.numpy()) < 1e-6
        again = weft.load_source(tmp_path / side)  # a class with a projection
        assert str(again.graph) == str(loaded.graph).replace(str(tmp_path / "hf"), str(tmp_path / side))
