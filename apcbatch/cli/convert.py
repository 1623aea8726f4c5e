"""`apcbatch convert`: write a quantised copy of a model."""

from __future__ import annotations

from pathlib import Path

import click

from apcbatch.cli.options import LOCAL, GroupedCommand, GroupedOption
from apcbatch.cli.terminal import echo, warn

EPILOG = """\b
Examples:
  apcbatch convert ./my-mamba ./my-mamba-int8 --to int8
  apcbatch convert Qwen/Qwen3.5-4B ./qwen-int4 --to int4 --head int8
"""


@click.command(cls=GroupedCommand, epilog=EPILOG, short_help="Write a copy of a model in 8 or 4 bits.")
@click.argument("model", metavar="MODEL", type=LOCAL)
@click.argument("target", metavar="DIR", type=LOCAL)
@click.option(
    "--to", type=click.Choice(["int8", "int4", "fp8"]), required=True, cls=GroupedOption, group="Format",
    help="int8 or int4 in groups of 128 columns; fp8 (e4m3) with a scale for each output.",
)  # fmt: skip
@click.option(
    "--head", type=click.Choice(["keep", "int8"]), default="keep", show_default=True, cls=GroupedOption,
    group="Format", help="Keep the output projection as it is, or encode it in int8 too.",
)  # fmt: skip
def convert(model: str, target: str, to: str, head: str) -> None:
    """Write a copy of MODEL to DIR whose projections are in 8 or 4 bits, rounded to nearest.

    MODEL is a folder, ORG/NAME in the Hugging Face cache, or `demo`; its weights are not quantised yet. DIR is new or
    empty. The copy is in the format of compressed-tensors, which `run` and transformers read. Embeddings, norms,
    convolutions, gates and routers are copied as they are, and so are the tokenizer, its template and the licence. A
    projection whose columns are no multiple of 128 stays in int8 and int4, and a line says so.
    """
    from tqdm import tqdm

    from apcbatch.kernels.processor import set_threads
    from apcbatch.model.conversion import convert
    from apcbatch.model.locate import locate_model

    set_threads(1)  # faster than a disk, and not slowed by other programs
    with tqdm(desc="reading", unit="B", unit_scale=True, leave=False, disable=None) as bar:
        sentence = convert(locate_model(model), Path(target), to, head, warn, bar.update)
    echo(sentence)
