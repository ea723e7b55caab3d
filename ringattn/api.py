"""The public functions: each finds the framework from its arguments and calls the function of the same name there."""

import sys
from typing import Any

from ringattn.comms.axis import Solo
from ringattn.cost import Shape, replicas
from ringattn.planning import Plan, candidates, check_heads, check_length, choose, describe, hardware_of
from ringattn.spec import AttentionSpec, Docs

REFUSED = {
    "dropout": "attention dropout is not supported: it has no exact form over ranks",
    "dropout_p": "attention dropout is not supported: it has no exact form over ranks",
    "alibi_slopes": "ALiBi is not supported: use rotary positions (plan.positions())",
    "alibi": "ALiBi is not supported: use rotary positions (plan.positions())",
    "bias": "an additive bias is not supported: masks are intervals (causal, window, docs)",
    "attn_bias": "an additive bias is not supported: masks are intervals (causal, window, docs)",
    "attn_mask": "an arbitrary mask is not supported: masks are intervals (causal, window, docs)",
    "mask": "an arbitrary mask is not supported: masks are intervals (causal, window, docs)",
    "is_causal": "say spec=AttentionSpec(causal=...)",
    "causal": "say spec=AttentionSpec(causal=...)",
    "window": "say spec=AttentionSpec(window=...)",
    "window_size": "say spec=AttentionSpec(window=...)",
    "softcap": "say spec=AttentionSpec(softcap=...)",
    "scale": "say spec=AttentionSpec(scale=...)",
    "softmax_scale": "say spec=AttentionSpec(scale=...)",
    "cu_seqlens": "say docs=Docs.from_cu_seqlens(...)",
}


def attention(
    q: Any,
    k: Any,
    v: Any,
    plan: Plan | None = None,
    *,
    spec: AttentionSpec | None = None,
    docs: Docs | None = None,
    key_docs: Docs | None = None,
    sinks: Any = None,
    return_lse: bool = False,
    **unknown: Any,
) -> Any:
    """softmax(scale * q k^T) v over the whole sequence, exact, whichever rank holds which part of it.

    q [B, T, H, D], k [B, S, G, D] and v [B, S, G, V] are this rank's tokens under `plan` (see `Plan.shard`); G divides
    H. Without a plan they are everything, on one device. Returns out [B, T, H, V] in q's dtype, and with
    `return_lse` also lse [B, T, H], the natural log-sum-exp in float32, differentiable.

    spec      causal, window, softcap, scale; causal by default
    docs      packed documents, the same on every rank; `key_docs` those of the keys where they are another sequence
    sinks     [H], a logit a head that takes part in the softmax with a value of zero
    """
    if unknown:
        refuse(unknown)
    return framework(q).attention(
        q, k, v, plan, spec=spec, docs=docs, key_docs=key_docs, sinks=sinks, return_lse=return_lse
    )


def refuse(unknown: dict[str, Any]) -> None:
    """Name every argument that attention does not take, and what to use instead."""
    said = [f"{name}: {REFUSED.get(name, 'attention has no such argument')}" for name in unknown]
    raise ValueError("; ".join(said))


def framework(x: Any) -> Any:
    """The module of functions for this tensor's framework."""
    if "torch" in sys.modules and isinstance(x, sys.modules["torch"].Tensor):
        import ringattn.torch.attention

        return ringattn.torch.attention
    if "jax" in sys.modules and isinstance(x, sys.modules["jax"].Array):
        import ringattn.jax

        return ringattn.jax
    raise ValueError(f"expected a torch tensor or a jax array, got {type(x).__name__}")


def init_mesh(
    data: int = 1, ring: int = 1, ulysses: int = 1, sequence: int | None = None, device_type: str | None = None
) -> Any:
    """A torch DeviceMesh over all ranks: axes data, ring and ulysses, or data and sequence, which `plan` factors."""
    from ringattn.comms import mesh

    return mesh.init_mesh(data, ring, ulysses, sequence, device_type)


def plan(
    mesh: Any = None,
    *,
    seq_len: int,
    key_len: int | None = None,
    heads: tuple[int, int] | int | None = None,
    head_dim: int | None = None,
    value_dim: int | None = None,
    spec: AttentionSpec | None = None,
    strategy: str = "auto",
    layout: str = "auto",
    kernel: str = "auto",
    dtype: str | None = None,
) -> Plan:
    """How `seq_len` tokens are spread over the mesh: every choice can be given, the rest is picked by predicted time.

    The mesh has axes "ring" and/or "ulysses", whose sizes are then fixed, or "sequence", which is factored here; no
    mesh means one device. `heads` is (query heads, key heads). Every rank must make the same plan; `explain()` shows
    the candidates and why this one.
    """
    spec = AttentionSpec() if spec is None else spec
    heads = (heads, heads) if isinstance(heads, int) else heads
    if heads is not None:
        check_heads(*heads, ulysses=1)
    device, ranks, bind = placed(mesh)
    shape = None
    if heads is not None and head_dim is not None:
        itemsize = {"float64": 8, "float32": 4}.get(dtype or ("float32" if device == "cpu" else "bfloat16"), 2)
        check_length("seq_len", seq_len)
        shape = Shape(seq_len, key_len or seq_len, *heads, head_dim, value_dim or head_dim, itemsize)
    hardware = hardware_of(device)
    best, options = choose(candidates(ranks, heads and heads[0], strategy, layout, spec), shape, spec, hardware)
    return Plan(
        seq_len=seq_len,
        key_len=key_len,
        ring=best.ring,
        ulysses=best.ulysses,
        strategy=best.strategy,
        layout=best.layout,
        kernel=kernel,
        heads=heads,
        head_dim=head_dim,
        value_dim=value_dim,
        framework="jax" if is_jax_mesh(mesh) else "torch",
        axes=bind(best.ring, best.ulysses),
        device=device,
        report=(
            *describe(options, hardware),
            *kernel_report(shape, spec, device, dtype, kernel, best.ulysses, is_jax_mesh(mesh)),
        ),
    )


def placed(mesh: Any) -> tuple[str, list[tuple[int, int]], Any]:
    """A mesh's device type, the (ring, ulysses) sizes it allows, and what turns the chosen sizes into axes."""
    if mesh is None:
        return default_device(), [(1, 1)], lambda ring, ulysses: (Solo("ring"), Solo("ulysses"))
    if is_jax_mesh(mesh):
        from ringattn.comms.jax import placed as placed_on_jax

        return placed_on_jax(mesh)
    from ringattn.comms.mesh import axis, axis_names, axis_size, split

    names = axis_names(mesh)
    if "sequence" in names:
        size = axis_size(mesh, "sequence")
        pairs = [(size // u, u) for u in range(1, size + 1) if size % u == 0]

        def bind(ring: int, ulysses: int) -> tuple[Any, Any]:
            cut = split(mesh, "sequence", {"ring": ring, "ulysses": ulysses})
            return axis(cut, "ring"), axis(cut, "ulysses")

        return mesh.device_type, pairs, bind
    if not {"ring", "ulysses"} & set(names):
        raise ValueError(
            f"the mesh has axes {names or '()'}; a plan needs 'ring' and/or 'ulysses', or 'sequence' to be factored "
            "(ringattn.init_mesh names them)"
        )
    sizes = axis_size(mesh, "ring"), axis_size(mesh, "ulysses")
    return mesh.device_type, [sizes], lambda ring, ulysses: (axis(mesh, "ring"), axis(mesh, "ulysses"))


def is_jax_mesh(mesh: Any) -> bool:
    return "jax" in sys.modules and isinstance(mesh, sys.modules["jax"].sharding.Mesh)


def default_device() -> str:
    """Where tensors of a plan without a mesh are made: the GPU if torch sees one."""
    torch = sys.modules.get("torch")
    return "cuda" if torch is not None and torch.cuda.is_available() else "cpu"


def kernel_report(
    shape: Shape | None,
    spec: AttentionSpec,
    device: str,
    dtype: str | None,
    kernel: str,
    ulysses: int,
    jax: bool = False,
) -> list[str]:
    """Which kernel will run and why each other one will not; an unknown name is refused here."""
    from ringattn import kernels as for_torch
    from ringattn.kernels import pallas as for_jax

    kernels: Any = for_jax if jax else for_torch
    if shape is None:
        if kernel not in ("auto", *(k.name for k in kernels.TABLE)):
            kernels.select(kernels.Problem(device, "float32", 64, 64, 1, 1), kernel)
        return [f"kernel {kernel}: say heads and head_dim to see which one that is"]
    problem = kernels.Problem(
        device=device,
        dtype=dtype or ("float32" if device == "cpu" else "bfloat16"),
        head_dim=shape.head_dim,
        value_dim=shape.value_dim,
        heads=shape.heads // ulysses,
        kv_heads=shape.kv_heads * replicas(shape.kv_heads, ulysses) // ulysses,
        softcap=spec.softcap is not None,
        tiles=spec.window is None,  # documents and stripes may cut a step into more pieces than rectangles
    )
    chosen = kernels.select(problem, kernel).name
    lines = [f"kernel {kernel} -> {chosen} ({problem.device}, {problem.dtype}, head dim {problem.head_dim})"]
    for other in kernels.TABLE:
        serves = "would serve, slowly: say its name" if device in other.told else "would serve"
        if other.name != chosen:
            lines.append(f"  {other.name}: {other.refuses(problem) or serves}")
    return lines
