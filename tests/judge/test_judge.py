"""Judging policies: estimates against the truth, differences that are real, and what is refused."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from small_offline import SPEC as HELD
from small_offline import H, gen, recorded

from embodyrl.algorithms.imitation import imitation_loss
from embodyrl.build import make_policy
from embodyrl.cli.main import main
from embodyrl.config import resolve
from embodyrl.data.lerobot_write import write_dataset
from embodyrl.data.recording import Recording
from embodyrl.errors import UserError
from embodyrl.judge.estimates import Estimate, agreement, differences
from embodyrl.judge.fitted_q import CRITICS, fitted_q
from embodyrl.judge.judge_policies import judge_policies, print_judgement, verdict_of
from embodyrl.judge.logged import Logged, as_chunks
from embodyrl.storage import checkpoint
from embodyrl.storage.env_spec import spec_to_json

SPEC = replace(HELD, privileged_dim=0)
EPISODES = 1000


def two_steps() -> tuple[Logged, dict[float, float], float]:
    """Episodes of two chunks whose outcome depends on both actions; a coin acted.

    Returns:
        The chunks; the exact success of always taking an action, in the process whose chances are
        the shares in these episodes; and that of taking 1 first, and then as the coin did.
    """
    rng = np.random.default_rng(0)
    action = rng.choice([-1.0, 1.0], size=(EPISODES, 2))
    good = (rng.random(EPISODES) < np.where(action[:, 0] > 0, 0.8, 0.2)).astype(int)
    table = np.array([[0.1, 0.5], [0.3, 0.9]])
    solved = rng.random(EPISODES) < table[good, (action[:, 1] > 0).astype(int)]
    one_hot = torch.eye(3)[torch.from_numpy(np.stack([np.full(EPISODES, 2), good], 1)).flatten()]
    rows = torch.arange(2 * EPISODES)
    last = rows % 2 == 1
    ended = last & torch.from_numpy(solved).repeat_interleave(2)
    chunks = torch.from_numpy(action).float().view(-1, 1, 1)
    logged = Logged(
        cast(Any, None), one_hot, chunks, torch.ones(2 * EPISODES, 1, dtype=torch.bool),
        rows // 2, torch.where(last, -1, rows + 1), ended, torch.from_numpy(solved),
    )  # fmt: skip
    exact = {}
    for a in (1.0, -1.0):
        share = good[action[:, 0] == a].mean()
        after = [solved[(good == g) & (action[:, 1] == a)].mean() for g in (0, 1)]
        exact[a] = float(share * after[1] + (1 - share) * after[0])
    return logged, exact, float(solved[action[:, 0] > 0].mean())


def test_fitted_q_finds_the_success_of_policies_that_nobody_played() -> None:
    logged, exact, first_then_coin = two_steps()
    up = torch.ones(2 * EPISODES, 1, 1, 1)
    found = {sign: fitted_q(logged, sign * up, rounds=3) for sign in exact}
    for sign, value in exact.items():
        assert found[sign].shape == (CRITICS,)
        assert found[sign].mean() == pytest.approx(value, abs=0.05)
    # Where the policy acts for one chunk only, whoever played goes on.
    found[0.0] = fitted_q(logged, up, rounds=0)
    assert found[0.0].mean() == pytest.approx(first_then_coin, abs=0.05)
    assert exact[1.0] > first_then_coin + 0.2 > exact[-1.0] + 0.5
    # The difference is real, whichever comes first.
    better, worse = (Estimate("fitted_q", found[sign]) for sign in (1.0, -1.0))
    assert differences([better, worse])[0]["better"] == "a"
    assert differences([worse, better])[0]["better"] == "b"
    assert better.summary()["interval"][0] > worse.summary()["interval"][1]


def test_chunks_know_how_their_episodes_went_on() -> None:
    logged = as_chunks(recorded(40, length=5), SPEC, H)
    # Three chunks of two actions, the last with one.
    assert logged.episode[:4].tolist() == [0, 0, 0, 1] and len(logged.success) == 40
    assert logged.following[:4].tolist() == [1, 2, -1, 4] and logged.following[-1] == -1
    assert logged.valid[2].tolist() == [True, False]
    assert logged.first[:3].tolist() == [0, 3, 6]
    assert torch.allclose(logged.features[:4, -1], torch.tensor([0.0, 0.1, 0.2, 0.0]))
    # Solved in the last chunk of an episode whose first action says so.
    assert torch.equal(logged.solved[2::3], logged.success) and not logged.solved[0::3].any()
    assert torch.equal(logged.success, logged.choice[0::3, 0, 0] > 0)


def test_agreement_is_that_of_solved_episodes_and_of_actions_that_were_carried_out() -> None:
    logged = as_chunks(recorded(40, length=5), SPEC, H)
    same = logged.choice[:, None].clone()
    assert agreement(logged, same).tolist() == [1.0] * int(logged.success.sum())
    # Half off in one of two dims: 1/4 on average, and half of that.
    off = same.clone()
    off[..., 0] += 0.5
    off[~logged.valid[:, None].expand_as(off[..., 0])] = 9.0
    assert agreement(logged, off) == pytest.approx(1 - 0.25 / 2)
    # What was done in failed episodes does not count.
    failed = ~logged.success[logged.episode]
    same[failed] = 9.0
    assert agreement(logged, same).min() == 1.0


def test_dreams_are_compared_in_pairs() -> None:
    a, b = np.zeros(60), np.zeros(60)
    a[:40], b[:10] = 1, 1
    found = differences([Estimate("dream", a), Estimate("dream", b)])[0]
    assert found["difference"] == pytest.approx(0.5) and found["better"] == "a"
    assert Estimate("dream", a).summary()["value"] == pytest.approx(2 / 3)
    same = differences([Estimate("dream", a), Estimate("dream", a)])[0]
    assert same["better"] == "" and same["interval"][0] < 0 < same["interval"][1]


def test_the_verdict_says_what_is_real() -> None:
    def pair(a: int, b: int, better: str) -> dict[str, Any]:
        return {"a": a, "b": b, "better": better}

    pairs = [pair(0, 1, ""), pair(0, 2, "a"), pair(1, 2, "")]
    assert verdict_of(pairs, 3) == "A is better than C. Cannot tell A from B; B from C."
    assert verdict_of([pair(0, 1, "")], 2).startswith("Cannot tell any of these policies")
    assert verdict_of([pair(0, 1, "a")], 2) == "A is better than B."
    assert verdict_of([], 1).startswith("There is one policy")
    many = [pair(0, 1, "a"), pair(0, 2, "a"), pair(1, 2, "a")]
    assert verdict_of(many, 3) == "A is better than B and C. B is better than C."


def test_data_of_one_outcome_or_too_few_are_refused() -> None:
    with pytest.raises(UserError, match=r"40 solved and 0 failed.*does not say which failed"):
        as_chunks(recorded(40, solved=True), SPEC, H)
    with pytest.raises(UserError, match=r"0 solved and 40 failed.*Add episodes that were solved"):
        as_chunks(recorded(40, solved=False), SPEC, H)
    with pytest.raises(UserError, match=r"takes 10 of each\. Record more"):
        as_chunks(recorded(12), SPEC, H)


def imitating(folder: Path, solved: bool) -> str:
    """A checkpoint of a policy that does what was done in solved, or in failed episodes."""
    config = resolve(
        {
            "env": {"name": "mujoco"},
            "policy": {"name": "flow_mlp", "width": 32, "layers": 1, "horizon": H},
            "algorithm": {"name": "sft"},
        }
    )
    policy: Any = make_policy(config.policy, SPEC, 0)
    demos = recorded(300)
    policy.fit_inputs(demos.proprio, demos.actions)
    optimizer = torch.optim.Adam(policy.parameters(), 3e-3)
    frames = (demos.success == solved).nonzero().flatten()[::2]
    obs, actions, mask = demos.batch(frames)
    generator = gen(1)
    for _ in range(100):
        loss = imitation_loss(policy, obs, actions, mask, generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    meta = {"config": json.loads(json.dumps(asdict(config))), "spec": spec_to_json(SPEC)}
    states = {"policy": policy.state_dict()}
    return str(checkpoint.save(folder / "step_000001", states, meta))


def write(folder: Path, spec: Any = SPEC) -> str:
    """The episodes of ``recorded`` on disk."""
    demos = recorded(120, seed=3)
    episodes = []
    for k in range(120):
        rows = slice(2 * k, 2 * k + 2)
        solved = demos.solved[rows].numpy()
        seen, did = demos.proprio[rows].numpy(), demos.actions[rows].numpy()
        reward = solved.astype(np.float32)
        episodes.append(Recording({}, seen, did, reward, solved, k, "t", "go"))
    return str(write_dataset(folder, episodes, spec))


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """A good policy, a bad one, and episodes that a coin played."""
    folder = tmp_path_factory.mktemp("judge")
    runs = [imitating(folder / name, name == "good") for name in ("good", "bad")]
    return runs[0], runs[1], write(folder / "played")


def test_the_better_checkpoint_is_found(
    material, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad, data = material
    monkeypatch.setattr("embodyrl.judge.fitted_q.BATCH", 64)
    assert (
        main(["judge", bad, good, "--data", data, "--by", "fitted_q", "--device", "cpu", "--json"])
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert [row["policy"] for row in found["policies"]] == [good, bad]
    assert found["ways"] == ["fitted_q", "agreement"] and found["by"] == "fitted_q"
    assert found["solved"] + found["failed"] == 120
    # Each does nearly always what it imitates, and only that decides.
    first, second = (row["fitted_q"] for row in found["policies"])
    assert first["value"] > 0.8 and second["value"] < 0.2
    assert first["interval"][0] <= first["value"] <= first["interval"][1]
    assert found["policies"][0]["agreement"]["value"] > found["policies"][1]["agreement"]["value"]
    assert found["pairs"][0]["better"] == "a"
    # The same for people.
    print_judgement(found)
    text = capsys.readouterr().out
    assert f"A  {good}" in text and "A is better than B." in text and "Sorted by fitted Q" in text
    print_judgement(found | {"by": "agreement"})
    assert "A agrees more with the solved episodes than B." in capsys.readouterr().out


def test_what_cannot_be_judged_is_refused(material, tmp_path: Path) -> None:
    good, bad, data = material
    refused: list[tuple[list[str], dict[str, Any], str]] = [
        ([good, good], {}, "named twice"),
        ([good], {"by": "agrement"}, "agreement"),
        ([good], {"by": "dream"}, "--dream MODEL"),
        ([good], {"episodes": 0}, "at least 1"),
    ]
    for runs, options, match in refused:
        with pytest.raises(UserError, match=match):
            judge_policies(runs, [data], device="cpu", **options)
    assert main(["judge", good, "--data", data, "--episodes", "3"]) == 1
    # Data that mean something else than the policy's env does.
    for change, match in (
        ({"control_mode": "ee_delta_pos"}, "ee_delta_pos"),
        ({"control_hz": 10.0}, "10 actions per second"),
    ):
        other = write(tmp_path / match[:3], replace(SPEC, **cast(Any, change)))
        with pytest.raises(UserError, match=match):
            judge_policies([good, bad], [other], device="cpu")
