"""Two processes of torchrun: one process's losses and weights, its checkpoints, its resumption; refusals in words."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from scale_runs import GRPO, make, rows, states

from embodyrl.config import Config, to_yaml
from embodyrl.data.collect import collect_dataset
from embodyrl.distributed.fsdp import ranks_config
from embodyrl.errors import UserError
from embodyrl.training.runner import train

pytestmark = pytest.mark.timeout(900)
TOLERANCE = 1e-5
"""Of weights, moments and figures: gradients are summed in another order."""
SFT = {"name": "sft", "steps_per_iteration": 4, "batch_size": 15, "microbatch_size": 4}
FPO = {
    "name": "fpo",
    "num_chunks": 6,
    "minibatch_size": 24,
    "epochs": 1,
    "critic_epochs": 1,
    "warmup_iterations": 0,
}


def together(config: Config, *overrides: str) -> Path:
    """The run of ``config`` in two processes."""
    out = Path(config.run.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "preset.yaml").write_text(to_yaml(config))
    start = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = [*start, "-m", "embodyrl.cli", "train", str(out / "preset.yaml"), *overrides]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Look at it with") == 1  # the first process alone speaks
    return out / config.run.name


def assert_near(a: Path, b: Path) -> None:
    # The softmax of keypoints takes away their bias: its gradient is rounding, which Adam enlarges.
    mine, other = (
        {k: v for k, v in states(run).items() if not k.endswith("keypoints.bias")} for run in (a, b)
    )
    assert mine.keys() == other.keys()
    for key, value in mine.items():
        torch.testing.assert_close(
            value, other[key], atol=TOLERANCE, rtol=TOLERANCE, msg=lambda m, k=key: f"{k}: {m}"
        )
    assert len(rows(a)) == len(rows(b))
    for one, two in zip(rows(a), rows(b), strict=True):
        one, two = ({k: math.nan if v is None else v for k, v in row.items()} for row in (one, two))
        assert one == pytest.approx(two, abs=TOLERANCE, rel=1e-4, nan_ok=True)


def test_two_processes_give_what_one_does_and_each_goes_on_where_the_other_stopped(tmp_path):
    one = train(make(tmp_path / "one", "run.workers=2"))
    two = together(make(tmp_path / "two"), "run.iterations=2", "run.eval_every=1")
    train(make(tmp_path / "two", "run.workers=2", "run.iterations=3", "run.eval_every=1"))
    together(make(tmp_path / "two", "run.workers=2"))
    assert_near(one, two)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [GRPO, FPO], ids=lambda a: a["name"])
def test_other_algorithms_on_rollouts(tmp_path, algorithm):
    one = train(make(tmp_path / "one", "run.workers=2", algorithm=algorithm))
    assert_near(one, together(make(tmp_path / "two", algorithm=algorithm)))


SEEING = ("env.renderer=warp", "env.image_size=32", "policy.vision_width=4")
PLACES = {**SFT, "hindsight_coef": 1.0, "shift": 0}


@pytest.mark.slow
@pytest.mark.parametrize(("more", "algorithm"), [((), SFT), (SEEING, PLACES)])
def test_imitation_in_pieces(tmp_path, more, algorithm):
    env = make(tmp_path, "env.max_episode_steps=25", *more[:2]).env
    collect_dataset(env, tmp_path / "demos", num_episodes=4)
    data = ("policy.name=flow_vla", "policy.width=16", "policy.heads=2", "policy.action_patch=2")
    configs = [
        make(tmp_path / name, f"data.path={tmp_path / 'demos'}", *data, *more, algorithm=algorithm)
        for name in ("one", "two")
    ]
    assert_near(train(configs[0]), together(configs[1]))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["run.workers=3"], "run.workers=3, but torchrun started 2 processes"),
        (["run.max_lag=1", "algorithm.behaviour_cap=5"], "every process is both"),
        (["env.num_envs=5"], "cannot share env.num_envs=5 evenly"),
        (["algorithm.bc_coef=1"], "algorithm.bc_coef does not go with torchrun"),
        (["algorithm.reference_coef=1"], "algorithm.reference_coef does not go with torchrun"),
        (["run.keep=best", "run.eval_every=2"], "run.keep=best does not go with torchrun"),
    ],
)
def test_what_cannot_be_shared_is_refused(tmp_path, overrides, words):
    with pytest.raises(UserError, match=words):
        ranks_config(make(tmp_path, *overrides), 2)


def test_off_policy_is_refused(tmp_path):
    with pytest.raises(UserError, match="sft, ppo, fpo and grpo"):
        ranks_config(make(tmp_path, algorithm={"name": "sac_flow"}), 2)
