"""A Llama or a related model on the device, with its keys and values in the paged cache.

The twin of `reference/llama.py`: the same steps give the same tokens. The matrix products are the library's. All other
work is fused, because each pass over memory and each kernel launch costs time:

    residual += the layer before it; x = norm of the residual        one kernel
    q, k, v = x through one matrix                                    (three matrices, stacked)
    (normalize,) rotate q and k, write k and v into their slots       one kernel
    attention through the block tables                                one kernel
    x through o_proj; again residual += x; x = norm of the residual   one kernel
    gate, up = x through one matrix; silu(gate) × up                  one kernel
    x through down_proj

(In Gemma the results of attention and MLP are normalised too, before they are added: two kernels more.)

A step's numbers (token ids, positions, ...) go to the device as one tensor. The block tables are already there: each
step's differences update them (`block_table.DeviceTables`), and slots are looked up in them on the device. While the
same sequences continue, the other numbers are there too, and each position increases by one.

On a GPU a decoding step launches some 280 kernels, and most of them run shorter than a launch takes. So the whole step
is captured once for each batch size as a CUDA graph and launched as one. A batch between two captured sizes is padded:
slot -1 is not written, and a context of length 0 is not attended to. A graph begins by moving its sequences to their
next position (`DecodeGraph`), so while the same sequences continue, the host sends nothing. A step that reads common
blocks once for many sequences is not replayed: a graph would fix the numbers of prefixes and members. Such a step
must save more than its launches cost (`LEAST_SAVED_ON_GPU`).

In a step with prompts, the decoding sequences either run in their graph as usual (`Llama._run_apart`), or in one pass
with the prompts. Both use the decode kernel for them.

Nothing in a step waits for the device, so with asynchronous scheduling the next step can be launched while it runs. The
tokens that a step chooses stay on the device on their way into the next batch (`FlatBatch.token_ids`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minipaged.contracts import Batch, BatchRow, PromptInput, Runner, Sampled, SamplingInput, StepResult
from minipaged.fast.attention import attend
from minipaged.fast.block_table import DeviceTables
from minipaged.fast.cascade import shared_prefixes
from minipaged.fast.device import is_gpu, to_device
from minipaged.fast.handover import read_blocks, read_host_blocks
from minipaged.fast.kernels import Layer, Linear, LlamaKernels, Matrix, Shared
from minipaged.fast.kv_cache import KVCache
from minipaged.fast.linear import joined_linear
from minipaged.fast.preemption import carry, measure
from minipaged.fast.rope import rotary_tables
from minipaged.fast.sampling import Choosing, Samples, gather_logprobs, joined
from minipaged.mirror import Mirror, PerLane
from minipaged.models.config import ModelConfig
from minipaged.models.quantized.stored import StoredMatrix, can_stack, stack
from minipaged.params import SamplingParams
from minipaged.scheduling import Costs
from minipaged.steps import LOGITS, Begun, BlockMoves, Forked, Row, Sampling, StepInput

BATCH_SIZES = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16)]
"""The batch sizes for which a decoding step is captured: at most 7 rows of padding up to 64, and 15 above."""
SMALL_LAYER = 40 << 20
"""The size, in bytes, of a layer's matrices up to which the decoding sequences of a step with prompts run separately,
in their graph. The device then reads each layer twice, which takes 10 µs for this size at 4 TB/s. In one pass instead,
the host launches two or three more kernels per layer, at 5 to 20 µs each. Calculated, not measured (docs/tuning.md)."""

LEAST_SAVED = 768
"""The number of tokens that sequences must save, if the blocks that they have in common are read once for all of them.
Measured in bfloat16 on an AMD EPYC (SmolLM2's shapes): 2 sequences that share 1,024 tokens save 3 % of the attention, 4
that share 256 save 7 %, and 8 that share 64 would lose 6 %. In 8 bits less would do. A CPU's kernel shares whole tiles
of 64 tokens, and not those of a sequence whose tiles are divided between threads."""
LEAST_SAVED_ON_GPU = 512 << 20
"""The number of bytes of keys and values that a shared prefix must save in each layer, if a GPU reads its blocks once
for all its members. Calculated, not yet measured.

Such a step is not replayed from a graph: the host launches its 12 kernels per layer (2 or 3 more than otherwise) one by
one, at 7 to 14 µs each (docs/gpu.md), so 84 to 168 µs per layer. Memory delivers this number of bytes in 125 µs on an
H200 (4.3 TB/s) and in 180 µs on an H100 (3.0). So if a step saves it, a layer took about as long before, and the
launches cost little. With Llama 3 8B (4 KiB per token and layer), 65 sequences that share 2,048 tokens save it. If the
second cache delivers common blocks faster than memory does, the number is too low; for a step that no graph would
serve, too high.
"""

PIECE = 2**22
"""The number of a prompt's logits that exist at a time."""
PROMPT_LENGTHS = [2, 4, 8, 16, 32, 64, 128]
"""Prompt lengths that cover all tile sizes of the GPU's prefill kernel. A prompt between two of these uses the tiles of
one or the other; a longer prompt uses those of the last."""


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's weights on the device, laid out for the kernels. A stage has only some of the layers, and has None for
    the weights that only the first or the last stage needs."""

    embed: Callable[[Tensor], Tensor] | None  # token ids [tokens] -> [tokens, hidden]
    layers: list[Layer]
    norm: Tensor | None  # [hidden]
    head: Linear | None  # [vocab, hidden]
    kv_scales: Mapping[str, Any]  # scales for keys and values in the checkpoint, by name

    @classmethod
    def of(cls, config: ModelConfig, weights: Mapping[str, Tensor | StoredMatrix], kernels: LlamaKernels) -> Weights:
        """Lay out tensors (named as in transformers, all on one device and of one dtype) and packed matrices.

        If `weights` is a dict, each matrix is taken out of it, so that no matrix is in memory twice for long.
        """
        prefixes = [f"model.layers.{i}" for i in range(config.num_hidden_layers)]
        stacks = {prefix: _LayerStacks.of(prefix, weights) for prefix in prefixes}
        norm = _tensor(weights, "model.norm") if "model.norm.weight" in weights else None
        embedding: Stack = ("model.embed_tokens",)
        head_stack: Stack = embedding if config.tie_word_embeddings else ("lm_head",)
        # The largest first: when the last one is laid out, nearly all of the model is in memory twice.
        order: list[Stack] = [] if norm is None else [head_stack]
        if isinstance(weights.get("model.embed_tokens.weight"), StoredMatrix) and embedding not in order:
            order.append(embedding)
        order += [stack for layer in stacks.values() for part in layer for stack in part]
        matrices = _matrices(weights, order, _tensor(weights, f"{prefixes[0]}.input_layernorm"), kernels)

        def linear(part: list[Stack]) -> Linear:
            return joined_linear([matrices[stack] for stack in part])

        embed: Callable[[Tensor], Tensor] | None = None
        if embedding in matrices:
            embed = matrices[embedding].rows
        elif "model.embed_tokens.weight" in weights:
            embed = _tensor(weights, "model.embed_tokens").__getitem__
        if embed and config.gemma:
            embed = ScaledEmbedding(embed, math.sqrt(config.hidden_size))
        before_attention, after_attention, before_mlp, after_mlp = config.layer_norms

        def norm_of(prefix: str, name: str | None) -> Tensor | None:
            return None if name is None else _tensor(weights, f"{prefix}.{name}")

        layers = [
            Layer(
                input_norm=_tensor(weights, f"{prefix}.{before_attention}"),
                qkv=linear(layer.qkv),
                qk_norm=_qk_norm(weights, prefix) if config.qk_norm else None,
                o=linear(layer.o),
                post_norm=_tensor(weights, f"{prefix}.{before_mlp}"),
                gate_up=linear(layer.gate_up),
                down=linear(layer.down),
                attention_norm=norm_of(prefix, after_attention),
                mlp_norm=norm_of(prefix, after_mlp),
                sinks=_sinks(weights, prefix),
            )
            for prefix, layer in stacks.items()
        ]
        head = None if norm is None else matrices[head_stack]
        kv_scales = {name: each for name, each in weights.items() if name.endswith(("k_scale", "v_scale"))}
        return cls(embed, layers, norm, head, kv_scales)


class ScaledEmbedding:
    """An embedding whose rows are multiplied by a factor, which is rounded to their type first."""

    def __init__(self, rows: Callable[[Tensor], Tensor], factor: float) -> None:
        self._rows, self._factor = rows, factor

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Map token ids [tokens] to [tokens, hidden]."""
        x = self._rows(token_ids)
        return x * torch.tensor(self._factor, dtype=x.dtype)


Stack = tuple[str, ...]
"""The names of matrices with the same inputs, which are stacked into one matrix, one below the other."""


class _LayerStacks(NamedTuple):
    """The matrices of one layer, in the order in which they are laid out.

    Each is one stack, or several if its parts are packed differently.
    """

    qkv: list[Stack]
    o: list[Stack]
    gate_up: list[Stack]
    down: list[Stack]

    @classmethod
    def of(cls, prefix: str, weights: Mapping[str, Tensor | StoredMatrix]) -> _LayerStacks:
        """`prefix`: the start of the layer's names in `weights`."""

        def stacked(*names: str) -> list[Stack]:
            return _stacked(tuple(f"{prefix}.{name}" for name in names), weights)

        return cls(
            qkv=stacked("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            o=stacked("self_attn.o_proj"),
            gate_up=stacked("mlp.gate_proj", "mlp.up_proj"),
            down=stacked("mlp.down_proj"),
        )


def _stacked(names: Stack, weights: Mapping[str, Tensor | StoredMatrix]) -> list[Stack]:
    """Group matrices of the same input into as few stacks as possible: one if all are tensors, or packed alike."""
    matrices = [weights[f"{name}.weight"] for name in names]
    packed = [matrix for matrix in matrices if isinstance(matrix, StoredMatrix)]
    together = can_stack(packed) if len(packed) == len(matrices) else not packed
    return [names] if together else [(name,) for name in names]


def _tensor(weights: Mapping[str, Tensor | StoredMatrix], name: str) -> Tensor:
    tensor = weights[f"{name}.weight"]
    assert isinstance(tensor, Tensor)
    return tensor


def _qk_norm(weights: Mapping[str, Tensor | StoredMatrix], prefix: str) -> Tensor:
    """Return the norm weights of a layer's queries and keys: [2, head_dim]."""
    return torch.stack([_tensor(weights, f"{prefix}.self_attn.{name}") for name in ("q_norm", "k_norm")])


def _sinks(weights: Mapping[str, Tensor | StoredMatrix], prefix: str) -> Tensor | None:
    """Return the sinks of a layer's heads: [heads] float32."""
    sinks = weights.get(f"{prefix}.self_attn.sinks")
    return sinks.float() if isinstance(sinks, Tensor) else None


def _matrices(
    weights: Mapping[str, Tensor | StoredMatrix], stacks: list[Stack], like: Tensor, kernels: LlamaKernels
) -> dict[Stack, Matrix]:
    """Lay out each stack as one matrix, on the device and in the type of `like`, in the order of `stacks`."""

    def laid_out(names: Stack) -> Tensor | StoredMatrix:
        keys = [f"{name}.weight" for name in names]
        taken = [weights.pop(key) if isinstance(weights, dict) else weights[key] for key in keys]
        tensors = [matrix for matrix in taken if isinstance(matrix, Tensor)]
        return torch.cat(tensors) if tensors else stack([m for m in taken if isinstance(m, StoredMatrix)])

    def bias(names: Stack) -> Tensor | None:
        biases = [bias for name in names if isinstance(bias := weights.get(f"{name}.bias"), Tensor)]  # all, or none
        return torch.cat(biases) if biases else None

    sizes = []
    for names in stacks:
        shapes = [weights[f"{name}.weight"].shape for name in names]
        sizes.append((sum(num_outputs for num_outputs, _ in shapes), shapes[0][1]))
    each = (laid_out(names) for names in stacks)
    ready = kernels.linears(sizes, each, [bias(names) for names in stacks], like)
    return dict(zip(stacks, ready, strict=True))


class Llama(Runner):
    """A runner of a Llama's steps: it moves blocks in `kv_cache`, computes logits, and chooses tokens.

    It also runs Mistral (windows), Qwen2 (biases), Qwen3 (norms of queries and keys), and Gemma 2 and 3 (all of these
    but biases, and more). See `models/config.py`.
    """

    chooses = True
    """Whether this runner has the last layers, and so makes logits and chooses tokens."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights | Mapping[str, Tensor | StoredMatrix],
        kv_cache: KVCache,
        *,
        max_num_seqs: int = 256,
        max_model_len: int | None = None,
        num_lanes: int = 1,
    ) -> None:
        """`weights`: ready (`Weights.of`), or tensors named as in transformers, on the cache's device and of its dtype.

        Measures the costs of preemption on this device and, on a GPU, captures the decoding steps. Both run the model.
        The measurement overwrites blocks of the cache, which must be unused.
        """
        self.config = config
        self.kv_cache = kv_cache
        self.kernels = kv_cache.kernels
        self.weights = weights if isinstance(weights, Weights) else Weights.of(config, weights, self.kernels)
        self.groups = config.groups
        self.scale = 1 / math.sqrt(config.query_pre_attn_scalar or config.head_dim)  # of attention scores
        views = [kv_cache.layer(i) for i in range(len(self.weights.layers))]
        longest = config.max_position_embeddings if max_model_len is None else max_model_len
        layers = self.weights.layers
        windows = [config.window(i) for i in range(len(layers))]
        # Each layer's window, where a sequence can be longer.
        self.windows = [None if window is None or window >= longest else window for window in windows]
        # The group of a layer that sees everything, in whose table shared blocks are found; None: there is none.
        self._sharing = self.groups.of_layer[self.windows.index(None)] if None in self.windows else None
        # Each layer's cos and sin. Gemma 3 has other rotary frequencies in layers with a window.
        ropes = {config.rope(window): window for window in windows}
        tables = {rope: rotary_tables(config, longest, kv_cache.device, each) for rope, each in ropes.items()}
        self.rotations = [tables[config.rope(window)] for window in windows]
        self._one_call = None
        num_groups = len(self.groups.windows)
        if not config.gemma and num_groups == 1:  # the call knows no soft caps, GELU, norms of results and other tables
            heads, eps, angles = config.num_attention_heads, config.rms_norm_eps, self.rotations[0]
            self._one_call = self.kernels.in_one_call(layers, views, self.windows, heads, *angles, self.scale, eps)
        max_blocks = min(-(-longest // kv_cache.block_size), kv_cache.num_blocks)
        if self.groups.windows != (None,):  # a sequence may be longer than what the pool holds of it
            max_blocks = -(-longest // kv_cache.block_size)
        self.mirrors = PerLane(Mirror)
        self.mirror = Mirror()  # the mirror of the lane of the current step
        self.tables = DeviceTables(2 * max_num_seqs, max_blocks, kv_cache.device, self.kernels, num_lanes, num_groups)
        self._has_lanes = num_lanes > 1
        # Each lane's last batch (by the lane's mirror), if the next step may continue from it.
        self._steady: dict[Mirror, FlatBatch] = {}
        self._choosing: dict[Mirror, Choosing] = {}  # each lane's last sampling plan
        self._prompt_hidden: tuple[Tensor, Tensor, Tensor] | None = None  # the input of `prompt_logprobs`
        self._graphs: dict[int, DecodeGraph] = {}
        first = self.weights.layers[0]
        matrices = (first.qkv, first.o, first.gate_up, first.down)
        self._has_small_layers = sum(matrix.nbytes for matrix in matrices) <= SMALL_LAYER
        if is_gpu(kv_cache.device):
            self._capture(max_num_seqs)
        self._costs = measure(kv_cache, self.forward, num_groups, longest)

    @torch.inference_mode()
    def run(self, step: StepInput) -> StepResult:
        # The previous step's chosen tokens are read on the device, if they are there.
        self.mirror = self.mirrors.of(step)
        self.mirror.apply(step, wait=not isinstance(self.mirror.latest, Samples))
        self.tables.apply(step)
        self.move(step.moves)
        logits = self._forward()
        choices = self.sample(logits, self.mirror.sampling_inputs())
        self.mirror.chosen(choices)
        if self._has_lanes and self._graphs:  # beam search reads them after other lanes have run the same graphs
            logits = logits.clone()
        return StepResult(choices, logits, self.prompt_logprobs(self.mirror.prompt_inputs))

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Return the logits [rows that want them, vocab_size] after the last query token of each row. All tokens are
        known.

        The block tables are those in `batch`, not those that steps have set.
        """
        if not batch:
            return self._no_logits()
        batch, _ = one_by_one(batch, range(len(batch)))
        on_device = to_device(_host_tables(batch, len(self.groups.windows)), self.kv_cache.device)
        tokens = self._with_shared(flatten(batch, range(len(batch)), on_device), batch)
        return self._compute(tokens.on(self.kv_cache.device))

    def sample(self, logits: Tensor, inputs: Sequence[SamplingInput]) -> Sequence[Sampled]:
        """Choose one token for each input. The tokens may still be on the device (`sampling.Samples`)."""
        kept = self._choosing.pop(self.mirror, None)  # removed, in case an error interrupts this step
        if not inputs:
            return []
        with self.kernels.computing(throughout=False):
            how = Choosing.of(inputs, logits, kept)
            samples = how.sample(logits)
        self._choosing[self.mirror] = how
        return samples

    def prompt_logprobs(self, inputs: Sequence[PromptInput]) -> dict[int, Sequence[Sampled]]:
        """Return the log-probabilities of prompts, by sequence, still on the device. The logits for them are made and
        dropped in pieces."""
        if not inputs:
            return {}
        assert self._prompt_hidden is not None
        (x, residual, rows), self._prompt_hidden = self._prompt_hidden, None
        at_once = max(1, PIECE // self.config.vocab_size)
        told: dict[int, Sequence[Sampled]] = {}
        first = 0  # the index in `rows` of the current prompt's first token
        with self.kernels.computing(throughout=False):
            for asked in inputs:
                parts = []
                for i in range(0, len(asked.token_ids), at_once):
                    token_ids = asked.token_ids[i : i + at_once]
                    places = rows[first + i : first + i + len(token_ids)]
                    logits = self._logits(x[places], residual[places])  # [piece, vocab]
                    parts.append(gather_logprobs(logits, token_ids, asked.num_logprobs))
                first += len(asked.token_ids)
                told[asked.sequence] = joined(parts)
        return told

    def _forward(self) -> Tensor:
        """Compute the logits of the mirror's rows."""
        rows = self.mirror.rows
        before = self._steady.pop(self.mirror, None)  # removed, in case an error interrupts this step
        if not len(rows):
            return self._no_logits()
        # The previous step's choices, on the device; the host may not know them yet.
        chosen = self.mirror.latest.token_ids if isinstance(self.mirror.latest, Samples) else None  # [choices] int64
        if rows.num_steady > 1 and chosen is not None:
            if before:  # the last step was not in a graph
                self._steady[self.mirror] = tokens = before.one_further(chosen)
                return self._compute(tokens)
            graph = self._graph_for(len(rows))
            if graph and not self._has_lanes:  # otherwise another lane may have run it since
                return graph.run_again(chosen)
        batch, device_rows = one_by_one(self.mirror.batch(), self.tables.rows_of(row.sequence for row in rows))
        tokens = self._with_shared(flatten(batch, device_rows, self.tables.by_group, chosen), batch)
        if rows.num_steady and chosen is not None:  # from here on, each row's input is the token chosen for it
            tokens = replace(tokens, ids=-1 - torch.arange(len(rows), dtype=torch.int32), chosen=chosen)
        by_graph = tokens.num_decoding > 0 and not tokens.asks_of_decoding and tokens.shared is None
        graph = self._graph_for(tokens.num_decoding) if by_graph else None
        if graph and tokens.num_decoding == len(batch):
            return graph.run(tokens)
        if graph and self._has_small_layers:
            return self._run_apart(tokens, graph)
        self._steady[self.mirror] = tokens = tokens.on(self.kv_cache.device)
        return self._compute(tokens)

    def _run_apart(self, tokens: FlatBatch, graph: DecodeGraph) -> Tensor:
        """Return the logits of a batch on the host: its decoding sequences run in their graph, then the others in a
        pass.

        The graph runs first because it is one launch: while the device is busy with it, the host launches the other
        kernels one by one. No sequence reads what another one writes in the same step, so the order changes nothing
        else (`tests/engine/test_content_oracle.py`).
        """
        decoding, others = tokens.split()
        parts = [graph.run(decoding), self._compute(others.on(self.kv_cache.device))]
        parts = [logits for logits in parts if len(logits)]
        if len(parts) < 2:
            return parts[0] if parts else self._no_logits()
        assert tokens.logit_rows is not None
        late = (tokens.logit_rows >= tokens.num_decoding).int()  # [rows that want logits]
        logits = torch.cat(parts)
        if not (late.diff() < 0).any():  # the parts are already in the batch's order
            return logits
        return logits[to_device(late.argsort(stable=True).argsort(), logits.device)]

    def _no_logits(self) -> Tensor:
        return torch.empty(0, self.config.vocab_size, dtype=self.kv_cache.dtype, device=self.kv_cache.device)

    def _compute(self, tokens: FlatBatch, slots: Tensor | None = None) -> Tensor:
        """Run all layers. Returns the logits [rows that want them, vocab_size]. `slots`: [tokens], those of the first
        group of layers, or None to look them up."""
        all_decode = tokens.num_decoding == len(tokens.positions)
        with self.kernels.computing(kind=(id(self), tokens.num_decoding) if all_decode else None):
            return self._run_layers(tokens, slots)

    def _run_layers(self, tokens: FlatBatch, slots: Tensor | None) -> Tensor:
        eps, heads = self.config.rms_norm_eps, self.config.num_attention_heads
        kernels, weights = self.kernels, self.weights
        block_size = self.kv_cache.block_size
        all_slots = [slots] if slots is not None else []  # [groups] [tokens]
        for table in tokens.tables[len(all_slots) :]:
            all_slots.append(kernels.slot_mapping(table, tokens.token_rows, tokens.positions, block_size))
        assert weights.embed is not None
        residual = weights.embed(tokens.token_ids())  # [tokens, hidden]
        own_kernels = self.kv_cache.kernels is kernels  # others that were put there are to be called
        shared = self._shared(tokens)
        if self._one_call and own_kernels and tokens.num_decoding == len(residual) <= self._one_call.most_tokens:
            where = tokens.positions, all_slots[0], tokens.tables[0], tokens.rows, tokens.context_lens, shared
            return self._leave(tokens, self._one_call(residual, *where), residual)
        activate = kernels.geglu if self.config.gemma else kernels.swiglu
        x = kernels.rms_norm(residual, weights.layers[0].input_norm, eps)  # [tokens, hidden]
        for i, layer in enumerate(weights.layers):
            if i:
                x = kernels.add_rms_norm(x, residual, layer.input_norm, eps)
            qkv = layer.qkv(x)  # [tokens, (heads + 2 * kv_heads) * head_dim]
            keys, values = self.kv_cache.layer(i)
            group = self.groups.of_layer[i]
            q = kernels.rope_and_write(
                qkv,
                *self.rotations[i],
                tokens.positions,
                all_slots[group],
                keys,
                values,
                heads,
                layer.qk_norm,
                eps,
                self.kv_cache.scales(i),
                self.kv_cache.static(i),
            )  # [tokens, heads, head_dim]
            x = attend(
                q,
                self.kv_cache,
                i,
                tokens.tables[group],
                tokens.rows,
                tokens.query_start,
                tokens.context_lens,
                self.scale,
                num_decoding=tokens.num_decoding,
                max_query_len=tokens.max_query_len,
                shared=shared,
                window=self.windows[i],
                soft_cap=self.config.attn_logit_softcapping,
                sinks=layer.sinks,
            )  # [tokens, heads, head_dim]
            x = layer.o(x.view(len(x), -1))  # [tokens, hidden]
            if layer.attention_norm is not None:
                x = kernels.rms_norm(x, layer.attention_norm, eps)
            x = kernels.add_rms_norm(x, residual, layer.post_norm, eps)
            x = layer.down(activate(layer.gate_up(x)))  # [tokens, hidden]
            if layer.mlp_norm is not None:
                x = kernels.rms_norm(x, layer.mlp_norm, eps)
        return self._leave(tokens, x, residual)

    def _with_shared(self, tokens: FlatBatch, batch: Batch) -> FlatBatch:
        """On a GPU, add the decoding sequences whose common blocks are read once for all of them, if that pays. The
        host has no tables there, so they are made from the rows of the batch.

        The shared prefixes hold until the rows change: they are full blocks, which keep their contents as long as the
        first member runs.
        """
        group = self._sharing
        if group is None or not is_gpu(self.kv_cache.device):
            return tokens
        num_sharing = self.windows.count(None)  # layers with a window share nothing
        lens = tokens.context_lens[: tokens.num_decoding]
        block_size = self.kv_cache.block_size
        token_bytes = self.kv_cache.block_bytes // (block_size * self.kv_cache.layers_per_block)  # per layer
        least = -(-LEAST_SAVED_ON_GPU * len(self.windows) // (token_bytes * num_sharing))  # tokens
        if int(lens.sum()) < least:
            return tokens
        decoding = [row for row in batch if len(row.token_ids) == 1]
        if len({row.blocks[group] for row in decoding}) == len(decoding):
            return tokens
        table = _host_tables(decoding, len(self.groups.windows))[group]
        return replace(tokens, shared=shared_prefixes(table, lens, block_size, least=least))

    def _shared(self, tokens: FlatBatch) -> Shared | None:
        """Return the decoding sequences whose common blocks are read once for all of them."""
        count = tokens.num_decoding
        if count < 2 or is_gpu(self.kv_cache.device):  # a GPU's batch says so (`_with_shared`)
            return tokens.shared
        if self._sharing is None:
            return None  # nobody reads what lies before a window
        rows, lens = tokens.rows[:count], tokens.context_lens[:count]
        return shared_prefixes(tokens.tables[self._sharing], lens, self.kv_cache.block_size, rows, LEAST_SAVED)

    def _leave(self, tokens: FlatBatch, x: Tensor, residual: Tensor) -> Tensor:
        """Return the logits [rows that want them, vocab_size] from the last layer's output and the residual,
        [tokens, hidden] each. `residual` is overwritten."""
        if tokens.prompt_rows is not None:
            self._prompt_hidden = x, residual, tokens.prompt_rows
        if tokens.logit_rows is not None:
            x, residual = x[tokens.logit_rows], residual[tokens.logit_rows]  # [rows, hidden]
        return self._logits(x, residual) if len(x) else self._no_logits()

    def _logits(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return logits [rows, vocab_size] from the last layer's output and the residual, [rows, hidden] each.
        `residual` is overwritten."""
        weights = self.weights
        assert weights.norm is not None
        assert weights.head is not None
        logits = weights.head(self.kernels.add_rms_norm(x, residual, weights.norm, self.config.rms_norm_eps))
        cap = self.config.final_logit_softcapping
        return logits if cap is None else (cap * torch.tanh(logits.float() / cap)).to(logits.dtype)

    def warm_up(self) -> None:
        """Run small examples of all work that serving may need, so that kernels compile now and not while requests
        wait. (numba keeps compiled code in files, so on a CPU penalties and grammars are left to the first request
        that has some.) The cache must be unused."""
        chosen_by = [SamplingParams(temperature=0), SamplingParams(temperature=1)]
        if is_gpu(self.kv_cache.device):
            self._warm_up_kernels()
            chosen_by += [
                SamplingParams(repetition_penalty=2),
                SamplingParams(repetition_penalty=2, top_k=2, top_p=0.5, logprobs=1),
            ]
        for params in chosen_by:
            result = self._begin_anew([1], Sampling(params, seed=0, stream=0))
            if self.chooses:
                list(result.choices)
        if is_gpu(self.kv_cache.device) and self.chooses:
            self._warm_up_grammars(result.logits)

    def _warm_up_grammars(self, logits: Tensor) -> None:
        """Choose tokens for the first row of `logits` among those that a grammar allows: greedily, by drawing, and
        with a penalty."""
        allowed = np.full(-(-self.config.vocab_size // 32), 2**32 - 1, np.uint32)
        for params in (
            SamplingParams(temperature=0),
            SamplingParams(temperature=1),
            SamplingParams(repetition_penalty=2),
        ):
            list(self.sample(logits, [SamplingInput(0, params, [0], [], seed=0, stream=0, allowed=allowed)]))

    def _warm_up_kernels(self) -> None:
        """Run prompts for all tile sizes, the largest number of sequences, a fork, and block moves."""
        cache = self.kv_cache
        most_tokens = min(len(self.rotations[0][0]), cache.num_blocks * cache.block_size)
        most_seqs = self.tables.max_rows // 2
        hidden = self.weights.layers[0].input_norm.new_zeros(max(PROMPT_LENGTHS), self.config.hidden_size)
        for length in sorted({min(length, most_tokens) for length in PROMPT_LENGTHS}):
            self._begin_anew([length])
            if self.chooses:
                self._logits(hidden[:length], hidden[:length])  # for prompts with log-probabilities
        self._begin_anew([1] * most_seqs)  # may be more sequences than a graph is captured for
        self._warm_up_shared_reading()
        there_and_back = ((0, 0),) if cache.num_swap_blocks else ()
        copied = ((0, 1),) if cache.num_blocks > 1 else ()
        moves = BlockMoves(swap_out=there_and_back, swap_in=there_and_back, copy=copied)
        self.run(StepInput(1, forked=(Forked(most_seqs, parent=0, choice=LOGITS),), moves=moves))

    def _warm_up_shared_reading(self) -> None:
        """Run two sequences of one token each as members of a shared prefix, which has no token. The kernels are the
        same. Both own the first row of the tables, which must have blocks."""
        batch = [BatchRow([0], 0, [], wants_logits=True)] * 2
        shared = Shared(*(torch.tensor(each, dtype=torch.int32) for each in ([0, 1], [0, 2], [0])))
        tokens = flatten(batch, [0, 0], self.tables.by_group)
        with torch.inference_mode():
            self._compute(replace(tokens, shared=shared).on(self.kv_cache.device))

    def _begin_anew(self, lengths: Sequence[int], sampling: Sampling | None = None) -> StepResult:
        """Run prompts of the given lengths, all in the same blocks. `sampling`: how to choose a token after each; None:
        no tokens."""
        begun, added = [], []
        for sequence, length in enumerate(lengths):
            groups = len(self.groups.windows)
            blocks = tuple(i // groups for i in range(-(-length // self.kv_cache.block_size) * groups))
            begun.append(Begun(sequence, (0,) * length, length, blocks, sampling))
            added.append(Row(sequence, 0, length, num_choices=0 if sampling is None else 1))
        return self.run(StepInput(0, fresh=True, begun=tuple(begun), added=tuple(added)))

    def move(self, moves: BlockMoves) -> None:
        """Swap out, poison, swap in, copy and load blocks."""
        carry(self.kv_cache, moves)

    def read_blocks(self, blocks: Sequence[int]) -> list[bytes]:
        return read_blocks(self.kv_cache, blocks)

    def read_host_blocks(self, blocks: Sequence[int]) -> list[bytes]:
        return read_host_blocks(self.kv_cache, blocks)

    def costs(self) -> Costs:
        """The costs of swapping and recomputing on this device, measured when the model was made."""
        return self._costs

    # --- CUDA graphs ------------------------------------------------------------------------------

    def _graph_for(self, num_seqs: int) -> DecodeGraph | None:
        """The smallest captured step with room for `num_seqs` sequences; None if there is none."""
        return next((graph for size, graph in self._graphs.items() if size >= num_seqs), None)

    def _capture(self, max_num_seqs: int) -> None:
        """Capture a decoding step for each batch size, the largest first, so that the others share its memory."""
        sizes = sorted({min(size, max_num_seqs) for size in BATCH_SIZES})
        device = self.kv_cache.device
        chosen = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        # One stream for all: cuBLAS keeps scratch memory for each stream that it has run on.
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        graphs: list[tuple[int, DecodeGraph]] = []
        for size in reversed(sizes):
            pool = graphs[0][1].graph.pool() if graphs else None
            graphs.append((size, DecodeGraph(size, self, chosen, stream, pool)))
        self._graphs = dict(reversed(graphs))


class DecodeGraph:
    """A captured decoding step of `size` sequences, so that the host launches all its kernels in one call.

    It begins by moving each sequence to its next position: slots and context lengths are computed on the device, from
    the block tables (`advance_decode`, and `slot_mapping` for each further group of layers). Its input tensors keep
    their contents between runs. So while the same sequences continue with the tokens that the device has just chosen,
    the host sends nothing. Otherwise it sends three numbers per sequence.

    The tokens that the last step chose are copied into `chosen`, which all sizes share: [max_num_seqs] int64.
    """

    PADDING = -2
    """A position that never advances. (-1 is the position of a sequence before its first token.)"""

    def __init__(self, size: int, llama: Llama, chosen: Tensor, stream: torch.cuda.Stream, pool: Any) -> None:
        device = chosen.device
        self._padding = np.zeros((3, size), np.int32)
        self._padding[2] = self.PADDING
        self._held: NDArray[np.int32] | None = None  # the contents of `numbers`; None: unknown
        self.numbers = torch.tensor(self._padding, device=device)  # [3, size]: the last run's ids, rows, positions
        ids, rows, positions = self.numbers.unbind()
        slots, context_lens = torch.empty_like(self.numbers[:2]).unbind()  # [size] each
        self._llama = llama
        self._chosen = chosen
        self._slots = slots
        self._tokens = FlatBatch(
            tables=llama.tables.by_group,
            ids=ids,
            positions=positions,
            token_rows=rows,
            rows=rows,
            context_lens=context_lens,
            query_start=torch.zeros(1, dtype=torch.int32, device=device),
            logit_rows=None,
            num_decoding=size,
            max_query_len=1,
            chosen=chosen,
        )
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream), torch.inference_mode():
            self.step()  # compiles every kernel: nothing may compile during the capture
        torch.cuda.current_stream(device).wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        # The capture excludes, and permits, work of other threads on the GPU meanwhile.
        capture = torch.cuda.graph(self.graph, pool=pool, stream=stream, capture_error_mode="thread_local")
        # Keep this order: torch creates its own bookkeeping tensors at the first capture. Created in inference mode,
        # they would make every later capture outside of it fail, in the whole process (pytorch/pytorch#166792).
        with capture, torch.inference_mode():
            self.logits = self.step()  # [size, vocab]

    def step(self) -> Tensor:
        """The work that is captured: advance one position, then compute the logits [size, vocab_size]."""
        llama, tokens = self._llama, self._tokens
        llama.kernels.advance_decode(
            llama.tables.tables,
            tokens.rows,
            tokens.positions,
            self._slots,
            tokens.context_lens,
            llama.kv_cache.block_size,
        )
        return llama._compute(tokens, self._slots)

    def run(self, batch: FlatBatch) -> Tensor:
        """Return the logits [rows that want them, vocab_size]. The next run overwrites them.

        `batch`: on the host; every row has one token.
        """
        count = len(batch.ids)
        numbers = self._padding.copy()
        numbers[0, :count] = batch.ids
        numbers[1, :count] = batch.rows
        numbers[2, :count] = batch.positions - 1
        held, self._held = self._held, None  # unknown if this is interrupted
        if held is None or not np.array_equal(numbers, held):
            self.numbers.copy_(torch.from_numpy(numbers).pin_memory(), non_blocking=True)
        logits = self._replay(numbers, count, batch.chosen)
        return logits if batch.logit_rows is None else logits[to_device(batch.logit_rows, logits.device)]

    def run_again(self, chosen: Tensor) -> Tensor:
        """Run the sequences of the last run again, one position further, each with the token chosen for its row."""
        held, self._held = self._held, None
        assert held is not None
        return self._replay(held, len(chosen), chosen)

    def _replay(self, numbers: NDArray[np.int32], count: int, chosen: Tensor | None) -> Tensor:
        if chosen is not None:
            self._chosen[: len(chosen)].copy_(chosen)
        self.graph.replay()
        numbers[2, :count] += 1  # the device has done the same
        self._held = numbers
        return self.logits[:count]


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """A batch as int32 tensors: the query tokens of all sequences, concatenated.

    The decoding sequences come first: those with one query token, including a prompt's last token. The others follow.
    Both parts keep the batch's order.
    """

    tables: Tensor  # [groups, any, max_blocks], the block tables of each group of layers, on the device
    ids: Tensor  # [tokens]; an id of -1 - i means chosen[i]
    positions: Tensor  # [tokens]
    token_rows: Tensor  # [tokens], each token's row of the block tables
    rows: Tensor  # [seqs], each sequence's row of the block tables
    context_lens: Tensor  # [seqs]
    query_start: Tensor  # [other seqs + 1], offsets into their tokens
    logit_rows: Tensor | None
    """[logits], in the batch's order: the indices in [tokens] of the last query tokens of rows that want logits. None:
    all tokens."""
    num_decoding: int
    max_query_len: int
    prompt_rows: Tensor | None = None
    """[prompt tokens that predict a requested log-probability], their indices in [tokens]. None if there are none."""
    asks_of_decoding: bool = False
    """Whether some of `prompt_rows` are among the decoding sequences: a prompt's chunk of one token is laid out with
    them."""
    chosen: Tensor | None = None  # [samples] int64, on the device: the previous step's choices. None: all ids known
    shared: Shared | None = None
    """On a GPU, the decoding sequences whose common blocks are read once for all of them. (On a CPU they are found in
    the tables when the batch runs.)"""

    def token_ids(self) -> Tensor:
        """Return the token ids [tokens], looked up on the device if only the device knows them."""
        if self.chosen is None:
            return self.ids
        return torch.where(self.ids < 0, self.chosen[(-1 - self.ids).clamp(min=0)], self.ids)

    def on(self, device: torch.device) -> FlatBatch:
        """Copy the batch to a device, as one tensor."""
        if not is_gpu(device):
            return self
        parts = [self.ids, self.positions, self.token_rows, self.rows, self.context_lens, self.query_start]
        wanted = {"logit_rows": self.logit_rows, "prompt_rows": self.prompt_rows}
        others = {name: places for name, places in wanted.items() if places is not None}
        parts += [*others.values(), *(self.shared or ())]
        whole = to_device(torch.cat(parts), device)
        ids, positions, token_rows, rows, lens, start, *places = torch.split(whole, list(map(len, parts)))
        places, shared = places[: len(others)], places[len(others) :]
        return replace(
            self,
            ids=ids,
            positions=positions,
            token_rows=token_rows,
            rows=rows,
            context_lens=lens,
            query_start=start,
            shared=Shared(*shared) if shared else None,
            **dict[str, Any](zip(others, places, strict=True)),
        )

    def split(self) -> tuple[FlatBatch, FlatBatch]:
        """Split the batch into the decoding sequences and the others. There must be some of each, on the host, and the
        decoding sequences may not be asked for prompt log-probabilities."""
        n, last = self.num_decoding, self.logit_rows
        assert last is not None
        wanted = last[last < n]

        def part(cut: slice, **others: Any) -> FlatBatch:
            """`cut`: a slice of both tokens and sequences, since each decoding sequence has one token."""
            return replace(
                self,
                ids=self.ids[cut],
                positions=self.positions[cut],
                token_rows=self.token_rows[cut],
                rows=self.rows[cut],
                context_lens=self.context_lens[cut],
                chosen=self.chosen if (self.ids[cut] < 0).any() else None,
                **others,
            )

        start, logit_rows = self.query_start[:1], None if len(wanted) == n else wanted
        decoding = part(slice(n), query_start=start, logit_rows=logit_rows, max_query_len=1, prompt_rows=None)
        asked = None if self.prompt_rows is None else self.prompt_rows - n
        return decoding, part(slice(n, None), logit_rows=last[last >= n] - n, num_decoding=0, prompt_rows=asked)

    def one_further(self, chosen: Tensor) -> FlatBatch:
        """Return the batch of the same sequences with the tokens chosen for them. This batch is overwritten."""
        self.positions.add_(1)
        self.context_lens.add_(1)
        return replace(self, chosen=chosen)


def _host_tables(batch: Batch, num_groups: int = 1) -> Tensor:
    """Return the block tables of a batch's rows, on the host: [groups, seqs, max_blocks] int32."""
    max_blocks = max(len(row.blocks) for row in batch) // num_groups
    if num_groups > 1:
        max_blocks = -(-max_blocks // 4) * 4  # each group's begin at a multiple of 16 bytes, as in `DeviceTables`
    tables = np.full((num_groups, len(batch), max_blocks), -1, np.int32)
    for s, row in enumerate(batch):
        for group in range(num_groups):
            blocks = row.blocks[group::num_groups]
            tables[group, s, : len(blocks)] = blocks
    return torch.from_numpy(tables)


def one_by_one(batch: Batch, rows: Sequence[int]) -> tuple[Batch, Sequence[int]]:
    """Return a batch in which each drafted token has a row of its own, and the row of the block tables that belongs to
    each.

    So a decoding sequence and its drafts take the decode kernel and all that comes with it, such as graphs. Each layer
    writes the keys and values of all tokens before its attention, so a drafted token sees those before it.
    """
    if not any(row.num_drafted for row in batch):
        return batch, rows
    parts, owners = list[BatchRow](), list[int]()
    for row, owner in zip(batch, rows, strict=True):
        cut = len(row.token_ids) - row.num_drafted
        parts.append(replace(row, token_ids=row.token_ids[:cut], num_drafted=0))
        for i, token in enumerate(row.token_ids[cut:], row.first_position + cut):
            parts.append(BatchRow([token], i, row.blocks, wants_logits=True))
        owners += [owner] * (row.num_drafted + 1)
    return parts, owners


def flatten(batch: Batch, rows: Sequence[int], tables: Tensor, chosen: Tensor | None = None) -> FlatBatch:
    """Lay the rows of a batch out one after another. `rows`: the row of `tables` that belongs to each."""
    lens = np.array([len(row.token_ids) for row in batch], np.int32)  # [seqs], in batch order; below, in layout order
    order = np.argsort(lens > 1, kind="stable")  # [seqs]
    num_decoding = int((lens == 1).sum())
    laid_out = [batch[i] for i in order]
    query_lens = lens[order]
    ends = np.cumsum(query_lens, dtype=np.int32)
    first = np.array([row.first_position for row in laid_out], np.int32)
    owners = np.array(rows, np.int32)[order]
    last = np.empty_like(ends)  # [seqs], in the batch's order: last query tokens
    last[order] = ends - 1
    wanted = [row.wants_logits for row in batch]
    firsts = (last - lens + 1).tolist()  # [seqs], in the batch's order: first query tokens
    asked = [range(first, first + row.num_prompt_logits) for first, row in zip(firsts, batch, strict=True)]
    prompt_rows = list(chain.from_iterable(asked))
    # None lets `_logits` overwrite the tokens' hidden states. Not if prompt log-probabilities need them too.
    every = num_decoding == len(batch) and all(wanted) and not prompt_rows
    ids = np.fromiter(chain.from_iterable(row.token_ids for row in laid_out), np.int32, ends[-1])
    positions = np.arange(ends[-1], dtype=np.int32) + np.repeat(first + query_lens - ends, query_lens)
    return FlatBatch(
        tables=tables,
        ids=torch.from_numpy(ids),
        positions=torch.from_numpy(positions),
        token_rows=torch.from_numpy(np.repeat(owners, query_lens)),
        rows=torch.from_numpy(owners),
        context_lens=torch.from_numpy(first + query_lens),
        query_start=torch.from_numpy(np.append(np.int32(0), ends[num_decoding:] - np.int32(num_decoding))),
        logit_rows=None if every else torch.from_numpy(last[wanted]),
        num_decoding=num_decoding,
        max_query_len=int(query_lens.max(initial=1)),
        prompt_rows=torch.tensor(prompt_rows, dtype=torch.int32) if prompt_rows else None,
        asks_of_decoding=any(place < num_decoding for place in prompt_rows),
        chosen=chosen if (ids < 0).any() else None,
    )
