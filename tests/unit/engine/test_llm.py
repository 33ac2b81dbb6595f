"""LLM: what a script or a notebook sees of the engine."""

import dataclasses
import functools
import gc
import math
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxpage import LLM, EngineConfig, SamplingParams
from paxpage.engine import build, kv_cache, step
from paxpage.engine.engine import Group
from paxpage.engine.llm import SELDOM, without_old_garbage
from paxpage.engine.served_model import describe, raise_if_failed
from paxpage.models.embedded import default_model_path
from paxpage.models.loading import LoadOptions
from paxpage.prompts import encode_text, render_chat
from tests.helpers.engines import (
    Arrival,
    assert_idle,
    complete,
    greedy_params,
    ids,
    serve,
    steps_in_flight,
    tokens,
    tokens_alone,
)
from tests.helpers.fixtures import shelf, unchecked_types
from tests.helpers.oracle import logits_of
from tests.helpers.shelf import Limits, Shelf
from tests.server.tiny import make_tokenizer

__all__ = ["shelf", "unchecked_types"]

SMALLEST = Limits(max_num_seqs=1, max_num_batched_tokens=16, max_model_len=64)
PROMPTS = [[50 + (13 * i + 7 * j) % 400 for j in range(length)] for i, length in enumerate((3, 17, 30, 64))]
GREEDY = greedy_params(12)


@pytest.fixture
def llm(shelf: Shelf) -> Iterator[LLM]:
    """TINY without a tokenizer, found and left idle."""
    llm = shelf.tiny()
    assert_idle(llm.engine)
    yield llm
    assert_idle(llm.engine)


@pytest.fixture(scope="module")
def text_llm(shelf: Shelf) -> Iterator[LLM]:
    """TINY with a byte-level tokenizer that adds a BOS, and a chat template that begins with it."""
    limits = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    with LLM(str(shelf.tiny_folder), tokenizer=make_tokenizer(), **limits, show_progress=False) as llm:
        yield llm


# Prompts and parameters


def test_a_text_may_be_given_in_every_form(text_llm: LLM) -> None:
    text = "The blue kettle"
    token_ids = encode_text(text_llm.engine.tokenizer, text)
    forms: list[Any] = [text, [text], {"prompt": text}, [{"prompt": text}], ids(token_ids), [ids(token_ids)]]
    outputs = [text_llm.generate(form, GREEDY, use_tqdm=False) for form in forms]
    assert all(len(output) == 1 for output in outputs)
    assert {tuple(output[0].prompt_token_ids) for output in outputs} == {tuple(token_ids)}
    assert len({tuple(output[0].outputs[0].token_ids) for output in outputs}) == 1
    assert len({output[0].outputs[0].text for output in outputs}) == 1
    assert [output[0].prompt for output in outputs] == [text] * 4 + [None] * 2


def test_a_text_that_is_too_long_whatever_its_tokens_are(text_llm: LLM) -> None:
    """Said before it is tokenised; one that may fit is counted."""
    most = " remember" * 254  # a token each, which no other is longer than, and a BOS
    (output,) = text_llm.generate(most, greedy_params(1), use_tqdm=False)
    assert len(output.prompt_token_ids) == 255
    allowed = r"allowed: at most 255 tokens \(max_model_len 256"
    with pytest.raises(ValueError, match=rf"prompt length is 256; {allowed}"):
        text_llm.generate(f"{most} remember", GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match=rf"prompt length is at least 256; {allowed}"):
        text_llm.generate(f"{most} remember" + "x", GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match=rf"prompt length is at least 2222\d\d; {allowed}"):
        text_llm.chat([{"role": "user", "content": "x" * 2_000_000}], GREEDY, use_tqdm=False)


BAD_STARTS: dict[str, tuple[dict[str, Any], str, bool]] = {
    "a tokenizer that is not there": ({"tokenizer": "/nowhere"}, r"tokenizer is '/nowhere'", False),
    "a context longer than the pool": ({"num_blocks": 9, "max_model_len": 512}, r"max_model_len is 512", False),
    "a tokenizer of a larger model": ({"tokenizer": default_model_path()}, r"tokenizer is .* model's 512 tokens", True),
}


@pytest.mark.parametrize("mistake", BAD_STARTS)
def test_what_can_be_seen_before_the_weights_is_refused_before_them(
    shelf: Shelf, mistake: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """And what only reading a tokenizer shows, while they are read."""
    fields, message, are_weights_begun = BAD_STARTS[mistake]
    with pytest.raises(ValueError, match=message):
        LLM(str(shelf.tiny_folder), max_num_seqs=1, max_num_batched_tokens=16, **fields)
    assert ("Loading weights" in capfd.readouterr().err) == are_weights_begun


def test_weights_are_not_read_for_a_tokenizer_that_failed(shelf: Shelf, capfd: pytest.CaptureFixture[str]) -> None:
    loader = describe(str(shelf.tiny_folder), None, None, LoadOptions(dtype="float32")).loader
    failed: Future[Any] = Future()
    failed.set_exception(ValueError("no tokenizer"))
    with pytest.raises(ValueError, match="no tokenizer"):
        loader.load_params(functools.partial(raise_if_failed, failed))
    assert "0.00/" in capfd.readouterr().err
    failed = Future()
    failed.set_result(None)
    assert loader.load_params(functools.partial(raise_if_failed, failed)) and "100%" in capfd.readouterr().err


def test_the_text_is_that_of_the_tokens(text_llm: LLM) -> None:
    (output,) = text_llm.generate("Whoever comes", greedy_params(20), use_tqdm=False)
    decoded = text_llm.engine.tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True)
    assert output.outputs[0].text == decoded != ""


def test_a_stop_string_ends_the_text(text_llm: LLM) -> None:
    """Cut out of the middle of a greedy run, wherever the tokens' borders are."""
    (whole,) = text_llm.generate("Whoever comes", greedy_params(20), use_tqdm=False)
    text = whole.outputs[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, stop=stop)
    (output,) = text_llm.generate("Whoever comes", params, use_tqdm=False)
    assert output.outputs[0].text == text[: text.index(stop)]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    assert_idle(text_llm.engine)


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    """Though the first takes longest, and the short ones end before it."""
    llm.reset_prefix_cache()
    params = [greedy_params(40), *[greedy_params(count) for count in (3, 2, 1)]]
    outputs = llm.generate([ids(prompt) for prompt in PROMPTS], params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    assert [len(output.outputs[0].token_ids) for output in outputs] == [40, 3, 2, 1]
    assert len({output.request_id for output in outputs}) == len(PROMPTS)
    assert all(output.finished and output.num_cached_tokens == 0 for output in outputs)


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([], use_tqdm=False) == []


def test_default_params_are_those_of_sampling_params(llm: LLM) -> None:
    (output,) = llm.generate(ids(PROMPTS[0]), use_tqdm=False)
    assert len(output.outputs) == 1 and len(output.outputs[0].token_ids) <= SamplingParams().max_tokens == 16


def test_one_param_set_for_each_prompt_or_one_for_all(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"sampling_params is '2 of them'; allowed: one, or one for each of 4"):
        llm.generate([ids(prompt) for prompt in PROMPTS], [GREEDY, GREEDY], use_tqdm=False)


BAD_PARAMS: tuple[Any, ...] = ({"temperature": 0}, "greedy", [{"temperature": 0}], 5, (GREEDY for _ in range(1)))


@pytest.mark.parametrize("params", BAD_PARAMS, ids=["dict", "text", "list of dict", "int", "generator"])
def test_what_is_no_sampling_params_is_named(llm: LLM, params: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^sampling_params is .*; allowed: a SamplingParams, a list of these, or None"
    ):
        llm.generate(ids(PROMPTS[0]), params, use_tqdm=False)


@pytest.mark.parametrize("model", [None, 5, b"model", Group])
def test_what_is_no_model_is_named(model: Any) -> None:
    with pytest.raises(ValueError, match=r"^model is .*; allowed: a folder, a .gguf file"):
        LLM(model, show_progress=False)


@pytest.mark.parametrize("prompts", [None, 5, [5]])
def test_what_is_no_prompt_is_named(llm: LLM, prompts: Any) -> None:
    with pytest.raises(ValueError, match=r'^prompts is (None|5); allowed: str, {"prompt_token_ids"'):
        llm.generate(prompts, use_tqdm=False)


@pytest.mark.parametrize("messages", [None, 5, "Hi", {"role": "user", "content": "Hi"}])
def test_what_is_no_conversation_is_named(text_llm: LLM, messages: Any) -> None:
    with pytest.raises(ValueError, match=r"^messages is .*; allowed: a list of messages, or a list of such lists"):
        text_llm.chat(messages, use_tqdm=False)


def test_a_request_may_have_the_name_of_anothers_sample(llm: LLM) -> None:
    arrivals = {
        "a-1": Arrival(PROMPTS[0], GREEDY),
        "a": Arrival(PROMPTS[1], dataclasses.replace(GREEDY, n=2)),
    }
    outputs = serve(llm.engine, arrivals)
    found = {request_id: [sample.token_ids for sample in output.outputs] for request_id, output in outputs.items()}
    one, two = tokens(llm, [PROMPTS[0]], GREEDY), tokens(llm, [PROMPTS[1]], GREEDY)
    assert found == {"a-1": one, "a": 2 * two}


def test_n_samples(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, max_tokens=8, ignore_eos=True)
    (output,) = llm.generate(ids(PROMPTS[1]), params, use_tqdm=False)
    assert [sample.index for sample in output.outputs] == [0, 1, 2]
    assert len({tuple(sample.token_ids) for sample in output.outputs}) >= 2


def test_max_tokens_none_is_all_that_the_context_allows(llm: LLM) -> None:
    (output,) = complete(llm, [PROMPTS[0]], SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True))
    assert len(output.token_ids) == llm.engine.max_model_len - len(PROMPTS[0])
    assert output.finish_reason == "length"


def test_stop_token_ids_and_min_tokens(llm: LLM) -> None:
    """A greedy run's own fourth token ends it, unless it may not come yet."""
    whole = tokens_alone(llm, PROMPTS[1], GREEDY)
    stop_id = whole[3]
    num_before = whole.index(stop_id) + 1
    params = SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=[stop_id])
    (output,) = complete(llm, [PROMPTS[1]], params)
    assert output.token_ids == whole[:num_before]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop_id)
    params = SamplingParams(temperature=0.0, max_tokens=12, min_tokens=8, stop_token_ids=[stop_id])
    (output,) = complete(llm, [PROMPTS[1]], params)
    assert len(output.token_ids) >= 8 and stop_id not in output.token_ids[:8]


@pytest.mark.parametrize("num_in_flight", [0, 1])
def test_log_probabilities_are_transformers_own(llm: LLM, shelf: Shelf, num_in_flight: int) -> None:
    """Of the raw distribution, whatever the temperature; each step has its own list, the chosen token first."""
    params = SamplingParams(temperature=1.5, seed=5, max_tokens=10, logprobs=5, ignore_eos=True)
    with steps_in_flight(llm, num_in_flight):
        outputs = complete(llm, PROMPTS, params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        logits = logits_of(shelf.tiny_oracle, prompt + output.token_ids)[len(prompt) - 1 : -1].astype(np.float64)
        expected = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        for token_id, row, entries in zip(output.token_ids, expected, output.logprobs, strict=True):
            best = np.argsort(-row)[:5].tolist()
            assert list(entries) == [token_id, *[other for other in best if other != token_id]]
            for other, entry in entries.items():
                assert entry.logprob == pytest.approx(row[other], abs=1e-4)
                assert entry.rank == 1 + int((row > row[other]).sum())
        total = sum(row[token_id] for row, token_id in zip(expected, output.token_ids, strict=True))
        assert output.cumulative_logprob == pytest.approx(total, abs=1e-3)


@pytest.mark.parametrize("num_in_flight", [0, 1])
def test_each_gets_the_log_probabilities_that_it_asks_for(text_llm: LLM, num_in_flight: int) -> None:
    """In one batch with others, who ask for more or for none: as many of the same ones."""
    nums_top = (0, 20, None, 3)
    kinds = [SamplingParams(temperature=0.7, seed=3, max_tokens=8, ignore_eos=True, logprobs=num) for num in nums_top]
    with steps_in_flight(text_llm, num_in_flight):
        none_of, all_of, nothing, few_of = complete(text_llm, [PROMPTS[0]] * 4, kinds)
    assert nothing.logprobs is None
    for token_id, one, most, few in zip(
        all_of.token_ids, none_of.logprobs, all_of.logprobs, few_of.logprobs, strict=True
    ):
        assert one == {token_id: most[token_id]}
        assert few == {i: entry for i, entry in most.items() if i == token_id or entry.rank <= 3}
        assert list(few) == list(most)[: len(few)] and len(most) in (20, 21)
        decode = text_llm.engine.tokenizer.decode
        assert {i: entry.decoded_token for i, entry in most.items()} == {i: decode([i]) for i in most}


def test_times_are_in_order(llm: LLM) -> None:
    (output,) = llm.generate(ids(PROMPTS[2]), GREEDY, use_tqdm=False)
    times = output.metrics
    assert times.first_scheduled_time_s is not None and times.first_token_time_s is not None
    assert times.finished_time_s is not None
    assert times.arrival_time_s <= times.first_scheduled_time_s <= times.first_token_time_s <= times.finished_time_s


# Chat


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is the kettle?"}]


def test_chat_is_generate_over_the_rendered_template(text_llm: LLM) -> None:
    tokenizer = text_llm.engine.tokenizer
    (output,) = text_llm.chat(CHAT, GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == render_chat(tokenizer, CHAT)
    assert output.prompt_token_ids.count(tokenizer.bos_token_id) == 1
    assert output.outputs[0].token_ids == tokens(text_llm, [render_chat(tokenizer, CHAT)], GREEDY)[0]


def test_several_conversations_at_once(text_llm: LLM) -> None:
    other = [{"role": "user", "content": "Who comes?"}]
    together = text_llm.chat([CHAT, other], GREEDY, use_tqdm=False)
    alone = [text_llm.chat(conversation, GREEDY, use_tqdm=False)[0] for conversation in (CHAT, other)]
    assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in alone]


def test_a_conversation_may_be_continued(text_llm: LLM) -> None:
    conversation = [*CHAT, {"role": "assistant", "content": "On the"}]
    (output,) = text_llm.chat(
        conversation, GREEDY, use_tqdm=False, add_generation_prompt=False, continue_final_message=True
    )
    expected = render_chat(
        text_llm.engine.tokenizer, conversation, add_generation_prompt=False, continue_final_message=True
    )
    assert output.prompt_token_ids == expected


def test_another_template(text_llm: LLM) -> None:
    template = "{{ messages[0].content }}"
    (output,) = text_llm.chat(CHAT, GREEDY, use_tqdm=False, chat_template=template)
    assert output.prompt_token_ids == text_llm.engine.tokenizer.encode("Be brief.", add_special_tokens=False)


def test_chat_without_a_tokenizer_is_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"messages is .*; allowed: prompts of token ids: this model has no tokenizer"):
        llm.chat(CHAT, GREEDY, use_tqdm=False)


# Mistakes


BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "empty": (ids([]), r"prompt is \[\]; allowed: at least one token"),
    "id past the vocabulary": (ids([5, 512]), r"prompt token id is 512; allowed: integers from 0 to 511"),
    "negative id": (ids([-1]), r"prompt token id is -1; allowed: integers from 0 to 511"),
    "not an integer": (ids([1.5]), r"prompt token id is 1.5; allowed: integers"),
    "a bool": (ids([True]), r"prompt token id is True; allowed: integers"),
    "too long": (ids([5] * 512), r"prompt length is 512; allowed: at most 511 tokens \(max_model_len 512"),
    "unknown key": ({"prompt_ids": [5]}, r"prompt is \['prompt_ids'\]; allowed: text, token ids,"),
    "a number": (5, r"prompts is 5; allowed: str, "),
    "ids that are a number": ({"prompt_token_ids": 5}, r"prompt is 5; allowed: text, token ids,"),
    "text without a tokenizer": ("hello", r"prompt is 'hello'; allowed: token ids only"),
}
BAD_PARAMS: dict[str, tuple[dict[str, Any], str]] = {
    "too many logprobs": ({"logprobs": 21}, r"logprobs is 21; allowed: at most max_logprobs \(20\)"),
    "a stop id past the vocabulary": ({"stop_token_ids": [512]}, r"stop_token_ids is 512; allowed: ids below"),
    "stop strings without a tokenizer": ({"stop": "x"}, r"stop is 'x'; allowed: nothing: this model has no tokenizer"),
}


@pytest.mark.parametrize("mistake", BAD_PROMPTS)
def test_a_bad_prompt_is_refused_before_anything_runs(llm: LLM, mistake: str) -> None:
    """The good ones before it and after it have not been started."""
    prompt, message = BAD_PROMPTS[mistake]
    before = llm.engine.stats().num_steps
    with pytest.raises(ValueError, match=message):
        llm.generate([ids(PROMPTS[0]), prompt, ids(PROMPTS[1])], GREEDY, use_tqdm=False)
    assert llm.engine.stats().num_steps == before


@pytest.mark.parametrize("mistake", BAD_PARAMS)
def test_bad_params_are_refused_before_anything_runs(llm: LLM, mistake: str) -> None:
    fields, message = BAD_PARAMS[mistake]
    before = llm.engine.stats().num_steps
    with pytest.raises(ValueError, match=message):
        llm.generate([ids(prompt) for prompt in PROMPTS], [GREEDY] * 3 + [SamplingParams(**fields)], use_tqdm=False)
    assert llm.engine.stats().num_steps == before


def test_a_flat_list_of_ids_is_refused_with_the_right_form(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r'prompts is 5; allowed: str, \{"prompt_token_ids": \[...\]\} or a list'):
        llm.generate([5, 6, 7], GREEDY, use_tqdm=False)


def test_arguments_of_the_llm_are_those_of_engine_config(shelf: Shelf) -> None:
    """A bad one is refused by name, before the model is read."""
    with pytest.raises(ValueError, match=r"block_size is 17; allowed: 8, 16, 32, 64, 128"):
        LLM("no/such model", block_size=17)
    with pytest.raises(ValueError, match=r"max_model_len is 4096; allowed: at most the model's own 2048"):
        LLM(str(shelf.tiny_folder), max_model_len=4096, show_progress=False)
    with pytest.raises(ValueError, match=r"max_num_batched_tokens is 4; allowed: at least max_num_seqs \(8\)"):
        LLM(str(shelf.tiny_folder), max_num_seqs=8, max_num_batched_tokens=4, show_progress=False)
    assert EngineConfig().block_size == 16


# Progress


def test_silent_without_the_bar(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    tokens(llm, PROMPTS, GREEDY)
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


def test_a_bar_by_default(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate([ids(prompt) for prompt in PROMPTS], GREEDY)
    captured = capfd.readouterr()
    assert captured.out == "" and "generating" in captured.err and "4/4" in captured.err


# Interrupts


class InterruptAtCall:
    """A profile function that sends this process a SIGINT, as Ctrl-C does, at the n-th call of an engine function."""

    def __init__(self, call: int) -> None:
        self.num_calls = 0
        self.call = call

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and "/paxpage/engine/" in path and not path.endswith("llm.py"):
            self.num_calls += 1
            if self.num_calls == self.call:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)


def _generate_with(llm: LLM, profile: InterruptAtCall) -> None:
    prompts = [ids(prompt) for prompt in PROMPTS]
    sys.setprofile(profile)
    try:
        llm.generate(prompts, GREEDY, use_tqdm=False)
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("num_in_flight", [0, 1])
def test_ctrl_c_at_any_moment_leaves_the_llm_usable(llm: LLM, num_in_flight: int) -> None:
    """At some forty moments, in the midst of scheduling, packing, launching and taking tokens in."""
    with steps_in_flight(llm, num_in_flight):
        expected = tokens(llm, PROMPTS, GREEDY)
        num_failed = llm.engine.stats().num_failed_steps
        uninterrupted = InterruptAtCall(-1)
        llm.reset_prefix_cache()  # as before each of them: what is found there takes fewer calls
        _generate_with(llm, uninterrupted)
        first = 4 * len(PROMPTS)  # past the checks of the prompts
        for call in range(first, uninterrupted.num_calls, uninterrupted.num_calls // 40):
            llm.reset_prefix_cache()
            with pytest.raises(KeyboardInterrupt):
                _generate_with(llm, InterruptAtCall(call))
            assert_idle(llm.engine)
            assert tokens(llm, PROMPTS, GREEDY) == expected
    assert llm.engine.stats().num_failed_steps == num_failed  # tokens still in flight were no error
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def _raise_in_step(llm: LLM, monkeypatch: pytest.MonkeyPatch, error: BaseException, *, is_cache_consumed: bool) -> None:
    """The next step raises, before or after the device has been given the cache."""
    compiled = llm.engine.runner._compiled

    def failing(original: Any, *arguments: Any) -> Any:
        monkeypatch.undo()
        if is_cache_consumed:
            original(*arguments)
        raise error

    for shape in llm.engine.runner.shapes:
        monkeypatch.setitem(compiled, shape, functools.partial(failing, compiled[shape]))


@pytest.mark.parametrize("is_cache_consumed", [False, True])
def test_an_interrupt_inside_a_compiled_step(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, is_cache_consumed: bool
) -> None:
    """A second Ctrl-C does not wait for the step's end: whatever became of the cache, the LLM goes on."""
    expected = tokens(llm, PROMPTS, GREEDY)
    _raise_in_step(llm, monkeypatch, KeyboardInterrupt(), is_cache_consumed=is_cache_consumed)
    with pytest.raises(KeyboardInterrupt):
        tokens(llm, PROMPTS, GREEDY)
    assert_idle(llm.engine)
    assert tokens(llm, PROMPTS, GREEDY) == expected


# Sharing and closing


def test_threads_may_share_an_llm(llm: LLM) -> None:
    expected = [tokens_alone(llm, prompt, GREEDY) for prompt in PROMPTS]
    found: dict[int, list[list[int]]] = {}

    def work(index: int) -> None:
        found[index] = [tokens(llm, [PROMPTS[index]], GREEDY)[0] for _ in range(5)]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert found == {index: [token_ids] * 5 for index, token_ids in enumerate(expected)}


def _live_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def test_closing_gives_the_memory_back(shelf: Shelf) -> None:
    """Weights, cache and the tokens of the last step; closing again does nothing, and use after it is an error."""
    before = _live_bytes()
    llm = shelf.fresh_tiny(SMALLEST)
    cache = llm.engine.runner.cache
    assert cache is not None
    assert _live_bytes() - before >= 2 * cache.k.nbytes + 512 * 144 * 4
    del cache
    tokens(llm, PROMPTS[:1], GREEDY)
    llm.close()
    llm.close()
    assert _live_bytes() - before < 4096
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        llm.generate(ids(PROMPTS[0]), GREEDY, use_tqdm=False)


def test_a_with_block_closes_it_whatever_happens(shelf: Shelf) -> None:
    with pytest.raises(ZeroDivisionError), shelf.fresh_tiny(SMALLEST) as llm:
        tokens(llm, PROMPTS[:1], GREEDY)
        _ = 1 / 0
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        llm.generate(ids(PROMPTS[0]), GREEDY, use_tqdm=False)


# The cache is updated in place


def test_garbage_made_before_is_left_alone_while_generating(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """And looked for again afterwards; what the script itself has frozen stays so."""
    frozen, run = [], llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda: (frozen.append(gc.get_freeze_count()), run())[1])
    complete(llm, PROMPTS[:1], GREEDY)
    assert min(frozen) > 100_000 and gc.get_freeze_count() < 1000
    gc.freeze()
    try:
        complete(llm, PROMPTS[:1], GREEDY)
        assert gc.get_freeze_count() > 100_000
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("thresholds", [(700, 10, 10), (60_000, 10, 300), (0, 10, 10)])
def test_garbage_is_seldom_looked_for_while_generating(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, thresholds: tuple[int, int, int]
) -> None:
    """More seldom than usual, never if the script has it so, and afterwards as before, whatever happened."""
    seen, run, before = [], llm.engine.step, gc.get_threshold()
    monkeypatch.setattr(llm.engine, "step", lambda: (seen.append(gc.get_threshold()), run())[1])
    gc.set_threshold(*thresholds)
    try:
        complete(llm, PROMPTS[:1], GREEDY)
        assert set(seen) == {(0, 10, 10) if thresholds[0] == 0 else tuple(map(max, thresholds, SELDOM))}
        assert gc.get_threshold() == thresholds
        with pytest.raises(ZeroDivisionError), without_old_garbage():
            1 / 0  # noqa: B018
        assert gc.get_threshold() == thresholds
    finally:
        gc.set_threshold(*before)


def test_requests_leave_nothing_for_the_garbage_collector(llm: LLM) -> None:
    """What finished and what was aborted is gone at once: a collection after a thousand requests would stop a server's
    threads for 50 ms.
    """
    gc.collect()
    gc.disable()
    try:
        complete(llm, PROMPTS[:2], dataclasses.replace(GREEDY, n=2))
        llm.engine.add_request("left", ids(PROMPTS[2]), dataclasses.replace(GREEDY, n=2))
        llm.engine.step()
        assert num_groups() == 1
        assert len(llm.engine.abort(["left"])) == 2
        while llm.engine.has_unfinished_requests():
            llm.engine.step()
        assert num_groups() == 0
    finally:
        gc.enable()


def num_groups() -> int:
    """How many requests' samples are in memory."""
    return sum(type(found) is Group for found in gc.get_objects())


@pytest.mark.parametrize(("platform", "given", "expected"), [("gpu", None, 512), ("gpu", 64, 64), ("cpu", None, None)])
def test_a_server_keeps_steps_short_beside_decodes(
    platform: str, given: int | None, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_platform", lambda: platform)
    config = EngineConfig(num_tokens_beside_decodes=given)
    assert build.serving_config(config) == dataclasses.replace(config, num_tokens_beside_decodes=expected)


def assert_in_place(stats: Any, cache: kv_cache.KVCache) -> None:
    """A compiled step gives the donated cache back, and never holds as much as a tenth of one layer of it beside."""
    layer_bytes = math.prod(cache.k.shape[1:]) * cache.k.dtype.itemsize
    assert stats.alias_size_in_bytes >= 2 * cache.k.shape[0] * layer_bytes, "the cache is copied out"
    assert stats.temp_size_in_bytes < layer_bytes / 10, "a copy is made on the way"


def test_every_compiled_step_updates_the_cache_in_place(shelf: Shelf) -> None:
    """The compiler's own figures, with a cache of 48 MiB for a layer's keys."""
    with shelf.fresh_tiny(SMALLEST._replace(max_num_seqs=4, num_blocks=16384)) as llm:
        runner = llm.engine.runner
        cache = runner.cache
        assert cache is not None and cache.k.nbytes == 2 * 48 * 2**20
        analyses = runner.memory_analysis()
        assert {(shape.is_decode, shape.num_rows) for shape in analyses} >= {(True, 1), (True, 4), (False, 4)}
        for stats in analyses.values():
            assert_in_place(stats, cache)


@pytest.mark.parametrize(("is_donated", "message"), [(False, "copied out"), (True, "made on the way")])
def test_a_copy_of_the_cache_would_be_seen(shelf: Shelf, is_donated: bool, message: str) -> None:
    """Without donation there is one in the outputs; where the old cache is still wanted, one among the temporaries."""
    runner = shelf.tiny().engine.runner
    shape = runner.shapes[0]
    cache = kv_cache.abstract_cache(*runner.layout)
    keywords = {"graphdef": runner._graphdef, "shape": shape, "backend": None}
    forward = functools.partial(step.forward, logits_buffer=None, **keywords)

    def run(params: Any, old: kv_cache.KVCache, packed: jax.Array, previous: jax.Array) -> Any:
        output, new = forward(params, old, packed, previous)
        return output, kv_cache.KVCache(new.k + 0 * old.k[..., :1] if is_donated else new.k, new.v)

    previous = jax.ShapeDtypeStruct((runner.max_rows,), jnp.int32)
    lowered = jax.jit(run, donate_argnums=(1,) if is_donated else ()).lower(
        step.abstract(runner.params), cache, step.abstract_inputs(shape), previous
    )
    with pytest.raises(AssertionError, match=message):
        assert_in_place(lowered.compile().memory_analysis(), cache)
