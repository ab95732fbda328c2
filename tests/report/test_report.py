import json
import re
import shutil

import pytest

from embodyrl.cli.main import main
from embodyrl.errors import UserError
from embodyrl.functional.intervals import mean_interval, wilson
from embodyrl.report import build_report
from embodyrl.report.read import read_run, training_success


def data_of(page):
    text = page.read_text()
    return json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S).group(1)
    )


def test_the_figures_are_those_of_the_evaluations(runs, tmp_path):
    run = data_of(build_report(runs[:1], tmp_path / "sub" / "report.html"))["runs"][0]
    raw = {
        name: json.loads((runs[0] / "evals" / f"{name}.json").read_text())["episodes"]
        for name in ("before", "after")
    }
    for name, episodes in raw.items():
        found = next(e for e in run["evals"] if e["name"] == name)
        k = sum(e["success"] for e in episodes)
        assert (found["k"], found["n"]) == (k, 16) and (found["lo"], found["hi"]) == pytest.approx(
            wilson(k, 16)
        )
    assert [e["name"] for e in run["evals"]] == ["before", "iter_000005", "after"]
    assert (run["before"], run["after"]) == ("before", "after")
    for task in run["tasks"]:
        solved = [e["success"] for e in raw["after"] if e["task"] == task["task"]]
        assert (task["after"]["k"], task["after"]["n"]) == (sum(solved), len(solved))
    old, new = ({e["init"]: e["success"] for e in raw[name]} for name in ("before", "after"))
    groups = {
        (False, True): "fixed",
        (True, False): "broken",
        (True, True): "solved",
        (False, False): "failed",
    }
    assert {p["init"]: p["group"] for p in run["episodes"]} == {
        i: groups[old[i], new[i]] for i in old
    }
    assert run["curves"]["train_success"][2] is None and len(run["curves"]["iteration"]) == 10
    assert dict(run["config"])["algorithm.gamma"] == "0.99"


def test_the_figures_of_a_run_without_success_are_mean_returns(pendulum, runs, tmp_path):
    run = data_of(build_report([pendulum], tmp_path / "report.html"))["runs"][0]
    raw = {
        name: json.loads((pendulum / "evals" / f"{name}.json").read_text())["episodes"]
        for name in ("before", "after")
    }
    for name, episodes in raw.items():
        found = next(e for e in run["evals"] if e["name"] == name)
        figures = (found["value"], found["lo"], found["hi"])
        assert (
            figures == pytest.approx(mean_interval([e["return"] for e in episodes]))
            and "k" not in found
        )
    old, new = ({e["init"]: e["return"] for e in raw[name]} for name in ("before", "after"))
    assert {p["init"]: p["group"] for p in run["episodes"]} == {
        i: "better" if new[i] > old[i] else "worse" for i in old
    }
    assert (
        not run["reports_success"]
        and "train_success" not in run["curves"]
        and run["tasks"][0]["after"]["n"] == 6
    )
    both = data_of(build_report([pendulum, pendulum], tmp_path / "report.html"))
    assert both["across"]["iqm"] == pytest.approx(run["tasks"][0]["after"]["value"])

    young = tmp_path / "young"
    shutil.copytree(pendulum, young)
    for path in (young / "evals").iterdir():
        path.unlink() if path.stem != "before" else None
    assert {p["group"] for p in read_run(young)["episodes"]} == {"scored"}
    shutil.rmtree(young / "evals")
    assert not read_run(young)["reports_success"] and read_run(runs[0])["reports_success"]


def test_several_runs_have_an_interquartile_mean(runs, tmp_path):
    data = data_of(build_report(runs, tmp_path / "report.html"))
    rates = [
        next(e["k"] / e["n"] for e in run["evals"] if e["name"] == "after") for run in data["runs"]
    ]
    assert data["across"]["iqm"] == pytest.approx(sum(rates) / 2) and data["across"]["runs"] == 2
    assert [run["name"] for run in data["runs"]] == ["seed0", "seed1"]
    same = data_of(build_report([runs[0], runs[0]], tmp_path / "report.html"))
    assert all(run["name"].endswith("/seed0") for run in same["runs"])


def test_curves_of_success_are_continued(rising, runs, pendulum, tmp_path, capsys):
    out = tmp_path / "report.html"
    assert data_of(build_report(rising, out))["fits"] == []
    (fit,) = data_of(build_report(rising, out, extrapolate=True))["fits"]
    assert fit["runs"] == [0, 1]  # seeds of one experiment
    for axis, last in (("env_steps", 12_000), ("minutes", 1.2)):
        found = fit[axis]
        assert found["last"] == pytest.approx(last) and found["refused"] == ""
        assert found["asymptote"][0] == pytest.approx(0.9, abs=0.03)
        assert found["ahead"]["2"][0] == pytest.approx(0.2 + 0.7 * 24**2 / (24**2 + 2**2), abs=0.03)
        assert found["curve"][-1][0] == pytest.approx(2 * last)
    # Too few evaluations, and no success at all.
    assert main(["report", str(runs[0]), str(pendulum), "--extrapolate", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "by env steps  no curve: 3 evaluations, and the curve takes 4 of a run" in said
    assert "by minutes    no curve: the env reports no success" in said
    assert [fit["runs"] for fit in data_of(out)["fits"]] == [[0], [1]]
    assert main(["report", *map(str, rising), "--extrapolate", "--out", str(out)]) == 0
    assert "seed0, seed1: fitted together" in capsys.readouterr().out


def test_seeds_are_averaged_where_all_of_them_have_come_to(runs, tmp_path):
    """A seed that is still on its way: the mean is of the last iteration that both have."""
    young = tmp_path / "seed1"
    shutil.copytree(runs[1], young)
    (young / "evals" / "after.json").unlink()
    data = data_of(build_report([runs[0], young], tmp_path / "report.html"))
    rates = [
        next(e["k"] / e["n"] for e in run["evals"] if e["iteration"] == 5) for run in data["runs"]
    ]
    assert data["across"]["iqm"] == pytest.approx(sum(rates) / 2)
    assert data["across"]["iteration"] == 5
    (young / "evals" / "iter_000005.json").unlink()
    assert data_of(build_report([runs[0], young], tmp_path / "report.html"))["across"] is None


def test_success_at_any_time_and_episodes_of_a_person_stand_beside_the_score(runs, tmp_path):
    folder = tmp_path / "seed0"
    shutil.copytree(runs[0], folder)
    path = folder / "evals" / "after.json"
    page = json.loads(path.read_text())
    for k, row in enumerate(page["episodes"]):
        row |= {"success": k % 4 == 0, "success_once": k % 2 == 0, "person": k >= 12}
    path.write_text(json.dumps(page | {"faults": 3}))
    run = data_of(build_report([folder], tmp_path / "report.html"))["runs"][0]
    score = next(e for e in run["evals"] if e["name"] == "after")
    assert (score["k"], score["n"], score["not_counted"], score["faults"]) == (3, 12, 4, 3)
    assert (score["once"]["k"], score["once"]["n"]) == (6, 12)
    for row in page["episodes"]:
        row["person"] = True
    path.write_text(json.dumps(page))
    run = data_of(build_report([folder], tmp_path / "report.html"))["runs"][0]
    assert next(e for e in run["evals"] if e["name"] == "after")["value"] is None


def test_runs_of_different_configs_are_not_averaged(runs, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(runs[1], other)
    (other / "config.yaml").write_text((runs[1] / "config.yaml").read_text().replace("0.99", "0.9"))
    assert data_of(build_report([runs[0], other], tmp_path / "report.html"))["across"] is None


def test_videos_beyond_the_budget_are_left_out_in_pairs_and_counted(runs, tmp_path):
    full = build_report(runs[:1], tmp_path / "full.html")
    films = [p for p in data_of(full)["runs"][0]["episodes"] if p["after"]["video"]]
    assert len(films) == 6 and all(p["before"]["video"] for p in films)
    size = sum(f.stat().st_size for f in (runs[0] / "videos").iterdir()) / 2**20
    half = data_of(build_report(runs[:1], tmp_path / "half.html", max_video_mb=size / 2))["runs"][0]
    kept = [p for p in half["episodes"] if p["after"]["video"]]
    assert 0 < len(kept) < 6 and len(kept) + half["videos_left_out"] == 6
    assert all(bool(p["before"]["video"]) == bool(p["after"]["video"]) for p in half["episodes"])


def test_nothing_from_a_run_becomes_markup(runs, tmp_path):
    evil = tmp_path / "<img src=x onerror=alert(1)>"
    shutil.copytree(runs[0], evil)
    text = (evil / "evals" / "after.json").read_text()
    (evil / "evals" / "after.json").write_text(
        text.replace('"pick"', '"</script><script>alert(2)</script>@@SCRIPT@@"')
    )
    (evil / "config.yaml").write_text('env: {name: "<!--<script>"}\n')
    page = build_report([evil], tmp_path / "report.html").read_text()
    assert "alert(2)</script>" not in page and "<img" not in page and "<!--<script>" not in page
    assert page.count("</script>") == 2 and page.count('"use strict"') == 1


def test_the_page_names_no_address(runs, tmp_path):
    page = build_report(runs, tmp_path / "report.html").read_text()
    assert "default-src 'none'" in page and "unsafe" not in page
    assert set(
        re.findall(
            r"(?:https?:)?//[\w.]+\.\w+[^\s\"']*",
            re.sub(r'id="data">.*?</script>', "", page, flags=re.S),
        )
    ) <= {"http://www.w3.org/2000/svg"}


def test_unfinished_runs_and_runs_without_a_before(runs, tmp_path):
    young = tmp_path / "young"
    shutil.copytree(runs[0], young)
    (young / "evals" / "after.json").unlink()
    run = read_run(young)
    assert (run["before"], run["after"]) == ("before", "iter_000005")
    (young / "evals" / "before.json").unlink()
    run = read_run(young)
    assert (run["before"], run["after"]) == (None, "iter_000005")
    assert {p["group"] for p in run["episodes"]} <= {"solved", "failed"}
    shutil.rmtree(young / "evals")
    (young / "metrics.jsonl").unlink()
    assert build_report([young], tmp_path / "report.html").exists()


def test_what_is_no_run_is_refused_in_words(runs, tmp_path):
    with pytest.raises(UserError, match="no run's folder"):
        build_report([tmp_path], tmp_path / "report.html")
    bad = tmp_path / "bad"
    shutil.copytree(runs[0], bad)
    text = (bad / "evals" / "after.json").read_text()
    (bad / "evals" / "after.json").write_text(
        text.replace("videos/after_0000.mp4", "../../../etc/passwd")
    )
    with pytest.raises(UserError, match="outside"):
        build_report([bad], tmp_path / "report.html")
    (bad / "evals" / "after.json").write_text(text[: len(text) // 2])
    with pytest.raises(UserError, match=r"after\.json is damaged"):
        build_report([bad], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_success_in_training_is_that_of_the_newest_episodes():
    # In 40 iterations: none of 100 is solved, nothing is scored, all of 40 are solved, half of 4.
    played = [(0.0, 5)] * 20 + [(None, None)] * 10 + [(1.0, 5)] * 8 + [(0.5, 4), (None, 0)]
    found = training_success(played)
    assert found is not None
    # The newest 44 are too few, so two more iterations are taken.
    assert (found["k"], found["n"], found["all"]) == (42, 54, 144)
    assert (found["lo"], found["hi"]) == wilson(found["k"], found["n"])
    assert found["slices"][:10] == [0.0] * 10 and found["slices"][10:15] == [None] * 5
    assert found["slices"][15:19] == [1.0] * 4 and found["slices"][19] == 0.5
    assert training_success([(None, None), (None, 0)]) is None
