"""The base install has no torch, triton, numba or accelerate, and everything works all the same.

Each test runs a process of its own, to which they are not there.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

NOT_IN_THE_BASE_INSTALL = ("torch", "triton", "numba", "accelerate")

WITHOUT = """
import sys

class Hiding:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        hidden = name.partition(".")[0] in {hidden!r}
        return None if hidden else self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
"""


def run_without(hidden: tuple[str, ...], code: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter in which none of `hidden` can be imported."""
    command = [sys.executable, "-c", WITHOUT.format(hidden=hidden) + code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def output_of(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_these_tests_do_hide_what_is_not_in_the_base_install():
    code = """
import importlib
for module in sys.argv[1:]:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        print(error)
"""
    said = output_of(run_without(NOT_IN_THE_BASE_INSTALL, code, *NOT_IN_THE_BASE_INSTALL))
    assert said.splitlines() == [f"No module named '{module}'" for module in NOT_IN_THE_BASE_INSTALL]


def test_generate_chat_and_beam_search_work_on_the_base_install(small_llama: Path):
    """And generating from text imports no transformers: that takes seconds, and only a chat template needs it."""
    code = """
from minipaged import LLM, BeamSearchParams, SamplingParams
llm = LLM(sys.argv[1], num_blocks=32, debug=True)
params = SamplingParams(n=2, temperature=0.8, seed=1, max_tokens=8, ignore_eos=True)
outputs = llm.generate(["hello", [3, 4, 5]], params)
print("transformers" in sys.modules)
outputs += llm.chat([{"role": "user", "content": "hi"}], params)
outputs += llm.beam_search("hello", BeamSearchParams(2, max_tokens=8))
print([len(output.outputs) for output in outputs], len(outputs[0].outputs[0].token_ids))
"""
    result = run_without(NOT_IN_THE_BASE_INSTALL, code, small_llama)
    assert output_of(result) == "False\n[2, 2, 2, 2] 8\n"
    assert "PyTorch" not in result.stderr, "transformers need not tell that it is missing"


def test_the_command_line_works_on_the_base_install(small_llama: Path):
    code = "from minipaged.cli import main; main()"
    arguments = ("generate", "hello", "--model", small_llama, "--num-blocks=32", "--max-tokens=5", "--json")
    [output] = json.loads(output_of(run_without(NOT_IN_THE_BASE_INSTALL, code, *arguments)))
    assert 1 <= len(output["outputs"][0]["token_ids"]) <= 5


def test_the_demo_says_once_how_a_gpu_would_be_used(small_llama: Path):
    """`make demo` installs the base alone."""
    code = """
from minipaged.cli import main
from minipaged.tiers import devices
devices.has_nvidia_gpu = lambda: True
main()
"""
    arguments = ("demo", "--model", small_llama, "--scene=one-request", "--steps=1", "--speed=inf")
    result = run_without(NOT_IN_THE_BASE_INSTALL, code, *arguments)
    assert "on the reference tier" in output_of(result)
    assert result.stderr.startswith("the GPU is not used: the fast tier is not installed; install minipaged with")
    assert result.stderr.count("\n") == 1


def test_the_reference_tier_imports_neither_torch_nor_transformers():
    code = """
import importlib, pkgutil
import minipaged.reference
names = [module.name for module in pkgutil.iter_modules(minipaged.reference.__path__)]
for name in names:
    importlib.import_module(f"minipaged.reference.{name}")
print(len(names) >= 8, sorted({"torch", "transformers", "numba", "tokenizers"} & set(sys.modules)))
"""
    assert output_of(run_without((), code)) == "True []\n"


def test_engine_contracts_and_the_block_allocator_run_without_numpy():
    """So that they run in a browser: what the engine itself schedules needs no arrays."""
    code = """
import minipaged
from minipaged import BeamSearchParams, SamplingParams
from minipaged.contracts import Sampled, Tier
from minipaged.engine.engine import Engine
from minipaged.mirror import MirroredRunner
from minipaged.params import EngineConfig
from minipaged.reference.block_allocator import BlockAllocator
from minipaged.reference.block_table import BlockTable

class Counts(MirroredRunner):
    def move(self, moves): pass
    def forward(self, batch): return [row.token_ids[-1] + 1 for row in batch if row.wants_logits]
    def sample(self, logits, inputs): return [Sampled(logits[wanted.row], 0.0, None) for wanted in inputs]
    def costs(self): raise AssertionError("the pool is large enough")

tier = Tier("counting", BlockAllocator, BlockTable, None, None)
config = EngineConfig(num_blocks=4, block_size=2, max_model_len=8, vocab_size=100, debug=True)
engine = Engine(config, tier, Counts())
engine.add_request([1, 2, 3], SamplingParams(max_tokens=4))
while engine.has_unfinished_requests():
    for update in engine.step():
        if update.output:
            print(update.output.outputs[0].token_ids)
"""
    assert output_of(run_without(("numpy", *NOT_IN_THE_BASE_INSTALL), code)) == "(4, 5, 6, 7)\n"
