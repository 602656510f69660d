"""Tensor parallelism: two processes that share a model by its plan compute what one does, gradients and caches too."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from weft import (
    MLP,
    ALiBi,
    Attention,
    Block,
    Decoder,
    GatedMLP,
    LayerNorm,
    LearnedPositions,
    Mamba,
    MoE,
    RMSNorm,
    RoPE,
    WeftError,
)
from weft.backends.torch.codegen.source import write_source
from weft.backends.torch.package.export import build, write_code
from weft.backends.torch.package.module import state_dict
from weft.backends.torch.package.parallel import write_plan
from weft.frontends.api.modules import step_forms

from ...lowered import build_module, build_step, lower
from ...sampling import each
from .parallel_worker import observed, stepped

rope, norm = RoPE(10_000), RMSNorm(1e-5)
biased = Block(Attention(heads=4, qkv_bias=True, out_bias=True), MLP(72, "gelu", bias=True), norm=LayerNorm(1e-5))
grouped = Attention(heads=4, kv_heads=2, rope=rope)


def decoder(*blocks: Block, **more: Any) -> Decoder:
    return Decoder(vocab=61, dim=32, layers=list(blocks), context=32, **more)


MODELS = {
    "llama": decoder(*[Block(grouped, GatedMLP(56), norm=norm)] * 2),
    "gpt2": decoder(biased, biased, positions=LearnedPositions(32), tie_embeddings=True),
    "normed, gated": decoder(
        Block(Attention(heads=4, rope=rope, qk_norm=norm), GatedMLP(56), norm=norm),
        Block(Attention(heads=4, kv_heads=2, rope=rope, gate=True), GatedMLP(56), norm=norm),
    ),
    "mixtral": decoder(
        *[Block(Attention(heads=4, kv_heads=2, rope=rope, window=5), MoE(4, hidden=24, k=3), norm=norm)] * 2
    ),
    "sandwich": decoder(
        Block(grouped, GatedMLP(56), norm=norm, arrangement="sandwich"),
        Block(grouped, MoE(4, hidden=24, k=2, shared=GatedMLP(24)), norm=norm, arrangement="parallel"),
    ),
    "hybrid": decoder(
        Block(Mamba(inner=48, state=4), GatedMLP(56), norm=norm),
        Block(grouped, MoE(4, hidden=24, k=1), norm=norm),
        Block(Attention(heads=4, bias=ALiBi()), GatedMLP(55), norm=norm),
    ),
}
RUN = each(2, MODELS, 1)  # biases and a tied head are in one of them
FOUR = {  # for four processes
    "experts": decoder(
        Block(Attention(heads=8, kv_heads=4, rope=rope, qk_norm=norm), MoE(8, hidden=24, k=3), norm=norm),
        Block(Attention(heads=8, kv_heads=4, rope=rope, qkv_bias=True), MLP(56, "gelu", bias=True), norm=norm),
    ),
}
IDS, PROMPT = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(3)), 6


Ran = dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, warm: dict[str, str]) -> Ran:
    """Run every model in one process and in each of two."""
    return together({name: MODELS[name] for name in RUN}, 2, tmp_path_factory.mktemp("two"), warm)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory, warm: dict[str, str]) -> Ran:
    """Run models in one process and in each of four."""
    return together(FOUR, 4, tmp_path_factory.mktemp("four"), warm)


def together(models: dict[str, Decoder], processes: int, folder: Path, warm: dict[str, str]) -> Ran:
    """Run `models` in one process, and in each of several by folders that are compiled for them."""
    alone = {}
    for name, model in models.items():
        graph = model.graph(seed=1)
        built, home = build(step_forms(graph, processes), processes), folder / name
        home.mkdir()
        write_code(built, home)
        (home / "parallel.py").write_text(write_plan(built.lowered, processes), encoding="utf-8")
        weights = state_dict(built.source, graph.reader, torch.float64)
        torch.save({"weights": weights, "ids": IDS, "prompt": PROMPT}, home / "given.pt")
        alone[name] = observed(build_module(graph, dtype=torch.float64), IDS, PROMPT)
        net = build_module(graph)
        alone[name]["steps"] = stepped(net, build_step(graph, net), IDS, PROMPT)
    worker = Path(__file__).with_name("parallel_worker.py")
    run = [str(shutil.which("torchrun", path=warm["PATH"])), "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run([*run, str(worker), str(folder)], env=warm, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-12000:]
    seen = {name: [torch.load(folder / name / f"{rank}.pt") for rank in range(processes)] for name in models}
    return {name: (alone[name], seen[name]) for name in models}


@pytest.mark.parametrize(("processes", "name"), [*((2, name) for name in RUN), *((4, name) for name in FOUR)])
def test_steps_of_several_processes_are_those_of_one(processes: int, name: str, request: pytest.FixtureRequest) -> None:
    """Every process steps to the logits of one, which are those of a whole pass."""
    alone, parts = request.getfixturevalue("ran" if processes == 2 else "four")[name]
    assert len(parts) == processes and alone["steps"].shape == (2, IDS.shape[1] - PROMPT, 61)
    for want in (alone["steps"], alone["logits"][:, PROMPT:].float()):
        for one in parts:
            torch.testing.assert_close(one["steps"], want, rtol=0, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize("name", RUN)
def test_two_processes_compute_what_one_does(name: str, ran: Any) -> None:
    alone, both = ran[name]
    for one in both:
        near(one["logits"], alone["logits"])
        near(one["calls"], alone["calls"])
        near(one["calls"], alone["logits"])
        assert one["gradients"].keys() == alone["gradients"].keys()
        largest = max(float(g.abs().max()) for g in alone["gradients"].values())
        for key in alone["gradients"]:
            near(one["gradients"][key], alone["gradients"][key], largest)
            near(one["again"][key], alone["gradients"][key], largest)


def near(got: torch.Tensor, want: torch.Tensor, largest: float = 0.0) -> None:
    """Equal but for the order of sums: norms and angles are in f32 on both sides, of numbers that differ by f64's; what
    should be 0 (gradients of biases of keys) by f64's of the `largest` number."""
    atol = 64 * max(2**-23 * float(want.abs().max()), 2**-52 * largest)
    torch.testing.assert_close(got, want, rtol=0, atol=atol)


@pytest.mark.parametrize("name", RUN)
def test_a_step_leaves_the_model_as_it_was(name: str, ran: Any) -> None:
    """Its packed weights are views for the model, so no process holds its part twice."""
    alone, both = ran[name]
    for one in both:
        want = alone["logits"].float()
        torch.testing.assert_close(one["after"], want, rtol=0, atol=1e-5 * float(want.abs().max()))
        assert one["views"]


@pytest.mark.parametrize("name", RUN)
def test_each_process_holds_a_part(name: str, ran: Any) -> None:
    _, both = ran[name]
    whole = dict(write_source(lower(MODELS[name].graph())).weights)
    cut = [k for k in both[0]["local"] if not k.endswith(("_norm.weight", "o.bias", "down.bias"))]
    tokens = [k for k in cut if k.startswith(("embed", "lm_head"))]
    assert len(tokens) == (0 if name == "gpt2" else 2)  # whose head is the embedding
    for key in cut:
        size = torch.Size(whole[key].type.concrete({})).numel()
        shares = (31, 30, 61) if key in tokens else (1, 1, 2)
        assert [one["local"][key] for one in both] == [size * share // shares[2] for share in shares[:2]]
    expected = {"llama": [1, 1], "normed, gated": [2, 1], "gpt2": [2, 2], "mixtral": [1, 1], "sandwich": [1, 1]}
    expected |= {"hybrid": [1, 4]}
    assert both[0]["heads"] == both[1]["heads"] == expected[name]


def test_what_is_whole_is_said() -> None:
    text = write_plan(lower(MODELS["hybrid"].graph()), 2)
    assert "# layers.2.attn is whole on every process: it has bias of its own for every head" in text
    assert "# layers.2.ffn is whole on every process: its 55 hidden units do not divide evenly" in text
    assert '"layers.1.ffn.experts": ExpertParallel()' in text
    assert "# embed is whole on every process: it is the head too" in write_plan(lower(MODELS["gpt2"].graph()), 2)
    assert "layers.2.attn.q" not in text and '"layers.*' not in text


def test_all_layers_are_one_entry() -> None:
    text = write_plan(lower(MODELS["llama"].graph()), 2)
    assert text.count("Parallel()") == 7 and '"embed": RowwiseParallel(input_layouts=Replicate())' in text
    assert (
        '"lm_head": ColwiseParallel(output_layouts=Replicate())' in text
        and '"layers.*.ffn.down": RowwiseParallel()' in text
    )
    assert "ExpertParallel" not in text


@pytest.mark.parametrize(
    ("model", "degree", "says"),
    [
        ("llama", 4, r"4 processes cannot evenly share 4 query and 2 key/value heads \(layers\.0\.attn\)"),
        ("llama", 1, "degree 1 divides nothing"),
    ],
)
def test_what_cannot_be_shared_is_refused(model: str, degree: int, says: str) -> None:
    with pytest.raises(WeftError, match=says):
        write_plan(lower(MODELS[model].graph()), degree)


def test_a_model_without_heads_is_refused() -> None:
    with pytest.raises(WeftError, match="nothing of decoder can be divided among 2 processes"):
        write_plan(lower(decoder(Block(Mamba(inner=48, state=4), norm=norm)).graph()), 2)


def test_a_folder_holds_the_plan(tmp_path: Path) -> None:
    weft.compile(MODELS["llama"], tmp_path / "out", target="torch", tensor_parallel=2)
    assert (tmp_path / "out" / "parallel.py").read_text(encoding="utf-8") == write_plan(
        lower(MODELS["llama"].graph()), 2
    )
    weft.compile(MODELS["llama"], tmp_path / "out", target="torch")
    assert not (tmp_path / "out" / "parallel.py").exists()


@pytest.mark.parametrize(
    ("target", "degree", "says"),
    [
        ("ort-cpu", 2, "--tensor-parallel supports target torch only, not ort-cpu; leave it out"),
        ("torch", 0, "tensor parallelism of degree 0 divides nothing; give at least 2"),
        ("torch", 4, "4 processes cannot evenly share 4 query and 2 key/value heads"),
    ],
)
def test_compile_refuses(target: str, degree: int, says: str, tmp_path: Path) -> None:
    with pytest.raises(WeftError, match=says):
        weft.compile(MODELS["llama"], tmp_path / "out", target=target, tensor_parallel=degree)
    assert not (tmp_path / "out").exists()
