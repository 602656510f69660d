"""Every block of the README and of docs/ is run. A page is one session in one folder, from top to bottom.

``python`` blocks share a namespace; one that begins with the comment ``# name.py`` is that file. ``sh`` blocks run in a
shell. A ``text`` block is what the block before it prints, where … stands for anything within a line, and for any lines
on a line of its own; a ``mermaid`` block too. On a page that runs nothing they are drawings. Behind the language, where
readers of the page do not see it, may stand:

- ``exit=2``: the status the shell block ends with; ``raises``: the python block ends with an exception, shown by its
  last line
- ``cold``: the shell block runs the programs themselves, where others ask a process that has imported everything
- ``torch``: the block needs PyTorch or transformers; what is not marked runs without them, too
- ``from=path``: an excerpt of that file of the repository, not run
- ``setup``: installing and making, not run; its make targets and files must exist
- ``elsewhere``: commands of other tools on machines that tests do not have, not run; the page says so

The pages in `LONG` are run by `make test-engines`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from . import pages
from .sampling import ALL

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted(ROOT.glob("docs/*.md"))]
INDEX = ROOT / "docs" / "README.md"  # its python block makes tiny-llama/
LONG = (
    *("README", "adapters", "bisect", "certificate", "compile", "deploy", "export", "families", "research", "run"),
    *(
        "scale",
        "serve",
        "surgery",
        "torch",
        "trace",
        "training",
        "transformers",
        "verify",
        "viz",
        "viz-diff",
        "viz-live",
        "viz-panels",
    ),
    "web",
)
QUICKEST = INDEX.with_name("ir.md")
WITH_PYTORCH = {"adapters.md", "scale.md", "surgery.md", "torch.md", "training.md", "transformers.md"}
LINK = re.compile(r"""(?:\]\(|src(?:set)?=")([^)"#:]+)(?:#[^)]*)?[)"]""")


@pytest.fixture(scope="session")
def tiny_llama(warm: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the index page makes."""
    folder = tmp_path_factory.mktemp("index")
    _run(INDEX, folder, warm)
    return folder / "tiny-llama"


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.long] * (page.stem in LONG)) for page in PAGES],
    ids=[page.relative_to(ROOT).as_posix() for page in PAGES],
)
def test_every_code_block_gives_the_printed_result(
    page: Path,
    tiny_llama: Path,
    warm: dict[str, str],
    tmp_path: Path,
    smollm2_gguf: Path,
    minilm_folder: Path,
) -> None:
    if page == INDEX:
        return  # run by the fixture
    check_page(page, tmp_path, smollm2_gguf, minilm_folder, tiny_llama, warm)


@pytest.mark.parametrize(
    "page",
    [p for p in PAGES if p not in (INDEX, QUICKEST) and ALL and p.name not in WITH_PYTORCH] + [QUICKEST],
    ids=lambda page: page.name,
)
def test_unmarked_blocks_run_without_pytorch(
    page: Path, warm: dict[str, str], tmp_path: Path, smollm2_gguf: Path, minilm_folder: Path, tiny_llama: Path
) -> None:
    blocked = os.pathsep.join(filter(None, (str(Path(__file__).parent / "without_torch"), warm.get("PYTHONPATH"))))
    environment = {**warm, "PYTHONPATH": blocked}
    check_page(page, tmp_path, smollm2_gguf, minilm_folder, tiny_llama, environment, "without-torch")


def test_page_links_exist() -> None:
    for page in PAGES:
        for target in LINK.findall(page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_index_names_every_page() -> None:
    text = INDEX.read_text(encoding="utf-8")
    missing = [page.name for page in PAGES if page.parent == INDEX.parent and page != INDEX and page.name not in text]
    assert not missing


@pytest.mark.parametrize("page", [README, INDEX.with_name("compile.md")], ids=lambda page: page.name)
def test_tables_name_every_target(page: Path) -> None:
    from weft.backends.target import TARGETS

    rows = re.findall(r"^\| `([\w-]+)` \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert {*TARGETS} <= {*rows}


def check_page(
    page: Path, folder: Path, gguf: Path, minilm: Path, tiny_llama: Path, environment: dict[str, str], *more: str
) -> None:
    """Run `page` in `folder`, with the files that pages name."""
    (folder / "model.gguf").symlink_to(gguf)
    (folder / "minilm").symlink_to(minilm)
    shutil.copytree(tiny_llama, folder / "tiny-llama")
    for example in ("local_global.py", "tiny_translator.py"):
        shutil.copy(ROOT / "examples" / example, folder)
    for name in ("texts", "deploy"):
        (folder / name).symlink_to(ROOT / "examples" / name)
    _run(page, folder, environment, *more)
    shutil.rmtree(folder)  # hundreds of MB; where the page fails they stay


def _run(page: Path, folder: Path, environment: dict[str, str], *more: str) -> None:
    """The page in a process of its own: what it registers stays there."""
    python = str(shutil.which("python", path=environment["PATH"]))
    done = subprocess.run(
        [python, pages.__file__, str(page), *more], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"\n{done.stdout}{done.stderr}"
