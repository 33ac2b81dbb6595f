"""Case 3: a cached block is found for its own tokens only. After openvinotoolkit/openvino.genai#3722.

The design relies on digests: a block's is SHA-256 of its parent's digest and its token ids, too long for two to meet.
"""

import hashlib
import itertools
import struct

import pytest

from paxpage import LLM
from paxpage.engine.prefix_cache import block_digests, root_digest
from tests.helpers.engines import assert_idle, greedy_params, ids, steps_in_flight, tokens_alone
from tests.helpers.shelf import UNCACHED, Shelf

PROMPTS = {
    "A": [100] * 32 + [7],
    "B": [200] * 32 + [7],
    "C": [100] * 16 + [200] * 16 + [7],
    "D": [200] * 16 + [100] * 16 + [7],
}
PARAMS = greedy_params(16)
# Tokens found in the cache when the prompts come in this order to an empty one, twice. The second time a prompt
# is there but for its last token.
FIRST = {"A": 0, "B": 0, "C": 16, "D": 16}


@pytest.fixture
def llm(shelf: Shelf) -> LLM:
    llm = shelf.tiny()
    llm.reset_prefix_cache()
    return llm


@pytest.fixture(scope="module")
def alone(shelf: Shelf) -> dict[str, list[int]]:
    """REF of each prompt; they differ, so one that is given another's blocks would show it."""
    outputs = {name: tokens_alone(shelf.tiny(UNCACHED), prompt, PARAMS) for name, prompt in PROMPTS.items()}
    for name, token_ids in outputs.items():
        shelf.tiny_judge().check(PROMPTS[name], token_ids)
    assert len({tuple(token_ids) for token_ids in outputs.values()}) == 4
    return outputs


def _run(llm: LLM, name: str) -> tuple[list[int], int]:
    """Tokens, and how many of the prompt's were found in the cache."""
    (output,) = llm.generate([ids(PROMPTS[name])], PARAMS, use_tqdm=False)
    assert_idle(llm.engine)
    return output.outputs[0].token_ids, output.num_cached_tokens


@pytest.mark.parametrize("num_in_flight", [0, 1])
def test_each_prompt_gets_its_own_blocks(llm: LLM, alone: dict[str, list[int]], num_in_flight: int) -> None:
    """C and D share their first block with A and B; D's second has the tokens of A's first, but others before it."""
    with steps_in_flight(llm, num_in_flight):
        assert {name: _run(llm, name) for name in PROMPTS} == {name: (alone[name], FIRST[name]) for name in PROMPTS}
        assert {name: _run(llm, name) for name in PROMPTS} == {name: (alone[name], 32) for name in PROMPTS}


@pytest.mark.parametrize("order", list(itertools.permutations(PROMPTS)), ids="".join)
def test_in_any_order(llm: LLM, alone: dict[str, list[int]], order: tuple[str, ...]) -> None:
    for index, name in enumerate(order):
        is_begun = any(PROMPTS[name][0] == PROMPTS[other][0] for other in order[:index])
        assert _run(llm, name) == (alone[name], 16 if is_begun else 0)


def test_all_at_once(llm: LLM, alone: dict[str, list[int]]) -> None:
    names = [*PROMPTS] * 2
    outputs = llm.generate([ids(PROMPTS[name]) for name in names], PARAMS, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [alone[name] for name in names]
    assert_idle(llm.engine)


@pytest.mark.parametrize("salts", [("x", "y"), (None, "x"), ("", None), ("x", "x\0")])
def test_another_salt_shares_nothing(llm: LLM, alone: dict[str, list[int]], salts: tuple[str | None, ...]) -> None:
    """The same salt finds all; another one neither whole blocks nor the beginning of one."""
    for num_cached in (0, 32):
        for salt in salts:
            prompt = {**ids(PROMPTS["A"]), "cache_salt": salt}
            (output,) = llm.generate([prompt], PARAMS, use_tqdm=False)
            assert (output.outputs[0].token_ids, output.num_cached_tokens) == (alone["A"], num_cached)
    assert_idle(llm.engine)


def test_what_the_cache_says_of_c_after_a(llm: LLM) -> None:
    """Its first block is there. Its second would follow that one, as A's does, but begins with another token."""
    salt = {"cache_salt": "case 3"}  # no other test has had these blocks
    llm.generate([{**ids(PROMPTS["A"]), **salt}], PARAMS, use_tqdm=False)
    near = [*PROMPTS["A"][:20], *PROMPTS["C"][20:]]
    verdicts = {
        name: [(report.verdict, report.first_difference) for report in llm.explain_cache({**ids(prompt), **salt})]
        for name, prompt in {**PROMPTS, "near": near}.items()
    }
    hit, miss = ("hit", None), ("miss", None)
    assert verdicts == {
        "A": [hit, hit], "B": [miss, miss], "C": [hit, miss], "D": [miss, miss], "near": [hit, ("differs", 20)]
    }  # fmt: skip


def test_digests_are_long_and_chained() -> None:
    """At least 128 bits of a cryptographic hash over the parent's digest and the ids; Python's hash() has no part."""
    token_ids = [*range(16), *range(16)]
    root = root_digest(None)
    first, second = block_digests(root, token_ids, 16)
    packed = struct.pack("=16I", *range(16))
    assert len(first) * 8 >= 128
    assert first == hashlib.sha256(root + packed).digest()
    assert second == hashlib.sha256(first + packed).digest()
    salted = [digest for salt in ("", "x") for digest in block_digests(root_digest(salt), token_ids, 16)]
    assert len({first, second, *salted}) == 6


def test_ids_are_hashed_at_their_full_width() -> None:
    """Ids that agree in their low bytes, or that join to the same bytes, are different ones."""
    runs = ([1, 2], [257, 2], [65537, 2], [2**24 + 1, 2], [1, 2 + 2**8], [2, 1], [0, 258])
    assert len({digest for run in runs for digest in block_digests(root_digest(None), run, 2)}) == len(runs)
