"""What wrappers of modules (FSDP, DDP, accelerate, checkpointing) do with what layers receive: nothing."""

import copy
import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.utils import _apply_to_tensors, _recursive_to, _to_kwargs
from torch.nn.parallel.distributed import _find_tensors
from torch.utils import _pytree

import ringattn as ra
from ringattn.masks.values import Value
from ringattn.models.hf.attention import Asked, Call
from ringattn.models.hf.choice import Spread
from ringattn.models.hf.generate import RanksCache
from ringattn.plans import machine
from ringattn.plans.sizes import Transport

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
