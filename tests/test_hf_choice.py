"""Models that are prepared over a mesh: the plan is chosen for their attention, and they equal one rank."""

from copy import deepcopy

import pytest
import torch
from hf_ranks import same, trained

import ringattn as ra
from ringattn.comms.local import run
from ringattn.models import hf
from ringattn.models.hf import choice as hf_choice

transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install '.[hf]')")
SIZES = {"vocab_size": 64, "hidden_size": 48, "intermediate_size": 48, "num_hidden_layers": 2}


def build(kind: str = "Llama", **more):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **more})
    config._attn_implementation = "eager"
    return getattr(transformers, f"{kind}ForCausalLM")(config)


@pytest.mark.parametrize(
    ("kind", "more", "heads", "dims", "spec"),
    [
        ("Llama", {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10}, (6, 2), (10, 10), {}),
        ("OPT", {"num_attention_heads": 4, "ffn_dim": 48, "word_embed_proj_dim": 48}, (4, 4), (12, 12), {}),
        ("Roberta", {"num_attention_heads": 4}, (4, 4), (12, 12), {"causal": False}),
        ("Mistral", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 7},
         (4, 2), (8, 8), {"window": 7}),
        ("Gemma2", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 7},
         (4, 2), (8, 8), {}),  # every other layer sees all
        ("MiniCPM3", {"num_attention_heads": 4, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
                      "q_lora_rank": 8, "kv_lora_rank": 8, "num_key_value_heads": 4}, (4, 4), (12, 6), {}),
    ],
)  # fmt: skip
def test_the_attention_of_a_model_is_read_from_its_config(kind, more, heads, dims, spec):
    model = build(kind, **more)
    assert hf_choice.attention_of(model) == {
        "heads": heads, "head_dim": dims[0], "value_dim": dims[1], "dtype": "float32", "spec": ra.AttentionSpec(**spec),
    }  # fmt: skip
    model.config.get_text_config()._tp_plan, model._tp_size = None, 2
    assert hf_choice.heads_of(model) == (heads[0] // 2, heads[1] // 2)


@pytest.mark.parametrize("heads", [4, 6])
def test_a_plan_is_chosen_by_prediction_for_the_longest_batch(heads):
    """Two data ranks with batches of different lengths, on a mesh with the user's names: both choose the same sizes."""
    model = build(num_attention_heads=heads, num_key_value_heads=2, head_dim=8)
    rows = [torch.randint(0, 64, (1, n), generator=torch.Generator().manual_seed(n)) for n in (30, 41)]
    single = deepcopy(model)
    weights = torch.tensor([29.0, 40.0]) / 69
    expected = sum(w * single(x, labels=x).loss for w, x in zip(weights, rows, strict=True))
    expected.backward()
    copies = [deepcopy(model) for _ in range(8)]

    def one_rank(mesh):
        mine = hf.prepare(copies[mesh.rank], mesh, axes={"sequence": "cp"}, over=("dp",))
        x = rows[mesh.coordinates["dp"]]
        results = trained(mine, input_ids=x, labels=x)
        chosen = ra.plan(mesh, seq_len=41, axes={"sequence": "cp"}, heads=(heads, 2), head_dim=8)
        plan = hf.plan_of(mine)
        assert (plan.ring, plan.ulysses, plan.strategy, plan.layout) == (
            chosen.ring, chosen.ulysses, chosen.strategy, chosen.layout
        )  # fmt: skip
        assert plan.seq_len == x.shape[1] and plan.heads is None and "no prediction" not in plan.explain()
        assert heads % plan.ulysses == 0
        return results

    same(run(one_rank, dp=2, cp=4), expected, single)


def test_a_length_can_be_named_and_generate_chooses_too():
    model = build(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    tokens = torch.randint(0, 64, (1, 20))
    expected = model.generate(tokens, max_new_tokens=3, do_sample=False)

    def one_rank(mesh):
        named = hf.prepare(deepcopy(model), mesh, seq_len=100)
        assert hf.plan_of(named).seq_len == 100
        return hf.prepare(deepcopy(model), mesh).generate(tokens, max_new_tokens=3, do_sample=False)

    assert all(torch.equal(result, expected) for result in run(one_rank, sequence=2))


def test_what_a_mesh_cannot_be_is_refused():
    def one_rank(mesh):
        for given, more, message in (
            (mesh, {"over": ("data",)}, "is given no mesh with an axis 'data'"),
            (mesh, {"axes": {"sequence": "cp"}}, "the mesh has axes"),
            (ra.plan(mesh, seq_len=8), {"seq_len": 8}, "axes and seq_len belong to a mesh"),
            (ra.plan(mesh, seq_len=8), {}, "ulysses=4 does not divide 6 query heads; use ulysses=2, ring=2"),
        ):
            with pytest.raises(ValueError, match=message):
                mine = hf.prepare(build(num_attention_heads=6, num_key_value_heads=2, head_dim=8), given, **more)
                mine(torch.zeros(1, 8, dtype=torch.long))

    run(one_rank, ulysses=4)
    with pytest.raises(ValueError, match="is not prepared; call"):
        hf.plan_of(build(num_attention_heads=4))
