"""llama.cpp, greedy, in a process of its own: `benchmarks.packed --llama-cpp PYTHON FILE.gguf` starts it.

    python llama_cpp_peer.py FILE.gguf THREADS

A line in, [token ids of the prompt, how many more], is answered by a line with those. It calls llama.cpp's own
functions one by one, and takes the tokens by its greedy sampler: nothing of the package's own loop in Python is timed.
"""

from __future__ import annotations

import json
import sys

import llama_cpp  # in the environment of this process, not of who asks


def main() -> None:
    threads = int(sys.argv[2])
    whole = llama_cpp.Llama(sys.argv[1], n_ctx=1024, n_threads=threads, n_threads_batch=threads, verbose=False)
    context, sampler = whole.ctx, llama_cpp.llama_sampler_init_greedy()
    for line in sys.stdin:
        prompt, count = json.loads(line)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        new, found = prompt, []
        while len(found) < count:
            array = (llama_cpp.llama_token * len(new))(*new)  # the batch has but its address
            if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(array, len(new))) != 0:
                raise RuntimeError("llama_decode failed")
            new = [llama_cpp.llama_sampler_sample(sampler, context, -1)]
            found += new
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
