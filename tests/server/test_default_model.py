"""The embedded model, as a newcomer meets it."""

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from paxpage.models.embedded import default_model_path
from paxpage.models.loading import load_tokenizer, open_model
from tests.helpers.oracle import logits_of
from tests.helpers.shelf import Shelf
from tests.server.conftest import SMALL
from tests.server.process import AbandonedRequest, ServerProcess

PARIS = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]


@pytest.fixture(scope="module")
def smol() -> Iterator[ServerProcess]:
    with ServerProcess(*SMALL, "--max_model_len=4096") as server:
        yield server.wait_ready()


def test_what_is_printed_when_it_is_ready(smol: ServerProcess) -> None:
    lines = smol.log().splitlines()
    start = lines.index(f"ready at {smol.url}")
    assert f"curl {smol.url}/v1/chat/completions" in lines[start + 1]
    assert "Ctrl-C" in lines[start + 2] and "--model=" in lines[start + 3]


def test_it_knows_a_capital_whole_and_streamed(smol: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{smol.url}/v1", api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id
        ask = {"model": model, "messages": PARIS, "max_tokens": 24, "temperature": 0}
        whole = client.chat.completions.create(**ask).choices[0]
        assert "Paris" in whole.message.content and whole.finish_reason == "stop"
        chunks = list(client.chat.completions.create(**ask, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
        assert chunks[-1].choices[0].finish_reason == "stop"


def test_no_bos_is_added(smol: ServerProcess) -> None:
    prompt_ids = smol.complete("Hi", max_tokens=1)["choices"][0]["prompt_token_ids"]
    assert len(prompt_ids) == 1
    refused = smol.post("completions", {"prompt": ""})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
    assert smol.post("completions", {"prompt": [49152]}).status_code == 400


def test_a_chat_is_its_template_and_nothing_else(smol: ServerProcess, tokenizer: Any) -> None:
    rendered = tokenizer.apply_chat_template(PARIS, tokenize=False, add_generation_prompt=True)
    body = {"messages": PARIS, "max_tokens": 1, "return_token_ids": True}
    chat_ids = smol.post("chat/completions", body).json()["prompt_token_ids"]
    assert chat_ids == smol.complete(rendered, max_tokens=1)["choices"][0]["prompt_token_ids"]
    assert chat_ids == tokenizer.encode(rendered, add_special_tokens=False)


# Case 23: ids at the edge of a large vocabulary, beside a running stream; the rest of the case is in test_requests.py


def test_biases_at_the_edge_of_the_vocabulary(smol: ServerProcess) -> None:
    alone = smol.complete("The blue kettle", max_tokens=60)["choices"][0]["token_ids"]
    running = {"prompt": "The blue kettle", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    stream = smol.stream("completions", {**running, "return_token_ids": True})
    received = next(stream)["choices"][0]["token_ids"]
    body = {"prompt": "x", "max_tokens": 4, "ignore_eos": True, "return_token_ids": True}
    for bias, status in (({"49151": -100}, 200), ({"49152": -100}, 400), ({str(i): -1 for i in range(2000)}, 200)):
        response = httpx.post(f"{smol.url}/v1/completions", json={**body, "logit_bias": bias}, timeout=60)
        assert response.status_code == status, response.text
        assert status == 200 or (response.json()["error"]["param"], "49152" in response.text) == ("logit_bias", True)
    forced = httpx.post(f"{smol.url}/v1/completions", json={**body, "logit_bias": {"260": 100}}, timeout=60)
    assert forced.json()["choices"][0]["token_ids"] == [260] * 4
    for chunk in stream:
        received += [] if chunk == "[DONE]" else chunk["choices"][0]["token_ids"]
    assert received == alone
    smol.check_alive()


def test_a_stop_string_over_token_borders(smol: ServerProcess) -> None:
    body = {"prompt": "Letters in order: A B C", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    text = smol.complete(body["prompt"], max_tokens=16)["choices"][0]["text"]
    k = next(k for k in range(2, len(text) - 7) if text.find(text[k : k + 7]) == k)
    stopped = {**body, "stop": text[k : k + 7]}
    whole = smol.post("completions", stopped).json()["choices"][0]
    streamed = "".join(chunk["choices"][0]["text"] for chunk in list(smol.stream("completions", stopped))[:-1])
    assert (whole["text"], streamed, whole["finish_reason"]) == (text[:k], text[:k], "stop")


# Case 13: characters cut between tokens, over HTTP; all 20 seeds, in the engine: tests/cases/test_case_13.py


def test_hot_streams_join_to_the_whole_texts(smol: ServerProcess) -> None:
    body = {"prompt": "Greetings in many scripts: ", "temperature": 1.5, "seed": 0, "max_tokens": 64, "n": 8}
    whole = smol.complete(**body)["choices"]
    texts, pieces = [""] * 8, 0
    for event in list(smol.stream("completions", {**body, "ignore_eos": True}))[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
            pieces += 1
    assert texts == [choice["text"] for choice in whole] and len(set(texts)) == 8
    assert pieces < sum(len(choice["token_ids"]) for choice in whole)  # some were held back


# Case 17: values; the rest of the case is in test_requests.py


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(open_model(default_model_path()))


def expected_logprobs(shelf: Shelf, prompt_ids: list[int], token_ids: list[int]) -> np.ndarray:
    """[num_tokens, vocab_size]: transformers' log-softmax, float32, at each of token_ids."""
    logits = logits_of(shelf.smol_oracle(), prompt_ids + token_ids)[len(prompt_ids) - 1 : -1].astype(np.float64)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("fields", [{}, {"n": 2, "temperature": 1.0, "seed": 3}])
def test_completion_logprobs_are_transformers_own(
    smol: ServerProcess, shelf: Shelf, tokenizer: Any, fields: dict[str, Any]
) -> None:
    choices = smol.complete("Blue kettle, seven doors", max_tokens=6, logprobs=5, **fields)["choices"]
    assert len(choices) == fields.get("n", 1)
    for choice in choices:
        token_ids, logprobs = choice["token_ids"], choice["logprobs"]
        rows = expected_logprobs(shelf, choice["prompt_token_ids"], token_ids)
        assert len(token_ids) == len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == 6
        for i, (token_id, row) in enumerate(zip(token_ids, rows, strict=True)):
            assert logprobs["token_logprobs"][i] == pytest.approx(row[token_id], abs=1e-3)
            shown = {token_id, *np.argsort(-row)[:5].tolist()}
            expected = {tokenizer.decode([other]): row[other] for other in shown}
            assert logprobs["top_logprobs"][i] == pytest.approx(expected, abs=1e-3)


def test_chat_logprobs_are_transformers_own(smol: ServerProcess, shelf: Shelf, tokenizer: Any) -> None:
    body = {"messages": PARIS, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = smol.post("chat/completions", {**body, "logprobs": True, "top_logprobs": 5}).json()
    token_ids = answer["choices"][0]["token_ids"]
    content = answer["choices"][0]["logprobs"]["content"]
    rows = expected_logprobs(shelf, answer["prompt_token_ids"], token_ids)
    for token_id, row, entry in zip(token_ids, rows, content, strict=True):
        assert entry["logprob"] == pytest.approx(row[token_id], abs=1e-3)
        best = np.argsort(-row)[:5]
        assert [top["token"] for top in entry["top_logprobs"]] == [tokenizer.decode([other]) for other in best]
        assert [top["logprob"] for top in entry["top_logprobs"]] == pytest.approx(row[best], abs=1e-3)


# Case 25: clients killed after a second; the rest of the case is in test_clients_leaving.py


def test_chats_whose_clients_are_killed(smol: ServerProcess) -> None:
    body = json.dumps({"messages": PARIS, "max_tokens": 4000, "temperature": 0, "ignore_eos": True}).encode()
    for _ in range(4):
        request = AbandonedRequest(smol, "chat/completions", body)
        time.sleep(1)
        assert smol.metrics()["num_requests_running"] == 1
        request.leave()
        smol.wait_idle(3)
    num_tokens = smol.metrics()["generation_tokens_total"]
    smol.check_alive()
    assert smol.metrics()["generation_tokens_total"] == num_tokens + 5
    assert smol.log().count("its client left") == 4 and "Traceback" not in smol.log()
