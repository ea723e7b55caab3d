"""Compile a plan for a TPU topology, without a TPU: memory, the order of hops and kernels, and which blocks fit.

    ringattn aot topology=v6e:2x4 ring=8 seq_len=131072 heads=32 kv_heads=8
    ringattn aot topology=v5e:2x4 ring=4 ulysses=2 layout=striped window=4096 blocks=1024x1024,2048x2048
    ringattn aot topology=v5e:2x4 ring=8 linear=delta heads=32 kv_heads=16

Needs libtpu (pip install 'ringattn[tpu]'). Devices beyond ring x ulysses form a data axis.
"""

from dataclasses import dataclass
from pathlib import Path

from ringattn.launch.words import option
from ringattn.masks.spec import AttentionSpec, Docs
from ringattn.plans.plan import Plan


@dataclass
class Options:
    topology: str = option("v6e:2x4", "a TPU topology: v4:2x2x2, v5e:2x4, v5p:2x2x2, v6e:2x4, tpu7x:2x2x2, ...")
    seq_len: int = option(131072, "tokens of the whole sequence")
    ring: int = option(8, "devices along the ring")
    ulysses: int = option(1, "devices along the Ulysses axis")
    strategy: str = option("ring", "ring, gather or ulysses")
    layout: str = option("zigzag", "contiguous, striped or zigzag")
    heads: int = option(32, "query heads; of linear attention the heads of values, states and gates")
    kv_heads: int = option(8, "key and value heads; of linear attention those of queries and keys")
    head_dim: int = option(128, "the size of a head")
    value_dim: int | None = option(None, "the size of a value; by default head_dim")
    batch: int = option(1, "sequences of each ring")
    dtype: str = option("bfloat16", "bfloat16 or float32")
    causal: bool = option(True, "whether a query sees no later key")
    window: int | None = option(None, "how many keys a query sees at most")
    softcap: float | None = option(None, "the soft cap of scores")
    docs: list[int] = option([], "the lengths of packed documents, known to the program: 40000,20000,5536")
    linear: str | None = option(
        None, "linear attention instead, with a gate a head: gated, or delta for the delta rule"
    )
    cache: int | None = option(None, "prefill of seq_len tokens and decode of one instead, with a cache of so many")
    blocks: list[str] = option([], "also try these blocks of queries x keys, one by one: 512x512,1024x2048")
    text: str | None = option(None, "also write both scheduled programs, to PATH.forward and so on, by their names")


def run(options: Options) -> int:
    """Print the report."""
    from ringattn.jax import aot

    plan = Plan(
        options.seq_len, options.ring, options.ulysses, options.strategy, options.layout,
        heads=(options.heads, options.kv_heads), head_dim=options.head_dim, value_dim=options.value_dim,
    )  # fmt: skip
    spec = AttentionSpec(options.causal, options.window, softcap=options.softcap)
    docs = Docs.from_lengths(options.docs, pad_to=options.seq_len) if options.docs else None
    sizes = [pair(word) for word in options.blocks]
    if sizes and options.linear:
        raise ValueError(f"blocks={','.join(options.blocks)} are of the attention kernel; leave out blocks or linear")
    try:
        report = aot.aot_report(
            options.topology, plan, spec=spec, docs=docs, batch=options.batch, dtype=options.dtype,
            linear=options.linear, cache=options.cache,
        )  # fmt: skip
        print(report)
        for size, verdict in aot.fits(options.topology, plan, sizes, options.dtype).items() if sizes else ():
            print(f"blocks {size}: {verdict}")
    except RuntimeError as error:  # JAX's and libtpu's own
        raise ValueError(str(error)) from error
    for program in report.programs if options.text else ():
        Path(f"{options.text}.{program.name}").write_text(program.text)
    return 0


def pair(word: str) -> tuple[int, int]:
    queries, x, keys = word.partition("x")
    if not (x and queries.isdigit() and keys.isdigit()):
        raise ValueError(f"blocks={word}: give queries x keys, as in 512x1024")
    return int(queries), int(keys)
