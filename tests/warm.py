"""The commands `weft`, `python FILE` and `torchrun` that start at once: forks of a process that imported everything.

`python warm.py SOCKET` is that process. `command` writes the programs to put on the PATH, which hand over their
arguments, folder and standard streams, and end as the fork ends; where they are killed, the fork is too. Pages of the
documentation run a hundred commands, each of which would import ONNX, PyTorch and the rest again.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import pkgutil
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

CLIENT = """\
#!{python} -IS
import array, json, os, socket, sys
OWN = {{"PWD", "OLDPWD", "SHLVL", "_"}}  # what a shell sets
OWN |= {{"PYTHON_EXEC", "TORCHINDUCTOR_CACHE_DIR"}}  # what torchrun starts; what PyTorch sets to its default
environment, name, arguments = dict(os.environ), {name!r}, sys.argv[1:]
differs = {{key for key in {{*environment, *{environment!r}}} if environment.get(key) != {environment!r}.get(key)}}
if "TORCHELASTIC_RUN_ID" in differs:  # torchrun starts its workers as `python -u FILE`, and numbers them by variables
    OWN |= {workers!r}
    arguments = arguments[arguments[:1] == ["-u"] :]
if name == "python" and arguments[:2] == ["-m", "torch.distributed.run"]:
    name, arguments = "torchrun", arguments[2:]
if name == "python" and arguments[:2] == ["-m", "weft"]:
    name, arguments = "weft", arguments[2:]
known = name != "python" or arguments and arguments[0].endswith(".py")  # others start by themselves
if not known or not os.path.exists({path!r}) or differs - OWN:  # settings are read where modules are imported
    os.execv({cold!r}, [{cold!r}, *sys.argv[1:]])
server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
server.connect({path!r})
message = json.dumps([name, arguments, os.getcwd(), environment]).encode()
streams = array.array("i", [0, 1, 2])
server.sendmsg([len(message).to_bytes(8, "little")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
server.sendall(message)
status = server.recv(4)
os._exit(int.from_bytes(status, "little") if status else 1)
"""
WEFT = ("ir", "passes", "backends.onnx", "backends.viz", "frontends")  # imported with all they hold
# Without onnxruntime, whose threads no fork has, and which waits for them where the process ends.
HEAVY = (
    *("torch", "transformers", "tokenizers", "onnx", "onnx_ir", "gguf", "jinja2", "safetensors"),
    *("torch.distributed.run", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch._dynamo"),
)
WORKERS = {  # what torchrun sets for each process
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"),
    *("GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_PORT", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCHELASTIC_RUN_ID"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE"),
    *("TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"),
}


def command(folder: Path, environment: dict[str, str]) -> tuple[Path, subprocess.Popen[bytes]]:
    """A folder that holds programs `weft` and `python` for processes of this `environment`, and the process that they
    ask."""
    place, programs = folder / "socket", folder / "bin"
    programs.mkdir()
    environment = {**environment, "PATH": f"{programs}{os.pathsep}{environment['PATH']}"}
    for name in ("weft", "python", "torchrun"):
        cold = str(Path(sys.executable).with_name(name))
        known = {"path": str(place), "environment": environment, "workers": WORKERS}
        text = CLIENT.format(python=sys.executable, name=name, cold=cold, **known)
        (programs / name).write_text(text, encoding="utf-8")
        (programs / name).chmod(0o755)
    process = subprocess.Popen(
        [sys.executable, __file__, str(place)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    return programs, process


def serve(path: str) -> tuple[str, list[str]]:
    """Fork for each call; returns, in the fork, the program and its arguments."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(path)
    listening.listen()
    print("ready", flush=True)
    waiting = selectors.DefaultSelector()
    waiting.register(listening, selectors.EVENT_READ)
    waiting.register(sys.stdin, selectors.EVENT_READ)  # which ends where the tests end
    while True:
        for key, _ in waiting.select():
            if key.fileobj is sys.stdin:
                os._exit(0)
            if isinstance(key.fileobj, int):
                _end(waiting, key)
                continue
            if key.fileobj is not listening:  # whose program was killed before its fork has ended
                os.kill(key.data, signal.SIGKILL)
                waiting.unregister(key.fileobj)
                continue
            call, _ = listening.accept()
            length, given, *_ = socket.recv_fds(call, 8, 3)
            name, arguments, folder, environment = json.loads(_read(call, int.from_bytes(length, "little")))
            child = os.fork()
            if child == 0:
                waiting.close()
                listening.close()
                call.close()
                for number, descriptor in enumerate(given):
                    os.dup2(descriptor, number)
                    os.close(descriptor)
                _open_streams()
                os.chdir(folder)
                os.environ.clear()
                os.environ.update(environment)
                return name, arguments
            for descriptor in given:
                os.close(descriptor)
            waiting.register(call, selectors.EVENT_READ, child)
            waiting.register(os.pidfd_open(child), selectors.EVENT_READ, (child, call))


def _open_streams() -> None:
    """Open the standard streams as where Python starts: those of the process that forked know its own files."""
    stdin, stderr = (
        os.fdopen(0, closefd=False),
        os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False),
    )
    stdout = os.fdopen(1, "w", buffering=1 if os.isatty(1) else -1, closefd=False)
    sys.stdin, sys.stdout, sys.stderr = stdin, stdout, stderr


def _end(waiting: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    """Tell who asked how the fork has ended."""
    child, call = key.data
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    waiting.unregister(key.fileobj)
    os.close(key.fd)
    with contextlib.suppress(BrokenPipeError):  # of a program that was killed
        call.sendall((code if code >= 0 else 128 - code).to_bytes(4, "little"))
    with contextlib.suppress(KeyError):
        waiting.unregister(call)
    call.close()


def _read(call: socket.socket, length: int) -> bytes:
    text = b""
    while len(text) < length:
        text += call.recv(length - len(text))
    return text


def main(path: str) -> NoReturn:
    sys.path[0] = str(Path(sys.executable).parent)  # as for the program
    for name in HEAVY:
        importlib.import_module(name)
    for name in WEFT:
        package = importlib.import_module(f"weft.{name}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    from torch.distributed.run import main as run

    from weft.frontends.app.cli import main

    gc.collect()
    gc.freeze()
    name, arguments = serve(path)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if name != "python":
        sys.argv = [name, *arguments]
        _leave(main if name == "weft" else run)
    sys.argv = arguments
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    _leave(lambda: runpy.run_path(arguments[0], run_name="__main__"))


def _leave(run: Callable[[], object]) -> NoReturn:
    """Run a program and end the process as Python would, but without taking every imported module apart again."""
    status = 0
    try:
        run()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:
        status = 120
    os._exit(status & 0xFF)


if __name__ == "__main__":
    main(sys.argv[1])
