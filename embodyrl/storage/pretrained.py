"""A pretrained checkpoint: found on disk or on the hub, and recognised by what it says of itself.

A public checkpoint does not say what its pictures mean. The names of its cameras tell its family
(``profiles.PROFILES``), and so which ``env.profile`` shows it what it was trained on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from embodyrl.errors import UserError, did_you_mean
from embodyrl.storage.env_spec import ORIGIN_FILE, spec_from_json, unlike
from embodyrl.storage.paths import expand_home, is_hub_id
from embodyrl.storage.plain_data import ANYTHING, TEXT, read_json
from embodyrl.storage.profiles import PROFILES

LEROBOT_VLAS = ("smolvla", "pi0", "pi05", "pi0_fast")
"""Policies of LeRobot's checkpoints, by the ``type`` in their config.json and their name here."""
CONFIG = {"type?": TEXT, "input_features?": ({...: ANYTHING}, None)}
"""Structure of such a config.json, as far as it is read here."""
PREPROCESSOR = "policy_preprocessor.json"
RENAMING = {
    "steps": [
        {
            "registry_name?": ANYTHING,
            "config?": {"rename_map?": {...: TEXT}, ...: ANYTHING},
            ...: ANYTHING,
        }
    ],
    ...: ANYTHING,
}
"""Structure of its pre-processor, likewise."""
IMAGES = "observation.images."
PICTURE_STEP = "embodyrl_pictures"
"""The step of a pre-processor that ``policies.vla.picture_step`` registers with LeRobot."""


@dataclass(frozen=True)
class Recognised:
    """What a checkpoint's files say about how it is used.

    Attributes:
        policy: the name of its policy; empty if it is none of ``LEROBOT_VLAS``.
        profile: the family that its cameras belong to; empty if they belong to none.
        cameras: its cameras in the order of the env's; empty without a family.
    """

    policy: str = ""
    profile: str = ""
    cameras: tuple[str, ...] = ()


def recognise(folder: Path, cameras: Sequence[str]) -> Recognised:
    """What the config of a LeRobot checkpoint says.

    Args:
        folder: of the checkpoint; without a config.json nothing is recognised.
        cameras: of the env.

    Raises:
        UserError: the config is damaged.
    """
    if not (folder / "config.json").is_file():
        return Recognised()
    config = read_json(folder / "config.json", CONFIG, "Use another copy of the checkpoint.")
    policy = config.get("type", "")
    if policy not in LEROBOT_VLAS:
        return Recognised()
    keys = config.get("input_features") or {}
    # Key of the data -> key of the policy, which another name in the data stands for.
    known = {**{key: key for key in keys}, **_renamed_inputs(folder, keys)}
    for name, profile in PROFILES.items():
        # The key of each of the env's cameras in this family, where the checkpoint has it.
        found = [
            next((known[key] for key in profile.cameras.get(camera, ()) if key in known), "")
            for camera in cameras
        ]
        if found and all(found) and not _says_otherwise(folder, name):
            names = tuple(key.removeprefix(IMAGES) for key in found)
            return Recognised(policy, name, names)
    return Recognised(policy)


def _renamed_inputs(folder: Path, keys: Container[str]) -> dict[str, str]:
    """What the pre-processor of a checkpoint renames to one of ``keys``: name of the data -> key.

    A checkpoint that was fine-tuned from another robot's keeps that one's names of cameras.
    """
    file = folder / PREPROCESSOR
    if not file.is_file():
        return {}
    # As a rule there is one such step.
    steps = read_json(file, RENAMING, "Use another copy of the checkpoint.")["steps"]
    found: dict[str, str] = {}
    for step in steps:
        if step.get("registry_name") == "rename_observations_processor":
            found |= step.get("config", {}).get("rename_map", {})
    return {name: key for name, key in found.items() if key in keys}


def _says_otherwise(folder: Path, profile: str) -> bool:
    """Whether an export of ours says that its pictures or actions are not those of a family."""
    if not (folder / ORIGIN_FILE).is_file():
        return False
    said = read_json(
        folder / ORIGIN_FILE, {"spec": {...: ANYTHING}}, "Export the checkpoint again."
    )
    return bool(unlike(PROFILES[profile].conventions, spec_from_json(said["spec"]).conventions))


def find_checkpoint(
    path: str, revision: str = "", weights: bool = True, setting: str = "policy.pretrained"
) -> Path:
    """The folder of a LeRobot checkpoint, or of a tokenizer.

    It is a folder of this machine, or it is downloaded from the Hugging Face hub (or taken from the
    hub's cache).

    Args:
        path: the folder, or the id on the hub.
        revision: of an id.
        weights: download the weights too, not only the JSON files.
        setting: the config key that names it, for the message.

    Raises:
        UserError: there is no such checkpoint, it may not be read, or the hub cannot be reached.
    """
    folder = Path(expand_home(path))
    if folder.is_dir():
        return folder
    # What cannot be an id of the hub (owner/name) must be a folder. Name the nearest ones.
    if not is_hub_id(path):
        near = []
        if folder.parent.is_dir():
            near = [p.name for p in folder.parent.iterdir() if p.is_dir()]
        hint = "Give a folder, or an id of the hub (OWNER/NAME)."
        if near:
            hint = did_you_mean(folder.name, near)
        raise UserError(f"{setting} is {path!r}, and there is no such folder. {hint}")
    from huggingface_hub import snapshot_download

    with explain_hub_errors(path):
        # The last pattern is of the parts beside the network of an OpenVLA-OFT.
        patterns = ["*.json", "*.safetensors", "*--*_checkpoint.pt"] if weights else ["*.json"]
        return Path(snapshot_download(path, revision=revision or None, allow_patterns=patterns))


@contextlib.contextmanager
def explain_hub_errors(name: str) -> Iterator[None]:
    """Turns errors of the Hugging Face libraries into a ``UserError`` that says what to do.

    Args:
        name: the hub id or folder that is being read.
    """
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError) as error:
        # Transformers wraps the errors of the hub's client: look at all causes, too.
        causes: list[BaseException] = [error]
        while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
            causes.append(cause)

        def caused_by(*kinds: type[BaseException]) -> bool:
            return any(isinstance(e, kinds) for e in causes)

        # The first two are subclasses of HfHubHTTPError, so they are asked for first.
        if caused_by(GatedRepoError):
            problem = (
                "is gated: accept its licence on its page at huggingface.co, then log in with `hf "
                "auth login` (or set HF_TOKEN)"
            )
        elif caused_by(RepositoryNotFoundError, RevisionNotFoundError):
            problem = (
                "is not on the Hugging Face hub, or is private: check the id and policy.revision, "
                "or `hf auth login`"
            )
        elif caused_by(
            OfflineModeIsEnabled, LocalEntryNotFoundError, HfHubHTTPError, ConnectionError
        ):
            problem = (
                "is not on this machine, and the Hugging Face hub cannot be reached: download it "
                f"where there is a network (`hf download {name}`), and give the folder"
            )
        else:
            first_line = str(error).strip().partition("\n")[0]
            problem = (
                f"cannot be used ({first_line[:300]}): give a folder that holds it, or an id of "
                "the Hugging Face hub"
            )
        raise UserError(f"{name} {problem}.") from error
