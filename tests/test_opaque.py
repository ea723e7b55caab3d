"""What wrappers of modules (FSDP, DDP, accelerate, checkpointing) do with what layers receive: nothing."""

import copy
import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.utils import _apply_to_tensors, _recursive_to, _to_kwargs
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint

import ringattn as ra
from ringattn import hf
from ringattn.launch.processes import run
from ringattn.masks.values import Value
from ringattn.models.hf.attention import Asked, Call
from ringattn.models.hf.choice import Spread
from ringattn.models.hf.generate import RanksCache
from ringattn.models.nn import Attention, GatedDeltaNet
from ringattn.plans import machine
from ringattn.plans.transport import Transport

BF16, T = torch.bfloat16, 64
MACHINE = machine.of_device("cpu")
PLAN, DOCS = ra.plan(seq_len=T), ra.Docs.from_lengths([20, 44])
HANDED_ON = [
    PLAN, Transport(), ra.AttentionSpec(window=3), DOCS, Asked(3), Call(PLAN, DOCS, lengths=torch.ones(2)),
    Spread(PLAN, ()), RanksCache(PLAN, 8), MACHINE, MACHINE.inside,
    ra.KVCache.allocate(PLAN, batch=1, max_len=8, kv_heads=1, head_dim=4, dtype=torch.float32),
]  # fmt: skip


def to_half(x: Any) -> Any:
    return x.to(BF16) if isinstance(x, Tensor) else x


def walks() -> dict[str, Any]:
    """What wrappers do with each argument of a module."""
    results = {
        "FSDP": partial(_apply_to_tensors, to_half),
        "DDP": lambda x: _recursive_to(x, torch.device("cpu"), False)[0],
        "DDP by name": lambda x: _to_kwargs((), {"x": x}, torch.device("cpu"), False)[1][0]["x"],
        "pytree": partial(_pytree.tree_map, to_half),
    }
    operations = pytest.importorskip("accelerate").utils.operations
    results["recursively_apply"] = partial(operations.recursively_apply, to_half)
    results["send_to_device"] = lambda x: operations.send_to_device(x, "cpu")
    results["convert_to_fp32"] = operations.convert_to_fp32
    return results


@pytest.mark.parametrize("x", HANDED_ON, ids=lambda x: type(x).__name__)
def test_what_layers_receive_is_not_taken_apart(x):
    for name, walk in walks().items():
        assert walk(x) is x, name
    assert not isinstance(x, tuple | list | dict) and not dataclasses.is_dataclass(x)
    assert not list(_find_tensors(x))


def test_every_value_is_among_those():
    assert {type(x) for x in HANDED_ON} >= set(Value.__subclasses__())


def test_a_value_is_a_frozen_dataclass_to_us():
    spec = ra.AttentionSpec(window=3)
    assert spec.replace(causal=True) == spec == copy.deepcopy(spec) != spec.replace(window=4)
    assert hash(spec.replace(scale=None)) == hash(spec) and "window=3" in repr(spec)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.window = 4  # type: ignore[misc]
    with pytest.raises(TypeError, match="nope"):
        spec.replace(nope=1)


class Block(nn.Module):
    """A layer that is called with a plan, and what it was called with."""

    def __init__(self, kind: str):
        super().__init__()
        makes: dict[str, Any] = {
            "Attention": lambda: Attention(32, 4, 2),
            "GatedDeltaNet": lambda: GatedDeltaNet(32, 4, key_dim=8),
            "ra.attention": lambda: nn.Linear(32, 96),
        }
        self.kind, self.layer = kind, makes[kind]()
        self.expected: tuple[Any, ...] = ()

    def forward(self, x: Tensor, plan: Any, *, spec: Any, docs: Any) -> Tensor:
        assert all(a is b for a, b in zip((plan, spec, docs), self.expected, strict=True))
        if self.kind != "ra.attention":
            return x + self.layer(x, plan, docs=docs)
        q, k, v = self.layer(x).unflatten(2, (3, 4, 8)).unbind(2)
        return x + ra.attention(q, k, v, plan, spec=spec, docs=docs).flatten(2)


class Stack(nn.Module):
    """Blocks that are wrapped one by one and recomputed."""

    def __init__(self, kind: str):
        super().__init__()
        self.layers = nn.ModuleList(Block(kind) for _ in range(2))

    def forward(self, x: Tensor, plan: Any, spec: Any, docs: Any, again: bool) -> Tensor:
        for block in self.layers:
            call = partial(checkpoint, block, use_reentrant=False) if again else block
            x = call(x, plan, spec=spec, docs=docs)
        return x


def wrapped(model: nn.Module, layers: Any, way: str, mesh: Any) -> nn.Module:
    """The model in a wrapper that averages gradients over the ranks."""
    if way == "DDP":
        return DistributedDataParallel(model)
    if way == "FSDP1":
        policy = MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32, cast_forward_inputs=True)
        wrap = partial(
            FullyShardedDataParallel, mixed_precision=policy, device_id=torch.device("cpu"), use_orig_params=True
        )
        for i, layer in enumerate(layers):
            layers[i] = wrap(layer)
        return wrap(model)
    for part in (*layers, model):
        fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32))
    return model


def grads(model: nn.Module, way: str) -> list[Tensor]:
    if way == "FSDP1":
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            return [p.grad.clone() for p in model.parameters()]
    return [p.grad.full_tensor() if way == "FSDP2" else p.grad for p in model.parameters()]


def stepped(kind: str, way: str, again: bool) -> list[Any]:
    """The loss and all gradients of one pass over all ranks."""
    mesh = ra.init_mesh(ring=dist.get_world_size(), device_type="cpu")
    plan, spec = ra.plan(mesh, seq_len=T, layout="zigzag"), ra.AttentionSpec(window=30)
    torch.manual_seed(0)
    if kind == "Llama":
        model = hf.prepare(llama(), plan, averaged=True)
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        call = wrapped(model, model.model.layers, way, mesh["ring"])
        ids, positions = torch.randint(64, (1, T)), torch.cat([torch.arange(20), torch.arange(44)])
        loss = call(ids, labels=ids, position_ids=positions[None]).loss
    else:
        model = Stack(kind)
        for block in model.layers:
            block.expected = plan, spec, DOCS
        call = wrapped(model, model.layers, way, mesh["ring"])
        x = torch.randn(1, T, 32)
        loss = ra.token_mean(call(plan.shard(x), plan, spec, DOCS, again).float().square().mean(-1), plan)
        loss = loss + (plan.ring - 1) * (loss - loss.detach())  # the wrapper averages gradients
    loss.backward()
    return [loss.detach().numpy(), *(g.float().numpy() for g in grads(call, way))]


def llama() -> Any:
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config)


KINDS = ("Llama", "Attention", "GatedDeltaNet", "ra.attention")
CELLS = [(kind, "FSDP2", i % 2 == 1) for i, kind in enumerate(KINDS)] + [
    ("Llama", "FSDP1", False), ("Llama", "DDP", True), ("Attention", "FSDP1", True), ("GatedDeltaNet", "DDP", False),
]  # fmt: skip


def plain_world() -> None:
    """A new world group as users have it: DistributedDataParallel crashes with one that was made under DETAIL."""
    store, rank, ranks = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.set_debug_level(dist.DebugLevel.OFF)
    dist.init_process_group("gloo", store=dist.PrefixStore("plain", store), rank=rank, world_size=ranks)


def all_cells() -> list[list[Any]]:
    plain_world()
    return [stepped(*cell) for cell in CELLS]


def test_mixed_precision_over_ranks_equals_one_rank():
    pytest.importorskip("transformers")
    (expected,) = run(all_cells, 1)
    for results in run(all_cells, 2):
        for cell, mine, right in zip(CELLS, results, expected, strict=True):
            near = 1e-5 if "DDP" in cell else 2e-2  # bfloat16, summed in another order
            for a, b in zip(mine, right, strict=True):
                assert abs(a - b).max() <= near * abs(b).max(), cell
