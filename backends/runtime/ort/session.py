"""ONNX Runtime sessions on the CPU or on CUDA, never on another device than the requested one."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.ir.errors import WeftError

from ...target import Backend
from ..core.sampler import check_count
from ..huge_pages import use_huge_pages

CUDA = "CUDAExecutionProvider"
CPU = "CPUExecutionProvider"
DEVICES = ("auto", "cpu", "cuda")

# Shape arithmetic that ONNX Runtime places on the host on purpose: no tensor crosses the bus for it.
_HOST_OPS = {"Shape", "Size", "Gather", "Cast", "Squeeze", "Unsqueeze", "Concat", "Slice"} | {
    *("Add", "Sub", "Mul", "Div", "Mod", "Min", "Max", "Neg")
}
FROM_END, ANY_SIZE = "logits_from_end", "_size"  # of the pass last-token-logits; the suffix of a symbolic size
MOST_BYTES = 1 << 28  # of a model file whose weights are in another file
_DRIVER = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"
_log = logging.getLogger("weft.runtime")


def import_onnxruntime() -> Any:
    """Import onnxruntime, without its telemetry, and return the module. Every import in weft must go through here.
    Raises WeftError that names the package to install if it is missing."""
    # Its wheels send usage data and store a device id below ~/.cache, unless this is set before the import.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        return importlib.import_module("onnxruntime")
    except ImportError as error:
        raise WeftError(
            f"ONNX Runtime cannot be imported ({error}): install weft[cpu] (onnxruntime) or weft[gpu] (onnxruntime-gpu)"
        ) from error


def list_ort_errors() -> tuple[type[Exception], ...]:
    """Return the types of all exceptions that ONNX Runtime raises (they share no base class), and MemoryError."""
    state = vars(importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state"))
    return RuntimeError, MemoryError, *(e for e in state.values() if isinstance(e, type) and issubclass(e, Exception))


@contextlib.contextmanager
def convert_ort_errors(name: str, what: str = "ONNX Runtime failed") -> Iterator[None]:
    """Convert ONNX Runtime's errors inside the block to a WeftError "{name}: {what}: {message}", with any remedy."""
    try:
        yield
    except list_ort_errors() as error:
        damaged = re.search(r"pre-?packed weights .* do not match", join_lines(error), re.IGNORECASE)
        remedy = "; the weights that --prepack stored are damaged: compile again" if damaged else ""
        raise WeftError(f"{name}: {what}: {join_lines(error)}{remedy}") from error


def join_lines(error: Exception) -> str:
    """Return the message of `error` as one line: each run of whitespace becomes a space."""
    return " ".join(str(error).split())


@dataclass(frozen=True)
class Session:
    """An ONNX model that is open in ONNX Runtime, and its device."""

    ort: Any  # onnxruntime.InferenceSession
    device: str  # "cpu" or "cuda"
    graphs: bool = False  # runs may be captured as CUDA graphs
    stream: Any = None  # the PyTorch stream that it runs on, if shared with PyTorch
    adapter: Mapping[str, Any] = field(default_factory=dict)  # the OrtValues of the selected adapter, by input

    def new_binding(self) -> Any:
        """Return an IO binding with the selected adapter; RunOptions cannot select one for a run with a binding."""
        binding = self.ort.io_binding()
        for name, value in self.adapter.items():
            binding.bind_ortvalue_input(name, value)
        return binding

    def new_run_options(self, graph: int = -1, waits: bool = True) -> Any:
        """Return the options of a run that captures or replays CUDA graph number `graph` (-1: none); None if these are
        the defaults. Unless `waits`, the run returns before the work on its stream has ended."""
        if not self.graphs and waits:
            return None
        options = import_onnxruntime().RunOptions()
        if self.graphs:
            options.add_run_config_entry("gpu_graph_id", str(graph))
        if not waits:
            options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        return options


def open_session(
    model: Path,
    *,
    device: str = "auto",
    threads: int | None = None,
    target: Backend | None = None,
    graphs: bool = False,
    stream: Any = None,
) -> Session:
    """Return a session of the ONNX file `model`, compiled for `target`, on `device`.

    "auto" is CUDA if ONNX Runtime supports it and the model was not compiled for the CPU; if CUDA is installed but
    unusable, log a warning and use the CPU. A model compiled for CUDA runs on the CPU only if `device` is "cpu".
    `threads` bounds the CPU threads of one operator; the default is OMP_NUM_THREADS, as in PyTorch, or if unset ONNX
    Runtime's default, one per physical core. On CUDA, runs use the PyTorch `stream`, if given. With `graphs`, and if
    the model allows it, they are captured as CUDA graphs, and every run must name its graph, -1 for none
    (`Session.new_run_options`). Raises WeftError if `device` or `threads` is invalid, the device cannot be used (naming
    the missing part), or the file cannot be opened.
    """
    if device not in DEVICES:
        raise WeftError(f"device is {device!r}, but it must be one of {', '.join(DEVICES)}")
    if threads is not None:
        check_count("threads", threads)
        if threads > (most := 8 * (os.cpu_count() or 1)):
            raise WeftError(f"threads is {threads}, but more than {most} only slow this machine down: use fewer")
    ort = import_onnxruntime()
    name, bound = (target.name, target.device) if target is not None and target.contrib else ("", "")
    if device == "cuda" and bound == "cpu":
        raise WeftError(f"{model}: compiled for {name}, so it cannot run on CUDA; compile it with --target ort-cuda")
    if device == "cpu" or (device == "auto" and bound == "cpu"):
        return Session(_create_session(ort, model, [CPU], threads), "cpu")
    trouble = find_cuda_problem(ort)
    if trouble is None:
        return _open_cuda(ort, model, threads, graphs, stream)
    if device == "cuda":
        raise WeftError(f"device cuda cannot be used: {trouble}")
    if bound == "cuda":
        raise WeftError(f"{model}: compiled for {name}, but {trouble}; to run it on the CPU, use device cpu")
    if CUDA in ort.get_available_providers():
        _log.warning("running on the CPU: %s", trouble)
    return Session(_create_session(ort, model, [CPU], threads), "cpu")


def has_cuda_provider() -> bool:
    """Return whether the installed ONNX Runtime supports CUDA. Raises WeftError when it is not installed."""
    return CUDA in import_onnxruntime().get_available_providers()


def find_cuda_problem(ort: Any) -> str | None:
    """Return a short reason why `ort`, the module onnxruntime, cannot use CUDA; None if it can. ONNX Runtime itself
    would use the CPU with only a log line; so load its CUDA library here, and query the driver for a device."""
    offered = ort.get_available_providers()
    if CUDA not in offered:
        return (
            f"the installed ONNX Runtime {ort.__version__} has no {CUDA} (it offers {', '.join(offered)}): "
            "install onnxruntime-gpu instead of onnxruntime (weft[gpu])"
        )
    with contextlib.redirect_stdout(io.StringIO()):  # it prints libraries it cannot load; errors below are clearer
        ort.preload_dlls()
    if (trouble := find_gpu_problem()) is not None:
        return trouble
    try:
        if os.name != "nt":
            libraries = Path(ort.__file__).parent / "capi"
            # Loaded first and globally: the CUDA library needs its symbols.
            ctypes.CDLL(str(libraries / "libonnxruntime_providers_shared.so"), mode=ctypes.RTLD_GLOBAL)
            ctypes.CDLL(str(libraries / "libonnxruntime_providers_cuda.so"))
    except OSError as error:
        return (
            f"a library that {CUDA} needs cannot be loaded ({error}): install the CUDA {ort.cuda_version} libraries, "
            "onnxruntime-gpu[cuda,cudnn] and nvidia-cublas (weft[gpu])"
        )
    return None


def find_gpu_problem() -> str | None:
    """Return a short reason why no GPU can be used through the NVIDIA driver; None if one can."""
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError as error:
        return f"the NVIDIA driver cannot be loaded ({error})"
    count = ctypes.c_int(0)
    if status := driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        text = ctypes.c_char_p()
        driver.cuGetErrorString(status, ctypes.byref(text))
        return f"the NVIDIA driver reports error {status} ({(text.value or b'unknown').decode()})"
    return None if count.value else "the NVIDIA driver sees no GPU"


def _open_cuda(ort: Any, model: Path, threads: int | None, graphs: bool, stream: Any) -> Session:
    """Return a session of `model` on CUDA, with CUDA graphs if `graphs`; if the model cannot be captured, log a warning
    and open it without CUDA graphs. Raises WeftError if ONNX Runtime would compute nodes on the CPU. Its option
    `session.disable_cpu_ep_fallback` would also reject shape arithmetic on the host, which is harmless and even wanted;
    so check the node placement afterwards."""
    # TF32 would round the operands of f32 products to 10 bits of mantissa.
    options = {"device_id": "0", "use_tf32": "0"}
    if stream is not None:
        options["user_compute_stream"] = str(stream.cuda_stream)
    options["enable_cuda_graph"] = str(int(graphs))
    try:
        session = _create_session(ort, model, [(CUDA, options), CPU], threads)
    except WeftError as error:
        # ONNX Runtime's message for a model that it cannot capture: a node or a copy is off the GPU.
        if not graphs or "graph capture" not in str(error):
            raise
        _log.warning("%s: decoding without CUDA graphs: %s", model, error)
        return _open_cuda(ort, model, threads, graphs=False, stream=stream)
    if CUDA not in session.get_providers():
        raise WeftError(f"{model}: ONNX Runtime opened it on {', '.join(session.get_providers())}, not on {CUDA}")
    if strays := list_host_ops(session):
        raise WeftError(
            f"{model}: ONNX Runtime would compute {', '.join(strays)} on the CPU although device cuda was chosen; "
            "compile it with --target ort-cuda (dtype f16 or bf16), or run it with device cpu"
        )
    return Session(session, "cuda", graphs, stream)


def list_host_ops(session: Any) -> list[str]:
    """Return the sorted operator types that `session` computes on the CPU, without those of shape arithmetic."""
    on_cpu = (part for part in session.get_provider_graph_assignment_info() if part.ep_name == CPU)
    return sorted({node.op_type for part in on_cpu for node in part.get_nodes()} - _HOST_OPS)


def declare_literal(model: bytes) -> bytes | None:
    """Return the serialized ONNX `model` with its initializer logits_from_end declared as an input i64 [1, n], which a
    call may leave out; None if it has none. In the file it is a constant, because ONNX Runtime warns of initializers
    that are inputs. Repeated fields of protobuf messages add up if their bytes are concatenated."""
    if f"{FROM_END}{ANY_SIZE}".encode() not in model:
        return None

    def wrap(number: int, content: bytes) -> bytes:
        return bytes([number << 3 | 2, len(content)]) + content

    batch, size = b"\x08\x01", wrap(2, f"{FROM_END}{ANY_SIZE}".encode())  # dim_value, dim_param
    type_of_tensor = b"\x08\x07" + wrap(2, wrap(1, batch) + wrap(1, size))  # INT64, shape
    value = wrap(1, FROM_END.encode()) + wrap(2, wrap(1, type_of_tensor))
    return model + wrap(7, wrap(11, value))  # ModelProto.graph.input


def read_default_threads() -> int:
    """Return the first number in OMP_NUM_THREADS; 0 if it is unset, invalid or above 8 times the number of CPUs."""
    value = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(value) if value.isdecimal() and int(value) <= 8 * (os.cpu_count() or 1) else 0


def _create_session(ort: Any, model: Path, providers: list[Any], threads: int | None) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    # `list_host_ops` reads the assignment.
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    options.intra_op_num_threads = threads or read_default_threads()
    pages = use_huge_pages() if providers == [CPU] else contextlib.nullcontext()
    with convert_ort_errors(str(model), "ONNX Runtime cannot open it"), pages:
        source: Path | bytes = model
        # From bytes, ONNX Runtime reads no weights through links, which snapshots of a hub are.
        if providers == [CPU] and not model.is_symlink() and model.stat().st_size < MOST_BYTES:
            folder = "session.model_external_initializers_file_folder_path"
            if (declared := declare_literal(model.read_bytes())) is not None:
                source = declared
                options.add_session_config_entry(folder, str(model.parent))
        try:
            # With the fallback an error on CUDA would open the model on the CPU instead.
            return ort.InferenceSession(source, options, providers=providers, enable_fallback=0)
        except UnicodeDecodeError as error:  # ONNX Runtime passes names on without checking them
            raise WeftError(f"{model}: it holds a name that is not UTF-8 ({error.reason})") from error
