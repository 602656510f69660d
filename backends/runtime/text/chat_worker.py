"""Render one chat template; run as a script, in a process of its own that may take little time and memory.

A template is text of whoever made the model. jinja2's sandbox keeps it from files and attributes, but not from loops
within loops or strings of gigabytes, and constants are computed while it is parsed. So the process bounds itself before
it sees the template: the request is JSON on stdin, the reply JSON on stdout. With the argument --serve it answers any
number of requests, each in a fork that bounds itself; a frame is 8 bytes of length, little-endian, and JSON. It imports
nothing of weft.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any, BinaryIO

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

LONGEST = 1 << 24  # characters of a prompt; the longest contexts are a few million tokens


class Generation(Extension):
    """`{% generation %}` marks the assistant's tokens for training; here its body is all that matters."""

    tags = {"generation"}  # noqa: RUF012  as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> ImmutableSandboxedEnvironment:
    """Templates as Hugging Face compiles them: the sandbox, its filters and functions, `{% generation %}` blocks."""

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    sandbox.filters["tojson"] = tojson
    sandbox.globals["raise_exception"] = refuse
    sandbox.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return sandbox


def render(template: str, variables: dict[str, Any]) -> dict[str, str]:
    """Return {"text": the prompt}, or {"error": what is wrong, and whose fault}."""
    try:
        compiled = environment().from_string(template)
    except MemoryError:
        return {"error": "takes too much memory"}
    except Exception as error:  # not only TemplateError: constants are computed here
        return {"error": f"cannot be parsed: {_brief(error)}"}
    try:
        text = compiled.render(variables)
    except MemoryError:
        return {"error": "takes too much memory"}
    except Exception as error:  # whatever the template divides, indexes or raises
        return {"error": f"refuses the messages: {_brief(error)}"}
    if len(text) > LONGEST:
        return {"error": f"makes a prompt of {len(text)} characters, more than {LONGEST}"}
    return {"text": text}


def _brief(error: Exception) -> str:
    kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
    return f"{kind}{error}"[:500]


def limit(seconds: float, memory: int) -> None:
    """Bound this process: `seconds` by the clock and of a core, bytes of `memory`, and no files to write."""
    bounds = [(resource.RLIMIT_CPU, math.ceil(seconds)), (resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, 0)]
    for which, most in [*bounds, (resource.RLIMIT_CORE, 0)]:
        with contextlib.suppress(ValueError, OSError):  # macOS does not bound addresses
            resource.setrlimit(which, (most, most))
    # A signal that the parent ignores stays ignored across exec.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def main() -> None:
    """Answer the one request on stdin."""
    sys.stdout.write(answer(sys.stdin.buffer.read()))


def answer(raw: bytes) -> str:
    """Answer a request in this process, which is bounded from now on."""
    request = json.loads(raw)
    limit(request["seconds"], request["memory"])
    return json.dumps(render(request["template"], request["variables"]))


def serve(requests: BinaryIO, replies: BinaryIO, answer: Callable[[bytes], str]) -> None:
    """Answer requests in forks until there are no more: replies are {"status": how the fork ended, "reply": what it
    wrote}."""
    while len(head := requests.read(8)) == 8:
        raw = requests.read(int.from_bytes(head, "little"))
        ours, theirs = os.pipe()
        if (child := os.fork()) == 0:
            status = 1
            try:
                os.close(ours)
                with os.fdopen(theirs, "w", encoding="utf-8") as pipe:
                    pipe.write(answer(raw))
                status = 0
            finally:
                os._exit(status)
        os.close(theirs)
        with os.fdopen(ours, encoding="utf-8") as pipe:
            text = pipe.read()
        _, status = os.waitpid(child, 0)
        reply = json.dumps({"status": os.waitstatus_to_exitcode(status), "reply": text}).encode()
        replies.write(len(reply).to_bytes(8, "little") + reply)
        replies.flush()


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        # What jinja2 and Python prepare at first, such as the lexer's patterns, the forks find ready.
        environment().from_string("{% for a in b %}{{ a.c | trim }}{% endfor %}").render({"b": []})
        serve(sys.stdin.buffer, sys.stdout.buffer, answer)
    else:
        main()
