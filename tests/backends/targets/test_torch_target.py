"""The target torch: options as passes, forms of a graph, and functions that open its folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weft import Attention, Block, Decoder, Encoder, GatedMLP, RMSNorm, RoPE
from weft.backends.folder_facts import FolderFacts
from weft.backends.target import TARGETS
from weft.ir import Graph, WeftError, parse
from weft.passes import run_passes

TORCH = TARGETS["torch"]
SIZES: dict[str, Any] = {"vocab": 17, "dim": 16, "layers": 1, "context": 16}


def block(**options: Any) -> Block:
    return Block(Attention(2, head_dim=8, rope=RoPE(), **options), GatedMLP(24), RMSNorm())


@pytest.fixture(scope="module")
def decoder() -> Graph:
    return Decoder(**SIZES, block=block()).graph()


@pytest.mark.parametrize(
    ("options", "passes"),
    [
        ({}, {}),
        ({"cache_dtype": "fp8"}, {}),  # modules round keys and values themselves
        ({"cache_dtype": "int4"}, {"cache_dtype": "quantize-cache{bits=4}"}),
        ({"keep_blocks": "all"}, {"keep_blocks": "keep-blocks{which=all}"}),
        ({"activations": "fp8"}, {"keep_blocks": "keep-blocks{which=quantized, activations=fp8}"}),
        (
            {"activations": "fp8", "keep_blocks": "head"},
            {"keep_blocks": "keep-blocks{which=head, activations=fp8}, keep-blocks{which=quantized, activations=fp8}"},
        ),
    ],
)
def test_options_request_passes(options: dict[str, Any], passes: dict[str, str]) -> None:
    assert TORCH.options(**options).passes() == passes


def test_weights_are_cast_when_they_are_stored(decoder: Graph) -> None:
    assert [p.name for p in TORCH.pipeline(decoder, "bf16", "").passes] == []


def test_losses_stay_in_models_for_training_only() -> None:
    graph = parse("""graph losses {
      input %x: f32[batch, seq, 4]
      %loss: f32[] = mean(%x, axes=[0, 1, 2])
      output logits = %x
      output aux_loss = %loss
    }""")
    assert [p.name for p in TORCH.pipeline(graph, "f32", "").passes] == ["drop-outputs"]
    assert [p.name for p in TORCH.pipeline(graph, "f32", "", trains=True).passes] == []


def test_decode_step_is_a_form_of_decoders(decoder: Graph) -> None:
    forms = TORCH.forms(decoder, TORCH.options())
    assert list(forms) == ["model", "step"] and forms["step"].of == "model"
    encoder = Encoder(**SIZES, block=block(causal=False)).graph()
    assert list(TORCH.forms(encoder, TORCH.options())) == ["model"]


def test_dropout_is_dropped_from_steps_only() -> None:
    graph = Decoder(
        **SIZES, block=Block(Attention(2, head_dim=8, rope=RoPE()), GatedMLP(24), RMSNorm(), dropout=0.1)
    ).graph()
    forms = TORCH.forms(graph, TORCH.options())
    names = {name: [p.name for p in form.pipeline.passes] for name, form in forms.items()}
    assert "drop-dropout" in names["step"] and "drop-dropout" not in names["model"]


def test_lowerings_with_kernels_are_left_out_for_transformers() -> None:
    assert TORCH.lowerings("choose_tokens") != [] and TARGETS["transformers"].lowerings("choose_tokens") == []
    assert TORCH.lowerings("linear") != []


def test_steps_have_lowerings_of_their_own(decoder: Graph) -> None:
    node = next(node for node in decoder.nodes if node.op.name == "linear")
    assert TORCH.takes(decoder, "step")(node) is None and TORCH.takes(decoder, "")(node) is None
    with pytest.raises(WeftError, match="target torch has only one form of a graph, not 'genai'"):
        TORCH.takes(decoder, "genai")


def test_graphs_are_rewritten_for_the_module(decoder: Graph) -> None:
    pipeline = TORCH.forms(decoder, TORCH.options())["model"].pipeline
    assert [p.name for p in pipeline.passes] == ["unfuse-residual-norm", "python-names", "legalize"]
    run_passes(decoder, pipeline)


@pytest.mark.parametrize(("kind", "name"), [("encoder", "open_encoder"), ("decoder", "open_decoder")])
def test_folders_are_opened_by_kind(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = FolderFacts(Path("out"), (), kind, "torch", vocab=9, max_length=8)
    monkeypatch.setattr(f"weft.backends.runtime.torch.open_torch.{name}", lambda *given: given)
    assert TORCH.open(facts, "cpu", 2) == (facts, "cpu", 2)
    if kind == "decoder":
        assert TORCH.open_offloaded(facts, "cpu", 2, 3) == (facts, "cpu", 2, 3)
    assert TORCH.files(kind) == ("model.py",)


def test_place_on_a_cpu_keeps_the_default_dtype() -> None:
    place = TORCH.place("cpu")
    assert (place.target, place.device, place.dtype) == ("torch", "cpu", None)
