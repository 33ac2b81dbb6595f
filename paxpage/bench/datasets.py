"""What is asked of a server: prompts and lengths, drawn or read from a file. Needs neither jax nor a tokenizer."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paxpage.bench.workloads import FIRST_TOKEN_ID, lengths, token_ids, token_rng
from paxpage.config import require, require_int

DATASETS = ("random", "sharegpt", "shared-prefix", "custom")
FORMATS = ("auto", "token_ids", "text")
CUSTOM_KEYS = ("prompt", "messages", "output_tokens")
# Nearly every tokenizer has a token for each of these with the blank before it, so n of them are about n tokens.
WORDS = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state"),
    *("family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system"),
    *("program", "question", "work", "government", "number", "night", "point", "home", "water", "room", "mother"),
    *("area", "money", "story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business"),
    *("issue", "side", "kind", "head", "house", "service", "friend", "father", "power", "hour", "game", "line", "end"),
)

Prompt = str | list[int] | list[dict[str, Any]]  # text, token ids, or a conversation


class BenchRequest(NamedTuple):
    """One request: what is sent, and how many tokens may be generated."""

    prompt: Prompt
    max_tokens: int


@dataclasses.dataclass(frozen=True)
class DatasetOptions:
    """What to draw. Lengths are in tokens; with text they are in words, which are about as many tokens."""

    dataset_name: str
    dataset_path: str | None
    num_prompts: int
    input_len: int
    output_len: int
    random_range_ratio: float
    shared_prefix_len: int
    num_prefixes: int
    vocab_size: int
    prompt_format: str
    seed: int

    def __post_init__(self) -> None:
        require(self.dataset_name in DATASETS, "dataset_name", self.dataset_name, ", ".join(DATASETS))
        require(self.prompt_format in FORMATS, "prompt_format", self.prompt_format, ", ".join(FORMATS))
        has_path = (self.dataset_path is not None) == (self.dataset_name == "custom")
        require(has_path, "dataset_path", self.dataset_path, "a JSONL file with dataset_name custom, else nothing")
        for field in ("num_prompts", "input_len", "output_len", "num_prefixes"):
            require_int(field, getattr(self, field), 1)
        for field in ("shared_prefix_len", "seed"):
            require_int(field, getattr(self, field), 0)
        require_int("vocab_size", self.vocab_size, FIRST_TOKEN_ID + 1)
        ratio = self.random_range_ratio
        require(0 <= ratio < 1, "random_range_ratio", ratio, "a number in [0, 1)")


def make_requests(options: DatasetOptions, *, is_chat: bool, draw: int = 0) -> list[BenchRequest]:
    """The requests of one run. Another draw has the same lengths and other prompts, which no cache has seen.

    Raises:
        ValueError: token ids for a chat, or a line of the file that is no request.
    """
    is_text = options.prompt_format == "text" or (options.prompt_format == "auto" and is_chat)
    require(is_text or not is_chat, "prompt_format", options.prompt_format, "auto or text: a chat has no token ids")
    if options.dataset_name == "custom":
        return _read_custom(options, is_chat)
    make = {"random": _random, "sharegpt": _sharegpt, "shared-prefix": _shared_prefix}[options.dataset_name]
    shape = (lambda ids: _as_prompt(_as_words(ids), is_chat)) if is_text else (lambda ids: ids)
    return [BenchRequest(shape(ids), num_output) for ids, num_output in make(options, draw)]


Drawn = list[tuple[list[int], int]]


def _random(options: DatasetOptions, draw: int) -> Drawn:
    rng = np.random.default_rng([options.seed, 2])
    num_inputs, num_outputs = (_spread(rng, options, length) for length in (options.input_len, options.output_len))
    tokens = _tokens_of(options, draw)
    return [(tokens(num_input), num_output) for num_input, num_output in zip(num_inputs, num_outputs, strict=True)]


def _spread(rng: np.random.Generator, options: DatasetOptions, length: int) -> list[int]:
    margin = int(length * options.random_range_ratio)
    return rng.integers(length - margin, length + margin + 1, options.num_prompts).tolist()


def _sharegpt(options: DatasetOptions, draw: int) -> Drawn:
    tokens = _tokens_of(options, draw)
    pairs = zip(*lengths(options.num_prompts, options.seed), strict=True)
    return [(tokens(int(num_input)), int(num_output)) for num_input, num_output in pairs]


def _shared_prefix(options: DatasetOptions, draw: int) -> Drawn:
    tokens = _tokens_of(options, draw)
    prefixes = [tokens(options.shared_prefix_len) for _ in range(options.num_prefixes)]
    own = [tokens(options.input_len) for _ in range(options.num_prompts)]
    return [(prefixes[i % len(prefixes)] + ids, options.output_len) for i, ids in enumerate(own)]


def _tokens_of(options: DatasetOptions, draw: int) -> Callable[[int], list[int]]:
    rng = token_rng(options.seed, draw)
    return lambda n: token_ids(rng, n, options.vocab_size)


def _as_words(ids: list[int]) -> str:
    return " ".join(WORDS[token_id % len(WORDS)] for token_id in ids)


def _as_prompt(text: str, is_chat: bool) -> Prompt:
    return [{"role": "user", "content": text}] if is_chat else text


def _read_custom(options: DatasetOptions, is_chat: bool) -> list[BenchRequest]:
    assert options.dataset_path is not None
    path = Path(options.dataset_path)
    require(path.is_file(), "dataset_path", options.dataset_path, "a JSONL file")
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    require(bool(lines), "dataset_path", options.dataset_path, "a file with at least one line")
    chosen = enumerate(lines[: options.num_prompts], 1)
    return [_custom_request(f"{path.name}:{number}", line, options.output_len, is_chat) for number, line in chosen]


def _custom_request(where: str, line: str, output_len: int, is_chat: bool) -> BenchRequest:
    allowed = f"an object with prompt or messages (for a chat), and output_tokens or not: {', '.join(CUSTOM_KEYS)}"
    try:
        fields = json.loads(line)
    except json.JSONDecodeError:
        fields = None
    is_object = isinstance(fields, dict) and set(fields) <= set(CUSTOM_KEYS)
    require(is_object and ("prompt" in fields) != ("messages" in fields), where, line[:60], allowed)
    prompt = fields.get("prompt", fields.get("messages"))
    if is_chat and isinstance(prompt, str):
        prompt = _as_prompt(prompt, is_chat)
    is_fitting = isinstance(prompt, list) if is_chat else "prompt" in fields and isinstance(prompt, (str, list))
    require(is_fitting, where, line[:60], "messages or a prompt of text for a chat, else a prompt of text or token ids")
    num_output = fields.get("output_tokens", output_len)
    require_int(f"{where} output_tokens", num_output, 1)
    return BenchRequest(prompt, num_output)
