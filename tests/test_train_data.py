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


@pytest.mark.parametrize("bad", [-1, 500])
def test_a_token_outside_of_the_vocabulary_is_an_error(bad, tmp_path):
    tokens = np.arange(500, dtype=np.int32)
    tokens[3] = bad
    tokens.tofile(tmp_path / "tokens")
    corpus = data.open_corpus(Data(path=str(tmp_path / "tokens"), tokens="int32"), 500)
    assert corpus.read(4, 496).max() == 499
    with pytest.raises(ValueError, match=f"holds token {bad}, and model.vocab=500; .*use model.vocab="):
        corpus.read(0, 4)


def test_a_file_that_is_not_flat_tokens_is_refused(tmp_path):
    (tmp_path / "odd").write_bytes(bytes(101))
    with pytest.raises(ValueError, match=r"odd has no whole number of uint16 tokens"):
        data.open_corpus(Data(path=str(tmp_path / "odd"), tokens="uint16"), 1000)
    assert len(data.open_corpus(Data(path=str(tmp_path / "odd")), 256)) == 101
