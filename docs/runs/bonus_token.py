"""A sampled request with drafts of two tokens. The first two stand, and after that hardly any does."""

from typing import Any

from docs.runs.museum import Stage, exhibit
from minipaged import SamplingParams
from minipaged.engine.drafting import AdaptiveDrafts
from minipaged.events import TokensAccepted, TokensComputed, TokensDrafted
from minipaged.params import EngineConfig
from minipaged.stepper import Recording, record
from minipaged.testing.content_runner import WrongRead

museum = exhibit("bonus_token")
stage = Stage("the cat sat on a mat and slept")


class Noting(museum["DraftModel"]):  # type: ignore[misc]
    """The draft model. It notes what each pass runs, and wrong reads."""

    def one_pass(self, sequence: Any, table: Any, rows: list[list[int]]) -> list[int]:
        ran = " and ".join(f"“{stage.decode(row[-1:])}” at position {len(row) - 1}" for row in rows)
        note(f"A pass of the draft model runs {ran}.")
        chosen: list[int] = super().one_pass(sequence, table, rows)
        return chosen

    def on_wrong_read(self, read: WrongRead) -> None:
        note(
            f"It looks for the keys and values of “{stage.decode(read.wanted)}” at position {read.position}, and "
            f"reads those of “{stage.decode(read.found or [])}”."
        )


def note(text: str) -> None:
    assert stage.recording
    stage.recording.note(text)


def serve(recording: Recording, **parts: Any) -> list[int]:
    """Return the tokens of the request."""
    engine = stage.start(recording, parts=parts, num_blocks=6, block_size=4)
    wanted = SamplingParams(max_tokens=7, temperature=1, seed=0)
    engine.add_request(stage.encode("the cat sat"), wanted, request_id="A")
    tokens = list[int]()
    while engine.has_unfinished_requests():
        for update in engine.step():
            tokens += update.completions[0].new_token_ids
    return tokens


drafts = museum["ModelDrafts"](EngineConfig(num_blocks=6, max_model_len=64, vocab_size=len(stage.words)), Noting)
drafts.rule = AdaptiveDrafts(2)
with record("Two guesses stand", stage.decode, watch=[museum["DraftModel"], museum["ModelDrafts"]]) as run:
    tokens = serve(run, drafts=drafts)

# What the page says of its steps.
notes = {i + 1: text for i, text in run.notes.items()}
assert list(notes) == [9, 18, 26, 34]
assert run.events[12 - 1] == TokensAccepted(0, num_drafted=2, num_accepted=2)
assert all(isinstance(run.events[step - 1], TokensComputed) for step in notes)
assert "“on” at position 5 and “and” at position 6. A pass of the draft model runs “a” at position 6" in notes[18]
assert all("reads those of “the cat sat a and on a”" in notes[step] for step in (18, 26, 34))
assert [event.num_accepted for event in run.events if isinstance(event, TokensAccepted)] == [2, 0, 0]
assert run.events[27 - 1] == TokensDrafted(0, tuple(stage.encode("slept")))
assert tokens == serve(run)  # without drafts, and after the recording
