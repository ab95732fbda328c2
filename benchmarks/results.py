"""Every benchmark's numbers in one table, the page that lists the benchmarks, and their figures.

    python benchmarks/results.py build            the table, the page and the figures, from the JSONs
    python benchmarks/results.py list             names, minutes and cores
    python benchmarks/results.py draw quickstart  one figure again, from the table alone
    python benchmarks/results.py run quickstart   measures it again: hours, as `list` says

The table is ``benchmarks/results.parquet``, a row for each number (``tidy.py`` says how a JSON is
read): ``pandas.read_parquet("benchmarks/results.parquet")``. The page is ``docs/results/runs.md``.
``make results``, ``make results-list`` and ``make results-NAME`` do the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tidy import HERE, Row, catalogue, read

from embodyrl.errors import UserError

ROOT = HERE.parent
TABLE = HERE / "results.parquet"
PAGE = ROOT / "docs" / "results" / "runs.md"
HEAD = """# Every run

<!-- Written by benchmarks/results.py: `make results` -->

Each row is a JSON file of `benchmarks/` with that name. These commands show names, minutes and cores;
measure one again; and draw a figure again without training:

```sh
make results-list
make results-quickstart
.venv/bin/python benchmarks/results.py draw quickstart
```

The numbers of all files are in one table, `benchmarks/results.parquet`, a row for each number:

```python
import pandas

runs = pandas.read_parquet("benchmarks/results.parquet")
curve = runs.query("benchmark == 'quickstart' and metric == 'success' and seed == 0")
print(curve[["x", "value", "low", "high", "successes", "episodes"]])
```

| Column | What it holds |
| --- | --- |
| `benchmark`, `run`, `label`, `seed` | whose number it is; `label` is what a figure calls the run |
| `metric`, `value`, `unit` | the number; success rates are shares of 1 |
| `index`, `x` | iteration of training or place in a list; env steps |
| `successes`, `episodes`, `low`, `high` | counts of a rate, and the number's 95% interval |
| `commit`, `date` | what was measured, and the day of that commit; `+`: with changes |
| `hardware`, `command` | on what and how |

Minutes are those that the file itself holds, of all seeds one after the other; `-`: it holds none.
Cores are those that the command uses.

"""
COLUMNS = ("Name", "What it shows", "Command", "Commit", "Date", "Hardware", "Minutes", "Cores")


def dates(earlier: pa.Table | None) -> dict[str, str]:
    """Commit -> its day; from git, and for commits that are not there as the table had them."""
    known: dict[str, str] = {}
    if earlier is not None:
        pairs = earlier.select(["commit", "date"]).to_pylist()
        known = {row["commit"]: row["date"] for row in pairs if row["date"]}
    command = ["git", "-C", str(ROOT), "log", "--all", "--abbrev=12", "--format=%h %cs"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return known | dict(line.split() for line in done.stdout.splitlines())


@functools.cache
def rows() -> tuple[Row, ...]:
    """The rows of all JSONs, in the catalogue's order."""
    return tuple(row for name in catalogue() for row in read(name))


def make_table() -> pa.Table:
    """The tidy table of all JSONs."""
    found = [dataclasses.asdict(row) for row in rows()]
    table = pa.Table.from_pylist(found, schema=schema())
    days = dates(pq.read_table(TABLE) if TABLE.exists() else None)
    bare = [row.commit.rstrip("+")[:12] for row in rows()]
    by_prefix = {day[:7]: days[day] for day in days}  # some files have seven digits
    column = [days.get(commit) or by_prefix.get(commit[:7]) for commit in bare]
    commands = [catalogue()[row.benchmark]["command"] for row in rows()]
    table = table.append_column("date", pa.array(column, pa.string()))
    return table.append_column("command", pa.array(commands, pa.string()))


def schema() -> pa.Schema:
    """The columns that ``Row`` has."""
    kinds = {"str": pa.string(), "int": pa.int64(), "float": pa.float64()}
    fields = dataclasses.fields(Row)
    return pa.schema([(f.name, kinds[str(f.type).split(" |")[0]]) for f in fields])


def write_table(table: pa.Table) -> None:
    pq.write_table(table, TABLE, compression="zstd", compression_level=19)


def table_rows(name: str) -> list[Row]:
    """A benchmark's rows of the written table."""
    if not TABLE.exists():
        raise UserError(f"There is no {TABLE}. `make results` writes it from the JSONs.")
    names = [field.name for field in dataclasses.fields(Row)]
    table = pq.read_table(TABLE, columns=names, filters=[("benchmark", "=", name)])
    return [Row(**row) for row in table.to_pylist()]


def minutes(name: str) -> float | None:
    """What a benchmark took, as far as its JSON says: the largest time of each run and seed, added up."""
    longest: dict[tuple[str, str, int | None], float] = {}
    for row in rows():
        patterns = catalogue()[name].get("cost", ()) if row.benchmark == name else ()
        if any(fnmatch.fnmatch(f"{row.run}:{row.metric}", p) for p in patterns):
            key = (row.run, row.metric, row.seed)
            time = row.value / (60 if "seconds" in row.metric else 1)
            longest[key] = max(longest.get(key, 0.0), time)
    # Where seeds have curves, a list over seeds says the same once more.
    if any(seed is not None for _, _, seed in longest):
        longest = {key: time for key, time in longest.items() if key[2] is not None}
    return sum(longest.values()) if longest else None


def cores(name: str) -> str:
    """Cores that the command uses: the catalogue's, or all that the machine had."""
    machines = {row.hardware.split(" x ")[0] for row in rows() if row.benchmark == name}
    return str(catalogue()[name].get("cores") or ", ".join(sorted(machines - {""})) or "-")


def page() -> str:
    """``docs/results/runs.md``."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "| " + " | ".join("---" for _ in COLUMNS) + " |"]
    table = pq.read_table(TABLE, columns=["benchmark", "date"]).group_by("benchmark")
    days = {
        row["benchmark"]: row
        for row in table.aggregate([("date", "min"), ("date", "max")]).to_pylist()
    }
    for name, entry in catalogue().items():
        mine = [row for row in rows() if row.benchmark == name]
        first, last = days[name]["date_min"], days[name]["date_max"]
        lines.append("| " + " | ".join((
            f"`{name}`" + (f" ([figure](../images/{name}.png))" if "figure" in entry else ""),
            entry["shows"] + (f" (`make results-{name}` {entry['note']}.)" if "note" in entry else ""),
            f"`{entry['command']}`",
            some(row.commit for row in mine),
            "-" if first is None else first if first == last else f"{first} to {last}",
            some((row.hardware for row in mine), 2),
            "-" if minutes(name) is None else f"{minutes(name):,.0f}",
            cores(name),
        )) + " |")  # fmt: skip
    return HEAD + "\n".join(lines) + "\n"


def some(values: Any, most: int = 3) -> str:
    """Different values, the first of them by name."""
    found = [value for value in dict.fromkeys(values) if value]
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ("; ".join(found[:most]) + more) or "-"


def build() -> None:
    """Table, page and figures."""
    from figures import draw

    write_table(make_table())
    PAGE.write_text(page(), encoding="utf-8")
    for name, entry in catalogue().items():
        if "figure" in entry:
            draw(name, table_rows(name))
    print(f"{TABLE.relative_to(ROOT)}: {len(rows())} rows, {TABLE.stat().st_size / 1000:.0f} kB")


def listing() -> str:
    """Names with minutes and cores."""
    lines = [("name", "minutes", "cores", "what it shows")]
    for name, entry in catalogue().items():
        took = minutes(name)
        lines.append((name, "-" if took is None else f"{took:.0f}", cores(name), entry["shows"]))
    return "\n".join(f"{a:36} {b:>7}  {c:5}  {d}" for a, b, c, d in lines)


def commands(name: str) -> list[str]:
    """What measures a benchmark again, in order."""
    if name not in catalogue():
        raise UserError(f"There is no benchmark {name!r}. `make results-list` shows the names.")
    return [*catalogue()[name].get("first", ()), catalogue()[name]["command"]]


def run(name: str) -> None:
    """Measures a benchmark again; an interrupted one goes on where its script can."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for command in commands(name):
        print(f"$ {command}", flush=True)
        done = subprocess.run(["bash", "-ec", command], cwd=ROOT, env={**os.environ, "PATH": path})
        if done.returncode:
            raise UserError(f"`{command}` ended with status {done.returncode}: see above.")
    print("`make results` puts what was measured into the table, the page and the figure.")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("build", help="table, page and figures from the JSONs")
    verbs.add_parser("list", help="names, minutes and cores")
    drawing = verbs.add_parser("draw", help="a figure again, from the table alone")
    drawing.add_argument("name")
    drawing.add_argument("--out", type=Path, help="default: docs/images/NAME.png")
    running = verbs.add_parser("run", help="measures a benchmark again")
    running.add_argument("name")
    running.add_argument("--dry-run", action="store_true", help="only show the commands")
    a = parser.parse_args()
    try:
        if a.verb == "build":
            build()
        elif a.verb == "list":
            print(listing())
        elif a.verb == "draw":
            from figures import draw

            print(draw(a.name, table_rows(a.name), a.out))
        elif a.dry_run:
            print("\n".join(commands(a.name)))
        else:
            run(a.name)
    except UserError as error:
        raise SystemExit(f"results.py: {error}") from None


if __name__ == "__main__":
    main()
