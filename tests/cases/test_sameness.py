"""Sameness: how a request's keys and values came to be changes none of its tokens.

Cold, cached, partly cached, forked, preempted and computed again, in chunks, in any company, a step ahead or not: in
float32 always what the request gets alone from an engine without prefix caching.
"""

import dataclasses
import random
from collections.abc import Callable

import numpy as np
import pytest

from paxpage import LLM, RequestOutput, SamplingParams
from tests.helpers.engines import (
    Arrival,
    assert_idle,
    cached_contents,
    greedy_params,
    ids,
    serve,
    steps_in_flight,
    token_budget,
    tokens_alone,
)
from tests.helpers.shelf import UNCACHED, Limits, Shelf

PROMPTS = [[50 + (13 * i + 7 * j) % 400 for j in range(length)] for i, length in enumerate((1, 15, 16, 17, 40, 64, 65))]
LONG = PROMPTS[-1]
NUM_TOKENS = 24
ROUNDING = 1e-4  # of a log-probability: what is closer may come out either way on another processor
GREEDY = greedy_params(NUM_TOKENS)
SEEDED = SamplingParams(temperature=0.8, seed=11, max_tokens=NUM_TOKENS, ignore_eos=True)
CHOSEN = SamplingParams(temperature=1.0, top_k=50, top_p=0.95, seed=-3, max_tokens=NUM_TOKENS, ignore_eos=True)
PENALISED = SamplingParams(
    temperature=0.0,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=-0.2,
    logit_bias={7: -100.0, 90: 2.0},
    max_tokens=NUM_TOKENS,
    ignore_eos=True,
)
PATIENT = SamplingParams(  # always one of few tokens, in a new order
    temperature=1.0,
    seed=5,
    frequency_penalty=1.0,
    allowed_token_ids=range(100, 120),
    bad_words=[[token_id, token_id + 1] for token_id in range(100, 120)] + [[101, 105, 103], [110]],
    max_tokens=NUM_TOKENS,
    ignore_eos=True,
)
TIGHT = Limits(max_num_batched_tokens=48, num_blocks=25, max_model_len=None)  # 24 usable blocks hold 384 tokens

IN_FLIGHT = pytest.mark.parametrize("num_in_flight", [0, 1])
NAMED = {"greedy": GREEDY, "seeded": SEEDED, "chosen": CHOSEN, "penalised": PENALISED, "patient": PATIENT}
KINDS = pytest.mark.parametrize("params", NAMED.values(), ids=NAMED)
Samples = list[list[int]]
Reference = Callable[[list[int], SamplingParams], Samples]


@pytest.fixture(scope="module")
def alone(shelf: Shelf) -> Reference:
    """REF: each sample of a request as a request of its own, alone, without prefix caching; asked for once."""
    known: dict[tuple[tuple[int, ...], str], list[int]] = {}

    def sample(prompt: list[int], params: SamplingParams) -> list[int]:
        key = tuple(prompt), repr(params)
        if key not in known:
            known[key] = tokens_alone(shelf.tiny(UNCACHED), prompt, params)
            if params == GREEDY:
                assert _least_lead(shelf.tiny(UNCACHED), prompt) > ROUNDING, f"a near tie: choose others than {prompt}"
        return known[key]

    return lambda prompt, params: [sample(prompt, params.for_child(index)) for index in range(params.n)]


@pytest.fixture
def llm(shelf: Shelf) -> LLM:
    llm = shelf.tiny()
    llm.reset_prefix_cache()
    return llm


def _least_lead(llm: LLM, prompt: list[int]) -> float:
    """By how much, in log-probability, each greedy token is ahead of the second one, at the least."""
    (output,) = llm.generate([ids(prompt)], dataclasses.replace(GREEDY, logprobs=2), use_tqdm=False)
    entries = output.outputs[0].logprobs
    assert entries is not None
    return min(abs(float(np.subtract(*(each.logprob for each in entry.values())))) for entry in entries)


def _with_n(params: SamplingParams, n: int) -> SamplingParams:
    return dataclasses.replace(params, n=n)


def _samples(output: RequestOutput) -> Samples:
    return [sample.token_ids for sample in output.outputs]


def _generate(llm: LLM, prompts: list[list[int]], params: SamplingParams, alone: Reference) -> list[int]:
    """Compares all, and returns how many tokens of each prompt were found in the cache."""
    outputs = llm.generate([ids(prompt) for prompt in prompts], params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert _samples(output) == alone(prompt, params)
    assert_idle(llm.engine)
    return [output.num_cached_tokens for output in outputs]


def test_the_references_can_show_a_fault(alone: Reference) -> None:
    """Tokens vary along an answer, and change with the first token of the prompt and with the seed."""
    for params in NAMED.values():
        assert len(set(alone(LONG, params)[0])) >= 5
        assert alone([LONG[0] + 1, *LONG[1:]], params) != alone(LONG, params)
    first, second, third = alone(LONG, _with_n(SEEDED, 3))
    assert first != second != third != first


@KINDS
@IN_FLIGHT
def test_cold_and_cached(llm: LLM, alone: Reference, params: SamplingParams, num_in_flight: int) -> None:
    with steps_in_flight(llm, num_in_flight):
        for prompt in PROMPTS:
            assert _generate(llm, [prompt], params, alone) == [0]
            assert _generate(llm, [prompt], params, alone) == [len(prompt) - 1]
        assert _generate(llm, PROMPTS, params, alone) == [len(prompt) - 1 for prompt in PROMPTS]


@pytest.mark.parametrize("params", [GREEDY, CHOSEN], ids=["greedy", "chosen"])
@IN_FLIGHT
@pytest.mark.parametrize("num_shared", [5, 16, 21, 47])
def test_partly_cached(llm: LLM, alone: Reference, params: SamplingParams, num_shared: int, num_in_flight: int) -> None:
    """Another prompt has left whole blocks, and one of which only the first tokens are wanted: that one is copied.

    Its own keys and values stay as they are, and it is served again.
    """
    other = [*LONG[:num_shared], *(459 + j % 50 for j in range(64 - num_shared))]
    with steps_in_flight(llm, num_in_flight):
        assert _generate(llm, [other], GREEDY, alone) == [0]
        before = cached_contents(llm.engine)
        assert _generate(llm, [LONG], params, alone) == [num_shared]
        after = cached_contents(llm.engine)
        assert _generate(llm, [other, LONG], GREEDY, alone) == [63, 64]
    for digest, contents in before.items():
        np.testing.assert_array_equal(after[digest], contents)


@IN_FLIGHT
@pytest.mark.parametrize("budget", [8, 13, 16, 48])
def test_partly_cached_and_in_chunks(llm: LLM, alone: Reference, budget: int, num_in_flight: int) -> None:
    """The rest of a prompt begins anywhere in a block, and so do its chunks."""
    others = [[*LONG[:num_shared], *range(460, 480)] for num_shared in (5, 21, 37)]
    with steps_in_flight(llm, num_in_flight), token_budget(llm, budget):
        for other in others:
            _generate(llm, [other, LONG[:50], LONG], SEEDED, alone)
        _generate(llm, [LONG, *others], GREEDY, alone)


@IN_FLIGHT
def test_a_tree_of_beginnings(llm: LLM, alone: Reference, num_in_flight: int) -> None:
    """Sixteen prompts that leave LONG at different tokens, at once and in two orders; more than there are rows."""
    prompts = [[*LONG[: 4 * i + 1], *range(100 + i, 130 + i)] for i in range(16)]
    with steps_in_flight(llm, num_in_flight):
        for order in (prompts, prompts[::-1], prompts[::2] + prompts[1::2]):
            llm.reset_prefix_cache()
            _generate(llm, order, SEEDED, alone)
            assert _generate(llm, order, GREEDY, alone) == [len(prompt) - 1 for prompt in order]


@KINDS
@IN_FLIGHT
@pytest.mark.parametrize("has_prefix_cache", [True, False])
def test_forked(
    shelf: Shelf, alone: Reference, params: SamplingParams, has_prefix_cache: bool, num_in_flight: int
) -> None:
    """Three samples of one request are three requests with its seed, its seed + 1 and its seed + 2."""
    llm, three = shelf.tiny(UNCACHED._replace(has_prefix_cache=has_prefix_cache)), _with_n(params, 3)
    llm.reset_prefix_cache()
    with steps_in_flight(llm, num_in_flight):
        for prompt in PROMPTS:
            _generate(llm, [prompt], three, alone)
        num_cached = _generate(llm, PROMPTS, three, alone)
        apart = llm.generate([ids(LONG)] * 3, [three.for_child(index) for index in range(3)], use_tqdm=False)
    assert num_cached == [len(prompt) - 1 if has_prefix_cache else 0 for prompt in PROMPTS]
    assert [output.outputs[0].token_ids for output in apart] == alone(LONG, three)


@IN_FLIGHT
@pytest.mark.parametrize("length", [16, 40])
@pytest.mark.parametrize("leaving", [0, 1, 2])
@pytest.mark.parametrize("place", [0, 7])
def test_forked_from_one_that_leaves(
    llm: LLM, alone: Reference, length: int, leaving: int, place: int, num_in_flight: int
) -> None:
    """One of the samples meets a stop token of its own and gives its blocks back, those shared with the others too."""
    prompt = LONG[:length]
    stop = alone(prompt, _with_n(SEEDED, 3))[leaving][place]
    with steps_in_flight(llm, num_in_flight):
        params = dataclasses.replace(SEEDED, n=3, stop_token_ids=(stop,))
        assert len(alone(prompt, params)[leaving]) <= place + 1
        _generate(llm, [prompt], params, alone)
        _generate(llm, [prompt, [*prompt, 5]], params, alone)


@IN_FLIGHT
@pytest.mark.parametrize("has_prefix_cache", [True, False])
def test_preempted(shelf: Shelf, alone: Reference, has_prefix_cache: bool, num_in_flight: int) -> None:
    """Greedy and seeded, forked and single, of three beginnings, in a pool for a third of them."""
    llm = shelf.tiny(TIGHT._replace(has_prefix_cache=has_prefix_cache))
    llm.reset_prefix_cache()
    kinds = (GREEDY, _with_n(SEEDED, 3), PENALISED, _with_n(PATIENT, 2))
    long = [dataclasses.replace(params, max_tokens=56) for params in kinds]
    arrivals = {
        str(i): Arrival([*PROMPTS[4 + i % 3][: 30 + 3 * i], 7 * i], long[i % 4], at_step=2 * i) for i in range(10)
    }
    with steps_in_flight(llm, num_in_flight):
        for _ in range(2):
            outputs = serve(llm.engine, arrivals)
            assert sum(output.metrics.num_preemptions > 0 for output in outputs.values()) >= 2
            for request_id, output in outputs.items():
                assert _samples(output) == alone(list(arrivals[request_id].prompt), arrivals[request_id].params)
            assert_idle(llm.engine)


@IN_FLIGHT
@pytest.mark.parametrize("num_steps", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 3])
def test_blocks_that_never_come(llm: LLM, alone: Reference, n: int, num_steps: int, num_in_flight: int) -> None:
    """Whoever computes a prompt that others wait for is aborted on the way: one of them goes on from where it was."""
    engine, params = llm.engine, _with_n(SEEDED, n)
    with steps_in_flight(llm, num_in_flight), token_budget(llm, 16):
        for request_id in ("A", "B", "C"):
            engine.add_request(request_id, LONG, params)
        for _ in range(num_steps):
            engine.step()
        assert engine.stats().num_waiting >= 2, "they compute the same blocks side by side"
        engine.abort(["A"])
        outputs = serve(engine, {"D": Arrival(LONG, GREEDY)})
    assert _samples(outputs["B"]) == _samples(outputs["C"]) == alone(LONG, params)
    assert _samples(outputs["D"]) == alone(LONG, GREEDY)
    assert_idle(engine)


def _random_arrival(source: random.Random) -> Arrival:
    """A beginning of one of two trunks, an ending of its own or none, any kind of sampling."""
    prompt = PROMPTS[source.choice((5, 6))][: source.randint(1, 64)]
    prompt = [*prompt, *(source.randrange(512) for _ in range(source.choice((0, 0, 1, 9, 20))))]
    kind = source.choice(tuple(NAMED.values()))
    params = dataclasses.replace(kind, n=source.choice((1, 1, 2, 3)), max_tokens=source.randint(1, 90))
    return Arrival(prompt, params, at_step=source.randint(0, 60))


@IN_FLIGHT
@pytest.mark.parametrize("seed", [0, 1])
def test_any_traffic(shelf: Shelf, alone: Reference, seed: int, num_in_flight: int) -> None:
    """24 requests through a small pool, some of them aborted, the cache reset on the way."""
    llm, source = shelf.tiny(TIGHT), random.Random(seed)
    engine = llm.engine
    llm.reset_prefix_cache()
    arrivals = {str(i): _random_arrival(source) for i in range(24)}
    aborts = {step: str(source.randrange(24)) for step in source.sample(range(5, 90), 4)}
    num_steps, num_preemptions, num_hits = 0, engine.stats().num_preemptions, engine.stats().num_prefix_hits
    outputs: dict[str, RequestOutput] = {}
    with steps_in_flight(llm, num_in_flight), token_budget(llm, source.choice((16, 33, 48))):
        while num_steps <= 90 or engine.has_unfinished_requests():
            for request_id, arrival in arrivals.items():
                if arrival.at_step == num_steps:
                    engine.add_request(request_id, list(arrival.prompt), arrival.params)
            deltas = engine.abort([aborts[num_steps]] if num_steps in aborts else [])
            if num_steps == 45:
                engine.reset_prefix_cache()
            deltas += engine.step()
            engine._manager.pool.check()
            outputs.update({delta.request_id: delta.output for delta in deltas if delta.output is not None})
            num_steps += 1
    assert outputs.keys() == arrivals.keys()
    assert engine.stats().num_preemptions > num_preemptions and engine.stats().num_prefix_hits > num_hits
    for request_id, output in outputs.items():
        whole = alone(list(arrivals[request_id].prompt), arrivals[request_id].params)
        for sample, token_ids in zip(output.outputs, whole, strict=True):
            assert sample.token_ids == token_ids[: len(sample.token_ids)]
            assert sample.finish_reason == "abort" or sample.token_ids == token_ids
    assert_idle(engine)
