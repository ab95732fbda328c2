"""A checkpoint of a run as one that LeRobot, or OpenVLA's code, loads: ``embodyrl export``."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from embodyrl.build import load_config, load_policy, load_spec
from embodyrl.errors import UserError
from embodyrl.policy import ExportsAsPublished, ExportsToLeRobot, has_ability
from embodyrl.storage.atomic_files import write_json
from embodyrl.storage.env_spec import ORIGIN_FILE, WORDS, spec_from_json, spec_to_json, unlike
from embodyrl.storage.paths import require_writable
from embodyrl.storage.plain_data import ANYTHING, read_json
from embodyrl.storage.pretrained import IMAGES, PICTURE_STEP
from embodyrl.storage.profiles import PROFILES, profile_named
from embodyrl.storage.translation import Translation, translate
from embodyrl.types import EnvSpec

PIPELINES = ("policy_preprocessor.json", "policy_postprocessor.json")
REMEDY = "Export the checkpoint again."


def export(path: str, folder: str | Path, profile: str = "") -> Path:
    """Writes the policy of a checkpoint for the ``from_pretrained`` of LeRobot or OpenVLA.

    Args:
        path: a checkpoint, or a run's folder (its newest).
        folder: new, or empty.
        profile: a public family whose pictures the checkpoint shall take, under the family's names
            of cameras. Its pre-processor then turns them to those of the training. Empty leaves
            the pictures as in training.

    Raises:
        UserError: it is no policy that they have, ``folder`` cannot be written, or what the family
            shows or does cannot be translated.
    """
    require_writable(folder)
    config = load_config(path)
    spec = load_spec(path)
    change = _translation(spec, profile) if profile else Translation()
    policy: Any = load_policy(path, config.policy, spec, config.run.seed)
    if has_ability(policy, ExportsToLeRobot):
        save = policy.save_lerobot
    elif has_ability(policy, ExportsAsPublished):
        if profile:
            raise UserError(
                f"--profile is for LeRobot's checkpoints, and {path} holds a {config.policy.name}. "
                "Leave it out."
            )
        save = policy.save_published
    else:
        raise UserError(
            f"{path} holds a {config.policy.name}, which LeRobot does not have: it knows act, "
            "diffusion, smolvla, pi0, pi05 and pi0_fast. Of the others, openvla can be written as it is "
            "published. A policy of your own needs the method save_lerobot."
        )
    save(folder)
    if not (Path(folder).is_dir() and any(Path(folder).iterdir())):
        raise UserError(
            f"{type(policy).__name__}.{save.__name__}({str(folder)!r}) wrote nothing. It must write "
            "its files into that folder."
        )
    # The export then takes the pictures of that family, under its names of cameras.
    if profile:
        names = config.policy.cameras or tuple(spec.cameras)
        spec = _present(Path(folder), dict(zip(spec.cameras, names, strict=True)), spec, profile)
        _add_picture_step(Path(folder), change)
    # What its pictures and actions mean; only we read it.
    write_json(Path(folder) / ORIGIN_FILE, {"spec": spec_to_json(spec)}, indent=2)
    return Path(folder)


def remark(folder: str | Path) -> str:
    """What to know before LeRobot's own env of a family plays an export; mostly nothing.

    Args:
        folder: of the export.
    """
    said = read_json(Path(folder) / ORIGIN_FILE, {"spec": {...: ANYTHING}}, REMEDY)
    spec = spec_from_json(said["spec"])
    for name, profile in PROFILES.items():
        differs = unlike(profile.conventions, spec.conventions)
        keys = [key for camera in spec.cameras for key in profile.cameras.get(camera, ("",))[:1]]
        if differs == ["orientation"] and keys and all(key.startswith(IMAGES) for key in keys):
            return (
                f"Its pictures are {spec.conventions.orientation}, and those of {name} are "
                f"{profile.conventions.orientation}. For LeRobot's own env of this family, export "
                f"with --profile {name}."
            )
    return ""


def _translation(spec: EnvSpec, profile: str) -> Translation:
    """What is done to the pictures of a family, so that they are those of the training.

    Raises:
        UserError: the family is not LeRobot's, has no such camera, or acts differently.
    """
    family = profile_named(profile)
    change = translate(family.conventions, spec, f"the profile {profile}")
    for camera in spec.cameras:
        key = family.cameras.get(camera, ("",))[0]
        if not key.startswith(IMAGES):
            known = [
                name
                for name, p in PROFILES.items()
                if any(k.startswith(IMAGES) for keys in p.cameras.values() for k in keys)
            ]
            raise UserError(
                f"LeRobot's checkpoints have no name for the camera {camera!r} in the family "
                f"{profile}. Families that have: {', '.join(known)}."
            )
    if change.factor:
        wrong = unlike(family.conventions, spec.conventions)
        raise UserError(
            f"{WORDS[wrong[-1]].capitalize()} ({wrong[-1]}) of the family {profile} differs from "
            "that of the training, and an export translates pictures alone. Train with "
            f"env.profile={profile}."
        )
    return change


def _present(folder: Path, cameras: dict[str, str], spec: EnvSpec, profile: str) -> EnvSpec:
    """Gives the cameras of an export the names of a family, and returns the spec that it shows.

    Args:
        folder: of the export.
        cameras: camera of the env -> camera of the policy.
        spec: of the env of the training.
        profile: the family.
    """
    family = profile_named(profile)
    keys = {IMAGES + cameras[camera]: family.cameras[camera][0] for camera in spec.cameras}
    for file in ("config.json", *PIPELINES):
        content = read_json(folder / file, {...: ANYTHING}, REMEDY)
        write_json(folder / file, _renamed(content, keys), indent=2)
    # How pictures of another shape are changed is a matter of data.
    known = {f.name: getattr(family.conventions, f.name) for f in fields(family.conventions)}
    known = {name: value for name, value in known.items() if value and name != "fit"}
    return replace(spec, conventions=replace(spec.conventions, **known))


def _renamed(content: Any, keys: dict[str, str]) -> Any:
    """Nested data with other names for some keys of its mappings."""
    if isinstance(content, dict):
        return {keys.get(key, key): _renamed(value, keys) for key, value in content.items()}
    return [_renamed(value, keys) for value in content] if isinstance(content, list) else content


def _add_picture_step(folder: Path, change: Translation) -> None:
    """Lets the pre-processor of an export turn pictures, where something is to be turned."""
    flips = {"rows": change.rows, "columns": change.columns, "channels": change.channels}
    if not any(flips.values()):
        return
    pipeline = read_json(folder / PIPELINES[0], {"steps": [ANYTHING]}, REMEDY)
    pipeline["steps"].insert(1, {"registry_name": PICTURE_STEP, "config": flips})
    write_json(folder / PIPELINES[0], pipeline, indent=2)
