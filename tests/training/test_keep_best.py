"""run.keep=best: the policy of the best look is what a run leaves, and what a longer run goes on from."""

import json
import shutil
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from embodyrl import registry
from embodyrl.algorithm import Algorithm
from embodyrl.config import resolve
from embodyrl.env import EnvConfig, SteppedVecEnv, Tick
from embodyrl.errors import UserError
from embodyrl.functional.intervals import latest_near_best, standard_error
from embodyrl.rollouts.batches import TransitionBatch
from embodyrl.rollouts.collect import collect_transitions
from embodyrl.storage import checkpoint
from embodyrl.storage.run_files import read_evaluations
from embodyrl.training.runner import train
from embodyrl.types import EnvSpec, Obs


class Bar(SteppedVecEnv):
    """Solved at once by an action above the bar of the initial state, which lies in [-1, 1]."""

    Config = EnvConfig

    def __init__(self, config):
        super().__init__(EnvSpec("test/bar", config.num_envs, 1, 1, "box", 10.0, 2, {}), config)

    def _reset(self, env_ids, inits):
        pass

    def _step(self, actions, active):
        bars = [np.random.default_rng(int(i)).uniform(-1, 1) for i in self.init]
        solved = torch.as_tensor(actions)[:, 0] > torch.tensor(bars)
        return Tick(solved.float(), solved, solved, torch.zeros_like(solved))

    def _observe(self, env_ids):
        return Obs({}, torch.zeros(self.spec.num_envs, 1), ["go"] * self.spec.num_envs)


@dataclass(frozen=True)
class ScriptedConfig:
    """Settings: what each iteration makes of the policy."""

    name: str = "scripted"
    levels: str = ""


class Scripted(Algorithm):
    """Sets the policy's action of each iteration; it counts its updates."""

    Config = ScriptedConfig
    Batch = TransitionBatch
    whole_episodes = True

    def __init__(self, config, policy):
        super().__init__(config, policy)
        self.updates = 0
        with torch.no_grad():
            for p in policy.parameters():
                p.zero_()
            policy.normalize_action.std.fill_(1e-3)

    def collect(self, player, *, generator, between=lambda: None):
        def act(obs, generator):
            actions = self.policy.sample(obs, generator=generator, mode="train").actions
            return actions, actions

        return collect_transitions(
            player.new_episodes(), act, 2, generator=generator, between=between
        )

    def update(self, batch, *, progress, generator):
        level = json.loads(self.config.levels)[self.updates]
        self.policy.normalize_action.mean.fill_(level)
        self.updates += 1
        return {"updates": float(self.updates)}

    def state_dict(self):
        return {"updates": self.updates}

    def load_state_dict(self, state):
        self.updates = int(state["updates"])


POLICY = {
    "name": "flow_mlp",
    "horizon": 1,
    "width": 8,
    "layers": 1,
    "critic_width": 8,
    "squash": False,
}
RUN = {
    "iterations": 6, "eval_every": 1, "eval_episodes": 100, "checkpoint_every": 1, "keep_checkpoints": 1,
    "device": "cpu", "threads": 1, "videos": 0, "keep": "best",
}  # fmt: skip


@pytest.fixture(autouse=True)
def known(monkeypatch):
    name = __name__
    monkeypatch.setitem(sys.modules, name, sys.modules[name])
    monkeypatch.setitem(registry.BUILT_IN["envs"], "bar", f"{name}:Bar")
    monkeypatch.setitem(registry.BUILT_IN["algorithms"], "scripted", f"{name}:Scripted")


def make(out, levels, *overrides):
    algorithm = {"name": "scripted", "levels": json.dumps(levels)}
    sections = {"env": {"name": "bar"}, "policy": POLICY, "algorithm": algorithm, "run": RUN}
    return resolve(sections, [f"run.out={out}", *overrides])


def left(folder):
    """Level and number of updates of what a run leaves, and the success of its last evaluation."""
    states, meta = checkpoint.load_run(checkpoint.find(folder))
    rows = json.loads((folder / "evals" / "after.json").read_text())["episodes"]
    level = round(float(states["policy"]["normalize_action.mean"][0]), 3)
    solved = sum(row["success"] for row in rows) / len(rows)
    return level, states["algorithm"]["updates"], meta["position"]["iteration"], solved


def expected(level):
    """How many of the first hundred states have their bar below a level."""
    offsets = np.array([np.random.default_rng(i).uniform(-1, 1) for i in range(100)])
    return float((offsets < level).mean())


@pytest.mark.parametrize(
    ("levels", "kept", "updates"),
    [
        ([0.0, 0.9, 0.3, -0.5, -0.9, 0.1], 0.9, 2),  # the best is in the middle
        ([-0.5] * 6, 0.0, 0),  # training did harm: the policy of before
        ([-0.2, 0.2, 0.5, 0.6, 0.7, 0.95], 0.95, 6),  # the last is the best
        ([0.2, 0.9, 0.899, -0.5, -0.9, 0.1], 0.899, 3),  # two that cannot be told apart: the later
    ],
)
def test_a_run_leaves_the_policy_of_its_best_look(tmp_path, levels, kept, updates):
    folder = train(make(tmp_path, levels))
    level, counted, iteration, solved = left(folder)
    assert (level, counted, iteration) == (pytest.approx(kept), updates, 6)
    # The last evaluation is of that policy, as the look at it was.
    pages = read_evaluations(folder)
    assert pages["after"]["iteration"] == 6
    look = {0: "before", 6: "after"}.get(updates, f"iter_{updates:06d}")
    assert solved == sum(row["success"] for row in pages[look]["episodes"]) / 100
    assert solved == pytest.approx(expected(kept), abs=0.02)
    assert train(make(tmp_path, levels)) == folder  # nothing is left to do
    plain = train(make(tmp_path / "last", levels, "run.keep=last"))
    assert left(plain)[0] == pytest.approx(levels[-1])
    assert left(plain)[3] <= solved + 0.05


def test_a_longer_run_goes_on_from_there(tmp_path):
    levels = [0.0, 0.9, 0.3, -0.5, -0.9, 0.1]
    train(make(tmp_path, levels))
    folder = train(make(tmp_path, levels, "run.iterations=7"))
    # The third update comes again after the second one, which was kept.
    assert left(folder)[:3] == (pytest.approx(0.9), 2, 7)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["updates"] == 3


def test_patience_ends_a_run_that_keeps_its_best(tmp_path):
    levels = [0.0, 0.9, 0.3, -0.5, -0.9, 0.1]
    folder = train(make(tmp_path, levels, "run.patience=2"))
    assert left(folder)[:3] == (pytest.approx(0.9), 2, 4)


def test_a_run_that_was_killed_while_it_went_back_does_so_again(tmp_path):
    levels = [0.0, 0.9, 0.3, -0.5, -0.9, 0.1]
    folder = train(make(tmp_path / "whole", levels))
    shutil.copytree(folder, tmp_path / "run")
    # The checkpoint was written, and the last evaluation not yet.
    (tmp_path / "run" / "evals" / "after.json").unlink()
    meta = json.loads((tmp_path / "run" / "meta.json").read_text())
    (tmp_path / "run" / "meta.json").write_text(json.dumps(meta | {"finished": None}))
    again = train(make(tmp_path, levels))
    assert left(again) == left(folder)


def test_the_best_outlives_a_lost_tail(tmp_path):
    levels = [0.6, -0.5, 0.9]
    folder = train(make(tmp_path, levels, "run.iterations=3", "run.keep_checkpoints=2"))
    assert left_steps(folder) == ["step_000001", "step_000002", "step_000003"]
    # The newest checkpoint is damaged, and it was the best: until it comes again, the first one is.
    (folder / "checkpoints" / "step_000003" / "state.json").write_text("{}")
    train(make(tmp_path, levels, "run.iterations=3", "run.keep_checkpoints=1"))
    assert left(folder)[:3] == (pytest.approx(0.9), 3, 3)
    assert "step_000001" in left_steps(folder)


def left_steps(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_the_best_needs_looks(tmp_path):
    with pytest.raises(UserError, match=r"run.keep=best chooses among evaluations"):
        make(tmp_path, [0.0], "run.eval_every=0")


def test_the_latest_within_a_standard_error_of_the_best():
    assert latest_near_best([0.2, 0.5, 0.46, 0.3], [0.05] * 4) == 2
    assert latest_near_best([0.2, 0.5, 0.44, 0.3], [0.05] * 4) == 1
    assert latest_near_best([1.0, 1.0], [0.0, 0.0]) == 1
    scores = [1.0, 0.0, 0.0, 1.0, 1.0]
    assert standard_error(scores) == pytest.approx((0.6 * 0.4 / 5) ** 0.5)
    with pytest.raises(UserError, match="no best of no scores"):
        latest_near_best([], [])
