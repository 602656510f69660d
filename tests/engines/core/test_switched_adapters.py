"""Adapters of a folder that stay apart: onnxruntime-genai chooses one of them for each answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import onnxruntime_genai as og
import pytest
import torch
from numpy.typing import NDArray

import weft
from weft.ir.errors import WeftError

from ...frontends.command import done, refused
from ...frontends.formats.hf import peft_models as peft
from ..compiled import compiled, error, loaded, texts

IDS = texts(1, 9, 37, seed=5)
KINDS: dict[str, dict[str, Any]] = {
    "first": {"r": 4, "target_modules": ["q", "v", "down"]},
    "second": {"r": 6, "target_modules": ["q", "k", "o", "gate", "up"], "use_rslora": True},
}


def adapted(folder: Path, out: Path, **lora: Any) -> NDArray[Any]:
    """Write an adapter of random numbers; return the logits of PEFT's model."""
    torch.manual_seed(len(out.name))
    model = peft.peft.get_peft_model(loaded(folder), peft.peft.LoraConfig(**{"lora_alpha": 6, **lora})).eval()
    for parameter in (p for p in model.parameters() if p.requires_grad):
        parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(out)
    with torch.no_grad():
        logits: NDArray[Any] = model(input_ids=IDS, use_cache=False).logits[0].numpy()
    return logits


def answered(model: og.Model, adapters: og.Adapters, name: str) -> NDArray[Any]:
    """Return the logits of onnxruntime-genai with the adapter `name`, or with none."""
    params = og.GeneratorParams(model)
    params.set_search_options(max_length=12, do_sample=False)
    generator = og.Generator(model, params)
    if name:
        generator.set_active_adapter(adapters, name)
    generator.append_tokens(IDS.numpy().astype(np.int32))
    return np.asarray(generator.get_output("logits"))[0]


@pytest.mark.parametrize(
    ("source", "options", "bound"),
    [
        ("preset/smollm2-135m", {}, 1e-5),
        ("family/gemma2", {"target": "onnx"}, 1e-5),
        ("preset/smollm2-135m", {"weights": "int8"}, 0.25),  # factors of adapters stay floats
    ],
)
def test_genai_chooses_an_adapter(source: str, options: dict[str, Any], bound: float, tmp_path: Path) -> None:
    folder = compiled(source, tmp_path / "folder")
    want = {name: adapted(folder, tmp_path / name, **lora) for name, lora in KINDS.items()}
    with torch.no_grad():
        want[""] = loaded(folder)(IDS, use_cache=False).logits[0].numpy()
    paths, out = [tmp_path / name for name in KINDS], tmp_path / "out"
    weft.compile(folder, out, switch_adapters=paths, passes="default,-last-token-logits", **options)
    model = og.Model(str(out))
    adapters = og.Adapters(model)
    for name in KINDS:
        adapters.load(str(out / f"{name}.onnx_adapter"), name)
    for name in ("first", "", "second", "first"):
        assert error(answered(model, adapters, name), want[name]) <= bound
        assert all(error(other, want[name]) > 0.3 for key, other in want.items() if key != name)
    assert error(weft.load(out).logits(IDS[0].tolist()), want[""]) <= bound  # weft runs the model without them


def test_compile_stores_adapters_of_known_families(tmp_path: Path) -> None:
    """By the names of the folder; ONNX Runtime takes the files by itself."""
    peft.save_base(tmp_path / "base")
    peft.write_tokenizer(tmp_path / "base")
    want = peft.logits(peft.adapt(tmp_path / "base", tmp_path / "mine", target_modules=["q_proj", "down_proj"]))
    every = ("-p", "default,-last-token-logits,-kv-cache")
    done("compile", tmp_path / "base", "--switch-adapter", tmp_path / "mine", "-o", tmp_path / "out", *every)
    assert json.loads((tmp_path / "out/weft.json").read_text())["adapters"] == {"mine": "mine.onnx_adapter"}
    session, options, adapter = ort.InferenceSession(tmp_path / "out/model.onnx"), ort.RunOptions(), ort.LoraAdapter()
    adapter.Load(str(tmp_path / "out/mine.onnx_adapter"))
    ids = np.array([peft.IDS])
    given = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(ids.shape[1])[None]}
    feeds = {i.name: given[i.name] for i in session.get_inputs()}
    plain = session.run(["logits"], feeds)[0][0]
    options.add_active_adapter(adapter)
    assert error(session.run(["logits"], feeds, options)[0][0], want) <= 1e-5 < error(plain, want)
    told = refused(
        "compile", tmp_path / "base", "--target", "torch", "--switch-adapter", tmp_path / "mine", "-o", tmp_path / "t"
    )
    assert "--switch-adapter needs a target that ONNX Runtime runs, not torch" in told


@pytest.mark.parametrize(
    ("lora", "reason"),
    [
        ({"target_modules": ["q"], "use_dora": True}, "lora_magnitude_vector.*merge the adapter by --adapter"),
        ({"target_modules": ["q"], "modules_to_save": ["norm"]}, "norm.*merge the adapter by --adapter"),
        ({"target_modules": ["lm_head"]}, "lm_head.*merge the adapter by --adapter"),
    ],
)
def test_adapters_of_unsupported_layers_are_refused(lora: dict[str, Any], reason: str, tmp_path: Path) -> None:
    folder = compiled("preset/smollm2-135m", tmp_path / "folder")
    adapted(folder, tmp_path / "adapter", **lora)
    with pytest.raises(WeftError, match=f"adapter.*{reason}"):
        weft.compile(folder, tmp_path / "out", switch_adapters=[tmp_path / "adapter"])


def test_refuses_names_twice_and_two_models(tmp_path: Path) -> None:
    folder = compiled("preset/smollm2-135m", tmp_path / "folder")
    for name in ("a/same", "b/same"):
        adapted(folder, tmp_path / name, target_modules=["q"])
    with pytest.raises(WeftError, match="two adapter folders have the name same"):
        weft.compile(folder, tmp_path / "out", switch_adapters=[tmp_path / "a/same", tmp_path / "b/same"])
    with pytest.raises(WeftError, match="is an encoder-decoder, so use --adapter"):
        weft.compile("t5-base", tmp_path / "out", switch_adapters=[tmp_path / "a/same"])
    with pytest.raises(WeftError, match="folder is not an adapter"):
        weft.compile(folder, tmp_path / "out", switch_adapters=[folder])
