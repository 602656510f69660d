"""Models written back as Hugging Face folders: transformers loads them, misses nothing, computes the same."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from weft.frontends import load_source
from weft.frontends.export.hf.checkpoint import write_folder
from weft.ir import WeftError, interpret
from weft.ir.graph import Graph
from weft.ir.recipes import Add, Map, Recipe, Scale
from weft.passes import Trace
from weft.passes.library.target.rope_length import RopeLength

from ..sampling import each
from .families import LENGTH, ROWS, VOCAB, error, reference
from .seq2seq import SEQ2SEQ, answered, pairs

# Weights that several layers share and each adapts cannot be told apart from what they are adapted with.
DECODERS = [name for name, row in ROWS.items() if row.is_decoder and name != "zamba2-adapters"]
ENCODERS = [name for name, row in ROWS.items() if row.is_encoder]
ONE_OF_EACH = list({ROWS[name].family: name for name in DECODERS}.values())
IDS = np.random.default_rng(1).integers(3, VOCAB, (2, LENGTH))


def loaded(model: torch.nn.Module, folder: Path, ignored: Sequence[str] = ()) -> torch.nn.Module:
    """The model in `folder` as transformers loads it: nothing left over or of another shape, nothing missing but what
    was `ignored`."""
    found: Any = type(model)
    attention = model.config._attn_implementation
    again, info = found.from_pretrained(folder, attn_implementation=attention, output_loading_info=True)
    assert info.pop("missing_keys") <= set(ignored)
    assert not any(info.values()), info
    result: torch.nn.Module = again.eval()
    return result


def is_exact(graph: Graph) -> bool:
    """Check that all recipes invert without rounding."""

    def rounds(recipe: Recipe) -> bool:
        sums = isinstance(recipe, Add) and len(recipe.items) > 1
        products = isinstance(recipe, Scale) and (isinstance(recipe.factor, Recipe) or not _power_of_two(recipe.factor))
        return sums or products or isinstance(recipe, Map) or any(rounds(part) for part in recipe.parts)

    return not any(rounds(param.recipe) for param in graph.params.values())


def _power_of_two(x: float) -> bool:
    return abs(math.frexp(x)[0]) == 0.5


@pytest.mark.halved
@pytest.mark.parametrize("name", each(8, DECODERS))
def test_transformers_loads_written_decoders(name: str, tmp_path: Path) -> None:
    model = ROWS[name].save(tmp_path / "hf")
    source = load_source(tmp_path / "hf")
    write_folder(source, tmp_path / "back")
    again = reference(loaded(model, tmp_path / "back"), IDS)
    want = reference(model, IDS)
    assert np.array_equal(again, want) if is_exact(source.graph) else error(again, want) < 1e-5


@pytest.mark.parametrize("name", each(2, ENCODERS))
def test_transformers_loads_written_encoders(name: str, tmp_path: Path) -> None:
    model = ROWS[name].save(tmp_path / "hf")
    source = load_source(tmp_path / "hf")
    write_folder(source, tmp_path / "back")
    with torch.inference_mode():
        nets = loaded(model, tmp_path / "back"), model
        again, want = (net(torch.from_numpy(IDS)) for net in nets)
    for part in ("last_hidden_state", "pooler_output"):
        if want.get(part) is not None:
            pair = again[part].numpy(), want[part].numpy()
            assert np.array_equal(*pair) if is_exact(source.graph) else error(*pair) < 1e-5


@pytest.mark.parametrize("name", each(3, SEQ2SEQ))
def test_transformers_loads_written_encoder_decoders(name: str, tmp_path: Path) -> None:
    """Sinusoids that a checkpoint stores are made anew by either side."""
    row = SEQ2SEQ[name]
    model = row.save(tmp_path / "hf")
    source = load_source(tmp_path / "hf")
    write_folder(source, tmp_path / "back")
    again = loaded(model, tmp_path / "back", source.ignored if row.sinusoids else ())
    assert np.array_equal(*(answered(net, pairs(row), LENGTH) for net in (again, model)))


@pytest.mark.halved
@pytest.mark.parametrize("name", each(4, ONE_OF_EACH))
def test_transformers_uses_rewritten_weights(name: str, tmp_path: Path) -> None:
    """Parameters that were changed here, as by training, have the same effect there."""
    model = ROWS[name].save(tmp_path / "hf")
    source = load_source(tmp_path / "hf")
    graph, rng, params = source.graph, np.random.default_rng(2), {}
    for parameter, param in graph.params.items():
        if list(param.recipe.sources()):
            value = param.recipe.evaluate(graph.reader)
            params[parameter] = (value * rng.uniform(0.8, 1.2, value.shape)).astype(np.float32)
    write_folder(source, tmp_path / "new", params=params)
    RopeLength(LENGTH).run(graph, Trace())
    inputs = {"input_ids": IDS, "position_ids": np.broadcast_to(np.arange(LENGTH), IDS.shape)}
    ours = interpret(graph, {k: v for k, v in inputs.items() if k in graph.inputs}, params=params)["logits"]
    theirs = reference(loaded(model, tmp_path / "new"), IDS)
    assert error(theirs, ours) < 1e-4
    assert error(theirs, reference(model, IDS)) > 1e-2


def test_writing_splits_shards_and_copies_config_and_tokenizer(tmp_path: Path) -> None:
    """Shards as long as asked for, with their index; what else the folder holds comes along."""
    model = ROWS["llama-gqa-tied"].save(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    source = load_source(tmp_path / "hf")
    write_folder(source, tmp_path / "one")
    write_folder(source, tmp_path / "many", shard_bytes=30_000)
    assert {p.name for p in (tmp_path / "one").iterdir()} == {
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
        *("model.safetensors", "provenance.json"),
    }
    shards = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(shards) > 3
    assert shards[0].name == f"model-00001-of-{len(shards):05}.safetensors"
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    tensors = {key: (shard.name, value) for shard in shards for key, value in load_file(shard).items()}
    assert index["weight_map"] == {key: name for key, (name, _) in tensors.items()}
    assert index["metadata"]["total_size"] == sum(value.nbytes for _, value in tensors.values())
    assert json.loads((tmp_path / "many" / "config.json").read_text()) == config
    whole = load_file(tmp_path / "one" / "model.safetensors")
    assert all(np.array_equal(whole[key], value) for key, (_, value) in tensors.items())
    assert np.array_equal(reference(loaded(model, tmp_path / "many"), IDS), reference(model, IDS))


@pytest.mark.parametrize(("dtype", "kind"), [("bf16", torch.bfloat16), ("f16", torch.float16), ("f32", torch.float32)])
def test_checkpoint_is_written_in_narrower_dtypes(dtype: str, kind: torch.dtype, tmp_path: Path) -> None:
    """The numbers are rounded as transformers rounds them, and stay so when nothing else is asked for."""
    model = ROWS["qwen3-gqa"].save(tmp_path / "hf")
    write_folder(load_source(tmp_path / "hf"), tmp_path / "small", dtype=dtype)
    write_folder(load_source(tmp_path / "small"), tmp_path / "again")
    want = {key: value.to(kind) for key, value in model.state_dict().items()}
    for folder in ("small", "again"):
        found = loaded(model, tmp_path / folder)
        assert json.loads((tmp_path / folder / "config.json").read_text())["dtype"] == str(kind).removeprefix("torch.")
        for key, value in found.state_dict().items():
            assert value.dtype == kind
            assert torch.equal(value, want[key])


def test_inexpressible_models_are_refused(tmp_path: Path) -> None:
    ROWS["llama-gqa-tied"].save(tmp_path / "hf")
    source = load_source(tmp_path / "hf")
    out = tmp_path / "out"
    norm = {"final_norm.weight": np.full(64, 1e6, np.float32)}
    with pytest.raises(
        WeftError, match=r"tensor 'model\.norm\.weight' holds 1e\+06, beyond the range of f16: choose --dtype"
    ):
        write_folder(source, out, dtype="f16", params=norm)
    with pytest.raises(WeftError, match="a checkpoint cannot be written in i8; choose f32, f16, bf16"):
        write_folder(source, out, dtype="i8")
    with pytest.raises(WeftError, match="preset gpt2 is not from a Hugging Face folder: use `weft export`"):
        write_folder(load_source("gpt2"), out)
    source.unread.append("mystery.weight")
    with pytest.raises(WeftError, match=r"tensor 'mystery\.weight' cannot be written: the model does not read it"):
        write_folder(source, out)
    assert not out.exists()
