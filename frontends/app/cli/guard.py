"""Exit status of every command, and one line if something went wrong.

0: done. 1: `weft verify` found a difference. 2: bad input, or something the system refused. 130, 143: interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from types import FrameType
from typing import Any

import click

from weft.ir.errors import WeftError

from .applying import check_options
from .shown import echo, note

BAD, INTERRUPTED, PIPE_CLOSED = 2, 130, 141
LONGEST = 1400  # characters of a message


class Terminated(SystemExit):
    """A signal ends the process; a type of its own, so that nothing takes it for the exit() of somebody's code."""


class Root(click.Group):
    """The top command: lists its commands by group, in the order they were added, and turns every end into an exit
    status."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.groups: dict[str, list[click.Command]] = {}

    def add_to(self, group: str, command: click.Command) -> None:
        """Add `command`, which the help lists under `group`; its options take numbers within reason, and are checked
        against each other."""
        for option in command.params:
            option.callback = option.callback or _bounded
        if command.callback is not None:
            command.callback = _checked(command.callback)
        self.add_command(command)
        self.groups.setdefault(group, []).append(command)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(len(name) for name in self.commands)
        limit = formatter.width - 6 - width
        for group, commands in self.groups.items():
            with formatter.section(group):  # names padded to one width, so that the columns of all groups align
                rows = [((c.name or "").ljust(width), c.get_short_help_str(limit)) for c in commands]
                formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # before click makes a 1 of it
            ctx.exit(_close_pipe())
        except KeyboardInterrupt:  # and an empty line of this
            ctx.exit(_interrupted())

    def main(  # type: ignore[override]  # click's overloads tell apart what the flag decides here too
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        _open_streams()
        run = partial(super().main, args, prog_name, standalone_mode=False, **extra)
        if not standalone_mode:
            return run()
        sys.exit(_status(run))


def _checked(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return the callback `run` wrapped such that the options of its command are checked before it is called."""

    @wraps(run)
    def checked(*args: Any, **options: Any) -> Any:
        check_options(click.get_current_context())
        return run(*args, **options)

    return checked


def _bounded(ctx: click.Context, option: click.Parameter, value: Any) -> Any:
    """Return the value of an option. Raises BadParameter on numbers that libraries written in C have not."""
    if isinstance(value, (int, float)) and not abs(value) < 2**63:  # nan is not, either
        raise click.BadParameter(f"{value!r:.30} is not a finite number below 2**63.", ctx, option)
    return value


def complain(message: str) -> None:
    """One line on stderr, cut where it is longer than anybody reads."""
    line = " ".join(message.split())
    if (more := len(line) - LONGEST) > 0:
        line = f"{line[:LONGEST]} … ({more:,} more characters)"
    echo(f"weft: error: {line}", err=True)


def _open_streams() -> None:
    """Open the standard streams that the caller has closed (`2>&-`) on the null device.

    Otherwise Python has None in their place, and the next file that is opened, such as one of weights, gets their
    number, so that a library which prints there writes into it.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is not None:
            continue
        if not _is_open(number):
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
        setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _status(run: Callable[[], Any]) -> int:
    """Run a command to its exit status."""
    interrupted = threading.Event()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show × shows ?
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="surrogateescape")  # so that who reads can say what is no UTF-8
    try:
        with _terminable(interrupted), _remarks():
            result = run()
            sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except (WeftError, ImportError) as error:
        if interrupted.is_set() and isinstance(error.__cause__ or error, ImportError):
            return _interrupted()  # while they load, C extensions make this of it
        if isinstance(error, ImportError):
            raise
        complain(str(error))
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "weft"
        complain(f"{error.format_message().rstrip('.')}; see `{where} --help`")
    except click.ClickException as error:
        complain(error.format_message())
    except (click.Abort, KeyboardInterrupt):
        return _interrupted()
    except BrokenPipeError:
        return _close_pipe()
    except MemoryError:
        complain("not enough memory; use a smaller model, batch or --max-length")
    except OSError as error:
        complain(_sentence(error))
    return BAD


@contextlib.contextmanager
def _remarks() -> Iterator[None]:
    """Print what weft logs as remarks on stderr while the block runs."""

    class Remarks(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            note(record.getMessage())

    log, handler = logging.getLogger("weft"), Remarks(logging.WARNING)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


@contextlib.contextmanager
def _terminable(interrupted: threading.Event) -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP unwind the stack, so that temporary files go, and SIGINT leaves a mark besides.

    Only the main thread can arrange it.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        interrupted.set()
        signal.default_int_handler(number, frame)

    def leave(number: int, _: FrameType | None) -> None:
        for s in before:
            signal.signal(s, signal.SIG_IGN)
        echo("weft: terminated", err=True)
        raise Terminated(128 + number)

    named = {"SIGINT": interrupt, "SIGTERM": leave, "SIGHUP": leave}
    handlers = {getattr(signal, name): handler for name, handler in named.items() if hasattr(signal, name)}
    usual = (signal.SIG_DFL, signal.default_int_handler)  # nohup has SIGHUP ignored, and means it
    before = {s: signal.getsignal(s) for s in handlers if signal.getsignal(s) in usual}
    if threading.current_thread() is not threading.main_thread():
        before = {}
    for s in before:
        signal.signal(s, handlers[s])
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


def _interrupted() -> int:
    after = "\n" if sys.stderr.isatty() else ""  # the ^C that the terminal shows
    echo(f"{after}weft: interrupted", err=True)
    return INTERRUPTED


def _close_pipe() -> int:
    """Whoever read our output has had enough: end without a word, now and when Python flushes at exit."""
    with contextlib.suppress(OSError, ValueError):  # no such descriptor where stdout is replaced
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return PIPE_CLOSED


def _sentence(error: OSError) -> str:
    """Describe an error of the operating system in one sentence."""
    what = (error.strerror or str(error)).lower()
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = "the disk is full; free some space or name a folder on another disk"
    return f"{error.filename}: {what}" if error.filename is not None else what
