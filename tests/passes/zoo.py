"""The test zoo: tiny graphs with random weights to try every pass on.

`ZOO` makes them by name: ``family/…`` as imported from checkpoints of transformers, ``preset/…`` shrunk, ``variant/…``
of the language, ``packed/…`` and ``cached/…`` forms of some of them, ``quantized/…`` checkpoints, and each
``example/…`` of the documentation of a pass. A graph is made when it is asked for, and each time a copy. `TRIED` are
the names that tests of all graphs take.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from weft.frontends.dsl import MLA, Attention, CrossAttention, MoE, T5Bias
from weft.frontends.formats.gguf.load import load_gguf
from weft.frontends.formats.hf.folder import load_folder
from weft.frontends.models.presets import PRESETS
from weft.ir import Graph, parse
from weft.ir.recipes.readers import MemoryReader
from weft.passes import all_passes, run_passes

from ..e2e.families import VARIED, Row
from ..e2e.images import TOWERS
from ..e2e.random_models import strong
from ..e2e.seq2seq import VARIED as SEQ2SEQ_VARIED
from ..e2e.sounds import SOUNDS, SPEECH
from ..e2e.test_quantized_folders import in_fp8, in_mxfp4
from ..sampling import each
from .zoo_variants import LENGTH, VARIANTS

# Sizes of shrunk presets, by the names of fields: no two that could be mistaken for each other are equal.
SMALL = {
    "vocab": 37,
    "dim": 36,
    "hidden": 23,
    "context": LENGTH,
    "length": LENGTH,
    "window": 3,
    "original": 8,
    "head_dim": 10,
    "rank": 13,
    "rope_dim": 4,
    "v_head_dim": 7,
    "q_rank": 11,
    "inner": 21,
    "state": 5,
    "buckets": 8,
    "max_distance": 20,
    "capacity": 3,
}
_KEPT = tempfile.TemporaryDirectory(prefix="weft-zoo-")  # of quantized checkpoints, which are read when needed


def _family(row: Row) -> Graph:
    """As imported, its checkpoint in memory."""
    with tempfile.TemporaryDirectory() as folder:
        row.save(Path(folder))
        graph = load_folder(Path(folder))[1].graph
        files = sorted(Path(folder).glob("*.safetensors"))
        graph.reader = MemoryReader({key: array for file in files for key, array in load_file(file).items()})
    del graph.meta["source"]  # a path
    return graph


def _preset(name: str) -> Graph:
    return strong(shrunk(PRESETS[name].model()).graph(name=name))


def shrunk(module: Any) -> Any:
    """`module` with tiny sizes: at most three layers, of each kind that it has; multi-head attention stays multi-head,
    groups stay groups."""
    if isinstance(module, (list, tuple)):
        kinds = [layer for i, layer in enumerate(module) if i == 0 or layer != module[i - 1]]
        return [shrunk(layer) for layer in kinds[:3]]
    if not dataclasses.is_dataclass(module):
        return module
    given = {f.name: getattr(module, f.name) for f in dataclasses.fields(module) if f.init}
    small = {name: SMALL[name] if name in SMALL and value else shrunk(value) for name, value in given.items()}
    if isinstance(module, (Attention, CrossAttention)):
        kv_heads = {1: 1, module.heads: 3}.get(module.groups, 2)
        small.update(heads=kv_heads * min(3, module.heads // module.groups), kv_heads=kv_heads)
    elif isinstance(module, (MLA, T5Bias)):
        small.update(heads=3)
    elif isinstance(module, MoE):
        groups = min(2, module.router.groups)
        router = dataclasses.replace(module.router, groups=groups, top_groups=min(1, module.router.top_groups))
        small.update(experts=4 * groups, k=min(2, module.k), router=router)
    elif isinstance(given.get("layers"), int):
        small.update(layers=2)
    return type(module)(**small)


def _gguf() -> Graph:
    """A llama whose matrices are stored as Q8_0 and Q4_1 blocks."""
    path, rng = Path(_KEPT.name, "llama.gguf"), np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    for key, number in {
        "embedding_length": 64,
        "feed_forward_length": 96,
        "block_count": 2,
        "context_length": 64,
    }.items():
        writer.add_uint32(f"llama.{key}", number)
    writer.add_uint32("llama.attention.head_count", 4)
    writer.add_uint32("llama.attention.head_count_kv", 2)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-6)
    blocks = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
    blocks |= {"ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96), "attn_norm": (64,), "ffn_norm": (64,)}
    shapes = {"token_embd": (37, 64), "output_norm": (64,)}
    shapes |= {f"blk.{i}.{name}": shape for i in range(2) for name, shape in blocks.items()}
    for name, shape in shapes.items():
        array = rng.standard_normal(shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q8_0 if name == "token_embd" else gguf.GGMLQuantizationType.Q4_1
        stored = gguf.quants.quantize(array / math.sqrt(shape[-1]), kind) if len(shape) > 1 else 1 + 0.2 * array
        writer.add_tensor(f"{name}.weight", stored, raw_dtype=kind if len(shape) > 1 else None)
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    return load_gguf(path)[1].graph


def _mxfp4() -> Graph:
    return _loaded(in_mxfp4(Path(tempfile.mkdtemp(dir=_KEPT.name))))


def _fp8() -> Graph:
    return _loaded(in_fp8("qwen3-gqa", Path(tempfile.mkdtemp(dir=_KEPT.name)))[0])


def _loaded(folder: Path) -> Graph:
    graph = load_folder(folder)[1].graph
    del graph.meta["source"]
    return graph


def _examples() -> Iterator[tuple[str, str]]:
    """Passes by name, and their example graphs."""
    for name, kind in all_passes().items():
        if text := kind.documentation().graph:
            yield name, text


def _rewritten(pipeline: str, origin: str) -> Graph:
    return run_passes(ZOO[origin](), pipeline)


ROWS = VARIED | SEQ2SEQ_VARIED | TOWERS | SOUNDS | SPEECH
PACK = "pack-qkv, pack-gate-up, fuse-residual-norm"
MODELS: dict[str, Callable[[], Graph]] = {
    **{f"family/{name}": partial(_family, row) for name, row in ROWS.items()},
    **{f"preset/{name}": partial(_preset, name) for name in PRESETS},
    **{f"variant/{name}": lambda model=model: strong(model.graph()) for name, model in VARIANTS.items()},
    **{f"example/{name}": partial(parse, text) for name, text in _examples()},
    "quantized/gguf": _gguf,
    "quantized/mxfp4": _mxfp4,
    "quantized/fp8": _fp8,
}
PACKED = (
    *("family/llama-mha-biases", "family/qwen3-gqa", "family/gpt2-tied", "family/gemma2", "family/gpt-oss"),
    *("family/phi3", "family/falcon-gqa", "family/bert", "family/t5-v1.1"),
    *("preset/mixtral-8x7b", "variant/tied", "variant/grouped", "variant/layer norm", "variant/latent queries"),
    *("variant/no positions, biases", "variant/hybrid", "variant/repeated", "variant/encoder-decoder"),
    "quantized/gguf",
)
CACHED = (
    "family/llama-gqa-tied",
    "family/mistral-gqa",
    "preset/gpt2",
    "variant/latent",
    "variant/hybrid",
    "family/bart",
)


# Families with something that no other graph has.
ALONE = (
    *("gpt_neo", "modernbert", "esm", "fnet", "deberta-v2", "mistral4", "gemma3n", "apertus", "granite_swa", "phimoe"),
    *("t5gemma", "longt5", "vit", "dinov2-registers", "clip-vision"),
)


def _copies(make: Callable[[], Graph]) -> Callable[[], Graph]:
    """`make`, run once: after that copies of what it made."""
    once = functools.cache(make)
    return lambda: once().clone()


ZOO: dict[str, Callable[[], Graph]] = {
    name: _copies(make)
    for name, make in {
        **MODELS,
        **{f"packed/{name.replace('/', ' ')}": partial(_rewritten, PACK, name) for name in PACKED},
        **{f"cached/{name.replace('/', ' ')}": partial(_rewritten, f"{PACK}, kv-cache", name) for name in CACHED},
    }.items()
}
# What `make test` tries everything on: of the families those that stand alone, and a few others.
_FAMILIES = [name for name in ZOO if name.startswith("family/")]
_SOME = {*each(6, _FAMILIES), *(f"family/{name}" for name in ALONE)}
TRIED = [name for name in ZOO if name not in _FAMILIES or name in _SOME]
