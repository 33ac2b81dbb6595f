"""The founding scenario on the embedded model: scripts/demo_shared_prompt.py."""

import pytest

from paxpage import LLM
from paxpage.models.embedded import default_model_path
from scripts.demo_shared_prompt import Demo, Report, print_report

NUM_USERS = 10


@pytest.fixture(scope="module")
def report() -> Report:
    with LLM(
        default_model_path(), num_blocks=33, max_num_seqs=16, max_num_batched_tokens=256, max_model_len=512,
        show_progress=False,
    ) as llm:  # fmt: skip
        report = Demo(llm.engine, NUM_USERS, max_tokens=36).run()
        stats = llm.engine.stats()
        assert stats.num_blocks_free == stats.num_blocks_usable == 32
        assert stats.num_preemptions == 0
    return report


def test_everybody_is_answered(report: Report) -> None:
    assert set(report.texts) == {f"user-{i}" for i in range(NUM_USERS)}
    assert all(text.strip() for text in report.texts.values())
    assert "Paris" in report.texts["user-6"]


def test_a_finished_requests_blocks_serve_a_waiting_one_on_the_very_next_pass(report: Report) -> None:
    assert report.num_prompt_holders < NUM_USERS, "the cache was large enough for all: nobody waited"
    assert report.reuses
    for reuse in report.reuses:
        assert reuse.num_freed > 0 and 0 < reuse.num_taken < report.num_prompt_blocks
        assert reuse.admitted not in reuse.finished


def test_little_is_wasted_where_contiguous_reservation_wastes_most(report: Report) -> None:
    # The last block of each request is half empty on average, and its other blocks are few: the prompt's are shared.
    assert report.waste_fraction < 0.12
    assert report.contiguous_waste_fraction > 0.35


def test_the_shared_prompt_is_computed_and_held_once(report: Report) -> None:
    assert report.num_prompt_holders > 1 and report.num_prompt_copies == 1
    num_shared = report.num_prompt_blocks * 16
    assert report.num_cached_tokens >= (NUM_USERS - 1) * num_shared


def test_the_report_can_be_printed(report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    print_report(report, 16)
    assert "let user-" in capsys.readouterr().out
