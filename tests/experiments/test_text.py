"""Rows of tokens: made-up text as it is described, local files, and what of them is refused."""

import tracemalloc

import numpy as np
import pytest
import torch

from experiments.workloads.synthetic_text import SyntheticText
from experiments.workloads.text import load_rows
from tests.experiments.small import sizes

SIZES = sizes("MM", vocab_size=512)


def synthetic(seqlen=512, seed=0):
    return load_rows("synthetic", SIZES, seqlen, seed)


def test_a_row_is_the_same_whoever_asks():
    first, second = synthetic(), synthetic()
    second[7], second[3]
    for name, t in first[5].items():
        assert torch.equal(t, second[5][name])
    assert not torch.equal(first[5]["input_ids"], first[6]["input_ids"])
    assert not torch.equal(first[5]["input_ids"], synthetic(seed=1)[5]["input_ids"])


def test_a_long_row_takes_some_times_its_own_memory():
    text = SyntheticText(vocab_size=64, length=1 << 16, seed=0)
    tracemalloc.start()
    text.row(0)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 20 * 8 * text.length


@pytest.mark.parametrize("seqlen", [2, 64, 500])
def test_labels_stay_in_their_document(seqlen):
    data = synthetic(seqlen)
    for number in range(20):
        row = data[number]
        tokens, documents = data.source.row(number)
        assert row["seq_idx"].dtype == torch.int32 and row["seq_idx"][0] == 0
        assert row["input_ids"].dtype == row["labels"].dtype == torch.int64
        assert {len(t) for t in row.values()} == {seqlen}
        within = torch.from_numpy(documents[1:] == documents[:-1])
        assert torch.equal(row["labels"][within], torch.from_numpy(tokens[1:])[within])
        assert (row["labels"][~within] == -100).all()
        assert set(np.diff(documents)) <= {0, 1}
    assert seqlen < 64 or any(data[n]["seq_idx"][-1] > 0 for n in range(20)), "documents are packed"


def test_a_row_taken_for_one_document():
    together, apart = (load_rows("synthetic", SIZES, 64, 0, documents=documents)[3] for documents in (False, True))
    assert together.keys() == {"input_ids", "labels"} and torch.equal(together["input_ids"], apart["input_ids"])
    assert torch.equal(together["labels"][:-1], together["input_ids"][1:]) and (apart["labels"] == -100).any()


def test_the_floor_is_below_what_frequencies_alone_reach():
    source = SyntheticText(512, 257, 0)
    of_frequencies = -(source.zipf * np.log(source.zipf)).sum()
    assert 2 < source.floor() < of_frequencies - 1 < np.log(512) - 2


def test_local_text_is_read_whole_once_an_epoch(tmp_path):
    (tmp_path / "more").mkdir()
    (tmp_path / "a.txt").write_text("é" * 20)
    (tmp_path / "more" / "b.txt").write_bytes(bytes(range(1, 100)))
    (tmp_path / "ignored.md").write_text("x")
    data = load_rows(str(tmp_path), SIZES, 16, 0)
    assert data.source.rows == 8 and data.floor is None
    seen = sorted(bytes(data[n]["input_ids"].tolist()) for n in range(8))
    content = "é".encode() * 20 + bytes(range(1, 100))
    assert seen == sorted(content[at : at + 16] for at in range(0, 128, 16))
    assert seen == sorted(bytes(data[n]["input_ids"].tolist()) for n in range(8, 16))
    (crossing,) = [data[n] for n in range(8) if data[n]["seq_idx"][-1] > 0]
    assert crossing["seq_idx"].tolist() == [0] * 8 + [1] * 8 and crossing["labels"][7] == -100
    again = load_rows(str(tmp_path), SIZES, 16, 0)
    assert torch.equal(again[11]["labels"], data[11]["labels"]), "whatever was read before"


@pytest.mark.parametrize("name, content, said", [
    ("empty.txt", b"", "empty.txt is empty"),
    ("broken.txt", b"abc\xff\xfe" * 100, "broken.txt is not UTF-8 text, byte 3 is 0xff"),
    ("short.txt", b"abc", "short.txt has 3 tokens, expected at least 33"),
    ("page.html", b"<p>", r"page.html, expected synthetic, a \.txt file or a folder of such, a file of \.jsonl"),
])
def test_bad_files_are_named(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=said):
        load_rows(str(tmp_path / name), SIZES, 32, 0)


def test_missing_data_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"--data: got 'books.txt', where nothing is, expected synthetic, a \.txt"):
        load_rows("books.txt", SIZES, 32, 0)
    with pytest.raises(FileNotFoundError, match=rf"--data: got {tmp_path}, which has no \.txt file in it"):
        load_rows(str(tmp_path), SIZES, 32, 0)


def test_text_needs_a_model_of_bytes(tmp_path):
    with pytest.raises(ValueError, match=r"for 100 tokens, expected synthetic, .*: the tokenizer bytes has 256"):
        load_rows(str(tmp_path), sizes("MM", vocab_size=100), 32, 0)
