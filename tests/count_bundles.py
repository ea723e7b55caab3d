"""How many instruction bundles a grid step of a TPU kernel takes, ours and others', by the compiler's own text.

    PYTHONPATH=. python tests/count_bundles.py ours FOLDER        (or stock, or tokamax; needs libtpu, and no TPU)

All compute tiles of 1024 x 1024 at head dim 128 in bfloat16, on v6e. The compiler writes its last schedule to FOLDER;
regions of it that no other long region lies in are the bodies of a grid step: with us one for tiles that are seen
whole, one for those on the diagonal of a causal mask, forward one for other tiles that only ends of intervals cut, and
one with the whole mask; in stock splash one for all; in tokamax's one for whole and one for masked tiles. tokamax is no
dependency: without it the command says that it is not installed.
"""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

KERNELS = ("ours", "stock")
LEAST = 1500  # bundles of a region that is a tile's
TOKENS, BLOCK, DIM = 8192, 1024, 128


def of(which: str, folder: Path) -> dict[str, list[int]]:
    """{"forward": [bundles of each kind of tile], "backward": ...} (stock: "dq", "dkv"), from a process of its own."""
    folder.mkdir(parents=True)
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, __file__, which, str(folder)], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def ours() -> tuple[Any, list[tuple[tuple[int, ...], str]]]:
    import jax.numpy as jnp

    from ringattn.kernels.attention.pallas import splash
    from ringattn.kernels.attention.pallas.blocks import VMEM, Blocks
    from ringattn.kernels.intervals import Intervals

    def both(q: Any, k: Any, v: Any, dout: Any, lse: Any, delta: Any, end: Any) -> Any:
        where = Intervals(jnp.zeros_like(end)[None], end[None])
        given: dict[str, Any] = {"scale": DIM**-0.5, "blocks": Blocks(BLOCK, BLOCK, VMEM[6, 0])}
        grads = splash.attend_backward(q, k, v, where, dout, lse, delta, **given)
        return splash.attend(q, k, v, where, **given), grads

    tensor, row = ((1, TOKENS, 1, DIM), "bfloat16"), ((1, TOKENS, 1), "float32")
    return both, [tensor] * 4 + [row] * 2 + [((TOKENS,), "int32")]


def stock() -> tuple[Any, list[tuple[tuple[int, ...], str]]]:
    import jax
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    names = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute",
             "block_q_dq", "block_kv_dq")  # fmt: skip
    attend = kernel.make_splash_mha(
        masks.MultiHeadMask([masks.CausalMask((TOKENS, TOKENS))]), head_shards=1, q_seq_shards=1,
        block_sizes=kernel.BlockSizes(**dict.fromkeys(names, BLOCK)),
    )  # fmt: skip

    def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, back = jax.vjp(attend, q, k, v)
        return out, back(dout)

    return both, [((1, TOKENS, DIM), "bfloat16")] * 4


def tokamax() -> tuple[Any, list[tuple[tuple[int, ...], str]]]:
    """Its fused backward kernel is called dkv."""
    import jax
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel as kernel
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_mask as masks

    names = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
    attend = kernel.make_splash_mha_single_device(
        masks.CausalMask((TOKENS, TOKENS)), config=kernel.SplashConfig(**dict.fromkeys(names, BLOCK))
    )

    def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, back = jax.vjp(attend, q, k, v)
        return out, back(dout)

    return both, [((1, TOKENS, DIM), "bfloat16")] * 4


def compile_for_v6e(both: Any, shapes: list[tuple[tuple[int, ...], str]]) -> None:
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from ringattn.jax.aot import topology_devices

    mesh = Mesh(np.array(topology_devices("v6e:2x4")[:1]), ("alone",))
    there = NamedSharding(mesh, PartitionSpec())
    args = [jax.ShapeDtypeStruct(shape, dtype, sharding=there) for shape, dtype in shapes]
    alone = jax.shard_map(both, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    jax.jit(alone).lower(*args).compile()


def tiles(path: Path) -> list[int]:
    """The lengths of the long regions that hold no other, in the order of the program."""
    begun: dict[str, int] = {}
    results: list[tuple[int, int]] = []
    for line in path.read_text().splitlines():
        number = re.match(r"\s*(0x[0-9a-f]+|0)\s", line)
        at = int(number.group(1), 16) if number else 0
        for word, region in re.findall(r"(Start|End) region (\d+)", line):
            if word == "Start":
                begun[region] = at
            elif region in begun and at - begun[region] + 1 >= LEAST:
                results.append((begun[region], at + 1))
    inner = [(a, b) for a, b in results if not any((a, b) != (c, d) and a <= c and d <= b for c, d in results)]
    return [b - a for a, b in sorted(inner)]


def main() -> None:
    which, folder = sys.argv[1], Path(sys.argv[2])
    if which == "tokamax" and find_spec("tokamax") is None:
        sys.exit("tokamax is not installed (pip install tokamax), so its kernel is not counted")
    os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
    os.environ["JAX_PLATFORMS"] = "cpu"
    compile_for_v6e(*{"ours": ours, "stock": stock, "tokamax": tokamax}[which]())
    counts = {}
    for path in sorted(folder.glob("*-final_bundles.txt")):
        kernel = re.search(r"-(?:splash_mha_)?(fwd|forward|backward|dq|dkv)_\w+\.\d+-\d+-final_bundles", path.name)
        if kernel:
            counts[{"fwd": "forward"}.get(kernel.group(1), kernel.group(1))] = tiles(path)
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
