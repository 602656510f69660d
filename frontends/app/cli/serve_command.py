"""`weft serve`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from weft.ir.errors import WeftError

from .completion import complete_sources
from .open_model import open_model
from .options import LOADING, add_loading_options, default_option, device_option, prefix_cache_option
from .terminal import echo, print_note

KEY = "WEFT_API_KEY"


@click.command("serve", short_help="Serve a model over HTTP, with OpenAI's API.")
@click.argument("source", shell_complete=complete_sources)
@default_option("--host", "127.0.0.1", "Address to listen on; 0.0.0.0: all addresses.")
@default_option("--port", 8000, "Port; 0: any free port.", type=click.IntRange(0, 65535))
@click.option("--model-name", help="Name of the model in requests; default: the name of SOURCE.")
@click.option("--api-key", help=f"Key that requests must send; {KEY} in the environment hides it from other users.")
@default_option("--max-batch", 16, "Maximum answers in one batch.", type=click.IntRange(1, 1024))
@default_option("--max-queue", 256, "Maximum waiting answers.", type=click.IntRange(1))
@prefix_cache_option
@click.option(
    "--prompt-lookup",
    type=click.IntRange(0),
    help="Draft up to this number of tokens at a time for a single greedy answer, while that saves time; 0: none; "
    "default: 8.",
)
@default_option("--max-body", 4, "Maximum size of a request, in MiB.", type=click.IntRange(1))
@default_option(
    "--client-timeout",
    30,
    "Seconds after which a client that neither sends nor reads is disconnected.",
    type=click.FloatRange(0.1),
)
@default_option(
    "--drain", 30, "Seconds that running answers have to finish after Ctrl-C or SIGTERM.", type=click.FloatRange(0)
)
@device_option
@add_loading_options
def serve_command(
    source: str,
    host: str,
    port: int,
    model_name: str | None,
    api_key: str | None,
    max_body: int,
    prefix_cache: int | None,
    prompt_lookup: int | None,
    trust: bool,
    **options: Any,
) -> None:
    """Serve a compiled folder, or any SOURCE, with OpenAI's HTTP API: chats, completions, embeddings.

    The server prints its address when it is ready. After Ctrl-C or SIGTERM, running answers have --drain seconds to
    finish; a second signal ends them.

    \b
    Examples:
      weft serve out/                                   http://127.0.0.1:8000/v1 for any OpenAI client
      weft serve out/ --port 9000 --model-name smollm2
      WEFT_API_KEY=secret weft serve out/ --host 0.0.0.0
      weft serve model.gguf --max-batch 4               compiled for this run
    """
    try:
        from ..serve.server import LOOPBACK, Server, is_loopback, listen
        from ..serve.server_settings import ServerSettings
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        raise WeftError(f"weft serve needs {name}, which is not installed: install weft[serve]") from error

    key = api_key if api_key is not None else os.environ.get(KEY)
    stored = {"prefix_cache": prefix_cache, "prompt_lookup": prompt_lookup}
    options |= {name: value for name, value in stored.items() if value is not None}
    loading = {option: options.pop(option) for option in LOADING}
    with listen(host, port) as listening:  # report all errors before a model is compiled
        local = is_loopback(listening)
        settings = ServerSettings(
            name=model_name or _name_model(source),
            api_key=key,
            max_body=max_body << 20,
            hosts=LOOPBACK | {host.lower()} if local else None,
            **options,
        )
        with open_model(source, text=True, trusted=[source] * trust, **loading) as model:
            server = Server(model, listening, settings)
            if not local and key is None:
                print_note(f"{host} can be reached from other machines, and requests need no key: set {KEY}")
            address = f"[{host}]" if ":" in host else host
            echo(f"weft: serving {settings.name} at http://{address}:{server.port}/v1; Ctrl-C ends", err=True)
            server.run()
    print_note("the server has ended")


def _name_model(source: str) -> str:
    path = Path(source)
    name = path.absolute().name if path.is_dir() else path.name
    return name.removesuffix(".gguf").removesuffix(".py") or source
