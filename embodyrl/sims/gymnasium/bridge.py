"""A bridge to Gymnasium in both directions: VecEnvs as its vector envs, and its envs as VecEnvs."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray
from torch import Tensor

from embodyrl.env import EnvConfig, SteppedVecEnv, Tick, VecEnv
from embodyrl.errors import UserError, did_you_mean, try_each
from embodyrl.sims.gymnasium.reports import read_reset, read_step
from embodyrl.sims.gymnasium.spaces import ObservationReader, action_box
from embodyrl.sims.silent_reset import was_reset_silently
from embodyrl.types import EnvSpec, Obs

UNKNOWN_HZ = 30.0
"""Actions per second of an env whose metadata name no ``render_fps``."""


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
    """Gymnasium envs with a box of actions as a VecEnv, e.g. Hopper-v5.

    What the observations become is said in ``spaces``. Without pictures the numbers of proprio are
    privileged state too. Actions in [-1, 1] are scaled to the env's box. The number of an initial
    state is the seed of the env's reset. Success is what ``info`` says (``reports``); with
    ``terminate_on_success`` it ends the episode. An env that truncates its episode before the time
    limit has a shorter one. An env that raises is reset; one that raises again before an episode
    has ended is made anew.

    Attributes:
        reader: of the observations; ``reader.numbers`` says what the numbers of proprio are.
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
            UserError: no such env, a split it does not have, or spaces that no policy here can see
                or act in.
        """
        if config.split not in ("train", "eval"):
            raise UserError(
                f"gymnasium/{env_id} has no split {config.split!r}. Valid names: eval, train."
            )
        self._make = partial(gymnasium.make, env_id, **kwargs)
        self._failed: set[int] = set()  # envs that raised since their last whole episode
        self._broken: set[int] = set()  # of those, the ones to be made anew
        try:
            self._envs = [self._make() for _ in range(config.num_envs)]
        except gymnasium.error.UnregisteredEnv as error:
            near = did_you_mean(env_id, gymnasium.registry)
            own = "" if ":" in env_id else " An env of your own is env.id=MODULE:ID."
            raise UserError(f"Gymnasium has no env {env_id!r}. {near}{own}") from error
        except (gymnasium.error.Error, ImportError) as error:
            # A package is missing, or Gymnasium has dropped this version.
            raise UserError(f"Gymnasium cannot make {env_id!r}: {error}") from error
        env = self._envs[0]
        self.reader = ObservationReader(env_id, env.observation_space)
        self._box = action_box(env_id, env.action_space)
        self._low = self._box.low.ravel()
        self._high = self._box.high.ravel()
        self._tried_one_step = reports_success is None
        if reports_success is None:
            reports_success = self._try_one_step(env_id)
        if not (config.terminate_on_success or reports_success):
            raise UserError(
                f"{env_id} reports no success, so there is none that could end an episode: leave "
                "env.terminate_on_success true."
            )
        reader = self.reader
        n = config.num_envs
        self._proprio = np.zeros((n, reader.proprio_dim), np.float32)
        self._images = {
            name: np.zeros((n, *size, 3), np.uint8) for name, size in reader.cameras.items()
        }
        self._instruction = [env_id] * n
        limit = env.spec.max_episode_steps if env.spec else None
        super().__init__(
            EnvSpec(
                name=f"gymnasium/{env_id}",
                num_envs=n,
                action_dim=len(self._low),
                proprio_dim=reader.proprio_dim,
                control_mode="box",
                control_hz=float(env.metadata.get("render_fps") or UNKNOWN_HZ),
                max_episode_steps=limit or 1000,
                cameras=reader.cameras,
                # A critic that reads this sees nothing else, which is too little with pictures.
                privileged_dim=0 if reader.cameras else reader.proprio_dim,
                tasks=(env_id,),
                reports_success=reports_success,
            ),
            config,
        )
        # An env that has terminated cannot go on, so ``_step`` itself says what ends an episode.
        self._ends_on_success = config.terminate_on_success
        self._ignore_success = False
        # Seeds of the two splits never meet: initial states are numbered below 2^31.
        self._offset = 0 if config.split == "train" else 2**31

    def _try_one_step(self, env_id: str) -> bool:
        """Whether ``info`` says after a first step if the task is solved.

        Raises:
            UserError: the env cannot take that step, or shows something else than its space says.
        """
        try:
            self.reader.read(read_reset(self._envs[0].reset(seed=0)))
            middle = self._native(((self._low + self._high) / 2)[None])[0]
            outcome = read_step(self._envs[0].step(middle))
            self.reader.read(outcome.obs)
        except Exception as error:
            raise UserError(
                f"{env_id} cannot take a first step, which would tell whether it reports "
                f"success: {type(error).__name__}: {error} Mend it, or set "
                "env.reports_success to go on without that step."
            ) from error
        return outcome.success is not None

    def _native(self, scaled: NDArray[Any]) -> NDArray[Any]:
        """(N, ...) actions in the shape of the env's own, whole numbers where it takes those."""
        if np.issubdtype(self._box.dtype, np.integer):
            scaled = np.rint(scaled).astype(self._box.dtype)
        return scaled.reshape(len(scaled), *self._box.shape)

    def _reset(self, env_ids: list[int], inits: list[int]) -> None:
        for k, init in zip(env_ids, inits, strict=True):
            if k not in self._broken:
                try:
                    self._keep(k, read_reset(self._envs[k].reset(seed=self._offset + init)))
                    continue
                except Exception:
                    if k not in self._failed:
                        self._failed.add(k)
                        raise
            # After an error the env may be in any state. A plain reset did not help.
            with suppress(Exception):
                self._envs[k].close()
            self._envs[k] = self._make()
            self._failed.discard(k)
            self._broken.discard(k)
            self._keep(k, read_reset(self._envs[k].reset(seed=self._offset + init)))

    def _keep(self, k: int, obs: Any) -> None:
        """Notes the observation of env k, which may not have another shape."""
        seen = self.reader.read(obs)
        self._proprio[k] = seen.proprio
        for name, image in seen.images.items():
            self._images[name][k] = image
        if seen.instruction:
            self._instruction[k] = seen.instruction

    def _step(self, actions: Tensor, active: Tensor) -> Tick:
        n = self.spec.num_envs
        reward = torch.zeros(n)
        terminated, success, fault, cut = (torch.zeros(n, dtype=torch.bool) for _ in range(4))
        scaled = self._low + (actions.cpu().numpy() + 1) / 2 * (self._high - self._low)
        native = self._native(scaled)

        def step_one(k: int) -> None:
            env = self._envs[k]
            outcome = read_step(env.step(native[k]))
            self._keep(k, outcome.obs)
            reward[k] = outcome.reward
            if outcome.success is not None and not self.spec.reports_success:
                self._refuse_surprise()
            success[k] = self.spec.reports_success and bool(outcome.success)
            terminated[k] = outcome.terminated or (bool(success[k]) and self._ends_on_success)
            cut[k] = outcome.truncated
            # Looked at in every step: the next one of the chunk may hide it.
            if len(bad := np.flatnonzero(~np.isfinite(self._proprio[k]))):
                fault[k] = True
                self.fault_texts[k] = f"proprio[{bad[0]}] is {self._proprio[k, bad[0]]}"
            elif was_reset_silently(getattr(env.unwrapped, "data", None)):
                fault[k] = True
                self.fault_texts[k] = "MuJoCo found NaN or infinity, and reset the simulation"

        failed = try_each(active.nonzero().flatten().tolist(), step_one)
        self._broken |= failed.keys() & self._failed
        self._failed |= failed.keys()
        self._failed -= set((terminated | cut).nonzero().flatten().tolist()) - failed.keys()
        self.fault_texts |= failed
        fault[list(failed)] = True
        return Tick(*(x.to(self.device) for x in (reward, terminated, success, fault, cut)))

    def _refuse_surprise(self) -> None:
        """Success is reported after all, which the first step did not show."""
        if self._tried_one_step:
            raise UserError(
                f"{self.spec.name} reports success, but did not at the first step, which was "
                "tried to find out. Set env.reports_success=true, or false to score it by its "
                "return."
            )

    def _observe(self, env_ids: list[int] | None) -> Obs:
        proprio = torch.from_numpy(self._proprio.copy()).to(self.device)
        images = {
            name: torch.from_numpy(image.copy()).to(self.device)
            for name, image in self._images.items()
        }
        privileged = proprio.clone() if self.spec.privileged_dim else None
        return Obs(images, proprio, list(self._instruction), privileged)

    def close(self) -> None:
        """Closes every env."""
        for env in self._envs:
            env.close()


def _to_dict(obs: Obs) -> dict[str, np.ndarray]:
    out = {"proprio": _numpy(obs.proprio)}
    out |= {f"image_{name}": _numpy(image) for name, image in obs.images.items()}
    if obs.privileged is not None:
        out["privileged"] = _numpy(obs.privileged)
    return out


def _numpy(x: Tensor) -> np.ndarray:
    return x.detach().cpu().numpy()
