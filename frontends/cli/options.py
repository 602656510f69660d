"""Options that several commands take."""

from __future__ import annotations

import click

adapter_option = click.option(
    "--adapter",
    "adapters",
    multiple=True,
    type=click.Path(),
    metavar="DIR",
    help="A PEFT adapter (LoRA, DoRA) to merge into SOURCE; given several times, they are merged in that order.",
)
