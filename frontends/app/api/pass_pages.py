"""Pages that document the passes: one per pass, from its docstring and its example, which is executed."""

from __future__ import annotations

import typing
from pathlib import Path

from weft.ir.recipes.spelling import spell
from weft.ir.text.parser import parse
from weft.passes import Pass, all_passes, run_passes
from weft.passes.core.base import Purpose

INDEX = "README.md"
PROMISES = {
    "exact": "the same outputs",
    "conditional": "the same outputs, under its condition",
    "lossy": "nearly the same outputs; `weft eval` measures the loss",
    "changing": "other outputs, on purpose",
}


def group_by_purpose() -> dict[str, list[str]]:
    """Return the names of passes in alphabetical order, keyed by purpose; purposes without passes are left out."""
    groups: dict[str, list[str]] = {purpose: [] for purpose in typing.get_args(Purpose)}
    for name, cls in all_passes().items():
        groups[cls.purpose].append(name)
    return {purpose: names for purpose, names in groups.items() if names}


def format_signature(pass_type: type[Pass]) -> str:
    """Return the arguments of a pass with their defaults, in the syntax of pipelines."""
    arguments = pass_type.arguments()
    return ", ".join(a.name if a.required else f"{a.name}={spell(a.default)}" for a in arguments)


def write_pages(folder: Path) -> int:
    """Write the page of each pass and an index into `folder`; return the number of files; raise as `render_page`."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = {f"{name}.md": render_page(pass_type) for name, pass_type in all_passes().items()} | {INDEX: render_index()}
    for name, text in pages.items():
        (folder / name).write_text(text, encoding="utf-8")
    return len(pages)


def render_page(pass_type: type[Pass]) -> str:
    """Return the page of one pass, in Markdown; raise WeftError if its example contradicts its effect."""
    parts = pass_type.documentation()
    before = str(parse(parts.graph, f"the example of {pass_type.name}"))
    after = str(run_passes(parse(parts.graph), parts.pipeline, verify=True))
    sections = [
        f"# {pass_type.name}",
        parts.summary,
        f"**{pass_type.effect.capitalize()}**: {PROMISES[pass_type.effect]}. "
        f"`--verify` shows: {_end_sentence(pass_type.describe_check())}",
        parts.text,
        parts.condition and f"**Condition**: {_end_sentence(parts.condition)}",
        pass_type.tradeoff and f"**Trade-off**: {_end_sentence(pass_type.tradeoff)}",
        parts.source and f"**Source**: {_end_sentence(parts.source)}",
        pass_type.see and f"**See also**: {', '.join(f'[{name}]({name}.md)' for name in pass_type.see)}",
        _render_arguments(pass_type),
        f"## Example\n\n`{parts.pipeline}` rewrites",
        f"```weft\n{before}```",
        "into:",
        f"```weft\n{after}```",
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def render_index() -> str:
    """Return the page that lists all passes by purpose, in Markdown."""
    sections = [
        "# Passes",
        "Every rewrite that weft knows. [How to use them, and how to write one](../passes.md); these pages are made by "
        "`weft passes --write-docs docs/passes` from the docstrings, and their examples are run by a test.",
    ]
    passes = all_passes()
    for purpose, names in group_by_purpose().items():
        rows = [f"| [{n}]({n}.md) | {passes[n].effect} | {_escape(passes[n].documentation().summary)} |" for n in names]
        sections.append("\n".join([f"## {purpose}\n", "| pass | effect | what it does |", "|---|---|---|", *rows]))
    return "\n\n".join(sections) + "\n"


def _render_arguments(pass_type: type[Pass]) -> str:
    """Return the section with the table of a pass's arguments, in Markdown; "" without arguments."""
    rows = [
        f"| `{a.name}` | {_escape(a.type_text)} | {'must be given' if a.required else f'`{spell(a.default)}`'} |"
        for a in pass_type.arguments()
    ]
    return "\n".join(["## Arguments\n", "| name | type | default |", "|---|---|---|", *rows]) if rows else ""


def _escape(text: str) -> str:
    return text.replace("|", "&#124;")


def _end_sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?", ")")) else f"{text}."
