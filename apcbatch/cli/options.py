"""Make flags from the option table of config.py, and help that shows them in groups.

Values stay text here; resolution.py parses them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from apcbatch import resolution
from apcbatch.config import OPTIONS, Config, flag_name
from apcbatch.errors import UsageError
from apcbatch.foreign_options import FOREIGN_COMMANDS
from apcbatch.option_values import Spec, brief, format_size, parse_path, shown
from apcbatch.sampling import MOST_TOKENS

_MOST_CELLS = 74  # of flags in the help, so that its lines fit into 80 columns
METAVARS = {"integer": "N", "number": "F", "size": "SIZE"}


class PathName(click.ParamType):  # type: ignore[type-arg]
    """Type of an argument that is a file or a folder; the address of a local file becomes its path. is_anywhere: accept
    addresses on other machines. is_output: it is a file that is written, and its name becomes the place to write."""

    name = "path"

    def __init__(self, is_anywhere: bool = False, is_output: bool = False) -> None:
        self._is_anywhere, self._is_output = is_anywhere, is_output

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        is_folder = (param.metavar or "").startswith("DIR")
        return [CompletionItem(incomplete, type="dir" if is_folder else "file")]

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        where = "" if param is None else param.opts[0]
        if isinstance(param, click.Argument):
            where = (param.metavar or param.opts[0]).rstrip(".")
        try:
            return parse_path(value, where, self._is_anywhere, self._is_output)
        except ValueError as error:
            raise UsageError(str(error)) from None


LOCAL, ANYWHERE = PathName(), PathName(is_anywhere=True)
OUTPUT, OUTPUT_ANYWHERE = PathName(is_output=True), PathName(is_anywhere=True, is_output=True)


class Count(click.IntRange):
    """Click type of an integer with a minimum, whose error is worded like those of options with a Spec."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the value as an integer. Raises click.UsageError."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            name = param.opts[0] if param is not None else "the value"
            raise click.UsageError(f"{name} is {value!r}; expected an integer from {self.min} up", ctx) from None


class GroupedOption(click.Option):
    """Option listed under a heading of the help. Its metavar determines the shell completion."""

    def __init__(self, *args: Any, group: str = "Other", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the flags and the help. Choices that make the flags wider than _MOST_CELLS stand in the help."""
        record = super().get_help_record(ctx)
        if record is None or self.metavar is None or len(record[0]) <= _MOST_CELLS:
            return record
        flags, help = record
        return flags.replace(self.metavar, "NAME"), f"{help}  [{', '.join(self.metavar.split('|'))}]"

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        words = (self.metavar or "").split("|")
        found = [CompletionItem(word) for word in words if word.islower() and word.startswith(incomplete)]
        if found or "FILE" not in (self.metavar or "") and "DIR" not in words:
            return found or super().shell_complete(ctx, incomplete)
        return LOCAL.shell_complete(ctx, self, incomplete)


class GroupedCommand(click.Command):
    """Command whose help lists its options under headings, and prints its examples verbatim."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does, and say what to give in place of a removed option or one of another tool."""
        given = [word.partition("=")[0] for word in args if word.startswith("-")]
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            for word in (error.option_name, *given):  # of `-tp 2` click names -t
                if instead := resolution.instead(word.lstrip("-").replace("-", "_")):
                    raise click.UsageError(f"{word} is not an option{instead}", ctx) from None
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                groups.setdefault(getattr(parameter, "group", "Other"), []).append(record)
        for group, records in groups.items():
            with formatter.section(f"{group} options"):
                formatter.write_dl(records)


def short_help_option(first: Sequence[str], epilog: str) -> Callable[[Any], Any]:
    """Return a decorator that adds -h, which shows a command's first paragraph, the options in `first`, and an epilog.
    The command's context_settings must leave -h out of its help_option_names."""

    def show(ctx: click.Context, parameter: click.Parameter, wanted: bool) -> None:
        if not wanted or ctx.resilient_parsing:
            return
        command, formatter = ctx.command, ctx.make_formatter()
        command.format_usage(ctx, formatter)
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text((command.help or "").partition("\n\n")[0])
        options = {one.name: one for one in command.get_params(ctx)}
        with formatter.section("Options to begin with"):
            formatter.write_dl([record for name in first if (record := options[name].get_help_record(ctx))])
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(epilog)
        click.echo(formatter.getvalue().rstrip("\n"))
        ctx.exit()

    help = f"Show the {len(first)} options to begin with, and stop."
    return click.option("-h", is_flag=True, is_eager=True, expose_value=False, callback=show, help=help)


class OrderedGroup(click.Group):
    """Group that lists its commands in the order in which they were added."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args[0] in FOREIGN_COMMANDS and args[0] not in self.commands:
            ctx.fail(f"{args[0]} is not a command of apcbatch; {FOREIGN_COMMANDS[args[0]]}")
        return super().resolve_command(ctx, args)


# Options of several commands that are not in config.py; each is a decorator.
config_file_option = click.option(
    "--config", "config_file", metavar="FILE", type=LOCAL, cls=GroupedOption, group="Configuration",
    help="Take options from a YAML file; flags and APCBATCH_<OPTION> variables win over it.",
)  # fmt: skip
json_option = click.option(
    "--json", "json_path", metavar="FILE", type=OUTPUT, cls=GroupedOption, group="Output",
    help="Write the numbers to FILE; - is standard output, instead of the table.",
)  # fmt: skip


def config_options(names: Iterable[str]) -> Callable[[Any], Any]:
    """Return a decorator that adds the flags of the named options; the function gets them as keyword arguments."""

    def decorate(function: Any) -> Any:
        for name in reversed(list(names)):
            spec = OPTIONS[name]
            if name == "store":
                function = _switch("no_store", "Reuse", "Keep nothing on disk.")(function)
            if spec.flag is not None:
                function = _option(name, spec)(function)
        return function

    return decorate


def given_flags(ctx: click.Context) -> dict[str, Any]:
    """Return the options given on the command line, by name."""
    known = {*OPTIONS, "no_store"}
    return {
        name: value
        for name, value in ctx.params.items()
        if name in known and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }


def _option(name: str, spec: Spec) -> Callable[[Any], Any]:
    if spec.kind == "switch":
        return _switch(name, spec.group, spec.help, spec.flag)
    metavar = spec.metavar or ("|".join(spec.choices) if spec.choices else METAVARS[spec.kind])
    repeated = spec.most is not None
    default = shown(spec, getattr(Config, name))
    help = spec.help
    if default not in (None, []) and name != "pool_size":
        help += f"  [default: {format_size(default) if spec.kind == 'size' else default}]"
    return click.option(
        flag_name(name),
        name,
        type=str,
        metavar=metavar,
        help=help,
        cls=GroupedOption,
        group=spec.group,
        multiple=repeated,
    )


def _switch(name: str, group: str, help: str, short: str | None = None) -> Callable[[Any], Any]:
    flag = flag_name(name)
    if name in OPTIONS and OPTIONS[name].opposite is not None:
        flag += f"/{OPTIONS[name].opposite}"
    flags = [short, flag] if short else [flag]
    return click.option(*flags, name, is_flag=True, help=help, cls=GroupedOption, group=group)


BLOCK_SIZES = (1, 16, 32, 64, 128, 256, 512, 1024, 2048)  # in tokens; the sizes compared by default
USUAL_SIZES = ",".join(map(str, BLOCK_SIZES))


def read_block_sizes(flag: str, text: str, example: str) -> list[int]:
    """Parse the block sizes of a flag, in tokens; UsageError with the example for anything else."""
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = [0]
    if not 1 <= min(sizes) <= max(sizes) <= MOST_TOKENS:
        raise UsageError(f"{flag} is {brief(text)}; expected integers from 1 with commas between, such as {example}")
    return sizes
