"""The embedded model, as a newcomer meets it."""

from collections.abc import Iterator

import openai
import pytest

from tests.server.conftest import SMALL
from tests.server.process import ServerProcess

PARIS = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]


@pytest.fixture(scope="module")
def smol() -> Iterator[ServerProcess]:
    with ServerProcess(*SMALL, "--max_model_len=2048") as server:
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


def test_a_stop_string_over_token_borders(smol: ServerProcess) -> None:
    body = {"prompt": "Letters in order: A B C", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    text = smol.complete(body["prompt"], max_tokens=16)["choices"][0]["text"]
    k = next(k for k in range(2, len(text) - 7) if text.find(text[k : k + 7]) == k)
    stopped = {**body, "stop": text[k : k + 7]}
    whole = smol.post("completions", stopped).json()["choices"][0]
    streamed = "".join(chunk["choices"][0]["text"] for chunk in list(smol.stream("completions", stopped))[:-1])
    assert (whole["text"], streamed, whole["finish_reason"]) == (text[:k], text[:k], "stop")
