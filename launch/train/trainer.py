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

from ringattn.comms import lost
from ringattn.comms import mesh as meshes
from ringattn.conf.schema import Train
from ringattn.launch import bench
from ringattn.launch.processes import CLOSED
from ringattn.launch.train import data, estimate, metrics, model, parallelize, torchrun
from ringattn.launch.train.checkpoint import Checkpoints, about, load, newest, numbered
from ringattn.launch.train.torchrun import Stop
from ringattn.masks.spec import AttentionSpec, Docs
from ringattn.models.batch import IGNORED, following, local_batch
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
    checkpoints: Checkpoints
    started_at: float
    rank0: bool = field(default_factory=lambda: dist.get_rank() == 0)  # which alone writes
    step: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def log(self, kind: str, step: int, **figures: Any) -> dict[str, Any]:
        """Write a row of metrics.jsonl, on rank 0."""
        row = {"kind": kind, "step": step, **figures}
        if self.rank0:
            metrics.append(self.folder / "metrics.jsonl", row)
        return row


def work(
    config: Train, folder: str, started_at: float, should_stop: Callable[[], bool] | None = None
) -> dict[str, Any]:
    """One rank's whole run; the process group is ready. Returns the figures of the summary.

    `started_at` is when it began, for its summary; `should_stop`: another way to stop, beside SIGTERM.
    """
    patience = timedelta(seconds=config.cluster.timeout)
    stop = Stop(dist.new_group(backend="gloo", timeout=patience), should_stop)
    device = torch.device("cuda", torch.cuda.current_device()) if config.device == "cuda" else torch.device("cpu")
    neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))  # on this machine
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // neighbours) if device.type == "cpu" else 1)
    with lost.missing_named("preparing the training"):
        job = prepare(config, Path(folder), device, started_at)
    try:
        resume(job)
        with save_config(job) if job.rank0 else contextlib.nullcontext():
            stopped = train(job, stop)
    except (RuntimeError, ConnectionError) as error:
        if named := in_words(error, job.step):
            raise named from None
        raise
    return {"stopped": stopped, "step": job.step, **job.seconds}


def train(job: Job, stop: Stop) -> bool:
    """Train to the end of the run, or until a rank gets a request to stop; returns whether one did."""
    begun = job.step
    if job.rank0 and begun < job.config.steps:
        metrics.forget_after(job.folder / "metrics.jsonl", begun)
    stopped = loop(job, stop)
    job.checkpoints.finish()
    if not stopped:
        evaluate(job)
        if job.config.reference and job.step > begun:
            probe_memory(job)
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
    s, samples = config.strategy, data.of(config)
    mesh = meshes.init_mesh(data=s.data, ring=s.ring or 1, ulysses=s.ulysses or 1, device_type=device.type)
    everyone = mesh._flatten("everyone") if dist.get_world_size() > 1 else mesh["data"]
    limit = timedelta(seconds=config.cluster.timeout)
    lost.set_timeout(limit)
    meshes.set_timeouts(limit, mesh, everyone)
    plan = parallelize.plan_of(config, mesh)
    decoder = parallelize.build(config, device, everyone)
    o = config.optimizer
    matrices = [p for p in decoder.parameters() if p.dim() > 1]
    norms = [p for p in decoder.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": o.weight_decay}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=o.lr, betas=(o.beta1, o.beta2), fused=device.type == "cuda")
    axis, checkpoints = meshes.axis(mesh, "data"), Checkpoints(folder, config.keep, dist.new_group(None, limit, "gloo"))
    return Job(config, folder, device, plan, axis, samples, decoder, optimizer, checkpoints, started_at)


def loop(job: Job, stop: Stop) -> bool:
    """Steps until the last one, or until a rank gets a request to stop; returns whether one did."""
    config, memory, stopping = job.config, metrics.Memory(job.device), False
    peak = (metrics.peak_flops(job.device) or 0.0) * dist.get_world_size()
    progress = metrics.Progress(job.step, config.steps)
    memory.reset()
    while job.step < config.steps and not stopping:
        begin = time.perf_counter()
        loss, norm = train_step(job)
        job.step += 1
        seconds = time.perf_counter() - begin
        job.seconds.setdefault("first_step", time.time() - job.started_at)
        if not math.isfinite(loss):
            raise ValueError(f"the loss of step {job.step} is {loss}; lower optimizer.lr={config.optimizer.lr}")
        if job.rank0:
            mfu = estimate.step_flops(config, job.decoder, job.samples, job.step - 1) / seconds / peak if peak else None
            row = job.log(
                "step", job.step, loss=loss, norm=norm, lr=job.optimizer.param_groups[0]["lr"], seconds=seconds,
                tokens_per_second=config.a_step * config.seq_len / seconds, memory_mib=memory.peak() / MIB, mfu=mfu,
            )  # fmt: skip
            progress.show(row)
        job.checkpoints.finish(wait=False)
        stopping = stop.agreed()
        due = config.save_every and (job.step % config.save_every == 0 or job.step == config.steps)
        if config.keep and (stopping or due):
            begin = time.perf_counter()
            job.checkpoints.save(job.step, job.decoder, job.optimizer, about(config, job.samples.corpus))
            job.log("save", job.step, seconds=time.perf_counter() - begin)
        if config.eval_every and job.step % config.eval_every == 0 and job.step < config.steps and not stopping:
            evaluate(job)
    if job.rank0:
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
        first = job.step * config.a_step + (micro * job.axis.size + job.axis.rank) * config.batch
        batch = [job.samples.train(first + i) for i in range(config.batch)]
        loss = batch_loss(job, batch) / config.accumulate
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


def batch_loss(job: Job, batch: list[data.Sample]) -> Tensor:
    """The mean cross entropy of the next token, over all ranks; its gradient is this rank's share.

    Documents do not see each other, and no token predicts the first one of the next document.
    """
    length, docs, all_docs = job.plan.seq_len, None, None
    whole = torch.from_numpy(np.stack([sample.tokens for sample in batch])[:, : length + 1])
    if job.samples.documents:
        docs, all_docs = (Docs.from_lengths([sample.lengths(n) for sample in batch]) for n in (length, length + 1))
    labels = following(whole, all_docs)[0]
    work = AttentionSpec(window=job.config.model.window)
    # documents are dealt out over the ring by their work, but with linear attention, which costs more then, on request
    layout, linear = job.config.strategy.layout, job.config.model.softmax_every != 1
    deal = job.plan.ring > 1 and (layout == "balanced" or (layout == "auto" and not linear))
    local = local_batch(
        whole[:, :length], job.plan, labels=labels[:, :length], docs=docs, deal=deal, spec=work, device=job.device
    )
    losses = job.decoder(local.tokens, local.plan, local.docs, labels_BT=local.labels)
    return token_mean(losses, local.plan, mask=local.labels != IGNORED, over=(job.axis,))


@torch.no_grad()
def evaluate(job: Job) -> None:
    """The mean loss over the sequences that are never trained on; every data rank does all of them."""
    if job.samples.kept:
        losses = [float(batch_loss(job, [job.samples.evaluation(i)])) for i in range(job.samples.kept)]
        job.seconds["held_out"] = sum(losses) / len(losses)
        job.log("eval", job.step, loss=job.seconds["held_out"])


def probe_memory(job: Job) -> None:
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
        job.log("memory", -divisor, seq_len=length, memory_mib=memory.grown() / MIB)
    job.plan = whole


def resume(job: Job) -> None:
    """Go on where a checkpoint ended: the run's own newest, or where it has none, the one that was named."""
    named, checkpoints = job.config.resume, job.checkpoints
    paths = numbered(checkpoints.folder) or ([Path(named)] if named not in (None, "auto") else [])
    path = newest(paths, checkpoints.group)
    if path is None:
        return
    job.step = load(path, job.decoder, job.optimizer, about(job.config, job.samples.corpus))
    if job.rank0 and job.step < job.config.steps:
        metrics.echo(f"goes on after step {job.step} from {path}")


def save_config(job: Job) -> TextIO:
    """config.json: the resolved configuration, the versions, the commit, the plan.

    No other run can use the folder while the returned file is open. The system unlocks it when this process ends.
    """
    about = {
        "config": dataclasses.asdict(job.config),
        "plan": str(job.plan),
        "ranks": dist.get_world_size(),
        "python": platform.python_version(),
        "launcher": torchrun.run_name(),
        **bench.stamp(),
    }
    path = job.folder / "config.json"
    with metrics.writing(path):
        job.folder.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        why = f"another run is writing to {job.folder}; wait for its end, or use another run=NAME"
        raise BlockingIOError(why) from None  # another attempt may succeed
    except OSError:  # this file system knows no locks
        pass
    with metrics.writing(path):
        file.truncate(0)
        file.write(json.dumps(about, indent=1))
        file.flush()
    return file
