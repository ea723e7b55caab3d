"""`ringattn.compat.yunchang`: its modules equal dense float64 attention, gradients too, in its users' layouts."""

from inspect import signature

import pytest
import torch
import torch.distributed as dist

import ringattn as ra
from ringattn.comms.local import run
from ringattn.compat import yunchang as compat
from ringattn.launch import processes
from ringattn.launch.verify import oracle
from ringattn.launch.verify.cases import Case
from ringattn.masks.spec import AttentionSpec

T = 48


def part(x, name, r, u, ring, ulysses):
    """What rank u of the Ulysses ranks of ring rank r holds of x [B, T, ...], in the words of yunchang's users."""
    if name == "zigzag":
        blocks = x.chunk(2 * ring, 1)
        shard = torch.cat([blocks[r], blocks[-1 - r]], 1)
    else:
        shard = x[:, r::ring] if name == "strip" else x.chunk(ring, 1)[r]
    return shard.chunk(ulysses, 1)[u]


OPTIONS = {
    "causal": ({"causal": True}, AttentionSpec()),
    "full": ({}, AttentionSpec(causal=False)),
    "window": ({"causal": True, "window_size": (6, 0), "softmax_scale": 0.3}, AttentionSpec(window=7, scale=0.3)),
    "softcap": ({"causal": True, "softcap": 2.0, "deterministic": True}, AttentionSpec(softcap=2.0)),
}


def results(module, given, mine, options, together=False):
    """out and gradients of one rank; `mine` cuts whole tensors."""
    leaves = {n: mine(given[n]).clone().requires_grad_() for n in "qkv"}
    tensors = (torch.stack([*leaves.values()], 2),) if together else leaves.values()
    out = module(*tensors, **options, return_attn_probs=True)
    out.backward(mine(given["dout"]))
    return {"out": out.detach(), **{f"d{n}": x.grad for n, x in leaves.items()}}


def check(outputs, truth, mine, where):
    for name, x in outputs.items():
        error = oracle.error(x, mine(truth[name]), float(truth[name].norm()))
        assert error <= 2e-6, f"{where}: {name} is off by {error}"


def dense(case, given):
    """The truth for the loss sum(out * dout)."""
    return oracle.dense(case, {**given, "dlse": torch.zeros_like(given["dlse"])})


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", ["basic", "zigzag", "strip"])
def test_a_ring_of_ulysses_ranks_equals_dense_float64(name, options):
    words, spec = OPTIONS[options]
    case = Case(name, seq_len=T, spec=spec)
    given = oracle.inputs(case, torch.float32)
    truth = dense(case, given)

    def one_rank(mesh):
        r, u = (mesh.coordinates[n] for n in ("ring", "ulysses"))
        module = compat.LongContextAttention(ring_impl_type=name, mesh=mesh)

        def mine(x):
            return part(x, name, r, u, 2, 2)

        check(results(module, given, mine, words), truth, mine, f"ring rank {r}, Ulysses rank {u}")

    run(one_rank, ring=2, ulysses=2)


def test_fewer_key_heads_than_ulysses_ranks():
    case = Case("multi_query", seq_len=T, kv_heads=1)
    given = oracle.inputs(case, torch.float32)
    truth = dense(case, given)

    def one_rank(mesh):
        def mine(x):
            return x.chunk(4, 1)[mesh.rank]

        check(results(compat.UlyssesAttention(mesh), given, mine, {"causal": True}), truth, mine, f"rank {mesh.rank}")

    run(one_rank, ulysses=4)


def of_groups():
    """Every arrangement of four ranks, each group with sequences of its own, cut by EXTRACT_FUNC_DICT."""
    rank = dist.get_rank()
    for ulysses, ring, low in ((2, 2, True), (2, 2, False), (4, 1, True), (1, 4, False), (1, 2, True), (2, 1, False)):
        compat.set_seq_parallel_pg(ulysses, ring, rank, 4, low)
        ranks = dist.get_rank(compat.PROCESS_GROUP.RING_PG), dist.get_rank(compat.PROCESS_GROUP.ULYSSES_PG)
        where = rank % (ring * ulysses)
        assert ranks == (divmod(where, ulysses) if low else divmod(where, ring)[::-1])
        case = Case("groups", seq_len=T, kv_heads=4)
        given = oracle.inputs(case, torch.float32, seed=rank // (ring * ulysses))
        truth = dense(case, given)
        modules = {n: compat.LongContextAttention(ring_impl_type=n) for n in ("basic", "zigzag", "strip")}
        modules["together"] = compat.LongContextAttentionQKVPacked(ring_impl_type="zigzag")
        if ring == 1:
            modules["ulysses"] = compat.UlyssesAttention(sequence_process_group=compat.PROCESS_GROUP.ULYSSES_PG)
        for name, module in modules.items():
            layout = {"together": "zigzag", "ulysses": "basic"}.get(name, name)

            def mine(x, layout=layout, ranks=ranks, ring=ring, ulysses=ulysses):
                result = compat.EXTRACT_FUNC_DICT[layout](x, rank, world_size=4, rd=ring, ud=ulysses)
                assert torch.equal(result, part(x, layout, *ranks, ring, ulysses))
                return result

            result = results(module, given, mine, {"causal": True}, together=name == "together")
            check(result, truth, mine, f"{name}, ulysses {ulysses}, ring {ring}, rank {rank}")
    with pytest.raises(ValueError, match=f"rank=9, world_size=4: this is rank {rank} of 4"):
        compat.set_seq_parallel_pg(2, 2, 9, 4)
    case = Case("all", seq_len=T, kv_heads=4)
    given = oracle.inputs(case, torch.float32)
    result = results(compat.UlyssesAttention(), given, lambda x: x.chunk(4, 1)[rank], {"causal": True})
    check(result, dense(case, given), lambda x: x.chunk(4, 1)[rank], f"all ranks, rank {rank}")


def test_over_process_groups():
    processes.run(of_groups, 4)


NAMES = [
    "query", "key", "value", "dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes",
    "deterministic", "return_attn_probs",
]  # fmt: skip


def test_signatures():
    for module in (compat.LongContextAttention, compat.UlyssesAttention):
        assert list(signature(module.forward).parameters)[1:] == [*NAMES, "args"]
    assert list(signature(compat.set_seq_parallel_pg).parameters) == [
        "sp_ulysses_degree", "sp_ring_degree", "rank", "world_size", "use_ulysses_low",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"dropout_p": 0.1}, "dropout_p=0.1: attention dropout is not supported"),
        ({"alibi_slopes": torch.ones(4)}, "alibi_slopes: ALiBi is not supported"),
    ],
)
def test_what_is_not_supported_is_refused(given, error):
    q = torch.ones(1, 4, 4, 8)

    def one_rank(mesh):
        with pytest.raises(ValueError, match=error):
            compat.LongContextAttention(mesh=mesh)(q, q, q, **given)

    run(one_rank, ring=1)


def test_every_kind_of_kernel_and_every_function_of_a_ring():
    """Those that are exact give what one rank has; the others are refused by each function."""
    x, cu = torch.randn(1, 16, 2, 8), torch.tensor([0, 4, 16], dtype=torch.int32)
    expected = ra.attention(x, x, x)
    packed = torch.stack([x, x, x], 2)

    def one_rank(mesh):
        for kind in compat.AttnType:
            assert compat.AttnType.from_string(kind.value) is kind
            if "sage" not in kind.value:
                module = compat.LongContextAttention(2, 1, "basic_flashinfer", False, False, kind, None, mesh=mesh)
                result = module(x, x, x, 0.0, None, True, (-1, -1), 0.0, None, False, True, "more")
                torch.testing.assert_close(result, expected)
        for name, function in compat.RING_IMPL_QKVPACKED_DICT.items():
            out, *_ = function(packed, 0.0, None, True, (-1, -1), 0.0, None, False, True, mesh, attn_type="fa3")
            torch.testing.assert_close(out, expected)
            torch.testing.assert_close(compat.RING_IMPL_DICT[name](x, x, x, causal=True, group=mesh), out)
            with pytest.raises(ValueError, match="attn_type='sage_fp8': attention is exact"):
                function(packed, group=mesh, attn_type=compat.AttnType.SAGE_FP8)
        out = compat.zigzag_ring_flash_attn_varlen_func(x[0], x[0], x[0], cu, 12, causal=True, softcap=1.0, group=mesh)
        capped = ra.AttentionSpec(softcap=1.0)
        torch.testing.assert_close(out[None], ra.attention(x, x, x, spec=capped, docs=ra.Docs.from_lengths([4, 12])))

    run(one_rank, ring=1)
    with pytest.raises(ValueError, match="'x' is not a valid AttnType"):
        compat.AttnType.from_string("x")
    functions = {name for name in compat.__all__ if name.endswith("_func")}
    assert len(functions) == 19 and all(callable(getattr(compat, name)) for name in functions)
    assert [*signature(compat.ring_flash_attn_func).parameters][3:] == [
        *NAMES[3:],
        "group",
        "attn_type",
        "attn_processor",
    ]
