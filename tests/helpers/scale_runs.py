"""What the tests of sharded runs share: a run that takes a second, and what it computed."""

from pathlib import Path

import torch

from embodyrl.config import Config, resolve
from embodyrl.storage import checkpoint
from embodyrl.storage.loggers import read_metrics

ENV = {"name": "mujoco", "task": "reach", "renderer": "none", "num_envs": 8, "num_threads": 1}
POLICY = {
    "name": "flow_mlp",
    "horizon": 2,
    "num_denoise_steps": 2,
    "width": 16,
    "layers": 1,
    "critic_width": 16,
}
PPO = {
    "name": "ppo",
    "num_chunks": 6,
    "minibatch_size": 24,
    "epochs": 1,
    "critic_epochs": 1,
    "warmup_iterations": 1,
}
GRPO = {
    "name": "grpo",
    "num_episodes": 8,
    "group_size": 2,
    "minibatch_size": 40,
    "epochs": 1,
    "keep_max": 1.0,
}
GRPO |= {"keep_min": 0.0, "max_rounds": 1, "rewards": ["return"]}
SAC = {
    "name": "sac_flow",
    "num_chunks": 12,
    "capacity": 512,
    "warmup_chunks": 120,
    "batch_size": 16,
    "utd": 0.05,
}
SAC |= {"critic_width": 16}
DSRL = SAC | {"name": "dsrl"}
FQL = {key: value for key, value in SAC.items() if key != "name"} | {"name": "fql"}
FQL |= {"offline_steps": 0}
FPO = {"name": "fpo", "num_chunks": 6, "minibatch_size": 24, "epochs": 1}
PA_RL = {
    "name": "pa_rl",
    "num_chunks": 12,
    "capacity": 512,
    "warmup_chunks": 120,
    "critic_warmup": 4,
    "mc_steps": 2,
    "batch_size": 16,
    "actor_batch_size": 8,
    "critic_utd": 0.05,
    "actor_utd": 0.02,
}
NEEDS = {
    "sac_flow": {"transition": "flow_noise"},
    "dsrl": {"steer_width": 16},
    "fql": {"one_step_width": 16},
    "pa_rl": {"chooser_width": 16},
}
RUN = {
    "iterations": 4, "eval_every": 0, "eval_episodes": 8, "eval_before": False, "checkpoint_every": 2,
    "keep_checkpoints": 0, "device": "cpu", "threads": 1, "videos": 0,
}  # fmt: skip
CLOCKS = ("minutes", "rollout_seconds", "env_steps_per_second", "worker_restarts")


def make(out: Path, *overrides: str, algorithm=PPO) -> Config:
    policy = POLICY | NEEDS.get(algorithm["name"], {})
    sections = {"env": ENV, "policy": policy, "algorithm": algorithm, "run": RUN}
    return resolve(sections, [f"run.out={out}", "env.reward=dense", *overrides])


def states(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the newest checkpoint: policy and optimisers."""
    loaded, _ = checkpoint.load(checkpoint.find(folder))
    out = {}

    def visit(value, path):
        if isinstance(value, torch.Tensor):
            out[path] = value
        elif isinstance(value, dict):
            for k, v in value.items():
                visit(v, f"{path}/{k}")
        elif isinstance(value, list | tuple):
            for i, v in enumerate(value):
                visit(v, f"{path}/{i}")

    visit(loaded, "")
    return out


def rows(folder: Path) -> list[dict]:
    """The metrics without the clocks."""
    return [
        {k: v for k, v in row.items() if k not in CLOCKS}
        for row in read_metrics(folder / "metrics.jsonl")
    ]


def assert_same(a: Path, b: Path) -> None:
    """Two runs computed the same bits."""
    mine, other = states(a), states(b)
    assert mine.keys() == other.keys()
    assert [k for k in mine if not torch.equal(mine[k], other[k])] == []
    assert rows(a) == rows(b)
