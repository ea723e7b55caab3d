"""What suites time, and how: random inputs, passes, and clocks of one device or of all ranks together."""

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import ringattn as ra
from ringattn.launch.train import metrics
from ringattn.launch.words import option

RULES = ("softmax", "gated", "delta", "kimi")
CALLS: Any = option(1, "calls in a row, of which one is timed: as in a model, the host launches ahead")
TIMEOUT: Any = option(900.0, "seconds for all")
FLOPS = {"forward": 4, "forward+backward": 14}  # of a pair, a head and a dim
Passes = dict[str, Callable[[], Any]]


@dataclass
class Heads:
    """What suites of attention have in common."""

    heads: int = option(32, "query heads")
    kv_heads: int = option(8, "key heads")
    head_dim: int = option(128, "head dim")
    device: str = option("cuda", "where it runs", among=("cuda", "cpu"))
    repeats: int = option(10, "timed runs, of which the median counts")

    @property
    def sizes(self) -> dict[str, Any]:
        """As a plan takes them."""
        return {"heads": (self.heads, self.kv_heads), "head_dim": self.head_dim}


def dtype_on(device: str) -> Any:
    """The dtype of what is measured: bfloat16 on a GPU, float32 on a CPU."""
    return torch.bfloat16 if device == "cuda" else torch.float32


def draws(options: Any, tokens: int, heads: str = "qkv", grads: bool = False) -> list[Any]:
    """Random [1, tokens, heads, head_dim] for each letter: q (or o) of the query heads, k and v of the key heads.

    With `grads` all but o require a gradient.
    """
    counts = {"q": options.heads, "k": options.kv_heads, "v": options.kv_heads, "o": options.heads}
    how = {"device": options.device, "dtype": dtype_on(options.device)}
    shapes = [(name, (1, tokens, counts[name], options.head_dim)) for name in heads]
    return [torch.randn(*shape, **how, requires_grad=grads and name != "o") for name, shape in shapes]


def linear_draws(options: Any, tokens: int) -> tuple[list[Any], Tensor]:
    """q, k, v, gates and beta of linear attention as a layer makes them, None where the rule has none, and dout.

    Gates are logsigmoid(x) / 16, one a head for Gated DeltaNet and one a channel else; the delta rules take q and k of
    length 1.
    """
    q, k, v, dout = draws(options, tokens, "qqqq")
    gates = torch.randn(q.shape[: 3 if options.rule == "delta" else 4], device=options.device)
    g, beta = F.logsigmoid(gates) / 16, None
    if options.rule != "gated":
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        beta = torch.rand(q.shape[:3], device=options.device)
    return [x if x is None else x.requires_grad_() for x in (q, k, v, g, beta)], dout


def passes(attend: Callable[[], Any], leaves: Sequence[Any], dout: Any) -> Passes:
    """What is timed: one forward pass, and one with its backward."""
    given = [x for x in leaves if x is not None]
    return {
        "forward": torch.no_grad()(attend),
        "forward+backward": lambda: torch.autograd.grad(attend(), given, dout),
    }


def passes_of(options: Any, plan: Any, asked: dict[str, Any], kernel: str = "auto", scan: str = "auto") -> Passes:
    """The passes of attention by a plan, on random data of this rank; of linear attention also by a kernel and scan."""
    if getattr(options, "rule", "softmax") == "softmax":
        q, k, v, dout = draws(options, plan.local_len, "qkvo", grads=True)
        return passes(lambda: ra.attention(q, k, v, plan, **asked), (q, k, v), dout)
    (q, k, v, g, beta), dout = linear_draws(options, plan.local_len)
    how: dict[str, Any] = {"beta": beta, "scan": scan, "kernel": kernel, "docs": asked.get("docs"), "check": False}
    return passes(lambda: ra.linear_attention(q, k, v, g, plan, **how), (q, k, v, g, beta), dout)


def memory_from_now(device: str) -> metrics.Memory:
    """The memory that is allocated from now on; on a CPU freed tensors go back to the system at once."""
    if device == "cpu":
        ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD
    memory = metrics.Memory(torch.device(device))
    memory.reset()
    return memory


def meet() -> None:
    """A barrier of all ranks, if there are several, after their devices have finished."""
    finish()
    if dist.is_initialized():
        dist.barrier()
        finish()


def finish() -> None:
    """Wait for the GPU, if this process uses one."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def together(call: Callable[[], Any], calls: int = 1) -> float:
    """Seconds from when all ranks start until this one is done, of one of so many calls in a row."""
    meet()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    finish()
    return (time.perf_counter() - start) / calls


def median_ms(call: Callable[[], Any], repeats: int, graph: bool = False, calls: int = 1) -> float:
    """The median in milliseconds, all ranks starting together; with `graph`, of replays of the call as a CUDA graph."""
    call()
    call()
    call = captured(call) if graph else call
    return statistics.median(together(call, calls) * 1e3 for _ in range(repeats))


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call as one CUDA graph."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    meet()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    return graph.replay


def in_turns(calls: Passes, rounds: int, device: str) -> dict[str, list[float]]:
    """Milliseconds of each call in each round, on this rank alone, after two calls to warm up.

    Rounds begin with another call in turn. The GPU waits for the host once a round, never between calls.
    """
    for call in calls.values():
        call()
        call()
    finish()
    order, times = list(calls), {name: list[float]() for name in calls}
    for _ in range(rounds):
        order, stamps = order[1:] + order[:1], [stamp(device)]
        for name in order:
            calls[name]()
            stamps.append(stamp(device))
        finish()
        for name, start, end in zip(order, stamps, stamps[1:], strict=False):
            times[name].append(start.elapsed_time(end) if device == "cuda" else (end - start) * 1e3)
    return times


def stamp(device: str) -> Any:
    """The time at which the device gets here."""
    if device != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def alone_ms(call: Callable[[], Any], rounds: int, device: str) -> float:
    """The median in milliseconds of this rank alone."""
    return statistics.median(in_turns({"": call}, rounds, device)[""])


def copy_rate(device: str) -> float:
    """Bytes a second, read and written, of a plain copy of half a GiB; of less on a CPU."""
    a = torch.empty(1 << (29 if device == "cuda" else 25), dtype=torch.uint8, device=device).random_()
    b = torch.empty_like(a)
    return 2e3 * a.nbytes / alone_ms(lambda: b.copy_(a), 10, device)
