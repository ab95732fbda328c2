"""LIBERO's goals and observations of many worlds of one scene at once, in torch.

They are computed on the device that simulates the worlds. The predicates are those of
``native.Simulation`` for one world; a test holds the two equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from embodyrl.sims.libero.blueprint import Blueprint, Item
from embodyrl.sims.libero.scene import MAX_OBJECTS, PRIVILEGED_DIM


@dataclass
class Poses:
    """What goals and observations are computed from, as the last physics step of N worlds left it.

    Attributes:
        qpos: (N, nq).
        qvel: (N, nv).
        xpos: (N, nbody, 3). Like the next three it is from before the step's integration, as in
            MuJoCo.
        xquat: (N, nbody, 4).
        site_xpos: (N, nsite, 3).
        site_xmat: (N, nsite, 3, 3).
        seen_hand: (N, 9) the hand's position, quaternion and fingers when robosuite's sensors look.
        contact_geoms: (C, 2) geoms of the contacts of all worlds together.
        contact_world: (C,) the worlds they are in.
        num_contacts: (1,) how many of the C are real; what follows them is left over.
    """

    qpos: Tensor
    qvel: Tensor
    xpos: Tensor
    xquat: Tensor
    site_xpos: Tensor
    site_xmat: Tensor
    seen_hand: Tensor
    contact_geoms: Tensor
    contact_world: Tensor
    num_contacts: Tensor


class Goals:
    """The goals and the privileged state of the tasks that share one scene.

    Args:
        num_geoms: of the scene's physics model.
        device: of the tensors.
    """

    def __init__(self, num_geoms: int, device: torch.device) -> None:
        self._device = device
        self._num_geoms = num_geoms
        self._plans: list[Blueprint] = []
        # Numbers that have been copied to the device.
        self._constants: dict[tuple[float, ...], Tensor] = {}
        self._members: dict[tuple[int, ...], Tensor] = {}
        # For each task, the objects of its privileged state: 0 none, 1 body, 2 site; and which.
        self._kind = torch.zeros(0, MAX_OBJECTS, dtype=torch.long, device=device)
        self._index = torch.zeros_like(self._kind)

    def add(self, plan: Blueprint) -> int:
        """The number of a task of this scene, which the other methods take."""
        if plan not in self._plans:
            self._plans.append(plan)
            items = [plan.items[name] for name in plan.observed]
            blank = [0] * (MAX_OBJECTS - len(items))
            kind = [1 if item.site < 0 else 2 for item in items] + blank
            index = [item.body if item.site < 0 else item.site for item in items] + blank
            self._kind = torch.cat([self._kind, torch.tensor([kind], device=self._device)])
            self._index = torch.cat([self._index, torch.tensor([index], device=self._device)])
        return self._plans.index(plan)

    def success(self, poses: Poses, task: Tensor) -> Tensor:
        """(N,) whether all goals of each world's task (N,) hold."""
        # Every task's goals are tried in all worlds; each world takes the result of its own task.
        out = torch.zeros_like(task, dtype=torch.bool)
        for number, plan in enumerate(self._plans):
            reached = torch.ones_like(out)
            for goal in plan.goals:
                reached &= self.holds(poses, plan, goal)
            out |= reached & (task == number)
        return out

    def holds(self, poses: Poses, plan: Blueprint, goal: list[str]) -> Tensor:
        """(N,) whether one goal holds, e.g. ``["on", "akita_black_bowl_1", "plate_1"]``."""
        predicate, first, *others = goal[0], *(plan.items[name] for name in goal[1:])
        if predicate == "on":
            return self._on(poses, plan, first, others[0])
        if predicate == "in":
            return self._in(poses, first, others[0])
        if predicate == "up":
            return _position(poses, first)[:, 2] >= 1.0
        any_or_all = torch.any if predicate in ("open", "turnon") else torch.all
        return in_state(poses.qpos, first, predicate, any_or_all)

    def _on(self, poses: Poses, plan: Blueprint, item: Item, place: Item) -> Tensor:
        pos = _position(poses, item)
        # On an object: above its middle, and in contact.
        if place.site < 0:
            below = _position(poses, place)
            close = (below[:, :2] - pos[:, :2]).norm(dim=1) < 0.03
            return (below[:, 2] <= pos[:, 2]) & close & self._touch(poses, place, item)
        # On a region: in its frame, a little above its top, and in contact with what it belongs to.
        size = self._constant(place.size)
        delta = (
            poses.site_xmat[:, place.site] @ (pos - poses.site_xpos[:, place.site]).unsqueeze(-1)
        ).squeeze(-1)
        high = (delta[:, 2] > size[2] - 0.005) & (delta[:, 2] < size[2] + 0.10)
        within = high & (delta[:, :2].abs() < size[:2]).all(dim=1)
        if not place.parent:
            return within
        return within & self._touch(poses, plan.items[place.parent], item)

    def _in(self, poses: Poses, item: Item, place: Item) -> Tensor:
        """Whether the item's middle is in the region's bounding box, 1 cm deeper at the bottom."""
        pos = _position(poses, item)
        middle = poses.site_xpos[:, place.site]
        half = (poses.site_xmat[:, place.site] @ self._constant(place.size)).abs()
        low = middle - half
        low[:, 2] -= 0.01
        return (pos > low).all(dim=1) & (pos < middle + half).all(dim=1)

    def _touch(self, poses: Poses, a: Item, b: Item) -> Tensor:
        """(N,) whether any contact is between a geom of one and a geom of the other."""
        geoms = poses.contact_geoms.long()
        in_a, in_b = (self._member(item)[geoms] for item in (a, b))
        real = torch.arange(len(geoms), device=geoms.device) < poses.num_contacts
        touching = real & ((in_a[:, 0] & in_b[:, 1]) | (in_a[:, 1] & in_b[:, 0]))
        count = torch.zeros(len(poses.qpos), dtype=torch.int32, device=geoms.device)
        # Count the contacts of each world. Left-over entries may name any world.
        return count.index_add_(0, torch.where(real, poses.contact_world, 0), touching.int()) > 0

    def _member(self, item: Item) -> Tensor:
        """(num_geoms,) which geoms are the object's."""
        key = tuple(item.geoms)
        if key not in self._members:
            self._members[key] = torch.isin(torch.arange(self._num_geoms), torch.tensor(key)).to(
                self._device
            )
        return self._members[key]

    def _constant(self, values: list[float]) -> Tensor:
        """A copy of the numbers on the device, made once."""
        key = tuple(values)
        if key not in self._constants:
            self._constants[key] = torch.tensor(values, device=self._device)
        return self._constants[key]

    def privileged(self, poses: Poses, task: Tensor) -> Tensor:
        """(N, PRIVILEGED_DIM) as ``Scene.privileged``."""
        plan = self._plans[0]
        n = len(task)
        out = torch.zeros(n, PRIVILEGED_DIM, device=self._device)
        robot = plan.robot
        eef = poses.site_xpos[:, robot["site"]]
        # The robot.
        own = [
            poses.qpos[:, robot["joints"]],
            poses.qvel[:, robot["dofs"]],
            poses.qpos[:, robot["fingers"]],
        ]
        out[:, :23] = torch.cat([*own, eef, poses.xquat[:, robot["hand"]]], dim=1)
        # Objects, by the lists of each world's task: bodies and sites are looked up, and the right
        # one is taken.
        kind = self._kind[task]
        index = self._index[task]
        rows = torch.arange(n, device=self._device)[:, None]
        body = torch.where(kind == 1, index, 0)
        site = torch.where(kind == 2, index, 0)
        is_site = (kind == 2)[..., None]
        pos = torch.where(is_site, poses.site_xpos[rows, site], poses.xpos[rows, body])
        quat = torch.where(
            is_site, _region_quat(poses.site_xmat[rows, site]), poses.xquat[rows, body]
        )
        objects = torch.cat([pos, quat, pos - eef[:, None]], dim=2)
        out[:, 23 : 23 + 10 * MAX_OBJECTS] = torch.where(
            (kind > 0)[..., None], objects, 0.0
        ).flatten(1)
        # Joints of drawers, doors and knobs.
        joints = plan.observed_joints
        out[:, 23 + 10 * MAX_OBJECTS : 23 + 10 * MAX_OBJECTS + len(joints)] = poses.qpos[:, joints]
        return out


def proprio_of_worlds(poses: Poses) -> Tensor:
    """(N, 8) gripper position, axis-angle (see ``scene.axis_angle``), finger joints."""
    hand = poses.seen_hand
    w = hand[:, 3:4].double().clamp(-1.0, 1.0)
    xyz = hand[:, 4:7].double()
    sine = (1.0 - w * w).sqrt()
    turn = torch.where(sine > 1e-8, xyz * 2.0 * w.arccos() / sine.clamp(min=1e-8), 0.0)
    return torch.cat([hand[:, :3], turn.float(), hand[:, 7:]], dim=1)


def in_state(qpos: Tensor, item: Item, what: str, any_or_all: Callable[..., Tensor]) -> Tensor:
    """(N,) whether any or all joints of a drawer, door or knob are open, closed, on or off."""
    direction, threshold = item.limits[what]
    values = direction * qpos[:, item.joints]
    limit = direction * threshold
    return any_or_all(values >= limit if what == "turnon" else values > limit, dim=1)


def _position(poses: Poses, item: Item) -> Tensor:
    return poses.site_xpos[:, item.site] if item.site >= 0 else poses.xpos[:, item.body]


def _region_quat(mat: Tensor) -> Tensor:
    """Quaternions (..., 4) of rotation matrices (..., 3, 3): x, y, z, w with w >= 0.

    robosuite has this order for regions.
    """
    xx = mat[..., 0, 0]
    yy = mat[..., 1, 1]
    zz = mat[..., 2, 2]
    # There are four ways to compute it, each divided by another component. The largest component is
    # taken, so that nothing is divided by almost zero (Shepperd 1978).
    squares = torch.stack(
        [1 + xx - yy - zz, 1 - xx + yy - zz, 1 - xx - yy + zz, 1 + xx + yy + zz], dim=-1
    )
    a = mat[..., 2, 1] - mat[..., 1, 2]
    b = mat[..., 0, 2] - mat[..., 2, 0]
    c = mat[..., 1, 0] - mat[..., 0, 1]
    p = mat[..., 0, 1] + mat[..., 1, 0]
    q = mat[..., 0, 2] + mat[..., 2, 0]
    r = mat[..., 1, 2] + mat[..., 2, 1]
    x, y, z, w = squares.unbind(-1)
    ways = torch.stack([x, p, q, a, p, y, r, b, q, r, z, c, a, b, c, w], dim=-1).unflatten(
        -1, (4, 4)
    )
    best = squares.argmax(-1)[..., None, None].expand(*squares.shape[:-1], 1, 4)
    quat = torch.nn.functional.normalize(ways.gather(-2, best).squeeze(-2), dim=-1)
    return torch.where(quat[..., 3:] < 0, -quat, quat)
