"""Folders in the layout of optimum and transformers.js, read by ONNX Runtime alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

import weft
from weft import WeftError
from weft.backends.onnx import hub_layout
from weft.frontends.app.api.verify.verification import verify_folder

from ...e2e.families import ROWS, VOCAB
from ...e2e.head_models import BERT, save
from ...e2e.seq2seq import SEQ2SEQ
from ...e2e.sounds import SPEECH


def compiled(name: str, folder: Path, target: str = "web", **options: Any) -> tuple[Any, Path]:
    """Return the model of transformers and its compiled folder."""
    model = (ROWS | SEQ2SEQ | SPEECH)[name].save(folder / "hf").eval()
    weft.compile(folder / "hf", folder / "out", target=target, max_length=48, **options)
    return model, folder / "out"


def sizes(value: Any) -> list[str | int]:
    return [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]


@pytest.mark.parametrize("target", ["web", "onnx"])
@pytest.mark.parametrize("name", ["llama-gqa-tied", "bloom", "mistral-gqa", "gpt-oss", "gemma2", "mpt"])
def test_left_padded_rows_equal_transformers(name: str, target: str, tmp_path: Path) -> None:
    options = {"precisions": "fp32"} if target == "web" else {"layout": "optimum"}
    model, folder = compiled(name, tmp_path, target, **options)
    session = ort.InferenceSession(folder / "onnx/model.onnx")
    rng = np.random.default_rng(0)
    mask = (np.arange(9) >= [[0], [4]]).astype(np.int64)
    ids = np.where(mask, rng.integers(3, VOCAB, (2, 9)), 0)
    positions = np.maximum(np.cumsum(mask, 1) - 1, 0)
    names = {value.name: value for value in session.get_inputs()}
    shapes = {n: [2, *(d if isinstance(d, int) else 0 for d in v.shape[1:])] for n, v in names.items()}
    states = {name: np.zeros(shape, np.float32) for name, shape in shapes.items() if name.startswith("past")}
    assert all(v.shape[0] == "batch_size" for v in names.values())
    begin = 0
    for end in (6, 7, 8, 9):  # a prompt, then calls that continue the caches
        fed = {"input_ids": ids[:, begin:end], "attention_mask": mask[:, :end], "position_ids": positions[:, begin:end]}
        outputs = [value.name for value in session.get_outputs()]
        inputs = {name: array for name, array in (fed | states).items() if name in names}
        results = dict(zip(outputs, session.run(None, inputs), strict=True))
        states = {n.replace("present", "past_key_values"): v for n, v in results.items() if n != "logits"}
        begin = end
    for row, start in ((0, 0), (1, 4)):
        with torch.inference_mode():
            wanted = model(torch.tensor(ids[row : row + 1, start:])).logits[0, -1].numpy()
        assert np.abs(results["logits"][row, -1] - wanted).max() < 1e-4 * max(1, np.abs(wanted).max())


def test_encoder_decoders_compute_keys_of_the_source_once(tmp_path: Path) -> None:
    _, folder = compiled("t5", tmp_path, precisions="fp32")
    encoder, decoder = (onnx.load(folder / f"onnx/{name}.onnx") for name in ("encoder_model", "decoder_model_merged"))
    assert [v.name for v in encoder.graph.input] == ["input_ids", "attention_mask"]
    assert [v.name for v in encoder.graph.output] == ["last_hidden_state"]
    weights = {w.name for w in decoder.graph.initializer}
    names = [v.name for v in decoder.graph.input if v.name not in weights]
    assert {"input_ids", "encoder_hidden_states", "encoder_attention_mask"} <= {*names}
    assert all(n.endswith((".decoder.key", ".decoder.value")) for n in names if n.startswith("past"))
    assert not {"attention_mask", "position_ids"} & {*names}
    with pytest.raises(WeftError, match=r"weft cannot run .* in the layout of optimum: load it with optimum"):
        weft.load(folder)


def test_config_states_caches_files_and_tokens(tmp_path: Path) -> None:
    _, folder = compiled("qwen3-gqa", tmp_path, precisions="q4, fp32")
    config = json.loads((folder / "config.json").read_text())
    graph = onnx.load(folder / "onnx/model_q4.onnx", load_external_data=False).graph
    caches = [sizes(v) for v in graph.input if v.name.endswith(".key")]
    assert config["num_hidden_layers"] == len(caches)
    assert caches[0] == ["batch_size", config["num_key_value_heads"], "past_sequence_length", config["head_dim"]]
    assert config["hidden_size"] == config["num_attention_heads"] * config["head_dim"]
    own = config["transformers.js_config"]
    assert own == {"dtype": "q4", "use_external_data_format": {"model_q4.onnx": 1, "model.onnx": 1}}
    assert {file.name for file in (folder / "onnx").iterdir()} == {
        *("model.onnx", "model.onnx_data", "model_q4.onnx", "model_q4.onnx_data")
    }
    assert len(weft.load(folder).generate([3, 4, 5], max_tokens=3)[0].tokens) == 3  # the first precision


def test_large_weights_are_split_into_files_of_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_layout, "MOST_BYTES", 60_000)
    model, folder = compiled("llama-gqa-tied", tmp_path, precisions="fp32")
    chunks = sorted((folder / "onnx").glob("model.onnx_data*"))
    assert len(chunks) > 2
    assert all(chunk.stat().st_size <= 60_000 for chunk in chunks)
    config = json.loads((folder / "config.json").read_text())
    assert config["transformers.js_config"]["use_external_data_format"] == {"model.onnx": len(chunks)}
    prompt = [3, 14, 15, 9]
    tokens = weft.load(folder).generate(prompt, max_tokens=6, temperature=0)[0].tokens
    with torch.inference_mode():
        wanted = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert wanted[0].tolist()[4 : 4 + len(tokens)] == tokens
    monkeypatch.setattr(hub_layout, "MOST_BYTES", 4_000)
    with pytest.raises(WeftError, match=r"takes [\d,]+ bytes, of 4,000 that a file may have"):
        compiled("llama-gqa-tied", tmp_path, precisions="fp32")


def test_chat_templates_and_token_types_reach_transformers_js(tmp_path: Path) -> None:
    save(tmp_path / "hf", "BertForSequenceClassification", BERT, num_labels=1)
    (tmp_path / "hf/chat_template.jinja").write_text("{{ messages }}")
    weft.compile(tmp_path / "hf", tmp_path / "out", target="web")
    tokenizer = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert tokenizer["tokenizer_class"] == "BertTokenizer"  # others give no token types
    assert tokenizer["chat_template"] == "{{ messages }}"
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["weft"]["ranks"] is True
    assert (tmp_path / "out/index.html").is_file()


def test_states_other_than_caches_are_for_the_loader_alone(tmp_path: Path) -> None:
    _, folder = compiled("mamba", tmp_path, precisions="fp32")
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "weft"
    assert {state["input"] for state in config["weft"]["states"]} <= {
        value.name for value in ort.InferenceSession(folder / "onnx/model.onnx").get_inputs()
    }
    with pytest.raises(
        WeftError, match="the layout optimum does not fit mamba: optimum keeps caches of keys and of values"
    ):
        compiled("mamba", tmp_path, "onnx", layout="optimum")


def test_scripts_are_copied_and_the_runtime_is_compressed(tmp_path: Path) -> None:
    modules = tmp_path / "node_modules"
    package, runtime = modules / "@huggingface/transformers", modules / "onnxruntime-web/dist"
    (package / "dist").mkdir(parents=True)
    runtime.mkdir(parents=True)
    (package / "package.json").write_text('{"version": "4.3.2"}')
    (package / "dist/transformers.min.js").write_text("export {};")
    for end in ("mjs", "wasm"):
        (runtime / f"ort-wasm-simd-threaded.asyncify.{end}").write_bytes(b"\0" * 4096)
    save(tmp_path / "hf", "BertModel", BERT)
    weft.compile(tmp_path / "hf", tmp_path / "out", target="web", javascript=str(modules))
    names = {file.name for file in (tmp_path / "out/javascript").iterdir()}
    assert names == {
        *("transformers.min.js", "ort-wasm-simd-threaded.asyncify.mjs", "ort-wasm-simd-threaded.asyncify.wasm.gz")
    }
    (package / "package.json").write_text('{"version": "3.0.0"}')
    with pytest.raises(WeftError, match=r"has version 3.0.0, but the page is for 4.3.2"):
        weft.compile(tmp_path / "hf", tmp_path / "out", target="web", javascript=str(modules))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("whisper", "it reads sound, which needs a processor"),
        ("deepseek-v3", "optimum keeps caches of keys and of values"),
        ("gemma4", "optimum keeps caches of one size|no other states"),
    ],
)
def test_models_that_the_libraries_cannot_feed_are_refused(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(WeftError, match=f"the layout optimum does not fit .*: {message}"):
        compiled(name, tmp_path, "onnx", layout="optimum")


@pytest.mark.parametrize("name", ["llama-gqa-tied", "bert"])
@pytest.mark.parametrize(
    "options", [{"target": "web", "precisions": "q8"}, {"target": "onnx", "layout": "optimum", "weights": "int8"}]
)
def test_folders_are_verified_against_their_source(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    ROWS[name].save(tmp_path / "hf")
    weft.compile(tmp_path / "hf", tmp_path / "out", **options)
    result = verify_folder(tmp_path / "out")
    assert result.passed
    assert result.weights is not None
    assert result.weights.tensors > 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": "buffer"}, "its libraries keep caches that grow, not of a fixed capacity"),
        ({"cache_dtype": "int8"}, "optimum keeps caches of floats: leave out --cache-dtype"),
    ],
)
def test_caches_that_optimum_cannot_keep_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(WeftError, match=message):
        compiled("llama-gqa-tied", tmp_path, "onnx", layout="optimum", **options)
