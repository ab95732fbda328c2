"""A hook of MkDocs: the site gets the figures of ``benchmarks/`` that its pages show, under the same address."""

import re
import shutil
from pathlib import Path
from typing import Any

FIGURE = re.compile(r"\]\((?:\.\./)+benchmarks/([\w.]+\.png)\)")


def on_post_build(config: Any) -> None:
    """Copies them; a figure that is not there fails the build."""
    out = Path(config["site_dir"]) / "benchmarks"
    out.mkdir(exist_ok=True)
    for page in sorted(Path(config["docs_dir"]).rglob("*.md")):
        for name in FIGURE.findall(page.read_text(encoding="utf-8")):
            shutil.copy(Path(__file__).parents[1] / "benchmarks" / name, out)
