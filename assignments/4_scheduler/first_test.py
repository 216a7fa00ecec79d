"""A first test of your scheduler: `pytest`, in this folder. More of them are yours to write."""

from scheduler import Scheduler

from minipaged.scheduling import Costs, RequestView

COSTS = Costs(1e-6, 2, 1 << 20, 10e9, 10_000)


def test_of_two_that_wait_only_the_first_may_fit():
    scheduler = Scheduler(num_blocks=10, block_size=16, max_num_seqs=8, max_num_batched_tokens=512, costs=COSTS)
    first, second = (RequestView(name, i, blocks_needed=6, tokens_to_run=90) for i, name in enumerate("ab"))
    assert list(scheduler.admit([second, first], [], num_free=10, tokens_left=512)) == ["a"]
