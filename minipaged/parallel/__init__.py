"""One model in several processes (paper, section 4.6): a driver that schedules, and workers that run what it says.

    driver                                             worker 0 .. N - 1, a process each
    Engine: scheduler, block tables, requests          a rank's weights, its part of every block
      │ StepInput: what has changed, to each of them     │ mirror of the sequences, `fast/sharded.py`
      └──────── the same bytes, one message a step ────► run ◄─── sums over the ranks (torch.distributed) ───►
      ◄──────── the tokens, told by one of them ─────────┘

Nobody but the driver decides anything: a block has one number, and each worker keeps its heads' part of it under that
number. The workers are told of block tables by their differences, as every runner is (`steps.py`), so a step in which
all go on is a message of 27 bytes, however many sequences run (and with stages the tokens of the lane's step before).

    messages.py   what goes back and forth
    worker.py     a worker's process
    workers.py    the driver's hold on them: starts them, hears of their ends, leaves none behind
    rank.py       what a worker runs: its part of the model, and its place among the others
    runner.py     the runner that the engine is given; tier.py: how a model gets its workers
"""
