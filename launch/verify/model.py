"""`ringattn verify model=PATH_OR_NAME`: a transformers model over ranks beside the same on one rank, layer by layer.

Logits, loss, hidden states and every gradient, in float32. The truth is one rank's in float64, and what float32 may be
off by is what one rank in float32 is off by: over ranks it may be twice that, and EPSILON more. Packed documents are
each run alone on one rank.
"""

import os
import re
import sys
import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ringattn import choosing
from ringattn.comms import local
from ringattn.comms.mesh import init_mesh
from ringattn.launch import processes
from ringattn.launch.verify import oracle
from ringattn.models.batch import IGNORED
from ringattn.models.hf import model as hf_model
from ringattn.models.hf.positions import numbered, rule_of
from ringattn.models.hf.refusals import refuse_model

EPSILON = 5e-6
LONGEST = 4096  # tokens by default
SMALL = 0.1  # of a layer's largest gradient: errors of smaller ones are relative to this, as some are only rounding


@dataclass(frozen=True)
class Batch:
    """Random tokens [1, T], and the lengths of the documents that they are packed from, if they are."""

    tokens: Tensor
    lengths: list[int]

    @property
    def labels(self) -> Tensor:
        """The tokens; the first one of a document follows no token."""
        labels = self.tokens.clone()
        starts = torch.tensor([0, *self.lengths[:-1]]).cumsum(0)
        labels[:, starts[1:]] = IGNORED
        return labels

    def positions(self, model: Any) -> Tensor | None:
        """What the model itself would number the tokens of each document by, if there are several."""
        if len(self.lengths) == 1:
            return None
        documents = self.tokens.split(self.lengths, 1)
        own = [numbered(rule_of(model), tokens, None) for tokens in documents]
        counted = [torch.arange(n, device=self.tokens.device)[None] for n in self.lengths]
        return torch.cat([a if b is None else b for a, b in zip(counted, own, strict=True)], 1)


class Results(NamedTuple):
    """What one pass gave: the whole sequence's values, and every gradient."""

    loss: float
    values: list[Tensor]  # [1, T, ...]: the embeddings, the hidden states after each layer, the logits
    gradients: dict[str, Tensor]


class Off(NamedTuple):
    """How far something is off over ranks, and on one rank in the same dtype."""

    name: str
    ranks: float
    own: float

    @property
    def allowed(self) -> float:
        return 2 * self.own + EPSILON

    @property
    def good(self) -> bool:
        return self.ranks <= self.allowed


class Row(NamedTuple):
    """One layer: its values, and its gradients, of which the worst comes first."""

    values: Off
    gradients: list[Off]

    @property
    def good(self) -> bool:
        return all(off.good for off in (self.values, *self.gradients))

    @property
    def worst(self) -> str:
        return self.gradients[0].name if self.gradients else "-"


def check(options: Any) -> None:
    """A ValueError for what a model cannot be verified with, before anything is loaded."""
    default = type(options)()
    for name in ("cases", "random"):
        if getattr(options, name) != getattr(default, name):
            raise ValueError(f"model={options.model} is compared as a whole; leave {name} out")
    if options.kernel != "auto" or options.dtype not in (None, "float32"):
        raise ValueError("model=: it is compared in float32, by the kernel that auto takes; leave kernel and dtype out")
    if "RANK" in os.environ:
        raise ValueError(f"model={options.model} starts its own ranks; run it without torchrun")
    config_of(options.model)


def is_here(name: str) -> bool:
    """Whether it names a folder that `save_pretrained` wrote, or a config."""
    return (Path(name) / "config.json").is_file() or Path(name).is_file()


def config_of(name: str) -> Any:
    """A ValueError if it is neither here nor a model of the hub, or the hub cannot be reached and has saved nothing."""
    from transformers import AutoConfig

    if is_here(name):
        return AutoConfig.from_pretrained(name, local_files_only=True)
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ValueError(
            f"model={name}: no such config here, nor a folder with a config.json, as save_pretrained writes it; and as "
            f"a name of the hub transformers cannot load it: {reason}"
        ) from error


def run(options: Any) -> int:
    """Compare, and print the table; 0 if the model is the same over ranks."""
    begun = time.perf_counter()
    model = load(options)
    batch = draw(options, model)
    where = f"{options.count} ranks ({options.backend}), {options.device}, float32"
    packed = f"{len(batch.lengths)} documents, " * (len(batch.lengths) > 1)
    weights = "" if has_weights(options.model) else " with random weights"
    print(f"{type(model).__name__}{weights}: {batch.tokens.shape[1]} tokens, {packed}{where}", file=sys.stderr)
    refuse_model(model, type(model).__name__)
    with Precise():
        exact = on_one_rank(precise(model), batch)
    own = on_one_rank(deepcopy(model), batch)
    spread = over_ranks(options, model, batch)
    rows, loss = compared(exact, own, spread), Off("loss", *(abs(x.loss - exact.loss) for x in (spread, own)))
    losses = f"loss {spread.loss:.7f} over ranks, {own.loss:.7f} on one"
    print("\n".join(report(rows, loss, losses, where, time.perf_counter() - begun)))
    return 0 if loss.good and all(row.good for row in rows) else 1


def load(options: Any) -> Any:
    """The model in float32: with the weights of its folder or of the hub, or random ones by the seed."""
    from transformers import AutoModelForCausalLM

    name = options.model
    if has_weights(name):
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, local_files_only=is_here(name))
    else:
        torch.manual_seed(options.seed)
        model = AutoModelForCausalLM.from_config(config_of(name)).float()
    return model.to(options.device).eval()


def has_weights(name: str) -> bool:
    if not is_here(name):
        return True
    return any(file for kind in ("*.safetensors*", "*.bin*") for file in Path(name).glob(kind))


class Precise(TorchFunctionMode):
    """Everything in float64, also what a model asks to be in float32: norms, angles and linear layers."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function = Tensor.double if function is Tensor.float else function
        return function(*map(wide, args), **{name: wide(x) for name, x in (kwargs or {}).items()})


def wide(x: Any) -> Any:
    return torch.float64 if x is torch.float32 else x


def precise(model: Any) -> Any:
    """A copy in float64, whose experts are plain products: there are no grouped ones in float64."""
    copy = deepcopy(model).double()
    copy.set_experts_implementation("eager")
    return copy


def draw(options: Any, model: Any) -> Batch:
    """Random tokens but for padding's, and documents of random lengths, by the seed."""
    config = model.config.get_text_config()
    first = numbered(rule_of(model), torch.ones(1, 1, dtype=torch.long) + (config.pad_token_id or 0), None)
    most = (getattr(config, "max_position_embeddings", None) or LONGEST) - (0 if first is None else int(first))
    T = min(LONGEST, most) if options.tokens is None else options.tokens
    if most < T:
        raise ValueError(f"tokens={T}: the model has positions for {most}; give tokens={most} or fewer")
    if options.docs > T:
        raise ValueError(f"docs={options.docs} do not fit in {T} tokens; use fewer docs, or more tokens")
    g = torch.Generator().manual_seed(options.seed)
    padding = config.vocab_size if config.pad_token_id is None else config.pad_token_id
    tokens = torch.randint(0, config.vocab_size - (padding < config.vocab_size), (1, T), generator=g)
    tokens += tokens >= padding
    ends = sorted((torch.randperm(T - 1, generator=g)[: max(0, options.docs - 1)] + 1).tolist())
    return Batch(tokens.to(options.device), [b - a for a, b in zip([0, *ends], [*ends, T], strict=True)])


def on_one_rank(model: Any, batch: Batch) -> Results:
    """The model itself on one rank: each document by itself."""
    documents = []
    for tokens in batch.tokens.split(batch.lengths, 1):
        output = model(tokens, output_hidden_states=True, use_cache=False)
        documents.append([*output.hidden_states, output.logits])
    values = [torch.cat(x, 1) for x in zip(*documents, strict=True)]
    labels = batch.labels[0, 1:]
    loss = F.cross_entropy(values[-1][0, :-1], labels, ignore_index=IGNORED)
    loss.backward()
    return Results(loss.item(), [x.detach() for x in values], gradients(model))


def gradients(model: Any) -> dict[str, Tensor]:
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


def over_ranks(options: Any, model: Any, batch: Batch) -> Results:
    if options.backend == "threads":
        models = [deepcopy(model) for _ in range(options.count)]
        return local.run(
            lambda mesh: one_rank(mesh, models[mesh.rank], batch), device=options.device, ring=options.count,
            timeout=options.timeout,
        )[0]  # fmt: skip
    return processes.run(process, options.count, options, backend=options.backend, timeout=options.timeout)[0]


def process(options: Any) -> Results | None:
    """One rank of processes: what the first one found."""
    model, mesh = load(options), init_mesh(ring=options.count, device_type=options.device)
    result = one_rank(mesh, model, draw(options, model))
    return result if mesh.get_rank() == 0 else None


def one_rank(mesh: Any, model: Any, batch: Batch) -> Results:
    """One rank of the prepared model; what it gives is of the whole sequence."""
    plan = choosing.plan(mesh, seq_len=batch.tokens.shape[1])
    output = hf_model.prepare(model, plan)(
        batch.tokens, labels=batch.labels, position_ids=batch.positions(model), output_hidden_states=True
    )
    output.loss.backward()
    values = [plan.unshard(x.detach()) for x in (*output.hidden_states, output.logits)]
    shares = {name: plan.ring_axis.all_gather(x[None]).wait().sum(0) for name, x in gradients(model).items()}
    return Results(output.loss.item(), values, shares)


def compared(exact: Results, own: Results, spread: Results) -> list[Row]:
    """Every value and gradient, layer by layer, in the order of the model."""
    layers = len(exact.values) - 2
    names, rows = ["embeddings", *(f"layer {i}" for i in range(layers)), "norm and head"], []
    for at, (name, truth, *values) in enumerate(zip(names, exact.values, spread.values, own.values, strict=True)):
        gradients = {n: x for n, x in exact.gradients.items() if row_of(n, layers) == at}
        floor = SMALL * max(map(oracle.size, gradients.values()), default=0.0)
        offs = [Off(n, *(error(of.gradients[n], x, floor) for of in (spread, own))) for n, x in gradients.items()]
        offs.sort(key=lambda off: off.ranks / off.allowed, reverse=True)
        rows.append(Row(Off(name, *(error(x, truth) for x in values)), offs))
    return rows


def row_of(name: str, layers: int) -> int:
    """Of a weight: 0 is the embeddings, the last one what follows the layers."""
    number = re.search(r"\.(\d+)\.", name)
    at = int(number[1]) + 1 if number else 0 if any(word in name for word in ("embed", "wte", "wpe")) else layers + 1
    return min(at, layers + 1)


def error(result: Tensor, truth: Tensor, floor: float = 0.0) -> float:
    return oracle.error(result.to(truth.device), truth, max(oracle.size(truth), floor))


def report(rows: list[Row], loss: Off, losses: str, where: str, seconds: float) -> Iterator[str]:
    """The table, the loss, and the verdict: the first layer where they part, if they do."""
    yield f"relative errors against one rank in float64: over {where}, and of one rank in float32"
    yield ""
    width, wide = max(len(row.values.name) for row in rows), 2 + max(len(row.worst) for row in rows)
    yield f"{'':<{width}}{'values':>11}{'one rank':>11}{'gradients':>11}{'one rank':>11}  {'of':<{wide}}result"
    for row in rows:
        cells = "".join(f"{off.ranks:>11.1e}{off.own:>11.1e}" for off in (row.values, *row.gradients[:1]))
        cells += "" if row.gradients else f"{'-':>11}" * 2
        yield f"{row.values.name:<{width}}{cells}  {row.worst:<{wide}}{'pass' if row.good else 'FAIL'}"
    yield ""
    yield f"{losses}: {'pass' if loss.good else 'FAIL'} (off by {loss.ranks:.1e})"
    bad = [row for row in rows if not row.good]
    if first := next((row.values for row in bad if not row.values.good), None):
        yield f"they part in {first.name}: off by {first.ranks:.1e}, and rounding allows {first.allowed:.1e}"
    elif bad:
        yield f"values are equal; gradients part in {bad[-1].values.name}: {bad[-1].worst}"
    yield f"the model is {'the same' if loss.good and not bad else 'NOT the same'} over ranks, in {seconds:.1f} s"
