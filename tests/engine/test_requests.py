"""Requests: what is refused and how; how a sequence ends; what its user gets back; what the statistics say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minipaged.contracts import Logits, Sampled, SamplingInput
from minipaged.engine.detokenizer import Decode, Encode
from minipaged.engine.engine import Engine
from minipaged.errors import InvalidRequest
from minipaged.events import Event, RequestPreempted, RequestRefused
from minipaged.outputs import RequestOutput
from minipaged.params import BeamSearchParams, EngineConfig, SamplingParams
from minipaged.reference.sampling import sample
from minipaged.testing.content_runner import ContentRunner
from tests.effort import examples
from tests.workloads import REFERENCE, Workload, WorkloadRequest, WorkloadRun, ended

CONFIG = EngineConfig(num_blocks=8, block_size=4, max_model_len=40, vocab_size=20, max_num_seqs=4, debug=True)


class Bench:
    """An engine, and what went into its sampler. With `script`, stream i gets the tokens `script[i]`."""

    def __init__(
        self,
        config: EngineConfig = CONFIG,
        script: Sequence[Sequence[int]] = (),
        decode: Decode | None = None,
        encode: Encode | None = None,
    ) -> None:
        self.script = script
        self.sampled: list[SamplingInput] = []
        self.events: list[Event] = []
        sizes = (config.num_blocks, config.num_swap_blocks, config.block_size, config.vocab_size)
        runner = ContentRunner(*sizes, choose=self.sample)
        self.engine = Engine(config, REFERENCE, runner, decode=decode, encode=encode, listeners=[self.events.append])
        runner.engine = self.engine

    def sample(self, logits: Logits, inputs: Sequence[SamplingInput]) -> list[Sampled]:
        self.sampled += inputs
        if self.script:
            return [Sampled(self.script[i.stream][len(i.output_token_ids)], -0.5, None) for i in inputs]
        return sample(logits, inputs)

    def serve(
        self,
        prompt: Sequence[int],
        params: SamplingParams | BeamSearchParams,
        request_id: str | None = None,
        text: str | None = None,
    ) -> RequestOutput:
        """Run one request to its end, and see that it leaves nothing behind."""
        self.engine.add_request(prompt, params, request_id=request_id, prompt=text)
        outputs: list[RequestOutput] = []
        while self.engine.has_unfinished_requests():
            outputs += ended(self.engine.step())
        self.check_nothing_leaked()
        [output] = outputs
        return output

    def check_nothing_leaked(self) -> None:
        blocks = self.engine.blocks
        assert blocks.num_available == blocks.allocator.num_blocks
        assert not self.engine.has_unfinished_requests()


# --- What is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], SamplingParams(), "the prompt is empty; give it at least one token"),
        ([1, 20], SamplingParams(), "prompt token 1 is 20, .*numbers 0 to 19"),
        ([-1], SamplingParams(), "prompt token 0 is -1, .*numbers 0 to 19"),
        ([True], SamplingParams(), "prompt token 0 is True, of type bool; .*numbers 0 to 19"),
        ([1.0], SamplingParams(), "prompt token 0 is 1.0, of type float; .*numbers 0 to 19"),
        ([1, None], SamplingParams(), "prompt token 1 is None, .*numbers 0 to 19"),
        ("hi", SamplingParams(), "prompt token 0 is 'h', of type str; .*numbers 0 to 19"),
        (
            [1] * 40,
            SamplingParams(),
            "prompt has 40 tokens.*max_model_len is 40; shorten the prompt or raise max_model",
        ),
        ([1] * 33, SamplingParams(max_tokens=1), "prompt alone needs 9 blocks.*whole pool has 8; shorten.*num_blocks"),
        ([1] * 30, SamplingParams(max_tokens=4), r"can need 9 blocks.*pool has 8; .*lower max_tokens \(4\)"),
        ([1] * 8, SamplingParams(n=3, max_tokens=10), r"can need 11 blocks.*pool has 8; .*or n \(3\), or raise num_bl"),
        ([1] * 8, BeamSearchParams(beam_width=3, max_tokens=10), r"can need 11 blocks.*or beam_width \(3\), or raise"),
        ([1], SamplingParams(n=5), r"n is 5, but at most 4 sequences.*max_num_seqs \(4\)"),
        ([1], BeamSearchParams(beam_width=5), r"beam_width is 5, but at most 4 sequences.*max_num_seqs \(4\)"),
        ([1], BeamSearchParams(beam_width=21), "beam_width is 21, more than the vocabulary's 20 tokens; lower it"),
        ([1], SamplingParams(logprobs=21), "logprobs is 21; the vocabulary has only 20 tokens"),
        ([1], SamplingParams(stop_token_ids=[20]), "stop_token_ids has 20, which is none of .*tokens 0 to 19"),
        ([1], SamplingParams(stop_token_ids=[-1]), "stop_token_ids has -1, which is none of .*tokens 0 to 19"),
        ([1], SamplingParams(prompt_logprobs=21), "prompt_logprobs is 21; the vocabulary has only 20 tokens"),
        ([1], SamplingParams(allowed_token_ids=[3, 20]), "allowed_token_ids has 20, which is none of .*tokens 0 to 19"),
        ([1], SamplingParams(logit_bias={-1: 1}), "logit_bias has -1, which is none of .*tokens 0 to 19"),
        ([1], SamplingParams(bad_words=["x"]), "bad_words need a tokenizer, and this engine has none; use logit_bias"),
        (
            [1],
            SamplingParams(allowed_token_ids=[3], stop_token_ids=[3], min_tokens=1),
            r"allowed_token_ids is \(3,\), and each of these is a bad word or would end the.*allow another",
        ),
        ([], SamplingParams(truncate_prompt_tokens=3), "the prompt is empty; give it at least one token"),
        ([1] * 99, SamplingParams(truncate_prompt_tokens=40), "prompt has 40 tokens.*max_model_len is 40; shorten"),
        ([1], SamplingParams(stop="x"), "stop strings need a tokenizer, and this engine has none; use stop_token_ids"),
    ],
)
def test_a_bad_request_is_refused_with_the_value_the_limit_and_the_way_out(
    prompt: Any, params: SamplingParams | BeamSearchParams, message: str
) -> None:
    bench = Bench()
    with pytest.raises(InvalidRequest, match=message) as caught:
        bench.engine.add_request(prompt, params, request_id="bad")
    assert bench.events[-1] == RequestRefused("bad", str(caught.value))
    bench.check_nothing_leaked()
    assert bench.serve([1, 2, 3], SamplingParams(max_tokens=2), request_id="bad").finished


def test_the_largest_request_that_can_fit_is_served() -> None:
    """The limits of the test above are exact: the last token needs no slot."""
    assert len(Bench().serve([1] * 30, SamplingParams(max_tokens=3, ignore_eos=True)).outputs[0].token_ids) == 3
    assert len(Bench().serve([1] * 8, SamplingParams(n=2, max_tokens=13)).outputs) == 2
    assert len(Bench().serve([1] * 32, SamplingParams(max_tokens=1)).outputs[0].token_ids) == 1


def test_a_request_id_can_be_used_again_only_after_its_request_has_ended() -> None:
    bench = Bench()
    bench.engine.add_request([1], SamplingParams(max_tokens=1), request_id="same")
    with pytest.raises(InvalidRequest, match="request id 'same' is in use; wait for that request or choose another"):
        bench.engine.add_request([2], SamplingParams(), request_id="same")
    assert [output.prompt_token_ids for output in ended(bench.engine.step())] == [(1,)]
    assert bench.serve([2], SamplingParams(max_tokens=1), request_id="same").prompt_token_ids == (2,)


def test_a_request_without_an_id_gets_one_that_is_not_in_use() -> None:
    bench = Bench()
    bench.engine.add_request([1], SamplingParams(), request_id="1")
    assert bench.engine.add_request([1], SamplingParams()) != "1"


def test_numpy_tokens_are_numbers_too_and_events_can_be_written() -> None:
    bench = Bench()
    output = bench.serve(np.array([1, 2, 3]), SamplingParams(max_tokens=2))  # type: ignore[arg-type]
    assert [type(token) for token in output.prompt_token_ids] == [int] * 3
    assert all(event.to_json() for event in bench.events)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", -1),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("top_k", -2),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("logprobs", -1),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 1.0),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -1),
        ("skip_special_tokens", 1),
        ("include_stop_str_in_output", 0),
        ("presence_penalty", 2.1),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("n", 2.5),
        ("n", True),
        ("seed", 0.5),
        ("max_tokens", 2.0),
    ],
)
def test_sampling_params_out_of_range_are_refused_by_name_and_value(name: str, value: float) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name} is {value}; it must be "):
        SamplingParams(**{name: value})


def test_sampling_params_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens is 5, more than max_tokens, which is 4"):
        SamplingParams(min_tokens=5, max_tokens=4)
    with pytest.raises(InvalidRequest, match="stop holds an empty string"):
        SamplingParams(stop=["end", ""])
    with pytest.raises(InvalidRequest, match=r"stop_token_ids is \[2.5\]; token ids are whole numbers"):
        SamplingParams(stop_token_ids=[2.5])  # type: ignore[list-item]
    assert SamplingParams(min_tokens=5, max_tokens=None).min_tokens == 5


@pytest.mark.parametrize(
    "params",
    [
        {"n": 1, "temperature": 0, "top_p": 1, "top_k": -1, "min_p": 1, "max_tokens": None, "logprobs": 0},
        {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 0.1, "min_tokens": 16},
    ],
)
def test_sampling_params_at_the_edge_of_their_range_are_accepted(params: dict[str, Any]) -> None:
    SamplingParams(**params)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("beam_width", 0),
        ("beam_width", 1.5),
        ("max_tokens", 0),
        ("length_penalty", float("inf")),
        ("early_stopping", "sometimes"),
    ],
)
def test_beam_search_params_out_of_range_are_refused_by_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name} is {value!r}; it must be "):
        BeamSearchParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", 0),
        ("block_size", 257),
        ("num_blocks", 0),
        ("max_model_len", 0),
        ("vocab_size", 0),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 0),
        ("num_swap_blocks", -1),
        ("preemption", "never"),
        ("num_blocks", 8.0),
    ],
)
def test_engine_settings_out_of_range_are_refused_by_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name} is {value!r}; (it must be|choose) "):
        replace(CONFIG, **{name: value})


def test_swapping_without_a_host_pool_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="preemption is 'swap' but num_swap_blocks is 0"):
        replace(CONFIG, preemption="swap")


# --- How a sequence ends --------------------------------------------------------------------------

PIECES = ["", "he", "ll", "o w", "orld", "!"]


def join(token_ids: Sequence[int]) -> str:
    return "".join(PIECES[token] for token in token_ids)


def end_of(script: Sequence[int], decode: Decode | None = join, **params: Any) -> Any:
    """The output of a sequence whose tokens are scripted; token 9 is the end of sequence."""
    config = replace(CONFIG, eos_token_ids=(9,))
    return Bench(config, [script], decode).serve([1], SamplingParams(**params)).outputs[0]


def test_a_stop_string_may_begin_in_one_token_and_end_in_another() -> None:
    output = end_of([1, 2, 3, 4, 5], stop="lo w")
    assert (output.token_ids, output.text) == ((1, 2, 3), "hel")
    assert (output.finish_reason, output.stop_reason) == ("stop", "lo w")


def test_a_stop_string_may_stay_in_the_text_which_ends_with_it() -> None:
    output = end_of([1, 2, 3, 4, 5], stop="lo", include_stop_str_in_output=True)
    assert (output.token_ids, output.text) == ((1, 2, 3), "hello")
    assert (output.finish_reason, output.stop_reason) == ("stop", "lo")


def test_of_several_stop_strings_the_one_that_begins_first_is_cut_off() -> None:
    output = end_of([1, 2, 3, 4, 5], stop=["world", " w", "o w"])
    assert (output.text, output.stop_reason) == ("hell", "o w")


def test_a_stop_string_that_never_comes_changes_nothing() -> None:
    output = end_of([1, 2, 3, 4, 5], stop="low", max_tokens=5)
    assert (output.text, output.finish_reason, output.stop_reason) == ("hello world!", "length", None)


def test_a_character_of_several_tokens_is_text_once_it_is_whole() -> None:
    letters = "a€b".encode()  # the second takes three bytes

    def decode(token_ids: Sequence[int]) -> str:
        return bytes(letters[token - 1] for token in token_ids).decode(errors="replace")

    output = end_of([1, 2, 3, 4, 5], decode, stop="€", max_tokens=5)
    assert (output.token_ids, output.text, output.stop_reason) == ((1, 2, 3, 4), "a", "€")
    output = end_of([1, 2, 3, 4, 5], decode, stop="b", max_tokens=5)
    assert (output.token_ids, output.text) == ((1, 2, 3, 4, 5), "a€")
    output = end_of([1, 2, 3, 4, 5], decode, stop="\ufffd", max_tokens=5)
    assert (output.text, output.finish_reason) == ("a€b", "length")


def test_a_decoder_that_drops_the_first_space_does_not_shift_the_text() -> None:
    """As sentencepiece does: only the difference of two decodings is new text, and the prompt has the first space."""
    words = ["", " one", " two", " three"]

    def decode(token_ids: Sequence[int]) -> str:
        return "".join(words[token] for token in token_ids).removeprefix(" ")

    output = end_of([1, 2, 3, 1, 2, 3, 1, 2, 3, 1], decode, stop="three one two three one two thr")
    assert (output.text, len(output.token_ids)) == (" one two ", 9)


def test_a_stop_token_is_kept_and_named_while_the_end_of_sequence_is_not_named() -> None:
    output = end_of([1, 2, 3], stop_token_ids=[2])
    assert (output.token_ids, output.text) == ((1, 2), "hell")
    assert (output.finish_reason, output.stop_reason) == ("stop", 2)
    output = end_of([1, 9, 3], decode=None)
    assert (output.token_ids, output.finish_reason, output.stop_reason, output.text) == ((1, 9), "stop", None, "")


def test_ignore_eos_goes_on_but_a_stop_token_still_ends_it() -> None:
    output = end_of([9, 1, 9, 2], decode=None, ignore_eos=True, max_tokens=4)
    assert (output.token_ids, output.finish_reason) == ((9, 1, 9, 2), "length")
    output = end_of([9, 1, 9, 2], decode=None, ignore_eos=True, stop_token_ids=[9])
    assert (output.token_ids, output.stop_reason) == ((9,), 9)


def test_min_tokens_holds_back_stop_strings_stop_tokens_and_the_end_of_sequence() -> None:
    output = end_of([2, 2, 2, 2], stop="ll", stop_token_ids=[2], min_tokens=3)
    assert (output.token_ids, output.stop_reason) == ((2, 2, 2), 2)
    output = end_of([2, 1, 3, 2], stop="ll", min_tokens=3)
    assert (output.token_ids, output.stop_reason, output.text) == ((2, 1, 3, 2), "ll", "llheo w")
    output = end_of([9, 9, 9, 9], decode=None, min_tokens=2)
    assert output.token_ids == (9, 9)


def test_what_would_stop_before_min_tokens_is_forbidden_to_the_sampler() -> None:
    bench = Bench(replace(CONFIG, eos_token_ids=(9,)), [[1, 2, 3]])
    bench.serve([1], SamplingParams(min_tokens=2, stop_token_ids=[7], max_tokens=3))
    assert [set(i.forbidden_token_ids) for i in bench.sampled] == [{7, 9}, {7, 9}, set()]
    bench = Bench(replace(CONFIG, eos_token_ids=(9,)), [[1, 2, 3]])
    bench.serve([1], SamplingParams(min_tokens=2, stop_token_ids=[7], max_tokens=3, ignore_eos=True))
    assert [set(i.forbidden_token_ids) for i in bench.sampled] == [{7}, {7}, set()]


def test_a_bad_word_forbids_its_last_token_where_the_output_ends_with_the_others() -> None:
    """And a word of one token is forbidden always. The prompt does not count."""
    bench = Bench(script=[[1, 2, 1, 2, 3]], decode=join, encode=encode_as({"a": [5], "b": [2, 1, 7], " b": [1, 9]}))
    bench.serve([2, 1], SamplingParams(bad_words=["a", "b"], max_tokens=5))
    assert [set(i.forbidden_token_ids) for i in bench.sampled] == [{5}, {5, 9}, {5}, {5, 7, 9}, {5}]


def test_bad_words_that_the_model_cannot_generate_are_left_out() -> None:
    """With a token beyond its vocabulary, or with none."""
    bench = Bench(decode=join, encode=encode_as({"a": [], " a": [20], "b": [3, 20], " b": [4]}))
    bench.serve([1], SamplingParams(bad_words=[" a", "b"], max_tokens=1))
    assert [i.forbidden_token_ids for i in bench.sampled] == [(4,)]


def encode_as(texts: dict[str, list[int]]) -> Encode:
    """A tokenizer that knows these texts; all others have no tokens."""

    def encode(text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return texts.get(text, [])

    return encode


def test_only_the_last_tokens_of_a_prompt_are_taken_where_it_is_to_be_truncated() -> None:
    prompts: list[Any] = [list(range(15)), tuple(range(15)), np.arange(15)]
    for prompt in prompts:
        output = Bench().serve(prompt, SamplingParams(truncate_prompt_tokens=3, max_tokens=1), text="all of it")
        assert (output.prompt_token_ids, output.prompt) == ((12, 13, 14), "all of it")
    long = Bench().serve([1] * 99, SamplingParams(truncate_prompt_tokens=5, max_tokens=1))
    assert long.prompt_token_ids == (1,) * 5
    short = Bench().serve([1, 2], SamplingParams(truncate_prompt_tokens=5, max_tokens=1))
    assert short.prompt_token_ids == (1, 2)


def test_special_tokens_are_shown_where_they_are_not_to_be_skipped() -> None:
    """On the way, at the end, and where nobody reads along."""

    def decode(token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join("" if token == 9 and skip_special_tokens else str(token) for token in token_ids)

    for stop in ((), "none"):
        for shown, text in ((True, "129"), (False, "12")):
            output = end_of([1, 2, 9], decode, skip_special_tokens=not shown, stop=stop)
            assert (output.text, output.finish_reason) == (text, "stop")


def test_a_sequence_ends_at_max_tokens_or_at_max_model_len() -> None:
    for max_tokens, length in ((3, 3), (None, 8), (100, 8)):
        bench = Bench(replace(CONFIG, max_model_len=10))
        output = bench.serve([1, 2], SamplingParams(max_tokens=max_tokens)).outputs[0]
        assert (len(output.token_ids), output.finish_reason) == (length, "length")


# --- What comes back ------------------------------------------------------------------------------


def test_an_output_has_the_prompt_the_text_and_the_times() -> None:
    output = Bench(script=[[1, 2, 3, 4]], decode=join).serve([5], SamplingParams(max_tokens=4), text="!")
    assert (output.prompt, output.prompt_token_ids, output.finished) == ("!", (5,), True)
    assert output.outputs[0].text == "hello world"
    times = output.metrics
    assert times.first_scheduled_time is not None
    assert times.first_token_time is not None
    assert times.arrival_time <= times.first_scheduled_time <= times.first_token_time <= times.finished_time


def test_every_token_has_its_logprobs_when_they_are_asked_for() -> None:
    for asked, most in ((0, 1), (2, 3)):
        output = Bench().serve([1], SamplingParams(logprobs=asked, max_tokens=4, seed=3)).outputs[0]
        assert output.logprobs is not None
        assert len(output.logprobs) == 4
        for token, logprobs in zip(output.token_ids, output.logprobs, strict=True):
            assert token in logprobs
            assert max(asked, 1) <= len(logprobs) <= most
        chosen = [logprobs[token] for token, logprobs in zip(output.token_ids, output.logprobs, strict=True)]
        assert output.cumulative_logprob == pytest.approx(sum(chosen))
    assert Bench().serve([1], SamplingParams(max_tokens=4)).outputs[0].logprobs is None


def test_n_sequences_are_streams_0_to_n_minus_1_of_one_seed_in_this_order() -> None:
    """Each ends when it does; the outputs are in order of the streams all the same."""
    bench = Bench(replace(CONFIG, eos_token_ids=(9,)), [[1, 1, 1, 9], [9], [2, 2, 9]])
    output = bench.serve([5], SamplingParams(n=3, seed=7, max_tokens=8))
    assert [o.index for o in output.outputs] == [0, 1, 2]
    assert [o.token_ids for o in output.outputs] == [(1, 1, 1, 9), (9,), (2, 2, 9)]
    assert [o.cumulative_logprob for o in output.outputs] == [-2.0, -0.5, -1.5]
    assert {i.seed for i in bench.sampled} == {7}
    assert [i.stream for i in bench.sampled] == [0, 1, 2, 0, 2, 0, 2, 0]
    assert {i.row for i in bench.sampled[:3]} == {0}, "the first tokens come from the one row of the prompt"


def test_requests_without_a_seed_get_different_ones_but_the_same_again_in_the_next_run() -> None:
    seeds = []
    for _ in range(2):
        bench = Bench()
        for _ in range(3):
            bench.serve([1], SamplingParams(max_tokens=1))
        seeds.append([i.seed for i in bench.sampled])
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 3


def test_a_refused_request_does_not_change_what_later_ones_generate() -> None:
    """Atomic-failure: the seeds that requests without one get are not used up by it."""
    seeds = []
    for refused in (False, True):
        bench = Bench()
        if refused:
            with pytest.raises(InvalidRequest):
                bench.engine.add_request([1] * 33, SamplingParams(max_tokens=1))
        bench.serve([1], SamplingParams(max_tokens=1))
        seeds += [i.seed for i in bench.sampled]
    assert seeds[0] == seeds[1]


def test_a_cancelled_request_returns_what_it_has_generated() -> None:
    bench = Bench(script=[[1, 2, 3, 4, 5]], decode=join)
    name = bench.engine.add_request([5], SamplingParams())
    for _ in range(3):
        assert ended(bench.engine.step()) == []
    bench.engine.abort(name)
    [output] = ended(bench.engine.step())
    assert (output.finished, output.outputs[0].finish_reason) == (False, "abort")
    assert (output.outputs[0].token_ids, output.outputs[0].text) == ((1, 2, 3), "hello w")


def test_prompt_tokens_from_the_prefix_cache_are_counted() -> None:
    bench = Bench()
    assert bench.serve(list(range(10)), SamplingParams(max_tokens=1)).num_cached_tokens == 0
    assert bench.serve(list(range(10)), SamplingParams(max_tokens=1)).num_cached_tokens == 9  # all but one
    assert bench.engine.stats.prefix_cache_hit_tokens == 9
    assert bench.engine.stats.prefix_cache_query_tokens == 20


# --- Statistics, by hand --------------------------------------------------------------------------


def test_the_statistics_of_two_samples_of_one_prompt() -> None:
    """Six prompt tokens in blocks of four, two samples of three tokens, nothing cached.

    step   blocks held              table entries   slots filled   unfilled   contiguous, 20 slots each
    1      [pppp][pp..]             2               6              2          6 of 20
    2      [pppp][ppa.][ppb.]       2 + 2           4 + 3 + 3      1 + 1      7 + 7 of 40
    3      [pppp][ppaa][ppbb]       2 + 2           12             0          8 + 8 of 40
    """
    config = replace(CONFIG, enable_prefix_caching=False, max_model_len=20)
    bench = Bench(config)
    bench.serve([1, 2, 3, 4, 5, 6], SamplingParams(n=2, max_tokens=3))
    stats = bench.engine.stats
    assert (stats.steps, stats.query_tokens, stats.generated_tokens, stats.finished_requests) == (3, 10, 6, 1)
    assert (stats.blocks_total, stats.blocks_used, stats.peak_blocks_used, stats.blocks_copied) == (8, 3, 3, 1)
    assert stats.blocks_saved == 1
    assert (stats.block_steps, stats.table_entry_steps) == (8, 10)
    assert stats.share_saved == pytest.approx(0.2)
    assert (stats.paged.tokens, stats.paged.reserved, stats.paged.internal_fragmentation) == (28, 0, 4)
    assert stats.paged.share_of_tokens() == pytest.approx(28 / 32)
    # Reserved: of the 8 slots that each came to fill, 2 and 1 were still empty for the first, 1 for the second.
    assert stats.contiguous.tokens == 36
    assert stats.contiguous.reserved == 4
    assert stats.contiguous.taken == 5 * 20
    assert stats.contiguous.share_of_tokens() == pytest.approx(0.36)


def test_the_statistics_of_a_fresh_engine_are_numbers() -> None:
    stats = Bench().engine.stats
    assert (stats.share_saved, stats.paged.share_of_tokens()) == (0.0, 1.0)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_the_statistics_of_preemption(mode: Any) -> None:
    config = replace(CONFIG, num_blocks=6, num_swap_blocks=8, preemption=mode, enable_prefix_caching=False)
    bench = Bench(config)
    for name in ("first", "second"):
        bench.engine.add_request([1] * 8, SamplingParams(max_tokens=12, ignore_eos=True), request_id=name)
    while bench.engine.has_unfinished_requests():
        bench.engine.step()
    stats = bench.engine.stats
    preemptions = [event for event in bench.events if isinstance(event, RequestPreempted)]
    assert preemptions
    if mode == "swap":
        assert stats.preempted_by_swap == len(preemptions)
        assert stats.blocks_swapped_out == stats.blocks_swapped_in == sum(event.num_blocks for event in preemptions)
        assert (stats.preempted_by_recompute, stats.tokens_recomputed) == (0, 0)
    else:
        assert stats.preempted_by_recompute == len(preemptions)
        assert stats.tokens_recomputed == sum(event.num_tokens for event in preemptions)
        assert (stats.preempted_by_swap, stats.blocks_swapped_out, stats.blocks_swapped_in) == (0, 0, 0)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("stop", [7], r"stop is \[7\]; it must hold strings"),
        ("temperature", "hot", "temperature is 'hot'; it must be a number"),
        ("top_p", True, "top_p is True; it must be a number"),
        ("stop_token_ids", ["a"], r"stop_token_ids is \['a'\]; token ids are whole numbers"),
        ("stop_token_ids", 5, "stop_token_ids is 5; token ids are whole numbers"),
        ("stop", 5, "stop is 5; it must hold strings"),
        ("allowed_token_ids", [1, 2.0], r"allowed_token_ids is \[1, 2.0\]; token ids are whole numbers"),
        ("allowed_token_ids", 5, "allowed_token_ids is 5; token ids are whole numbers"),
        ("allowed_token_ids", [], "allowed_token_ids is empty, which leaves nothing to choose; None allows all"),
        ("bad_words", [7], r"bad_words is \[7\]; it must hold strings"),
        ("bad_words", ["a", ""], "bad_words holds an empty string; drop it"),
        ("logit_bias", 5, r"logit_bias is 5; it must map tokens to numbers, as in \{42: -100.0\}"),
        ("logit_bias", [1, 2], r"logit_bias is \[1, 2\]; it must map tokens to numbers"),
        ("logit_bias", {"5": 1}, "logit_bias has the key '5'; token ids are whole numbers"),
        ("logit_bias", {True: 1}, "logit_bias has the key True; token ids are whole numbers"),
        ("logit_bias", {5: 100.5}, "logit_bias of token 5 is 100.5; it must be a number between -100 and 100"),
        ("logit_bias", {5: float("nan")}, "logit_bias of token 5 is nan; it must be a number between -100 and 100"),
        ("logit_bias", {5: "1"}, "logit_bias of token 5 is '1'; it must be a number between -100 and 100"),
    ],
)
def test_sampling_params_of_the_wrong_type_are_refused_by_name_and_value(name: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{message}"):
        SamplingParams(**{name: value})


def test_none_and_numpys_numbers_are_taken_where_vllm_takes_them() -> None:
    params = SamplingParams(
        stop=None,  # type: ignore[arg-type]
        stop_token_ids=None,  # type: ignore[arg-type]
        seed=np.int64(5),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
    )
    assert (params.stop, params.stop_token_ids, params.seed, params.temperature) == ((), (), 5, 0.5)
    assert type(params.seed) is int
    assert type(params.temperature) is float


def test_params_can_be_hashed_and_taken_apart_whatever_they_were_made_of() -> None:
    """Equal ones are equal, in whichever order a mapping has them; and a copy may be made of their own values."""
    params = SamplingParams(logit_bias={9: 1, np.int64(2): -0.5}, allowed_token_ids=range(3), bad_words=["a b"])
    assert params.logit_bias == ((2, -0.5), (9, 1.0))
    same = SamplingParams(logit_bias={2: -0.5, 9: 1}, allowed_token_ids=(0, 1, 2), bad_words="a b")
    assert params == same == replace(params)
    assert len({params, same, replace(params, logit_bias=None)}) == 2  # type: ignore[arg-type]


@settings(max_examples=examples(150))
@given(prompt=st.integers(1, 20), max_tokens=st.integers(1, 12), n=st.integers(1, 4), block_size=st.integers(1, 9))
def test_a_request_is_refused_exactly_when_the_pool_is_smaller_than_what_it_comes_to_hold(
    prompt: int, max_tokens: int, n: int, block_size: int
) -> None:
    """Liveness from above, and from below: NEVER is not said too often either."""
    params = SamplingParams(n=n, max_tokens=max_tokens, ignore_eos=True, seed=1)
    request = WorkloadRequest(0, tuple(i % 7 for i in range(prompt)), params)
    config = EngineConfig(
        num_blocks=200, max_model_len=40, vocab_size=7, block_size=block_size, enable_prefix_caching=False
    )
    ample = WorkloadRun(Workload(config, (request,), swap_is_cheap=True))
    ample.to_the_end()
    peak = ample.engine.stats.peak_blocks_used
    exact = WorkloadRun(Workload(replace(config, num_blocks=peak), (request,), swap_is_cheap=True))
    exact.to_the_end()
    assert not exact.refused
    if peak > 1:
        short = WorkloadRun(Workload(replace(config, num_blocks=peak - 1), (request,), swap_is_cheap=True))
        short.to_the_end()
        assert short.refused


def test_a_clock_may_begin_at_zero() -> None:
    """A simulated one does. What happened then, happened then."""
    now = iter(range(1000))
    config = EngineConfig(num_blocks=8, max_model_len=20, vocab_size=11)
    engine = Engine(config, REFERENCE, ContentRunner(8, 0, 16, 11), clock=lambda: max(0.0, next(now) - 1.0))
    engine.add_request([1, 2], SamplingParams(max_tokens=6, ignore_eos=True))
    updates = [update for _ in range(6) for update in engine.step()]
    [output] = [update.output for update in updates if update.output]
    assert output.metrics.arrival_time == output.metrics.first_scheduled_time == 0.0
    assert output.metrics.finished_time > 0
