"""ManiSkill on the CPU: N scenes of one episode each, stepped in a loop and observed once a chunk.

``BaseEnv.step`` computes observation and reward on tensors of one env in every control step, which
costs far more than the physics. Here a control step drives the controller and the scene, asks
``evaluate`` at most once, and leaves the observation to the end of the chunk. The rest is
ManiSkill's own code on the same numbers, so states, successes and rewards are bit-equal to those of
``gymnasium.make`` (a test compares them). ``fast_step.py`` replaces the slowest pieces.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from embodyrl.env import Tick
from embodyrl.errors import try_each
from embodyrl.sims.maniskill import fast_step
from embodyrl.sims.maniskill.actions import split_action
from embodyrl.sims.maniskill.base_env import make_base_env
from embodyrl.sims.maniskill.config import ManiSkillConfig
from embodyrl.sims.maniskill.observations import draw, visual_proprio

COLLECT_EVERY = 16  # resets of an env


class CpuEngine:
    """See ``engine.Engine``.

    Args:
        config: of the env.
        task: registered id.
        count: scenes at first.
    """

    def __init__(self, config: ManiSkillConfig, task: str, count: int) -> None:
        self.task = task
        self.reward = config.reward
        self.rgb = config.obs == "rgb"
        self.fault_texts: dict[int, str] = {}  # why envs broke in the last step
        self._make: dict[str, Any] = {
            "control_mode": config.control_mode,
            "reward": config.reward,
            "image_size": config.image_size if self.rgb else 0,
            "robot": config.robot,
            "num_envs": 1,
            "sim_backend": "physx_cpu",
            "render_backend": "cpu" if self.rgb else "none",
        }
        self.envs: list[SingleEnv] = []
        self.cameras: list[str] = []
        # Observations of all scenes, and the scenes whose rows are out of date.
        self._stale: set[int] = set()
        self._rows: tuple[Tensor, Tensor, dict[str, Tensor]] | None = None
        self.grow(count)
        self.base = self.envs[0].base

    @property
    def size(self) -> int:
        """See ``engine.Engine``."""
        return len(self.envs)

    def grow(self, count: int) -> None:
        """See ``engine.Engine``."""
        make = self._make
        for _ in range(count):
            with nothing_to_collect():
                try:
                    base = make_base_env(self.task, **make)
                except AttributeError:
                    # A few tasks (PushT) paint things while they build, also without cameras.
                    if make["render_backend"] == "cpu":
                        raise
                    make["render_backend"] = "cpu"
                    base = make_base_env(self.task, **make)
            self._stale.add(len(self.envs))
            self.envs.append(SingleEnv(base, self.task, self.reward))
        # The new scenes get rows like the first one's, until they are looked at.
        if self._rows is not None:
            states, proprios, pictures = self._rows
            more = {
                name: torch.cat([x, x[:1].expand(count, *x.shape[1:])])
                for name, x in pictures.items()
            }
            wider = (torch.cat([x, x[:1].expand(count, -1)]) for x in (states, proprios))
            self._rows = (*wider, more)  # pyright: ignore[reportAttributeAccessIssue]

    def reset(self, ids: list[int], seeds: list[int]) -> None:
        """Puts those scenes into the initial states of those seeds."""
        for k, seed in zip(ids, seeds, strict=True):
            self.envs[k].reset(seed)
        self._stale.update(ids)

    def step(self, actions: Tensor, active: Tensor) -> Tick:
        """One control step of the active scenes."""
        n = len(self.envs)
        reward = torch.zeros(n)
        terminated, success, fault = (torch.zeros(n, dtype=torch.bool) for _ in range(3))
        actions = actions.cpu()

        def step_one(k: int) -> None:
            reward[k], terminated[k], success[k], fault[k] = self.envs[k].step(actions[k])
            self._stale.add(k)

        self.fault_texts = try_each(active.nonzero().flatten().tolist(), step_one)
        for k in self.fault_texts:
            self.envs[k].rebuild = True
            fault[k] = True
        to = active.device
        return Tick(reward.to(to), terminated.to(to), success.to(to), fault.to(to))

    def observe(self) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """State, proprio and images; only scenes that moved since then are observed anew."""
        # Scene 0 tells the sizes.
        if self._rows is None:
            state, proprio, images = self._look(0)
            n = len(self.envs)
            tiled = {name: image.repeat(n, 1, 1, 1) for name, image in images.items()}
            self._rows = state.repeat(n, 1), proprio.repeat(n, 1), tiled
        states, proprios, pictures = self._rows
        for k in self._stale:
            states[k], proprio, images = self._look(k)
            proprios[k] = proprio
            for name, image in images.items():
                pictures[name][k] = image
        self._stale.clear()
        state = states.clone()
        return (
            state,
            (proprios.clone() if self.rgb else state),
            {name: p.clone() for name, p in pictures.items()},
        )

    def tool(self) -> np.ndarray:
        """See ``engine.Engine``."""
        return np.stack([_numbers(env.base.agent.tcp._objs[0].entity_pose) for env in self.envs])

    def pose(self, name: str) -> np.ndarray:
        """See ``engine.Engine``."""
        found = [getattr(env.base, name) for env in self.envs]
        return np.stack([_numbers(x._objs[0].pose if hasattr(x, "_objs") else x.sp) for x in found])

    def close(self) -> None:
        """Frees the scenes."""
        for env in self.envs:
            env.base.close()
        self.envs = []

    def _look(self, k: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        env = self.envs[k]
        state = env.state()
        return state, (env.proprio() if self.rgb else state), env.images(self.cameras)


class Outcome(NamedTuple):
    """The result of one control step of one env."""

    reward: float
    terminated: bool
    success: bool
    fault: bool


class SingleEnv:
    """A ManiSkill env of one episode (``num_envs=1``, ``sim_backend="physx_cpu"``).

    Args:
        base: from ``make_base_env``.
        task: its registered id.
        reward: ``"sparse"``, ``"dense"`` or ``"normalized_dense"``.
    """

    def __init__(self, base: Any, task: str, reward: str) -> None:
        self.base = base
        self.task = task
        self.reward = reward
        self._info: dict[str, Any] | None = None
        self.rebuild = False
        self._resets = 0
        self._agent: object = None
        self._controller: fast_step.EEDeltaPosController | None = None

    def reset(self, seed: int) -> None:
        """Puts the env into the initial state of ``seed``, whatever ran before."""
        put_to_sleep(self.base)
        # A scene that held NaN is not trusted to be clean again: it is built anew.
        # Now and then it may, so that scenes which a task built anew do not pile up.
        self._resets += 1
        with nothing_to_collect() if self._resets % COLLECT_EVERY else nullcontext():
            self.base.reset(seed=seed, options={"reconfigure": True} if self.rebuild else None)
        renew_physics(self.base)
        self.rebuild = False
        self._info = None
        # Tasks that build new shapes for each episode also make a new robot.
        if self._agent is not self.base.agent:
            self._agent = self.base.agent
            self._controller = fast_step.controller_for(self.base)
            fast_step.shortcut_grasp_check(self.base)

    def step(self, action: Tensor) -> Outcome:
        """One control step with ``action`` (A,) float32, in the controller's own units."""
        base = self.base
        # Set the controller's targets and step the physics, by the fast controller where it fits.
        if self._controller is None:
            native = split_action(base, action[None])
            base._step_action(native)
        else:
            native = action[None]
            self._controller.set_action(action.numpy())
            _simulate(base)
        base._elapsed_steps += 1
        # A broken simulation is masked, and its scene is built anew at the reset.
        if not self._finite():
            self.rebuild = True
            return Outcome(0.0, False, False, True)
        self._info = None
        # Most steps are far from success, which costs less to see than to evaluate.
        if self.reward == "sparse" and fast_step.far_from_success(base, self.task):
            return Outcome(0.0, False, False, False)
        self._info = info = base.get_info()
        success = bool(info.get("success", False))
        fail = bool(info.get("fail", False))
        if self.reward == "sparse":
            reward = float(success) - float(fail)
        else:
            reward = float(
                base.get_reward(obs=base.get_obs(info, unflattened=True), action=native, info=info)
            )
        return Outcome(reward, success or fail, success, False)

    def state(self) -> Tensor:
        """(S,) the flat task state, ManiSkill's ``obs_mode="state"``."""
        return self.base.get_obs(self._current_info())[0]

    def proprio(self) -> Tensor:
        """(P,) what ManiSkill gives to a policy with cameras.

        These are joints, tool pose, and the goal where it is not drawn.
        """
        return visual_proprio(self.base, self._current_info())[0]

    def images(self, cameras: list[str]) -> dict[str, Tensor]:
        """Camera name -> (h, w, 3) uint8."""
        return (
            {name: image[0] for name, image in draw(self.base, cameras).items()} if cameras else {}
        )

    def _finite(self) -> bool:
        """Whether all poses and speeds are finite numbers; a sum is, only if all its terms are."""
        total = 0.0
        for articulation in self.base.scene.articulations.values():
            for body in articulation._objs:
                total += float(body.qpos.sum()) + float(body.qvel.sum())
        for actor in self.base.scene.actors.values():
            for entity in actor._objs:
                total += float(entity.pose.p.sum())
        return bool(np.isfinite(total))

    def _current_info(self) -> dict[str, Any]:
        """What ``evaluate`` says of this state; computed once for each state."""
        info = self._info or self.base.get_info()
        self._info = info
        return info


def _numbers(pose: Any) -> np.ndarray:
    """(7,) of a pose of SAPIEN's."""
    return np.concatenate([pose.p, pose.q])


@contextmanager
def nothing_to_collect() -> Iterator[None]:
    """Hides from ManiSkill's own garbage collection what is there already.

    ManiSkill collects for every scene that it builds. With all of PyTorch's objects to search, that
    takes longer than the building. An old scene waits for a later collection.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def put_to_sleep(base: Any) -> None:
    """Stops all bodies before a reset: PhysX keeps a trace of a speed that is set while moving."""
    for actor in base.scene.actors.values():
        for entity in actor._objs:
            for body in entity.components:
                if hasattr(body, "put_to_sleep") and not body.kinematic:
                    body.put_to_sleep()


def renew_physics(base: Any) -> None:
    """Puts the bodies of a ManiSkill env into a new physics system.

    From one episode to the next, PhysX keeps more than poses and speeds: contacts, their order, the
    solver's first guesses. With contacts, a difference in the last bit grows to a centimetre within
    a second, so an initial state would not give the same episode twice.
    """
    import sapien

    # A scene with the same settings and renderer, but a physics system without a past.
    old = base.scene.sub_scenes[0]
    base._set_scene_config()
    physics = sapien.physx.PhysxCpuSystem()
    physics.timestep = old.physx_system.timestep
    drawn = [old.render_system] if base.scene.can_render() else []
    new = sapien.Scene([physics, *drawn])
    # Move every body, and let ManiSkill use the new scene from here on.
    entities = list(old.entities)
    for entity in entities:
        old.remove_entity(entity)
    for entity in entities:
        new.add_entity(entity)
    base.scene.sub_scenes[0] = new
    base.scene.px = physics


def _simulate(base: Any) -> None:
    """``BaseEnv._step_action`` after the controller has set its targets."""
    base._before_control_step()
    for _ in range(base._sim_steps_per_control):
        base.agent.before_simulation_step()
        base._before_simulation_step()
        base.scene.step()
        base._after_simulation_step()
    base._after_control_step()
