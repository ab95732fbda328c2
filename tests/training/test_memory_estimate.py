"""The estimate before start against what PyTorch's own profiler counts in the real step, and pi0 without a weight."""

import psutil
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from embodyrl.build import make_policy
from embodyrl.cli.main import main
from embodyrl.config import resolve
from embodyrl.training.memory_estimate import estimate, table, total
from embodyrl.types import DenoisingTrace, EnvSpec, Obs

SPEC = EnvSpec("test/arm", 8, 4, 6, "ee_delta_pos", 25.0, 20, {"front": (64, 64)}, privileged_dim=5)
POLICY = {"name": "flow_vla", "width": 64, "layers": 4}
TOLERANCE = 0.25
"""It said 16% more than was measured, with 16 rows and with 64."""


def config(policy=POLICY, **algorithm):
    return resolve(
        {
            "env": {"name": "mujoco", "num_envs": 8},
            "policy": policy,
            "algorithm": {"name": "ppo", **algorithm},
        }
    )


def named(needs) -> dict[str, int]:
    return {need.what.partition(",")[0].partition(":")[0]: need.bytes for need in needs}


def measured_peak(step) -> int:
    """The most bytes that were allocated at a time while ``step`` ran."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        step()
    now = peak = 0
    for event in run.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


@pytest.mark.parametrize("rows", [16, 64])
def test_a_gradient_step_takes_what_was_said(rows):
    c = config(minibatch_size=128, microbatch_size=rows)
    found = named(estimate(c, SPEC))
    policy = make_policy(c.policy, SPEC, 0)
    n, h, a, steps = rows, policy.config.horizon, SPEC.action_dim, policy.config.num_denoise_steps
    obs = Obs(
        {"front": torch.zeros(n, 64, 64, 3, dtype=torch.uint8)},
        torch.zeros(n, 6),
        ["go on"] * n,
        torch.zeros(n, 5),
    )
    trace = DenoisingTrace(torch.zeros(n, steps + 1, h, a), torch.ones(n, steps, dtype=torch.bool))
    peak = measured_peak(lambda: policy.evaluate(obs, trace).logprob.sum().backward())
    said = found["activations of a gradient step"] + found["their gradient"]
    print(f"{rows} rows: {said / 1e6:.2f} MB said, {peak / 1e6:.2f} MB measured")
    assert said == pytest.approx(peak, rel=TOLERANCE)


def test_the_table_counts_what_is_there():
    c = config(num_chunks=4)
    needs = estimate(c, SPEC)
    policy, found = make_policy(c.policy, SPEC, 0), named(needs)
    trained = sum(p.numel() for p in policy.actor_parameters())
    buffers = sum(b.numel() * b.element_size() for b in policy.buffers())
    assert found["weights"] == 4 * sum(p.numel() for p in policy.parameters()) + buffers
    assert found["their gradient"] == 4 * trained and found["Adam's two moments"] == 8 * trained
    batch = 4 * 8 * (64 * 64 * 3 + 4 * 11 + 4 * 5 * 5 * 4 + 5 * 4)
    assert batch < found["a rollout of 32 chunks"] < 1.02 * batch
    assert max(found.values()) < total(needs) < sum(found.values())
    assert "at the worst moment" in table(needs)


def test_a_dry_run_prints_it_behind_the_config(tmp_path, capsys):
    assert main(["train", "mujoco_pick_ppo", "run.init_checkpoint=", "--dry-run", "--memory"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("of them trained" in line for line in lines if line.startswith("# policy"))
    assert lines[-1].startswith("# ") and "worst moment" in lines[-1]


@pytest.mark.slow
def test_pi0_at_its_real_size_is_counted_without_a_weight(tmp_path):
    pytest.importorskip("lerobot.policies", reason="the extra vla is not installed")
    from embodyrl.policies.vla.make_small import make_pi0

    policy = {
        "name": "pi0",
        "pretrained": str(make_pi0(tmp_path, ["go on"])),
        "random_weights": True,
        "horizon": 50,
    }
    before = psutil.Process().memory_info().rss
    found = named(
        needs := estimate(config({**policy, "precision": "bfloat16"}, minibatch_size=32), SPEC)
    )
    assert psutil.Process().memory_info().rss - before < 2e9
    print(table(needs))
    assert 3.2e9 < int(needs[0].what.split()[1].replace(",", "")) < 3.6e9
    assert (
        1.1e9 < found["their gradient"] < 1.4e9
        and 1e9 < found["activations of a gradient step"] < 80e9
    )
