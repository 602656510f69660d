"""Opening compiled folders: devices, and everything that can be wrong with a folder, a graph or a device."""

from __future__ import annotations

import ctypes
import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

import weft
from weft.backends.runtime.core.generation import Generator
from weft.backends.runtime.ort import session as sessions
from weft.backends.runtime.ort.ort_decoder import OrtDecoder
from weft.backends.runtime.state_io import get_growth
from weft.backends.target import TARGETS
from weft.backends.torch.lib import caches
from weft.backends.torch.lib.recurrent_states import RecurrentState
from weft.ir.errors import WeftError
from weft.ir.schema.states import Growth

from ..handmade import LONGEST, MANIFEST, VOCAB, decoder, encoder, opened, save


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"attention_mask": None}, "the graph has no attention_mask"),
        ({"logits": None}, "the graph has no logits"),
        ({"extra_states": [1]}, "has the input extra_states"),
        ({"present.0.value": None}, "does not return present.0.value"),
        ({"past_key_values.0.key": (1, ["b", "h", "c", 8])}, "must be fixed numbers"),
        (
            {"past_key_values.0.key": (11, ["b", 1, "c", 8]), "present.0.key": (11, ["b", 1, "c", 8])},
            r"tensor\(double\)",
        ),
        ({"logits": ["batch", "seq", 5]}, "logits are 5 wide, but the manifest records a vocabulary of 12"),
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
    with pytest.raises(WeftError, match="6 tokens are more than the 4 that fit the caches of the graph"):
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
    with pytest.raises(WeftError, match="7 tokens are more than the maximum of 6"), model.decoder.context(1, 7):
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
        (lambda f: (f / "weft.json").unlink(), "no weft.json in it, so it is not a compiled model"),
        (break_manifest("{"), "weft.json: not valid JSON"),
        (break_manifest("[1]"), "weft.json: a JSON object was expected, not array"),
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

        ort = FakeOrt(sessions.import_onnxruntime(), **wished)
        monkeypatch.setattr(sessions, "import_onnxruntime", lambda: ort)
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
    session = sessions.open_session(tmp_path, target=TARGETS["ort-cuda"], graphs=True)
    assert (session.device, session.graphs) == ("cuda", True)
    ((name, options), fallback) = ort.asked[0]
    assert name == sessions.CUDA and fallback == sessions.CPU
    assert options["use_tf32"] == "0" and options["enable_cuda_graph"] == "1"
    session = sessions.open_session(tmp_path, target=TARGETS["onnx"])
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
    assert sessions.list_host_ops(model.session.ort) == ["ReduceSum"]


def test_without_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(WeftError, match=r"ONNX Runtime cannot be imported .*weft\[cpu\]"):
        sessions.import_onnxruntime()


def test_states_are_those_that_the_manifest_records(tmp_path: Path) -> None:
    """Without a record, as in older folders, the names of the inputs tell."""
    cache = (1, ["batch", 1, 4, 8])
    names = [f"{a}.0.{b}" for a in ("past_key_values", "present") for b in ("key", "value")]
    model = decoder(**dict.fromkeys(names, cache))

    def record(growth: str) -> list[dict[str, str]]:
        return [{"input": a, "output": b, "growth": growth} for a, b in zip(names[:2], names[2:], strict=True)]

    def rewinds(**manifest: Any) -> bool:
        return opened(save(tmp_path, model, **manifest)).decoder.can_rewind

    assert rewinds() and rewinds(carried=record("text"))
    assert not rewinds(cache=[{"rolling": True}]) and not rewinds(carried=record("window"))
    with pytest.raises(WeftError, match="growth is 'sideways'"):
        rewinds(carried=record("sideways"))
    extra = {"input": "past_states.0.ssm", "output": "present_states.0.ssm", "growth": "constant"}
    with pytest.raises(WeftError, match=r"does not take past_states\.0\.ssm, which its manifest records"):
        rewinds(carried=[*record("text"), extra])
    with pytest.raises(WeftError, match=rf"has the input {names[1]}, which the runtime cannot provide"):
        rewinds(carried=record("text")[:1])


def test_cache_classes_of_older_modules_are_known_by_name() -> None:
    for name in ("KVCache", "KeyCache", "RollingKVCache", "RollingKeyCache", "CrossCache"):
        assert get_growth(type(name, (), {})()) is get_growth(object.__new__(getattr(caches, name)))
    assert get_growth(type("State", (), {})()) is get_growth(RecurrentState()) is Growth.CONSTANT


@pytest.mark.parametrize(("said", "threads"), [("3", 3), ("2,4", 2), ("", 0), ("many", 0), ("-1", 0), ("99999", 0)])
def test_threads_of_the_environment(said: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers as PyTorch reads them; 0 leaves them to ONNX Runtime."""
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert sessions.read_default_threads() == threads
