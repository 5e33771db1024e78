"""Find the requests that have to leave early, without looking at those that stay."""

from __future__ import annotations

import heapq
import itertools

from dflash_trt.decoding.request import Request

_FEW = 64  # fewer requests with a deadline are not worth a search for ended ones


class Leaving:
    """Cancelled requests, and requests whose deadline has passed. Not thread-safe.

    The cost of a step grows with the requests that leave, not with those that wait.
    """

    def __init__(self) -> None:
        self._cancelled: list[Request] = []
        self._deadlines: list[tuple[float, int, Request]] = []  # a heap; the number separates equal times
        self._numbers = itertools.count()
        self._worth = _FEW

    def watch(self, request: Request) -> None:
        """Watch a request for cancellation and its deadline."""
        if request.cancelled:  # already
            self._cancelled.append(request)
        if request.deadline is None:
            return
        heapq.heappush(self._deadlines, (request.deadline, next(self._numbers), request))
        if len(self._deadlines) > self._worth:  # half of them may have ended: remove those
            self._deadlines = [entry for entry in self._deadlines if entry[2].stop.finish_reason is None]
            heapq.heapify(self._deadlines)
            self._worth = max(_FEW, 2 * len(self._deadlines))

    def cancel(self, request: Request) -> None:
        """End this request at the next `take`. No effect if it has ended."""
        request.cancelled = True
        self._cancelled.append(request)

    def take(self, now: float) -> list[Request]:
        """The requests that leave at this time of perf_counter, each once. They are no longer watched."""
        leaving, self._cancelled = self._cancelled, []
        while self._deadlines and self._deadlines[0][0] <= now:
            leaving.append(heapq.heappop(self._deadlines)[2])
        return [request for request in dict.fromkeys(leaving) if request.stop.finish_reason is None]
