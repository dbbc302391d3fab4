"""A reward model from labelled texts: `python prepare_reward.py --texts FILE --body FOLDER --out
FOLDER`.

The reward model is the library's sequence-classification model with one label: its one logit is the
reward.
"""

import csv
import json
import math
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import tyro
from torch import Tensor
from transformers import AutoModelForSequenceClassification, logging

from splitppo.data.raw import raw_rows
from splitppo.errors import UserError, command, words
from splitppo.models.build import read_config
from splitppo.models.tokenizer import read_tokenizer

FIGURES = "reward_training.json"
"""The file beside the model that says how it was trained and what it reached."""
_FEWEST = 20  # texts of a label: with less the held-out figures mean nothing
_WARMUP = 0.1  # share of the steps


@dataclass(frozen=True)
class Training:
    """How a reward model is trained: AdamW, linear warm-up and decay, binary cross-entropy on the
    one logit."""

    text_key: str = "text"
    """Column of the text."""
    label_key: str = "label"
    """Column of the label."""
    labels: tuple[str, str] = ("0", "1")
    """The two labels: what is bad, what is good."""
    epochs: int = 1
    """Passes over the training texts."""
    lr: float = 2e-5
    """Peak learning rate."""
    batch_size: int = 32
    """Texts an optimizer step."""
    max_rows: int | None = None
    """Texts to use at most, drawn from all of them."""
    max_tokens: int = 128
    """A longer text is cut here."""
    held_out: float = 0.1
    """Share of the texts of each label that is not trained on but measured on."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of forward and backward; weights stay float32. `auto`: bfloat16 on a GPU."""
    seed: int = 0
    """Which texts are held out, their order and the head's first weights follow from it."""


@dataclass(frozen=True)
class Example:
    """A text and its label, 0 or 1."""

    text: str
    label: int


def prepare_reward(
    texts: Path,
    body: Path,
    out: Path,
    training: Annotated[Training, tyro.conf.arg(name="")] = Training(),
) -> dict[str, float]:
    """A reward model: train a body with a scalar head to tell good texts from bad ones.

    Args:
        texts: Labelled texts: .csv, .jsonl, .json, .parquet, or a folder of the library datasets.
        body: Folder of any model with a sequence-classification class: an encoder, or a causal
            language model.
        out: Folder to write: safetensors, tokenizer, and the figures in reward_training.json.

    Returns:
        Held-out `accuracy` (at a logit of 0) and `auc`, and the numbers of texts `trained` and
        `held_out`.

    Raises:
        UserError: the texts or the body can't be used, `out` holds something, or a setting is out
            of range.
    """
    _check_training(training)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out}: exists and is not empty; remove it or choose another --out")
    train, held_out = split_examples(read_examples(texts, training), training)
    torch.manual_seed(training.seed)
    logging.disable_progress_bar()
    tokenizer, model = _load_body(body, training.max_tokens)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    print(
        f"{body} on {model.device}: {len(train)} texts to train on, {len(held_out)} held out",
        flush=True,
    )
    train_reward(model, tokenizer, train, training)
    logits = reward_logits(model, tokenizer, [example.text for example in held_out], training)
    labels = torch.tensor([example.label for example in held_out])
    figures = {
        "accuracy": float(((logits > 0) == (labels > 0)).float().mean()),
        "auc": auc(logits, labels),
        "trained": len(train),
        "held_out": len(held_out),
    }
    _save(
        model,
        tokenizer,
        out,
        {"texts": str(texts), "body": str(body)} | asdict(training) | {"reached": figures},
    )
    print(f"held-out accuracy {figures['accuracy']:.3f}, AUC {figures['auc']:.3f}")
    print(f"{out}: reward model; score with it by --reward.model {out}")
    return figures


def read_examples(file: Path, training: Training) -> list[Example]:
    """The labelled texts of a .csv file, or of one that the trainer reads.

    Raises:
        UserError: there is no such file or column, or a row has no text or another label; it names
            the row from 1.
    """
    used = {training.text_key, training.label_key}
    is_csv = file.suffix == ".csv" and file.is_file()
    rows = read_csv(file) if is_csv else raw_rows(str(file), "--texts", used)
    return [_example(columns, training, f"{file} row {number}") for number, columns in rows]


def split_examples(
    examples: Sequence[Example], training: Training
) -> tuple[list[Example], list[Example]]:
    """At most `max_rows` of the examples, shuffled; `held_out` of each label apart.

    Raises:
        UserError: a label has too few texts.
    """
    drawn = random.Random(training.seed).sample(
        examples, min(len(examples), training.max_rows or len(examples))
    )
    train, held_out = [], []
    for label, name in enumerate(training.labels):
        of_label = [example for example in drawn if example.label == label]
        if len(of_label) < _FEWEST:
            raise UserError(
                f"{len(of_label)} of {len(drawn)} texts have the label {name!r}; "
                f"a reward model needs at least {_FEWEST} texts of each label; add some"
            )
        cut = math.ceil(len(of_label) * training.held_out)
        held_out += of_label[:cut]
        train += of_label[cut:]
    return train, held_out


def train_reward(
    model: Any, tokenizer: Any, examples: Sequence[Example], training: Training
) -> None:
    """Trains the model in place, on the device it is on; prints about 20 lines of progress."""
    tokens = _tokenize(tokenizer, [example.text for example in examples], training)
    labels = torch.tensor([float(example.label) for example in examples])
    batches = [
        batch
        for epoch in range(training.epochs)
        for batch in _batches(
            [len(ids) for ids in tokens],
            training.batch_size,
            random.Random(f"{training.seed}/{epoch}"),
        )
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: _rate(done + 1, len(batches))
    )
    model.train()
    began, seen, losses, right = time.monotonic(), 0, 0.0, 0
    for step, batch in enumerate(batches, 1):
        target = labels[batch].to(model.device)
        logits = _forward(model, tokenizer, [tokens[i] for i in batch], training)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, target)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        seen += len(batch)
        losses += float(loss.detach()) * len(batch)
        right += int(((logits > 0) == (target > 0)).sum())
        if step % math.ceil(len(batches) / 20) == 0 or step == len(batches):
            speed = seen / (time.monotonic() - began)
            print(
                f"step {step}/{len(batches)}  loss {losses / seen:.3f}  "
                f"accuracy {right / seen:.3f} so far  {speed:.0f} texts/s",
                flush=True,
            )
    model.eval()


@torch.no_grad()
def reward_logits(model: Any, tokenizer: Any, texts: Sequence[str], training: Training) -> Tensor:
    """Rewards `[len(texts)]` float32 on the CPU, in the texts' order."""
    tokens = _tokenize(tokenizer, texts, training)
    order = sorted(range(len(tokens)), key=lambda i: len(tokens[i]))
    rewards = torch.zeros(len(tokens))
    for first in range(0, len(order), training.batch_size):
        batch = order[first : first + training.batch_size]
        rewards[batch] = _forward(model, tokenizer, [tokens[i] for i in batch], training).cpu()
    return rewards


def auc(scores: Tensor, labels: Tensor) -> float:
    """Probability that a text of label 1 scores above one of label 0, ties counted half
    (Mann-Whitney).

    `scores` and `labels` are `[N]`; both labels occur.
    """
    _, inverse, counts = np.unique(scores.numpy(), return_inverse=True, return_counts=True)
    ranks = torch.from_numpy((np.cumsum(counts) - (counts - 1) / 2)[inverse])
    good = labels > 0
    n_good, n_bad = int(good.sum()), int((~good).sum())
    return float((ranks[good].sum() - n_good * (n_good + 1) / 2) / (n_good * n_bad))


def _check_training(training: Training) -> None:
    rules = [
        (training.epochs >= 1, f"--epochs {training.epochs} must be at least 1"),
        (training.batch_size >= 1, f"--batch-size {training.batch_size} must be at least 1"),
        (training.max_tokens >= 1, f"--max-tokens {training.max_tokens} must be at least 1"),
        (
            training.max_rows is None or training.max_rows >= 1,
            f"--max-rows {training.max_rows} must be at least 1",
        ),
        (
            0 < training.held_out < 1,
            f"--held-out {training.held_out} must lie between 0 and 1; use 0.1",
        ),
        (
            training.lr > 0 and math.isfinite(training.lr),
            f"--lr {training.lr} must be above 0; use 2e-5",
        ),
        (
            training.labels[0] != training.labels[1],
            f"--labels {' '.join(training.labels)} must be two different ones",
        ),
    ]
    for holds, wrong in rules:
        if not holds:
            raise UserError(wrong)


def read_csv(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(row number, row) of a .csv file in UTF-8 with a head line."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            yield from enumerate(csv.DictReader(lines), 1)
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(
            f"--texts {file}: not CSV in UTF-8 ({error}); write it again, or as .jsonl"
        ) from error


def _example(columns: Any, training: Training, where: str) -> Example:
    if not isinstance(columns, dict):
        raise UserError(f"{where} is a {type(columns).__name__}; a row is an object with columns")
    for flag, key in (("--text-key", training.text_key), ("--label-key", training.label_key)):
        if key not in columns:
            raise UserError(
                f"{flag} {key}: {where} has no such column; columns: {', '.join(map(str, columns))}"
            )
    text, label = columns[training.text_key], columns[training.label_key]
    if not isinstance(text, str) or not text.strip():
        raise UserError(
            f"{where} has no text in column {training.text_key}; fill it in or drop the row"
        )
    # 1, 1.0 and True are all the label 1
    name = str(int(label)) if isinstance(label, bool | float) and label in (0, 1) else str(label)
    if name not in training.labels:
        raise UserError(
            f"{where} has the label {label!r}; there are {' and '.join(training.labels)}: "
            "name the bad and the good one with --labels, or drop the other rows"
        )
    return Example(text, training.labels.index(name))


def _load_body(folder: Path, max_tokens: int) -> tuple[Any, Any]:
    """Tokenizer and model; the head is drawn from torch's random state, and every dropout is
    off."""
    config = read_config(str(folder))
    tokenizer = read_tokenizer(str(folder))
    kinds: Any = AutoModelForSequenceClassification
    if type(config) not in kinds._model_mapping:
        raise UserError(
            f"--body {folder}: transformers has no sequence-classification model of type "
            f"{config.model_type!r}; choose another --body"
        )
    limit = min(getattr(config, "max_position_embeddings", max_tokens), tokenizer.model_max_length)
    if max_tokens > limit:
        raise UserError(
            f"--max-tokens {max_tokens}: {folder} reads at most {limit} tokens; "
            f"use {limit} or fewer"
        )
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise UserError(
                f"--body {folder}: its tokenizer has neither a pad nor an end token; "
                "give it a pad token"
            )
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"
    config.num_labels, config.pad_token_id = 1, tokenizer.pad_token_id
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it would warn of the head, which the body lacks
    try:
        model = kinds.from_pretrained(folder, config=config, dtype=torch.float32)
    except OSError as error:  # no weights there
        raise UserError(f"--body {folder}: {str(error).splitlines()[0]}") from error
    finally:
        logging.set_verbosity(verbosity)
    return tokenizer, model


def _tokenize(tokenizer: Any, texts: Sequence[str], training: Training) -> list[list[int]]:
    return tokenizer(list(texts), truncation=True, max_length=training.max_tokens)["input_ids"]


def _forward(model: Any, tokenizer: Any, rows: list[list[int]], training: Training) -> Tensor:
    """Logits `[rows]` float32 on the model's device."""
    batch = tokenizer.pad({"input_ids": rows}, return_tensors="pt").to(model.device)
    half = training.dtype == "bfloat16" or (
        training.dtype == "auto" and model.device.type == "cuda"
    )
    with torch.autocast(model.device.type, torch.bfloat16, enabled=half):
        return model(**batch).logits[:, 0].float()


def _batches(lengths: Sequence[int], size: int, generator: random.Random) -> list[list[int]]:
    """A pass over all texts in random order, but with texts of like length together: less
    padding."""
    order = generator.sample(range(len(lengths)), len(lengths))
    pool = 32 * size
    pools = [
        sorted(order[first : first + pool], key=lambda i: lengths[i])
        for first in range(0, len(order), pool)
    ]
    batches = [part[first : first + size] for part in pools for first in range(0, len(part), size)]
    generator.shuffle(batches)
    return batches


def _rate(step: int, steps: int) -> float:
    """Share of the peak learning rate at a step, from 1."""
    warmup = max(1, round(_WARMUP * steps))
    return step / warmup if step <= warmup else (steps + 1 - step) / (steps + 1 - warmup)


def _save(model: Any, tokenizer: Any, out: Path, figures: dict[str, Any]) -> None:
    """Writes beside the target and renames, so that a folder under its final name is a complete
    one."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        built = Path(scratch) / "model"
        model.save_pretrained(built)
        tokenizer.save_pretrained(built)
        (built / FIGURES).write_text(json.dumps(figures, indent=2) + "\n")
        # safetensors writes its file readable by its owner only: give it the mode of its
        # neighbours.
        shutil.copymode(built / "config.json", built / "model.safetensors")
        if out.exists():
            out.rmdir()
        shutil.move(built, out)


def main() -> None:
    tyro.cli(prepare_reward, args=words())


if __name__ == "__main__":
    sys.exit(command(main)())
