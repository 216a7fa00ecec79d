"""Compiles one form in a process of its own, which a hostile form may end (`python grammar_trial.py < FORM`).

Some forms of a few hundred characters would take the library minutes and all memory, and it has no limit for that: a
dozen patterns that must all match, or a `multipleOf` of a large prime. So a form that could be one of these is tried
here first, with little processor time and memory. The process prints the bytes that the form took. It imports nothing
of minipaged, so that it starts within 50 ms.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from typing import Any

if sys.platform != "win32":
    import resource

MOST_LEXER_STATES = 50_000
"""The most states of a lexer, at about 2 kB each. Sequences of one grammar share a lexer, until it is full."""
MOST_ALTERNATIVES = 8_000
"""The most rules in progress at one place of an output. An object takes four for each optional property."""
STACK_BYTES = 2**29
"""The stack on which forms are compiled. Only what is used of it takes memory."""
TRIAL_S = 2
"""Seconds of the processor that a form may take."""
TRIAL_BYTES = 2**28
"""Bytes of memory that a form may take."""


def limits(library: Any) -> Any:
    """The library's limits for compiling and for each token, with which a form is tried and used."""
    return library.LLParserLimits(
        max_lexer_states=MOST_LEXER_STATES, max_items_in_row=MOST_ALTERNATIVES, verbose_errors=False
    )


def _limit_this_process() -> None:
    """Limit the processor time, and the memory on Linux, from now on. Windows has no such limits."""
    if sys.platform != "win32":
        resource.setrlimit(resource.RLIMIT_CPU, (TRIAL_S, TRIAL_S + 1))
        with suppress(OSError):  # macOS does not say how much is in use, and limits no memory
            with open("/proc/self/statm") as file:
                pages = int(file.read().split()[0])
            most = pages * resource.getpagesize() + STACK_BYTES + TRIAL_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _peak_bytes() -> int:
    """The most memory that this process has used; 0 on Windows."""
    if sys.platform == "win32":
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _try(form: str) -> None:
    import llguidance as library

    _limit_this_process()
    before = _peak_bytes()
    try:
        matcher = library.LLMatcher(library.LLTokenizer("byte"), form, log_level=0, limits=limits(library))
        matcher.compute_bitmask()
    except MemoryError:
        os._exit(1)
    except Exception:
        pass
    print(_peak_bytes() - before, flush=True)


def main() -> None:
    form = sys.stdin.buffer.read().decode()
    threading.stack_size(STACK_BYTES)
    trial = threading.Thread(target=_try, args=(form,))
    trial.start()
    trial.join()


if __name__ == "__main__":
    main()
