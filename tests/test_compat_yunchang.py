"""`ringattn.compat.yunchang`: its modules equal dense float64 attention, gradients too, in its users' layouts."""

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
from tests.cases import relative_error

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


def results(module, given, mine, options):
    """out and gradients of one rank; `mine` cuts whole tensors."""
    leaves = {n: mine(given[n]).clone().requires_grad_() for n in "qkv"}
    out = module(*leaves.values(), **options, return_attn_probs=True)
    out.backward(mine(given["dout"]))
    return {"out": out.detach(), **{f"d{n}": x.grad for n, x in leaves.items()}}


def check(outputs, truth, mine, where):
    for name, x in outputs.items():
        error = relative_error(x, mine(truth[name]), truth[name])
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
        if ring == 1:
            modules["ulysses"] = compat.UlyssesAttention(sequence_process_group=compat.PROCESS_GROUP.ULYSSES_PG)
        for name, module in modules.items():
            layout = "basic" if name == "ulysses" else name

            def mine(x, layout=layout, ranks=ranks, ring=ring, ulysses=ulysses):
                result = compat.EXTRACT_FUNC_DICT[layout](x, rank, world_size=4, rd=ring, ud=ulysses)
                assert torch.equal(result, part(x, layout, *ranks, ring, ulysses))
                return result

            where = f"{name}, ulysses {ulysses}, ring {ring}, rank {rank}"
            check(results(module, given, mine, {"causal": True}), truth, mine, where)
    with pytest.raises(ValueError, match=f"rank=9, world_size=4: this is rank {rank} of 4"):
        compat.set_seq_parallel_pg(2, 2, 9, 4)
    case = Case("all", seq_len=T, kv_heads=4)
    given = oracle.inputs(case, torch.float32)
    result = results(compat.UlyssesAttention(), given, lambda x: x.chunk(4, 1)[rank], {"causal": True})
    check(result, dense(case, given), lambda x: x.chunk(4, 1)[rank], f"all ranks, rank {rank}")


def test_over_process_groups():
    processes.run(of_groups, 4)


def test_arguments_by_position_and_what_is_refused():
    q = torch.randn(1, 16, 4, 8)

    def one_rank(mesh):
        kind = compat.AttnType.from_string("fa3")
        module = compat.AsyncLongContextAttention(2, 1, "basic", False, False, kind, None, mesh=mesh)
        result = module(q, q, q, 0.0, None, True, (-1, -1), 0.0, None, False, True, "more")
        torch.testing.assert_close(result, ra.attention(q, q, q))
        with pytest.raises(ValueError, match=r"dropout_p=0\.1: attention dropout is not supported"):
            module(q, q, q, dropout_p=0.1)
        with pytest.raises(ValueError, match="alibi_slopes: ALiBi is not supported"):
            module(q, q, q, alibi_slopes=torch.ones(4))

    run(one_rank, ring=1)
    with pytest.raises(ValueError, match="'sage_fp8' is not a valid AttnType"):
        compat.UlyssesAttention(attn_type="sage_fp8")
