"""`weft.torch`: a source as an `nn.Module` of readable PyTorch, in this process and without files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weft.backends.runtime.torch_folder import pytorch
from weft.backends.targets import find_target
from weft.ir.verifier import verify
from weft.passes import run_passes

from .compiler import target_dtype, target_pipeline
from .sources import load_source

if TYPE_CHECKING:
    from torch import device as Device
    from torch import dtype as Dtype
    from torch import nn


NAMES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}  # as torch calls them


def torch(
    source: Any,
    *,
    dtype: str | Dtype | None = None,
    device: str | Device | None = None,
    seed: int = 0,
    passes: str = "default",
) -> nn.Module:
    """`source` (whatever `load_source` takes, a module, or a graph) as a PyTorch module with its weights.

    `model(input_ids)` gives what the graph's only output is, [batch, seq, vocab] logits for a language model;
    ``cache = model.new_cache(batch, length)`` and `model(input_ids, cache=cache)` continue texts call by call. The
    module trains, pickles, and shows its source (`inspect.getsource`).

    Args:
        dtype: of the weights: "f32" (where None), "bf16" or "f16", or a dtype of torch.
        device: where they lie; the CPU if None.
        seed: of the random initialization, where there is no checkpoint.
        passes: pipeline text, or ``@path`` of a file that holds it; the default only simplifies.

    Raises:
        WeftError: on any bad input, and where PyTorch is not installed.
    """
    framework = pytorch()
    from weft.backends.torch.module import build_module

    place = find_target("torch")
    if dtype is None or isinstance(dtype, str):
        kind: Dtype = getattr(framework, NAMES[target_dtype(place, dtype)])
    else:
        kind = dtype
    model = load_source(source, seed=seed)
    verify(model.graph, recipes=True)
    pipeline = target_pipeline(model.graph, place, "f32", passes)
    return build_module(run_passes(model.graph, pipeline), dtype=kind, device="cpu" if device is None else device)
