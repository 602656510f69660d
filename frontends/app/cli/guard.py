"""Exit status of every command, and a one-line error message.

0: done. 1: `weft verify` found a difference. 2: bad input or a system error. 129, 130, 143: a signal. 141: closed pipe.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import logging
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial, wraps
from pathlib import Path
from types import FrameType
from typing import Any

import click

from weft.ir.errors import WeftError

from .option_rules import check_options
from .terminal import echo, print_note

FAILED, INTERRUPTED, PIPE_CLOSED = 2, 130, 141
MAX_LENGTH = 1400  # characters of a message


class Terminated(SystemExit):
    """An exit by a signal, distinct from exit() in user code."""


class Root(click.Group):
    """The command `weft`: it lists its commands by group, in the order of addition, and sets the exit status."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.groups: dict[str, list[click.Command]] = {}

    def add_to(self, group: str, command: click.Command) -> None:
        """Add `command`, listed under `group` in the help; its options are checked for range and conflicts."""
        for option in command.params:
            option.callback = option.callback or _check_bounds
        if command.callback is not None:
            command.callback = _add_option_checks(command.callback)
        self.add_command(command)
        self.groups.setdefault(group, []).append(command)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name, command in self.commands.items() if name == command.name]  # not earlier names

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(len(name) for name in self.commands)
        limit = formatter.width - 6 - width
        for group, commands in self.groups.items():
            with formatter.section(group):  # names padded to one width, so that the columns of all groups align
                rows = [((c.name or "").ljust(width), c.get_short_help_str(limit)) for c in commands]
                formatter.write_dl(rows)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if not ctx.resilient_parsing and args[0] not in self.commands and not args[0].startswith("-"):
            raise WeftError(explain_unknown(args[0], self.commands))
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # before click turns it into exit status 1
            ctx.exit(_close_pipe())
        except KeyboardInterrupt:  # before click prints an empty line for it
            ctx.exit(_report_interrupt())

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        _open_streams()
        run = partial(super().main, *args, standalone_mode=False, **extra)
        if not standalone_mode:
            return run()
        sys.exit(_run_command(run))


def _add_option_checks(run: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(run)
    def call(*args: Any, **options: Any) -> Any:
        check_options(click.get_current_context())
        return run(*args, **options)

    return call


def _check_bounds(ctx: click.Context, option: click.Parameter, value: Any) -> Any:
    if isinstance(value, (int, float)) and not abs(value) < 2**63:  # the range of C libraries; nan is not in it
        raise click.BadParameter(f"{value!r:.30} is not a finite number below 2**63.", ctx, option)
    return value


def print_error(message: str) -> None:
    """Print an error message in one line on stderr, truncated after `MAX_LENGTH` characters."""
    line = " ".join(message.split())
    if (excess := len(line) - MAX_LENGTH) > 0:
        line = f"{line[:MAX_LENGTH]} … ({excess:,} more characters)"
    echo(f"weft: error: {line}", err=True)


def _open_streams() -> None:
    """Open standard streams that the caller has closed (`2>&-`) on the null device.

    Otherwise the next file that is opened, such as one of weights, gets the descriptor of a closed stream, and a
    library that prints to this descriptor writes into the file.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is not None:
            continue
        try:
            os.fstat(number)
        except OSError:  # the descriptor is closed
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
        setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


def _run_command(run: Callable[[], Any]) -> int:
    """Run the command `run`, print its error if it fails, and return its exit status."""
    interrupted = threading.Event()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # terminals that cannot show × show ?
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="surrogateescape")  # so that readers can report invalid UTF-8
    try:
        with _handle_signals(interrupted), _print_warnings():
            result = run()
            sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except (WeftError, ImportError) as error:
        if interrupted.is_set() and isinstance(error.__cause__ or error, ImportError):
            return _report_interrupt()  # an interrupt while C extensions load raises ImportError
        if isinstance(error, ImportError):
            name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
            if name in ("", "weft"):
                raise
            # Such as in a container for compiled folders, without the packages that only compiling needs.
            print_error(f"this needs the package {name}, which is not installed: run `pip install {name}`")
            return FAILED
        print_error(str(error))
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "weft"
        print_error(f"{error.format_message().rstrip('.')}; see `{command} --help`")
    except click.ClickException as error:
        print_error(error.format_message())
    except (click.Abort, KeyboardInterrupt):
        return _report_interrupt()
    except BrokenPipeError:
        return _close_pipe()
    except MemoryError:
        print_error("not enough memory; use a smaller model, batch or --max-length")
    except OSError as error:
        print_error(_describe_os_error(error))
    return FAILED


@contextlib.contextmanager
def _print_warnings() -> Iterator[None]:
    class Remarks(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            print_note(record.getMessage())

    log, handler = logging.getLogger("weft"), Remarks(logging.WARNING)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


@contextlib.contextmanager
def _handle_signals(interrupted: threading.Event) -> Iterator[None]:
    """While the block runs, SIGTERM and SIGHUP raise Terminated, so that temporary files are removed.

    SIGINT sets `interrupted` and raises KeyboardInterrupt. Only the main thread can install the handlers.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        interrupted.set()
        signal.default_int_handler(number, frame)

    def leave(number: int, _: FrameType | None) -> None:
        for s in replaced:
            signal.signal(s, signal.SIG_IGN)
        echo("weft: terminated", err=True)
        raise Terminated(128 + number)

    by_name = {"SIGINT": interrupt, "SIGTERM": leave, "SIGHUP": leave}
    handlers = {getattr(signal, name): handler for name, handler in by_name.items() if hasattr(signal, name)}
    defaults = (signal.SIG_DFL, signal.default_int_handler)  # other handlers stay: nohup ignores SIGHUP on purpose
    replaced = {s: signal.getsignal(s) for s in handlers if signal.getsignal(s) in defaults}
    if threading.current_thread() is not threading.main_thread():
        replaced = {}
    for s in replaced:
        signal.signal(s, handlers[s])
    try:
        yield
    finally:
        for s, handler in replaced.items():
            signal.signal(s, handler)


def _report_interrupt() -> int:
    newline = "\n" if sys.stderr.isatty() else ""  # the ^C that the terminal shows
    echo(f"{newline}weft: interrupted", err=True)
    return INTERRUPTED


def _close_pipe() -> int:
    """Redirect stdout, whose reader has closed it, to the null device, also for Python's flush at exit; return 141."""
    with contextlib.suppress(OSError, ValueError):  # there is no such descriptor if stdout is replaced
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return PIPE_CLOSED


def _describe_os_error(error: OSError) -> str:
    reason = (error.strerror or str(error)).lower()
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        reason = "the disk is full; free some space or name a folder on another disk"
    return f"{error.filename}: {reason}" if error.filename is not None else reason


_TABLE = """
chat talk | talk to a model | weft run model.gguf --chat
generate complete infer inference predict sample prompt | continue a text | weft run model.gguf --prompt "Once upon"
embed encode | embed a text | weft run ./all-MiniLM-L6-v2 --prompt "a sentence"
server api host start | answer requests of OpenAI's API | weft serve out/
finetune fine-tune tune sft pretrain fit | train on a text | weft train ./SmolLM2-135M --text notes.txt -o tuned/
distill distillation | train a rewritten model on its original | weft distil q4/ --against model.gguf -o run/
lora adapter merge | merge a LoRA adapter | weft compile ./SmolLM2-135M --adapter ./my-lora -o out/
quantize quantise quant | store the weights in fewer bits | weft compile model.gguf --weights int4 -o out/
convert save | write a checkpoint for transformers or llama.cpp | weft export model.gguf -o folder/
build make onnx | write a folder that ONNX Runtime runs | weft compile model.gguf -o out/
web deploy | write a page that runs the model | weft compile model.gguf --target web -o site/
prune shrink compress slim | leave out layers | weft opt model.gguf -p "prune-layers{layers=[24, 25]}" -o smaller/
optimize optimise rewrite transform pass apply | rewrite a model by passes | weft opt model.gguf -p pack-qkv,dce
bench benchmark speed profile time | measure the time per token | weft eval out/ --against model.gguf --text notes.txt
evaluate score perplexity ppl | measure the loss | weft eval out/ --against model.gguf --text notes.txt
draw plot graph show view visualize visualise picture | draw a model | weft viz model.gguf -o model.html
diff | draw the differences of two models | weft viz model.gguf --vs smaller/ -o diff.html
info summary describe print count params stats size memory | print sizes and costs | weft inspect model.gguf
list ls models catalog zoo | list the published architectures | weft presets
download pull fetch get | fetch a model, which weft does not do itself | hf download HuggingFaceTB/SmolLM2-135M
test check validate | compare a compiled folder with its source | weft verify out/
"""
ROWS = [tuple(line.split(" | ")) for line in _TABLE.strip().splitlines()]  # names, purpose, example


def explain_unknown(name: str, commands: Iterable[str]) -> str:
    """Return a sentence that names the command to use instead of `name`; `commands` exist."""
    if Path(name).exists() or "." in name or "/" in name:
        return f"{name} is not a command: to inspect a file, use `weft inspect {shlex.quote(name)}`"
    guesses = {word: (purpose, example) for words, purpose, example in ROWS for word in words.split()}
    names, word = [*guesses, *commands], name.lower()
    match = word if word in names else next(iter(difflib.get_close_matches(word, names, 1)), "")
    if match in guesses:
        purpose, example = guesses[match]
        return f"there is no command {name}: to {purpose}, use `{example}`"
    return f"there is no command {name}{f': did you mean `weft {match}`?' if match else '; see `weft --help`'}"
