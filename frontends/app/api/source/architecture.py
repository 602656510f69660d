"""Architecture files: Python of the user, run for the models that it defines.

Whatever that code does, weft must end with one sentence, and go on in the folder where it was started: code may call
exit(), change the working folder, or raise what cannot even be told.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from weft.ir.errors import WeftError
from weft.ir.storage.documents import read_bytes, told


def run_file(path: Path) -> dict[str, Any]:
    """Return the names that the architecture file at `path` defines; it may import files beside it.

    Raises:
        WeftError: if there is no such file, or its code fails: with the line.
    """
    if not path.is_file():
        raise WeftError(f"{path}: no such architecture file")
    name = f"weft_source_{path.stem}"
    module = importlib.util.module_from_spec(ModuleSpec(name, None, origin=str(path)))
    module.__file__ = str(path)
    source, beside = read_bytes(path), str(path.parent.resolve())
    sys.modules[name] = module  # dataclasses look their module up
    sys.path.insert(0, beside)
    try:
        with running(path):
            exec(compile(source, path, "exec"), vars(module))
    except BaseException:
        sys.modules.pop(name, None)
        raise
    finally:
        with contextlib.suppress(ValueError):  # the code may have changed it
            sys.path.remove(beside)
    return vars(module)


@contextlib.contextmanager
def running(path: Path) -> Iterator[None]:
    """Run code of the architecture file at `path` inside the block: behind it, relative paths mean the same as before,
    and modules are found where they were.

    Raises:
        WeftError: for whatever the code raises, with the line; interrupts pass.
    """
    known, before = list(sys.path), os.open(".", getattr(os, "O_PATH", os.O_RDONLY))
    try:
        yield
    except KeyboardInterrupt:
        raise
    except SystemExit as e:
        if type(e) is not SystemExit:  # of a signal, not of the code
            raise
        raise WeftError(f"{path}{_line_in(path, e)}: it calls exit(), but must define a model") from e
    except BaseException as e:
        kind = "" if isinstance(e, WeftError) else f"{type(e).__name__}: "
        raise WeftError(f"{path}{_line_in(path, e)}: {kind}{told(e)}") from e
    finally:
        sys.path += [place for place in known if place not in sys.path]
        os.fchdir(before)
        os.close(before)


def _line_in(path: Path, error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f":{error.lineno}" if error.lineno else ""
    lines, at = [], error.__traceback__
    while at is not None:
        if os.path.abspath(at.tb_frame.f_code.co_filename) == os.path.abspath(path):
            lines.append(at.tb_lineno)
        at = at.tb_next
    return f":{lines[-1]}" if lines else ""
