"""What models train on: files, documents and flat tokens, read in an order that the seed alone decides."""

import numpy as np
import pytest

from ringattn.conf.schema import Data
from ringattn.launch.train import data


def test_data_is_read_across_files_and_in_an_order_of_its_own(tmp_path):
    for i, text in enumerate((b"abc", b"", b"defgh", b"ij")):
        (tmp_path / f"{i}.txt").write_bytes(text)
    corpus = data.open_corpus(Data(path=str(tmp_path), suffix=".txt"), 256)
    assert len(corpus) == 10
    for start in range(10):
        for count in range(1, 11 - start):
            assert bytes(corpus.read(start, count).astype(np.uint8)) == b"abcdefghij"[start : start + count]
    samples = data.Samples(corpus, seq_len=2, seed=0, held_out=1)
    assert (samples.total, len(samples)) == (4, 3)
    epoch = [tuple(samples.train(i).tokens) for i in range(3)]
    assert len(set(epoch)) == 3 and tuple(samples.evaluation(0).tokens) not in epoch
    assert sorted(epoch) == sorted(tuple(samples.train(3 + i).tokens) for i in range(3))


def test_documents_are_files_or_what_a_token_ends(tmp_path):
    for i, text in enumerate((b"abc", b"", b"de_g", b"ij")):
        (tmp_path / f"{i}.txt").write_bytes(text)
    corpus = data.open_corpus(Data(path=str(tmp_path), suffix=".txt"), 256)

    def sample(documents: str, index: int) -> data.Sample:
        return data.Samples(corpus, 4, 0, held_out=0, documents=documents).sample(index)

    assert bytes(sample("files", 0).tokens.astype(np.uint8)) == b"abcde"
    assert sample("files", 0).starts.tolist() == [3] and sample("files", 1).starts.tolist() == [3]
    assert sample("files", 0).lengths(4) == [3, 1] and sample("files", 1).lengths(4) == [3, 1]
    assert sample(str(ord("_")), 1).starts.tolist() == [2] and sample("", 1).lengths(4) == [4]


def test_a_file_of_tokens(tmp_path):
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "tokens")
    corpus = data.open_corpus(Data(path=str(tmp_path / "tokens"), tokens="uint16"), 1000)
    assert corpus.read(997, 3).tolist() == [997, 998, 999]
    (tmp_path / "text").write_bytes(bytes(101))
    assert len(data.open_corpus(Data(path=str(tmp_path / "text")), 256)) == 101


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (np.array([0, 1, -1, *range(497)], np.int32), "holds token -1, and model.vocab=500; .*use model.vocab="),
        (np.array([0, 1, 500, *range(497)], np.int32), "holds token 500, and model.vocab=500"),
        (np.zeros(101, np.uint8), "file has no whole number of int32 tokens"),
    ],
    ids=["below", "above", "torn"],
)
def test_tokens_that_cannot_be_are_an_error_where_they_are_read(tokens, message, tmp_path):
    tokens.tofile(tmp_path / "file")
    with pytest.raises(ValueError, match=message):
        corpus = data.open_corpus(Data(path=str(tmp_path / "file"), tokens="int32"), 500)
        assert corpus.read(4, 496).max() == 496
        corpus.read(0, 4)
