"""Schedulers: the engine's own, right ones written differently, and wrong ones for each rule."""

from __future__ import annotations

from minipaged.course.grader.mutants import seeded, source_of

REFERENCE = source_of("engine/policy").replace("FirstComeFirstServed", "Scheduler")
"""The engine's own policy as a student's file."""

PLAIN = '''
"""Uses none of our classes but the views, NumPy for admission, tuples for lists; holds back no blocks."""
import heapq
import math

import numpy as np


class Scheduler:
    def __init__(self, num_blocks, block_size, max_num_seqs, max_num_batched_tokens, costs):
        self.given = num_blocks, block_size, max_num_seqs, max_num_batched_tokens, costs

    def fits(self, request):
        blocks, size, sequences, tokens, _ = self.given
        tables = [set() for _ in range(request.num_sequences if request.max_output_tokens > 1 else 1)]
        for position in range(request.prompt_tokens + request.max_output_tokens - 1):
            for number, table in enumerate(tables):
                shared = (position // size + 1) * size <= request.prompt_tokens
                table.add((position // size, None if shared else number))
        return len(set().union(*tables)) <= blocks and request.num_sequences <= min(sequences, tokens)

    def share_tokens(self, running):
        left, given = self.given[3], {}
        for request in running:
            if request.decodes:
                given[request.request_id] = request.tokens_to_run
                left -= request.tokens_to_run
        heap = [(r.arrival, r.request_id, r.tokens_to_run) for r in running if not r.decodes]
        heapq.heapify(heap)
        while heap and left:
            _, name, tokens = heapq.heappop(heap)
            given[name] = tokens if tokens < left else left
            left -= given[name]
        return given

    def victim(self, running):
        latest = running[0]
        for request in running:
            if request.arrival > latest.arrival:
                latest = request
        return latest.request_id

    def way_back(self, request, host_free):
        costs = self.given[4]
        one_way = costs.copies_per_block * costs.seconds_per_copy + costs.block_bytes / costs.link_bytes_per_second
        swap = math.inf if request.num_blocks > host_free else request.num_blocks * 2 * one_way
        return ("recompute", "swap")[swap <= request.num_tokens / costs.prefill_tokens_per_second]

    def admit(self, waiting, running, num_free, tokens_left):
        queue = sorted(waiting, key=lambda r: r.arrival)
        sequences = np.cumsum([r.num_sequences for r in queue]) + sum(r.num_sequences for r in running)
        blocks = np.cumsum([r.blocks_needed for r in queue])
        before = np.cumsum([0] + [r.tokens_to_run for r in queue])[:-1]
        least = np.array([r.tokens_to_run if r.decodes else 1 for r in queue])
        good = (sequences <= min(self.given[2:4])) & (blocks <= num_free) & (before + least <= tokens_left)
        count = len(queue) if good.all() else int(np.argmin(good))
        return tuple(r.request_id for r in reversed(queue[:count]))
'''


NEVER, BUDGET, ORDER = "what can never fit", "the token budget", "first come, first served"
BATCH, POOL, IDLE = "room in the batch", "room in the pool", "nobody waits for nothing"
VICTIM, WAY, PURE, ENGINE = (
    "who is preempted",
    "the way back",
    "a question changes nothing",
    "the engine, on a small model",
)

FITS = "request.num_sequences <= self.max_sequences and self.most_blocks(request) <= self.num_blocks"
SEQUENCES = "sequences > self.max_sequences or "
BLOCKS = "blocks > num_free or "
SORTED = "queue = sorted(waiting, key=self.turn)"
GIVEN = "tokens[request.request_id] = min(request.tokens_to_run, left)"
CHOSEN = "return max(running, key=self.turn).request_id"
WAY_BACK = '"swap" if request.num_blocks <= host_free and self.price(request) < 0 else "recompute"'
COPIES = "num_blocks * costs.copies_per_block * costs.seconds_per_copy"
ADMITTED = "        return admitted\n"
BREAK = "                break\n"

BUGS = {
    "everything fits: fits always returns True": (NEVER, FITS, "True"),
    "siblings share everything: fits counts all blocks as shared by a request's sequences": (
        NEVER,
        "num_sequences * (each - shared)",
        "(each - shared)",
    ),
    "siblings share nothing: fits counts no block as shared by a request's sequences": (
        NEVER,
        "shared = prompt_tokens // block_size",
        "shared = 0",
    ),
    "the last token gets a slot: fits counts a slot for the last token": (
        NEVER,
        "(prompt_tokens + max_output_tokens - 1)",
        "(prompt_tokens + max_output_tokens)",
    ),
    "a single token is decoded: fits counts a decode for a request that generates a single token": (
        NEVER,
        "if max_output_tokens == 1:",
        "if False:",
    ),
    "any number of sequences: fits ignores the sequences that a batch has room for": (
        NEVER,
        "request.num_sequences <= self.max_sequences and ",
        "",
    ),
    "a batch of sequences without tokens: fits ignores that each sequence needs a token of the batch": (
        NEVER,
        "self.max_sequences = min(max_num_seqs, max_num_batched_tokens)",
        "self.max_sequences = max_num_seqs",
    ),
    "the budget is ignored": (BUDGET, GIVEN, "tokens[request.request_id] = request.tokens_to_run"),
    "prompts first: prompts get tokens before requests that decode": (
        BUDGET,
        "(not r.decodes, self.turn(r))",
        "(r.decodes, self.turn(r))",
    ),
    "no chunks: a prompt gets no tokens if it does not fit as a whole": (
        BUDGET,
        GIVEN,
        f"{GIVEN} if request.tokens_to_run <= left else 0",
    ),
    "last in, first out: the latest arrival is admitted first": (
        ORDER,
        SORTED,
        SORTED.replace("self.turn", "lambda r: -r.arrival"),
    ),
    "in the order of the list: requests are admitted in the order of the list, not of arrival": (
        ORDER,
        SORTED,
        "queue = waiting",
    ),
    "small ones overtake: a request that does not fit is skipped": (ORDER, BREAK, "                continue\n"),
    "as many sequences as there are: admit ignores the sequences that the batch has room for": (BATCH, SEQUENCES, ""),
    "siblings are split: admit counts one sequence for each request": (
        BATCH,
        "sequences += request.num_sequences",
        "sequences += 1",
    ),
    "no tokens are left: a request is admitted without tokens left for it": (BATCH, " or least > tokens_left", ""),
    "one token for three that decode: a request that decodes is admitted with fewer tokens than sequences": (
        BATCH,
        "request.tokens_to_run if request.decodes else 1",
        "1",
    ),
    "over capacity: admit ignores the number of free blocks": (POOL, BLOCKS, ""),
    "the blocks of the others are forgotten: admit does not count the blocks of those admitted before": (
        POOL,
        "num_free -= request.blocks_needed",
        "pass",
    ),
    "nobody comes in: admit always returns an empty list": (IDLE, ADMITTED, "        return []\n"),
    "more is held back than anybody can need: admit holds back more blocks than running requests can need": (
        IDLE,
        "max(0, min(request.num_sequences * request.num_groups, self.most_blocks(request) - num_blocks))",
        "request.num_sequences * request.num_groups",
    ),
    "one at a time: a request is admitted only if no other runs": (
        IDLE,
        ADMITTED,
        "        return [] if running else admitted[:1]\n",
    ),
    "the oldest is starved: the earliest arrival is preempted": (VICTIM, CHOSEN, CHOSEN.replace("max", "min")),
    "the largest makes room: the request with the most blocks is preempted": (
        VICTIM,
        CHOSEN,
        CHOSEN.replace("self.turn", "lambda r: (r.num_blocks, r.arrival)"),
    ),
    "the last of the list: the last request of the list is preempted": (
        VICTIM,
        CHOSEN,
        "return running[-1].request_id",
    ),
    "the same victim for ever: victim keeps returning its first answer": (
        VICTIM,
        CHOSEN,
        CHOSEN.replace("return", "self.chosen = getattr(self, 'chosen', None) or") + "\n        return self.chosen",
    ),
    "the victim itself: victim returns the request, not its request_id": (
        VICTIM,
        CHOSEN,
        CHOSEN.replace(".request_id", ""),
    ),
    "a victim that nobody knows: victim returns an unknown request_id": (VICTIM, CHOSEN, 'return "nobody"'),
    "it raises: victim raises an error": (VICTIM, CHOSEN, "return running[7].request_id"),
    "always recompute: victims are recomputed whatever it costs": (WAY, WAY_BACK, '"recompute"'),
    "always swap: victims are swapped whatever it costs": (
        WAY,
        WAY_BACK,
        '"swap" if request.num_blocks <= host_free else "recompute"',
    ),
    "the host has room for everything: way_back ignores the free blocks of the host": (
        WAY,
        "request.num_blocks <= host_free and ",
        "",
    ),
    "only out: swapping is counted in one direction only": (WAY, "2 * carry_seconds(", "carry_seconds("),
    "a block is one copy: way_back ignores copies_per_block": (WAY, COPIES, "num_blocks * costs.seconds_per_copy"),
    "copies start by themselves: way_back ignores seconds_per_copy": (WAY, COPIES, "0"),
    "bytes weigh nothing: way_back ignores the time for the bytes": (WAY, "copies + num_blocks *", "copies + 0 *"),
    "a third way: way_back returns neither swap nor recompute": (WAY, WAY_BACK, '"wait"'),
    "the queue is emptied: admit removes the requests from the list it was given": (
        PURE,
        ADMITTED,
        f"        waiting.clear()\n{ADMITTED}",
    ),
    "a view is written to: victim changes a request it was given": (
        PURE,
        CHOSEN,
        f"running[0].num_blocks = 0\n        {CHOSEN}",
    ),
    "the settings are everybody's: the settings are kept in the class, not in the object": (
        PURE,
        "        self.num_blocks = num_blocks",
        "        Scheduler.num_blocks = num_blocks",
    ),
    "tokens are used up for good: each call of share_tokens has one token less": (
        PURE,
        "left = self.max_tokens",
        "left = self.max_tokens = self.max_tokens - 1",
    ),
    "somebody who does not wait: admit returns a request that is not waiting": (
        ORDER,
        ADMITTED,
        '        return [*admitted, "nobody"]\n',
    ),
    "somebody twice: admit returns a request twice": (ORDER, ADMITTED, "        return admitted * 2\n"),
}

PESSIMIST = REFERENCE.replace("min(request.num_sequences, ", "(")
"""A scheduler that holds back all blocks that running requests may need, so that preemption is rare."""

SEEDED = seeded({"the reference": REFERENCE, "NumPy and tuples": PLAIN, "holds back all": PESSIMIST}, BUGS)
