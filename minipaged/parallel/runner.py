"""The engine's runner for a model that runs in several processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minipaged.contracts import Runner, Sampled, StepResult
from minipaged.errors import InvalidRequest
from minipaged.mirror import PerLane, Rows
from minipaged.parallel.messages import Make, Making, NoRoom, Ran, RankReady, RunStep
from minipaged.parallel.workers import RankProcesses
from minipaged.params import EngineConfig
from minipaged.scheduling import Costs
from minipaged.steps import StepInput


class ParallelRunner(Runner):
    """A runner that sends each step to all workers and receives the result from one of them.

    It waits for a result only when the result is read. The workers can thus run a step while the engine commits and
    schedules.
    """

    def __init__(self, workers: RankProcesses, config: EngineConfig) -> None:
        """Let the workers reserve KV caches, which replace those of an earlier runner.

        Raises MemoryError if a worker has too little memory (the workers have then ended), and WorkerFailed.
        """
        self._turn = workers.serves = object()
        self.workers = workers
        self._vocab_size = config.vocab_size
        self._rows = PerLane(Rows)
        self._launched: dict[int, ParallelStepResult] = {}  # by step number, results not received yet
        self._latest: dict[int, ParallelStepResult] = {}  # by lane
        self._has_stages = config.pipeline_parallel_size > 1
        self._untold: list[tuple[int, list[int]]] = []  # tokens by step, not yet sent to the other stages
        workers.num_served += 1
        workers.tell(Make(config, workers.num_served))
        while workers.result(patient=True) != Making(workers.num_served):
            pass  # results of an earlier runner's steps
        self._costs = self._prepared(0)
        for rank in range(1, len(workers)):
            self._prepared(rank)

    def _prepared(self, rank: int) -> Costs:
        while True:
            made = self.workers.answer(rank, patient=True)
            if isinstance(made, NoRoom):
                self.workers.close()
                raise MemoryError(made.error)
            if isinstance(made, RankReady) and made.number == self.workers.num_served:
                return made.costs  # any other answer belongs to an earlier runner

    def run(self, step: StepInput) -> StepResult:
        """Send a step to the workers, and return a result that waits for them when it is read.

        Raises WorkerFailed if a worker has failed; no step can run after that. Raises InvalidRequest if another runner
        has taken over the workers.
        """
        if self.workers.serves is not self._turn:
            raise InvalidRequest("another LLM was made of the same LoadedModel, and its workers serve that one now")
        rows = self._rows.of(step)
        rows.follow(step)
        if self._has_stages and not step.fresh and step.lane in self._latest:
            self.fetch(self._latest[step.lane])  # unread if all requests were aborted, but the stages need its tokens
        outcome = self._launched[step.number] = self._latest[step.lane] = ParallelStepResult(self)
        untold, self._untold = self._untold, []
        self.workers.tell(RunStep(step, untold))
        logits = None
        if not rows.num_steady and any(row.num_choices < 0 for row in rows):  # beam search reads logits immediately
            logits = outcome.logits(self._vocab_size)
        return StepResult(LateChoices(rows.num_choices, outcome), logits, LatePromptLogprobs(outcome))

    def costs(self) -> Costs:
        """The costs that the first rank has measured. All ranks swap and recompute at the same time."""
        return self._costs

    def on_failure(self, call: Callable[[Exception], None]) -> None:
        self.workers.on_failure(call)

    def fetch(self, outcome: ParallelStepResult) -> Ran:
        """Wait for a step's result. Results arrive in the order of the steps, including some that are never read."""
        while outcome.answer is None:
            answer = self.workers.result()
            assert isinstance(answer, Ran)
            if found := self._launched.pop(answer.number, None):
                found.answer = answer
            if self._has_stages and answer.choices.token_ids:
                self._untold.append((answer.number, answer.choices.token_ids))
        return outcome.answer


class ParallelStepResult:
    """A step's result, which is fetched from the workers when it is first read."""

    def __init__(self, runner: ParallelRunner) -> None:
        self.answer: Ran | None = None
        self._runner = runner

    def choices(self) -> list[Sampled]:
        return self._runner.fetch(self).choices.sampled()

    def prompt_logprobs(self) -> dict[int, list[Sampled]]:
        return {sequence: told.sampled() for sequence, told in self._runner.fetch(self).prompt_logprobs.items()}

    def logits(self, vocab_size: int) -> Tensor:
        """The logits that the step returned: [rows, vocab_size] float32."""
        values: NDArray[np.float32] = np.frombuffer(bytearray(self._runner.fetch(self).logits), np.float32)
        return torch.from_numpy(values).view(-1, vocab_size)


class LateChoices(Sequence[Sampled]):
    """A step's choices, fetched when an element is first read."""

    def __init__(self, count: int, outcome: ParallelStepResult) -> None:
        self._count, self._outcome = count, outcome
        self._known: list[Sampled] | None = None

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sampled]:
        return iter(self[:])

    def __getitem__(self, index: Any) -> Any:
        if self._known is None:
            self._known = self._outcome.choices()
        return self._known[index]


class LatePromptLogprobs(Mapping[int, Sequence[Sampled]]):
    """A step's prompt log-probabilities by sequence, fetched when they are first read."""

    def __init__(self, outcome: ParallelStepResult) -> None:
        self._outcome = outcome

    def __len__(self) -> int:
        return len(self._outcome.prompt_logprobs())

    def __iter__(self) -> Iterator[int]:
        return iter(self._outcome.prompt_logprobs())

    def __getitem__(self, sequence: int) -> Sequence[Sampled]:
        return self._outcome.prompt_logprobs()[sequence]
