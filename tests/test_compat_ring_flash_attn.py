"""`ringattn.compat.ring_flash_attn`: every function equals dense float64 attention, out, lse and gradients."""

import pytest
import torch
import torch.distributed as dist

import ringattn as ra
from ringattn.comms.local import run
from ringattn.compat import ring_flash_attn as compat
from ringattn.launch import processes
from ringattn.launch.verify import oracle
from ringattn.launch.verify.cases import Case
from ringattn.masks.spec import AttentionSpec
from tests.cases import relative_error
from tests.training import one_process

T, LENGTHS = 48, [16, 24, 8]  # multiples of twice the ranks


def blocks(x, rank, ranks, which):
    """What a rank holds of one sequence in dim 0."""
    if which == "stripe":
        return x[rank::ranks]
    if which == "zigzag":
        chunks = x.chunk(2 * ranks)
        return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])
    return x.chunk(ranks)[rank]


def part(x, rank, ranks, which):
    """What a rank holds of x [B, T, ...], as the functions want it."""
    if which.endswith("varlen"):
        return torch.cat([blocks(d, rank, ranks, which.removesuffix("_varlen")) for d in x[0].split(LENGTHS)])
    if which == "llama3":
        return x[0].chunk(ranks)[rank]
    return torch.stack([blocks(row, rank, ranks, which) for row in x])


FUNCTIONS = {
    "ring": "ring_flash_attn", "zigzag": "zigzag_ring_flash_attn", "stripe": "stripe_flash_attn",
    "ring_varlen": "ring_flash_attn_varlen", "zigzag_varlen": "zigzag_ring_flash_attn_varlen",
    "llama3": "llama3_flash_attn_varlen",
}  # fmt: skip
OPTIONS = {
    "causal": ({"causal": True}, AttentionSpec()),
    "full": ({}, AttentionSpec(causal=False)),
    "window": ({"causal": True, "window_size": (6, 0), "softmax_scale": 0.3}, AttentionSpec(window=7, scale=0.3)),
    "window_alone": ({"window_size": (6, 0)}, AttentionSpec(window=7)),
    "both_sides": ({"window_size": (6, 3)}, AttentionSpec(causal=False, window=(6, 3))),
    "behind": ({"window_size": (6, -1)}, AttentionSpec(causal=False, window=(6, 2**62))),
    "softcap": ({"causal": True, "softcap": 2.0, "deterministic": True}, AttentionSpec(softcap=2.0)),
}


def case_of(which, spec):
    packed = which.endswith("varlen") or which == "llama3"
    return Case(which, seq_len=T, batch=1 if packed else 2, spec=spec, lengths=LENGTHS if packed else None)


def call(which, form, rank, ranks, group, given, options, copied=False):
    """out, lse and gradients of this rank's part, and what they should be as a function of the whole."""
    leaves = {n: part(given[n], rank, ranks, which).requires_grad_() for n in "qkv"}
    q, k, v = leaves.values()
    tensors = (q, k, v)
    if form:
        tensors = (q, torch.stack([k, v], -3)) if form == "_kvpacked" else (torch.stack([q, k, v], -3),)
    more = ()
    cu = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    if which.endswith("varlen"):
        more = (cu // ranks, max(LENGTHS) // ranks)
    if which == "llama3":
        made = compat.llama3_flash_attn_prepare_cu_seqlens(cu, options.get("causal", False), rank, ranks)
        made = (made[0].clone(), *made[1:]) if copied else made
        more = (*made[:4], 1, made[4])
    function = getattr(compat, f"{FUNCTIONS[which]}{form}_func")
    out, lse, nothing = function(*tensors, *more, return_attn_probs=True, group=group, **options)
    assert nothing is None
    heads_last = lse.T if lse.dim() == 2 else lse.transpose(1, 2)
    dout, dlse = (part(given[n], rank, ranks, which) for n in ("dout", "dlse"))
    results = oracle.with_gradients({"out": out, "lse": heads_last}, {"dout": dout, "dlse": dlse}, leaves)
    plain = function(*tensors, *more, group=group, **options)
    assert torch.equal(plain, out)
    return results


def check(which, result, truth, ranks, where=""):
    for rank, results in enumerate(result):
        for name, x in results.items():
            error = relative_error(x, part(truth[name], rank, ranks, which), truth[name])
            assert error <= 2e-6, f"{which} {where} rank {rank}: {name} is off by {error}"


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("which", FUNCTIONS)
def test_equals_dense_float64(which, options):
    words, spec = OPTIONS[options]
    case = case_of(which, spec)
    given = oracle.inputs(case, torch.float32)
    truth = oracle.dense(case, given)
    result = run(lambda mesh: call(which, "", mesh.rank, 4, mesh, given, words), ring=4)
    check(which, result, truth, 4)


@pytest.mark.parametrize("form", ["_kvpacked", "_qkvpacked"])
@pytest.mark.parametrize("which", FUNCTIONS)
def test_packed_forms(which, form):
    """Heads as many as key heads, for qkv."""
    case = Case(which, seq_len=T, heads=2, kv_heads=2, batch=case_of(which, None).batch,
                lengths=case_of(which, None).lengths)  # fmt: skip
    given = oracle.inputs(case, torch.float32)
    truth = oracle.dense(case, given)
    result = run(lambda mesh: call(which, form, mesh.rank, 2, mesh, given, {"causal": True}), ring=2)
    check(which, result, truth, 2)


def of_groups():
    """Two groups of two ranks, each with its own sequences; then all four ranks."""
    rank, results = dist.get_rank(), []
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for group, ranks, at in ((groups[rank // 2], 2, rank % 2), (None, 4, rank)):
        for which in FUNCTIONS:
            given = oracle.inputs(
                case_of(which, AttentionSpec()), torch.float32, seed=0 if group is None else rank // 2
            )
            results.append(call(which, "", at, ranks, group, given, {"causal": True}, copied=True))
    return results


def test_over_process_groups():
    results = processes.run(of_groups, 4)
    for i, which in enumerate(FUNCTIONS):
        case = case_of(which, AttentionSpec())
        for group in range(2):
            truth = oracle.dense(case, oracle.inputs(case, torch.float32, seed=group))
            check(which, [results[2 * group + r][i] for r in range(2)], truth, 2, f"group {group}")
        truth = oracle.dense(case, oracle.inputs(case, torch.float32))
        check(which, [single[len(FUNCTIONS) + i] for single in results], truth, 4)


def test_the_arguments_of_one_rank_for_packed_documents():
    """Eight ranks with two tokens each, of documents of 7, 7 and 2."""
    cu = torch.tensor([0, 7, 14, 16], dtype=torch.int32)
    for causal in (True, False):
        for rank in range(8):
            q, k, longest_q, longest_k, keys = compat.llama3_flash_attn_prepare_cu_seqlens(cu, causal, rank, 8)
            assert q.dtype == k.dtype == cu.dtype and q[0] == k[0] == 0 and len(q) == len(k)
            assert q[-1] == 2 and keys.stop - keys.start == k[-1]
            assert (longest_q, longest_k) == (q.diff().max(), k.diff().max())
            assert keys.start in cu and (keys.stop == 2 * rank + 2 if causal else keys.stop in cu)
    assert compat.llama3_flash_attn_prepare_cu_seqlens(cu, True, 3, 8)[0].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dropout_p": 0.1}, "dropout_p=0.1: attention dropout is not supported"),
        ({"alibi_slopes": torch.ones(4)}, "alibi_slopes: ALiBi is not supported"),
        ({}, "no ranks were started: call torch.distributed.init_process_group"),
    ],
)
@pytest.mark.parametrize("which", ["zigzag", "ring_varlen", "llama3"])
def test_what_cannot_be_is_refused(which, given, message):
    q = torch.ones((1, 4, 4, 8) if which == "zigzag" else (4, 4, 8))
    cu = torch.tensor([0, 4])
    more = {"zigzag": (), "ring_varlen": (cu, 4), "llama3": (cu, cu, 4, 4, 1, slice(0, 4))}[which]
    with pytest.raises(ValueError, match=message):
        getattr(compat, f"{FUNCTIONS[which]}_func")(q, q, q, *more, **given)


def test_what_is_not_in_its_layout_is_refused():
    q, cu, other = torch.ones(1, 5, 2, 8), torch.tensor([0, 2, 5]), torch.tensor([0, 2, 6])
    zigzag, varlen = compat.zigzag_ring_flash_attn_func, compat.zigzag_ring_flash_attn_varlen_func

    def refused(mesh):
        for function, message, *given in (
            (zigzag, "5 tokens a rank: zigzag needs an even number", q, q, q),
            (varlen, "zigzag cuts each document into two", *[q[0, :4]] * 3, torch.tensor([0, 1, 4]), 3),
            (varlen, "cu_seqlens ends with 10", *[q[0, :4]] * 3, 2 * cu, 3),
            (varlen, "do not make the same call: .*docs: ", *[torch.ones(6, 2, 8)] * 3, other[:: mesh.rank + 1], 4),
            (zigzag, "4 queries a rank and 2 keys", q[:, :4], *[q[:, :2]] * 2, 0.0, None, True),
        ):
            with pytest.raises(ValueError, match=message):
                function(*given, group=mesh)

    run(refused, ring=2)
    with pytest.raises(ValueError, match="5 tokens over 3 ranks: pad them"):
        compat.llama3_flash_attn_prepare_cu_seqlens(cu, True, 0, 3)


def test_keys_of_another_sequence():
    case = Case("cross", seq_len=16, key_len=24, spec=AttentionSpec(causal=False))
    given = oracle.inputs(case, torch.float32)
    result = run(lambda mesh: call("ring", "", mesh.rank, 2, mesh, given, {}), ring=2)
    check("ring", result, oracle.dense(case, given), 2)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("which", ["ring_varlen", "zigzag_varlen", "llama3"])
def test_cu_seqlens_that_are_filled_again_are_read_again(which, inference):
    """In place, also where it does not show: in inference mode, and by numpy. prepare's own result too."""

    def of(mesh):
        with torch.inference_mode(inference):
            q = torch.randn(3, 16, 2, 8).unbind(0)
            cu = torch.tensor([0, 4, 16], dtype=torch.int32)
            more = (cu, 16)
            if which == "llama3":
                made = compat.llama3_flash_attn_prepare_cu_seqlens(cu, True, 0, 1)
                more, cu = (*made[:4], 1, made[4]), made[0]
                made[1].numpy()[1] = 10
            function = getattr(compat, f"{FUNCTIONS[which]}_func")
            before = function(*q, *more, causal=True, group=mesh)
            if which == "llama3":
                more = (cu, cu, *more[2:])
            cu.numpy()[1] = 10
            after = function(*q, *more, causal=True, group=mesh)
            for lengths, result in (([4, 12], before), ([10, 6], after)):
                expected = ra.attention(*(x[None] for x in q), docs=ra.Docs.from_lengths(lengths))[0]
                assert (result - expected).abs().max() < 1e-5, lengths

    run(of, ring=1)


@pytest.mark.slow
def test_compiled():
    """Nothing was called before: the mesh is made in the first call."""
    x = torch.randn(1, 8, 2, 8, requires_grad=True)
    cu = torch.tensor([0, 4, 8], dtype=torch.int32)

    def model(x):
        y = 2 * x
        y = y + compat.zigzag_ring_flash_attn_func(y, y, y, causal=True)
        y = y + compat.ring_flash_attn_varlen_func(*3 * [y[0]], cu, 4, causal=True)
        a = compat.llama3_flash_attn_prepare_cu_seqlens(cu, True, 0, 1)
        return y + compat.llama3_flash_attn_varlen_func(*3 * [y[0]], *a[:4], 1, a[4], causal=True)

    with one_process():
        result = torch.compile(model, backend="aot_eager")(x)
        torch.testing.assert_close(result, model(x))
        torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x)[0] for y in (result, model(x))))
        alone_ = torch.compile(compat.stripe_flash_attn_func, backend="aot_eager")
        torch.testing.assert_close(alone_(x, x, x, causal=True), compat.stripe_flash_attn_func(x, x, x, causal=True))
