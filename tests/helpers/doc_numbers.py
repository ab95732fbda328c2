"""The numbers in the tables of the documentation, and whether the table of all runs holds them.

A table of measured numbers has a mark above it, an HTML comment:

    from: benchmarks/NAME.json                     every number is in that file, or one of several
    from: benchmarks/NAME.json; each row: RUN      and those of a row are in one run that fits RUN
    from: benchmarks/NAME.json; each row: seed     those of a row are of one seed
    from: benchmarks/NAME.json; each column: seed  those of a column are
    from: the row's files                          each row names its own files
    notebook                                       single runs: the notebook has the same numbers
    settings                                       nothing was measured

The first column says what a row is about, and is not read; nor is what stands in backticks. A number
is held if a value of the file rounds to what is printed, as a share or as percent, or if a mean or
a sum of values over seeds or over the elements of a list does; of rates that stand beside one
another also their number, and how many are 1.

Pages about results and algorithms need a mark above each table with numbers. On other pages a mark
is checked where there is one.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

ROOT = Path(__file__).parents[2]
PAGES = (
    ROOT / "README.md",
    ROOT / "docs" / "index.md",
    *sorted((ROOT / "docs" / "algorithms").glob("*.md")),
    *(p for p in sorted((ROOT / "docs" / "results").glob("*.md")) if p.name != "runs.md"),
)
OTHERS = tuple(
    page
    for page in sorted((ROOT / "docs").rglob("*.md"))
    if page not in PAGES and page.name != "runs.md" and "notebook" not in page.parts
)
MARK = re.compile(r"^<!-- (from: .*|notebook|settings) -->$")
FILE = re.compile(r"(\w+)\.json")
NUMBER = re.compile(
    r"(?<![\w.,$^-])([-\N{MINUS SIGN}]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?)(?![\w]|,\d)"
)
UNREAD = (
    re.compile(r"`[^`]*`"),
    re.compile(r"\$[^$]*\$"),
    re.compile(r"(?<=\])\([^)]*\)"),
    re.compile(r"arXiv:[\d.]+"),
)


@dataclass(frozen=True)
class DocTable:
    """A table of a page: its mark without the brackets, or "", and the cells below its head."""

    page: str
    line: int
    mark: str
    rows: tuple[tuple[str, ...], ...]

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Printed:
    """A number as it is printed: its value, half a unit of its last digit, and the factors to try."""

    text: str
    value: float
    half: float
    factors: tuple[float, ...]

    def held(self, values: Iterable[float]) -> bool:
        """Whether one of the values rounds to it."""
        slack = self.half * (1 + 1e-6) + 1e-9
        return any(abs(v * f - self.value) <= slack for v in values for f in self.factors)


def tables(page: Path) -> Iterator[DocTable]:
    """The tables of a page, outside of code blocks."""
    lines = re.sub(r"^```.*?^```", _blank, page.read_text(encoding="utf-8"), flags=re.M | re.S)
    mark, found, start = "", [], 0
    for number, line in enumerate([*lines.splitlines(), ""], 1):
        if line.startswith("|"):
            start = start or number
            found.append(tuple(cell.strip() for cell in line.strip().strip("|").split("|")))
        elif found:
            yield DocTable(str(page.relative_to(ROOT)), start, mark, tuple(found[2:]))
            mark, found, start = "", [], 0
        if not line.startswith("|") and line.strip():
            match = MARK.match(line.strip())
            mark = match[1] if match else ""


def _blank(match: re.Match[str]) -> str:
    return "\n" * match[0].count("\n")


def printed(cell: str, percent: bool = False) -> list[Printed]:
    """The numbers of a cell; ``percent``: they may be shares, printed without the sign."""
    for pattern in UNREAD:
        cell = pattern.sub(" ", cell)
    found = []
    for match in NUMBER.finditer(cell.replace("*", "")):
        text = match[1]
        if not re.search(r"\d", text):
            continue
        plain = text.replace(",", "").replace("\N{MINUS SIGN}", "-")
        digits = len(plain.partition(".")[2])
        zeros = len(plain) - len(plain.rstrip("0")) if "." not in plain else 0
        # 96,000 stands for 95,500 to 96,500, and 470 for 465 to 475; 90 is 90.
        size = abs(float(plain))
        unit = (
            10.0**zeros if size >= 1000 else 10.0 ** min(zeros, 1) if size >= 100 else 10.0**-digits
        )
        factors = (1.0, 100.0) if percent or "%" in cell or "points" in cell else (1.0,)
        if cell.replace("*", "")[match.end() :].startswith(" M"):
            factors = (1e-6,)
        found.append(Printed(text, float(plain), unit / 2, factors))
    return found


@functools.cache
def runs(benchmark: str) -> tuple[dict, ...]:
    """The rows of a benchmark in the table of all runs."""
    table = pq.read_table(
        ROOT / "benchmarks" / "results.parquet", filters=[("benchmark", "=", benchmark)]
    )
    return tuple(table.to_pylist())


def values(rows: Iterable[dict]) -> set[float]:
    """All that the rows hold, and the means and sums over seeds and over lists."""
    found: set[float] = set()
    groups: dict[tuple, list[float]] = defaultdict(list)
    ends: dict[tuple, float] = {}
    for row in rows:
        for key in ("value", "x", "index", "successes", "episodes", "low", "high"):
            if row[key] is not None:
                found.add(float(row[key]))
        parts = row["run"].split("/")
        if row["successes"] is not None:
            for key in ("successes", "episodes"):
                groups["beside", *parts[:-1], key].append(row[key])
            groups["all of them", *parts[:-1]].append(float(row["value"] == 1))
        name = (row["run"], row["metric"])
        if row["seed"] is None:
            groups["list", *name].append(row["value"])
        else:
            # Of a curve the first point and the last one.
            ends.setdefault((*name, row["seed"], "first"), row["value"])
            ends[*name, row["seed"], "last"] = row["value"]
        for at in (at for at, part in enumerate(parts) if part.isdigit()):
            run = "/".join([*parts[:at], "*", *parts[at + 1 :]])
            groups["list", run, row["metric"], row["seed"]].append(row["value"])
            groups["both", run, row["metric"], ()].append(row["value"])
    for (run, metric, _, end), value in ends.items():
        groups["seeds", run, metric, end].append(value)
    for group in groups.values():
        found |= {sum(group), sum(group) / len(group)}
    found |= {float(len(group)) for name, group in groups.items() if name[0] == "all of them"}
    return found


@functools.cache
def notebook() -> tuple[frozenset[float], ...]:
    """The numbers of each entry of the notebook's pages."""
    text = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "docs/notebook").glob("*.md"))
    entries = text.replace("*", "").replace("`", " ").split("\n## ")
    return tuple(frozenset(n.value for n in printed(entry)) for entry in entries)


def fewest(part: list[Printed], sets: Iterable[Iterable[float]]) -> list[str]:
    """Those of the numbers that are not held, by the scope that holds most of them."""
    lost = ([n.text for n in part if not n.held(known)] for known in sets)
    return min(lost, key=len, default=[n.text for n in part])


def missing(table: DocTable) -> list[str]:
    """What is wrong with a table: numbers that its source does not hold, or no source at all."""
    cells = [cell for row in table.rows for cell in row[1:]]
    if not table.mark:
        return ["it has numbers and no mark above it"] if any(map(printed, cells)) else []
    if table.mark == "settings":
        return [f"{c!r}: a setting in %" for c in cells if "%" in c.replace("95%", "")]
    source, _, scope = table.mark.removeprefix("from: ").partition("; ")
    lost = []
    for row, part in parts(table, by_column=scope == "each column: seed"):
        if source == "notebook":
            name, held = "one entry of the notebook", iter(notebook())
        else:
            files = FILE.findall(" ".join(row) if source == "the row's files" else source)
            name = ", ".join(files) or "any file"
            held = scopes([line for file in files for line in runs(file)], scope)
        lost += [f"{text}: not in {name} ({row[0]})" for text in fewest(part, held)]
    return lost


def parts(table: DocTable, by_column: bool) -> Iterator[tuple[tuple[str, ...], list[Printed]]]:
    """The rows or columns of a table, each with its numbers."""
    numbers = [[printed(c, any("%" in c for c in row)) for c in row[1:]] for row in table.rows]
    if by_column:
        for at, column in enumerate(zip(*numbers, strict=True), 1):
            yield (f"column {at}",), [n for cell in column for n in cell]
    else:
        for row, found in zip(table.rows, numbers, strict=True):
            yield row, [n for cell in found for n in cell]


def scopes(rows: list[dict], scope: str) -> Iterator[set[float]]:
    """The sets of values of which one must hold all numbers of a row or column."""
    if not scope:
        yield values(rows)
    elif scope.endswith(": seed"):
        for seed in sorted({row["seed"] for row in rows if row["seed"] is not None}):
            yield values(row for row in rows if row["seed"] == seed)
    else:
        pattern = scope.removeprefix("each row: ")
        for run in dict.fromkeys(row["run"] for row in rows):
            if fnmatch.fnmatchcase(run, pattern):
                yield values(r for r in rows if r["run"] == run or r["run"].startswith(f"{run}/"))
