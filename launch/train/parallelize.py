"""A training on many ranks: the plan, and the decoder, sharded by FSDP2.

The decoder is made part by part, each rank drawing its own rows of the weights.
"""

import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from ringattn import choosing
from ringattn.conf.schema import Train
from ringattn.launch.train.model import Block, Decoder, head_dim
from ringattn.masks.spec import AttentionSpec
from ringattn.plans.plan import Plan


def plan_of(config: Train, mesh: Any = None) -> Plan:
    """The plan of the ranks of this configuration: over their mesh, or without one as they would make it elsewhere."""
    s, m = config.strategy, config.model
    return choosing.plan(
        choosing.elsewhere(config.device, [(s.ring or 1, s.ulysses or 1)]) if mesh is None else mesh,
        seq_len=config.seq_len,
        heads=(m.heads, m.kv_heads),
        head_dim=head_dim(m),
        spec=AttentionSpec(window=m.window, softcap=m.softcap),
        strategy=s.keys,
        layout=s.layout,
        kernel=s.kernel,
        graphs=s.graphs,
        dtype=config.precision,
        machine=config.machine,
    )


def build(config: Train, device: torch.device, mesh: Any = None) -> Decoder:
    """The decoder, with weights that depend on the seed alone, sharded over all ranks of a `mesh` (FSDP2).

    It is made part by part, so that no rank ever holds more than its shard and one whole block. The master weights are
    float32 whatever the precision.
    """
    seed, layers = config.seed, config.model.layers
    place = (0, 1) if mesh is None else (mesh.get_local_rank(), mesh.size())
    with torch.device("meta"):
        decoder = Decoder(config.model, config.strategy.recompute, config.strategy.offload)
    for name in (*(f"blocks.{i}" for i in range(layers)), "embed", "norm", "head", ""):  # the whole comes last
        module = decoder.get_submodule(name)
        module.to_empty(device=device, recurse=name != "")
        initialise(module, name, seed, layers, place)
        if config.compile and isinstance(module, Block):
            module.compile(fullgraph=True)
        if mesh is not None:
            shard(module, mesh, config.precision)
    return decoder


@torch.no_grad()
def initialise(module: nn.Module, name: str, seed: int, layers: int, shard: tuple[int, int]) -> None:
    """Norms 1, biases 0; matrices normal with deviation 1 / sqrt(inputs), over sqrt(2 layers) where they end a residual
    branch; the embedding 0.5; the head such that the logits have 0.22 at any width, and the first guess is even.

    Drawn on the CPU from a stream of each weight's own, so that no sharding, device or order changes them; and only the
    rows that rank `shard[0]` of `shard[1]` keeps.
    """
    if not name or next(module.parameters()).is_meta:  # no weights to draw
        return
    for of_module, weight in module.named_parameters():
        if weight.dim() == 1:
            weight.fill_(0.0 if of_module.endswith("bias") else 1.0)
            continue
        ends = of_module.endswith(("attention.out.weight", "mlp.down.weight"))
        rows, width = len(weight), weight[0].numel()
        deviation = {"embed": 0.5, "head": (20 * width) ** -0.5}.get(
            name, weight.shape[1] ** -0.5 / ((2 * layers) ** 0.5 if ends else 1)
        )
        each = -(-rows // shard[1])
        first, last = min(rows, shard[0] * each), min(rows, (shard[0] + 1) * each)
        drawn = normal(f"{seed} {name}.{of_module}", first * width, last * width)
        weight[first:last].copy_(drawn.view(-1, *weight.shape[1:]).mul_(deviation))


def normal(name: str, begin: int, end: int, size: int = 2**16) -> Tensor:
    """Numbers [begin, end) of an endless normal sequence that depends on its name alone; `size` of them a thread."""
    low, high = begin // size, -(-end // size)
    drawn = torch.empty((high - low) * size)

    def draw(i: int) -> None:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {low + i}".encode()))
        drawn[i * size : (i + 1) * size].normal_(generator=generator)

    with ThreadPoolExecutor() as threads:
        list(threads.map(draw, range(high - low)))
    return drawn[begin - low * size : end - low * size]


def shard(module: nn.Module, mesh: Any, precision: str) -> None:
    """FSDP2 over all ranks. Gradients are summed, never averaged: each rank's loss is its share of the mean."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    low = torch.bfloat16 if precision == "bfloat16" else None
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
    module.set_gradient_divide_factor(1.0)  # type: ignore[operator]
