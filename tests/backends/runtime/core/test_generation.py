"""Generation with small ONNX decoders written by hand, against the same model in float64 without a cache."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from weft.backends.folder_facts import FolderFacts
from weft.backends.runtime import load
from weft.backends.runtime.core.generation import Generator
from weft.backends.runtime.ort import session as sessions
from weft.backends.runtime.ort.ort_decoder import OrtDecoder
from weft.backends.runtime.ort.session import Session, open_session

from ..pretended import Device

VOCAB, DIM, HEADS, KV, HEAD, HIDDEN, LAYERS, LONGEST = 64, 32, 4, 2, 16, 48, 2, 320
EPS = 1e-5
PROMPTS = [[5, 9, 33, 2, 60, 7, 11], [1], [40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52]]


@dataclass
class Tiny:
    """A random decoder: its weights, its float64 meaning, and the ONNX graphs that compute it."""

    weights: dict[str, NDArray[np.float32]]
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)

    @classmethod
    def random(cls, seed: int = 0) -> Tiny:
        rng = np.random.default_rng(seed)

        def normal(*shape: int) -> NDArray[np.float32]:
            return (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)

        angle = np.arange(LONGEST)[:, None] / 10_000 ** (np.arange(HEAD // 2) * 2 / HEAD)
        weights = {"embed": 4 * normal(VOCAB, DIM), "head": 3 * normal(DIM, VOCAB), "norm": 1 + normal(DIM)}
        weights |= {"cos": np.cos(angle).astype(np.float32), "sin": np.sin(angle).astype(np.float32)}
        for i in range(LAYERS):
            weights |= {f"{i}.qkv": 2 * normal(DIM, (HEADS + 2 * KV) * HEAD), f"{i}.o": normal(HEADS * HEAD, DIM)}
            weights |= {f"{i}.up": normal(DIM, HIDDEN), f"{i}.down": normal(HIDDEN, DIM)}
            weights |= {f"{i}.norm1": 1 + normal(DIM), f"{i}.norm2": 1 + normal(DIM)}
        return cls(weights)

    def logits(self, ids: list[int]) -> NDArray[np.float64]:
        """Compute [len(ids), vocab] without a cache."""
        w = {name: value.astype(np.float64) for name, value in self.weights.items()}
        n = len(ids)
        cos, sin = w["cos"][:n, None], w["sin"][:n, None]

        def norm(x: Any, scale: Any) -> Any:
            return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * scale

        def rope(x: Any) -> Any:
            a, b = x[..., : HEAD // 2], x[..., HEAD // 2 :]
            return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

        x = w["embed"][ids]
        for i in range(LAYERS):
            qkv = (norm(x, w[f"{i}.norm1"]) @ w[f"{i}.qkv"]).reshape(n, HEADS + 2 * KV, HEAD)
            q, k, v = rope(qkv[:, :HEADS]), rope(qkv[:, HEADS : HEADS + KV]), qkv[:, HEADS + KV :]
            k, v = np.repeat(k, HEADS // KV, 1), np.repeat(v, HEADS // KV, 1)
            scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(HEAD)
            scores[:, np.triu(np.ones((n, n), bool), 1)] = -np.inf
            p = np.exp(scores - scores.max(-1, keepdims=True))
            p /= p.sum(-1, keepdims=True)
            x = x + np.einsum("hqk,khd->qhd", p, v).reshape(n, -1) @ w[f"{i}.o"]
            x = x + np.maximum(norm(x, w[f"{i}.norm2"]) @ w[f"{i}.up"], 0) @ w[f"{i}.down"]
        return np.asarray(norm(x, w["norm"]) @ w["head"])

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return ids[len(prompt) :]

    def op(self, kind: str, *inputs: str, outputs: int = 1, domain: str = "", **attributes: Any) -> Any:
        names = [f"{kind}{len(self.nodes)}.{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(kind, inputs, names, domain=domain, **attributes))
        return names[0] if outputs == 1 else names

    def constant(self, *values: int) -> str:
        name = "c" + "_".join(map(str, values))
        if all(known.name != name for known in self.constants):
            self.constants.append(numpy_helper.from_array(np.array(values, np.int64), name))
        return name

    def build(self, *, standard: bool = False, every: bool = False, cache: int = 1, output: int = 1) -> onnx.ModelProto:
        """Return a model of GroupQueryAttention, or of standard operators with `standard`; `cache` and `output` are
        ONNX types."""
        op, self.nodes = self.op, []
        self.constants = [numpy_helper.from_array(value, name) for name, value in self.weights.items()]
        valid = op("ReduceSum", "attention_mask", self.constant(1), keepdims=0)
        lengths = op("Cast", op("Sub", valid, self.constant(1)), to=TensorProto.INT32)
        total = op("Cast", op("Gather", op("Shape", "attention_mask"), self.constant(1)), to=TensorProto.INT32)
        first = op("Gather", "position_ids", self.constant(0), axis=1)
        x = op("Gather", "embed", "input_ids")
        for i in range(LAYERS):
            h = self.norm(x, f"{i}.norm1")
            past = [f"past_key_values.{i}.{part}" for part in ("key", "value")]
            qkv = op("MatMul", h, f"{i}.qkv")
            if standard:
                y, *present = self.standard_attention(qkv, past, first, cache)
            else:
                feed = [qkv, "", "", *past, lengths, total, "cos", "sin"]
                feed = [op("Cast", n, to=cache) if cache != 1 and n in (qkv, "cos", "sin") else n for n in feed]
                facts = {"num_heads": HEADS, "kv_num_heads": KV, "do_rotary": 1}
                y, *present = op("GroupQueryAttention", *feed, outputs=3, domain="com.microsoft", **facts)
                y = op("Cast", y, to=1) if cache != 1 else y
            for name, part in zip(present, ("key", "value"), strict=True):
                self.nodes.append(helper.make_node("Identity", [name], [f"present.{i}.{part}"]))
            x = op("Add", x, op("MatMul", y, f"{i}.o"))
            h = op("Relu", op("MatMul", self.norm(x, f"{i}.norm2"), f"{i}.up"))
            x = op("Add", x, op("MatMul", h, f"{i}.down"))
        if not every:
            at = op("Sub", op("Unsqueeze", op("Sub", valid, self.constant(1)), self.constant(1)), first)
            x = op("Unsqueeze", op("GatherND", x, at, batch_dims=1), self.constant(1))
        y = op("MatMul", self.norm(x, "norm"), "head")
        self.nodes.append(helper.make_node("Cast", [y], ["logits"], to=output))
        return self.model(every, cache, output)

    def norm(self, x: str, scale: str) -> str:
        return str(self.op("RMSNormalization", x, scale, epsilon=EPS))

    def standard_attention(self, qkv: str, past: list[str], first: str, cache: int) -> list[str]:
        op = self.op
        first = op("Squeeze", first, self.constant(1))
        sizes = self.constant(HEADS * HEAD, KV * HEAD, KV * HEAD)
        heads = []
        for part, count in zip(op("Split", qkv, sizes, outputs=3, axis=-1), (HEADS, KV, KV), strict=True):
            split = op("Reshape", part, self.constant(0, 0, count, HEAD))
            heads.append(op("Transpose", split, perm=[0, 2, 1, 3]))
        q, k = (op("RotaryEmbedding", h, "cos", "sin", "position_ids") for h in heads[:2])
        present = [
            op("TensorScatter", old, op("Cast", new, to=cache), first, axis=2)
            for old, new in zip(past, (k, heads[2]), strict=True)
        ]
        slots = op("Squeeze", op("Gather", op("Shape", present[0]), self.constant(2)), self.constant(0))
        zero, one = (op("Squeeze", self.constant(n), self.constant(0)) for n in (0, 1))
        allowed = op("LessOrEqual", op("Range", zero, slots, one), op("Unsqueeze", "position_ids", self.constant(1, 3)))
        keys, values = (op("Cast", name, to=1) for name in present)
        y = op("Transpose", op("Attention", q, keys, values, allowed), perm=[0, 2, 1, 3])
        return [op("Reshape", y, self.constant(0, 0, HEADS * HEAD)), *present]

    def model(self, every: bool, cache: int, output: int) -> onnx.ModelProto:
        integers = {
            "input_ids": ["batch", "seq"],
            "attention_mask": ["batch", "total"],
            "position_ids": ["batch", "seq"],
        }
        inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, shape) for name, shape in integers.items()]
        outputs = [helper.make_tensor_value_info("logits", output, ["batch", "seq" if every else 1, VOCAB])]
        for i in range(LAYERS):
            for part in ("key", "value"):
                shape = ["batch", KV, "capacity", HEAD]
                inputs.append(helper.make_tensor_value_info(f"past_key_values.{i}.{part}", cache, shape))
                outputs.append(helper.make_tensor_value_info(f"present.{i}.{part}", cache, shape))
        graph = helper.make_graph(self.nodes, "tiny", inputs, outputs, self.constants)
        # Written at the same memory, present aliases past: no Identity may stand between, so rename it away.
        renamed = {node.input[0]: node.output[0] for node in graph.node if node.op_type == "Identity"}
        kept = [node for node in graph.node if node.op_type != "Identity"]
        for node in kept:
            for names in (node.input, node.output):
                names[:] = [renamed.get(name, name) for name in names]
        del graph.node[:]
        graph.node.extend(kept)
        opsets = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=11)


def save(folder: Path, model: onnx.ModelProto, **facts: Any) -> Path:
    folder.mkdir(exist_ok=True)
    onnx.save(model, folder / "model.onnx")
    manifest = {"kind": "decoder", "target": "ort-cpu", "vocab": VOCAB, "max_length": LONGEST, "eos_token_ids": []}
    (folder / "weft.json").write_text(json.dumps(manifest | facts))
    return folder


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    return Tiny.random()


@pytest.fixture(scope="module")
def folder(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("tiny"), tiny.build())


@pytest.fixture(scope="module")
def model(folder: Path) -> Generator:
    return opened(folder)


def opened(folder: Path) -> Generator:
    model = load(folder, threads=1)
    assert isinstance(model, Generator)
    return model


def tokens(results: list[Any]) -> list[list[int]]:
    return [result.tokens for result in results]


# float32 rounding of about 2·DIM·LAYERS-long sums against float64, on logits of up to about 10
TOLERANCE = 10 * 2**-24 * 8 * np.sqrt(DIM * LAYERS * 8)


@pytest.mark.parametrize("standard", [False, True], ids=["gqa", "standard"])
@pytest.mark.parametrize("every", [False, True], ids=["last", "all"])
def test_every_call_size_gives_the_reference_tokens(tiny: Tiny, tmp_path: Path, standard: bool, every: bool) -> None:
    model = opened(save(tmp_path, tiny.build(standard=standard, every=every)))
    wanted = [tiny.greedy(prompt, 12) for prompt in PROMPTS]
    assert len({t for row in wanted for t in row}) > 6  # the model does not just repeat itself
    for chunk in (1, 3, 7, 14, 512):  # 14: the first two together, then the third; 512: all together
        assert tokens(model.generate(PROMPTS, max_tokens=12, chunk=chunk)) == wanted
        for prompt, row in zip(PROMPTS, wanted, strict=True):
            assert tokens(model.generate(prompt, max_tokens=12, chunk=chunk)) == [row]


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("every", [False, True], ids=["last", "all"])
def test_logits_of_all_positions(tiny: Tiny, tmp_path: Path, every: bool, chunk: int) -> None:
    model = opened(save(tmp_path, tiny.build(every=every)))
    ids = list(np.random.default_rng(1).integers(VOCAB, size=40))
    found, wanted = model.logits(ids, chunk), tiny.logits(ids)
    if not every:
        wanted = wanted[np.minimum(np.arange(chunk, 40 + chunk, chunk), 40) - 1]
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, atol=TOLERANCE)


def test_caches_grow_past_their_first_capacity(tiny: Tiny, model: Generator) -> None:
    prompt = list(np.random.default_rng(2).integers(VOCAB, size=250))  # grows past the first 256 slots
    (result,) = model.generate(prompt, max_tokens=None, chunk=64)
    assert len(result.tokens) == LONGEST + 1 - 250 and result.finish == "length"
    ids = [*prompt, *result.tokens]
    np.testing.assert_array_equal(tiny.logits(ids[:-1])[249:].argmax(-1), result.tokens)


def test_rows_end_at_their_own_stop_tokens(tiny: Tiny, tmp_path: Path) -> None:
    alone = [tiny.greedy(prompt, 20) for prompt in PROMPTS]
    stop = alone[0][4]
    model = opened(save(tmp_path, tiny.build(), eos_token_ids=[stop]))
    for row, result in zip(alone, model.generate(PROMPTS, max_tokens=20), strict=True):
        ends = row.index(stop) + 1 if stop in row else 20
        assert result.tokens == row[:ends]
        assert result.finish == ("stop" if stop in row else "length")


def test_contexts_are_independent_and_used_again(tiny: Tiny, model: Generator) -> None:
    decoder = model.decoder
    with decoder.context(1, 30) as one, decoder.context(1, 30) as two:
        one.prefill([PROMPTS[0]])
        two.prefill([PROMPTS[2]])
        at = np.array([3])
        np.testing.assert_allclose(one.step(at)[0], tiny.logits([*PROMPTS[0], 3])[-1], atol=TOLERANCE)
        np.testing.assert_allclose(two.step(at)[0], tiny.logits([*PROMPTS[2], 3])[-1], atol=TOLERANCE)
    with decoder.context(1, 29) as three:
        assert three is one
        np.testing.assert_allclose(three.prefill([[8]])[0], tiny.logits([8])[-1], atol=TOLERANCE)


def test_timings_count_tokens(model: Generator) -> None:
    results = model.generate(PROMPTS, max_tokens=5)
    timings = results[0].timings
    assert timings is results[1].timings
    assert timings.prompt_tokens == sum(map(len, PROMPTS)) and timings.decoded_tokens == 3 * 4
    assert timings.prefill_rate > 0 and timings.decode_rate > 0


def test_seeds_repeat_draws(model: Generator) -> None:
    options: Any = {"max_tokens": 20, "temperature": 1.5, "top_k": 40, "top_p": 0.95, "repetition_penalty": 1.2}
    batch = tokens(model.generate(PROMPTS, seed=7, **options))
    assert batch == tokens(model.generate(PROMPTS, seed=7, chunk=3, **options))
    assert batch != tokens(model.generate(PROMPTS, seed=8, **options))
    for row, prompt in enumerate(PROMPTS):  # row r draws as it would alone with seed + r
        assert [batch[row]] == tokens(model.generate(prompt, seed=7 + row, **options))
    assert tokens(model.generate(PROMPTS, **options)) != tokens(model.generate(PROMPTS, **options))


@pytest.mark.parametrize(
    ("standard", "cache", "output", "epsilon"),
    [(False, 10, 10, 2**-11), (True, 16, 16, 2**-8), (True, 10, 16, 2**-8)],
    ids=["f16", "bf16", "mixed"],
)
def test_half_precision(tiny: Tiny, tmp_path: Path, standard: bool, cache: int, output: int, epsilon: float) -> None:
    model = opened(save(tmp_path, tiny.build(standard=standard, every=True, cache=cache, output=output)))
    ids = PROMPTS[2] * 2
    wanted = tiny.logits(ids)
    close = {"atol": epsilon * np.sqrt(DIM * LAYERS) * float(np.abs(wanted).max())}
    np.testing.assert_allclose(model.logits(ids), wanted, **close)
    np.testing.assert_allclose(model.logits(ids, chunk=5), wanted, **close)
    assert np.abs(model.logits(ids) - wanted).max() > TOLERANCE  # it is a lower precision
    with model.decoder.context(2, 30) as context:
        context.prefill([PROMPTS[0], PROMPTS[2]])
        found = context.step(np.array([3, 4]))
        assert found.dtype == np.float32
        np.testing.assert_allclose(found[0], tiny.logits([*PROMPTS[0], 3])[-1], **close)
        np.testing.assert_allclose(found[1], tiny.logits([*PROMPTS[2], 4])[-1], **close)


@pytest.mark.parametrize(("cache", "output"), [(1, 1), (16, 16)], ids=["f32", "bf16"])
def test_cuda_path_on_a_simulated_device(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: int, output: int
) -> None:
    path = save(tmp_path, tiny.build(standard=cache == 16, cache=cache, output=output)) / "model.onnx"
    real = open_session(path, threads=1, device="cpu").ort
    device = Device(sessions.import_onnxruntime(), real)
    device.pretend(monkeypatch)
    facts = FolderFacts(tmp_path, (path,), "decoder", "ort-cpu", VOCAB, LONGEST)
    decoder = OrtDecoder(Session(device, "cuda", graphs=True), facts)
    model, plain = Generator(decoder), Generator(OrtDecoder(Session(real, "cpu"), facts))
    for chunk in (4, 512):
        device.graph_ids.clear()
        found = tokens(model.generate(PROMPTS, max_tokens=6, chunk=chunk))
        runs = 1 if chunk == 512 else sum(-(-len(prompt) // 4) for prompt in PROMPTS)
        assert device.graph_ids == ["-1"] * runs + ["1"] * 5  # prefill is never captured, decoding always
        monkeypatch.undo()
        assert found == tokens(plain.generate(PROMPTS, max_tokens=6))
        device.pretend(monkeypatch)
    model.generate(PROMPTS[0], max_tokens=3)
    assert device.released == [1] and device.graph_ids[-1] == "2"  # another batch size: another graph
