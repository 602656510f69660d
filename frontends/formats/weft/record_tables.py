"""Tables of the statements in the record of a folder: sources with hashes, passes with checks, measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from weft.ir.storage.documents import Record

CARD = "README.md"
SHOWN = {"nll_loss": "ΔNLL {:+.4f}", "kl": "KL {:.3g}", "agreement": "agreement {:.2%}", "cosine": "cosine {:.4f}"}


class RecordTable(NamedTuple):
    """A table with a title."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def list_levels(record: Record) -> list[Record]:
    """Return `record` and the records of the model folders that it was made from, the earliest first."""
    levels = [record]
    while "provenance" in (source := levels[0].record("source", {})):
        levels.insert(0, source.record("provenance"))
    return levels


def build_tables(record: Record) -> list[RecordTable]:
    """Return the tables with rows of `record`, a weft.json or provenance.json; raise WeftError if it is malformed."""
    levels = list_levels(record)
    sources = [level.record("source", {}) for level in levels]
    facts = [(key, record.text(key)) for key in ("weft", "target", "dtype") if key in record]
    facts += [("pipeline", text) for level in levels if (text := level.text("pipeline", ""))]
    facts += [("seed", str(seed)) for s in sources if (seed := s.integer("seed", None)) is not None]
    facts += [("left out", part.text("name", "")) for level in levels for part in level.records("left_out", [])]
    facts += [("versions", " ".join(item)) for item in record.get("versions", dict[str, str], {}).items()]
    files = [(s, s.get("hashes", dict[str, str], {}).items() or [("", "no files")]) for s in sources]
    hashes = [(source.text("spec", ""), *item) for source, items in files for item in items]
    steps = [_describe_pass(step) for level in levels for step in level.records("passes", [])]
    names = [*(source.text("spec", "") for source in sources[1:]), ""]  # of the folders before this one
    measured = [
        _describe_measurement(entry, f" of {name}" if name else "")
        for level, name in zip(levels, names, strict=True)
        for entry in level.records("measurements", [])
    ]
    runs = [_describe_run(source.record("trained")) for source in sources if "trained" in source]
    tables = (
        RecordTable("Record", ("", ""), [*dict.fromkeys(facts)]),
        RecordTable("Sources", ("source", "file", "SHA-256"), hashes),
        RecordTable("Training", ("by", "texts", "amount", "result"), runs),
        RecordTable("Passes", ("pass", "effect", "rewrites", "check on small random inputs in float64"), steps),
        RecordTable("Measurements", ("measured", "text", "amount", "result"), measured),
    )
    return [table for table in tables if table.rows]


def _describe_pass(step: Record) -> tuple[str, ...]:
    checked, difference = step.get("checked", str | None) or "not checked", step.get("difference", float | None)
    rewrites = sum(step.get("rewrites", dict[str, int], {}).values())
    largest = "" if difference is None else f" Largest difference: {difference:.1e}."
    return step.text("pass"), step.text("effect"), str(rewrites), checked + largest


def _describe_run(run: Record) -> tuple[str, ...]:
    """Return the row of the record of a training run or a distillation."""
    settings, against = run.record("settings"), run.get("against", str | None, None)
    files = [(Path(text.text("path")).name, text.get("sha256", str | None)) for text in run.records("texts")]
    texts = [f"{name}, SHA-256 {digest or 'unknown'}" for name, digest in files]
    size = f"{settings.integer('batch')} windows of {settings.integer('context')} tokens"
    by = "weft train" if against is None else f"weft distil against {against}"
    measure = "loss" if against is None else "difference from the original"
    loss = f"{measure} on held-out text {run.get('loss', float):.5g}" if "loss" in run else ""
    return by, "; ".join(texts), f"{run.integer('steps'):,} steps of {size}, seed {settings.integer('seed')}", loss


def _describe_measurement(entry: Record, of: str) -> tuple[str, ...]:
    if entry.choice("kind", ("evaluation", "verification")) == "verification":
        error, tolerance, passed = entry.get("max_relative", float), entry.get("tolerance", float), entry.flag("passed")
        result = f"relative error {error:.2g}, tolerance {tolerance:.2g}: {'passed' if passed else 'FAILED'}"
        return f"verify{of}: {entry.text('reference')}", "", f"{entry.integer('positions')} positions", result
    scores = entry.get("scores", dict[str, float])
    result = ", ".join(form.format(scores[key]) for key, form in SHOWN.items() if key in scores)
    text = f"{Path(entry.text('text')).name}, SHA-256 {entry.text('sha256')}"
    amount = f"{entry.integer('tokens'):,} tokens in windows of {entry.integer('context')}"
    return f"eval{of}: against {entry.text('against')}", text, amount, result


def render_card(record: Mapping[str, Any]) -> str:
    """Return the model card of an exported folder with the provenance.json `record`, in Markdown."""
    title = Record(CARD, record).record("source").text("description", "Model")
    lines = ["---", "library_name: transformers", "tags:", "- weft", "---", "", f"# {title}", ""]
    lines.append("Written by weft. `weft certificate FOLDER` checks this page.")
    for table in build_tables(Record(CARD, record)):
        lines += ["", f"## {table.title}", ""]
        for row in (table.columns, ["---"] * len(table.columns), *table.rows):
            lines.append("| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in row) + " |")
    return "\n".join([*lines, ""])
