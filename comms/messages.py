"""Small values between ranks, as JSON, which is safe to decode: unlike pickle it runs no code."""

import json
from typing import Any

import torch
import torch.distributed as dist

SIMPLE = bool, int, float, str


def plain(value: Any) -> Any:
    """The value as it arrives: None, bools, numbers, strings, lists (tuples become lists), dicts with string keys."""
    if value is None or isinstance(value, SIMPLE):
        return value
    if isinstance(value, (list, tuple)):
        return [each if isinstance(each, SIMPLE) else plain(each) for each in value]
    if isinstance(value, dict) and all([isinstance(key, str) for key in value]):
        return {key: each if isinstance(each, SIMPLE) else plain(each) for key, each in value.items()}
    raise TypeError(
        "ranks exchange None, bools, numbers, strings, lists and dicts with string keys, but got "
        f"{type(value).__name__} ({value!r:.80})"
    )


def encode(value: Any) -> bytes:
    return json.dumps(plain(value)).encode()


def decode(data: bytes, rank: int) -> Any:
    """The value that this rank encoded."""
    try:
        return json.loads(data)
    except ValueError:
        raise ValueError(
            f"rank {rank} sent {len(data)} bytes that are not JSON ({data[:40]!r}); use the same version of ringattn "
            "on all ranks, and make the same calls in the same order"
        ) from None


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The small values of all ranks, in group order. Lengths travel first, then all values padded to the longest."""
    # from the host, unless the group has only NCCL
    over_host = "gloo" in dist.get_backend_config(group) or "nccl" not in dist.get_backend(group)
    device = torch.device("cpu") if over_host else torch.device("cuda", torch.cuda.current_device())
    size = dist.get_world_size(group)
    mine = torch.frombuffer(bytearray(encode(value)), dtype=torch.uint8).to(device)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([mine.numel()], device=device), group)
    longest = max(map(int, lengths))
    everyone = [mine.new_zeros(longest) for _ in range(size)]
    dist.all_gather(everyone, torch.cat([mine, mine.new_zeros(longest - mine.numel())]), group)
    return [
        decode(x[: int(n)].cpu().numpy().tobytes(), r) for r, (x, n) in enumerate(zip(everyone, lengths, strict=True))
    ]
