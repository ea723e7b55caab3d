"""A list of cases, and where the tests run them: every feature on every strategy, layout and a few meshes.

Ranks are threads, processes or GPUs: each says what it `found` beside the oracle, and `check` looks at them all.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

import ringattn as ra
from ringattn.comms.local import run
from ringattn.kernels.arrays import accumulator
from ringattn.kernels.total import in_dtype
from ringattn.launch.processes import run as run_processes
from ringattn.launch.verify import oracle
from ringattn.launch.verify.cases import Case
from ringattn.masks.spec import AttentionSpec

FULL = AttentionSpec(causal=False)
SHARED = {f"d{name}" for name in oracle.WHOLE}  # every rank has a share of these gradients

# What can be computed on any layout, strategy and mesh.
FEATURES = (
    Case("causal"),
    Case("full", spec=FULL),
    Case("window", spec=AttentionSpec(window=11)),
    Case("window_one", spec=AttentionSpec(window=1)),
    Case("softcap", spec=AttentionSpec(softcap=2.0, scale=0.7)),
    Case("docs", lengths=[20, 0, 11, 30]),
    Case("docs_rows", lengths=[[20, 0, 11, 30], [1, 2, 50]], sinks=True),
    Case("docs_full_window", spec=AttentionSpec(window=7, softcap=3.0), lengths=[[3] * 20, [33, 28]]),
    Case("docs_padded", lengths=[[20, 0, 11], [5]]),
    Case("sinks", sinks=True),
    Case("multi_query", heads=8, kv_heads=1),
    Case("value_dim", head_dim=8, value_dim=12),
    Case("cross", spec=FULL, key_len=37, sinks=True),
    Case("cross_docs", spec=FULL, key_len=37, lengths=[20, 11, 30], key_lengths=[5, 0, 32]),
    Case("cross_docs_alike", spec=FULL, key_len=61, lengths=[20, 0, 11], key_lengths=[5, 50, 6]),
    Case("cross_docs_causal", spec=AttentionSpec(window=13), key_len=67, lengths=[[20, 11, 25], [1, 40]],
         key_lengths=[[30, 0, 14], [9, 58]], sinks=True),
    Case("short", seq_len=3),
    Case("even", seq_len=64),
    Case("all_at_once", spec=AttentionSpec(window=13, softcap=5.0, scale=0.3), lengths=[[30, 31], [9, 52]], sinks=True,
         heads=8, kv_heads=4, value_dim=12),
    Case("both_sides", spec=AttentionSpec(causal=False, window=(6, 3))),
    Case("both_sides_packed", spec=AttentionSpec(causal=False, window=(2, 17), first=3), sinks=True,
         lengths=[[20, 0, 11, 30], [1, 2, 50]]),
    Case("chunks", spec=AttentionSpec(chunk=9)),
    Case("chunks_packed", spec=AttentionSpec(chunk=8, window=5, first=2, softcap=3.0), lengths=[20, 0, 11, 26],
         sinks=True, heads=8),
    Case("chunks_full", spec=AttentionSpec(causal=False, chunk=8, first=11), lengths=[[33, 20], [9, 52]]),
    Case("first", spec=AttentionSpec(window=7, first=4)),
    Case("prefix", lengths=[20, 0, 11, 26], prefix=[5, 0, 11, 1]),
    Case("spans", lengths=[[20, 0, 11, 26], [3, 50]], prefix=[[4, 0, 0, 3], [0, 0]], sinks=True,
         spans=[[(5, 9), (9, 16), (25, 31)], [(4, 45)]]),
    Case("spans_near", spec=AttentionSpec(window=4, chunk=13, first=2, softcap=4.0), lengths=[61],
         spans=[(7, 20), (30, 35)]),
    Case("tree", lengths=[17, 9, 3, 12, 7, 5], parents=[-1, 0, 1, 0, 3, 3]),
    Case("trees", spec=AttentionSpec(window=14, first=3, scale=0.4), lengths=[[9, 8, 13, 5, 11, 7], [3, 4, 50]],
         parents=[[-1, 0, -1, 0, 1, 2], [-1, 0, -1]], heads=8, sinks=True),
    Case("tree_chunks", spec=AttentionSpec(chunk=11), lengths=[17, 9, 3, 20, 7, 5], parents=[-1, 0, 1, 0, 3, 0]),
    Case("slices", sinks=True, slices=[((4, 20), (0, 16), "causal"), ((20, 40), (0, 12), "full"),
         ((20, 40), (15, 45), "both"), ((40, 61), (30, 61), "inverse"), ((48, 57), (2, 9), "causal")]),
    Case("slices_near", spec=AttentionSpec(window=9, chunk=40, first=3), sinks=True,
         slices=[((4, 20), (0, 20), "full"), ((20, 61), (0, 50), "inverse")]),
    Case("shared_question", slices=[((0, 30), (0, 30), "causal"), ((30, 61), (0, 13), "full"),
         ((30, 44), (30, 44), "causal"), ((44, 61), (44, 61), "causal")]),
)  # fmt: skip

PLACES = (
    *product(((4, 1),), ("ring", "gather"), ("contiguous", "striped", "zigzag")),
    ((1, 4), "ulysses", "contiguous"),
    ((2, 2), "ring", "zigzag"),
    ((2, 2), "ring", "striped"),
    ((2, 2), "gather", "zigzag"),
    ((8, 1), "ring", "zigzag"),
    ((2, 4), "ring", "contiguous"),
)

CASES = tuple(
    replace(case, ring=ring, ulysses=ulysses, strategy=strategy, layout=layout)
    for case in FEATURES
    for (ring, ulysses), strategy, layout in PLACES
)

# What the balanced layout can be: one sequence, whose documents are dealt out to the ring.
BALANCED = tuple(
    replace(case, ring=ring, ulysses=ulysses, strategy=strategy, layout="balanced")
    for case in FEATURES
    if case.keys == case.seq_len
    for ring, ulysses, strategy in ((4, 1, "ring"), (2, 2, "gather"))
)

# A few of each kind, for what costs more than a thread: processes, GPUs.
FEW = (
    *(
        c
        for c in CASES
        if c.name in ("all_at_once", "cross", "docs_rows", "window")
        and (c.strategy, c.layout) in (("ring", "zigzag"), ("gather", "zigzag"), ("ulysses", "contiguous"))
    ),
    *(c for c in BALANCED if c.name == "docs" and c.strategy == "ring"),
)


def large_scores(given: dict[str, Tensor], size: float = 1e4) -> dict[str, Tensor]:
    """The same with scores, where the scale is 1, and sinks that float32 holds exactly, and that are about `size`."""
    scored = {n: (given[n] * 2).round() / (8 if n == "k" else 1) for n in "qk"}
    scored["q"][..., 0], scored["k"][..., 0] = size, 1.0
    return {**given, **scored, "sinks": size + (given["sinks"] * 8).round() / 8}


def passes(case: Case, mesh: Any, given: dict[str, Any], kernel: str = "auto", **choices: Any) -> dict[str, Tensor]:
    """Both results and every gradient of this rank's part; `choices` are further words for the plan."""
    case = replace(case, kernel=kernel, plan={**case.plan, **choices})
    return oracle.run(case, case.plan_on(mesh), given)


def relative_error(result: Tensor, expected: Tensor, whole: Tensor | None = None) -> float:
    """|result - expected| / |whole|, by default of `expected`; inf where one is NaN, or not the same infinity."""
    finite, whole = torch.isfinite(expected), expected if whole is None else whole
    result = result.double()
    if result.isnan().any() or not torch.equal(result[~finite], expected[~finite].double()):
        return float("inf")
    gap = torch.where(finite, result - expected, 0.0)
    return float(gap.norm()) / max(float(whole.nan_to_num(neginf=0.0).norm()), 1e-30)


def errors(case: Case, mesh: Any, results: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """The relative error (norm) of each local result; inf where padding leaked or an empty row is not one."""
    plan, off = case.plan_on(mesh), {}
    for n in results.keys() - SHARED:
        mine = oracle.local(plan, n, exact[n].to(results[n].device), -torch.inf if n == "lse" else 0.0)
        off[n] = relative_error(results[n], mine, exact[n])
    return off


def found(case: Case, mesh: Any, given: dict[str, Any], exact: dict[str, Tensor], **choices: Any) -> dict[str, Any]:
    """A rank's errors, and its shares of the gradients of what every rank has; `choices` are further words."""
    results = passes(case, mesh, {n: x for n, x in given.items() if x is not None}, **choices)
    return errors(case, mesh, results, exact) | {n: results[n].double().cpu().numpy() for n in results.keys() & SHARED}


def on_threads(case: Case, given: dict[str, Any], exact: dict[str, Tensor], **choices: Any) -> list[dict[str, Any]]:
    return run(lambda mesh: found(case, mesh, given, exact, **choices), ring=case.ring, ulysses=case.ulysses)


def worst(ranks: list[dict[str, Any]], exact: dict[str, Tensor]) -> dict[str, float]:
    """The largest error of any rank, and those of the sums of shares."""
    totals = {n: torch.as_tensor(sum(mine[n] for mine in ranks)) for n in ranks[0].keys() & SHARED}
    off = {n: max(mine[n] for mine in ranks) for n in ranks[0].keys() - SHARED}
    return off | {n: relative_error(total, exact[n].cpu()) for n, total in totals.items()}


def check(ranks: list[dict[str, Any]], exact: dict[str, Tensor], limits: Any, what: Any) -> None:
    """Hold what all ranks `found` against one limit, or a limit a result."""
    for name, value in worst(ranks, exact).items():
        limit = limits[name] if isinstance(limits, dict) else limits
        each = {} if name in SHARED else {rank: mine[name] for rank, mine in enumerate(ranks) if mine[name] > limit}
        assert value <= limit, f"{what}: {name} is off by {value:.2e} (limit {limit:.1e}) {each or ''}"


class Call(NamedTuple):
    """A case, what goes in, what must come out, and further words for the plan."""

    case: Case
    given: dict[str, Any]
    exact: dict[str, Tensor]
    way: dict[str, Any] = {}  # noqa: RUF012


def attention(case: Case, **way: Any) -> Call:
    given = oracle.inputs(case, torch.float32)
    return Call(case, given, oracle.dense(case, given), way)


def by_process(calls: list[Callable[[], Call]]) -> list[dict[str, Any]]:
    """What this process found of each call."""
    results = []
    for case, given, exact, way in (make() for make in calls):
        mesh = ra.init_mesh(ring=case.ring, ulysses=case.ulysses, device_type="cpu")
        results.append(found(case, mesh, given, exact, **way))
    return results


def check_processes(ranks: int, calls: list[Callable[[], Call]], limit: float, through: Any = None) -> None:
    """All calls over processes that are started once; `through` a function."""
    task = (by_process, ranks) if through is None else (through, ranks, by_process)
    results = run_processes(*task, calls)
    for i, make in enumerate(calls):
        case, _, exact, way = make()
        check([each[i] for each in results], exact, limit, f"{case} {way}")


# Linear attention.

B, H, K, V = 2, 2, 8, 12
LEAVES = ("q", "k", "v", "g", "beta")
Lengths = tuple[tuple[int, ...], ...]


def inputs(
    T: int, gate: str | None, dtype: torch.dtype = torch.float64, deep: float = 1.0, beta: bool = False,
    key_heads: int = H, states: int = B,
) -> dict[str, Any]:  # fmt: skip
    """Random q, k, v, log decays, states and what comes back; the same on every rank. With `beta`, by the delta rule,
    every second k has length 1 and the others are shorter, and some betas are 0, 1 and 2. If `deep` is small, states
    are forgotten as slowly.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    shapes = {"channel": (B, T, H, K), "head": (B, T, H)}
    q, k = (draw(B, T, key_heads, K) for _ in "qk")
    given: dict[str, Any] = {
        "q": q, "k": k, "v": draw(B, T, H, V),
        "g": None if gate is None else deep * torch.nn.functional.logsigmoid(draw(*shapes[gate])),
        "state": draw(states, H, K, V), "dout": draw(B, T, H, V), "dend": draw(states, H, K, V),
    }  # fmt: skip
    given["beta"] = None
    if beta:
        lengths, betas = (torch.rand(B, T, h, generator=generator, dtype=torch.float64) for h in (key_heads, H))
        lengths[:, 1::2] = 1
        given["k"] = torch.nn.functional.normalize(k, dim=-1) * lengths[..., None]
        for t, value in enumerate((0.0, 0.5, 1.0)):
            betas[:, t::7] = value
        given["beta"] = 2 * min(deep, 1.0) * betas
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    in_float32 = ("state", "dend", "g", "beta")
    return {n: x if x is None else x.to(exact if n in in_float32 else dtype) for n, x in given.items()}


def case_of(given: dict[str, Any], lengths: Lengths | None, **placed: Any) -> Case:
    """The call of these inputs over some ranks."""
    g, (rows, T, key_heads, _) = given["g"], given["q"].shape
    return Case(
        "linear", seq_len=T, batch=rows, heads=H, kv_heads=key_heads, head_dim=K, value_dim=V,
        lengths=lengths and [list(row) for row in lengths],
        gate=None if g is None else "head" if g.dim() == 3 else "channel", beta=given["beta"] is not None,
        state="document" if len(given["state"]) > rows else "row", **placed,
    )  # fmt: skip


@lru_cache
def truth(T: int, gate: str | None, lengths: Lengths | None = None, *how: Any, **rule: Any) -> dict[str, Tensor]:
    """out, the end states and every gradient, by autograd through the recurrence, for what `inputs` gives."""
    given = inputs(T, gate, *how, **rule)
    return oracle.dense(case_of(given, lengths), {n: x for n, x in given.items() if x is not None})


def gradients(
    kernel: Any, q: Any, k: Any, v: Any, where: Any, dout: Any, lse: Any, delta: Any, out: Any = None, **how: Any
) -> tuple[Tensor, ...]:
    """(dq, dk, dv) of one step by a kernel for torch, in float32 (float64 for float64)."""
    grads = kernel.backward((q, k, v), where, kernel.prepare(dout, lse, delta, out), **how)
    return tuple(in_dtype(grad, accumulator(x)) for grad, x in zip(grads, (q, k, v), strict=True))


def begins(lengths: Lengths | None, T: int) -> Tensor | None:
    """[rows, T]: the first token of each token's document, -1 in the row's first; padding goes on with the last."""
    if lengths is None:
        return None
    rows = []
    for row in lengths:
        of = [sum(row[:i]) if i else -1 for i, n in enumerate(row) for _ in range(n)]
        rows.append(of + (of or [-1])[-1:] * (T - len(of)))
    return torch.tensor(rows)


def states_of(lengths: Lengths | None, rows: int = B) -> int:
    """How many states there are with one a document: as many for each row."""
    return rows * max(map(len, lengths or ((0,),)))


def docs_of(lengths: Lengths | None, T: int) -> ra.Docs | None:
    return None if lengths is None else ra.Docs.from_lengths([list(row) for row in lengths], pad_to=T)


def linear(
    place: tuple[int, int, str], gate: str | None, lengths: Lengths | None, T: int, dtype: torch.dtype = torch.float64,
    scan: str = "auto", **rule: Any,
) -> Call:  # fmt: skip
    given, (ring, ulysses, layout) = inputs(T, gate, dtype, **rule), place
    case = case_of(given, lengths, ring=ring, ulysses=ulysses, layout=layout, words={"scan": scan})
    return Call(case, given, truth(T, gate, lengths, dtype, **rule))
