"""Prefix caching as a client sees it: cached_tokens, cache_salt, the metrics, and the explanation of a hit rate."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import SMALL
from tests.server.process import ServerProcess

BLOCK_SIZE = 16
PROMPT = [50 + (7 * i) % 400 for i in range(70)]  # four whole blocks and 6 tokens


@pytest.fixture(scope="module")
def server(tiny_dir: Path) -> Iterator[ServerProcess]:
    """A server whose cache nobody else fills."""
    with ServerProcess(f"--model={tiny_dir}", "--num_blocks=64", "--max_model_len=512", *SMALL) as server:
        yield server.wait_ready()
        assert "Traceback" not in server.log()


def complete(server: ServerProcess, prompt: list[int], **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 3, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **fields}
    answer = server.client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def num_cached(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def explain(server: ServerProcess, **body: Any) -> dict[str, Any]:
    answer = server.client.post("/debug/explain_cache", json=body)
    assert answer.status_code == 200, answer.text
    (prompt,) = answer.json()["prompts"]
    return prompt


def test_a_prompt_that_was_seen_is_not_computed_again(server: ServerProcess) -> None:
    salt = {"cache_salt": "seen"}
    first, second = complete(server, PROMPT, **salt), complete(server, PROMPT, **salt)
    other = complete(server, [*PROMPT[:60], 1, 2, 3], **salt)  # 12 tokens of the fourth block are its own
    assert [num_cached(answer) for answer in (first, second, other)] == [0, 64, 60]
    assert first["choices"] == second["choices"]


def test_salts_share_nothing(server: ServerProcess) -> None:
    first, second = (complete(server, PROMPT, cache_salt=salt) for salt in ("tenant a", "tenant b"))
    assert [num_cached(answer) for answer in (first, second)] == [0, 0]
    assert num_cached(complete(server, PROMPT, cache_salt="tenant a")) == 64
    assert first["choices"] == second["choices"]


@pytest.mark.parametrize("salt", ["", 7, "x" * 257])
def test_a_bad_salt_is_refused_by_name(server: ServerProcess, salt: Any) -> None:
    answer = server.client.post("/v1/completions", json={"prompt": PROMPT, "cache_salt": salt})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "cache_salt"


def test_samples_of_one_prompt_share_its_blocks(server: ServerProcess) -> None:
    """61 tokens are 4 blocks, 3 of them whole; four samples of 30 tokens on 63 blocks preempt nobody."""
    answer = complete(server, [3, *PROMPT[:60]], n=4, seed=1, temperature=1.0, max_tokens=30)
    texts = {tuple(choice["token_ids"]) for choice in answer["choices"]}
    assert len(answer["choices"]) == 4 and len(texts) == 4
    assert answer["usage"]["completion_tokens"] == 120
    assert server.metrics()["num_preemptions_total"] == 0


def test_metrics_count_lookups_and_hits(server: ServerProcess) -> None:
    names = ("prefix_cache_queries_total", "prefix_cache_hits_total")
    before = server.metrics()
    for _ in range(2):
        complete(server, PROMPT, cache_salt="metrics")
    after = server.metrics()
    assert [after[name] - before[name] for name in names] == [140, 64]


def test_the_explanation_says_block_by_block_what_is_found(server: ServerProcess) -> None:
    salt = {"cache_salt": "explain"}
    assert [block["verdict"] for block in explain(server, prompt=PROMPT, **salt)["blocks"]] == ["miss"] * 4
    complete(server, PROMPT, **salt)
    found = explain(server, prompt=[*PROMPT[:37], 1, *PROMPT[38:]], **salt)
    assert found["num_tokens"] == 70 and found["num_blocks_hit"] == 2
    assert [block["verdict"] for block in found["blocks"]] == ["hit", "hit", "differs", "miss"]
    assert found["blocks"][2]["first_difference"] == 37
    assert [block["place"] for block in found["blocks"]] == [0, 1, 2, 3]


def test_what_was_evicted_is_said_to_be(server: ServerProcess) -> None:
    complete(server, PROMPT, cache_salt="old")
    for index in range(5):
        complete(server, [index, *PROMPT * 3], cache_salt=f"new {index}")
    verdicts = [block["verdict"] for block in explain(server, prompt=PROMPT, cache_salt="old")["blocks"]]
    assert verdicts == ["evicted"] * 4


def test_conversations_are_explained_too(server: ServerProcess) -> None:
    messages = [{"role": "user", "content": "The blue kettle stands on the stove and the seven doors are open. " * 3}]
    before = explain(server, messages=messages)
    answer = server.client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
    assert answer.status_code == 200
    after = explain(server, messages=messages)
    assert (before["num_blocks_hit"], after["num_blocks_hit"]) == (0, len(after["blocks"]))


@pytest.mark.parametrize(("body", "param"), [({}, "prompt"), ({"prompt": [99999]}, "prompt"), ({"messages": []}, None)])
def test_what_cannot_be_explained_is_a_400(server: ServerProcess, body: dict[str, Any], param: str | None) -> None:
    answer = server.client.post("/debug/explain_cache", json=body)
    assert answer.status_code == 400
    assert param in (None, answer.json()["error"]["param"])
