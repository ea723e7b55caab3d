"""Masks and packed documents by their words: which (query, key) pairs are useful, and what attention takes for them."""

from typing import Any, NamedTuple

import numpy as np

import ringattn as ra
from ringattn.masks.bands import bounds_at, families

DRAWN = "lognormal:MEDIAN:SIGMA or pareto:ALPHA:LEAST"
LONG = (65536, 1024, 8192, 2048, 16384, 4096, 1024, 2048, 8192, 4096, 2048, 1024, 8192, 4096, 2048, 1024)
SHORT = 8 * (512, 4096, 1024, 2048, 512, 1536, 3072, 512, 1024, 2048)
MIXES: dict[str, tuple[int, ...]] = {"long": LONG, "short": SHORT}  # of 131072 tokens
WORDS = (
    "causal; full; a number: a window; first:N:WINDOW; chunk:N; packed: long, short, "
    "lognormal:MEDIAN:SIGMA, pareto:ALPHA:LEAST, even:N (documents of N tokens), full:MIX; that see one another: "
    "prefix:N:LENGTH (N at the start of each LENGTH), spans:N:EVERY; of its own length: shared:PREFIX:BRANCH:COUNT, "
    "and branches:... the same as separate documents"
)


class Case(NamedTuple):
    """A mask over so many tokens: the arguments of attention and of plans, and how many pairs it leaves."""

    tokens: int
    asked: dict[str, Any]
    pairs: float

    @property
    def plain(self) -> bool:
        """Whether as many pairs of one rank are a shorter sequence."""
        spec = self.asked["spec"]
        return set(self.asked) == {"spec"} and spec.window is spec.chunk is None


def case_of(word: str, tokens: int) -> Case:
    """The case of a word; a ValueError if there is no such mask."""
    asked = asked_by(word, tokens)
    docs = asked.get("docs")
    tokens = docs.length if docs else tokens
    sides = (bounds_at(each, np.arange(tokens)) for each in families(asked["spec"], tokens, docs=docs))
    return Case(tokens, asked, float(sum(np.maximum(end - begin, 0).sum() for begin, end in sides)))


def asked_by(word: str, tokens: int) -> dict[str, Any]:
    kind, *given = word.split(":")
    if kind in ("lognormal", "pareto"):
        return packed(drawn(word, tokens, 0))
    if kind == "full" and given:
        return asked_by(":".join(given), tokens) | {"spec": ra.AttentionSpec(causal=False)}
    try:
        n = [int(x) for x in given]
        if kind.isdigit() and int(kind):
            return {"spec": ra.AttentionSpec(window=int(kind))}
        return KINDS[kind](tokens, *n)
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"mask={word}: choose {WORDS}") from None


def packed(lengths: Any, **more: Any) -> dict[str, Any]:
    return {"spec": ra.AttentionSpec(), "docs": ra.Docs.from_lengths(lengths, **more)}


def mixed(lengths: tuple[int, ...], tokens: int) -> list[int]:
    """Documents of these lengths, over and over, that have so many tokens in all; the last one is cut."""
    ends = np.cumsum(np.tile(lengths, tokens // sum(lengths) + 1)).clip(max=tokens)
    return np.diff(ends[: np.searchsorted(ends, tokens) + 1], prepend=0).tolist()


def spans(tokens: int, n: int, every: int) -> dict[str, Any]:
    """One document with an image of `n` tokens in the middle of each `every`."""
    starts = range((every - n) // 2, tokens - n + 1, every)
    return packed([tokens], spans=[(at, at + n) for at in starts])


def tree(tokens: int, prefix: int, branch: int, count: int) -> dict[str, Any]:
    lengths, parents = [prefix, *[branch] * count], [-1, *[0] * count]
    return {"spec": ra.AttentionSpec(), "docs": ra.Docs.tree(lengths, parents)}


KINDS: dict[str, Any] = {
    "causal": lambda tokens: {"spec": ra.AttentionSpec()},
    "full": lambda tokens: {"spec": ra.AttentionSpec(causal=False)},
    "first": lambda tokens, n, window: {"spec": ra.AttentionSpec(first=n, window=window)},
    "chunk": lambda tokens, n: {"spec": ra.AttentionSpec(chunk=n)},
    "long": lambda tokens: packed(mixed(LONG, tokens)),
    "short": lambda tokens: packed(mixed(SHORT, tokens)),
    "even": lambda tokens, n: packed(mixed((n,), tokens)),
    "prefix": lambda tokens, n, length: packed(
        mixed((length,), tokens), prefix=[min(n, x) for x in mixed((length,), tokens)]
    ),
    "spans": spans,
    "shared": tree,
    "branches": lambda tokens, prefix, branch, count: packed([prefix + branch] * count),
}


def lengths_of(given: tuple[int, ...] | str, seq_len: int, seed: int = 0) -> list[int]:
    """These lengths, or those of as many documents as fill the sequence; the same for a seed."""
    lengths = drawn(given, seq_len, seed) if isinstance(given, str) else list(given)
    if sum(lengths) > seq_len:
        raise ValueError(f"docs= holds {sum(lengths)} tokens, more than seq_len={seq_len}")
    return lengths


def drawn(mix: str, seq_len: int, seed: int) -> list[int]:
    """Random lengths of a mix, whose sum is `seq_len`."""
    kind, *numbers = mix.split(":")
    try:
        first, second = map(float, numbers)
    except ValueError:
        first = second = 0.0
    if kind not in ("lognormal", "pareto") or not (0 < first < np.inf and 0 < second < np.inf):
        raise ValueError(f"docs={mix}: give lengths, as in docs=4000,200, or {DRAWN}, numbers above 0")
    random, lengths, left = np.random.default_rng(seed), [], seq_len
    while left:
        n = random.lognormal(np.log(first), second) if kind == "lognormal" else (random.pareto(first) + 1) * second
        lengths.append(min(left, max(1, int(min(n, seq_len)))))
        left -= lengths[-1]
    return lengths
