"""``JudgedEnv``: a reflector gives the reward of any env, in place of the simulator.

Its reward is what a robot without sensors of success could have too:

    r = [solved] + c (p' - p)

p is the reflector's calibrated probability before a chunk and p' after it. The second term is
potential-based shaping (Ng et al., 1999) with a discount of 1: what is gained can be lost again, so
a policy cannot earn more than c by going to and fro (the Delta of arXiv:2410.15115).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from embodyrl.env import EnvConfig, VecEnv, env_index, replace_rows
from embodyrl.errors import UserError, did_you_mean
from embodyrl.rollouts.env_around import EnvAround
from embodyrl.types import Obs, Step
from embodyrl.world_models.film import Film
from embodyrl.world_models.reflectors.base import successes
from embodyrl.world_models.reflectors.folder import load_reflector

UNJUDGED = "the reflector could not judge its pictures"


class JudgedEnv(EnvAround):
    """A VecEnv around another one, whose reward and success are a reflector's.

    It looks at the observation after each chunk. What the simulator itself says is
    ``Step.log["real_success"]``, for whoever measures how often the reflector is fooled.

    Args:
        env: does not end an episode when the task is solved.
        config: of the env; ``reflector`` and ``progress_coef`` are read.

    Attributes:
        spec: the env's.
        fault_texts: env number -> why it broke.

    Raises:
        UserError: no reflector in that folder, or the env lacks a camera that it looks at.
    """

    def __init__(self, env: VecEnv, config: EnvConfig) -> None:
        super().__init__(env)
        self.fault_texts: dict[int, str] = {}
        self._config = config
        self._reflector = load_reflector(config.reflector, str(config.place()))
        seen = self._reflector.cameras
        if missing := [name for name in seen if name not in env.spec.cameras]:
            raise UserError(
                f"The reflector {config.reflector} looks at the camera {missing[0]!r}, which "
                f"{env.spec.name} does not have. {did_you_mean(missing[0], env.spec.cameras)}"
            )
        n = env.spec.num_envs
        self._film = Film()
        self._streak = torch.zeros(n, dtype=torch.long)
        self._running = torch.zeros(n, dtype=torch.bool)
        self._probability = torch.zeros(n)
        self._obs: Obs | None = None

    def reset(
        self,
        env_ids: Tensor | Sequence[int] | None = None,
        *,
        seed: int | Sequence[int] | None = None,
        init: Sequence[int] | None = None,
    ) -> Obs:
        """See ``VecEnv.reset``."""
        obs = self.env.reset(env_ids, seed=seed, init=init)
        rows = torch.tensor(env_index(env_ids, self.spec.num_envs), dtype=torch.long)
        self._film.begin(obs.images, rows, self._reflector.cameras, self._reflector.window)
        self._streak[rows] = 0
        self._running[rows] = True
        self.fault_texts = {
            k: v for k, v in self.fault_texts.items() if k not in set(rows.tolist())
        }
        # A reflector that cannot judge the first picture has not seen any progress yet.
        if self._config.progress_coef and len(rows):
            self._probability[rows] = self._judged(rows, obs).nan_to_num(0.0)
        # Envs whose episode was over for the reflector may have moved since.
        waiting = ~self._running
        self._obs = obs if self._obs is None else self._kept(obs, self._obs, waiting)
        return self._obs

    def step(self, actions: Tensor) -> Step:
        """See ``VecEnv.step``."""
        if self._obs is None:
            raise RuntimeError("step was called before the first reset.")
        step = self.env.step(actions)
        device = step.valid.device
        # Judge the envs that moved in an episode that runs.
        self._film.append(step.obs.images)
        ran = self._running & step.valid.any(1).cpu() & ~step.fault.cpu()
        rows = ran.nonzero().flatten()
        raw = torch.zeros(self.spec.num_envs)
        raw[rows] = self._judged(rows, step.obs, calibrated=False)
        unjudged = raw.isnan()
        for k in unjudged.nonzero().flatten().tolist():
            self.fault_texts[k] = UNJUDGED
        hit, streak = successes(raw[:, None], self._reflector.calibration, self._streak)
        self._streak = torch.where(ran, streak, self._streak)
        success = hit[:, 0] & ran & ~unjudged
        # How each episode goes on.
        fault = (step.fault.cpu() & self._running) | unjudged
        failed = step.terminated.cpu() & ran & ~fault
        terminated = failed | (success if self._config.terminate_on_success else False)
        truncated = (step.truncated.cpu() & self._running & ~terminated) | fault
        valid = step.valid.cpu() & (ran & ~fault)[:, None]
        # The reward stands at the last action that was executed.
        probability = self._reflector.calibration.apply(raw).float()
        gain = self._config.progress_coef * (probability - self._probability)
        reward = torch.zeros(valid.shape)
        last = (valid * torch.arange(1, valid.shape[1] + 1)).argmax(1)
        earned = torch.where(ran & ~fault, success.float() + gain, 0.0)
        reward.scatter_(1, last[:, None], earned[:, None])
        self._probability = torch.where(ran & ~fault, probability, self._probability)
        # An episode that is over, and one that broke, stays where it was.
        self._obs = self._kept(step.obs, self._obs, ~ran | fault)
        self._running &= ~(terminated | truncated)
        log = {
            "steps": valid.sum(1).to(device),
            "judged": torch.where(ran, probability, torch.zeros(())).to(device),
            "real_success": (step.ever_solved.cpu() & ran).to(device),
        }
        return replace(
            step,
            obs=self._obs,
            reward=reward.to(device),
            terminated=terminated.to(device),
            truncated=truncated.to(device),
            valid=valid.to(device),
            success=success.to(device),
            fault=fault.to(device),
            log=log,
            success_once=None if self._config.terminate_on_success else success.to(device),
        )

    def _judged(self, rows: Tensor, obs: Obs, *, calibrated: bool = True) -> Tensor:
        """(M,) probability that the task is solved in the newest pictures of ``rows``."""
        if not len(rows):
            return torch.zeros(0)
        sentences = [obs.instruction[k] for k in rows.tolist()]
        raw = self._reflector.judge(self._film.frames(rows), sentences, new=1)[:, -1].cpu().float()
        return self._reflector.calibration.apply(raw).float() if calibrated else raw

    @staticmethod
    def _kept(new: Obs, old: Obs, rows: Tensor) -> Obs:
        """``new``, with the rows of ``old`` where nothing was to happen."""
        return replace_rows(new, old, rows.to(new.proprio.device)) if rows.any() else new
