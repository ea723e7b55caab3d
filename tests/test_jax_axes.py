"""Meshes as they are: axes with the user's names, without devices, and what cuts the batch and the heads."""

import re
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import ringattn as ra  # noqa: E402
import ringattn.jax  # noqa: E402
from ringattn.comms.tpu_slice import ring_order  # noqa: E402
from tests.test_jax_programs import close, expect  # noqa: E402

NAMES = ("data", "fsdp", "context", "tensor_seq", "tensor", "expert")
AXES = {"ring": "context", "ulysses": "tensor_seq", "batch": ("data", "fsdp"), "heads": "tensor"}


def arrays(batch=4, tokens=32):
    return [jax.random.normal(jax.random.key(i), (batch, tokens, h, 8)) for i, h in enumerate((4, 2, 2))]


def mesh_of(*sizes, kind=AxisType.Auto):
    return jax.make_mesh(sizes, NAMES, axis_types=(kind,) * len(NAMES))


@pytest.mark.parametrize(
    ("sizes", "kernel", "kind"),
    [
        pytest.param((1, 2, 2, 1, 2, 1), "splash", AxisType.Auto, marks=pytest.mark.slow),
        ((1, 1, 2, 2, 1, 2), "reference", AxisType.Auto),  # the experts hold copies
        ((2, 1, 2, 1, 2, 1), "reference", AxisType.Explicit),
    ],
    ids=str,
)
def test_named_axes_under_set_mesh_gather_nothing(sizes, kernel, kind):
    """A mesh with all of MaxText's axes; the plan is made of the mesh without devices."""
    mesh = mesh_of(*sizes, kind=kind)
    plan = ra.plan(
        mesh.abstract_mesh, seq_len=32, heads=(4, 2), head_dim=8, strategy="ring", layout="contiguous", kernel=kernel,
        axes=AXES,
    )  # fmt: skip
    there = NamedSharding(mesh, P(("data", "fsdp"), ("context", "tensor_seq"), "tensor"))
    q, k, v = arrays()
    placed = jax.device_put((q, k, v), there)

    def grads(attention):
        return jax.jit(jax.value_and_grad(lambda *x: (attention(*x) ** 2).sum(), argnums=(0, 1, 2)))

    with jax.set_mesh(mesh):
        compiled = grads(lambda *x: ra.attention(*x, plan)).lower(*placed).compile()
        found = jax.device_get(compiled(*placed))
        if kernel != "splash":  # interpreted, it is slow
            close(jax.device_get(ra.attention(*map(plan.shard, placed), plan)), ra.attention(q, k, v))
    assert "all-gather" not in compiled.as_text()
    close(found, grads(ra.attention)(q, k, v))


def test_a_batch_that_the_axes_do_not_divide_is_not_cut():
    mesh = mesh_of(1, 2, 2, 1, 2, 1)
    plan = ra.plan(mesh, seq_len=30, strategy="ring", layout="zigzag", axes=AXES)
    x = arrays(batch=1, tokens=30)
    close(jax.jit(lambda *x: plan.unshard(ra.attention(*map(plan.shard, x), plan)))(*x), ra.attention(*x))
    assert plan.shard(arrays(tokens=30)[0]).sharding.spec[0] == ("data", "fsdp")


def test_one_axis_is_factored_and_one_role_may_have_several():
    mesh = jax.make_mesh((2, 4), ("data", "cp"), axis_types=(AxisType.Auto,) * 2)
    x = arrays()
    for axes in ({"sequence": "cp"}, {"ring": ("cp", "data"), "batch": ()}, {"ulysses": "cp"}):
        plan = ra.plan(mesh, seq_len=32, heads=(4, 2), head_dim=8, axes=axes)
        assert plan.ring * plan.ulysses == (8 if "ring" in axes else 4)
        close(plan.unshard(ra.attention(*map(plan.shard, x), plan)), ra.attention(*x))


def test_wrong_axes_are_refused():
    mesh = jax.make_mesh((2, 4), ("data", "cp"), axis_types=(AxisType.Auto,) * 2)
    for axes, words in (
        ({"rings": "cp"}, ["'rings'", "ring, ulysses, sequence, batch, heads"]),
        ({"ring": "context"}, ["('data', 'cp')", "['context']"]),
        ({"ring": "cp", "batch": "cp"}, ["one role"]),
        ({"sequence": "cp", "ring": "data"}, ["'sequence' stands for"]),
        ({"sequence": ("data", "cp")}, ["takes one axis"]),
        ({"batch": "data"}, ["axes={'ring': ...}"]),
    ):
        expect(words, lambda axes=axes: ra.plan(mesh, seq_len=32, axes=axes))
    expect(["axes=", "mesh"], lambda: ra.plan(seq_len=32, axes={"ring": "cp"}))
    both = ra.plan(mesh, seq_len=32, axes={"ulysses": "cp", "heads": "data"})
    expect(["data=2 and ulysses=4", "4 of q"], lambda: ra.attention(*arrays(), both))


def test_an_explicit_mesh_of_one_device():
    """Under jit and grad, also without a plan: types with names of axes must agree, even those of one device."""
    mesh = jax.make_mesh((1, 1), ("data", "cp"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:1])
    x, plan = arrays(), ra.plan(mesh, seq_len=32, axes={"ring": "cp"})
    placed = jax.device_put(x, NamedSharding(mesh, P("data", "cp")))

    def grads(*x, plan=None):
        return jax.value_and_grad(lambda *x: (ra.attention(*x, plan) ** 2).sum(), argnums=(0, 1, 2))(*x)

    for given in (jax.jit(grads), partial(grads, plan=plan)):
        with jax.set_mesh(mesh):
            found = given(*placed)
        close(found, grads(*x))


def test_the_name_that_remat_saves_results_by_is_the_plans_choice():
    mesh = ringattn.jax.init_mesh(ring=8)
    x = arrays(batch=1)
    counts = []
    for saved_as, policy in ((None, "ringattn_out"), ("context", "context"), ("context", "other")):
        names = [policy, "ringattn_lse"] if saved_as is None else [policy]
        plan = ra.plan(mesh, seq_len=32, strategy="ring", layout="contiguous", saved_as=saved_as)
        keep = jax.checkpoint_policies.save_only_these_names(*names)
        layer = jax.checkpoint(lambda *x, plan=plan: ra.attention(*x, plan), policy=keep)
        loss = jax.grad(lambda *x, layer=layer: (layer(*x) ** 2).sum(), argnums=(0, 1, 2))
        counts.append(len(re.findall("collective_permute", jax.jit(loss).lower(*x).as_text())))
    assert counts[0] == counts[1] < counts[2]
    expect(["saved_as='context'", "JAX"], lambda: ra.plan(seq_len=32, saved_as="context"))


@dataclass(frozen=True)
class Chip:
    coords: tuple[int, int, int]
    slice_index: int = 0
    platform: str = "tpu"


@pytest.mark.parametrize(
    ("width", "height", "ring", "ulysses", "longest"),
    [(4, 8, 32, 1, 1), (3, 4, 12, 1, 1), (4, 8, 16, 2, 2), (4, 8, 8, 1, 1), (16, 16, 64, 4, 2), (1, 8, 8, 1, 2)],
)
def test_each_hop_of_a_ring_on_a_flat_tpu_slice_goes_along_a_row_or_a_column(width, height, ring, ulysses, longest):
    """Any other pair of devices makes a permute synchronous on v5e slices of 32 chips and more."""
    places = list(product(range(3, 3 + width), range(height)))
    devices = [Chip((*place, 0)) for place in places]
    order = ring_order(devices, ring, ulysses)
    assert order.shape == (width * height // (ring * ulysses), ring, ulysses)
    assert sorted(tuple(device.coords[:2]) for device in order.flat) == places
    coords = np.array([device.coords for device in order.flat]).reshape(*order.shape, 3)
    hops = abs(coords - np.roll(coords, 1, axis=1))
    assert ((hops > 0).sum(axis=-1) == 1).all() and hops.max() == longest
    mesh = ringattn.jax.init_mesh(data=len(order), ring=ring, ulysses=ulysses, devices=devices)
    assert (mesh.devices == order).all()


def test_other_devices_keep_jaxs_order():
    flat = [Chip((x, y, 0)) for x in range(2) for y in range(4)]
    two = [Chip((x, y, 0), slice_index=x) for x in range(2) for y in range(4)]
    deep = [Chip((x, y, z)) for x in range(2) for y in range(2) for z in range(2)]
    odd = [Chip((x, y, 0)) for x in range(3) for y in range(3)]
    assert ring_order(flat, 8, 1) is not None
    for devices, ring in ((two, 8), (deep, 8), (odd, 9), (flat[:7], 7), (flat * 2, 16), (flat, 2)):
        assert ring_order(devices, ring, len(devices) // ring) is None
    assert ring_order(jax.devices(), 8, 1) is None
