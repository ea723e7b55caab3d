"""A launch of a kind that was seen before runs what Triton would have run: random calls of every kernel, both ways.

The compiler and the interpreter cannot share a process, so the test runs this file as a script. There nothing is
compiled or launched: a kernel stands for what Triton would compile, by Triton's own key.
"""

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest

HERE = Path(__file__).resolve().parent
CALLS = 500


def test_a_kind_seen_before_is_what_triton_would_take():
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = f"{HERE.parent}{os.pathsep}{HERE}"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    launches, again, kernels = map(int, done.stdout.split())
    assert launches > 2 * CALLS and again > CALLS / 8 and kernels == 15


def test_kinds_that_two_threads_make_at_once_have_numbers_of_their_own():
    """Otherwise one would run the kernel that the other compiled."""
    pytest.importorskip("triton")
    import torch

    from ringattn.kernels.triton import Launch

    def kind_of(key) -> int:
        return Launch(None, (1, 1, 1), torch.device("cpu"), (), key).kind

    class Overtaken:
        def __hash__(self):  # which is when the number of this kind is looked up
            self.other = kind_of("of another thread")
            return 0

    key = Overtaken()
    assert kind_of(key) != key.other


class Compiled:
    """What Triton would compile; launched, it says so."""

    used: ClassVar[list["Compiled"]] = []
    again = 0

    function = packed_metadata = None

    def __init__(self, name: str):
        self.name = name

    def __getitem__(self, grid):
        """Loads the kernel; nobody launches it so, since no profiler listens."""

    def run(self, *args):
        assert all(isinstance(n, int) for n in args[:4]), "three numbers of programs and a stream"
        Compiled.again += 1
        self.used.append(self)


def stand_in_for_triton():
    import triton
    from compile_triton import TARGETS, stand_in
    from triton.runtime.jit import JITFunction

    from ringattn.kernels.attention.triton import blocks
    from ringattn.kernels.linear.triton import gated

    triton.runtime.driver.set_active(stand_in(TARGETS["sm90"][0]))
    blocks.architecture = gated.architecture = lambda _device: "sm90"
    run = JITFunction.run

    def compile_nothing(self, key, signature, device, *rest):
        kernel = self.device_caches[device][0][key] = Compiled(self.fn.__name__)
        return kernel

    def launch_nothing(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        Compiled.used.append(kernel)
        return kernel

    JITFunction._do_compile, JITFunction.run = compile_nothing, launch_nothing


def some_call(draw: random.Random):
    """One of the functions that launch, on a shape of its own."""
    import torch

    from ringattn.kernels.attention.triton import KERNEL, append, decode, forward, gradients, merge, row_delta
    from ringattn.kernels.intervals import Intervals
    from ringattn.kernels.linear.maps import Inputs
    from ringattn.kernels.linear.triton import gated
    from ringattn.kernels.partial import Partial

    dtype = draw.choice([torch.bfloat16, torch.float16, torch.float32])
    B, T, S = draw.choice([1, 2]), draw.choice([1, 16, 17, 64, 100]), draw.choice([1, 16, 50, 128])
    G, R, D, V = draw.choice([1, 2]), draw.choice([1, 3, 4]), draw.choice([32, 40, 64, 128]), draw.choice([32, 64, 128])
    H, room = G * R, draw.choice([0, 0, 1, 8])

    def tensor(*sizes, dtype=dtype):
        """Now and then a part of a larger one: other strides, and addresses that are no multiples of 16."""
        if room and len(sizes) > 1:
            return torch.empty(*sizes[:-1], sizes[-1] + room, dtype=dtype)[..., room:]
        return torch.empty(*sizes, dtype=dtype)

    where = Intervals(*torch.zeros(2, draw.choice([1, B]), T, dtype=torch.int32))
    q, k, v, dout = tensor(B, T, H, D), tensor(B, S, G, D), tensor(B, S, G, V), tensor(B, T, H, V)
    row = torch.empty(B, H, T).transpose(1, 2)
    scale, softcap = draw.choice([(0.1, None), (1, None), (0.5, 30.0)])
    carry = draw.choice([None, Partial(torch.empty(B, T, H, V), row)])
    K, W = draw.choice([32, 64, 128, 256]), draw.choice([32, 64, 512])
    ql, kl, vl, dl = (tensor(B, T, H, n) for n in (K, K, W, W))
    g = draw.choice([None, tensor(B, T, H), tensor(B, T, H, K)])
    begin = draw.choice([None, torch.zeros(draw.choice([1, B]), T, dtype=torch.int32)])
    x = Inputs(ql, kl, vl, g, None, begin, 0.1)
    stack = tensor(5, B, T, H, V, dtype=torch.float32), torch.empty(5, B, T, H)

    def linear_forward():
        gated.read_out(x, gated.scan_states(x), state)

    def linear_backward():
        gated.gradients(x, gated.scan_states(x), state, gated.scan_gradients(x, dl), dl, None)

    state = draw.choice([None, torch.empty(B, H, K, W)])
    lengths, kept = torch.zeros(B, dtype=torch.int64), (torch.empty(B, 640, G, n, dtype=dtype) for n in (D, V))
    into_k, into_v = kept
    few = Intervals(*torch.zeros(2, B, min(T, 4), dtype=torch.int32))
    parts = [(tensor(B, T, H, D, dtype=draw.choice([dtype, torch.float32])), (0, T), (0, H)) for _ in range(R)]
    dlse, sinks, splits, window = (draw.choice([None, x]) for x in (row, torch.empty(H), 4, draw.choice([9, 2**40])))
    return draw.choice([
        lambda: forward.attend(q, k, v, where, scale=scale, softcap=softcap, carry=carry),
        lambda: KERNEL.backward((q, k, v), where, KERNEL.prepare(dout, row, row, None), scale=scale, softcap=softcap),
        lambda: row_delta(dout, dout, dlse),
        lambda: gradients.add_parts(torch.empty(B, T, H, D), parts),
        linear_forward,
        linear_backward,
        lambda: merge.merge_stack(Partial(*stack), carry, sinks),
        lambda: merge.merge_stack(Partial(stack[0], stack[1].double()), carry),
        lambda: decode.decode_splits(q[:, :4], into_k, into_v, few, scale, softcap, splits),
        lambda: append.append(k[:, :3], v[:, :3], into_k, into_v, lengths, (0, 64, 256, 64), window=window),
    ])  # fmt: skip


def main() -> None:
    stand_in_for_triton()
    from ringattn.kernels.triton import COMPILED

    launches, names = 0, set()
    for seed in range(CALLS):
        call = some_call(random.Random(seed))
        Compiled.used = seen = []
        call()
        kept = dict(COMPILED)
        COMPILED.clear()  # so that Triton is asked
        Compiled.used = asked = []
        call()
        COMPILED.update(kept)
        assert [*map(id, seen)] == [*map(id, asked)], (seed, [x.name for x in seen], [x.name for x in asked])
        launches, names = launches + len(seen), names | {x.name for x in seen}
    print(launches, Compiled.again, len(names))


if __name__ == "__main__":
    main()
