"""A checkpoint of a run as one that LeRobot loads: ``embodyrl export``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from embodyrl.build import load_config, load_policy, load_spec
from embodyrl.errors import UserError
from embodyrl.policy import ExportsToLeRobot, has_ability
from embodyrl.storage.atomic_files import write_json
from embodyrl.storage.env_spec import ORIGIN_FILE, spec_to_json
from embodyrl.storage.paths import require_writable


def export(path: str, folder: str | Path) -> Path:
    """Writes the policy of a checkpoint for LeRobot's ``from_pretrained``.

    Args:
        path: a checkpoint, or a run's folder (its newest).
        folder: new, or empty.

    Raises:
        UserError: it is no policy that LeRobot has, or ``folder`` cannot be written.
    """
    require_writable(folder)
    config = load_config(path)
    spec = load_spec(path)
    policy: Any = load_policy(path, config.policy, spec, config.run.seed)
    if not has_ability(policy, ExportsToLeRobot):
        raise UserError(
            f"{path} holds a {config.policy.name}, which LeRobot does not have: it knows act, "
            "diffusion, smolvla, pi0 and pi05. A policy of your own needs the method save_lerobot."
        )
    policy.save_lerobot(folder)
    if not (Path(folder).is_dir() and any(Path(folder).iterdir())):
        raise UserError(
            f"{type(policy).__name__}.save_lerobot({str(folder)!r}) wrote nothing. It must write its "
            "files into that folder."
        )
    # What its pictures and actions mean; LeRobot does not read it.
    write_json(Path(folder) / ORIGIN_FILE, {"spec": spec_to_json(spec)}, indent=2)
    return Path(folder)
