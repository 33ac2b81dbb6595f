"""python -m paxpage.bench COMMAND [--flag=value ...]: chooses the command and says what is wrong with its flags."""

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from absl import flags

from paxpage.command_line import complain

EXIT_BAD_USAGE = 2
PROGRAM = "paxpage.bench"
OF_EXTRA = ("httpx", "matplotlib")  # what paxpage[bench] installs


def _serve(argv: Sequence[str]) -> int:
    from paxpage.bench import serve

    return serve.main(argv)


def _offline(argv: Sequence[str]) -> int:
    from paxpage.bench import offline

    return offline.main(argv)


def _kernels(argv: Sequence[str]) -> int:
    from paxpage.bench import kernels

    return kernels.main(argv)


class Command(NamedTuple):
    """One of the benchmarks; what it needs is imported when it runs."""

    help: str
    run: Callable[[Sequence[str]], int]


COMMANDS = {
    "serve": Command("load on a server with OpenAI's API, of whatever make", _serve),
    "offline": Command("an engine in this process: throughput and latency", _offline),
    "kernels": Command("attention kernels beside their floors", _kernels),
}


def main(argv: Sequence[str]) -> int:
    """Runs the command named first; returns the process's exit code."""
    name = argv[1] if len(argv) > 1 else ""
    if name in ("--help", "-h"):
        print(help_text())
        return 0
    if name not in COMMANDS:
        return complain(PROGRAM, f"command is {name!r}; allowed: {', '.join(COMMANDS)}", EXIT_BAD_USAGE)
    try:
        return COMMANDS[name].run(argv[1:])
    except (ValueError, flags.Error) as error:
        return complain(f"{PROGRAM} {name}", error, EXIT_BAD_USAGE)
    except ModuleNotFoundError as error:
        if error.name not in OF_EXTRA:
            raise
        return complain(f"{PROGRAM} {name}", f"{error.name} is missing: pip install 'paxpage[bench]'", EXIT_BAD_USAGE)


def help_text() -> str:
    """The commands in a line each."""
    lines = [f"  {name:<10} {command.help}" for name, command in COMMANDS.items()]
    return "\n".join([f"python -m {PROGRAM} COMMAND [--flag=value ...]; COMMAND --help lists its flags", "", *lines])


if __name__ == "__main__":
    sys.exit(main(sys.argv))
