"""Models for ort-cuda on a GPU against f32 on the CPU, and ops against their references.

Needs no pytest: `python benchmarks/gpu tests --only tests/ort_cuda` runs all side by side. With --device cpu only
f16 can be run, and there are no CUDA graphs; that much checks the checks themselves.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from chosen import DEVICE
from decoders import DECODERS, DIM, LAYERS, LENGTH, VOCAB
from numpy.typing import NDArray

import weft
from weft.backends.onnx.export import build_model, serialize_model
from weft.backends.onnx.lowering import list_refusals
from weft.backends.runtime.compiled_folder import read_facts
from weft.backends.runtime.core.generation import Generator
from weft.backends.runtime.ort.ort_decoder import OrtDecoder
from weft.backends.runtime.ort.ort_encoder import EncoderModel as OpenEncoder
from weft.backends.runtime.ort.session import CPU, CUDA, import_onnxruntime, open_session
from weft.backends.runtime.torch import ort_cuda_decoder as onnx
from weft.backends.target import TARGETS
from weft.frontends.dsl import MLP, Attention, Block, Encoder, LayerNorm, LearnedPositions
from weft.ir import OPS, Graph, Op, TensorType, Value, interpret
from weft.ir import ops as ir_ops
from weft.ir.op import Case
from weft.ir.types import dtypes
from weft.passes import legalize

Floats = NDArray[np.float32]
DTYPES = ("f16", "bf16") if DEVICE == "cuda" else ("f16",)
ENCODER = Encoder(
    VOCAB,
    DIM,
    LAYERS,
    Block(Attention(4, qkv_bias=True), MLP(512, "gelu", bias=True), LayerNorm(), arrangement="post"),
    LearnedPositions(LENGTH),
    token_types=2,
    embed_norm=LayerNorm(),
)


@cache
def place() -> Path:
    """Return the folder for compiled models, which lives as long as the process."""
    folder = tempfile.TemporaryDirectory(prefix="weft-gpu-")
    place.folder = folder  # type: ignore[attr-defined] # it is removed when this reference goes
    return Path(folder.name)


@cache
def compiled(name: str, target: str, dtype: str) -> Path:
    out = place() / f"{name}-{target}-{dtype}"
    weft.compile(ENCODER if name == "encoder" else DECODERS[name], out, target=target, dtype=dtype)
    return out


@cache
def opened(name: str, dtype: str, graphs: bool = True, draws: bool = False) -> Generator:
    """The model on the device, or (f32) its reference on the CPU; with CUDA graphs where the device has them. One that
    `draws` chooses tokens there."""
    if dtype == "f32":
        reference = weft.load(compiled(name, "ort-cpu", "f32"), device="cpu")
        assert isinstance(reference, Generator)
        return reference
    facts = read_facts(compiled(name, "ort-cuda", dtype))
    graphs = graphs and DEVICE == "cuda"
    stream = onnx.new_stream() if draws else None
    session = open_session(facts.model, device=DEVICE, target=TARGETS[facts.target], graphs=graphs, stream=stream)
    assert session.graphs == graphs, "ONNX Runtime refused CUDA graphs"
    model = OrtDecoder(session, facts)
    if draws:
        model.context_class = onnx.SamplingOrtContext
    return Generator(model, stop_ids=facts.eos, folder=facts.folder)


def tolerance(dtype: str) -> float:
    """Relative to the norm of the logits: some ten roundings a layer, of random sign, each at most half an eps."""
    return dtypes.parse(dtype).eps * float(np.sqrt(10 * LAYERS)) / 2


def error(got: Floats, want: Floats) -> float:
    """‖got − want‖ / ‖want‖, infinite if anything is not finite."""
    return float(np.linalg.norm(got - want) / np.linalg.norm(want)) if np.isfinite(got).all() else float("inf")


def close(got: Floats, want: Floats, dtype: str, what: str) -> None:
    found = error(got, want)
    print(f"  {what} {dtype}: error {found:.2e} of {tolerance(dtype):.2e}")
    assert found <= tolerance(dtype), what


def tokens(length: int, seed: int = 0) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(0, VOCAB, length).tolist()
    return found


def prefilled(model: Generator, prompts: list[list[int]], chunk: int, steps: list[list[int]] | None = None) -> Floats:
    """Logits after the prompts, and after each of `steps` (a token a row): [1 + steps, batch, vocab]."""
    most = max(map(len, prompts)) + len(steps or [])
    with model.decoder.context(len(prompts), most) as context:
        rows = [context.prefill(prompts, chunk).copy()]
        rows += [context.step(np.array(step)).copy() for step in steps or []]
    return np.stack(rows)


def check_prefill_and_decode(name: str, dtype: str) -> None:
    """A prompt in one run, then steps: as on the CPU in f32."""
    prompt, steps = tokens(100), [[t] for t in tokens(12, seed=1)]
    got = prefilled(opened(name, dtype), [prompt], 512, steps)
    close(got, prefilled(opened(name, "f32"), [prompt], 512, steps), dtype, name)


def check_chunked_prefill(name: str, dtype: str) -> None:
    """A long prompt in pieces is as good as in one."""
    prompt = tokens(1100, seed=2)
    want = prefilled(opened(name, "f32"), [prompt], 2048)
    for chunk in (2048, 512, 100):
        close(prefilled(opened(name, dtype), [prompt], chunk), want, dtype, f"{name} in pieces of {chunk}")


def check_ragged_batch(name: str, dtype: str) -> None:
    """Rows of different lengths, padded together, and a step for each."""
    prompts, steps = [tokens(n, seed=n) for n in (3, 50, 17, 200)], [tokens(4, seed=9), tokens(4, seed=10)]
    for chunk in (2048, 64):
        got = prefilled(opened(name, dtype), prompts, chunk, steps)
        close(got, prefilled(opened(name, "f32"), prompts, 2048, steps), dtype, f"{name}, four rows, chunk {chunk}")


def check_greedy_tokens(name: str, dtype: str) -> None:
    """Generated tokens rank first in the model's own logits and, within the rounding, in those of f32."""
    prompt = tokens(40, seed=3)
    (result,) = opened(name, dtype).generate([prompt], max_tokens=32)
    again = prefilled(opened(name, dtype), [prompt], 512, [[t] for t in result.tokens[:-1]])[:, 0]
    want = prefilled(opened(name, "f32"), [prompt], 512, [[t] for t in result.tokens[:-1]])[:, 0]
    assert again.argmax(-1).tolist() == result.tokens
    chosen = np.take_along_axis(want, np.array(result.tokens)[:, None], 1)[:, 0]
    spread = tolerance(dtype) * np.linalg.norm(want, axis=-1) / np.sqrt(VOCAB)
    assert (want.max(-1) - chosen <= 8 * spread).all()


def check_graph_equals_no_graph(name: str, dtype: str) -> None:
    """Replaying a captured step computes the same as running it: bit for bit, batches and new prompts included."""
    for rows in (1, 3):
        for seed in (4, 5):  # the second prompt replays what the first captured
            prompts, steps = (
                [tokens(60 + r, seed=seed + r) for r in range(rows)],
                [tokens(rows, seed=s) for s in range(8)],
            )
            plain = prefilled(opened(name, dtype, graphs=False), prompts, 512, steps)
            np.testing.assert_array_equal(prefilled(opened(name, dtype), prompts, 512, steps), plain)


def check_drawn(name: str, dtype: str) -> None:
    """Tokens that PyTorch draws on the device are those that the host draws, step by step, row by row."""
    prompts = [tokens(n, seed=n) for n in (3, 50, 17)]
    for options in ({}, {"temperature": 0.8, "seed": 1}, {"temperature": 1.2, "top_k": 40, "top_p": 0.9, "seed": 2}):
        drawn, chosen = (
            [r.tokens for r in opened(name, dtype, draws=draws).generate(prompts, max_tokens=24, **options)]
            for draws in (True, False)
        )
        assert drawn == chosen, options


def check_encoder(dtype: str) -> None:
    """Hidden states of padded rows. The runtime reads f16 only."""
    rows = [tokens(n, seed=n) for n in (5, 30, 12)]
    models = [
        weft.load(compiled("encoder", "ort-cuda", dtype), DEVICE),
        weft.load(compiled("encoder", "ort-cpu", "f32")),
    ]
    got, want = (m.hidden_states(rows) for m in models if isinstance(m, OpenEncoder))
    for row, ids in enumerate(rows):
        close(got[row, : len(ids)], want[row, : len(ids)], dtype, f"encoder row {row}")


def narrow_case(op: Op, case: Case, dtype: str) -> tuple[Graph, dict[str, Any], dict[str, Any]]:
    """The op between casts from and to f32, its operands (already rounded), and what the reference makes of them."""
    graph, feeds, operands = Graph(op.name), {}, list[Value | None]()
    kind = dtypes.parse(dtype)
    for i, array in enumerate(case.draw()):
        if array is None:
            operands.append(None)
            continue
        is_float = array.dtype.kind == "f"
        feeds[f"x{i}"] = array.astype(kind.numpy).astype(np.float32) if is_float else array
        value = graph.add_input(f"x{i}", TensorType(dtypes.f32 if is_float else dtypes.from_numpy(array), array.shape))
        operands.append(ir_ops.cast(value, to=kind) if is_float else value)
    for i, value in enumerate(op.emit(*operands, **case.attrs)):
        graph.add_output(f"y{i}", ir_ops.cast(value, to=dtypes.f32) if value.type.dtype.is_float else value)
    return graph, feeds, interpret(graph, feeds)


def check_op(op: Op, dtype: str) -> None:
    """Every case of an op equals its float64 reference within a few dozen roundings."""
    ort = import_onnxruntime()
    provider = [(CUDA, {"use_tf32": "0"})] if DEVICE == "cuda" else [CPU]
    for number, case in enumerate(op.cases):
        graph, feeds, want = narrow_case(op, case, dtype)
        legalize(graph, lambda node: list_refusals(node, TARGETS["ort-cuda"]))
        session = ort.InferenceSession(
            serialize_model(build_model(graph, TARGETS["ort-cuda"], 1024)), providers=provider
        )
        used = {i.name for i in session.get_inputs()}
        for y, reference in zip(
            session.run(None, {k: v for k, v in feeds.items() if k in used}), want.values(), strict=True
        ):
            if reference.dtype.kind != "f":
                np.testing.assert_array_equal(y, reference)
                continue
            scale = max(1.0, float(np.abs(reference[np.isfinite(reference)]).max(initial=0)))
            atol = 16 * dtypes.parse(dtype).eps * scale
            np.testing.assert_allclose(
                y, reference, rtol=0, atol=atol, err_msg=f"case {number} of {op.name} in {dtype}"
            )


def checks() -> Iterator[tuple[str, Callable[[], None]]]:
    """Every check by name."""
    for dtype in DTYPES:
        for name in DECODERS:
            for check in (check_prefill_and_decode, check_chunked_prefill, check_ragged_batch):
                yield f"{check.__name__[6:]}-{name}-{dtype}", partial(check, name, dtype)
        yield f"greedy_tokens-{dtype}", partial(check_greedy_tokens, "grouped", dtype)
        yield f"drawn-{dtype}", partial(check_drawn, "grouped", dtype)
        if DEVICE == "cuda":
            for name in ("grouped", "head-of-12"):
                yield f"graphs-{name}-{dtype}", partial(check_graph_equals_no_graph, name, dtype)
        for op in OPS.values():
            if op.cases:
                yield f"op-{op.name}-{dtype}", partial(check_op, op, dtype)
    yield "encoder-f16", partial(check_encoder, "f16")


def pytest_generate_tests(metafunc: Any) -> None:
    found = dict(checks())
    metafunc.parametrize("check", found.values(), ids=found)


def test_on_the_gpu(check: Callable[[], None]) -> None:
    check()
