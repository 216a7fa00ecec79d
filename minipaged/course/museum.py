"""The bug museum: runs bugs that shipped elsewhere, rewritten for minipaged (`museum/`, docs/museum/).

An exhibit that is a part of an assignment is graded like a submission. The others replace a part of the engine and run
random workloads on the model that checks every read; `try_workloads` is their main program.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from minipaged.errors import Invariant, InvariantViolation
from minipaged.testing.content_runner import ContentRunner, WrongRead
from minipaged.testing.workloads import WorkloadRun, letters, random_workload

Parts = Mapping[str, Any]
"""Parts that replace those of an engine: `memory`, `policy`; `drafts`, which makes them from the engine's config; and
`runner`, a subclass of ContentRunner."""


class TellingRunner(ContentRunner):
    """A content runner that raises an error on a wrong read. The error shows each token as a letter."""

    def on_wrong_read(self, read: WrongRead) -> None:
        holds = "nothing" if read.found is None else f"the K/V of {letters(read.found)}"
        raise InvariantViolation(
            Invariant.CONTENT,
            f"position {read.position} of {letters(read.wanted)} is read from block {read.block}, which holds {holds}",
        )


def run_workload(seed: int, parts: Parts) -> None:
    """Run one workload and check its reads, outputs and leaks. Raises the first error."""
    of_engine = dict(parts)
    runner = type("Runner", (TellingRunner, of_engine.pop("runner", ContentRunner)), {})
    workload = random_workload(seed)
    if "drafts" in of_engine:
        of_engine["drafts"] = of_engine["drafts"](workload.config)
    run = WorkloadRun(workload, make_runner=runner, steady=False, **of_engine)
    run.to_the_end()
    run.check_outputs()
    run.check_nothing_leaked()


def try_workloads(parts: Parts) -> None:
    """The main program of an exhibit. Reports the workloads that fail; the exit status is 0 when none does."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workloads", type=int, default=200, help="how many random workloads to run (200)")
    parser.add_argument("--seed", type=int, help="run only the workload with this seed, and show the traceback")
    args = parser.parse_args()
    if args.workloads < 1:
        parser.error(f"--workloads is {args.workloads}; it must be at least 1")
    if args.seed is not None:
        run_workload(args.seed, parts)
        print(f"workload {args.seed} passes")
        return
    failed = 0
    for seed in range(args.workloads):
        try:
            run_workload(seed, parts)
        except Exception as error:
            failed += 1
            if failed == 1:
                print(f"workload {seed} is the first that fails:\n  {type(error).__name__}: {error}", flush=True)
    print(f"{failed} of {args.workloads} random workloads fail ({failed / args.workloads:.1%})")
    sys.exit(1 if failed else 0)
