"""Replicas behind a router, simulated: who finds what, and that each has its own time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from minipaged.paper.figures import FIGURES, routing
from minipaged.paper.figures.routing import ROUTERS, Fleet, Routed, RoutedChats, Talk
from minipaged.paper.running import Results, run_figure
from minipaged.paper.workloads import MAX_MODEL_LEN, Round, conversations
from tests.effort import thorough


def talked(router: str, replicas: int, rounds: Sequence[Sequence[Round]]) -> Routed:
    return Fleet(ROUTERS[router](), replicas, "OPT-13B").run([Talk(i, one) for i, one in enumerate(rounds)])


def test_conversations_grow_as_far_as_the_model_holds_them() -> None:
    found = conversations(2.0, 200.0, seed=1)
    assert found == conversations(2.0, 200.0, seed=1) != conversations(2.0, 200.0, seed=2)
    begins = [rounds[0].pause for rounds in found]
    assert begins == sorted(begins)
    for rounds in found:
        assert sum(one.said_tokens + one.answer_tokens for one in rounds) < MAX_MODEL_LEN
        assert all(one.pause > 0 for one in rounds)
    assert 2 < np.mean([len(rounds) for rounds in found]) < 8


ROUNDS = [Round(1.0, 100, 20), Round(5.0, 40, 20), Round(5.0, 40, 20)]


def test_a_conversation_alone_finds_all_that_it_left() -> None:
    found = talked("prefix-aware", 1, [ROUNDS])
    assert found.requests == 3
    assert found.most == (119 + 179) / (100 + 160 + 220), "of 120 and of 180 tokens all but the last"
    assert found.hit_rate == found.most


def test_the_last_token_of_an_answer_has_not_been_run_so_it_is_not_there() -> None:
    rounds = [Round(1.0, 100, 12), Round(5.0, 40, 24), Round(5.0, 40, 20)]
    found = talked("prefix-aware", 1, [rounds])
    assert found.hit_rate == found.most == (111 + 175) / (100 + 152 + 216), (
        "of 112 and of 176 tokens, which end a block"
    )


def test_by_turns_a_round_comes_to_who_knows_nothing_of_it() -> None:
    assert talked("round robin", 2, [ROUNDS[:2]]).hit_rate == 0
    assert talked("round robin", 2, [ROUNDS]).hit_rate == 119 / 480, "the third one finds what the first one left"
    assert talked("prefix-aware", 2, [ROUNDS]) == talked("prefix-aware", 1, [ROUNDS])


def test_each_replica_has_a_clock_of_its_own() -> None:
    alone, both = talked("round robin", 1, [ROUNDS[:1]]), talked("round robin", 2, [ROUNDS[:1], ROUNDS[:1]])
    assert both.latency == alone.latency
    assert talked("round robin", 1, [ROUNDS[:1], ROUNDS[:1]]).latency.mean > alone.latency.mean


def test_a_round_waits_for_the_answer_before_it_and_a_pause() -> None:
    """A prompt that comes before an answer's end makes it later; one that comes in the pause does not."""
    first = talked("round robin", 1, [ROUNDS[:1]]).latency.mean
    for when, disturbs in ((0.9 * first, True), (first + 2.5, False), (first + 5.0 + 0.9 * first, True)):
        disturbed = talked("round robin", 1, [ROUNDS[:2], [Round(1.0 + when, 1000, 1)]])
        alone = talked("round robin", 1, [ROUNDS[:2]]), talked("round robin", 1, [[Round(1.0 + when, 1000, 1)]])
        assert (disturbed.latency.mean * 3 > alone[0].latency.mean * 2 + alone[1].latency.mean + 0.01) == disturbs


def test_who_is_least_loaded_is_asked() -> None:
    """By turns the two long answers would come from one replica, and the short ones from the other."""
    long, short = Round(1.0, 100, 800), Round(1.0, 100, 2)
    rounds = [[long], [short], [replace(long, pause=4.0)], [replace(short, pause=4.0)]]
    assert talked("least loaded", 2, rounds).latency.mean < talked("round robin", 2, rounds).latency.mean


@thorough
def test_the_figure_has_a_line_for_each_router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "QUICK_SECONDS", 12.0)
    data = run_figure(
        FIGURES["beyond/routing"], Results(tmp_path), quick=True, seed=0, processes=1, done=lambda job: None
    )
    hits = {line["label"]: dict(line["points"]) for line in data["plots"][0]["lines"]}
    assert hits.keys() == ROUTERS.keys()
    assert len({of[1] for of in hits.values()}) == 1, "before one replica there is nothing to choose"
    assert hits["prefix-aware"][8] > 2 * max(hits["round robin"][8], hits["least loaded"][8])


def test_the_same_seed_gives_the_same_numbers() -> None:
    job = RoutedChats("prefix-aware", 2, 0.25, 10.0, seed=3)
    assert job.run() == job.run() != replace(job, seed=4).run()
