"""Tiny models of every kind, compiled for each runtime of `weft compile --target onnx --for` and run in it.

docs/runtimes.md shows the table; ``python -m tests.engines.runtime_matrix`` writes it, in a minute per runtime.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

import weft
from weft import (
    MLA,
    MLP,
    Attention,
    Block,
    CrossAttention,
    Decoder,
    Dense,
    Encoder,
    EncoderDecoder,
    GatedMLP,
    LayerNorm,
    LearnedPositions,
    Mamba,
    MoE,
    RoPE,
    SentencePooling,
    Sinusoidal,
    TaskHead,
)
from weft.backends.onnx_runtimes import RUNTIMES
from weft.frontends.app.api.weights import expand_weights
from weft.ir import Graph, interpret

from ..caches import empty_caches
from .runtimes import Runtime, RuntimeRefusal

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "runtimes.md"
TRIED = ("openvino", "tract", "mnn", "ort-node", "ort-web")  # that pip and npm install
VOCAB, PROMPT, LENGTH = 96, 6, 9
_ROTATED = Attention(4, kv_heads=2, rope=RoPE())
_READS = Block(Attention(4), MLP(64, "relu", bias=True), LayerNorm(1e-6), arrangement="post")
_WRITES = Block(Attention(4), MLP(64, "relu", bias=True), LayerNorm(1e-6), arrangement="post", cross=CrossAttention(4))
_BERT = Block(Attention(4, qkv_bias=True, out_bias=True), MLP(96, "gelu", bias=True), LayerNorm(), arrangement="post")
_ENDS: dict[str, Any] = {"positions": LearnedPositions(32), "embed_norm": LayerNorm(), "token_types": 2}
MODELS: dict[str, Any] = {
    "dense": Decoder(VOCAB, 64, 2, Block(Attention(4), MLP(128, "gelu_tanh"), LayerNorm()), LearnedPositions(32)),
    "GQA, window": Decoder(VOCAB, 64, 2, Block(Attention(4, kv_heads=2, rope=RoPE(), window=4), GatedMLP(96))),
    "MoE": Decoder(VOCAB, 64, 2, Block(_ROTATED, MoE(6, 64, 2))),
    "MLA": Decoder(VOCAB, 64, 2, Block(MLA(4, 32, 16, 16, 16, RoPE()), GatedMLP(96))),
    "Mamba": Decoder(VOCAB, 64, 2, Block(Mamba(128), None)),
    "encoder": Encoder(VOCAB, 64, 2, _BERT, **_ENDS),
    "classifier": Encoder(VOCAB, 64, 2, _BERT, **_ENDS, head=TaskHead("text-classification", 3, pool="first")),
    "reranker": Encoder(VOCAB, 64, 2, _BERT, **_ENDS, head=TaskHead("text-classification", 1, pool="first")),
    "sentence vectors": Encoder(VOCAB, 64, 2, _BERT, **_ENDS, sentence=SentencePooling(after=(Dense(48),))),
    "encoder-decoder": EncoderDecoder(
        Encoder(VOCAB, 64, 2, _READS, positions=Sinusoidal(32)),
        Decoder(VOCAB, 64, 2, _WRITES, positions=Sinusoidal(32), tie_embeddings=True),
    ),
}
PRECISIONS = {"f32": 1e-5, "f16": 2e-2, "int8": 1e-5, "int4": 1e-5}  # relative errors that rounding explains
Arrays = dict[str, np.ndarray[Any, Any]]


@functools.cache
def build_graph(name: str) -> Graph:
    graph: Graph = MODELS[name].graph(seed=3)
    return graph


def draw_inputs(graph: Graph) -> Arrays:
    """Inputs of the whole model: two rows, the first full; the second has padding where the model reads a mask."""
    rng, kind = np.random.default_rng(1), graph.meta["kind"]
    ids, mask = rng.integers(3, VOCAB, (2, LENGTH)), (np.arange(LENGTH) < [[LENGTH], [5]]).astype(np.int64)
    arrays = {"input_ids": ids, "position_ids": np.broadcast_to(np.arange(LENGTH), ids.shape)}
    arrays |= {"encoder_input_ids": ids[:, ::-1].copy(), "encoder_attention_mask": mask}
    if kind == "encoder":
        arrays |= {"attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
    return {name: array for name, array in arrays.items() if name in graph.inputs}


def compute_reference(name: str, precision: str) -> Arrays:
    """The outputs of the whole model in float64, its weights rounded to the codes of `precision`."""
    graph = build_graph(name)
    if precision.startswith("int"):
        graph = weft.run_passes(graph, expand_weights(graph, f"{precision}{{method=rtn}}"))
    return dict(interpret(graph, draw_inputs(graph)))


def compile_for(runtime: str, name: str, precision: str, out: Path) -> None:
    """Compile a model for a runtime; raises WeftError where the runtime lacks something."""
    graph = build_graph(name)
    options: dict[str, Any] = {"weights": f"{precision}{{method=rtn}}"} if precision.startswith("int") else {}
    options = options or {"dtype": precision}
    decodes = graph.meta["kind"] != "encoder"
    passes = "default,-last-token-logits" if decodes else "default"
    weft.compile(graph, out, target="onnx", runtime=runtime, passes=passes, max_length=32, **options)


def run_in(session: Any, folder: Path, name: str) -> Arrays:
    """The outputs of a compiled model in a runtime; a decoder runs a prompt, then token by token, through caches."""
    graph, float_dtype = build_graph(name), _read_float_dtype(folder)
    inputs, kind = draw_inputs(graph), graph.meta["kind"]
    if kind == "encoder":
        return dict(session(folder / "model.onnx", inputs))
    crossed: Mapping[str, Any] = {}
    if kind == "encoder-decoder":
        sources = {k: v for k, v in inputs.items() if k.startswith("encoder")}
        crossed = session(folder / "encoder.onnx", sources) | sources
    described = ort.InferenceSession(folder / "model.onnx", _quiet())
    states, found, ids = empty_caches(described, 2, 0), [], inputs["input_ids"]
    states = {k: v.astype(float_dtype) if v.dtype == np.float32 and "conv" in k else v for k, v in states.items()}
    names = {i.name for i in described.get_inputs()}
    for start, end in [(0, PROMPT), *((i, i + 1) for i in range(PROMPT, LENGTH))]:
        call = {
            "input_ids": ids[:, start:end],
            "attention_mask": np.ones((2, end), np.int64),
            "position_ids": np.broadcast_to(np.arange(start, end), (2, end - start)),
        }
        given = {k: v for k, v in {**call, **states, **crossed}.items() if k in names}
        outputs = session(folder / "model.onnx", given)
        found.append(outputs["logits"])
        states = {k: outputs[k.replace("past_key_values", "present").replace("past_", "present_")] for k in states}
    return {"logits": np.concatenate(found, 1)}


def measure_error(runtime: Runtime, name: str, precision: str, out: Path) -> float:
    """The largest difference from float64 by the largest value, over valid positions. Raises WeftError where weft
    refuses to compile, RuntimeRefusal where the runtime does."""
    compile_for(runtime.name, name, precision, out)
    got, want = run_in(runtime.run, out, name), compute_reference(name, precision)
    mask = draw_inputs(build_graph(name)).get("attention_mask")
    errors = [0.0]
    for key, values in want.items():
        rows = mask.astype(bool) if mask is not None and values.shape[:2] == mask.shape else slice(None)
        ours, theirs = np.asarray(got[key], np.float64)[rows], values[rows]
        errors.append(float(np.abs(ours - theirs).max() / np.abs(theirs).max()))
    return max(errors)


def _read_float_dtype(folder: Path) -> type:
    described = ort.InferenceSession(folder / "model.onnx", _quiet())
    return np.float16 if any("float16" in v.type for v in described.get_outputs()) else np.float32


def _quiet() -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return options


def describe_cell(runtime: Runtime, name: str, precision: str) -> str:
    """A cell of the table: the error, or the sentence with which weft refuses."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = measure_error(runtime, name, precision, Path(folder, "out"))
        except weft.WeftError as error:
            return f"refused: {str(error).partition(', which')[0]}"
        except RuntimeRefusal as error:
            return f"FAILS: {str(error).splitlines()[0]}"
    return f"{found:.0e}" if found <= PRECISIONS[precision] else f"WRONG by {found:.0e}"


def write_page() -> None:
    """Write the records and the measured errors into the page."""
    rows = ["| runtime | " + " | ".join(("model", *PRECISIONS)) + " |", "|---" * (2 + len(PRECISIONS)) + "|"]
    for name in TRIED:
        runtime = Runtime(name)
        for model in MODELS:
            cells = [describe_cell(runtime, model, precision) for precision in PRECISIONS]
            rows.append("| " + " | ".join([name, model, *cells]) + " |")
        runtime.close()
    text = PAGE.read_text(encoding="utf-8")
    for mark, lines in {"records": list_records(), "errors": rows}.items():
        before, rest = text.split(f"<!-- {mark} -->\n", 1)
        text = (
            f"{before}<!-- {mark} -->\n"
            + "\n".join(lines)
            + f"\n<!-- end of {mark} -->"
            + rest.partition(f"<!-- end of {mark} -->")[2]
        )
    PAGE.write_text(text, encoding="utf-8")


def list_records() -> list[str]:
    """The table of `RUNTIMES`."""
    head = ["| `--for` | runtime | version | opset | dtypes | without | run by our tests |", "|---" * 7 + "|"]
    return head + [
        f"| {r.name} | {r.doc} | {r.version} | {r.opset} | {', '.join(r.dtypes)} | {', '.join(r.lacks)} "
        f"| {'yes' if r.tried else 'no'} |"
        for r in RUNTIMES.values()
    ]


if __name__ == "__main__":
    write_page()
