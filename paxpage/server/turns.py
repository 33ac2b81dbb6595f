"""Keeps each turn of the event loop short, however many tasks have something to do at once."""

import asyncio
from collections import deque

PIECES_PER_TURN = 8  # of work: a request's beginning or a stream's chunk, a fifth of a millisecond each


class Turns:
    """Lets so many tasks go on in one turn of the loop, in the order in which they came; the others wait for the next.

    A step ends with a token for each of its rows: without this, a thousand readers would be woken, and a thousand
    chunks written, before the loop looks at a new connection or a timer again.
    """

    def __init__(self, per_turn: int = PIECES_PER_TURN):
        self._per_turn = per_turn
        self._num_left = per_turn
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._has_next = False  # whether _begin_turn will be called

    async def take(self) -> None:
        """Returns at once or in a later turn of the loop."""
        loop = asyncio.get_running_loop()
        if not self._has_next:
            self._has_next = True
            loop.call_soon(self._begin_turn)
        if self._num_left > 0:
            self._num_left -= 1
            return
        place = loop.create_future()
        self._waiting.append(place)
        await place

    def _begin_turn(self) -> None:
        self._num_left = self._per_turn
        while self._waiting and self._num_left > 0:
            place = self._waiting.popleft()
            if not place.done():  # else its task was cancelled
                place.set_result(None)
                self._num_left -= 1
        self._has_next = bool(self._waiting)
        if self._has_next:
            asyncio.get_running_loop().call_soon(self._begin_turn)
