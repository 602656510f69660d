"""The text of modeling_*.py: classes of layers, a base model, and heads, behind the functions that they use."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from ...torch.codegen.docstrings import model_doc
from ...torch.codegen.source import formatted
from ...torch.codegen.structure import Method, structure
from ...torch.program import snippets
from ...torch.program.snippets import Snippet, imports, library, names, used_snippets
from .. import snippets as own_snippets
from ..lower.lower import Lowered
from .classes import ShellWriter, read_config
from .initial import experts_lines, initial_lines, initializer_range
from .stack import Stack, attends, cache_count, stack_of

IMPORTS = snippets.IMPORTS | {
    **dict.fromkeys(
        ("AutoModel", "Cache", "DynamicCache", "GenerationMixin", "PreTrainedModel"),
        "from transformers import AutoModel, Cache, DynamicCache, GenerationMixin, PreTrainedModel",
    ),
    "dataclass": "from dataclasses import dataclass",
    "init": "from transformers import initialization as init",
    **{
        name: f"from transformers.masking_utils import {name}"
        for name in (
            "create_causal_mask",
            "create_sliding_window_causal_mask",
            "create_chunked_causal_mask",
            "create_recurrent_attention_mask",
            "create_bidirectional_mask",
            "find_first_full_attention_index",
        )
    },
    "GradientCheckpointingLayer": "from transformers.modeling_layers import GradientCheckpointingLayer",
    "GenericForSequenceClassification": "from transformers.modeling_layers import GenericForSequenceClassification",
    **{
        name: f"from transformers.modeling_outputs import {name}"
        for name in (
            "BaseModelOutput",
            "BaseModelOutputWithPast",
            "CausalLMOutputWithPast",
            "BaseModelOutputWithPooling",
            "MoeCausalLMOutputWithPast",
        )
    },
    "ALL_ATTENTION_FUNCTIONS": "from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS",
    "use_experts_implementation": "from transformers.integrations import use_experts_implementation",
    "can_return_tuple": "from transformers.utils import can_return_tuple",
    "merge_with_config_defaults": "from transformers.utils.generic import merge_with_config_defaults",
    "capture_outputs": "from transformers.utils.output_capturing import OutputRecorder, capture_outputs",
    "OutputRecorder": "from transformers.utils.output_capturing import OutputRecorder, capture_outputs",
}


@dataclass
class Modeling:
    """A generated file: its `text`; the `stack` of layers with the class of each; the classes that attend."""

    text: str
    stack: Stack | None
    blocks: list[str]
    methods: dict[str, Method]
    base: Method
    count_field: str


def write_modeling(lowered: Lowered, name: str, stem: str) -> Modeling:
    """The Python source of the model called `name`, whose file ends in `stem`."""
    e, program = lowered.emitter, lowered.base
    top = structure(program)
    stack = None if e.shared else stack_of(top, e)  # the number of layers that share weights is fixed
    config = f"{name}Config"
    plain = "BaseModelOutputWithPast" if e.cached else "BaseModelOutput"
    plain = "BaseModelOutputWithPooling" if "pooler_output" in program.outputs else plain
    losses = "aux_loss" in program.outputs
    returned = f"{name}Output" if losses else plain
    writer = ShellWriter(program, e, f"{name}Model", config, returned, stack)
    alone = stack is None or cache_count(top, e) in (0, len([c for c in stack.calls if cache_count(c.callee, e)]))
    writer.count_field = "num_hidden_layers" if alone and (stack is None or stack.caches == 1) else "num_blocks"
    writer.write(top)
    blocks = [writer.names[c.callee.key] for c in stack.calls] if stack else []
    head = _head(lowered, config)
    *classes, base = list(writer.classes.values())
    weights = lowered.base.weights
    usual = initializer_range(weights)
    inner = {k: m for k, m in writer.methods.items() if m is not top}
    given: dict[str, Any] = {
        "stem": stem,
        "config": config,
        "name": name,
        "classes": classes,
        "blocks": set(blocks),
        "indexed": {k for k, m in inner.items() if not e.shared and (writer.indexed(m) or writer.listed(m.path))},
        "taking": {k for k, m in inner.items() if writer.takes(m)},
        "table": sorted(set(blocks)) if len(set(blocks)) > 1 else [],
        "facts": _facts(lowered, writer, blocks, inner),
        "initial": [
            *initial_lines({**inner, f"{name}Model": top}, weights, usual),
            *experts_lines(e.experts, weights, usual),
        ],
        "constants": base.constants,
        "base": base,
        "returned": returned,
        "plain": plain,
        "losses": losses,
        "takes_embeds": bool(e.embedding),
        "head": head,
        "tied": {k: f"model.{v}" for k, v in lowered.tied.items()},
        "own_masks": bool(lowered.masks),
    }
    for c in classes:
        members = {m[1] for line in c.init if (m := re.match(r"self\.(\w+)", line))}
        read_config(c.lines, c.init, members)
    read_config(base.lines, base.init, None)
    own = [*program.functions.values(), *([lowered.masks] if lowered.masks else [])]
    page, known = template("modeling.py.j2"), _library()
    used = names(ast.parse(page.render(about=[], imports=[], parts=own, **given)))
    parts = used_snippets(used, known)
    used = used.union({"torch"}, *(p.uses for p in parts))
    about = [
        f"{model_doc(lowered.graph, program, False)[0]}",
        "",
        "Generated by weft; needs only torch and transformers.",
    ]
    text = page.render(
        about=about, imports=imports(used, table=IMPORTS), parts=[*(p.source for p in parts), *own], **given
    )
    return Modeling(formatted(text), stack, blocks, writer.methods, top, writer.count_field)


def _head(lowered: Lowered, config: str) -> dict[str, list[str]] | None:
    """The lines that make a head's modules, and those that make logits of hidden states."""
    if lowered.head is None:
        return None
    method = structure(lowered.head)
    writer = ShellWriter(lowered.head, lowered.emitter, "Head", config, "", None)
    writer.keeps_any = False
    name = writer.write(method)
    made = writer.classes[name]
    read_config(lines := [*made.lines], made.init, None)
    lines[-1] = lines[-1].replace("return ", "logits = ", 1)
    return {"init": made.init, "lines": [line for line in lines if line != "logits = logits"]}


def _facts(lowered: Lowered, writer: ShellWriter, blocks: list[str], inner: Mapping[str, Method]) -> list[str]:
    """The attributes by which transformers knows what a model can do."""
    e = lowered.emitter
    features = set().union(*(told.features for told in e.attending.values()))
    plain = not features & {"softcap", "s_aux"}
    recorded = [f'"hidden_states": {_recorders(sorted(set(blocks)), 0)}'] if blocks else []
    attending = {}
    for name, method in inner.items():
        for statement, _ in attends(method, e):
            if len(statement.results) == 2 and statement.results[1] in method.outputs:
                attending[name] = method.outputs.index(statement.results[1])
    if attending:
        entries = [f"OutputRecorder({n}, index={i})" for n, i in attending.items()]
        recorded.append(f'"attentions": {entries[0] if len(entries) == 1 else "[" + ", ".join(entries) + "]"}')
    lines = ["supports_gradient_checkpointing = True"] if blocks else []
    if blocks:
        lines.append(f"_no_split_modules = {sorted(set(blocks))!r}".replace("'", '"'))
    if e.cached:
        lines.append('_skip_keys_device_placement = ["past_key_values"]')
    if e.attending:
        able = {
            "_supports_flash_attn": not features & {"s_aux", "position_bias"},
            "_supports_sdpa": plain,
            "_supports_flex_attn": "position_bias" not in features,
            "_supports_attention_backend": True,
        }
        for value in (True, False):
            names = [name for name, has in able.items() if has is value]
            lines += [f"{' = '.join(names)} = {value}"] if names else []
    if e.cached:
        lines.append("_can_compile_fullgraph = True")
    if e.recurrent:
        lines.append("_is_stateful = True")
    if e.embedding and e.embedding != "embed_tokens":
        lines.append(f'_input_embed_layer = "{e.embedding}"')
    if recorded:
        lines.append(f"_can_record_outputs = {{{', '.join(recorded)}}}")
    return lines


def _recorders(names: list[str], index: int) -> str:
    if len(names) == 1:
        return names[0]
    return "[" + ", ".join(f"OutputRecorder({name}, index={index})" for name in names) + "]"


def _library() -> dict[str, Snippet]:
    """The parts of all models, and those of models for transformers."""
    return {name: part for name, part in library().items() if name not in IMPORTS} | library(own_snippets.__name__)


@functools.cache
def template(name: str) -> jinja2.Template:
    """One of the templates in this folder."""
    folder = Path(__file__).parent / "templates"
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder), trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template(name)
