"""Writes a run's metrics: always to ``metrics.jsonl``, and to further loggers by name.

``LiveTable`` shows them on the terminal.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import netrc
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol, Self
from urllib.parse import urlsplit

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from embodyrl.errors import MissingDependencyError, UserError, did_you_mean
from embodyrl.functional.by_task import tasks_in_words
from embodyrl.functional.intervals import format_number, format_rate
from embodyrl.storage.atomic_files import write_text
from embodyrl.storage.paths import no_access
from embodyrl.storage.plain_data import NUMBER, TEXT, first_line, mismatch

METRICS = {"iteration?": NUMBER, ...: (NUMBER, TEXT, None)}
"""Structure of a row of ``metrics.jsonl``."""
Row = Mapping[str, float | int]


class Sink(Protocol):
    """A logger that receives every row, beside ``metrics.jsonl``."""

    def write(self, row: Row) -> None:
        """Takes one row; ``row["iteration"]`` is the step."""
        ...

    def close(self) -> None:
        """Sends what is still buffered."""
        ...


class MetricsWriter:
    """Appends rows to ``metrics.jsonl`` and passes them to loggers; use it as a context manager.

    Args:
        folder: of the run.
        loggers: any of ``"tensorboard"``, ``"trackio"``, ``"wandb"``.
        start_iteration: where the run resumes. Rows of later iterations are deleted, because they
            will be written again.

    Raises:
        UserError: an unknown logger.
        MissingDependencyError: the package of a logger is not installed.
    """

    def __init__(
        self, folder: str | Path, loggers: Sequence[str] = (), start_iteration: int = 0
    ) -> None:
        self.path = Path(folder) / "metrics.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        check_loggers(loggers)
        keep_rows(self.path, start_iteration)
        self._file = self.path.open("ab", buffering=0)
        self._sinks: list[Sink] = []
        try:
            self._sinks += [SINKS[name](Path(folder)) for name in loggers]
        except BaseException:
            self.close()
            raise

    def write(self, row: Row) -> None:
        """Writes one row of scalars immediately; NaN and infinity become null."""
        clean = {key: _plain(value) for key, value in row.items()}
        line = (json.dumps(clean, allow_nan=False) + "\n").encode()
        try:
            # Written at once. What a full disk cut off is dropped when the run goes on.
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            raise no_access(error, self.path) from error
        # The loggers get no null: they would fail on it.
        finite = {key: value for key, value in clean.items() if value is not None}
        for sink in self._sinks:
            sink.write(finite)

    def flush_to_disk(self) -> None:
        """Waits until all rows are on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file and the loggers."""
        self._file.close()
        for sink in self._sinks:
            sink.close()
        self._sinks = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def check_loggers(names: Sequence[str]) -> None:
    """Checks the names of ``run.loggers``.

    Raises:
        UserError: an unknown one.
    """
    if unknown := [name for name in names if name not in SINKS]:
        raise UserError(
            f"There is no logger {unknown[0]!r} (run.loggers). {did_you_mean(unknown[0], SINKS)}"
        )


def require_loggers(names: Sequence[str]) -> None:
    """Checks that loggers can be used here, before anything is built.

    Raises:
        MissingDependencyError: the package of one is not installed.
        UserError: an unknown one, or Weights & Biases without a key.
    """
    check_loggers(names)
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise _missing(name)
    # Weights & Biases would ask for a key, or fail, after the envs are built.
    offline = os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun")
    if "wandb" in names and not offline and not _has_wandb_key():
        raise UserError(
            "The logger 'wandb' was asked for (run.loggers), but there is no key for it here. Log "
            "in (wandb login), set WANDB_API_KEY, write to the disk alone (WANDB_MODE=offline), or "
            "leave it out; metrics.jsonl is written in any case."
        )


def _has_wandb_key() -> bool:
    """Whether there is a key of Weights & Biases where its own login looks for one."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a ``metrics.jsonl``; an incomplete last line, left by a crash, is skipped.

    Raises:
        UserError: another line is damaged, or the file may not be read.
    """
    path = Path(path)
    if not path.is_file():
        return []
    rows: list[dict[str, Any]] = []
    try:
        lines = path.read_bytes().split(b"\n")
    except PermissionError as error:
        raise no_access(error, path) from error
    # Only a complete line ends with a newline, so what follows the last one is incomplete.
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path} is damaged in line {number}: {first_line(error)}.") from error
        if problem := mismatch(row, METRICS):
            raise UserError(f"{path} is damaged in line {number}: {problem}.")
        rows.append(row)
    return rows


def keep_rows(path: Path, last_iteration: int) -> None:
    """Deletes the rows after ``last_iteration``: a resumed run would write them twice."""
    if not path.exists():
        return
    rows = [row for row in read_metrics(path) if row.get("iteration", 0) <= last_iteration]
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def _plain(value: Any) -> float | int | None:
    """A scalar (also of torch or numpy) as a Python number; None for NaN and infinity."""
    number = value.item() if hasattr(value, "item") else value
    if isinstance(number, float) and not math.isfinite(number):
        return None
    return number


def _import_logger(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _missing(package) from error


def _missing(package: str) -> MissingDependencyError:
    return MissingDependencyError(
        f"The logger {package!r} was asked for (run.loggers), but it is not installed here. "
        f"Install it: pip install {package}, or leave it out; metrics.jsonl is written in any case."
    )


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        _import_logger("tensorboard", "tensorboard")
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self._writer = writer(str(folder / "tensorboard"))

    def write(self, row: Row) -> None:
        for key, value in row.items():
            if key != "iteration":
                self._writer.add_scalar(key, value, int(row["iteration"]))

    def close(self) -> None:
        self._writer.close()


class _Tracker:
    """Trackio and Weights & Biases, which have the same interface."""

    def __init__(self, package: str, folder: Path, **settings: Any) -> None:
        self._module = _import_logger(package, package)
        self._module.init(project="embodyrl", name=folder.name, **settings)

    def write(self, row: Row) -> None:
        self._module.log(dict(row), step=int(row["iteration"]))

    def close(self) -> None:
        self._module.finish()


SINKS: dict[str, Callable[[Path], Sink]] = {
    "tensorboard": _TensorBoard,
    "trackio": lambda folder: _Tracker("trackio", folder, resume="allow"),
    "wandb": lambda folder: _Tracker("wandb", folder, dir=str(folder), resume="allow"),
}


SHOWN_METRICS = {
    "loss": ("loss", ".3g"),
    "approx_kl": ("KL", ".3g"),
    "clip_fraction": ("clipped", ".0%"),
    "explained_variance": ("value explains", ".0%"),
}
"""Metrics that the live table shows: key -> label and format."""


class LiveTable:
    """Shows the progress of a run.

    On a terminal a table is redrawn in place. Elsewhere a plain line is printed from time to time.

    Args:
        name: of the run.
        total: iterations in all.
        start: iterations already done.
        file: where to write; None means stdout.
        every_seconds: least time between two plain lines.
    """

    def __init__(
        self,
        name: str,
        total: int,
        start: int = 0,
        *,
        file: IO[str] | None = None,
        every_seconds: float = 15.0,
    ) -> None:
        self.name = name
        self.total = total
        self.start = start
        self.every_seconds = every_seconds
        self.console = Console(file=file or sys.stdout, soft_wrap=True)
        self.row: dict[str, Any] = {"iteration": start}
        self._began = time.monotonic()
        self._busy_minutes: float | None = None  # training time after the first iteration
        self._first_minutes = 0.0
        self._last_printed = -math.inf
        self._evals: list[str] = []
        self._tasks = ""
        self._evaluated_tasks = ""
        self._activity = ""
        self._live: Live | None = None

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        if self.console.is_terminal:
            self._live = Live(
                console=self.console, get_renderable=self._render, refresh_per_second=2
            )
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._activity = ""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, row: Row, tasks: Mapping[str, Sequence[float]] | None = None) -> None:
        """Shows the metrics of an iteration.

        Args:
            row: of the iteration.
            tasks: task -> how many of its recent training episodes were solved, and how many there
                were.
        """
        self._activity = ""
        self._tasks = tasks_in_words(tasks or {})
        if self._busy_minutes is None and "minutes" in row:
            # The first iteration is slow, because kernels are compiled. The remaining time is
            # estimated from the iterations after it.
            self._first_minutes = float(row["minutes"])
            self._busy_minutes = 0.0
            self.start = int(row["iteration"])
        elif self._busy_minutes is not None:
            self._busy_minutes = float(row["minutes"]) - self._first_minutes
        self.row = {**self.row, **row}
        last = row.get("iteration", 0) >= self.total
        now = time.monotonic()
        if self._live is None and (last or now - self._last_printed >= self.every_seconds):
            self._last_printed = now
            self.console.print(self._line(), highlight=False, markup=False)

    def evaluating(self, done: int, score: str) -> None:
        """Shows the progress of an evaluation, and the score of the episodes done so far."""
        self._activity = f"evaluating: {done} episodes, {score}"
        now = time.monotonic()
        if self._live is None and now - self._last_printed >= self.every_seconds:
            self._last_printed = now
            self.console.print(f"{self.name}  {self._activity}", highlight=False, markup=False)

    def evaluated(self, score: str, tasks: str = "") -> None:
        """Shows the result of an evaluation, of all episodes and by task."""
        self._activity = ""
        self._evaluated_tasks = tasks
        # The table keeps the first result and the last four.
        self._evals.append(score)
        self._evals = [self._evals[0], *self._evals[1:][-4:]]
        if self._live is None:
            text = f"{self.name}  evaluation after iteration {self.row['iteration']}: {score}"
            self.console.print(text, highlight=False, markup=False)
            if tasks:
                self.console.print(f"{self.name}  by task: {tasks}", highlight=False, markup=False)

    def say(self, text: str) -> None:
        """Prints a line that stays."""
        self.console.print(text, highlight=False, markup=False)

    def seconds_left(self) -> float | None:
        """Estimated training time left, in s; None during the first iterations."""
        done = int(self.row["iteration"]) - self.start
        if done <= 0 or not self._busy_minutes:
            return None
        return self._busy_minutes * 60 / done * (self.total - int(self.row["iteration"]))

    def _figures(self) -> list[tuple[str, str]]:
        """Label and text of each figure that is known, in the order shown."""
        row = self.row
        out = [("elapsed", clock(time.monotonic() - self._began))]
        left = self.seconds_left()
        if left is not None:
            out.append(("left", f"about {clock(left)}"))
        if row.get("env_steps"):
            steps = f"{row['env_steps']:,}"
            if "env_steps_per_second" in row:
                steps += f" at {row['env_steps_per_second']:,.0f}/s"
            out.append(("env steps", steps))
        # The success rate of the training episodes, or their return if the env reports no success.
        # No episode has come to its time limit yet: there is nothing to say without a bias.
        if row.get("train_episodes") == 0:
            out.append(("train success" if "train_success" in row else "train return", "-"))
        elif row.get("train_episodes"):
            count = int(row["train_episodes"])
            if "train_success" in row:
                solved = round(float(row["train_success"] or 0.0) * count)
                out.append(("train success", format_rate(solved, count)))
            else:
                episodes = f"{count} episodes" if count > 1 else "1 episode"
                out.append(("train return", f"{format_number(row['train_return'])} ({episodes})"))
        if self._tasks:
            out.append(("by task", self._tasks))
        if row.get("person_episodes"):
            out.append(("with a person", f"{row['person_episodes']} episodes, not counted"))
        for key, (label, format_spec) in SHOWN_METRICS.items():
            if isinstance(value := row.get(key), (int, float)) and math.isfinite(value):
                out.append((label, format(value, format_spec)))
        return out

    def _line(self) -> str:
        figures = ", ".join(f"{label} {text}" for label, text in self._figures())
        return f"{self.name}  {self.row['iteration']}/{self.total}  {figures}"

    def _render(self) -> Group:
        done = int(self.row["iteration"])
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(self.name, style="bold"),
            ProgressBar(self.total, done, width=40),
            Text(f"{done}/{self.total}"),
        )
        body = Table.grid(padding=(0, 2))
        for label, text in self._figures():
            body.add_row(Text(label, style="dim"), Text(text))
        if self._evals:
            body.add_row(
                Text("evaluation", style="dim"), Text("  →  ".join(self._evals), style="bold")
            )
        if self._evaluated_tasks:
            body.add_row(Text("", style="dim"), Text(self._evaluated_tasks))
        if self._activity:
            body.add_row(Text("now", style="dim"), Text(self._activity))
        return Group(head, body)


def clock(seconds: float) -> str:
    """A duration as minutes and seconds, ``"1:05"``, or with hours, ``"2:03:04"``."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
