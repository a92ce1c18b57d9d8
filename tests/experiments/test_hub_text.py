"""Text through datasets and tokenizers: every document once, in the tokens asked for, and what is refused."""

import json
import sys
from unittest.mock import Mock

import numpy as np
import pytest
from huggingface_hub import HfApi, constants
from tokenizers import Tokenizer, models, pre_tokenizers

from experiments.workloads import hub_text
from experiments.workloads.text import load_rows
from tests.experiments.small import sizes

datasets = pytest.importorskip("datasets")
TEXTS = ["to be or not to be", "", "that is the question", None, "to sleep"]
WORDS = {word: n for n, word in enumerate(["?", *sorted({*" ".join(filter(None, TEXTS)).split()})])}
SIZES = sizes("MM", vocab_size=256)


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def make_tokenizer(words: dict[str, int]) -> Tokenizer:
    made = Tokenizer(models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


@pytest.fixture
def tokenizer(tmp_path) -> str:
    make_tokenizer(WORDS).save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path)


@pytest.fixture(params=["jsonl", "parquet", "csv"])
def file(request, tmp_path) -> str:
    path = tmp_path / f"text.{request.param}"
    if request.param == "jsonl":
        path.write_text("".join(json.dumps({"text": text, "id": n}) + "\n" for n, text in enumerate(TEXTS)))
    else:
        table = datasets.Dataset.from_dict({"text": TEXTS})
        table.to_parquet(path) if request.param == "parquet" else table.to_csv(path)
    return str(path)


def test_rows_of_a_file_are_documents(file, tokenizer):
    loaded = hub_text.load_tokenizer(tokenizer)
    assert loaded.vocab_size == len(WORDS)
    tokens, ends = hub_text.read(file, loaded)
    lists = [[WORDS[word] for word in (text or "").split()] for text in TEXTS]
    assert [part.tolist() for part in np.split(tokens, ends[:-1])] == lists and tokens.dtype == np.int32


def test_a_tokenizer_that_changed_is_another(file, tokenizer):
    before = load_rows(file, SIZES, 4, 0, tokenizer).source.tokens
    changed = make_tokenizer({word: n + 1 for word, n in WORDS.items()})
    changed.enable_truncation(3)  # which is not for here
    changed.enable_padding(length=12)
    changed.save(f"{tokenizer}/tokenizer.json")
    assert (load_rows(file, SIZES, 4, 0, tokenizer).source.tokens == before + 1).all()
    with pytest.raises(ValueError, match=f"has {len(WORDS) + 1}$"):  # tokens are below that, though they are fewer
        load_rows(file, sizes("MM", vocab_size=len(WORDS)), 4, 0, tokenizer)


def test_a_data_set_by_name(monkeypatch):
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *given, **named: asked.append((given, named)) or
                        datasets.Dataset.from_dict({"text": TEXTS}))
    monkeypatch.setattr(HfApi, "repo_info", Mock())
    for name in ("wikimedia/wikipedia:20231101.en", "teknium/OpenHermes-2.5"):
        assert len(load_rows(name, SIZES, 4, 0).source.tokens) == 18 + 20 + 8
    assert asked == [(("wikimedia/wikipedia", "20231101.en"), {"split": "train"}),
                     (("teknium/OpenHermes-2.5",), {"split": "train"})]


def test_what_is_refused(tmp_path, tokenizer, monkeypatch):
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    (tmp_path / "cut.jsonl").write_text('{"text": "a"}\n{"text": "b"\n')
    (tmp_path / "other.jsonl").write_text('{"body": "x"}\n')
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
    (tmp_path / "numbers.jsonl").write_text('{"text": 5}\n')
    for name, said in (("broken.parquet", "which datasets cannot read: .*[Pp]arquet"),
                       ("cut.jsonl", "line 2 of which is not JSON: "),
                       ("empty.jsonl", "has no text in its column 'text'"),
                       ("numbers.jsonl", "has int64 in its column 'text', expected strings"),
                       ("other.jsonl", "has the columns body, expected 'text'")):
        with pytest.raises(ValueError, match=f"--data: .*{name}.* {said}") as error:
            load_rows(str(tmp_path / name), SIZES, 4, 0)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=f"for 8 tokens, expected synthetic, .*: the tokenizer .* has {len(WORDS)}"):
        load_rows(str(tmp_path / "other.jsonl"), sizes("MM", vocab_size=8), 4, 0, tokenizer)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"--tokenizer: .* cannot be loaded .*expected bytes, a tokenizer\.json"):
        load_rows(str(tmp_path / "other.jsonl"), SIZES, 4, 0, tokenizer)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(HfApi, "repo_info", Mock(side_effect=RuntimeError("no network")))
    with pytest.raises(ValueError, match=r"--data: got books, which is no path, and .*Hub.* cannot be reached \(Couldn't"):
        load_rows("books", SIZES, 4, 0)
    with pytest.raises(ValueError, match="--tokenizer: gpt2 cannot be loaded"):
        hub_text.load_tokenizer("gpt2")
    assert constants.HF_HUB_OFFLINE, "else it is tried for half a minute"
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"datasets, which reads text that is no \.txt file, cannot .*: pip install datasets"):
        load_rows("books", SIZES, 4, 0)
