"""TRL's trainers over ranks: losses and metrics are those of its own trainer on one rank (make test-with WHAT=trl)."""

import json
import os
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest
import torch

import ringattn as ra
from ringattn.comms.local import run
from ringattn.models import hf
from ringattn.models.hf import model as hf_model
from ringattn.models.hf.forward import keep_outermost

trl = pytest.importorskip("trl", reason="trl is not installed (pip install '.[trl]')")
from datasets import Dataset  # noqa: E402

ROOT = Path(__file__).parent.parent
SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "vocab_size": 64, "num_hidden_layers": 2, "sliding_window": 7, "num_local_experts": 2, "num_experts_per_tok": 1,
    "attention_dropout": 0.0, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "max_position_embeddings": 256,
}  # fmt: skip


def build(kind: str):
    import transformers

    torch.manual_seed(0)
    shape = {name: x for name, x in SHAPE.items() if kind != "Llama" or name != "sliding_window"}
    config = getattr(transformers, f"{kind}Config")(**shape)  # caches cut keys by a window that Llama does not have
    config._attn_implementation = "eager"
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"w{i}" for i in range(4, 64))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


def words(n: int, seed: int) -> str:
    return " ".join(f"w{i}" for i in torch.randint(4, 64, (n,), generator=torch.Generator().manual_seed(seed)).tolist())


def texts() -> dict:
    return {"text": [words(10 + 7 * (i % 5), i) for i in range(32)]}


def pairs() -> dict:
    def column(n, first):
        return [" " + words(n + i % 7, first + i) for i in range(16)]

    return {"prompt": column(8, 0), "chosen": column(10, 100), "rejected": column(12, 200)}


def prompts() -> dict:
    return {"prompt": [words(5 + i % 7, i) for i in range(16)]}


def rewards(completions, completion_ids, **_) -> list[float]:
    """Of other ranks than a plan's first one, nonsense: it is not asked."""
    import torch.distributed as dist

    wrong = 100 * torch.rand(()).item() * dist.get_rank()
    return [wrong + sum(t % 5 for t in ids) / len(ids) for ids in completion_ids]


def agreement(result) -> dict[str, float]:
    """A metric of the logits and labels of all real tokens; batches differ in length.

    DPOTrainer's labels are token ids, where padding is 0. What logits are at padding is left to the model.
    """
    pairs = list(zip(result.predictions, result.label_ids, strict=True))
    return {"agreement": float(sum(abs(x[y > 0]).sum() + y.sum() for x, y in pairs))}


def rounded(trainer):
    """A GRPOTrainer whose equal entropies are equal: TRL's mask of those above a quantile splits them by last bits."""

    class Rounded(trainer):
        def get_high_entropy_mask(self, entropies, *given):
            return super().get_high_entropy_mask(entropies.round(decimals=4), *given)

    return Rounded


DATA = {"SFT": texts, "DPO": pairs, "GRPO": prompts}


def train(way: str, what: str, kind: str, options: dict, folder: str, steps: int = 50) -> list[dict]:
    """One rank: what the trainer logs at each step.

    `way` is "plain" (TRL's own), "prepared" (the model is, and DDP averages) or "accelerate" (FSDP2).
    """
    import torch.distributed as dist
    from accelerate import ParallelismConfig, PartialState
    from accelerate.utils import DistributedType

    rank, ranks = dist.get_rank(), dist.get_world_size()
    started = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    os.environ.update({name: str(value) for name, value in started.items()})  # as torchrun does; nobody connects
    common = {
        "use_cpu": True, "bf16": False, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
        "max_steps": steps, "learning_rate": 1e-3, "lr_scheduler_type": "constant", "logging_steps": 1,
        "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "gradient_checkpointing": False,
        "ddp_find_unused_parameters": False, "router_aux_loss_coef": 0.0, **options,
    }  # fmt: skip
    config, trainer = getattr(trl, f"{what}Config"), getattr(trl, f"{what}Trainer")
    model, more = build(kind), {}
    if what == "GRPO":  # which reads its reference by the model's name
        model.config._name_or_path = f"{folder}/model"
        model.save_pretrained(model.config._name_or_path, is_main_process=rank == 0)
        dist.barrier()
    if way == "accelerate":
        wrap = {"version": 2, "transformer_layer_cls_to_wrap": [f"{kind}DecoderLayer"]}
        common |= {"fsdp": True, "fsdp_config": wrap}
    args = config(folder, **common)
    assert args.device.type == "cpu"
    if way == "accelerate":  # which knows FSDP2 on GPUs only; gloo carries it
        args.parallelism_config = ParallelismConfig(cp_size=ranks)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    elif way == "prepared":
        model = hf.prepare(model, ra.plan(ra.init_mesh(ring=ranks), seq_len=64))
    if "eval_strategy" in options:
        n = 8 if what == "GRPO" else 6  # whose last batch is shorter
        more["eval_dataset"] = Dataset.from_dict({name: x[:n] for name, x in DATA[what]().items()})
        more |= {} if what == "GRPO" else {"compute_metrics": agreement}
    if what == "DPO":
        reference = build(kind)
        more["ref_model"] = hf.prepare(reference, model.ringattn.source) if way == "prepared" else reference
    if what == "GRPO":
        more["reward_funcs"] = rewards
        trainer = rounded(trainer)
    data = DATA[what]()
    own = trainer if way == "plain" else type("Long", (hf.OverRanks, trainer), {})
    made = own(model=model, args=args, train_dataset=Dataset.from_dict(data), processing_class=tokenizer(), **more)
    made.train()
    names = "loss", "grad_norm", "entropy", "mean_token_accuracy", "rewards/margins", "logps/chosen", "reward", "kl"
    names += "reward_std", "num_tokens", "agreement", "frac_reward_zero_std"
    names += tuple(f"eval_{name}" for name in names)
    logged = [{name: row[name] for name in names if name in row} for row in made.state.log_history[:-1]]
    if what == "GRPO":
        logged.append({"answers": len(made._logs["completion"]), "rewards": len(made._logs["rewards"]["rewards"])})
    return logged


EVALUATED = {
    "per_device_eval_batch_size": 4, "eval_strategy": "steps", "eval_steps": 2, "eval_do_concat_batches": False,
    "include_num_input_tokens_seen": "all",
}  # fmt: skip
WHOLE_BATCH = {"scale_rewards": "batch", "num_generations_eval": 2, "log_completions": True}
ANSWERS = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 12, "beta": 0.1}
BF16 = {"bf16": True}  # as TRL sets itself
CASES = {
    "packed, windows": ("SFT", "Mistral", ("prepared", "accelerate"), 50, {"packing": True, "max_length": 64}),
    "padded, windows and sinks": ("SFT", "GptOss", ("accelerate",), 50, {"max_length": 64}),
    "answers": ("GRPO", "GptOss", ("prepared", "accelerate"), 50, ANSWERS),
    "evaluated answers": ("GRPO", "Llama", ("prepared",), 2, ANSWERS | EVALUATED | WHOLE_BATCH),
    "answers above a quantile": ("GRPO", "Llama", ("prepared",), 2, ANSWERS | {"top_entropy_quantile": 0.5}),
    "evaluated texts": ("SFT", "Llama", ("prepared",), 2, EVALUATED | {"max_length": 64}),
    "evaluated preferences": ("DPO", "Llama", ("prepared",), 2, EVALUATED | {"max_length": 64}),
    "preferences": ("DPO", "GptOss", ("prepared", "accelerate"), 50, {"max_length": 64}),
    "packed, in bf16": ("SFT", "Mistral", ("prepared", "accelerate"), 4, {"packing": True, "max_length": 64} | BF16),
    "answers in bf16": ("GRPO", "Llama", ("prepared", "accelerate"), 2, ANSWERS | BF16),
    "preferences in bf16": ("DPO", "Llama", ("prepared", "accelerate"), 4, EVALUATED | {"max_length": 64} | BF16),
}


def of_all(ways: dict[str, int], *given) -> list[list[dict]]:
    """The logs of each way, on so many ranks: in processes that DistributedDataParallel survives."""
    script = (
        "import json; from ringattn.launch.processes import run; from test_trl import train; "
        f"print(json.dumps([run(train, ranks, way, *{given!r})[0] for way, ranks in {ways!r}.items()]))"
    )
    path = [str(ROOT), str(ROOT / "tests"), *filter(None, os.environ.get("PYTHONPATH", "").split(":"))]
    environment = {**os.environ, "TORCH_DISTRIBUTED_DEBUG": "OFF", "PYTHONPATH": ":".join(path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_losses_and_metrics_are_those_of_one_rank(case, tmp_path):
    what, kind, ways, steps, options = CASES[case]
    plain, *ours = of_all({"plain": 1} | dict.fromkeys(ways, 2), what, kind, options, str(tmp_path), steps)
    assert len(plain) >= steps and "loss" in plain[0]
    for way, results in zip(ways, ours, strict=True):
        loss, near = 1e-5, {"rel": 1e-3, "abs": 1e-4}
        if "bf16" in options:  # which FSDP2 returns, too
            loss = 2e-2 if way == "accelerate" else 1e-3
            near = {"rel": max(loss / 2, 1e-3), "abs": loss}
        for step, (mine, theirs) in enumerate(zip(results, plain, strict=True)):
            assert mine.get("loss") == pytest.approx(theirs.get("loss"), abs=loss), (way, step)
            assert mine == pytest.approx(theirs, **near), (way, step)


@pytest.mark.slow
def test_cells_of_the_matrix_equal_one_rank():
    import matrix

    print(matrix.check([cell for cell in matrix.covering() if cell.integration == "SFT"]))


@pytest.mark.parametrize("prepared_first", [False, True])
def test_log_probabilities_of_answers_are_those_of_one_rank(prepared_first):
    """As GRPOTrainer computes them, padded on both sides, with entropies and gradients."""
    from trl.trainer.utils import add_fused_lm_head

    plain = build("GptOss")
    copies = [deepcopy(plain) for _ in range(4)]
    head = {"temperature": 0.7, "outputs": ("log_probs", "entropy")}
    add_fused_lm_head(plain, **head)
    tokens, mask = torch.randint(4, 64, (4, 29)), torch.ones(4, 29, dtype=torch.long)
    mask[1, 25:] = mask[2, :4] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    labels[:, :-12] = -100
    given = {"input_ids": tokens, "attention_mask": mask, "labels": labels, "fused_lm_head": True}
    expected, weight = plain(**given), torch.randn(4, 28)
    (expected.log_probs * weight).sum().backward()

    def one_rank(mesh):
        model, plan = copies[mesh.rank], ra.plan(mesh, seq_len=64)
        if prepared_first:  # and the trainer's mixin puts the cutting outermost again
            hf_model.prepare(model, plan)
        add_fused_lm_head(model, **head)
        if prepared_first:
            keep_outermost(model)
        else:
            hf_model.prepare(model, plan)
        result = model(**given)
        (result.log_probs * weight).sum().backward()
        return result, {name: p.grad for name, p in model.named_parameters()}

    results = run(one_rank, ring=2, ulysses=2)
    for result, _ in results:
        for name in ("log_probs", "entropy", "label_mask", "loss"):
            torch.testing.assert_close(getattr(result, name), getattr(expected, name), rtol=1e-5, atol=1e-5)
    for name, p in plain.named_parameters():  # all four ranks compute the same sum
        mean = sum(torch.zeros_like(p) if g[name] is None else g[name] for _, g in results) / 4
        torch.testing.assert_close(mean, torch.zeros_like(p) if p.grad is None else p.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("what", "options", "message"),
    [
        ("RLOO", {"beta": 0.0}, "LongRLOO deals out answers .*; of such trainers GRPOTrainer is supported"),
        ("GRPO", {"num_generations": 4, "generation_batch_size": 4}, "num_generations: 4 does not divide 2 rows"),
    ],
)
def test_answers_that_would_be_wrong_are_refused(what, options, message, tmp_path):
    model = hf_model.prepare(build("Llama"), ra.plan(seq_len=64))
    given = {"num_generations": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1} | options
    args = getattr(trl, f"{what}Config")(str(tmp_path), use_cpu=True, bf16=False, **given)
    args.steps_per_generation = 1  # with two ranks the batch of four would be theirs
    made = {"model": model, "args": args, "processing_class": tokenizer(), "reward_funcs": rewards}
    with pytest.raises(ValueError, match=message):
        type(f"Long{what}", (hf.OverRanks, getattr(trl, f"{what}Trainer")), {})(
            train_dataset=Dataset.from_dict(prompts()), **made
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
def test_the_example_trains_a_saved_model(kind, tmp_path):
    build("GptOss").save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    data = tmp_path / "data"
    if kind != "dpo":
        data.write_text(("\n" if kind == "grpo" else "\n\n").join(texts()["text"]))
    else:
        rows = pairs()
        data.write_text(
            "\n".join(json.dumps(dict(zip(rows, row, strict=True))) for row in zip(*rows.values(), strict=True))
        )
    script = ROOT / "examples" / "long_trl.py"
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    path = ":".join([str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(":"))])
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "TORCH_DISTRIBUTED_DEBUG": "OFF"}
    done = subprocess.run(
        [*start, kind, str(tmp_path / "model"), str(data), "64", "2", str(tmp_path / "out")], env=environment,
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert (done.stdout + done.stderr).count("'grad_norm'") >= 2
