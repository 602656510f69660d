"""PyTorch whose weights stay in the blocks of a GGUF file: the numbers of the dequantized weights, in their bytes."""

from __future__ import annotations

import importlib
import json
import pickle
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type
from safetensors.torch import load_file

import weft
from weft.backends.runtime.core.generation import Generator
from weft.backends.runtime.torch.open_torch import import_from
from weft.backends.torch.codegen.model_source import write_source
from weft.backends.torch.kernels.shared import gemv, launch
from weft.backends.torch.kernels.shared import quantized_gemv as codes
from weft.backends.torch.lib.quantized import dequantize_rows
from weft.frontends.app.api.modules import with_weights
from weft.ir import Graph, WeftError, interpret
from weft.ir.types.block_layouts import LAYOUTS
from weft.passes import run_passes

from ....backends.onnx.quantized_llama import DIM, FFN, LAYERS, VOCAB
from ....backends.onnx.quantized_llama import write as write_llama
from ....backends.torch.generated import assert_close, call, tolerance
from ....lowered import build_module, build_step, explain, lower
from ....sampling import each
from ...command import done, refused
from ...formats.gguf.gguf_models import MODELS, write_gguf

KINDS = (Type.Q4_0, Type.Q4_1, Type.Q8_0)
BITS = {Type.Q4_0: 4, Type.Q4_1: 4, Type.Q8_0: 8}
FAMILIES = {  # which of the models of an architecture; and what is new in it
    "llama": 1,  # rows of q and k in another order; biases; a tied head
    "qwen2": 0,  # biases of q, k and v; a head of its own
    "gpt2": 0,  # one matrix of q, k and v with its bias; stored the other way about
    "falcon": 0,
    "gemma2": 0,  # a scaled embedding
    "phi3": 0,  # one matrix of gate and up
    "bert": 0,  # no decoder
}
IDS = np.random.default_rng(7).integers(1, 97, (2, 9))


def feeds(graph: Graph, ids: np.ndarray = IDS) -> dict[str, np.ndarray]:
    given = {"input_ids": ids, "position_ids": np.arange(ids.shape[1])[None].repeat(len(ids), 0)}
    given |= {"attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    return {name: given[name] for name in graph.inputs}


def kept(graph: Graph, asked: str = "all") -> Graph:
    """`graph` as the target sees it."""
    return run_passes(graph, f"keep-blocks{{which={asked}}}")


@pytest.mark.parametrize("arch", FAMILIES)
def test_families_run_with_kept_blocks(arch: str, save: Any, tmp_path: Path) -> None:
    """One pass, and where there is a cache one token after the other, against the float64 reference of the file."""
    model_type, config, metadata = MODELS[arch][FAMILIES[arch]]
    options = {"kind": "AutoModelForMaskedLM"} if arch == "bert" else {}
    _, folder = save(model_type, pad_token_id=0, **options, **config)
    kind = KINDS[list(FAMILIES).index(arch) % 3]
    write_gguf(tmp_path / "model.gguf", folder, arch, {}, True, metadata, kind)
    graph = weft.load_source(tmp_path / "model.gguf").graph
    source = write_source(lower(kept(graph)))
    quantized = [key for key in source.weights if key.endswith(".codes")]
    assert len(quantized) >= 3 * 3  # at least q, k, v and out, or those in one, and one more, in each layer
    module: Any = build_module(kept(graph)).eval()
    given = feeds(graph)
    (name, want), *_ = interpret(graph, given).items()
    (got, *_) = call(module, {k: torch.from_numpy(a) for k, a in given.items()})
    assert_close(got, want, tolerance(graph, torch.float32))
    if name == "logits":
        with torch.inference_mode():
            cache, ids = module.new_cache(2, 9), torch.from_numpy(IDS)
            made = [module(ids[:, i : i + 1], cache=cache) for i in range(9)]
            assert_close(torch.cat(made, 1), want, tolerance(graph, torch.float32))


@pytest.mark.parametrize("kind", each(2, KINDS), ids=lambda k: k.name)
def test_folder_stores_the_blocks(kind: Type, tmp_path: Path) -> None:
    source, out = write_llama(tmp_path / "model.gguf", {"": kind}), tmp_path / "out"
    done("compile", source, "--target", "torch", "--keep-blocks", "all", "-o", out)
    tensors, bits = load_file(out / "model.safetensors"), BITS[kind]
    weights = VOCAB * DIM + LAYERS * (DIM * DIM * 2 + DIM * DIM + 3 * DIM * FFN)

    def padded(width: int) -> int:
        return -(-width * bits // 512) * 512 // bits  # to chunks of 16 words

    codes = VOCAB * padded(DIM) + LAYERS * (3 * DIM * padded(DIM) + 2 * FFN * padded(DIM) + DIM * padded(FFN))
    offsets = weights // 32 * 4 if kind == Type.Q4_1 else 0
    norms = 4 * DIM * (2 * LAYERS + 1)
    assert sum(t.nbytes for t in tensors.values()) == codes * bits // 8 + weights // 32 * 2 + offsets + norms
    assert tensors["layers.0.attn.q.codes"].shape == (DIM, padded(DIM) * bits // 32)
    facts = json.loads((out / "weft.json").read_text())
    assert (facts["kept_blocks"], facts["blocks"]) == ("all", {kind.name.lower(): 1 + 7 * LAYERS})
    assert f"{weights + DIM * (2 * LAYERS + 1):,} parameters" in (out / "model.py").read_text()
    graph = weft.load_source(source).graph
    loaded = weft.load(out, device="cpu", trust=True)
    assert isinstance(loaded, Generator)
    ids = np.random.default_rng(1).integers(0, VOCAB, 20)
    want = interpret(graph, feeds(graph, ids[None]))["logits"][0]
    assert_close(torch.from_numpy(loaded.logits(ids.tolist())), want, tolerance(graph, torch.float32))
    assert "passed" in done("verify", out, "--trust", "--tokens", 2).stdout
    with import_from(out):
        model = importlib.import_module("load").load_model(out, dtype="bf16")
    assert {t.dtype for t in model.buffers()} <= {torch.int32, torch.float16, torch.float32}
    (half,) = call(model, {"input_ids": torch.from_numpy(ids)[None]})
    assert half.dtype == torch.bfloat16
    assert_close(half[0], want, tolerance(graph, torch.bfloat16))


def test_only_the_head_stays_in_blocks(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "model.gguf", {"": Type.Q4_0, "token_embd": Type.Q8_0})
    keys = weft.state_dict(source, keep_blocks="head").keys()
    assert {key for key in keys if key.endswith((".codes", ".scales"))} == {"embed.codes", "embed.scales"}
    module = weft.torch(source, keep_blocks="head")
    module.load_state_dict(weft.state_dict(source, keep_blocks="head"))
    graph = weft.load_source(source).graph
    (got,) = call(module, {"input_ids": torch.from_numpy(IDS)})
    assert_close(got, interpret(graph, feeds(graph))["logits"], tolerance(graph, torch.float32))


def test_unsupported_blocks_are_dequantized_with_a_note(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "model.gguf", {"": Type.Q4_0, "ffn_down": Type.F16})
    report = weft.compile(source, tmp_path / "out", target="torch", keep_blocks="all", passes="default, pack-qkv")
    name, layouts = "layers.0.ffn.down.weight", ", ".join(LAYOUTS)
    assert f"{name} is dequantized: it is stored as f16, not as {layouts} or integers in groups" in report.trace
    keys = load_file(tmp_path / "out" / "model.safetensors").keys()
    assert {"layers.0.ffn.down.weight", "layers.0.attn.qkv.codes", "layers.1.ffn.gate.scales"} <= keys
    folded = weft.torch(source, keep_blocks="all", passes="default, fold-norm-scale").state_dict().keys()
    assert {"layers.0.attn.q.weight", "layers.0.attn.o.codes"} <= folded


def test_a_source_without_blocks_is_refused(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "model.gguf", {"": Type.F16})
    words = "has no effect here, so leave it out: no weights keep their blocks: .* it is stored as f16"
    with pytest.raises(WeftError, match=f"--keep-blocks all {words}"):
        weft.compile(source, tmp_path / "out", target="torch", keep_blocks="all")
    with pytest.raises(WeftError, match=f"keep_blocks='head' {words}"):
        weft.torch(source, keep_blocks="head")


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is published for Linux alone")
@pytest.mark.parametrize("kind", each(2, KINDS), ids=lambda k: k.name)
def test_decode_step_kernels_read_blocks(kind: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter, with nothing in the place of the kernel, two rows at once."""
    graph = kept(weft.load_source(write_llama(tmp_path / "model.gguf", {"": kind})).graph)
    module: Any = build_module(graph).eval()
    ids = torch.from_numpy(IDS[:, :5])
    (whole,) = call(module, {"input_ids": ids})
    step = build_step(graph, module)
    with torch.inference_mode():
        cache = module.new_cache(2, 5)
        call(module, {"input_ids": ids[:, :4], "cache": cache})
        monkeypatch.setattr(launch, "INTERPRETED", True)
        monkeypatch.setattr(gemv, "PROCESSORS", 1)  # more outputs in each of fewer blocks
        monkeypatch.setattr(codes, "dequantize", None)
        monkeypatch.setattr(sys.modules[type(module).__module__], "dequantize_rows", _rows_of_two)
        got = step(ids[:, 4:], torch.full((2, 1), 4), cache)
    assert_close(got, whole[:, 4:].double().numpy(), tolerance(graph, torch.float32))
    told = " ".join(map(str, explain(graph)))
    assert all(kernel in told for kernel in ("norm_qkv", "norm_glu", "linear_residual", "norm_linear"))
    assert "Triton does not run on a CPU" in str(explain(graph, capability=None)[2])


def _rows_of_two(codes: torch.Tensor, *rest: Any) -> torch.Tensor:
    """`dequantize_rows` of the rows of two tokens alone, which no kernel looks up."""
    assert len(codes) == 2
    return dequantize_rows(codes, *rest)


def test_gradients_pass_through_blocks_to_norms(tmp_path: Path) -> None:
    """Blocks are no parameters; gradients pass through them, as through the widened weights."""
    source = write_llama(tmp_path / "model.gguf", {"": Type.Q4_1})
    module, wide = weft.torch(source, keep_blocks="all"), weft.torch(source)
    assert {name.rpartition(".")[0].rpartition(".")[2] for name, _ in module.named_parameters()} == {
        *("attn_norm", "ffn_norm", "final_norm")
    }
    for net in (module, wide):
        net(torch.from_numpy(IDS)).square().mean().backward()
    for name, p in module.named_parameters():
        want = wide.get_parameter(name).grad
        assert p.grad is not None and want is not None
        assert (p.grad - want).abs().max() <= 1e-4 * want.abs().max()


def test_modules_cast_pickle_and_export(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "model.gguf", {"": Type.Q4_1})
    module: Any = weft.torch(source, keep_blocks="all").eval()
    ids = torch.from_numpy(IDS)
    (want,) = call(module, {"input_ids": ids})
    again = pickle.loads(pickle.dumps(module)).bfloat16()
    assert {b.dtype for b in again.buffers()} == {torch.int32, torch.float16, torch.float32}
    assert again(ids).dtype == torch.bfloat16 and torch.equal(again.float().embed.offsets, module.embed.offsets)
    exported = torch.export.export(
        module, (ids,), dynamic_shapes=({0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO},)
    )
    with torch.inference_mode():
        got = exported.module()(ids[:, :6])
    assert_close(got, want[:, :6].double().numpy(), 1e-5)


def test_invalid_choices_are_refused_in_one_sentence(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "model.gguf", {"": Type.Q4_0})
    args = ("compile", source, "-o", tmp_path / "out", "--keep-blocks", "all", "--target")
    assert "--keep-blocks is an option of the targets ort-cpu and torch only, not of onnx; leave it out" in refused(
        *args, "onnx"
    )
    with pytest.raises(WeftError, match="--keep-blocks 'some' is unknown: choose head or all"):
        weft.torch(source, keep_blocks="some")
    graph = kept(weft.load_source(source).graph)
    with pytest.raises(WeftError, match="has quantized blocks, which do not train"):
        with_weights(graph, {})
