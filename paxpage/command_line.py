"""Command lines made of absl flags: dashes and underscores are the same, help comes in groups."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from absl import flags

HELP_WIDTH = 34


class Flag(NamedTuple):
    """One flag: its kind is str, int, float or bool."""

    name: str
    kind: type
    default: str | int | float | bool | None
    help: str


Groups = Mapping[str, Sequence[Flag]]


def parse_flags(groups: Groups, argv: Sequence[str]) -> flags.FlagValues:
    """Parses a command line, argv[0] being the program; --max-num-seqs and --max_num_seqs are the same.

    Raises:
        flags.Error: an unknown flag or a value of the wrong kind.
        ValueError: an argument that is no flag.
    """
    values = _define_flags(groups)
    values.set_gnu_getopt(True)
    rest = values([argv[0], *(_with_underscores(argument, values) for argument in argv[1:])])[1:]
    if rest:
        raise ValueError(f"{rest[0]!r} is not a flag; a model is given as --model={rest[0]}")
    return values


def values_of(values: flags.FlagValues) -> dict[str, Any]:
    """Flags and their values, but for help; None for what has no default and was not given."""
    return {name: values[name].value for name in values if name != "help"}


def help_text(title: Sequence[str], groups: Groups) -> str:
    """Some lines, then every flag with its default, by group."""
    lines = list(title)
    for group, members in groups.items():
        lines += ["", f"{group}:"]
        for flag in members:
            shown = f"  --{flag.name}" + ("" if flag.default is None else f"={flag.default}")
            lines.append(f"{shown:<{HELP_WIDTH}} {flag.help}")
    return "\n".join(lines)


def complain(program: str, error: Exception | str, exit_code: int) -> int:
    """Says in one line why a program ends; gives its exit code."""
    print(f"{program}:", " ".join(str(error).split()), file=sys.stderr)
    return exit_code


def _define_flags(groups: Groups) -> flags.FlagValues:
    values = flags.FlagValues()
    define: dict[type, Callable[..., Any]] = {
        str: flags.DEFINE_string,
        int: flags.DEFINE_integer,
        float: flags.DEFINE_float,
        bool: flags.DEFINE_boolean,
    }
    for group in groups.values():
        for flag in group:
            define[flag.kind](flag.name, flag.default, flag.help, flag_values=values)
    flags.DEFINE_boolean("help", False, "show this text", flag_values=values)
    return values


def _with_underscores(argument: str, values: flags.FlagValues) -> str:
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument[2:].partition("=")
    name = name.replace("-", "_")
    positive = name.removeprefix("no_")
    if positive != name and positive in values:  # absl's own spelling is --noname
        name = f"no{positive}"
    return f"--{name}{equals}{value}"
