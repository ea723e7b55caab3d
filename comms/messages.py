"""Small values between ranks, as JSON: reading what arrived runs nothing that it holds."""

import json
from typing import Any

import torch
import torch.distributed as dist


def plain(value: Any) -> Any:
    """The value as its reader gets it: None, bools, numbers, strings, lists (tuples become lists), dicts by strings."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: plain(one) for key, one in value.items()}
    raise TypeError(
        f"ranks exchange None, bools, numbers, strings, lists and dicts with string keys, not {type(value).__name__} "
        f"({value!r:.80})"
    )


def encode(value: Any) -> bytes:
    return json.dumps(plain(value)).encode()


def decode(data: bytes, rank: int) -> Any:
    """What that rank has encoded."""
    try:
        return json.loads(data)
    except ValueError:
        raise ValueError(
            f"rank {rank} sent {len(data)} bytes that are not JSON ({data[:40]!r}); all ranks must make the same calls "
            "with the same version of ringattn"
        ) from None


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's small value, in the order of the group: lengths first, then all values padded to the longest."""
    device, size = host_or_gpu(group), dist.get_world_size(group)
    mine = torch.frombuffer(bytearray(encode(value)), dtype=torch.uint8).to(device)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([mine.numel()], device=device), group)
    longest = max(map(int, lengths))
    everyone = [mine.new_zeros(longest) for _ in range(size)]
    dist.all_gather(everyone, torch.cat([mine, mine.new_zeros(longest - mine.numel())]), group)
    return [
        decode(x[: int(n)].cpu().numpy().tobytes(), r) for r, (x, n) in enumerate(zip(everyone, lengths, strict=True))
    ]


def host_or_gpu(group: dist.ProcessGroup | None) -> torch.device:
    """Where a group's small values travel: from the host, unless it has NCCL alone."""
    over_host = "gloo" in dist.get_backend_config(group) or "nccl" not in dist.get_backend(group)
    return torch.device("cpu") if over_host else torch.device("cuda", torch.cuda.current_device())
