"""A file of flags: YAML, of which JSON is a part. Its keys are the flags' names."""

from collections.abc import Collection
from typing import Any

import yaml

from paxpage.config import require


def read_config(path: str, names: Collection[str]) -> list[str]:
    """The file's settings as arguments of a command line, where those that follow win. Null means: not given.

    names: the flags there are; dashes and underscores in a key are the same. A list is its items, comma between.

    Raises:
        ValueError: the file cannot be read, is not one flat mapping, or has a key that is no flag.
    """
    try:
        with open(path, encoding="utf-8") as file:
            settings = yaml.safe_load(file)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"config is {path!r}, which cannot be read: {error}") from None
    settings = {} if settings is None else settings
    require(isinstance(settings, dict), "config", path, "a file of flags and values, as port: 8000")
    given = {str(key).replace("-", "_"): value for key, value in settings.items()}
    require(len(given) == len(settings), "config", path, "each flag once")
    unknown = sorted(given.keys() - set(names))
    require(not unknown, "config", path, f"flags as keys; it has {', '.join(unknown)}, which is none (see --help)")
    return [f"--{name}={_text(path, name, value)}" for name, value in given.items() if value is not None]


def _text(path: str, name: str, value: Any) -> str:
    items = value if isinstance(value, list) else [value]
    is_plain = all(isinstance(item, (str, int, float)) for item in items)
    require(is_plain, f"{name} in {path}", value, "text, a number, true, false, or a list of these")
    return ",".join(str(item) for item in items)
