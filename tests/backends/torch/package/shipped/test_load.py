"""load.py of a folder: weights, manifests and devices that it rejects, and decode steps by decode.py or the model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from weft.backends.runtime.torch.open_torch import import_from
from weft.backends.torch.package.shipped import load

from .....frontends.command import refused
from .conftest import Script

DECODE = """
class Step:
    def __init__(self, model): pass
    def __call__(self, ids, positions, cache): return "decode.py"
"""


class Model(nn.Module):
    """A model of one weight that returns its name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1))

    def forward(self, input_ids: Tensor, position_ids: Tensor, cache: Any) -> str:
        return "model.py"


class OnAGPU(Model):
    """The same model as `make_stepper` sees it on a GPU."""

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        yield SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "decode.py").write_text(DECODE)
    with import_from(tmp_path):
        yield tmp_path


def computes(model: nn.Module, folder: Path, texts: int = 1) -> Any:
    return load.make_stepper(model, folder)(torch.zeros(texts, 1), torch.zeros(texts, 1), None)


def test_large_batches_step_with_the_model(folder: Path) -> None:
    assert computes(Model(), folder, load.MAX_CPU_BATCH) == "decode.py"
    assert computes(Model(), folder, load.MAX_CPU_BATCH + 1) == "model.py"


def test_decode_step_is_skipped_if_its_weights_exceed_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the limit: on a CPU decode.py packs its weights in addition to those of the model."""
    monkeypatch.setattr(load.os, "sysconf", {"SC_PAGE_SIZE": 4, "SC_PHYS_PAGES": 3}.__getitem__)
    assert computes(Model(), folder) == "model.py"
    monkeypatch.setattr(load.os, "sysconf", {"SC_PAGE_SIZE": 4, "SC_PHYS_PAGES": 4}.__getitem__)
    assert computes(Model(), folder) == "decode.py"


@pytest.mark.parametrize("reason", ["Triton is not installed", None])
def test_gpu_without_kernels_warns_and_steps_with_the_model(folder: Path, reason: str | None) -> None:
    (folder / "kernels" / "shared").mkdir()
    (folder / "kernels" / "shared" / "launch.py").write_text(f"def refusal(x): return {reason!r}")
    if reason is None:
        assert computes(OnAGPU(), folder) == "decode.py"
        return
    with pytest.warns(UserWarning, match=rf"decode\.py: {reason}$"):
        assert computes(OnAGPU(), folder) == "model.py"


def test_sharded_models_step_without_decode(folder: Path) -> None:
    """Check that the model itself decodes: decode.py reads full tensors, not a DTensor."""
    shared = Model()
    weight: Any = shared.weight
    weight.device_mesh = "of two processes"  # as a DTensor's
    assert computes(shared, folder) == "model.py"


def test_folder_without_decode_steps_with_the_model(tmp_path: Path) -> None:
    assert computes(Model(), tmp_path) == "model.py"


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = {key: t.clone() for key, t in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def edit_header(folder: Path, **of: Any) -> None:
    """Replace these fields of the embedding in the header of the weights."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header["embed.weight"] |= of
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[start:])


def shards(folder: Path, count: int) -> None:
    """Leave the first of `count` shards of the weights."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    keys = sorted(tensors)[: len(tensors) // count]
    save_file({key: tensors[key] for key in keys}, folder / f"model-00001-of-{count:05}.safetensors")


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda f: changed(f, lambda t: t.pop("embed.weight")), "the weights lack embed.weight (1 of "),
    "unknown": (lambda f: changed(f, lambda t: t.update(more=torch.ones(1))), "have more, which is not in the model"),
    "shape": (
        lambda f: changed(f, lambda t: t.update({"embed.weight": torch.ones(2, 3)})),
        "embed.weight is [2, 3] in the weights, but [37, 30] in the model",
    ),
    "cut": (lambda f: cut(f / "model.safetensors"), "model.safetensors: not a complete safetensors file: "),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no model.safetensors in it"),
    "whole numbers": (
        lambda f: changed(f, lambda t: t.update({"embed.weight": t["embed.weight"].int()})),
        "embed.weight is torch.int32 in the weights, but torch.float32 in the model",
    ),
    "a shard": (lambda f: shards(f, 2), "the weights lack "),
    "below 0": (lambda f: edit_header(f, shape=[-37, -30]), "do not hold "),
    "before the file": (lambda f: edit_header(f, data_offsets=[-9999, 37 * 30 * 4 - 9999]), "do not hold "),
    "another size": (lambda f: edit_header(f, shape=[37, 29]), "do not hold "),
    "a shift": (lambda f: edit_header(f, data_offsets=[4, 37 * 30 * 4 + 4]), "where the last one ends"),
    "another dtype": (lambda f: edit_header(f, dtype="F8"), "not a complete safetensors file: 'F8'"),
    "code": (lambda f: shutil.rmtree(f / "kernels"), "is incomplete: No module named 'kernels'"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_mismatched_weights_are_rejected_in_one_sentence(what: str, broken: Path, script: Script) -> None:
    spoil, words = BROKEN[what]
    spoil(broken)
    status, out, err = script(broken / "generate.py", "--ids", "3,4")
    assert (status, out) == (2, "")
    assert err.startswith("generate.py: ") and words in err and err.count("\n") == 1
    assert words in refused("run", broken, "--trust", "--ids", "3,4")


MANIFESTS = [
    "",
    "[]",
    "{}",
    '{"kind": "decoder", "vocab": 37}',
    '{"kind": 1, "vocab": 37, "max_length": 9}',
    "[" * 100_000,
]


@pytest.mark.parametrize("text", MANIFESTS, ids=range(len(MANIFESTS)))
def test_invalid_manifest_is_rejected_in_one_sentence(text: str, broken: Path, script: Script) -> None:
    (broken / "weft.json").write_text(text)
    status, out, err = script(broken / "generate.py", "--ids", "3,4")
    assert (status, out) == (2, "")
    assert "weft.json cannot be read: " in err and err.count("\n") == 1


def test_old_pytorch_is_rejected(decoder: Path, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.1")
    status, _, err = script(decoder / "generate.py", "--ids", "3")
    assert (status, err) == (2, "generate.py: PyTorch 2.10.1 is too old: install 2.11 or newer\n")


def test_missing_gpu_is_rejected(decoder: Path, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "device cuda cannot be used: PyTorch"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # nor one that is there
    status, _, err = script(decoder / "generate.py", "--ids", "3", "--device", "cuda")
    assert status == 2 and words in err
    assert words in refused("run", decoder, "--trust", "--ids", "3", "--device", "cuda")
