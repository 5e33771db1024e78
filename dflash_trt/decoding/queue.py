"""The requests that wait for a slot, and those that have to leave before their end."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from dflash_trt.decoding.request import Request

_PRIORITY_SECONDS = 1.0  # of waiting that one unit of priority counts for
_FEW = 64  # fewer requests with a deadline are not worth a search for ended ones


class Queue:
    """Waiting requests in the order in which they start, and every request whose deadline passes or that is cancelled.

    A request starts before those that arrived later, where each unit of priority counts like a second of waiting. So
    it is overtaken only by those that arrive within so many seconds as its priority number is higher than theirs.
    The cost of a step grows with the requests that start or leave, not with those that wait. Not thread-safe.
    """

    def __init__(self) -> None:
        self._waiting: dict[Request, None] = {}
        # Heaps of times. The numbers separate equal times. A request that left the queue goes when its turn comes.
        self._turns: list[tuple[float, int, Request]] = []
        self._deadlines: list[tuple[float, int, Request]] = []
        self._numbers = itertools.count()
        self._cancelled: list[Request] = []
        self._most_deadlines = _FEW

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        """The waiting requests, in order of arrival."""
        return iter(self._waiting)

    def add(self, request: Request) -> None:
        """Let a request wait for its turn, and watch it."""
        self._waiting[request] = None
        turn = request.arrived + request.options.priority * _PRIORITY_SECONDS
        heapq.heappush(self._turns, (turn, next(self._numbers), request))
        self.watch(request)

    @property
    def first(self) -> Request:
        """The waiting request whose turn it is."""
        while (request := self._turns[0][2]) not in self._waiting:
            heapq.heappop(self._turns)
        return request

    def pop(self) -> Request:
        """Remove and return the request whose turn it is. It is still watched."""
        request = self.first
        heapq.heappop(self._turns)
        self.remove(request)
        return request

    def remove(self, request: Request) -> bool:
        """Remove a request if it waits. Returns whether it did."""
        waited = request in self._waiting
        self._waiting.pop(request, None)
        if not self._waiting:
            self._turns.clear()
        return waited

    def watch(self, request: Request) -> None:
        """Let `leaving` return a request when it is cancelled or its deadline has passed."""
        if request.cancelled:  # already
            self._cancelled.append(request)
        if request.deadline is None:
            return
        heapq.heappush(self._deadlines, (request.deadline, next(self._numbers), request))
        if len(self._deadlines) > self._most_deadlines:  # half of them may have ended: remove those
            self._deadlines = [entry for entry in self._deadlines if entry[2].stop.finish_reason is None]
            heapq.heapify(self._deadlines)
            self._most_deadlines = max(_FEW, 2 * len(self._deadlines))

    def cancel(self, request: Request) -> None:
        """Let the next `leaving` return this request, unless it has ended by then."""
        request.cancelled = True
        self._cancelled.append(request)

    def leaving(self, now: float) -> list[Request]:
        """The requests that leave at this time of perf_counter, each once. They are watched no longer."""
        leaving, self._cancelled = self._cancelled, []
        while self._deadlines and self._deadlines[0][0] <= now:
            leaving.append(heapq.heappop(self._deadlines)[2])
        return [request for request in dict.fromkeys(leaving) if request.stop.finish_reason is None]
