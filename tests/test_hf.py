"""Models of transformers over four ranks: logits, loss and every gradient equal the model's own on one rank."""

import pickle
import threading
from copy import deepcopy
from functools import partial

import pytest
import torch
from hf_ranks import gradients, on_each, same, trained
from torch._dynamo.testing import CompileCounterWithBackend

import ringattn as ra
from ringattn.comms.local import run
from ringattn.models import hf
from ringattn.models.hf.attention import Call, attend

transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install '.[hf]')")
peft = pytest.importorskip("peft", reason="peft is not installed (pip install peft)")

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
MODELS = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": 7},
    "Gemma2": {"sliding_window": 7, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 8},
    "GptOss": {"sliding_window": 7, "num_local_experts": 2, "num_experts_per_tok": 1},
    "Phi3": {},
    "Qwen2Moe": {  # whose layers say how far they see by their mask alone
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4,
        "use_sliding_window": True, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"],
    },
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "Qwen3Next": {
        **DELTA, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "Qwen3_5": DELTA,
    "KimiLinear": {
        "num_key_value_heads": 4, "linear_num_heads": 4, "linear_head_dim": 8, "kv_lora_rank": 16, "q_lora_rank": 16,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "head_dim": None,
        "layer_types": DELTA["layer_types"], "mlp_layer_types": ["dense", "dense"],
    },
    "Bamba": {
        "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2, "attn_layer_indices": [1],
    },
}  # fmt: skip
LINEAR = ["Qwen3Next", "Qwen3_5", "KimiLinear", "Bamba"]
T = 37  # a prime: padded to the ranks
FOUR = {"ring": 2, "ulysses": 2}


def build(name: str, **more):
    if (kind := getattr(transformers, f"{name}ForCausalLM", None)) is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    given = {name: x for name, x in {**SMALL, **MODELS[name], **more}.items() if x is not None}
    config = kind.config_class(**given)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = kind(config).float()
    with torch.no_grad():  # some start as zeros, which would hide an error
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(0.1 * torch.randn_like(weight))
    return model


def batch() -> torch.Tensor:
    return torch.randint(3, 64, (2, T), generator=torch.Generator().manual_seed(0))


def compare(name: str, real: torch.Tensor | None = None, more: dict | None = None, **given) -> None:
    """One pass over ring=2 x ulysses=2 against the model itself; logits where `real`."""
    model = build(name, **(more or {}))
    given = {"input_ids": batch(), "labels": batch(), **given}
    copied = deepcopy(model)
    output = model(**given, use_cache=False)
    output.loss.backward()
    results = on_each(copied, partial(trained, **given), T, FOUR, strategy="ring", layout="zigzag")
    same(results, output.loss, model, output.logits, ... if real is None else real)


@pytest.mark.parametrize("name", MODELS)
def test_logits_loss_and_every_gradient_equal_one_rank(name):
    compare(name)


@pytest.mark.parametrize("longest", [16, 64])
@pytest.mark.parametrize("name", ["Llama", "Phi3"])
def test_rotary_angles_that_depend_on_the_length_take_that_of_the_whole(name, longest):
    """Of 37 tokens, beyond or within what the model was made for."""
    rope = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
    more = {"max_position_embeddings": longest, "rope_parameters": rope}
    if name == "Phi3":
        rope |= {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0]}
        more |= {"original_max_position_embeddings": longest}
    compare(name, more=more)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["Llama", "Gemma2", "OPT", "Qwen3Next", "KimiLinear", "Bamba"])
def test_padding(name, side):
    mask = torch.ones(2, T, dtype=torch.long)
    mask[1, : T // 3] = 0
    mask = mask if side == "left" else mask.flip(1)
    labels = torch.where(mask.bool(), batch(), -100)
    labels[1, T // 3 if side == "left" else 0] = -100  # transformers also counts what padding predicts; we do not
    compare(name, real=mask.bool(), labels=labels, attention_mask=mask)


LENGTHS = ((20, 17), (5, 32))


def positions() -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2"])
def test_packed_documents(name):
    compare(name, position_ids=positions())


@pytest.mark.parametrize("name", ["GptOss", *LINEAR])
def test_packed_documents_are_each_document_alone(name):
    """transformers' own GptOss and its linear layers let packed documents see each other; here they do not."""
    model = build(name)
    layout = "contiguous" if name in LINEAR else "auto"
    with torch.no_grad():
        separate = [
            torch.cat([model(d[None]).logits[0] for d in row.split(n)]) for row, n in zip(batch(), LENGTHS, strict=True)
        ]

    def call(mine):
        return hf.whole(mine, mine(batch(), position_ids=positions()).logits.detach())

    for logits in on_each(model, call, T, {"ring": 4}, layout=layout):
        torch.testing.assert_close(logits, torch.stack(separate), rtol=1e-5, atol=1e-5)


def flattened(**which):
    """Three documents as transformers packs them."""
    rows = [{"input_ids": batch()[0, a:b].tolist()} for a, b in ((0, 20), (20, 21), (21, T))]
    return transformers.DataCollatorWithFlattening(**which)(rows)


@pytest.mark.parametrize(
    "which",
    [
        {"return_flash_attn_kwargs": True, "return_seq_idx": True},
        {"return_flash_attn_kwargs": True, "return_position_ids": False},
        {"return_seq_idx": True, "return_position_ids": False},
    ],
    ids=["all", "cu_seq_lens", "seq_idx"],
)
@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_batches_of_the_flattening_collator_equal_one_rank(name, which):
    plain, given = build(name), flattened(**which)
    assert "seq_idx" in given or "cu_seq_lens_q" in given
    copied = deepcopy(plain)
    output = plain(**flattened(), use_cache=False)
    output.loss.backward()
    same(on_each(copied, partial(trained, **given), T, FOUR, layout="zigzag"), output.loss, plain, output.logits)


def test_a_packed_batch_that_is_not_of_these_rows_is_refused():
    model, given = hf.prepare(build("Llama"), plan_of_one()), flattened(return_flash_attn_kwargs=True)
    cu = given["cu_seq_lens_q"]
    for change, error in (
        ({"cu_seq_lens_q": cu[:-1]}, r"cu_seq_lens_q=\[0, 20, 21\] with 1 rows of 37 tokens: it must rise from 0 to"),
        ({"seq_idx": cu}, r"seq_idx has shape \(4,\); expected \(1, 37\)"),
    ):
        with pytest.raises(ValueError, match=error):
            model(**{**given, **change})
    with pytest.raises(ValueError, match="with 2 rows of 37 tokens"):
        model(batch(), cu_seq_lens_q=cu)
    running = model(**{**given, "position_ids": torch.arange(T)[None]})  # documents, and positions that do not restart
    torch.testing.assert_close(running.loss, model(**given).loss)


@pytest.mark.parametrize("packed", [False, True])
def test_labels_that_are_shifted_already(packed):
    shifted = batch().roll(-1, 1)
    shifted[:, [-1, 5, 6]] = -100
    given = {"position_ids": positions()} if packed else {}
    plain = build("Llama")
    copied = deepcopy(plain)
    expected = plain(batch(), labels=batch(), shift_labels=shifted, use_cache=False, **given).loss
    expected.backward()

    def call(mine):
        loss_without = mine(batch(), shift_labels=shifted, **given).loss  # and labels are not needed
        assert torch.equal(loss_without, mine(batch(), labels=batch(), shift_labels=shifted, **given).loss)
        return trained(mine, input_ids=batch(), shift_labels=shifted, **given)

    same(on_each(copied, call, T, {"ring": 2}), expected, plain)


def lora(model):
    torch.manual_seed(1)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize("adapters_first", [True, False])
def test_adapters_around_or_within_a_prepared_model(adapters_first):
    plain = lora(build("Llama"))
    loss = plain(batch(), labels=batch(), use_cache=False).loss
    loss.backward()
    models = [lora(build("Llama")) if adapters_first else build("Llama") for _ in range(2)]
    lock = threading.Lock()  # ranks are threads, and seeds are the process's

    def one_rank(mesh):
        mine = hf.prepare(models[mesh.rank], ra.plan(mesh, seq_len=T))
        with lock:
            mine = mine if adapters_first else lora(mine)
        assert isinstance(mine, peft.PeftModel)
        return trained(mine, input_ids=batch(), labels=batch())

    assert sum(bool(g.any()) for g in gradients(plain).values()) == 8
    same(run(one_rank, ring=2), loss, plain)


DEPTH = {"Llama": {"num_hidden_layers": 1}, "Qwen3_5": {"num_hidden_layers": 1, "layer_types": ["linear_attention"]}}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "Qwen3_5"])
def test_layers_are_compiled_and_what_is_around_them_is_not(name):
    """Compiling is not made for threads: one rank compiles, and meets a rank that does not."""
    torch._dynamo.reset()
    plain, counter = build(name, **DEPTH.get(name, {})), CompileCounterWithBackend("aot_eager")
    copies = [deepcopy(plain) for _ in range(2)]
    if name != "Llama":  # whose own documents see each other
        hf.prepare(plain, plan_of_one())
    given = [{"position_ids": torch.tensor([[*range(n), *range(T - n)]]).expand(2, T)} for n in (20, 11)]
    expected = [plain(batch(), labels=batch(), use_cache=False, **words).loss for words in ({}, *given)]
    sum(expected).backward()

    def one_rank(mesh):
        mine = hf.prepare(copies[mesh.rank], ra.plan(mesh, seq_len=T))
        call = torch.compile(mine, backend=counter) if mesh.rank == 0 else mine
        losses = [call(batch(), labels=batch(), **each).loss for each in ({}, *given)]
        sum(losses).backward()
        return torch.stack(losses).tolist(), None, gradients(mine)

    results = run(one_rank, timeout=600.0, ring=2)
    assert results[0][0] == pytest.approx(torch.stack(expected).tolist(), abs=2e-6)
    same([(sum(losses), *more) for losses, *more in results], sum(expected), plain)
    assert 1 <= counter.frame_count <= 4  # without documents, with them, and with those of any number


def plan_of_one():
    return ra.plan(seq_len=T)


def pooled():
    return transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**SMALL))


def t5():
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=8)
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: build("Llama", attention_dropout=0.1), "LlamaForCausalLM has attention_dropout=0.1"),
        (lambda: torch.nn.Linear(2, 2), "Linear is not a transformers model"),
        (lambda: pooled(), "LlamaForSequenceClassification predicts from one token"),
        (t5, "T5ForConditionalGeneration is an encoder-decoder"),
    ],
    ids=["dropout", "linear", "pooled", "t5"],
)
def test_what_is_not_supported_is_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        hf.prepare(make(), plan_of_one())


def test_linear_layers_that_cannot_be_spread_are_refused():
    def refused(model, message, plan=None):
        with pytest.raises(ValueError, match=message):
            hf.prepare(model, plan or plan_of_one())(batch() % 50)

    mixers = small("mamba2", num_heads=8, head_dim=8, state_size=8, n_groups=2)
    refused(mixers, "a linear layer was called .* by one that does not hand its keyword arguments on")
    refused(build("Qwen3_5"), "has linear layers, and layout='striped'", ra.Plan(T, 2, 1, "ring", "striped"))


def small(kind, **more):
    """A model of this kind with weights that are not small."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0, **more,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.35)
    return model


def test_what_a_model_asks_of_its_attention_is_never_dropped():
    """A learned mask, a bias, arguments that do not come at all."""
    for kind, reason in (("doge", "DogeAttention passes a mask of its own to its attention"),
                       ("nemotron", "does not hand its keyword arguments on"),
                       ("stablelm", "does not hand its keyword arguments on")):  # fmt: skip
        model = hf.prepare(small(kind), plan_of_one())
        with pytest.raises(ValueError, match=reason):
            model(batch() % 50)
    q = torch.randn(1, 4, 5, 8)
    given = {"ringattn": Call(ra.plan(seq_len=5), None), "position_ids": torch.arange(5), "use_cache": False}
    assert attend(torch.nn.Identity(), q, q, q, None, **given)[0].shape == (1, 5, 4, 8)
    with pytest.raises(ValueError, match="Identity passes indices, position_bias to its attention, which is not supp"):
        attend(torch.nn.Identity(), q, q, q, None, **given, position_bias=q, indices=q, alibi=None)


@pytest.mark.parametrize("embedded", [False, True])
def test_positions_by_a_rule_of_the_model(embedded):
    """RoBERTa counts from padding_idx + 1 on, and skips padding."""
    model, tokens = small("roberta", is_decoder=True).eval(), 3 + batch() % 40
    mask = torch.ones_like(tokens)
    if not embedded:
        mask[1, 20:] = 0
        tokens[1, 20:] = model.config.pad_token_id
    given = {"inputs_embeds": model.get_input_embeddings()(tokens).detach()} if embedded else {"input_ids": tokens}
    given["attention_mask"] = mask
    expected = model(**given, use_cache=False).logits
    for logits in on_each(model, lambda mine: hf.whole(mine, mine(**given).logits.detach()), T, {"ring": 2}):
        torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("keep", [1, 9, torch.tensor([30, 2, -1, 2])], ids=["last", "nine", "positions"])
@pytest.mark.parametrize("strategy", ["ring", "gather"])
def test_logits_of_some_tokens_are_on_every_rank(keep, strategy):
    """Their gradients are sums over the ranks, which all have the same loss here."""
    plain = build("Gemma2")
    copied = deepcopy(plain)
    expected = plain(batch(), logits_to_keep=keep, use_cache=False).logits
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    (loss := (expected * weight).sum()).backward()

    def call(mine):
        result = mine(batch(), logits_to_keep=keep).logits
        (result * weight).sum().backward()
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
        return float(loss), None, gradients(mine)

    layout = "zigzag" if strategy == "ring" else "contiguous"
    same(on_each(copied, call, T, FOUR, strategy=strategy, layout=layout), loss, plain, averaged=True, atol=1e-5)


def test_gradients_for_what_averages_them_and_losses_divided_by_a_count():
    """As DDP averages, and as a trainer counts the labels of several batches."""
    plain, labels = build("Llama"), batch()
    labels[0, :30] = -100
    copied = deepcopy(plain)
    given = [{"input_ids": batch(), "labels": labels}, {"input_ids": batch()[:1], "labels": batch()[:1]}]
    count = sum(int((x["labels"][:, 1:] != -100).sum()) for x in given)
    expected = sum(plain(**x, num_items_in_batch=count, use_cache=False).loss for x in given)
    expected.backward()

    def one_rank(mesh):
        mine = hf.prepare(deepcopy(copied), ra.plan(mesh, seq_len=T), averaged=True)
        loss = sum(mine(**x, num_items_in_batch=count).loss for x in given)
        loss.backward()
        return float(loss.detach()), None, gradients(mine)

    same(run(one_rank, ring=2), expected, plain, averaged=True)


def test_a_copy_runs_its_own_weights():
    """As the average of weights does, or the reference of a preference loss."""
    tokens = batch()
    model = hf.prepare(build("Llama"), plan_of_one())
    with torch.no_grad():
        expected = model(tokens, labels=tokens)
        copy = deepcopy(model)
        torch.testing.assert_close(copy(tokens, labels=tokens).loss, expected.loss)
        for weight in copy.parameters():
            weight.zero_()
        assert not copy(tokens).logits.any()
        torch.testing.assert_close(model(tokens).logits, expected.logits)
    with pytest.raises(TypeError, match="save its state_dict"):
        pickle.dumps(model)


@pytest.mark.parametrize("kind", ["Llama", "Llava"])
def test_models_of_the_same_config_do_not_change(kind):
    """A reference model, or a copy for evaluation."""
    config = build("Llama").config if kind == "Llama" else seeing("llava").config
    model, other = (getattr(transformers, type(seeing("llava") if kind == "Llava" else build(kind)).__name__)(config)
                    for _ in range(2))  # fmt: skip
    expected = other(batch(), use_cache=False).logits
    configs = [m.config for m in other.modules() if hasattr(m, "config")]
    before = [each._attn_implementation for each in configs]
    hf.prepare(model, plan_of_one())(batch())
    assert [each._attn_implementation for each in configs] == before
    assert torch.equal(other(batch(), use_cache=False).logits, expected)
    assert all(m.config is model.config for m in model.modules() if getattr(m, "config", None) == model.config)


def seeing(kind):
    """A small model of images and text."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    rope = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1]}
    vision, text = {**sizes, "image_size": 8, "patch_size": 4}, {**SMALL, "model_type": "llama"}
    if kind != "llava":
        vision = {**sizes, "embed_dim": 32, "num_heads": 4, "depth": 1, "out_hidden_size": 32}
        text = {**SMALL, "rope_parameters": rope}
    config = transformers.AutoConfig.for_model(kind, vision_config=vision, text_config=text)
    torch.manual_seed(0)
    return transformers.AutoModelForImageTextToText.from_config(config).float()


def test_a_compiled_model_is_prepared_inside_and_a_wrapped_one_is_refused():
    model = build("Llama")
    expected = model(batch(), use_cache=False).logits
    mine = hf.prepare(torch.compile(model, backend="eager"), plan_of_one())
    torch.testing.assert_close(mine(batch()).logits, expected, rtol=1e-5, atol=1e-5)
    assert hasattr(model, "ringattn") and hf.unprepare(mine) is mine and not hasattr(model, "ringattn")
    for wrapped in (torch.nn.DataParallel(model), torch.nn.DataParallel(lora(build("Llama")))):
        with pytest.raises(ValueError, match="wrapped in DataParallel: prepare before wrapping"):
            hf.prepare(wrapped, plan_of_one())


@pytest.mark.parametrize(
    ("plan", "over", "message"),
    [
        (lambda: None, (), "plan is of type NoneType; pass a mesh of torch"),
        (lambda: ra.plan(seq_len=T, heads=(4, 2), head_dim=8), (), "make the plan without heads and head_dim"),
        (plan_of_one, ("data",), "is given no mesh with an axis 'data'"),
    ],
)
def test_a_refused_model_is_as_it_was(plan, over, message):
    model = build("Llama")
    with pytest.raises(ValueError, match=message):
        hf.prepare(model, plan(), over=over)
    assert model.config._attn_implementation == "eager"
    hf.prepare(model, plan_of_one())(batch())
    with pytest.raises(ValueError, match="this LlamaForCausalLM is already prepared"):
        hf.prepare(model, plan_of_one())


def test_bad_input_is_named():
    model = hf.prepare(build("Llama"), plan_of_one())
    holes = torch.ones(2, T, dtype=torch.long)
    holes[0, 5] = 0
    with pytest.raises(ValueError, match="padding between real tokens"):
        model(batch(), attention_mask=holes)
    with pytest.raises(ValueError, match="expected \\(2, 37\\)"):
        model(batch(), attention_mask=torch.ones(2, 1, T, T))
    for mask in ({"full_attention": torch.ones(2, T)}, [[1] * T] * 2):  # what transformers takes a layer type
        for more in ({}, {"labels": batch()}, {"past_key_values": hf.RanksCache(plan_of_one(), T)}):
            with pytest.raises(ValueError, match=r"attention_mask is of type (dict|list); expected a tensor"):
                model(batch(), attention_mask=mask, **more)
    with pytest.raises(ValueError, match="old is of type DynamicCache: a prepared model takes the cache over"):
        model(batch(), old=transformers.DynamicCache())  # a cache by what it is, whatever it is called
    with pytest.raises(ValueError, match="pass input_ids or inputs_embeds"):
        model()
    with pytest.raises(ValueError, match="outside a prepared model"):
        model.model(batch())
    assert torch.equal(model(batch(), logits_to_keep=0).logits, model(batch()).logits)
    with pytest.raises(ValueError, match="logits_to_keep with labels: the loss needs the logits of all tokens"):
        model(batch(), labels=batch(), logits_to_keep=1)
    with pytest.raises(ValueError, match=r"position_ids has shape \(3, 2, 37\); expected"):
        model(batch(), position_ids=torch.zeros(3, 2, T, dtype=torch.long))


def state(model):
    """All that a call of the model depends on beside its weights, of every module and config."""
    modules = {
        name: {k: v for k, v in vars(m).items() if k[0] != "_" and not isinstance(v, torch.Tensor)}
        for name, m in model.named_modules()
    }
    return modules, [m.config._attn_implementation for m in model.modules() if hasattr(m, "config")]


@pytest.mark.parametrize("name", ["Llama", "Phi3", "Qwen3Next"])
def test_unprepare_leaves_nothing_behind(name):
    rope = {"rope_type": "longrope", "rope_theta": 100.0, "factor": 4.0,
            "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0]}  # fmt: skip
    more = {"max_position_embeddings": 16, "original_max_position_embeddings": 16, "rope_parameters": rope}
    model = build(name, **(more if name == "Phi3" else {}))
    earlier = model.forward = model.forward  # an attribute, as accelerate's hooks leave one
    model.config.output_hidden_states = False
    expected, before = model(batch(), use_cache=False).logits, state(model)
    with hf.prepared(model, plan_of_one()) as mine:
        assert mine is model and mine(batch()).loss is None and state(model) != before
    assert state(model) == before and model.forward is earlier
    assert torch.equal(model(batch(), use_cache=False).logits, expected)
    assert model.generate(batch()[:, :3], max_new_tokens=2, do_sample=False).shape == (2, 5)
    with pytest.raises(ValueError, match=f"this {name}ForCausalLM is not prepared"):
        hf.unprepare(model)


def test_what_would_be_wrong_after_unprepare_is_refused():
    model = hf.prepare(build("Llama"), plan_of_one())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    loss = model.train()(batch(), labels=batch()).loss
    hf.unprepare(model)
    with pytest.raises(ValueError, match="backward recomputes layers of a model that was unprepared: call"):
        loss.backward()
    wrapped = hf.prepare(build("Llama"), plan_of_one())
    wrapped.forward = lambda *args, of=wrapped.forward, **given: of(*args, **given)
    with pytest.raises(ValueError, match="this LlamaForCausalLM is not prepared, or its forward was wrapped after"):
        hf.unprepare(wrapped)
    wrapped = hf.prepare(build("Llama"), plan_of_one())
    wrapped.set_attn_implementation("sdpa")
    assert hf.unprepare(wrapped).config._attn_implementation == "sdpa"  # what the user chose since then


def test_what_is_changed_after_prepare_is_refused():
    model = hf.prepare(build("Llama"), plan_of_one())
    model.loss_function = lambda logits, labels, vocab_size, **more: 0 * logits.sum()
    with pytest.raises(ValueError, match=r"trained by another loss \(a loss_function of its own\)"):
        model(batch(), labels=batch())
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="was prepared, and then given 'sdpa' as its attention"):
        model(batch())
    bare = hf.prepare(transformers.LlamaModel(transformers.LlamaConfig(**SMALL)), plan_of_one())
    assert bare(batch()).last_hidden_state.shape == (2, T, 32)
    with pytest.raises(ValueError, match="LlamaModel gives no logits, so it has no use for labels"):
        bare(batch(), labels=batch())
