"""A GPU that is pretended: its tensors, streams, events, pinned memory and graphs, on a machine without one.

What runs there is computed at once, by torch on a CPU and by Triton's interpreter, so the numbers are real. What is
pretended is time: every operation is put on the clocks of `happens_before.py` as if the device came to it whenever it
likes, and what nothing puts in order is a race. Beyond that it is as strict as a GPU is, or stricter:

- Its tensors are on a device of their own ("gpu"). One operation takes tensors of one device; a kernel takes no others.
- What a kernel reads and writes is not declared but watched: the addresses of its loads and stores.
- A copy into pinned memory arrives as late as it may: until the host has waited for it, there is rubbish.
- A copy out of pinned memory may be late, too: what it took must still be there when the host has waited for it.
- `to` from memory that is not pinned does not copy, as on a CPU: who writes to either of the two has to copy himself.
- A graph does again what was captured, where it was captured; what it had not allocated itself must still be there.
  During the capture nothing runs on the device, and nothing may wait for it.
- `torch.cuda.graph` waits for nobody, and no copy from the host is waited for. (The real ones do, and promise nothing.)
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from triton.runtime import interpreter

from tests.fast.happens_before import HOST, Access, Memory, Order, who
from tests.triton_interpreter import watched

_setup_privateuseone_for_python_backend("gpu")
torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor(numbers, device=...)` asks the mode below for its copy

DEVICE = torch.device("gpu:0")

aten = torch.ops.aten
UNWRITTEN = {aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided}
"""They allocate, and touch nothing."""
WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Operations whose result the host needs before it can go on. Of indexing that holds for masks only."""
INDEXING = {aten.index, aten.index_put_}


class Uses(NamedTuple):
    """Of one operation: the memory that it has read and written. The graph it is part of keeps no memory by this."""

    reads: Sequence[weakref.ref[DeviceMemory]]
    writes: Sequence[weakref.ref[DeviceMemory]]

    @classmethod
    def of(cls, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> Uses:
        return cls(
            *(
                [weakref.ref(tensor.memory) for tensor in tensors if isinstance(tensor, PretendedTensor)]
                for tensors in (reads, writes)
            )
        )


class Operation(NamedTuple):
    """Something for a thread to do, once, or at each replay of a graph."""

    what: str
    run: Callable[[], Uses]


@dataclass(eq=False)
class DeviceMemory(Memory):
    """On the device, or pinned on the host."""

    pinned: bool = False
    arriving: list[tuple[Access, Callable[[], object]]] = field(default_factory=list)
    """Copies into it that the host has not waited for: what makes each arrive."""
    lent: list[tuple[Access, Tensor, Tensor]] = field(default_factory=list)
    """Copies out of it that the host has not waited for: from where, and what was there."""

    def settle(self, is_done: Callable[[Access], bool] = lambda access: True) -> None:
        """Copies that are done have arrived; what they took should be what was there when they were queued."""
        with beneath():
            for access, arrive in self.arriving:
                if is_done(access):
                    arrive()
            for access, source, taken in self.lent:
                if is_done(access) and not torch.equal(source, taken):
                    self.order.found(f"{HOST} has overwritten {self.made}, which {access.what} may not have read")
        self.arriving = [one for one in self.arriving if not is_done(one[0])]
        self.lent = [one for one in self.lent if not is_done(one[0])]

    def __del__(self) -> None:
        self.settle()
        super().__del__()


@contextmanager
def beneath() -> Iterator[None]:
    """Where the numbers are computed: nothing of it is the user's, nor in a mode of his."""
    with torch.inference_mode(), torch._C._DisableTorchDispatch():
        yield


class PretendedTensor(Tensor):
    """A tensor on the device or in pinned memory; its numbers are a tensor of torch's own."""

    numbers: Tensor
    memory: DeviceMemory

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor, memory: DeviceMemory) -> PretendedTensor:
        tensor = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device="cpu" if memory.pinned else DEVICE,
        )
        tensor.numbers, tensor.memory = inner, memory
        return tensor

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{function} on a tensor of a GPU that is gone")

    def data_ptr(self) -> int:
        return self.numbers.data_ptr()

    def record_stream(self, stream: Stream) -> None:
        self.memory.recorded.add(stream.name)

    def numpy(self) -> np.ndarray[Any, Any]:
        """The host reads pinned memory."""
        if not self.memory.pinned:
            raise TypeError("can't convert a tensor of the device to numpy; use Tensor.cpu() first")
        order = self.memory.order
        order.access(self.memory, Access(HOST, order.begin(HOST), f"{who()} on {HOST}"), writes=False)
        return self.numbers.numpy()

    def tolist(self) -> Any:
        return self.numpy().tolist() if self.memory.pinned else self.cpu().tolist()


class Stream:
    def __init__(self, gpu: Gpu, name: str) -> None:
        self.name = name
        self._gpu = gpu

    def wait_event(self, event: Event) -> None:
        self._gpu.order.hear(self.name, event.clock)

    def wait_stream(self, other: Stream) -> None:
        event = Event(self._gpu)
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        event = Event(self._gpu)
        event.record(self)
        event.synchronize()


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.clock: Counter[str] = Counter()
        """Of nothing, until it is recorded: who waits for such an event does not wait."""

    def record(self, stream: Stream | None = None) -> None:
        name = (stream or self._gpu.streams[-1]).name
        self._gpu.order.begin(name)
        self.clock = self._gpu.order.clocks[name].copy()

    def synchronize(self) -> None:
        self._gpu.host_waits(self.clock)


class Graph:
    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.operations: list[Operation] = []
        self.memory: list[Memory] = []
        """What it has allocated."""

    def pool(self) -> tuple[int, int]:
        return (0, 1)

    def replay(self) -> None:
        self._gpu.generator_state().fill_(0)
        for operation in self.operations:
            self._gpu.perform(operation, self._gpu.streams[-1].name)


class Gpu(TorchDispatchMode):
    """Does what torch is asked to, and puts it on the clocks of `order`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """See `GuardedMemory`."""
        return False

    def __init__(self) -> None:
        super().__init__()
        self.order = Order()
        self.streams = [Stream(self, "the default stream")]
        """The last one is the current one."""
        self.waits: Counter[str] = Counter()
        """Where the host has waited for the device."""
        self._num_streams = 0
        self._capturing: Graph | None = None
        self._pinned: weakref.WeakSet[DeviceMemory] = weakref.WeakSet()
        self._generator: Tensor | None = None

    # --- Time -------------------------------------------------------------------------------------

    def perform(self, operation: Operation, thread: str) -> None:
        """A thread does something."""
        now = Access(thread, self.order.begin(thread), f"{operation.what} on {thread}")
        uses = operation.run()
        for memories, writes in ((uses.reads, False), (uses.writes, True)):
            for memory in (reference() for reference in memories):
                if memory is None:
                    self.order.found(f"{now.what} uses memory that was given back")
                else:
                    self.order.access(memory, now, writes=writes)

    def queue(self, operation: Operation) -> None:
        """For the current stream, or for the graph that is being captured."""
        if self._capturing:
            self._capturing.operations.append(operation)
        else:
            self.perform(operation, self.streams[-1].name)

    def host_waits(self, *clocks: Counter[str]) -> None:
        if self._capturing:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.waits[who()] += 1
        for clock in list(clocks):
            self.order.hear(HOST, clock)
        for memory in list(self._pinned):
            memory.settle(functools.partial(self.order.knows, HOST))

    # --- Tensors ----------------------------------------------------------------------------------

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_composite(function):
            with self:
                return function.decompose(*args, **kwargs)
        given = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        device = kwargs.get("device")
        if function is aten._to_copy.default and device is not None and device.type != args[0].device.type:
            return self._to_other_side(*args, **kwargs)
        if function is aten.copy_.default and args[0].device.type != args[1].device.type:
            self._copy(args[0], args[1], *args[2:], **kwargs)
            return args[0]
        if kwargs.get("pin_memory"):
            return self.pin(function(*args, **kwargs | {"pin_memory": False}))
        on_device = device == DEVICE or any(tensor.device == DEVICE for tensor in given)
        if not on_device and not any(isinstance(tensor, PretendedTensor) for tensor in given):
            return function(*args, **kwargs)
        if on_device and any(tensor.device != DEVICE and tensor.ndim for tensor in given):
            raise RuntimeError(f"{function}: tensors of the device and of the host, in {who()}")
        return self._operate(function, args, kwargs, given, on_device)

    def _operate(self, function: Any, args: Any, kwargs: Any, given: list[Tensor], on_device: bool) -> Any:
        """An operation of torch: now, and at each replay of a graph. A capture does it only to have its results."""
        inner_args, inner_kwargs = pytree.tree_map_only(PretendedTensor, lambda tensor: tensor.numbers, (args, kwargs))
        if "device" in inner_kwargs:
            inner_kwargs["device"] = torch.device("cpu")
        pretended = [tensor for tensor in given if isinstance(tensor, PretendedTensor)]
        written = _written(function, args, kwargs)
        result, captured = None, self._capturing if on_device else None
        if not (written and captured):
            with beneath() if on_device else nullcontext():
                result = function(*inner_args, **inner_kwargs)
        bases = {_storage(tensor.numbers): tensor for tensor in pretended}
        results = [] if written else [each for each in pytree.tree_leaves(result) if isinstance(each, Tensor)]
        fresh = {id(each): self._new(each, on_device) for each in results if _storage(each) not in bases}

        if (written or fresh) and function.overloadpacket not in UNWRITTEN:
            reads = [tensor for tensor in pretended if not any(tensor is one for one in written)]
            writes = [tensor for tensor in [*written, *fresh.values()] if isinstance(tensor, PretendedTensor)]
            uses = Uses.of(reads, writes)
            what = f"{function.overloadpacket.__name__} in {who()}"
            if captured:

                def again() -> Uses:
                    with beneath():
                        values = pytree.tree_leaves(function(*inner_args, **inner_kwargs))
                        for place, value in zip(results, values, strict=False):
                            place.copy_(value)
                    return uses

                captured.operations.append(Operation(what, again))
            else:
                self.perform(Operation(what, lambda: uses), self.streams[-1].name if on_device else HOST)
        if on_device and _host_needs_result(function, given):
            self.host_waits(self.order.clocks[self.streams[-1].name])
        if written:
            return written[0]
        return pytree.tree_map_only(
            Tensor, lambda each: fresh[id(each)] if id(each) in fresh else _view(each, bases[_storage(each)]), result
        )

    def _new(self, inner: Tensor, on_device: bool = True, *, pinned: bool = False) -> Any:
        """Memory of the device, pinned memory, or the host's own."""
        if not on_device and not pinned:
            return inner
        owner = HOST if pinned else None if self._capturing else self.streams[-1].name
        memory = DeviceMemory(self.order, owner, f"what {who()} has allocated", pinned=pinned)
        if pinned:
            self._pinned.add(memory)
        elif self._capturing:
            self._capturing.memory.append(memory)
        return PretendedTensor(inner, memory)

    # --- Copies between host and device -------------------------------------------------------------

    def pin(self, tensor: Tensor) -> Tensor:
        with torch._C._DisableTorchDispatch():
            inner = tensor.clone()
        return self._new(inner, pinned=True)

    def _to_other_side(
        self, source: Tensor, *, dtype: torch.dtype | None = None, non_blocking: bool = False, **_: Any
    ) -> Tensor:
        to_host = source.device == DEVICE
        inner = torch.empty(source.shape, dtype=dtype or source.dtype)
        copy = self._new(inner, not to_host, pinned=to_host and non_blocking)
        self._copy(copy, source, non_blocking)
        return copy

    def to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """`Tensor.to`, in the manner of a CPU: it gives the tensor itself to the device, if it is not pinned."""
        if isinstance(tensor, PretendedTensor) or args != (DEVICE,) or kwargs:
            return torch._C.TensorBase.to(tensor, *args, **kwargs)
        shared: Tensor = self._new(tensor)
        uses = Uses.of([], [shared])
        self.queue(Operation(f"a copy in {who()}", lambda: uses))
        return shared

    def _copy(self, to: Tensor, source: Tensor, non_blocking: bool = False) -> None:
        """By the current stream. Pinned memory is not given to others before such a copy is done; of graphs it knows
        nothing."""
        sides = [tensor for tensor in (to, source) if isinstance(tensor, PretendedTensor)]
        if self._capturing and len(sides) == 1:
            raise RuntimeError("Cannot copy between CPU and CUDA tensors during CUDA graph capture unless pinned")
        for tensor in sides:
            if tensor.memory.pinned and not self._capturing:
                tensor.memory.recorded.add(self.streams[-1].name)
        inner_to, inner_source = (getattr(tensor, "numbers", tensor) for tensor in (to, source))
        uses = Uses.of([source], [to])
        what = f"a copy in {who()}"

        def run() -> Uses:
            stream = self.streams[-1].name
            now = Access(stream, self.order.clocks[stream][stream], f"{what} on {stream}")
            read, written = ([memory for one in some if (memory := one()) and memory.pinned] for some in uses)
            for memory in (*read, *written):
                memory.settle()
            with beneath():
                value = inner_source.clone()
                for memory in read:
                    memory.lent.append((now, inner_source, value))
                if written:
                    inner_to.copy_(torch.full_like(value.view(torch.uint8), 0xFF).view(value.dtype))
                    written[0].arriving.append((now, lambda: inner_to.copy_(value)))
                else:
                    inner_to.copy_(value)
            return uses

        self.queue(Operation(what, run))
        if not non_blocking:  # what goes to the device has left the host then, but need not have arrived
            self.host_waits(*[self.order.clocks[self.streams[-1].name]] * (source.device == DEVICE))

    # --- Kernels ----------------------------------------------------------------------------------

    def launcher(self) -> Callable[..., None]:
        run_kernel = interpreter.InterpretedFunction.run

        def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)]
            if any(tensor.device != DEVICE for tensor in tensors):
                raise ValueError(f"Pointer argument of {kernel.__name__} cannot be accessed from Triton (cpu tensor?)")
            inner_args = [arg.numbers if isinstance(arg, Tensor) else arg for arg in args]
            memories = {_storage(tensor.numbers): weakref.ref(tensor.memory) for tensor in tensors}

            def run() -> Uses:
                with beneath(), watched(inner_args) as watch:
                    run_kernel(kernel, *inner_args, grid=grid, warmup=warmup, **kwargs)
                return Uses([memories[one] for one in watch.read], [memories[one] for one in watch.written])

            self.queue(Operation(f"{kernel.__name__} in {who()}", run))

        return launch

    # --- Streams and graphs -------------------------------------------------------------------------

    def new_stream(self, device: Any = None) -> Stream:
        self._num_streams += 1
        return Stream(self, f"stream {self._num_streams}")

    @contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        self.streams.append(stream)
        try:
            yield
        finally:
            self.streams.pop()

    @contextmanager
    def capture(
        self, graph: Graph, pool: Any = None, stream: Stream | None = None, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        self.generator_state().fill_(0)
        with self.on_stream(stream or self.new_stream()):
            self._capturing = graph
            try:
                yield
            finally:
                self._capturing = None

    def generator_state(self) -> Tensor:
        """What torch keeps for graphs that draw random numbers, and sets for each graph: made with the first, and in
        some versions in whatever mode that was captured in."""
        if self._generator is None:
            self._generator = torch.zeros(1)
        return self._generator


@contextmanager
def pretended_gpu() -> Iterator[Gpu]:
    """Within it, `torch.cuda` is this GPU."""
    gpu = Gpu()
    cuda = {
        "Stream": gpu.new_stream,
        "Event": lambda: Event(gpu),
        "CUDAGraph": lambda: Graph(gpu),
        "graph": gpu.capture,
        "stream": gpu.on_stream,
        "current_stream": lambda device=None: gpu.streams[-1],
        "synchronize": lambda device=None: gpu.host_waits(*gpu.order.clocks.values()),
        "get_device_properties": lambda device=None: SimpleNamespace(multi_processor_count=1),
        "get_device_capability": lambda device=None: (9, 0),
    }
    with ExitStack() as replaced:
        for name, pretended in cuda.items():
            replaced.enter_context(patch.object(torch.cuda, name, pretended))
        replaced.enter_context(patch.object(Tensor, "pin_memory", lambda tensor: gpu.pin(tensor)))
        replaced.enter_context(patch.object(Tensor, "to", lambda tensor, *to, **kwargs: gpu.to(tensor, *to, **kwargs)))
        replaced.enter_context(patch.object(interpreter.InterpretedFunction, "run", gpu.launcher()))
        replaced.enter_context(gpu)
        yield gpu


def _is_composite(function: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(
        function.name(), torch._C.DispatchKey.CompositeImplicitAutograd
    )


def _host_needs_result(function: Any, given: Sequence[Tensor]) -> bool:
    if function.overloadpacket in INDEXING:
        return any(tensor.dtype == torch.bool for tensor in given[1:])
    return not WAITS.isdisjoint(function.tags)


def _written(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that it writes to."""
    given = {argument.name: value for argument, value in zip(function._schema.arguments, args, strict=False)} | kwargs
    changed = [one.name for one in function._schema.arguments if one.alias_info and one.alias_info.is_write]
    return [given[name] for name in changed if name in given]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _view(inner: Tensor, of: PretendedTensor) -> PretendedTensor:
    """A view of a tensor is of the same mode, whatever mode it is made in."""
    with torch.inference_mode(of.is_inference()):
        return PretendedTensor(inner, of.memory)
