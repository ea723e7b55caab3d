"""TRL's trainers over ranks: their models answer with log-probabilities instead of logits.

TRL's `add_fused_lm_head` gives a model's forward the argument `fused_lm_head`. In a prepared model each rank computes
the numbers of its tokens, and all ranks get those of the whole sequences, from which TRL computes its losses.
"""

from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ringattn.models.hf.generate import numbers_of_the_first
from ringattn.models.hf.targets import Wanted

# arguments of GRPOTrainer with which each rank would get answers of its own
EACH_RANK = "use_vllm", "tools", "rollout_func", "environment_factories"


def is_head(forward: Any) -> bool:
    """Whether TRL gave a model this forward, with its argument `fused_lm_head`, also within accelerate's autocast."""
    while forward is not None:
        if "fused_lm_head" in getattr(getattr(forward, "__code__", None), "co_varnames", ()):
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False


@torch.compiler.disable(recursive=False)
def log_probs(self: Any, given: dict[str, Any], asked: Wanted | None, shifted: bool, items: Any) -> Any:
    """TRL's output for the whole sequences, on every rank; its gradient is the sum of the gradients on all ranks."""
    run = self.ringattn_fused or self.local_forward
    if not is_head(run):
        raise ValueError(f"{type(self).__name__} does not take fused_lm_head: TRL did not give it its head")
    if asked is None:
        raise ValueError("fused_lm_head without labels: there is nothing to give log-probabilities of")
    output = run(**given, fused_lm_head=True, shift_labels=asked.labels)
    return of_whole(output, asked.labels, self, shifted, items)


@torch.compiler.disable
def of_whole(output: Any, mine: Tensor, model: Any, shifted: bool, items: Any) -> Any:
    outputs, whole = {}, model.ringattn_last.whole
    for name, x in output.items():
        if isinstance(x, Tensor) and x.shape == mine.shape:
            x = whole(x.int()).bool() if x.dtype == torch.bool else whole(x)
            outputs[name] = x if shifted else x[:, :-1]
    count = outputs["label_mask"].sum().clamp(min=1) if items is None else items
    return type(output)(loss=-outputs["log_probs"].sum() / count, **outputs)


class Answers:
    """GRPOTrainer over ranks: all ranks of a plan have the same prompts, answers, rewards and order of them.

    Each generates what the first one does. What TRL gathers of all ranks is that of the first rank of each plan, so
    rewards, losses, metrics and logs count each answer and each token once.
    """

    args: Any
    accelerator: Any
    plan: Any  # of OverRanks
    data_place: Any
    firsts: Any
    of_firsts: Any

    def check_answers(self) -> None:
        """A ValueError about arguments with which answers or losses would be wrong; batches are those of data ranks."""
        if not hasattr(self.args, "num_generations"):  # this trainer generates nothing
            return
        if not any(kind.__name__ == "GRPOTrainer" for kind in type(self).__mro__):
            raise ValueError(
                f"{type(self).__name__} deals out answers that it generates itself; of such trainers GRPOTrainer is "
                "supported over ranks"
            )
        args = self.args
        rows, each = args.per_device_train_batch_size * args.steps_per_generation, args.num_generations
        evaluated, of_prompt = args.eval_batch_size, args.num_generations_eval or each
        problems = {name: "each rank would get answers of its own" for name in EACH_RANK if getattr(self, name, None)}
        same_plan = "the answers to one prompt belong to the ranks of one plan"
        if rows % each:
            problems["num_generations"] = f"{each} does not divide {rows} rows a generation: {same_plan}"
        if getattr(self, "eval_dataset", None) is not None and evaluated % of_prompt:
            problems["per_device_eval_batch_size"] = f"{of_prompt} does not divide {evaluated}: {same_plan}"
        if problems:
            raise ValueError("; ".join(f"{name}: {why}" for name, why in problems.items()))
        args.generation_batch_size = size = rows * self.data_place[0]
        of_firsts = partial(OfFirsts, self.firsts.tolist(), args.world_size, size)  # TRL's sizes count every rank
        logs: dict[str, Any] = self._logs  # type: ignore[has-type]
        lasting: Any = partial(deque, maxlen=size)
        self._logs = {
            **logs, **{name: of_firsts() for name in ("images", "prompt", "completion")}, "advantages": lasting(),
            "rewards": defaultdict(lasting), "extra": defaultdict(of_firsts),
        }  # fmt: skip

    @contextmanager
    def as_data_ranks(self) -> Iterator[None]:
        """Within, the accelerator gathers from the first rank of each plan, and its processes are the data ranks."""
        whole = self.accelerator
        self.accelerator = whole if isinstance(whole, DataRanks) else DataRanks(self)
        try:
            yield
        finally:
            self.accelerator = whole

    def _prepare_inputs(self, inputs: Any) -> Any:
        if not hasattr(self.args, "num_generations"):
            return super()._prepare_inputs(inputs)  # type: ignore[misc]
        with self.as_data_ranks(), numbers_of_the_first(self.plan):  # TRL samples with them, and shuffles
            return super()._prepare_inputs(inputs)  # type: ignore[misc]

    def _calculate_rewards(self, *args: Any) -> Tensor:
        """The rewards of all data ranks' answers, as the first rank of each plan has them."""
        return self.of_firsts(super()._calculate_rewards(*args))  # type: ignore[misc]


class DataRanks:
    """accelerate's Accelerator as if the ranks of each plan were one: its processes are the data ranks."""

    dispatch_batches = False  # a stream is read by all ranks

    def __init__(self, trainer: Any):
        self.trainer, self.accelerator = trainer, trainer.accelerator
        self.num_processes, self.process_index = trainer.data_place

    def prepare(self, loader: Any) -> Any:
        return type(self.accelerator).prepare_data_loader(self, loader)

    def gather(self, x: Tensor) -> Tensor:
        rows: Tensor = self.accelerator.gather(x)
        return rows if self.accelerator.num_processes == 1 else self.trainer.of_firsts(rows)

    gather_for_metrics = gather  # of counts and sums, which a last batch of fewer rows does not shorten

    def __getattr__(self, name: str) -> Any:
        return getattr(self.accelerator, name)


class OfFirsts(deque[Any]):
    """The last rows of what all ranks add together, of which those of each plan's first rank stay."""

    def __init__(self, firsts: list[int], ranks: int, size: int):
        super().__init__(maxlen=size)
        self.firsts, self.ranks = firsts, ranks

    def extend(self, rows: Any) -> None:
        n = len(rows) // self.ranks
        super().extend(row for rank in self.firsts for row in rows[rank * n : (rank + 1) * n])
