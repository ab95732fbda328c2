"""The training loop: rollout or demonstrations -> algorithm -> checkpoint, with an evaluation every so often.

All randomness of iteration i is drawn from generators seeded by (seed, i) and every rollout starts from fresh initial
states, so parameters, optimiser and the number i are all that an exact resume needs.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from embodyrl import checkpoint, registry
from embodyrl.build import make_env, make_policy, pick_device
from embodyrl.config import Config, to_yaml
from embodyrl.env import VecEnv
from embodyrl.errors import UserError
from embodyrl.evaluate import Evaluation, evaluate, first_inits
from embodyrl.loggers import LiveTable, MetricsWriter
from embodyrl.provenance import describe_run, finish_run
from embodyrl.report.video import write_video
from embodyrl.rollout import collect


def train(config: Config, *, command: str = "") -> Path:
    """Runs or resumes the run that ``config`` describes, and returns its folder.

    The folder holds ``config.yaml``, ``meta.json``, ``metrics.jsonl``, ``evals/``, ``videos/`` and ``checkpoints/``.
    Ctrl-C finishes the iteration, saves and returns; a second one stops at once.

    Raises:
        UserError: the folder holds a run with another config, or checkpoint and env do not fit.
    """
    run = config.run
    folder = Path(run.out) / run.name
    prepare_folder(folder, config)
    device = pick_device(run.device)
    if run.threads:
        torch.set_num_threads(run.threads)
    envs = Envs(config)
    try:
        algorithm = build_algorithm(config, envs, device)
        start = resume(folder, config, envs, algorithm, device)
        if start.iteration >= run.iterations:
            return folder
        describe_run(folder / "meta.json", command=command, seed=run.seed, device=device)
        with (
            Interrupt() as interrupt,
            MetricsWriter(folder, run.loggers, start.iteration) as metrics,
            LiveTable(run.name, run.iterations, start.iteration) as table,
        ):
            _loop(config, envs, algorithm, start, folder, device, interrupt, metrics, table)
    finally:
        envs.close()
    return folder


@dataclasses.dataclass
class Position:
    """How far a run has come: iterations and env steps done, and minutes of training (evaluations not counted)."""

    iteration: int = 0
    env_steps: int = 0
    minutes: float = 0.0


def _loop(
    config: Config,
    envs: Envs,
    algorithm: Any,
    at: Position,
    folder: Path,
    device: torch.device,
    interrupt: Interrupt,
    metrics: MetricsWriter,
    table: LiveTable,
) -> None:
    run = config.run

    def score(name: str, film: bool) -> None:
        result = run_evaluation(config, envs.eval, algorithm.result, device, film, table)
        save_evaluation(folder, name, at, result)
        table.evaluated(result.successes, len(result.episodes))

    demos = load_demos(config, envs.spec) if algorithm.source == "demos" else None
    if at.iteration == 0 and run.eval_before and algorithm.source == "rollout":
        score("before", film=True)
    for i in range(at.iteration, run.iterations):
        began = time.monotonic()
        generator = seeded(run.seed, i)
        progress = i / run.iterations
        if demos is not None:
            row = algorithm.update(demos, progress=progress, generator=generator)
        else:
            batch = collect(
                envs.train,
                algorithm.policy,
                algorithm.config.num_chunks,
                inits=draw_inits(envs.train, algorithm.config.num_chunks, run.seed, i),
                generator=generator,
                device=device,
            )
            rollout_seconds = time.monotonic() - began
            row = algorithm.update(batch, progress=progress, generator=generator)
            at.env_steps += batch.env_steps
            row |= {
                "train_success": batch.success_rate,
                "train_episodes": len(batch.episodes),
                "rollout_seconds": rollout_seconds,
                "env_steps_per_second": batch.env_steps / (time.monotonic() - began),
            }
        at.iteration = i + 1
        at.minutes += (time.monotonic() - began) / 60
        row = {"iteration": at.iteration, "env_steps": at.env_steps, "minutes": at.minutes, **row}
        metrics.write(row)
        table.update(row)
        out_of_time = bool(run.minutes) and at.minutes >= run.minutes
        last = at.iteration == run.iterations or out_of_time
        if last or interrupt.asked or at.iteration % run.checkpoint_every == 0:
            save(folder, config, envs.spec, algorithm, at)
        if interrupt.asked:
            table.say(f"Stopped after iteration {at.iteration}; the same command goes on from there.")
            return
        if last:
            break
        if run.eval_every and at.iteration % run.eval_every == 0:
            score(f"iter_{at.iteration:06d}", film=False)
    score("after", film=True)
    finish_run(folder / "meta.json")


class Envs:
    """The training env and the evaluation env of a run, each built when first asked for."""

    def __init__(self, config: Config) -> None:
        self._configs = {
            "train": config.env,
            "eval": dataclasses.replace(config.env, split=config.run.eval_split),
        }
        self._built: dict[str, VecEnv] = {}

    def _get(self, which: str) -> VecEnv:
        if which not in self._built:
            self._built[which] = make_env(self._configs[which])
        return self._built[which]

    @property
    def train(self) -> VecEnv:
        """Of the split that the config names."""
        return self._get("train")

    @property
    def eval(self) -> VecEnv:
        """Of ``run.eval_split``."""
        return self._get("eval")

    @property
    def spec(self):
        """What both agree on."""
        return (self._built.get("train") or self.eval).spec

    def close(self) -> None:
        """Closes what was built."""
        for env in self._built.values():
            env.close()
        self._built.clear()


def build_algorithm(config: Config, envs: Envs, device: torch.device) -> Any:
    """Policy, critic and optimiser, with initial weights that depend on ``run.seed`` alone."""
    cls = registry.load("algorithms", config.algorithm.name)
    spec = (envs.train if cls.source == "rollout" else envs.eval).spec
    policy = make_policy(config.policy, spec, config.run.seed, device)
    if config.run.init_checkpoint:
        checkpoint.load_policy(config.run.init_checkpoint, policy, spec)
    return cls(config.algorithm, policy)


def resume(folder: Path, config: Config, envs: Envs, algorithm: Any, device: torch.device) -> Position:
    """Loads the run's newest valid checkpoint, if it has one."""
    newest = checkpoint.latest(folder / "checkpoints")
    if newest is None:
        return Position()
    tensors, meta = checkpoint.load(newest, device=device)
    checkpoint.check_compatible(meta["spec"], envs.spec)
    algorithm.result.load_state_dict(tensors["policy"])
    algorithm.load_state_dict(tensors["algorithm"])
    return Position(**meta["position"])


def save(folder: Path, config: Config, spec: Any, algorithm: Any, at: Position) -> Path:
    """Writes a checkpoint that ``resume`` and ``embodyrl eval`` read."""
    meta = {
        "config": dataclasses.asdict(config),
        "spec": checkpoint.spec_to_json(spec),
        "position": dataclasses.asdict(at),
    }
    return checkpoint.save(
        folder / "checkpoints" / f"step_{at.iteration:06d}",
        {"policy": algorithm.result.state_dict(), "algorithm": algorithm.state_dict()},
        meta,
        keep_last=config.run.keep_checkpoints,
    )


def run_evaluation(
    config: Config, env: VecEnv, policy: Any, device: torch.device, film: bool, table: LiveTable | None = None
) -> Evaluation:
    """The first ``run.eval_episodes`` initial states of the evaluation split."""
    inits = first_inits(env.spec, config.run.eval_episodes)
    return evaluate(
        env,
        policy,
        inits,
        seed=config.run.seed,
        film=inits[: config.run.videos] if film and env.spec.cameras else [],
        device=device,
        progress=table.evaluating if table else None,
    )


def save_evaluation(folder: Path, name: str, at: Position, result: Evaluation) -> None:
    """Writes ``evals/NAME.json`` and the videos it names."""
    rows = []
    for episode in result.episodes:
        row = {**dataclasses.asdict(episode), "return": episode.reward, "video": None}
        row.pop("reward")
        if episode.init in result.frames:
            row["video"] = f"videos/{name}_{episode.init:04d}.mp4"
            write_video(result.frames[episode.init], folder / row["video"])
        rows.append(row)
    path = folder / "evals" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    payload = {"env_steps": at.env_steps, "minutes": at.minutes, "iteration": at.iteration, "episodes": rows}
    path.write_text(json.dumps(payload))


def load_demos(config: Config, spec: Any) -> Any:
    """The data set of the ``data`` section, as chunks of the policy's horizon."""
    from embodyrl.data.demos import Demonstrations

    if not config.data.path:
        raise UserError(
            "This algorithm learns from demonstrations: give data.path=FOLDER (see `embodyrl collect --help`)."
        )
    return Demonstrations.load(config.data.path, config.policy.horizon, spec=spec, episodes=config.data.episodes)


def draw_inits(env: VecEnv, num_chunks: int, seed: int, iteration: int) -> torch.Tensor:
    """Initial states for one rollout: enough for every env to start anew at every chunk."""
    rng = np.random.default_rng([seed, iteration])
    limit = env.spec.num_init_states or 2**31
    return torch.from_numpy(rng.integers(limit, size=env.spec.num_envs * (num_chunks + 1)))


def seeded(seed: int, iteration: int) -> torch.Generator:
    """The generator of one iteration's noise."""
    return torch.Generator().manual_seed(
        int(np.random.SeedSequence([seed, iteration]).generate_state(1, np.uint64)[0] >> 1)
    )


def prepare_folder(folder: Path, config: Config) -> None:
    """Makes the run's folder, or checks that the one that is there belongs to the same config."""
    text = to_yaml(config)
    path = folder / "config.yaml"
    if path.exists() and path.read_text() != text:
        old, new = path.read_text().splitlines(), text.splitlines()
        changed = [line.strip() for line in new if line not in old] or ["fewer keys"]
        raise UserError(
            f"{folder} holds a run with another config (now: {'; '.join(changed[:4])}). Give this run its own run.name=..., "
            f"or delete {folder} to start over."
        )
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


class Interrupt:
    """Turns the first SIGINT or SIGTERM into a wish to stop; the second one acts at once."""

    def __init__(self) -> None:
        self.asked = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
