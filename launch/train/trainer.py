"""What every rank of a training run does: set up, step, evaluate, save. Only rank 0 writes."""

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringattn import api
from ringattn.comms import lost
from ringattn.comms import mesh as meshes
from ringattn.conf.schema import Train
from ringattn.launch import bench
from ringattn.launch.processes import CLOSED
from ringattn.launch.train import data, estimate, metrics, model, parallelize, torchrun
from ringattn.launch.train.checkpoint import Checkpoints, about, load, newest, numbered
from ringattn.launch.train.torchrun import Stop
from ringattn.masks.spec import AttentionSpec, Docs
from ringattn.models.batch import IGNORED, local_batch
from ringattn.models.loss import token_mean
from ringattn.plans.plan import Plan

MIB = 2**20


@dataclass
class Job:
    """What a rank holds while it trains."""

    config: Train
    folder: Path
    device: torch.device
    plan: Plan
    axis: Any  # the data axis
    samples: data.Samples
    decoder: model.Decoder
    optimizer: torch.optim.Optimizer
    started_at: float
    step: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def a_step(self) -> int:
        """Sequences of all ranks in one step of the optimizer."""
        return self.config.batch * self.config.accumulate * self.axis.size


def work(
    config: Train, folder: str, started_at: float, should_stop: Callable[[], bool] | None = None
) -> dict[str, Any]:
    """One rank's whole run; the process group is ready. Returns the figures of the summary.

    `started_at` is when it began, for its summary; `should_stop`: another way to stop, beside SIGTERM.
    """
    patience = timedelta(seconds=config.cluster.timeout)
    stop = Stop(dist.new_group(backend="gloo", timeout=patience), should_stop)
    device = torch.device("cuda", torch.cuda.current_device()) if config.device == "cuda" else torch.device("cpu")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // torchrun.neighbours()) if device.type == "cpu" else 1)
    with lost.missing_named("preparing the training"):
        job = prepare(config, Path(folder), device, started_at)
    rank0 = dist.get_rank() == 0
    with contextlib.closing(save_config(job)) if rank0 else contextlib.nullcontext():
        try:
            stopped = train(job, stop, Checkpoints(job.folder, config.keep, dist.new_group(None, patience, "gloo")))
        except (RuntimeError, ConnectionError) as error:
            named = in_words(error, job.step)
            if named is None:
                raise
            raise named from None
    return {"stopped": stopped, "step": job.step, **job.seconds}


def train(job: Job, stop: Stop, checkpoints: Checkpoints) -> bool:
    """Train to the end of the run, or until a rank gets a request to stop; returns whether one did."""
    config, log = job.config, None
    resume(job, checkpoints)
    if dist.get_rank() == 0:
        if job.step < config.steps:
            metrics.forget_after(job.folder / "metrics.jsonl", job.step)
        log = metrics.Log(job.folder)
    with contextlib.closing(log) if log else contextlib.nullcontext():
        begun = job.step
        stopped = loop(job, checkpoints, log, stop)
        checkpoints.finish()
        if not stopped:
            evaluate(job, log)
            if config.reference and job.step > begun:
                probe_memory(job, log)
    return stopped


def in_words(error: RuntimeError | ConnectionError, step: int) -> ConnectionError | None:
    """The error if another rank is lost, with the step and that rank; axes name the rank, gloo does not."""
    if isinstance(error, ConnectionError):
        return ConnectionError(f"after step {step}: {error}")
    if not lost.of_transport(error) and not any(word in str(error) for word in CLOSED):
        return None
    return ConnectionError(f"another rank was lost after step {step}: {lost.who_is_missing(str(error))}")


def prepare(config: Train, folder: Path, device: torch.device, started_at: float) -> Job:
    """The mesh, the plan, the data, the model and its optimizer."""
    s, m = config.strategy, config.model
    samples = data.of(config)
    mesh = api.init_mesh(data=s.data, ring=s.ring or 1, ulysses=s.ulysses or 1, device_type=device.type)
    everyone = mesh._flatten("everyone") if dist.get_world_size() > 1 else mesh["data"]
    limit = timedelta(seconds=config.cluster.timeout)
    lost.set_timeout(limit)
    meshes.set_timeouts(limit, mesh, everyone)
    plan = parallelize.plan_of(config, mesh)
    decoder = parallelize.build(
        m, config.seed, device, everyone, recompute=s.recompute, precision=config.precision, compile=config.compile
    )
    o = config.optimizer
    matrices = [p for p in decoder.parameters() if p.dim() > 1]
    norms = [p for p in decoder.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": o.weight_decay}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=o.lr, betas=(o.beta1, o.beta2), fused=device.type == "cuda")
    return Job(config, folder, device, plan, meshes.axis(mesh, "data"), samples, decoder, optimizer, started_at)


def loop(job: Job, checkpoints: Checkpoints, log: metrics.Log | None, stop: Stop) -> bool:
    """Steps until the last one, or until a rank gets a request to stop; returns whether one did."""
    config, memory, stopping = job.config, metrics.Memory(job.device), False
    peak, ranks = metrics.peak_flops(job.device), dist.get_world_size()
    progress = metrics.Progress(job.step, config.steps) if log else None
    memory.reset()
    while job.step < config.steps and not stopping:
        begin = time.perf_counter()
        loss, norm = train_step(job)
        job.step += 1
        seconds = time.perf_counter() - begin
        if "first_step" not in job.seconds:
            job.seconds["first_step"] = time.time() - job.started_at
            if config.save_every:
                checkpoints.copy(job.decoder, job.optimizer)  # only so that no step waits for the memory
        if not math.isfinite(loss):
            raise ValueError(f"the loss of step {job.step} is {loss}; lower optimizer.lr={config.optimizer.lr}")
        if log and progress:
            row = log.write(
                "step", job.step, loss=loss, norm=norm, lr=job.optimizer.param_groups[0]["lr"], seconds=seconds,
                tokens_per_second=job.a_step * config.seq_len / seconds,
                mfu=estimate.step_flops(job, job.step - 1) / seconds / peak / ranks if peak else None,
                memory_mib=memory.peak() / MIB,
            )  # fmt: skip
            progress.show(row)
        checkpoints.finish(wait=False)
        stopping = stop.agreed()
        due = config.save_every and (job.step % config.save_every == 0 or job.step == config.steps)
        if config.keep and (stopping or due):
            save(job, checkpoints, log)
        if config.eval_every and job.step % config.eval_every == 0 and job.step < config.steps and not stopping:
            evaluate(job, log)
    if progress:
        progress.close()
    return job.step < config.steps


def train_step(job: Job) -> tuple[float, float]:
    """One step of the optimizer: (the mean loss over all tokens of all ranks, the gradient's norm before clipping)."""
    config = job.config
    for group in job.optimizer.param_groups:
        group["lr"] = learning_rate(config, job.step)
    total: Tensor | float = 0.0
    for micro in range(config.accumulate):
        job.decoder.set_requires_gradient_sync(micro == config.accumulate - 1)  # type: ignore[operator]
        loss = batch_loss(job, train_batch(job, micro)) / config.accumulate
        loss.backward()
        total = total + loss.detach()
    norm = nn.utils.clip_grad_norm_(job.decoder.parameters(), config.optimizer.clip)
    job.optimizer.step()
    job.optimizer.zero_grad()
    return float(total), float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def learning_rate(config: Train, step: int) -> float:
    """Linear warm-up, then half a cosine down to `final` of the highest rate."""
    o = config.optimizer
    if step < o.warmup:
        return o.lr * (step + 1) / o.warmup
    done = (step - o.warmup) / max(1, config.steps - 1 - o.warmup)
    return o.lr * (o.final + (1 - o.final) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def train_batch(job: Job, micro: int) -> list[data.Sample]:
    """This data rank's sequences of one micro-batch."""
    batch = job.config.batch
    first = job.step * job.a_step + (micro * job.axis.size + job.axis.rank) * batch
    return [job.samples.train(first + i) for i in range(batch)]


def batch_loss(job: Job, batch: list[data.Sample]) -> Tensor:
    """The mean cross entropy of the next token, over all ranks; its gradient is this rank's share.

    Documents do not see each other, and no token predicts the first one of the next document.
    """
    length, docs = job.plan.seq_len, None
    whole = torch.from_numpy(np.stack([w.tokens for w in batch])[:, : length + 1])
    inputs, labels = whole[:, :-1], whole[:, 1:]
    if job.samples.documents:
        docs = Docs.from_lengths([w.lengths(length) for w in batch])
        predicted = torch.from_numpy(np.stack([w.predicted(length) for w in batch]))
        labels = labels.masked_fill(predicted == 0, IGNORED)
    work = AttentionSpec(window=job.config.model.window)
    mine = local_batch(inputs, job.plan, labels=labels, docs=docs, deal=deals_out(job), spec=work, device=job.device)
    losses = job.decoder(mine.tokens, mine.plan, mine.docs, labels_BT=mine.labels)
    return token_mean(losses, mine.plan, mask=mine.labels != IGNORED, over=(job.axis,))


def deals_out(job: Job) -> bool:
    """Whether each batch's documents are dealt out over the ring by their work, all rows as one.

    Linear attention costs more then, so only on request, and not where it would be compiled anew for each batch.
    """
    layout, config = job.config.strategy.layout, job.config
    linear = config.model.softmax_every != 1
    wanted = layout == "balanced" or (layout == "auto" and not linear)
    return wanted and job.plan.ring > 1 and not (config.compile and linear)


@torch.no_grad()
def evaluate(job: Job, log: metrics.Log | None) -> None:
    """The mean loss over the sequences that are never trained on; every data rank does all of them."""
    if not job.samples.kept:
        return
    losses = [float(batch_loss(job, [job.samples.evaluation(i)])) for i in range(job.samples.kept)]
    job.seconds["held_out"] = sum(losses) / len(losses)
    if log:
        log.write("eval", job.step, loss=job.seconds["held_out"])


def probe_memory(job: Job, log: metrics.Log | None) -> None:
    """The memory of a forward and backward pass at an eighth, a quarter, half and all of the length.

    After the last step, so that the first one does not wait, and what is allocated only once is not counted.
    """
    memory, whole = metrics.Memory(job.device), job.plan
    for divisor in (8, 4, 2, 1):
        length = max(1, job.config.seq_len // divisor)
        job.plan = whole.for_length(length)
        memory.reset()
        batch_loss(job, [job.samples.train(0)]).backward()
        job.optimizer.zero_grad()
        if log:
            log.write("memory", -divisor, seq_len=length, memory_mib=memory.grown() / MIB)
    job.plan = whole


def save(job: Job, checkpoints: Checkpoints, log: metrics.Log | None) -> None:
    """Save a checkpoint, and log how long training waited."""
    begin = time.perf_counter()
    state = {**about(job.config, job.samples.corpus), "steps": job.config.steps}
    checkpoints.save(job.step, job.decoder, job.optimizer, state)
    if log:
        log.write("save", job.step, seconds=time.perf_counter() - begin)


def resume(job: Job, checkpoints: Checkpoints) -> None:
    """Go on where a checkpoint ended: the run's own newest, or where it has none, the one that was named."""
    named, steps = job.config.resume, job.config.steps
    there = numbered(checkpoints.folder) or ([Path(named)] if named not in (None, "auto") else [])
    path = newest(there, checkpoints.group)
    if path is None:
        return
    state = load(path, job.decoder, job.optimizer, about(job.config, job.samples.corpus))
    job.step = state["step"]
    if dist.get_rank() == 0:
        at = f"already at step {job.step} of {steps}:" if job.step >= steps else f"goes on after step {job.step} from"
        metrics.echo(f"{at} {path}")
        if job.step < steps != state["steps"]:
            metrics.echo(f"steps was {state['steps']} before: the rate now falls to its end at {steps}")


def save_config(job: Job) -> TextIO:
    """config.json: the resolved configuration, the versions, the commit, the plan.

    No other run can use the folder while the returned file is open.
    """
    about = {
        "config": dataclasses.asdict(job.config),
        "plan": str(job.plan),
        "ranks": dist.get_world_size(),
        "python": platform.python_version(),
        "launcher": torchrun.run_name(),
        **bench.stamp(),
    }
    with metrics.writing(job.folder / "config.json"):
        job.folder.mkdir(parents=True, exist_ok=True)
        file = (job.folder / "config.json").open("a")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another run is writing to {job.folder}; wait for its end, or use another run=NAME"
            ) from None
        except OSError:  # this file system knows no locks
            pass
        file.truncate(0)
        file.write(json.dumps(about, indent=1))
        file.flush()
    return file
