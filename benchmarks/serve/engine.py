"""The yardstick: what minipaged's engine does with the same requests when no server is around it.

In a process of its own, which takes a line of JSON for each run and answers with one: it has the libraries' threads to
itself, and the load tool stays small.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from types import TracebackType
from typing import Any

from benchmarks.serve.load import Request


class EngineProcess:
    """`LLM(model, **settings)` in another process. Raises RuntimeError where that does not work; it tells why on
    stderr by itself."""

    def __init__(self, model: str, settings: dict[str, Any], *, chat: bool) -> None:
        command = [sys.executable, "-m", "benchmarks.serve.engine"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._tell({"model": model, "settings": settings, "chat": chat})

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def tokens_per_second(self, requests: list[Request]) -> float:
        """Output tokens a second of `LLM.generate` (or `LLM.chat`) with all of them at once."""
        answer = self._tell([(request.prompt, request.output_tokens) for request in requests])
        return float(answer["output_tokens"] / answer["seconds"])

    def _tell(self, what: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps(what), file=self._process.stdin, flush=True)
            return json.loads(self._process.stdout.readline())
        except (BrokenPipeError, ValueError):
            raise RuntimeError("the engine's process has ended; what it said stands above") from None


def main() -> None:
    from minipaged import LLM, SamplingParams

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is no answer
    settings = json.loads(sys.stdin.readline())
    llm = LLM(settings["model"], **settings["settings"])
    generate = llm.chat if settings["chat"] else llm.generate

    def run(requests: list[tuple[str, int]]) -> dict[str, float]:
        prompts: Any = [[{"role": "user", "content": p}] if settings["chat"] else p for p, _ in requests]
        params = [SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True) for _, tokens in requests]
        start = time.perf_counter()
        outputs = generate(prompts, params)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "output_tokens": sum(len(o.outputs[0].token_ids) for o in outputs)}

    run([("The first words compile what has to be compiled.", 4)] * 4)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
