"""Exported checkpoints: transformers loads them, misses nothing, and computes what the graph does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

import weft
from weft.frontends import load_source
from weft.frontends.app.api.export import export
from weft.frontends.app.api.rewrite import rewrite
from weft.frontends.export.hf.configs import list_families
from weft.frontends.model import Model
from weft.ir import Graph, WeftError, interpret, ops
from weft.passes import Trace
from weft.passes.library.target.rope_length import RopeLength

from ..sampling import ALL, each
from .families import LENGTH, ROWS, VOCAB, error, reference
from .seq2seq import SEQ2SEQ
from .test_genai import generated

IDS = np.random.default_rng(1).integers(3, VOCAB, (2, LENGTH))
POSITIONS = np.tile(np.arange(LENGTH), (2, 1))
PROPOSED = [name for name, row in ROWS.items() if row.family in list_families()]
FIRST = set({ROWS[name].family: name for name in reversed(PROPOSED)}.values())  # one of each family
OTHERS = {
    row.family: name
    for name, row in ROWS.items()
    if row.is_decoder
    and row.family not in {*list_families(), *(row.family for row in SEQ2SEQ.values())}
    and name != "zamba2-adapters"  # see test_checkpoint
}


def loaded(folder: Path, attention: str = "eager", kind: Any = transformers.AutoModelForCausalLM) -> torch.nn.Module:
    """The model in `folder` as the class `kind` loads it: nothing left over, nothing missing."""
    model, info = kind.from_pretrained(folder, attn_implementation=attention, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


def tensors(folder: Path) -> dict[str, np.ndarray]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def meaning(graph: Graph) -> np.ndarray:
    """The logits in float64."""
    RopeLength(LENGTH).run(graph, Trace())
    feeds = {"input_ids": IDS, "position_ids": POSITIONS}
    return interpret(graph, {name: feeds[name] for name in graph.inputs})["logits"]


def anonymous(model: Model) -> Model:
    """`model` without a word of where it comes from."""
    del model.graph.meta["source"], model.graph.meta["model_type"]
    return model


# -- nothing rewritten


@pytest.mark.halved
@pytest.mark.parametrize("name", each(3, PROPOSED))
def test_family_is_inferred_from_the_graph(name: str, tmp_path: Path) -> None:
    """Without its config, and without rounding: the tensors are those of the checkpoint to the bit, and the config says
    what its own does."""
    row = ROWS[name]
    model = row.save(tmp_path / "hf")
    source = load_source(tmp_path / "hf")
    text = str(source.graph)
    del source.graph.meta["source"]
    assert export(source, tmp_path / "out") == row.family
    before, after = tensors(tmp_path / "hf"), tensors(tmp_path / "out")
    shared = before.keys() & after.keys()
    assert len(shared) >= 0.5 * len(before)  # experts may be stored together or apart
    assert all(np.array_equal(before[key], after[key]) for key in shared)
    if before.keys() == after.keys():
        assert str(load_source(tmp_path / "out").graph).replace("/out", "/hf") == text
    if name in FIRST:
        assert error(reference(loaded(tmp_path / "out"), IDS), reference(model, IDS)) <= 1e-5


@pytest.mark.halved
@pytest.mark.parametrize("name", each(3, OTHERS.values()))
def test_families_without_inference_keep_their_config(name: str, tmp_path: Path) -> None:
    row = ROWS[name]
    kind = type(row.save(tmp_path / "hf"))
    model = rewrite(load_source(tmp_path / "hf"), "pack-qkv, pack-gate-up, fuse-residual-norm")
    assert export(model, tmp_path / "out") == row.family
    assert error(reference(loaded(tmp_path / "out", row.attention, kind), IDS), meaning(model.graph)) <= 1e-4
    old, new = (json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("hf", "out"))
    assert {**old, "dtype": "float32"} == new


# -- rewritten

# model of the table, pipeline, the family that expresses the result
REWRITTEN = [
    ("llama-gqa-tied", "fold-norm-scale{untie=true}, pack-qkv, pack-gate-up, fuse-residual-norm", "llama"),
    ("llama-gqa-tied", "fuse-norm-linear{untie=true}, pack-qkv", "llama"),
    ("llama-mha-biases", "fuse-norm-linear, fold-scale", "granite"),
    ("llama-mha-biases", "drop-k-bias, v-bias-to-o-bias, pack-qkv", "llama"),
    ("llama-gqa-tied", "gqa-to-mha", "llama"),
    ("llama-gqa-tied", "sliding-window{size=8}", "mistral"),
    ("llama-gqa-tied", "sliding-window{size=8, layers=[1]}", "qwen2"),
    ("llama-gqa-tied", "extend-context{method=pi, factor=4}", "llama"),
    ("llama-gqa-tied", "extend-context{method=ntk, factor=4}", "llama"),
    ("llama-gqa-tied", "extend-context{method=yarn, factor=4}", "llama"),
    ("llama-gqa-tied", "extend-context{method=llama3, factor=4}", "llama"),
    ("llama-gqa-tied", "prune-layers{layers=[1]}", "llama"),
    ("llama-gqa-tied", "replace-activation{to=gelu}", "llama"),
    ("llama-gqa-tied", "upcycle-to-moe{experts=4, top_k=2}", "mixtral"),
    ("gpt2-untied", "strip-positions, insert-rope", "gpt_neox"),
    ("gptj", "rope-layout{layout=half}", "phi"),
    ("gemma", "fold-norm-scale{untie=true}, fold-scale", "granite"),
    ("gemma2", "fold-norm-scale, fuse-residual-norm", "gemma2"),
    ("qwen3-gqa", "fuse-norm-linear", "qwen3"),
    ("mixtral", "fold-norm-scale, pack-qkv", "mixtral"),
    ("mamba", "fold-norm-scale, fuse-residual-norm", "mamba"),
    ("deepseek-v3", "fold-norm-scale", "deepseek_v3"),
]


@pytest.mark.halved
@pytest.mark.parametrize(("name", "pipeline", "family"), REWRITTEN)
def test_exported_rewrites_agree_with_the_graph(name: str, pipeline: str, family: str, tmp_path: Path) -> None:
    ROWS[name].save(tmp_path / "hf")
    model = rewrite(load_source(tmp_path / "hf"), pipeline)
    assert export(model, tmp_path / "out") == family
    assert error(reference(loaded(tmp_path / "out"), IDS), meaning(model.graph)) <= 1e-4


@pytest.mark.parametrize("name", each(2, ["llama-mha-biases", "qwen2-gqa-tied"]))
def test_inexpressible_score_scale_is_folded_into_queries(name: str, tmp_path: Path) -> None:
    """Of the families with windows none has a scale of its own."""
    ROWS[name].save(tmp_path / "hf")
    model = rewrite(load_source(tmp_path / "hf"), "sliding-window{size=8, layers=[1]}")
    for node in model.graph.nodes:
        if node.op is ops.attention:
            node.attrs["scale"] = 0.1
    assert export(model, tmp_path / "out") in ("qwen2", "smollm3")
    assert error(reference(loaded(tmp_path / "out"), IDS), meaning(model.graph)) <= 1e-4


@pytest.mark.parametrize(
    ("name", "pipeline", "told"),
    [
        ("gpt2-untied", "fuse-norm-linear", "gpt2, differs at lm_head: it has no bias, the graph a bias"),
        ("gpt2-tied", "insert-rope", "gpt_neox, differs at embed: it has embedding, the graph add"),
        (
            "llama-gqa-tied",
            "sliding-window{size=8, keep_first=1}",
            "differs at layers.0.attn.attention: it has keep_first=0",
        ),
        ("bloom", "", "no Hugging Face family expresses the graph: the nearest, "),
        ("mamba", "", "no Hugging Face family expresses the graph: the graph has no softmax attention"),
        ("deepseek-v3", "", "q is made by concat"),
        ("llama-gqa-tied", "replace-activation{to=relu}, kv-cache", "export before the pass kv-cache"),
    ],
)
def test_inexpressible_graphs_are_refused_in_one_sentence(name: str, pipeline: str, told: str, tmp_path: Path) -> None:
    ROWS[name].save(tmp_path / "hf")
    model = anonymous(load_source(tmp_path / "hf"))
    with pytest.raises(WeftError) as caught:
        export(model, tmp_path / "out", passes=pipeline)
    assert told in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_encoders_are_not_exported_as_causal_models(minilm_folder: Path, tmp_path: Path) -> None:
    """Their own config says what they are, as long as the graph is still that."""
    model = rewrite(load_source(minilm_folder), "pack-qkv")
    assert export(model, tmp_path / "out") == "bert"
    before, after = tensors(minilm_folder), tensors(tmp_path / "out")
    assert all(np.array_equal(before[key], after[key]) for key in after)
    with pytest.raises(WeftError, match="the graph has no output logits, which a decoder needs"):
        export(anonymous(model), tmp_path / "other")


@pytest.mark.parametrize("name", ["t5", "bart", "switch"])
def test_encoder_decoders_keep_their_config(name: str, tmp_path: Path) -> None:
    model = SEQ2SEQ[name].save(tmp_path / "hf")
    export(tmp_path / "hf", tmp_path / "out", passes="pack-qkv, fuse-residual-norm")
    again, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    before, after = model.state_dict(), again.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


# -- dtypes and files


def test_export_dtype_can_be_chosen(tmp_path: Path) -> None:
    row = ROWS["llama-gqa-tied"]
    row.save(tmp_path / "hf").to(torch.bfloat16).save_pretrained(tmp_path / "hf")
    for dtype, stored in ((None, "bfloat16"), ("f16", "float16"), ("f32", "float32")):
        export(tmp_path / "hf", tmp_path / str(dtype), dtype=dtype)
        config = json.loads((tmp_path / str(dtype) / "config.json").read_text())
        kinds = {str(t.dtype) for t in tensors(tmp_path / str(dtype)).values()}
        assert (config["dtype"], kinds) == (stored, {stored})
        assert str(loaded(tmp_path / str(dtype)).dtype) == f"torch.{stored}"
    with pytest.raises(WeftError, match="cannot be written in i8"):
        export(tmp_path / "hf", tmp_path / "out", dtype="i8")
    export(
        tmp_path / "hf", tmp_path / "cast", passes="cast{dtype=f16}"
    )  # the graph's own comes before the checkpoint's
    assert {str(t.dtype) for t in tensors(tmp_path / "cast").values()} == {"float16"}
    export(tmp_path / "hf", tmp_path / "mixed", passes="fold-scale, fold-norm-scale")
    assert {str(t.dtype) for t in tensors(tmp_path / "mixed").values()} == {"float32"}


def test_exported_parameters_keep_their_names(tmp_path: Path) -> None:
    ROWS["llama-gqa-tied"].save(tmp_path / "hf")
    model = rewrite(load_source(tmp_path / "hf"), "pack-qkv")
    assert export(model, tmp_path / "out.safetensors", format="safetensors") == ""
    found = load_file(tmp_path / "out.safetensors")
    for name, value in found.items():
        param = model.graph.params[name]
        assert np.array_equal(value, param.recipe.evaluate(model.graph.reader))
    assert set(model.graph.params) - set(found) == {"rope.frequencies"}
    with pytest.raises(WeftError, match="it is a folder"):
        export(model, tmp_path, format="safetensors")
    with pytest.raises(WeftError, match="unknown format 'onnx'; weft exports hf, safetensors, gguf"):
        export(model, tmp_path / "out", format="onnx")


def test_export_replaces_its_files_and_keeps_foreign_ones(tmp_path: Path) -> None:
    ROWS["llama-gqa-tied"].save(tmp_path / "hf")
    export(tmp_path / "hf", tmp_path / "out")
    export(tmp_path / "hf", tmp_path / "out", passes="pack-qkv")
    record = json.loads((tmp_path / "out/provenance.json").read_text())
    assert record["pipeline"] == "pack-qkv" and "config.json" in record["source"]["hashes"]
    with pytest.raises(WeftError, match="holds files that weft did not write"):
        export(tmp_path / "out", tmp_path / "hf")
    assert load_source(tmp_path / "out").unread == []  # it can go in again


# -- a real model


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """SmolLM2 rewritten and exported; the folders of weft and of transformers."""
    home = tmp_path_factory.mktemp("smollm2")
    from weft.frontends.formats.weft.model_folder import write_model

    model = rewrite(
        load_source(smollm2_gguf), "fold-norm-scale{untie=true}, pack-qkv, pack-gate-up, fuse-residual-norm"
    )
    write_model(model, home / "weft")
    export(home / "weft", home / "hf")
    return home / "weft", home / "hf"


@pytest.mark.long
def test_smollm2_from_gguf_to_transformers(smollm2: tuple[Path, Path], smollm2_gguf: Path, tmp_path: Path) -> None:
    """Equal logits and greedy tokens, and the tokenizer goes along."""
    model = loaded(smollm2[1], "sdpa")
    weft.compile(smollm2_gguf, tmp_path / "out", passes="default, -last-token-logits", max_length=64)
    ours = weft.load(tmp_path / "out", threads=2)
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2[1])
    text = "The capital of France is"
    ids = tokenizer(text)["input_ids"]
    want = ours.logits(ids)
    with torch.inference_mode():
        got = model(torch.tensor([ids])).logits[0].numpy()
        out = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert error(got, want) <= 1e-4
    (answer,) = ours.generate([ids], max_tokens=12)
    assert out[0, len(ids) :].tolist() == answer.tokens
    assert tokenizer.decode(answer.tokens).startswith(" Paris")
    shutil.rmtree(tmp_path)


@pytest.mark.long
def test_one_key_and_value_head_in_every_runtime(smollm2_gguf: Path, tmp_path: Path) -> None:
    """SmolLM2 with one key/value head fitted to its three: transformers and onnxruntime-genai agree, and the cache is
    a third. `make test` keeps its first six layers."""
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(0, 49_152, (1, 96)))
    few = "" if ALL else 'prune-layers{layers="6-29"}, '
    fitted = f"{few}mha-to-gqa{{kv_heads=1, method=svd, calibration={json.dumps(str(tmp_path / 'ids.npy'))}}}"
    whole, small = (rewrite(load_source(smollm2_gguf), passes) for passes in (f"{few}dce", fitted))
    assert weft.inspect(whole).cache_per_token == 3 * weft.inspect(small).cache_per_token
    export(small, tmp_path / "hf")
    prompt = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")("The capital of France is")["input_ids"]
    model = loaded(tmp_path / "hf", "sdpa")
    assert model.config.num_key_value_heads == 1
    report = weft.compile(tmp_path / "hf", tmp_path / "out", max_length=64)
    assert report.notes == []
    found = generated(tmp_path / "out", prompt, len(prompt) + 16)
    assert (found[: len(prompt)], len(found)) == (prompt, len(prompt) + 16)
    logits = reference(model, np.array([found]))[0, len(prompt) - 1 : -1]
    logits[:, report.graph.meta["eos_token_ids"]] = -np.inf  # not before 16 tokens
    assert logits.argmax(-1).tolist() == found[len(prompt) :]
