"""A wrong call is a ValueError with the numbers and the remedy, on every rank alike, before anything is sent."""

import jax
import jax.numpy as jnp
import pytest
import torch

import ringattn as ra
from ringattn.comms.local import run

FULL = ra.AttentionSpec(causal=False)
HALVES = ra.Docs.from_lengths([32, 32])


def tensors(T=16, H=4, G=2, D=8, B=2):
    return [torch.randn(B, T, h, D) for h in (H, G, G)]


def call(change=lambda q, k, v: (q, k, v), plan=None, ring=2, ulysses=2, **given):
    """One call on four ranks with changed tensors; every rank must raise the same ValueError. Returns its text."""
    messages = []

    def one_rank(mesh):
        made = ra.plan(mesh, seq_len=64, **(plan or {}))
        sent = made.ring_axis.sent if made.ring > 1 else 0
        try:
            ra.attention(*change(*tensors()), made, **given)
        except ValueError as error:
            messages.append(str(error))
            assert made.ring == 1 or made.ring_axis.sent == sent, "something was sent before the error"
        ra.attention(*tensors(), made)  # nothing is half done: the next call works

    run(one_rank, ring=ring, ulysses=ulysses)
    assert len(messages) == 4, f"{len(messages)} of 4 ranks raised"
    assert len(set(messages)) == 1, messages
    return messages[0]


@pytest.mark.parametrize(
    ("change", "given", "says"),
    [
        (lambda q, k, v: (q, k[:, :, :1].repeat(1, 1, 3, 1), v[:, :, :1].repeat(1, 1, 3, 1)), {},
         "3 key heads do not divide 4 query heads"),
        (lambda q, k, v: (q[:, :, :3], k[:, :, :1], v[:, :, :1]), {},
         "ulysses=2 does not divide 3 query heads; use ulysses=1, ring=4"),
        (lambda q, k, v: (q, k[..., :6], v), {}, "head dims differ: q 8, k 6; only v may have another"),
        (lambda q, k, v: (q, k.half(), v), {}, "q is torch.float32, k is torch.float16"),
        (lambda q, k, v: (q.int(), k.int(), v.int()), {}, "attention takes float16, bfloat16, float32 or float64"),
        (lambda q, k, v: (q, k, v.to("meta")), {}, "v is on meta; put all three on one device"),
        (lambda q, k, v: (q[0], k[0], v[0]), {}, r"expected 4 dims \[batch, tokens, heads, head_dim\]"),
        (lambda q, k, v: (q, k[:1], v[:1]), {}, "batch sizes differ: q 2, k 1, v 1"),
        (lambda q, k, v: (q, k, v[:, :8]), {}, "k has 16 tokens x 2 heads, v 8 x 2"),
        (lambda q, k, v: (q[:, :15], k, v), {}, r"q has 15 tokens, a rank of this plan holds 16 .*plan.for_length"),
        (lambda q, k, v: [x.repeat(1, 4, 1, 1) for x in (q, k, v)], {}, r"q has 64 tokens.* pass plan.shard\(x\)"),
        (lambda *x: x, {"docs": ra.Docs.from_lengths([30, 30])},
         r"docs: document lengths add up to 60, the sequence has 64 tokens; .*pad_to=64"),
        (lambda *x: x, {"docs": ra.Docs.from_lengths([[64]] * 3)}, "3 rows, the batch has 2; give 1 row or 2"),
        (lambda *x: x, {"key_docs": ra.Docs.from_lengths([64])}, "key_docs needs docs"),
        (lambda *x: x, {"sinks": torch.zeros(3)}, r"sinks has shape \(3,\).*expected one per query head, \(4,\)"),
        (lambda *x: x, {"dropout": 0.1}, "dropout: attention dropout is not supported"),
        (lambda *x: x, {"alibi_slopes": 1, "bias": 2}, "alibi_slopes: ALiBi is not supported.*bias: an additive bias"),
        (lambda *x: x, {"docs": [30, 34]}, r"docs is of type list; pass Docs.from_lengths"),
        (lambda *x: x, {"spec": {"causal": False}}, r"spec is of type dict; pass AttentionSpec\(causal"),
    ],
)  # fmt: skip
def test_a_wrong_call_is_refused_on_all_ranks_alike(change, given, says):
    import re

    result = call(change, **given)
    assert re.search(says, result), result


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (lambda: {"k": torch.zeros(2, 16, 2, 6)}, "head dims differ: q 8, k 6; only v may have another"),
        (lambda: {"docs": [8, 8]}, "docs is of type list"),
        (lambda: {"dropout": 0.1}, "dropout: attention dropout is not supported"),
        (lambda: {"v": torch.zeros(16)}, r"v has shape \(16,\); expected 4 dims"),
        (
            lambda: {"v": jnp.zeros((2, 16, 2, 8))},
            "expected torch tensors or jax arrays, got Tensor, Tensor, ArrayImpl",
        ),
    ],
)
def test_an_argument_that_only_one_rank_passes_is_refused_on_all(given, says):
    def one_rank(mesh):
        plan = ra.plan(mesh, seq_len=32)
        q, k, v = tensors()
        with pytest.raises(ValueError, match=rf"{says}.*\(on ring rank 1\)"):
            ra.attention(**{"q": q, "k": k, "v": v, "plan": plan, **(given() if mesh.rank else {})})
        ra.attention(q, k, v, plan)

    run(one_rank, ring=2, timeout=20)


class Spread(torch.Tensor):
    """What a DTensor has."""

    to_local = torch.Tensor.clone


def linear(**given):
    x = torch.zeros(2, 16, 4, 8)
    return ra.linear_attention(**{"q": x, "k": x, "v": x, **given})


Q, K, V = tensors()
HEADS_FIRST = [x.transpose(1, 2) for x in (Q, K, V)]
NESTED = torch.nested.nested_tensor([torch.zeros(3, 4, 8), torch.zeros(5, 4, 8)], layout=torch.jagged)
SPREAD = [x.as_subclass(Spread) for x in (Q, K, V)]
BFLOAT16 = r"bfloat16; the state of .*float32 inputs is float32: cast it to that"
EXCHANGED = r"q has shape \(2, 4, 16, 8\), .* look exchanged: .* x.transpose\(1, 2\)"
SPARSE, DENSER = torch.Tensor.to_sparse, torch.Tensor.to_mkldnn
WRONG = [
    (lambda: linear(log_decay=-0.5), "log_decay is of type float; it must be a torch tensor, as q is"),
    (lambda: linear(plan="x"), r"plan is of type str; make one with ringattn.plan\(mesh"),
    (lambda: linear(scale="x"), "scale='x'"),
    (lambda: linear(q=torch.zeros(3)), r"q has shape \(3,\); expected 4 dims"),
    (lambda: linear(q=Q[..., :0], k=Q[..., :0]), r"q has shape \(2, 16, 4, 0\); heads and head dim must be"),
    (lambda: linear(initial_state=torch.zeros(2, 4, 8, 8).bfloat16()), BFLOAT16),
    (lambda: ra.linear_attention(*[jnp.zeros((2, 16, 4, 8))] * 3, initial_state=jnp.zeros((2, 4, 8, 8), jnp.bfloat16)),
     BFLOAT16),
    (lambda: linear(log_decay=DENSER(Q)), "log_decay has the layout torch._mkldnn"),
    (lambda: ra.attention(*(x.to("meta") for x in (Q, K, V))), "q, k and v are on meta, which has no numbers"),
    (lambda: ra.attention(*map(SPARSE, (Q, K, V))), r"q has the layout torch.sparse_coo; give q.to_dense\(\)"),
    (lambda: ra.attention(Q, K, V, sinks=SPARSE(torch.zeros(4))), "sinks has the layout torch.sparse_coo"),
    (lambda: ra.attention(*HEADS_FIRST, ra.plan(seq_len=16, heads=(4, 2))), EXCHANGED),
    (lambda: ra.attention(*HEADS_FIRST, ra.plan(seq_len=16)), EXCHANGED),
    (lambda: ra.attention(*HEADS_FIRST), EXCHANGED),
    (lambda: ra.attention(*(x[:, :15] for x in (Q, K, V)), ra.plan(seq_len=16)), "q has 15 tokens(?!.*exchanged)"),
    (lambda: ra.attention(Q, K, V, ra.plan(jax.sharding.Mesh(jax.devices()[:2], ("ring",)), seq_len=16)),
     "the plan was made for a jax mesh, and q is a torch tensor; give plan"),
    (lambda: ra.attention([1.0], [1.0], [1.0]), "expected torch tensors or jax arrays, got list, list, list"),
    (lambda: ra.attention(Q, K, None), "got Tensor, Tensor, NoneType"),
    (lambda: ra.attention(NESTED, NESTED, NESTED), "q is a nested tensor; .* pass docs=Docs.from_lengths"),
    (lambda: ra.linear_attention(*SPREAD), r"q is a DTensor; give q.to_local\(\)"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "says"), WRONG, ids=[says[:30] for _, says in WRONG])
def test_a_wrong_call_on_one_device_says_what_is_wrong(call, says):
    with pytest.raises(ValueError, match=says):
        call()


def dealt(mesh, lengths):
    return ra.plan(mesh, seq_len=64, layout="balanced").for_docs(ra.Docs.from_lengths(lengths))


@pytest.mark.parametrize(
    ("differ", "field"),
    [
        (lambda rank, mesh: ({"plan": ra.plan(mesh, seq_len=64, layout=("zigzag", "striped")[rank % 2])}, 2), "plan"),
        (lambda rank, mesh: ({"spec": ra.AttentionSpec(window=8 + rank // 2)}, 2), "spec"),
        (lambda rank, mesh: ({"docs": ra.Docs.from_lengths([32, 32] if rank else [30, 34])}, 2), "docs"),
        (
            lambda rank, mesh: (
                {"docs": HALVES, "key_docs": ra.Docs.from_lengths([30 + rank, 34 - rank])},
                2,
            ),
            "key_docs",
        ),
        (lambda rank, mesh: ({"plan": dealt(mesh, [30 + rank, 34 - rank])}, 2), "plan.docs"),
        (lambda rank, mesh: ({}, 2 + rank // 3), "q"),
        (lambda rank, mesh: ({"sinks": torch.zeros(4, requires_grad=rank < 2)}, 2), "gradients"),
    ],
    ids=["plan", "spec", "docs", "key_docs", "plan.docs", "shape", "gradients"],
)
def test_ranks_that_differ_are_named_with_the_field(differ, field):
    messages = []

    def one_rank(mesh):
        given, batch = differ(mesh.rank, mesh)
        plan = given.pop("plan", None) or ra.plan(mesh, seq_len=64)
        with pytest.raises(ValueError) as error:
            ra.attention(*tensors(B=batch), plan, **given)
        messages.append(str(error.value))

    run(one_rank, ring=4)
    assert len(set(messages)) == 1 and f"{field}: ring rank 0 has" in messages[0] and "ring rank 3" in messages[0], (
        messages[0]
    )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"seq_len": 12.5}, "seq_len=12.5"),
        ({"strategy": "rinf"}, "strategy='rinf': choose one of auto, ring, gather, ulysses"),
        ({"layout": "balnced"}, "layout='balnced': choose one of auto, contiguous, striped, zigzag, balanced"),
        ({"layout": "balanced", "docs": ra.Docs.from_lengths([8, 16])}, "lengths add up to 24, and seq_len=64; make"),
        ({"heads": (12, 5)}, "5 key heads do not divide 12 query heads"),
        ({"heads": (6, 6)}, "ulysses=4 does not divide 6 query heads; use ulysses=2, ring=4"),
        ({"strategy": "ulysses"}, r"the mesh has ring=2; use init_mesh\(ulysses=8\)"),
    ],
)
def test_an_impossible_plan_is_refused(given, says):
    def one_rank(mesh):
        with pytest.raises(ValueError, match=says):
            ra.plan(mesh, **{"seq_len": 64, **given})

    run(one_rank, ring=2, ulysses=4)


def test_no_length_is_too_long_to_plan():
    """Positions are sampled: an array of all would take 64 GiB."""

    def one_rank(mesh):
        return ra.plan(mesh, seq_len=2**33, heads=(8, 2), head_dim=64).explain()

    first, second = run(one_rank, ring=2)
    assert first == second and first.startswith("ring 2 in zigzag layout")


def test_a_mesh_without_ranks_says_how_they_are_started(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="no ranks were started: run this under torchrun --nproc-per-node=4"):
        ra.init_mesh(ring=4)


def test_attention_and_prefill_at_once_are_named_whichever_rank_is_first():
    def one_rank(mesh):
        plan = ra.plan(mesh, seq_len=16)
        x, other = torch.ones(1, 8, 2, 8), mesh.rank
        cache = ra.KVCache.allocate(plan, batch=1, max_len=32, kv_heads=2, head_dim=8, dtype=x.dtype)
        for turn in (0, 1):
            with pytest.raises(ValueError, match=r"do not make the same call: .*call: ring rank 0 has"):
                ra.prefill(x, x, x, plan, cache) if other == turn else ra.attention(x, x, x, plan)

    run(one_rank, ring=2)


def test_unshard_and_shard_say_what_they_expected():
    def one_rank(mesh):
        plan = ra.plan(mesh, seq_len=64)
        with pytest.raises(ValueError, match="has 16 tokens, the plan is for 64; it is already sharded"):
            plan.shard(torch.zeros(1, 16))
        with pytest.raises(ValueError, match=r"has 60 tokens, the plan is for 64; use plan.for_length\(60\)"):
            plan.shard(torch.zeros(1, 60))
        with pytest.raises(ValueError, match="has 64 tokens; a rank of this plan holds 16"):
            plan.unshard(torch.zeros(1, 64))

    run(one_rank, ring=4)


def test_empty_documents_and_fully_padded_ranks_give_zeros():
    def one_rank(mesh):
        plan = ra.plan(mesh, seq_len=5, layout="contiguous")
        q, k, v = (x.requires_grad_() for x in tensors(T=plan.local_len))
        docs = ra.Docs.from_lengths([0, 3, 0], pad_to=5)
        out, lse = ra.attention(q, k, v, plan, docs=docs, return_lse=True)
        out.sum().backward()
        padding = plan.positions() >= 3
        assert out[:, padding].eq(0).all() and lse[:, padding].eq(float("-inf")).all()
        assert all(x.grad[:, padding].eq(0).all() for x in (q, k, v))
        return out[:, ~padding].isfinite().all()

    assert all(run(one_rank, ring=8))


@pytest.mark.parametrize("name", ["attention", "linear_attention", "prefill", "decode"])
def test_every_function_refuses_unknown_words_alike(name):
    plan, x = ra.plan(seq_len=8), torch.zeros(1, 8, 2, 8)
    cache = ra.KVCache.allocate(plan, batch=1, max_len=16, kv_heads=2, head_dim=8, dtype=x.dtype)
    cache.append(x, x)
    where = {"prefill": (plan, cache), "decode": (cache,)}.get(name, ())
    spec = "linear attention is causal" if name == "linear_attention" else r"pass spec=AttentionSpec\(causal=...\)"
    for word, says in [
        ("dropout", "dropout: attention dropout is not supported: it has no exact form over ranks"),
        ("bias", "bias: an additive bias is not supported: masks are those of spec="),
        ("temprature", f"temprature: {name} has no such argument"),
        ("is_causal", f"is_causal: {spec}"),
    ]:
        with pytest.raises(ValueError, match=says):
            getattr(ra, name)(x, x, x, *where, **{word: 0.1})
    assert cache.lengths.tolist() == [8]


@pytest.mark.parametrize("strategy", ["ring", "gather"])
def test_a_kernel_that_one_rank_cannot_use_is_refused_on_all(strategy):
    """Only rank 1 has many short documents. Nothing is sent, and the next call works."""

    def one_rank(mesh):
        plan = ra.plan(mesh, seq_len=400, layout="contiguous", kernel="sdpa_cpu", strategy=strategy)
        x, sent = torch.randn(1, plan.local_len, 1, 8), plan.ring_axis.sent
        with pytest.raises(NotImplementedError, match="rectangles"):
            ra.attention(x, x, x, plan, docs=ra.Docs.from_lengths([170, 60] + [2] * 85))
        assert plan.ring_axis.sent == sent
        ra.attention(x, x, x, plan)

    run(one_rank, ring=2, timeout=20)
