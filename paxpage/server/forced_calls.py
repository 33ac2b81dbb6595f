"""Calls that have to come: the grammar of an answer that is calls of tools and nothing else."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from paxpage.config import require
from paxpage.engine.structured_outputs import WHITE_SPACE, StructuredOutputsParams
from paxpage.server.tool_calls import CallFormat

NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
OPEN = ("additionalProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf")  # say more on an object's keys
SPACE = r"/[ \n]{0,2}/"  # where models put a line's end or nothing


def forced_calls(
    tools: Sequence[Mapping[str, Any]],
    call_format: CallFormat,
    marks: Collection[str],
    *,
    name: str | None = None,
    is_one: bool,
) -> StructuredOutputsParams:
    """What the output of an answer must match that calls one of tools; several times if it likes, unless is_one.

    tools: in OpenAI's form; name: of the only one to call. Arguments follow a tool's parameters; a tool without them
    takes none; one that lists properties, and says nothing of others, takes no others. marks: of the format's opening
    and closing, those that are tokens of their own.

    Raises:
        ValueError: the parameters of a tool are no schema of an object, or all together are too long.
    """
    functions = [(index, tool["function"]) for index, tool in enumerate(tools)]
    allowed = [(index, function) for index, function in functions if name in (None, function["name"])]
    objects = [_object(index, function, call_format.arguments) for index, function in allowed]
    call = " | ".join(objects)
    if call_format.closing is not None:
        call = f"{_mark(call_format.opening, marks)} {SPACE} ({call}) {SPACE} {_mark(call_format.closing, marks)}"
    between = SPACE if call_format.separator is None else f"{_quoted(call_format.separator)} {SPACE}"
    start = "call" if is_one else f"call ({between} call)*"
    return StructuredOutputsParams(grammar=f"start: {start}\ncall: {call}\n")


def _object(index: int, function: Mapping[str, Any], arguments: str) -> str:
    """A call as models write it, in llguidance's dialect of Lark."""
    head = f'{{"name": {_quoted(function["name"])}, {_quoted(arguments)}: '
    given = function.get("parameters")
    schema = NO_ARGUMENTS if given is None else _of_object(f"tools.{index}.function.parameters", given)
    if "x-guidance" not in schema:
        schema = {**schema, "x-guidance": {"whitespace_pattern": WHITE_SPACE}}
    return f'{_quoted(head)} %json {json.dumps(schema)} "}}"'


def _of_object(field: str, schema: Any) -> Mapping[str, Any]:
    """A schema, which may have left out that what it describes is an object, and has the keys that are listed."""
    kind = schema.get("type", "object") if isinstance(schema, dict) else None
    is_object = kind == "object" or (isinstance(kind, list) and "object" in kind)
    require(is_object, field, schema, 'a JSON schema of type "object", when tool_choice forces a call')
    is_closed = "properties" in schema and not any(key in schema for key in OPEN)
    return {**schema, "type": "object", **({"additionalProperties": False} if is_closed else {})}


def _mark(text: str, marks: Collection[str]) -> str:
    """A token by its name, which no spelling stands for; else the text."""
    return text if text in marks else _quoted(text)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
