"""A checkpoint of a run as one that LeRobot, or OpenVLA's code, loads: ``embodyrl export``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from embodyrl.build import load_config, load_policy, load_spec
from embodyrl.errors import UserError
from embodyrl.policy import ExportsAsPublished, ExportsToLeRobot, has_ability
from embodyrl.storage.atomic_files import write_json
from embodyrl.storage.env_spec import ORIGIN_FILE, spec_to_json
from embodyrl.storage.paths import require_writable


def export(path: str, folder: str | Path) -> Path:
    """Writes the policy of a checkpoint for the ``from_pretrained`` of LeRobot or OpenVLA.

    Args:
        path: a checkpoint, or a run's folder (its newest).
        folder: new, or empty.

    Raises:
        UserError: it is no policy that they have, or ``folder`` cannot be written.
    """
    require_writable(folder)
    config = load_config(path)
    spec = load_spec(path)
    policy: Any = load_policy(path, config.policy, spec, config.run.seed)
    if has_ability(policy, ExportsToLeRobot):
        save = policy.save_lerobot
    elif has_ability(policy, ExportsAsPublished):
        save = policy.save_published
    else:
        raise UserError(
            f"{path} holds a {config.policy.name}, which LeRobot does not have: it knows smolvla, "
            "pi0 and pi05. Of the others, openvla can be written as it is published. A policy of "
            "your own needs the method save_lerobot."
        )
    save(folder)
    if not (Path(folder).is_dir() and any(Path(folder).iterdir())):
        raise UserError(
            f"{type(policy).__name__}.{save.__name__}({str(folder)!r}) wrote nothing. It must write "
            "its files into that folder."
        )
    # What its pictures and actions mean; only we read it.
    write_json(Path(folder) / ORIGIN_FILE, {"spec": spec_to_json(spec)}, indent=2)
    return Path(folder)
