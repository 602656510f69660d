"""Tools that take folders of target transformers.

`make test-engines` runs all of these tests, `make test` none of them. `make test-all` leaves out extra/, which needs
more packages, and long/, which takes minutes.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

# An argument would not do: pytest drops the folder that lies in another one that it is given.
collect_ignore = [] if os.environ.get("WEFT_ENGINES") == "all" else ["extra", "long"]


@pytest.fixture(autouse=True)
def _own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let transformers copy the code of folders into a folder of the test.

    The package of these copies stays in memory with the path that it had first, so it is dropped. Warnings of tools
    about themselves are no errors.
    """
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    # Without the folder of tests that load such code elsewhere: it would be found first.
    monkeypatch.setattr(sys, "path", [p for p in sys.path if not Path(p, "transformers_modules").is_dir()])
    _forget()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    _forget()


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        del sys.modules[name]
