"""Over ranks a wrong call is one error on every rank alike, with the numbers and the remedy, and nothing is sent."""

import pytest
import torch

import ringattn as ra
from ringattn.comms.axis import Solo
from ringattn.comms.local import run
from ringattn.plans.machine import load

HALVES = ra.Docs.from_lengths([32, 32])
PAIR, RING, TWO_BY_TWO, TWO_BY_FOUR = {"ring": 2}, {"ring": 4}, {"ring": 2, "ulysses": 2}, {"ring": 2, "ulysses": 4}


def tensors(T=16, H=4, G=2, D=8, B=2):
    return [torch.randn(B, T, h, D) for h in (H, G, G)]


def changed(change):
    """Attention of 16 tokens on every rank, with changed tensors."""
    return lambda mesh, plan: ra.attention(*change(*tensors()), plan)


def asked(**given):
    return lambda mesh, plan: ra.attention(*tensors(), plan, **given)


EVERYWHERE = [
    (changed(lambda q, k, v: (q, k[:, :, :1].repeat(1, 1, 3, 1), v[:, :, :1].repeat(1, 1, 3, 1))),
     "3 key heads do not divide 4 query heads"),
    (changed(lambda q, k, v: (q[:, :, :3], k[:, :, :1], v[:, :, :1])),
     "ulysses=2 does not divide 3 query heads; use ulysses=1, ring=4"),
    (changed(lambda q, k, v: (q, k[..., :6], v)), "head dims differ: q 8, k 6; only v may have another"),
    (changed(lambda q, k, v: (q, k.half(), v)), "q is torch.float32, k is torch.float16"),
    (changed(lambda q, k, v: (q.int(), k.int(), v.int())), "attention takes float16, bfloat16, float32 or float64"),
    (changed(lambda q, k, v: (q, k, v.to("meta"))), "v is on meta; put all three on one device"),
    (changed(lambda q, k, v: (q[0], k[0], v[0])), r"expected 4 dims \[batch, tokens, heads, head_dim\]"),
    (changed(lambda q, k, v: (q, k[:1], v[:1])), "batch sizes differ: q 2, k 1, v 1"),
    (changed(lambda q, k, v: (q, k, v[:, :8])), "k has 16 tokens x 2 heads, v 8 x 2"),
    (changed(lambda q, k, v: (q[:, :15], k, v)), r"q has 15 tokens, a rank of this plan holds 16 .*plan.for_length"),
    (changed(lambda q, k, v: [x.repeat(1, 4, 1, 1) for x in (q, k, v)]), r"q has 64 tokens.* pass plan.shard\(x\)"),
    (asked(docs=ra.Docs.from_lengths([30, 30])), "add up to 60, the sequence has 64 tokens; .*pad_to=64"),
    (asked(docs=ra.Docs.from_lengths([[64]] * 3)), "3 rows, the batch has 2; give 1 row or 2"),
    (asked(key_docs=ra.Docs.from_lengths([64])), "key_docs needs docs"),
    (asked(sinks=torch.zeros(3)), r"sinks has shape \(3,\).*expected one per query head, \(4,\)"),
    (asked(dropout=0.1), "dropout: attention dropout is not supported"),
    (asked(alibi_slopes=1, bias=2), "alibi_slopes: ALiBi is not supported.*bias: an additive bias"),
    (asked(docs=[30, 34]), "docs is of type list; pass Docs.from_lengths"),
    (asked(spec={"causal": False}), r"spec is of type dict; pass AttentionSpec\(causal"),
]  # fmt: skip


def planned(**given):
    return lambda mesh, plan: ra.plan(mesh, **{"seq_len": 64, **given})


def sent_by(strategy="auto", **choice):
    return planned(transport=ra.Transport(**choice), heads=(8, 4), head_dim=8, strategy=strategy)


PLANS = [
    (TWO_BY_FOUR, planned(seq_len=12.5), "seq_len=12.5"),
    (TWO_BY_FOUR, planned(strategy="rinf"), "strategy='rinf': choose one of auto, ring, gather, ulysses"),
    (TWO_BY_FOUR, planned(layout="balnced"), "choose one of auto, contiguous, striped, zigzag, balanced"),
    (TWO_BY_FOUR, planned(layout="balanced", docs=ra.Docs.from_lengths([8, 16])), "add up to 24, and seq_len=64; make"),
    (TWO_BY_FOUR, planned(heads=(12, 5)), "5 key heads do not divide 12 query heads"),
    (TWO_BY_FOUR, planned(heads=(6, 6)), "ulysses=4 does not divide 6 query heads; use ulysses=2, ring=4"),
    (TWO_BY_FOUR, planned(strategy="ulysses"), r"the mesh has ring=2; use init_mesh\(ulysses=8\)"),
    ({"ulysses": 2}, sent_by(groups=3), "groups=3 does not divide the 2 key heads of a rank; leave it out"),
    ({"ulysses": 4}, sent_by(groups=3), "groups=3 does not divide the 2 query heads of a rank; leave it out"),
    (PAIR, sent_by("ring", groups=2), "groups=2 is for Ulysses and gather"),
    (PAIR, sent_by("ring", route="levels", hosts=3), "hosts=3 for ring=2: hosts have equally many ranks"),
    (RING, lambda mesh, plan: plan.shard(torch.zeros(1, 16)), "16 tokens, the plan is for 64; it is already sharded"),
    (RING, lambda mesh, plan: plan.shard(torch.zeros(1, 60)), r"has 60 tokens, .*; use plan.for_length\(60\)"),
    (RING, lambda mesh, plan: plan.unshard(torch.zeros(1, 64)), "has 64 tokens; a rank of this plan holds 16"),
]


def dealt(mesh, lengths, layout="balanced"):
    return ra.plan(mesh, seq_len=64, layout=layout).for_docs(ra.Docs.from_lengths(lengths))


def cache_of(plan, filled=0, **given):
    sizes = {"batch": 2, "max_len": 256, "kv_heads": 2, "head_dim": 8, "dtype": torch.float32, **given}
    cache = ra.KVCache.allocate(plan, **sizes)
    if filled:
        cache.append(*tensors(filled)[1:])
    return cache


def prefilled(mesh, plan, cache=None, **given):
    cache = cache_of(plan) if cache is None else cache
    return ra.prefill(*tensors(plan.local_len), plan, cache, **given)


def linear(mesh, plan, g=None, **given):
    x = torch.randn(2, plan.local_len, 2, 4)
    return ra.linear_attention(x, x, x, -x.exp() if g is None else g, plan, **given)


CHUNK = r"and a chunk is one"
OF_DOCUMENTS = [
    (PAIR, lambda mesh, plan: linear(mesh, dealt(mesh, [32, 32], "zigzag")), "a state would have to pass them all"),
    (PAIR, lambda mesh, plan: ra.nn.GatedDeltaNet(8, 2, convolution=3)(
        torch.randn(1, 32, 8), dealt(mesh, [32, 32], "zigzag")), "a state would have to pass"),
    (PAIR, lambda mesh, plan: prefilled(mesh, dealt(mesh, [32, 32], "zigzag")), CHUNK),
    (PAIR, lambda mesh, plan: prefilled(mesh, dealt(mesh, [8, 56])), CHUNK),
    (PAIR, lambda mesh, plan: linear(mesh, dealt(mesh, [8, 56]), scan="ring"), "maps go straight to the ranks that"),
    (RING, lambda mesh, plan: linear(mesh, ra.plan(mesh, seq_len=64, layout="striped")),
     "layout='striped' deals out neighbouring tokens.*use layout='zigzag' or 'contiguous'"),
    (RING, lambda mesh, plan: linear(mesh, plan, docs=ra.Docs.from_lengths([60])), "add up to 60, the sequence has 64"),
]  # fmt: skip

THREE = ra.Docs.from_lengths([[3, 3, 58], [4, 60]])


def continued(states=6, dtype=torch.float32, **given):
    state = torch.zeros(states, 2, 4, 4, dtype=dtype)
    return lambda mesh, plan: linear(mesh, plan, initial_state=state, **{"docs": THREE, **given})


STATES = [
    (continued(states=3), r"expected \(2, 2, 4, 4\).*or \(6, 2, 4, 4\), one a document: 2 x 3 documents"),
    (continued(docs=None), r"initial_state has shape \(6, 2, 4, 4\); expected \(2, 2, 4, 4\): batch"),
    (continued(dtype=torch.bfloat16), "initial_state is torch.bfloat16; the state of .*float32"),
    (continued(docs=None, states=2, return_state="documents"), "return_state='documents': .*or with docs 'documents'"),
    (continued(return_state="document"), "return_state='document': pass True or False, or with docs 'documents'"),
    (continued(return_state=1), "return_state=1: pass True or False, or with docs 'documents'"),
]


def attention_of_one(**wrong):
    """Rank 1 alone passes something else."""

    def call(mesh, plan):
        q, k, v = tensors(plan.local_len)
        return ra.attention(**{"q": q, "k": k, "v": v, "plan": plan, **(wrong if mesh.rank else {})})

    return call


def mean_of_one(**wrong):
    return lambda mesh, plan: ra.token_mean(
        **{"losses_BT": torch.rand(2, plan.local_len), "plan": plan, **(wrong if mesh.rank else {})}
    )


def prefill_of_one(**wrong):
    return lambda mesh, plan: ra.prefill(
        *tensors(plan.local_len), **{"plan": plan, "cache": cache_of(plan), **(wrong if mesh.rank else {})}
    )


def gate_of_one(mesh, plan):
    g = -torch.ones(2, plan.local_len, 2, 4)
    g[1, 7] = 0.5 if mesh.rank else -1.0
    return linear(mesh, plan, g)


OF_ONE_RANK = [
    (attention_of_one(k=torch.zeros(2, 32, 2, 6)), "head dims differ: q 8, k 6; only v may have another"),
    (attention_of_one(docs=[8, 8]), "docs is of type list"),
    (attention_of_one(dropout=0.1), "dropout: attention dropout is not supported"),
    (attention_of_one(v=torch.zeros(16)), r"v has shape \(16,\); expected 4 dims"),
    (attention_of_one(v=[0.0]), "expected torch tensors or jax arrays, got Tensor, Tensor, list"),
    (mean_of_one(losses_BT=torch.rand(1, 9)), "losses has 9 tokens, a rank of this plan holds 32"),
    (mean_of_one(losses_BT=torch.ones(1, 32).int()), "losses has shape .* dtype torch.int32; expected floats"),
    (mean_of_one(docs=ra.Docs.from_lengths([6])), "document lengths add up to 6, the sequence has 64 tokens"),
    (mean_of_one(mask=torch.full((2, 32), 0.25)), r"mask is torch.float32: .* give bools \(mask > 0\) or integers"),
    (mean_of_one(over=Solo("data")), "over=.*: a list of axes"),
    *((prefill_of_one(**wrong), next(iter(wrong)))
      for wrong in ({"sinks": [0.0, 0.0]}, {"spec": {}}, {"keys": 1.5}, {"start": "0"}, {"plan": None})),
    (gate_of_one, r"log_decay\[1, 7, 0, 0\] = 0.5"),
]  # fmt: skip


def attention_by(of_rank):
    """Each rank passes its own."""
    return lambda mesh, plan: ra.attention(*tensors(plan.local_len), **{"plan": plan, **of_rank(mesh.rank, mesh)})


def other_plan(*choices):
    return attention_by(lambda rank, mesh: {"plan": ra.plan(mesh, seq_len=64, **choices[rank * len(choices) // 4])})


def other_batch(mesh, plan):
    return ra.attention(*tensors(plan.local_len, B=2 + mesh.rank // 3), plan)


def joined(name):
    return lambda mesh, plan: getattr(plan, name)(torch.ones(1, 32, 2, requires_grad=mesh.rank == 0))


def other_lengths(mesh, plan):
    cache = cache_of(plan, filled=16)
    cache.truncate(16 - mesh.rank)
    return ra.decode(*tensors(1), cache)


def other_spec(mesh, plan):
    return ra.decode(*tensors(1), cache_of(plan, filled=16), spec=ra.AttentionSpec(window=(None, 9)[mesh.rank]))


def other_drafts(mesh, plan):
    return ra.decode(*tensors(3), cache_of(plan, filled=16), parents=[-1, 0, mesh.rank])


def other_caches(*given):
    return lambda mesh, plan: prefilled(mesh, plan, cache_of(plan, **given[mesh.rank]), spec=ra.AttentionSpec(window=8))


def other_function(first):
    return lambda mesh, plan: attention_of_one()(mesh, plan) if mesh.rank == first else prefilled(mesh, plan)


BOTH = "{0}: ring rank 0 has {1}.* ring rank 1 has {2}".format
ALL = "{0}: ring rank 0 has .*ring rank 3 has {1}".format
DIFFERENT = [
    (RING, other_plan({"layout": "zigzag"}, {"layout": "striped"}), ALL("plan", "")),
    (RING, attention_by(lambda rank, mesh: {"spec": ra.AttentionSpec(window=8 + rank // 2)}), ALL("spec", "")),
    (RING, attention_by(lambda rank, mesh: {"docs": ra.Docs.from_lengths([32, 32] if rank else [30, 34])}),
     ALL("docs", "")),
    (RING, attention_by(lambda rank, mesh: {
        "docs": HALVES, "key_docs": ra.Docs.from_lengths([30 + rank, 34 - rank])}), ALL("key_docs", "")),
    (RING, attention_by(lambda rank, mesh: {"plan": dealt(mesh, [30 + rank, 34 - rank])}), ALL("plan.docs", "")),
    (RING, other_batch, ALL("q", "")),
    (RING, attention_by(lambda rank, mesh: {"sinks": torch.zeros(4, requires_grad=rank < 2)}), ALL("gradients", "")),
    (RING, other_plan(*({"transport": ra.Transport("levels", hosts)} for hosts in (2, 4))),
     ALL("route", "levels 4")),
    (RING, other_plan({"machine": "cpu"}, {"machine": load("cpu").replace(room=1e6)}), ALL("machine", r"CPU .* #\w+")),
    (PAIR, joined("unshard"), BOTH("gradients", "True", "False")),
    (PAIR, joined("roll"), BOTH("gradients", "True", "False")),
    (PAIR, mean_of_one(over=[Solo("data")]), BOTH("over", r"\[\]", r"\['data'\]")),
    (PAIR, lambda mesh, plan: linear(mesh, plan, scale=1.0 + mesh.rank), BOTH("asked", "", "")),
    (PAIR, lambda mesh, plan: linear(mesh, plan, docs=HALVES, return_state=(True, "documents")[mesh.rank]),
     BOTH("asked", "", "")),
    (PAIR, other_lengths, BOTH("cache", r".*\[16, 16\]", r".*\[15, 15\]")),
    (PAIR, other_spec, BOTH("spec", ".*window=None", ".*window=9")),
    (PAIR, other_drafts, r"ring rank 1 has decode, parents=\(-1, 0, 1\)"),
    (PAIR, other_caches({"block": 16}, {"block": 64}), BOTH("cache", ".*block=16", ".*block=64")),
    (PAIR, other_caches({"window": 20, "room": 64}, {}), BOTH("cache", ".*window 20", ".*window None")),
    (PAIR, other_function(0), "do not make the same call: .*call: ring rank 0 has"),
    (PAIR, other_function(1), "do not make the same call: .*call: ring rank 0 has"),
]  # fmt: skip


def rectangles(strategy):
    """Only rank 1 has many short documents."""

    def call(mesh, plan):
        plan = ra.plan(mesh, seq_len=400, layout="contiguous", kernel="sdpa_cpu", strategy=strategy)
        return ra.attention(*tensors(200), plan, docs=ra.Docs.from_lengths([170, 60] + [2] * 85))

    return call


REFUSED = [
    *((ValueError, TWO_BY_TWO, *row) for row in EVERYWHERE),
    *((ValueError, PAIR, *row) for row in STATES),
    *((ValueError, PAIR, call, rf"{says}.*\(on ring rank 1\)") for call, says in OF_ONE_RANK),
    *((ValueError, *row) for row in (*PLANS, *OF_DOCUMENTS, *DIFFERENT)),
    *((NotImplementedError, PAIR, rectangles(strategy), "rectangles") for strategy in ("ring", "gather")),
]


@pytest.mark.parametrize(("error", "sizes", "call", "says"), REFUSED, ids=[row[-1][:40] for row in REFUSED])
def test_what_is_wrong_on_any_rank_is_refused_on_all_alike_before_anything_is_sent(error, sizes, call, says):
    def one_rank(mesh):
        plan = ra.plan(mesh, seq_len=64)
        sent = [getattr(axis, "sent", 0) for axis in (plan.ring_axis, plan.ulysses_axis)]
        with pytest.raises(error, match=says) as caught:
            call(mesh, plan)
        assert sent == [getattr(axis, "sent", 0) for axis in (plan.ring_axis, plan.ulysses_axis)]
        ra.attention(*tensors(plan.local_len), plan)  # nothing is half done: the next call works
        return str(caught.value)

    assert len(set(run(one_rank, timeout=20, **sizes))) == 1


def test_no_length_is_too_long_to_plan():
    """Positions are sampled: an array of all would take 64 GiB."""

    def one_rank(mesh):
        return ra.plan(mesh, seq_len=2**33, heads=(8, 2), head_dim=64).explain()

    first, second = run(one_rank, ring=2)
    assert first == second and first.startswith("ring 2 in zigzag layout")


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
