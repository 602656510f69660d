"""Exported GGUF files: what llama.cpp's converter would have written, and what other readers make of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from weft.frontends import load_source
from weft.frontends.app.api.export import export
from weft.frontends.app.api.rewrite import rewrite
from weft.frontends.export.gguf.keys import list_architectures
from weft.ir import Graph, WeftError, interpret
from weft.passes import Trace
from weft.passes.library.target.rope_length import RopeLength

from ....sampling import each
from ...conftest import Save
from ...formats.gguf.gguf_models import LONG, MODELS, SHORT, write_gguf

IDS = np.random.default_rng(2).integers(0, 97, (2, 24))


FEEDS = {"input_ids": IDS, "position_ids": np.tile(np.arange(24), (2, 1))}


SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


CASES = [
    (arch, i) for arch, models in MODELS.items() if arch in list_architectures(None)[1] for i in range(len(models))
]


# Said of gpt2, which has no rotations; follows from Gemma's architecture; of no meaning among experts; ours is how far
# LongRoPE's short factors reach.
UNSAID = ("freq_base", "sliding_window_pattern", "feed_forward_length", "context_length")


# llama.cpp reads a window in the first, and does not apply it; those of Gemma 3 and OLMo 3 have a pattern of their own
WINDOWED = {("phi3", 0), ("gemma3", 0), ("olmo2", 1)}


def compute_logits(graph: Graph) -> np.ndarray:
    RopeLength(24).run(graph, Trace())
    return interpret(graph, {name: FEEDS[name] for name in graph.inputs})["logits"]


def read_fields(reader: gguf.GGUFReader) -> dict[str, Any]:
    return {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}


@pytest.mark.parametrize(("arch", "index"), each(2, [case for case in CASES if case not in WINDOWED]))
def test_files_equal_those_of_the_converter(arch: str, index: int, save: Save, tmp_path: Path) -> None:
    """Names, order of rows, numbers and the keys of the converter's file, read by the gguf package."""
    model_type, config, metadata = MODELS[arch][index]
    _, folder = save(model_type, pad_token_id=0, **config)
    longrope = {"rope_factors_short.weight": SHORT, "rope_factors_long.weight": LONG}
    scaled = "rope.scaling.attn_factor" in metadata
    extra = {name: np.array(x, np.float32) for name, x in longrope.items()} if scaled else {}
    write_gguf(tmp_path / "theirs.gguf", folder, arch, extra, False, metadata)
    assert export(folder, tmp_path / "ours.gguf", format="gguf") == arch
    theirs, ours = (gguf.GGUFReader(tmp_path / f"{who}.gguf") for who in ("theirs", "ours"))
    wanted, found = ({t.name: t.data for t in reader.tensors} for reader in (theirs, ours))
    assert found.keys() == wanted.keys()
    for name, data in wanted.items():
        np.testing.assert_allclose(found[name], data, rtol=2e-7, err_msg=name)
    said = read_fields(ours)
    for key, value in read_fields(theirs).items():
        if not key.endswith(UNSAID):
            assert said[key] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), key


@pytest.mark.parametrize(("arch", "index"), each(2, CASES, first=1))
def test_files_load_as_the_same_model(arch: str, index: int, save: Save, tmp_path: Path) -> None:
    model_type, config, _ = MODELS[arch][index]
    _, folder = save(model_type, pad_token_id=0, **config)
    model = load_source(folder)
    if (arch, index) in WINDOWED:
        with pytest.raises(WeftError, match=r"no architecture of llama\.cpp expresses the graph"):
            export(model, tmp_path / "out.gguf", format="gguf")
        assert not (tmp_path / "out.gguf").exists()
        return
    export(model, tmp_path / "out.gguf", format="gguf")
    again = load_source(tmp_path / "out.gguf")
    assert (again.unread, again.ignored) == ([], [])
    want = compute_logits(model.graph)
    assert np.abs(compute_logits(again.graph) - want).max() <= 1e-5 * np.abs(want).max()


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("llama", {"num_key_value_heads": 2}),
        ("llama", {"num_key_value_heads": 2, "head_dim": 12, "tie_word_embeddings": True}),
        ("qwen2", {"num_key_value_heads": 2}),
        ("stablelm", {"num_key_value_heads": 2, "use_qkv_bias": True, "layer_norm_eps": 1e-5}),
    ],
)
def test_transformers_loads_the_files(model_type: str, config: dict[str, Any], save: Save, tmp_path: Path) -> None:
    """Through a reader of its own; it needs a package to load whole models, but not to read the tensors."""
    import torch
    import transformers
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    _, folder = save(model_type, **config)
    model = rewrite(load_source(folder), "pack-qkv" if model_type == "stablelm" else "fold-norm-scale, pack-qkv")
    export(model, tmp_path / "out.gguf", format="gguf")
    said = load_gguf_checkpoint(tmp_path / "out.gguf")["config"]
    assert said.pop("model_type") == model_type
    made = transformers.AutoConfig.for_model(model_type, **said)
    hf = transformers.AutoModelForCausalLM.from_config(made)
    read = load_gguf_checkpoint(tmp_path / "out.gguf", return_tensors=True, model_to_load=hf)["tensors"]
    missing, unexpected = hf.load_state_dict(read, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"] if made.tie_word_embeddings else [], [])
    hf.tie_weights()
    with torch.inference_mode():
        got = hf.eval()(torch.from_numpy(IDS)).logits.numpy()
    want = compute_logits(model.graph)
    assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max()


@pytest.mark.parametrize("scaling", ["linear", "yarn", "llama3"])
def test_rope_scalings_are_stored(scaling: str, save: Save, tmp_path: Path) -> None:
    rope: dict[str, Any] = {"rope_type": scaling, "rope_theta": 500.0, "factor": 4.0}
    if scaling != "linear":
        rope["original_max_position_embeddings"] = 16
    if scaling == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    _, folder = save("llama", num_key_value_heads=2, rope_parameters=rope)
    export(folder, tmp_path / "out.gguf", format="gguf")
    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    assert read_fields(reader).get("llama.rope.scaling.type") == (None if scaling == "llama3" else scaling)
    assert ("rope_freqs.weight" in {t.name for t in reader.tensors}) == (scaling == "llama3")
    again, want = load_source(tmp_path / "out.gguf"), compute_logits(load_source(folder).graph)
    assert (again.unread, again.ignored) == ([], [])
    assert np.abs(compute_logits(again.graph) - want).max() <= 1e-5 * np.abs(want).max()


@pytest.mark.parametrize(("dtype", "bound"), [("f16", 2**-10), ("bf16", 2**-7), ("q8_0", 2**-6)])
def test_matrices_are_stored_in_the_dtype(dtype: str, bound: float, save: Save, tmp_path: Path) -> None:
    _, folder = save("llama", num_key_value_heads=2, intermediate_size=72)  # rows of 72: no whole blocks
    export(folder, tmp_path / "out.gguf", format="gguf", dtype=dtype)
    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    kinds = {t.name: t.tensor_type.name.lower() for t in reader.tensors}
    assert kinds["output_norm.weight"] == "f32" and kinds["blk.0.attn_q.weight"] == dtype
    assert kinds["blk.0.ffn_down.weight"] == ("f16" if dtype == "q8_0" else dtype)
    assert read_fields(reader)["general.file_type"] == {"f16": 1, "q8_0": 7, "bf16": 32}[dtype]
    ours, theirs = load_source(folder).graph, load_source(tmp_path / "out.gguf").graph
    for name in ("layers.1.attn.q.weight", "layers.2.ffn.down.weight", "embed.weight"):
        want, got = (g.params[name].recipe.evaluate(g.reader) for g in (ours, theirs))
        assert 0 < np.abs(got - want).max() <= bound * np.abs(want).max()
    for tensor in reader.tensors:
        data = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if tensor.name == "token_embd.weight":
            assert np.array_equal(data, theirs.params["embed.weight"].recipe.evaluate(theirs.reader))


@pytest.mark.parametrize(
    ("model_type", "config", "told"),
    [
        ("qwen3_moe", SPARSE | {"norm_topk_prob": False}, "renormalize=true"),
        ("qwen2", {"num_key_value_heads": 2, "use_sliding_window": True, "max_window_layers": 1}, "window=none"),
        ("phi", {"qk_layernorm": True}, "the nearest, .* differs at"),
        ("cohere", {"head_dim": 12, "num_key_value_heads": 2, "logit_scale": 0.25}, "no architecture of llama"),
        ("gemma2", {"num_key_value_heads": 2, "tie_word_embeddings": False}, "no architecture of llama"),
        ("phi", {"tie_word_embeddings": True}, "no architecture of llama"),
    ],
)
def test_graphs_that_llama_cpp_cannot_load_are_refused(
    model_type: str, config: dict[str, Any], told: str, save: Save, tmp_path: Path
) -> None:
    """Our importer would read more than llama.cpp does: norms of queries in any architecture, windows, odd heads,
    heads that are tied or not."""
    _, folder = save(model_type, pad_token_id=0, **config)
    with pytest.raises(WeftError, match=told):
        export(folder, tmp_path / "out.gguf", format="gguf")


def test_invalid_options_are_refused(save: Save, tmp_path: Path) -> None:
    _, folder = save("llama", num_key_value_heads=2)
    (tmp_path / "old.gguf").write_text("old")
    for options, told in (
        ({"dtype": "q4_0"}, "dtype q4_0 is not supported in GGUF files; choose f32, f16, bf16, q8_0"),
        ({"dtype": "f33"}, "unknown dtype 'f33'"),
        (
            {"passes": "sliding-window{size=3}"},
            "the nearest, llama, differs at layers.0.attn.attention: it has window=none",
        ),
        ({"passes": "strip-positions, replace-norm{kind=layer}"}, "no architecture of llama.cpp expresses the graph"),
    ):
        with pytest.raises(WeftError, match=told):
            export(folder, tmp_path / "old.gguf", format="gguf", **options)
    with pytest.raises(WeftError, match="it is a folder"):
        export(folder, tmp_path, format="gguf")
    with pytest.raises(WeftError, match=r"cannot write to .*/nowhere/out.gguf: no such file or directory"):
        export(folder, tmp_path / "nowhere/out.gguf", format="gguf")
    assert (tmp_path / "old.gguf").read_text() == "old"
    assert {p.name for p in tmp_path.iterdir()} == {"model", "old.gguf"}
