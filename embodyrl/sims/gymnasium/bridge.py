"""A bridge to Gymnasium in both directions: VecEnvs as its vector envs, and its envs as VecEnvs."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import gymnasium
import mujoco
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import Tensor

from embodyrl.env import EnvConfig, SteppedVecEnv, Tick, VecEnv
from embodyrl.errors import UserError, did_you_mean, try_each
from embodyrl.types import EnvSpec, Obs

SUCCESS = ("success", "is_success")
"""The keys of ``info`` by which Gymnasium envs say that a task is solved."""


_mujoco: Any = mujoco  # its type stubs lack the warnings
_RESETS = (
    _mujoco.mjtWarning.mjWARN_BADQPOS,
    _mujoco.mjtWarning.mjWARN_BADQVEL,
    _mujoco.mjtWarning.mjWARN_BADQACC,
)


class AsGymnasium(VectorEnv):
    """A VecEnv behind gymnasium's vector API: one action per step, autoreset in the same step.

    Observations are a dict: ``proprio``, one ``image_CAMERA`` per camera, and ``privileged`` where
    there is some. The instructions are in ``info["instruction"]``, and the last observation of an
    ended episode is in ``info["final_obs"]``.
    """

    def __init__(self, env: VecEnv) -> None:
        super().__init__()
        self.env = env
        spec = env.spec
        self.num_envs = spec.num_envs
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        box = gymnasium.spaces.Box
        spaces: dict[str, gymnasium.Space[Any]] = {
            "proprio": box(-np.inf, np.inf, (spec.proprio_dim,), np.float32)
        }
        for name, size in spec.cameras.items():
            spaces[f"image_{name}"] = box(0, 255, (*size, 3), np.uint8)
        if spec.privileged_dim:
            spaces["privileged"] = box(-np.inf, np.inf, (spec.privileged_dim,), np.float32)
        self.single_observation_space = gymnasium.spaces.Dict(spaces)
        self.single_action_space = box(-1.0, 1.0, (spec.action_dim,), np.float32)
        self.observation_space = gymnasium.vector.utils.batch_space(
            self.single_observation_space, self.num_envs
        )
        self.action_space = gymnasium.vector.utils.batch_space(
            self.single_action_space, self.num_envs
        )

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Starts all episodes anew; ``options={"init": [...]}`` names their initial states."""
        init = (options or {}).get("init")
        if isinstance(seed, list) and len(seed) != self.num_envs:
            raise UserError(f"seed has {len(seed)} entries, but there are {self.num_envs} envs.")
        if isinstance(seed, list) and None in seed:
            # For gymnasium, None means that the env's random stream goes on.
            obs = self.env.reset(init=init)
            for k, s in enumerate(seed):
                if s is not None:
                    obs = self.env.reset([k], seed=[s], init=None if init is None else [init[k]])
        else:
            # Here the list holds no None, which the type checker cannot see.
            obs = self.env.reset(seed=seed, init=init)  # pyright: ignore[reportArgumentType]
        return _to_dict(obs), {"instruction": obs.instruction}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """One action per env, (N, A)."""
        step = self.env.step(torch.as_tensor(np.asarray(actions), dtype=torch.float32)[:, None])
        obs = step.obs
        info: dict[str, Any] = {"success": _numpy(step.success)}
        if step.done.any():
            # Copies, because an env may use its buffers again at the reset.
            final = {name: x.copy() for name, x in _to_dict(step.obs).items()}
            info |= {"final_obs": final, "_final_obs": _numpy(step.done)}
            obs = self.env.reset(step.done)
        info["instruction"] = obs.instruction
        return (
            _to_dict(obs),
            _numpy(step.reward[:, 0]),
            _numpy(step.terminated),
            _numpy(step.truncated),
            info,
        )

    def close_extras(self, **kwargs: Any) -> None:
        """Closes the VecEnv."""
        self.env.close()


def as_gymnasium(env: VecEnv) -> AsGymnasium:
    """The VecEnv as a ``gymnasium.vector.VectorEnv``."""
    return AsGymnasium(env)


class FromGymnasium(SteppedVecEnv):
    """Gymnasium envs with flat observations and a box of actions as a VecEnv, e.g. Hopper-v5.

    The flat observation is both proprio and privileged state. Actions in [-1, 1] are scaled to the
    env's box. The number of an initial state is the seed of the env's reset. Success is what
    ``info`` holds under one of ``SUCCESS``. An env that truncates its episode before the time limit
    has a shorter one. An env that raises is made anew.
    """

    Config = EnvConfig

    def __init__(
        self, env_id: str, config: EnvConfig, reports_success: bool | None = None, **kwargs: Any
    ) -> None:
        """Makes the envs.

        Args:
            env_id: Gymnasium's own.
            config: number of envs, split, seed and device.
            reports_success: whether its ``info`` says if a task is solved. Nothing in Gymnasium's
                API tells that, so None takes a first step and reads its ``info``.
            kwargs: of ``gymnasium.make``.

        Raises:
            UserError: no such env, a split it does not have, or spaces that are not flat,
                continuous and bounded.
        """
        if config.split not in ("train", "eval"):
            raise UserError(
                f"gymnasium/{env_id} has no split {config.split!r}. Valid names: eval, train."
            )
        if not config.terminate_on_success:
            raise UserError(
                f"{env_id} ends its episodes itself: leave env.terminate_on_success true."
            )
        self._make = partial(gymnasium.make, env_id, **kwargs)
        self._failed: set[int] = set()  # envs that raised, to be made anew
        try:
            self._envs = [self._make() for _ in range(config.num_envs)]
        except gymnasium.error.UnregisteredEnv as error:
            near = did_you_mean(env_id, gymnasium.registry)
            raise UserError(f"Gymnasium has no env {env_id!r}. {near}") from error
        except (gymnasium.error.Error, ImportError) as error:
            # A package is missing, or Gymnasium has dropped this version.
            raise UserError(f"Gymnasium cannot make {env_id!r}: {error}") from error
        # Only flat observations and bounded continuous actions fit a flow policy.
        observation = self._envs[0].observation_space
        action = self._envs[0].action_space
        if not isinstance(observation, gymnasium.spaces.Box) or not isinstance(
            action, gymnasium.spaces.Box
        ):
            raise UserError(
                f"{env_id} has no flat observations and continuous actions, which is what a flow "
                f"policy needs: {observation}, {action}. Choose an env that has both (Hopper-v5), "
                "or wrap and register it."
            )
        if not (np.isfinite(action.low).all() and np.isfinite(action.high).all()):
            raise UserError(
                f"The actions of {env_id} have no bounds to scale [-1, 1] to: {action}."
            )
        limit = self._envs[0].spec.max_episode_steps if self._envs[0].spec else None
        dim = int(np.prod(observation.shape))
        self._obs_shape = observation.shape
        self._low = action.low.ravel()
        self._high = action.high.ravel()
        self._action_shape = action.shape
        self._obs = np.zeros((config.num_envs, dim), np.float32)
        self._instruction = [env_id] * config.num_envs
        self._tried_one_step = reports_success is None
        if reports_success is None:
            try:
                self._envs[0].reset(seed=0)
                info = self._envs[0].step(((action.low + action.high) / 2).astype(action.dtype))[-1]
            except Exception as error:
                raise UserError(
                    f"{env_id} cannot take a first step, which would tell whether it reports "
                    f"success: {type(error).__name__}: {error} Mend it, or set "
                    "env.reports_success to go on without that step."
                ) from error
            reports_success = any(key in info for key in SUCCESS)
        super().__init__(
            EnvSpec(
                name=f"gymnasium/{env_id}",
                num_envs=config.num_envs,
                action_dim=int(np.prod(action.shape)),
                proprio_dim=dim,
                control_mode="box",
                control_hz=float(self._envs[0].metadata.get("render_fps", 0) or 0),
                max_episode_steps=limit or 1000,
                cameras={},
                privileged_dim=dim,
                tasks=(env_id,),
                reports_success=reports_success,
            ),
            config,
        )
        # Seeds of the two splits never meet: initial states are numbered below 2^31.
        self._offset = 0 if config.split == "train" else 2**31

    def _reset(self, env_ids: list[int], inits: list[int]) -> None:
        for k, init in zip(env_ids, inits, strict=True):
            if k in self._failed:
                # After an error the env may be in any state.
                with suppress(Exception):
                    self._envs[k].close()
                self._envs[k] = self._make()
                self._failed.discard(k)
            self._keep(k, self._envs[k].reset(seed=self._offset + init)[0])

    def _keep(self, k: int, obs: Any) -> None:
        """Notes the observation of env k, which may not have another shape."""
        row = np.asarray(obs, np.float32)
        if row.shape != self._obs_shape:
            raise ValueError(f"the observation has the shape {row.shape}, not {self._obs_shape}")
        self._obs[k] = row.ravel()

    def _step(self, actions: Tensor, active: Tensor) -> Tick:
        n = self.spec.num_envs
        reward = torch.zeros(n)
        terminated, success, fault, cut = (torch.zeros(n, dtype=torch.bool) for _ in range(4))
        scaled = self._low + (actions.cpu().numpy() + 1) / 2 * (self._high - self._low)

        def step_one(k: int) -> None:
            env = self._envs[k]
            obs, r, term, trunc, info = env.step(scaled[k].reshape(self._action_shape))
            self._keep(k, obs)
            reward[k] = float(r)
            terminated[k] = bool(term)
            cut[k] = bool(trunc)
            reported = [info[key] for key in SUCCESS if key in info]
            if reported and self._tried_one_step and not self.spec.reports_success:
                raise UserError(
                    f"{self.spec.name} reports success, but did not at the first step, which was "
                    "tried to find out. Set env.reports_success=true, or false to score it by its "
                    "return."
                )
            success[k] = self.spec.reports_success and bool(reported and reported[0])
            # Looked at in every step: the next one of the chunk may hide it.
            if len(bad := np.flatnonzero(~np.isfinite(self._obs[k]))):
                fault[k] = True
                self.fault_texts[k] = f"proprio[{bad[0]}] is {self._obs[k, bad[0]]}"
            elif _was_reset_silently(env):
                fault[k] = True
                self.fault_texts[k] = "MuJoCo found NaN or infinity, and reset the simulation"

        failed = try_each(active.nonzero().flatten().tolist(), step_one)
        self._failed |= failed.keys()
        self.fault_texts |= failed
        fault[list(failed)] = True
        return Tick(*(x.to(self.device) for x in (reward, terminated, success, fault, cut)))

    def _observe(self, env_ids: list[int] | None) -> Obs:
        flat = torch.from_numpy(self._obs.copy()).to(self.device)
        return Obs({}, flat, list(self._instruction), flat.clone())

    def close(self) -> None:
        """Closes every env."""
        for env in self._envs:
            env.close()


def _was_reset_silently(env: gymnasium.Env[Any, Any]) -> bool:
    """Whether MuJoCo found NaN or infinity: it then resets the simulation without a word."""
    warning = getattr(getattr(env.unwrapped, "data", None), "warning", None)
    return warning is not None and any(warning[kind].number for kind in _RESETS)


def _to_dict(obs: Obs) -> dict[str, np.ndarray]:
    out = {"proprio": _numpy(obs.proprio)}
    out |= {f"image_{name}": _numpy(image) for name, image in obs.images.items()}
    if obs.privileged is not None:
        out["privileged"] = _numpy(obs.privileged)
    return out


def _numpy(x: Tensor) -> np.ndarray:
    return x.detach().cpu().numpy()
