"""Models of transformers over four ranks: logits, loss and every gradient equal the model's own on one rank."""

import pickle
import threading
from copy import deepcopy
from functools import partial

import pytest
import torch
from hf_ranks import DELTA, SMALL, gradients, on_each, same, trained
from torch._dynamo.testing import CompileCounterWithBackend

import ringattn as ra
from ringattn.comms.local import run
from ringattn.models import hf
from ringattn.models.hf.attention import Call, attend

transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install '.[hf]')")
peft = pytest.importorskip("peft", reason="peft is not installed (pip install peft)")

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


def test_documents_beside_positions_that_do_not_restart():
    model, given = hf.prepare(build("Llama"), plan_of_one()), flattened(return_flash_attn_kwargs=True)
    running = model(**{**given, "position_ids": torch.arange(T)[None]})
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
        torch.testing.assert_close(model(tokens, logits_to_keep=0).logits, expected.logits)  # 0: of all


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


def test_a_compiled_model_is_prepared_inside():
    model = build("Llama")
    expected = model(batch(), use_cache=False).logits
    mine = hf.prepare(torch.compile(model, backend="eager"), plan_of_one())
    torch.testing.assert_close(mine(batch()).logits, expected, rtol=1e-5, atol=1e-5)
    assert hasattr(model, "ringattn") and hf.unprepare(mine) is mine and not hasattr(model, "ringattn")


@pytest.mark.parametrize(
    ("make", "given", "message"),
    [
        (lambda: build("Llama", attention_dropout=0.1), {}, "LlamaForCausalLM has attention_dropout=0.1"),
        (lambda: torch.nn.Linear(2, 2), {}, "Linear is not a transformers model"),
        (lambda: pooled(), {}, "LlamaForSequenceClassification predicts from one token"),
        (lambda: t5(), {}, "T5ForConditionalGeneration is an encoder-decoder"),
        (lambda: torch.nn.DataParallel(build("Llama")), {}, "wrapped in DataParallel: prepare before wrapping"),
        (lambda: torch.nn.DataParallel(lora(build("Llama"))), {}, "wrapped in DataParallel: prepare before wrapping"),
        (lambda: hf.prepare(build("Llama"), plan_of_one()), {}, "this LlamaForCausalLM is already prepared"),
        (lambda: build("Llama"), {"plan": None}, "plan is of type NoneType; pass a mesh of torch"),
        (lambda: build("Llama"), {"plan": ra.plan(seq_len=T, heads=(4, 2), head_dim=8)}, "without heads and head_dim"),
        (lambda: build("Llama"), {"over": ("data",)}, "is given no mesh with an axis 'data'"),
    ],
    ids=[
        "dropout", "linear", "pooled", "t5", "wrapped", "an adapter wrapped", "prepared", "no plan", "heads", "axis",
    ],
)  # fmt: skip
def test_what_cannot_be_prepared_is_refused_and_stays_as_it_was(make, given, message):
    model = make()
    before = state(model)
    with pytest.raises(ValueError, match=message):
        hf.prepare(model, **{"plan": plan_of_one(), **given})
    assert state(model) == before


def with_bias(model):
    """Calls the attention of a layer with what ours does not know."""
    q = torch.randn(1, 4, 5, 8)
    given = {"ringattn": Call(ra.plan(seq_len=5), None), "position_ids": torch.arange(5), "use_cache": False}
    assert attend(torch.nn.Identity(), q, q, q, None, **given)[0].shape == (1, 5, 4, 8)
    attend(torch.nn.Identity(), q, q, q, None, **given, position_bias=q, indices=q, alibi=None)


def with_another_loss(model):
    model.loss_function = lambda logits, labels, vocab_size, **more: 0 * logits.sum()
    model(batch(), labels=batch())


def with_another_attention(model):
    model.set_attn_implementation("sdpa")
    model(batch())


def without_a_head(model):
    bare = hf.prepare(transformers.LlamaModel(model.config), plan_of_one())
    assert bare(batch()).last_hidden_state.shape == (2, T, 32)
    bare(batch(), labels=batch())


def unprepared_before_backward(model):
    model.gradient_checkpointing_enable({"use_reentrant": False})
    loss = model.train()(batch(), labels=batch()).loss
    hf.unprepare(model)
    loss.backward()


def unprepared_twice(model):
    hf.unprepare(hf.unprepare(model))


def unprepared_below_a_wrapper(model):
    model.forward = lambda *args, of=model.forward, **given: of(*args, **given)
    hf.unprepare(model)


HOLES = torch.ones(2, T, dtype=torch.long).index_put((torch.tensor(0), torch.tensor(5)), torch.tensor(0))
EDGES = torch.tensor([0, 20, 21, T], dtype=torch.int32)
OF_TYPES = {"full_attention": torch.ones(2, T)}  # what transformers takes, a mask a layer type
DOCS = ra.Docs.from_lengths([20, 17])
NO_TENSOR = "attention_mask is of type (dict|list); expected a tensor"
REFUSED = [  # a call of a prepared Llama, by its arguments or a function, and a part of the error's message
    ({"attention_mask": HOLES}, "padding between real tokens"),
    ({"attention_mask": torch.ones(2, 1, T, T)}, r"expected \(2, 37\)"),
    ({"attention_mask": OF_TYPES}, NO_TENSOR),
    ({"attention_mask": [[1] * T] * 2, "labels": batch()}, NO_TENSOR),
    ({"attention_mask": OF_TYPES, "past_key_values": hf.RanksCache(ra.plan(seq_len=T), T)}, NO_TENSOR),
    # a cache by what it is, whatever it is called
    ({"old": transformers.DynamicCache()}, "old is of type DynamicCache: a prepared model takes the cache over"),
    ({"input_ids": None}, "pass input_ids or inputs_embeds"),
    ({"labels": batch(), "logits_to_keep": 1}, "logits_to_keep with labels: the loss needs the logits of all tokens"),
    ({"position_ids": torch.zeros(3, 2, T, dtype=torch.long)}, r"position_ids has shape \(3, 2, 37\); expected"),
    ({"cu_seq_lens_q": EDGES}, "with 2 rows of 37 tokens"),
    ({"input_ids": batch()[:1], "cu_seq_lens_q": EDGES[:-1]}, r"=\[0, 20, 21\] with 1 rows of 37 tokens: it must rise"),
    ({"input_ids": batch()[:1], "seq_idx": EDGES}, r"seq_idx has shape \(4,\); expected \(1, 37\)"),
    ({"docs": [20, 17]}, "docs is of type list; pass ringattn.Docs"),
    ({"docs": ra.Docs.from_lengths([20])}, "expected those of 2 rows, or one, of 37 tokens"),
    ({"docs": DOCS, "attention_mask": torch.ones(2, T)}, "docs and attention_mask both say where"),
    ({"docs": DOCS, "past_key_values": hf.RanksCache(ra.plan(seq_len=T), T)}, "does not take docs"),
    ({"labels": batch(), "past_key_values": hf.RanksCache(ra.plan(seq_len=T), T)}, "labels with past_key_values"),
    (lambda model: model.model(batch()), "outside a prepared model"),
    (with_bias, "Identity passes indices, position_bias to its attention, which is not supp"),
    (with_another_loss, r"trained by another loss \(a loss_function of its own\)"),
    (with_another_attention, "was prepared, and then given 'sdpa' as its attention"),
    (without_a_head, "LlamaModel gives no logits, so it has no use for labels"),
    (unprepared_before_backward, "backward recomputes layers of a model that was unprepared: call"),
    (unprepared_twice, "this LlamaForCausalLM is not prepared"),
    (unprepared_below_a_wrapper, "this LlamaForCausalLM is not prepared, or its forward was wrapped after"),
    (pickle.dumps, "save its state_dict"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_a_prepared_model_cannot_do_is_refused(call, message):
    model = hf.prepare(build("Llama"), plan_of_one())
    with pytest.raises((ValueError, TypeError), match=message):
        call(model) if callable(call) else model(**{"input_ids": batch(), **call})


@pytest.mark.parametrize(
    ("make", "given", "message"),
    [
        (lambda: small("doge"), {}, "DogeAttention passes a mask of its own to its attention"),
        (lambda: small("nemotron"), {}, "does not hand its keyword arguments on"),
        (lambda: small("stablelm"), {}, "does not hand its keyword arguments on"),
        (lambda: small("mamba2", num_heads=8, head_dim=8, state_size=8, n_groups=2), {},
         "a linear layer was called .* by one that does not hand its keyword arguments on"),
        (lambda: build("Qwen3_5"), {"plan": ra.Plan(T, 2, 1, "ring", "striped")},
         "has linear layers, and layout='striped'"),
    ],
    ids=["a learned mask", "nemotron", "stablelm", "mamba2", "striped"],
)  # fmt: skip
def test_what_a_model_asks_of_its_layers_is_never_dropped(make, given, message):
    with pytest.raises(ValueError, match=message):
        hf.prepare(make(), **{"plan": plan_of_one(), **given})(batch() % 50)


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


def test_an_attention_that_was_chosen_since_stays_after_unprepare():
    model = hf.prepare(build("Llama"), plan_of_one())
    model.set_attn_implementation("sdpa")
    assert hf.unprepare(model).config._attn_implementation == "sdpa"
