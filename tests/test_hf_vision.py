"""Models with images and sound over ranks: loss, logits and every gradient, the towers' too, equal one rank's."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial

import pytest
import torch
from hf_ranks import DELTA, SMALL, on_each, same, trained
from torch.nn import functional as F

import ringattn as ra
from ringattn.models import hf
from ringattn.models.hf.choice import attention_of

transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install '.[hf]')")

T, IMAGE = 29, 60  # a prime, and the id of an image's tokens
TEXT = {**SMALL, "initializer_range": 0.2}
TOWER = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 7, "initializer_range": 0.2,
}  # fmt: skip
QWEN_TOWER = {
    **TOWER, "depth": 2, "num_heads": 2, "out_hidden_size": 32, "spatial_merge_size": 2, "temporal_patch_size": 1,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1]}
IDS = {"image_token_id": IMAGE, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}
PREFIXED = {
    "vision_config": {**TOWER, "patch_size": 14, "vision_use_head": False}, "image_token_index": IMAGE,
    "projection_dim": 32,
}  # fmt: skip
IMAGES = "pixel_values", "image_grid_thw"


def by_patches(n: int) -> dict:
    return {"pixel_values": torch.randn(16 * n, 3 * 49), "image_grid_thw": torch.tensor([[1, 4, 4]] * n)}


def by_images(n: int) -> dict:
    return {"pixel_values": torch.randn(n, 3, 28, 28)}


def qwen(text: dict | None = None, **tower) -> tuple[dict, Callable, str]:
    given = {"text_config": {**TEXT, "rope_parameters": ROPE, **(text or {})}, "vision_config": QWEN_TOWER | tower}
    return {**given, **IDS}, by_patches, "mm_token_type_ids"


MODELS = {  # the configuration, what makes n images of 4 tokens each, and the name of the types of tokens
    "qwen2_vl": qwen(hidden_size=32, embed_dim=16),
    "qwen2_5_vl": qwen(fullatt_block_indexes=[1], window_size=14),
    "qwen3_vl": qwen(deepstack_visual_indexes=[0, 1]),
    "qwen3_5": qwen(text={**DELTA, "initializer_range": 0.05}),
    "gemma3": (
        {
            "text_config": {**TEXT, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
            "vision_config": TOWER, "mm_tokens_per_image": 4, "image_token_index": IMAGE,
        },
        by_images, "token_type_ids",
    ),
    "paligemma": ({"text_config": {"model_type": "gemma", **TEXT}, **PREFIXED}, by_images, "token_type_ids"),
    "paligemma2": (
        {"text_config": {"model_type": "gemma2", **TEXT, "sliding_window": 7}, **PREFIXED}, by_images,
        "token_type_ids",
    ),
    "llava": (
        {
            "text_config": {"model_type": "llama", **TEXT}, "image_token_index": IMAGE,
            "vision_config": {"model_type": "clip_vision_model", **TOWER, "patch_size": 14},
        },
        by_images, None,
    ),
    "got_ocr2": (
        {
            "text_config": {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
            "image_token_index": IMAGE,
            "vision_config": {
                **TOWER, "image_size": 56, "output_channels": 16, "mlp_dim": 24, "window_size": 4,
                "global_attn_indexes": [1],
            },
        },
        lambda n: {"pixel_values": torch.randn(n, 3, 56, 56)}, None,
    ),
}  # fmt: skip


OF_TEXT = {
    "llava_onevision": ({"text_config": TEXT, "vision_config": TOWER, "image_token_index": IMAGE}, by_images, None)
}


def build(kind: str):
    name = kind.removesuffix("2") if kind == "paligemma2" else kind
    config = transformers.AutoConfig.for_model(name, **deepcopy((MODELS | OF_TEXT)[kind][0]))
    torch.manual_seed(0)
    way = "eager" if kind in ("paligemma2", "got_ocr2") else "sdpa"  # which these do not have
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation=way)
    with torch.no_grad():  # some start as zeros, which would hide an error
        for weight in model.parameters():
            if weight.dim() == 1 or not weight.any():
                weight.add_(0.1 * torch.randn_like(weight))
    return model


def batch(kind: str, at=((3, 14), (20,)), length: int = T) -> dict:
    """Rows of text with images at these tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 50, (len(at), length), generator=generator)
    for row, begins in zip(ids, at, strict=True):
        for begin in begins:
            row[begin : begin + 4] = IMAGE
    _, images, types = (MODELS | OF_TEXT)[kind]
    torch.manual_seed(1)
    n = sum(map(len, at))
    results = {"input_ids": ids, **(images(n) if n else {})}
    if kind.startswith("paligemma"):  # images and a question see one another, and not the answer
        ends = torch.tensor([max(begins, default=0) + 8 for begins in at])
        return {**results, types: (torch.arange(length) >= ends[:, None]).long()}
    return {**results, **({types: (ids == IMAGE).long()} if types else {})}


def compare(kind: str, given: dict, ring: int, ulysses: int, real: torch.Tensor | None = None) -> None:
    model = build(kind)
    labels = given["input_ids"].masked_fill(given["input_ids"] == IMAGE, -100)
    real = torch.ones_like(labels, dtype=torch.bool) if real is None else real
    expected = deepcopy(model)
    predicted = F.pad(real[:, :-1], (1, 0))  # by real tokens
    output = expected(**given, labels=labels.masked_fill(~(real & predicted), -100), use_cache=False)
    output.loss.backward()
    results = over_ranks(model, given, labels, {"ring": ring, "ulysses": ulysses})
    same(results, output.loss, expected, output.logits, real)


def over_ranks(model, given: dict, labels: torch.Tensor, ranks: dict[str, int]):
    strategy = "ring" if ranks["ring"] > 1 else "ulysses"
    return on_each(model, partial(trained, **given, labels=labels), labels.shape[1], ranks, strategy=strategy)


@pytest.mark.parametrize("ring, ulysses", [(3, 1), (1, 2)])
@pytest.mark.parametrize("kind", MODELS)
def test_loss_logits_and_every_gradient_equal_one_rank(kind, ring, ulysses):
    compare(kind, batch(kind), ring, ulysses)


@pytest.mark.parametrize("kind", MODELS)
def test_text_alone(kind):
    """Also where a processor adds types of tokens, which are all those of text."""
    given = batch(kind, at=((), ()))
    compare(kind, given, 2, 1)
    if len(given) > 1 and not kind.startswith("paligemma"):
        compare(kind, {"input_ids": given["input_ids"]}, 2, 1)


@pytest.mark.parametrize("keep", [0, 3, torch.tensor([-1, 4])])
@pytest.mark.parametrize("kind", ["got_ocr2", "llava_onevision"])
def test_models_that_hand_logits_to_keep_to_their_decoder(kind, keep):
    model, given = build(kind), batch(kind, at=((3, 14), (20,)) if kind in MODELS else ((), ()))
    expected = model(**given, logits_to_keep=keep, use_cache=False).logits

    def call(mine):
        logits = mine(**given, logits_to_keep=keep).logits
        return logits if isinstance(keep, torch.Tensor) or keep else hf.whole(mine, logits)

    for logits in on_each(model, call, T, {"ring": 2}):
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_plans_are_predicted_for_the_mask_of_the_text():
    """Which is causal, although towers see whole images."""
    assert attention_of(build("llava"))["spec"] == ra.AttentionSpec()


@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3", "paligemma2"])
def test_padding(kind):
    """Of 29 tokens the second row has 18, and its image comes right after the padding."""
    given, mask = batch(kind, at=((14, 22), (12,))), torch.ones(2, T, dtype=torch.long)
    mask[1, :11] = 0
    compare(kind, {**given, "attention_mask": mask}, 2, 1, real=mask.bool())


@pytest.mark.parametrize("kind", MODELS)
def test_packed_samples_with_images_equal_each_sample_alone(kind):
    lengths, at = (17, 12), ((3, 9), (5,))
    separate, model = [batch(kind, at=(begins,), length=n) for n, begins in zip(lengths, at, strict=True)], build(kind)
    packed = {name: torch.cat([x[name] for x in separate], int(name not in IMAGES)) for name in separate[0]}
    positions = [torch.arange(n)[None] for n in lengths]
    if kind.startswith("qwen"):  # the positions of text, and then those of M-RoPE
        rope = [
            model.model.get_rope_index(**{name: x[name] for name in x if name != "pixel_values"})[0] for x in separate
        ]
        positions = [torch.cat([text[None], several]) for text, several in zip(positions, rope, strict=True)]
    packed["position_ids"] = torch.cat(positions, -1)
    labels = [x["input_ids"].masked_fill(x["input_ids"] == IMAGE, -100) for x in separate]
    for row in labels:
        row[:, 0] = -100
    expected = deepcopy(model)
    counts = torch.tensor([float((row != -100).sum()) for row in labels])
    losses = [expected(**x, labels=row, use_cache=False).loss for x, row in zip(separate, labels, strict=True)]
    mean = (torch.stack(losses) * counts).sum() / counts.sum()
    mean.backward()
    same(over_ranks(model, packed, torch.cat(labels, 1), {"ring": 2, "ulysses": 1}), mean, expected)


@pytest.mark.parametrize("kind", MODELS)
def test_generate_goes_on_from_images_as_one_rank_does(kind):
    given, mask = batch(kind, at=((14, 22), (12,))), torch.ones(2, T, dtype=torch.long)
    mask[1, :11] = 0
    given, model = {**given, "attention_mask": mask}, build(kind).eval()
    model.generation_config.eos_token_id = None
    options = {"max_new_tokens": 5, "do_sample": False, "num_beams": 2}
    expected = model.generate(**given, **options)
    for result in on_each(model, lambda mine: mine.generate(**given, **options), T, {"ring": 2}):
        assert result.tolist() == expected.tolist()


def a_second_prompt(model) -> None:
    """A cache does not give its keys back, which the spans of images that are seen both ways would need."""
    cache = hf.RanksCache(hf.plan_of(model), 2 * T)
    for _ in range(2):
        model(**batch("gemma3"), past_key_values=cache)


def with_a_mask_of_its_own(shape: tuple[int, ...], model) -> None:
    """Here a hook stands for a model that makes one: its decoder gets more than which tokens are real."""
    masked = {"attention_mask": torch.ones(shape)}
    model.get_decoder().register_forward_pre_hook(lambda _, args, given: (args, given | masked), with_kwargs=True)
    model(**batch("llava"))


def without_types(model) -> None:
    model(batch("paligemma", at=((), ()))["input_ids"])


@pytest.mark.parametrize(
    ("kind", "call", "message"),
    [
        ("gemma3", a_second_prompt, "both ways behind a cache are not supported; give one prompt"),
        (
            "llava",
            partial(with_a_mask_of_its_own, (2, T, T)),
            r"a mask \(2, 29, 29\) of its own, which is not supported",
        ),
        ("llava", partial(with_a_mask_of_its_own, (2, 1, T, T)), r"a mask \(2, 1, 29, 29\) of its own"),
        ("paligemma", without_types, "sees its prefix both ways: pass token_type_ids"),
        ("paligemma2", without_types, "sees its prefix both ways: pass token_type_ids"),
    ],
    ids=["a second prompt", "three dims", "four dims", "paligemma", "paligemma2"],
)
def test_what_cannot_be_spread_is_refused(kind, call, message):
    with pytest.raises(ValueError, match=message):
        call(hf.prepare(build(kind).eval(), ra.plan(seq_len=T)))
