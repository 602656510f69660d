"""The checks of tests/gpu, side by side: everything that only a GPU can get wrong."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path

from gpu_pool import Work

FILES = {"kernels": 3.0, "torch": 4.0, "ort_cuda": 3.0}  # tests/gpu/test_NAME.py, and seconds to expect of a check


def works(args: Namespace) -> Iterator[Work]:
    """Every check as FILE/CHECK-CASE-DTYPE; those of one case and dtype share a process."""
    os.environ["WEFT_DEVICE"] = args.device
    sys.path.append(str(Path(__file__).resolve().parents[1] / "tests/gpu"))
    for file, seconds in FILES.items():
        try:
            module = import_module(f"test_{file}")
        except ImportError as error:  # of what it tests with, ONNX Runtime say
            yield Work(f"{file}/import", partial(_fail, error))
            continue
        for name, check in module.checks():
            group = f"{file}/{name.partition('-')[2]}"
            yield Work(f"{file}/{name}", partial(module.test_on_the_gpu, check), seconds, group=group)


def _fail(error: ImportError) -> None:
    raise error
