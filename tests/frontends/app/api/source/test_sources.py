"""SOURCE in all its forms, and the presets' published sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from weft.frontends import load_source
from weft.frontends.app.api.compile import compile
from weft.frontends.app.api.rewrite import rewrite
from weft.frontends.app.api.verify.verification import verify_folder
from weft.frontends.dsl import Attention, Block, Decoder
from weft.ir import Graph, WeftError, interpret
from weft.ir.text import parse

from ....command import TINY as TINY_FILE
from ....command import weft_command
from ...llamas import write_llama

TINY = Decoder(11, 8, 2, Block(Attention(2)))


def test_objects_are_sources() -> None:
    model = load_source(TINY, seed=1)
    assert (model.random_init, model.module) == (True, TINY)
    assert load_source(model) is model
    graph = load_source(model.graph)
    assert (graph.graph, graph.random_init) == (model.graph, True)
    assert model.hashes() == {}
    for wrong in (5, None, Decoder, [TINY]):
        with pytest.raises(WeftError, match="is not a valid source: a source is a preset"):
            load_source(wrong)


FILE = """\
from __future__ import annotations
from beside import HIDDEN
from weft import Attention, Block, Decoder, module, linear

@module
class Thin:
    hidden: int
    def __call__(self, x):
        return linear(linear(x, self.hidden, "a"), x.width, "b")

small = Decoder(11, 8, 2, Block(Attention(2), Thin(HIDDEN)))
def large():
    return Decoder(11, 8, 5, Block(Attention(2), Thin(HIDDEN)))
number = 5
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("HIDDEN = 3\n")
    (tmp_path / "arch.py").write_text(FILE)
    return tmp_path / "arch.py"


def test_architecture_files(file: Path) -> None:
    assert load_source(f"{file}:small").graph.params["layers.1.ffn.a.weight"].shape == (3, 8)
    assert "layers.4.ffn.a.weight" in load_source(f"{file}:large").graph.params
    only = load_source(file)  # the only model needs no name
    assert (only.graph.name, only.files, list(only.hashes())) == ("small", (file,), ["arch.py"])


@pytest.mark.parametrize(
    ("file_name", "variable", "name"),
    [("local_global.py", "model", "local_global"), ("zoo.py", "Mistral", "Mistral"), ("model.py", "model", "model"),
     ("2 layers é.py", "model", "_2_layers_")],
)  # fmt: skip
def test_graph_is_named_after_the_file_or_its_variable(
    file_name: str, variable: str, name: str, tmp_path: Path
) -> None:
    """A name that is not simply `model`; IR text with it can be read again."""
    (tmp_path / file_name).write_text(
        f"import weft\n{variable} = weft.Decoder(8, 8, 1, weft.Block(weft.Attention(2)))\n"
    )
    graph = load_source(tmp_path / file_name).graph
    assert (graph.name, parse(str(graph)).name) == (name, name)


@pytest.mark.parametrize(
    ("spec", "text", "message"),
    [
        ("gone.py", None, "gone.py: no such architecture file"),
        ("a.py:nope", "model = 1", "a.py defines no 'nope'; its models are none"),
        ("a.py", "x = 1", "a.py defines no model: give the model a name"),
        ("a.py:x", "x = 1", "a.py:x is not a model: name a Decoder"),
        ("a.py:x", "def x(): return 3", "a.py:x is not a model"),
        ("a.py:x", "def x():\n    return 1 / 0", "a.py:2: ZeroDivisionError: division by zero"),
        ("a.py", "x = 1\nimport nothing_such", "a.py:2: ModuleNotFoundError: No module named 'nothing_such'"),
        ("a.py", "x = 1\ny = (", r"a.py:2: SyntaxError: '\(' was never closed"),
        (
            "a.py",
            "from weft import *\n@module\nclass Bad:\n    n: int\n    def __call__(self, x):\n"
            "        return x + str(self.n)\nm = Decoder(9, 8, 1, Bad(2))",
            "a.py:6: TypeError: unsupported operand",
        ),
        ("a.py", "from weft import *\n\nAttention(8, 3)", "a.py:3: Attention: kv_heads=3 does not divide heads=8"),
    ],
)
def test_architecture_files_that_fail(spec: str, text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "a.py").write_text(text)
    with pytest.raises(WeftError, match=message):
        load_source(str(tmp_path / spec))


def test_a_relative_path_is_blamed_with_its_line(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("x = 1\n1 / 0\n")
    monkeypatch.chdir(file.parent)
    with pytest.raises(WeftError, match=r"^arch.py:2: ZeroDivisionError"):
        load_source("arch.py")


def test_text_of_a_random_model(tmp_path: Path, rng: np.random.Generator) -> None:
    graph = TINY.graph(seed=4)
    (tmp_path / "tiny.weft").write_text(str(graph))
    (tmp_path / "tiny.txt").write_text("# a comment\n" + str(graph))
    ids = {"input_ids": np.array([[1, 2, 3]])}
    for name in ("tiny.weft", "tiny.txt"):
        found = load_source(tmp_path / name)
        assert (found.graph, found.random_init) == (graph, True)
        np.testing.assert_array_equal(interpret(found.graph, ids)["logits"], interpret(graph, ids)["logits"])


def checkpointed(path: str | None) -> str:
    source = "" if path is None else f'  meta source = {{"path": "{path}"}}\n'
    return f'graph g {{\n{source}  param %w: f32[2] = source("w")\n  output y = %w\n}}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello", "is neither a checkpoint nor IR text; a source is a preset"),
        ("\udcff", "is neither a checkpoint nor IR text"),
        ("graph g {\n  input x\n}", r"x.txt:2:\d+: "),
        (checkpointed(None), r"reads the checkpoint tensor 'w', but its checkpoint cannot be opened: meta source"),
        (checkpointed("/gone/model"), "its checkpoint cannot be opened: /gone/model does not exist"),
    ],
)
def test_invalid_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(WeftError, match=message):
        load_source(tmp_path / "x.txt")


@pytest.mark.parametrize("passes", ["", 'mha-to-gqa{kv_heads=1}, quantize{bits=8, method="rtn"}'])
@pytest.mark.parametrize("target", ["onnx", "torch"])
def test_compiled_folder_is_its_source_after_the_passes_that_change_outputs(
    target: str, passes: str, tmp_path: Path
) -> None:
    source = write_llama(tmp_path / "llama", 0)
    compile(source, tmp_path / "out", target=target, passes=f"{passes}, default".removeprefix(", "), max_length=8)
    model = load_source(tmp_path / "out")
    expected = rewrite(load_source(source), passes)
    inputs = {"input_ids": np.arange(6)[None], "position_ids": np.arange(6)[None]}
    logits = [interpret(m.graph, inputs)["logits"] for m in (model, expected)]
    np.testing.assert_array_equal(*logits)
    assert model.pipeline == passes and model.files == expected.files
    (source / "model.safetensors").unlink()
    with pytest.raises(WeftError, match=r"out was compiled from .*llama.*\. `weft run`, .* without its source"):
        load_source(tmp_path / "out")


def test_compiled_folder_with_other_codes_than_its_source_is_refused(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "llama", 0)
    compile(source, tmp_path / "out", target="torch", weights="int8{method=rtn}", max_length=8)
    (file,) = (tmp_path / "out").glob("*.safetensors")
    tensors = load_file(file)
    key = next(key for key, array in tensors.items() if array.dtype.kind in "iu")
    tensors[key].reshape(-1)[0] ^= 1
    save_file(tensors, file)
    with pytest.raises(WeftError, match=r"the weights in .*out are not those of its source \(.* differs from its"):
        load_source(tmp_path / "out")


def test_compiled_architecture_is_no_source_because_that_would_run_code(compiled_tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(WeftError, match=r"is compiled from .*tiny\.py, which is code: name this file to run it"):
        load_source(compiled_tiny)


def test_seeds_start_at_zero() -> None:
    with pytest.raises(WeftError, match="seed is -1, but it must be at least 0"):
        load_source("gpt2", seed=-1)


def test_unknown_names() -> None:
    with pytest.raises(WeftError, match=r"'lama2-7b' is neither a preset .* did you mean the preset llama2-7b"):
        load_source("lama2-7b")
    with pytest.raises(
        WeftError, match="'zzz' is neither a preset nor an existing file or folder; a source is a preset"
    ):
        load_source("zzz")


def test_a_graph_of_any_object_with_a_graph_method() -> None:
    class Mine:
        def graph(self, seed: int = 0, name: str = "") -> Graph:
            return TINY.graph(seed, name)

    found: Any = load_source(Mine())
    assert (found.graph.name, found.description) == ("mine", "a Mine")


def test_a_compiled_folder_names_a_linked_source_by_the_name_of_the_link(tmp_path: Path) -> None:
    """A link's target may have another name, such as a hash in the hub cache, without a suffix."""
    text = tmp_path / "stored"
    text.write_text("graph g {\n  input %x: f32[batch, 4]\n  %y: f32[batch, 4] = relu(%x)\n  output y = %y\n}\n")
    link = tmp_path / "graph.weft"
    link.symlink_to(text)
    compile(link, tmp_path / "out", max_length=4)
    source = json.loads((tmp_path / "out" / "weft.json").read_text())["source"]
    assert source["spec"] == str(link) and list(source["hashes"]) == [link.name]
    assert load_source(source["spec"]).hashes() == source["hashes"]


def test_changed_or_missing_source_is_refused(compiled_tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(TINY_FILE + "# changed\n")
    result = weft_command("verify", "--trust", compiled_tiny)
    assert result.exit_code == 2
    assert "tiny.py" in result.stderr and "has changed" in result.stderr
    (tmp_path / "tiny.py").unlink()
    assert "cannot be read again" in weft_command("verify", "--trust", compiled_tiny).stderr


def test_recorded_code_runs_only_if_trusted_and_unchanged(compiled_tiny: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    with pytest.raises(WeftError, match=r"names .*tiny\.py as its source, which is code that this .* add --trust"):
        verify_folder(compiled_tiny)
    (tmp_path / "tiny.py").write_text(f"{TINY_FILE}open({str(ran)!r}, 'w')\n")
    with pytest.raises(WeftError, match=r"has changed \(tiny\.py\)"):
        verify_folder(compiled_tiny, trust=True)
    assert not ran.exists()
