"""Masks and packed documents by their words: which (query, key) pairs are useful, and what attention takes for them."""

from typing import Any, NamedTuple

import numpy as np

import ringattn as ra
from ringattn.masks.bands import work_of

MIX = "lognormal:MEDIAN:SIGMA"
MIXES: dict[str, tuple[int, ...]] = {
    "long": (65536, 1024, 8192, 2048, 16384, 4096, 1024, 2048, 8192, 4096, 2048, 1024, 8192, 4096, 2048, 1024),
    "short": 8 * (512, 4096, 1024, 2048, 512, 1536, 3072, 512, 1024, 2048),
}  # of 131072 tokens
WORDS = (
    f"causal; full; a number: a window; first:N:WINDOW; chunk:N; packed documents: long, short, {MIX}, "
    "even:N (of N tokens)"
)
ALIGNED = 128  # tokens; kernels are slower at odd lengths


class Case(NamedTuple):
    """A mask over so many tokens: the arguments of attention and of plans, and how many pairs it leaves."""

    word: str
    tokens: int
    asked: dict[str, Any]
    pairs: float

    def alone(self, ranks: int) -> "Case":
        """What one rank takes as long for as for its share: a shorter sequence of as many pairs, or else the whole.

        Its time is multiplied by the ratio of the pairs.
        """
        spec = self.asked["spec"]
        if ranks == 1 or set(self.asked) != {"spec"} or not spec.window is spec.chunk is None:
            return self
        return case_of(self.word, max(1, round(self.tokens / ranks**0.5 / ALIGNED)) * ALIGNED)


def case_of(word: str, tokens: int) -> Case:
    """The case of a word; a ValueError if there is no such mask."""
    asked = asked_by(word, tokens)
    return Case(word, tokens, asked, float(work_of(asked["spec"], tokens, docs=asked.get("docs")).below(tokens)))


def asked_by(word: str, tokens: int) -> dict[str, Any]:
    kind, *given = word.split(":")
    if kind == "lognormal":
        return {"spec": ra.AttentionSpec(), "docs": ra.Docs.from_lengths(drawn(word, tokens, 0))}
    try:
        n = [int(x) for x in given]
        if kind.isdigit() and int(kind):
            return {"spec": ra.AttentionSpec(window=int(kind))}
        if kind in SPECS:
            return {"spec": SPECS[kind](*n)}
        lengths = mixed(n if kind == "even" else MIXES[kind], tokens)
        return {"spec": ra.AttentionSpec(), "docs": ra.Docs.from_lengths(lengths)}
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        raise ValueError(f"mask={word}: choose {WORDS}") from None


SPECS: dict[str, Any] = {
    "causal": ra.AttentionSpec,
    "full": lambda: ra.AttentionSpec(causal=False),
    "first": lambda n, window: ra.AttentionSpec(first=n, window=window),
    "chunk": lambda n: ra.AttentionSpec(chunk=n),
}


def mixed(lengths: Any, tokens: int) -> list[int]:
    """Documents of these lengths, over and over, that have so many tokens in all; the last one is cut."""
    ends = np.cumsum(np.tile(lengths, tokens // sum(lengths) + 1)).clip(max=tokens)
    return np.diff(ends[: np.searchsorted(ends, tokens) + 1], prepend=0).tolist()


def drawn(mix: str, seq_len: int, seed: int) -> list[int]:
    """Random lengths of a mix, whose sum is `seq_len`."""
    kind, *numbers = mix.split(":")
    try:
        median, sigma = map(float, numbers)
    except ValueError:
        median = sigma = 0.0
    if kind != "lognormal" or not (0 < median < np.inf and 0 < sigma < np.inf):
        raise ValueError(f"docs={mix}: give lengths, as in docs=4000,200, or {MIX}, numbers above 0")
    random, lengths, left = np.random.default_rng(seed), list[int](), seq_len
    while left:
        lengths.append(max(1, int(min(random.lognormal(np.log(median), sigma), left))))
        left -= lengths[-1]
    return lengths
