"""`pptrain report`: the page of a run, whether it has ended or goes on."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from pptrain.durable import write_whole
from pptrain.errors import ConfigError, NotationError
from pptrain.perfetto import read_trace
from pptrain.record import METRICS, Record, read_record, read_reports
from pptrain.report_page import History, to_html
from pptrain.simulate import Span


def run(argv: Sequence[str]) -> int:
    """The command; returns 0.

    Raises:
        UserError: If the directory is not a run's, or a file of it cannot be read.
    """
    options = _parser().parse_args(argv)
    path: Path = options.html or options.directory / "report.html"
    text = to_html(look(options.directory, options.trace))
    try:
        write_whole(path, lambda file: file.write(text.encode()))
    except OSError as error:
        raise ConfigError(
            f"[{path}] Cannot be written: {error.strerror}. Expected a file in a directory. Change --html."
        ) from error
    print(path)
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser("pptrain report", description=__doc__)
    parser.add_argument("directory", type=Path, help="the --adapter-path of a run, which has metrics.jsonl")
    parser.add_argument("--html", type=Path, metavar="FILE", help="where to write it (default: DIRECTORY/report.html)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="what train --trace wrote (default: where it did)")
    return parser


def look(directory: Path, trace: Path | None = None) -> History:
    """All that a run's directory, and its trace, tell of it.

    Args:
        directory: The run's.
        trace: Its trace; by default where the run says that it writes it, which need not be there yet.

    Raises:
        ConfigError: If it is no run's directory, or a file cannot be read.
    """
    reports, record = read_reports(directory), read_record(directory)
    written = datetime.fromtimestamp((directory / METRICS).stat().st_mtime, UTC)
    name, as_of = directory.resolve().name, f"{written:%Y-%m-%d %H:%M:%S} UTC"
    return History(name, as_of, record, reports, _spans(record, trace))


def _spans(record: Record | None, trace: Path | None) -> Mapping[int, Sequence[Span]]:
    path = trace or _own_trace(record)
    if path is None:
        return {}
    try:
        return read_trace(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"[{path}] Cannot be read: {error}. Expected a trace. Check --trace.") from error
    except NotationError as error:
        raise ConfigError(f"{error} The file is {path}.") from error


def _own_trace(record: Record | None) -> Path | None:
    """Where a run wrote its trace, if it has; one that is older than the run is another's."""
    if record is None or record.trace is None or not (path := Path(record.trace)).exists():
        return None
    began = max((datetime.fromisoformat(start.time).timestamp() for start in record.starts), default=0.0)
    return path if path.stat().st_mtime >= began else None
