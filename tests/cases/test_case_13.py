"""Case 13, whole: at a high temperature SMOL writes half characters, and its stream still joins to the whole text."""

import pytest

from paxpage import SamplingParams
from paxpage.engine.detokenizer import decode_after
from paxpage.engine.engine import Engine
from tests.helpers.shelf import Shelf

NUM_SEEDS, NUM_TOKENS = 20, 64
PROMPT = "Greetings in many scripts: "


@pytest.fixture(scope="module")
def pieces(shelf: Shelf) -> dict[int, tuple[list[str], list[int], str]]:
    """Of each seed: the stream's pieces, its tokens, and the text of the whole output."""
    engine = shelf.smol().engine
    for seed in range(NUM_SEEDS):
        params = SamplingParams(temperature=1.5, seed=seed, max_tokens=NUM_TOKENS, ignore_eos=True)
        engine.add_request(f"case 13, {seed}", PROMPT, params)
    found: dict[int, tuple[list[str], list[int], str]] = {seed: ([], [], "") for seed in range(NUM_SEEDS)}
    while engine.has_unfinished_requests():
        for delta in engine.step():
            seed = int(delta.request_id.rsplit(" ", 1)[1])
            texts, token_ids, whole = found[seed]
            whole = delta.output.outputs[0].text if delta.output else whole
            found[seed] = ([*texts, delta.text], token_ids + delta.token_ids, whole)
    return found


def whole_text(engine: Engine, token_ids: list[int]) -> str:
    """Decoded at once, as a request that nobody streams is."""
    tokenizer = engine.tokenizer
    decode = lambda ids: tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=True)  # noqa: E731
    return decode_after(decode, tokenizer.encode(PROMPT), token_ids)


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_a_stream_joins_to_the_whole_text(shelf: Shelf, pieces: dict, seed: int) -> None:
    texts, token_ids, whole = pieces[seed]
    assert len(token_ids) == NUM_TOKENS
    assert "".join(texts) == whole == whole_text(shelf.smol().engine, token_ids)


def test_some_pieces_were_held_back(pieces: dict) -> None:
    """Otherwise no token ended within a character, and nothing was shown."""
    assert any("" in texts[:-1] for texts, _, _ in pieces.values())


def test_a_request_that_is_not_streamed_gives_the_same_text(shelf: Shelf, pieces: dict) -> None:
    params = SamplingParams(temperature=1.5, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True)
    (output,) = shelf.smol().generate(PROMPT, params, use_tqdm=False)
    assert output.outputs[0].text == pieces[3][2]
