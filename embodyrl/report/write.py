"""Writes the report: one HTML file with everything inside."""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embodyrl import __version__
from embodyrl.errors import UserError
from embodyrl.functional.intervals import bootstrap_iqm
from embodyrl.report.extrapolate import fit_runs
from embodyrl.report.read import embed_videos, finite, read_run, same_but_seeds
from embodyrl.storage.atomic_files import write_text
from embodyrl.storage.paths import require_writable

SCRIPTS = ("charts.js", "summary.js", "curves.js", "episodes.js", "report.js")
"""Parts of the page's one script, in order."""


def build_report(
    run_dirs: Sequence[str | Path],
    out: str | Path,
    *,
    max_video_mb: float = 60.0,
    extrapolate: bool = False,
) -> Path:
    """Writes one self-contained HTML file about one or more runs.

    The file does not use the network. A content security policy allows nothing but its own script
    and style (by hash), and its own pictures and videos. Run data reach the page as JSON, and are
    only inserted as text.

    Args:
        run_dirs: folders of runs; the first is shown first.
        out: the file to write.
        max_video_mb: total size of the videos; the others are left out, and the page says so.
        extrapolate: continue the curves of success (``fit_runs``).

    Raises:
        UserError: a folder that holds no run, or a damaged file.
    """
    folders = [Path(d) for d in run_dirs]
    if not folders:
        raise UserError("A report needs at least one run's folder.")
    require_writable(out, "--out FILE")
    # Read the runs.
    runs = [read_run(folder) for folder in folders]
    _unique_names(runs, folders)
    # Every run gets an equal share of the size that is left.
    budget = int(max_video_mb * 2**20)
    for number, (folder, run) in enumerate(zip(folders, runs, strict=True)):
        budget -= embed_videos(folder, run, budget // (len(runs) - number))
    fits = fit_runs(runs) if extrapolate else []
    across = _across(runs)
    page = render({"version": __version__, "runs": runs, "across": across, "fits": fits})
    out = Path(out)
    write_text(out, page)
    return out


def render(data: dict[str, Any]) -> str:
    """The page with ``data`` inside."""
    files = importlib.resources.files("embodyrl.report") / "page"
    style = (files / "report.css").read_text(encoding="utf-8")
    script = "".join((files / name).read_text(encoding="utf-8") for name in SCRIPTS)
    # Only these scripts, styles and embedded pictures may be used.
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "img-src data:; media-src data:; base-uri 'none'; form-action 'none'"
    )
    names = ", ".join(run["name"] for run in data["runs"])
    parts = {
        "POLICY": html.escape(policy, quote=False),
        "TITLE": html.escape(f"{names} · embodyrl"),
        "STYLE": style,
        "DATA": _json(data),
        "SCRIPT": script,
    }
    page = (files / "report.html").read_text(encoding="utf-8")
    # @@NAME@@ stands for a part. Parts are not searched for further names.
    return "".join(parts.get(piece, piece) for piece in page.split("@@"))


def _json(data: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(finite(data), allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _unique_names(runs: list[dict[str, Any]], folders: list[Path]) -> None:
    """Adds the parent folder to the names of runs that have the same name."""
    names = [run["name"] for run in runs]
    for run, folder in zip(runs, folders, strict=True):
        if names.count(run["name"]) > 1:
            run["name"] = "/".join(folder.resolve().parts[-2:])


def _across(runs: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Interquartile mean of the scores of runs that differ only in their seeds; or None.

    Runs that have not come equally far are compared at the last evaluation that all of them have.
    """
    scores = [_by_iteration(run["evals"]) for run in runs]
    # The last point of training that all seeds have reached.
    common = sorted(set.intersection(*(set(s) for s in scores)))
    if not same_but_seeds(runs) or not common:
        return None
    mean, low, high = bootstrap_iqm([s[common[-1]] for s in scores])
    return {"runs": len(runs), "iteration": common[-1], "iqm": mean, "lo": low, "hi": high}


def _by_iteration(evals: list[dict[str, Any]]) -> dict[int, float]:
    """Iteration -> score of the evaluation there, of those after the start."""
    found = {e["iteration"]: e["value"] for e in evals if e["iteration"] and e["n"]}
    return {iteration: value for iteration, value in found.items() if math.isfinite(value)}
