"""Finds calls of tools in what a model writes, as it comes in.

Where a text is cut changes nothing: an answer that is read whole gives what the pieces of its stream give together.
A call is given out once it is whole, for what a client was sent cannot be taken back; what turns out to be no call is
text, every character of it.
"""

import dataclasses
import json
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from paxpage.config import require

SPACE = " \t\r\n"
TEXT_RUN = re.compile(r'[^"\\]*')  # within a string of JSON
JSON_RUN = re.compile(r'[^"{}<;|\\]*')  # between strings and braces; the other characters are never there


@dataclasses.dataclass(frozen=True)
class CallFormat:
    """How a family of models writes its calls: a JSON object with a name and its arguments, after an opening.

    arguments: the key of its arguments, as the models write it; both keys are read. closing: what may follow a call.
    separator: what may stand between a call and the next, which then needs no opening. is_bare: whether an answer that
    begins with the object needs no opening either.
    """

    name: str
    opening: str
    arguments: str
    closing: str | None = None
    separator: str | None = None
    is_bare: bool = False


FORMATS = {
    "hermes": CallFormat("hermes", "<tool_call>", "arguments", closing="</tool_call>"),
    "llama3_json": CallFormat("llama3_json", "<|python_tag|>", "parameters", separator=";", is_bare=True),
}


class ToolCall(NamedTuple):
    """One call. arguments: a JSON object, as text."""

    name: str
    arguments: str


Part = str | ToolCall
Template = str | Mapping[str, str] | None  # a chat template, or several by name


@dataclasses.dataclass(frozen=True)
class ToolPolicy:
    """What a server does with the calls of its model.

    call_format: how they are recognised, or None. leaves_text: without a format, whether tools may be given
    nevertheless; the calls are then a part of the text. is_opening_special: whether the format's opening is a special
    token, which is not shown in texts unless asked for. marks: of the format's opening and closing, those that are
    tokens of their own, special or not.
    """

    call_format: CallFormat | None
    leaves_text: bool = False
    is_opening_special: bool = False
    marks: frozenset[str] = frozenset()

    def require_parser(self) -> None:
        """Raises ValueError where a request's tools would be of no use."""
        allowed = (
            "only with tool_choice none, since this server parses no calls: start it with tool_call_parser hermes or "
            "llama3_json (or none, which leaves them in the text)"
        )
        require(self.call_format is not None or self.leaves_text, "tools", "given", allowed)


REFUSES_TOOLS = ToolPolicy(None)


def choose_policy(parser: str, is_enabled: bool, template: Template, added_tokens: Mapping[str, bool]) -> ToolPolicy:
    """The policy of a server.

    parser: a key of FORMATS, "none" (calls stay text) or "auto" (what the chat template makes plain). is_enabled:
    whether tools may be given at all. added_tokens: of the tokenizer, by text: whether each is a special one.
    """
    if not is_enabled:
        return REFUSES_TOOLS
    if parser == "none":
        return ToolPolicy(None, leaves_text=True)
    call_format = guess_format(template) if parser == "auto" else FORMATS[parser]
    if call_format is None:
        return ToolPolicy(None)
    marks = frozenset(mark for mark in (call_format.opening, call_format.closing or "") if mark in added_tokens)
    return ToolPolicy(call_format, is_opening_special=added_tokens.get(call_format.opening, False), marks=marks)


def guess_format(template: Template) -> CallFormat | None:
    """The format that a chat template asks the model for; None where it is not one of these."""
    if isinstance(template, Mapping):
        template = template.get("tool_use") or template.get("default")
    text = (template or "").replace("\\", "")
    is_xml = "<function=" in text or "<arg_key>" in text  # written between the same tags by other families
    if "<tool_call>" in text and "arguments" in text and not is_xml:
        return FORMATS["hermes"]
    return FORMATS["llama3_json"] if '{"name": function name, "parameters":' in text else None


class ObjectScanner:
    """Looks for the end of a JSON object that grows, reading every character once.

    end: where the object ends, or where it cannot go on; None as long as it may.
    """

    def __init__(self) -> None:
        self.end: int | None = None
        self._position = 0
        self._depth = 0
        self._is_in_string = False

    def scan(self, text: str) -> int | None:
        """Goes on to the end of text, whose beginning is what was scanned before; gives end."""
        while self.end is None and self._step(text):
            pass
        return self.end

    def _step(self, text: str) -> bool:
        """Goes past the next character that matters; False if there is none yet."""
        run = TEXT_RUN if self._is_in_string else JSON_RUN
        found = run.match(text, self._position)
        assert found is not None
        self._position = found.end()
        if self._position == len(text):
            return False
        mark = text[self._position]
        if self._is_in_string and mark == "\\":
            return self._go(text, 2)
        if mark == '"':
            self._is_in_string = not self._is_in_string
        elif mark in "{}":
            self._depth += 1 if mark == "{" else -1
        else:
            self.end = self._position
            return False
        self._go(text, 1)
        self.end = self._position if self._depth == 0 else None
        return True

    def _go(self, text: str, num_characters: int) -> bool:
        if self._position + num_characters > len(text):
            return False
        self._position += num_characters
        return True


class ToolCallParser:
    """Reads one answer. names: the tools that may be called. max_calls: what comes after so many is text."""

    def __init__(self, call_format: CallFormat, names: Collection[str], max_calls: int | None = None):
        self.num_calls = 0
        self._format = call_format
        self._names = frozenset(names)
        self._max_calls = max_calls
        self._buffer = ""  # what is not decided yet
        self._opening = ""  # what came before a call that is not whole, or after one; text if nothing follows it
        self._blank = ""  # space at the beginning of a text, which is left out beside a call
        self._is_text = False  # whether the text since the last call has more than space
        self._scanner = ObjectScanner()
        self._parts: list[Part] = []
        self._step = self._read_head if call_format.is_bare else self._read_text

    def feed(self, text: str) -> list[Part]:
        """What is certain now: text, and whole calls."""
        self._buffer += text
        while self._step():
            pass
        return self._take()

    def finish(self) -> list[Part]:
        """The rest, after the last piece."""
        self._say(self._opening + self._buffer)
        if not self.num_calls:
            self._parts += [self._blank] if self._blank else []
        self._buffer = self._opening = self._blank = ""
        return self._take()

    def _take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    def _read_text(self) -> bool:
        before, opening, after = self._buffer.partition(self._format.opening)
        if opening and not self._is_full():
            self._say(before)
            self._opening, self._buffer = opening, after
            self._step = self._read_head
            return True
        num_held = 0 if self._is_full() else num_begun(self._buffer, self._format.opening)
        cut = len(self._buffer) - num_held
        self._say(self._buffer[:cut])
        self._buffer = self._buffer[cut:]
        return False

    def _read_head(self) -> bool:
        """What stands between an opening and the object."""
        if not self._pass_space():
            return False
        self._scanner = ObjectScanner()
        if self._buffer[0] == "{":
            self._step = self._read_object
        else:
            self._give_up(0)
        return True

    def _read_object(self) -> bool:
        end = self._scanner.scan(self._buffer)
        if end is None:
            return False
        call = read_call(self._buffer[:end], self._names)
        if call is None:
            self._give_up(end)
        else:
            self._add(call, end)
        return True

    def _read_tail(self) -> bool:
        """What stands after a call."""
        mark = self._format.closing or self._format.separator or ""
        if not self._pass_space() or (len(self._buffer) < len(mark) and mark.startswith(self._buffer)):
            return False
        is_separator = self._format.separator is not None
        if not self._buffer.startswith(mark) or (is_separator and self._is_full()):
            self._give_up(0)
            return True
        self._buffer = self._buffer[len(mark) :]
        self._opening = mark if is_separator else ""
        self._step = self._read_head if is_separator else self._read_text
        return True

    def _pass_space(self) -> bool:
        """Sets space aside; whether something else comes after it."""
        rest = self._buffer.lstrip(SPACE)
        self._opening += self._buffer[: len(self._buffer) - len(rest)]
        self._buffer = rest
        return bool(rest)

    def _give_up(self, end: int) -> None:
        """What looked like a call is text, to the buffer's character end; a call may begin after it."""
        self._say(self._opening + self._buffer[:end])
        self._opening, self._buffer = "", self._buffer[end:]
        self._step = self._read_text

    def _add(self, call: ToolCall, end: int) -> None:
        self._parts.append(call)
        self.num_calls += 1
        self._opening, self._buffer = "", self._buffer[end:]
        self._blank, self._is_text = "", False
        self._step = self._read_tail

    def _say(self, text: str) -> None:
        if not self._is_text and not text.strip(SPACE):
            self._blank += text
            return
        self._parts += [self._blank + text] if self._blank or text else []
        self._blank, self._is_text = "", True

    def _is_full(self) -> bool:
        return self._max_calls is not None and self.num_calls >= self._max_calls


def num_begun(text: str, mark: str) -> int:
    """How many characters at the end of text may be the beginning of mark."""
    sizes = range(min(len(text), len(mark) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(mark[:size])), 0)


def read_call(text: str, names: Collection[str]) -> ToolCall | None:
    """The call that a JSON object is, if it is one: a name that is one of names, and arguments or parameters."""
    try:
        fields = json.loads(text, strict=False, parse_constant=_refuse_constant)
        return _call_of(fields, names)
    except (ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _call_of(fields: Any, names: Collection[str]) -> ToolCall | None:
    name = fields.get("name")
    arguments = fields.get("arguments", fields.get("parameters", {}))
    if isinstance(arguments, str):  # some models write them as a string
        arguments = json.loads(arguments, strict=False, parse_constant=_refuse_constant)
    if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
        return None
    return ToolCall(name, _dump(arguments))


def _dump(arguments: dict[str, Any]) -> str:
    """JSON as it is read most easily; escaped where it holds half of a character, which has no bytes."""
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(arguments)
    return text


def read_whole(parser: ToolCallParser, text: str) -> tuple[str | None, list[ToolCall]]:
    """The text of a whole answer, None where there are calls alone, and its calls."""
    parts = [*parser.feed(text), *parser.finish()]
    calls = [part for part in parts if isinstance(part, ToolCall)]
    content = "".join(part for part in parts if isinstance(part, str))
    return (content or None if calls else content), calls
