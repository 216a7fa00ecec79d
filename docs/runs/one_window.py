"""A prompt of seven words, on a model in which one layer sees everything and two see four words."""

from docs.runs.museum import Stage, exhibit, greedy
from minipaged.stepper import record

museum = exhibit("one_window")
Layer, Group = museum["Layer"], museum["Group"]


class Short(Stage, museum["Runner"]):  # type: ignore[misc]
    """The stage, with small windows. It notes what the layer that sees everything reads."""

    GROUP = Group(Layer(4), Layer(4), Layer(None))

    def _read(self, sequence: int, blocks: list[int], tokens: list[int], start: int) -> list[int]:
        found: list[int] = super()._read(sequence, blocks, tokens, start)
        assert self.recording
        if len(found) < len(tokens):
            self.recording.note(
                f"Now the model runs. The layer that sees everything should read “{self.decode(tokens)}”, and reads "
                f"“{self.decode(found)}”. All of it is in blocks {', '.join(map(str, blocks))}."
            )
        return found


stage = Short("blue is the colour so which colour")
with record("A layer that forgets", stage.decode, watch=[Layer, Group]) as run:
    engine = stage.start(run, num_blocks=6, block_size=2)
    engine.add_request(stage.encode("blue is the colour so which colour"), greedy(2), request_id="A")
    while engine.has_unfinished_requests():
        engine.step()

# What the page says of its steps.
notes = {i + 1: note for i, note in run.notes.items()}
assert list(notes) == [5, 9]
assert "should read “blue is the colour so which colour”, and reads “colour so which colour”" in notes[5]
assert "All of it is in blocks 0, 1, 2, 3." in notes[5]
