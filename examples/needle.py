"""A needle in a haystack of 100,000 tokens, trained on this machine's CPU over 4 processes: minutes.

torchrun --nproc-per-node=4 examples/needle.py [tokens=100000] [steps=250] [picture=needle.svg]

The haystack is random words. In it hide a few needles: a name, and right after it its answer. Questions ask for the
answers by name. One layer of attention must find the right token among all, wherever it is: each token's key is made
from the token before it, so a question's query can meet the key of the answer (with the same weights, since equal names
must meet). No rank holds the whole haystack: the questions attend to the keys of all ranks (cross attention).

The haystack starts at 128 tokens and doubles whenever most questions are answered. Then needles at each depth are
asked for.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ringattn as ra

WORDS, NAMES, ANSWERS = 200, 64, 64  # the vocabulary: words of the haystack, then names, then answers
ASKED = 16  # needles in a haystack, all asked for
FULL = ra.AttentionSpec(causal=False)


class Finder(nn.Module):
    """One layer of attention, from the questions to the haystack."""

    def __init__(self, width: int = 64, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(WORDS + NAMES + ANSWERS, width)
        self.name, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.head = nn.Linear(width, ANSWERS)

    def forward(self, questions: Tensor, tokens: Tensor, before: Tensor, plan: ra.Plan) -> Tensor:
        """Logits of the answers to this rank's questions; `before` is the token before each of this rank's tokens."""
        q = self.name(self.embed(questions)).unflatten(-1, (self.heads, -1))
        k = self.name(self.embed(before)).unflatten(-1, (self.heads, -1))
        v = self.value(self.embed(tokens)).unflatten(-1, (self.heads, -1))
        return self.head(self.out(ra.attention(q, k, v, plan, spec=FULL).flatten(2)))


def haystack(tokens: int, random: torch.Generator, depth: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """A haystack [1, tokens], the names that are asked for [1, ASKED], and their answers; needles lie anywhere, or all
    near one depth (0: the start, 1: the end)."""
    hay = torch.randint(0, WORDS, (1, tokens), generator=random)
    names = torch.randperm(NAMES, generator=random)[:ASKED] + WORDS
    answers = torch.randint(0, ANSWERS, (ASKED,), generator=random)
    room = tokens // 2 if depth is None else 4 * ASKED  # places of two tokens each
    first = 0 if depth is None else round(depth * (tokens // 2 - room))
    at = 2 * (first + torch.randperm(room, generator=random)[:ASKED])
    hay[0, at], hay[0, at + 1] = names, answers + WORDS + NAMES
    return hay, names[None], answers[None]


def logits_of(model: Finder, mesh: object, hay: Tensor, names: Tensor) -> tuple[Tensor, ra.Plan]:
    """The logits of this rank's questions; every rank passes the same haystack and keeps its part."""
    plan = ra.plan(mesh, seq_len=ASKED, key_len=hay.shape[1], layout="contiguous", spec=FULL)
    tokens = plan.keys.shard(hay)
    before = plan.keys.roll(tokens, 1, fill=0)
    return model(plan.shard(names), tokens, before, plan), plan


def train(model: Finder, mesh: object, tokens: int, steps: int, add_up: Callable[[Tensor], None]) -> list[float]:
    """The loss of every step. `add_up` sums a gradient over ranks, in place: each rank has its part of it."""
    random, losses, length = torch.Generator().manual_seed(0), list[float](), min(tokens, 128)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        hay, names, answers = haystack(length, random)
        logits, plan = logits_of(model, mesh, hay, names)
        loss = ra.cross_entropy(logits, plan.shard(answers), plan)
        optimizer.zero_grad()
        loss.backward()
        for weight in model.parameters():
            add_up(weight.grad)
        optimizer.step()
        losses.append(loss.item())
        if losses[-1] < 0.5:
            length = min(tokens, 2 * length)
    return losses


@torch.no_grad()
def recall(model: Finder, mesh: object, tokens: int, depth: float) -> float:
    """The share of questions that are answered rightly, with needles at one depth of a haystack of so many tokens."""
    hay, names, answers = haystack(tokens, torch.Generator().manual_seed(1), depth)
    logits, plan = logits_of(model, mesh, hay, names)
    return (plan.unshard(logits).argmax(-1) == answers).float().mean().item()


def draw(losses: list[float], lengths: list[int], depths: list[float], table: list[list[float]], path: Path) -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from ringattn.launch.commands.plot import STYLE, save

    with rc_context(STYLE):  # readable on light and on dark pages
        figure = Figure(figsize=(9, 3.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        left.plot(losses, color="#4477aa")
        left.set(title="loss while the haystack grows", xlabel="step", ylabel="nats per question")
        image = right.imshow(table, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        right.set(title="needles found", xlabel="tokens", ylabel="depth of the needles")
        right.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths])
        right.set_yticks(range(len(depths)), [f"{d:.0%}" for d in depths])
        figure.colorbar(image, ax=right)
        save(figure, path)


def main(tokens: str = "100000", steps: str = "250", picture: str = "needle.svg") -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same weights on every rank
    model, mesh = Finder(), ra.init_mesh(ring=dist.get_world_size(), device_type="cpu")
    losses = train(model, mesh, int(tokens), int(steps), dist.all_reduce)
    lengths = sorted({max(1000, int(tokens) // part) for part in (16, 4, 1)})
    depths = [0.0, 0.25, 0.5, 0.75, 1.0]
    table = [[recall(model, mesh, length, depth) for length in lengths] for depth in depths]
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.2f} to {losses[-1]:.2f}; needles found in {lengths[-1]:,} tokens, by depth: ", end="")
        print(", ".join(f"{depth:.0%}: {row[-1]:.0%}" for depth, row in zip(depths, table, strict=True)))
        draw(losses, lengths, depths, table, Path(picture))
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit(f"ranks are started by torchrun, as here:\n\n{__doc__}")
    main(**dict(word.split("=") for word in sys.argv[1:]))
