"""What recomputation keeps of a layer, its input and with `keep_attention` its attention, waits on the host.

It is copied to pinned memory, which torch reuses, on a stream of its own while the next layer runs, leaves the device
when that one ends, and is fetched a layer ahead in backward. On CPUs nothing is copied.
"""

from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from types import SimpleNamespace
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

HOST = torch.device("cpu")
SIDE = cache(torch.cuda.Stream)  # of a device


def offloaded(checkpoint: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`checkpoint(*args, **kwargs)`, torch's or what takes its place, for one of the layers that follow each other."""
    layer = Layer()
    with saved_tensors_hooks(layer.keep, layer.give):
        out = checkpoint(*args, **kwargs)
    if layer.places:  # none without gradients
        layer.to_host()
    return out


class Layer:
    """What is kept of one layer: `places` hold what is on the device, the input first."""

    def __init__(self) -> None:
        self.before = LATEST.get()  # which backward needs next
        LATEST.set(ref(self))  # it lives as long as its graph
        self.modes: list[Any] = []  # of recomputations that keep more than the input
        self.places: list[Any] = []
        self.host: list[Tensor] = []
        self.copied: Any = None  # the event after the latest copies

    def keep(self, x: Tensor) -> Any:
        """Of tensors that are saved, the first that is not empty: others, as positions, belong to all layers."""
        if self.places or not x.numel():
            return x
        self.places = [SimpleNamespace(val=x)]
        return self

    def to_host(self) -> None:
        if (before := self.before()) is not None:
            before.wait()  # its copies had the time of a layer
            for place in before.places:
                place.val = None
        found = [x for mode in self.modes for x in tree_leaves(mode.storage)]
        self.places += [x for x in found if isinstance(getattr(x, "val", None), Tensor)]
        self.device = self.places[0].val.device
        self.host = self.copies([place.val for place in self.places], HOST)

    def fetch(self) -> None:
        if self.host and self.places[0].val is None:
            for place, x in zip(self.places, self.copies(self.host, self.device), strict=False):
                place.val, place.version = x, x._version

    def give(self, kept: Any) -> Tensor:
        """The input, for backward; the rest is where the recomputation looks for it."""
        if kept is not self:
            return kept
        self.fetch()
        self.wait()
        if (before := self.before()) is not None:
            before.fetch()
        x, self.places = self.places[0].val, [SimpleNamespace(val=None)]
        return x

    def copies(self, tensors: list[Tensor], device: torch.device) -> list[Tensor]:
        """Made beside what is computed next. Their memory is the computing stream's, which reuses it in order."""
        if self.device.type != "cuda":
            return tensors
        side = SIDE(self.device)
        made = [torch.empty_like(x, device=device, pin_memory=device == HOST) for x in tensors]
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for to, x in zip(made, tensors, strict=True):
                to.copy_(x, non_blocking=True)
        self.copied = side.record_event()
        return made

    def wait(self) -> None:
        if self.copied is not None:
            torch.cuda.current_stream(self.device).wait_event(self.copied)
            self.copied = None

    __del__ = wait  # memory is reused after the copies even if no backward pass came


LATEST: ContextVar[Callable[[], Layer | None]] = ContextVar("LATEST", default=lambda: None)


def keep_too(mode: Any) -> None:
    """What a selective recomputation keeps of the layer that is running waits with its input, if that does."""
    if (layer := LATEST.get()()) is not None and not layer.host:
        layer.modes.append(mode)
