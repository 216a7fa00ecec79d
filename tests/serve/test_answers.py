"""What an answer says of tokens, where the model says nothing else than what the test wants: texts, places, bytes,
log-probabilities; whole and streamed; and which of vLLM's fields there are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest

from minipaged.llm import LoadedModel
from minipaged.serve.protocol import (
    REFUSED,
    WITHOUT_EFFECT,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    StreamOptions,
    TokenizeBody,
)
from tests.models import tokenizers
from tests.serve.harness import Served, served
from tests.tiny_model import CHAT_TEMPLATE, make_successor_model

Json = dict[str, Any]
KINDS = {"byte-level": tokenizers.byte_level, "bytes to fall back to": tokenizers.bpe_with_byte_fallback}
TEXT = "the €é😀the"


@dataclass(frozen=True)
class Case:
    """A server of a model that goes on with TEXT, wherever it is cut."""

    server: Served
    token_ids: list[int]

    def decode(self, token_ids: list[int]) -> str:
        return self.server.allm.llm.need_tokenizer().decode(token_ids)

    def num_characters(self, token_ids: list[int]) -> int:
        """The whole characters of their bytes."""
        bytes_of = self.server.allm.llm.need_tokenizer().token_bytes
        return len(b"".join(map(bytes_of, token_ids)).decode(errors="ignore"))

    def completion(self, prompt: Any, **fields: Any) -> Json:
        """The one choice of an answer."""
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 20, "add_special_tokens": False, **fields}
        answer = self.server.post("/v1/completions", body)
        assert answer.status_code == 200, answer.text
        [choice] = answer.json()["choices"]
        return dict(choice)

    def chunks(self, path: Literal["completions", "chat/completions"], **fields: Any) -> list[Json]:
        answer = self.server.post(f"/v1/{path}", {"temperature": 0, "stream": True, **fields})
        assert answer.status_code == 200, answer.text
        events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        assert events.pop() == "[DONE]"
        return [json.loads(event) for event in events]

    def streamed(self, prompt: Any, **fields: Any) -> Json:
        """The chunks of a completion of one choice, put together."""
        joined: Json = {"text": "", "logprobs": {}, "token_ids": [], "finish_reason": None}
        body = {"prompt": prompt, "max_tokens": 20, "add_special_tokens": False, **fields}
        for chunk in self.chunks("completions", **body):
            for choice in chunk["choices"]:
                joined["text"] += choice["text"]
                joined["finish_reason"] = choice["finish_reason"]
                joined["token_ids"] += choice.get("token_ids", [])
                for name, values in (choice["logprobs"] or {}).items():
                    joined["logprobs"].setdefault(name, []).extend(values)
        return joined


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    made = request.param()
    token_ids = made.encode(TEXT).ids
    folder = tmp_path_factory.mktemp("answers")
    end = made.token_to_id("</s>")
    successors = dict(pairwise(token_ids)) | {made.token_to_id("<s>"): token_ids[0]}
    make_successor_model(folder, made.get_vocab_size(), successors, eos_token_id=end)
    tokenizers.write(made, folder, chat_template=CHAT_TEMPLATE, eos_token="</s>")
    with served(LoadedModel.load(folder, tier="reference"), block_size=4) as running:
        yield Case(running, token_ids)
        running.check_nothing_is_left()


# --- Texts and places -----------------------------------------------------------------------------


def test_a_prompt_echoed_and_what_follows_are_the_text_of_all_tokens_at_every_cut(case: Case) -> None:
    """Text-of-all, over HTTP; whole and streamed."""
    for cut in range(1, len(case.token_ids)):
        prompt, number = case.token_ids[:cut], len(case.token_ids) - cut
        for fields in ({}, {"logprobs": 1}):
            asked = {"echo": True, "max_tokens": number, **fields}
            assert case.completion(prompt, **asked)["text"] == case.decode(case.token_ids)
            assert case.streamed(prompt, **asked)["text"] == case.decode(case.token_ids)


def test_a_token_has_the_place_in_the_text_where_it_begins(case: Case) -> None:
    """Parts of characters that of the character; the same echoed or not, whole or streamed, in whichever words."""
    for cut in range(1, len(case.token_ids)):
        prompt, output = case.token_ids[:cut], case.token_ids[cut:]
        asked: Json = {"max_tokens": len(output), "logprobs": 0}
        begun = case.num_characters(prompt)
        places = [case.num_characters([*prompt, *output[:i]]) - begun for i in range(len(output))]
        shown = len(case.completion(prompt, **asked, echo=True)["text"]) - len(case.completion(prompt, **asked)["text"])
        for more in ({}, {"return_tokens_as_token_ids": True}):
            whole = case.completion(prompt, **asked, **more)
            assert whole["logprobs"]["text_offset"] == places
            assert case.streamed(prompt, **asked, **more)["logprobs"] == whole["logprobs"]
        echoed = case.completion(prompt, echo=True, **asked)["logprobs"]
        assert echoed["text_offset"][cut:] == [shown + place for place in places]
        assert echoed["text_offset"][0] == 0
        assert case.streamed(prompt, echo=True, **asked)["logprobs"] == echoed


def test_whole_characters_stand_where_their_tokens_say(case: Case) -> None:
    choice = case.completion(case.token_ids[:1], echo=True, logprobs=0, max_tokens=len(case.token_ids) - 1)
    logprobs = choice["logprobs"]
    for token, place in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if "\ufffd" not in token and place:
            assert choice["text"].startswith(token, place)


def test_text_that_is_held_back_for_a_stop_string_moves_no_place(case: Case) -> None:
    prompt, number = case.token_ids[:1], len(case.token_ids) - 1
    plain = case.completion(prompt, max_tokens=number, logprobs=0)["logprobs"]["text_offset"]
    never = {"max_tokens": number, "logprobs": 0, "stop": ["€é😀the end", "é😀!"]}
    assert case.completion(prompt, **never)["logprobs"]["text_offset"] == plain
    assert case.streamed(prompt, **never)["logprobs"]["text_offset"] == plain


def test_special_tokens_of_a_prompt_of_tokens_are_echoed_and_counted(case: Case) -> None:
    tokenizer = case.server.allm.llm.need_tokenizer()
    special = tokenizer.encode("<s>", add_special_tokens=False)[0]
    prompt = [case.token_ids[0], special]
    choice = case.completion(prompt, echo=True, logprobs=0, max_tokens=1)
    shown = tokenizer.decode(prompt, skip_special_tokens=False)
    assert "<s>" in shown
    assert choice["text"].startswith(shown)
    assert choice["logprobs"]["text_offset"][2] == len(shown)
    alone = case.completion(prompt, echo=True, logprobs=0, max_tokens=0)
    assert (alone["text"], alone["finish_reason"]) == (shown, "length")


def test_special_tokens_of_a_prompt_of_text_take_no_room_unless_the_text_shows_them(case: Case) -> None:
    for text in ("the<s>the", "the"):
        choice = case.completion(text, echo=True, logprobs=0, max_tokens=1)
        assert choice["logprobs"]["text_offset"][-1] == len(text)


# --- Bytes, names, log-probabilities --------------------------------------------------------------


def test_the_bytes_of_all_tokens_are_the_bytes_of_the_text(case: Case) -> None:
    choice = case.completion(case.token_ids[:1], echo=True, max_tokens=len(case.token_ids) - 1)
    body = {"messages": [{"role": "user", "content": "x"}], "temperature": 0, "max_tokens": len(case.token_ids)}
    template = "{{ '<s>' }}"  # after which the whole text comes
    body |= {"logprobs": True, "top_logprobs": 2}
    case.server.server.serving._trust_chat_templates = True
    for as_ids in (False, True):
        answer = case.server.post(
            "/v1/chat/completions", body | {"chat_template": template, "return_tokens_as_token_ids": as_ids}
        ).json()
        entries = answer["choices"][0]["logprobs"]["content"]
        assert b"".join(bytes(entry["bytes"]) for entry in entries).decode().lstrip() == choice["text"].lstrip()
        for entry in entries:
            assert entry["top_logprobs"][0]["bytes"] == entry["bytes"]


def test_a_single_token_has_its_space(case: Case) -> None:
    choice = case.completion(case.token_ids[:1], logprobs=0, max_tokens=2)
    assert choice["logprobs"]["tokens"][0] == " "
    answer = case.server.post("/tokenize", {"prompt": "the the", "return_token_strs": True}).json()
    vocabulary = case.server.allm.llm.get_tokenizer()
    assert answer["token_strs"] == vocabulary.convert_ids_to_tokens(answer["tokens"])
    assert answer["token_strs"][-1] in ("Ġthe", "▁the")


def test_of_tokens_with_one_text_the_chosen_one_counts_or_else_the_likeliest(case: Case) -> None:
    """Parts of characters all have the text U+FFFD."""
    begins = case.token_ids.index(case.server.allm.llm.need_tokenizer().encode("€", add_special_tokens=False)[-3])
    parts = case.token_ids[begins : begins + 3]
    prompt = case.token_ids[:begins]
    for chosen in parts:
        fields = {"allowed_token_ids": [chosen], "max_tokens": 1, "logprobs": 20}
        logprobs = case.completion(prompt, **fields)["logprobs"]
        [top], [own] = logprobs["top_logprobs"], logprobs["token_logprobs"]
        assert top["\ufffd"] == own
        exact = case.completion(prompt, **fields, return_tokens_as_token_ids=True)["logprobs"]["top_logprobs"][0]
        assert exact[f"token_id:{chosen}"] == own
    a = case.token_ids[0]  # chosen is another token; of the parts the likeliest counts
    logprobs = case.completion(prompt, allowed_token_ids=[a], max_tokens=1, logprobs=20)["logprobs"]
    exact = case.completion(prompt, allowed_token_ids=[a], max_tokens=1, logprobs=20, return_tokens_as_token_ids=True)[
        "logprobs"
    ]["top_logprobs"][0]
    assert logprobs["top_logprobs"][0]["\ufffd"] == exact[f"token_id:{parts[0]}"]


def test_named_tokens_are_reported_in_place_of_the_likeliest(case: Case) -> None:
    named = case.token_ids[2:5]
    fields = {"logprobs": 0, "logprob_token_ids": named, "max_tokens": 2, "return_tokens_as_token_ids": True}
    whole = case.completion(case.token_ids[:1], **fields)
    for top, chosen in zip(whole["logprobs"]["top_logprobs"], case.token_ids[1:3], strict=True):
        assert top.keys() == {f"token_id:{token}" for token in {*named, chosen}}
    assert case.streamed(case.token_ids[:1], **fields)["logprobs"] == whole["logprobs"]
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "logprobs": True}
    answer = case.server.post("/v1/chat/completions", body | {"logprob_token_ids": named}).json()
    [entry] = answer["choices"][0]["logprobs"]["content"]
    assert len(entry["top_logprobs"]) in (3, 4)


# --- Fields ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(case: Case) -> Served:
    return case.server


def test_a_stream_has_the_tokens_of_its_prompt_in_the_first_chunk_of_each_choice(case: Case) -> None:
    prompts = [case.token_ids[:1], case.token_ids[:3]]
    chunks = case.chunks("completions", prompt=prompts, n=2, max_tokens=2, temperature=1, return_token_ids=True)
    found: dict[int, list[Json]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            found.setdefault(choice["index"], []).append(choice)
    assert found.keys() == {0, 1, 2, 3}
    for index, (first, *others) in found.items():
        assert first["prompt_token_ids"] == prompts[index // 2]
        assert not any("prompt_token_ids" in other for other in others)
        assert sum(len(choice.get("token_ids", ())) for choice in (first, *others)) == 2
    messages = [{"role": "user", "content": "x"}]
    first, *others = case.chunks("chat/completions", messages=messages, max_tokens=2, return_token_ids=True)
    assert first["prompt_token_ids"] == case.server.allm.llm.encode_chat(messages)
    assert not any("prompt_token_ids" in other for other in others)


def test_the_log_probabilities_of_a_prompt_are_streamed_with_its_echo(case: Case) -> None:
    prompt = case.token_ids[:3]
    for max_tokens in (2, 0):
        fields = {"echo": True, "logprobs": 2, "max_tokens": max_tokens}
        whole, streamed = case.completion(prompt, **fields), case.streamed(prompt, **fields)
        assert streamed["logprobs"] == whole["logprobs"]
        assert (streamed["text"], streamed["finish_reason"]) == (whole["text"], whole["finish_reason"])
        assert len(streamed["logprobs"]["tokens"]) == 3 + max_tokens
    options = {"include_usage": True}
    *_, last = case.chunks("completions", prompt=prompt, echo=True, max_tokens=0, stream_options=options)
    assert last["usage"]["completion_tokens"] == 0


def test_none_of_a_prompts_log_probabilities_beside_its_own_may_be_streamed(case: Case) -> None:
    prompt = case.token_ids[:3]
    whole = case.completion(prompt, prompt_logprobs=0, max_tokens=1)["prompt_logprobs"]
    first, *_ = case.chunks("completions", prompt=prompt, prompt_logprobs=0, max_tokens=1)
    assert first["choices"][0]["prompt_logprobs"] == whole
    messages = [{"role": "user", "content": "x"}]
    first, *_ = case.chunks("chat/completions", messages=messages, prompt_logprobs=0, max_tokens=1)
    assert len(first["prompt_logprobs"]) == len(case.server.allm.llm.encode_chat(messages))


def test_a_message_that_is_continued_is_echoed_in_a_stream(case: Case) -> None:
    fields: Json = {"echo": True, "add_generation_prompt": False, "continue_final_message": True, "max_tokens": 2}
    fields["messages"] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "the"}]
    chunks = case.chunks("chat/completions", **fields)
    streamed = "".join(choice["delta"]["content"] for chunk in chunks for choice in chunk["choices"])
    answer = case.server.post("/v1/chat/completions", {"temperature": 0, **fields}).json()
    assert streamed == answer["choices"][0]["message"]["content"]
    assert streamed.startswith("the")
    parts = [{"type": "text", "text": "the"}, {"type": "text", "text": "x"}]
    fields["messages"][1]["content"] = parts
    answer = case.server.post("/v1/chat/completions", {"temperature": 0, **fields}).json()
    assert answer["choices"][0]["message"]["content"].startswith("the\nx")


@pytest.mark.parametrize("side", ["left", "right", None])
def test_a_prompt_is_cut_at_the_side_that_is_named(case: Case, side: str | None) -> None:
    fields = {"truncate_prompt_tokens": 2, "truncation_side": side, "max_tokens": 1, "return_token_ids": True}
    tokens = case.token_ids
    kept = tokens[:2] if side == "right" else tokens[-2:]
    assert case.completion(tokens, **fields)["prompt_token_ids"] == kept
    assert case.completion(TEXT, **fields, echo=True)["prompt_token_ids"] == kept
    messages = [{"role": "user", "content": "the the"}]
    body = {"messages": messages, "truncate_prompt_tokens": 3, "truncation_side": side, "max_tokens": 1}
    answer = case.server.post("/v1/chat/completions", body | {"return_token_ids": True}).json()
    whole = case.server.allm.llm.encode_chat(messages)
    assert answer["prompt_token_ids"] == (whole[:3] if side == "right" else whole[-3:])


def test_as_many_tokens_of_a_prompt_as_leave_room_are_one_at_least(case: Case) -> None:
    most = case.server.allm.llm.config.max_model_len
    fields = {"truncate_prompt_tokens": -1, "max_tokens": most, "min_tokens": 0, "stop_token_ids": case.token_ids[1:2]}
    choice = case.completion(case.token_ids[:1] * 5, **fields, return_token_ids=True)
    assert len(choice["prompt_token_ids"]) == 1


def test_special_tokens_are_shown_without_spaces_where_that_is_asked_for(case: Case) -> None:
    special = case.server.allm.llm.need_tokenizer().encode("<s>", add_special_tokens=False)[0]
    fields = {"allowed_token_ids": [special], "max_tokens": 3, "skip_special_tokens": False}
    for spaces in (True, False):
        choice = case.completion(case.token_ids[:1], **fields, spaces_between_special_tokens=spaces)
        streamed = case.streamed(case.token_ids[:1], **fields, spaces_between_special_tokens=spaces)
        assert choice["text"] == streamed["text"]
        if not spaces:
            assert choice["text"].strip() == "<s>" * 3


def test_more_tokens_than_there_is_room_for_are_as_many_as_there_is_room_for(case: Case) -> None:
    most = case.server.allm.llm.config.max_model_len
    prompt = case.token_ids[:1] * (most - 3)
    for asked in (4, most):
        choice = case.completion(prompt, max_tokens=asked, ignore_eos=True, return_token_ids=True)
        assert (len(choice["token_ids"]), choice["finish_reason"]) == (3, "length")
    for field in ("max_tokens", "min_tokens"):
        body = {"prompt": prompt, "max_tokens": 4, field: most + 1 if field == "max_tokens" else 4}
        error = case.server.post("/v1/completions", body).json()["error"]
        assert (error["param"], error["code"]) == (field, "context_length_exceeded")


def test_an_empty_text_that_has_a_token_is_taken(tmp_path: Path) -> None:
    from tokenizers import processors

    made = tokenizers.bpe_with_byte_fallback()
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    make_successor_model(tmp_path, made.get_vocab_size(), {1: 4})
    tokenizers.write(made, tmp_path)
    with served(LoadedModel.load(tmp_path, tier="reference")) as running:
        for prompt in ("", ["", "the"]):
            assert running.post("/v1/completions", {"prompt": prompt, "max_tokens": 1}).status_code == 200
        for prompt in ([], [[]], [[4], []]):
            error = running.post("/v1/completions", {"prompt": prompt, "max_tokens": 1}).json()["error"]
            assert (error["param"], error["code"]) == ("prompt", 400)
        none = {"prompt": "", "max_tokens": 1, "add_special_tokens": False}
        assert running.post("/v1/completions", none).json()["error"]["param"] == "prompt"


def test_an_assistants_message_may_have_no_content(case: Case) -> None:
    asks: Json = {"role": "user", "content": "x"}
    empty = case.server.allm.llm.encode_chat([asks, {"role": "assistant", "content": ""}])
    for says_nothing in ({"content": None}, {"content": None, "tool_calls": []}, {}):
        messages = [asks, {"role": "assistant", **says_nothing}]
        body = {"messages": messages, "max_tokens": 1, "return_token_ids": True}
        answer = case.server.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["prompt_token_ids"] == empty == case.server.allm.llm.encode_chat(messages)


# --- The length of several sequences --------------------------------------------------------------


@pytest.mark.parametrize("fields", [{"n": 2}, {"n": 5}, {"n": 2, "use_beam_search": True}, {"n": 1}], ids=str)
def test_where_max_tokens_is_left_open_it_is_what_fits_all_sequences(case: Case, fields: Json) -> None:
    """In a pool that holds one sequence of the model's length."""
    model = case.server.allm.llm.loaded
    body = {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True, "return_token_ids": True, **fields}
    with served(model, block_size=4, num_blocks=32) as running:
        answer = running.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        choices, usage = answer.json()["choices"], answer.json()["usage"]
        assert [choice["finish_reason"] for choice in choices] == ["length"] * fields["n"]
        shared = usage["prompt_tokens"] // 4  # blocks; each sequence has an equal part of the others
        room = 4 * (shared + (32 - shared) // fields["n"]) - usage["prompt_tokens"] + 1
        assert usage["completion_tokens"] == fields["n"] * min(room, 128 - usage["prompt_tokens"])
        error = running.post("/v1/chat/completions", body | {"n": 257}).json()["error"]
        assert "at most 256 sequences run at once" in error["message"]


def test_a_prompt_leaves_each_of_several_sequences_an_equal_part_of_the_pool(case: Case) -> None:
    """More is lowered to it, whatever more it is; and no fewer than min_tokens are generated in silence."""
    prompt = case.token_ids[:1] * 5
    with served(case.server.allm.llm.loaded, block_size=4, num_blocks=16) as running:
        body = {"prompt": prompt, "n": 3, "ignore_eos": True, "return_token_ids": True}
        lengths = set()
        for asked in (16, 20, 40, 64):
            answer = running.post("/v1/completions", body | {"max_tokens": asked})
            assert answer.status_code == 200, answer.text
            lengths |= {len(choice["token_ids"]) for choice in answer.json()["choices"]}
        assert lengths == {4 * (1 + 15 // 3) - 5 + 1, 16}
        for path in ("completions", "chat/completions"):
            messages = {"messages": [{"role": "user", "content": "x"}]}
            asks = {"n": 3, "min_tokens": 30} | (messages if path.startswith("chat") else {"prompt": prompt})
            asks |= {} if path.startswith("chat") else {"max_tokens": 64}
            error = running.post(f"/v1/{path}", asks).json()["error"]
            assert (error["param"], error["code"]) == ("min_tokens", "context_length_exceeded")
            assert ", and n is 3: lower min_tokens to" in error["message"]
        running.check_nothing_is_left()


# --- vLLM's fields --------------------------------------------------------------------------------

VLLM: Json = json.loads((Path(__file__).parent / "vllm_request_fields.json").read_text())
BODIES = {
    "completion": CompletionBody,
    "chat": ChatBody,
    "tokenize_completion": TokenizeBody,
    "tokenize_chat": TokenizeBody,
    "detokenize": DetokenizeBody,
    "stream_options": StreamOptions,
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in BODIES for name in VLLM[kind]])
def test_every_field_of_vllms_is_served_or_refused_by_name_or_without_effect(kind: str, name: str) -> None:
    ours = BODIES[kind].model_fields.keys()
    served_here = name in ours or (kind == "chat" and name == "add_special_tokens")  # refused unless it is false
    assert [served_here, name in REFUSED, name in WITHOUT_EFFECT].count(True) == 1


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_refused_is_refused_by_name_wherever_it_is_sent(server: Served, name: str) -> None:
    bodies: dict[str, Json] = {
        "/v1/completions": {"prompt": "the", "max_tokens": 1},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
        "/tokenize": {"prompt": "the"},
    }
    for path, body in bodies.items():
        error = server.post(path, body | {name: "something"}).json()["error"]
        assert error["param"] == name
        assert error["message"].startswith(f"{name} is not supported: ")
        assert server.post(path, body | {name: None}).status_code == 200
