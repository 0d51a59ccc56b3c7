"""Data sets: loaded and processed by mlx-lm, and every row that will be used is checked before training.

As in mlx-lm, one pad token is trained in each row that is padded (a row's length counts target positions from 1, so the
last one is the first pad token), a row longer than the maximum is truncated, and batches come in the order of mlx-lm's
own `iterate_batches`.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from mlx_lm.tuner.datasets import CacheDataset, create_dataset, load_dataset

from pptrain.config import TrainConfig
from pptrain.errors import DataError

_log = logging.getLogger(__name__)
_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Row:
    """One processed row.

    Attributes:
        where: File and line, or data set and number.
        tokens: The whole row.
        offset: Length of the prompt that is masked, or 0.
        num_keys: Number of keys of the row as it was read; mlx-lm orders rows by it.
    """

    where: str
    tokens: list[int]
    offset: int
    num_keys: int


class Rows(CacheDataset):
    """Checked rows, as mlx-lm's `iterate_batches` takes them, in the order that it would give them."""

    def __init__(self, rows: list[Row]) -> None:
        super().__init__(rows)
        self.rows = rows

    def itemlen(self, idx: int) -> int:
        """What mlx-lm sorts by: the number of keys in the row's object, not of its tokens."""
        return self.rows[idx].num_keys

    def __getitem__(self, idx: int) -> tuple[list[int], int]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.rows[idx].tokens, self.rows[idx].offset


@dataclass(frozen=True, slots=True)
class Data:
    """The sets of a run; one that the run does not use is empty.

    Attributes:
        train: Rows to train on.
        valid: Rows to validate on.
        test: Rows to test on.
        supervised_tokens: Target positions of the training set that the loss counts, mlx-lm's pad tokens included.
    """

    train: Rows
    valid: Rows
    test: Rows
    supervised_tokens: int

    def fingerprint(self) -> str:
        """SHA-256 of all that decides the batches: tokens, offsets and order of the rows of every set."""
        return _digest(self.train, self.valid, self.test)

    def training_fingerprint(self) -> str:
        """The same of the sets that training draws from."""
        return _digest(self.train, self.valid)


def _digest(*sets: Rows) -> str:
    digest = hashlib.sha256()
    for rows in sets:
        digest.update(f"{len(rows)} rows ".encode())
        for row in rows.rows:
            digest.update(f"{row.num_keys} {row.offset} {len(row.tokens)} ".encode())
            digest.update(np.asarray(row.tokens, dtype="<i4").tobytes())
    return digest.hexdigest()


def load_data(config: TrainConfig, tokenizer: Any, vocab_size: int | None) -> Data:
    """Load and check what a run will use.

    Args:
        config: Names the data and how it is used.
        tokenizer: As `mlx_lm.load` gives it.
        vocab_size: Number of rows of the model's embedding, or `None` where it is not known.

    Raises:
        DataError: If a row, a file or a set cannot be used; it lists every such row.
    """
    checker = _Checker(config, _Renderings(tokenizer), vocab_size)
    loaded = checker.load()
    used = {"train": config.train, "valid": config.train and config.val_batches != 0, "test": config.test}
    rows = {name: checker.rows(name, loaded[name]) if is_used else [] for name, is_used in used.items()}
    checker.raise_problems()
    _check_sizes({name: len(rows[name]) for name in used if used[name] and len(loaded[name])}, config.batch_size)
    supervised = _supervised_tokens(rows["train"], config.max_seq_length)
    return Data(Rows(rows["train"]), Rows(rows["valid"]), Rows(rows["test"]), supervised)


def _check_sizes(sizes: Mapping[str, int], batch_size: int) -> None:
    """mlx-lm makes whole batches only, so a set must fill at least one."""
    if small := [f"{name} has {size} rows to use" for name, size in sizes.items() if size < batch_size]:
        raise DataError(f"{', '.join(small)}, fewer than --batch-size {batch_size}. Add rows, or use smaller batches.")


def _supervised_tokens(rows: list[Row], max_seq_length: int) -> int:
    """Target positions from the first after the prompt to the row's length, or to the end of a truncated row."""
    return sum(min(len(row.tokens), max_seq_length - 1) - max(row.offset, 1) + 1 for row in rows)


class _Renderings:
    """A tokenizer that remembers what it rendered, so that the prompt mlx-lm masks can be compared with the whole."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._rendered: list[tuple[Any, list[int]]] = []

    def apply_chat_template(self, messages: Any, **kwargs: Any) -> list[int]:
        tokens: list[int] = self._tokenizer.apply_chat_template(messages, **kwargs)
        self._rendered.append((messages, tokens))
        return tokens

    def take(self) -> list[tuple[Any, list[int]]]:
        """Messages and tokens of what was rendered since the last time, in order."""
        rendered, self._rendered = self._rendered, []
        return rendered

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


class _Checker:
    """Loads and checks one run's rows; problems are collected, so that one error lists them all."""

    def __init__(self, config: TrainConfig, renderings: _Renderings, vocab_size: int | None) -> None:
        self._config = config
        self._renderings = renderings
        self._tokenizer: Any = renderings  # mlx-lm wants the type of a transformers tokenizer
        self._vocab_size = vocab_size
        self._problems: list[str] = []

    def raise_problems(self) -> None:
        """Raise one error for all problems found so far."""
        if self._problems:
            count = len(self._problems)
            more = [f"and {count - _SHOWN} more"] if count > _SHOWN else []
            raise DataError(
                "\n  ".join([f"{count} of the data's rows or files cannot be used:", *self._problems[:_SHOWN], *more])
            )

    def load(self) -> dict[str, Any]:
        """mlx-lm's data sets by name; files are read before it, which stops at a bad line with a traceback."""
        if not self._config.hf_dataset:
            for name in ("train", "valid", "test"):  # mlx-lm reads all three, used or not
                self._problems += self._problems_of_file(Path(self._config.data) / f"{name}.jsonl")
            self.raise_problems()
        try:
            train, valid, test = load_dataset(self._config.namespace(), self._tokenizer)
        except (ValueError, ImportError, OSError) as error:
            raise DataError(f"{self._source()} cannot be loaded: {error}") from error
        return {"train": train, "valid": valid, "test": test}

    def _source(self) -> str:
        if self._config.hf_dataset:
            return "hf_dataset"
        is_local = Path(self._config.data).exists()
        return f"--data {self._config.data}" + ("" if is_local else " is no directory here, and as a hub data set it")

    def _problems_of_file(self, path: Path) -> Iterator[str]:
        if not path.exists():
            return
        try:
            with path.open(encoding="utf-8") as file:
                lines = [line.rstrip("\n") for line in file]
        except (OSError, UnicodeDecodeError) as error:
            yield f"{path}: cannot be read ({error})"
            return
        if not lines:
            yield f"{path}: is empty. Fill it, or remove it"
        for number, line in enumerate(lines, start=1):
            if problem := self._problem_of_line(line, is_first=number == 1):
                yield f"{path}:{number}: {problem}"

    def _problem_of_line(self, line: str, *, is_first: bool) -> str | None:
        """What is wrong with a line; the first one decides, in mlx-lm, which format the file is of."""
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            return f"no JSON ({error.msg} at column {error.colno})"
        if not isinstance(row, dict):
            return f"expected a JSON object, but found {type(row).__name__}"
        try:
            if is_first:
                create_dataset([row], self._tokenizer, self._config.namespace())
        except ValueError as error:
            return " ".join(str(error).split())
        return None

    def rows(self, name: str, data: Any) -> list[Row]:
        """The rows of a set, without those whose prompt leaves nothing to train."""
        rows = [row for index in range(len(data)) if (row := self._row(self._where(name, index), data, index))]
        limit = self._config.max_seq_length
        if dropped := [row.where for row in rows if row.offset >= limit]:
            _log.warning("Dropped %s: the prompt alone reaches --max-seq-length %d", _listed(dropped), limit)
        kept = [row for row in rows if row.offset < limit]
        if long := [row.where for row in kept if len(row.tokens) > limit]:
            _log.warning("Truncated %s to --max-seq-length %d", _listed(long), limit)
        return kept

    def _where(self, name: str, index: int) -> str:
        """Lines of files count from 1, rows of hub data sets from 0."""
        path = Path(self._config.data) / f"{name}.jsonl"
        is_file = not self._config.hf_dataset and path.exists()
        return f"{path}:{index + 1}" if is_file else f"{name}[{index}]"

    def _row(self, where: str, data: Any, index: int) -> Row | None:
        raw = data[index]
        self._renderings.take()
        try:
            tokens, offset = data.process(raw)
        except KeyError as error:
            problem = f"no key {error}"
        except (TypeError, ValueError, AttributeError, IndexError, TemplateError) as error:
            problem = f"cannot be tokenized ({type(error).__name__}: {error})"
        else:
            problem = self._problem_of_tokens(tokens) or self._problem_of_prompt(tokens, offset)
            if problem is None:
                return Row(where, list(tokens), offset, len(raw))
        self._problems.append(f"{where}: {problem}")
        return None

    def _problem_of_tokens(self, tokens: list[int]) -> str | None:
        if len(tokens) < 2:
            return f"{len(tokens)} tokens, so there is none to predict. Expected at least 2"
        if self._vocab_size is not None and max(tokens) >= self._vocab_size:
            return f"token {max(tokens)} is outside the model's vocabulary of {self._vocab_size}"
        return None

    def _problem_of_prompt(self, tokens: list[int], offset: int) -> str | None:
        """What keeps the prompt from being masked; mlx-lm masks as many tokens as it renders to alone."""
        if not self._config.mask_prompt:
            return None
        (messages, whole), (_, prompt) = self._renderings.take()
        if messages[-1].get("role") != "assistant":
            return "--mask-prompt trains the last turn, and it is not the assistant's"
        if whole[: len(prompt)] != prompt:
            return "--mask-prompt needs a chat template that renders the prompt alone as it does in the whole"
        return None if offset < len(tokens) else "--mask-prompt leaves nothing to train after the prompt"


def _listed(where: list[str]) -> str:
    more = f" and {len(where) - _SHOWN} more" if len(where) > _SHOWN else ""
    return f"{len(where)} rows ({', '.join(where[:_SHOWN])}{more})"
