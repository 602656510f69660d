"""The target torch: `weft.torch` in this process, what compiling for it refuses, and what the folder says of itself."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import weft
from weft.backends import safetensors as writing
from weft.backends.runtime.core.generation import Generator
from weft.frontends.app.api.verify.divergence import compute_layer_errors, score_tokens
from weft.ir import interpret

from ....e2e.families import ROWS
from ....passes.zoo import ZOO
from ...command import TINY, done, refused


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    (tmp_path / "tiny.py").write_text(TINY)
    return tmp_path / "tiny.py"


IDS = [[3, 1, 4, 1, 5]]


def logits_of(source: Path) -> np.ndarray:
    """Of the architecture `source` with weights of seed 0, in float64."""
    graph = weft.load_source(source).graph
    inputs = {"input_ids": np.array(IDS), "position_ids": np.arange(5)[None]}
    found: np.ndarray = interpret(graph, {name: inputs[name] for name in graph.inputs})["logits"]
    return found


def test_a_module_is_its_source(tiny: Path) -> None:
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
def test_a_module_of_bad_options(tiny: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(weft.WeftError) as error:
        weft.torch(tiny, **options)
    assert words in str(error.value)


WINDOWS = """
from weft import MLP, ALiBi, Attention, Block, Decoder

layers = [Block(Attention(2, window=window, {bias}), MLP(9)) for window in {windows}]
model = Decoder(11, 8, layers, context=16)
"""
REFUSED = [
    (["--prepack"], "--prepack supports target ort-cpu only, not torch; leave it out"),
    (["--tensor-parallel", "2"], "target torch has no option 'tensor_parallel' any more: target transformers writes"),
    (["-p", "default, kv-cache"], "target torch adds caches by itself: leave out the pass kv-cache"),
    (["--dtype", "i8"], "target torch does not support i8; it supports f32, bf16, f16"),
    (["--max-length", "0"], "--max-length 0 must be positive"),
]


@pytest.mark.parametrize(("args", "words"), REFUSED)
def test_what_compiling_refuses(tiny: Path, tmp_path: Path, args: list[str], words: str) -> None:
    done("compile", tiny, "-o", tmp_path / "out", "--target", "torch")
    before = (tmp_path / "out" / "model.py").read_text()
    assert words in refused("compile", tiny, "-o", tmp_path / "out", "--target", "torch", *args)
    assert (tmp_path / "out" / "model.py").read_text() == before
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_without_pytorch_one_sentence(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done("compile", tiny, "-o", tmp_path / "out", "--target", "torch")
    monkeypatch.setitem(sys.modules, "torch", None)
    for command in (
        ["compile", tiny, "-o", tmp_path / "no", "--target", "torch"],
        ["compile", tiny, "-o", tmp_path / "no", "--target", "transformers"],
        ["inspect", tiny, "--parallel", "tp=2"],
        ["run", tmp_path / "out", "--ids=1", "--trust"],
        ["opt", tiny, "-p", "legalize{target=torch}"],
        ["opt", tiny, "-p", "python-names"],
    ):
        assert "PyTorch cannot be imported" in refused(*command)
    listed = done("targets", "--pipeline").stdout
    assert "its forms are not listed: PyTorch cannot be imported" in listed and "form model:" in listed
    with pytest.raises(weft.WeftError, match=r"install weft\[torch\]"):
        weft.torch(tiny)


def test_commands_on_a_folder(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    said = done("compile", tiny, "-o", out, "--target", "torch", "--dtype", "bf16", "--max-length", 32).stdout
    assert "for torch in bf16" in said
    done("compile", tiny, "-o", tmp_path / "onnx", "--max-length", 32)
    answers = [
        done("run", tmp_path / name, "--trust", "--ids", "3,1,4", "--max-tokens", 6).stdout for name in ("out", "out")
    ]
    assert answers[0] == answers[1] and len(answers[0].split(",")) == 6
    report = json.loads(done("verify", out, "--trust", "--tokens", 4, "--json").stdout)
    assert report["max_relative"] <= report["tolerance"] and report["layers"] == {}


def test_scores_are_those_of_onnx_runtime(tiny: Path, tmp_path: Path) -> None:
    ids, runners = np.random.default_rng(0).integers(0, 12, 60).tolist(), list[Generator]()
    for target in ("torch", "onnx"):
        passes = "default" if target == "torch" else "default, -last-token-logits"
        weft.compile(tiny, tmp_path / target, target=target, passes=passes)
        runners.append(weft.load(tmp_path / target, device="cpu", trust=True))  # type: ignore[arg-type]  # a decoder
    ours, theirs = score_tokens(runners, ids, 25, False, lambda stage, done, total: None)
    assert ours.tokens == theirs.tokens == 59 and theirs.agreement == 1
    assert abs(ours.nll - theirs.nll) < 1e-5 and theirs.kl < 1e-9
    with pytest.raises(weft.WeftError, match="compared for ONNX folders only, not for PyTorch folders"):
        compute_layer_errors(runners, ids[:5])


def test_weights_are_stored_as_asked_and_in_shards(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing.write_shards, "__defaults__", (20_000, writing.write_shards.__defaults__[1]))
    weft.compile(tiny, tmp_path / "out", target="torch", dtype="f16", max_length=32)
    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 1 and (tmp_path / "out" / "model.safetensors.index.json").is_file()
    tensors = {key: t for name in files for key, t in load_file(tmp_path / "out" / name).items()}
    assert {t.dtype for t in tensors.values()} == {torch.float16}
    assert tensors.keys() == weft.torch(tiny).state_dict().keys()
    model = weft.load(tmp_path / "out", device="cpu", trust=True)
    assert isinstance(model, Generator)
    assert len(model.generate([IDS[0]], max_tokens=3)[0].tokens) == 3


def test_tables_and_whole_numbers_keep_their_dtypes(tmp_path: Path) -> None:
    """A table that nobody trains is not rounded with the weights."""
    weft.compile(ZOO["variant/sinusoidal"](), tmp_path / "out", target="torch", dtype="bf16", max_length=19)
    kinds = {key: t.dtype for key, t in load_file(tmp_path / "out" / "model.safetensors").items()}
    assert {kind for key, kind in kinds.items() if "positions" not in key} == {torch.bfloat16}


def test_a_loss_is_left_out_and_said_so(tmp_path: Path) -> None:
    report = weft.compile(
        ZOO["variant/experts with noise and a loss"](), tmp_path / "out", target="torch", max_length=19
    )
    assert any(note.endswith("is left out: `weft.torch` gives a module that returns it") for note in report.notes)
    model = weft.load(tmp_path / "out", device="cpu", trust=True)
    assert isinstance(model, Generator)
    assert len(model.generate([[1, 2]], max_tokens=3)[0].tokens) == 3


@pytest.mark.parametrize(
    ("windows", "bias", "rolls"),
    [
        ((3, None), "", [3, None]),
        ((3, 3), "bias=ALiBi()", [3, 3]),
        ((3, None), "bias=ALiBi()", [None, None]),  # one bias for both
    ],
)
def test_the_manifest_tells_which_caches_roll(
    windows: tuple[int | None, ...], bias: str, rolls: list[int | None], tmp_path: Path
) -> None:
    """Those that the module makes so."""
    (tmp_path / "model.py").write_text(WINDOWS.format(windows=windows, bias=bias))
    weft.compile(tmp_path / "model.py", tmp_path / "out", target="torch")
    facts = json.loads((tmp_path / "out" / "weft.json").read_text())
    assert [c["capacity"] if c["rolling"] else None for c in facts["cache"]] == rolls
    module: Any = weft.torch(tmp_path / "model.py")
    assert [type(c).__name__.startswith("Rolling") for c in module.new_cache(1, 9)] == [bool(c) for c in rolls]


def test_a_language_model_whose_output_is_called_otherwise(tiny: Path, tmp_path: Path) -> None:
    text = done("opt", tiny).stdout
    (tmp_path / "scores.weft").write_text(text.replace("output logits =", "output scores ="))
    answers = []
    for source, name in ((tiny, "logits"), (tmp_path / "scores.weft", "scores")):
        done("compile", source, "-o", tmp_path / name, "--target", "torch", "--max-length", 32)
        answers.append(done("run", tmp_path / name, "--trust", "--ids", "3,1,4", "--max-tokens", 4).stdout)
    assert answers[0] == answers[1]
