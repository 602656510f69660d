"""Fixtures of all tests: no network, fixed seeds, and the two real models under .cache/weights."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest

from .device import gpus
from .interpreter import quicken
from .sampling import ALL
from .warm import command

ROOT = Path(__file__).resolve().parents[1]
WEIGHTS = ROOT / ".cache" / "weights"

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # as weft sets it, for tests that import onnxruntime themselves
# Threads of OpenMP spin while they wait for each other: on a machine that does other work too, two of them train a
# small model 20 times slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if not gpus():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton decides when it is imported; see backends/torch/kernels

gc.disable()  # until all tests are collected

hypothesis.settings.register_profile("weft", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("weft")


CHROMIUMS = ("chromium", "chromium-browser", "google-chrome")
QUIET = ("--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync")

HALVED, MANY = ("e2e/", "backends/", "frontends/", "passes/"), 6
# Their tests take longest: they begin first, so that no worker ends with one.
FIRST = ("test_docs.py", "test_offline.py", "test_typing.py")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select tests by the mark `long`: `make test` runs those without it, `make test-engines` those with it and the
    folder engines/. ``WEFT_TESTS=all`` and ``-m`` select by themselves.

    Functions with the mark `halved`, and those in `HALVED` with many cases, run every second case in `make test`, or
    every third if both apply."""
    items.sort(key=lambda item: item.path.name not in FIRST)
    for _, group in itertools.groupby(items, key=lambda item: getattr(item, "function", None)):
        cases = list(group)
        many = len(cases) >= MANY and cases[0].path.relative_to(ROOT / "tests").as_posix().startswith(HALVED)
        step = 1 + many + (cases[0].get_closest_marker("halved") is not None)
        for i, item in enumerate(cases):
            if i % step:
                item.add_marker("long")
    if ALL or config.option.markexpr:
        return
    engines = os.environ.get("WEFT_ENGINES") == "all"
    config.hook.pytest_deselected(items=[item for item in items if _is_late(item) != engines])
    items[:] = [item for item in items if _is_late(item) == engines]


def _is_late(item: pytest.Item) -> bool:
    return item.get_closest_marker("long") is not None or ROOT / "tests" / "engines" in item.path.parents


def pytest_collection_finish() -> None:
    """Spare what is imported and collected from garbage collection.

    PyTorch and transformers alone are a million objects, which every full collection would walk through again.
    """
    quicken()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


def pytest_sessionfinish() -> None:
    """Give it back to collection: libraries tell of objects that are left where Python ends."""
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Sessions of ONNX Runtime that tests open themselves have one thread, as weft's have by OMP_NUM_THREADS: idle
    ones spin for a while, and would take the time of other tests."""
    import onnxruntime as ort

    real = ort.InferenceSession.__init__

    def begin(self: Any, model: Any, sess_options: Any = None, *more: Any, **options: Any) -> None:
        chosen = sess_options or ort.SessionOptions()
        chosen.intra_op_num_threads = chosen.intra_op_num_threads or 1
        real(self, model, chosen, *more, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ort.InferenceSession, "__init__", begin)
        yield


@pytest.fixture(autouse=True, scope="session")
def _no_network() -> Iterator[None]:
    """A test that opens a connection to another machine fails."""

    def connect(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1"):
            raise AssertionError(f"a test tried to connect to {address}")
        real(self, address)

    real = socket.socket.connect
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", connect)
        yield


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Variables of processes in which `weft`, `python FILE` and `torchrun` need not import anything again."""
    own = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    own |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{own['PATH']}", "COLUMNS": "120"}
    folder, process = command(tmp_path_factory.mktemp("warm"), own)
    yield {**own, "PATH": f"{folder}{os.pathsep}{own['PATH']}", "PYTHON_EXEC": str(folder / "python")}
    process.communicate()  # closes its input, at which it ends


@pytest.fixture
def rng() -> np.random.Generator:
    """Random numbers with a fixed seed."""
    return np.random.default_rng(0)


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


def _weights(name: str) -> Path:
    path = WEIGHTS / name
    if not path.exists():
        pytest.fail(f"{path} is missing: run `make weights`", pytrace=False)
    return path


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A headless Chromium: that of the variable CHROMIUM, or the one that is installed."""
    from playwright.sync_api import sync_playwright

    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, CHROMIUMS)), None)
    assert path, "the tests of pages need Chromium: install it, or name it in the variable CHROMIUM"
    with sync_playwright() as driver:
        made = driver.chromium.launch(executable_path=path, args=["--no-sandbox", *QUIET])
        yield made
        made.close()


@pytest.fixture(autouse=True)
def own_event_loop(request: pytest.FixtureRequest) -> Iterator[None]:
    """Hide the event loop of the browser, which runs until the session ends, from tests that run one of their own."""
    loop = asyncio._get_running_loop()
    if loop is None or "browser" in request.fixturenames:
        yield
        return
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, mostly Q4_1, with a Q8_0 embedding and F32 norms."""
    return _weights("SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    """all-MiniLM-L6-v2: a Hugging Face folder of the bert family, safetensors."""
    return _weights("all-MiniLM-L6-v2")


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Auto classes copy code into the folder of the test, and have imported none before."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    for name in [n for n in sys.modules if n.partition(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("sys.path", [*sys.path])
