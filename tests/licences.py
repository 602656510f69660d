"""Write docs/licences.md, the licences of all pinned packages, from their own metadata: `make licences`."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "licences.md"
# By the name of the column, files of requirements/.
SETS = {"demo": "demo", "tests": "test", "engines": "engines", "site": "docs"}
HEAD = """# Licences

weft is Apache-2.0 ([LICENSE](../LICENSE)). It copies no code of others. The one font that it ships for pictures, Inter,
is under the [SIL Open Font License](../backends/viz/layout/fonts/OFL.txt).

These are the packages that weft is run, tested and documented with, as pinned in [constraints.txt](../constraints.txt),
and the licence that each states. `make licences` writes this page. [pyproject.toml](../pyproject.toml) says what each
direct dependency is for.

"""
SPELLED = {  # words of classifiers and of free text that SPDX has a name for
    "3-clause bsd license": "BSD-3-Clause",
    "apache 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache license v2.0": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "apache-2": "Apache-2.0",
    "bsd license": "BSD",
    "bsd-3-clause license": "BSD-3-Clause",
    "isc": "ISC",
    "isc license": "ISC",
    "isc license (iscl)": "ISC",
    "mit": "MIT",
    "mit license": "MIT",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "new bsd": "BSD-3-Clause",
    "python software foundation license": "PSF-2.0",
}


def pins() -> dict[str, str]:
    """The pinned version of every package, by its canonical name."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    wanted = [Requirement(line) for line in lines if line and line[0] != "#"]
    return {canonicalize_name(w.name): next(iter(w.specifier)).version for w in wanted}


def members(name: str) -> set[str]:
    """The packages of one file of requirements/, canonical; PyTorch belongs to the tests without a hash."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8")
    found = {canonicalize_name(n) for n in re.findall(r"^([\w.-]+)==", text, re.MULTILINE)}
    return found | {"torch"} if name == "test" else found


def licence(name: str, version: str = "") -> str | None:
    """Return the licence of an installed package, as an SPDX expression if recognized; None if not installed, or in
    another `version`."""
    try:
        facts = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return None
    if version and facts["Version"].partition("+")[0] != version:
        return None
    classified = [c.rpartition(" :: ")[2] for c in facts.get_all("Classifier") or () if c.startswith("License :: ")]
    classified = [c for c in classified if c != "OSI Approved"]
    free = " ".join((facts.get("License") or "").split())
    short = free if len(free) <= 40 and free != "UNKNOWN" else ""  # some give the whole text
    said = facts.get("License-Expression") or short or " and ".join(classified)
    if not said and "Permission is hereby granted, free of charge" in (free or _text(name)):
        said = "MIT"
    return SPELLED.get(said.lower(), said)


def _text(name: str) -> str:
    """The licence itself, where a package ships it and says nothing else."""
    files = metadata.files(name) or ()
    texts = (file.read_text() for file in files if re.match(r"licen[cs]e", file.name, re.IGNORECASE))
    return " ".join(" ".join(texts).split())


def rows(text: str) -> dict[str, tuple[str, str]]:
    """The version and the licence of every package in the table of `text`."""
    found = re.findall(r"^\| ([\w.-]+) \| ([^|]+) \| ([^|]+) \|", text, re.MULTILINE)
    return {name: (version, said) for name, version, said in found if name != "package"}


def page(old: str = "") -> str:
    """The page; a package that is not installed in its pinned version keeps its row of `old`, if that has it."""
    known, sets = rows(old), {column: members(name) for column, name in SETS.items()}
    lines = [f"| package | version | licence | {' | '.join(sets)} |", f"|---|---|---|{'---|' * len(sets)}"]
    for name, version in sorted(pins().items()):
        said = licence(name, version)
        if said is None and known.get(name, ("", ""))[0] == version:
            said = known[name][1]
        marks = " | ".join("×" if name in members else "" for members in sets.values())
        lines.append(f"| {name} | {version} | {said or '?'} | {marks} |")
    return HEAD + "\n".join(lines) + "\n"


def main() -> None:
    """Write the page."""
    old = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    PAGE.write_text(page(old), encoding="utf-8")


if __name__ == "__main__":
    main()
