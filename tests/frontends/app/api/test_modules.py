"""`weft.torch` and `weft.state_dict`: modules that compute their source, and options that are refused."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import weft
from weft.ir import interpret

from ....e2e.families import ROWS

IDS = [[3, 1, 4, 1, 5]]


def logits_of(source: Path) -> np.ndarray:
    """Of the architecture `source` with weights of seed 0, in float64."""
    graph = weft.load_source(source).graph
    inputs = {"input_ids": np.array(IDS), "position_ids": np.arange(5)[None]}
    found: np.ndarray = interpret(graph, {name: inputs[name] for name in graph.inputs})["logits"]
    return found


def test_module_computes_its_source(tiny: Path) -> None:
    module, wanted = weft.torch(tiny), logits_of(tiny)
    with torch.inference_mode():
        got = module(torch.tensor(IDS)).numpy()
    assert np.abs(got - wanted).max() <= 64 * np.finfo(np.float32).eps * np.abs(wanted).max()
    again = pickle.loads(pickle.dumps(module))
    with torch.inference_mode():
        assert torch.equal(again(torch.tensor(IDS)), module(torch.tensor(IDS)))


@pytest.mark.parametrize("dtype", ["bf16", "float16", torch.float16, torch.float64, None])
def test_dtypes_by_name_or_as_torch_has_them(tiny: Path, dtype: Any) -> None:
    kinds = {"bf16": torch.bfloat16, "float16": torch.float16, None: torch.float32}
    assert {p.dtype for p in weft.torch(tiny, dtype=dtype).parameters()} == {kinds.get(dtype, dtype)}


def test_passes_and_seeds_are_those_of_compile(tiny: Path) -> None:
    keys = weft.torch(tiny, passes="default, pack-gate-up").state_dict().keys()
    assert {key.rpartition(".ffn.")[2] for key in keys if ".ffn." in key} == {"gate_up.weight", "down.weight"}
    first, same, other = (weft.torch(tiny, seed=seed).state_dict()["embed.weight"] for seed in (1, 1, 2))
    assert torch.equal(first, same) and not torch.equal(first, other)


def test_a_module_takes_the_weights_of_a_checkpoint_by_its_own_names(tiny: Path, tmp_path: Path) -> None:
    """Those of another seed; and what transformers wrote, into the module of the architecture that it was made of."""
    module = weft.torch(tiny, seed=2)
    module.load_state_dict(weft.state_dict(tiny, seed=1))
    with torch.inference_mode():
        assert torch.equal(module(torch.tensor(IDS)), weft.torch(tiny, seed=1)(torch.tensor(IDS)))
    row = ROWS["llama-gqa-tied"]
    theirs = row.save(tmp_path / "hf")
    module = weft.torch(tmp_path / "hf", dtype="f16").float()
    module.load_state_dict(weft.state_dict(tmp_path / "hf"))
    with torch.inference_mode():
        wanted = theirs(torch.tensor(IDS)).logits
        assert (module(torch.tensor(IDS)) - wanted).abs().max() <= 1e-4 * wanted.abs().max()


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"dtype": "f64"}, "target torch does not support f64; it supports f32, bf16, f16"),
    ({"dtype": "f31"}, "unknown dtype 'f31'"),
    ({"dtype": torch.int8}, "dtype torch.int8 is not a float dtype"),
    ({"device": "tpu"}, "device 'tpu' is unknown to PyTorch: use cpu or cuda"),
    ({"device": "xpu"}, "device xpu cannot be used: Torch not compiled with XPU enabled"),
    ({"passes": "fusee"}, "unknown pass 'fusee'"),
    ({"seed": -1}, "seed is -1"),
]


@pytest.mark.parametrize(("options", "words"), WRONG)
def test_module_options_that_are_refused(tiny: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(weft.WeftError) as error:
        weft.torch(tiny, **options)
    assert words in str(error.value)
