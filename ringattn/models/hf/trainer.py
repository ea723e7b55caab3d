"""accelerate and transformers' Trainer over ranks.

accelerator = hf.over_ranks(Accelerator(...)); class LongTrainer(hf.OverRanks, Trainer): ...
"""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ringattn.comms import mesh as meshes
from ringattn.models.batch import IGNORED
from ringattn.models.hf import model as hf_model
from ringattn.models.hf import trl as hf_trl
from ringattn.models.hf.choice import Choice
from ringattn.models.hf.forward import keep_outermost
from ringattn.models.hf.targets import scaled, targets_of
from ringattn.plans.plan import Plan

A = TypeVar("A")
DATA = ("dp_replicate", "dp_shard")  # accelerate's names of the axes of a mesh
CONTEXT = "cp"


def over_ranks(
    accelerator: A, *, seq_len: int | None = None, ulysses: int | None = None, strategy: str = "auto",
    layout: str = "auto", offload: bool = False,
) -> A:  # fmt: skip
    """The same accelerator, whose `prepare` also calls `hf.prepare`, over its context-parallel ranks.

    Make it with ParallelismConfig(cp_size=N). Models take whole sequences, their loss is the mean over all ranks of the
    mesh, and gradients are right after DDP or FSDP averages them. Batches are whole also inside of
    `maybe_context_parallel`, which does nothing. The plan is chosen by predicted time, for `seq_len` tokens or the
    length of the first batch, as far as `ulysses` (how many of the ranks are Ulysses ranks), `strategy` and `layout`
    leave a choice; they are those of `ringattn.plan`. `offload` is that of `hf.prepare`.
    """
    size = getattr(getattr(accelerator, "parallelism_config", None), "cp_size", 1)
    if size < 2:
        raise ValueError(
            f"this {type(accelerator).__name__} has no context parallelism; make it with "
            "Accelerator(parallelism_config=ParallelismConfig(cp_size=N), fsdp_plugin=...). accelerate refuses that on "
            "CPUs and without FSDP2; there, leave it out, and call "
            "hf.prepare(model, ringattn.init_mesh(sequence=N), averaged=True)"
        )
    if ulysses is not None and (not isinstance(ulysses, int) or ulysses < 1 or size % ulysses):
        raise ValueError(f"ulysses={ulysses!r}: choose a whole number that divides cp_size={size}")

    def prepare_models(*args: Any) -> tuple[Any, ...]:
        """What `Accelerator.prepare` calls before it wraps models in FSDP or DDP."""
        for arg in args:
            if isinstance(arg, nn.Module):
                prepare_for(accelerator, arg, ulysses, offload, seq_len=seq_len, strategy=strategy, layout=layout)
        return args

    accelerator._prepare_cp = prepare_models  # type: ignore[attr-defined]
    accelerator.maybe_context_parallel = lambda *a, **b: nullcontext()  # type: ignore[attr-defined]
    return accelerator


def prepare_for(
    accelerator: Any, model: nn.Module, ulysses: int | None = None, offload: bool = False, **choices: Any
) -> None:
    """`hf.prepare` over the ranks of the accelerator's mesh, unless the model is prepared for as many."""
    mesh = accelerator.torch_device_mesh
    size = meshes.axis_size(mesh, CONTEXT)
    spread = getattr(hf_model.inner(model), "ringattn", None)
    if spread is not None:
        if spread.size != size or not spread.averaged:
            raise ValueError(
                f"the model was prepared for {spread.size} ranks, averaged={spread.averaged}, and the "
                f"accelerator has cp_size={size} and averages gradients; leave hf.prepare to the accelerator"
            )
        return
    over = [meshes.axis(mesh, name) for name in DATA if meshes.axis_size(mesh, name) > 1]
    axes: Any = {"sequence": CONTEXT}
    if ulysses is not None:
        mesh, axes = meshes.split(mesh, CONTEXT, {"ring": size // ulysses, "ulysses": ulysses}), None
    hf_model.prepare(model, Choice(mesh, axes, **choices), over=over, averaged=True, offload=offload)


class OverRanks(hf_trl.Answers):
    """Has transformers' Trainer train over ranks: `class LongTrainer(hf.OverRanks, Trainer): ...`.

    Give it a model and TrainingArguments(parallelism_config=ParallelismConfig(cp_size=N)), or a prepared model. On
    CPUs, for which accelerate has no ParallelismConfig, each rank has all weights, as with DDP. Ranks of one plan get
    the same examples, and those of a data axis (`prepare(..., over=("data",))`) different ones. Gradients,
    which DDP and FSDP average over all ranks, come out as sums of the ranks' shares.
    """

    model: Any
    gather_function: Any
    model_accepts_loss_kwargs: bool

    def __init__(self, *args: Any, **kwargs: Any):
        self.mesh: Any = None  # where accelerate has none: on CPUs
        self.packing: dict[str, Any] = {}  # arguments of TRL that its constructor refuses, to be put back after it
        super().__init__(*args, **kwargs)
        vars(self.args).update(self.packing)
        reference = getattr(self, "ref_model", None)
        if reference is not None:
            self.prepare(reference)
        for model in (self.model, reference):
            keep_outermost(hf_model.inner(model))
        self.check_answers()

    def create_accelerator_and_postprocess(self) -> None:
        config: Any = getattr(self.args, "parallelism_config", None)
        if getattr(config, "cp_size", 1) > 1 and self.args.distributed_state.distributed_type == "MULTI_CPU":
            data = config.dp_replicate_size * config.dp_shard_size
            self.mesh = meshes.init_mesh(data=data, sequence=config.cp_size, device_type="cpu")
            self.args.parallelism_config = None  # which accelerate refuses there
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        if self.by_accelerate:
            over_ranks(self.accelerator)
            names = "packing", "eval_packing"  # refused with torch's context parallelism, which drops the mask
            self.packing = {name: vars(self.args)[name] for name in names if name in vars(self.args)}
            vars(self.args).update(dict.fromkeys(self.packing, False))

    @property
    def by_accelerate(self) -> bool:
        """Whether accelerate's mesh defines which ranks share a sequence, so that accelerate deals out the examples."""
        return getattr(getattr(self.accelerator, "parallelism_config", None), "cp_size", 1) > 1

    @property
    def spread(self) -> Any:
        """Where the model's sequences lie; it is prepared now if accelerate has not done so."""
        model = hf_model.inner(self.model)
        if not hasattr(model, "ringattn"):
            self.prepare(model)
        return model.ringattn

    def prepare(self, model: Any) -> None:
        """Prepare the model for accelerate's mesh, or a reference model as the trained one is prepared."""
        if self.by_accelerate:
            prepare_for(self.accelerator, model)
        elif self.mesh is not None and not hasattr(hf_model.inner(model), "ringattn"):
            hf_model.prepare(model, self.mesh, over=("data",))
        elif not hasattr(self.model, "ringattn"):
            raise ValueError(
                "the model is not prepared: give the trainer hf.prepare(model, plan), or "
                "parallelism_config=ParallelismConfig(cp_size=N)"
            )
        elif not hasattr(hf_model.inner(model), "ringattn"):
            hf_model.prepare(model, self.spread.source, over=self.spread.over)

    @property
    def plan(self) -> Plan:
        return self.spread.first(hf_model.inner(self.model))

    @property
    def by_trl(self) -> bool:
        """Whether TRL computes the losses, from log-probabilities of whole sequences, which each rank has."""
        bare = hf_model.inner(self.model)
        return any(hf_trl.is_head(vars(bare).get(name)) for name in ("forward", "local_forward", "ringattn_fused"))

    def _prepare_context_parallel_inputs(self, model: Any, inputs: Any) -> Any:
        return nullcontext, inputs

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        for name in ("label_smoother", "compute_loss_func"):
            if getattr(self, name, None) is not None:
                raise ValueError(f"this trainer has a {name}, which needs all logits on one rank; leave it out")
        if self.by_trl:
            given = {"return_outputs": return_outputs, "num_items_in_batch": num_items_in_batch}
            with self.as_data_ranks():
                return super().compute_loss(model, inputs, **given)  # type: ignore[misc]
        items = num_items_in_batch
        if items is not None and not self.model_accepts_loss_kwargs:  # each batch's and data rank's own mean counts
            items = count_of([inputs], over=()) * self.data_place[0]
        output = model(**inputs, num_items_in_batch=items)
        if output.get("loss") is None:
            raise ValueError(f"there are no labels among {', '.join(inputs)}, so there is no loss to train with")
        loss = output.loss if self.spread.averaged else scaled(output.loss, self.args.world_size)
        return (loss, output) if return_outputs else loss

    def get_total_train_batch_size(self, args: Any) -> int:
        size: int = super().get_total_train_batch_size(args)  # type: ignore[misc]
        return size if self.by_accelerate else size // self.spread.size

    def _track_num_input_tokens(self, inputs: Any) -> None:
        with self.as_data_ranks():
            super()._track_num_input_tokens(inputs)  # type: ignore[misc]

    def _get_num_items_in_batch(self, batch_samples: Any, device: Any) -> Tensor | None:
        """How many labels count, of all batches that are accumulated and of all data ranks."""
        if not all(hasattr(batch, "get") for batch in batch_samples):
            return None  # prompts, of which TRL makes batches later
        each_its_own = self.by_trl and not self.args.average_tokens_across_devices  # TRL scales its loss only then
        return count_of(batch_samples, () if each_its_own else self.spread.over, device)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor | None, Any, Any]:
        given = model, inputs, prediction_loss_only, ignore_keys
        loss, outputs, labels = super().prediction_step(*given)  # type: ignore[misc]
        return loss, None if outputs is None else self.whole(outputs), labels

    def whole(self, x: Any) -> Any:
        if isinstance(x, list | tuple):
            return tuple(map(self.whole, x))
        model = hf_model.inner(self.model)
        if not isinstance(x, Tensor) or x.dim() < 2 or x.shape[1] != model.ringattn_last.plan.local_len:
            shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"the model also gives {shape}, which is not one row a token: name it in ignore_keys")
        return model.ringattn_last.whole(x)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        counted = Counted(dataloader, self.data_place, self.args.eval_batch_size)
        self.gather_function = lambda x: self.of_data_ranks(x, counted.real)
        return super().evaluation_loop(counted, *args, **kwargs)  # type: ignore[misc]

    def of_data_ranks(self, x: Any, real: int | None) -> Any:
        """The rows of all data ranks in the order of the dataset, without those that only fill up the last batch."""
        if isinstance(x, list | tuple):
            return tuple(self.of_data_ranks(each, real) for each in x)
        return self.of_firsts(self.accelerator.gather(x))[:real]

    def of_firsts(self, x: Tensor) -> Tensor:
        """Of the rows of all ranks, those of the first rank of each plan."""
        return x.unflatten(0, (self.args.world_size, -1))[self.firsts].flatten(0, 1)

    @cached_property
    def firsts(self) -> Tensor:
        """The first rank of each plan, in the order of the data ranks."""
        from accelerate.utils import gather

        later = self.plan.ring_axis.rank + self.plan.ulysses_axis.rank > 0
        place = torch.tensor([[self.data_place[1], later]], device=self.accelerator.device)
        places, others = gather(place).unbind(1)
        ranks = (others == 0).nonzero()[:, 0]
        return ranks[places[ranks].argsort()]

    @property
    def data_place(self) -> tuple[int, int]:
        """How many data ranks there are, and which of them this is."""
        over, mine = self.spread.over, 0
        for axis in over:
            mine = mine * axis.size + axis.rank
        return math.prod(axis.size for axis in over), mine

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader[Any]:
        """Batches of this data rank, dealt out by accelerate: the same for all ranks of a plan."""
        if self.by_accelerate:
            return super()._get_dataloader(*args, **kwargs)  # type: ignore[misc]
        strategy = self.args.train_sampling_strategy
        if strategy not in ("random", "sequential"):
            raise ValueError(
                f"train_sampling_strategy={strategy!r} deals out examples by their lengths, others to each rank, and "
                "the ranks of a plan need the same: use 'random' or 'sequential'"
            )
        with self.as_data_ranks():
            loader: Any = super()._get_dataloader(*args, **kwargs)  # type: ignore[misc]
        loader.worker_init_fn = None  # which seeds by the rank
        return loader


def count_of(batches: Any, over: Any, device: Any = None) -> Any:
    """How many labels count, of these batches and of the ranks of these axes; None if there are none."""
    names = "labels", "shift_labels", "attention_mask", "docs"
    targets = [targets_of(*(batch.get(name) for name in names)) for batch in batches]
    counts = [(x != IGNORED).sum() for every in targets for x in every]
    if not all(targets) or not counts:
        return None
    count = torch.stack(counts).sum(0, keepdim=True).to(device=device)
    for axis in over:
        count = axis.all_gather(count).wait().sum(0, keepdim=True)
    return count[0]


class Counted:
    """A loader whose last batch may repeat examples, so that all data ranks have equally many: these do not count.

    An example may be several rows (a pair of answers), or several may be one (packed).
    """

    def __init__(self, loader: Any, place: tuple[int, int], batch_size: int):
        self.loader, self.place, self.batch_size = loader, place, batch_size
        self.real: int | None = None  # how many rows of the batch, of all data ranks, count; None: all of them

    def __iter__(self) -> Iterator[Any]:
        dataset, before = getattr(self.loader, "dataset", None), 0
        total = len(dataset) if hasattr(dataset, "__len__") else None  # type: ignore[arg-type]
        for batch in self.loader:
            if total is not None and hasattr(batch, "values"):  # not prompts, of which TRL makes batches later
                n, (ranks, mine) = next(len(x) for x in batch.values() if isinstance(x, Tensor)), self.place
                at = torch.arange(n) + mine * self.batch_size
                for name in [name for name in ("labels", "shift_labels") if batch.get(name) is not None]:
                    repeated = (before + at >= total)[:, None].to(batch[name].device)
                    batch[name] = batch[name].long().masked_fill(repeated, IGNORED)
                full = total - before >= self.batch_size * ranks
                self.real, before = None if full else total - before, before + self.batch_size * ranks
            yield batch

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)
