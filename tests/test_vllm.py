"""Code that is written for vLLM runs with its import changed, and what there is not here is refused by name."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

import minipaged
from minipaged import (
    LLM,
    BeamSearchParams,
    CompletionOutput,
    InvalidRequest,
    RequestOutput,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)
from minipaged.api import vllm_arguments
from minipaged.api.vllm_arguments import (
    CHAT_ARGUMENTS,
    GENERATE_ARGUMENTS,
    LLM_ARGUMENTS,
    PROMPT_KEYS,
    SAMPLING_ARGUMENTS,
    NotHere,
)
from minipaged.llm import LoadedModel
from minipaged.params import TruncationSide, truncated

PAGE = (Path(minipaged.__file__).parent.parent / "docs" / "vllm.md").read_text()
GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture(scope="module")
def loaded(tiny_model: Path) -> LoadedModel:
    return LoadedModel.load(tiny_model, "reference")


@pytest.fixture
def llm(loaded: LoadedModel) -> LLM:
    return LLM(loaded, num_blocks=64, block_size=4)


def first_tokens(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_tools_reach_the_template(llm: LLM) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    template = "{{ tools[0]['function']['name'] }} {{ messages[0]['content'] }}"
    [output] = llm.chat([{"role": "user", "content": "x"}], GREEDY, tools=tools, chat_template=template)
    assert llm.need_tokenizer().decode(output.prompt_token_ids) == "f x"
    with pytest.raises(InvalidRequest, match=r"^tools are given, and the model's chat template does not mention them"):
        llm.chat([{"role": "user", "content": "x"}], GREEDY, tools=tools)


# --- The page -------------------------------------------------------------------------------------


def rows_below(heading: str) -> list[list[str]]:
    """The first table below a heading of the page: its rows, without the head."""
    lines = PAGE.partition(f"\n{heading}\n")[2].splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("|"))
    last = next(i for i in range(first, len(lines)) if not lines[i].startswith("|"))
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[first + 2 : last]]


def names_in(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


@pytest.mark.parametrize("call", [LLM, LLM.generate, LLM.chat, LLM.beam_search])
def test_the_page_has_every_argument(call: Callable[..., Any]) -> None:
    """Of the second column each is one of ours, and each of ours is there; of the first none is refused."""
    name = "LLM" if call is LLM else f"LLM.{call.__name__}"
    parameters = inspect.signature(call).parameters.values()
    ours = {each.name for each in parameters if each.kind is not each.VAR_KEYWORD} - {"self"}
    rows = rows_below(f"## {name}")
    assert {found for row in rows for found in names_in(row[1])} == ours
    for theirs, here, _ in rows:
        if names_in(theirs) == names_in(here):
            assert (
                not {*names_in(theirs)}
                & getattr(vllm_arguments, f"{name.upper().replace('LLM.', '')}_ARGUMENTS").keys()
            )


@pytest.mark.parametrize("name", re.findall(r"^<!-- not here: (\w+) -->$", PAGE, re.MULTILINE))
def test_the_page_has_every_argument_that_there_is_not_and_why(name: str) -> None:
    table: dict[str, NotHere] = getattr(vllm_arguments, name)
    rows = rows_below(f"<!-- not here: {name} -->")
    expected = [[f"`{key}`", ", ".join(f"`{v!r}`" for v in each.let_through), each.why] for key, each in table.items()]
    assert rows == expected


def test_the_page_has_all_tables() -> None:
    tables = {name for name, value in vars(vllm_arguments).items() if isinstance(value, dict) and name.isupper()}
    assert {*re.findall(r"^<!-- not here: (\w+) -->$", PAGE, re.MULTILINE)} == tables
    assert len(tables) == 8


def test_what_the_page_says_is_no_parameter_is_none() -> None:
    missing = {name for row in rows_below("## Parameters") for name in names_in(row[0])}
    assert len(missing) > 5
    assert not missing & {each.name for each in fields(SamplingParams)}


def test_what_the_page_says_is_the_same_in_outputs_is_there() -> None:
    found = {RequestOutput: set[str](), CompletionOutput: set[str]()}
    for kind in found:
        for theirs, here in rows_below("## What comes back"):
            if theirs.startswith(f"`{kind.__name__}.") and here.startswith("the same"):
                found[kind] |= set(re.findall(r"(\w+)`", theirs))
        assert found[kind] <= {each.name for each in fields(kind)}
        assert len(found[kind]) == 6


# --- What is not here -----------------------------------------------------------------------------

REFUSED: dict[str, Any] = {
    "enable_chunked_prefill": False,
    "disable_log_stats": False,
    "trust_remote_code": True,
    "enforce_eager": True,
    "quantization": "awq",
    "generation_config": "auto",
    "tokenizer": "org/another",
}


@pytest.mark.parametrize("name", LLM_ARGUMENTS)
def test_what_asks_for_what_is_done_anyway_is_let_through_and_the_rest_is_refused(name: str, tiny_model: Path) -> None:
    for value in LLM_ARGUMENTS[name].let_through:
        with pytest.raises(minipaged.ModelError):  # it is the model that is looked for then
            LLM("/no/such/model", **{name: value})
    refused = REFUSED.get(name, 77)
    with pytest.raises(InvalidRequest, match=f"^{name} is {refused!r}; {re.escape(LLM_ARGUMENTS[name].why)}"):
        LLM("/no/such/model", **{name: refused})


def test_an_argument_that_nobody_knows_is_refused(llm: LLM) -> None:
    calls: list[Callable[..., Any]] = [LLM, llm.generate, llm.chat, llm.beam_search]
    for call in calls:
        with pytest.raises(TypeError, match=r"got an unexpected keyword argument 'temprature'"):
            call([], temprature=0)


@pytest.mark.parametrize(("call", "known"), [("generate", GENERATE_ARGUMENTS), ("chat", CHAT_ARGUMENTS)])
def test_a_call_refuses_what_there_is_not(llm: LLM, call: str, known: dict[str, NotHere]) -> None:
    asked: Any = {"generate": "a", "chat": [{"role": "user", "content": "a"}]}[call]
    through = {name: value.let_through[0] for name, value in known.items()}
    assert first_tokens(getattr(llm, call)(asked, GREEDY, **through)) == first_tokens(getattr(llm, call)(asked, GREEDY))
    for name, each in known.items():
        with pytest.raises(InvalidRequest, match=re.escape(f"{name} is [{{'a': 1}}]; {each.why}")):
            getattr(llm, call)(asked, GREEDY, **{name: [{"a": 1}]})
    assert not llm.engine.has_unfinished_requests()


SAMPLING_PARAMS_OF_VLLM = """
n presence_penalty frequency_penalty repetition_penalty temperature watermarking top_p top_k min_p seed stop
stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs prompt_logprob_token_ids prompt_logprob_start
logprob_token_ids flat_logprobs detokenize skip_special_tokens spaces_between_special_tokens include_stop_str_in_output
output_kind stream_interval skip_clone output_text_buffer_length structured_outputs logit_bias allowed_token_ids
extra_args bad_words skip_reading_prefix_cache thinking_token_budget repetition_detection routed_experts_prompt_start
trace_decode_token_ids
"""
"""The fields of vLLM 0.33.0's SamplingParams that have no underscore before them."""


@pytest.mark.parametrize("name", SAMPLING_PARAMS_OF_VLLM.split())
def test_each_parameter_of_vllms_is_served_or_refused_by_name(name: str) -> None:
    assert (name in {each.name for each in fields(SamplingParams)}) != (name in SAMPLING_ARGUMENTS)


@pytest.mark.parametrize("name", SAMPLING_ARGUMENTS)
def test_parameters_refuse_what_there_is_not(name: str) -> None:
    for value in SAMPLING_ARGUMENTS[name].let_through:
        assert SamplingParams(n=2, **{name: value}) == SamplingParams(n=2)
    with pytest.raises(InvalidRequest, match=f"^{name} is 77; {re.escape(SAMPLING_ARGUMENTS[name].why)}"):
        SamplingParams(n=2, **{name: 77})


def test_a_parameter_that_nobody_knows_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^SamplingParams\(\) got an unexpected keyword argument 'temprature'"):
        SamplingParams(temprature=0)  # type: ignore[call-arg]
    assert [*inspect.signature(SamplingParams).parameters] == [each.name for each in fields(SamplingParams)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"logprob_token_ids": range(129)}, "^logprob_token_ids holds 129 tokens, and may hold 128; give fewer$"),
        ({"logprob_token_ids": [5, 6], "logprobs": 3}, r"^logprobs is 3, and logprob_token_ids, .* holds 2; leave"),
        ({"logprob_token_ids": [5, 6], "logprobs": 0}, r"^logprobs is 0, and logprob_token_ids"),
        ({"logprob_token_ids": ["a"]}, r"^logprob_token_ids is \['a'\]; token ids are whole numbers$"),
        ({"logprob_token_ids": 5}, "^logprob_token_ids is 5; token ids are whole numbers$"),
        ({"spaces_between_special_tokens": None}, "^spaces_between_special_tokens is None; it must be True or False$"),
    ],
)
def test_parameters_are_checked_as_vllm_checks_them(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        SamplingParams(**given)


def test_tokens_to_report_may_be_given_in_all_ways_that_vllm_takes() -> None:
    for logprobs in (None, 3):
        params = SamplingParams(logprob_token_ids=[7, 5, 7], logprobs=logprobs)
        assert (params.logprob_token_ids, params.num_likeliest) == ((7, 5, 7), 0)
    assert SamplingParams(logprob_token_ids=None) == SamplingParams(logprob_token_ids=[]) == SamplingParams()  # type: ignore[arg-type]
    assert SamplingParams(logprob_token_ids=[], logprobs=2).num_likeliest == 2


@pytest.mark.parametrize(
    ("most", "side", "kept"),
    [
        (None, "left", [1, 2, 3, 4]),
        (9, "left", [1, 2, 3, 4]),
        (4, "right", [1, 2, 3, 4]),
        (3, "left", [2, 3, 4]),
        (3, "right", [1, 2, 3]),
        (0, "left", []),
    ],
)
def test_a_prompt_is_cut_on_the_side_that_is_named(most: int | None, side: TruncationSide, kept: list[int]) -> None:
    assert list(truncated([1, 2, 3, 4], most, side)) == kept


class Tensor:
    """Like a tensor, it is not to be asked whether it is something."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("name", PROMPT_KEYS)
def test_a_prompt_with_more_than_text_is_refused_by_name(llm: LLM, name: str) -> None:
    assert first_tokens(llm.generate({"prompt": "a", name: None}, GREEDY)) == first_tokens(llm.generate("a", GREEDY))  # type: ignore[misc]
    with pytest.raises(InvalidRequest, match=f"^{name} is .*; {re.escape(PROMPT_KEYS[name].why)}"):
        llm.generate({"prompt": "a", name: Tensor()}, GREEDY)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({}, 'must have a "prompt", its text, or "prompt_token_ids"'),
        ({"prompt": None}, 'must have a "prompt", its text, or "prompt_token_ids"'),
        ({"prompt": "a", "promt": "a"}, "but no 'promt'"),
        ({"prompt": 3}, '"prompt" must be a text'),
        ({"prompt": [3, 4]}, '"prompt" must be a text'),
        ({"prompt_token_ids": "abc"}, '"prompt_token_ids" a list of token ids'),
        ({"prompt_token_ids": 3}, "not int: 3"),
        ({"prompt_token_ids": {3: 4}}, "not dict"),
        ({"prompt_token_ids": [3, -1]}, "prompt token 1 is -1"),
        ({"prompt_token_ids": []}, "the prompt is empty"),
    ],
)
def test_a_dict_that_is_no_prompt_is_refused(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        llm.generate(["before it", prompt], GREEDY)
    assert not llm.engine.has_unfinished_requests()


@pytest.mark.parametrize("use_tqdm", [None, 1, lambda *_, **__: None])
def test_a_bar_of_ones_own_is_refused(llm: LLM, use_tqdm: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^use_tqdm is .*; it must be True or False"):
        llm.generate("a", GREEDY, use_tqdm=use_tqdm)


@pytest.mark.parametrize(("is_terminal", "use_tqdm", "shown"), [(True, True, 1), (True, False, 0), (False, True, 0)])
def test_a_bar_is_shown_where_somebody_looks(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, is_terminal: bool, use_tqdm: bool, shown: int
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    seen: list[int] = []
    llm.engine.listeners.append(lambda _: seen.append(len(llm.engine.listeners) - 1))
    llm.generate("a", GREEDY, use_tqdm=use_tqdm)
    assert {*seen} == {shown} | {0}  # the bar listens while requests run, not while they are added
    assert len(llm.engine.listeners) == 1


# --- Settings -------------------------------------------------------------------------------------


def test_swap_space_is_num_swap_blocks_in_gib(loaded: LoadedModel) -> None:
    size = loaded.block_bytes(4)
    sizes: dict[str, Any] = {"num_blocks": 8, "block_size": 4}
    assert LLM(loaded, swap_space=10 * size / 2**30, **sizes).config.num_swap_blocks == 10
    assert LLM(loaded, swap_space=10.9 * size / 2**30, **sizes).config.num_swap_blocks == 10
    assert LLM(loaded, swap_space=0, **sizes).config.num_swap_blocks == 0
    with pytest.raises(InvalidRequest, match=r"swap_space is 1.0 GiB and num_swap_blocks is 4; give one of them"):
        LLM(loaded, swap_space=1, num_swap_blocks=4)
    with pytest.raises(InvalidRequest, match="more than the free memory; lower num_blocks, or num_swap_blocks"):
        LLM(loaded, swap_space=2**20, **sizes)


@pytest.mark.parametrize(("name", "ours"), [("half", "float16"), ("float", "float32")])
def test_a_dtype_may_have_vllms_name(tiny_model: Path, name: str, ours: str) -> None:
    if ours == "float32":
        assert LoadedModel.load(tiny_model, "reference", dtype=name).tier.dtype == ours
    else:
        with pytest.raises(InvalidRequest, match=f"dtype is '{ours}'"):  # no CPU computes in it
            LLM(tiny_model, tier="reference", dtype=name)


@pytest.mark.parametrize("given", [-1, "auto", None])
def test_the_longest_sequence_may_be_left_open_in_vllms_ways(loaded: LoadedModel, given: Any) -> None:
    assert LLM(loaded, num_blocks=8, block_size=4, max_model_len=given).config.max_model_len == 32
    with pytest.raises(InvalidRequest, match="max_model_len is -2; it must be 1 or more"):
        LLM(loaded, max_model_len=-2)


# --- Scripts --------------------------------------------------------------------------------------


def test_the_script_of_the_page_runs(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [script] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert "smollm2-135m-instruct" in script
    script = script.replace("tensor_parallel_size=1", "tensor_parallel_size=1, tier='reference'")  # it compiles nothing
    exec(script.replace("smollm2-135m-instruct", str(tiny_model)), {})
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" -> ")[0] for line in lines] == [
        "'Hello, my name is'",
        "'The capital of France is'",
        "None",
    ]


def test_a_prompt_may_be_written_in_every_way(llm: LLM) -> None:
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode("a prompt")
    prompts: list[Any] = [
        "a prompt",
        ids,
        {"prompt": "a prompt"},
        TextPrompt(prompt="a prompt"),
        {"prompt_token_ids": ids},
        TokensPrompt(prompt_token_ids=ids, prompt="another text"),
    ]
    together = llm.generate(prompts, sampling_params=GREEDY, use_tqdm=False)
    assert len({*first_tokens(together)}) == 1
    assert {output.prompt_token_ids for output in together} == {tuple(ids)}
    texts = ["a prompt", None, "a prompt", "a prompt", None, "another text"]
    assert [output.prompt for output in together] == texts
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in prompts]
    assert first_tokens(alone) == first_tokens(together)
    assert [output.prompt for output in alone] == texts


def test_a_prompt_may_have_a_salt(llm: LLM) -> None:
    """Its tokens are those without one."""
    prompt = "a prompt with a salt"
    prompts = [TextPrompt(prompt=prompt, cache_salt=salt) for salt in ("mine", "theirs", "mine")]
    outputs = [llm.generate(each, GREEDY)[0] for each in prompts]
    assert first_tokens(outputs) == first_tokens(llm.generate([prompt] * 3, GREEDY))
    assert [bool(output.num_cached_tokens) for output in outputs] == [False, False, True]
    ids = outputs[0].prompt_token_ids
    [again] = llm.generate(TokensPrompt(prompt_token_ids=ids, cache_salt="theirs"), GREEDY)
    assert again.num_cached_tokens == outputs[2].num_cached_tokens
    for salt in ("", 3, "\ud800"):
        with pytest.raises(InvalidRequest, match=r"^cache_salt "):
            llm.generate({"prompt": prompt, "cache_salt": salt}, GREEDY)  # type: ignore[typeddict-item]


def test_one_priority_is_for_all(loaded: LoadedModel) -> None:
    llm = LLM(loaded, num_blocks=64, scheduling_policy="priority")
    assert len(llm.generate(["a", "b"], GREEDY, priority=3)) == 2
    with pytest.raises(InvalidRequest, match="2 prompts need 2 priorities; got 1"):
        llm.generate(["a", "b"], GREEDY, priority=[3])


def test_a_priority_that_would_change_nothing_is_refused(llm: LLM) -> None:
    assert len(llm.generate(["a", "b"], GREEDY, priority=0)) == 2
    with pytest.raises(InvalidRequest, match=r"^priority is 1, and this engine's .*scheduling_policy='priority'"):
        llm.generate(["a", "b"], GREEDY, priority=[0, 1])
    assert not llm.engine.has_unfinished_requests()


def test_what_a_script_reads_of_outputs_is_there(llm: LLM) -> None:
    params = SamplingParams(n=2, temperature=0.8, top_p=0.95, max_tokens=6, seed=1, logprobs=2)
    [output] = llm.generate(prompts=["The president of the"], sampling_params=params)
    assert output.finished
    assert output.request_id
    assert output.num_cached_tokens == 0
    assert output.metrics.first_token_time is not None
    for index, completion in enumerate(output.outputs):
        assert (completion.index, completion.finish_reason, completion.stop_reason) == (index, "length", None)
        assert len(completion.token_ids) == 6
        assert completion.logprobs is not None
        assert all(token in each for token, each in zip(completion.token_ids, completion.logprobs, strict=True))


def test_a_chat_script_runs(llm: LLM) -> None:
    conversation = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": [{"type": "text", "text": "Hello,"}, {"type": "text", "text": "who are you?"}]},
    ]
    [output] = llm.chat(conversation, GREEDY, False)
    tokenizer = llm.get_tokenizer()
    plain = [conversation[0], {"role": "user", "content": "Hello,\nwho are you?"}]
    text = tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(output.prompt_token_ids) == text
    assert tokenizer.encode(text, add_special_tokens=False) == list(output.prompt_token_ids)
    both = llm.chat([conversation, plain], sampling_params=[GREEDY, GREEDY], use_tqdm=False)
    assert first_tokens(both) == [output.outputs[0].token_ids] * 2


@dataclass(frozen=True)
class Written:
    """How a chat of two messages is written out, by options."""

    options: dict[str, Any]
    text: str


ASKED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nI am"
WRITTEN = [
    Written({"add_generation_prompt": True}, ASKED + "<|im_end|>\n<|im_start|>assistant\n"),
    Written({"add_generation_prompt": False}, ASKED + "<|im_end|>\n"),
    Written({"add_generation_prompt": False, "continue_final_message": True}, ASKED),
    Written({"chat_template": "{{ messages[1]['content'] }}{{ who }}", "chat_template_kwargs": {"who": "!"}}, "I am!"),
]


@pytest.mark.parametrize("written", WRITTEN)
def test_a_chat_is_written_out_as_asked(llm: LLM, written: Written) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I am"}]
    [output] = llm.chat(messages, GREEDY, **written.options)
    assert llm.get_tokenizer().decode(output.prompt_token_ids) == written.text
    assert llm.encode_chat(messages, **written.options) == list(output.prompt_token_ids)


def test_a_beam_search_script_runs(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=5)
    outputs = llm.beam_search([{"prompt": "Hello, my name is"}, {"prompt_token_ids": [40, 41]}], params)
    assert [len(output.outputs) for output in outputs] == [3, 3]
    assert first_tokens(llm.beam_search([[40, 41]], params, use_tqdm=True)) == first_tokens(outputs)[1:]
