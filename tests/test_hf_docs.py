"""Documents, prefixes and trees that a caller describes to a prepared model: all numbers are those of one rank."""

from copy import deepcopy
from types import SimpleNamespace

import pytest
import test_hf_models
import torch
import transformers
from hf_ranks import on_each, same, trained
from test_hf import build
from torch.nn import functional as F

import ringattn as ra
from ringattn import hf
from ringattn.comms.local import run

T = 41
TREES = {  # lengths and parents of the segments of each row: some are empty, rows end in padding
    "a question with answers": [([11, 7, 9, 6, 8], [-1, 0, 0, 0, 0])],
    "trees": [([5, 4, 6, 3, 9, 8, 6], [-1, 0, 1, 1, 0, -1, 5])],
    "rows that differ": [([9, 0, 8, 5, 7], [-1, 0, 1, 1, 0]), ([6, 12, 3, 10], [-1, 0, -1, 2])],
    "documents": [([17, 1, 9, 14], [-1] * 4)],
}


def made(name: str):
    if name != "Llama4":
        return build(name)
    config = transformers.AutoConfig.for_model(
        "llama4_text", **test_hf_models.SMALL, **test_hf_models.MODELS["llama4_text"]
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def branch(parents: list[int], i: int) -> list[int]:
    return [i] if parents[i] < 0 else [*branch(parents, parents[i]), i]


def each_branch_alone(model, tokens, labels, trees):
    """Losses and logits of the tokens, each row's branches one after the other as sequences of their own."""
    losses, logits = [], torch.zeros(*tokens.shape, 64)
    for row, (lengths, parents) in enumerate(trees):
        starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
        for i in range(len(lengths)):
            at = torch.cat([torch.arange(starts[j], starts[j + 1]) for j in branch(parents, i)])
            own = lengths[i]
            if not own:
                continue
            results = model(tokens[row, at][None], use_cache=False).logits[0]
            logits[row, at[-own:]] = results[-own:]
            first = max(len(at) - own, 1)  # no token predicts the first one
            losses.append(F.cross_entropy(results[first - 1 : -1], labels[row, at[first:]], reduction="sum"))
    return losses, logits


@pytest.mark.parametrize(
    ("name", "case"),
    [
        *(("Llama", case) for case in TREES),
        ("Mistral", "trees"),
        *(("Llama4", case) for case in ("trees", "documents")),
    ],
)
def test_a_tree_is_its_branches(name, case):
    """Shared tokens are there once. Windows, chunks and Llama 4's temperatures count along the branch."""
    trees = TREES[case]
    tokens, labels = torch.randint(3, 64, (2, len(trees), T), generator=torch.Generator().manual_seed(0))
    labels[:, 3] = -100
    docs = ra.Docs.tree([t[0] for t in trees], [t[1] for t in trees], pad_to=T)
    plain, real = made(name), torch.arange(T) < torch.from_numpy(docs.starts[:, -1:].copy())
    copies = [deepcopy(plain) for _ in range(4)]
    losses, logits = each_branch_alone(plain, tokens, labels, trees)
    roots = sum(parent < 0 < n for lengths, parents in trees for n, parent in zip(lengths, parents, strict=True))
    count = int((real & (labels != -100)).sum()) - roots
    loss = sum(losses) / count
    loss.backward()
    batch = {"labels": labels, "docs": docs}
    trainer = SimpleNamespace(by_trl=False, spread=SimpleNamespace(over=()), args=None)
    assert hf.OverRanks._get_num_items_in_batch(trainer, [batch], "cpu") == count

    def one_rank(mesh):
        mine = hf.prepare(copies[mesh.rank], mesh, seq_len=T)
        result = trained(mine, input_ids=tokens, **batch)
        dealt = getattr(mine.ringattn_last, "plan", mine.ringattn_last).layout == "balanced"
        assert dealt == (len(trees) == 1 and (case == "documents" or bool(real.all())))
        return result

    same(run(one_rank, ring=2, ulysses=2), loss, plain, logits, real)


def test_a_prefix_sees_itself():
    """In models of text alone, as a dense mask on one rank."""
    docs = ra.Docs.from_lengths([25, 16], prefix=[9, 16])
    at, document = torch.arange(T), torch.arange(T) // 25
    sees = (at[:, None] >= at) | (at < 9) & (at[:, None] < 9) | (document == 1)
    mask = torch.where(sees & (document[:, None] == document), 0.0, -torch.inf)[None, None]
    tokens = torch.randint(3, 64, (1, T), generator=torch.Generator().manual_seed(0))
    plain = build("Llama")
    positions = torch.where(document == 1, at - 25, at)[None]
    expected = plain(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits
    for result in on_each(plain, lambda mine: hf.whole(mine, mine(tokens, docs=docs).logits), T, {"ring": 2}):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


def test_a_mask_leaves_a_model_its_windows():
    """A mask over all tokens changes nothing in layers of which some have a window."""
    tokens, mask = torch.randint(3, 64, (1, T)), ra.Mask.from_slices([(0, T)], [(0, T)], "causal", T)
    plain = build("Mistral")
    for result in on_each(plain, lambda mine: hf.whole(mine, mine(tokens, docs=mask).logits), T, {"ring": 2}):
        torch.testing.assert_close(result, plain(tokens, use_cache=False).logits, rtol=1e-5, atol=1e-5)
