"""How many blocks fit the device."""

from types import SimpleNamespace

import jax
import pytest

from paxpage.engine.build import is_as_expected
from paxpage.engine.memory import CPU_CACHE_BYTES, MIB, num_blocks_that_fit


def on_device(monkeypatch: pytest.MonkeyPatch, stats: dict[str, int] | None) -> None:
    device = SimpleNamespace(memory_stats=lambda: stats)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])


def test_what_is_left_of_the_allocators_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    on_device(monkeypatch, {"bytes_limit": 100 * MIB, "bytes_in_use": 30 * MIB})
    assert num_blocks_that_fit(MIB, 10 * MIB, 0.9, most_useful=7) == 50
    assert num_blocks_that_fit(3 * MIB, 10 * MIB, 0.9, most_useful=7) == 16
    assert num_blocks_that_fit(MIB, 10 * MIB, 0.5, most_useful=7) == 10


@pytest.mark.parametrize(("temporary_mib", "fits"), [(58, True), (59, False)])
def test_at_least_the_null_block_and_one_more(monkeypatch: pytest.MonkeyPatch, temporary_mib: int, fits: bool) -> None:
    on_device(monkeypatch, {"bytes_limit": 100 * MIB, "bytes_in_use": 30 * MIB})
    if fits:
        assert num_blocks_that_fit(MIB, temporary_mib * MIB, 0.9, most_useful=7) == 2
    else:
        with pytest.raises(ValueError, match=r"0\.9.*100 MiB.*30 MiB in use.*59 MiB.*1 MiB.*1\.00 MiB"):
            num_blocks_that_fit(MIB, temporary_mib * MIB, 0.9, most_useful=7)


def test_more_in_use_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    on_device(monkeypatch, {"bytes_limit": 100 * MIB, "bytes_in_use": 95 * MIB})
    with pytest.raises(ValueError, match="leaves -5 MiB"):
        num_blocks_that_fit(MIB, 0, 0.9, most_useful=7)


def test_weights_that_are_still_to_come_are_told_as_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    on_device(monkeypatch, {"bytes_limit": 100 * MIB, "bytes_in_use": 5 * MIB})
    assert num_blocks_that_fit(MIB, 10 * MIB, 0.9, 7, coming_bytes=25 * MIB) == 50
    with pytest.raises(ValueError, match=r"95 MiB in use .weights included., less 10 MiB for a step"):
        num_blocks_that_fit(MIB, 10 * MIB, 0.9, 7, coming_bytes=90 * MIB)


def test_some_more_bytes_in_use_change_nothing_where_blocks_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    for in_use_mib in range(7_000, 7_060, 10):
        on_device(monkeypatch, {"bytes_limit": 100_000 * MIB, "bytes_in_use": in_use_mib * MIB})
        found.add(num_blocks_that_fit(2 * MIB, 1_000 * MIB, 0.9, most_useful=7))
    assert len(found) <= 2 and max(found) <= (90_000 - 8_000) / 2 and min(found) >= (90_000 - 8_060) / 2 * 0.998


@pytest.mark.parametrize(("expected", "is_taken"), [(1000, True), (990, True), (989, False), (1001, False)])
def test_blocks_that_steps_were_lowered_for_are_taken_if_they_fit_and_are_not_far_fewer(
    expected: int, is_taken: bool
) -> None:
    assert is_as_expected(expected, num_blocks=1000) == is_taken


@pytest.mark.parametrize(
    ("bytes_per_block", "most_useful", "expected"),
    [(MIB, 10**6, 512), (MIB, 300, 300), (CPU_CACHE_BYTES, 300, 2), (MIB, 1, 2)],
)
def test_a_cpu_has_a_budget_of_its_own(
    monkeypatch: pytest.MonkeyPatch, bytes_per_block: int, most_useful: int, expected: int
) -> None:
    on_device(monkeypatch, None)
    assert num_blocks_that_fit(bytes_per_block, 10 * MIB, 0.9, most_useful) == expected
