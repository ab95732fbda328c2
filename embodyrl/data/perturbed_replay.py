"""``ReplayActor``: replays successes with a nudge, which gives near-successes and near-misses.

In recorded episodes the actions give the outcome away: whoever closes and lifts the hand has
mostly seen that it holds something. A world model learns this shortcut, and then imagines success
whenever a hand closes and lifts. In a replay with a nudge the same actions follow whether or not
the hand is in the right place. Only what the simulator shows then tells the outcome.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodyrl.data.lerobot_read import open_dataset
from embodyrl.data.table_checks import require_sound_tables
from embodyrl.env import EnvConfig
from embodyrl.errors import UserError
from embodyrl.types import EnvSpec, Obs

NUDGE = 5
"""Number of actions over which a nudge is spread."""
MAY_DIFFER = (
    "num_envs",
    "num_workers",
    "num_threads",
    "device",
    "seed",
    "render_batch",
    "terminate_on_success",
    "renderer",
)
"""Settings that do not change the course of an episode.

Camera settings do not either, but they are part of the data and must be equal.
"""


class ReplayActor:
    """Repeats recorded successes, each with one nudge at a random moment before success.

    A nudge is a random displacement, drawn from a Gaussian and spread over ``NUDGE`` actions. It is
    added to all action dims but the last, which is the gripper's. At the end of the record its last
    action is repeated.

    Attributes:
        inits: endless iterator over the initial states of the episodes to replay. ``reset`` replays
            the episodes that were drawn last.
    """

    def __init__(
        self,
        spec: EnvSpec,
        episodes: list[tuple[int, np.ndarray, int]],
        perturb: float,
        seed: int = 0,
    ) -> None:
        """Prepares to act in an env.

        Args:
            spec: of the env.
            episodes: for each its initial state, its actions (T, A), and the number of actions
                after which it was solved.
            perturb: standard deviation of a nudge, in units of the largest action.
            seed: of the order and the nudges.
        """
        self._spec = spec
        self._episodes = episodes
        self._perturb = perturb
        self._order = np.random.default_rng(seed)
        self._rng = np.random.default_rng([seed, 1])
        self._drawn: list[int] = []
        self._plans: list[np.ndarray] = [np.zeros((1, spec.action_dim), np.float32)] * spec.num_envs
        self._elapsed = np.zeros(spec.num_envs, dtype=np.int64)
        self.inits = self._draw()

    def _draw(self) -> Iterator[int]:
        while True:
            for number in self._order.permutation(len(self._episodes)).tolist():
                self._drawn.append(number)
                yield self._episodes[number][0]

    def reset(self, env_ids: list[int]) -> None:
        """Starts the episodes that were drawn last, in the envs ``env_ids``."""
        for k, number in zip(env_ids, self._drawn[-len(env_ids) :], strict=True):
            _, actions, solved = self._episodes[number]
            # A displacement at a random time before success, spread over some actions.
            plan = actions.copy()
            first = int(self._rng.integers(max(1, solved - NUDGE)))
            shift = self._perturb * self._rng.standard_normal(self._spec.action_dim - 1)
            plan[first : first + NUDGE, :-1] += (shift / NUDGE).astype(np.float32)
            self._plans[k] = plan.clip(-1.0, 1.0)
            self._elapsed[k] = 0
        self._drawn.clear()

    def act_on(self, obs: Obs) -> Tensor:
        """The next action of every env, (N, A) in [-1, 1]; it does not depend on ``obs``."""
        actions = [
            plan[min(t, len(plan) - 1)]
            for t, plan in zip(self._elapsed.tolist(), self._plans, strict=True)
        ]
        self._elapsed += 1
        return torch.from_numpy(np.stack(actions))


def load_replays(
    path: str | Path, config: EnvConfig, env: Any, perturb: float, seed: int
) -> ReplayActor:
    """An actor that replays in ``env`` the solved episodes of a data set of ``embodyrl collect``.

    Raises:
        UserError: the data set does not say its initial states, holds no success, or was recorded
            in another env.
    """
    # The same actions have the same effects only in the same env.
    data = open_dataset(path)
    wanted = [data.need(name) for name in ("action", "init", "next.success")]
    data = open_dataset(path, wanted)
    require_sound_tables(data)
    mine = _settings(config)
    theirs = data.origin.get("config", {})
    if wrong := [k for k, v in mine.items() if k in theirs and _plain(theirs[k]) != v]:
        raise UserError(
            f"{path} was recorded in another env ({wrong[0]} was {theirs[wrong[0]]!r}, now "
            f"{mine[wrong[0]]!r}), where the same actions have other effects."
        )
    # Initial state, actions and time of success of every solved episode.
    columns = data.columns
    episodes = []
    episode = columns["episode_index"].reshape(-1)
    solved = columns["next.success"].reshape(-1) > 0
    for number in np.unique(episode[solved]).tolist():
        rows = np.flatnonzero(episode == number)
        init = int(columns["init"].reshape(-1)[rows[0]])
        after = int(solved[rows].argmax()) + 1
        if init >= 0:
            episodes.append((init, columns["action"][rows].astype(np.float32), after))
    if not episodes:
        raise UserError(
            f"{path} holds no solved episode whose initial state is known, so there is nothing to "
            "replay."
        )
    return ReplayActor(env.spec, episodes, perturb, seed)


def _settings(config: EnvConfig) -> dict[str, Any]:
    return {k: _plain(v) for k, v in vars(config).items() if k not in MAY_DIFFER}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else value
