"""The longest cached prefix first: requests are admitted while their prompt is still in the prefix cache.

In the order of arrival, requests behind different long prompts take turns. Then each prompt may be evicted for the next
one, and computed again. With this policy, requests behind the same prompt run one after another or together. Those that
run together also read their shared prefix together (`reference/cascade.py`).

What is cached changes while a request waits, and so does this order. Still no request starves: whatever is cached, a
request can overtake only the `MOST` arrivals before it.
"""

from __future__ import annotations

from collections.abc import Sequence

from minipaged.engine.policy import FirstComeFirstServed
from minipaged.scheduling import RequestView


class LongestPrefixFirst(FirstComeFirstServed):
    """Each `TOKENS_PER_PLACE` cached tokens move a waiting request forward by one place in the order of arrival.

    A request moves by at most `MOST` places. So only requests among the next `MOST` arrivals can overtake it, however
    many come later. Running requests are in order of arrival: the latest makes room.
    """

    TOKENS_PER_PLACE = 32
    MOST = 64

    def turn(self, request: RequestView) -> tuple[float, ...]:
        """The request's place in the order of arrival, moved by what it finds in the prefix cache."""
        return request.arrival - min(request.num_cached_tokens // self.TOKENS_PER_PLACE, self.MOST), request.arrival

    def admit(
        self, waiting: Sequence[RequestView], running: Sequence[RequestView], num_free: int, tokens_left: int
    ) -> list[str]:
        """The requests to admit now, of the `MOST` arrivals from the oldest waiting request on. Only these are
        looked up in the prefix cache, because a look-up takes time."""
        first = min((request.arrival for request in waiting), default=0)
        near = [request for request in waiting if request.arrival < first + self.MOST]
        return super().admit(near, running, num_free, tokens_left)
