"""Facts of the config classes of transformers on keys, as frontends/models/config_keys.json records it.

``python -m tests.frontends.models.config_facts`` writes the file anew, from the installed transformers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

from weft.frontends.models import config_keys
from weft.frontends.models.config_keys import FACTS, RecordingConfig, explain, iter_leaves
from weft.frontends.models.families import FAMILIES
from weft.frontends.models.tables.family import Table
from weft.ir import WeftError


def facts(model_type: str) -> dict[str, Any]:
    """The facts of one model type; empty for one that transformers has not."""
    if model_type not in CONFIG_MAPPING:
        return {}
    kind = CONFIG_MAPPING[model_type]
    fields = {field.name for field in dataclasses.fields(kind)}
    # Fields are assigned before further keys, each under the name that attribute_map gives it.
    overrides = dict((kept, key) if key in fields else (key, kept) for key, kept in kind.attribute_map.items())
    ordered = [key for key, kept in overrides.items() if fields.isdisjoint((key, kept))]
    defaults = json.loads(kind().to_json_string(use_diff=False))
    recorded = RecordingConfig(defaults)
    with contextlib.suppress(WeftError):  # of a class whose defaults no table takes
        Table.read(FAMILIES[model_type], recorded, frozenset(), model_type)
    found = iter_leaves(defaults, recorded.read)
    unread = {key: value for key, value in found if key not in recorded.read and not explain(key, defaults)}
    skipped = ("rope_parameters", *overrides)
    found = {
        "overrides": dict(sorted(overrides.items())),
        "ordered": sorted(ordered),
        "rope": rope_form(kind),
        "original": "original_max_position_embeddings" in fields,
        "defaults": {key: unread[key] for key in sorted(unread) if key not in skipped and unread[key] is not None},
    }
    return {name: value for name, value in found.items() if value}


def rope_form(kind: Any) -> str:
    """Return what the config class `kind` does with rope_scaling; "" if it has no rotary settings."""
    if not hasattr(kind(), "rope_parameters"):
        return ""
    scaling = {"rope_type": "default", "rope_theta": 77.0}
    if "full_attention" in (rope := kind(rope_scaling=dict(scaling)).rope_parameters):
        return " ".join(name for name in rope if rope[name]["rope_theta"] == 77.0)
    return (
        "replaces"
        if kind(rope_parameters=dict(scaling), rope_scaling=None).rope_parameters
        else "replaces even if empty"
    )


def main() -> None:
    """Write the file: a line per model type."""
    lines = [f"{json.dumps(name)}: {json.dumps(facts(name))}" for name in sorted(FAMILIES)]
    path = Path(config_keys.__file__).parent / FACTS
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
