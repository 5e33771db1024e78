"""Requests that wait for a slot, in the order in which they start."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from dflash_trt.decoding.request import Request

STEP_SECONDS = 1.0  # what one step of priority is worth


class Waiting:
    """Requests in order of arrival, where each step of priority counts like a second of waiting.

    Of requests that come together the lowest priorities start first. None waits for ever: a request is overtaken only
    by those that arrive within so many seconds as its priority is higher than theirs. The order of two requests does
    not change while they wait. A removed request costs nothing until its turn.
    """

    def __init__(self) -> None:
        self._requests: dict[Request, None] = {}
        self._order: list[tuple[float, int, Request]] = []  # a heap; the number separates equal times
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """In order of arrival."""
        return iter(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request in self._requests

    def add(self, request: Request) -> None:
        self._requests[request] = None
        turn = request.arrived + request.options.priority * STEP_SECONDS
        heapq.heappush(self._order, (turn, next(self._numbers), request))

    def remove(self, request: Request) -> None:
        del self._requests[request]
        if not self._requests:
            self._order.clear()

    @property
    def first(self) -> Request:
        """The request whose turn it is."""
        while (request := self._order[0][2]) not in self._requests:
            heapq.heappop(self._order)
        return request

    def pop(self) -> Request:
        """Remove and return the request whose turn it is."""
        request = self.first
        heapq.heappop(self._order)
        self.remove(request)
        return request
