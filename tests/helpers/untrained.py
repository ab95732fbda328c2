"""A checkpoint of a policy that has learned nothing, for the simulated arm."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from embodyrl.build import make_policy
from embodyrl.config import compose
from embodyrl.real_robot.twin.mujoco_twin import MujocoTwin
from embodyrl.storage import checkpoint
from embodyrl.storage.env_spec import spec_to_json


def untrained(folder: Path, preset: str) -> Path:
    """Saves it.

    Args:
        folder: where to.
        preset: YAML of an embedded task and a policy.
    """
    file = folder / "preset.yaml"
    file.write_text(preset)
    config = compose(str(file), [])
    twin = MujocoTwin(config.env)  # type: ignore[arg-type]
    policy = make_policy(config.policy, twin.spec, 0)
    meta = {"config": json.loads(json.dumps(asdict(config))), "spec": spec_to_json(twin.spec)}
    twin.close()
    return checkpoint.save(folder / "step_000001", {"policy": policy.state_dict()}, meta)
