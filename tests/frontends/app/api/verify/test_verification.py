"""weft verify: it passes what is right, and finds what is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

import weft
from weft.frontends.app.api.verify.verification import verify_folder
from weft.frontends.app.cli import cli
from weft.ir import WeftError

from .....e2e.head_models import save
from ....formats.weft.sealing import seal_again

TINY = """
from weft import Attention, Block, Decoder, GatedMLP, RMSNorm, RoPE

block = Block(Attention(heads=4, kv_heads=2, rope=RoPE(), window=8), GatedMLP(48), RMSNorm())
model = Decoder(vocab=97, dim=32, layers=3, block=block, context=64)
"""


def compiled(tmp_path: Path, **options: Any) -> Path:
    source = tmp_path / "tiny.py"
    source.write_text(TINY)
    weft.compile(source, tmp_path / "out", **options)
    return tmp_path / "out"


def verify_command(*args: str | Path) -> Result:
    return CliRunner().invoke(cli, ["verify", "--trust", *map(str, args)])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"target": "onnx"},
        {"dtype": "f16"},
        {"passes": "default, -last-token-logits"},
        {"passes": "kv-cache", "seed": 5},
    ],
    ids=str,
)
def test_faithful_folders_pass(tmp_path: Path, options: dict[str, Any]) -> None:
    found = verify_folder(compiled(tmp_path, **options), tokens=12, trust=True)
    assert found.passed
    assert found.argmax_agreement == 1 or options.get("dtype") == "f16"
    assert found.divergence is None
    assert list(found.layers)[:2] == ["layers.0", "layers.1"]
    assert found.kl_max is not None and -1e-9 < found.kl_max < (1e-2 if options.get("dtype") else 1e-9)
    # every position of a chunk where logits can be returned for all, else its last; 12 steps
    assert found.positions == 12 + (2 if options.get("target") == "onnx" else 16)


def test_noise_of_routers_is_left_out_of_the_reference_too(tmp_path: Path) -> None:
    source = tmp_path / "noisy.py"
    source.write_text(TINY.replace("GatedMLP", "MoE").replace("MoE(48)", "MoE(4, 48, 2, noisy=True)"))
    weft.compile(source, tmp_path / "out")
    found = verify_folder(tmp_path / "out", tokens=4, trust=True)
    assert found.passed and found.divergence is None


ON_PURPOSE = ['replace-activation{to="gelu_tanh"}', "prune-layers{layers=[1]}", "sliding-window{size=3}"]


@pytest.mark.parametrize("forgotten", ON_PURPOSE)
def test_reference_includes_lossy_passes(tmp_path: Path, forgotten: str) -> None:
    folder = compiled(tmp_path, passes=f"{', '.join(ON_PURPOSE)}, default")
    found = verify_folder(folder, tokens=4, trust=True)
    assert found.passed and found.divergence is None
    assert found.reference.endswith("model after " + ", ".join(ON_PURPOSE))
    manifest = (folder / "weft.json").read_text()
    quoted = json.dumps(forgotten)[1:-1]
    assert quoted in manifest
    (folder / "weft.json").write_text(manifest.replace(quoted, "dce"))
    seal_again(folder)
    assert not verify_folder(folder, tokens=4, trust=True).passed


@pytest.mark.parametrize("name", ["hybrid", "tiny_translator"])
def test_examples_that_do_not_only_look_back_pass(name: str, root: Path, tmp_path: Path) -> None:
    """Experts that choose among the tokens of a call, which therefore is one; an encoder's answer."""
    weft.compile(root / "examples" / f"{name}.py", tmp_path / "out", max_length=64)
    found = verify_folder(tmp_path / "out", tokens=3, trust=True)
    assert found.passed and found.divergence is None
    assert (found.positions, len(found.layers)) == ((16, 7) if name == "hybrid" else (4, 5))


def weight_of(folder: Path, node: str) -> tuple[int, int]:
    """Return the offset and bytes, in model.onnx.data, of the weight that makes the value `node`."""
    graph = onnx.load(folder / "model.onnx", load_external_data=False).graph
    reader = next(n for n in graph.node if node in n.output)
    weight = next(t for t in graph.initializer if t.name in reader.input)
    place = {entry.key: int(entry.value) for entry in weight.external_data if entry.key != "location"}
    return place["offset"], place["length"]


def test_a_wrong_weight_is_found(tmp_path: Path) -> None:
    folder = compiled(tmp_path)
    offset, length = weight_of(folder, "layers.1.ffn.down")
    data = np.memmap(folder / "model.onnx.data", np.float32, "r+", offset, (length // 4,))
    data[:] *= 1.5
    data.flush()
    with pytest.raises(WeftError, match=r"model\.onnx\.data was modified"):
        verify_folder(folder, trust=True)
    seal_again(folder)
    found = verify_folder(folder, trust=True)
    assert not found.passed
    assert found.divergence is not None
    assert (found.divergence.layer, found.divergence.value) == ("layers.1", "layers.1.ffn.down")
    result = verify_command(folder)
    assert result.exit_code == 1
    assert "FAILED" in result.stdout and "layers.1" in result.stdout
    shown = json.loads(verify_command(folder, "--json").stdout)
    assert shown["passed"] is False and shown["divergence"]["layer"] == "layers.1"


def test_wrong_weight_after_the_layers_is_found(tmp_path: Path) -> None:
    folder = compiled(tmp_path)
    offset, length = weight_of(folder, "lm_head")
    data = np.memmap(folder / "model.onnx.data", np.float32, "r+", offset, (length // 4,))
    data[:] *= 1.5
    data.flush()
    with pytest.raises(WeftError, match=r"model\.onnx\.data was modified"):
        verify_folder(folder, trust=True)
    seal_again(folder)
    result = verify_command(folder)
    assert result.exit_code == 1
    assert "in the last layer, norm or head" in result.stdout


def test_an_encoder_against_its_source_and_transformers(minilm_folder: Path, tmp_path: Path) -> None:
    weft.compile(minilm_folder, tmp_path / "out")
    for against in (None, minilm_folder):
        found = verify_folder(tmp_path / "out", against=against, prompt="a sentence of some words")
        assert found.passed and found.divergence is None
        assert found.argmax_agreement is None and found.kl_max is None
        assert len(found.layers) >= 5


def test_a_decoder_against_transformers(save: Callable[..., tuple[Any, Path]], tmp_path: Path) -> None:
    _, source = save("llama", num_key_value_heads=2, eos_token_id=None)
    weft.compile(source, tmp_path / "out")
    found = verify_folder(tmp_path / "out", against=source)
    assert found.passed and list(found.layers) == ["layers.0", "layers.1"]
    assert str(source) in found.reference


def test_another_model_fails(save: Callable[..., tuple[Any, Path]], tmp_path: Path) -> None:
    _, source = save("llama", eos_token_id=None)
    weft.compile(source, tmp_path / "out")
    _, other = save("llama", vocab_size=98, eos_token_id=None)
    with pytest.raises(WeftError, match="outputs of width 97, but transformers"):
        verify_folder(tmp_path / "out", against=other)


def test_folders_that_cannot_be_verified_are_refused(tmp_path: Path) -> None:
    assert "no such folder" in verify_command(tmp_path / "nothing").stderr
    folder = compiled(tmp_path)
    seal_again(folder, source={})
    assert "names no source" in verify_command(folder).stderr


@pytest.mark.parametrize("name", ["BertForPreTraining", "BertForMultipleChoice", "BartForSequenceClassification"])
def test_scores_of_a_head_are_compared(name: str, tmp_path: Path) -> None:
    save(tmp_path / "hf", name)
    weft.compile(tmp_path / "hf", tmp_path / "out")
    for against in (None, tmp_path / "hf"):
        found = verify_folder(tmp_path / "out", against=against)
        assert found.passed and {"prediction_logits", "seq_relationship_logits", "logits"} & found.outputs.keys()
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    last = next(n for n in weights if n.endswith(("seq_relationship.weight", "classifier.weight", "out_proj.weight")))
    weights[last] = weights[last] * 1.1
    save_file(weights, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    found = verify_folder(tmp_path / "out", against=tmp_path / "hf")
    assert not found.passed and found.divergence is None
