"""Load the model of this folder with its weights:  from load import load_model; model = load_model()"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import math
import mmap
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

FOLDER = Path(__file__).resolve().parent
OLDEST_TORCH = (2, 11)  # weft's own requirement
MAX_CPU_BATCH = 8  # the largest batch for which decode.py is faster on a CPU
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
_FACTS = {"kind": str, "vocab": int, "max_length": int}  # the facts of weft.json that scripts need
_KINDS = {  # of safetensors
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
}


class Failure(Exception):
    """An error whose message is one sentence for the user."""


class _SkipInitialization(TorchFunctionMode):
    """Skips the initialization of parameters while active: weights replace them, and random values on the meta device
    make PyTorch import hundreds of modules, which takes a second."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else keywords["tensor"]
        return func(*args, **keywords)


def load_model(folder: Path = FOLDER, device: str = "cpu", dtype: str | None = None) -> nn.Module:
    """Return the model of `folder` on `device`, with weights in `dtype` (f32, bf16 or f16; by default as stored).

    Raises:
        Failure: if PyTorch is too old, the device unusable, a file missing or incomplete, or the weights do not match.
    """
    check_torch()
    check_device(device)
    with torch.device("meta"), _SkipInitialization():
        model: nn.Module = _import_module("model", folder).Model()
    tensors, expected = read_weights(folder), model.state_dict()
    if missing := expected.keys() - tensors.keys():
        raise Failure(f"{folder}: the weights lack {min(missing)} ({len(missing)} of {len(expected)} are missing)")
    if extra := tensors.keys() - expected.keys():
        raise Failure(f"{folder}: the weights have {min(extra)}, which is not in the model ({len(extra)} unknown)")
    for key, value in expected.items():
        if tensors[key].shape != value.shape:
            shapes = f"{list(tensors[key].shape)} in the weights, but {list(value.shape)} in the model"
            raise Failure(f"{folder}: {key} is {shapes}")
        if tensors[key].is_floating_point() != value.is_floating_point():
            raise Failure(f"{folder}: {key} is {tensors[key].dtype} in the weights, but {value.dtype} in the model")
    cast = {key: DTYPES[dtype] for key, _ in model.named_parameters()} if dtype else {}
    model.load_state_dict({k: t.to(device, cast.get(k)) for k, t in tensors.items()}, assign=True)
    return model.eval()


class Stepper:
    """A function that maps ids and positions [batch, 1] and the cache to logits [batch, 1, vocab]. Batches of up to
    `most` rows run `few`, the step of decode.py; larger ones run `whole`, the model. If `reads(batch)`, ids may be
    [batch, seq], and `last` [batch] is the index of the token in each row whose logits are returned."""

    def __init__(self, whole: Callable[..., Tensor], few: Any = None, most: int = 0) -> None:
        self.whole, self.few, self.most = whole, few, most

    def __call__(self, ids: Tensor, positions: Tensor, cache: Any, *last: Tensor | None) -> Tensor:
        return (self.few if len(ids) <= self.most else self.whole)(ids, positions, cache, *last)

    def reads(self, batch: int) -> bool:
        """Return whether ids may be [batch, seq], if all rows of the batch continue at the same position."""
        return batch <= self.most and getattr(self.few, "reads_prompts", False)

    def captured_once(self, batch: int) -> bool:
        """Return whether one CUDA graph serves a batch of this size at any sequence length."""
        return batch <= self.most and getattr(self.few, "any_length", False)


def make_stepper(model: nn.Module, folder: Path = FOLDER) -> Stepper:
    """Return the decode step of `model`, through decode.py of `folder` if that exists and is faster here."""
    takes = inspect.signature(model.forward).parameters

    def whole(ids: Tensor, positions: Tensor, cache: Any) -> Any:
        at = {"position_ids": positions} if "position_ids" in takes else {}
        return model(input_ids=ids, **at, cache=cache)

    if not (folder / "decode.py").is_file() or not _is_decode_faster(model, folder):
        return Stepper(whole)
    most = sys.maxsize if next(model.parameters()).is_cuda else MAX_CPU_BATCH
    return Stepper(whole, _import_module("decode", folder).Step(model), most)


def _is_decode_faster(model: nn.Module, folder: Path) -> bool:
    """Return whether decode.py is faster: its kernels run on this GPU (else warn), or a CPU can hold packed weights;
    never for DTensors, of which this process holds only a part."""
    weights = list(model.parameters())
    if any(hasattr(w, "device_mesh") for w in weights):  # DTensors: this process holds only a part
        return False
    if not weights[0].is_cuda:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
        return sum(w.nbytes for w in weights) <= memory // 4
    reason = _import_module("kernels.shared.launch", folder).refusal(weights[0])
    if reason is not None:
        warnings.warn(f"{folder}: model.py computes the steps, not the kernels of decode.py: {reason}", stacklevel=3)
    return reason is None


def read_facts(folder: Path = FOLDER) -> dict[str, Any]:
    """Return the contents of weft.json in `folder`; raise Failure if it is unreadable, or a necessary key is wrong."""
    path = folder / "weft.json"
    try:
        facts = _parse_object(path.read_bytes())
        if lost := _FACTS.keys() - facts.keys():
            raise ValueError(f"it lacks the key {min(lost)}")
        for key, kind in _FACTS.items():
            if type(facts[key]) is not kind:
                raise ValueError(f"{key} is {facts[key]!r:.60}, not of type {kind.__name__}")
    except (OSError, ValueError) as e:
        raise Failure(f"{path} cannot be read: {e}") from e
    return facts


def read_tokenizer(folder: Path = FOLDER) -> Any:
    """Return the tokenizer of `folder`, without padding; raise Failure if its file or the package is missing."""
    path, remedy = folder / "tokenizer.json", "give token ids instead, as in --ids 1,15,7"
    if not path.is_file():
        raise Failure(f"{folder} has no tokenizer.json: {remedy}")
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise Failure(f"the package tokenizers is not installed: pip install tokenizers, or {remedy}") from None
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def parse_ids(text: str) -> list[int]:
    """Return the token ids in `text`, such as 1,15,7; raise ArgumentTypeError for other text."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids such as 1,15,7") from None


def check_ids(what: str, ids: list[int], vocab: int, longest: int) -> None:
    """Raise Failure unless `ids` has 1 to `longest` tokens from 0 to `vocab` − 1; the message calls the ids `what`."""
    if not ids or not 0 <= min(ids) <= max(ids) < vocab:
        raise Failure(f"{what} is {ids}, but it must be tokens from 0 to {vocab - 1}, one at least")
    if len(ids) > longest:
        raise Failure(f"{what} of {len(ids)} tokens is longer than the {longest} that the model was compiled for")


def main(name: str, run: Callable[[], None]) -> None:
    """Call `run`. On a Failure or lack of GPU memory, print the script's `name` and the message; exit with status 2."""
    try:
        run()
    except (Failure, torch.OutOfMemoryError) as failed:
        print(f"{name}: {failed}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # the reader of the output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except KeyboardInterrupt:
        sys.exit(130)


def check_torch() -> None:
    """Raise Failure if this PyTorch is older than `OLDEST_TORCH`."""
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < OLDEST_TORCH:
        raise Failure(f"PyTorch {torch.__version__} is too old: install {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} or newer")


def check_device(device: str, remedy: str = "use --device cpu") -> None:
    """Raise Failure if this PyTorch cannot use `device`; if there is no GPU, the message ends in `remedy`."""
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise Failure(f"device {device!r} is unknown to PyTorch: use cpu or cuda") from None
    if kind == "cuda" and not torch.cuda.is_available():
        why = "was built without CUDA" if torch.version.cuda is None else "finds no GPU"
        raise Failure(f"device cuda cannot be used: PyTorch {torch.__version__} {why}; {remedy}")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as e:  # a GPU number that does not exist, or another kind of device
        raise Failure(f"device {device} cannot be used: {str(e).splitlines()[0]}") from e


def _import_module(name: str, folder: Path) -> Any:
    """Import and return the module `name` from `folder`; raise Failure if one of its files is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise Failure(f"{folder} is incomplete: {e}") from e


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of all model*.safetensors in `folder` by key, memory-mapped: pages are read on first use.

    Raises:
        Failure: if there is no such file, or one is incomplete.
    """
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise Failure(f"{folder}: no model.safetensors in it")
    tensors: dict[str, Tensor] = {}
    for path in files:
        try:
            with path.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            start = 8 + int.from_bytes(data[:8], "little")
            header = _parse_object(data[8:start])
            header.pop("__metadata__", None)
            for key, entry in header.items():
                tensors[key] = _map_tensor(data, start, entry["data_offsets"], entry["dtype"], entry["shape"])
            end = 0
            for first, last in sorted(entry["data_offsets"] for entry in header.values()):
                if first != end:
                    raise ValueError(
                        f"a tensor begins at byte {start + first}, not at {start + end}, where the last one ends"
                    )
                end = last
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise Failure(f"{path}: not a complete safetensors file: {e}") from e
    return tensors


def _parse_object(text: bytes) -> dict[str, Any]:
    """Return the JSON object in `text`; raise ValueError for other JSON, or if a key occurs twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(unique_pairs := dict(pairs)) < len(pairs):
            raise ValueError("a key occurs twice")
        return unique_pairs

    try:
        unique_pairs = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except RecursionError:
        raise ValueError("its lists and objects are nested too deep") from None
    if not isinstance(unique_pairs, dict):
        raise ValueError("it is not a JSON object")
    return unique_pairs


def _map_tensor(data: mmap.mmap, start: int, between: list[int], kind: str, shape: list[int]) -> Tensor:
    """Return the tensor stored in the bytes of `data` from ``start + between[0]`` to ``start + between[1]``, without a
    copy. Raise ValueError if their number does not match `shape` and `kind`, the dtype."""
    (first, last), dtype, count = between, _KINDS[kind], math.prod(shape)
    if min((first, *shape)) < 0 or last - first != count * dtype.itemsize or start + last > len(data):
        raise ValueError(f"bytes {start + first} to {start + last} do not hold {count} elements of {kind}")
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, count=count, offset=start + first).reshape(shape)
