"""A first test of your policy: `pytest`, in this folder. More of them are yours to write."""

from under_load import UnderLoad

from minipaged.scheduling import Objectives, RequestView


def test_nobody_is_passed_for_ever():
    policy = UnderLoad(Objectives(first_token=3.0, between_tokens=0.12), longest_wait=30.0)
    forgotten = RequestView("a", arrival=0, prompt_tokens=900, max_output_tokens=900, arrival_time=0.0)
    new = RequestView("b", arrival=9, prompt_tokens=10, max_output_tokens=10, arrival_time=29.9)
    assert policy.turn(forgotten, now=29.9) < policy.turn(new, now=29.9)
