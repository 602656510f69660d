"""Plugins: an op, a pass, a family and targets, by entry points and by --import."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from weft.backends.target import TARGETS
from weft.ir.errors import WeftError
from weft.ir.registry import Alternatives, DuplicateName, Registry

from ..warm import command

pytestmark = pytest.mark.long
HERE = Path(__file__).parent
PROJECT = tomllib.loads((HERE / "weft_extras" / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ENTRIES = "".join(f"{name} = {what}\n" for name, what in PROJECT["entry-points"]["weft.plugins"].items())
MODEL = """
from weft import Attention, Block, Decoder, RMSNorm, RoPE, linear, module
from weft_extras.hard_sigmoid import hard_sigmoid


@module
class Gate:
    hidden: int

    def __call__(self, x):
        return linear(hard_sigmoid(linear(x, self.hidden, "up")), x.width, "down")


model = Decoder(97, 32, 2, Block(Attention(4, rope=RoPE()), Gate(48), RMSNorm()), context=64)
"""
WORKS = {"compile", "export", "run", "verify"}  # commands that import most of weft
Weft = Callable[..., subprocess.CompletedProcess[str]]


def environment(folder: Path) -> dict[str, str]:
    """Return the variables of a process that has `folder` and weft on its path."""
    paths = (str(folder), str(HERE.parents[1] / "src"))
    own = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    return {**own, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "200"}


def run(folder: Path, *args: object, program: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python, or another program, with `folder` and weft on its path, in `folder`."""
    variables = environment(folder)
    if program is not None:  # which asks its server where it has the variables of that one
        variables["PATH"] = f"{program.parent}{os.pathsep}{variables['PATH']}"
    words = [program or sys.executable, *map(str, args)]
    return subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True, check=False)


def install(folder: Path, entries: str, **modules: str) -> Path:
    """Write what an installed package has: its metadata, and `modules` by name."""
    metadata = folder / "weft_extras-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: weft-extras\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(entries)
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    return folder


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of installed packages that holds weft_extras."""
    folder = install(tmp_path_factory.mktemp("site"), f"[weft.plugins]\n{ENTRIES}", model=MODEL)
    shutil.copytree(HERE / "weft_extras", folder / "weft_extras", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="module")
def warm(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A `weft` that forks from a process that has imported everything, where weft_extras is installed."""
    folder, process = command(tmp_path_factory.mktemp("warm"), environment(installed))
    yield folder / "weft"
    process.communicate()  # closes its input, at which it ends


@pytest.fixture(scope="module")
def weft(installed: Path, warm: Path) -> Weft:
    """The command where weft_extras is installed: cold where it lists what there is, from `warm` where it works."""

    def done(*args: object) -> subprocess.CompletedProcess[str]:
        lists = not WORKS.intersection(args) or "--help" in args
        process = run(installed, "-m", "weft", *args) if lists else run(installed, *args, program=warm)
        assert process.returncode == 0, process.stderr
        return process

    return done


def test_plugin_adds_an_op(weft: Weft, installed: Path) -> None:
    assert "hard_sigmoid" in weft("ops").stdout
    shown = weft("ops", "hard_sigmoid").stdout
    assert "Courbariaux" in shown and "  ort-cpu: its body\n" in shown and "  text: text\n" in shown
    weft("compile", "model.py", "-o", "out", "--max-length", 16)
    assert "hard_sigmoid" in run(installed, "-c", "import weft; print(weft.hard_sigmoid.name)").stdout
    passed = weft("verify", "out", "--trust", "--tokens", 2)
    assert "FAILED" not in passed.stdout


def test_plugin_adds_a_pass(weft: Weft) -> None:
    assert "swap-adds" in weft("passes").stdout
    assert weft("passes", "swap-adds").stdout.startswith("swap-adds (exact)")
    trace = weft("compile", "model.py", "-o", "swapped", "-p", "default, swap-adds", "--trace", "--verify").stderr
    assert "swap-adds" in trace


def test_plugin_adds_a_family(weft: Weft, installed: Path) -> None:
    assert "lama" in [line.split(" ")[0] for line in weft("families").stdout.splitlines()]
    dense = MODEL.replace("Gate(48)", "GatedMLP(48)").replace("Decoder,", "Decoder, GatedMLP,")
    (installed / "dense.py").write_text(dense)
    weft("export", "dense.py", "-o", "checkpoint")
    config = json.loads((installed / "checkpoint" / "config.json").read_text())
    assert config["model_type"] == "llama"
    renamed = installed / "renamed"
    shutil.copytree(installed / "checkpoint", renamed)
    (renamed / "config.json").write_text(json.dumps(config | {"model_type": "lama"}))
    weft("compile", "renamed", "-o", "family")
    weft("compile", "checkpoint", "-o", "usual")
    one, two = ((installed / name / "model.onnx.data").read_bytes() for name in ("family", "usual"))
    assert one == two
    assert (
        "again is a lama model" in weft("export", "renamed", "-p", "replace-activation{to=relu}", "-o", "again").stderr
    )
    assert json.loads((installed / "again" / "config.json").read_text())["architectures"] == ["LamaForCausalLM"]
    assert "out.gguf is a lama-gguf model" in weft("export", "renamed", "-o", "out.gguf").stderr
    weft("compile", "out.gguf", "-o", "read")
    assert (installed / "read" / "model.onnx.data").read_bytes() == two


def test_plugin_adds_targets(weft: Weft, installed: Path) -> None:
    rows = {line.split()[0]: line for line in weft("targets").stdout.splitlines() if line}
    assert [*rows][2:] == [*TARGETS, "onnx-half", "text"]
    assert "--case, --heading" in rows["text"]
    assert "--heading TEXT" in (text := weft("compile", "--help").stdout) and "[lower|upper]" in text
    done = weft("compile", "model.py", "--target", "text", "--heading", "gates", "--case", "upper", "-o", "text")
    assert "for text in f32" in done.stdout and "its texts have 64 tokens at most" in done.stderr
    assert (installed / "text" / "model.weft").read_text().startswith("# GATES\ngraph model {\n")
    assert json.loads((installed / "text" / "weft.json").read_text())["heading"] == "GATES"
    weft("compile", "model.py", "--target", "onnx-half", "-o", "half")
    assert json.loads((installed / "half" / "weft.json").read_text())["dtype"] == "f16"
    assert "weft:" in weft("run", "half", "--ids", "1,2,3", "--max-tokens", 2, "--device", "cpu").stderr
    offered = run(installed, "-c", COMPLETION).stdout.split()
    assert offered == ["onnx", "onnx-half"]


SHIFTED = """
from weft import Attention, Block, Decoder, GatedMLP, RMSNorm, RoPE, linear, module
from weft_extras.token_shift import token_shift


@module
class Shift:
    def __call__(self, x):
        return linear(token_shift(x), x.width, "mix")


shift = Block(Shift(), GatedMLP(48), RMSNorm())
attend = Block(Attention(4, rope=RoPE()), GatedMLP(48), RMSNorm())
model = Decoder(97, 32, [shift, attend], context=64)
"""


def test_plugin_adds_a_state(weft: Weft, warm: Path, installed: Path) -> None:
    """The spec of its op is enough for ONNX Runtime: input and output, reset, beams, manifest. PyTorch asks for a
    lowering."""
    (installed / "shifted.py").write_text(SHIFTED)
    weft("compile", "shifted.py", "-o", "shifted", "--max-length", 24)
    carried = json.loads((installed / "shifted" / "weft.json").read_text())["carried"]
    (state,) = (record for record in carried if record["kind"] == "conv")
    assert (state["growth"], state["shape"]) == ("constant", [1, 32])
    assert "FAILED" not in weft("verify", "shifted", "--trust", "--tokens", 8).stdout
    weft("run", "shifted", "--ids", "1,2,3", "--max-tokens", 4, "--beams", 2)
    alone = run(installed, "compile", "shifted.py", "-o", "bare", "--target", "torch", program=warm)
    assert alone.returncode == 2 and "token_shift" in alone.stderr
    both = "--import", "weft_extras.token_shift_torch"
    weft(*both, "compile", "shifted.py", "-o", "module", "--target", "torch")
    assert "FAILED" not in weft(*both, "verify", "module", "--trust", "--tokens", 8).stdout


BLOCKS = """
import json, sys
import ml_dtypes
import numpy as np
import weft
from weft.ir import MemoryReader, interpret
from weft.ir.recipes import Source
from weft.ir.types.block_layouts import LAYOUTS, Blocks
import weft_extras.f4_64, weft_extras.f8_64, weft_extras.q3_64, weft_extras.q4_64, weft_extras.q5_64

name, codes_below = sys.argv[1], int(sys.argv[2])
layout = LAYOUTS[name]
FLOATS = {4: ml_dtypes.float4_e2m1fn, 8: ml_dtypes.float8_e4m3fn}


class Checkpoint(MemoryReader):
    def dtype(self, key):
        return layout.dtype

    def shape(self, key):
        rows, groups, _ = self.arrays[key].shape
        return rows, groups * layout.group

    def read_blocks(self, key, start, stop):
        return self.arrays[key][start:stop]

    def read(self, key, start, stop):
        return weights[key][start:stop]


block = weft.Block(weft.Attention(4, rope=weft.RoPE()), weft.GatedMLP(192), weft.RMSNorm())
graph, rng = weft.Decoder(97, 64, 2, block, context=64).graph(), np.random.default_rng(0)
stored, weights = {}, {}  # `weights` by the formula of the format, without the layout
for name, param in graph.params.items():
    if param.type.rank == 2 and "embed" not in name:
        rows, width = param.shape
        scales = 10.0 ** rng.uniform(-9, -1, (rows, width // 64))  # f16 ends at 6e-8
        codes = rng.integers(0, codes_below, (rows, width // 64, 64))
        if layout.floats:
            scales = 2.0 ** rng.integers(-30, -2, scales.shape).astype(np.float32)
            codes[codes % 128 == 127] = 0  # no numbers
            values = codes.astype(np.uint8).view(FLOATS[layout.bits]).astype(np.float32)
            weights[name] = (scales[..., None] * values).reshape(rows, width)
            stored[name] = layout.pack(Blocks(codes.astype(np.uint8), scales))
            param.recipe = Source(name)
            continue
        scales = scales.astype(layout.scale.numpy).astype(np.float32)
        middle = np.full(scales.shape, codes_below // 2)
        zeros = rng.integers(0, codes_below, scales.shape) if layout.has_minimum else middle
        weights[name] = (scales[..., None] * (codes - zeros[..., None]).astype(np.float32)).reshape(rows, width)
        half = 2 ** (layout.bits - 1)
        if layout.has_minimum:  # a zero point is the minimum −scale·zero
            stored[name] = layout.pack(Blocks(codes.astype(np.uint8), scales, scales * (half - zeros)))
        else:
            stored[name] = layout.pack(Blocks((codes - middle[..., None] + half).astype(np.uint8), scales))
        param.recipe = Source(name)
graph.reader = Checkpoint(stored)
ids = rng.integers(0, 97, 24)
want = interpret(graph, {"input_ids": ids[None], "position_ids": np.arange(24)[None]})["logits"][0]
targets = {"ort-cpu": "default, -last-token-logits", "torch": "default"}
if layout.floats:
    del targets["ort-cpu"]  # which has no operator that multiplies by floats
for target, passes in targets.items():
    weft.compile(graph, target, target=target, passes=passes, keep_blocks="all", max_length=32)
    got = weft.load(target, device="cpu", trust=True).logits(ids.tolist())
    manifest = json.load(open(f"{target}/weft.json"))
    print(target, float(np.abs(got - want).max() / np.abs(want).max()), manifest["kept_blocks"], manifest.get("blocks"))
"""


LAYOUTS = [("q3_64", 8), ("q4_64", 16), ("q5_64", 32), ("f4_64", 16), ("f8_64", 256)]  # and how many codes there are


@pytest.mark.parametrize(("layout", "codes"), LAYOUTS)
def test_plugin_adds_a_block_layout(layout: str, codes: int, warm: Path, installed: Path) -> None:
    """Every kernel and lowering that takes its bits and groups, or its floats, takes it, with scales that f16 does not
    have."""
    (installed / "blocks.py").write_text(BLOCKS)
    done = run(installed, "blocks.py", layout, codes, program=warm.with_name("python"))
    assert done.returncode == 0, done.stderr
    lines = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    wanted = {"ort-cpu": f"all {{'{layout}': 11}}", "torch": f"all {{'{layout}': 15}}"}  # the first packs q, k and v
    if layout[0] == "f":
        del wanted["ort-cpu"]
    assert {target: kept for target, _, kept in lines} == wanted
    assert all(float(error) < 1e-4 for _, error, _ in lines)


COMPLETION = """
from click.shell_completion import ShellComplete
from weft.frontends.app.cli import cli
items = ShellComplete(cli, {}, "weft", "_WEFT_COMPLETE").get_completions(["compile", "--target"], "onnx")
print(*(item.value for item in items))
"""


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--heading", "x"], "--heading is an option of target text only, not of ort-cpu; leave it out"),
        (["--target", "text", "--prepack"], "--prepack is an option of target ort-cpu only, not of text; leave it out"),
        (["--target", "text", "--dtype", "f16"], "target text does not support f16; it supports f32"),
        (["--target", "text", "--case", "odd"], "Invalid value for '--case'"),
    ],
)
def test_plugin_options_are_checked(args: list[str], words: str, warm: Path, installed: Path) -> None:
    done = run(installed, "compile", "model.py", "-o", "none", *args, program=warm)
    assert done.returncode == 2 and words in done.stderr


def test_target_without_a_runtime_is_refused_by_run(weft: Weft, warm: Path, installed: Path) -> None:
    weft("compile", "model.py", "--target", "text", "-o", "unrun")
    done = run(installed, "run", "unrun", "--ids", "1", program=warm)
    assert done.returncode == 2
    assert done.stderr == "weft: error: weft cannot run unrun, compiled for text: load it with the tool it is for\n"


def test_modules_are_imported_by_name(tmp_path: Path, installed: Path) -> None:
    """Without being installed, from the working folder."""
    shutil.copytree(installed / "weft_extras", tmp_path / "weft_extras")
    assert "hard_sigmoid" not in run(tmp_path, "-m", "weft", "ops").stdout
    given = ["--import", "weft_extras.hard_sigmoid", "--import", "weft_extras.swap_adds"]
    assert "hard_sigmoid" in run(tmp_path, "-m", "weft", *given, "ops").stdout
    assert "swap-adds" in run(tmp_path, "-m", "weft", *given, "passes").stdout
    one = run(tmp_path, "-m", "weft", "--import", "weft_extras.lama", "families").stdout
    assert "lama" in [line.split(" ")[0] for line in one.splitlines()]


@pytest.mark.parametrize(
    ("entry", "text", "words"),
    [
        ("broken", "1 / 0", "(broken) cannot be loaded: ZeroDivisionError: division by zero"),
        ("broken:missing", "", "(broken:missing) cannot be loaded: AttributeError"),
        ("absent", "", "(absent) cannot be loaded: ModuleNotFoundError: No module named 'absent'"),
        (
            "broken",
            "from weft.ir.op import op\n@op()\ndef linear(x): ...",
            "(broken) cannot be loaded: op linear is declared twice",
        ),
    ],
)
def test_a_broken_plugin_is_named(tmp_path: Path, entry: str, text: str, words: str) -> None:
    folder = install(tmp_path / "site", f"[weft.plugins]\nmine = {entry}\n", broken=text)
    done = run(folder, "-m", "weft", "ops")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"weft: error: the plugin mine of weft-extras {words}")


def test_broken_plugin_breaks_only_its_users(tmp_path: Path) -> None:
    folder = install(tmp_path / "site", "[weft.plugins]\nmine = broken\n", broken="1 / 0")
    assert run(folder, "-m", "weft", "--help").returncode == 0  # it needs none
    again = "import weft.ir\nfor _ in 1, 2:\n    try: len(weft.ir.OPS)\n    except weft.WeftError as e: print(e)"
    assert run(folder, "-c", again).stdout.count("the plugin mine") == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "there is no module mine on the Python path or in the working folder"),
        ("1 / 0", "the module mine cannot be imported: ZeroDivisionError: division by zero"),
        ("raise BaseException('x')", "the module mine cannot be imported: BaseException: x"),
        ("raise SystemExit(3)", "the module mine cannot be imported: SystemExit: 3"),
        (
            "class Odd(BaseException):\n    def __str__(self): raise SystemExit\nraise Odd",
            "the module mine cannot be imported: Odd: (its text cannot be made: SystemExit)",
        ),
        ("import absent", "the module mine cannot be imported: ModuleNotFoundError: No module named 'absent'"),
        ("from weft.ir.op import op\n@op()\ndef linear(x): ...", "op linear is declared twice"),
        ("import sys\nsys.path.clear()\n1 / 0", "the module mine cannot be imported: ZeroDivisionError"),
        ("from weft.ir.op import OPS\nOPS.add(3, None)", "op 3: the name must be a string"),
    ],
)
def test_a_broken_module_is_named(tmp_path: Path, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / "mine.py").write_text(text)
    done = run(tmp_path, "-m", "weft", "--import", "mine", "ops")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert words in line


def test_registries_list_plugin_entries() -> None:
    numbers: Registry[object] = Registry("number", "weft.ir.errors", "count")
    numbers.add("one", 1)
    numbers.add("one", 1)
    with pytest.raises(DuplicateName, match="number one is declared twice, as 1 and 2"):
        numbers.add("one", 2)
    assert dict(numbers) == {"one": 1} and isinstance(DuplicateName(), WeftError)
    with pytest.raises(WeftError, match="unknown number 'on'; did you mean one"):
        numbers.lookup("on")
    numbers.remove("one")
    assert not numbers


@pytest.fixture
def catalogue(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[], None]], str]:
    """Name a module that does something when it is imported."""

    def make(name: str, fill: Callable[[], None]) -> str:
        class Finder(MetaPathFinder, Loader):
            def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
                return ModuleSpec(name, self) if fullname == name else None

            def exec_module(self, module: ModuleType) -> None:
                fill()

        monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder()])
        monkeypatch.delitem(sys.modules, name, raising=False)
        return name

    return make


def test_early_plugin_entries_follow_built_in_ones(catalogue: Callable[..., str]) -> None:
    """Modules may be imported, and register, before anybody looks."""
    words: Registry[int] = Registry("word", catalogue("own_words", lambda: words.add("own", 1)), "read")
    words.add("early", 0)
    assert [*words] == ["own", "early"]

    def fill() -> None:
        ways.put("north", "own")
        ways.put("north", "own first", first=True)

    ways: Alternatives[str] = Alternatives("way", catalogue("own_ways", fill), "go")
    ways.put("north", "early")
    ways.put("west", "early")
    assert ways["north"] == ["own first", "own", "early"] and ways["west"] == ["early"]
