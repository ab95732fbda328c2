"""The one evaluation protocol: the noise-free policy on a fixed list of initial states, each scored once."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embodyrl.build import for_episodes, load_config, make_env, make_policy, pick_device
from embodyrl.env import VecEnv
from embodyrl.errors import UserError
from embodyrl.functional.intervals import format_rate, format_return, mean_interval, wilson
from embodyrl.policies.guidance import GuidedPolicy
from embodyrl.policy import Policy
from embodyrl.rollouts.batches import Episode
from embodyrl.storage import checkpoint
from embodyrl.types import EnvSpec, Obs


@dataclass
class Evaluation:
    """Results in the order of the initial states asked for.

    Attributes:
        episodes: one per initial state.
        frames: init -> (steps + 1, h, w, 3) uint8 of the episodes that were filmed, cameras side by
            side.
        faults: episodes whose simulator broke; they were run again from the start.
    """

    episodes: list[Episode]
    frames: dict[int, Tensor]
    faults: int = 0

    @property
    def successes(self) -> int:
        """How many episodes were solved."""
        return sum(e.success for e in self.episodes)


def evaluate(
    env: VecEnv,
    policy: Policy,
    inits: Sequence[int],
    *,
    seed: int = 0,
    film: Sequence[int] = (),
    device: torch.device | str = "cpu",
    progress: Callable[[list[Episode]], None] | None = None,
) -> Evaluation:
    """Scores a policy on each of ``inits`` once.

    Every episode draws its initial noise from its own generator, seeded by (seed, init), so that
    its outcome does not depend on the number of envs or on the other episodes (but for the rounding
    of larger matrix products).

    Args:
        env: N envs, of a split never trained on.
        policy: sampled in ``"eval"`` mode.
        inits: initial states.
        seed: of the noise.
        film: those of ``inits`` that are filmed, at one frame per action; the outcome stays the
            same.
        device: of the policy.
        progress: called with the episodes done so far.

    Raises:
        UserError: ``inits`` is empty or names a state twice, or the simulator broke far too often.
    """
    if not inits:
        raise UserError("There is nothing to evaluate: the list of initial states is empty.")
    if twice := [i for i, count in Counter(inits).items() if count > 1]:
        raise UserError(
            f"Initial state {twice[0]} is listed twice; its episode would be the same again and "
            "make the interval look narrower than it is. List every state once, and vary the seed "
            "for more episodes."
        )
    done: dict[int, Episode] = {}
    frames: dict[int, Tensor] = {}
    faults = 0
    filmed = set(film)
    for camera in (True, False):
        part = [i for i in inits if (i in filmed) is camera]
        waiting = part[::-1]
        while waiting:
            faults += _run(
                env, policy, waiting, done, frames if camera else None, seed, device, progress
            )
            if faults > 5 + len(inits) // 20:
                raise UserError(
                    f"The simulator of {env.spec.name} broke {faults} times in one evaluation; "
                    "giving up."
                )
    return Evaluation([done[i] for i in inits], frames, faults)


def evaluate_checkpoint(
    path: str,
    overrides: Sequence[str] = (),
    *,
    episodes: int = 0,
    seed: int = 0,
    base: str = "",
    guidance: float = 1.0,
) -> dict[str, Any]:
    """Scores a checkpoint in the env it was trained for, on its evaluation split unless ``env.split`` is overridden.

    Args:
        path: a checkpoint, or a run's folder (its newest).
        overrides: of the config that it was trained with.
        episodes: initial states; 0 means as in training.
        seed: of the policy's noise.
        base: a checkpoint whose velocity is mixed in (``policies.guidance``); none by default.
        guidance: 0 acts as ``base``, 1 as the checkpoint itself, more goes further.

    Returns:
        ``env``, ``split``, ``reports_success``, ``episodes``, ``successes``, ``success_rate``,
        ``interval`` (95% Wilson), ``return_mean``, ``return_interval`` (95% Student's t, None for
        one episode) and ``tasks``, the same per task; ``results`` lists every episode.
    """
    config = load_config(path, overrides)
    if not any(o.startswith("env.split=") for o in overrides):
        config = dataclasses.replace(config, env=config.env.for_evaluation(config.run.eval_split))
    device = pick_device(config.run.device)
    episodes = episodes or config.run.eval_episodes
    env = make_env(for_episodes(config.env, episodes))
    try:
        policy: Any = make_policy(config.policy, env.spec, config.run.seed, device)
        checkpoint.load_policy(path, policy, env.spec)
        if base:
            policy = GuidedPolicy(policy, _base_policy(base, env.spec, device), guidance)
        inits = first_inits(env.spec, episodes)
        result = evaluate(env, policy, inits, seed=seed, device=device)
    finally:
        env.close()
    tasks = {name: [e for e in result.episodes if e.task == name] for name in env.spec.tasks}
    return {
        "checkpoint": str(path),
        "env": env.spec.name,
        "split": config.env.split,
        "reports_success": env.spec.reports_success,
        **_summary(result.episodes),
        "tasks": {name: _summary(part) for name, part in tasks.items() if part},
        "results": [dataclasses.asdict(e) for e in result.episodes],
    }


def _base_policy(path: str, spec: EnvSpec, device: torch.device) -> Any:
    config = load_config(path)
    policy = make_policy(config.policy, spec, config.run.seed, device)
    checkpoint.load_policy(path, policy, spec)
    return policy


def first_inits(spec: EnvSpec, count: int) -> list[int]:
    """The initial states that an evaluation of ``count`` episodes uses: always the first ones, tasks in turn."""
    return list(range(count if spec.num_init_states is None else min(count, spec.num_init_states)))


def score_text(episodes: Sequence[Episode], reports_success: bool) -> str:
    """The success rate of some episodes as text, or their mean return where the env reports no success."""
    if reports_success:
        return format_rate(sum(e.success for e in episodes), len(episodes))
    return f"return {format_return([e.reward for e in episodes])}" if episodes else "no episodes"


def _summary(episodes: list[Episode]) -> dict[str, Any]:
    solved = sum(e.success for e in episodes)
    rate = solved / len(episodes)
    mean, low, high = mean_interval([e.reward for e in episodes])
    return {
        "episodes": len(episodes),
        "successes": solved,
        "success_rate": rate,
        "interval": wilson(solved, len(episodes)),
        "return_mean": mean,
        "return_interval": (low, high) if len(episodes) > 1 else None,
    }


def print_evaluation(result: dict[str, Any]) -> None:
    """The figures of ``evaluate_checkpoint`` as text."""
    episodes = [Episode(**row) for row in result["results"]]
    reports = result["reports_success"]
    print(f"{result['env']}, split {result['split']}: {score_text(episodes, reports)}")
    if len(result["tasks"]) > 1:
        for name in result["tasks"]:
            print(f"  {name}: {score_text([e for e in episodes if e.task == name], reports)}")


def _run(
    env: VecEnv,
    policy: Policy,
    waiting: list[int],
    done: dict[int, Episode],
    frames: dict[int, Tensor] | None,
    seed: int,
    device: torch.device | str,
    progress: Callable[[list[Episode]], None] | None,
) -> int:
    """Works off ``waiting`` with as many envs as there are; returns the number of faults (those states wait again)."""
    n = env.spec.num_envs
    slots: list[int | None] = [waiting.pop() if waiting else None for _ in range(n)]
    # An env without work runs along on some state and is not counted.
    obs = env.reset(init=[0 if s is None else s for s in slots])
    generators = [_generator(seed, s or 0) for s in slots]
    reward = torch.zeros(n)
    length = torch.zeros(n, dtype=torch.long)
    reel = [[image] for image in _images(obs)] if frames is not None else None
    faults = 0
    while any(s is not None for s in slots):
        actions = policy.sample(obs.to(device), generator=generators, mode="eval").actions
        obs, gained, steps, over, success, fault = _execute(env, actions, reel)
        reward += gained
        length += steps
        restart: list[int] = []
        for k in over.nonzero().flatten().tolist():
            init = slots[k]
            if init is None:
                continue
            if fault[k]:
                faults += 1
                waiting.append(init)
            else:
                done[init] = Episode(
                    init, env.spec.task_of(init), bool(success[k]), float(reward[k]), int(length[k])
                )
                if frames is not None and reel is not None:
                    frames[init] = torch.stack(reel[k])
            reward[k] = 0.0
            length[k] = 0
            slots[k] = waiting.pop() if waiting and faults <= 5 else None
            if slots[k] is not None:
                generators[k] = _generator(seed, slots[k] or 0)
                restart.append(k)
        if progress is not None:
            progress(list(done.values()))
        if restart:
            obs = env.reset(restart, init=[slots[k] or 0 for k in restart])
            if reel is not None:
                images = _images(obs)
                for k in restart:
                    reel[k] = [images[k]]
    return faults


def _execute(
    env: VecEnv, actions: Tensor, reel: list[list[Tensor]] | None
) -> tuple[Obs, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A chunk, filmed one action at a time: obs, and per env reward, actions executed, over, success and fault."""
    n = len(actions)
    reward = torch.zeros(n)
    length = torch.zeros(n, dtype=torch.long)
    over, success, fault = (torch.zeros(n, dtype=torch.bool) for _ in range(3))
    obs: Obs | None = None
    for piece in actions.split(1, dim=1) if reel is not None else (actions,):
        step = env.step(piece)
        if reel is not None:
            valid = step.valid[:, 0].tolist()
            for k, image in enumerate(_images(step.obs)):
                if valid[k]:
                    reel[k].append(image)
        reward += step.reward.sum(1).cpu()
        length += step.valid.sum(1).cpu()
        over |= step.done.cpu()
        success |= step.success.cpu() & step.done.cpu()
        fault |= (
            step.log["fault"].bool().cpu()
            if "fault" in step.log
            else torch.zeros(n, dtype=torch.bool)
        )
        obs = step.obs
    assert obs is not None
    return obs, reward, length, over, success, fault


def _images(obs: Obs) -> list[Tensor]:
    """Per env one picture with all cameras side by side."""
    if not obs.images:
        return [torch.zeros(8, 8, 3, dtype=torch.uint8)] * len(obs)
    return list(torch.cat([image.cpu() for image in obs.images.values()], dim=2))


def _generator(seed: int, init: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed * 1_000_003 + init * 7_919 + 1) % 2**63)
