"""The text of decode steps: that of SmolLM2 as reviewed, launches counted; all of them clean, alone and repeatable."""

from __future__ import annotations

import ast
import functools
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from weft import load_source
from weft.backends.torch.codegen.model_source import write_source
from weft.backends.torch.codegen.structure import Method
from weft.backends.torch.decode.step_source import LAUNCHERS, name_attributes, write_constructor
from weft.backends.torch.package.source_folder import generate_model, write_code
from weft.backends.torch.program.statements import ParamRef, Submodule
from weft.frontends.app.api.modules import build_step_graphs
from weft.passes import Trace, lookup

from ....lowered import lower, write_step
from ....sampling import each
from ..generated import alone, graph_of

GOLDEN = Path(__file__).parents[3] / "golden" / "smollm2_decode.py.txt"
CALLS = re.compile(rf"\b({'|'.join(LAUNCHERS)})\(")
# Not E501, docs in one line; nor B905, zip of what the generator has counted.
RULES = "F,E,W,I,B,UP,ARG,RET,SIM,PIE,C4"
NAMES = [
    *("family/deepseek-v3", "family/gpt-oss", "family/gemma3", "family/falcon-sequential", "family/jamba"),
    *("variant/hybrid", "variant/experts, shared and gated", "variant/experts that choose", "variant/chunked"),
    *("variant/linear attention, rope", "variant/T5 bias, per layer", "variant/gate", "packed/variant repeated"),
    *("variant/delta rule", "variant/RWKV-7", "variant/mLSTM"),
]


@pytest.fixture(scope="module")
def smollm2() -> str:
    return write_step(load_source("smollm2-135m").graph)[0]


@functools.cache
def written(name: str) -> tuple[str, list[str]]:
    """Return the source of the decode step of a model of the zoo, and the files of its kernels."""
    return write_step(graph_of(name))


def classes(text: str) -> dict[str, str]:
    """The ``__call__`` of every class."""
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = next(ast.unparse(f) for f in node.body if getattr(f, "name", "") == "__call__")
    return found


def test_decode_step_of_smollm2_is_the_golden_file(smollm2: str) -> None:
    """After a change that is meant: ``WEFT_GOLDEN=write pytest`` this file, and read the diff."""
    if os.environ.get("WEFT_GOLDEN") == "write":
        GOLDEN.write_text(smollm2, encoding="utf-8")
    assert smollm2 == GOLDEN.read_text(encoding="utf-8")


def test_a_layer_of_smollm2_is_five_launches(smollm2: str) -> None:
    called = {name: CALLS.findall(text) for name, text in classes(smollm2).items()}
    assert sorted(called["Block"]) == ["decode_attention", "linear_residual", "linear_residual", "norm_glu", "norm_qkv"]
    assert called["Step"] == ["embed_tokens", "norm_linear"]


@pytest.mark.parametrize("name", ["family/gpt2-tied", "family/gemma2", "family/mamba", "variant/post", "family/bert"])
def test_residual_norms_leave_the_source_unchanged(name: str) -> None:
    """They end the layer before, as in the model; the kernels of a step norm what they read."""
    graph, fused = graph_of(name), graph_of(name).clone()
    lookup("fuse-residual-norm")().run(fused, trace := Trace())
    assert trace.rewrites and write_source(lower(fused)).text == write_source(lower(graph)).text
    assert write_step(fused) == write_step(graph)


LAYERS = {  # what is called for a layer of a model: a launch each, attention to long texts two
    "family/mamba": "norm_linear conv_step norm_linear selective_step linear_residual",
    "variant/Mamba, norms": "norm_linear conv_step norm_linear selective_step linear_residual norm_glu linear_residual",
    "family/mamba2": "norm_linear conv_step ssd_step linear_residual",
    "variant/Mamba-2 in groups": "norm_linear conv_step ssd_step linear_residual norm_glu linear_residual",
    "variant/latent": "norm_linear latent_qk latent_decode linear_by_head linear_residual norm_glu linear_residual",
    "variant/latent queries": (
        "norm_linear norm_linear latent_qk latent_decode linear_by_head linear_residual norm_glu linear_residual"
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_launch_these_kernels_and_nothing_else(name: str) -> None:
    """Between kernels nothing is computed but views: no operator, no function."""
    text = written(name)[0]
    layer = "".join(body for called, body in classes(text).items() if called != "Step")
    assert sorted(CALLS.findall(layer)) == sorted(LAYERS[name].split())
    tree = ast.parse(text)
    made = [n for c in tree.body if isinstance(c, ast.ClassDef) for n in ast.walk(c)]
    assert not [n for n in made if isinstance(n, ast.BinOp)]
    assert "F." not in layer and "torch." not in layer


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("variant/norms of q and k, full", "self.attn_qkv, norm=self.attn_norm).split((24, 8, 8), -1)"),
        ("variant/linear attention", "self.attn_qkv, bias=self.attn_qkv_bias, norm=self.attn_norm).split((30, 30, 30)"),
    ],
)
def test_parallel_projections_are_one_launch(name: str, line: str) -> None:
    """Without a kernel for more of the attention: q, k and v, then the head."""
    text = written(name)[0]
    assert f"q, k, v = norm_linear(x, {line}" in text
    assert text.count("norm_linear(") == 2


@pytest.mark.parametrize("name", each(2, NAMES))
def test_decode_source_is_repeatable_lint_free_and_standalone(name: str, tmp_path: Path) -> None:
    graph = graph_of(name)
    text, kernels = written(name)
    assert (text, kernels) == write_step(graph)
    imported = {n.module.split(".")[0] for n in ast.parse(text).body if isinstance(n, ast.ImportFrom) and n.module}
    assert imported <= {"__future__", "typing", "torch", "kernels", "model"}
    write_code(generate_model(build_step_graphs(graph)), tmp_path)
    assert (tmp_path / "decode.py").read_text(encoding="utf-8") == text
    command = [
        "ruff",
        "check",
        "--isolated",
        "--quiet",
        "--line-length=120",
        f"--select={RULES}",
        "--ignore=E501,B905",
        "decode.py",
    ]
    found = subprocess.run([sys.executable, "-m", *command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (found.stdout, found.stderr, found.returncode) == ("", "", 0)


@pytest.mark.parametrize("name", ["grouped", "delta rule", "RWKV-7"])
def test_folders_decode_without_weft(name: str, tmp_path: Path) -> None:
    """Model, step and kernels need torch alone, wherever they are."""
    write_code(generate_model(build_step_graphs(graph_of(f"variant/{name}"))), tmp_path)
    with alone(tmp_path), torch.inference_mode():
        model, decode = (importlib.import_module(name) for name in ("model", "decode"))
        net = model.Model()
        for weight in (*net.parameters(), *net.buffers()):  # all: their memory is uninitialized
            torch.nn.init.normal_(weight, std=0.3, generator=torch.Generator().manual_seed(0))
        ids, at = torch.tensor([[3], [5]]), torch.zeros(2, 1, dtype=torch.int64)
        want = net(ids, cache=net.new_cache(2, 4))
        got = decode.Step(net)(ids, at, net.new_cache(2, 4))
    assert got.shape == want.shape and (got - want).abs().max() < 1e-5 * want.abs().max()


def test_kernel_files_are_those_that_the_source_calls() -> None:
    for name in NAMES:
        text, files = written(name)
        helpers = {"shared.norm" for _ in re.findall(r"\bNorm\(", text)} | {
            "shared.tickets" for _ in re.findall(r"\bTickets\(", text)
        }
        helpers |= {"shared.launch", "shared.recurrence"} if "@jit" in text else set()  # of a generated kernel
        assert set(files) == helpers | {*CALLS.findall(text)}


def build_method(*members: ParamRef | Submodule, path: str = "") -> Method:
    method = Method(path, [])
    method.members.update({m.path: m for m in members})
    return method


def test_attributes_are_short_unless_two_would_be_equal() -> None:
    names = name_attributes(
        build_method(
            ParamRef("attn.q.weight", (2, 2)),
            Submodule("attn.q.norm", "Norm()"),
            Submodule("mlp.module", "{0}"),
            Submodule("angles.table1", "torch.zeros(1)"),
        )
    )
    assert sorted(names.values()) == ["angles", "attn_q", "attn_q_norm", "mlp"]
    assert names["mlp.module"] == "mlp"


def test_attributes_leave_out_the_path_of_their_class() -> None:
    names = name_attributes(build_method(ParamRef("layers.0.attn.o.weight", (2, 2)), path="layers.0"))
    assert names == {"layers.0.attn.o.weight": "attn_o"}


def test_constructor_reads_the_modules_of_the_model() -> None:
    method = build_method(ParamRef("head.weight", (2, 2)), Submodule("attn.qkv_weight", "pack({0}.q, {0}.k, {0}.v)"))
    assert sorted(write_constructor(method, {})) == [
        "self.attn_qkv = pack(module.attn.q, module.attn.k, module.attn.v)",
        "self.head = module.head.weight",
    ]
    assert write_constructor(build_method(), {}) == ["pass"]


def test_constructor_builds_one_list_of_layers() -> None:
    method = build_method()
    method.modules.update(dict.fromkeys(("layers.0", "layers.1")))
    assert write_constructor(method, {"layers.0": "Block", "layers.1": "Block"}) == [
        "self.layers = [Block(layer) for layer in module.layers]"
    ]
    assert write_constructor(method, {"layers.0": "Block", "layers.1": "Local"}) == [
        "self.layers = [kind(layer) for kind, layer in zip([Block, Local], module.layers)]"
    ]
