"""The site builds without a warning, and every page fits a wide and a narrow window."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WIDTHS = (1400, 400)

# What a page shows that is cut off: wider than its box, where the box does not scroll.
CUT_OFF = """() => {
  const found = [];
  const wide = "article pre, article table, article .katex-display";
  for (const element of document.querySelectorAll(wide)) {
    let box = element;
    const edge = element.getBoundingClientRect().right;
    while (box && box !== document.body) {
      const style = getComputedStyle(box).overflowX;
      if (style === "auto" || style === "scroll") break;
      if (style === "hidden" && edge > box.getBoundingClientRect().right + 1) break;
      box = box.parentElement;
    }
    const scrolls = box && ["auto", "scroll"].includes(getComputedStyle(box).overflowX);
    if (!scrolls && edge > innerWidth + 1) found.push(element.outerHTML.slice(0, 80));
  }
  return found;
}"""
RAW = r"""() => {
  const article = document.querySelector("article").cloneNode(true);
  for (const part of article.querySelectorAll("code, pre, annotation, script")) part.remove();
  return {
    raw: /\\\(|\\\)|\\\[|\$\$/.test(article.textContent),
    equations: article.querySelectorAll(".arithmatex").length,
    rendered: article.querySelectorAll(".arithmatex .katex").length,
    errors: article.querySelectorAll(".katex-error").length,
    backslashes: /\\(?=[|`*_])/.test(article.textContent),
  };
}"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as ``make docs`` does."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def pages(site: Path) -> list[Path]:
    return sorted(page for page in site.rglob("*.html") if "reference" not in page.parts)


def test_pages_fit_their_window_and_equations_are_set(site: Path, chromium) -> None:
    """Of the generated reference one page is looked at, the widest: they are all alike."""
    page = chromium.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    wrong: list[str] = []
    equations = 0
    for file in [*pages(site), site / "reference/config.html"]:
        name = str(file.relative_to(site))
        page.set_viewport_size({"width": WIDTHS[0], "height": 800})
        page.goto(file.as_uri(), wait_until="load")
        found = page.evaluate(RAW)
        equations += found["equations"]
        if found["raw"] or found["errors"] or found["rendered"] < found["equations"]:
            wrong.append(f"{name}: equations {found}")
        if found["backslashes"]:
            wrong.append(f"{name}: a backslash is shown before a mark")
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 800})
            wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            if wide > 0:
                wrong.append(f"{name}: {wide} pixels wider than {width}")
            wrong += [f"{name} at {width}: cut off: {text}" for text in page.evaluate(CUT_OFF)]
    page.close()
    assert not wrong, "\n".join(wrong)
    assert equations > 50
    outside = {url for url in asked if not url.startswith(("file:", "data:"))}
    assert not outside, f"the site asks for {sorted(outside)[:3]}: it must work offline"


def public_classes() -> set[str]:
    """Dotted names of the package's classes, as their files define them."""
    found = set()
    for file in (ROOT / "embodyrl").rglob("*.py"):
        parts = file.relative_to(ROOT).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.add(f"{module}.{node.name}")
    return found


def test_every_class_is_in_the_reference(site: Path) -> None:
    text = "".join(page.read_text() for page in (site / "reference").glob("*.html"))
    shown = set(re.findall(r'id="(embodyrl[\w.]+)"', text))
    assert not public_classes() - shown
    configs = {name for name in public_classes() if name.endswith("Config")}
    anchors = {name.removeprefix("embodyrl.").replace(".", "-") for name in configs}
    assert not anchors - set(re.findall(r'id="config-([\w-]+)"', text))
    for key in ("run.seed", "algorithm.clip_range", "policy.horizon", "env.num_envs", "data.path"):
        assert f"<code>{key}</code>" in text
