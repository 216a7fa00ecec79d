"""The stepper's own fold, in JavaScript, run by Node, beside the project's: what each says of every step of a run."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from minipaged.events import Event
from minipaged.replay.state import State
from minipaged.stepper.page import STEPPER
from tests.browser import missing

NO_NODE = "there is no Node here; on Debian: apt-get install nodejs"
PROGRAM = """
globalThis.HTMLElement = class {};
const defined = new Map();
globalThis.customElements = {get: (name) => defined.get(name), define: (name, element) => defined.set(name, element)};
const {stepper, runs} = JSON.parse(require("fs").readFileSync(0, "utf8"));
(0, eval)(stepper);
const {Fold, holders} = defined.get("paged-stepper");
const numbers = (who) => who.map((holder) => holder.id).sort((a, b) => a - b);
const held = (state, host) =>
  Object.fromEntries([...holders(state, host)].map(([block, who]) => [block, numbers(who)]));
const look = (fold) => (n) => {
  const state = fold.at(n);
  return {
    step: state.step, waiting: state.waiting, running: state.running,
    cached: Object.fromEntries(state.cached), floor: Object.fromEntries(state.floor),
    sizes: [state.pool.num_blocks, state.pool.num_swap_blocks, state.pool.block_size],
    device: held(state, false), host: held(state, true),
    sequences: Object.fromEntries([...state.sequences].map(([id, s]) => [id, {
      request: s.request, tokens: s.tokens, prompt: s.prompt, table: s.table, num_computed: s.filled,
      drafted: s.drafted.slice(s.tokens.length), standing: Math.max(0, s.verified - s.tokens.length),
      swapped: s.swapped, ended: s.done,
    }])),
    finished: Object.fromEntries(state.finished.map((s) => [s.id, [s.request, s.tokens, s.reason]])),
  };
};
const states = (events) => {
  const steps = events.map((_, i) => i + 1);
  return [steps.map(look(new Fold(events))), steps.reverse().map(look(new Fold(events))).reverse()];
};
process.stdout.write(JSON.stringify(runs.map(states)));
"""
"""Forward; and back from the end, over the states that were kept on the way there."""


def check_folds_agree(runs: Sequence[Sequence[Event]]) -> None:
    """After every event of each run, forward and back, the stepper's fold is the project's."""
    for run, (forward, back) in zip(runs, _stepper_states(runs), strict=True):
        state = State()
        for n, event in enumerate(run):
            state.apply(event)
            ours = _look(state)
            kept = {request for request, _, _ in ours["finished"].values()}
            for theirs in (forward[n], back[n]):
                # The stepper shows all that has finished; the project's fold keeps the last few, and no dropped beams.
                theirs["finished"] = {
                    number: (request, tokens, reason)
                    for number, (request, tokens, reason) in theirs["finished"].items()
                    if reason != "dropped" and request in kept
                }
                assert theirs == ours, f"after event {n + 1}, {event}"


def _stepper_states(runs: Sequence[Sequence[Event]]) -> list[list[list[dict[str, Any]]]]:
    node = shutil.which("node") or shutil.which("nodejs") or missing(NO_NODE)
    data = [[{"event": event.name, **asdict(event)} for event in run] for run in runs]
    given = json.dumps({"stepper": STEPPER.read_text(), "runs": data})
    done = subprocess.run([node, "-e", PROGRAM], input=given, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def _look(state: State) -> dict[str, Any]:
    """What there is to compare, as JSON has it: the keys of objects are texts."""
    requests = [*state.requests.values(), *state.finished]
    ended = [
        *(sequence for request in requests for sequence in request.done),
        *(sequence for sequence in state.sequences.values() if sequence.ended not in (None, "dropped")),
    ]
    return {
        "step": state.step,
        "waiting": [request.name for request in state.waiting],
        "running": [request.name for request in state.running],
        "cached": {str(block): list(tokens) for block, tokens in state.cached.items()},
        "floor": {str(block): list(tokens) for block, tokens in state.demoted.items()},
        "sizes": [state.device.num_blocks, state.host.num_blocks, state.block_size],
        "device": {str(block): sorted(holders) for block, holders in state.device.holders.items()},
        "host": {str(block): sorted(holders) for block, holders in state.host.holders.items()},
        "sequences": {
            str(number): {
                "request": sequence.request.name,
                "tokens": sequence.tokens,
                "prompt": len(sequence.prompt),
                "table": sequence.table,
                "num_computed": sequence.num_computed,
                "drafted": list(sequence.drafted),
                "standing": sequence.num_standing,
                "swapped": sequence.swapped,
                "ended": sequence.ended is not None,
            }
            for number, sequence in state.sequences.items()
        },
        "finished": {str(s.number): (s.request.name, s.tokens, s.ended) for s in ended},
    }
