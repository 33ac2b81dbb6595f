"""What ends a request."""

import pytest

from paxpage.engine.request import FinishReason, Request, RequestStatus
from paxpage.engine.sampling_params import SamplingParams

EOS = frozenset({7, 8})


def request_with(params: SamplingParams, max_tokens: int = 5) -> Request:
    return Request("a", [1, 2, 3], params, max_tokens=max_tokens, eos_token_ids=EOS)


def reasons(request: Request, token_ids: list[int]) -> list[FinishReason | None]:
    return [request.append(token_id) for token_id in token_ids]


def test_a_new_request() -> None:
    request = request_with(SamplingParams())
    assert (request.num_tokens, request.num_prompt_tokens, request.num_output_tokens) == (3, 3, 0)
    assert request.num_uncomputed_tokens == 3
    assert (request.status, request.finish_reason, request.row) == (RequestStatus.WAITING, None, -1)


def test_outputs_follow_the_prompt() -> None:
    prompt = [1, 2, 3]
    request = Request("a", prompt, SamplingParams(), max_tokens=5)
    request.append(4)
    request.append(5)
    assert (request.token_ids, request.output_token_ids, prompt) == ([1, 2, 3, 4, 5], [4, 5], [1, 2, 3])
    request.num_computed_tokens = 4
    assert (request.num_output_tokens, request.num_uncomputed_tokens) == (2, 1)


def test_the_last_token_allowed_ends_it() -> None:
    assert reasons(request_with(SamplingParams(), 3), [4, 4, 4]) == [None, None, FinishReason.LENGTH]


@pytest.mark.parametrize("eos", sorted(EOS))
def test_each_end_of_sequence_token_ends_it(eos: int) -> None:
    request = request_with(SamplingParams())
    assert reasons(request, [4, eos]) == [None, FinishReason.STOP]
    assert request.stop_reason is None


def test_an_end_of_sequence_in_the_prompt_does_not_count() -> None:
    request = Request("a", [7], SamplingParams(), max_tokens=5, eos_token_ids=EOS)
    assert request.append(4) is None


def test_ignore_eos() -> None:
    request = request_with(SamplingParams(ignore_eos=True), 3)
    assert reasons(request, [7, 8, 7]) == [None, None, FinishReason.LENGTH]


def test_a_stop_token_ends_it_and_is_named() -> None:
    request = request_with(SamplingParams(stop_token_ids=[5, 6]))
    assert reasons(request, [4, 6]) == [None, FinishReason.STOP]
    assert request.stop_reason == 6


def test_ignore_eos_leaves_stop_tokens_alone() -> None:
    request = request_with(SamplingParams(ignore_eos=True, stop_token_ids=[7]))
    assert reasons(request, [8, 7]) == [None, FinishReason.STOP]
    assert request.stop_reason == 7


def test_a_stop_token_as_the_last_one_allowed_is_a_stop() -> None:
    assert reasons(request_with(SamplingParams(stop_token_ids=[5]), 2), [4, 5]) == [None, FinishReason.STOP]


@pytest.mark.parametrize("token_id", [5, 7])
def test_nothing_stops_it_before_min_tokens(token_id: int) -> None:
    request = request_with(SamplingParams(stop_token_ids=[5], min_tokens=3))
    assert reasons(request, [token_id, token_id, token_id]) == [None, None, FinishReason.STOP]


def test_the_limit_of_the_context_comes_before_min_tokens() -> None:
    request = request_with(SamplingParams(min_tokens=4), 2)
    assert reasons(request, [4, 4]) == [None, FinishReason.LENGTH]


def test_tokens_in_flight_count_as_tokens_and_not_as_output() -> None:
    request = request_with(SamplingParams(), 3)
    request.num_computed_tokens, request.num_tokens = 3, request.num_tokens + 1
    assert (request.num_known_tokens, request.num_tokens, request.num_output_tokens) == (3, 4, 0)
    assert request.num_uncomputed_tokens == 1


def test_a_token_that_arrives_was_counted_when_it_was_sampled() -> None:
    request = request_with(SamplingParams(), 2)
    request.num_tokens += 1
    assert request.num_pending_tokens == 1
    assert request.append(4) is None
    assert (request.num_pending_tokens, request.num_tokens, request.num_output_tokens) == (0, 4, 1)


def test_tokens_in_flight_can_be_lost() -> None:
    request = request_with(SamplingParams(), 2)
    request.num_tokens += 2
    request.forget_pending()
    assert (request.num_pending_tokens, request.num_tokens) == (0, 3)
