"""The log: its two forms, and what is never in it."""

import io
import json
import logging
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

import openai
import pytest

from paxpage.server.logs import JsonFormatter
from tests.server.conftest import PARROT_KEY
from tests.server.process import ServerProcess, wait_until

SECRET = "xyzzy-plugh"  # in prompts
LEAVE_AFTER_S = 0.5


@pytest.fixture
def stream() -> Any:
    """What a logger with a JsonFormatter wrote."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("tests.server.json")
    logger.addHandler(handler)
    logger.propagate = False
    yield written
    logger.removeHandler(handler)


def test_a_line_of_json(stream: io.StringIO) -> None:
    logger = logging.getLogger("tests.server.json")
    logger.warning('%s took %d "steps"\nand more 世', "a", 5)
    try:
        raise ValueError("inner")
    except ValueError:
        logger.exception("failed")
    first, second = map(json.loads, stream.getvalue().splitlines())
    time = datetime.fromisoformat(first.pop("time"))
    assert abs(datetime.now(UTC) - time) < timedelta(minutes=1)
    message = 'a took 5 "steps"\nand more 世'
    assert first == {"level": "WARNING", "logger": "tests.server.json", "message": message}
    assert second["exception"].startswith("Traceback") and second["exception"].endswith("ValueError: inner")


def test_a_json_log_is_json_alone(parrot: ServerProcess) -> None:
    entries = [json.loads(line) for line in parrot.log().splitlines()]
    assert {"time", "level", "logger", "message"} <= set(entries[0])
    assert f"ready at http://127.0.0.1:{parrot.port}" in [entry["message"] for entry in entries]


def test_neither_prompts_nor_keys_are_logged(parrot: ServerProcess, client: openai.OpenAI) -> None:
    """Not when a request is answered, refused, left by its client, or comes with a wrong key."""
    messages: list[Any] = [{"role": "user", "content": f"{SECRET} F"}]
    client.chat.completions.create(model="PARROT", messages=messages, user=SECRET)
    client.completions.create(model="PARROT", prompt=SECRET, max_tokens=3, extra_body={"cache_salt": SECRET})
    for body in ({"prompt": [SECRET]}, {"prompt": SECRET, SECRET: 1}, {"prompt": SECRET, "stop": [SECRET, 5]}):
        parrot.post("completions", body)
    assert parrot.client.post("/tokenize", json={"prompt": SECRET}).status_code == 200
    wrong = {"Authorization": f"Bearer {SECRET}"}
    assert parrot.client.post("/v1/completions", json={"prompt": SECRET}, headers=wrong).status_code == 401
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=LEAVE_AFTER_S).chat.completions.create(
            model="PARROT", messages=messages, max_tokens=8000, extra_body={"ignore_eos": True}
        )
    wait_until(lambda: "its client left" in parrot.log())
    assert SECRET not in parrot.log() and PARROT_KEY not in parrot.log()


def test_stderr_is_where_it_goes() -> None:
    import subprocess

    code = "import logging; from paxpage.server.logs import set_up_logging as s; s('json'); "
    code += "logging.getLogger('paxpage.x').info('hello'); logging.getLogger('other').info('no'); "
    code += "import warnings; warnings.warn('careful')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    hello, careful = map(json.loads, done.stderr.splitlines())
    assert hello["message"] == "hello" and "careful" in careful["message"]
