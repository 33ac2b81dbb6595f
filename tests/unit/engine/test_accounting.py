"""Slots summed over steps."""

from paxpage.engine.accounting import SlotAccount
from paxpage.engine.scheduler import SlotUsage


def test_nothing_yet() -> None:
    assert (SlotAccount().wasted, SlotAccount().waste_fraction) == (0, 0.0)


def test_a_run() -> None:
    account = SlotAccount()
    for allocated, holding in ((16, 10), (32, 20), (0, 0), (32, 32)):
        account.add(SlotUsage(allocated, holding))
    assert (account.num_steps, account.allocated, account.holding, account.wasted) == (4, 80, 62, 18)
    assert account.waste_fraction == 18 / 80
    assert account.last == (32, 32)


def test_accounts_are_separate() -> None:
    first, second = SlotAccount(), SlotAccount()
    first.add(SlotUsage(16, 1))
    assert second.num_steps == 0
