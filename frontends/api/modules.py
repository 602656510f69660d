"""`weft.torch` and `weft.state_dict`: a source as an `nn.Module` of readable PyTorch, or its weights, without files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.backends.options import no_effect
from weft.backends.runtime.torch.folder import pytorch
from weft.backends.targets import TARGETS
from weft.ir.errors import WeftError
from weft.ir.graph.verifier import verify
from weft.passes import run_passes

from ..model import SourceLike
from .rewriting import pipeline_text
from .source.sources import load_source

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch import device as Device
    from torch import dtype as Dtype

    from weft.ir.graph import Graph


NAMES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}  # as torch calls them


def torch(
    source: SourceLike,
    *,
    dtype: str | Dtype | None = None,
    device: str | Device | None = None,
    seed: int | None = None,
    passes: str = "default",
    keep_blocks: str = "",
) -> nn.Module:
    """`source` (whatever `load_source` takes, a module, or a graph) as a PyTorch module with its weights.

    `model(input_ids)` gives what the graph's only output is, [batch, seq, vocab] logits for a language model;
    ``cache = model.new_cache(batch, length)`` and `model(input_ids, cache=cache)` continue texts call by call. The
    module trains, pickles, and shows its source (`inspect.getsource`).

    Args:
        dtype: of the weights: "f32" (where None), "bf16" or "f16", or a dtype of torch.
        device: where they lie; the CPU if None.
        seed: of the random initialization, for sources without a checkpoint; 0 if None.
        passes: pipeline text, or ``@path`` of a file that holds it; the default only simplifies.
        keep_blocks: ``head`` or ``all``: weights of the output head, or of every linear map, stay in the 4- or 8-bit
            blocks of the source, where it has them. Such weights are buffers, which training leaves as they are.

    Raises:
        WeftError: on any bad input, and where PyTorch is not installed.
    """
    kind = _dtype(dtype)
    from weft.backends.torch.package.module import build_module

    graph = _graph(source, seed, passes, keep_blocks)
    return build_module(graph, dtype=kind, device="cpu" if device is None else device)


def state_dict(
    source: SourceLike,
    *,
    dtype: str | Dtype | None = None,
    seed: int | None = None,
    passes: str = "default",
    keep_blocks: str = "",
) -> dict[str, Tensor]:
    """The weights of `source` under the names that the module `torch` makes of it has, on the CPU.

    So a module takes those of another checkpoint of its architecture, whatever that calls them:
    ``module.load_state_dict(weft.state_dict("folder/"))``. Arguments and errors as of `torch`.
    """
    kind = _dtype(dtype)
    from weft.backends.torch.lower.lower import lower
    from weft.backends.torch.package.module import tensor

    graph = _graph(source, seed, passes, keep_blocks)
    return {key: tensor(param, graph.reader, kind) for key, param in lower(graph).program.weights.items()}


def _dtype(dtype: str | Dtype | None) -> Dtype:
    """A dtype of torch."""
    framework = pytorch()
    if dtype is not None and not isinstance(dtype, str):
        if not dtype.is_floating_point:
            raise WeftError(
                f"dtype {dtype} is for whole numbers, which no weights are: torch.float32, torch.bfloat16, …"
            )
        return dtype
    torch_dtype: Dtype = getattr(framework, NAMES[TARGETS["torch"].dtype(dtype)])
    return torch_dtype


def _graph(source: SourceLike, seed: int | None, passes: str, keep_blocks: str) -> Graph:
    """The graph of `source` after the pipeline of the target, with the parameters that `source` declares."""
    from weft.backends.torch.program.quantized import widens_all

    target = TARGETS["torch"]
    options = target.choose({"keep_blocks": keep_blocks})
    model = load_source(source, seed=seed)
    model.notices()  # which refuse a part without which it computes something else
    verify(model.graph, recipes=True)
    graph = run_passes(model.graph, target.pipeline(model.graph, "f32", pipeline_text(passes), trains=True))
    options.mark(graph)
    if reason := widens_all(graph):
        raise no_effect(f"keep_blocks={keep_blocks!r}", reason)
    return graph
