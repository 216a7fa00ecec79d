"""Steps as data: their encoding, their size, what the mirror makes of them, recordings and their replay."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipaged.contracts import Sampled, SamplingInput, StepResult
from minipaged.engine.engine import Engine
from minipaged.engine.step_writer import StepWriter
from minipaged.errors import BadRecording, InvariantViolation
from minipaged.mirror import Mirror, PerLane, Rows
from minipaged.models.config import ModelConfig
from minipaged.params import EngineConfig, SamplingParams, StructuredOutputsParams
from minipaged.recordings.replay_steps import Replay
from minipaged.recordings.step_files import (
    FIRST_LINE,
    Header,
    RecordedStep,
    StepRecorder,
    decode,
    encode,
    read_recording,
)
from minipaged.reference.sampling import sample
from minipaged.steps import (
    LOGITS,
    AllowedTokens,
    Begun,
    BlockMoves,
    ChosenToken,
    Forked,
    Row,
    Sampling,
    StepInput,
    TableChange,
)
from minipaged.testing.content_runner import ContentRunner
from minipaged.testing.numpy_model import fake_logits
from tests.effort import quick_cases, scaled, seeds
from tests.engine.test_async_scheduling import workload_of as async_workload
from tests.engine.test_drafts import Guesses
from tests.engine.test_failure_injection import WORKLOADS as CROWDED
from tests.workloads import REFERENCE, Workload, WorkloadRun, random_workload

# --- The encoding ---------------------------------------------------------------------------------

numbers = st.integers(0, 2**32)
lists = st.lists(numbers, max_size=5).map(tuple)
pairs = st.lists(st.tuples(numbers, numbers), max_size=3).map(tuple)
params = st.builds(
    SamplingParams,
    n=st.integers(1, 4),
    temperature=st.floats(0, 2),
    top_p=st.floats(0.1, 1),
    top_k=st.integers(-1, 9),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    stop=st.lists(st.text(min_size=1, max_size=3), max_size=2),
    stop_token_ids=lists,
    max_tokens=st.none() | st.integers(20, 99),
    min_tokens=st.integers(0, 9),
    logprobs=st.none() | st.integers(0, 5),
    presence_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(numbers, st.floats(-100, 100), max_size=2),
    allowed_token_ids=st.none() | st.lists(numbers, min_size=1, max_size=3),
    bad_words=st.lists(st.text(min_size=1, max_size=3), max_size=2),
    prompt_logprobs=st.none() | st.integers(0, 5),
)
forms = st.builds(StructuredOutputsParams, json=st.dictionaries(st.text(max_size=3), st.booleans(), max_size=2))
forms |= st.builds(StructuredOutputsParams, choice=st.lists(st.text(max_size=3), min_size=1, max_size=2))
structured = st.builds(replace, params, min_tokens=st.just(0), structured_outputs=forms)
asking = st.builds(replace, params, logprobs=st.none(), logprob_token_ids=lists)
words = st.lists(st.lists(numbers, min_size=1, max_size=3).map(tuple), max_size=2).map(tuple)
samplings = st.builds(Sampling, params | asking | structured, st.integers(0, 2**64 - 1), numbers, lists, words)


def several(what: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(what, max_size=3).map(tuple)


steps = st.builds(
    StepInput,
    number=numbers,
    fresh=st.booleans(),
    forked=several(st.builds(Forked, numbers, numbers, st.integers(LOGITS, 9))),
    ended=lists,
    begun=several(st.builds(Begun, numbers, lists, numbers, lists, st.none() | samplings)),
    tables=several(st.builds(TableChange, numbers, numbers, lists)),
    told=several(st.builds(ChosenToken, numbers, numbers, numbers)),
    moves=st.builds(BlockMoves, pairs, lists, pairs, pairs, several(st.tuples(numbers, st.binary(max_size=9)))),
    left_out=lists,
    added=several(st.builds(Row, numbers, numbers, numbers, st.integers(LOGITS, 9), lists)),
    lane=numbers,
    allowed=several(st.builds(AllowedTokens, numbers, st.binary(max_size=9))),
)


@given(step=steps)
def test_a_step_comes_back_from_its_bytes_as_it_was(step: StepInput) -> None:
    again = decode(encode(step))
    assert again == step
    assert encode(again) == encode(step)


def test_the_encoding_is_what_is_documented() -> None:
    assert encode(StepInput(7)).hex(" ") == "9c 07 c2 90 90 90 90 90 95 90 90 90 90 90 90 90 00 90"
    step = StepInput(1, fresh=True, begun=(Begun(2, (3, 4), 2, (5,), None),), added=(Row(2, 0, 2, LOGITS),), lane=3)
    assert encode(step).hex(" ") == (
        "9c 01 c3 90 90 91 95 02 92 03 04 02 91 05 c0 90 90 95 90 90 90 90 90 90 91 95 02 00 02 ff 90 03 90"
    )
    allowed = encode(StepInput(7, allowed=(AllowedTokens(2, b"\x05\0\0\0"),)))
    assert allowed[-9:].hex(" ") == "91 92 02 c4 04 05 00 00 00"


def test_a_step_of_a_recording_without_grammars_is_read() -> None:
    """Recordings of an older version have no field for allowed tokens."""
    older = bytes.fromhex("9b 07 c2 90 90 90 90 90 95 90 90 90 90 90 90 90 00")
    assert decode(older) == StepInput(7)


@given(params)
def test_parameters_that_a_recording_does_not_have_are_the_defaults(given: SamplingParams) -> None:
    """Recordings of an older version lack them: nobody could ask for them then."""
    step = StepInput(1, begun=(Begun(2, (3, 4), 2, (5,), Sampling(given, 7, 0)),))
    plain = msgspec.msgpack.decode(encode(step))
    fields = plain[4][0][4][0]
    assert [fields.pop(name) for name in ("logprob_token_ids", "spaces_between_special_tokens")] == [[], True]
    assert decode(msgspec.msgpack.encode(plain)) == step


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc0", encode(StepInput(7))[:-1], encode(StepInput(7)) + b"\x00", b"\x93\x01\xc2\x01", b"text"],
)
def test_what_is_no_step_is_refused(data: bytes) -> None:
    with pytest.raises(BadRecording, match="not what a recording holds"):
        decode(data)


def test_a_setting_out_of_range_is_refused_when_it_is_read() -> None:
    begun = Begun(0, (1,), 1, (0,), Sampling(SamplingParams(temperature=1.5), 0, 0))
    data = encode(StepInput(1, begun=(begun,))).replace(struct.pack(">d", 1.5), struct.pack(">d", -1.5))
    with pytest.raises(BadRecording, match=r"temperature is -1\.5; it must be"):
        decode(data)


# --- Sizes ----------------------------------------------------------------------------------------


class Watched(ContentRunner):
    """Remembers the steps it was given."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.steps: list[StepInput] = []

    def run(self, step: StepInput) -> StepResult:
        self.steps.append(step)
        return super().run(step)


@quick_cases(1)
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_step_in_which_256_sequences_go_on_is_less_than_2_kilobytes(async_scheduling: bool) -> None:
    """However full their blocks are: one in `block_size` grows at each step. And nothing is said of their tokens."""
    config = EngineConfig(
        num_blocks=2000, max_model_len=100, vocab_size=20, max_num_seqs=256, async_scheduling=async_scheduling
    )
    runner = Watched(config.num_blocks, 0, config.block_size, config.vocab_size)
    engine = Engine(config, REFERENCE, runner)
    for number in range(256):
        prompt = [number % 20, number // 20, *range(number % 16)]
        engine.add_request(prompt, SamplingParams(max_tokens=60, ignore_eos=True, seed=number))
    while engine.has_unfinished_requests():
        engine.step()
    going_on = [step for step in runner.steps if not (step.begun or step.ended or step.left_out)]
    assert len(going_on) > 50
    sizes = [len(encode(step)) for step in going_on]
    assert max(sizes) < 2048, "also where the blocks of half of them are full at once"
    assert sum(sizes) / len(sizes) < 300
    assert not any(step.told or step.added for step in going_on)
    assert sum(len(step.tables) for step in going_on) > 256 * 2


# --- The mirror -----------------------------------------------------------------------------------

# That it equals the truth after every step is part of the content oracle (`CheckedMirror`), in every workload: one at
# a time, asynchronously, on a late device, and with errors. These are the bugs that it has to find.


def first_that_fails(workloads: int = 300) -> str:
    for seed in range(workloads):
        try:
            WorkloadRun(random_workload(seed)).to_the_end()
        except InvariantViolation as error:
            return str(error)
    raise AssertionError(f"not found in {workloads} workloads")


def without(method: str, when: Callable[..., bool]) -> Callable[..., None]:
    right = getattr(StepWriter, method)

    def forgetful(self: StepWriter, *arguments: Any) -> None:
        if not when(*arguments):
            right(self, *arguments)

    return forgetful


@pytest.mark.parametrize(
    ("method", "when", "told"),
    [
        ("table_changed", lambda sequence, kept: 0 < kept < len(sequence.table.blocks), "block table of sequence"),
        ("table_changed", lambda sequence, kept: kept == 0, "block table of sequence"),
        ("ended", lambda sequence: len(sequence.tokens) % 3 == 0, "which has ended"),
        ("told", lambda sequence: len(sequence.tokens) % 3 == 0, "the tokens of sequence"),
    ],
    ids=["a table that grew", "a table given up", "an end", "a token that the host chose"],
)
def test_the_oracle_finds_a_change_that_was_not_told(
    method: str, when: Callable[..., bool], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepWriter, method, without(method, when))
    assert told in first_that_fails()


def test_the_oracle_finds_a_fork_of_a_table_that_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forked(self: StepWriter, child: Any, parent: Any, choice: int) -> None:
        self._forked[child.sequence_id] = Forked(child.sequence_id, parent.sequence_id, choice)

    monkeypatch.setattr(StepWriter, "forked", forked)
    assert "block table of sequence" in first_that_fails()


def test_a_step_that_was_missed_is_noticed() -> None:
    mirrors = PerLane(Mirror)
    first = mirrors.of(StepInput(1, fresh=True))
    with pytest.raises(ValueError, match="step 3 cannot follow step 1; only a fresh one can"):
        mirrors.of(StepInput(3))
    assert mirrors.of(StepInput(3, fresh=True)) is first
    assert mirrors.of(StepInput(4, fresh=True, lane=1)) is not first  # the numbers are common to all lanes
    with pytest.raises(ValueError, match="step 4 cannot follow step 4"):
        mirrors.of(StepInput(4))
    assert mirrors.of(StepInput(5)) is first


@given(st.data())
def test_rows_go_on_end_and_are_added_as_the_step_says(data: st.DataObject) -> None:
    """Against a model that keeps the rows of the step before, and makes each anew (`StepInput`)."""
    choices = st.sampled_from([1, 1, 1, 0, 2, LOGITS])
    ended: tuple[int, ...]
    left_out: tuple[int, ...]
    rows, steady, num_rows = Rows(), 0, 0
    expected: list[Row] = []
    for number in range(data.draw(st.integers(1, 12))):
        going = [row.sequence for row in expected if row.num_choices]
        ended, left_out = ((), ())
        if data.draw(st.booleans()):
            ended, left_out = (tuple(data.draw(st.sets(st.sampled_from(going)))) if going else () for _ in range(2))
        drawn = data.draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5), choices), max_size=2))
        sequences = [*(sequence for sequence in left_out if sequence not in ended), num_rows, num_rows + 1]
        added = tuple(Row(sequence, *one) for sequence, one in zip(sequences, drawn, strict=False))
        num_rows += 2
        fresh = data.draw(st.integers(0, 9)) == 0
        goes_on = not (fresh or ended or left_out or added) and all(row.num_choices == 1 for row in expected)
        steady = steady + 1 if goes_on and number else 0
        out = {*ended, *left_out}
        before = [] if fresh else [row for row in expected if row.num_choices and row.sequence not in out]
        expected = [*(Row(row.sequence, row.stop, 1, min(row.num_choices, 1)) for row in before), *added]

        rows.follow(StepInput(number, fresh=fresh, ended=ended, left_out=left_out, added=added))

        assert (list(rows), len(rows)) == (expected, len(expected))
        assert rows.num_steady == steady
        assert rows.num_choices == sum(max(0, row.num_choices) for row in expected)
        assert rows.num_query_tokens == sum(row.num_tokens for row in expected)
        assert rows.num_context_tokens == sum(row.stop for row in expected)


def test_so_many_tokens_as_were_asked_for_have_to_be_chosen() -> None:
    mirror = Mirror()
    begun = Begun(0, (1, 2), 2, (0,), Sampling(SamplingParams(), 0, 0))
    mirror.apply(StepInput(1, fresh=True, begun=(begun,), added=(Row(0, 0, 2, 3),)))
    with pytest.raises(ValueError, match="1 tokens were chosen, not 3"):
        mirror.chosen([Sampled(1, 0.0, None)])


@pytest.mark.parametrize("lag", [0, 1], ids=["known", "pending"])
def test_inputs_that_only_move_on_are_made_once(lag: int) -> None:
    """`lag`: the choices of so many steps are not known yet to the mirror. One sequence is left out for a step."""
    mirror = Mirror()
    begun = tuple(Begun(number, (1, 2), 2, (0,), Sampling(SamplingParams(), 0, 0)) for number in range(2))
    steps = [
        StepInput(1, fresh=True, begun=begun, added=(Row(0, 0, 2, 1), Row(1, 0, 2, 1))),
        *(StepInput(number) for number in (2, 3, 4)),
        StepInput(5, left_out=(0,)),
        StepInput(6, added=(Row(0, 5, 1, 1),)),
        *(StepInput(number) for number in (7, 8, 9)),
    ]
    given: list[tuple[SamplingInput, ...]] = []
    for step in steps:
        mirror.apply(step, wait=lag == 0)
        given.append(mirror.sampling_inputs())
        assert [one.position for one in given[-1]] == [row.stop for row in mirror.rows]
        mirror.chosen([Sampled(3, 0.0, None)] * len(given[-1]))
    again = [number for number in range(2, 10) if given[number - 1] is given[number - 2]]
    assert again == [3, 4, 8, 9]  # 2 and 7 are the first in which as many tokens are pending for all


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(SamplingParams(min_tokens=3), 0, 0, forbidden_token_ids=(9,)), [(9,), (9,), (9,), (), (), ()]),
        (Sampling(SamplingParams(), 0, 0, bad_words=((3, 7),)), [(), (7,), (), (7,), (), (7,)]),
    ],
    ids=["min_tokens", "bad_words"],
)
def test_inputs_are_made_anew_while_tokens_may_come_to_be_forbidden(
    sampling: Sampling, expected: list[tuple[int, ...]]
) -> None:
    """Token 9 would end it, and must not come before the fourth token. 7 must not follow 3, every other token."""
    mirror = Mirror()
    mirror.apply(StepInput(1, fresh=True, begun=(Begun(0, (1, 2), 2, (0,), sampling),), added=(Row(0, 0, 2, 1),)))
    told = []
    for number in range(2, 8):
        told.append(mirror.sampling_inputs()[0].forbidden_token_ids)
        mirror.chosen([Sampled(3 + number % 2, 0.0, None)])
        mirror.apply(StepInput(number))
    assert told == expected


# --- Recordings -----------------------------------------------------------------------------------

HEADER = Header(
    version="1",
    model="a model",
    model_config=ModelConfig(11, 8, 8, 1, 1, 1, 8, 1e-5, 1e4, None, 64, True, None, (2,)),
    tier="reference",
    device="cpu",
    dtype="float32",
    engine_config=EngineConfig(num_blocks=4, max_model_len=16, vocab_size=11),
)


def workload_in_lanes(seed: int) -> Workload:
    workload = random_workload(seed)
    return replace(workload, config=replace(workload.config, pipeline_parallel_size=2 + seed % 3))


def recorded(run: WorkloadRun, folder: Path) -> Path:
    """The recording of a workload."""
    path = folder / "steps"
    with path.open("wb") as file:
        recorder = StepRecorder(run.engine.runner, file, HEADER)
        run.engine.runner = recorder
        run.to_the_end()
        recorder.close()
    return path


def replayed(run: WorkloadRun, path: Path, choose: Any = None) -> Replay:
    """Its replay on another content oracle, from the bytes alone."""
    config = run.workload.config
    sizes = (config.num_blocks, config.num_swap_blocks, config.block_size, config.vocab_size)
    header, steps = read_recording(path)
    assert header == HEADER

    def exact(tokens: Sequence[int]) -> np.ndarray:
        return fake_logits(tokens, config.vocab_size).astype(np.float64)

    return Replay(steps, ContentRunner(*sizes, choose=choose), exact)


@scaled
@pytest.mark.parametrize(
    "workload_of", [random_workload, async_workload, workload_in_lanes], ids=["random", "async", "in lanes"]
)
@pytest.mark.parametrize("seeds", seeds(200, 50), ids=str)
def test_a_replay_chooses_what_was_recorded(
    seeds: range, workload_of: Callable[[int], Workload], tmp_path: Path
) -> None:
    """Replay-equals-run: forks, beams, both kinds of preemption, prefix hits, chunks, requests that are cancelled."""
    for seed in seeds:
        run = WorkloadRun(workload_of(seed))
        replay = replayed(run, recorded(run, tmp_path))
        assert not list(replay), f"workload {seed}"
        assert replay.largest_error == 0
        assert replay.num_steps >= run.engine.stats.steps
        sampled = {name for name, request in run.named_requests() if isinstance(request.params, SamplingParams)}
        outputs = [output for name, output in run.outputs.items() if name in sampled]
        assert replay.num_choices >= sum(len(one.token_ids) for output in outputs for one in output.outputs)


@scaled
@pytest.mark.parametrize("workload_of", [random_workload, workload_in_lanes], ids=["random", "in lanes"])
@pytest.mark.parametrize("seeds", seeds(100, 50), ids=str)
def test_where_another_token_is_chosen_the_recorded_ones_go_on(
    seeds: range, workload_of: Callable[[int], Workload], tmp_path: Path
) -> None:
    """Every seventh choice is another one; each is reported, and nothing else is: also among samples that fork."""
    for seed in seeds:
        run, wrong = WorkloadRun(workload_of(seed)), 0
        path = recorded(run, tmp_path)

        def choose(logits: Any, inputs: Sequence[SamplingInput]) -> list[Sampled]:
            nonlocal wrong
            chosen = sample(logits, inputs)
            for i, one in enumerate(chosen):
                if (inputs[i].position * 31 + one.token_id + inputs[i].stream) % 7 == 0:
                    wrong += 1
                    chosen[i] = Sampled((one.token_id + 1) % logits.shape[1], one.logprob, None)
            return chosen

        differences = list(replayed(run, path, choose))
        assert len(differences) == wrong
        assert all(one.chosen == (one.recorded + 1) % run.workload.config.vocab_size for one in differences)


@scaled
@pytest.mark.parametrize("seeds", seeds(100, 50), ids=str)
def test_a_replay_verifies_the_recorded_drafts(seeds: range, tmp_path: Path) -> None:
    """Replay-equals-run; and where another token is chosen, the recorded ones go on. Choices after the first drafted
    token that does not stand have no meaning, and are not compared."""
    for seed in seeds:
        workload = random_workload(seed)
        run = WorkloadRun(workload, drafts=Guesses(workload, seed))
        path = recorded(run, tmp_path)
        replay = replayed(run, path)
        assert not list(replay), f"workload {seed}"
        chosen_at = set[int]()

        def choose(logits: Any, inputs: Sequence[SamplingInput], at: set[int] = chosen_at) -> list[Sampled]:
            chosen = sample(logits, inputs)
            for i, one in enumerate(chosen):
                if (inputs[i].position * 31 + one.token_id + inputs[i].stream) % 7 == 0:
                    at.add(inputs[i].position)
                    chosen[i] = Sampled((one.token_id + 1) % logits.shape[1], one.logprob, None)
            return chosen

        differences = list(replayed(run, path, choose))
        assert all(one.chosen == (one.recorded + 1) % workload.config.vocab_size for one in differences)
        assert {one.position for one in differences} <= chosen_at


def test_a_run_with_errors_is_replayed_up_to_them_and_from_there_on(tmp_path: Path) -> None:
    class Power(Exception):
        pass

    class Unsteady(ContentRunner):
        calls = 0

        def forward(self, batch: Any) -> Any:
            logits = super().forward(batch)
            self.calls += 1
            assert self.engine is not None
            if self.calls % (5 * self.engine.config.pipeline_parallel_size) == 0:  # or nobody would ever catch up
                raise Power
            return logits

    in_lanes = (replace(one, config=replace(one.config, pipeline_parallel_size=2)) for one in CROWDED.values())
    for workload in (*CROWDED.values(), *in_lanes):
        run = WorkloadRun(workload, make_runner=Unsteady)
        step = run.engine.step

        def patient(step: Callable[[], Any] = step) -> Any:
            try:
                return step()
            except Power:
                return []

        run.engine.step = patient  # type: ignore[method-assign]
        path = recorded(run, tmp_path)
        run.check_outputs()
        replay = replayed(run, path)
        assert not list(replay)
        assert replay.num_steps > run.engine.stats.steps


def test_a_logprob_that_rounding_cannot_explain_is_a_difference(tmp_path: Path) -> None:
    run = WorkloadRun(random_workload(3))
    path = recorded(run, tmp_path)

    def choose(logits: Any, inputs: Sequence[SamplingInput]) -> list[Sampled]:
        return [replace(one, logprob=one.logprob - 0.01) for one in sample(logits, inputs)]

    replay = replayed(run, path, choose)
    assert {str(one).partition(" but ")[2][:14] for one in replay} == {"its logprob is"}
    assert replay.num_failures == replay.num_choices > 0


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda data: data[:-1], "was cut short"),
        (lambda data: data[: len(data) // 2], "was cut short|not what a recording holds"),
        (lambda data: data[: len(FIRST_LINE)], "was cut short"),
        (lambda data: data[: len(FIRST_LINE) + 2], "was cut short"),
        (lambda data: b"", "is no recording; `minipaged generate --record-steps FILE` writes one"),
        (lambda data: b'{"event": 1}\n', "is no recording"),
        (lambda data: data.replace(b"steps 2", b"steps 1", 1), "a recording of another kind .*steps 1"),
        (lambda data: data + b"x", "is damaged: it should hold"),
        (lambda data: data[:-1] + b"\x01", "is damaged: it should hold 1 steps"),
        (lambda data: data[: len(FIRST_LINE)] + b"\0\0\0\1\x80" + data[-5:], "not what a recording holds"),
    ],
)
def test_a_file_that_is_no_whole_recording_is_refused(
    damage: Callable[[bytes], bytes], told: str, tmp_path: Path
) -> None:
    path = recorded(WorkloadRun(random_workload(3)), tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(BadRecording, match=told):
        list(read_recording(path)[1])


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRecording, match=r"cannot read .*nowhere: No such file"):
        read_recording(tmp_path / "nowhere")


def test_steps_that_do_not_follow_one_another_are_refused() -> None:
    recording = [RecordedStep(StepInput(1, fresh=True), ()), RecordedStep(StepInput(4), ())]
    replay = Replay(recording, ContentRunner(4, 0, 4, 11), lambda tokens: np.zeros(11))
    with pytest.raises(BadRecording, match="step 4 does not follow from those before it"):
        list(replay)


def test_a_recording_is_complete_even_if_the_last_step_was_nobodys(tmp_path: Path) -> None:
    """As when all requests are cancelled with a step in flight."""
    config = EngineConfig(num_blocks=8, max_model_len=32, vocab_size=11, async_scheduling=True)
    engine = Engine(config, REFERENCE, ContentRunner(8, 0, 16, 11))
    path = tmp_path / "steps"
    with path.open("wb") as file:
        engine.runner = recorder = StepRecorder(engine.runner, file, HEADER)
        for prompt in ([1, 2], [3, 4]):
            engine.add_request(prompt, SamplingParams(max_tokens=9, seed=1), request_id="a")
            engine.step()
            engine.step()
            engine.abort("a")
        recorder.close()
    choices = [step.choices for step in read_recording(path)[1]]
    assert [one and len(one) for one in choices] == [1, None, 1, None]
    replay = Replay(read_recording(path)[1], ContentRunner(8, 0, 16, 11), lambda tokens: np.zeros(11))
    assert not list(replay)
    assert replay.num_choices == 2
