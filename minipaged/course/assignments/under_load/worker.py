"""Runs in the worker with a student's policy: gets the turns of many requests in one message.

Each view is sent as a list of its values, because the names of its fields would be most of the message.
"""

from __future__ import annotations

from typing import Any

from minipaged.scheduling import RequestView


def turns(policy: Any, requests: Any, now: Any) -> Any:
    """Return `policy.turn(request, now)` of each request."""
    return [policy.turn(RequestView(*values), now) for values in requests]
