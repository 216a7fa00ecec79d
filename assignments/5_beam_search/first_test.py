"""A first test of your beam search: `pytest`, in this folder. More of them are yours to write."""

import numpy as np
from beam_search import BeamSearch

from minipaged import BeamSearchParams


def test_the_prompt_goes_on_in_its_two_likeliest_tokens():
    search = BeamSearch(BeamSearchParams(beam_width=2, max_tokens=4), prompt_length=3, max_length=7, eos_token_ids=[0])
    logits = np.array([[-9.0, 1.0, 3.0, 2.0]])  # [rows, vocab]
    survivors = search.step(logits, [0], [0.0]).survivors
    assert [(move.parent, move.token_id) for move in survivors] == [(0, 2), (0, 3)]
