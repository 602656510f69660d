"""The target transformers: names of classes, forms of both halves, and folders that weft does not run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from weft import Attention, Block, CrossAttention, Decoder, Encoder, EncoderDecoder, GatedMLP, RMSNorm, RoPE
from weft.backends.folder_facts import FolderFacts
from weft.backends.target import TARGETS
from weft.ir import Graph, WeftError

TARGET = TARGETS["transformers"]
FACTS = FolderFacts(Path("out"), (), "decoder", "transformers", vocab=9, max_length=8)
SIZES: dict[str, Any] = {"vocab": 17, "dim": 16, "layers": 1}


def block(**options: Any) -> Block:
    return Block(Attention(2, head_dim=8, rope=RoPE()), GatedMLP(24), RMSNorm(), **options)


@pytest.fixture(scope="module")
def both() -> Graph:
    return EncoderDecoder(
        Encoder(**SIZES, block=block()), Decoder(**SIZES, block=block(cross=CrossAttention(2)))
    ).graph()


@pytest.mark.parametrize("name", ["", "Tiny", "Größe_2"])
def test_class_name_is_an_identifier(name: str) -> None:
    options: Any = TARGET.options(class_name=name)
    assert options.class_name == name and options.passes() == {}


@pytest.mark.parametrize("name", ["2tiny", "a-b", "class", "x y"])
def test_other_class_names_are_refused(name: str) -> None:
    with pytest.raises(WeftError, match=f"--class-name '{name}' is not a valid class name; give letters and digits"):
        TARGET.options(class_name=name)


def test_both_halves_are_forms_of_the_model(both: Graph) -> None:
    forms = TARGET.forms(both, TARGET.options())
    assert list(forms) == ["model", "decoder", "encoder"]
    assert {forms[side].of for side in ("decoder", "encoder")} == {"model"}
    decoder = Decoder(**SIZES, block=block()).graph()
    assert list(TARGET.forms(decoder, TARGET.options())) == ["model"]  # no decode step: transformers runs the module


def test_encoders_of_sound_are_refused(both: Graph) -> None:
    graph = both.clone()
    graph.inputs["input_features"] = graph.inputs.pop("encoder_input_ids")
    with pytest.raises(WeftError, match=r"target transformers supports only text encoders; that of .* reads sound"):
        TARGET.forms(graph, TARGET.options())


def test_folders_are_for_transformers_to_run() -> None:
    with pytest.raises(
        WeftError, match="weft cannot run out, compiled for transformers: load it with from_pretrained, or"
    ):
        TARGET.open(FACTS, "cpu", None)
    with pytest.raises(WeftError, match="keeps all experts on the device"):
        TARGET.open_offloaded(FACTS, "cpu", None, 2)
    with pytest.raises(WeftError, match="weft cannot run a folder compiled for transformers"):
        TARGET.place("cpu")
    assert TARGET.files("decoder") == ("config.json",)


def test_parameters_stay_as_the_architecture_declares_them() -> None:
    """Models are trained further, so no phase but simplify applies."""
    graph = Decoder(**SIZES, block=block()).graph()
    names = {p.name for p in TARGET.pipeline(graph, "f32").passes}
    assert names <= {p.name for p in replace(TARGET, phases=()).pipeline(graph, "f32").passes}
    assert "kv-cache" not in names and "pack-qkv" not in names
