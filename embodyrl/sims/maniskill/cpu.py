"""ManiSkill on the CPU: N envs of one episode each, stepped in a loop, observed when somebody looks.

``BaseEnv.step`` computes observation and reward on tensors of one env in every control step, which
costs far more than the physics. Here a control step drives the controller and the scene, asks
``evaluate`` at most once, and leaves the observation to the end of the chunk. What remains is
ManiSkill's own code on the same numbers, so states, successes and rewards are bit-equal to
``gymnasium.make`` (tested). ``fast_step.py`` replaces the slowest pieces.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from embodyrl.env import Tick
from embodyrl.errors import UserError, did_you_mean
from embodyrl.sims.maniskill import fast_step
from embodyrl.sims.maniskill.make_env import make_base_env

if TYPE_CHECKING:
    from embodyrl.sims.maniskill.env import ManiSkillConfig


class CpuEngine:
    """See ``env.Engine``.

    Args:
        config: the env's.
    """

    def __init__(self, config: ManiSkillConfig) -> None:
        self.rgb = config.obs == "rgb"
        make = {
            "control_mode": config.control_mode,
            "reward": config.reward,
            "image_size": config.image_size if self.rgb else 0,
            "robot": config.robot,
            "num_envs": 1,
            "sim_backend": "physx_cpu",
            "render_backend": "cpu" if self.rgb else "none",
        }
        self.envs: list[SingleEnv] = []
        try:
            for _ in range(config.num_envs):
                # ManiSkill collects garbage for every scene it builds: searching all of PyTorch
                # takes longer than the rest.
                gc.freeze()
                try:
                    base = make_base_env(config.task, **make)
                except (
                    AttributeError
                ):  # a few tasks (PushT) paint things while they build, also where nobody looks
                    if make["render_backend"] == "cpu":
                        raise
                    make["render_backend"] = "cpu"
                    base = make_base_env(config.task, **make)
                self.envs.append(SingleEnv(base, config.task, config.reward))
        finally:
            gc.unfreeze()
        self.base = self.envs[0].base
        self.cameras = choose_cameras(config, self.base) if self.rgb else []
        self._stale = set(range(config.num_envs))
        self._rows: tuple[Tensor, Tensor, dict[str, Tensor]] | None = None

    def reset(self, env_ids: list[int], seeds: list[int]) -> None:
        """Puts those envs into the initial states of those seeds."""
        for k, seed in zip(env_ids, seeds, strict=True):
            self.envs[k].reset(seed)
        self._stale.update(env_ids)

    def step(self, actions: Tensor, active: Tensor) -> Tick:
        """One control step of the active envs."""
        n = len(self.envs)
        reward = torch.zeros(n)
        terminated, success, fault = (torch.zeros(n, dtype=torch.bool) for _ in range(3))
        actions = actions.cpu()
        for k in active.nonzero().flatten().tolist():
            reward[k], terminated[k], success[k], fault[k] = self.envs[k].step(actions[k])
            self._stale.add(k)
        to = active.device
        return Tick(reward.to(to), terminated.to(to), success.to(to), fault.to(to))

    def observe(self) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """State, proprio and images; only envs that moved since the last call are looked at anew."""
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
        """(N, 3) position of the tool between the fingers."""
        return np.stack([env.base.agent.tcp._objs[0].entity_pose.p for env in self.envs])

    def position(self, actor: str) -> np.ndarray:
        """(N, 3) position of the actor that ManiSkill's env keeps under that attribute."""
        return np.stack([getattr(env.base, actor)._objs[0].pose.p for env in self.envs])

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
    """What one control step did to one env."""

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
        self._rebuild = False
        self._agent: object = None
        self._controller: fast_step.EEDeltaPosController | None = None

    def reset(self, seed: int) -> None:
        """Puts the env into the initial state of ``seed``, whatever ran before."""
        calm(self.base)
        # A scene that held NaN is not trusted to be clean again: it is built anew.
        self.base.reset(seed=seed, options={"reconfigure": True} if self._rebuild else None)
        forget_physics(self.base)
        self._rebuild = False
        self._info = None
        if (
            self._agent is not self.base.agent
        ):  # tasks that build new shapes for each episode make a new robot, too
            self._agent = self.base.agent
            self._controller = fast_step.controller_for(self.base)
            fast_step.shortcut_grasp_check(self.base)

    def step(self, action: Tensor) -> Outcome:
        """One control step with ``action`` (A,) float32, in the controller's own units."""
        base = self.base
        if self._controller is None:
            native = split_action(base, action[None])
            base._step_action(native)
        else:
            native = action[None]
            self._controller.set_action(action.numpy())
            _simulate(base)
        base._elapsed_steps += 1
        if not self._finite():
            self._rebuild = True
            return Outcome(0.0, False, False, True)
        self._info = None
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
        """(P,) what ManiSkill gives to a policy with cameras: joints, tool pose, and the goal where none is drawn."""
        return visual_proprio(self.base, self._current_info())[0]

    def images(self, cameras: list[str]) -> dict[str, Tensor]:
        """Camera name -> (h, w, 3) uint8, drawn now."""
        return (
            {name: image[0] for name, image in draw(self.base, cameras).items()} if cameras else {}
        )

    def _finite(self) -> bool:
        total = 0.0
        for articulation in self.base.scene.articulations.values():
            for body in articulation._objs:
                total += float(body.qpos.sum()) + float(body.qvel.sum())
        for actor in self.base.scene.actors.values():
            for entity in actor._objs:
                total += float(entity.pose.p.sum())
        return bool(np.isfinite(total))

    def _current_info(self) -> dict[str, Any]:
        info = self._info or self.base.get_info()
        self._info = info
        return info


def calm(base: Any) -> None:
    """Stops what moves; set to zero while it moves, a speed leaves something behind in PhysX."""
    for actor in base.scene.actors.values():
        for entity in actor._objs:
            for body in entity.components:
                if hasattr(body, "put_to_sleep") and not body.kinematic:
                    body.put_to_sleep()


def forget_physics(base: Any) -> None:
    """Puts the bodies of a ManiSkill env into a new physics system.

    PhysX keeps more from one episode to the next than poses and speeds (contacts, their order, the
    solver's first guesses), and a contact makes of the last bit of it a centimetre within a second.
    """
    import sapien

    old = base.scene.sub_scenes[0]
    base._set_scene_config()
    physics = sapien.physx.PhysxCpuSystem()
    physics.timestep = old.physx_system.timestep
    drawn = [old.render_system] if base.scene.can_render() else []
    new = sapien.Scene([physics, *drawn])
    entities = list(old.entities)
    for entity in entities:
        old.remove_entity(entity)
    for entity in entities:
        new.add_entity(entity)
    base.scene.sub_scenes[0] = new
    base.scene.px = physics


def visual_proprio(base: Any, info: dict[str, Any]) -> Tensor:
    """(N, P) ``visual_state``, flat."""
    return _flatten(visual_state(base, info), base.num_envs)


def visual_state(base: Any, info: dict[str, Any]) -> dict[str, Any]:
    """ManiSkill's state without what only the simulator knows; tasks ask the observation mode what that is."""
    from mani_skill.envs.utils.observations import parse_obs_mode_to_struct

    kept = base._obs_mode, base.obs_mode_struct
    base._obs_mode = "rgb"
    base.obs_mode_struct = parse_obs_mode_to_struct("rgb")
    try:
        return base._get_obs_state_dict(info)
    finally:
        base._obs_mode, base.obs_mode_struct = kept


def draw(base: Any, cameras: list[str]) -> dict[str, Tensor]:
    """Camera name -> (N, h, w, 3) uint8; goal markers that ManiSkill hides from policies stay hidden."""
    for hidden in base._hidden_objects:
        hidden.hide_visual()
    base.scene.update_render(update_sensors=True, update_human_render_cameras=False)
    out = {}
    for name in cameras:
        sensor = base.scene.sensors[name]
        sensor.capture()
        out[name] = sensor.get_obs(rgb=True, depth=False, position=False, segmentation=False)["rgb"]
    return out


def choose_cameras(config: ManiSkillConfig, base: Any) -> list[str]:
    """The cameras that the config asks for."""
    known = list(base.scene.sensors)
    if wrong := [name for name in config.cameras if name not in known]:
        raise UserError(
            f"{config.task} has no camera {wrong[0]!r}. {did_you_mean(wrong[0], known)}"
        )
    return list(config.cameras) or known


def split_action(base: Any, action: Tensor) -> Any:
    """(N, A) as ManiSkill wants it: with several robots, one tensor for each."""
    space = base.single_action_space
    if not hasattr(space, "spaces"):
        return action
    widths = [part.shape[0] for part in space.spaces.values()]
    return dict(zip(space.spaces, action.split(widths, dim=1), strict=True))


def _simulate(base: Any) -> None:
    """``BaseEnv._step_action`` after the controller has set its targets."""
    base._before_control_step()
    for _ in range(base._sim_steps_per_control):
        base.agent.before_simulation_step()
        base._before_simulation_step()
        base.scene.step()
        base._after_simulation_step()
    base._after_control_step()


def _flatten(tree: Any, rows: int) -> Tensor:
    if isinstance(tree, dict):
        parts = [_flatten(value, rows) for value in tree.values()]
        return torch.cat(parts, dim=1) if parts else torch.zeros(rows, 0)
    return torch.as_tensor(tree).float().reshape(rows, -1)
