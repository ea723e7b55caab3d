"""One list of cases: `ringattn verify` runs them everywhere, the tests where tests/cases.py puts them."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor

import ringattn as ra
from ringattn.masks.slices import Mask
from ringattn.masks.spec import AttentionSpec, Docs
from ringattn.masks.values import fields
from ringattn.plans.transport import Transport


@dataclass(frozen=True)
class Placed:
    """One call over ring x ulysses ranks."""

    name: str
    ring: int = 4
    ulysses: int = 1
    strategy: str = "ring"
    layout: str = "zigzag"

    @property
    def table_row(self) -> str:
        """The row of a table that it belongs to."""
        return f"{self.ring:>4} {self.ulysses:>7} {self.strategy:<8} {self.layout:<12}"

    def __str__(self) -> str:
        return f"{self.name}-{self.strategy}{self.ring}x{self.ulysses}-{self.layout}"


@dataclass(frozen=True)
class Case(Placed):
    """One attention call."""

    outputs: ClassVar = ("out", "lse")
    spec: AttentionSpec = field(default_factory=AttentionSpec)
    seq_len: int = 61  # a prime: no number of ranks divides it
    key_len: int | None = None
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    value_dim: int = 8
    batch: int = 2
    lengths: Any = None  # of packed documents
    key_lengths: Any = None
    sinks: bool = False
    dealt: Any = None  # lengths of documents that the plan lays out; see laid_out
    prefix: Any = None  # of each document
    spans: Any = None
    parents: Any = None  # of the documents, as segments of trees
    slices: Any = None  # (queries, keys, kind) each

    @property
    def ranks(self) -> int:
        return self.ring * self.ulysses

    @property
    def docs(self) -> Docs | None:
        if self.parents is not None:
            return Docs.tree(self.lengths, self.parents, pad_to=self.seq_len)
        if self.lengths is None:
            return None
        return Docs.from_lengths(self.lengths, pad_to=self.seq_len, prefix=self.prefix, spans=self.spans)

    @property
    def mask(self) -> Mask | None:
        if self.slices is None:
            return None
        q_ranges, k_ranges, kinds = zip(*self.slices, strict=True)
        return Mask.from_slices(q_ranges, k_ranges, kinds, self.seq_len)

    @property
    def align(self) -> Literal["end"] | None:
        """Where queries and keys are different documents, they end at one position."""
        return "end" if self.key_lengths else None

    @property
    def key_docs(self) -> Docs | None:
        return None if self.key_lengths is None else Docs.from_lengths(self.key_lengths, pad_to=self.key_len)

    @property
    def crossed(self) -> bool:
        """Whether keys are a sequence of another length, which some layouts refuse."""
        return self.key_len not in (None, self.seq_len)

    @property
    def laid_out(self) -> Docs | None:
        """The documents that the plan lays out; in the balanced layout all that are alike in every row."""
        if self.dealt is not None:
            return Docs.from_lengths(self.dealt, pad_to=self.seq_len)
        docs = self.mask or self.docs
        return docs.first if self.layout == "balanced" and docs is not None else None

    @property
    def leaves(self) -> tuple[str, ...]:
        """The inputs that get gradients."""
        return ("q", "k", "v", *["sinks"] * self.sinks)

    def plan_on(self, mesh: Any, kernel: str = "auto", **choices: Any) -> Any:
        """Its plan; of `choices`, what a Transport has goes into one."""
        how = {name: choices.pop(name) for name in fields(Transport) if name in choices}
        plan = ra.plan(mesh, seq_len=self.seq_len, key_len=self.key_len, spec=self.spec, strategy=self.strategy,
                       layout=self.layout, kernel=kernel, transport=Transport(**how), **choices)  # fmt: skip
        return plan if self.laid_out is None else plan.for_docs(self.laid_out)

    def call(self, plan: Any, x: dict[str, Any], kernel: str = "auto") -> tuple[Any, Any]:
        """The call itself, on tensors of torch or JAX; its plan has the kernel."""
        return ra.attention(
            x["q"], x["k"], x["v"], plan, spec=self.spec, docs=self.docs, key_docs=self.key_docs, align=self.align,
            mask=self.mask, sinks=x.get("sinks"), return_lse=True,
        )  # fmt: skip


class Truth(NamedTuple):
    """What goes into a case, what must come out, how far its elements may be off, and how far each whole result."""

    given: dict[str, Any]
    exact: dict[str, Tensor]
    allowed: dict[str, Tensor]
    limits: dict[str, float]
    by_element: bool = False  # whether only elements count, those of each result on their own


FULL = AttentionSpec(causal=False)

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
