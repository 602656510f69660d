"""Processes of a gloo group, and a count of the bytes that they hand to collectives."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import dynamic_module_utils

SECONDS = 60
# The server imports them once; each process is a fork of it, which has run no threads yet.
PRELOADED = [
    "torch",
    "torch.distributed.tensor",
    "transformers",
    "transformers.modeling_utils",
    "tests.engines.scale.jobs",
]
COLLECTIVES = {  # ops of torch by what they are, and which of their arguments holds what is sent
    "allreduce_": ("all-reduce", 0),
    "all_reduce": ("all-reduce", 0),
    "_allgather_base_": ("all-gather", 0),
    "allgather_": ("all-gather", 0),
    "all_gather_into_tensor": ("all-gather", None),  # what comes out of it
    "alltoall_base_": ("all-to-all", 1),
    "all_to_all_single": ("all-to-all", 0),
    "reduce_scatter_tensor": ("reduce-scatter", 0),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "send": ("send", 0),
    "broadcast_": ("broadcast", 0),
}


class Counted(TorchDispatchMode):
    """Add up the calls and the bytes of each kind of collective within it, but for a few integers that tell sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented  # its own dispatch comes first, which sends what must be whole
        made = func(*args, **(kwargs or {}))
        namespace, name = func.namespace, func._schema.name.partition("::")[2]
        if namespace in ("c10d", "_c10d_functional") and name in COLLECTIVES:
            kind, place = COLLECTIVES[name]
            given = [t for t in _tensors(made if place is None else args[place]) if t.is_floating_point()]
            if given:
                self.calls[kind] += 1
                self.bytes[kind] += sum(t.numel() * t.element_size() for t in given)
        return made


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for part in value for t in _tensors(part)] if isinstance(value, (list, tuple)) else []


def in_processes(count: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `function` of `args` in each of `count` processes of a group, and return the results in their order.

    Raises:
        RuntimeError: with the traceback of the first process that failed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        running: list[tuple[BaseProcess, Connection]] = []
        for rank in range(count):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_process, args=(theirs, Path(folder), rank, count, function, args), daemon=True
            )
            process.start()
            theirs.close()
            running.append((process, ours))
        results = []
        try:
            for rank, (_, connection) in enumerate(running):
                if not connection.poll(SECONDS):
                    raise RuntimeError(f"process {rank} of {count} is not done after {SECONDS} seconds")
                done, result = connection.recv()
                if not done:
                    raise RuntimeError(f"process {rank} of {count} failed:\n{result}")
                results.append(result)
        finally:
            for process, connection in running:
                process.join(5)
                process.kill()
                connection.close()
        return results


def _process(
    connection: Connection, folder: Path, rank: int, count: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dynamic_module_utils.HF_MODULES_CACHE = str(folder / f"modules-{rank}")
    try:
        store = f"file://{folder}/rendezvous"
        dist.init_process_group("gloo", store, rank=rank, world_size=count, timeout=timedelta(seconds=SECONDS))
        connection.send((True, function(*args)))
    except BaseException:
        connection.send((False, traceback.format_exc()))
    finally:
        connection.close()
        if dist.is_initialized():
            dist.destroy_process_group()
