"""Eviction policies: ours, one that keeps blocks in the order of their use, and seeded bugs."""

from __future__ import annotations

from minipaged.course.grader.mutants import seeded, source_of

OURS = source_of("course/assignments/eviction/ours").replace("OurEviction", "Eviction")

IN_ORDER = '''"""A policy that evicts the texts first whose beginning only one request has used."""

from collections import Counter, OrderedDict


class Eviction:
    def __init__(self, device, host):
        self._requests = Counter()  # the number of requests that have used a text's first block
        self._texts = {}  # block -> the first block of its text
        self._parents = {}
        self._queues = {floor: OrderedDict() for floor in ("device", "host")}  # in order of the last use
        self._num_children = {floor: Counter() for floor in ("device", "host")}

    def use(self, block, parent):
        self._texts[block] = block if parent is None else self._texts[parent]
        self._parents[block] = parent
        self._requests[block] += parent is None
        self._take(block, "host")
        self._take(block, "device")
        self._put(block, "device")

    def evict(self, floor, pinned):
        pinned = set(pinned)
        leaves = [one for one in self._queues[floor] if one not in pinned and not self._num_children[floor][one]]
        read_once = [one for one in leaves if self._requests[self._texts[one]] == 1]
        for block in read_once or leaves:
            self._take(block, floor)
            if floor == "device":
                self._put(block, "host")
            return block
        return None

    def _put(self, block, floor):
        self._queues[floor][block] = None
        self._num_children[floor][self._parents[block]] += 1

    def _take(self, block, floor):
        if block in self._queues[floor]:
            del self._queues[floor][block]
            self._num_children[floor][self._parents[block]] -= 1
'''

EMPTY, THERE, FLOORS = "empty floors", "a block that is there", "down to the host, and up"
PINNED, CHILDREN, SAME = "never a pinned block", "children first", "the same calls, the same answers"
GOOD, BETTER = "as good as the least recently used", "better than the least recently used"

KEPT = "kept = {*pinned, *blocks.values()}"
LEAVES = "            parent = blocks.pop(block)\n"
DOWN = '            if floor == "device":\n                self._floors["host"][block] = parent\n'
UP = '        self._floors["host"].pop(block, None)\n'
PUT = '        self._floors["device"][block] = parent\n'
WORTH = "return is_shared, self._last_use[block] + PATIENCE * log2(self._num_uses[block])"

BUGS = {
    "no block, no answer: evict raises an error when no block of the floor may leave": (EMPTY, ", default=None", ""),
    "a number for no block: evict returns -1 when no block of the floor may leave": (
        EMPTY,
        "return block\n",
        "return -1 if block is None else block\n",
    ),
    "it has left and is still there: the block that evict returns stays on its floor": (
        THERE,
        LEAVES,
        "            parent = blocks[block]\n",
    ),
    "it comes back and is not there: a block that was used before is not put on the device": (
        THERE,
        PUT,
        '        if block not in self._last_use:\n            self._floors["device"][block] = parent\n',
    ),
    "nobody is number 0: block 0 stays on its floor when evict returns it": (
        THERE,
        "if block is not None:",
        "if block:",
    ),
    "nothing below: a block that leaves the device is not put on the host": (THERE, DOWN, ""),
    "the host gives to itself: a block that leaves the host is put there again": (
        THERE,
        DOWN,
        '            self._floors["host"][block] = parent\n',
    ),
    "one floor for all: evict takes a block of the device even if the host is asked": (
        THERE,
        "blocks = self._floors[floor]",
        'blocks = self._floors["device"] or self._floors["host"]',
    ),
    "on two floors: a block that comes up stays on the host too": (FLOORS, UP, ""),
    "it stays below: a block of the host that is used stays there": (
        FLOORS,
        UP + PUT,
        '        if block not in self._floors["host"]:\n            self._floors["device"][block] = parent\n',
    ),
    "no pins: pinned blocks leave too": (PINNED, KEPT, "kept = {*blocks.values()}"),
    "one pin: only the first pinned block stays": (PINNED, KEPT, "kept = {*pinned[:1], *blocks.values()}"),
    "no pins on the host: pinned blocks leave the host": (
        PINNED,
        KEPT,
        'kept = {*(pinned if floor == "device" else []), *blocks.values()}',
    ),
    "someone has to go: if all blocks are pinned, one of them leaves": (
        PINNED,
        "default=None",
        "default=next(iter(blocks), None)",
    ),
    "passed over and forgotten: evict forgets the pinned blocks": (
        PINNED,
        f"        {KEPT}",
        f"        for one in pinned:\n            blocks.pop(one, None)\n        {KEPT}",
    ),
    "pinned for ever: a block that was pinned once never leaves": (
        PINNED,
        f"        {KEPT}",
        "        self._pinned = {*getattr(self, '_pinned', ()), *pinned}\n"
        "        kept = {*self._pinned, *blocks.values()}",
    ),
    "parents leave: a block leaves before its children": (CHILDREN, KEPT, "kept = {*pinned}"),
    "children of the other floor: a block waits for its children on the host": (
        CHILDREN,
        KEPT,
        'kept = {*pinned, *self._floors["device"].values(), *self._floors["host"].values()}',
    ),
    "no family below: a block leaves the host before its children": (
        CHILDREN,
        KEPT,
        'kept = {*pinned, *(blocks.values() if floor == "device" else [])}',
    ),
    "dice: any block that may leave leaves": (
        SAME,
        "key=self._worth",
        "key=lambda one: __import__('random').random()",
    ),
    "one cache for all: the blocks on the floors are the same for all policies": (
        SAME,
        '        self._floors: dict[str, dict[int, int | None]] = {"device": {}, "host": {}}  # block -> its parent\n',
        "",
        "    def __init__(",
        '    _floors: dict[str, dict[int, int | None]] = {"device": {}, "host": {}}\n\n    def __init__(',
    ),
    "the latest leaves: the block that was used last leaves first": (GOOD, WORTH, "return -self._last_use[block]"),
    "only the time counts: the block that was used longest ago leaves first": (
        BETTER,
        WORTH,
        "return self._last_use[block]",
    ),
}

SEEDED = seeded({"ours": OURS, "leaves in order": IN_ORDER}, BUGS)
