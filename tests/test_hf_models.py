"""The decoders that tested-models.md lists are the same over ranks: values and gradients, with packed documents."""

import pytest
from hf_ranks import DELTA, SMALL

from ringattn.launch import words

transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install '.[hf]')")

EXACT = {
    **SMALL, "initializer_range": 0.3, "attention_dropout": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0,
    "embd_pdrop": 0.0, "dropout": 0.0, "hidden_dropout": 0.0, "hidden_dropout_prob": 0.0, "layerdrop": 0.0,
    "attention_probs_dropout_prob": 0.0, "activation_dropout": 0.0,
}  # fmt: skip
WINDOW = {"sliding_window": 7}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_local_experts": 4}
GROUPS = {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
LATENT = {
    **GROUPS, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    "first_k_dense_replace": 1, "head_dim": None,
}  # fmt: skip
MIXED = {"layer_types": ["linear_attention", "full_attention"]}
KIMI = {**MIXED, "linear_num_heads": 4, "linear_head_dim": 8, "mlp_layer_types": ["dense", "sparse"]}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
MODELS = {
    "afmoe": EXPERTS, "apertus": {}, "arcee": {}, "biogpt": {}, "bitnet": {}, "cohere": {}, "cohere2": WINDOW,
    "cohere2_moe": GROUPS, "cwm": {}, "deepseek_v2": LATENT, "deepseek_v3": LATENT, "diffllama": {}, "dots1": GROUPS,
    "ernie4_5": {},
    "ernie4_5_moe": {**EXPERTS, "moe_num_experts": 4, "moe_k": 2}, "exaone4": WINDOW, "exaone_moe": GROUPS,
    "flex_olmo": EXPERTS, "gemma": {}, "gemma2": WINDOW, "gemma3_text": WINDOW, "glm": {}, "glm4": {},
    "glm4_moe": GROUPS, "gpt2": GPT2, "gpt_bigcode": GPT2, "gpt_neox": {}, "gpt_oss": {**EXPERTS, **WINDOW},
    "granite": {}, "granitemoe": EXPERTS, "granitemoeshared": EXPERTS, "helium": {}, "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": GROUPS, "jetmoe": {}, "llama": {},
    "llama4_text": {
        **EXPERTS, "intermediate_size_mlp": 48, "attention_chunk_size": 9, "floor_scale": 8, "no_rope_layers": [1, 0],
    },
    "mimo_v2_flash": GROUPS, "minicpm3": LATENT,
    "minimax_m2": EXPERTS, "ministral": WINDOW, "ministral3": {}, "mistral": WINDOW, "mixtral": EXPERTS,
    "modernbert-decoder": {}, "nanochat": {}, "olmo": {}, "olmo2": {}, "olmo3": WINDOW, "olmoe": EXPERTS,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32}, "persimmon": {}, "phi": {}, "phi3": {}, "phimoe": EXPERTS,
    "qwen2": {}, "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 16}, "qwen3": {}, "qwen3_moe": EXPERTS,
    "roberta": {"is_decoder": True}, "seed_oss": {}, "smollm3": {}, "solar_open": GROUPS, "starcoder2": WINDOW,
    "vaultgemma": WINDOW, "xlm-roberta-xl": {"is_decoder": True}, "youtu": LATENT,
    "bailing_hybrid": {**LATENT, **KIMI}, "kimi_linear": {**LATENT, **KIMI}, "olmo_hybrid": DELTA,
    "qwen3_5_text": DELTA, "qwen3_5_moe_text": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_next": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 16},
    "bamba": {**MAMBA, "attn_layer_indices": [1]}, "falcon_h1": {**MAMBA, "mamba_d_ssm": 64},
    "granitemoehybrid": {**MAMBA, **EXPERTS, "shared_intermediate_size": 16, **MIXED},
    "nemotron_h": {
        **GROUPS, "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"], "num_hidden_layers": 4,
    },
    "zamba2": {
        "n_mamba_heads": 8, "mamba_d_state": 8, "mamba_ngroups": 2, "attention_head_dim": 16,
        "layers_block_type": ["linear_attention", "hybrid"],
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
def test_a_listed_model_is_the_same_over_ranks(tmp_path, kind):
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    given = {name: value for name, value in {**EXACT, **MODELS[kind]}.items() if value is not None}
    transformers.AutoConfig.for_model(kind, **given).save_pretrained(tmp_path)
    assert words.main(["verify", f"model={tmp_path}", "ranks=2", "tokens=97", "docs=3"]) == 0
