"""Requests to a real server of TINY: text, templates, log-probabilities, seeds, faulty input (cases 11 to 27, 39)."""

import concurrent.futures
import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from paxpage import LLM, SamplingParams
from tests.server.process import ServerProcess
from tests.server.tiny import MAX_MODEL_LEN, VOCAB_SIZE, make_tokenizer

HELLO = [{"role": "user", "content": "Hi"}]
SEEDED = {"prompt": list(range(50, 60)), "temperature": 0.8, "seed": 42, "max_tokens": 16, "ignore_eos": True}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="module")
def reference(tiny_dir: Path) -> Any:
    """The checkpoint in transformers, float32."""
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(tiny_dir).eval()


def token_ids(server: ServerProcess, **body: Any) -> list[list[int]]:
    """The token ids of every choice of a completion that must succeed."""
    response = server.post("completions", {"return_token_ids": True, **body})
    assert response.status_code == 200, response.text
    return [choice["token_ids"] for choice in response.json()["choices"]]


def at_once[ResultT](jobs: list[Callable[[], ResultT]]) -> list[ResultT]:
    """Runs jobs on as many threads."""
    with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result() for future in [pool.submit(job) for job in jobs]]


def joined(chunks: list[Any]) -> str:
    """The text of a completion stream with one choice."""
    return "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])


# Equality with transformers, which the other tests build on


def test_tiny_can_show_faults_and_equals_transformers(tiny: ServerProcess, reference: Any) -> None:
    from tests.server.tiny import greedy

    first = tiny.complete([50, 51, 52], max_tokens=32)["choices"][0]["token_ids"]
    other = tiny.complete([49, 51, 52], max_tokens=32)["choices"][0]["token_ids"]
    assert len(set(first)) >= 5 and first != other
    assert first == greedy(reference, [50, 51, 52], 32)


# Case 11: stop strings


def find_stop(text: str, tokens: list[str], offsets: list[int]) -> int:
    """k so that text[k:k+7] begins inside one token, ends inside a later one, and first occurs at k; or -1."""
    inside = {offset + i for offset, token in zip(offsets, tokens, strict=True) for i in range(1, len(token))}
    candidates = [
        k for k in range(3, len(text) - 8) if k in inside and k + 7 in inside and "\ufffd" not in text[k : k + 8]
    ]
    return next((k for k in candidates if text.find(text[k : k + 7]) == k and text.find(text[k : k + 3]) == k), -1)


def test_stop_strings_over_token_borders(tiny: ServerProcess) -> None:
    for prompt in (
        f"the {word}" for word in ("river", "house", "table", "wagons", "ships", "garden", "lamps", "bread")
    ):
        body = {"prompt": prompt, "max_tokens": 48, "temperature": 0, "ignore_eos": True, "logprobs": 0}
        choice = tiny.post("completions", body).json()["choices"][0]
        text = choice["text"]
        k = find_stop(text, choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"])
        if k >= 0:
            break
    else:
        pytest.fail("no prompt gives a text to stop in")
    body.pop("logprobs")
    for stop, kept in ((text[k : k + 7], 7), ([text[k : k + 3], text[k : k + 7]], 3)):
        for fields, end in (({}, k), ({"include_stop_str_in_output": True}, k + kept)):
            stopped = {**body, **fields, "stop": stop}
            whole = tiny.post("completions", stopped).json()["choices"][0]
            chunks = list(tiny.stream("completions", stopped))[:-1]
            assert whole["text"] == joined(chunks) == text[:end]
            assert whole["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == "stop"
            assert whole["stop_reason"] == text[k : k + kept]


def test_streamed_text_equals_whole_text_at_high_temperature(tiny: ServerProcess) -> None:
    for seed in range(5):
        body = {"prompt": "the", "max_tokens": 40, "temperature": 1.5, "seed": seed, "ignore_eos": True}
        whole = tiny.post("completions", body).json()["choices"][0]["text"]
        assert joined(list(tiny.stream("completions", body))[:-1]) == whole


# Case 15: BOS, EOS, chat templates


def test_chat_ids_are_the_templates_with_one_bos(tiny: ServerProcess, tokenizer: Any) -> None:
    expected = tokenizer.apply_chat_template(HELLO, tokenize=True, return_dict=False, add_generation_prompt=True)
    assert expected.count(0) == 1
    rendered = tokenizer.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
    body = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    chat = tiny.post("chat/completions", {**body, "messages": HELLO}).json()
    assert chat["prompt_token_ids"] == expected
    answers = [chat["choices"][0]["token_ids"]]
    for prompt in (rendered, expected):
        choice = tiny.post("completions", {**body, "prompt": prompt}).json()["choices"][0]
        assert choice["prompt_token_ids"] == expected
        answers.append(choice["token_ids"])
    assert answers[0] == answers[1] == answers[2]
    plain = tiny.post("completions", {**body, "prompt": "Hi"}).json()["choices"][0]
    assert plain["prompt_token_ids"] == tokenizer.encode("Hi") and plain["prompt_token_ids"][0] == 0
    untouched = tiny.post("completions", {**body, "prompt": [0, 0, 90]}).json()["choices"][0]
    assert untouched["prompt_token_ids"] == [0, 0, 90]


def test_offline_and_online_agree_on_the_prompt(tiny: ServerProcess, tiny_dir: Path, tokenizer: Any) -> None:
    """A message, its rendered text and its ids, asked of the server and of an LLM: one BOS, by one rule."""
    rendered = tokenizer.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
    expected = tokenizer.apply_chat_template(HELLO, tokenize=True, return_dict=False, add_generation_prompt=True)
    prompts = {rendered: expected, "Hi": tokenizer.encode("Hi")}
    body = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    chat = tiny.post("chat/completions", {**body, "messages": HELLO}).json()
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    with LLM(str(tiny_dir), max_num_seqs=4, max_num_batched_tokens=48, max_model_len=256, show_progress=False) as llm:
        outputs = [*llm.chat(HELLO, params, use_tqdm=False), *llm.generate(list(prompts), params, use_tqdm=False)]
        outputs += llm.generate([{"prompt_token_ids": [0, 0, 90]}], params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [expected, *prompts.values(), [0, 0, 90]]
    online = [chat["choices"][0]["token_ids"]]
    online += [tiny.complete(prompt, max_tokens=8)["choices"][0]["token_ids"] for prompt in (*prompts, [0, 0, 90])]
    assert [output.outputs[0].token_ids for output in outputs] == online


def test_forms_of_a_conversation(tiny: ServerProcess, tokenizer: Any) -> None:
    def prompt_ids(messages: list[Any], **fields: Any) -> list[int]:
        body = {"messages": messages, "max_tokens": 1, "return_token_ids": True, **fields}
        response = tiny.post("chat/completions", body)
        assert response.status_code == 200, response.text
        return response.json()["prompt_token_ids"]

    parts = [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}]
    assert prompt_ids(parts) == prompt_ids(HELLO)
    ended = [*HELLO, {"role": "assistant", "content": "The bread"}]
    render = functools.partial(tokenizer.apply_chat_template, ended, tokenize=True, return_dict=False)
    assert prompt_ids(ended) == render(add_generation_prompt=True)
    assert prompt_ids(ended, add_generation_prompt=False) == render()
    assert prompt_ids(ended, continue_final_message=True) == render(continue_final_message=True)


def test_each_eos_that_is_forced_ends_a_request(tiny: ServerProcess, tiny_dir: Path) -> None:
    for eos_id in json.loads((tiny_dir / "generation_config.json").read_text())["eos_token_id"]:
        body = {"prompt": [60], "max_tokens": 9, "logit_bias": {str(eos_id): 100}, "return_token_ids": True}
        (choice,) = tiny.post("completions", body).json()["choices"]
        assert (choice["token_ids"], choice["finish_reason"]) == ([eos_id], "stop")


def test_tools_reach_the_template(tiny: ServerProcess) -> None:
    """And calls and their results, which the model is shown as what they mean."""

    def text_of(tokens: list[int]) -> str:
        return tiny.client.post("/detokenize", json={"tokens": tokens}).json()["prompt"]

    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    result = {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "sunny"}]}
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    said = "<|user|>Hi\n<|assistant|>weather(Rome)\n<|tool|>sunny\n<|assistant|>"
    body = {"messages": messages, "max_tokens": 1, "tools": tools, "return_token_ids": True}
    for fields, shown in (({}, "weather|"), ({"tool_choice": "auto"}, "weather|"), ({"tool_choice": "none"}, "")):
        answer = tiny.post("chat/completions", body | fields).json()
        assert text_of(answer["prompt_token_ids"]) == f"<s>{shown}{said}"
    tokens = tiny.client.post("/tokenize", json={"messages": messages, "tools": tools}).json()["tokens"]
    assert text_of(tokens) == f"<s>weather|{said}"
    for bad in ("{", "5", '["city"]'):
        broken = {**call, "function": {"name": "weather", "arguments": bad}}
        asked = [*HELLO, {"role": "assistant", "tool_calls": [broken]}]
        check_refused(tiny.post("chat/completions", {"messages": asked}), "tool_calls")
    check_refused(tiny.post("chat/completions", body | {"tool_choice": "required"}), "tool_choice")


def test_each_eos_of_the_generation_config_ends_a_request(tiny: ServerProcess, tiny_dir: Path) -> None:
    eos_ids = json.loads((tiny_dir / "generation_config.json").read_text())["eos_token_id"]
    for prompt, eos_id in (([60], eos_ids[0]), ([70], eos_ids[1])):
        whole = tiny.complete(prompt, max_tokens=30)["choices"][0]["token_ids"]
        ended = tiny.complete(prompt, max_tokens=30, ignore_eos=False)["choices"][0]
        assert eos_id in whole and ended["finish_reason"] == "stop"
        assert ended["token_ids"] == whole[: len(ended["token_ids"])] and ended["token_ids"][-1] in eos_ids


# Case 17: log-probabilities


def completion_logprobs(server: ServerProcess, **fields: Any) -> list[dict[str, Any]]:
    """Per choice the logprobs, whole; checks that the stream gives the same."""
    body = {"prompt": "Blue kettle, seven doors", "max_tokens": 6, "ignore_eos": True, "seed": 3, **fields}
    whole = server.post("completions", body).json()["choices"]
    streamed: dict[int, dict[str, list[Any]]] = {}
    for chunk in list(server.stream("completions", body))[:-1]:
        choice = chunk["choices"][0]
        parts = streamed.setdefault(choice["index"], {key: [] for key in whole[0]["logprobs"]})
        for key, values in choice["logprobs"].items():
            parts[key] += values
    assert streamed == {choice["index"]: choice["logprobs"] for choice in whole}
    return [choice["logprobs"] for choice in whole]


@pytest.mark.parametrize("num_top", [0, 1, 5])
@pytest.mark.parametrize("n", [1, 2])
def test_completion_logprobs(tiny: ServerProcess, num_top: int, n: int) -> None:
    for logprobs in completion_logprobs(tiny, logprobs=num_top, n=n, temperature=1.0 if n > 1 else 0):
        assert {key: len(values) for key, values in logprobs.items()} == dict.fromkeys(logprobs, 6)
        for token, value, top in zip(*(logprobs[k] for k in ("tokens", "token_logprobs", "top_logprobs")), strict=True):
            assert top[token] == value
            assert max(num_top, 1) <= len(top) <= num_top + 1
            assert n > 1 or value == max(top.values())
    assert list(logprobs) == ["text_offset", "token_logprobs", "tokens", "top_logprobs"]


@pytest.mark.parametrize("num_top", [None, 0, 5])
def test_chat_logprobs(tiny: ServerProcess, num_top: int | None) -> None:
    body = {"messages": HELLO, "max_tokens": 6, "ignore_eos": True, "temperature": 0, "logprobs": True}
    body |= {} if num_top is None else {"top_logprobs": num_top}
    content = tiny.post("chat/completions", body).json()["choices"][0]["logprobs"]["content"]
    chunks = list(tiny.stream("chat/completions", body))[:-1]
    streamed = [c["choices"][0]["logprobs"]["content"] for c in chunks if c["choices"][0]["logprobs"]]
    assert [entry for part in streamed for entry in part] == content
    assert len(content) == 6
    for entry in content:
        assert len(entry["top_logprobs"]) == (num_top or 0)
        if num_top:
            assert {k: entry[k] for k in ("token", "logprob", "bytes")} == entry["top_logprobs"][0]
    if num_top:
        assert len({json.dumps(entry["top_logprobs"]) for entry in content}) > 1


def test_logprob_values_equal_the_references(tiny: ServerProcess, reference: Any) -> None:
    import torch

    prompt = [60, 61, 62]
    choice = tiny.complete(prompt, max_tokens=6, logprobs=0)["choices"][0]
    ids = torch.tensor([prompt + choice["token_ids"]])
    with torch.no_grad():
        logprobs = torch.log_softmax(reference(ids).logits[0].double(), dim=-1)
    expected = [logprobs[len(prompt) - 1 + i, token_id].item() for i, token_id in enumerate(choice["token_ids"])]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("stream", [False, True])
def test_bad_logprobs_are_400(tiny: ServerProcess, stream: bool) -> None:
    for value in (-1, 10000, "2"):
        response = tiny.post("completions", {"prompt": "x", "logprobs": value, "stream": stream})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "logprobs")
    for fields in ({"top_logprobs": 5}, *({"logprobs": True, "top_logprobs": value} for value in (-1, 10000, "2"))):
        response = tiny.post("chat/completions", {"messages": HELLO, "stream": stream, **fields})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "top_logprobs")


# Case 19: seeds


def test_a_seed_gives_the_same_tokens_in_any_company(tiny: ServerProcess) -> None:
    run = functools.partial(token_ids, tiny, **SEEDED)
    alone = run()
    unseeded = {"prompt": [80, 81], "temperature": 1.0, "max_tokens": 24, "ignore_eos": True}
    for others in ([unseeded], [{**unseeded, "seed": 7}], [unseeded] * 3, [{**unseeded, "n": 3}]):
        first, *_ = at_once([run, *(functools.partial(token_ids, tiny, **other) for other in others)])
        assert first == alone
    texts = [token_ids(tiny, **unseeded)[0] for _ in range(3)]
    assert len({tuple(text) for text in texts}) > 1
    with_n = run(n=3)
    assert with_n[0] == alone[0] and len({tuple(ids) for ids in with_n}) == 3
    assert run(n=3) == with_n


@pytest.mark.parametrize(
    ("seed", "status"), [(0, 200), (-1, 200), (2**31, 200), (2**63 - 1, 200), (2**63, 400), ("7", 400)]
)
def test_seeds_at_their_limits(tiny: ServerProcess, seed: Any, status: int) -> None:
    responses = [tiny.post("completions", {**SEEDED, "seed": seed, "return_token_ids": True}) for _ in range(2)]
    assert [response.status_code for response in responses] == [status] * 2
    if status == 200:
        assert responses[0].json()["choices"] == responses[1].json()["choices"]
    else:
        assert responses[0].json()["error"]["param"] == "seed"


# Case 21: temperatures


def test_tiny_temperatures_are_greedy_alone_and_together(tiny: ServerProcess) -> None:
    body = {"prompt": [60, 61], "max_tokens": 16, "ignore_eos": True, "seed": 1}
    temperatures = (0, 1e-12, 1e-8, 1e-4, 1e-2)
    alone = [token_ids(tiny, **body, temperature=t)[0] for t in temperatures]
    assert alone[0] == alone[1] == alone[2]
    assert len(set(alone[0])) > 1
    jobs = [functools.partial(token_ids, tiny, **body, temperature=t) for t in (*temperatures, 1.0)]
    assert [ids[0] for ids in at_once(jobs)[:-1]] == alone


@pytest.mark.parametrize("temperature", ["-0.1", "NaN", '"hot"', "1e9", "[]", "1e400", "true"])
def test_bad_temperatures_are_400(tiny: ServerProcess, temperature: str) -> None:
    body = f'{{"prompt": [60], "max_tokens": 2, "temperature": {temperature}}}'
    response = tiny.client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "temperature")


def test_penalties_are_taken(tiny: ServerProcess) -> None:
    body = {"prompt": [60], "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    plain = token_ids(tiny, **body)[0]
    assert len(set(plain)) < 24, "nothing is repeated that could be penalised"
    fields = ({"repetition_penalty": 1e3}, {"presence_penalty": 2}, {"frequency_penalty": 2}, {"presence_penalty": -2})
    answers = [token_ids(tiny, **body, **each)[0] for each in fields]
    assert all(answer != plain for answer in answers[:3])
    assert len(set(answers[0])) == 24
    together = at_once([functools.partial(token_ids, tiny, **body, **each) for each in fields])
    assert [ids[0] for ids in together] == answers
    neutral = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "logit_bias": {}}
    assert token_ids(tiny, **body, **neutral)[0] == plain


@pytest.mark.parametrize(
    ("field", "value"),
    [("repetition_penalty", 0), ("presence_penalty", 2.1), ("frequency_penalty", "1"), ("presence_penalty", True)],
)
def test_bad_penalties_are_400(tiny: ServerProcess, field: str, value: Any) -> None:
    response = tiny.post("completions", {"prompt": [60], "max_tokens": 2, field: value})
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)


# Case 23: token ids out of range, and what comes beside a running stream


@pytest.mark.parametrize("prompt", [[VOCAB_SIZE], [-1], [2**40], [1, VOCAB_SIZE], [2**70]])
def test_prompt_ids_out_of_range_are_400(tiny: ServerProcess, prompt: list[int]) -> None:
    response = tiny.post("completions", {"prompt": prompt, "max_tokens": 1})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize(
    "bias", ['{"abc": 1}', '{"-1": 1}', '{"512": -100}', '{"5": "x"}', '{"5": 1e30}', '{"5": NaN}']
)
def test_illegal_logit_biases_are_400_beside_a_running_stream(tiny: ServerProcess, bias: str) -> None:
    alone = tiny.complete([60, 61], max_tokens=100)["choices"][0]["text"]
    stream = tiny.stream("completions", {"prompt": [60, 61], "max_tokens": 100, "temperature": 0, "ignore_eos": True})
    first = next(stream)
    content = f'{{"prompt": [60], "max_tokens": 2, "logit_bias": {bias}}}'
    headers = {"Content-Type": "application/json"}
    response = httpx.post(f"{tiny.url}/v1/completions", content=content, headers=headers)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "logit_bias")
    assert joined([first, *list(stream)[:-1]]) == alone
    tiny.check_alive()


def test_logit_bias_forces_and_bans(tiny: ServerProcess) -> None:
    """At the vocabulary's edge too, and with very many entries."""
    body = {"prompt": [60], "max_tokens": 8, "ignore_eos": True}
    for token_id in (0, 26, VOCAB_SIZE - 1):
        assert set(token_ids(tiny, **body, logit_bias={str(token_id): 100})[0]) == {token_id}
    only = {str(token_id): -100 for token_id in range(VOCAB_SIZE) if token_id != 26}
    assert set(token_ids(tiny, **body, temperature=1e6, logit_bias=only)[0]) == {26}
    assert tiny.post("completions", {**body, "logit_bias": only | {"26": -100}}).status_code == 400
    greedy = {**body, "temperature": 0}
    plain = token_ids(tiny, **greedy)[0]
    banned = token_ids(tiny, **greedy, logit_bias={str(plain[0]): -100})[0]
    assert plain[0] not in banned


def test_allowed_tokens_and_bad_words(tiny: ServerProcess) -> None:
    body = {"prompt": [60], "max_tokens": 12, "ignore_eos": True}
    assert set(token_ids(tiny, **body, allowed_token_ids=[26, 27], seed=1)[0]) == {26, 27}
    alternating = token_ids(tiny, **body, allowed_token_ids=[26, 27], bad_words=[[26, 26], [27, 27]])[0]
    assert all(first != second for first, second in itertools.pairwise(alternating))
    for fields in ({"allowed_token_ids": []}, {"allowed_token_ids": [VOCAB_SIZE]}, {"bad_words": [[VOCAB_SIZE]]}):
        response = tiny.post("completions", {**body, **fields})
        assert (response.status_code, response.json()["error"]["param"]) == (400, next(iter(fields)))


# The prompt in the answer: echo, prompt_logprobs, truncation


@pytest.mark.parametrize("is_text", [True, False])
@pytest.mark.parametrize("n", [1, 2])
def test_an_echo_is_the_prompt_and_its_log_probabilities(
    tiny: ServerProcess, tokenizer: Any, n: int, is_text: bool
) -> None:
    prompt = "Blue kettle, seven doors"
    ids = tokenizer.encode(prompt)
    body = {
        "prompt": [prompt if is_text else ids] * 2,
        "max_tokens": 4,
        "ignore_eos": True,
        "seed": 3,
        "n": n,
        "logprobs": 2,
    }
    plain = tiny.post("completions", body).json()["choices"]
    echoed = tiny.post("completions", {**body, "echo": True}).json()["choices"]
    streamed = {index: {"text": "", "logprobs": {}} for index in range(2 * n)}
    for chunk in list(tiny.stream("completions", {**body, "echo": True}))[:-1]:
        (choice,) = chunk["choices"]
        streamed[choice["index"]]["text"] += choice["text"]
        for key, values in choice["logprobs"].items():
            streamed[choice["index"]]["logprobs"].setdefault(key, []).extend(values)
    for place, (before, after) in enumerate(zip(plain, echoed, strict=True)):
        logprobs = after["logprobs"]
        assert after["text"] == prompt + before["text"]
        assert streamed[place] == {"text": after["text"], "logprobs": logprobs}
        assert [logprobs[key][0] for key in ("tokens", "token_logprobs", "top_logprobs")] == ["<s>", None, None]
        assert {len(values) for values in logprobs.values()} == {len(ids) + 4}
        assert logprobs["text_offset"][:2] == [0, 0] and logprobs["text_offset"][len(ids)] == len(prompt)
        assert logprobs["tokens"][len(ids) :] == before["logprobs"]["tokens"]
        assert logprobs["token_logprobs"][len(ids) :] == before["logprobs"]["token_logprobs"]
        assert "".join(logprobs["tokens"][1 : len(ids)]) == prompt
        assert all(2 <= len(top) <= 3 for top in logprobs["top_logprobs"][1:])


def test_an_echo_of_no_new_tokens_scores_a_prompt(tiny: ServerProcess, reference: Any) -> None:
    import torch

    prompt = [60, 61, 62, 63]
    with torch.no_grad():
        logprobs = torch.log_softmax(reference(torch.tensor([prompt])).logits[0].double(), dim=-1)
    expected = [logprobs[i, prompt[i + 1]].item() for i in range(3)]
    body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 0}
    answer = tiny.post("completions", body).json()
    (choice,) = answer["choices"]
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(expected, abs=1e-3)
    assert choice["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 0
    chunks = list(tiny.stream("completions", {**body, "stream_options": {"include_usage": True}}))
    assert joined(chunks[:-1]) == choice["text"] and chunks[-2]["usage"] == answer["usage"]
    assert tiny.post("completions", {**body, "echo": False}).status_code == 400


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_prompt_logprobs(tiny: ServerProcess, tokenizer: Any, route: str) -> None:
    form = {"prompt": "the river"} if route == "completions" else {"messages": HELLO}
    body = {**form, "max_tokens": 2, "prompt_logprobs": 2, "return_token_ids": True}
    answer = tiny.post(route, body).json()
    holder = answer["choices"][0] if route == "completions" else answer
    ids, entries = holder["prompt_token_ids"], holder["prompt_logprobs"]
    assert entries[0] is None and len(entries) == len(ids) > 2
    for token_id, entry in zip(ids[1:], entries[1:], strict=True):
        assert next(iter(entry)) == str(token_id) and 2 <= len(entry) <= 3
        assert set(entry[str(token_id)]) == {"logprob", "rank", "decoded_token"}
        assert entry[str(token_id)]["decoded_token"] == tokenizer.decode([token_id])
        assert all(other["rank"] <= 2 for key, other in entry.items() if key != str(token_id))
    for fields in ({"stream": True}, {"prompt_logprobs": 21}, {"prompt_logprobs": -1}):
        response = tiny.post(route, {**body, **fields})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt_logprobs")


def test_prompts_are_truncated_from_their_beginning(tiny: ServerProcess, tokenizer: Any) -> None:
    def prompt_ids(**body: Any) -> list[int]:
        route = "chat/completions" if "messages" in body else "completions"
        answer = tiny.post(route, {"max_tokens": 3, "return_token_ids": True, **body}).json()
        return (answer if "messages" in body else answer["choices"][0])["prompt_token_ids"]

    text = "The blue kettle stands on the stove"
    ids = tokenizer.encode(text)
    assert prompt_ids(prompt=text, truncate_prompt_tokens=4) == ids[-4:]
    assert prompt_ids(prompt=ids, truncate_prompt_tokens=2) == ids[-2:]
    assert prompt_ids(prompt=text, truncate_prompt_tokens=1000) == ids
    long = [60 + i % 90 for i in range(MAX_MODEL_LEN + 100)]
    ending = {"logit_bias": {"5": 100}, "stop_token_ids": [5]}  # at once, whatever max_tokens would allow
    roomy = {"max_tokens": MAX_MODEL_LEN - 50, "truncate_prompt_tokens": -1}
    assert prompt_ids(prompt=long, **roomy, **ending) == long[-50:]
    whole = prompt_ids(messages=HELLO)
    assert prompt_ids(messages=HELLO, truncate_prompt_tokens=3) == whole[-3:]
    echoed = tiny.post("completions", {"prompt": text, "truncate_prompt_tokens": 4, "echo": True, "max_tokens": 1})
    assert echoed.json()["choices"][0]["text"].startswith(tokenizer.decode(ids[-4:]))


# Tokens and texts


def test_tokenize_and_detokenize(tiny: ServerProcess, tokenizer: Any) -> None:
    def post(path: str, body: dict[str, Any]) -> httpx.Response:
        return tiny.client.post(path, json=body)

    text = "The blue kettle, naïve 世界"
    ids = tokenizer.encode(text)
    answer = post("/tokenize", {"model": "TINY", "prompt": text, "return_token_strs": True}).json()
    expected = {"count": len(ids), "max_model_len": MAX_MODEL_LEN, "tokens": ids}
    assert answer == {**expected, "token_strs": tokenizer.convert_ids_to_tokens(ids)}
    assert post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"] == ids[1:]
    assert post("/detokenize", {"tokens": ids}).json() == {"prompt": "<s>" + text}
    assert post("/detokenize", {"tokens": ids[1:]}).json() == {"prompt": text}
    chat = tiny.post("chat/completions", {"messages": HELLO, "max_tokens": 1, "return_token_ids": True}).json()
    assert post("/tokenize", {"messages": HELLO}).json()["tokens"] == chat["prompt_token_ids"]
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, None),
        ("/tokenize", {"prompt": "x", "model": "other"}, "model"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens.0"),
    ):
        response = tiny.client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
        check_refused(response)
        assert response.json()["error"]["param"] == param


def test_request_ids_come_back(tiny: ServerProcess) -> None:
    body = {"prompt": [60], "max_tokens": 1}
    for fields, headers, expected in (
        ({}, {"X-Request-Id": "from-header"}, "from-header"),
        ({"request_id": "from-body"}, {}, "from-body"),
        ({"request_id": "from-body"}, {"X-Request-Id": "from-header"}, "from-body"),
    ):
        for stream in (False, True):
            response = tiny.client.post("/v1/completions", json={**body, **fields, "stream": stream}, headers=headers)
            assert response.headers["x-request-id"] == expected
            assert f'"id":"cmpl-{expected}"' in response.text
    answers = [tiny.post("completions", body) for _ in range(2)]
    ids = {answer.headers["x-request-id"] for answer in answers}
    assert len(ids) == 2 and {answer.json()["id"].removeprefix("cmpl-") for answer in answers} == ids
    assert tiny.client.get("/v1/nothing", headers={"X-Request-Id": "q"}).headers["x-request-id"] == "q"
    for bad in ("x" * 129, b"\xe9"):
        response = tiny.client.post("/v1/completions", json=body, headers={"X-Request-Id": bad})
        check_refused(response, "X-Request-Id")


# Case 27: malformed input

BAD_BODIES = [
    *(b"{", b"", b"[]", b"null", b'{"prompt": "\\ud800"}', b"\xff\xfe", b"[" * 50_000),
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    *(
        b'{"prompt": "x", "max_tokens": 1e400}',
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1e400}',
    ),
]
BAD_FIELDS = [
    *({"max_tokens": value} for value in ("5", -1, 0, 1.5, True)),
    *({"stream": value} for value in ("yes", 1)),
    *({"stop": value} for value in (5, [""], [5])),
    *({"n": value} for value in (0, 129, "2")),
    *({"top_p": value} for value in (0, 2, "1")),
    *({"top_k": value} for value in (-2, 1.5)),
    *({"logit_bias": value} for value in ({"abc": 1}, {"999999": 1})),
    *({"min_p": 2}, {"seed": "x"}, {"best_of": 3}, {"no_such_field": 1}, {"temperature": []}, {"echo": 5}),
    *({"stop_token_ids": value} for value in ([-1], [VOCAB_SIZE], "5")),
    *({"min_tokens": 9, "max_tokens": 5}, {"priority": 1}),
]
BAD_MESSAGES = [
    None,
    [],
    "hi",
    [{}],
    [{"role": 5, "content": "x"}],
    [{"role": "alien", "content": "x"}],
    [{"role": "user", "content": 7}],
]
ROUTES = {"completions": {"prompt": "x"}, "chat/completions": {"messages": HELLO}}


def check_refused(response: httpx.Response, param: str | None = None) -> None:
    """A 4xx with an error body, that names param."""
    assert 400 <= response.status_code < 500, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.elapsed.total_seconds() < 2
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert param is None or param in error["message"]


@pytest.mark.parametrize("route", ROUTES)
def test_malformed_bodies(tiny: ServerProcess, route: str) -> None:
    for body in BAD_BODIES:
        headers = {"Content-Type": "application/json"}
        check_refused(tiny.client.post(f"/v1/{route}", content=body, headers=headers))
    body = json.dumps(ROUTES[route]).encode()
    check_refused(tiny.client.post(f"/v1/{route}", content=body), "Content-Type")
    check_refused(tiny.client.post(f"/v1/{route}", content=body, headers={"Content-Type": "text/plain"}), "text/plain")
    huge = b" " * 50_000_000 + body
    check_refused(tiny.client.post(f"/v1/{route}", content=huge, headers={"Content-Type": "application/json"}), "bytes")
    tiny.check_alive()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_malformed_fields(tiny: ServerProcess, route: str, stream: bool) -> None:
    for fields in BAD_FIELDS:
        response = tiny.post(route, {**ROUTES[route], "stream": stream, **fields})
        check_refused(response, next(iter(fields)))
    check_refused(tiny.post(route, {**ROUTES[route], "model": "nobody", "stream": stream}), "nobody")
    assert tiny.post(route, {**ROUTES[route], "model": "nobody"}).status_code == 404
    tiny.check_alive()


def test_malformed_messages(tiny: ServerProcess) -> None:
    for messages in BAD_MESSAGES:
        check_refused(tiny.post("chat/completions", {"messages": messages}), "messages")
    check_refused(tiny.post("chat/completions", {}), "messages")


def test_bodies_that_are_nested_too_deeply(tiny: ServerProcess) -> None:
    """Wherever JSON is read: a reader that goes down until Python's stack ends would be a fault of the server."""
    deep = "[" * 100_000
    headers = {"Content-Type": "application/json"}
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/debug/explain_cache"):
        check_refused(tiny.client.post(path, content=deep, headers=headers), "JSON")
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": deep}}
    refused = tiny.post("chat/completions", {"messages": [*HELLO, {"role": "assistant", "tool_calls": [call]}]})
    check_refused(refused, "tool_calls")
    assert refused.json()["error"]["param"] == "messages"
    check_refused(tiny.post("completions", {"prompt": "x", "structured_outputs": {"json": deep}}), "structured_outputs")


def test_wrong_routes_and_methods(tiny: ServerProcess) -> None:
    for route in ROUTES:
        assert tiny.client.get(f"/v1/{route}").status_code == 405
        check_refused(tiny.client.get(f"/v1/{route}"))
    check_refused(tiny.client.post("/v1/nothing", json={}), "/v1/nothing")
    check_refused(tiny.client.get("/"))


def test_lengths_beyond_the_context(tiny: ServerProcess) -> None:
    response = tiny.post("completions", {"prompt": [5] * MAX_MODEL_LEN, "max_tokens": 1})
    check_refused(response, str(MAX_MODEL_LEN))


def test_texts_that_are_too_long_whatever_their_tokens_are(tiny: ServerProcess) -> None:
    """Refused at once, where tokenising takes half a minute; unless only their end is wanted, or only their tokens."""
    text = "The blue kettle. " * 700_000
    asked = {
        "completions": ("prompt", {"prompt": ["x", text]}),
        "chat/completions": ("messages", {"messages": [*HELLO, {"role": "user", "content": text}]}),
    }
    for route, (field, body) in asked.items():
        response = tiny.post(route, body)
        check_refused(response, "prompt length is at least 13222")
        assert f"allowed: at most {MAX_MODEL_LEN - 1} tokens" in response.json()["error"]["message"]
        assert response.json()["error"]["param"] == field
        shorter = json.loads(json.dumps(body).replace(text, text[:80_000]))
        assert tiny.post(route, shorter).status_code == 400
        whole = tiny.post(route, {**shorter, "truncate_prompt_tokens": 4, "max_tokens": 1})
        assert whole.status_code == 200 and whole.json()["usage"]["prompt_tokens"] >= 4
    assert tiny.client.post("/tokenize", json={"prompt": text[:80_000]}).json()["count"] > MAX_MODEL_LEN


# The openai client


def test_the_openai_client(tiny: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["TINY"]
        assert client.models.retrieve("TINY").id == "TINY"
        whole = client.chat.completions.create(
            model="TINY", messages=HELLO, max_completion_tokens=8, temperature=0, logprobs=True, top_logprobs=2
        )
        assert (
            whole.usage.completion_tokens <= 8
            and whole.usage.prompt_tokens_details.cached_tokens < whole.usage.prompt_tokens
        )
        assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
        stream = client.chat.completions.create(
            model="TINY",
            messages=HELLO,
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        *chunks, last = stream
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
        assert last.choices == [] and last.usage == whole.usage
        completion = client.completions.create(model="TINY", prompt=["the", "a"], max_tokens=3, n=2, stop=["\n\n"])
        assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.BadRequestError) as raised:
            client.chat.completions.create(model="TINY", messages=HELLO, frequency_penalty=2.5)
        assert raised.value.param == "frequency_penalty"


def test_chat_may_use_the_context_and_completions_stop_at_16(tiny: ServerProcess) -> None:
    assert tiny.complete([60])["usage"]["completion_tokens"] == 16
    stream = tiny.stream("chat/completions", {"messages": HELLO, "temperature": 0, "ignore_eos": True})
    assert len([next(stream) for _ in range(60)]) == 60
    stream.close()


# Case 39: compilations


@pytest.mark.parametrize("number", [1, 2])
def test_nothing_compiles_after_the_warm_up(tiny: ServerProcess, number: int) -> None:
    import random

    choose = random.Random(0)
    kinds = (
        {"temperature": 0},
        {"temperature": 1.0},
        {"temperature": 0, "logprobs": 5},
        {"n": 2},
        {"top_k": 5, "seed": 1},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "logit_bias": {"7": -100, "9": 2}},
        {"temperature": 0, "presence_penalty": 1, "bad_words": ["the", [5, 6]], "n": 2},
    )
    bodies = [
        {
            "prompt": [choose.randrange(1, VOCAB_SIZE) for _ in range(choose.randint(1, 200))],
            "max_tokens": choose.randint(1, 40),
            "ignore_eos": True,
            **choose.choice(kinds),
        }
        for _ in range(40)
    ]
    while bodies:
        num_together = choose.randint(1, 7)
        together, bodies = bodies[:num_together], bodies[num_together:]
        for ids, body in zip(
            at_once([functools.partial(token_ids, tiny, **b) for b in together]), together, strict=True
        ):
            assert {len(choice) for choice in ids} == {body["max_tokens"]}
    assert tiny.metrics()["compilations_after_warmup_total"] == 0
