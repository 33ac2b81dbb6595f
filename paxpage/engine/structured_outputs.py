"""What an output must look like: a JSON schema, a regex, a choice or a grammar, checked on construction."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from paxpage.config import require, require_unicode

MAX_GRAMMAR_CHARS = 128 * 1024  # of a schema, a regex, a grammar, or all choices together
KINDS = ("json", "regex", "choice", "grammar", "json_object")
# Between tokens of JSON. Without a bound models, small ones above all, may go on with white space for ever.
WHITE_SPACE = r"[ \t\r\n]{1,40}"
ANY_OBJECT = '{"type": "object"}'


class GrammarSource(NamedTuple):
    """One of KINDS, and its text: a schema's or a list's as JSON."""

    kind: str
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What the whole output must match; exactly one is given. Nothing else can be sampled, greedily or not.

    json: a JSON schema, as a dict or as its text. What llguidance cannot follow of it is refused by name. White space
        between tokens is at most 40 characters long; the schema's own "x-guidance": {"whitespace_flexible": false}
        allows none.
    regex: in Rust's syntax, without look-around and back references; the whole output matches it.
    choice: strings, one of which the output is.
    grammar: in llguidance's dialect of Lark, or in GBNF.
    json_object: True for any JSON object.
    """

    json: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        is_flag = self.json_object is None or isinstance(self.json_object, bool)
        require(is_flag, "structured_outputs.json_object", self.json_object, "True, or None")
        given = [kind for kind in KINDS if getattr(self, kind) not in (None, False)]
        require(len(given) == 1, "structured_outputs", given, f"exactly one of {', '.join(KINDS)}")
        num_chars = len(self.source.text)
        field = f"structured_outputs.{given[0]}"
        allowed = f"at most {MAX_GRAMMAR_CHARS} characters"
        require(num_chars <= MAX_GRAMMAR_CHARS, field, f"{num_chars} characters long", allowed)
        require_unicode(field, self.source.text)

    @property
    def source(self) -> GrammarSource:
        """What is to be compiled. Two params with the same one ask for the same."""
        if self.json is not None:
            return GrammarSource("json", _schema_text(self.json))
        if self.choice is not None:
            return GrammarSource("choice", _choice_text(self.choice))
        if self.json_object:
            return GrammarSource("json_object", ANY_OBJECT)
        kind = "grammar" if self.regex is None else "regex"
        text = getattr(self, kind)
        require(isinstance(text, str) and text != "", f"structured_outputs.{kind}", text, "a non-empty string")
        return GrammarSource(kind, text)


def _schema_text(schema: object) -> str:
    field, allowed = "structured_outputs.json", "a JSON schema: an object, or its text"
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
        is_object = isinstance(json.loads(text), dict)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{field} is no JSON schema: {error}; allowed: {allowed}") from None
    require(is_object, field, schema, allowed)
    return text


def _choice_text(choice: object) -> str:
    is_list = isinstance(choice, Sequence) and not isinstance(choice, str) and len(choice) > 0
    is_valid = is_list and all(isinstance(item, str) and item for item in choice)  # type: ignore[attr-defined]
    require(is_valid, "structured_outputs.choice", choice, "a list of at least one non-empty string")
    return json.dumps(choice if isinstance(choice, list) else list(choice), ensure_ascii=False)  # type: ignore[call-overload]
