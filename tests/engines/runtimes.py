"""ONNX runtimes, each in a process of its own.

The method `run(path, inputs)` of a `Runtime` loads an ONNX file and returns the outputs by name. A crash, a hang or a
refusal of the runtime raises `RuntimeRefusal`, and the next call starts a new process. A file that was just run stays
loaded, so further calls measure what one loaded model accepts.

This file is also the script of these processes; runtimes.mjs is that of Node, whose packages are in build/node, or in
the folder that the environment variable WEFT_NODE names.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

Arrays = Mapping[str, np.ndarray[Any, Any]]
Session = Callable[[dict[str, Any]], dict[str, Any]]  # a loaded model: inputs by name → outputs by name

IN_NODE = ("ort-node", "ort-web")


class RuntimeRefusal(Exception):
    """The error that a runtime did not load or run a model; the message is that of the runtime, then its log."""


class Runtime:
    """The process of the runtime `name` (a key of `ENVIRONMENTS`), started by the first call of `run`; a call may take
    `timeout` seconds."""

    def __init__(self, name: str, timeout: float = 60.0) -> None:
        self.name, self.timeout = name, timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `close`
        self._replies = -1

    def run(self, path: str | os.PathLike[str], inputs: Arrays) -> dict[str, Any]:
        """Return the outputs of the ONNX file `path` by name. Raises RuntimeRefusal if the runtime refuses the file or
        the inputs, crashes, or exceeds the timeout."""
        process = self._process or self._start()
        self._log.truncate(0)
        request = {"path": os.fspath(path), "inputs": {name: encode(array) for name, array in inputs.items()}}
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            self.stop()
            raise RuntimeRefusal(f"no process: {self._read_log()}") from None
        reply = self._read_reply()
        if "error" in reply:
            raise RuntimeRefusal(f"{reply['error']}\n{self._read_log()}".strip())
        return {name: decode(array) for name, array in reply["outputs"].items()}

    def stop(self) -> None:
        """End the process; the next call of `run` starts another."""
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(BrokenPipeError):  # an unsent request
                self._process.communicate()
            os.close(self._replies)
        self._process = None

    def close(self) -> None:
        """End the process for good."""
        self.stop()
        self._log.close()

    def _start(self) -> subprocess.Popen[bytes]:
        script = Path(__file__)
        command = [sys.executable, "-P", str(script)]
        if self.name in IN_NODE:
            command = [
                "node",
                str(script.with_suffix(".mjs")),
                os.environ.get("WEFT_NODE", str(script.parents[2] / "build" / "node")),
            ]
        self._replies, writer = os.pipe()
        command += [self.name, str(writer)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=self._log, stderr=self._log, pass_fds=[writer]
        )
        os.close(writer)
        return self._process

    def _read_reply(self) -> dict[str, Any]:
        line = b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self._replies], [], [], self.timeout)
            part = os.read(self._replies, 1 << 20) if ready else b""
            if not part:
                process = self._process
                self.stop()
                code = "no answer" if not ready or process is None else _describe_exit(process.returncode)
                raise RuntimeRefusal(f"{code}: {self._read_log()}")
            line += part
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _read_log(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace").strip("\0 \n")[-2000:]


def _describe_exit(code: int) -> str:
    return f"crash ({signal.Signals(-code).name})" if code < 0 else f"exit {code}"


def encode(array: Any) -> list[Any]:
    """Return [dtype, shape, base64 of the bytes] of `array`."""
    array = np.asarray(array)
    return [array.dtype.name, list(array.shape), base64.b64encode(array.tobytes()).decode()]


def decode(fields: list[Any]) -> Any:
    """Return the array that `encode` turned into `fields`."""
    name, shape, data = fields
    if not hasattr(np, name) and name != "bool":
        import ml_dtypes  # noqa: F401  # registers bfloat16 and others with numpy
    return np.frombuffer(base64.b64decode(data), np.dtype(name)).reshape(shape)


# -- in the environments of the runtimes


def _load_reference(path: str) -> Session:
    from onnx.reference import ReferenceEvaluator

    model = ReferenceEvaluator(path)
    return lambda inputs: dict(zip(model.output_names, model.run(None, inputs), strict=True))


def _load_ort(path: str) -> Session:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return lambda inputs: dict(zip(names, session.run(names, inputs), strict=True))


def _load_openvino(path: str) -> Session:
    import openvino

    # Without these, products are in bf16 on CPUs that have it, and activations before quantized weights in 8 bits.
    exact = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    model = openvino.Core().compile_model(path, "CPU", exact)
    _, outputs = _list_names(path)  # in OpenVINO an output may have several names

    def run(inputs: dict[str, Any]) -> dict[str, Any]:
        results = model(inputs)
        return {name: np.array(results[i]) for i, name in enumerate(outputs)}

    return run


def _list_names(path: str) -> tuple[list[str], list[str]]:
    """Return the names of the inputs and of the outputs of the ONNX file `path`."""
    import onnx

    graph = onnx.load(path, load_external_data=False).graph
    weights = {weight.name for weight in graph.initializer}
    return [v.name for v in graph.input if v.name not in weights], [v.name for v in graph.output]


def _load_tract(path: str) -> Session:
    import tract

    loaded = tract.onnx().load(path)
    inputs = [loaded.input_name(i) for i in range(loaded.input_count())]
    # tract names outputs after nodes, but keeps their order.
    _, outputs = _list_names(path)
    model = loaded.into_model().into_runnable()

    def run(arrays: dict[str, Any]) -> dict[str, Any]:
        results = model.run([arrays[name] for name in inputs])
        return {name: result.to_numpy() for name, result in zip(outputs, results, strict=True)}

    return run


def _load_mnn(path: str) -> Session:
    import _tools
    import MNN

    inputs, outputs = _list_names(path)
    with tempfile.TemporaryDirectory() as folder:
        converted = str(Path(folder, "model.mnn"))
        # The script mnnconvert would install a package with the first pip in PATH, and report to a server.
        _tools.mnnconvert(["", "-f", "ONNX", "--modelFile", path, "--MNNModel", converted, "--bizCode", "weft"])
        if not Path(converted).is_file():
            raise ValueError("not converted")
        module = MNN.nn.load_module_from_file(converted, inputs, outputs)

    wide = {"int64": np.int32, "bool": np.int32, "float16": np.float32}
    types = {"float32": MNN.expr.float, "int32": MNN.expr.int, "uint8": MNN.expr.uint8, "int8": MNN.expr.int8}

    def new_variable(array: Any) -> Any:
        data = np.ascontiguousarray(array, wide.get(array.dtype.name, array.dtype))
        return MNN.expr.const(data, list(array.shape), MNN.expr.NCHW, types[data.dtype.name])

    def run(arrays: dict[str, Any]) -> dict[str, Any]:
        results = module.forward([new_variable(arrays[name]) for name in inputs])
        return {name: np.array(v.read()) for name, v in zip(outputs, results, strict=True)}

    return run


def serve(name: str, replies: int) -> None:
    """Answer requests from standard input, one JSON object per line, on the file descriptor `replies`."""
    load: Callable[[str], Session] = globals()[f"_load_{name.replace('-', '_')}"]
    loaded: tuple[Any, Session] | None = None
    for line in sys.stdin:
        request = json.loads(line)
        key = request["path"], os.stat(request["path"]).st_mtime_ns
        try:
            if loaded is None or loaded[0] != key:
                loaded = None
                loaded = key, load(request["path"])
            outputs = loaded[1]({k: decode(v) for k, v in request["inputs"].items()})
            reply: dict[str, Any] = {"outputs": {k: encode(v) for k, v in outputs.items()}}
        except BaseException as error:  # any error of a runtime is its answer
            reply = {"error": f"{type(error).__name__}: {error}"}
        os.write(replies, json.dumps(reply).encode() + b"\n")


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
