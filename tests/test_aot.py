"""Programs for TPUs, compiled ahead of time: every hop flies behind a kernel, and a ring gathers nothing."""

from functools import lru_cache
from importlib.util import find_spec

import pytest

jax = pytest.importorskip("jax")


import ringattn as ra  # noqa: E402
from ringattn.jax import aot  # noqa: E402

needs_compiler = pytest.mark.skipif(
    find_spec("libtpu") is None, reason="the TPU compiler is not installed: pip install '.[tpu]'"
)

SCHEDULED = """
HloModule jit_f, is_scheduled=true

%body.1 (p: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %start.1 = (bf16[4,8]{1,0:T(8,128)}, bf16[4,8]{1,0}, u32[]) collective-permute-start(%x), source_target_pairs={{0,1}}
  %forward_kernel.3 = (f32[4]{0}, f32[4]{0}) custom-call(%x), custom_call_target="tpu_custom_call"
  %done.1 = bf16[4,8]{1,0} collective-permute-done(%start.1)
}

%condition.1 (p: (s32[], bf16[4,8])) -> pred[] {
  %constant.1 = s32[]{:T(128)} constant(5)
  ROOT %lt = pred[] compare(%i, %constant.1), direction=LT
}

ENTRY %main (x: bf16[4,8]) -> bf16[4,8] {
  %while.1 = (s32[], bf16[4,8]) while(%t), condition=%condition.1, body=%body.1, metadata={op_name="while"}
  %start.2 = (f32[4,8]{1,0}, f32[4,8]{1,0}) collective-permute-start(%y), source_target_pairs={{1,0}}
  %done.2 = f32[4,8]{1,0} collective-permute-done(%start.2)
  %forward_kernel.4 = f32[4]{0} custom-call(%x), custom_call_target="tpu_custom_call"
  %all-gather.1 = bf16[32]{0} all-gather(%z), dimensions={0}
}
"""


def test_the_schedule_is_read_from_the_programs_text():
    order, transfers = aot.schedule(SCHEDULED)
    assert " ".join(order) == "5x[ start forward_kernel done ] start done forward_kernel all-gather"
    hidden, exposed, gather = transfers
    assert (hidden.times, hidden.bytes, hidden.behind) == (5, 64, ("forward_kernel",))
    assert (exposed.times, exposed.bytes, exposed.behind) == (1, 128, ())
    assert (gather.kind, gather.bytes) == ("all-gather", 64)


ON_A_SPARSECORE = """
%called.1 (p: bf16[4,8], t: token[]) -> bf16[32,8] {
  ROOT %all-gather.4 = bf16[32,8]{1,0} all-gather(%p), dimensions={0}
}

ENTRY %main (x: bf16[4,8]) -> bf16[4,8] {
  %prepare = s32[]{:S(2)} custom-call(), custom_call_target="PrepareAsyncCallStart"
  %call-start.1 = ((bf16[4,8]{1,0}, token[]), bf16[32,8]{1,0}) call-start(%x, %t), to_apply=%called.1
  %forward_kernel.3 = f32[4]{0} custom-call(%x), custom_call_target="tpu_custom_call"
  %call-done.1 = bf16[32,8]{1,0} call-done(%call-start.1)
}
"""


def test_what_a_sparsecore_sends_is_read_too():
    order, (gather,) = aot.schedule(ON_A_SPARSECORE)
    assert " ".join(order) == "start forward_kernel done"
    assert (gather.kind, gather.bytes, gather.behind) == ("all-gather", 512, ("forward_kernel",))


def test_a_plan_without_a_shape_is_refused():
    with pytest.raises(ValueError, match="heads"):
        ra.aot_report("v5e:2x4", ra.Plan(4096, ring=8))


@pytest.mark.skipif(find_spec("libtpu") is not None, reason="the TPU compiler is installed")
def test_without_the_compiler_the_message_says_what_to_install():
    with pytest.raises(RuntimeError, match=r"pip install 'ringattn\[tpu\]'"):
        ra.aot_report("v6e:2x4", ra.Plan(8192, 8, heads=(8, 2), head_dim=128))


HOP, HEADS = "collective-permute", "all-to-all"
SENT = [  # on each generation; of rings see below, too
    ("v6e:2x4", "ulysses", 1, {HEADS}),
    ("v6e:2x4", "one key head", 4, {HOP}),  # of a rank, as Llama's eight under Ulysses 8
    ("v6e:2x4", "usp", 1, {HOP, HEADS}),
    ("v6e:2x4", "usp", 2, {HOP}),
    ("v4:2x2x2", "ulysses", 2, {HOP}),
    ("v5e:2x4", "gather", 2, {HOP}),
    ("v5p:2x2x2", "gather", 1, {HOP, "all-gather"}),  # gradients are no sum of bfloat16
    ("tpu7x:2x2x1", "gather", 2, {HOP}),
]


@needs_compiler
@pytest.mark.compile
@pytest.mark.parametrize(("topology", "strategy", "groups", "kinds"), SENT)
def test_every_strategy_sends_something_and_groups_of_heads_hide_all_but_the_ends(topology, strategy, groups, kinds):
    ring, ulysses = {"ulysses": (1, 4), "one key head": (1, 8), "usp": (4, 2), "gather": (8, 1)}[strategy]
    heads, once = (8, 8), 0  # bytes of a rank's only key head, which it sends with the first group
    if strategy == "one key head":
        heads, once = (32, 8), 2 * 7 * 8192 // 8 * 128 * 2
    strategy = {"usp": "ring", "one key head": "ulysses"}.get(strategy, strategy)
    plan = ra.Plan(8192, ring, ulysses, strategy, "contiguous", heads=heads, head_dim=128)
    plan = plan.replace(transport=plan.transport.replace(groups=groups))
    found = ra.aot_report(topology, plan, docs=ra.Docs.from_lengths([5000, 3192]))
    assert found.forward.sent and found.backward.sent > found.forward.sent
    assert {t.kind for t in found.backward.transfers} == kinds, str(found)
    if groups > 1:
        for program in (found.forward, found.backward):
            assert all(t.times == 1 for t in program.exposed), str(program)
            assert sum(t.times >= groups for t in program.transfers) > len(program.exposed) / 2, str(program)
        ends = once + (found.forward.sent - once) / (groups + 1)  # of the first and the last group
        assert sum(t.bytes for t in found.forward.exposed) <= ends, str(found.forward)


@needs_compiler
@pytest.mark.compile
def test_a_caches_programs_write_it_in_place_and_send_something():
    plan = ra.Plan(2048, 8, 1, "ring", "contiguous", heads=(8, 2), head_dim=128)
    found = ra.aot_report("v6e:2x4", plan, cache=65536)
    prefill, decode = found.programs
    memory = 2 * 65536 // 8 * 2 * 128 * 2  # of a device's keys and values
    assert (prefill.name, decode.name) == ("prefill", "decode") and prefill.sent > decode.sent > 0
    assert all(memory <= p.arguments <= 1.5 * memory for p in found.programs), str(found)
    assert decode.temporaries < memory / 4, str(found)
    with pytest.raises(ValueError, match="leave out linear and docs"):
        ra.aot_report("v6e:2x4", plan, cache=65536, linear="delta")


@needs_compiler
@pytest.mark.compile
@pytest.mark.parametrize(("topology", "rule"), [("v6e:2x4", "gated"), ("v5e:2x4", "delta")])
def test_linear_attention_of_grouped_heads_sends_states(topology, rule):
    plan = ra.Plan(2048, 8, 1, "ring", "contiguous", heads=(4, 2), head_dim=128)
    found = ra.aot_report(topology, plan, linear=rule)
    state = 4 * 128 * 128 * 4  # of a device: a state for each head of values
    for program, passes in ((found.forward, 1), (found.backward, 2)):
        # gathered from all devices, or passed on in parts
        assert 2 * state <= program.sent / passes <= 8.01 * state, str(program)
    kernels = [name for name in found.forward.order if name.endswith("_kernel")]
    assert kernels == ["map_kernel", "outputs_kernel"] and found.forward.order[-1] == kernels[-1], str(found)
    assert {"gated": "gated linear attention", "delta": "the delta rule"}[rule] in str(found)


@lru_cache(maxsize=8)
def report(topology, layout, ring, a_device=512):
    return ra.aot_report(topology, ra.Plan(ring * a_device, ring, 1, "ring", layout, heads=(2, 1), head_dim=128))


slow, compile = pytest.mark.slow, pytest.mark.compile  # with other blocks or another network it takes longer
CHIPS = [
    pytest.param("v6e:2x4", "contiguous", 8, marks=slow),
    pytest.param("v5e:2x4", "zigzag", 8, marks=slow),
    pytest.param("v6e:16x16", "zigzag", 256, marks=compile),
    pytest.param("v5e:4x8", "zigzag", 32, marks=compile),
    pytest.param("v4:2x2x2", "zigzag", 8, marks=compile),
    pytest.param("v5p:2x2x2", "striped", 8, marks=compile),
    pytest.param("tpu7x:2x2x2", "zigzag", 8, marks=compile),
]


@needs_compiler
@pytest.mark.parametrize(("topology", "layout", "ring"), CHIPS)
def test_every_hop_of_a_ring_flies_behind_a_kernel(topology, layout, ring):
    found = report(topology, layout, ring)
    for program in (found.forward, found.backward):
        assert program.transfers
        assert not program.exposed, str(program)
        assert {t.kind for t in program.transfers} == {"collective-permute"}
        assert "all-gather" not in program.text
    assert sum(t.times for t in found.forward.transfers) == 2 * (ring - 1)  # keys and values, once around


@needs_compiler
@pytest.mark.parametrize(
    ("scan", "layout", "kind"),
    [
        pytest.param("gather", "zigzag", "all-gather", marks=compile),
        pytest.param("ring", "contiguous", "collective-permute", marks=slow),
    ],
)
def test_the_delta_rule_compiles_and_only_states_travel(scan, layout, kind):
    """Every gradient of Gated DeltaNet with grouped keys: no transfer is larger than a state a segment."""
    T, H, K, V = 8 * 256, 2, 64, 64
    plan = aot.bound_to("v6e:2x4", ra.Plan(T, 8, 1, "ring", layout))
    shapes = [(1, T, 1, K), (1, T, 1, K), (1, T, H, V), (1, T, H), (1, T, H)]
    args = aot.on_mesh(plan, [jax.ShapeDtypeStruct(x, "bfloat16" if len(x) == 4 else "float32") for x in shapes])

    def loss(q, k, v, g, beta):
        return ra.linear_attention(q, k, v, g, plan, beta=beta, scan=scan).astype("float32").sum()

    found = aot.compiled("gradients", jax.grad(loss, argnums=(0, 1, 2, 3, 4)), args)
    assert {t.kind for t in found.transfers} == {kind}
    assert max(t.bytes for t in found.transfers) == (16 if scan == "gather" else 1) * 4 * H * K * V


@needs_compiler
@pytest.mark.compile
def test_temporaries_shrink_with_the_ranks():
    eight, four = (report("v5e:2x4", "zigzag", ring, 8 * 4096 // ring).backward for ring in (8, 4))
    assert eight.temporaries <= 0.6 * four.temporaries


@needs_compiler
@pytest.mark.compile
def test_a_backward_pass_of_long_shards_hides_its_hops_and_holds_no_copies():
    """Short shards do not show it: copies in each step took twice the memory, and one hop waited for them."""
    found = ra.aot_report("v5e:2x4", ra.Plan(8 * 8192, 8, 1, "ring", "zigzag", heads=(8, 2), head_dim=128))
    forward, backward = found.programs
    assert forward.temporaries <= 0.5 * forward.arguments, str(forward)  # the result is added to in place
    assert backward.temporaries <= 2.4 * backward.arguments and not backward.exposed, str(backward)
