"""Compile a plan for TPUs on any machine, and report memory and the order of hops and kernels.

The real forward and backward are compiled ahead of time for a named topology. The compiler's schedule is the text it
returns: a hop whose start stands before a kernel, and whose end after it, flies while the kernel computes.
"""

import dataclasses
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ringattn.comms.jax import axes
from ringattn.comms.tpu_slice import ring_order
from ringattn.jax.attention.function import attention
from ringattn.jax.inference import function
from ringattn.jax.inference.cache import KVCache
from ringattn.jax.inference.cache import spec_of as token_cut
from ringattn.jax.linear.function import linear_attention
from ringattn.jax.sharding import closed, sequence_axes, spec_of
from ringattn.masks.spec import AttentionSpec, Docs
from ringattn.plans.machine import of_device
from ringattn.plans.plan import Plan
from ringattn.plans.ranks import Ranks

# Without these options the compiler does not overlap a loop's hops with its kernels, or only five of them at a time.
COMPILER_OPTIONS: dict[str, str | bool] = {
    "xla_tpu_enable_all_experimental_scheduler_features": True,
    "xla_max_concurrent_async_collective_permutes": "256",
}

NAME = r"%([\w.-]+) = "
KINDS = r"(collective-permute|all-gather|all-to-all|reduce-scatter|all-reduce|async)"
HOP = re.compile(NAME + r"(.*?) " + KINDS + r"(-start)?\(")
CALL = re.compile(NAME + r".* call-start\(.*to_apply=%([\w.-]+)")  # a SparseCore runs this computation meanwhile
DONE = re.compile(r" [\w-]+-done\(.*?%([\w.-]+)\)")
KERNEL = re.compile(NAME + r".* custom-call\(.*custom_call_target=\"tpu_custom_call\"")
LOOP = re.compile(r" while\(.*condition=%([\w.-]+), body=%([\w.-]+)")
LIMIT = re.compile(r" s32\[\]\S* constant\((\d+)\)")
SHAPE = re.compile(r"\b(pred|[suf]\d+|bf16)\[([\d,]*)\]")


@dataclass(frozen=True)
class Transfer:
    """One hop of the scheduled program: how often it runs, the bytes it moves, and the kernels that run meanwhile."""

    name: str
    kind: str
    times: int
    bytes: int
    behind: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """A compiled program: bytes of device memory, and its kernels and transfers in the order of execution."""

    name: str
    arguments: int
    outputs: int
    temporaries: int
    order: tuple[str, ...]
    transfers: tuple[Transfer, ...]
    text: str = dataclasses.field(repr=False, compare=False)

    @property
    def sent(self) -> int:
        return sum(t.times * t.bytes for t in self.transfers)

    @property
    def exposed(self) -> tuple[Transfer, ...]:
        return tuple(t for t in self.transfers if not t.behind)

    def __str__(self) -> str:
        lines = [
            f"{self.name}: HBM {mib(self.arguments)} arguments, {mib(self.outputs)} outputs, {mib(self.temporaries)} "
            f"temporaries; {mib(self.sent)} sent; {len(self.exposed)} of {len(self.transfers)} transfers exposed"
        ]
        for t in self.transfers:
            what = f"behind {', '.join(t.behind)}" if t.behind else "EXPOSED"
            lines.append(f"  {t.times:>4} x {mib(t.bytes):>10}  {t.kind:<18} {what}")
        return "\n".join([*lines, "  order: " + " ".join(self.order)])


@dataclass(frozen=True)
class Report:
    """The programs of one plan on one topology: forward and backward (which contains the forward), or those of a cache.

    A cache's are prefill, of as many tokens as the plan has, and decode, of one token.
    """

    topology: str
    plan: Plan
    programs: tuple[Program, Program]
    what: str = "attention"

    @property
    def forward(self) -> Program:
        return self.programs[0]

    @property
    def backward(self) -> Program:
        return self.programs[1]

    def __str__(self) -> str:
        devices = self.plan.ring_axis.mesh.devices
        head = f"{self.topology}: {devices.size} x {devices.flat[0].device_kind}, {self.what}\n{self.plan}"
        return "\n".join(map(str, (head, *self.programs)))


def mib(n: int) -> str:
    return f"{n / 2**20:.2f} MiB"


def aot_report(
    topology: str, plan: Plan, *, spec: AttentionSpec | None = None, docs: Docs | None = None, batch: int = 1,
    dtype: str = "bfloat16", linear: str | None = None, cache: int | None = None,
) -> Report:  # fmt: skip
    """Compile `plan` (made with heads= and head_dim=) for a topology such as "v6e:2x4"; needs libtpu, but no TPU.

    Documents are known at compile time. `linear` compiles linear attention, "gated" or with the "delta" rule: the
    plan's heads=(value, key) are those of values, states and gates, and those of queries and keys. `cache` compiles
    prefill of the plan's tokens, and decode of one, with a cache of so many tokens.
    """
    if plan.heads is None or plan.head_dim is None:
        raise ValueError("the plan does not say what is computed; make it with heads=(query, key) and head_dim")
    if linear not in (None, "gated", "delta"):
        raise ValueError(f"linear={linear!r}: choose gated or delta, or leave it out for attention")
    if linear and spec not in (None, AttentionSpec()):
        raise ValueError(f"linear={linear!r} has no mask but documents, and no softcap; leave out {spec}")
    bound = bound_to(topology, plan)
    batch *= bound.ring_axis.mesh.shape["data"]
    if cache is not None:
        if linear or docs is not None:
            raise ValueError(f"cache={cache} is of attention, without documents; leave out linear and docs")
        return Report(topology, bound, of_cache(bound, cache, batch, dtype, spec), f"a cache of {cache} tokens")
    shapes = shapes_of(bound, batch)
    if linear:
        values, keys = plan.heads
        shapes = tuple((*x[:2], n, x[3]) for x, n in zip(shapes, (keys, keys, values), strict=True))
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    if linear:  # a gate a head, and the delta rule's beta
        arrays += [jax.ShapeDtypeStruct(shapes[2][:3], "float32")] * (1 + (linear == "delta"))
    args = on_mesh(bound, arrays)

    def forward(q: Any, k: Any, v: Any, *gates: Any) -> Any:
        if linear:
            beta = gates[1] if linear == "delta" else None
            return (linear_attention(q, k, v, gates[0], bound, beta=beta, docs=docs),)
        return attention(q, k, v, bound, spec=spec, docs=docs, return_lse=True)

    def backward(given: Any, cotangents: Any) -> Any:
        return jax.vjp(forward, *given)[1](cotangents)

    cotangents = tuple(on_mesh(bound, jax.eval_shape(forward, *args)))
    programs = compiled("forward", forward, args), compiled("backward", backward, [tuple(args), cotangents])
    what = {"gated": "gated linear attention", "delta": "the delta rule"}.get(linear or "", "attention")
    return Report(topology, bound, programs, what)


def of_cache(plan: Plan, tokens: int, batch: int, dtype: str, spec: AttentionSpec | None) -> tuple[Program, Program]:
    """Prefill and decode, whose cache is written in place."""
    (_, kv_heads), dim, mesh = plan.heads or (1, 1), plan.head_dim, plan.ring_axis.mesh
    value_dim = plan.value_dim or dim
    sizes: dict[str, Any] = {"batch": batch, "max_len": tokens, "kv_heads": kv_heads, "head_dim": dim}
    sizes |= {"value_dim": value_dim, "dtype": jnp.dtype(dtype), "window": spec.behind if spec else None}
    empty = jax.eval_shape(lambda: KVCache.allocate(plan, **sizes))
    where = {4: token_cut(empty.cut, sequence_axes(plan)), 1: PartitionSpec(empty.cut[0])}

    def on_device(x: Any, cut: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, cut))

    there = jax.tree.map(lambda x: on_device(x, where[x.ndim]), empty)
    chunk = on_mesh(plan, [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes_of(plan, batch)])
    token = [jax.ShapeDtypeStruct((batch, 1, *x.shape[2:]), dtype) for x in chunk]
    token = [on_device(x, PartitionSpec(empty.cut[0])) for x in token]

    def prefill(cache: Any, q: Any, k: Any, v: Any) -> Any:
        return function.prefill(q, k, v, plan, cache, spec=spec)

    def decode(cache: Any, q: Any, k: Any, v: Any) -> Any:
        return function.decode(q, k, v, cache, spec=spec)

    return compiled("prefill", prefill, [there, *chunk], True), compiled("decode", decode, [there, *token], True)


def bound_to(topology: str, plan: Plan) -> Plan:
    """The same plan on the devices of a topology; devices beyond ring x ulysses form a data axis."""
    devices = topology_devices(topology)
    need = plan.ring * plan.ulysses
    if len(devices) % need:
        raise ValueError(
            f"ring={plan.ring} x ulysses={plan.ulysses} needs a multiple of {need} devices, {topology} has "
            f"{len(devices)}; make the product {len(devices)}"
        )
    grid = ring_order(devices, plan.ring, plan.ulysses)
    if grid is None:
        grid = np.array(devices).reshape(-1, plan.ring, plan.ulysses)
    mesh = Mesh(grid, ("data", "ring", "ulysses"), axis_types=(AxisType.Auto,) * 3)
    return plan.replace(axes=Ranks(*axes(mesh), "jax", "tpu"), machine=of_device("tpu", devices[0].device_kind))


def topology_devices(topology: str) -> list[Any]:
    """The devices of a named topology, as the compiler describes it."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # else the compiler asks the network which machine it is on,
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # and lets one process at a time ask for a description
    from jax.experimental import topologies

    words = {"chip_config_name": "megacore"} if topology.startswith("v4") else {}
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=topology, **words).devices)
    except Exception as error:
        if find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
            raise RuntimeError(
                "the TPU compiler is not installed: pip install 'ringattn[tpu]' (libtpu; no TPU is needed)"
            ) from error
        raise ValueError(f"topology={topology!r}: {error}; try v5e:2x4, v6e:2x4, v5p:2x2x2, v4:2x2x2") from error


def shapes_of(plan: Plan, batch: int) -> tuple[tuple[int, ...], ...]:
    """Of q, k and v as global arrays."""
    (heads, kv_heads), head_dim = plan.heads or (1, 1), plan.head_dim or 128
    queries, keys = plan.tokens.padded_length, plan.keys.tokens.padded_length
    value_dim = plan.value_dim or head_dim
    return (batch, queries, heads, head_dim), (batch, keys, kv_heads, head_dim), (batch, keys, kv_heads, value_dim)


def on_mesh(plan: Plan, arrays: Iterable[Any]) -> list[jax.ShapeDtypeStruct]:
    """The same shapes, as a plan's global arrays."""
    mesh, along = plan.ring_axis.mesh, sequence_axes(plan)
    where = ((x, closed(NamedSharding(mesh, spec_of(x, plan, 1, along)))) for x in arrays)
    return [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there) for x, there in where]


def compiled(name: str, function: Any, args: list[Any], in_place: bool = False) -> Program:
    """Of the function; the memory of the first argument is used again for what `in_place` returns."""
    program = jax.jit(function, donate_argnums=0 if in_place else ())
    done = program.lower(*args).compile(compiler_options=COMPILER_OPTIONS)
    memory: Any = done.memory_analysis()
    text = done.as_text() or ""
    order, transfers = schedule(text)
    return Program(
        name, memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes, order, transfers,
        text,
    )  # fmt: skip


def schedule(text: str) -> tuple[tuple[str, ...], tuple[Transfer, ...]]:
    """The kernels and hops of a scheduled program in order, and every transfer with the kernels that run meanwhile."""
    parts, entry = computations(text)
    transfers: list[Transfer] = []

    def walk(name: str, times: int) -> list[str]:
        order: list[str] = []
        flying: dict[str, tuple[str, int, list[str]]] = {}
        for line in parts.get(name, ()):
            words: list[str] = []
            if loop := LOOP.search(line):
                condition, body = loop.groups()
                limits = [int(n) for text in parts[condition] for n in LIMIT.findall(text)]
                trips = max(limits, default=1)  # a scan counts from 0 to the one number of its condition
                inside = walk(body, times * trips)
                words = [f"{trips}x[", *inside, "]"] if inside else []
            elif kernel := KERNEL.search(line):
                words = [re.sub(r"[.\d]*$", "", kernel.group(1))]
            elif (done := DONE.search(line)) and done.group(1) in flying:
                words = ["done"]
                kind, size, behind = flying.pop(done.group(1))
                transfers.append(Transfer(done.group(1), kind, times, size, tuple(behind)))
            elif call := CALL.search(line):
                for inner in filter(None, map(HOP.search, parts.get(call.group(2), ()))):
                    words = ["start"]
                    flying[call.group(1)] = inner.group(3), first_bytes(inner.group(2)), []
            elif hop := HOP.search(line):
                hop_name, shapes, kind, starts = hop.groups()
                words = ["start" if starts else kind]
                if starts:
                    flying[hop_name] = kind, first_bytes(shapes), []
                else:
                    transfers.append(Transfer(hop_name, kind, times, first_bytes(shapes), ()))
            order += words
            for _, _, behind in flying.values():
                behind += [word for word in words if word.endswith("kernel")]
        return order

    return tuple(walk(entry, 1)), tuple(transfers)


def computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation of a program, by name, and the name of the entry computation."""
    parts: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%([\w.-]+) \(", line):
            lines = parts.setdefault(head.group(2), [])
            entry = head.group(2) if head.group(1) else entry
        elif line.startswith("  "):
            lines.append(line)
    return parts, entry


def first_bytes(shapes: str) -> int:
    """The bytes of the first array of a tuple's text: what a hop sends."""
    match = SHAPE.search(shapes)
    if match is None:
        return 0
    kind, dims = match.groups()
    bits = {"pred": 8, "bf16": 16}.get(kind) or int(kind[1:])
    return int(np.prod([int(d) for d in dims.split(",") if d], dtype=np.int64)) * bits // 8
