"""transformers' Trainer over ranks: `class LongTrainer(hf.OverRanks, Trainer): ...`."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset


class OverRanks:
    """Has transformers' Trainer train a prepared model: `class LongTrainer(hf.OverRanks, Trainer): ...`.

    Ranks of one plan get the same examples, and those of a data axis (`prepare(..., over=(axis,))`) different ones. DDP
    and FSDP average gradients over all ranks: here they come out as sums of the ranks' shares.
    """

    args: Any
    model: Any

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        for name in ("label_smoother", "compute_loss_func", "compute_metrics"):
            if getattr(self, name, None) is not None:
                raise ValueError(f"this trainer has a {name}, which needs all logits on one rank; leave it out")
        output = model(**inputs)
        share = output.loss - output.loss.detach()  # zero, with this rank's gradient
        loss = output.loss + (self.args.world_size - 1) * share
        return (loss, output) if return_outputs else loss

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, None, None]:
        """The loss alone: no rank has all logits."""
        with torch.no_grad():
            return self.compute_loss(model, self._prepare_inputs(inputs)).detach(), None, None  # type: ignore[attr-defined]

    def get_train_dataloader(self) -> DataLoader[Any]:
        way = self.args.train_sampling_strategy
        if way not in ("random", "sequential"):
            raise ValueError(
                f"train_sampling_strategy={way!r} deals out examples by their lengths, others to each rank, and the "
                "ranks of a plan need the same: say 'random' or 'sequential'"
            )
        return self.loader(self.train_dataset, self.args.train_batch_size, way == "random")  # type: ignore[attr-defined]

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        found = self.eval_dataset if eval_dataset is None else eval_dataset  # type: ignore[attr-defined]
        found = self.eval_dataset[found] if isinstance(found, str) else found  # type: ignore[attr-defined]
        return self.loader(found, self.args.eval_batch_size)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        return self.loader(test_dataset, self.args.eval_batch_size)

    def loader(self, dataset: Any, batch: int, shuffle: bool = False) -> DataLoader[Any]:
        """Batches of the dataset: the same for all ranks of a plan, and each data rank's own."""
        over = self.model.ringattn.over
        ranks = math.prod(axis.size for axis in over)
        mine = 0
        for axis in over:
            mine = mine * axis.size + axis.rank
        said = {name: getattr(self.args, f"dataloader_{name}") for name in LOADING}
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        sampler: Any = None
        if not isinstance(dataset, IterableDataset):
            sampler = DistributedSampler(dataset, ranks, mine, shuffle, seed, said["drop_last"])
        elif ranks > 1:
            raise ValueError(
                f"{type(dataset).__name__} is an IterableDataset, which every rank reads for itself: it cannot be "
                f"dealt out to {ranks} data ranks; give a dataset with a length, or make a mesh without a data axis"
            )
        collate = self._get_collator_with_removed_columns(self.data_collator)  # type: ignore[attr-defined]
        loader: Any = DataLoader(dataset, batch, sampler=sampler, collate_fn=collate, **said)
        ordered = dataset if sampler is None else sampler
        if hasattr(ordered, "set_epoch"):  # Trainer tells the loader, or where a restart skips batches what makes them
            loader.set_epoch = loader.batch_sampler.set_epoch = ordered.set_epoch
        return loader


LOADING = (  # what Trainer's dataloader_ arguments say of a DataLoader
    "drop_last",
    "num_workers",
    "pin_memory",
    "persistent_workers",
    "prefetch_factor",
    "multiprocessing_context",
    "in_order",
)
