"""Architecture files: Python code of the user, run for the models that it defines.

Whatever that code does, weft must end with a one-sentence error and continue in its working folder: the code may call
exit(), change the working folder, or raise an exception that cannot even be printed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from weft.ir.errors import WeftError
from weft.ir.storage.documents import format_error, read_bytes


def run_file(path: Path, code: bytes | None = None) -> dict[str, Any]:
    """Run the architecture file at `path`, or `code` in its place, and return the names that it defines. It may import
    files next to it.

    Raise WeftError if there is no such file, or its code fails (with the line).
    """
    if not path.is_file():
        raise WeftError(f"{path}: no such architecture file")
    name = f"weft_source_{path.stem}"
    module = importlib.util.module_from_spec(ModuleSpec(name, None, origin=str(path)))
    module.__file__ = str(path)
    source, folder = read_bytes(path) if code is None else code, str(path.parent.resolve())
    sys.modules[name] = module  # dataclasses look their module up
    sys.path.insert(0, folder)
    try:
        with guard_user_code(path):
            exec(compile(source, path, "exec"), vars(module))
    except BaseException:
        sys.modules.pop(name, None)
        raise
    finally:
        with contextlib.suppress(ValueError):  # the code may have changed it
            sys.path.remove(folder)
    return vars(module)


@contextlib.contextmanager
def guard_user_code(path: Path) -> Iterator[None]:
    """Run the block, which executes the architecture file at `path`; then restore working folder and import path.

    Raise WeftError, with the line, for any exception of the code except interrupts and exits by a signal handler.
    """
    import_path, working_folder = list(sys.path), os.open(".", getattr(os, "O_PATH", os.O_RDONLY))
    try:
        yield
    except KeyboardInterrupt:
        raise
    except SystemExit as e:
        if type(e) is not SystemExit:  # raised by a signal handler, not by the code
            raise
        raise WeftError(f"{path}{_find_line(path, e)}: it calls exit(), but must define a model") from e
    except BaseException as e:
        kind = "" if isinstance(e, WeftError) else f"{type(e).__name__}: "
        raise WeftError(f"{path}{_find_line(path, e)}: {kind}{format_error(e)}") from e
    finally:
        sys.path += [entry for entry in import_path if entry not in sys.path]
        os.fchdir(working_folder)
        os.close(working_folder)


def _find_line(path: Path, error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f":{error.lineno}" if error.lineno else ""
    places = [(f.f_code.co_filename, line) for f, line in traceback.walk_tb(error.__traceback__)]
    if (site := getattr(error, "site", None)) is not None:  # where the module that fails was created
        places.append(site)
    lines = [line for file, line in places if os.path.abspath(file) == os.path.abspath(path)]
    return f":{lines[-1]}" if lines else ""
