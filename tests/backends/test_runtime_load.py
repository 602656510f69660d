"""Opening compiled folders: encoders, devices, and everything that can be wrong with a folder, a graph or a device."""

from __future__ import annotations

import ctypes
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

import weft
from weft.backends.runtime import session as sessions
from weft.backends.runtime.decoder import OrtDecoder
from weft.backends.runtime.encoder import Encoder
from weft.backends.runtime.generate import Generator
from weft.ir.errors import WeftError

VOCAB, DIM, LONGEST = 12, 8, 6
WORDS = ["[CLS]", "[SEP]", "[PAD]", "the", "cat", "sat", "on", "mat"]
MANIFEST = {"kind": "decoder", "target": "ort-cpu", "vocab": VOCAB, "max_length": LONGEST, "eos_token_ids": [1]}
Values = NDArray[np.float32]


def save(folder: Path, model: onnx.ModelProto, external: bool = False, **facts: Any) -> Path:
    options = {"save_as_external_data": True, "location": "model.onnx.data", "size_threshold": 0} if external else {}
    onnx.save(model, folder / "model.onnx", **options)
    (folder / "weft.json").write_text(json.dumps(MANIFEST | facts))
    return folder


def graph(nodes: Sequence[Any], inputs: dict[str, Any], outputs: dict[str, Any], *constants: Any) -> onnx.ModelProto:
    """A model; inputs are int64 and outputs float32 unless a pair gives another type."""

    def described(values: dict[str, Any], usual: int) -> list[onnx.ValueInfoProto]:
        pairs = {name: v if isinstance(v, tuple) else (usual, v) for name, v in values.items()}
        return [helper.make_tensor_value_info(name, *pair) for name, pair in pairs.items()]

    named = [numpy_helper.from_array(value, name) for name, value in constants]
    built = helper.make_graph(list(nodes), "g", described(inputs, 7), described(outputs, 1), named)
    return helper.make_model(built, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.fixture
def tables(rng: np.random.Generator) -> tuple[Values, Values]:
    words, kinds = (rng.standard_normal((n, DIM)).astype(np.float32) for n in (VOCAB, 2))
    return words, kinds


def encoder(tables: tuple[Values, Values], *, types: bool = True, output: str = "last_hidden_state") -> onnx.ModelProto:
    """Every token's vector plus the mean of its row's, so that padding would show."""
    node, size = helper.make_node, ["batch", "seq"]
    nodes = [
        node("Gather", ["words", "input_ids"], ["w"]),
        *([node("Gather", ["kinds", "token_type_ids"], ["k"]), node("Add", ["w", "k"], ["h"])] if types else []),
        node("Cast", ["attention_mask"], ["mask"], to=1),
        node("Unsqueeze", ["mask", "last"], ["column"]),
        node("Mul", ["h" if types else "w", "column"], ["kept"]),
        node("ReduceSum", ["kept", "one"], ["sum"]),
        node("ReduceSum", ["column", "one"], ["count"]),
        node("Div", ["sum", "count"], ["mean"]),
        node("Add", ["h" if types else "w", "mean"], [output]),
    ]
    inputs = dict.fromkeys(("input_ids", "attention_mask", *(["token_type_ids"] if types else [])), size)
    axes = [("last", np.array([2])), ("one", np.array([1]))]
    return graph(nodes, inputs, {output: [*size, DIM]}, ("words", tables[0]), ("kinds", tables[1]), *axes)


def write_tokenizer(folder: Path) -> None:
    fast = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="mat"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)])
    fast.enable_padding(length=128)
    fast.enable_truncation(5)
    fast.save(str(folder / "tokenizer.json"))


def opened(folder: Path, **options: Any) -> Any:
    return weft.load(folder, threads=1, **options)


TEXTS = ["the cat sat", "mat", "the cat on mat", "sat"]
IDS = [[0, 3, 4, 5, 1], [0, 7, 1], [0, 3, 4, 6, 7, 1], [0, 5, 1]]


@pytest.mark.parametrize("types", [True, False], ids=["types", "no-types"])
@pytest.mark.parametrize("batch", [1, 3, 32])
def test_encoder(tmp_path: Path, tables: tuple[Values, Values], types: bool, batch: int) -> None:
    model = opened(save(tmp_path, encoder(tables, types=types), kind="encoder"))
    assert isinstance(model, Encoder)
    write_tokenizer(tmp_path)
    hidden = [tables[0][ids] + (tables[1][0] if types else 0) for ids in IDS]
    hidden = [h + h.mean(0) for h in hidden]
    close: Any = {"rtol": 0, "atol": 2**-20}
    mean = np.stack([h.mean(0) for h in hidden])
    np.testing.assert_allclose(model.encode(TEXTS, batch=batch), mean, **close)
    unit = mean / np.linalg.norm(mean, axis=1, keepdims=True)
    np.testing.assert_allclose(model.encode(TEXTS, batch=batch, normalize=True), unit, **close)
    np.testing.assert_allclose(model.encode(TEXTS, batch=batch, pooling="cls"), [h[0] for h in hidden], **close)
    np.testing.assert_allclose(model.encode(TEXTS, batch=batch, pooling="max"), [h.max(0) for h in hidden], **close)
    np.testing.assert_array_equal(model.encode(IDS, batch=batch), model.encode(TEXTS, batch=batch))
    for found, wanted in zip(model.encode(TEXTS, batch=batch, pooling="none"), hidden, strict=True):
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, wanted, **close)
    np.testing.assert_allclose(model.encode("mat"), mean[1:2], **close)
    assert len(model.encode([])) == 0


def test_the_way_an_encoder_was_trained(tmp_path: Path, tables: tuple[Values, Values]) -> None:
    plain = opened(save(tmp_path, encoder(tables), kind="encoder"))
    model = opened(save(tmp_path, encoder(tables), kind="encoder", pooling="cls", normalize=True))
    np.testing.assert_array_equal(model.encode(IDS), plain.encode(IDS, pooling="cls", normalize=True))
    mean, token_vectors = {"pooling": "mean", "normalize": False}, {"pooling": "none"}
    np.testing.assert_array_equal(model.encode(IDS, **mean), plain.encode(IDS))
    np.testing.assert_array_equal(model.encode(IDS[0], **token_vectors), plain.encode(IDS[0], **token_vectors))
    with pytest.raises(WeftError, match="normalize is 'yes', but it must be of type bool"):
        opened(save(tmp_path, encoder(tables), kind="encoder", normalize="yes"))


def test_long_texts_are_refused_or_cut(tmp_path: Path, tables: tuple[Values, Values]) -> None:
    model = opened(save(tmp_path, encoder(tables), kind="encoder"))
    write_tokenizer(tmp_path)
    long = "the cat sat on the mat"
    with pytest.raises(WeftError, match="a text of 8 tokens is longer than the maximum of 6"):
        model.encode(["sat", long])
    found = model.encode(["sat", long], truncate=True)
    np.testing.assert_array_equal(found[1], model.encode("the cat sat on")[0])  # [SEP] stays
    with pytest.raises(WeftError, match="8 tokens"):
        model.encode(long)


@pytest.mark.parametrize(
    ("texts", "options", "words"),
    [
        (["a"], {"pooling": "sum"}, "pooling is 'sum', but it must be one of mean, cls, max, none"),
        (["a"], {"batch": 0}, "batch is 0"),
        ([3.0], {}, r"a text is 3\.0"),
        ([3, VOCAB], {}, "token 12 of a text is outside the vocabulary of 12"),
        ([3, -1], {}, "token -1 of a text"),
    ],
)
def test_bad_encodings(tmp_path: Path, tables: Any, texts: Any, options: dict[str, Any], words: str) -> None:
    model = opened(save(tmp_path, encoder(tables), kind="encoder"))
    write_tokenizer(tmp_path)
    with pytest.raises(WeftError, match=words):
        model.encode(texts, **options)


def test_bad_encoders(tmp_path: Path, tables: tuple[Values, Values]) -> None:
    with pytest.raises(WeftError, match="no output last_hidden_state"):
        opened(save(tmp_path, encoder(tables, output="embedding"), kind="encoder"))
    with pytest.raises(WeftError, match="its inputs are logits_in, so it is no encoder"):
        opened(save(tmp_path, graph([], {"logits_in": (1, [1])}, {"logits_in": [1]}), kind="encoder"))
    small = (tables[0][:5], tables[1])
    model = opened(save(tmp_path, encoder(small), kind="encoder", vocab=7))
    write_tokenizer(tmp_path)
    with pytest.raises(WeftError, match="token 7 of a text is outside the vocabulary of 7"):
        model.encode("mat")
    with pytest.raises(WeftError, match=r"ONNX Runtime failed: .*out of data bounds"):
        model.encode("sat")


def decoder(**changed: Any) -> onnx.ModelProto:
    """A decoder in name: logits from a table, caches handed through. A change of None takes an input or output away."""
    cache = (1, ["batch", 1, "capacity", 8])
    size = ["batch", "seq"]
    inputs = {"input_ids": size, "attention_mask": ["batch", "total"]}
    inputs |= {f"past_key_values.0.{part}": cache for part in ("key", "value")}
    outputs = {"logits": ["batch", "seq", VOCAB], "present.0.key": cache, "present.0.value": cache}
    inputs |= {name: value for name, value in changed.items() if name in inputs or name.startswith("extra")}
    outputs |= {name: value for name, value in changed.items() if name in outputs}
    inputs, outputs = ({k: v for k, v in some.items() if v is not None} for some in (inputs, outputs))
    source = {"logits": ["table", "input_ids"]}
    nodes = [helper.make_node("Gather", source[name], [name]) for name in outputs if name in source]
    for name in outputs:
        if name.startswith("present") and (past := name.replace("present", "past_key_values")) in inputs:
            nodes.append(helper.make_node("Identity", [past], [name]))
    width = outputs.get("logits", [VOCAB])[-1]
    table = np.random.default_rng(0).standard_normal((VOCAB, width)).astype(np.float32)
    return graph(nodes, inputs, outputs, ("table", table))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"attention_mask": None}, "the graph has no attention_mask"),
        ({"logits": None}, "the graph has no logits"),
        ({"extra_states": [1]}, "asks for the input extra_states"),
        ({"present.0.value": None}, "does not return present.0.value"),
        ({"past_key_values.0.key": (1, ["b", "h", "c", 8])}, "must be fixed numbers"),
        (
            {"past_key_values.0.key": (11, ["b", 1, "c", 8]), "present.0.key": (11, ["b", 1, "c", 8])},
            r"tensor\(double\)",
        ),
        ({"logits": ["batch", "seq", 5]}, "logits are 5 wide, but the vocabulary is said to hold 12"),
        ({f"{a}.0.{b}": None for a in ("past_key_values", "present") for b in ("key", "value")}, "no past_key_values"),
    ],
)
def test_graphs_that_are_no_decoder(tmp_path: Path, changed: dict[str, Any], words: str) -> None:
    with pytest.raises(WeftError, match=words):
        opened(save(tmp_path, decoder(**changed)))


def test_a_folder_of_the_genai_builder_opens(tmp_path: Path) -> None:
    cache = (1, ["batch", 1, "past", "width"])  # the builder leaves the head size open
    names = [f"{a}.0.{b}" for a in ("past_key_values", "present") for b in ("key", "value")]
    onnx.save(decoder(**dict.fromkeys(names, cache)), tmp_path / "other.onnx")
    config: dict[str, Any] = {"vocab_size": VOCAB, "context_length": LONGEST, "eos_token_id": 7}
    config["decoder"] = {"filename": "other.onnx", "head_size": 8}
    (tmp_path / "genai_config.json").write_text(json.dumps({"model": config}))
    model = opened(tmp_path)
    assert isinstance(model, Generator) and model.stop_ids == {7} and model.decoder.max_length == LONGEST
    assert model.generate([1, 2], max_tokens=2)[0].finish in ("length", "stop")


def test_caches_of_a_size_fixed_in_the_graph(tmp_path: Path) -> None:
    cache = (1, ["batch", 1, 4, 8])
    names = [f"{a}.0.{b}" for a in ("past_key_values", "present") for b in ("key", "value")]
    model = opened(save(tmp_path, decoder(**dict.fromkeys(names, cache)), eos_token_ids=[]))
    assert len(model.generate([1, 2], max_tokens=3)[0].tokens) == 3
    with pytest.raises(WeftError, match="6 tokens are longer than the 4 that the graph's caches hold"):
        model.generate([1, 2], max_tokens=5)


def test_rolling_caches_of_the_genai_builder(tmp_path: Path) -> None:
    """Without our manifest its configuration tells that caches of a fixed size roll, hence do not bound the text."""
    cache = (1, ["batch", 1, 4, 8])
    names = [f"{a}.0.{b}" for a in ("past_key_values", "present") for b in ("key", "value")]
    onnx.save(decoder(**dict.fromkeys(names, cache)), tmp_path / "model.onnx")
    config: dict[str, Any] = {"vocab_size": VOCAB, "context_length": LONGEST}
    config["decoder"] = {"filename": "model.onnx", "sliding_window": {"window_size": 4, "layers": [0]}}
    (tmp_path / "genai_config.json").write_text(json.dumps({"model": config}))
    assert len(opened(tmp_path).generate([1, 2], max_tokens=5)[0].tokens) == 5


def test_a_full_cache_is_refused(tmp_path: Path) -> None:
    model = opened(save(tmp_path, decoder()))
    with model.decoder.context(1, LONGEST) as context:
        context.prefill([[1] * LONGEST])
        with pytest.raises(WeftError, match="the cache is full: it holds 6 tokens"):
            context.step([1])
        with pytest.raises(WeftError, match="7 tokens do not fit the cache of 6"):
            context.extend([1])
    with pytest.raises(WeftError, match="7 tokens are longer than the maximum of 6"), model.decoder.context(1, 7):
        pass
    with pytest.raises(WeftError, match="no memory for the caches"), model.decoder.context(2**40, 6):
        pass


def break_manifest(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "weft.json").write_text(text)


def cut(name: str, count: int) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:count])


def changed(**facts: Any) -> Callable[[Path], object]:
    kept = {k: v for k, v in (MANIFEST | facts).items() if v is not None}
    return break_manifest(json.dumps(kept))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "weft.json").unlink(), "no weft.json in it, so it is no compiled model"),
        (break_manifest("{"), "weft.json: not valid JSON"),
        (break_manifest("[1]"), "weft.json: a JSON object was expected, not list"),
        (lambda f: (f / "weft.json").write_bytes(b"\xff\xfe\x00"), "weft.json: not valid JSON"),
        (changed(kind=None), "weft.json: the key 'kind' is missing"),
        (changed(kind="diffusion"), "kind is 'diffusion'"),
        (changed(vocab="many"), "vocab is 'many', but it must be of type int"),
        (changed(max_length=0), "max_length is 0, but it must be at least 1"),
        (changed(eos_token_ids=["</s>"]), "eos_token_ids is"),
        (lambda f: (f / "model.onnx").unlink(), "model.onnx: no such file"),
        (lambda f: (f / "model.onnx").write_bytes(b"not a model"), "model.onnx: ONNX Runtime cannot open it"),
        (cut("model.onnx", 100), "model.onnx: ONNX Runtime cannot open it"),
        (lambda f: (f / "model.onnx").write_bytes(b""), "model.onnx: ONNX Runtime cannot open it"),
        (lambda f: (f / "model.onnx.data").unlink(), "model.onnx: ONNX Runtime cannot open it"),
        (cut("model.onnx.data", 10), "model.onnx: ONNX Runtime cannot open it"),
    ],
)
def test_damaged_folders(tmp_path: Path, damage: Callable[[Path], object], words: str) -> None:
    save(tmp_path, decoder(), external=True)
    assert isinstance(opened(tmp_path), Generator)
    damage(tmp_path)
    with pytest.raises(WeftError, match=words) as caught:
        opened(tmp_path)
    assert "\n" not in str(caught.value)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(WeftError, match="nowhere: no such folder"):
        weft.load(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(WeftError, match="file: not a folder"):
        weft.load(tmp_path / "file")


def test_bad_devices(tmp_path: Path) -> None:
    folder = save(tmp_path, decoder())
    with pytest.raises(WeftError, match="device is 'gpu', but it must be one of auto, cpu, cuda"):
        weft.load(folder, device="gpu")
    with pytest.raises(WeftError, match="threads is 0"):
        weft.load(folder, threads=0)
    with pytest.raises(WeftError, match="threads is 100000"):
        weft.load(folder, threads=100_000)
    with pytest.raises(WeftError, match="compiled for ort-cpu, so it cannot run on CUDA"):
        weft.load(folder, device="cuda")


class FakeOrt:
    """An onnxruntime-gpu whose sessions come out as a test wishes."""

    __version__, cuda_version, __file__ = "1.0", "13.0", "/nowhere/onnxruntime/__init__.py"

    def __init__(self, real: Any, **wished: Any) -> None:
        self.real, self.wished, self.asked = real, wished, []
        self.SessionOptions = real.SessionOptions

    def get_available_providers(self) -> list[str]:
        return self.wished.get("offered", [sessions.CUDA, sessions.CPU])

    def preload_dlls(self) -> None:
        print("noise")

    def InferenceSession(self, model: Path, options: Any, providers: list[Any], enable_fallback: int) -> Any:
        assert enable_fallback == 0
        self.asked.append(providers)
        if providers == [sessions.CPU]:
            return self.real.InferenceSession(model, options, providers=providers)
        if "refused" in self.wished and providers[0][1]["enable_cuda_graph"] == "1":
            raise RuntimeError(self.wished["refused"])
        nodes = [SimpleNamespace(op_type=op) for op in self.wished.get("on_cpu", ["Shape", "Gather"])]
        parts = [SimpleNamespace(ep_name=sessions.CPU, get_nodes=lambda: nodes)]
        return SimpleNamespace(
            get_providers=lambda: self.wished.get("got", [sessions.CUDA, sessions.CPU]),
            get_provider_graph_assignment_info=lambda: parts,
        )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeOrt]:
    def install(missing: str = "", status: int = 0, count: int = 1, **wished: Any) -> FakeOrt:
        def load_library(name: str, mode: int = 0) -> Any:
            if missing and missing in name:
                raise OSError(f"{missing}.13: cannot open shared object file")

            def counted(pointer: Any) -> int:
                pointer._obj.value = count
                return 0

            def described(code: int, pointer: Any) -> None:
                pointer._obj.value = b"no CUDA-capable device is detected"

            return SimpleNamespace(cuInit=lambda _: status, cuDeviceGetCount=counted, cuGetErrorString=described)

        ort = FakeOrt(sessions.onnxruntime(), **wished)
        monkeypatch.setattr(sessions, "onnxruntime", lambda: ort)
        monkeypatch.setattr(ctypes, "CDLL", load_library)
        return ort

    return install


MISSING: list[tuple[dict[str, Any], str]] = [
    ({"offered": [sessions.CPU]}, "has no CUDAExecutionProvider .*install onnxruntime-gpu"),
    ({"missing": "libcuda.so"}, "the NVIDIA driver cannot be loaded .*libcuda.so.13"),
    (
        {"missing": "providers_cuda"},
        "a library that CUDAExecutionProvider needs cannot be loaded .*CUDA 13.0 libraries",
    ),
    ({"status": 100}, "the NVIDIA driver reports error 100 .no CUDA-capable device"),
    ({"count": 0}, "the NVIDIA driver sees no GPU"),
]


@pytest.mark.parametrize(("wished", "words"), MISSING)
def test_cuda_that_cannot_be_had(
    tmp_path: Path, fake: Any, wished: dict[str, Any], words: str, caplog: Any, capsys: Any
) -> None:
    folder = save(tmp_path, decoder(), target="onnx")
    ort = fake(**wished)
    with pytest.raises(WeftError, match=f"device cuda cannot be used: .*{words}"):
        weft.load(folder, device="cuda")
    assert not ort.asked
    with caplog.at_level(logging.WARNING, "weft.runtime"):
        model = weft.load(folder)
    assert isinstance(model, Generator) and isinstance(model.decoder, OrtDecoder)
    assert model.decoder.session.device == "cpu"
    assert ("running on the CPU" in caplog.text) == ("offered" not in wished)
    save(tmp_path, decoder(), target="ort-cuda")
    with pytest.raises(WeftError, match=f"compiled for ort-cuda, but .*{words}"):
        weft.load(folder)
    assert isinstance(weft.load(folder, device="cpu"), Generator)
    assert capsys.readouterr().out == ""


def test_cuda_sessions(tmp_path: Path, fake: Any, caplog: Any) -> None:
    ort = fake()
    session = sessions.open_session(tmp_path, target="ort-cuda", graphs=True)
    assert (session.device, session.graphs) == ("cuda", True)
    ((name, options), fallback) = ort.asked[0]
    assert name == sessions.CUDA and fallback == sessions.CPU
    assert options["use_tf32"] == "0" and options["enable_cuda_graph"] == "1"
    session = sessions.open_session(tmp_path, target="onnx")
    assert (session.device, session.graphs, ort.asked[1][0][1]["enable_cuda_graph"]) == ("cuda", False, "0")
    fake(refused="cannot use the graph capture feature")
    with caplog.at_level(logging.WARNING, "weft.runtime"):
        session = sessions.open_session(tmp_path, device="cuda", graphs=True)
    assert (session.device, session.graphs) == ("cuda", False) and "without CUDA graphs" in caplog.text
    for wished, words in (
        ({"refused": "out of memory"}, "out of memory"),
        ({"got": [sessions.CPU]}, "opened it on CPUExecutionProvider, not on CUDA"),
        ({"on_cpu": ["Shape", "GroupQueryAttention"]}, "compute GroupQueryAttention on the CPU although device cuda"),
    ):
        fake(**wished)
        with pytest.raises(WeftError, match=words):
            sessions.open_session(tmp_path, device="cuda", graphs=True)


def test_nodes_on_the_cpu_are_seen(tmp_path: Path) -> None:
    model = opened(save(tmp_path, encoder((np.eye(8, dtype=np.float32),) * 2), kind="encoder"))
    assert sessions.host_ops(model.session.ort) == ["ReduceSum"]


def test_without_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(WeftError, match=r"ONNX Runtime cannot be imported .*weft\[cpu\]"):
        sessions.onnxruntime()
