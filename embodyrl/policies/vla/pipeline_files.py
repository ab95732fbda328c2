"""Checks the pipelines of a LeRobot checkpoint before LeRobot reads them.

A step of a pipeline may name a Python class by its path, which LeRobot imports and calls with the
arguments of the file. A checkpoint from elsewhere could run any program that way, so only steps of
LeRobot's own registry are accepted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from embodyrl.errors import UserError
from embodyrl.storage.plain_data import ANYTHING, TEXT, read_json

PROCESSORS = ("policy_preprocessor", "policy_postprocessor")
"""Names of LeRobot's pipelines; each is a JSON file."""
PIPELINE = {
    "name?": TEXT,
    "steps": [{"registry_name?": TEXT, "state_file?": TEXT, "config?": {...: ANYTHING}}],
}
"""Structure of such a file."""


def read_pipeline(folder: Path, name: str) -> dict[str, Any]:
    """A pipeline's file, all of whose steps are LeRobot's own.

    Args:
        folder: of the checkpoint.
        name: of the pipeline, one of ``PROCESSORS``.

    Raises:
        UserError: the file is damaged, a step is a class of some other package, or a step's
            statistics lie outside of the folder.
    """
    file = folder / f"{name}.json"
    pipeline = read_json(file, PIPELINE, "Use another copy of the checkpoint.")
    for step in pipeline["steps"]:
        if "class" in step or "registry_name" not in step:
            raise UserError(
                f"{file} has the step {str(step.get('class', 'without a name'))[:80]!r}, which is "
                "not in LeRobot's registry. Such a step is Python code that the checkpoint chooses, "
                "so it is not run. Use a checkpoint whose steps all have a registry_name."
            )
        if Path(step.get("state_file", "")).name != step.get("state_file", ""):
            raise UserError(
                f"{file} names the file {step['state_file'][:80]!r}, which lies elsewhere. Use "
                "another copy of the checkpoint."
            )
    return pipeline
