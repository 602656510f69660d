"""ONNX Runtime sessions: the device that is asked for or a reason, threads, and nodes that would run on the CPU."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import weft
from weft.backends.runtime.core.generation import Generator
from weft.backends.runtime.ort import session as sessions
from weft.backends.runtime.ort.ort_decoder import OrtDecoder
from weft.backends.target import TARGETS
from weft.ir.errors import WeftError

from ...handmade import decoder, encoder, opened, save


def test_invalid_devices_and_threads_are_refused(tmp_path: Path) -> None:
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
def test_unusable_cuda_is_reported(
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


def test_cuda_session_options_and_fallbacks(tmp_path: Path, fake: Any, caplog: Any) -> None:
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


def test_host_operators_are_listed(tmp_path: Path) -> None:
    model = opened(save(tmp_path, encoder((np.eye(8, dtype=np.float32),) * 2), kind="encoder"))
    assert sessions.list_host_ops(model.session.ort) == ["ReduceSum"]


def test_missing_onnxruntime_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(WeftError, match=r"ONNX Runtime cannot be imported .*weft\[cpu\]"):
        sessions.import_onnxruntime()


@pytest.mark.parametrize(("said", "threads"), [("3", 3), ("2,4", 2), ("", 0), ("many", 0), ("-1", 0), ("99999", 0)])
def test_omp_num_threads_is_the_default(said: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers as PyTorch reads them; 0 leaves them to ONNX Runtime."""
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert sessions.read_default_threads() == threads
