"""Short calls as CUDA graphs: the host launches one graph, not some forty kernels, copies and signals one by one.

A pass of a kind of call that `ringattn.plans.graphs` allows is captured in its third run. A graph begins with copies of
its inputs to where it reads them, and ends with copies of its results out of its memory, where the next replay writes:
none of it is given to users or to autograd. So one graph serves all layers of a model, all in flight.
"""

import ctypes
import gc
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from ringattn.comms.engines import driver
from ringattn.comms.watch import Record
from ringattn.plans.plan import Plan
from ringattn.torch.agree import Words, compare, exchanged

EAGER_RUNS = 2  # of a pass before it is captured: they compile its kernels, and fill its caches
MAX_BYTES = 2**31  # of all graphs of a mesh: with more no graph is added
BROKEN: list[torch.cuda.CUDAGraph] = []  # graphs whose capture did not end: torch's allocators may still ask them

Run = Callable[..., Sequence[Any]]


class Memory:
    """The memory of all graphs of a mesh, which run in turn, as their transfers do."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)  # on which graphs are captured
        self.pool: Any = (0, 0)
        self.graphs: WeakSet[Graph] = WeakSet()  # calls hold them
        self.problem: str | None = None  # the last one, for which some pass is not captured

    @contextmanager
    def capturing(self) -> Iterator[torch.cuda.CUDAGraph]:
        """What is launched meanwhile becomes the graph, and what is allocated belongs to the pool."""
        if not self.graphs:  # torch ends a pool with its last graph
            self.pool = torch.cuda.graph_pool_handle()
        graph, device, collects = torch.cuda.CUDAGraph(keep_graph=True), self.stream.device_index, gc.isenabled()
        gc.disable()  # what it frees might wait for the device
        try:
            with torch.cuda.stream(self.stream):
                graph.capture_begin(self.pool, capture_error_mode="thread_local")
                try:
                    yield graph
                finally:
                    graph.capture_end()
        except BaseException:
            with suppress(RuntimeError):  # if the capture has ended
                torch._C._cuda_endAllocateToPool(device, self.pool)  # else the allocator would defer all that it frees
                BROKEN.append(graph)
                torch._C._cuda_releasePool(device, self.pool)
            raise
        finally:
            if collects:
                gc.enable()

    def segments(self) -> list[range]:
        """The addresses of the pool."""
        return [range(s["address"], s["address"] + s["total_size"]) for s in torch.cuda.memory_snapshot(self.pool)]

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.segments())) if self.graphs else 0

    def __str__(self) -> str:
        why = f"; not captured: {self.problem}" if self.problem else ""
        return f"CUDA graphs of this mesh: {len(self.graphs)} passes of calls, {self.nbytes / 1e6:.1f} MB{why}"


def room_for(x: Tensor) -> Tensor:
    """Dense memory in the order of x. Not torch.empty, which a graph would fill under use_deterministic_algorithms."""
    like = torch.empty_like(x, device="meta")
    return x.new_empty(0).set_(torch.UntypedStorage(like.nbytes, device=x.device), 0, like.shape, like.stride())


class Node:
    """The copy of a tensor into a graph that is captured, or out of it: of another tensor in each replay."""

    INTO, OUT = 48, 136  # where a CUDA_MEMCPY3D, of 200 bytes, has the address of that tensor

    def __init__(self, way: int, to: Tensor, source: Tensor, stream: torch.cuda.Stream):
        call, place, handle = driver(), ctypes.byref, stream.cuda_stream
        self.way, self.params, self.context = way, ctypes.create_string_buffer(200), ctypes.c_uint64()
        status, capture, graph, count = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_size_t()
        last = ctypes.POINTER(ctypes.c_uint64)()
        call("cuCtxGetCurrent", place(self.context))
        call("cuMemcpyAsync", to.data_ptr(), source.data_ptr(), to.nbytes, handle)
        call("cuStreamGetCaptureInfo_v2", ctypes.c_uint64(handle), *map(place, (status, capture, graph, last, count)))
        self.node = ctypes.c_uint64(last[0])  # of the stream, which is this copy
        call("cuGraphMemcpyNodeGetParams", self.node, self.params)

    def of(self, x: Tensor, graph: torch.cuda.CUDAGraph) -> None:
        """Copy x in the replays that follow."""
        struct.pack_into("<Q", self.params, self.way, x.data_ptr())
        launched = ctypes.c_uint64(graph.raw_cuda_graph_exec())
        driver()("cuGraphExecMemcpyNodeSetParams", launched, self.node, self.params, self.context)


class Graph:
    """A captured pass of a call."""

    def __init__(self, run: Run, tensors: Sequence[Any], axes: Sequence[Any], memory: Memory):
        self.axes, self.records, stream = axes, [Record() for _ in axes], memory.stream
        with torch.inference_mode(False), torch.no_grad(), memory.capturing() as self.graph, ExitStack() as recording:
            for axis, record in zip(axes, self.records, strict=True):
                recording.enter_context(axis.recording(record))
            self.inputs: list[Any] = [None if x is None else room_for(x) for x in tensors]
            pairs = enumerate(zip(self.inputs, tensors, strict=True))
            self.copied_in = {i: Node(Node.INTO, mine, x, stream) for i, (mine, x) in pairs if are_alike(mine, x)}
            self.results = list(run(*self.inputs))
            pairs = enumerate((None if x is None else room_for(x), x) for x in self.results)
            self.copied_out = {i: Node(Node.OUT, other, x, stream) for i, (other, x) in pairs if are_alike(other, x)}
            if any(x is not None and x.numel() and i not in self.copied_out for i, x in enumerate(self.results)):
                raise RuntimeError("a result is not dense")
        self.graph.instantiate()
        made = [x.data_ptr() for x in (*self.inputs, *self.results) if x is not None and x.numel()]
        segments = memory.segments()
        if not all(any(address in segment for segment in segments) for address in made):
            raise RuntimeError("memory is allocated from a pool of others (torch.cuda.use_mem_pool, reduce-overhead)")
        memory.graphs.add(self)

    def __call__(self, tensors: Sequence[Any]) -> list[Any]:
        with ExitStack() as replaying:
            for axis, record in zip(self.axes, self.records, strict=True):
                replaying.enter_context(axis.replaying(record))
            given = list(tensors)  # held until the graph is launched
            for i, (x, mine) in enumerate(zip(tensors, self.inputs, strict=True)):
                if i in self.copied_in:
                    given[i] = x if are_alike(x, mine) else torch.empty_like(mine).copy_(x)
                    self.copied_in[i].of(given[i], self.graph)
                elif x is not None:
                    mine.copy_(x)
            results: list[Any] = [None if x is None else torch.empty_like(x) for x in self.results]
            for i, copy in self.copied_out.items():
                copy.of(results[i], self.graph)
            self.graph.replay()
            return results


def are_alike(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether bytes can be copied between two tensors of a shape and dtype, of which one is dense."""
    return a is not None and b is not None and a.numel() > 0 and a.stride() == b.stride()


class Graphs:
    """Those of a bound call, by pass: how often each ran, then its graph, or None if it has none."""

    def __init__(self) -> None:
        self.runs = Counter[str]()
        self.captured: dict[str, Graph | None] = {}

    def run(self, call: Any, name: str, run: Run, *tensors: Tensor | None) -> Sequence[Any]:
        """`run(*tensors)`, or a replay of it. Which of both follows from what all ranks do alike."""
        axes = [axis for axis in (call.ring, call.ulysses) if axis.size > 1]
        if axes[0].lanes.capturing():  # a user's graph
            return run(*tensors)
        self.runs[name] += 1
        if self.runs[name] > EAGER_RUNS and name not in self.captured:
            self.captured[name] = captured(call.plan, call.words | {"call": f"graph of {name}"}, run, tensors, axes)
        graph = self.captured.get(name)
        return run(*tensors) if graph is None else graph(tensors)


def captured(plan: Plan, words: Words, run: Run, tensors: Sequence[Any], axes: Sequence[Any]) -> Graph | None:
    """The graph of a pass, or None if a rank cannot capture it: all ranks replay it, or none.

    Ranks compare what they capture: those that are not at the same call would wait for each other for ever.
    """
    kept, graph, problem = plan.axes.kept, None, None
    memory: Memory = kept.get("graphs") or Memory(next(x.device for x in tensors if x is not None))
    kept["graphs"] = memory
    try:
        if memory.nbytes > MAX_BYTES:
            raise RuntimeError(f"other graphs have more than {MAX_BYTES / 2**30:.0f} GiB")
        graph = Graph(run, tensors, axes, memory)
    except RuntimeError as error:  # too little memory, or what a device cannot do while it captures
        problem = str(error.__context__ or error).partition("\n")[0] or repr(error)  # the first error says more
    everyone = exchanged(plan, {"words": words, "problem": None, "data": [], "has": problem})
    compare({place: entry["words"] for place, entry in everyone.items()})
    problems = [entry["has"] for entry in everyone.values() if entry["has"]]
    memory.problem = problems[0] if problems else memory.problem
    return None if problems else graph
