"""A process that runs one input after the other: `python -m tests.fuzz.worker CORPUS SEED`.

Each line on stdin is a format and a number; each line on stdout is what came of that input, as JSON. The input follows
from the seed, the format and the number alone. Whatever commands print goes elsewhere.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

ROOM = 2 << 30  # bytes of address space that an input may take beside what the process has; its files are small
SERVER: Any = None  # of the small llama, once a request was sent
LONGEST = 1500  # characters of a message


def case_of(seed: int, kind: str, number: int, corpus: Path, scratch: Path) -> Any:
    """The input `number` of a format, its files written into `scratch`."""
    from .harness import FORMATS

    return FORMATS[kind][0](random.Random(f"{seed} {kind} {number}"), corpus, scratch)


def outcome(case: Any, before: set[str], scratch: Path) -> dict[str, Any]:
    """Run a case to its class, and what there is to say of it."""
    from click.testing import CliRunner

    from weft.frontends.app.cli import cli

    if case.request is not None:
        return answered(*case.request)
    if case.path is not None:
        sys.path.insert(0, str(case.path))
        case.path = None
        return _forked(lambda: outcome(case, before, scratch))  # what a plugin does to this process stays with it
    environment = {"HOME": str(scratch), **case.env}
    result = CliRunner().invoke(cli, case.args, input=case.input, env=environment)
    error = result.exception
    if error is not None and not isinstance(error, SystemExit):
        if isinstance(error, MemoryError):
            return {"class": "memory", "what": _frames(error)}
        return {"class": "traceback", "what": f"{type(error).__name__}: {error}"[:300], "at": _frames(error)}
    lines = result.stderr.splitlines()
    complaints = [line for line in lines if line.startswith("weft: error: ")]
    if "not enough memory" in result.stderr:
        return {"class": "memory", "what": lines[-1]}
    if result.exit_code == 2:
        if len(complaints) != 1:
            return {"class": "traceback", "what": f"status 2 with {len(complaints)} messages: {result.stderr[:300]!r}"}
        if len(complaints[0]) > LONGEST or "Traceback" in result.stderr:
            return {"class": "too long", "what": complaints[0][:200]}
        left = sorted({p.name for p in scratch.iterdir()} - before)
        if left:
            return {"class": "left over", "what": f"{left} after {complaints[0][:200]}"}
        return {"class": "refused", "what": complaints[0]}
    if result.exit_code not in (0, 1):
        return {"class": "traceback", "what": f"status {result.exit_code}: {result.stderr[-300:]!r}"}
    if case.overlaps or (case.safetensors is not None and (refused := _refused_by_the_library(case.safetensors))):
        return {"class": "overlap accepted", "what": refused if case.safetensors is not None else "GGUF"}
    return {"class": "fine", "what": ""}


def _forked(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what `run` returns in a fork of this process."""
    ours, theirs = os.pipe()
    if (child := os.fork()) == 0:
        try:
            with os.fdopen(theirs, "w", encoding="utf-8") as pipe:
                pipe.write(json.dumps(run()))
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, encoding="utf-8") as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    found: dict[str, Any] = json.loads(text or "{}")
    return found or {"class": "traceback", "what": f"the fork ended with status {status}"}


def answered(path: str, headers: dict[str, str], body: bytes) -> dict[str, Any]:
    """Send a request to the server of this process: its answer must be of JSON, or of events, and no failure of it."""
    import http.client

    assert SERVER is not None
    connection = http.client.HTTPConnection("127.0.0.1", SERVER.port, timeout=50)
    connection.request("POST", path, body, headers)
    response = connection.getresponse()
    text = response.read().decode("utf-8", "replace")
    connection.close()
    failed = response.status >= 500 or any(word in text for word in ("server_error", "Traceback", "<unknown>"))
    if failed or not (response.status == 200 or text.startswith(('{"error"', "Invalid HTTP"))):
        return {"class": "traceback", "what": f"{response.status} {text[:300]} for {body[:300]!r}"}
    return {"class": "fine" if response.status == 200 else "refused", "what": text[:300]}


def _refused_by_the_library(path: Path) -> str:
    """Return the error of the safetensors library on a file; "" if it opens."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "numpy"):
            return ""
    except SafetensorError as error:
        return str(error)


def _frames(error: BaseException) -> str:
    """The last places of weft in a traceback, and the very last."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f"{Path(f.filename).name}:{f.lineno}" for f in frames if "weft" in f.filename and "cli" not in f.filename]
    return " > ".join([*ours[-4:], f"({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""])


def _limit() -> None:
    """Bound the address space from now on."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, resource.RLIM_INFINITY))


def main(corpus: Path, seed: int) -> None:
    """Answer lines until there are no more."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    from weft.backends.runtime.ort.session import import_onnxruntime

    for name in ("gguf", "onnx", "tokenizers", "torch", "weft.frontends.app.cli"):
        importlib.import_module(name)  # what commands import when they run takes room once, not of an input
    import_onnxruntime().set_default_logger_severity(4)
    _limit()
    print("ready", file=answers, flush=True)
    corpus = corpus.resolve()
    with tempfile.TemporaryDirectory(prefix="fuzz-home-") as home, contextlib.ExitStack() as servers:
        os.chdir(home)  # where commands without -o write
        _answer(answers, Path.cwd(), corpus, seed, servers)


def _answer(answers: TextIO, home: Path, corpus: Path, seed: int, servers: contextlib.ExitStack) -> None:
    """Run the inputs that stdin names."""
    global SERVER
    for line in sys.stdin:
        kind, number = line.rstrip("\n").rsplit(" ", 1)
        if kind == "serve" and SERVER is None:
            import weft
            from tests.frontends.app.serve.serving import serve_in_thread
            from weft.frontends.app.serve.server_settings import ServerSettings

            settings = ServerSettings("llama", drain=0.0)
            SERVER = servers.enter_context(serve_in_thread(weft.load(corpus / "onnx" / "llama"), settings))
        scratch, path = Path(tempfile.mkdtemp(prefix="fuzz-")), list(sys.path)
        try:
            case = case_of(seed, kind, int(number), corpus, scratch)
            print(json.dumps({"args": [a[:200] for a in case.args]}), file=answers, flush=True)
            found = outcome(case, {p.name for p in scratch.iterdir()} | {"text.txt"}, scratch)
            if Path.cwd() != home:
                found = {"class": "traceback", "what": f"the working folder is {Path.cwd()} now"}
        finally:
            os.chdir(home)
            sys.path[:] = path
            shutil.rmtree(scratch, ignore_errors=True)
        print(json.dumps(found), file=answers, flush=True)
        gc.collect(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
