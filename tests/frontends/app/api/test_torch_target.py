"""Compilation for target torch: what it refuses, and folders and manifests that it writes."""

from __future__ import annotations

import json
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

from ....passes.zoo import ZOO
from ...command import done, refused

IDS = [[3, 1, 4, 1, 5]]
WINDOWS = """
from weft import MLP, ALiBi, Attention, Block, Decoder

layers = [Block(Attention(2, window=window, {bias}), MLP(9)) for window in {windows}]
model = Decoder(11, 8, layers, context=16)
"""
REFUSED = [
    (["--prepack"], "--prepack is an option of target ort-cpu only, not of torch; leave it out"),
    (["--tensor-parallel", "2"], "target torch has no option 'tensor_parallel' any more: target transformers writes"),
    (["-p", "default, kv-cache"], "target torch adds caches by itself: leave out the pass kv-cache"),
    (["--dtype", "i8"], "target torch does not support i8; it supports f32, bf16, f16"),
    (["--max-length", "0"], "--max-length is 0, but it must be positive"),
]


@pytest.mark.parametrize(("args", "words"), REFUSED)
def test_torch_target_refuses_bad_options(tiny: Path, tmp_path: Path, args: list[str], words: str) -> None:
    done("compile", tiny, "-o", tmp_path / "out", "--target", "torch")
    before = (tmp_path / "out" / "model.py").read_text()
    assert words in refused("compile", tiny, "-o", tmp_path / "out", "--target", "torch", *args)
    assert (tmp_path / "out" / "model.py").read_text() == before
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_missing_pytorch_is_one_error_line(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_commands_accept_a_torch_folder(tiny: Path, tmp_path: Path) -> None:
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


def test_scores_equal_onnxruntime(tiny: Path, tmp_path: Path) -> None:
    ids, runners = np.random.default_rng(0).integers(0, 12, 60).tolist(), list[Generator]()
    for target in ("torch", "onnx"):
        passes = "default" if target == "torch" else "default, -last-token-logits"
        weft.compile(tiny, tmp_path / target, target=target, passes=passes)
        runners.append(weft.load(tmp_path / target, device="cpu", trust=True))  # type: ignore[arg-type]  # a decoder
    ours, theirs = score_tokens(runners, ids, 25, False, lambda stage, done, total: None)
    assert ours.tokens == theirs.tokens == 59 and theirs.agreement == 1
    assert abs(ours.nll - theirs.nll) < 1e-5 and theirs.kl < 1e-9
    with pytest.raises(weft.WeftError, match="is for PyTorch, so its layers cannot be compared"):
        compute_layer_errors(runners, ids[:5])


def test_weights_are_stored_in_the_requested_dtype_and_shards(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_tables_and_integers_keep_their_dtypes(tmp_path: Path) -> None:
    """A table that nobody trains is not rounded with the weights."""
    weft.compile(ZOO["variant/sinusoidal"](), tmp_path / "out", target="torch", dtype="bf16", max_length=19)
    kinds = {key: t.dtype for key, t in load_file(tmp_path / "out" / "model.safetensors").items()}
    assert {kind for key, kind in kinds.items() if "positions" not in key} == {torch.bfloat16}


def test_loss_is_omitted_with_a_note(tmp_path: Path) -> None:
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
def test_manifest_lists_rolling_caches(
    windows: tuple[int | None, ...], bias: str, rolls: list[int | None], tmp_path: Path
) -> None:
    """Those that the module makes so."""
    (tmp_path / "model.py").write_text(WINDOWS.format(windows=windows, bias=bias))
    weft.compile(tmp_path / "model.py", tmp_path / "out", target="torch")
    facts = json.loads((tmp_path / "out" / "weft.json").read_text())
    assert [c["capacity"] if c["rolling"] else None for c in facts["cache"]] == rolls
    module: Any = weft.torch(tmp_path / "model.py")
    assert [type(c).__name__.startswith("Rolling") for c in module.new_cache(1, 9)] == [bool(c) for c in rolls]


def test_language_model_output_may_have_any_name(tiny: Path, tmp_path: Path) -> None:
    text = done("opt", tiny).stdout
    (tmp_path / "scores.weft").write_text(text.replace("output logits =", "output scores ="))
    answers = []
    for source, name in ((tiny, "logits"), (tmp_path / "scores.weft", "scores")):
        done("compile", source, "-o", tmp_path / name, "--target", "torch", "--max-length", 32)
        answers.append(done("run", tmp_path / name, "--trust", "--ids", "3,1,4", "--max-tokens", 4).stdout)
    assert answers[0] == answers[1]
