"""Parts of a source (tensors, config keys, files) that its graph leaves out, each with a name and a detail.

Every part of a source is used, or has no effect on the outputs, or is left out. Parts left out are reported when the
source is read, recorded in weft.json and listed by `weft inspect`. If such a part changes the outputs in the source's
own library, nothing is compiled or exported until ``--without NAME`` accepts that.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.ir.errors import WeftError
from weft.ir.storage.documents import Record

from .config_keys import Unread


@dataclass(frozen=True)
class LeftOut:
    """A part of a source that its graph leaves out.

    kind: tensors, key, file, head, projector, vision tower or audio tower. name: name in messages and ``--without``.
    detail: its value, contents or reason. changes: the source's own library computes other outputs with this part.
    """

    kind: str
    name: str
    detail: str = ""
    changes: bool = False

    def __str__(self) -> str:
        return f"{self.kind} {self.name}" + (f" ({self.detail})" if self.detail else "")

    @classmethod
    def read(cls, entry: Record) -> LeftOut:
        """Return the part that `entry`, of left_out in a manifest, describes; the inverse of `record`."""
        return cls(entry.text("kind"), entry.text("name"), entry.text("detail", ""), entry.flag("changes", False))

    def record(self) -> dict[str, Any]:
        """Return the entry of left_out in a manifest that describes this part."""
        return {"kind": self.kind, "name": self.name, "detail": self.detail, "changes": self.changes}


# Checkpoint tensors that a table knows and no graph reads, by the reason.
_REASONS = {
    "of the other encoder of a pair": r"(vision|text)_model\..*|(visual|text)_projection\..*|logit_(scale|bias)",
    "a buffer that the graph computes": r".*(inv_freq|position_ids|masked_bias|attn\.bias|attention\.bias|rot_embd"
    r"|rope_f\w+\.weight|\.version)",
    "of further layers, which predict several tokens ahead": r".*(mtp|nextn|layers\.\d+)\..*|blk\..*",
    "a copy of the embedding": r".*(lm_head|embed_out|output_projection|proj_out|(^|\.)head|embed_tokens)\.weight",
    "of training": r".*(mask_token|masked_spec_embed|quantizer\.|project_q\.|project_hid\.|generator_|discriminator).*",
}


def explain_tensor(key: str) -> str:
    """Return the reason why no graph reads the tensor `key`, which matches a pattern of its table's `unused`."""
    return next((reason for reason, names in _REASONS.items() if re.fullmatch(names, key)), "of another head")


def find_unread_modules(unread: Sequence[str], read: Collection[str]) -> Iterator[LeftOut]:
    """Yield a part for each tensor in `unread`: the outermost module around it without tensors in `read`, else itself.
    Equal parts are one part, and so are parts that differ only in the layer number, called with {i}."""
    parents = {key[:end] for key in read for end in _find_dots(key)}
    modules: dict[str, list[str]] = {}
    for key in unread:
        module = next((key[:end] for end in _find_dots(key) if key[:end] not in parents), key)
        modules.setdefault(re.sub(r"(?<=\.)\d+(?=\.|$)", "{i}", module), []).append(key)
    for module, keys in modules.items():
        yield LeftOut("tensors", module, "" if keys == [module] else summarize(keys))


def summarize(keys: Sequence[str], most: int = 2) -> str:
    """Return the first `most` of `keys`, and the number of the remaining ones, as in "a, b and 3 more"."""
    return ", ".join(keys[:most]) + (f" and {len(keys) - most} more" if len(keys) > most else "")


def find_unread_settings(unread: Iterable[Unread]) -> Iterator[LeftOut]:
    """Yield a part for each config key in `unread`."""
    for key in unread:
        reason = f", overridden by {key.override}" if key.override else ""
        yield LeftOut("key", key.path, f"{key.value!r:.60}{reason}")


def find_unread_entries(contents: Mapping[str, Any], known_keys: Collection[str], file: str) -> Iterator[LeftOut]:
    """Yield a part for each key of `contents`, of the file named `file`, that is not null and not in `known_keys`."""
    for key, value in contents.items():
        if value is not None and key not in known_keys:
            yield LeftOut("key", f"{file}:{key}", f"{value!r:.60}")


def check_accepted(source: str, parts: Sequence[LeftOut], without: Collection[str]) -> list[LeftOut]:
    """Check that `without` names all `parts` of `source` that change outputs; return the parts that it does not name.

    Raises:
        WeftError: naming a part that changes outputs and is not in `without`, or a name in `without` that no part has.
    """
    names = {part.name for part in parts}
    for name in without:
        if name not in names:
            names_left_out = ", ".join(sorted(names)) or "nothing"
            raise WeftError(f"{source} has no part {name!r} to leave out; parts left out: {names_left_out}")
    for part in parts:
        if part.changes and part.name not in without:
            raise WeftError(
                f"{source}: leaving out {part} would change the model's outputs; accept it by --without {part.name}"
            )
    return [part for part in parts if part.name not in without]


def _find_dots(key: str) -> list[int]:
    return [match.start() for match in re.finditer(r"\.", key)]
