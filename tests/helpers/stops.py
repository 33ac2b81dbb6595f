"""Something to go on with that ends at a given call."""


class StopsAt:
    """A go_on that raises ValueError ("no more") at its num_calls-th call, and never again."""

    def __init__(self, num_calls: int) -> None:
        self.num_calls = 0
        self._last = num_calls

    def __call__(self) -> None:
        self.num_calls += 1
        if self.num_calls == self._last:
            raise ValueError("no more")
