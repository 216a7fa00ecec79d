"""What runs in the worker beside a student's policy: it asks for the turns of many requests at once.

A view with all its names would be most of a message, so each comes as a list of its values.
"""

from __future__ import annotations

from typing import Any

from minipaged.scheduling import RequestView


def turns(policy: Any, requests: Any, now: Any) -> Any:
    """`policy.turn(request, now)` of each."""
    return [policy.turn(RequestView(*values), now) for values in requests]
