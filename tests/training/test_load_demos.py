"""The ``data`` section: obeyed by every algorithm that learns from demonstrations, else refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from embodyrl import registry
from embodyrl.algorithms import rlpd, sac_flow
from embodyrl.build import make_policy
from embodyrl.config import DataConfig, resolve
from embodyrl.data.demonstrations import Demonstrations
from embodyrl.data.mixture import Mixture
from embodyrl.errors import UserError
from embodyrl.training.load_demos import load_demos
from embodyrl.types import EnvSpec

SPEC = EnvSpec(
    name="plane", num_envs=2, action_dim=2, proprio_dim=1, control_mode="delta", control_hz=10.0,
    max_episode_steps=20, cameras={}, privileged_dim=0,
)  # fmt: skip
FRAMES = 12


def frames(number: float, corrected: int = 0) -> Demonstrations:
    """An episode whose proprioception is a number; in its first frames a person took over."""
    return Demonstrations(
        1, {}, torch.full((FRAMES, 1), number), torch.zeros(FRAMES, 2),
        torch.zeros(FRAMES, dtype=torch.long), torch.zeros(FRAMES, dtype=torch.long), ["go"],
        intervention=torch.arange(FRAMES) < corrected,
    )  # fmt: skip


def algorithm(name: str):
    """An algorithm on a small policy; those that may imitate do."""
    raw = {
        "env": {"name": "mujoco"},
        "policy": {"name": "flow_mlp", "horizon": 1, "width": 16, "layers": 1},
        "algorithm": {"name": name},
    }
    if name == "sac_flow":
        raw["algorithm"] |= {"bc_coef": 1.0}
    if name in ("sac_flow", "rlpd"):
        raw["algorithm"] |= {"batch_size": 64, "capacity": 100}
    config = resolve(raw)
    policy = make_policy(config.policy, SPEC, 0)
    return config, registry.load("algorithms", name)(config.algorithm, policy)


def drawn(name: str, demos, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """The proprioception (B,) of the demonstrations that an update learns from."""
    _, learner = algorithm(name)
    generator = torch.Generator().manual_seed(0)
    if name == "sft":
        return learner._draw(demos, generator)[1].proprio[:, 0]
    learner.add_demos(demos)
    seen = []
    for module in (sac_flow, rlpd):
        monkeypatch.setattr(
            module, "imitation_loss", lambda policy, obs, *rest: seen.append(obs.proprio[:, 0])
        )
    learner._imitation(generator)
    return seen[0]


@pytest.mark.parametrize("name", ["sft", "sac_flow", "rlpd"])
def test_weights_say_how_often_a_data_set_is_drawn(name, monkeypatch):
    parts = [frames(1.0), frames(2.0)]
    assert set(drawn(name, Mixture(parts, [0, 1]), monkeypatch).tolist()) == {2.0}
    assert set(drawn(name, Mixture(parts, [3, 0]), monkeypatch).tolist()) == {1.0}
    assert set(drawn(name, Mixture(parts), monkeypatch).tolist()) == {1.0, 2.0}


@pytest.mark.parametrize("name", ["sft", "sac_flow", "rlpd"])
def test_frames_of_a_person_are_drawn_as_often_as_asked_for(name, monkeypatch):
    demos = frames(1.0, corrected=2)
    demos.proprio[:2] = 5.0
    demos.intervention_weight = 1e6
    assert set(drawn(name, demos, monkeypatch).tolist()) == {5.0}


def test_corrections_on_the_way_count_as_those_of_the_data_set():
    _, learner = algorithm("rlpd")
    demos = frames(1.0)
    demos.intervention_weight = 1e6
    learner.add_demos(demos)
    chunk = next(frames(7.0).transitions())
    learner.add_interventions(chunk)
    given = learner._prior.sample(64, torch.Generator().manual_seed(0))[0]
    assert set(given.obs.proprio[:, 0].tolist()) == {7.0}
    # They keep their weights in a checkpoint.
    _, again = algorithm("rlpd")
    again.add_demos(demos)
    again._prior.load_state_dict(learner._prior.state_dict())
    assert torch.equal(again._prior.weights, learner._prior.weights)


@pytest.mark.parametrize("field", dataclasses.fields(DataConfig), ids=lambda field: field.name)
@pytest.mark.parametrize("name", ["ppo", "wsrl"])
def test_what_an_algorithm_does_not_read_is_refused(name, field):
    other = {
        "path": "d", "skip": (1,), "episodes": 3, "keep": "all", "more": ("e",), "weights": (1.0,),
        "intervention_weight": 2.0, "cameras": {"a": "b"}, "codec": "w",
        "profile": "droid", "convention": {"lag": 1}, "rate": "keep",
    }  # fmt: skip
    config, learner = algorithm(name)
    assert load_demos(config, learner, SPEC) is None
    changed = dataclasses.replace(
        config, data=dataclasses.replace(config.data, **{field.name: other[field.name]})
    )
    with pytest.raises(UserError, match=rf"data\.{field.name} is .*reads no demonstrations"):
        load_demos(changed, learner, SPEC)


def test_what_stays_unsolved_needs_instructions(monkeypatch, tmp_path):
    def load(path, *args, **kwargs):
        found = frames(0.0)
        found.origin = {"env": SPEC.name}
        found.no_instruction = "12 episodes have no instruction."
        return found

    monkeypatch.setattr("embodyrl.data.load_demonstrations.load_demonstrations", load)
    config, learner = algorithm("ppo")
    given = dataclasses.replace(config.algorithm, bc_coef=1.0, bc_schedule="unsolved")
    learner.config = given
    data = dataclasses.replace(config.data, path=str(tmp_path))
    changed = dataclasses.replace(config, data=data, algorithm=given)
    with pytest.raises(UserError, match=r"no instruction\..*bc_schedule=unsolved looks for"):
        load_demos(changed, learner, SPEC)
    other = dataclasses.replace(given, bc_schedule="success")
    assert load_demos(dataclasses.replace(changed, algorithm=other), learner, SPEC) is not None


def test_demonstrations_that_only_help_are_read_where_they_are_given(monkeypatch):
    """Without a path there are none; what says how to read them is then refused."""
    config, learner = algorithm("wsrl")
    monkeypatch.setattr(type(learner), "takes_demos", True)
    assert load_demos(config, learner, SPEC) is None
    changed = dataclasses.replace(config, data=dataclasses.replace(config.data, episodes=3))
    with pytest.raises(UserError, match=r"data\.episodes is .*names no demonstrations"):
        load_demos(changed, learner, SPEC)
    given = dataclasses.replace(config, data=dataclasses.replace(config.data, path="/no/such"))
    with pytest.raises(UserError, match="no data set /no/such"):
        load_demos(given, learner, SPEC)
