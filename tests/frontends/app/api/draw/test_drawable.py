"""Sources of `weft viz` beside graphs: ONNX files, compiled folders, model folders; and refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from weft import WeftError
from weft.backends.viz.layout.scene import Shape, build_scene
from weft.backends.viz.model.network import Network
from weft.frontends.app.api.draw.drawable import read_network

from .....backends.viz.onnx_models import Builder, slashed, wrapped
from ....command import TINY, done, refused


@pytest.fixture
def arch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "arch.py"
    path.write_text(TINY)
    monkeypatch.chdir(tmp_path)
    return path


def titles(root: Shape) -> list[str]:
    """Return the titles of drawn parts, without inputs and outputs."""
    return [s.label.title for s in root.all() if s.label.kind != "input" and not s.label.symbol]


def operations(network: Network) -> list[str]:
    return [v.weft_op.op for v in network.vertices]


def test_an_onnx_folder_looks_like_its_source(arch: Path) -> None:
    """Attention, feed-forward networks and layers are those of the source; caches add no boxes, only notes."""
    done("compile", arch, "-o", "out", "--target", "onnx")
    found = read_network("out")
    root, source = build_scene(found), build_scene(read_network(arch))
    assert found.name == "arch"
    assert [s.key for s in root.inner if s.label.kind == "input"] == [
        "input_ids",
        "position_ids",
        "attention_mask",
        "out.logits",
    ]
    layers = [s for s in root.inner if s.part.has_layers]
    assert sum(s.part.count for s in layers) == 3
    for kind in ("attention", "feed-forward"):
        (wanted,) = {s.label.title for s in source.all() if s.label.kind == kind and s.arrangement is not None}
        assert {s.label.title for s in root.all() if s.label.kind == kind and s.arrangement is not None} == {wanted}
    attn = next(s for s in root.all() if s.key.endswith(".attn"))
    assert attn.captions[0].endswith("past key, value") and attn.captions[1].startswith("gives present key, value")


def test_parameters_of_a_compiled_folder(arch: Path) -> None:
    """Those of the source, but for norms: without a checkpoint they are all ones, of which a file has one tensor."""
    done("compile", arch, "-o", "out", "--target", "onnx")
    expected = json.loads(done("inspect", arch, "--json").stdout)["parameters"]
    assert sum(w.learned for v in read_network("out").vertices for w in v.weights) == expected - 6 * 32


def test_a_torch_folder_is_drawn_by_its_source(arch: Path) -> None:
    done("compile", arch, "-o", "out", "--target", "torch")
    ours = done("opt", arch, "-p", json.loads(Path("out/weft.json").read_text())["pipeline"]).stdout
    assert ours.count("rms_norm") == operations(read_network("out", trust=True)).count("rms_norm") > 0
    arch.write_text(TINY.replace("layers=3", "layers=4"))
    assert "which is code that this would run" in refused("viz", "out", "-o", "a.svg")
    assert "has changed (arch.py)" in refused("viz", "out", "-o", "a.svg", "--trust")
    arch.unlink()
    said = refused("viz", "out", "-o", "a.svg", "--trust")
    assert "its source cannot be drawn" in said and "arch.py" in said
    assert not Path("a.svg").exists()


def test_a_model_folder(arch: Path) -> None:
    done("opt", arch, "-p", "kv-cache", "-o", "smaller")
    root, source = build_scene(read_network("smaller")), build_scene(read_network(arch))
    assert titles(root) == titles(source)
    assert {s.key for s in root.inner} == {s.key for s in source.inner} | {"attention_mask"}


@pytest.mark.parametrize("cut", [0, 10, 200, -40])
def test_a_file_that_is_cut_off(cut: int, tmp_path: Path) -> None:
    data = Builder(slashed).model(1).SerializeToString()
    (tmp_path / "m.onnx").write_bytes(data[:cut])
    said = refused("viz", tmp_path / "m.onnx", "-o", tmp_path / "a.svg")
    assert "m.onnx is not a valid ONNX model, or is truncated" in said
    assert not (tmp_path / "a.svg").exists()


def test_files_that_are_no_models(tmp_path: Path) -> None:
    (tmp_path / "text.onnx").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\n")
    assert "text.onnx is not a valid ONNX model" in refused("viz", tmp_path / "text.onnx")
    assert "no.onnx: no such file" in refused("viz", tmp_path / "no.onnx")
    (tmp_path / "folder.onnx").mkdir()
    assert "folder.onnx: is a directory" in refused("viz", tmp_path / "folder.onnx")


def test_values_that_nothing_makes(tmp_path: Path) -> None:
    info = ("a", TensorProto.FLOAT, [2]), ("b", TensorProto.FLOAT, [2])
    onnx.save(
        wrapped([helper.make_node("Relu", ["gone"], ["b"], name="act")], [info[0]], [info[1]]), tmp_path / "m.onnx"
    )
    assert "act (Relu) reads 'gone', which no earlier operation produces" in refused("viz", tmp_path / "m.onnx")
    onnx.save(wrapped([helper.make_node("Relu", ["a"], ["c"])], [info[0]], [info[1]]), tmp_path / "m.onnx")
    assert "no operation produces the output 'b'" in refused("viz", tmp_path / "m.onnx")


def test_incomplete_folders_are_refused(arch: Path, tmp_path: Path) -> None:
    done("compile", arch, "-o", "out", "--target", "onnx")
    Path("out/model.onnx").unlink()
    assert "no model.onnx: it is incomplete" in refused("viz", "out")
    shutil.rmtree("out")
    Path("out").mkdir()
    Path("out/weft.json").write_text("{")
    assert "not valid JSON" in refused("viz", "out")
    Path("out/weft.json").write_text('{"target": "torch"}')
    with pytest.raises(WeftError, match="names no source"):
        read_network("out")
