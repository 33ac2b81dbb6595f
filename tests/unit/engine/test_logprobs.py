"""Log-probabilities as users get them, from the sampler's arrays and from whole logits."""

import numpy as np
import pytest

from paxpage.engine.logprobs import Description, TokenTexts, describe_on_host, descriptions, token_logprobs
from paxpage.outputs import Logprob
from tests.server.tiny import make_tokenizer

VOCAB_SIZE, NUM_ROWS, NUM_THERE = 200, 12, 20


def logits_with_equals() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 40, (NUM_ROWS, VOCAB_SIZE)).astype(np.float32)


def arrays_of(logits: np.ndarray, token_ids: list[int]) -> tuple[np.ndarray, ...]:
    """What sampler.describe gives, in its dtypes."""
    logprobs = (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))).astype(np.float32)
    chosen = logprobs[np.arange(len(logits)), token_ids]
    ranks = 1 + (logprobs > chosen[:, None]).sum(axis=1)
    order = np.argsort(-logprobs, axis=1, kind="stable")[:, :NUM_THERE]
    return chosen, ranks.astype(np.int32), order.astype(np.int32), np.take_along_axis(logprobs, order, axis=1)


def expected_entries(
    arrays: tuple[np.ndarray, ...], row: int, token_id: int, num_top: int
) -> list[tuple[int, Logprob]]:
    """Value by value."""
    chosen, ranks, top_ids, top_logprobs = arrays
    entries = [(token_id, Logprob(float(chosen[row]), int(ranks[row]), f"<{token_id}>"))]
    for place in range(num_top):
        each = int(top_ids[row, place])
        if each != token_id:
            entries.append((each, Logprob(float(top_logprobs[row, place]), place + 1, f"<{each}>")))
    return entries


class Spelled(TokenTexts):
    """Texts without a tokenizer."""

    def __missing__(self, token_id: int) -> str:
        return f"<{token_id}>"


@pytest.mark.parametrize("num_top", [0, 1, 5, NUM_THERE])
@pytest.mark.parametrize("num_read", [5, NUM_THERE])
def test_entries_are_the_chosen_token_and_then_the_most_likely(num_top: int, num_read: int) -> None:
    """Chosen are the most likely one, the second of equals, some other of the top ones and hopeless ones."""
    logits = logits_with_equals()
    order = np.argsort(-logits, axis=1, kind="stable")
    token_ids = [int(order[row, (0, 1, 4, 19, 20, 150)[row % 6]]) for row in range(NUM_ROWS)]
    arrays, num_top = arrays_of(logits, token_ids), min(num_top, num_read)
    assert any(arrays[1][row] != 1 + list(order[row]).index(token_ids[row]) for row in range(NUM_ROWS)), "equals"
    rows = [0, 3, 4, 5, 7, 11, 1, 2]
    for row, described in zip(rows, descriptions(arrays, rows, num_read), strict=True):
        entries = token_logprobs(token_ids[row], described, num_top, Spelled(None))
        assert list(entries.items()) == expected_entries(arrays, row, token_ids[row], num_top)
        kinds = {(type(token_id), *map(type, entry), type(entry)) for token_id, entry in entries.items()}
        assert kinds == {(int, float, int, str, Logprob)}


def test_the_first_rows_of_a_prompts_tokens() -> None:
    arrays = arrays_of(logits_with_equals(), [7] * NUM_ROWS)
    described = descriptions(arrays, slice(3), 2)
    assert [each.rank for each in described] == arrays[1][:3].tolist()
    assert [each.top_token_ids for each in described] == arrays[2][:3, :2].tolist()


def test_no_row_and_no_token() -> None:
    arrays = arrays_of(logits_with_equals(), [7] * NUM_ROWS)
    assert descriptions(arrays, [], 5) == []
    (described,) = descriptions(arrays, [2], 0)
    assert described == Description(float(arrays[0][2]), int(arrays[1][2]), [], [])


@pytest.mark.parametrize("num_top", [0, 30, VOCAB_SIZE])
def test_whole_logits_give_the_same_and_more(num_top: int) -> None:
    logits = logits_with_equals()
    arrays = arrays_of(logits, [7] * NUM_ROWS)
    described = describe_on_host(logits[4], 7, num_top)
    entries = list(token_logprobs(7, described, num_top, Spelled(None)).items())
    expected = expected_entries(arrays, 4, 7, min(num_top, NUM_THERE))
    assert [token_id for token_id, _ in entries[: len(expected)]] == [token_id for token_id, _ in expected]
    for (_, entry), (_, other) in zip(entries, expected, strict=False):
        assert entry[1:] == other[1:] and entry.logprob == pytest.approx(other.logprob, abs=1e-5)
    assert len(entries) in ({1} if num_top == 0 else {num_top, num_top + 1})
    if num_top == VOCAB_SIZE:
        assert {token_id for token_id, _ in entries} == set(range(VOCAB_SIZE))
        assert sum(np.exp(entry.logprob) for _, entry in entries) == pytest.approx(1)


def test_a_tokens_text_is_its_own_and_kept() -> None:
    """Parts of characters and special tokens included."""
    tokenizer = make_tokenizer()
    texts = TokenTexts(tokenizer)
    for _ in range(2):
        assert [texts[i] for i in range(len(tokenizer))] == [tokenizer.decode([i]) for i in range(len(tokenizer))]
    assert dict(texts) == {i: tokenizer.decode([i]) for i in range(len(tokenizer))}
    assert "\ufffd" in texts.values() and tokenizer.bos_token in texts.values()


def test_without_a_tokenizer_there_are_no_texts() -> None:
    described = Description(-1.0, 2, [3, 4], [-0.5, -1.0])
    entries = token_logprobs(4, described, 2, TokenTexts(None))
    assert entries == {4: Logprob(-1.0, 2, None), 3: Logprob(-0.5, 1, None)}
