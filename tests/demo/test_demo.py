"""The demo: every scene on a tiny model shows what it is there to show, and what it prints is what was measured."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from minipaged import InvalidRequest, InvariantViolation, SamplingParams
from minipaged.cli import main
from minipaged.demo import replay, run_demo
from minipaged.demo.scenes import QUESTIONS, SCENES, SceneResult, beam_tree, compare
from minipaged.demo.stage import Stage
from minipaged.demo.ticker import printable
from minipaged.events import (
    HOLE,
    BlockCopied,
    BlocksLoaded,
    BlocksPassed,
    BlocksRolledBack,
    BlocksStored,
    RequestArrived,
    StepFinished,
    TokensAccepted,
    TokensComputed,
    TokensDrafted,
    from_json,
)
from minipaged.handover.shared_storage import SharedStorageConnector
from minipaged.llm import LLM, LoadedModel
from minipaged.reference.block_allocator import BlockAllocator
from minipaged.reference.preemption import carry
from minipaged.reference.sharded import ShardedLlama
from minipaged.replay.teller import Topic, numbers
from minipaged.replay.timeline import Timeline
from tests.effort import thorough
from tests.tiny_model import make_tiny_model
from tests.tokens import bytes_joined, token

NAMES = [scene.name for scene in SCENES]
EVERY = [*NAMES, "tensor-parallel", "windows", "disaggregated", "speculation"]


@dataclass(frozen=True)
class Show:
    """Every scene, played once."""

    outcomes: dict[str, SceneResult]
    printed: str

    @classmethod
    def of(cls, model: Path, **options: Any) -> Show:
        with redirect_stdout(io.StringIO()) as out:
            outcomes = run_demo(model=model, scene=",".join(EVERY), **options)
        return cls(dict(zip(EVERY, outcomes, strict=True)), out.getvalue())


@pytest.fixture(scope="session")
def show(tiny_model: Path) -> Show:
    return Show.of(tiny_model)


@pytest.fixture(scope="session")
def played(show: Show) -> dict[str, SceneResult]:
    return show.outcomes


# --- Every scene ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_a_scene_shows_texts_and_what_happened(played: dict[str, SceneResult], name: str) -> None:
    outcome = played[name]
    assert outcome.holds
    assert outcome.story
    assert outcome.findings
    assert all(ids and len(text) for t in outcome.texts for ids, text in zip(t.token_ids, t.outputs, strict=True))


@pytest.mark.parametrize("name", EVERY)
def test_the_breakdown_of_memory_adds_up_to_the_pool(played: dict[str, SceneResult], name: str) -> None:
    for run in played[name].runs:
        for memory in (run.paged, run.contiguous):
            parts = memory.tokens + memory.reserved + memory.internal_fragmentation + memory.free
            assert parts == pytest.approx(run.pool_bytes)
        assert run.paged.reserved == 0
        assert run.paged.share_of_tokens > run.contiguous.share_of_tokens
        assert 0 < run.peak_blocks_used <= run.num_blocks


def check_is_printed_in_eighty_columns_without_control_characters(printed: str) -> None:
    assert max(len(line) for line in printed.split("\n")) <= 80
    assert "\x1b" not in printed
    for name in EVERY:
        assert f"({name}) ===" in printed
    assert [line.split()[:3] for line in printed.splitlines() if line.startswith("  rank ")] == [
        ["rank", "0", "0"],
        ["rank", "1", "1"],
    ]


def test_every_scene_is_printed_in_eighty_columns_without_control_characters(show: Show) -> None:
    check_is_printed_in_eighty_columns_without_control_characters(show.printed)


def test_json_is_one_document_with_all_scenes(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_demo(model=tiny_model, tier="reference", seed=3, json_output=True)
    document = json.loads(capsys.readouterr().out)
    assert [scene["name"] for scene in document["scenes"]] == NAMES
    assert document["seed"] == 3
    assert document["tier"] == "reference"
    assert document["bytes_per_token"] == 2 * 2 * 2 * 8 * 4  # K and V, layers, KV heads, head_dim, fp32
    for scene in document["scenes"]:
        assert {"title", "watch", "texts", "story", "runs", "findings", "holds"} <= scene.keys()
        assert {"tokens", "reserved", "internal_fragmentation", "free"} <= scene["runs"][0]["paged"].keys()
        assert scene["texts"][0]["prompt"]


@pytest.mark.parametrize("block_size", [256, pytest.param(64, marks=thorough), pytest.param(1, marks=thorough)])
def test_every_scene_runs_and_is_printed_with_any_block_size(tiny_model: Path, block_size: int) -> None:
    show = Show.of(tiny_model, block_size=block_size)
    assert all(run.block_size == block_size for outcome in show.outcomes.values() for run in outcome.runs)
    if block_size > 1:
        check_is_printed_in_eighty_columns_without_control_characters(show.printed)


def test_every_scene_runs_on_a_model_with_a_short_context_and_no_chat_template(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "short", chat_template=False, max_position_embeddings=96)
    outcomes = run_demo(model=folder, scene=",".join(EVERY))
    assert all(run.max_model_len == 96 for outcome in outcomes for run in outcome.runs)


def test_the_seed_decides_what_is_sampled(tiny_model: Path, played: dict[str, SceneResult]) -> None:
    (again,) = run_demo(model=tiny_model, scene="continuous-batch", seed=0)
    (other,) = run_demo(model=tiny_model, scene="continuous-batch", seed=1)
    assert again.texts == played["continuous-batch"].texts
    assert again.texts != other.texts


# --- What each scene is about ---------------------------------------------------------------------


def test_one_request_shows_its_block_table_with_the_prompt_in_it(played: dict[str, SceneResult]) -> None:
    table = played["one-request"].block_table
    assert [row.logical for row in table] == list(range(len(table)))
    assert len({row.physical for row in table}) == len(table)
    assert all(row.filled == 4 for row in table[:-1])
    assert "".join("".join(row.tokens) for row in table).startswith("Four score and seven years ago our")
    assert len(table) == played["one-request"].runs[0].peak_blocks_used


def test_the_memory_of_one_request_is_what_can_be_worked_out_by_hand(tiny_model: Path) -> None:
    (outcome,) = run_demo(model=tiny_model, tier="reference", scene="one-request", num_blocks=300)
    (run,) = outcome.runs
    prompt, generated = len("Four score and seven years ago our"), len(outcome.texts[0].token_ids[0])
    slots = [prompt + step for step in range(generated)]  # filled at each step; the last token is never run
    mean = sum(slots) / generated * 256  # bytes a slot
    paged = sum(-(-n // 4) * 4 for n in slots) / generated * 256
    assert run.paged.tokens == run.contiguous.tokens == pytest.approx(mean)
    assert run.paged.internal_fragmentation == pytest.approx(paged - mean)
    assert run.contiguous.reserved == pytest.approx(slots[-1] * 256 - mean)
    assert run.contiguous.internal_fragmentation == pytest.approx((1024 - slots[-1]) * 256)
    assert run.contiguous_sequences == 1  # of 1024 slots in a pool of 1200


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_a_request_that_was_preempted_is_back_and_does_not_join_again(tiny_model: Path, preemption: str) -> None:
    stage = Stage(LoadedModel.load(tiny_model))
    params = SamplingParams(temperature=0, max_tokens=20, min_tokens=20)
    arrivals = [stage.complete(question, params, step=i) for i, question in enumerate(QUESTIONS[:3])]
    topics: dict[Topic, int] = {"join": 99, "preempt": 99, "return": 99}
    sizes = {"block_size": 4, "num_blocks": 32, "num_swap_blocks": 32}
    story = stage.run("a", arrivals, topics, preemption=preemption, **sizes).story
    assert [line.split()[3] for line in story if "joins" in line] == ["0", "1", "2"]
    preempted = [line for line in story if f"preempted by {preemption}" in line]
    assert len(preempted) == sum("is back" in line for line in story) > 0


def test_in_a_continuous_batch_blocks_of_requests_that_left_are_taken_by_others(played: dict[str, SceneResult]) -> None:
    outcome = played["continuous-batch"]
    assert any("gives back" in line for line in outcome.story)
    assert any("(once request" in line for line in outcome.story)
    assert outcome.runs[0].most_sequences > 4
    assert len(outcome.texts) == len(QUESTIONS)


def test_parallel_sampling_copies_the_prompts_last_block_for_all_but_one(played: dict[str, SceneResult]) -> None:
    outcome = played["parallel-sampling"]
    assert outcome.runs[0].blocks_copied == 3
    copies = [line for line in outcome.story if "copied to block" in line]
    assert [f"shared by {holders}:" in line for holders, line in zip((4, 3, 2), copies, strict=True)] == [True] * 3
    assert outcome.runs[0].share_saved > 0
    assert len(set(outcome.texts[0].token_ids)) == 4


def test_beam_search_drops_beams_and_gives_their_blocks_back_in_the_same_step(played: dict[str, SceneResult]) -> None:
    outcome = played["beam-search"]
    assert any("dropped" in line and "free again" in line for line in outcome.story)
    assert outcome.runs[0].share_saved > 0.3
    scores = outcome.texts[0].scores
    assert sorted(scores, reverse=True) == list(scores)  # type: ignore[type-var]
    assert sum(f"({score:.2f})" in line for line in outcome.tree for score in scores) >= len(scores) == 4
    winner = " ".join(outcome.texts[0].outputs[0].split())
    assert outcome.findings[-1] == f'The winner, score {scores[0]:.2f}: "{printable(winner)}"'


def test_beams_are_a_tree_of_what_they_have_in_common() -> None:
    words = ["the", "sea", "is", "calm", "wide", "sky"]
    beams = [((0, 1, 2, 3), -0.1), ((0, 5), -0.2), ((0, 1, 2), -0.3), ((0, 1, 2, 4), -0.4)]
    assert list(beam_tree(lambda tokens: " ".join(words[token] for token in tokens), beams)) == [
        "`- the",
        "   |- sea is",
        "   |  |- (-0.10) calm",
        "   |  |- (-0.30)",
        "   |  `- (-0.40) wide",
        "   `- (-0.20) sky",
    ]


def test_a_tree_of_beams_cuts_no_character() -> None:
    """Two beams may part within one."""
    euro = [token(bytes([byte])) for byte in "€".encode()]
    beams = [((token(b"a"), *euro[:2], euro[2]), -0.1), ((token(b"a"), *euro[:2], token(b"b")), -0.2)]
    assert list(beam_tree(bytes_joined, beams)) == ["`- a\ufffd", "   |- (-0.10) €", "   `- (-0.20) \ufffdb"]


def test_all_but_the_first_request_find_the_shared_prompt_in_the_cache(played: dict[str, SceneResult]) -> None:
    outcome = played["shared-prompt"]
    assert outcome.runs[0].prefix_cache_hit_tokens > 4 * 400
    found = [line for line in outcome.story if "in the prefix cache" in line]
    assert [line.split()[3] for line in found] == ["1", "2", "3", "4"]


def test_both_kinds_of_preemption_happen_and_the_tokens_are_the_same(played: dict[str, SceneResult]) -> None:
    outcome = played["preemption"]
    plenty, swap, recompute = outcome.runs
    assert (plenty.preempted_by_swap, plenty.preempted_by_recompute) == (0, 0)
    assert swap.preempted_by_swap > 0
    assert swap.preempted_by_recompute == swap.tokens_recomputed == 0
    assert swap.blocks_swapped_out == swap.blocks_swapped_in > 0
    assert recompute.preempted_by_recompute > 0
    assert recompute.preempted_by_swap == recompute.blocks_swapped_out == 0
    assert recompute.tokens_recomputed > 0
    assert outcome.holds
    assert sum("the same" in finding for finding in outcome.findings) == 2
    assert any("preempted by swap" in line for line in outcome.story)
    assert any("preempted by recompute" in line for line in outcome.story)


def test_two_ranks_write_the_same_blocks_each_for_its_own_heads(played: dict[str, SceneResult]) -> None:
    outcome = played["tensor-parallel"]
    first, second = outcome.rank_pools
    assert (first.kv_heads, second.kv_heads) == ((0,), (1,))
    named = {block for event in outcome.events[1] if isinstance(event, TokensComputed) for block in event.new_blocks}
    named |= {event.destination for event in outcome.events[1] if isinstance(event, BlockCopied)}
    assert set(first.blocks_written) == set(second.blocks_written) == named
    assert len(named) > 9
    assert first.block_bytes == second.block_bytes == 8 * 2 * 2 * 8 * 4  # slots, K and V, layers, head_dim, fp32
    assert outcome.runs[1].blocks_copied == 1
    assert "the very same ones" in outcome.findings[0]
    assert "the same as on one" in outcome.findings[2]
    plain = [
        [replace(event, seconds=0) if isinstance(event, StepFinished) else event for event in run]
        for run in outcome.events
    ]
    assert plain[0] == plain[1]  # nobody is told of ranks


def test_as_many_ranks_can_be_seen_as_are_asked_for(tiny_model: Path) -> None:
    (outcome,) = run_demo(model=tiny_model, tier="reference", scene="tensor-parallel", tensor_parallel_size=4)
    assert [pool.kv_heads for pool in outcome.rank_pools] == [(0,), (0,), (1,), (1,)]
    assert outcome.runs[1].pool_bytes == 2 * outcome.runs[0].pool_bytes  # two ranks keep each KV head
    assert outcome.holds


def test_a_rank_that_copies_no_block_is_found_out(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShardedLlama, "move", lambda self, moves: carry(self.stages[0][0].kv_cache, moves))
    (outcome,) = run_demo(model=tiny_model, scene="tensor-parallel")
    assert not outcome.holds
    assert "DIFFERENT" in outcome.findings[2]


def test_what_windows_have_passed_is_given_back_and_changes_no_token(show: Show) -> None:
    outcome = show.outcomes["windows"]
    whole, seeing_all, seeing_window = outcome.group_tables  # the tiny model has two layers
    one, grouped = outcome.runs
    assert [(table.num_layers, table.window) for table in outcome.group_tables] == [(2, None), (1, None), (1, 32)]
    assert HOLE not in (*whole.entries, *seeing_all.entries)
    num_holes = seeing_window.entries.count(HOLE)
    assert 0 < num_holes < len(seeing_window.entries) == len(whole.entries) == len(seeing_all.entries)
    assert HOLE not in seeing_window.entries[num_holes:]
    assert seeing_window.num_bytes == (len(whole.entries) - num_holes) * 8 * 2 * 2 * 8 * 4  # as above, of one layer
    assert whole.num_bytes == 2 * seeing_all.num_bytes
    assert grouped.pool_bytes == one.pool_bytes
    assert grouped.contiguous.tokens == pytest.approx(one.contiguous.tokens)
    assert grouped.contiguous_sequences == one.contiguous_sequences
    assert grouped.paged.tokens < one.paged.tokens
    assert outcome.holds
    passed = sum(len(event.blocks) for event in outcome.events[1] if isinstance(event, BlocksPassed))
    assert not any(isinstance(event, BlocksPassed) for event in outcome.events[0])
    assert f": {passed} blocks were given back" in outcome.findings[0]
    assert "the same as with one table. This is not the text of" in outcome.findings[1]
    assert "windows have passed" in " ".join(outcome.story), outcome.story
    shown = "-" * num_holes + "".join(f" {block}" for block in seeing_window.entries[num_holes:])
    assert any(line.startswith("  with groups") and line.endswith(f"  {shown}") for line in show.printed.splitlines())


def test_a_block_that_is_given_back_too_early_is_found_out(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "minipaged.engine.grouped_table.first_seen",
        lambda window, position: 0 if window is None else max(0, position - window // 2),
    )
    (outcome,) = run_demo(model=tiny_model, tier="reference", scene="windows")
    assert not outcome.holds
    assert "DIFFERENT as with one table" in outcome.findings[1]


def test_a_decoding_engine_has_every_full_block_of_the_prompts(played: dict[str, SceneResult]) -> None:
    """From the other engine, or from its own prefix cache, which had them from there; a block travels once."""
    outcome = played["disaggregated"]
    alone, first, second = outcome.events
    stored = sum(len(event.blocks) for event in first if isinstance(event, BlocksStored))
    loaded = sum(len(event.blocks) for event in second if isinstance(event, BlocksLoaded))
    assert stored == loaded > 20
    prompts = {e.sequence: len(e.prompt_token_ids) for e in second if isinstance(e, RequestArrived)}
    size = outcome.runs[2].block_size
    computed = {event.sequence: event.num_tokens for event in reversed(second) if isinstance(event, TokensComputed)}
    assert computed == prompts  # the first time that anything of it was, it was all the rest
    found = outcome.runs[2].prefix_cache_hit_tokens
    assert loaded * size + found == sum((length - 1) // size * size for length in prompts.values())
    assert not any(isinstance(event, BlocksLoaded | BlocksStored) for event in alone)
    assert "the same as of one" in outcome.findings[2]


def test_blocks_that_arrive_wrong_or_not_are_found_out(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minipaged.reference.preemption.write_blocks", lambda kv_cache, blocks: None)
    (outcome,) = run_demo(model=tiny_model, tier="reference", scene="disaggregated")
    assert not outcome.holds
    assert "DIFFERENT" in outcome.findings[2]
    monkeypatch.undo()
    monkeypatch.setattr(SharedStorageConnector, "load", lambda self, token_ids, start, stop: [])
    (outcome,) = run_demo(model=tiny_model, tier="reference", scene="disaggregated")
    assert not outcome.holds
    assert "the same as of one" in outcome.findings[2]


def test_a_difference_in_a_single_token_is_reported(tiny_model: Path) -> None:
    stage = Stage(LoadedModel.load(tiny_model))
    arrivals = [stage.complete(question, SamplingParams(max_tokens=8, seed=1)) for question in QUESTIONS[:2]]
    run = stage.run("a", arrivals, {}, block_size=4, num_blocks=64)
    completion = run.outputs[1].outputs[0]
    ids = (*completion.token_ids[:5], (completion.token_ids[5] + 1) % 200, *completion.token_ids[6:])
    changed = replace(run.outputs[1], outputs=(replace(completion, token_ids=ids),))
    findings, holds = compare(run, [run, replace(run, outputs=[run.outputs[0], changed])])
    assert not holds
    assert "the same 16 tokens" in findings[0]
    assert "DIFFERENT: request 1 from token 5 on" in findings[1]


def test_a_pool_that_is_not_small_enough_is_said_to_be_so(tiny_model: Path) -> None:
    (outcome,) = run_demo(model=tiny_model, scene="preemption", num_blocks=500)
    assert all("nothing preempted" in finding for finding in outcome.findings)


# --- What is asked for ----------------------------------------------------------------------------


def test_an_unknown_scene_is_answered_with_the_known_ones(tiny_model: Path) -> None:
    with pytest.raises(InvalidRequest, match="no scene 'paging'; choose from one-request, continuous-batch, "):
        run_demo(model=tiny_model, scene="paging")


def test_a_pool_too_small_for_a_scene_is_refused_with_the_reason(tiny_model: Path) -> None:
    with pytest.raises(InvalidRequest, match="the whole pool has 2"):
        run_demo(model=tiny_model, scene="beam-search", num_blocks=2)


def test_a_students_allocator_serves_every_scene(tiny_model: Path) -> None:
    taken: list[int] = []

    class LastFirst(BlockAllocator):
        def __init__(self, num_blocks: int) -> None:
            super().__init__(num_blocks)
            self._free.reverse()

        def allocate(self) -> int:
            taken.append(super().allocate())
            return taken[-1]

    (outcome,) = run_demo(model=tiny_model, scene="one-request", allocator=LastFirst)
    assert [row.physical for row in outcome.block_table] == taken
    assert taken[0] == outcome.runs[0].num_blocks - 1


def test_an_allocator_that_breaks_a_rule_is_told_which(tiny_model: Path) -> None:
    class Forgetful(BlockAllocator):
        def share(self, block: int) -> None:
            self.ref_count(block)

    with pytest.raises(InvariantViolation):
        run_demo(model=tiny_model, scene="parallel-sampling", allocator=Forgetful)


def test_the_module_is_the_same_as_the_command(tiny_model: Path) -> None:
    asked = ["--scene", "one-request", "--model", str(tiny_model), "--block-size", "8", "--num-blocks", "9", "--json"]
    asked += ["--tier", "reference"]
    done = subprocess.run([sys.executable, "-m", "minipaged.demo", *asked], capture_output=True, text=True, check=True)
    (scene,) = json.loads(done.stdout)["scenes"]
    assert (scene["runs"][0]["block_size"], scene["runs"][0]["num_blocks"]) == (8, 9)


# --- Its parts ------------------------------------------------------------------------------------


def test_llms_that_share_a_loaded_model_share_its_weights_and_nothing_else(tiny_model: Path) -> None:
    loaded = LoadedModel.load(tiny_model)
    steps: list[StepFinished] = []
    one = LLM(loaded, num_blocks=32, listeners=[lambda e: steps.append(e) if isinstance(e, StepFinished) else None])
    two = LLM(one.loaded, num_blocks=16, block_size=8)
    assert one.loaded.weights is two.loaded.weights
    assert (one.config.num_blocks, two.config.num_blocks, two.config.block_size) == (32, 16, 8)
    params = SamplingParams(temperature=0, max_tokens=6)
    assert two.generate("abc", params)[0].outputs == LLM(tiny_model, num_blocks=9).generate("abc", params)[0].outputs
    assert not steps
    assert one.stats().generated_tokens == 0


@pytest.mark.parametrize(
    ("blocks", "words"),
    [([4], "block 4"), ([1, 2, 3], "blocks 1-3"), ([7, 0, 1, 5], "blocks 7, 0-1, 5"), ([], "blocks none")],
)
def test_runs_of_blocks_are_drawn_together(blocks: list[int], words: str) -> None:
    assert numbers(blocks) == words


# --- What else may be asked for -------------------------------------------------------------------


def test_every_run_in_the_json_has_its_events(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_demo(model=tiny_model, tier="reference", scene="preemption", json_output=True)
    (scene,) = json.loads(capsys.readouterr().out)["scenes"]
    for run in scene["runs"]:
        timeline = Timeline(from_json(json.dumps(event)) for event in run["events"])
        timeline.seek(len(timeline))
        assert timeline.state.num_generated == run["generated_tokens"]
        assert timeline.state.counts["block_copied"] == run["blocks_copied"]
        assert timeline.state.most_sequences == run["most_sequences"]


@pytest.mark.parametrize("scene", [None, "yours"])
def test_ones_own_prompts_are_answered(tiny_model: Path, scene: str | None) -> None:
    (outcome,) = run_demo(model=tiny_model, tier="reference", scene=scene, prompts=["What is a page?", "And a block?"])
    assert [text.prompt for text in outcome.texts] == ["What is a page?", "And a block?"]
    assert all(text.outputs[0] for text in outcome.texts)


def test_ones_own_prompts_can_come_from_a_file(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n\nthree\n"))
    with pytest.raises(SystemExit):
        main(["demo", "--scene", "yours", "--model", str(tiny_model), "--tier", "reference", "--json"])
    (scene,) = json.loads(capsys.readouterr().out)["scenes"]
    assert [text["prompt"] for text in scene["texts"]] == ["one", "two"]


def test_every_scene_can_be_cut_short(tiny_model: Path) -> None:
    outcomes = run_demo(model=tiny_model, tier="reference", steps=3, scene=",".join(EVERY))
    assert len(outcomes) == len(EVERY)
    assert all(run.steps <= 3 for outcome in outcomes for run in outcome.runs)
    preempted = outcomes[NAMES.index("preemption")]
    assert preempted.holds  # as far as the runs went


def test_several_scenes_can_be_chosen(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_demo(model=tiny_model, tier="reference", scene="beam-search,one-request", steps=2)
    printed = capsys.readouterr().out
    assert printed.index("1/2 Beam search") < printed.index("2/2 One request")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"speed": 0.0}, "speed is 0.0; it must be above 0"),
        ({"speed": float("nan")}, "speed is nan"),
        ({"steps": 0}, "steps is 0; it must be at least 1"),
        ({"scene": "yours"}, "this scene needs prompts"),
        ({"scene": "one-request", "prompts": ["a"]}, "prompts are only for --scene yours"),
        ({"record": Path("demo.gif")}, "must end in"),
    ],
)
def test_what_makes_no_sense_is_refused(tiny_model: Path, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        run_demo(model=tiny_model, tier="reference", **asked)


ARRIVED = '{"event":"request_arrived","request":"0","sequence":0,"prompt_token_ids":[1],"num_sequences":1}\n'
STARTED = '{"event":"engine_started","num_blocks":4,"num_swap_blocks":0,"block_size":4,"max_model_len":16}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no events"),
        (ARRIVED, "line 1: the first event of a run is engine_started"),
        (STARTED + "{", "line 2: "),
        (STARTED + '\n{"event":"what"}', "line 3: not an event"),
        (STARTED + '{"event":"request_admitted","request":"7"}', "line 2: it does not follow from the events before"),
        (
            STARTED + ARRIVED + '{"event":"blocks_freed","sequence":0,"blocks":[3]}',
            r"line 3: sequence 0 holds blocks \[\]",
        ),
        (STARTED.replace('"block_size":', '"block_size":-'), "line 1: block_size is -"),
        (STARTED.replace('"num_blocks":', '"num_blocks":99999999'), "line 1: num_blocks is .* between 1 and"),
        (STARTED.replace('"max_model_len":', '"max_model_len":"long","was":'), "line 1: not a valid engine_started"),
        (STARTED + ARRIVED.replace('"sequence":0', '"sequence":"a"'), "its sequence is 'a'"),
        (
            STARTED + ARRIVED + '{"event":"sequence_finished","request":"7","sequence":0,"reason":"tired"}',
            "its reason is 'tired'",
        ),
        (STARTED + "[" * 100_000, "line 2: "),
    ],
)
def test_a_file_that_is_no_run_is_refused_with_the_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(content)
    with pytest.raises(InvalidRequest, match=message):
        replay(path)
    with pytest.raises(InvalidRequest, match="cannot read"):
        replay(tmp_path / "nothing.jsonl")


def test_what_generate_wrote_can_be_replayed_with_words_or_without(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, film = tmp_path / "run.jsonl", tmp_path / "run.cast"
    with path.open("w") as file:
        llm = LLM(tiny_model, tier="reference", listeners=[lambda event: print(event.to_json(), file=file)])
        llm.generate("paging", SamplingParams(n=2, max_tokens=8, seed=0))
    replay(path, record=film)
    assert "16 tokens generated for 1 request;" in capsys.readouterr().out
    assert llm.tokenizer is not None
    with_ids = film.read_text()
    prompt = llm.tokenizer.encode("paging")
    assert f"{prompt[0]}|{prompt[1]}|{prompt[2]}" in with_ids  # in the slots of the block table
    replay(path, record=film, decode=llm.tokenizer.decode)
    assert "p|a|g|i|n|g" in film.read_text()


@pytest.mark.model
def test_the_real_model_continues_lincoln_with_the_papers_block_table() -> None:
    (outcome,) = run_demo(scene="one-request", tier="reference")
    (text,) = outcome.texts
    assert "7 tokens into blocks 0-1" in outcome.story[0]
    assert "token 8: logical block 2 -> physical block 2" in outcome.story[1]
    assert [row.tokens for row in outcome.block_table[:1]] == [("Four", " score", " and", " seven")]
    assert len(text.outputs[0].split()) >= 10
    assert outcome.runs[0].pool_bytes == 1024 * 46_080


def test_drafts_change_no_token_and_what_became_of_them_is_counted(played: dict[str, SceneResult]) -> None:
    outcome = played["speculation"]
    without, drafted = outcome.events
    assert not any(isinstance(event, TokensDrafted) for event in without)
    num_drafted = sum(len(event.token_ids) for event in drafted if isinstance(event, TokensDrafted))
    stood = sum(event.num_accepted for event in drafted if isinstance(event, TokensAccepted))
    back = sum(len(event.blocks) for event in drafted if isinstance(event, BlocksRolledBack))
    assert num_drafted > 0
    assert f"Of {num_drafted} drafted tokens {stood} stood, and {back} blocks went back" in outcome.findings[0]
    assert "the same as without" in outcome.findings[1]
    assert any("drafted for A, and run to be verified" in line for line in outcome.story)


@pytest.mark.model
def test_of_what_is_drafted_for_the_real_model_some_stands_and_some_does_not() -> None:
    (outcome,) = run_demo(scene="speculation")
    verified = [event for event in outcome.events[1] if isinstance(event, TokensAccepted)]
    assert {0, 4} <= {event.num_accepted for event in verified if event.num_drafted == 4}
    assert any(isinstance(event, BlocksRolledBack) and event.blocks for event in outcome.events[1])
    plain, drafted = outcome.runs
    assert drafted.steps < plain.steps / 2
    assert outcome.holds


@pytest.mark.parametrize("sizes", [{"num_blocks": 0}, {"block_size": 0}])
@pytest.mark.parametrize("scene", NAMES)
def test_a_size_of_nought_is_refused_in_every_scene(tiny_model: Path, scene: str, sizes: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest, match=f"{next(iter(sizes))} is 0; it must be"):
        run_demo(model=tiny_model, scene=scene, **sizes)
