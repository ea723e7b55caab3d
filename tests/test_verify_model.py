"""`ringattn verify model=PATH`: a model that is the same over ranks passes, and one that is not is found."""

import shutil
from pathlib import Path

import pytest
import torch

from ringattn.launch import words
from ringattn.launch.verify import model as verify
from tests.launched import launched

transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install '.[hf]')")

ROOT = Path(__file__).resolve().parent.parent
SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
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


@pytest.mark.parametrize("more", [[], ["docs=5"], ["ranks=3", "tokens=61", "seed=5"]])
def test_a_saved_model_passes(saved, capsys, more):
    assert words.main(["verify", f"model={saved}", *([] if "ranks=3" in more else ["ranks=2"]), *more]) == 0
    out, err = capsys.readouterr()
    assert err.splitlines()[-1].startswith("LlamaForCausalLM: ")
    rows = [line.split()[0] for line in out.splitlines() if line.endswith("pass")]
    assert rows == ["embeddings", "layer", "layer", "norm", "loss"] and "the model is the same over ranks" in out
    assert "model.layers.1." in out and "loss 4." in out


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("Qwen2", {}),  # whose biases of keys have no gradient but rounding
        ("Gemma2", {"sliding_window": 7, "query_pre_attn_scalar": 8}),
        ("GptOss", {"sliding_window": 7, "num_local_experts": 2, "num_experts_per_tok": 1}),
    ],
)
def test_a_config_is_enough(tmp_path, capsys, kind, more):
    """Documents too: those of GptOss see each other on one rank, unless each is run alone."""
    status = words.main(["verify", f"model={config(tmp_path, kind, **more)}", "ranks=2", "docs=3"])
    out, err = capsys.readouterr()
    assert status == 0, out
    assert f"{kind}ForCausalLM with random weights: 128 tokens, 3 documents" in err


@pytest.mark.slow
def test_over_processes(saved, tmp_path):
    printed = launched(ROOT / "ringattn" / "__main__.py", ["verify", f"model={saved}", "docs=3"], 2, tmp_path)
    assert printed.count("the model is the same over ranks") == 1 and "2 ranks (processes, gloo)" in printed


def test_the_first_layer_that_differs_is_named(saved, capsys, monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaAttention

    of = LlamaAttention.forward

    def off(self, hidden_states, *args, **given):
        """Wrong only over ranks, in the second layer, by little."""
        out, weights = of(self, hidden_states, *args, **given)
        return (out * 1.001 if "ringattn" in given and self.layer_idx == 1 else out), weights

    monkeypatch.setattr(LlamaAttention, "forward", off)
    assert words.main(["verify", f"model={saved}", "ranks=2", "tokens=40"]) == 1
    out = capsys.readouterr().out
    assert "they part in layer 1: off by" in out and "NOT the same" in out


def test_a_gradient_that_is_off_is_named(saved, capsys, monkeypatch):
    of = verify.gradients

    def off(model):
        results = of(model)
        if hasattr(model, "ringattn"):
            results["model.layers.0.mlp.up_proj.weight"][0, 0] += 1e-3
        return results

    monkeypatch.setattr(verify, "gradients", off)
    assert words.main(["verify", f"model={saved}", "ranks=2", "tokens=40"]) == 1
    assert "values are equal; gradients part in layer 0: model.layers.0.mlp.up_proj.weight" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["tokens=8"], "tokens=8, docs=0 are of a model"),
        (
            ["model={}", "cases=docs"],
            "is compared as a whole, in float32, with kernel=auto; leave cases=, kernel=, dtype= out",
        ),
        (["model={}", "tokens=129"], "tokens=129: the model has positions for 128; give tokens=128"),
        (["model={}", "tokens=4", "docs=5"], "docs=5 do not fit in 4 tokens"),
    ],
)
def test_what_cannot_be_is_refused(saved, capsys, more, message):
    assert words.main(["verify", *(word.format(saved) for word in more)]) == 2
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


def test_models_that_cannot_be_spread_are_refused(tmp_path, capsys):
    assert words.main(["verify", f"model={config(tmp_path, 'Llama', attention_dropout=0.1)}", "ranks=2"]) == 2
    assert "LlamaForCausalLM has attention_dropout=0.1" in capsys.readouterr().err
