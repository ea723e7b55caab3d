"""`ringattn verify model=PATH`: a model that is the same over ranks passes, and one that is not is found."""

import shutil
from pathlib import Path

import pytest
import torch
from hf_ranks import SMALL

from ringattn.launch import words
from ringattn.launch.verify import model as verify
from tests.launched import launched

transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install '.[hf]')")

ROOT = Path(__file__).resolve().parent.parent
MORE = {
    "Qwen2": {}, "Gemma2": {"sliding_window": 7, "query_pre_attn_scalar": 8},
    "GptOss": {"sliding_window": 7, "num_local_experts": 2, "num_experts_per_tok": 1},
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(3)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).save_pretrained(folder)
    return folder


def config(folder, kind, **more):
    getattr(transformers, f"{kind}Config")(**{**SMALL, **more}).save_pretrained(folder)
    return folder / "config.json"


@pytest.mark.parametrize(
    ("kind", "more", "what"),
    [
        ("saved", ["ranks=2"], "LlamaForCausalLM: 128 tokens, 2 ranks"),
        ("saved", ["ranks=2", "docs=5"], "LlamaForCausalLM: 128 tokens, 5 documents, "),
        ("saved", ["ranks=3", "tokens=61", "seed=5"], "LlamaForCausalLM: 61 tokens, "),
        # a config is enough; Qwen 2's biases of keys have no gradient but rounding
        ("Qwen2", ["ranks=2", "docs=3"], "Qwen2ForCausalLM with random weights: 128 tokens, 3 documents"),
        ("Gemma2", ["ranks=2", "docs=3"], "Gemma2ForCausalLM with random weights: 128 tokens, 3 documents"),
        # whose documents see each other on one rank, unless each is run alone
        ("GptOss", ["ranks=2", "docs=3"], "GptOssForCausalLM with random weights: 128 tokens, 3 documents"),
    ],
)
def test_a_saved_model_or_a_config_passes(kind, more, what, saved, tmp_path, capsys):
    model = saved if kind == "saved" else config(tmp_path, kind, **MORE[kind])
    status = words.main(["verify", f"model={model}", *more])
    out, err = capsys.readouterr()
    assert status == 0 and "the model is the same over ranks" in out, out
    assert what in err.splitlines()[-1]
    rows = [line.split()[0] for line in out.splitlines() if line.endswith("pass")]
    assert rows == ["embeddings", "layer", "layer", "norm", "loss"] and "model.layers.1." in out and "loss 4." in out


@pytest.mark.slow
def test_over_processes(saved, tmp_path):
    printed = launched(ROOT / "ringattn" / "__main__.py", ["verify", f"model={saved}", "docs=3"], 2, tmp_path)
    assert printed.count("the model is the same over ranks") == 1 and "2 ranks (processes, gloo)" in printed


def wrong_layer(monkeypatch):
    """Only over ranks, the second one, by little."""
    from transformers.models.llama.modeling_llama import LlamaAttention

    of = LlamaAttention.forward

    def off(self, hidden_states, *args, **given):
        out, weights = of(self, hidden_states, *args, **given)
        return (out * 1.001 if "ringattn" in given and self.layer_idx == 1 else out), weights

    monkeypatch.setattr(LlamaAttention, "forward", off)


def wrong_gradient(monkeypatch):
    of = verify.gradients

    def off(model):
        results = of(model)
        if hasattr(model, "ringattn"):
            results["model.layers.0.mlp.up_proj.weight"][0, 0] += 1e-3
        return results

    monkeypatch.setattr(verify, "gradients", off)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (wrong_layer, "they part in layer 1: off by"),
        (wrong_gradient, "values are equal; gradients part in layer 0: model.layers.0.mlp.up_proj.weight"),
    ],
)
def test_the_first_layer_that_differs_is_named(wrong, named, saved, capsys, monkeypatch):
    wrong(monkeypatch)
    assert words.main(["verify", f"model={saved}", "ranks=2", "tokens=40"]) == 1
    output = capsys.readouterr().out
    assert named in output and "NOT the same" in output


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["tokens=8"], "tokens=8, docs=0 are of a model"),
        (["model={}", "cases=docs"], "is compared in float32, with kernel=auto; leave cases=, kernel=, dtype= out"),
        (["model={}", "tokens=129"], "tokens=129: the model has positions for 128; give tokens=128"),
        (["model={}", "tokens=4", "docs=5"], "docs=5 do not fit in 4 tokens"),
        (["model={dropout}", "ranks=2"], "LlamaForCausalLM has attention_dropout=0.1"),
    ],
)
def test_what_cannot_be_is_refused(saved, tmp_path, capsys, more, message):
    dropout = config(tmp_path, "Llama", attention_dropout=0.1)
    assert words.main(["verify", *(word.format(saved, dropout=dropout) for word in more)]) == 2
    assert message in capsys.readouterr().err


def test_a_name_of_the_hub_is_resolved_by_transformers(saved, tmp_path, capsys, monkeypatch):
    """Here from its cache; what that lacks is a sentence without a network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    kept = tmp_path / "models--someone--llama"
    shutil.copytree(saved, kept / "snapshots" / "0")
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("0")
    assert words.main(["verify", "model=someone/llama", "ranks=2", "tokens=40"]) == 0
    assert capsys.readouterr().err.splitlines()[-1].startswith("LlamaForCausalLM: ")
    assert words.main(["verify", "model=someone/else", "ranks=2"]) == 2
    output = capsys.readouterr().err
    assert "model=someone/else: no such folder, config.json or model of the hub: We couldn't connect" in output
