"""The table of all runs, the page that lists them, their figures and their commands."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import figures  # noqa: E402
import post_train  # noqa: E402
import results  # noqa: E402
import tidy  # noqa: E402

from embodyrl.errors import UserError  # noqa: E402

DRAWN = [name for name, entry in tidy.catalogue().items() if "figure" in entry]
# Hundreds of bootstrap intervals.
SLOW = {"algorithms", "locomotion"}
STALE = "run `make results`"


def tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "results.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def differing(name: str, rows: list[tidy.Row], out: Path) -> float:
    """Share of the pixels that are others than in the published figure."""
    published = np.asarray(Image.open(figures.IMAGES / f"{name}.png").convert("L")).astype(int)
    drawn = np.asarray(Image.open(figures.draw(name, rows, out)).convert("L")).astype(int)
    assert drawn.shape == published.shape
    return float((abs(drawn - published) > 48).mean())


def test_every_json_is_in_the_catalogue_and_has_numbers():
    files = {path.stem for path in (ROOT / "benchmarks").glob("*.json")}
    assert files == set(tidy.catalogue())
    assert files == {row.benchmark for row in results.rows()}


def test_the_table_is_that_of_the_jsons():
    written = pq.read_table(results.TABLE)
    made = results.make_table()
    names = [name for name in made.column_names if name != "date"]  # git may not know a commit
    assert written.column_names == made.column_names
    assert written.select(names).equals(made.select(names)), f"results.parquet is old: {STALE}"
    dated = sum(date is not None for date in written["date"].to_pylist())
    assert dated > 0.9 * written.num_rows
    assert results.TABLE.stat().st_size < 200_000


def test_the_page_is_that_of_the_table():
    assert results.PAGE.read_text(encoding="utf-8") == results.page(), f"runs.md is old: {STALE}"


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in DRAWN],
)
def test_a_figure_is_drawn_again_from_the_table_alone(name: str, tmp_path: Path):
    found = differing(name, results.table_rows(name), tmp_path / "figure.png")
    assert found < 2e-4, f"docs/images/{name}.png is old: {STALE}"


def test_a_figure_of_other_numbers_is_noticed(tmp_path: Path):
    rows = results.table_rows("quickstart")
    at = next(i for i, row in enumerate(rows) if row.metric == "success" and row.index == 40)
    rows[at] = tidy.dataclasses.replace(rows[at], value=rows[at].value - 0.03)
    assert differing("quickstart", rows, tmp_path / "figure.png") > 2e-4


def test_shapes_of_a_json_are_read_as_what_they_mean(tmp_path: Path):
    file = tmp_path / "made_up.json"
    file.write_text(
        """{"commit": "abc", "hardware": {"cpu": "Intel(R) Xeon(R) Processor", "cores": 2, "gpu": null},
        "iqm": {"after": [0.8, 0.7, 0.9]}, "settings": {"lr": 1},
        "seeds": [{"seed": 3, "after": [8, 10, 0.49, 0.94],
                   "evals": [{"iteration": 5, "env_steps": 70, "successes": 1, "episodes": 4}]}],
        "runs": {"task/ppo/1": {"evaluations": [{"iteration": 0, "env_steps": 0, "return": 7.5}]}},
        "loss": {"value": 2.0, "low": 1.0, "high": 3.0}, "text": "no number", "nothing": null}"""
    )
    rows = {(r.run, r.metric, r.seed): r for r in tidy.read("made_up", file)}
    assert len(rows) == 5
    assert {r.hardware for r in rows.values()} == {"2 x Intel Xeon"}
    mean = rows["iqm", "after", None]
    assert (mean.value, mean.low, mean.high, mean.unit) == (0.8, 0.7, 0.9, "share")
    after = rows["", "after", 3]
    assert (after.successes, after.episodes, after.low, after.high) == (8, 10, 0.49, 0.94)
    look = rows["", "success", 3]
    assert (look.index, look.x, look.value) == (5, 70.0, 0.25)
    assert look.low == pytest.approx(0.0456, abs=1e-4)  # Wilson's, by hand
    assert rows["task/ppo", "return", 1].value == 7.5
    assert (rows["", "loss", None].low, rows["", "loss", None].high) == (1.0, 3.0)


def test_minutes_are_those_of_the_files():
    assert results.minutes("quickstart") == pytest.approx(
        sum(row.value for row in tidy.read("quickstart") if row.metric == "minutes_all")
    )
    assert results.minutes("parity") is None
    # Three seeds of twelve algorithms on two tasks, and of eight more, four minutes each at most.
    assert 200 < (results.minutes("algorithms") or 0) < 3 * (12 * 2 + 8) * 4.3


def test_commands_name_scripts_and_options_that_exist():
    for name in tidy.catalogue():
        for command in results.commands(name):
            for script, rest in re.findall(r"python (\S+\.py)([^;&|]*)", command):
                source = (ROOT / script).read_text(encoding="utf-8")
                lost = [o for o in re.findall(r"(--[a-z-]+)", rest) if f'"{o}"' not in source]
                assert not lost, f"{name}: {script} has no {lost}"


@pytest.mark.slow
def test_a_benchmark_is_run_by_its_command():
    done = tool("run", "code")
    assert done.returncode == 0, done.stderr
    assert "$ python scripts/measure_code.py" in done.stdout
    assert '"circles of imports": 0' in done.stdout


def test_the_commands_of_a_benchmark_are_shown():
    shown = tool("run", "pa_rl_offline", "--dry-run").stdout.splitlines()
    assert shown[-1] == "python benchmarks/pa_rl_offline.py --seeds 0 1 2"
    assert shown[0].startswith("python benchmarks/post_train.py maniskill_pickcube_pa_rl")


def test_what_is_not_there_is_said():
    done = tool("run", "quickstrat")
    assert done.returncode == 1
    assert "no benchmark 'quickstrat'" in done.stderr
    with pytest.raises(UserError, match="has no figure"):
        figures.draw("parity", [])


@pytest.mark.parametrize("name", post_train.JOBS)
def test_a_title_says_whether_critics_read_the_simulators_state(name: str):
    job = post_train.JOBS[name]
    words = job.title.replace("no privileged critic", "")
    said = "privileged critic" in words or "simulator's state" in words
    assert said == ("policy.critic=privileged" in job.settings)
    path = ROOT / "benchmarks" / f"{name}.json"
    if path.exists():
        assert json.loads(path.read_text())["title"] == job.title
