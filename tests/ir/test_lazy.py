"""Names of a package that are imported on first use."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from weft.ir.lazy import lazy_names


def test_lazy_names_imports_from_the_modules_of_the_stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "lazy_example"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__init__.pyi").write_text(
        "import os\nfrom .numbers_of import TWO as TWO\nfrom .inner import deep as deep\n"
    )
    (package / "numbers_of.py").write_text("TWO = 2\n")
    (package / "inner" / "__init__.py").write_text("")
    (package / "inner" / "deep.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    get, names = lazy_names("lazy_example", str(package / "__init__.py"))
    assert names == ["TWO", "deep"]
    assert not {"lazy_example.numbers_of", "lazy_example.inner"} & {*sys.modules}
    assert get("TWO") == 2
    assert get("deep").__name__ == "lazy_example.inner.deep"  # a module, where the package does not have the name yet
    with pytest.raises(AttributeError, match="module 'lazy_example' has no attribute 'os'"):
        get("os")
    for name in [name for name in sys.modules if name.partition(".")[0] == "lazy_example"]:
        monkeypatch.delitem(sys.modules, name)
