"""`ringattn verify model=PATH_OR_NAME`: a transformers model over ranks beside the same on one rank, layer by layer.

The truth is one rank's in float64, each packed document alone. In float32 errors over ranks may be twice those of one
rank, and EPSILON more; they are shown over this limit.
"""

import math
import re
import sys
import time
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ringattn import choosing
from ringattn.launch.rows import Row, table
from ringattn.launch.verify.oracle import over_axes
from ringattn.models.batch import IGNORED
from ringattn.models.hf import model as hf_model
from ringattn.models.hf.packed import numbered, numbering_of
from ringattn.models.hf.refusals import refuse_model

EPSILON = 5e-6
DEFAULT_TOKENS = 4096
SMALL = 0.1  # of a layer's largest gradient: errors of smaller ones are relative to this, as some are only rounding
COLUMNS = "layer", "values", "gradients", "of", "result"


class Results(NamedTuple):
    """What one pass gave: the whole sequence's values, and every gradient."""

    values: list[Tensor]  # [1, T, ...]: the embeddings, the hidden states after each layer, the logits; and the loss
    gradients: dict[str, Tensor]


def run(options: Any, say: Any, over_ranks: Any) -> int:
    """Compare, and print the table; 0 if the model is the same over ranks."""
    begun, (model, weights) = time.perf_counter(), load(options)
    documents = draw(options, model)
    what = f"{sum(x.shape[1] for x in documents)} tokens" + f", {len(documents)} documents" * (len(documents) > 1)
    say(f"{type(model).__name__}{weights}: {what}, {options}", file=sys.stderr)
    refuse_model(model, type(model).__name__)
    with Precise():
        exact = on_one_rank(precise(model), documents)
    alone = on_one_rank(deepcopy(model), documents)
    spread = over_ranks(partial(one_rank, model, documents), options.ranks)
    rows = compared(exact, alone, spread)
    bad = [row for row in rows if row["result"] == "FAIL"]
    say(f"errors over what float32 allows: over {options}\n\n{table(rows, COLUMNS)}\n")
    if first := next((row for row in bad if row["values"] > 1), None):
        say(f"they part in {first['layer']}: off by {first['values']:.2g} times what rounding allows")
    elif bad:
        say(f"values are equal; gradients part in {bad[-1]['layer']}: {bad[-1]['of']}")
    say(f"loss {spread.values[-1]:.7f} over ranks, {alone.values[-1]:.7f} on one")
    say(f"the model is {'NOT ' * bool(bad)}the same over ranks, in {time.perf_counter() - begun:.1f} s")
    return int(bool(bad))


def load(options: Any) -> tuple[Any, str]:
    """The model in float32: with the weights of its folder or of the hub, or random ones by the seed, as it says."""
    from transformers import AutoConfig, AutoModelForCausalLM

    path = Path(options.model)
    where: dict[str, Any] = {"local_files_only": path.exists()}
    try:
        config = AutoConfig.from_pretrained(options.model, **where)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ValueError(f"model={path}: no such folder, config.json or model of the hub: {reason}") from error
    if path.exists() and not [*path.glob("*.safetensors*"), *path.glob("*.bin*")]:
        torch.manual_seed(options.seed)
        return AutoModelForCausalLM.from_config(config).float().to(options.device).eval(), " with random weights"
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32, **where)
    return model.to(options.device).eval(), ""


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


def draw(options: Any, model: Any) -> list[Tensor]:
    """Documents [1, n] of random lengths and tokens, but for padding's, by the seed."""
    config = model.config.get_text_config()
    padding = config.vocab_size if config.pad_token_id is None else config.pad_token_id
    first = int(numbers(model, torch.ones(1, 1, dtype=torch.long) + (config.pad_token_id or 0)))
    most = (getattr(config, "max_position_embeddings", None) or DEFAULT_TOKENS) - first
    T = min(DEFAULT_TOKENS, most) if options.tokens is None else options.tokens
    if most < T:
        raise ValueError(f"tokens={T}: the model has positions for {most}; give tokens={most} or fewer")
    if options.docs > T:
        raise ValueError(f"docs={options.docs} do not fit in {T} tokens; use fewer docs, or more tokens")
    g = torch.Generator().manual_seed(options.seed)
    tokens = torch.randint(0, config.vocab_size - (padding < config.vocab_size), (1, T), generator=g)
    tokens += tokens >= padding
    ends = torch.randperm(T - 1, generator=g)[: max(0, options.docs - 1)] + 1
    return list(tokens.to(options.device).tensor_split(ends.sort().values, 1))


def numbers(model: Any, document: Tensor) -> Tensor:
    """The positions that the model gives to the tokens of a document."""
    by_rule = numbered(numbering_of(model), {"input_ids": document})
    return torch.arange(document.shape[1], device=document.device)[None] if by_rule is None else by_rule


def on_one_rank(model: Any, documents: list[Tensor]) -> Results:
    """The model itself on one rank: each document by itself."""
    outputs = [model(tokens, output_hidden_states=True, use_cache=False) for tokens in documents]
    values = [torch.cat(x, 1) for x in zip(*([*each.hidden_states, each.logits] for each in outputs), strict=True)]
    loss = F.cross_entropy(torch.cat([x.logits[0, :-1] for x in outputs]), torch.cat([x[0, 1:] for x in documents]))
    loss.backward()
    return Results([x.detach() for x in (*values, loss)], gradients(model))


def gradients(model: Any) -> dict[str, Tensor]:
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


def one_rank(model: Any, documents: list[Tensor], mesh: Any) -> Results:
    """One rank of a prepared copy; what it gives is of the whole sequence."""
    tokens = torch.cat(documents, 1)
    labels = torch.cat([F.pad(x[:, 1:], (1, 0), value=IGNORED) for x in documents], 1)  # a first token follows none
    plan = choosing.plan(mesh, seq_len=tokens.shape[1])
    positions = torch.cat([numbers(model, document) for document in documents], 1) if len(documents) > 1 else None
    model = hf_model.prepare(deepcopy(model), plan)
    output = model(tokens, labels=labels, position_ids=positions, output_hidden_states=True)
    output.loss.backward()
    values = [plan.unshard(x.detach()) for x in (*output.hidden_states, output.logits)]
    totals = {name: over_axes(plan, torch.sum, share) for name, share in gradients(model).items()}
    return Results([*values, output.loss.detach()], totals)


def compared(exact: Results, alone: Results, spread: Results) -> list[Row]:
    """Layer by layer, in the order of the model: the errors of the values, and the largest of the gradients."""
    layers, rows = len(exact.values) - 3, []
    names = ["embeddings", *(f"layer {i}" for i in range(layers)), "norm and head", "loss"]
    for at, (name, ours, one, true) in enumerate(zip(names, spread.values, alone.values, exact.values, strict=True)):
        truths = {n: x for n, x in exact.gradients.items() if layer_of(n, layers) == at}
        floor = SMALL * max((float(x.norm()) for x in truths.values()), default=0.0)
        errors = {n: off(spread.gradients[n], alone.gradients[n], x, floor) for n, x in truths.items()}
        worst = max(errors, key=lambda n: errors[n], default="")
        row: Row = {"layer": name, "values": off(ours, one, true), "gradients": errors.get(worst), "of": worst or None}
        row["result"] = "pass" if row["values"] <= 1 and (row["gradients"] or 0) <= 1 else "FAIL"
        rows.append(row)
    return rows


def off(spread: Tensor, alone: Tensor, truth: Tensor, floor: float = 0.0) -> float:
    """The error over ranks over what it may be."""
    size = max(float(truth.norm()), floor, 1e-30)
    error, rounding = (float((x.to(truth) - truth).norm()) / size for x in (spread, alone))
    return error / (2 * rounding + EPSILON) if error == error else math.inf


def layer_of(name: str, layers: int) -> int:
    """Of a weight: 0 is the embeddings, the last one what follows the layers."""
    number = re.search(r"\.(\d+)\.", name)
    at = int(number[1]) + 1 if number else 0 if any(word in name for word in ("embed", "wte", "wpe")) else layers + 1
    return min(at, layers + 1)
