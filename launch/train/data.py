"""Where tokens come from: files, read only where they are needed, and the order in which a run sees them.

Order is a pure function of (seed, how many sequences were seen): there is no state but that number, and resuming on
another number of ranks reads the same sequences.
"""

import os
import sysconfig
import zlib
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ringattn.conf.schema import Data, Train

NOT_OURS = ("site-packages", "dist-packages", "__pycache__")
UNLIKE_TEXT = ("test", "tests", "encodings")  # of the standard library: tables of characters, and not on every machine


@dataclass(frozen=True)
class Corpus:
    """Files laid end to end as one array of tokens."""

    name: str
    files: tuple[Path, ...]
    dtype: np.dtype = np.dtype(np.uint8)  # noqa: RUF009 (immutable)
    vocab: int = 256

    @cached_property
    def ends(self) -> np.ndarray:
        """The end of each file, in tokens."""
        return np.cumsum([file.stat().st_size // self.dtype.itemsize for file in self.files])

    def __len__(self) -> int:
        return int(self.ends[-1]) if self.files else 0

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count) as int64."""
        first, last = np.searchsorted(self.ends, (start, start + count - 1), "right")
        blocks = []
        for i in range(first, last + 1):
            begin, end = int(self.ends[i - 1]) if i else 0, int(self.ends[i])
            low, high = max(start, begin), min(start + count, end)
            offset = (low - begin) * self.dtype.itemsize
            blocks.append(np.fromfile(self.files[i], self.dtype, high - low, offset=offset))
        tokens = np.concatenate(blocks).astype(np.int64)
        if len(tokens) < count:
            raise ValueError(f"{self.name} is shorter than when the run began; do not change data meanwhile")
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.vocab:
            raise ValueError(
                f"the data holds token {low if low < 0 else high}, and model.vocab={self.vocab}; look at data.path and "
                f"data.tokens, or use model.vocab={high + 1} or more"
            )
        return tokens


class Sample(NamedTuple):
    """A sequence and the token after it, [seq_len + 1]; and where documents other than the first one begin in it."""

    tokens: np.ndarray
    starts: np.ndarray

    def lengths(self, count: int) -> list[int]:
        """The documents' parts among the first `count` tokens."""
        return np.diff([0, *self.starts[self.starts < count], count]).tolist()


@dataclass(frozen=True)
class Samples:
    """Sequences of `seq_len` tokens and the one after each, in an order drawn from the seed, epoch after epoch."""

    corpus: Corpus
    seq_len: int
    seed: int
    held_out: int
    documents: str = ""

    def __post_init__(self) -> None:
        if self.total < 1:
            count = len(self.corpus)
            shorter = f"seq_len={count - 1} or less, or " * (count > 1)
            raise ValueError(
                f"{self.corpus.name} has {count} tokens, one sequence takes seq_len + 1 = {self.seq_len + 1}; "
                f"use {shorter}more data"
            )

    def __len__(self) -> int:
        """Training sequences in one epoch."""
        return self.total - self.kept

    @property
    def total(self) -> int:
        return (len(self.corpus) - 1) // self.seq_len

    @property
    def kept(self) -> int:
        """Sequences that are never trained on: at most half of them."""
        return min(self.held_out, self.total // 2)

    def train(self, number: int) -> Sample:
        """The `number`-th training sequence of the run."""
        epoch, i = divmod(number, len(self))
        return self.of_split(shuffled(len(self), self.seed, 1, epoch)[i])

    def evaluation(self, number: int) -> Sample:
        return self.of_split(len(self) + number)

    def of_split(self, index: int) -> Sample:
        """One of all samples, shuffled once: the last `kept` are held out."""
        return self.sample(shuffled(self.total, self.seed, 0)[index])

    def sample(self, index: int) -> Sample:
        start, count = int(index) * self.seq_len, self.seq_len + 1
        tokens, ends = self.corpus.read(start, count), self.corpus.ends
        if self.documents == "files":
            return Sample(tokens, ends[(start < ends) & (ends < start + count)] - start)
        return Sample(tokens, np.flatnonzero(tokens[:-1] == int(self.documents or -1)) + 1)


@lru_cache(maxsize=4)
def shuffled(count: int, *seed: int) -> np.ndarray:
    """The numbers below `count` in an order that depends on the seed alone; drawn once and read-only."""
    order = np.random.default_rng(seed).permutation(count)
    order.flags.writeable = False
    return order


def of(config: Train) -> Samples:
    """The sequences of a run; a ValueError if its data are missing, or too short for one."""
    corpus, data = open_corpus(config.data, config.model.vocab), config.data
    return Samples(corpus, config.seq_len, config.seed, data.held_out, data.documents)


def open_corpus(data: Data, vocab: int) -> Corpus:
    """The files that the configuration names; a ValueError says what is missing."""
    dtype, stdlib = np.dtype(data.tokens or "uint8"), data.path == "stdlib"
    if not data.path:
        raise ValueError("use data.path=PATH: a folder of files, or one file")
    path = Path(sysconfig.get_paths()["stdlib"] if stdlib else data.path).expanduser()
    if not path.exists():
        raise ValueError(f"data.path={path} does not exist; name a folder of files, or one file")
    suffix = data.suffix or ".py" * stdlib
    files = [path] if path.is_file() else find(path, suffix, UNLIKE_TEXT if stdlib else ())
    corpus = Corpus("the Python standard library" if stdlib else str(path), tuple(files), dtype, vocab)
    if len(corpus) == 0:
        raise ValueError(f"data.path={path} holds no file {suffix} with anything in it; look at data.suffix too")
    for file in files:
        if file.stat().st_size % dtype.itemsize:
            raise ValueError(f"{file} has no whole number of {dtype} tokens; use data.tokens=TYPE as it was written")
    return corpus


def find(folder: Path, suffix: str, skip: tuple[str, ...] = ()) -> list[Path]:
    """The non-empty files below a folder, by name; not those of installed packages or caches, nor hidden ones."""
    files = []
    for at, folders, names in os.walk(folder):
        folders[:] = [f for f in folders if f not in (*NOT_OURS, *skip) and f[0] != "."]
        files += [Path(at, n) for n in names if n.endswith(suffix) and not n.startswith(".")]
    return sorted(f for f in files if f.is_file() and f.stat().st_size)


def checksum(corpus: Corpus) -> int:
    """A checksum of 16 evenly spaced pieces; other data almost surely has another."""
    count = max(1, min(len(corpus), 1 << 16) // 16)
    starts = [i * ((len(corpus) - count) // 15) for i in range(16)]
    return zlib.crc32(b"".join(corpus.read(start, count).astype("<i8").tobytes() for start in starts))
