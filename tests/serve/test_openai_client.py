"""The real `openai` client against the server: every field, streaming and not, sync and async."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from minipaged.llm import LLM, LoadedModel
from minipaged.params import BeamSearchParams, SamplingParams
from tests.serve.harness import Served

if TYPE_CHECKING:
    import openai  # at run time by the tests that need it: it takes two seconds, in each process that collects tests

PROMPT = "The block table"
MESSAGES: Any = [{"role": "user", "content": "What is a page?"}]


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    import openai

    with openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def offline(tiny: LoadedModel) -> LLM:
    return LLM(tiny, num_blocks=256)


def text_of(chunks: Any) -> str:
    return "".join(choice.text for chunk in chunks for choice in chunk.choices)


def test_a_completion_is_what_generate_gives(client: openai.OpenAI, offline: LLM) -> None:
    given: dict[str, Any] = {
        "temperature": 0.7,
        "top_p": 0.9,
        "seed": 11,
        "max_tokens": 12,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
    }
    beyond: dict[str, Any] = {"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1, "ignore_eos": True}
    beyond |= {"min_tokens": 3}
    answer = client.completions.create(model="tiny", prompt=PROMPT, **given, extra_body=beyond)
    [output] = offline.generate([PROMPT], SamplingParams(**given, **beyond))
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.model == "tiny"
    [choice] = answer.choices
    assert (choice.index, choice.text, choice.finish_reason) == (0, output.outputs[0].text, "length")
    usage = answer.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (len(PROMPT), 12, len(PROMPT) + 12)


def test_the_pieces_of_a_stream_are_the_whole(client: openai.OpenAI) -> None:
    given: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 20, "n": 2, "seed": 1}
    whole = client.completions.create(**given)
    chunks = list(client.completions.create(**given, stream=True, stream_options={"include_usage": True}))
    for index in (0, 1):
        assert "".join(c.text for chunk in chunks for c in chunk.choices if c.index == index) == (
            whole.choices[index].text
        )
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    ends = [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason]
    assert ends == [choice.finish_reason for choice in whole.choices]


def test_usage_may_come_with_every_piece(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=5, stream=True, stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in stream if chunk.usage]
    assert counts == sorted(counts)
    assert counts[-1] == 5


@pytest.mark.parametrize("prompt", ["text", ["a", "b c"], [5, 6, 7], [[5, 6], [7]]], ids=str)
def test_a_prompt_is_text_or_tokens_one_or_several(client: openai.OpenAI, prompt: Any) -> None:
    answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=3, n=2, temperature=0)
    num_prompts = 1 if isinstance(prompt, str) or isinstance(prompt[0], int) else len(prompt)
    assert [choice.index for choice in answer.choices] == list(range(2 * num_prompts))
    stream = list(client.completions.create(model="tiny", prompt=prompt, max_tokens=3, n=2, temperature=0, stream=True))
    for choice in answer.choices:
        pieces = [c.text for chunk in stream for c in chunk.choices if c.index == choice.index]
        assert "".join(pieces) == choice.text


def test_logprobs_of_a_completion(client: openai.OpenAI, offline: LLM) -> None:
    given: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "logprobs": 2}
    by_id = {"return_tokens_as_token_ids": True}  # the texts of two tokens may be the same
    answer = client.completions.create(**given, extra_body=by_id)
    [output] = offline.generate([PROMPT], SamplingParams(max_tokens=4, temperature=0, logprobs=2))
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    own = output.outputs[0]
    assert own.logprobs is not None
    chosen = [of[token] for token, of in zip(own.token_ids, own.logprobs, strict=True)]
    assert logprobs.token_logprobs == pytest.approx(chosen)
    assert logprobs.tokens is not None
    assert logprobs.tokens == [f"token_id:{token}" for token in own.token_ids]
    decode = offline.need_tokenizer().decode
    assert logprobs.text_offset == [len(decode(own.token_ids[:i]).rstrip("\ufffd")) for i in range(4)]
    assert logprobs.top_logprobs is not None
    assert [len(one) for one in logprobs.top_logprobs] == [2] * 4
    stream = client.completions.create(**given, extra_body=by_id, stream=True)
    streamed = [c.logprobs for chunk in stream for c in chunk.choices if c.logprobs]
    assert [token for one in streamed for token in one.tokens or ()] == logprobs.tokens


def test_echo_gives_the_prompt_back_with_its_logprobs(client: openai.OpenAI, offline: LLM) -> None:
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=2, temperature=0, echo=True, logprobs=1)
    [choice] = answer.choices
    assert choice.text.startswith(PROMPT)
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert len(choice.logprobs.token_logprobs) == len(PROMPT) + 2
    assert choice.logprobs.token_logprobs[0] is None
    # As each token's own when it is generated: the model said the same of it then.
    allowed = offline.need_tokenizer().encode(PROMPT)[5]
    [forced] = offline.generate(
        [PROMPT[:5]], SamplingParams(max_tokens=1, logprobs=0, allowed_token_ids=[allowed], temperature=0)
    )
    assert forced.outputs[0].logprobs is not None
    assert choice.logprobs.token_logprobs[5] == pytest.approx(forced.outputs[0].logprobs[0][allowed], abs=1e-4)


def test_echo_of_nothing_but_the_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=0, echo=True, logprobs=0)
    [choice] = answer.choices
    assert choice.text == PROMPT
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens) == PROMPT
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    stream = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=2, temperature=0, echo=True, stream=True)
    assert text_of(stream).startswith(PROMPT)


def test_an_echo_is_what_was_given(client: openai.OpenAI) -> None:
    """Also as tokens of which several are one character, and where only the end of it is taken."""
    text = "é🎉ü"
    ids = client.post("/../tokenize", body={"prompt": text}, cast_to=dict)["tokens"]
    given: dict[str, Any] = {"model": "tiny", "max_tokens": 0, "echo": True, "logprobs": 1}
    by_id = {"return_tokens_as_token_ids": True}  # the texts of two tokens may be the same
    assert client.completions.create(prompt=ids, **given).choices[0].text == text
    cut = client.completions.create(prompt="hello world", **given, extra_body={"truncate_prompt_tokens": 2})
    assert cut.choices[0].text == "ld"
    [choice] = client.completions.create(prompt="hello", **given, extra_body={"prompt_logprobs": 3, **by_id}).choices
    assert choice.model_extra is not None
    assert all(1 <= len(one) <= 2 for one in choice.logprobs.top_logprobs[1:])  # type: ignore[union-attr, index]
    assert all(3 <= len(one) <= 4 for one in choice.model_extra["prompt_logprobs"][1:])
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=2, extra_body={"echo": True})
    assert not (answer.choices[0].message.content or "").startswith("What is")


def test_a_completion_of_16_tokens_if_it_does_not_say(client: openai.OpenAI) -> None:
    for given in ({}, {"max_tokens": None}):
        answer = client.completions.create(model="tiny", prompt=PROMPT, extra_body={"ignore_eos": True, **given})
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 16


def test_stop_strings_end_it_and_never_show(client: openai.OpenAI, offline: LLM) -> None:
    [output] = offline.generate([PROMPT], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    text = output.outputs[0].text
    stop = text[8:11]
    given: dict[str, Any] = {
        "model": "tiny",
        "prompt": PROMPT,
        "temperature": 0,
        "max_tokens": 30,
        "stop": [stop, "@@"],
    }
    beyond = {"ignore_eos": True}
    answer = client.completions.create(**given, extra_body=beyond)
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].model_extra is not None
    assert answer.choices[0].model_extra["stop_reason"] == stop
    assert text_of(client.completions.create(**given, extra_body=beyond, stream=True)) == answer.choices[0].text
    kept = client.completions.create(**given, extra_body=beyond | {"include_stop_str_in_output": True})
    assert kept.choices[0].text == text[: text.index(stop)] + stop


def test_biases_and_bans(client: openai.OpenAI) -> None:
    given: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 4}
    ids: dict[str, Any] = {"ignore_eos": True, "return_token_ids": True}

    def tokens(**options: Any) -> list[int]:
        beyond = options.pop("extra_body", {})
        answer = client.completions.create(**given, **options, extra_body=ids | beyond)
        assert answer.choices[0].model_extra is not None
        return list(answer.choices[0].model_extra["token_ids"])

    assert tokens(logit_bias={"77": 100}) == [77] * 4
    assert tokens(extra_body={"allowed_token_ids": [80]}) == [80] * 4
    letters = {"allowed_token_ids": client.post("/../tokenize", body={"prompt": "ab"}, cast_to=dict)["tokens"]}
    first = tokens(extra_body=letters)[0]
    assert tokens(logit_bias={str(first): -100}, extra_body=letters)[0] != first
    letter = client.post("/../detokenize", body={"tokens": [first]}, cast_to=dict)["prompt"]
    assert tokens(extra_body=letters | {"bad_words": [letter]})[0] != first


def test_beam_search(client: openai.OpenAI, offline: LLM) -> None:
    beams = {"use_beam_search": True, "length_penalty": 0.5}
    answer = client.completions.create(model="tiny", prompt=PROMPT, n=3, max_tokens=6, extra_body=beams)
    [output] = offline.beam_search([PROMPT], BeamSearchParams(beam_width=3, max_tokens=6, length_penalty=0.5))
    assert [choice.text for choice in answer.choices] == [one.text for one in output.outputs]


def test_prompt_logprobs_are_vllms(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=1, extra_body={"prompt_logprobs": 2})
    assert answer.choices[0].model_extra is not None
    first, *others = answer.choices[0].model_extra["prompt_logprobs"]
    assert first is None
    for token, one in zip(("6", "7"), others, strict=True):
        assert token in one
        assert {entry["rank"] for entry in one.values()} >= {1, 2}
        assert all(entry["logprob"] <= 0 for entry in one.values())


# --- Chat -----------------------------------------------------------------------------------------


def test_a_chat_is_what_llm_chat_gives(client: openai.OpenAI, offline: LLM) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, max_tokens=10)
    [output] = offline.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=10))
    [choice] = answer.choices
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert choice.message.role == "assistant"
    assert choice.message.content == output.outputs[0].text
    assert choice.finish_reason == output.outputs[0].finish_reason
    newer = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, max_completion_tokens=10)
    assert newer.choices[0].message.content == choice.message.content


def test_a_chat_streams_its_role_and_then_its_content(client: openai.OpenAI) -> None:
    given: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 10}
    whole = client.chat.completions.create(**given)
    chunks = list(client.chat.completions.create(**given, stream=True, stream_options={"include_usage": True}))
    assert (chunks[0].choices[0].delta.role, chunks[0].choices[0].delta.content) == ("assistant", "")
    text = "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage is not None


def test_a_chat_says_what_was_found_in_the_cache(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "A long question about pages, which is asked twice. " * 3}]
    for expects_hit in (False, True):
        answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=2)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        num_found = answer.usage.prompt_tokens_details.cached_tokens  # the template's first words may be there before
        assert (num_found == answer.usage.prompt_tokens - 1) == expects_hit


def test_logprobs_of_a_chat(client: openai.OpenAI) -> None:
    given: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 3}
    answer = client.chat.completions.create(**given, logprobs=True, top_logprobs=2)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert len(content) == 3
    for one in content:
        assert one.bytes is not None
        assert bytes(one.bytes).decode(errors="replace") == one.token
        assert len(one.top_logprobs) == 2
        assert one.top_logprobs[0].logprob == pytest.approx(one.logprob)  # greedy: the likeliest
        assert math.exp(one.logprob) <= 1
    plain = client.chat.completions.create(**given, logprobs=True)
    assert plain.choices[0].logprobs is not None
    assert plain.choices[0].logprobs.content is not None
    assert plain.choices[0].logprobs.content[0].top_logprobs == []


def test_a_message_may_be_continued_and_echoed(client: openai.OpenAI) -> None:
    messages: Any = [*MESSAGES, {"role": "assistant", "content": "A page is"}]
    goes_on = {"add_generation_prompt": False, "continue_final_message": True, "echo": True}
    answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=3, extra_body=goes_on)
    assert (answer.choices[0].message.content or "").startswith("A page is")


def test_content_may_come_in_parts_of_text(client: openai.OpenAI) -> None:
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "What is a page?"}]}]
    given: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 5}
    assert (
        client.chat.completions.create(messages=parts, **given).choices[0].message.content
        == client.chat.completions.create(messages=MESSAGES, **given).choices[0].message.content
    )


def test_the_models(client: openai.OpenAI) -> None:
    import openai

    [model] = client.models.list()
    assert model.id == "tiny"
    assert model.owned_by == "minipaged"
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


# --- What is not there ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"extra_body": {"structured_outputs": {"structural_tag": "a"}}}, "structural_tag"),
        ({"extra_body": {"lora_request": {"name": "a"}}}, "lora_request"),
        ({"extra_body": {"best_of": 3}}, "best_of"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "image_url"),
        ({"extra_body": {"chat_template": "{{ 1 }}"}}, "chat_template"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "extra_body": {"prompt_logprobs": 1}}, "prompt_logprobs"),
        ({"stream": True, "extra_body": {"use_beam_search": True}}, "beam search"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"extra_body": {"continue_final_message": True}}, "continue_final_message"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "n:"),
        ({"messages": []}, "messages"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_there_is_refused_by_name(client: openai.OpenAI, given: Any, names: str) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match=names):
        client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES} | given)


def test_an_unknown_model_and_an_unknown_endpoint_are_404(client: openai.OpenAI) -> None:
    import openai

    with pytest.raises(openai.NotFoundError, match="'other'") as caught:
        client.completions.create(model="other", prompt=PROMPT)
    assert caught.value.param == "model"
    with pytest.raises(openai.NotFoundError, match="embeddings"):
        client.embeddings.create(model="tiny", input="x")


def test_asynchronous_streams_side_by_side_give_what_each_gives_alone(server: Served, client: openai.OpenAI) -> None:
    import openai

    prompts = [f"Prompt number {i}" for i in range(12)]
    given: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "temperature": 0.9, "seed": 5}
    alone = [client.completions.create(prompt=prompt, **given).choices[0].text for prompt in prompts]

    async def one(client: openai.AsyncOpenAI, prompt: str) -> str:
        chunks = await client.completions.create(prompt=prompt, **given, stream=True)
        return "".join([choice.text async for chunk in chunks for choice in chunk.choices])

    async def work() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as client:
            return await asyncio.gather(*(one(client, prompt) for prompt in prompts))

    assert asyncio.run(work()) == alone
