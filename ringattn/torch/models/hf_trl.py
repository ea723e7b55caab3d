"""TRL's trainers over ranks: their models answer with log-probabilities instead of logits.

TRL's `add_fused_lm_head` gives a model's forward the argument `fused_lm_head`. In a prepared model each rank computes
the numbers of its tokens, and all ranks get those of the whole sequences, from which TRL computes its losses.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ringattn.planning import Plan
from ringattn.torch.models.hf_dealt import joined
from ringattn.torch.models.hf_generate import numbers_of_the_first
from ringattn.torch.models.hf_packed import IGNORED

EACH_RANK = {  # arguments of GRPOTrainer with which each rank would get answers of its own
    "use_vllm": "vLLM generates for each rank: leave it out, and the prepared model generates over ranks",
    "tools": "each rank would call the tools for itself",
    "rollout_func": "each rank would call it for itself",
    "environment_factories": "each rank would have an environment of its own",
}


def is_head(forward: Any) -> bool:
    """Whether this is the forward that TRL gave a model, with its argument `fused_lm_head`."""
    code = getattr(getattr(forward, "__func__", None), "__code__", None)
    return code is not None and "fused_lm_head" in code.co_varnames


def log_probs(self: Any, plan: Plan, given: dict[str, Any], targets: Tensor | None, shifted: bool, items: Any) -> Any:
    """TRL's output for the whole sequences, on every rank; its gradient is the sum of the gradients on all ranks."""
    run = getattr(self, "ringattn_fused", self.local_forward)
    if not is_head(run):
        raise ValueError(f"{type(self).__name__} does not take fused_lm_head: TRL did not give it its head")
    if targets is None:
        raise ValueError("fused_lm_head without labels: there is nothing to give log-probabilities of")
    last = self.ringattn_last
    mine = plan.shard(targets - IGNORED, dim=1, compare=self.ringattn.compare) + IGNORED  # also what padding predicts
    output = run(**given, fused_lm_head=True, shift_labels=mine)
    found = {}
    for name, x in output.items():
        if isinstance(x, Tensor) and x.shape == mine.shape:
            x = joined(last, x.int()).bool() if x.dtype == torch.bool else joined(last, x)
            found[name] = x if shifted else x[:, :-1]
    count = found["label_mask"].sum().clamp(min=1) if items is None else items
    return type(output)(loss=-found["log_probs"].sum() / count, **found)


class Answers:
    """GRPOTrainer over ranks: all ranks of a plan have the same prompts, answers, rewards and order of them.

    Each generates what the first one does. TRL gathers rewards of all ranks, where each answer is then met once for
    every rank of its plan: the means over groups of answers, and their deviations, are those of one rank.
    """

    args: Any
    accelerator: Any
    plan: Any  # of OverRanks
    data_place: Any

    @property
    def answers(self) -> bool:
        """Whether this trainer generates what it learns from."""
        return hasattr(self.args, "num_generations")

    def check_answers(self) -> None:
        """A ValueError about arguments with which answers or losses would be wrong; batches are those of data ranks."""
        if not self.answers:
            return
        if not any(one.__name__ == "GRPOTrainer" for one in type(self).__mro__):
            raise ValueError(
                f"{type(self).__name__} deals out answers that it generates itself; of such trainers GRPOTrainer is "
                "supported over ranks"
            )
        for name, why in EACH_RANK.items():
            if getattr(self, name, None):
                raise ValueError(f"{name}: {why}")
        args = self.args
        if args.scale_rewards == "batch" or args.multi_objective_aggregation != "sum_then_normalize":
            raise ValueError(
                f"scale_rewards={args.scale_rewards!r}, multi_objective_aggregation="
                f"{args.multi_objective_aggregation!r}: the deviation over a whole batch counts each answer once for "
                "every rank; use scale_rewards='group' or 'none', and 'sum_then_normalize'"
            )
        if args.top_entropy_quantile < 1:
            raise ValueError(
                f"top_entropy_quantile={args.top_entropy_quantile}: the quantile counts each token once for every "
                "rank; leave it out"
            )
        rows = args.per_device_train_batch_size * args.steps_per_generation
        if rows % args.num_generations:
            raise ValueError(
                f"num_generations={args.num_generations} does not divide {rows} rows, per_device_train_batch_size="
                f"{args.per_device_train_batch_size} x steps_per_generation={args.steps_per_generation}: the answers "
                "to one prompt belong to the ranks of one plan"
            )
        args.generation_batch_size = rows * self.data_place[0]

    def _prepare_inputs(self, inputs: Any) -> Any:
        if not self.answers:
            return super()._prepare_inputs(inputs)  # type: ignore[misc]
        with numbers_of_the_first(self.plan):  # with which TRL samples, and shuffles what it sampled
            return super()._prepare_inputs(inputs)  # type: ignore[misc]

    def _calculate_rewards(self, *args: Any) -> Tensor:
        """The rewards of all ranks' answers: all ranks of a plan get those of its first rank."""
        rewards: Tensor = super()._calculate_rewards(*args)  # type: ignore[misc]
        first = self.plan.ring_axis.rank == 0 and self.plan.ulysses_axis.rank == 0
        place = torch.tensor([[self.data_place[1], first]], device=rewards.device)
        of, leads = self.accelerator.gather(place).unbind(1)
        source = (of[:, None] == of[leads.bool()]).int().argmax(1)  # each rank's data rank, among the first ones
        return rewards.unflatten(0, (len(of), -1))[leads.bool()][source].flatten(0, 1)

    def prompts(self) -> DataLoader[Any]:
        """Batches of prompts, each as often as answers are sampled, the same on every rank."""
        args, (ranks, _) = self.args, self.data_place
        if ranks > 1 or not hasattr(self.train_dataset, "__getitem__"):  # type: ignore[attr-defined]
            raise ValueError(
                "prompts for several data ranks, or of an IterableDataset, are dealt out by accelerate: give "
                "parallelism_config=ParallelismConfig(cp_size=N) instead of a prepared model"
            )
        return DataLoader(
            self.train_dataset,  # type: ignore[attr-defined]
            args.per_device_train_batch_size * args.steps_per_generation,
            sampler=self._get_train_sampler(),  # type: ignore[attr-defined]
            collate_fn=self.data_collator,  # type: ignore[attr-defined]
        )
