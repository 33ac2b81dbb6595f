"""Every bad option is refused by name."""

import importlib.util
import math
from typing import Any

import pytest

from paxpage.engine import sampling_params
from paxpage.engine.sampling_params import (
    MAX_BAD_WORDS,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    SamplingParams,
)

NOT_NUMBERS = ("1", None, True, [], {}, 1j)
NOT_INTS = (*NOT_NUMBERS, 1.5, 1.0, math.nan, math.inf)
LONG_STOP = "a" * MAX_STOP_CHARS
AS_MANY_WORDS = (["a"] * (MAX_BAD_WORDS // 2), [[1]] * MAX_BAD_WORDS)
TOO_MANY_WORDS = tuple([*words, *words[:1]] for words in AS_MANY_WORDS)
BAD_VALUES: dict[str, tuple[Any, ...]] = {
    "n": (*NOT_INTS, 0, -1, 129),
    "temperature": (*NOT_NUMBERS, "hot", -0.1, math.nan, math.inf, -math.inf, 1.1e6, 1e9),
    "top_p": (*NOT_NUMBERS, 0, 0.0, -0.1, 1.01, math.nan, math.inf),
    "top_k": (*NOT_INTS, -2, 2**31),
    "min_p": (*NOT_NUMBERS, -0.1, 1.01, math.nan, math.inf),
    "seed": ("7", True, 1.5, math.nan, 2**63, -(2**63) - 1),
    "max_tokens": ("5", True, 1.5, math.inf, 0, -1),
    "min_tokens": (*NOT_INTS, -1, 17),
    "logprobs": ("2", True, 1.5, -2),
    "prompt_logprobs": ("2", True, 1.5, -1),
    "stop": (5, "", [""], ["a", ""], ["a", 5], [None], {"a": 1}, True, ["a"] * (MAX_STOPS + 1), LONG_STOP + "a"),
    "stop_token_ids": (5, "12", ["1"], [1.0], [True], [-1], {1, 2}, [1] * (MAX_STOP_TOKEN_IDS + 1)),
    "presence_penalty": (*NOT_NUMBERS, -2.1, 2.1, math.nan),
    "frequency_penalty": (*NOT_NUMBERS, -2.1, 2.1, math.inf),
    "repetition_penalty": (*NOT_NUMBERS, 0, -1, 1e-7, 1e7, math.nan),
    "allowed_token_ids": (5, "12", [], ["1"], [1.0], [True], [-1], {1, 2}),
    "structured_outputs": (5, "json", {}, {"regex": "a"}),
    "bad_words": (
        5,
        "abc",
        [""],
        [[]],
        ["a", 5],
        [None],
        [[-1]],
        [["a"]],
        [[1.5]],
        ["a"] * (MAX_BAD_WORDS // 2 + 1),
        [[1]] * (MAX_BAD_WORDS + 1),
    ),
    "ignore_eos": (1, 0, "yes", None),
    "include_stop_str_in_output": (1, "no", None),
    "detokenize": (0, "yes", None),
    "skip_special_tokens": (1, "yes", None),
}


@pytest.fixture(scope="module")
def unchecked() -> Any:
    """SamplingParams as users have it: without the run-time type checks of the test run, which would speak first."""
    spec = importlib.util.spec_from_file_location("unchecked_sampling_params", sampling_params.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.SamplingParams


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in BAD_VALUES.items() for value in values]
)
def test_a_bad_value_is_refused_by_name(unchecked: Any, field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{field} is .+; allowed: .+"):
        unchecked(**{field: value})


@pytest.mark.parametrize("field", list(SamplingParams.__dataclass_fields__))
def test_no_option_goes_untested(field: str) -> None:
    assert field in BAD_VALUES or field == "logit_bias"


@pytest.mark.parametrize(
    ("value", "named"),
    [
        *((value, "logit_bias is ") for value in (5, "ab", [1], [])),
        ({"abc": 1}, "logit_bias key is 'abc'"),
        ({"5": 1}, "logit_bias key is '5'"),
        ({-1: 1}, "logit_bias key is -1"),
        ({1.0: 1}, r"logit_bias key is 1\.0"),
        ({True: 1}, "logit_bias key is True"),
        *(({5: value}, "logit_bias of 5 is ") for value in (*NOT_NUMBERS, 1e30, 100.1, -101, math.nan)),
    ],
)
def test_a_bad_bias_is_refused_by_its_key(unchecked: Any, value: Any, named: str) -> None:
    with pytest.raises(ValueError, match=rf"^{named}.*; allowed: .+"):
        unchecked(logit_bias=value)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("n", (1, 128)),
        ("temperature", (0, 0.0, 1e-12, 1, 1e6)),
        ("top_p", (1e-9, 0.5, 1)),
        ("top_k", (-1, 0, 1, 2**31 - 1)),
        ("min_p", (0, 0.5, 1.0)),
        ("seed", (None, 0, -1, 2**31, 2**63 - 1, -(2**63))),
        ("max_tokens", (None, 1, 10**9)),
        ("min_tokens", (0, 16)),
        ("logprobs", (None, -1, 0, 20)),
        ("presence_penalty", (-2, 0, 0.5, 2)),
        ("frequency_penalty", (-2, 0, 0.5, 2)),
        ("repetition_penalty", (1e-6, 1e-3, 1, 1e3, 1e6)),
        ("logit_bias", (None, {}, {0: 1, 7: -100.0}, dict.fromkeys(range(2000), 100))),
        ("allowed_token_ids", (None, [0], (1, 2))),
        (
            "bad_words",
            (None, [], ["x", "y z"], ["x", [1, 2]], (("x"),), ["a"] * (MAX_BAD_WORDS // 2), [[1]] * MAX_BAD_WORDS),
        ),
        ("prompt_logprobs", (None, 0, 20)),
        ("stop", (None, "x", [], ["x", "yz"], ("x",), ["a"] * MAX_STOPS, LONG_STOP)),
        ("stop_token_ids", (None, [], [0], (1, 2), [1] * MAX_STOP_TOKEN_IDS)),
    ],
)
def test_a_good_value_is_kept(unchecked: Any, field: str, values: tuple[Any, ...]) -> None:
    assert [getattr(unchecked(**{field: value}), field) for value in values] == list(values)


def test_the_message_says_what_is_allowed() -> None:
    with pytest.raises(ValueError, match=r"^temperature is -0\.1; allowed: a finite number from 0 to 1e6$"):
        SamplingParams(temperature=-0.1)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="best_off"):
        SamplingParams(best_off=2)


def test_min_tokens_within_max_tokens() -> None:
    assert SamplingParams(min_tokens=40, max_tokens=None).min_tokens == 40
    with pytest.raises(ValueError, match=r"^min_tokens is 6; allowed: at most max_tokens \(5\)"):
        SamplingParams(min_tokens=6, max_tokens=5)


def test_stop_strings_need_text() -> None:
    with pytest.raises(ValueError, match=r"^stop is 'x'; allowed: nothing when detokenize is False"):
        SamplingParams(stop="x", detokenize=False)


@pytest.mark.parametrize(("stop", "expected"), [(None, ()), ("ab", ("ab",)), (["a", "b"], ("a", "b"))])
def test_stop_strings(stop: Any, expected: tuple[str, ...]) -> None:
    assert SamplingParams(stop=stop).stop_strings == expected


@pytest.mark.parametrize(
    ("temperature", "is_greedy"), [(0.0, True), (1e-12, True), (1e-8, True), (1e-4, False), (1.0, False)]
)
def test_a_tiny_temperature_is_greedy(temperature: float, is_greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).is_greedy is is_greedy


def test_samples_of_a_seeded_request_have_seeds_of_their_own() -> None:
    params = SamplingParams(n=3, seed=42, temperature=0.8)
    children = [params.for_child(index) for index in range(3)]
    assert [child.seed for child in children] == [42, 43, 44]
    assert all(child.n == 1 and child.temperature == 0.8 for child in children)


def test_a_childs_seed_wraps_round_within_int64() -> None:
    assert SamplingParams(n=2, seed=2**63 - 1).for_child(1).seed == -(2**63)
    assert SamplingParams(n=2, seed=-1).for_child(1).seed == 0


def test_samples_without_a_seed_stay_without() -> None:
    assert SamplingParams(n=2).for_child(1).seed is None


@pytest.mark.parametrize(
    ("options", "has_penalties", "is_adjusted"),
    [
        ({"logprobs": 3, "min_tokens": 2, "logit_bias": {}, "bad_words": []}, False, False),
        ({"presence_penalty": 0.1}, True, True),
        ({"frequency_penalty": -0.1}, True, True),
        ({"repetition_penalty": 1.1}, True, True),
        ({"logit_bias": {1: 0}}, False, True),
        ({"allowed_token_ids": [1]}, False, True),
        ({"bad_words": ["x"]}, False, True),
    ],
)
def test_who_is_adjusted(options: dict[str, Any], has_penalties: bool, is_adjusted: bool) -> None:
    params = SamplingParams(**options)
    assert (params.has_penalties, params.is_adjusted) == (has_penalties, is_adjusted)
