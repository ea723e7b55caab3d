"""Kernels that a library's Python interface has compiled, launched without it in calls that repeat.

FlashAttention-4's interface takes the host 0.2 to 0.4 ms a call: it looks up its compiled kernels by long keys, and
checks what it is given. Its second call of a kind is watched; later ones allocate and launch the same. A call that does
anything else, or gives a kernel what has no known origin, goes on through the interface, whatever its version is. What
it reads from the environment is taken to stay as it is.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import Lock, get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

COMPILING = Lock()  # one thread at a time: FA4's compiler keeps what it works on for the whole process
ONCE = "called once"
EMPTY = "aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty"
ZEROS = "aten::zeros", "aten::new_zeros"
SAME_MEMORY = "aten::alias", "aten::detach", "aten::expand"
LARGEST_NUMBER = 2**31  # above it, a number may be an address, which another call has not

Function = Callable[..., Any]
Given = Sequence[Tensor | None]


class Options(dict[str, Any]):
    """The arguments of calls with one mask; for each kind of call its launches, or why it has none."""

    def __init__(self, options: dict[str, Any]):
        super().__init__(options)
        self.launches: dict[Any, Learned | str] = {}


class Learned(NamedTuple):
    """Memory is made, and kernels get places of one list: tensors that are given, this memory, and constants."""

    made: list[Function]
    constants: list[Any]
    kernels: list[tuple[Function, list[int]]]
    results: list[int]

    def run(self, given: Given) -> Sequence[Any]:
        inputs = [x.detach() if x is not None and x.requires_grad else x for x in given]
        found = [*inputs, *[make() for make in self.made], *self.constants]
        for kernel, places in self.kernels:
            kernel(*[found[place] for place in places])
        return [found[place] for place in self.results]


def repeat(function: Function, options: Options, tensors: Mapping[str, Tensor | None], **numbers: Any) -> Any:
    """function(**tensors, **numbers, **options)"""
    given: list[Any] = list(tensors.values())
    kind = function, *numbers.values(), *[None if x is None else kind_of(x) for x in given]
    known = options.launches.get(kind)
    if type(known) is Learned:
        return known.run(given)
    run = partial(function, **tensors, **numbers, **options)
    with COMPILING:
        if known == ONCE and not (given[0].is_cuda and torch.cuda.is_current_stream_capturing()):
            results, options.launches[kind] = learned(function, run, options, given)
            return results
        options.launches.setdefault(kind, ONCE)
        return run()


def kind_of(x: Tensor) -> tuple[Any, ...]:
    """What an interface may look at, but for values. Kernels may be compiled for addresses that 16 divides."""
    return type(x), x.dtype, x.device, x.shape, x.stride(), x.data_ptr() % 16 if type(x) is Tensor else None


def learned(function: Function, run: Function, options: Options, given: Given) -> tuple[Any, Learned | str]:
    """The results of a call that is watched, and its launches or why it has none."""
    results = None
    try:
        with Watch(function) as watch:
            results = run()
        return results, launches_of(watch, options, given, results)
    except Exception as error:  # an error of the interface itself comes again
        return run() if results is None else results, f"it cannot be watched: {error!r}"


class Watch(TorchDispatchMode):
    """Notes what a function of an interface allocates and launches, and what else it does, in this thread.

    Compiled kernels lie in `compile_cache` of functions that it sees, in whose place this puts one that notes launches.
    """

    def __init__(self, function: Function):
        super().__init__()
        seen = function.__globals__.values()
        self.caches = [(x, x.compile_cache) for x in seen if "compile_cache" in getattr(x, "__dict__", ())]
        self.thread, self.launching = get_ident(), False
        self.made: list[tuple[Tensor, Function]] = []
        self.launches: list[tuple[Function, tuple[Any, ...]]] = []
        self.unknown: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the other way torch imports its compiler, which takes a second

    def __enter__(self) -> "Watch":
        for owner, cache in self.caches:
            owner.compile_cache = Watched(cache, self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for owner, cache in self.caches:
            owner.compile_cache = cache

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        x, name = op(*args, **(kwargs or {})), op._schema.name
        if self.launching:  # each launch does this again
            return x
        if name in EMPTY:
            self.made.append((x, partial(torch.empty_strided, x.shape, x.stride(), dtype=x.dtype, device=x.device)))
        elif name in ZEROS:
            self.made.append((x, partial(torch.zeros, x.shape, dtype=x.dtype, device=x.device)))
        elif name not in SAME_MEMORY:
            self.unknown.append(name)
        return x

    def launch(self, kernel: Function, *args: Any) -> None:
        self.launches.append((kernel, args))
        self.launching = True
        kernel(*args)
        self.launching = False


class Watched:
    """A cache of compiled kernels, whose launches by the watching thread are noted."""

    def __init__(self, cache: Any, watch: Watch):
        self.cache, self.watch = cache, watch

    def __contains__(self, key: Any) -> bool:
        return key in self.cache

    def __setitem__(self, key: Any, kernel: Any) -> None:
        self.cache[key] = kernel

    def __getitem__(self, key: Any) -> Any:
        kernel = self.cache[key]
        return partial(self.watch.launch, kernel) if get_ident() == self.watch.thread else kernel


def launches_of(watch: Watch, options: Options, given: Given, results: Sequence[Any]) -> Learned | str:
    """The launches of a call that was watched; or why later calls must not repeat them."""
    tensors, made = [x for x in given if x is not None], [x for x, _ in watch.made]
    lasting = {x.data_ptr() for x in leaves(list(options.values())) if isinstance(x, Tensor)}
    if watch.unknown:
        return f"it runs {', '.join(watch.unknown)}"
    if any(type(x) is not Tensor or x.numel() == 0 for x in (*tensors, *made)):
        return "tensors of other types, or without elements"
    if len({x.data_ptr() for x in tensors} - lasting) < len(tensors):
        return "two tensors in one place, which those of later calls may not be"
    places = {identity(x): place for place, x in enumerate((*given, *made)) if x is not None}
    constants, strange = list[Any](), list[Any]()

    def place_of(x: Any) -> int:
        if isinstance(x, Tensor) and identity(x) in places:
            return places[identity(x)]
        strange.extend(leaf for leaf in leaves(x) if not is_constant(leaf, lasting))
        constants.append(x)
        return len(given) + len(made) + len(constants) - 1

    kernels = [(kernel, [place_of(x) for x in args]) for kernel, args in watch.launches]
    last = [place_of(x) for x in results]
    if strange:
        return f"of unknown origin: {[(x.dtype, x.shape) if isinstance(x, Tensor) else x for x in strange]}"
    if not {*places.values()} <= {place for _, used in kernels for place in used}:
        return "no kernel gets one of the tensors: not every launch was seen"
    return Learned([make for _, make in watch.made], constants, kernels, last)


def is_constant(x: Any, lasting: set[int]) -> bool:
    """Whether x is the same in later calls: memory of the options, or a number but no address."""
    if isinstance(x, Tensor):
        return x.data_ptr() in lasting
    return x is None or (isinstance(x, (int, float)) and abs(x) < LARGEST_NUMBER)


def identity(x: Tensor) -> tuple[Any, ...]:
    return x.data_ptr(), x.dtype, x.shape, x.stride()


def leaves(x: Any) -> list[Any]:
    """x, or what lies in it if it is a list or a tuple."""
    return [leaf for each in x for leaf in leaves(each)] if isinstance(x, (list, tuple)) else [x]
