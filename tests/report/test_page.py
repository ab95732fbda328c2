"""The report in a real Chromium: it draws, plays, filters, and asks the network for nothing."""

from __future__ import annotations

import json
import shutil

import pytest

from embodyrl.report import build_report

pytest.importorskip("playwright.sync_api")


# Not wait_for_function, whose polling evaluates a string in the page, which the page's policy
# forbids.
SOON = """(v, [test, seconds]) => new Promise((done, late) => {
  const end = performance.now() + 1000 * seconds;
  const tests = { decoded: () => v.readyState >= 2, moves: () => v.currentTime > 0.05 };
  const said = () =>
    `not ${test}: ${v.readyState}, paused ${v.paused}, at ${v.currentTime} of ${v.duration}`;
  const ask = () => {
    if (tests[test]()) done();
    else if (performance.now() > end) late(new Error(said()));
    else setTimeout(ask, 20);
  };
  ask();
})"""


@pytest.fixture
def open_page(chromium, tmp_path):
    """Opens a report; at the end, nothing may have gone wrong in it."""
    wrong: list[str] = []
    contexts = []

    def go(folders, width=1280, scheme="light", extrapolate=False):
        file = build_report(folders, tmp_path / "report.html", extrapolate=extrapolate)
        contexts.append(
            chromium.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        )
        page = contexts[-1].new_page()
        page.on("console", lambda m: wrong.append(f"{m.type}: {m.text}"))
        page.on("pageerror", lambda e: wrong.append(str(e)))
        page.on(
            "request",
            lambda r: wrong.append(r.url) if not r.url.startswith(("data:", "file:")) else None,
        )
        page.on("requestfailed", lambda r: wrong.append(f"failed: {r.url[:80]}"))
        page.goto(file.as_uri())
        page.wait_for_selector("#curves svg path")
        return page

    yield go
    for context in contexts:
        context.close()
    assert wrong == []


def test_headline_curves_and_table(open_page, runs):
    page = open_page(runs[:1])
    before, after = (
        page.locator("#headline .was").inner_text(),
        page.locator("#headline .now").inner_text(),
    )
    assert before.endswith("%") and int(before[:-1]) < int(after[:-1])
    shown = page.locator("[data-metric]").evaluate_all("cards => cards.map(c => c.dataset.metric)")
    wanted = [
        "policy_loss",
        "value_loss",
        "approx_kl",
        "explained_variance",
        "env_steps_per_second",
    ]
    assert [m for m in shown if m in wanted] == wanted and "entropy" in shown
    steps = page.locator(".chart.wide svg").text_content()
    page.get_by_role("button", name="Minutes").click()
    page.wait_for_selector("#curves svg path")
    assert "min" in page.locator(".chart.wide svg").text_content() and "min" not in steps
    assert page.locator("#tasks tbody tr").count() == 3  # two tasks and all
    # Of pick there are training episodes, 10 in each of 10 iterations; of push there is none.
    rows = page.locator("#tasks tbody tr").all_inner_texts()
    assert ["80% [67, 89] of 50" in row for row in rows] == [True, False, False]
    assert page.locator("#tasks .slices rect").count() == 10
    box = page.locator(".chart.wide svg").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.98, box["y"] + box["height"] / 2)
    assert after in page.locator(".chart.wide .tip").inner_text()


def test_fitted_curves_are_dashed_and_told(open_page, rising):
    page = open_page(rising, extrapolate=True)
    dashed = "paths => paths.filter(p => p.style.strokeDasharray.startsWith('2')).length"
    assert page.locator(".chart.wide svg path").evaluate_all(dashed) == 1
    row = page.locator("#fits tbody tr")
    assert row.count() == 1 and "2 seeds together" in row.inner_text()
    assert "12k" in row.inner_text()
    # The axis reaches as far as the curve, twice what was trained.
    assert "20k" in page.locator(".chart.wide svg").text_content()
    page.get_by_role("button", name="Minutes").click()
    page.wait_for_selector("#curves svg path")
    assert "1.2 min" in page.locator("#fits tbody tr").inner_text()
    # Iterations are no compute.
    page.get_by_role("button", name="Iterations").click()
    page.wait_for_selector("#curves svg path")
    assert page.locator("#fits").count() == 0


def test_forty_tasks_can_be_put_in_order(open_page, runs, tmp_path):
    folder = tmp_path / "forty"
    shutil.copytree(runs[0], folder)
    for name in ("before", "after"):
        path = folder / "evals" / f"{name}.json"
        page = json.loads(path.read_text())
        # Task 7 is lost by training, task 30 is won, and the others stay unsolved.
        page["episodes"] = [
            {
                "init": i,
                "task": f"suite_{i // 20}/{'put_the_bowl_on_the_plate_' * 3}{i}",
                "success": i == {"before": 7, "after": 30}[name],
                "length": 9,
                "return": 0.0,
            }
            for i in range(40)
        ]
        path.write_text(json.dumps(page))
    page = open_page([folder])
    rows = page.locator("#tasks tbody tr")

    def order():
        return [row.split("\t")[0].split()[-1] for row in rows.all_inner_texts()]

    listed = order()
    assert len(listed) == 42  # pick of the training, and all
    assert listed[:3] == ["0", "1", "2"]
    page.get_by_role("button", name="Largest change").click()
    assert set(order()[:2]) == {"7", "30"}
    page.get_by_role("button", name="Lowest first").click()
    assert order()[0] == "0" and order()[-3:-1] == ["pick", "30"]
    assert rows.nth(0).locator("span").first.inner_text() == "suite_0"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_run_without_success_shows_its_return(open_page, pendulum):
    page = open_page([pendulum])
    before, after = (page.locator(f"#headline .{side}").inner_text() for side in ("was", "now"))
    assert (
        float(before) < 0
        and float(after) < 0
        and page.get_by_text("Mean return before and after").count() == 1
    )
    assert page.locator(".chart.wide h3").all_inner_texts() == ["Mean return"]
    assert page.locator('[data-metric="train_return"]').count() == 0  # it is in that chart
    assert (
        after in page.locator("#tasks tbody tr").inner_text()
        and page.locator("#tasks .bar circle").count() == 2
    )
    assert page.locator(".mosaic .cell").count() == 6
    words = page.locator("#page").text_content()
    assert "Success" not in words and "solved" not in words and "NaN" not in words
    assert page.get_by_text("Pendulum-v1").count() and page.get_by_text("Student's t").count() == 1


def test_runs_with_and_without_success_side_by_side(open_page, runs, pendulum):
    page = open_page([runs[0], pendulum])
    assert page.locator(".chart.wide h3").all_inner_texts() == ["Success", "Mean return"]
    first, second = page.locator("#comparison tbody tr").all_inner_texts()
    assert "%" in first and "%" not in second
    page.get_by_role("button", name="pendulum").click()
    assert float(page.locator("#headline .now").inner_text()) < 0


def test_videos_play(open_page, runs):
    page = open_page(runs[:1])
    assert page.locator("video").count() == 12
    page.locator("#episodes").scroll_into_view_if_needed()
    for video in page.locator("video").all():
        video.scroll_into_view_if_needed()
        video.evaluate(SOON, ["decoded", 60])
        assert video.evaluate("v => v.error === null && v.videoWidth === 256 && v.duration > 0.2")
    first = page.locator("video").first
    first.scroll_into_view_if_needed()
    first.evaluate(SOON, ["moves", 60])
    first.click()
    assert first.evaluate("v => v.paused")


def test_the_instruction_stands_under_every_pair_of_videos(open_page, runs):
    page = open_page(runs[:1])
    assert page.locator(".film-card .said").all_text_contents() == ["“go <there>”"] * 6


def test_filters_show_their_kind_alone(open_page, runs):
    page = open_page(runs[:1])
    groups = page.locator(".film-card").evaluate_all("cards => cards.map(c => c.dataset.group)")
    assert len(groups) == 6
    for name, kinds in {
        "Fixed": {"fixed"},
        "Broken": {"broken"},
        "Failures": {"failed", "broken"},
    }.items():
        page.locator("#episodes .tabs button", has_text=name).click()
        left = page.locator(".film-card").evaluate_all("cards => cards.map(c => c.dataset.group)")
        assert left == [g for g in groups if g in kinds]
        cells = page.locator(".mosaic .cell:not(.off)").evaluate_all(
            "cells => cells.map(c => c.classList[1])"
        )
        assert set(cells) <= kinds
        assert int(
            page.locator("#episodes .tabs button", has_text=name).locator("b").inner_text()
        ) == len(cells)
    page.locator(".mosaic button").first.click()  # a filmed one that is hidden now comes back
    assert page.locator(".film-card").count() in (6, len(left))


def test_search_in_the_settings(open_page, runs):
    page = open_page(runs[:1])
    page.get_by_placeholder("Search settings").fill("algo lr")
    assert page.locator(".config tr:visible").all_inner_texts() == ["algorithm.lr\t0.0001"]
    page.get_by_placeholder("Search settings").fill("nothing like this")
    assert (
        page.locator(".config tr:visible").count() == 0
        and page.get_by_text("No setting matches").is_visible()
    )
    assert page.get_by_text("a <b>CPU</b>, 2 cores").count() == 2  # text, not markup


def test_runs_side_by_side(open_page, runs):
    page = open_page(runs)
    assert (
        page.locator("#comparison tbody tr").count() == 3
        and "Interquartile" in page.locator("#comparison").inner_text()
    )
    page.get_by_text("1 setting differs").click()
    assert page.locator("details code", has_text="run.seed").is_visible()
    page.get_by_role("button", name="seed1").click()
    assert page.locator("dd", has_text="embodyrl train demo run.seed=1").count() == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(open_page, runs, scheme):
    page = open_page(runs, width=390, scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    bright = sum(int(c) for c in colour.removeprefix("rgb(").removesuffix(")").split(",")) > 380
    assert bright == (scheme == "light")
    page.get_by_role("button", name="Light or dark").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != colour
