"""`generate` of a prepared model gives, on every rank, the tokens that the model itself gives on one."""

from copy import deepcopy

import pytest
import torch

import ringattn as ra
from ringattn.comms.local import run
from ringattn.launch import processes
from ringattn.models import hf

transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install '.[hf]')")
pytest.importorskip("peft", reason="peft is not installed (pip install peft)")

from hf_ranks import on_each  # noqa: E402
from test_hf import T, batch, build, plan_of_one, seeing  # noqa: E402


def talkative(name: str, **more):
    """A model whose weights are large enough that each prompt goes on in its own way."""
    model = (seeing(name) if name.islower() else build(name, **more)).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.2, generator=torch.Generator().manual_seed(weight.numel()))
    model.generation_config.eos_token_id = None
    return model


def prompts(padded: bool) -> dict[str, torch.Tensor]:
    tokens, mask = batch(), torch.ones(2, T, dtype=torch.long)
    if padded:
        tokens[1, :12] = mask[1, :12] = 0
    return {"input_ids": tokens, "attention_mask": mask}


CASES = {
    "greedy": ("Llama", {"ring": 2, "ulysses": 2}, False, {}),
    "windows": ("Gemma2", {"ring": 2, "ulysses": 2}, False, {}),
    "sinks": ("GptOss", {"ring": 2}, True, {}),
    "learned positions": ("OPT", {"ring": 2}, True, {}),
    "beams": ("Llama", {"ring": 2}, True, {"num_beams": 3, "num_return_sequences": 2}),
    "no cache": ("Llama", {"ring": 2}, True, {"use_cache": False, "max_new_tokens": 8}),
    "a prompt in chunks": ("Mistral", {"ulysses": 2}, False, {"prefill_chunk_size": 17}),
    "padding longer than a chunk": ("Llama", {"ring": 2}, True, {"prefill_chunk_size": 5}),
    "padding of whole chunks": ("Llama", {"ring": 2}, True, {"prefill_chunk_size": 4, "max_new_tokens": 4}),
    "states behind chunks of padding": ("Bamba", {"ring": 2}, True, {"prefill_chunk_size": 5, "max_new_tokens": 4}),
    "text for a model of images": ("qwen2_5_vl", {"ring": 2}, True, {"max_new_tokens": 8}),
    "states": ("Qwen3Next", {"ring": 2, "ulysses": 2}, False, {}),
    "states behind padding": ("Bamba", {"ring": 2}, True, {"max_new_tokens": 8}),
    "states in chunks": ("Qwen3_5", {"ulysses": 2}, False, {"prefill_chunk_size": 17}),
    "states of beams": ("KimiLinear", {"ring": 2}, True, {"num_beams": 3, "num_return_sequences": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_one_rank(case):
    name, ranks, padded, options = CASES[case]
    options = {"max_new_tokens": 20, "do_sample": False, **options}
    plain, given = talkative(name), prompts(padded)
    expected = plain.generate(**given, **options)
    assert len(set(expected[0, T:].tolist())) > 1
    layout = "zigzag" if "ring" in ranks else "auto"
    for result in on_each(plain, lambda mine: mine.generate(**given, **options), T, ranks, layout=layout):
        assert torch.equal(result, expected), f"{case}: {result.tolist()}, expected {expected.tolist()}"


@pytest.mark.parametrize("name", ["Llama", "Qwen3_5"])
def test_logits_of_every_step_and_a_second_turn(name):
    """The cache that generate returns goes on with more tokens; few of them, or so many that ranks share them."""
    plain, options = talkative(name), {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}

    def turns(model):
        results, tokens, cache = [], batch(), None
        for more in (0, 3, 12, 30):
            tokens = torch.cat([tokens, batch()[:, :more]], 1)
            cached = {"past_key_values": cache} if cache is not None else {}
            answer = model.generate(
                tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=4, **cached, **options
            )
            results.append(torch.stack(answer.logits))
            tokens, cache = answer.sequences, answer.past_key_values
        return tokens, results

    tokens, logits = turns(plain)

    for mine, results in on_each(plain, turns, T, {"ring": 2}):
        assert torch.equal(mine, tokens)
        for ours, theirs in zip(results, logits, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def sampled(ranks: int) -> tuple[list, list[float]]:
    """One rank: samples, and the next random number; ranks have generators of their own."""
    import torch.distributed as dist

    torch.manual_seed(3)
    model = talkative("Llama")
    if ranks > 1:
        model = hf.prepare(model, ra.plan(ra.init_mesh(ring=ranks), seq_len=T))
    torch.manual_seed(7 + dist.get_rank())
    result = model.generate(**prompts(True), do_sample=True, temperature=2.0, max_new_tokens=10)
    return result.tolist(), torch.rand(1).tolist()


@pytest.mark.slow
def test_all_ranks_sample_what_one_rank_would():
    (expected, follows), *_ = processes.run(sampled, 1, 1)
    (first, after), (second, other) = processes.run(sampled, 2, 2)
    assert first == second == expected and after == follows != other


def test_what_generate_cannot_do_is_refused():
    model, tokens, mask = hf.prepare(talkative("Llama"), plan_of_one()), batch(), torch.ones(2, T, dtype=torch.long)
    holes = mask.index_fill(1, torch.tensor([30]), 0)
    cache = hf.RanksCache(plan_of_one(), T)
    model(tokens, past_key_values=cache)
    for given, message in (
        ({"cache_implementation": "static"}, "cache_implementation='static': a prepared model has caches over ranks"),
        ({"prompt_lookup_num_tokens": 2}, "assisted_generation is not supported over ranks; supported are greedy"),
        ({"past_key_values": transformers.DynamicCache()}, "is of type DynamicCache: a prepared model takes the cache"),
        ({"attention_mask": 0 * mask[:1]}, "attention_mask has a row of padding only"),
        ({"attention_mask": holes[:1]}, "attention_mask has padding behind real tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            model.generate(tokens[:1], max_new_tokens=2, **{"attention_mask": mask[:1], **given})
    with pytest.raises(ValueError, match=r"37 tokens a row and no room for 1 more: .*past_key_values=hf.RanksCache"):
        model(tokens[:, :1], past_key_values=cache)

    def tokens_that_differ(model):
        plan = hf.plan_of(model)
        with pytest.raises(ValueError, match="differ"):
            model(tokens.roll(plan.ring_axis.rank), past_key_values=hf.RanksCache(plan, T))

    on_each(talkative("Llama"), tokens_that_differ, T, {"ring": 2})


def test_embeddings_go_into_a_cache_and_token_ids_that_are_not_compared():
    plain = talkative("Llama")
    copies, embedded = [deepcopy(plain) for _ in range(4)], plain.get_input_embeddings()(batch()).detach()
    expected = plain(batch(), use_cache=False).logits

    def one_rank(mesh):
        plan = ra.plan(mesh, seq_len=T)
        model = hf.prepare(copies[mesh.rank], plan)
        result = model(inputs_embeds=embedded, past_key_values=hf.RanksCache(plan, T)).logits
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
        model = hf.prepare(copies[2 + mesh.rank], plan, compare=False)
        model(batch().roll(mesh.rank), past_key_values=hf.RanksCache(plan, T))
        model(batch().roll(mesh.rank), labels=batch().roll(mesh.rank))

    run(one_rank, ring=2)
