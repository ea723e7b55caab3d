"""A second call is short to read: which files its tensors pass, from the public function to the kernel and back."""

from collections.abc import Callable
from inspect import CO_VARARGS
from pathlib import Path
from sys import setprofile

import torch

import ringattn as ra
from ringattn.comms.local import run

ROOT = f"{Path(ra.__file__).parent}/"  # kernels and comms are linked into it
PROPERTIES = "/kernels/arrays.py"  # a tensor's dtype or framework is read there, and nothing else happens


def walked(call: Callable[[], object], *given: torch.Tensor) -> list[str]:
    """The files of the project whose functions get one of these tensors (or its memory), one after the other."""
    memory, files = {x.untyped_storage().data_ptr() for x in given}, []

    def passes(x: object, depth: int = 0) -> bool:
        if isinstance(x, torch.Tensor):
            return x.untyped_storage().data_ptr() in memory
        return depth < 3 and isinstance(x, tuple | list) and any(passes(each, depth + 1) for each in x)

    def note(frame, event, _):
        code, path = frame.f_code, frame.f_code.co_filename
        if event != "call" or not path.startswith(ROOT) or path.endswith(PROPERTIES):
            return
        count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & CO_VARARGS)
        if any(passes(frame.f_locals.get(name)) for name in code.co_varnames[:count]) and files[-1:] != [path]:
            files.append(path)

    setprofile(note)
    try:
        call()
    finally:
        setprofile(None)
    return [path.removeprefix(ROOT) for path in files]


def test_decode_passes_few_files():
    def one_rank(mesh):
        sizes = {"batch": 1, "max_len": 64, "kv_heads": 2, "head_dim": 16, "dtype": torch.float32}
        cache = ra.KVCache.allocate(ra.plan(mesh, seq_len=16), **sizes)
        q, k, v = (torch.randn(1, 1, heads, 16) for heads in (4, 2, 2))
        cache.append(torch.randn(1, 16, 2, 16), torch.randn(1, 16, 2, 16))
        ra.decode(q, k, v, cache)
        return walked(lambda: ra.decode(q, k, v, cache), q)

    files = run(one_rank, ring=2)[0]
    assert len(set(files)) <= 6 and len(files) <= 9, files  # 8 changes of file; comms is the seventh room


def test_attention_passes_few_files():
    def one_rank(mesh):
        plan = ra.plan(mesh, seq_len=128, layout="zigzag")
        return both_passes(lambda *tensors: ra.attention(*tensors, plan))

    forward, backward = run(one_rank, ring=2)[0]
    assert len(set(forward)) <= 7 and len(set(backward)) <= 7, (forward, backward)  # comms beside them


def test_linear_attention_passes_few_files():
    def one_rank(mesh):
        plan = ra.plan(mesh, seq_len=128, layout="contiguous")
        g = -torch.rand(1, 64, 2, 16)
        return both_passes(lambda *tensors: ra.linear_attention(*tensors, g, plan))

    forward, backward = run(one_rank, ring=2)[0]
    assert len(set(forward)) <= 5 and len(set(backward)) <= 4, (forward, backward)  # states.py, maps.py, comms beside


def both_passes(attend: Callable[..., torch.Tensor]) -> tuple[list[str], list[str]]:
    """The files of a second call's forward, and of its backward."""
    q, k, v = leaves = [torch.randn(1, 64, 2, 16, requires_grad=True) for _ in "qkv"]
    attend(q, k, v).sum().backward()
    out: list[torch.Tensor] = []
    forward = walked(lambda: out.append(attend(q, k, v)), q)
    dout = torch.randn_like(out[0])
    return forward, walked(lambda: torch.autograd.grad(out[0], leaves, dout), q, dout)
