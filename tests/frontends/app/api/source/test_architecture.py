"""Whatever the code in an architecture file does, weft ends with one sentence and stays in its folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ....command import TINY, done, refused

BAD = {
    "exit()": "x.py:1: it calls exit(), but must define a model",
    "import sys; sys.exit(0)": "x.py:1: it calls exit(), but must define a model",
    "raise BaseException('hello')": "x.py:1: BaseException: hello",
    "raise GeneratorExit": "x.py:1: GeneratorExit",
    "raise MemoryError('x' * 9000)": "x.py:1: MemoryError: xxx",
    "class E(Exception):\n    def __str__(self): raise ValueError\nraise E()": "x.py:3: E: (its text cannot be made: ",
    "class M:\n    def __getattr__(self, name): raise RuntimeError(name)\nmodel = M()": "x.py:2: RuntimeError: graph",
    "class M:\n    def graph(self, seed, name): return 5\nmodel = M()": "x.py: AttributeError: ",
    "import sys; sys.path.clear(); 1/0": "x.py:1: ZeroDivisionError: ",
    "import sys; del sys.modules[__name__]; 1/0": "x.py:1: ZeroDivisionError: ",
    "x = (": "x.py:1: SyntaxError: ",
    "\x00": "x.py: ",
}


@pytest.mark.parametrize("code", BAD)
def test_failing_architecture_files_are_one_error_line(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.py").write_text(code)
    known = list(sys.path)
    assert refused("inspect", "x.py").startswith(f"weft: error: {BAD[code]}")
    assert set(known) <= set(sys.path)


def test_working_folder_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    Path("x.py").write_text(f"import os\nos.chdir({str(elsewhere)!r})\n{TINY}")
    done("opt", "x.py", "-o", "out.weft")
    assert Path("out.weft").is_file() and os.getcwd() == str(tmp_path) and not any(elsewhere.iterdir())
