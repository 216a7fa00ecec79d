"""Orders under load: ours, the same order as single numbers, and seeded bugs."""

from __future__ import annotations

from minipaged.course.grader.mutants import seeded, source_of

OURS = source_of("course/assignments/under_load/ours").replace("Ours", "UnderLoad")

NUMBERS = """
class UnderLoad:
    def __init__(self, objectives, longest_wait):
        self.late, self.urgent = objectives.first_token, 0.6 * longest_wait

    def turn(self, request, now):
        tokens = request.prompt_tokens + request.max_output_tokens
        if request.num_tokens >= request.prompt_tokens:
            return tokens
        waited = now - request.arrival_time
        return -1.0 if waited > self.urgent else tokens + 1e9 * (waited > self.late)
"""

ORDER, OVERLOAD, BURSTS = "an order", "an overload", "bursts"
FIRST = "        waited, has_begun ="
TOKENS = "request.prompt_tokens + request.max_output_tokens"

BUGS = {
    "no number: turn returns a string": (ORDER, FIRST, f"        return 'first'\n{FIRST}"),
    "nothing: turn returns None": (ORDER, FIRST, f"        return None\n{FIRST}"),
    "no tuple of numbers: turn returns a tuple with None": (ORDER, FIRST, f"        return 1, None\n{FIRST}"),
    "an empty tuple: turn returns an empty tuple": (ORDER, FIRST, f"        return ()\n{FIRST}"),
    "no order: turn returns NaN": (ORDER, FIRST, f"        return float('nan')\n{FIRST}"),
    "at random: turn returns a random number": (ORDER, FIRST, f"        return __import__('random').random()\n{FIRST}"),
    "it counts: turn returns the number of its calls": (
        ORDER,
        FIRST,
        f"        self.asked = getattr(self, 'asked', 0) + 1\n        return self.asked\n{FIRST}",
    ),
    "it raises: turn divides by 0 when a request has just arrived": (
        ORDER,
        FIRST,
        f"        1 / (now - request.arrival_time)\n{FIRST}",
    ),
    "in order of arrival: requests are served in order of arrival": (
        OVERLOAD,
        FIRST,
        f"        return request.arrival\n{FIRST}",
    ),
    "the longest first: the requests with the most tokens are served first": (OVERLOAD, TOKENS, f"-({TOKENS})"),
    "who is late already comes first: requests that can no longer be in time are served first": (
        OVERLOAD,
        "else 2,",
        "else 0,",
    ),
    "nobody is urgent: the bound on the longest wait is ignored": (BURSTS, "waited > self.urgent", "False"),
}

SEEDED = seeded({"ours": OURS, "single numbers": NUMBERS}, BUGS)
