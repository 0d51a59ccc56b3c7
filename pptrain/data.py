"""Data sets: loaded and processed by mlx-lm, and every row that will be used is checked before training.

As in mlx-lm, one pad token is trained in each row that is padded (a row's length counts target positions from 1, so the
last one is the first pad token), a row longer than the maximum is truncated, and batches come in the order of mlx-lm's
own `iterate_batches`.
"""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
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
        DataError: If a row, a file or a set cannot be used; it lists every such row. With `skip_bad_rows` rows are
            left out instead, and named in a warning.
    """
    checker = _Checker(config, _Renderings(tokenizer), vocab_size)
    loaded = checker.load()
    used = {"train": config.train, "valid": config.train and config.val_batches != 0, "test": config.test}
    rows = {name: checker.rows(loaded[name]) if is_used else [] for name, is_used in used.items()}
    checker.raise_problems()
    checker.refuse_missing(loaded)
    _check_sizes({name: len(rows[name]) for name in used if used[name] and loaded[name].is_there}, config.batch_size)
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


@dataclass(frozen=True, slots=True)
class _Set:
    """A set as mlx-lm makes it, and where each of its rows stands.

    Attributes:
        name: As `train`.
        rows: mlx-lm's data set.
        path: The file, if it is from one.
        lines: Of the file, from 1, one for each row; a hub data set's rows count from 0.
        is_there: Whether there is such a set, even if none of its rows can be used.
    """

    name: str
    rows: Any
    path: Path | None = None
    lines: Sequence[int] = ()
    is_there: bool = True

    def where(self, index: int) -> str:
        """What a row is called."""
        return f"{self.path}:{self.lines[index]}" if self.path else f"{self.name}[{index}]"


@dataclass(frozen=True, slots=True)
class _Problem:
    where: str
    text: str
    is_row: bool = True

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


class _Checker:
    """Loads and checks one run's rows; problems are collected, so that one error lists them all."""

    def __init__(self, config: TrainConfig, renderings: _Renderings, vocab_size: int | None) -> None:
        self._config = config
        self._renderings = renderings
        self._tokenizer: Any = renderings  # mlx-lm wants the type of a transformers tokenizer
        self._vocab_size = vocab_size
        self._problems: list[_Problem] = []

    def raise_problems(self) -> None:
        """Raise one error for all problems; rows that may be left out are counted and named in a warning."""
        is_lenient = self._config.skip_bad_rows
        skipped = [problem for problem in self._problems if is_lenient and problem.is_row]
        if refused := [problem for problem in self._problems if not (is_lenient and problem.is_row)]:
            heading = f"{len(refused)} of the data's rows or files cannot be used:"
            advice = [] if is_lenient else ["Mend them, or leave rows out by --skip-bad-rows."]
            raise DataError("\n".join([_all_of(heading, refused), *advice]))
        if skipped:
            _log.warning(_all_of(f"Left out {len(skipped)} rows that cannot be used:", skipped))

    def load(self) -> dict[str, _Set]:
        """mlx-lm's data sets by name; files are read before it, which stops at a bad line with a traceback."""
        directory = Path(self._config.data)
        if not self._config.hf_dataset and directory.exists():  # mlx-lm reads all three, used or not
            return {name: self._from_file(name, directory / f"{name}.jsonl") for name in ("train", "valid", "test")}
        try:
            sets = load_dataset(self._config.namespace(), self._tokenizer)
        except (ValueError, ImportError, OSError) as error:
            raise DataError(f"{self._source()} cannot be loaded: {error}") from error
        named = zip(("train", "valid", "test"), sets, strict=True)
        return {name: _Set(name, rows, is_there=len(rows) > 0) for name, rows in named}

    def refuse_missing(self, sets: Mapping[str, _Set]) -> None:
        """A run trains and tests on what there is, as mlx-lm does; without validation it goes on."""
        for name, is_used, noun in (("train", self._config.train, "Training"), ("test", self._config.test, "Test")):
            if is_used and not sets[name].is_there:
                raise DataError(f"{self._source()} cannot be loaded: {noun} set not found or empty. Add {name}.jsonl.")
        if self._config.train and not sets["valid"].is_there:
            _log.warning("%s has no validation set. Training goes on without validation.", self._source())

    def _source(self) -> str:
        if self._config.hf_dataset:
            return "hf_dataset"
        is_local = Path(self._config.data).exists()
        return f"--data {self._config.data}" + ("" if is_local else " is no directory here, and as a hub data set it")

    def _refuse(self, where: object, text: str, is_row: bool = True) -> None:
        self._problems.append(_Problem(str(where), text, is_row))

    def _from_file(self, name: str, path: Path) -> _Set:
        if not path.exists():
            return _Set(name, [], is_there=False)
        rows = self._without_format(path, self._objects(path))
        data = create_dataset([*rows.values()], self._tokenizer, self._config.namespace()) if rows else []
        return _Set(name, data, path, [*rows])

    def _objects(self, path: Path) -> dict[int, dict[str, Any]]:
        """The JSON objects of a file by their lines."""
        try:
            with path.open(encoding="utf-8") as file:
                lines = [line.rstrip("\n") for line in file]
        except (OSError, UnicodeDecodeError) as error:
            self._refuse(path, f"cannot be read ({error})", is_row=False)
            return {}
        if not lines:
            self._refuse(path, "is empty. Fill it, or remove it", is_row=False)
        found = dict[int, dict[str, Any]]()
        for number, line in enumerate(lines, start=1):
            try:
                found[number] = _object(line)
            except ValueError as error:
                self._refuse(f"{path}:{number}", str(error))
        return found

    def _without_format(self, path: Path, rows: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """The first row decides, in mlx-lm, which format the file is of: those before the first that has one go."""
        for number, row in rows.items():
            try:
                create_dataset([row], self._tokenizer, self._config.namespace())
            except ValueError as error:
                self._refuse(f"{path}:{number}", " ".join(str(error).split()))
                if not self._config.skip_bad_rows:  # without a format no other row can be judged
                    return {}
            else:
                return {line: row for line, row in rows.items() if line >= number}
        return {}

    def rows(self, data: _Set) -> list[Row]:
        """The rows of a set, without those whose prompt leaves nothing to train."""
        found = (self._row(data.where(index), data.rows, index) for index in range(len(data.rows)))
        rows = [row for row in found if row]
        limit = self._config.max_seq_length
        if dropped := [row.where for row in rows if row.offset >= limit]:
            _log.warning("Dropped %s: the prompt alone reaches --max-seq-length %d", _listed(dropped), limit)
        kept = [row for row in rows if row.offset < limit]
        if long := [row.where for row in kept if len(row.tokens) > limit]:
            _log.warning("Truncated %s to --max-seq-length %d", _listed(long), limit)
        return kept

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
        self._refuse(where, problem)
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


def _object(line: str) -> dict[str, Any]:
    """A line's JSON object; raises a ValueError that says what is wrong."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, but found {type(row).__name__}")
    return row


def _all_of(heading: str, problems: Sequence[_Problem]) -> str:
    """All problems in one text: the first of them with their reasons, the others by their places."""
    lines = [str(problem) for problem in problems[:_SHOWN]]
    if others := problems[_SHOWN:]:
        lines.append(f"and {len(others)} more: {', '.join(_ranges([problem.where for problem in others]))}")
    return "\n  ".join([heading, *lines])


def _ranges(places: Sequence[str]) -> list[str]:
    """`file:3, file:4, file:5` as `file:3-5`."""
    found = list[tuple[str, int, int]]()
    for place in places:
        name, _, number = place.rpartition(":")
        if not number.isdecimal():
            found.append((place, 0, 0))
        elif found and found[-1][0] == name and found[-1][2] == int(number) - 1:
            found[-1] = (name, found[-1][1], int(number))
        else:
            found.append((name, int(number), int(number)))
    return [_range(*each) for each in found]


def _range(name: str, first: int, last: int) -> str:
    lines = f"{first}-{last}" if last > first else str(first)
    return f"{name}:{lines}" if first else name


def _listed(where: list[str]) -> str:
    more = f" and {len(where) - _SHOWN} more" if len(where) > _SHOWN else ""
    return f"{len(where)} rows ({', '.join(where[:_SHOWN])}{more})"
