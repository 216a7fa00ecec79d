"""One model in several processes (paper, section 4.6): a driver schedules, and workers run the steps.

    driver                                             worker 0 .. N - 1, a process each
    Engine: scheduler, block tables, requests          a rank's weights, its part of every block
      │ StepInput: the changes, to every worker          │ mirror of the sequences, `fast/sharded.py`
      └──────── the same bytes, one message a step ────► run ◄─── sums over the ranks (torch.distributed) ───►
      ◄──────── the tokens, from one worker ─────────────┘

Only the driver makes decisions. A block has one number, under which each worker stores the part of its own heads. Like
every runner (`steps.py`), workers receive only the changes of the block tables. A step in which all sequences continue
is therefore a message of 28 bytes for any number of sequences. (With stages it also contains the tokens of the lane's
previous step.)

    messages.py   the messages between driver and workers
    worker.py     the process of a worker
    workers.py    the driver's side: starts the workers, detects their ends, leaves none behind
    rank.py       a worker's part of the model, and its communication with the other ranks
    runner.py     the runner of the engine
    tier.py       loads a model into workers
"""
