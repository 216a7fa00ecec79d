"""Arriving requests: the checks that one must pass, and how a Request is made from one that does.

Every error names the value, the limit and the way out.
"""

from __future__ import annotations

import copy
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from numbers import Integral

from minipaged.contracts import BeamSearch
from minipaged.engine.detokenizer import Decode, Detokenizer, Encode, naming_failures
from minipaged.engine.grammar import Compile
from minipaged.engine.grouped_memory import pool_tokens
from minipaged.engine.memory import AllocStatus, Memory
from minipaged.engine.policies import looks_at_priority
from minipaged.engine.scheduler import Scheduler
from minipaged.engine.sequence import Request, SequenceState
from minipaged.engine.stats import Stats
from minipaged.errors import InvalidRequest
from minipaged.handover.block_hashes import salt_number
from minipaged.params import (
    BeamSearchParams,
    EngineConfig,
    RequestOutputKind,
    SamplingParams,
    final_token_ids,
    truncated,
)
from minipaged.scheduling import Policy
from minipaged.steps import Sampling

MOST_SALT = 1024
"""The longest salt, in characters."""
MOST_SALTS = 1 << 16
"""The number of salts that are remembered, to count different ones. Some 100 bytes each."""


class Arrivals:
    """Makes the requests of one engine, and counts their salts in `stats`."""

    def __init__(
        self,
        config: EngineConfig,
        beam_search: type[BeamSearch],
        scheduler: Scheduler,
        blocks: Memory,
        sequence_ids: Iterator[int],
        decode: Decode | None,
        encode: Encode | None,
        clock: Callable[[], float],
        stats: Stats,
        compile_grammar: Compile | None = None,
    ) -> None:
        self._config = config
        self._beam_search = beam_search
        self._scheduler = scheduler
        self._blocks = blocks
        self._sequence_ids = sequence_ids
        self._decode_as = decode
        self._decode = naming_failures(decode) if decode else None
        self._encode = encode
        self._clock = clock
        self._compile_grammar = compile_grammar
        self._random = random.Random(config.seed)
        self._stats = stats
        self._salts: set[int] = set()

    def make(
        self,
        request_id: str,
        order: int,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | BeamSearchParams,
        prompt: str | None,
        output_kind: RequestOutputKind,
        priority: int,
        cache_salt: str | None,
    ) -> Request:
        """Make a request. Raises InvalidRequest if it could never be served."""
        if isinstance(params, SamplingParams):
            prompt_token_ids = truncated(prompt_token_ids, params.truncate_prompt_tokens)
        check_prompt(prompt_token_ids, self._config)
        check_params(params, output_kind, self._config, has_tokenizer=self._decode is not None)
        check_priority(priority, self._scheduler.policy)
        check_salt(cache_salt)
        tokens = tuple(map(int, prompt_token_ids))  # NumPy's integers, for example, are not JSON
        room = self._config.max_model_len - len(tokens)
        salt = salt_number(cache_salt)
        first = SequenceState(next(self._sequence_ids), list(tokens), [], self._blocks.new_table(), salt=salt)
        request = Request(
            request_id=request_id,
            order=order,
            arrival_time=self._clock(),
            prompt=prompt,
            prompt_token_ids=tokens,
            params=params,
            final_token_ids=final_token_ids(params, self._config.eos_token_ids),
            max_output_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            reads_along=output_kind is RequestOutputKind.DELTA,
            priority=int(priority),
            sequences=[first],
            decode=self._decode,
        )
        if params.max_tokens is None:
            request.max_output_tokens = most_that_fits(request, self._config.num_blocks, self._blocks)
        if isinstance(params, SamplingParams):
            self._prepare_samples(request, params)
        else:
            most = len(tokens) + request.max_output_tokens
            request.beam_search = self._beam_search(params, len(tokens), most, self._config.eos_token_ids)
        check_fits(request, self._config, self._scheduler.max_sequences, self._blocks)
        self._scheduler.asked.check_fits(request)
        if request.sampling and request.sampling.params.seed is None:  # drawn last: a refused request uses none up
            request.sampling = request.sampling._replace(seed=self._random.getrandbits(64))
        if salt and len(self._salts) < MOST_SALTS:
            self._salts.add(hash(salt))
            self._stats.prefix_cache_salts = len(self._salts)
        return request

    def _prepare_samples(self, request: Request, params: SamplingParams) -> None:
        """Set up what sampled sequences need. Raises InvalidRequest if no token could ever be chosen."""
        final = tuple(request.final_token_ids) if params.min_tokens else ()
        bad_words = tokens_of_words(params.bad_words, self._encode, self._config.vocab_size)
        request.sampling = Sampling(params, (params.seed or 0) & (2**64 - 1), 0, final, bad_words)
        if params.allowed_token_ids and {*params.allowed_token_ids} <= {*request.sampling.forbidden_after(())}:
            raise InvalidRequest(
                f"allowed_token_ids is {params.allowed_token_ids}, and each of these is a bad word or would end the "
                "sequence before min_tokens; allow another"
            )
        [sequence] = request.sequences
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = []
        if params.num_likeliest is not None:
            sequence.logprobs = []
        if params.structured_outputs is not None:
            if self._compile_grammar is None:
                raise InvalidRequest("structured_outputs need a tokenizer, and this engine has none; leave them out")
            sequence.grammar = self._compile_grammar(params.structured_outputs).begin(request.final_token_ids)
        if self._decode_as and not params.skip_special_tokens:
            shown = {} if params.spaces_between_special_tokens else {"spaces_between_special_tokens": False}
            request.decode = naming_failures(partial(self._decode_as, skip_special_tokens=False, **shown))
        if request.decode and (params.stop or request.reads_along):  # its text is needed as it grows
            sequence.detokenizer = Detokenizer(
                request.decode,
                params.stop,
                keeps_stop=params.include_stop_str_in_output,
                prompt_token_ids=request.prompt_token_ids,
                prompt=request.prompt,
            )


def check_prompt(prompt: Sequence[int], config: EngineConfig) -> None:
    """Raise InvalidRequest unless `prompt` is a list of tokens that leaves room to generate."""
    if len(prompt) == 0:
        raise InvalidRequest("the prompt is empty; give it at least one token")
    if len(prompt) >= config.max_model_len:
        raise InvalidRequest(
            f"the prompt has {len(prompt)} tokens, which leaves no room to generate: max_model_len is "
            f"{config.max_model_len}; shorten the prompt or raise max_model_len"
            + (" and num_blocks, which hold no more" if config.max_model_len == pool_tokens(config) else "")
        )
    for position, token in enumerate(prompt):
        if type(token) is int and 0 <= token < config.vocab_size:  # the usual case; the checks below are slow
            continue
        if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= token < config.vocab_size:
            raise InvalidRequest(
                f"prompt token {position} is {token!r}, of type {type(token).__name__}; the tokens of this model are "
                f"the whole numbers 0 to {config.vocab_size - 1}"
            )


def check_params(
    params: SamplingParams | BeamSearchParams,
    output_kind: RequestOutputKind,
    config: EngineConfig,
    *,
    has_tokenizer: bool,
) -> None:
    """Raise InvalidRequest for parameters that this model or engine does not allow."""
    if not isinstance(output_kind, RequestOutputKind):
        raise InvalidRequest(
            f"output_kind is {output_kind!r}; choose RequestOutputKind.DELTA or RequestOutputKind.FINAL_ONLY"
        )
    if isinstance(params, BeamSearchParams):
        if params.beam_width > config.vocab_size:
            raise InvalidRequest(
                f"beam_width is {params.beam_width}, more than the vocabulary's {config.vocab_size} tokens; lower it"
            )
        return
    if params.logprobs is not None and params.logprobs > config.vocab_size:
        raise InvalidRequest(f"logprobs is {params.logprobs}; the vocabulary has only {config.vocab_size} tokens")
    if params.prompt_logprobs is not None and params.prompt_logprobs > config.vocab_size:
        raise InvalidRequest(
            f"prompt_logprobs is {params.prompt_logprobs}; the vocabulary has only {config.vocab_size} tokens"
        )
    named = {
        "stop_token_ids": params.stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids or (),
        "logit_bias": dict(params.logit_bias),
        "logprob_token_ids": params.logprob_token_ids,
    }
    for name, tokens in named.items():
        for token in tokens:
            if not 0 <= token < config.vocab_size:
                raise InvalidRequest(
                    f"{name} has {token}, which is none of this model's tokens 0 to {config.vocab_size - 1}"
                )
    if params.stop and not has_tokenizer:
        raise InvalidRequest("stop strings need a tokenizer, and this engine has none; use stop_token_ids")


def tokens_of_words(words: Sequence[str], encode: Encode | None, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each word, at the start of a text and after a space, because the two may differ.

    A word with a token that the model does not have cannot be generated and is left out. Raises InvalidRequest if there
    is no tokenizer.
    """
    if words and encode is None:
        raise InvalidRequest("bad_words need a tokenizer, and this engine has none; use logit_bias")
    found: dict[tuple[int, ...], None] = {}  # in order, without duplicates
    for word in words:
        for text in (word.lstrip(" "), " " + word.lstrip(" ")):
            tokens = tuple(encode(text, add_special_tokens=False)) if encode else ()
            if tokens and all(0 <= token < vocab_size for token in tokens):
                found[tokens] = None
    return tuple(found)


def check_priority(priority: int, policy: Policy) -> None:
    """Raise InvalidRequest for a priority that is no whole number, or that the policy would ignore (other than 0)."""
    if isinstance(priority, bool) or not isinstance(priority, Integral):
        raise InvalidRequest(f"priority is {priority!r}; it must be a whole number, and the smaller, the earlier")
    if priority and not looks_at_priority(policy):
        raise InvalidRequest(
            f"priority is {priority}, and this engine's policy, {type(policy).__name__}, does not look at it: leave it "
            "out, or start the engine with scheduling_policy='priority' (--scheduling-policy priority)"
        )


def check_salt(salt: object) -> None:
    """Raise InvalidRequest unless `salt` is None or a text of 1 to MOST_SALT characters that UTF-8 can write."""
    if salt is None:
        return
    shared = "requests share cached blocks only with those of the same salt"
    if not isinstance(salt, str):
        raise InvalidRequest(
            f"cache_salt is of type {type(salt).__name__}; {shared}, so give a text, or leave it out to share with all "
            "requests without one"
        )
    if not 1 <= len(salt) <= MOST_SALT:
        raise InvalidRequest(
            f"cache_salt has {len(salt):,} characters, and 1 to {MOST_SALT:,} are taken; {shared}: give each client a "
            "text of its own, such as 32 random letters, or leave it out to share with all requests without one"
        )
    try:
        salt.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"cache_salt has half of a character at place {error.start} ({salt[error.start]!r}), which UTF-8 cannot "
            "write; leave it out, or give both halves"
        ) from None


def most_that_fits(request: Request, num_blocks: int, blocks: Memory) -> int:
    """The most tokens that each of the request's sequences can generate with the whole pool to themselves. At least 1,
    and at most the request's max_output_tokens."""
    of_one = copy.copy(request)

    def most_blocks(num_tokens: int) -> int:
        of_one.max_output_tokens = num_tokens
        return blocks.most_blocks(of_one)

    return max(1, bisect_right(range(1, request.max_output_tokens + 1), num_blocks, key=most_blocks))


def check_fits(request: Request, config: EngineConfig, max_sequences: int, blocks: Memory) -> None:
    """Raise InvalidRequest if the request could NEVER be admitted."""
    name = "beam_width" if request.beam_search else "n"
    if request.num_sequences > max_sequences:
        raise InvalidRequest(
            f"{name} is {request.num_sequences}, but at most {max_sequences} sequences run at once: lower it, or raise "
            f"max_num_seqs ({config.max_num_seqs}) and max_num_batched_tokens ({config.max_num_batched_tokens})"
        )
    if blocks.can_admit(request) is AllocStatus.NEVER:
        prompt = blocks.blocks_of_prompt(request)
        what = (
            f"the prompt alone needs {prompt} blocks"
            if prompt > config.num_blocks
            else f"prompt and output can need {blocks.most_blocks(request)} blocks"
        )
        groups, chunk = "", ""
        if config.has_windows:  # all tokens of a step count, until its windows have passed them
            groups = f" in {len(config.group_windows)} groups of layers"
            chunk = f", lower max_num_batched_tokens ({config.max_num_batched_tokens})"
        raise InvalidRequest(
            f"the request could never be served: {what} of {config.block_size} tokens{groups}, and the whole pool has "
            f"{config.num_blocks}; shorten the prompt, lower max_tokens ({request.max_output_tokens}) or {name} "
            f"({request.num_sequences}){chunk}, or raise num_blocks"
        )
