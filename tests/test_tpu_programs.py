"""Programs compiled for TPUs without one: kernels hide the hops of a ring, which gathers nothing."""

import os
import re
from importlib.util import find_spec

import pytest

jax = pytest.importorskip("jax")
from jax.experimental import topologies  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

import ringattn as ra  # noqa: E402
from ringattn.jax import init_mesh  # noqa: E402

pytestmark = pytest.mark.skipif(
    find_spec("libtpu") is None, reason="the TPU compiler is not installed: pip install '.[tpu]'"
)
slow, compile = pytest.mark.slow, pytest.mark.compile
OPTIONS = {
    "xla_tpu_enable_all_experimental_scheduler_features": True,
    "xla_max_concurrent_async_collective_permutes": "256",
}
HOP = "collective-permute"


def plan_on(topology, tokens, ring, ulysses=1, **choices):
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # else the compiler asks the network which machine it is on,
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # and lets one process at a time ask for a description
    words = {"chip_config_name": "megacore"} if topology.startswith("v4") else {}
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology, **words).devices
    mesh = init_mesh(data=len(devices) // (ring * ulysses), ring=ring, ulysses=ulysses, devices=devices)
    return ra.plan(mesh, seq_len=tokens, **choices)


def compiled(function, plan, *heads, gates=0):
    """The function of q, k, v [data, T, heads, 128] in bfloat16 and of gates, and its gradients, as two programs."""
    there = NamedSharding(plan.ring_axis.mesh, PartitionSpec("data", ("ring", "ulysses")))
    B = plan.ring_axis.mesh.shape["data"]
    given = [jax.ShapeDtypeStruct((B, plan.seq_len, n, 128), "bfloat16", sharding=there) for n in heads]
    given += [jax.ShapeDtypeStruct((B, plan.seq_len, heads[2]), "float32", sharding=there)] * gates

    def loss(*given):
        return function(*given).astype("float32").sum()

    programs = function, jax.grad(loss, argnums=(*range(len(given)),))
    return [jax.jit(each).lower(*given).compile(compiler_options=OPTIONS) for each in programs]


def attention(plan, *heads, **choices):
    return compiled(lambda q, k, v: ra.attention(q, k, v, plan, **choices), plan, *heads)


def transfers(program):
    """Of each transfer of a scheduled program its kind, and whether a kernel runs meanwhile."""
    found, flying = [], {}
    for line in program.as_text().splitlines():
        if '"tpu_custom_call"' in line:
            flying = dict.fromkeys(flying, True)
        elif start := re.match(r"\s+%(\S+) = .* (\S+)-start\(", line):
            flying[start[1]] = False
        elif done := re.match(r".* (\S+)-done\(.*?%([^\s,)]+)\)", line):
            found.append((done[1], flying.pop(done[2], False)))
        elif now := re.match(r".* (all-gather|all-to-all|reduce-scatter|all-reduce|collective-permute)\(", line):
            found.append((now[1], False))
    return [each for each in found if not each[0].startswith(("copy", "slice", "dynamic"))]


@pytest.mark.parametrize(
    ("topology", "layout", "ring"),
    [
        pytest.param("v6e:2x4", "contiguous", 8, marks=slow),
        pytest.param("v5e:2x4", "zigzag", 8, marks=slow),
        pytest.param("v6e:16x16", "zigzag", 256, marks=compile),
        pytest.param("v5e:4x8", "zigzag", 32, marks=compile),
        pytest.param("v4:2x2x2", "zigzag", 8, marks=compile),
        pytest.param("v5p:2x2x2", "striped", 8, marks=compile),
        pytest.param("tpu7x:2x2x2", "zigzag", 8, marks=compile),
    ],
)
def test_every_hop_of_a_ring_flies_behind_a_kernel(topology, layout, ring):
    for program in attention(plan_on(topology, ring * 512, ring, layout=layout), 2, 1, 1):
        assert {*transfers(program)} == {(HOP, True)}


@compile
@pytest.mark.parametrize(
    ("topology", "ring", "ulysses", "groups", "heads", "strategy", "kinds"),
    [
        ("v6e:2x4", 1, 4, 1, 8, "ulysses", {"all-to-all"}),
        ("v4:2x2x2", 1, 4, 2, 8, "ulysses", {HOP}),
        ("v6e:2x4", 1, 8, 4, 32, "ulysses", {HOP}),  # with one key head on each rank, as Llama's
        ("v6e:2x4", 4, 2, 1, 8, "ring", {HOP, "all-to-all"}),
        ("v6e:2x4", 4, 2, 2, 8, "ring", {HOP}),
        ("v5e:2x4", 8, 1, 2, 8, "gather", {HOP}),
        ("v5p:2x2x2", 8, 1, 1, 8, "gather", {HOP, "all-gather"}),  # gradients are no sum of bfloat16
        ("tpu7x:2x2x1", 8, 1, 2, 8, "gather", {HOP}),
    ],
)
def test_groups_of_heads_hide_all_but_the_first_and_the_last(topology, ring, ulysses, groups, heads, strategy, kinds):
    plan = plan_on(topology, 8192, ring, ulysses, strategy=strategy, layout="contiguous")
    plan = plan.replace(transport=plan.transport.replace(groups=groups))
    programs = attention(plan, heads, 8, 8, docs=ra.Docs.from_lengths([5000, 3192]))
    assert {kind for program in programs for kind, _ in transfers(program)} == kinds
    for program in programs if groups > 1 else ():
        hidden = [behind for _, behind in transfers(program)]
        assert 2 * sum(hidden) >= hidden.count(False)


@pytest.mark.parametrize(
    ("scan", "layout", "kind"),
    [
        pytest.param("gather", "zigzag", "all-gather", marks=compile),
        pytest.param("ring", "contiguous", HOP, marks=slow),
    ],
)
def test_of_the_delta_rule_only_states_travel(scan, layout, kind):
    plan = plan_on("v6e:2x4", 8 * 128, 8, layout=layout)

    def delta_rule(q, k, v, g, beta):
        return ra.linear_attention(q, k, v, g, plan, beta=beta, scan=scan)

    for program in compiled(delta_rule, plan, 2, 2, 4, gates=2):
        assert {kind for kind, _ in transfers(program)} == {kind}


@compile
def test_long_shards_hold_no_copies_and_hide_their_hops():
    """Short shards do not show it: copies in each step took twice the memory, and one hop waited for them."""
    programs = attention(plan_on("v5e:2x4", 8 * 8192, 8, layout="zigzag"), 8, 2, 2)
    forward, backward = (program.memory_analysis() for program in programs)
    assert forward.temp_size_in_bytes <= 0.5 * forward.argument_size_in_bytes  # the result is added to in place
    assert backward.temp_size_in_bytes <= 5.5 * backward.argument_size_in_bytes
    assert {*transfers(programs[1])} == {(HOP, True)}


@slow
def test_decode_writes_the_cache_in_place():
    plan = plan_on("v6e:2x4", 2048, 8)

    def spread(shape, dtype):
        cut = PartitionSpec(None, ("ring", "ulysses")) if len(shape) == 4 and shape[1] > 1 else PartitionSpec()
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(plan.ring_axis.mesh, cut))

    sizes = {"batch": 1, "max_len": 65536, "kv_heads": 2, "head_dim": 128}
    empty = jax.eval_shape(lambda: ra.KVCache.allocate(plan, **sizes))
    cache = jax.tree.map(lambda x: spread(x.shape, x.dtype), empty)
    token = [spread((1, 1, heads, 128), "bfloat16") for heads in (8, 2, 2)]
    decode = jax.jit(lambda cache, *token: ra.decode(*token, cache), donate_argnums=0)
    memory = decode.lower(cache, *token).compile(compiler_options=OPTIONS).memory_analysis()
    keys_and_values = 2 * 65536 // 8 * 2 * 128 * 2  # bytes of a device
    assert memory.alias_size_in_bytes >= keys_and_values and memory.temp_size_in_bytes < keys_and_values / 4
