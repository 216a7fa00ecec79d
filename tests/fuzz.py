"""`python -m tests.fuzz --workloads 100000`: the content oracle over as many random workloads as you have time for.

Prints the seed of each workload that fails; `python -m tests.fuzz --seed N` runs that one again, with its traceback.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from functools import partial
from multiprocessing import Pool

from minipaged.engine.policies import POLICIES
from tests.workloads import random_workload, run_workload


def outcome(seed: int, policy: str = "fcfs") -> tuple[int, str, list[str]]:
    """How the workload of one seed went ("ok" or the error) and what happened in it at least once."""
    try:
        happened = run_workload(seed, policy=POLICIES[policy]).happened
    except Exception as error:
        return seed, f"{type(error).__name__}: {error}"[:300], []
    return seed, "ok", sorted(happened)


def main() -> int:
    """Run the workloads and report; the exit status is 1 when any failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="run this workload alone, in this process")
    parser.add_argument("--policy", choices=POLICIES, default="fcfs", help="who is served when")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--stop-after", type=int, default=10, help="stop after this many failures")
    args = parser.parse_args()
    if args.seed is not None:
        print(random_workload(args.seed))
        run_workload(args.seed, policy=POLICIES[args.policy])
        return 0
    started, failures, done, happened = time.monotonic(), 0, 0, Counter[str]()
    with Pool(args.processes) as pool:
        for seed, result, what in pool.imap_unordered(
            partial(outcome, policy=args.policy), range(args.first, args.first + args.workloads), chunksize=20
        ):
            done += 1
            happened.update(what)
            if result != "ok":
                failures += 1
                print(f"seed {seed}: {result}", flush=True)
                if failures >= args.stop_after:
                    break
    print(
        f"{done} workloads in {time.monotonic() - started:.0f} s, {failures} failed. Workloads in which it came about:"
    )
    for what, times in happened.most_common():
        print(f"{times:8} {what}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
