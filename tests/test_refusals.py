"""What cannot be is refused before anything runs: the kind of error, and in its words the number or the remedy.

On one device, a line a promise. Over ranks: test_bad_input.py; beside a cache, which stays as it was:
test_cache_refusals.py; of JAX's own: test_jax_linear.py and test_jax_inference.py; by kernels: test_ops.py.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
import torch

import ringattn as ra
from ringattn.choosing import elsewhere
from ringattn.kernels import rates
from ringattn.kernels.partial import Partial
from ringattn.masks.slices import Mask as Slices
from ringattn.masks.spec import raise_if
from ringattn.models.nn import Attention, GatedDeltaNet, GatedLinearAttention, StreamingAttention
from ringattn.models.pieces import in_pieces
from ringattn.plans import machine as machines
from ringattn.plans.ranks import Ranks
from ringattn.torch.check import of_device
from ringattn.torch.inference.cache import KVCache
from tests.test_bad_input import tensors

Docs, Plan, Spec = ra.Docs, ra.Plan, ra.AttentionSpec

MASKS = [
    (lambda: Spec(window=0), "window=0: the number of keys a query sees, at least 1"),
    (lambda: Spec(window=2.5), "window=2.5"),
    (lambda: Spec(causal="no"), "causal='no': pass True or False"),
    (lambda: Spec(causal=False, window=4), "pass a pair: window=(3, 0)"),
    (lambda: Spec(window=(3, 2)), "looks to both sides; use causal=False"),
    (lambda: Spec(chunk=0), "chunk=0: the number of positions of a block, at least 1"),
    (lambda: Spec(scale=-1.0), "scale=-1.0"),
    (lambda: Spec(softcap=0.0), "softcap=0.0"),
    (lambda: Spec(softcap=1e39), "pass a number from 1e-18 to 1e18"),
    (lambda: Docs.from_lengths([]), "no documents"),
    (lambda: Docs.from_lengths([3, -1]), "at least 0, got [3, -1]"),
    (lambda: Docs.from_lengths([9], pad_to=8), "9 tokens do not fit in pad_to=8"),
    (lambda: Docs.from_lengths([[3], [4]]), "pass pad_to=4"),
    (lambda: Docs.from_lengths([2**62, 2**62]), "9223372036854775808 tokens: at most 1099511627776"),
    (lambda: Docs.from_lengths([5, 3], prefix=[6, 0]), "prefix: for each of 2 documents"),
    (lambda: Docs.from_lengths([5, 3], spans=[(3, 6)]), "(3, 6) is no range of tokens within one document"),
    (lambda: Docs.from_lengths([8], spans=[(1, 4), (3, 6)]), "spans overlap: [1, 4] and [3, 6]"),
    (lambda: Docs.from_cu_seqlens([0, 7.9, 16]), "whole numbers of at least 0, got [0, 7.9, 16]"),
    (lambda: Docs.from_cu_seqlens([0, 7, 3]), "never decrease, got [0, 7, 3]"),
    (lambda: Docs.from_cu_seqlens([1, 4]), "must begin with 0"),
    (lambda: Docs.tree([3, 3], [-1, 1]), "parents are not a tree: segment 1 has parent 1"),
    (lambda: Docs.tree([3, 3], [-1]), "parents: 1 numbers for 2 segments"),
    (lambda: Slices.from_slices([(0, 4)], [(0, 9)], ["full"], 8), "k_ranges[0] = (0, 9) is no range within"),
    (lambda: Slices.from_slices([(0, 8)] * 2, [(0, 4), (3, 8)], "full", 8), "slices overlap: queries 0 to 8"),
]


def on_jax() -> jax.sharding.Mesh:
    return jax.sharding.Mesh(jax.devices()[:1], ("ring",))


PACKED, IN_JAX = Docs.from_lengths([8, 24]), Ranks(None, None, "jax", "cpu", here=False)
ZIGZAG, DEALT = Plan(32, 2, 2, layout="zigzag"), Plan(32, 2, 2, layout="balanced")
PLANS = [
    (lambda: ra.plan(seq_len=16, dtype="bf16"), "dtype='bf16': choose one of float16, bfloat16, float32, float64"),
    (lambda: ra.plan(seq_len=16, head_dim=0), "head_dim=0: give a whole number from 1"),
    (lambda: ra.plan(seq_len=16, head_dim=8.5), "head_dim=8.5: give a whole number"),
    (lambda: ra.plan(seq_len=16, heads=("8", "2")), "heads=('8', '2'): (query heads, key heads)"),
    (lambda: ra.plan(seq_len=16, transport="symmetric"), "transport is of type str; give Transport(route="),
    (lambda: ra.plan(seq_len=16, route="relay"), "route: it is part of transport=Transport"),
    (lambda: ra.plan(seq_len=16, docs=[8, 8]), "docs is of type list; pass Docs.from_lengths"),
    (lambda: ra.plan(seq_len=16, docs=Docs.from_lengths([8])), "document lengths add up to 8, and seq_len=16"),
    (lambda: ra.plan(seq_len=16, spec={}), "spec is of type dict; pass AttentionSpec"),
    (lambda: ra.plan(4, seq_len=16), "mesh=4 is of type int; make one with ringattn.init_mesh"),
    (lambda: ra.plan(on_jax(), seq_len=16, transport=ra.Transport(hosts=2)), "in JAX the compiler moves the blocks"),
    (lambda: ra.Transport("around"), "route='around': choose one of auto, direct, relay, levels"),
    (lambda: ra.Transport(together=0), "together=0: give a whole number"),
    (lambda: ra.Transport(by="pigeon"), "by='pigeon': choose one of auto, symmetric, group"),
    (lambda: ra.plan(seq_len=8, machine="h10"), "no such description or file; did you mean 'h100'"),
    (lambda: ra.plan(seq_len=8, machine=3), "machine=3: a name"),
    (lambda: Plan(2**30, axes=IN_JAX), "1073741824 tokens: JAX counts positions in 32 bits, at most 1073741823"),
    (lambda: Plan(8, key_len=2**30, axes=IN_JAX), "JAX counts positions in 32 bits"),
    (lambda: Plan(16, 2).shard(torch.zeros(1, 16)), "this plan for 2 ranks has no mesh to run on"),
    (lambda: ra.init_mesh(ring=4), "no ranks were started: run this under torchrun --nproc-per-node=4"),
    (lambda: ra.init_mesh(ring=0), "ring=0: the number of ranks along ring"),
    (lambda: ra.init_mesh(ring=2.5), "ring=2.5"),
    (lambda: ra.init_mesh(sequence=4, ring=2), "leave out ring=2"),
    (lambda: Plan(32, 2, layout="balanced", axes=IN_JAX), "in JAX, nor is"),
    (lambda: Plan(32, 2, layout="balanced", key_len=64), "only for queries and keys of one sequence"),
    (lambda: Plan(32, 2, layout="balanced", docs=Docs.from_lengths([8])).tokens, "the plan is for 32 tokens"),
    (lambda: DEALT.for_docs(Docs.from_lengths([[8, 8], [16, 0]])).tokens, "put the rows one after the other"),
    (lambda: DEALT.for_docs(PACKED).for_length(64), "and has their length"),
    (lambda: DEALT.replace(kernel="tiled").for_docs(DEALT.for_docs(PACKED)), "laid out by a plan with other choices"),
    (lambda: ZIGZAG.for_docs(Docs.from_lengths([12, 20])), "a document of 12 tokens cannot be cut over 4 ranks"),
    (lambda: ZIGZAG.for_docs(Docs.from_lengths([[8, 8], [16, 0]])), "rows with other documents would lie on other"),
    (lambda: ZIGZAG.replace(key_len=64).for_docs(PACKED), "for queries and keys of one sequence"),
    (lambda: ZIGZAG.replace(axes=IN_JAX).for_docs(PACKED), "for_docs is not supported in JAX"),
    (lambda: ZIGZAG.for_docs(PACKED).for_length(64), "has their length: use plan.for_docs(docs)"),
]


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
BFLOAT16 = re.compile(r"bfloat16; the state of .*float32 inputs is float32: cast it to that")
EXCHANGED = re.compile(r"q has shape \(2, 4, 16, 8\), .* look exchanged: .* x.transpose\(1, 2\)")
NO_EXCHANGE = re.compile("q has 15 tokens(?!.*exchanged)")
SPARSE, DENSER = torch.Tensor.to_sparse, torch.Tensor.to_mkldnn
GATE = torch.full((2, 16, 4, 8), 0.5)
ATTENTION = [
    (lambda: raise_if(of_device(Q, ra.plan(elsewhere("cuda", [(2, 1)]), seq_len=8))), "tensors on cuda; make its mesh"),
    (lambda: ra.attention(*(x.to("meta") for x in (Q, K, V))), "q, k and v are on meta, which has no numbers"),
    (lambda: ra.attention(*map(SPARSE, (Q, K, V))), "q has the layout torch.sparse_coo; give q.to_dense()"),
    (lambda: ra.attention(Q, K, V, sinks=SPARSE(torch.zeros(4))), "sinks has the layout torch.sparse_coo"),
    (lambda: ra.attention(*HEADS_FIRST, ra.plan(seq_len=16, heads=(4, 2))), EXCHANGED),
    (lambda: ra.attention(*HEADS_FIRST, ra.plan(seq_len=16)), EXCHANGED),
    (lambda: ra.attention(*HEADS_FIRST), EXCHANGED),
    (lambda: ra.attention(*(x[:, :15] for x in (Q, K, V)), ra.plan(seq_len=16)), NO_EXCHANGE),
    (lambda: ra.attention(Q, K, V, ra.plan(on_jax(), seq_len=16)), "made for a jax mesh, and q is a torch tensor"),
    (lambda: ra.attention([1.0], [1.0], [1.0]), "expected torch tensors or jax arrays, got list, list, list"),
    (lambda: ra.attention(Q, K, None), "got Tensor, Tensor, NoneType"),
    (lambda: ra.attention(Q, K, jnp.zeros(V.shape)), "got Tensor, Tensor, ArrayImpl"),
    (lambda: ra.attention(NESTED, NESTED, NESTED), "pass docs=Docs.from_lengths"),
]
LINEAR = [
    (lambda: ra.linear_attention(*SPREAD), "q is a DTensor; give q.to_local()"),
    (lambda: linear(log_decay=-0.5), "log_decay is of type float; it must be a torch tensor, as q is"),
    (lambda: linear(log_decay=DENSER(Q)), "log_decay has the layout torch._mkldnn"),
    (lambda: linear(log_decay=GATE), "log_decay[0, 0, 0, 0] = 0.5: a log decay is at most 0"),
    (lambda: linear(log_decay=-GATE[..., :3]), re.compile(r"expected \(2, 16, 4, 8\).*or \(2, 16, 4\), by head")),
    (lambda: linear(beta=torch.full((2, 16, 4), 2.1)), "beta[0, 0, 0] = 2.1: beta is in [0, 2]"),
    (lambda: linear(k=Q[:, :, :1], v=Q[:, :, :1]), "q has 4 heads, k 1"),
    (lambda: linear(k=Q[..., :4]), "head dims differ: q 8, k 4"),
    (lambda: linear(v=Q.half()), "give all three the same dtype"),
    (lambda: linear(q=torch.zeros(3)), "q has shape (3,); expected 4 dims"),
    (lambda: linear(q=Q[..., :0], k=Q[..., :0]), "q has shape (2, 16, 4, 0); heads and head dim must be"),
    (lambda: linear(initial_state=torch.zeros(2, 4, 9, 8)), "initial_state has shape (2, 4, 9, 8); expected (2, 4, 8"),
    (lambda: linear(initial_state=torch.zeros(2, 4, 8, 8).bfloat16()), BFLOAT16),
    (lambda: ra.linear_attention(*[jnp.zeros((2, 16, 4, 8))] * 3, initial_state=jnp.zeros((2, 4, 8, 8), jnp.bfloat16)),
     BFLOAT16),
    (lambda: linear(docs=Docs.from_lengths([4, 4])), "add up to 8, the sequence has 16 tokens"),
    (lambda: linear(docs=Docs.tree([8, 8], [-1, 0])), "linear attention takes documents alone"),
    (lambda: linear(scan="tree"), "scan='tree': choose one of auto, gather, ring, pipeline"),
    (lambda: linear(kernel="fast"), "kernel='fast': choose one of auto, triton, chunkwise"),
    (lambda: linear(plan="x"), "plan is of type str; make one with ringattn.plan(mesh"),
    (lambda: linear(scale="x"), "scale='x'"),
]  # fmt: skip

KEYS = torch.zeros(1, 6, 2, 8)
EIGHT, CAUSAL = Docs.from_lengths([8]), Slices.from_slices([(0, 8)], [(0, 8)], ["causal"], 8)


def masked(kv=None, **given):
    q = torch.zeros(1, 8, 2, 8)
    kv = q if kv is None else kv
    return ra.attention(q, kv, kv, **given)


PAIRS = [
    (lambda: masked(mask=CAUSAL, docs=EIGHT, spec=Spec(window=3)), "leave out docs"),
    (lambda: masked(KEYS, mask=CAUSAL), re.compile("8 queries and 6 keys: a mask, .* pad both to one length")),
    (lambda: masked(mask=EIGHT), "mask is of type Docs; pass it as docs="),
    (lambda: masked(KEYS, docs=Docs.tree([4, 4], [-1, 0]), key_docs=Docs.from_lengths([3, 3])), "are of one sequence"),
    (lambda: masked(KEYS, spec=Spec(False, chunk=3)), "chunk=3 with 8 queries and 6 keys"),
    (lambda: masked(KEYS, spec=Spec(False, (2, 2))), "window=(2, 2) with 8 queries and 6 keys"),
    (lambda: masked(KEYS, spec=Spec(chunk=3), docs=EIGHT, key_docs=Docs.from_lengths([6])), "leave out chunk"),
]

X = torch.zeros(2, 6, 32)


def layer() -> Attention:
    return Attention(32, heads=4, kv_heads=2, head_dim=8)


def unnamed_weight() -> None:
    first, second = torch.nn.Linear(8, 32), torch.nn.Linear(32, 8)
    out = in_pieces(lambda x: second(first(x)), 5, torch.randn(1, 20, 8), weights=[second.weight, second.bias])
    out.sum().backward()


LAYERS = [
    (lambda: Attention(32, 4, 2, 7), "head_dim=7 is odd; rotary positions turn pairs"),
    (lambda: Attention(32, 4, 3, 8), "heads=4 and kv_heads=3: kv_heads must divide heads"),
    (lambda: StreamingAttention(32, 64), "d_model=32 and heads=64 make heads of size 0"),
    (lambda: StreamingAttention(32, 0), "heads=0: at least 1, a whole number"),
    (lambda: layer()(X[0]), "x has shape (6, 32); expected [batch, tokens, 32]"),
    (lambda: layer()(X, ra.plan(seq_len=5)), "x has 6 tokens, a rank of this plan holds 5"),
    (lambda: layer()(X, positions=torch.arange(5)), "positions have shape (5,); x has 2 rows of 6 tokens"),
    (lambda: layer()(X, "x"), "plan is of type str; make one with ringattn.plan(mesh"),
    (lambda: GatedLinearAttention(32, 4, gate="row"), "gate='row': choose 'channel' or 'head'"),
    (lambda: GatedLinearAttention(32, 4, convolution=1.5), "convolution=1.5 must be a whole number, at least 0"),
    (lambda: GatedLinearAttention(32, "4"), "heads='4': at least 1"),
    (lambda: GatedDeltaNet(32, 4)(X, docs=Docs.from_lengths([5])), "lengths add up to 5, the sequence has 6 tokens"),
]


def mean(**given):
    return ra.token_mean(torch.zeros(8, 16), ra.plan(seq_len=16), **given)


def cross(logits=(1, 4, 7), labels=((0, 0, 0, 0),)):
    return ra.cross_entropy(torch.zeros(logits), torch.tensor(labels), ra.plan(seq_len=4))


def rolled(**given):
    return ra.plan(seq_len=4).roll(torch.arange(4)[None], **given)


TREE, SEVEN = Docs.tree([3, 2, 2], [-1, 0, 0]), torch.zeros(1, 7, dtype=torch.long)
PART = Partial(torch.zeros(1, 16, 2, 8), torch.zeros(1, 16, 2))
TOKENS = [
    *((partial(mean, mask=torch.ones(shape) > 0), re.compile(rf"mask has shape \({shape[0]}, .*, losses \(8, 16\)"))
      for shape in ((3, 16), (8, 15), (1, 8, 16))),
    (lambda: cross(labels=((0, 1, 2, 7),)), "label 7 is not among 7 classes, nor ignore_index=-100"),
    (lambda: cross(labels=((0, 0, 0),)), "labels has shape (1, 3)"),
    (lambda: cross(logits=(1, 8, 7)), "logits has 8 tokens, a rank of this plan holds 4"),
    (lambda: ra.balance([[4]] * 4, 0), "ranks=0: the number of data ranks"),
    (lambda: ra.balance([[4]] * 4, 3), "4 sequences for 3 data ranks"),
    (lambda: ra.balance([[4]] * 4, "2"), "ranks='2'"),
    (lambda: ra.local_batch(SEVEN, ra.plan(seq_len=7), docs=TREE), "pass labels="),
    (lambda: rolled(shift=0.5), "shift=0.5: how many places"),
    (lambda: rolled(dim=0), "dim 0 of x has 1 tokens; a rank of this plan holds 4"),
    (lambda: rolled(docs=[2, 2]), "docs is of type list"),
    (lambda: rolled(docs=Docs.from_lengths([3])), "add up to 3, the sequence has 4"),
    (lambda: ra.merge(PART, tuple(PART)), "expected Partial(out, lse), got tuple"),
    (lambda: ra.merge(PART, Partial(PART.out[:, :1], PART.lse[:, :1])), "b has out (1, 1, 2, 8)"),
    (lambda: ra.merge(PART, Partial(PART.out, PART.lse[..., None])), "lse (1, 16, 2, 1)"),
    (lambda: ra.merge(PART, Partial(PART.out.numpy(), PART.lse)), "got Tensor, Tensor, ndarray, Tensor"),
]  # fmt: skip

SIZES = {"batch": 1, "max_len": 64, "kv_heads": 2, "head_dim": 16, "dtype": torch.float32}


def cache(jax_too: bool = False, **given):
    return ra.KVCache.allocate(ra.plan(on_jax() if jax_too else None, seq_len=8), **{**SIZES, **given})


def drafted(parents, **given):
    x = torch.zeros(1, 3, 2, 16)
    made = cache(**given)
    made.append(x, x)
    return ra.decode(x, x, x, made, parents=parents)


def first_beside_window():
    x, made = torch.zeros(1, 8, 2, 16), cache(window=4, room=8)
    return ra.prefill(x, x, x, made.plan, made, spec=Spec(window=3, first=2))


W = torch.zeros(1, 8, 2, 16)
JAX_W = jnp.zeros((1, 8, 2, 16))
CACHES = [
    *((partial(cache, jax_too, **given), says) for jax_too in (False, True) for given, says in (
        ({"dtype": torch.int8}, "dtype=torch.int8: choose one of float16, bfloat16, float32, float64"),
        ({"window": 0}, "window=0: at least 1, a whole number"),
        ({"window": 4, "room": -1}, "room=-1: at least 1, a whole number"),
        ({"batch": 2.0}, "batch=2.0: at least 1, a whole number"),
    )),
    *((partial(kind.allocate, plan, **SIZES), f"plan is of type {type(plan).__name__}; make one with ringattn.plan")
      for kind in (ra.KVCache, KVCache) for plan in (3, None)),
    (lambda: ra.decode(W, W, W, None), "cache is of type NoneType; make one with KVCache.allocate"),
    (lambda: ra.prefill(W, W, W, None, cache()), "plan is of type NoneType; make one with ringattn.plan"),
    (lambda: ra.prefill(W, W, W, cache(), ra.plan(seq_len=8)), "plan is of type KVCache; pass it as cache="),
    (lambda: ra.decode(JAX_W, JAX_W, JAX_W, cache()), "made for a torch mesh, and q is a jax array"),
    (lambda: ra.decode(W, W, W, cache(True)), "made for a jax mesh, and q is a torch tensor"),
    (lambda: cache().append(JAX_W, JAX_W), "made for a torch mesh, and k is a jax array"),
    (lambda: drafted([-1, 0]), "parents has 2 numbers for 3 tokens"),
    (lambda: drafted([-1, 2, 0]), "token 1 has parent 2"),
    (lambda: drafted(torch.tensor([-1, 0, 0])), "as a list"),
    (first_beside_window, "the first 2 leave it; allocate without window"),
]  # fmt: skip


def unknown(name: str, word: str):
    """A call with a word that no function has."""
    plan, made = ra.plan(seq_len=8), cache()
    made.append(W, W)
    where = {"prefill": (plan, made), "decode": (made,)}.get(name, ())
    return getattr(ra, name)(W, W, W, *where, **{word: 0.1})


WORDS = [
    (partial(unknown, name, word), says)
    for name in ("attention", "linear_attention", "prefill", "decode")
    for word, says in (
        ("dropout", "dropout: attention dropout is not supported: it has no exact form over ranks"),
        ("bias", "bias: an additive bias is not supported: masks are those of spec="),
        ("temprature", f"temprature: {name} has no such argument"),
        ("is_causal", "is_causal: linear attention is causal" if name == "linear_attention" else
         "is_causal: pass spec=AttentionSpec(causal=...)"),
    )
]  # fmt: skip
OTHERS = [
    (TypeError, partial(cache, size=3), "unexpected keyword argument 'size'"),
    (TypeError, lambda: Spec().replace(nope=1), "nope"),
    (AttributeError, lambda: ra.atention, "no attribute 'atention'"),
    (RuntimeError, unnamed_weight, "a weight of shape (32, 8) is not among those of this function"),
]
ROWS = (*MASKS, *PLANS, *ATTENTION, *LINEAR, *PAIRS, *LAYERS, *TOKENS, *CACHES, *WORDS)
REFUSED = [*((ValueError, *row) for row in ROWS), *OTHERS]
PATTERNS = [re.escape(says) if isinstance(says, str) else says.pattern for *_, says in REFUSED]
CALLS = [(*row[:2], says) for row, says in zip(REFUSED, PATTERNS, strict=True)]


@pytest.mark.parametrize(("error", "call", "says"), CALLS, ids=[says[:40] for says in PATTERNS])
def test_what_cannot_be_is_refused_in_words(error, call, says):
    with pytest.raises(error, match=says):
        call()


H100 = 'like = "h100"\n'
FILES = [
    *((machines.load, H100 + line, says) for line, says in (
        ("memry = 80e9", "no such key 'memry'; did you mean 'memory'?"),
        ("memory = -1", "memory=-1: expected a number above 0"),
        ("bandwidth = 0", "bandwidth=0: expected a number above 0"),
        ("half = [1]", "half=[1]: expected two numbers from 0"),
        ("gpus = 2.5", "gpus=2.5: expected a whole number"),
        ("gpus = true", "gpus=True"),
        ('device = "gpu"', "device='gpu': choose one of cuda, tpu, cpu"),
        ("[inside]\nlatency = -1e-6", "latency=-1e-06: expected a number from 0"),
        ("gpus =", "not TOML"),
    )),
    (machines.load, 'name = "x"\nsource = "guess"\ndevice = "cpu"\n',
     "gpus, memory, bandwidth, inside, between, rates missing"),
    *((rates.use, text, "expected for each key two rates above 0")
      for text in ('{"a": ["b", "c"]}', '{"a": [NaN, 1]}', '{"a": [1, -1]}', '{"a": [1]}', "[]", "5")),
]  # fmt: skip


@pytest.mark.parametrize(("use", "text", "says"), FILES)
def test_a_file_with_wrong_numbers_is_refused_by_its_name_and_changes_nothing(use, text, says, tmp_path):
    before, path = dict(rates.RATES), tmp_path / "mine"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}.*{re.escape(says)}"):
        use(path)
    assert before == rates.RATES
