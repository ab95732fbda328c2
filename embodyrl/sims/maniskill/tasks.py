"""ManiSkill's tasks: which exist, their instructions, and whether their assets are on this machine.

ManiSkill's source files are read as text, so that tasks can be listed and refused without SAPIEN
and without a driver.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path

from embodyrl.errors import MissingDependencyError, UserError, did_you_mean

SPLITS = {"train": "initial states of training", "eval": "other initial states of the same task"}

INSTRUCTIONS = {
    "PickCube-v1": "pick up the red cube and hold it at the goal",
    "PickCubeSO100-v1": "pick up the red cube and hold it at the goal",
    "PickCubeWidowXAI-v1": "pick up the red cube and hold it at the goal",
    "PushCube-v1": "push the blue cube into the target circle in front of it",
    "PullCube-v1": "pull the blue cube back into the target circle",
    "PullCubeTool-v1": "use the hook to pull the cube closer",
    "PokeCube-v1": "poke the cube to the goal with the peg",
    "StackCube-v1": "put the red cube on top of the green cube",
    "StackPyramid-v1": "build a pyramid: two cubes side by side and the third on top of them",
    "LiftPegUpright-v1": "stand the peg upright",
    "PegInsertionSide-v1": "insert the peg into the hole in the side of the box",
    "PlugCharger-v1": "plug the charger into the socket",
    "PlaceSphere-v1": "put the blue sphere into the bin",
    "RollBall-v1": "roll the ball to the goal at the other end of the table",
    "PushT-v1": "push the T-shaped block onto its outline",
    "PickSingleYCB-v1": "pick up the object and hold it at the goal",
    "PickClutterYCB-v1": "pick the marked object out of the clutter and hold it at the goal",
    "AssemblingKits-v1": "put the piece into its slot in the kit",
    "TurnFaucet-v1": "turn the faucet on",
    "TwoRobotPickCube-v1": "hand the cube over to the other robot, which lifts it to the goal",
    "TwoRobotStackCube-v1": "stack the cubes together on the marked spot",
    "OpenCabinetDrawer-v1": "open the cabinet drawer",
    "OpenCabinetDoor-v1": "open the cabinet door",
    "InsertFlower-v1": "put the flower into the vase",
    "FMBAssembly1Easy-v1": "assemble the board",
    "DrawTriangle-v1": "draw along the outline of the triangle",
    "DrawSVG-v1": "draw along the outline of the picture",
    "TableTopFreeDraw-v1": "draw on the canvas",
    "UnitreeG1PlaceAppleInBowl-v1": "put the apple into the bowl",
    "UnitreeG1TransportBox-v1": "carry the box to the other table",
    "PutCarrotOnPlateInScene-v1": "put the carrot on the plate",
    "PutEggplantInBasketScene-v1": "put the eggplant into the yellow basket",
    "PutSpoonOnTableClothInScene-v1": "put the spoon on the towel",
    "StackGreenCubeOnYellowCubeBakedTexInScene-v1": "stack the green block on the yellow block",
    "SO100GraspCube-v1": "grasp the cube and lift it",
}

# ManiSkill gives these tasks 50 steps; a controller of 0.1 m a step at 20 Hz needs fewer.
EPISODE_STEPS = {"PickCube-v1": 40, "PushCube-v1": 40, "PullCube-v1": 40}

# Start of a task's id -> assets of its robot or scene that its registration does not name.
_IMPLIED_ASSETS = {
    "AnymalC": ("anymal_c",),
    "UnitreeH1": ("unitree_h1",),
    "UnitreeGo2": ("unitree_go2",),
    "PickCubeWidowXAI": ("widowxai",),
    "OpenCabinetDoor": ("partnet_mobility_cabinet",),
    "ReplicaCAD_": ("ReplicaCAD",),
    "ReplicaCAD": ("ReplicaCAD", "ReplicaCADRearrange"),
    "ArchitecTHOR": ("AI2THOR",),
    "SceneManipulation": ("ReplicaCAD",),
    "Put": ("widowx250s",),
    "StackGreenCube": ("widowx250s",),
}

# These are registered in a loop over scenes, so they cannot be found as text. They can only be
# looked at: they have no success.
_SCENES = (
    "ArchitecTHOR",
    "ReplicaCAD",
    *(
        f"ReplicaCAD{what}{part}"
        for what in ("PrepareGroceries", "SetTable", "TidyHouse")
        for part in ("Train", "Val")
    ),
)

# Where ManiSkill unpacks each asset, under its data folder.
_ASSET_PATHS = {
    "ycb": "assets/mani_skill2_ycb",
    "pick_clutter_ycb_configs": "tasks/pick_clutter",
    "assembling_kits": "tasks/assembling_kits",
    "bridge_v2_real2sim": "tasks/bridge_v2_real2sim_dataset",
    "partnet_mobility_cabinet": "partnet_mobility/dataset",
    "partnet_mobility_faucet": "partnet_mobility/dataset",
    "ReplicaCAD": "scene_datasets/replica_cad_dataset",
    "AI2THOR": "scene_datasets/ai2thor",
    "RoboCasa": "scene_datasets/robocasa_dataset",
    "oakink-v2": "tasks/oakink-v2",
    "ReplicaCADRearrange": "scene_datasets/replica_cad_dataset/rearrange",
    "widowx250s": "robots/widowx",
}


@dataclass(frozen=True)
class ManiSkillTask:
    """One task of the installed ManiSkill.

    Attributes:
        name: the registered id, e.g. ``"PickCube-v1"``.
        instruction: what the policy is told.
        max_episode_steps: control steps until truncation when the config does not say.
        assets: names of the downloads the task needs besides the package; empty for most.
        missing: those of ``assets`` that are not on this machine.
    """

    name: str
    instruction: str
    max_episode_steps: int
    assets: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def available(self) -> bool:
        """Whether all assets are on this machine."""
        return not self.missing

    @property
    def select(self) -> str:
        """The override that chooses the task."""
        return f"env.task={self.name}"

    @property
    def group(self) -> str:
        """ManiSkill has no suites."""
        return ""

    @property
    def mend(self) -> str:
        """The commands that download what is missing."""
        return " && ".join(
            f"python -m mani_skill.utils.download_asset {asset}" for asset in self.missing
        )


def data_folder() -> Path:
    """ManiSkill's folder of assets: ``$MS_ASSET_DIR/data``, by default ``~/.maniskill/data``."""
    return Path(os.getenv("MS_ASSET_DIR", str(Path.home() / ".maniskill"))) / "data"


def instruction_for(name: str) -> str:
    """The instruction of a task; where ``INSTRUCTIONS`` has none, the words of its id."""
    if name in INSTRUCTIONS:
        return INSTRUCTIONS[name]
    # "PickClutterYCB-v1" -> "pick clutter ycb": no prefix and version, then a space between words.
    words = re.sub(r"^MS-|-v\d+$", "", name).replace("_", " ").replace("-", " ")
    words = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Za-z])(?=\d)", " ", words)
    return " ".join(words.lower().split())


def list_tasks() -> list[ManiSkillTask]:
    """All registered tasks, by name.

    Raises:
        MissingDependencyError: ManiSkill is not installed.
    """
    return [
        _task(name, steps, assets) for name, (steps, assets) in sorted(_registrations().items())
    ]


def require_task(name: str) -> ManiSkillTask:
    """The task of that name, if it can run here.

    Raises:
        UserError: no such task; the message gives the nearest names.
        MissingDependencyError: ManiSkill or one of the task's assets is not here; the message gives
            the command.
    """
    known = _registrations()
    if name not in known:
        raise UserError(f"ManiSkill has no task {name!r}. {did_you_mean(name, known)}")
    task = _task(name, *known[name])
    if task.missing:
        raise assets_missing(name, task.missing)
    return task


def assets_missing(task: str, assets: tuple[str, ...] | list[str]) -> MissingDependencyError:
    """The error for a task whose assets are not on this machine."""
    commands = " and ".join(
        f"`python -m mani_skill.utils.download_asset {asset}`" for asset in assets
    )
    return MissingDependencyError(
        f"ManiSkill's {task} needs the asset {' and '.join(repr(a) for a in assets)}, which is not "
        f"in {data_folder()}. Download it with {commands} (set MS_ASSET_DIR to keep it elsewhere), "
        "or choose another task: embodyrl.sims.maniskill.tasks.list_tasks() says which have "
        "theirs."
    )


def _task(name: str, steps: int, assets: tuple[str, ...]) -> ManiSkillTask:
    missing = tuple(asset for asset in assets if not _is_downloaded(asset))
    return ManiSkillTask(
        name, instruction_for(name), EPISODE_STEPS.get(name, steps), assets, missing
    )


def _is_downloaded(asset: str) -> bool:
    path = data_folder() / _ASSET_PATHS.get(asset, f"robots/{asset}")
    return path.is_dir() and any(path.iterdir())


@functools.cache
def _registrations() -> dict[str, tuple[int, tuple[str, ...]]]:
    """Task id -> (steps, assets), read from the ``register_env`` lines of the installed package."""
    spec = importlib.util.find_spec("mani_skill")
    if spec is None or spec.origin is None:
        raise MissingDependencyError(
            "ManiSkill is not installed. Install it with `pip install 'embodyrl[maniskill]'`."
        )
    found: dict[str, tuple[int, tuple[str, ...]]] = {}
    # Every call of register_env in the package's task files.
    for file in sorted((Path(spec.origin).parent / "envs").rglob("*.py")):
        text = file.read_text(encoding="utf-8", errors="replace")
        if "register_env(" in text and "template" not in file.name:
            for call in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)):
                if isinstance(call.func, ast.Name) and call.func.id == "register_env":
                    _add_registration(call, found)
    found.update(
        {f"{s}_SceneManipulation-v1": (200, _implied(f"{s}_SceneManipulation-v1")) for s in _SCENES}
    )
    return found


def _implied(name: str) -> tuple[str, ...]:
    """The assets that the task's id implies; see ``_IMPLIED_ASSETS``."""
    return next((assets for start, assets in _IMPLIED_ASSETS.items() if name.startswith(start)), ())


def _add_registration(call: ast.Call, found: dict[str, tuple[int, tuple[str, ...]]]) -> None:
    """Adds the task of one ``register_env(uid, max_episode_steps=..., ...)`` call to ``found``."""
    keywords = {k.arg: k.value for k in call.keywords}
    name = call.args[0] if call.args else keywords.get("uid")
    if not isinstance(name, ast.Constant) or not isinstance(name.value, str):
        return
    steps = keywords.get("max_episode_steps")
    assets = keywords.get("asset_download_ids")
    listed = tuple(ast.literal_eval(assets)) if assets is not None else ()
    count = steps.value if isinstance(steps, ast.Constant) and isinstance(steps.value, int) else 200
    found[name.value] = (count, tuple(dict.fromkeys(listed + _implied(name.value))))
