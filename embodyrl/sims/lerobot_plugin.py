r"""A plug-in for ``lerobot-eval``: every env of this project in LeRobot's own evaluation.

    lerobot-eval --policy.path=out/my_smolvla_rl \
        --env.discover_packages_path=embodyrl.sims.lerobot_plugin \
        --env.type=embodyrl --env.preset=libero_object_vla_ppo --seed=0 \
        --eval.batch_size=10 --eval.n_episodes=50

LeRobot gives episode i the seed ``--seed`` + i. It is taken as the number of an initial state, so
``--seed=0`` plays the same ones as ``embodyrl eval``. LeRobot asks for one action at a time, where
``embodyrl eval`` executes chunks. Both are the same if the policy executes as many actions per
observation: ``n_action_steps``, which an export sets to ``policy.execute``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.envs.configs import EnvConfig

from embodyrl.build import make_env
from embodyrl.config import env_config
from embodyrl.env import VecEnv
from embodyrl.errors import UserError
from embodyrl.types import Obs

__path__: list[str] = []
"""LeRobot looks for submodules of what ``discover_packages_path`` names; there are none."""


@EnvConfig.register_subclass("embodyrl")
@dataclass
class EmbodyrlEnv(EnvConfig):
    """What ``--env.KEY=`` takes.

    Attributes:
        preset: a preset, or a run's config.yaml, whose env section is used; or an env's name.
        overrides: of that section, each ``env.key=value``.
        split: of the initial states.
    """

    preset: str = ""
    overrides: list[str] = field(default_factory=list)
    split: str = "eval"

    def __post_init__(self) -> None:
        if self.preset and not self.features:
            env = self._make(1)
            self.features = _features(env)
            self.fps = round(env.spec.control_hz)
            # The policy has the same names.
            self.features_map = {key: key for key in self.features}
            env.close()

    @property
    def gym_kwargs(self) -> dict[str, Any]:
        """Nothing: the envs do not come from gymnasium's registry."""
        return {}

    def create_envs(
        self, n_envs: int, use_async_envs: bool = False
    ) -> dict[str, dict[int, VectorEnv]]:
        """Suite -> number -> envs, as LeRobot wants them.

        The envs run in parallel by themselves, so ``use_async_envs`` means nothing here.
        """
        return {self.type: {0: LeRobotVectorEnv(self._make(n_envs))}}

    def _make(self, count: int) -> VecEnv:
        config = env_config(self.preset, self.overrides)
        return make_env(dataclasses.replace(config.for_evaluation(self.split), num_envs=count))


def _features(env: VecEnv) -> dict[str, PolicyFeature]:
    spec = env.spec
    images = {
        f"observation.images.{name}": PolicyFeature(FeatureType.VISUAL, (*size, 3))
        for name, size in spec.cameras.items()
    }
    state = PolicyFeature(FeatureType.STATE, (spec.proprio_dim,))
    return {
        **images,
        "observation.state": state,
        "action": PolicyFeature(FeatureType.ACTION, (spec.action_dim,)),
    }


class LeRobotVectorEnv(VectorEnv):
    """A VecEnv as LeRobot's rollout wants it: with LeRobot's names, and without autoreset."""

    def __init__(self, env: VecEnv) -> None:
        super().__init__()
        self.env = env
        spec = env.spec
        self.num_envs = spec.num_envs
        self._instruction = [""] * spec.num_envs
        self.metadata = {
            "autoreset_mode": AutoresetMode.DISABLED,
            "render_fps": round(spec.control_hz),
        }
        box = gymnasium.spaces.Box
        pictures: dict[str, gymnasium.Space[Any]] = {
            name: box(0, 255, (*size, 3), np.uint8) for name, size in spec.cameras.items()
        }
        self.single_observation_space = gymnasium.spaces.Dict(
            {
                "pixels": gymnasium.spaces.Dict(pictures),
                "agent_pos": box(-np.inf, np.inf, (spec.proprio_dim,), np.float32),
            }
        )
        self.single_action_space = box(-1.0, 1.0, (spec.action_dim,), np.float32)
        self.observation_space = gymnasium.vector.utils.batch_space(
            self.single_observation_space, self.num_envs
        )
        self.action_space = gymnasium.vector.utils.batch_space(
            self.single_action_space, self.num_envs
        )

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Starts all episodes; a list of seeds is taken as a list of initial states.

        Raises:
            UserError: there are fewer initial states, so some would be played twice.
        """
        given = seed if isinstance(seed, list) else None
        limit = self.env.spec.num_init_states
        if given and limit is not None and max(given) >= limit:
            raise UserError(
                f"{self.env.spec.name} has {limit} initial states, and the seed {max(given)} asks "
                "for another. Lower --seed or --eval.n_episodes."
            )
        obs = self.env.reset(init=given)
        return self._to_lerobot(obs), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """One action per env (N, A); an env that has ended does not change."""
        chunk = torch.as_tensor(np.asarray(actions), dtype=torch.float32).clamp(-1.0, 1.0)[:, None]
        step = self.env.step(chunk)
        done = step.done.cpu().numpy()
        success = (step.success & step.done).cpu().numpy()
        info = {"final_info": {"is_success": success}} if done.any() else {}
        reward = step.reward[:, 0].cpu().numpy()
        return (
            self._to_lerobot(step.obs),
            reward,
            step.terminated.cpu().numpy(),
            step.truncated.cpu().numpy(),
            info,
        )

    def _to_lerobot(self, obs: Obs) -> dict[str, Any]:
        """An observation under LeRobot's names; keeps what ``call`` may be asked for."""
        self._instruction = list(obs.instruction)
        self._images = {k: v.cpu().numpy() for k, v in obs.images.items()}
        return {"pixels": self._images, "agent_pos": obs.proprio.cpu().numpy()}

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """What LeRobot asks each env for: its instruction, its time limit, or a picture."""
        if name == "_max_episode_steps":
            return (self.env.spec.max_episode_steps,) * self.num_envs
        if name in ("task", "task_description"):
            return tuple(self._instruction)
        if name == "render":
            return tuple(np.concatenate(list(self._images.values()), axis=2))
        raise AttributeError(name)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """See ``call``."""
        return self.call(name)

    def close_extras(self, **kwargs: Any) -> None:
        """Closes the VecEnv."""
        self.env.close()
