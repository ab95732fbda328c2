"""The gate of ``embodyrl world loop``, and learning by what a dream chose."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from embodyrl.cli.main import main
from embodyrl.config import env_config
from embodyrl.data.collect import collect_dataset
from embodyrl.dreams import loop
from embodyrl.dreams.gate import GateClosed, closed_text, episode_counts, gate_text
from embodyrl.dreams.loop_config import LoopConfig, claim_folder, read_loop
from embodyrl.dreams.loop_record import LoopRecord, RealEvaluation
from embodyrl.dreams.ranking import score_ranking
from embodyrl.errors import UserError
from embodyrl.world_models.dream_chooser import choice_by_dream

SEEN = ["mujoco_pick_seen", ["policy=x"]]


@pytest.fixture(scope="module")
def hasty(tmp_path_factory) -> str:
    """Eight episodes of an expert too noisy to succeed always."""
    out = tmp_path_factory.mktemp("data") / "hasty"
    env = env_config("mujoco", ["env.task=reach", "env.image_size=32", "env.num_envs=8"])
    collect_dataset(env, out, num_episodes=8, noise=1.5, keep_failures=True)
    return str(out)


def ranking(order: float, mean: float = 0.5, states: int = 40) -> dict:
    """A ranking of 4 proposals, of which the model has a share ``order`` of the pairs right."""
    rng = np.random.default_rng(0)
    solved = rng.random((states, 4)) < mean
    promised = np.where(rng.random((states, 1)) < order, solved, ~solved).astype(float)
    return score_ranking(promised, solved) | {"real_steps": 100}


def test_one_way_of_learning_is_chosen_and_what_it_does_not_read_is_refused() -> None:
    config = read_loop(*SEEN)
    assert config.imitate == "mujoco_pick_sft" and not config.dream and not config.demos
    assert {"found=true", "frames=false"} <= set(config.world)
    for preset, overrides, said in (
        ("mujoco_pick_seen", ["dream=dream_ppo"], "name one of them"),
        ("mujoco_pick_seen", ["imitate="], "name one of them"),
        ("mujoco_pick_seen", ["dream_overrides=[a=1]"], "nothing is trained in dreams"),
        ("mujoco_pick_seen", ["gate=maybe"], "gate is 'maybe'"),
        ("mujoco_pick", ["demos=y", "chosen=7"], "nothing is imitated after a choice"),
        ("mujoco_pick", ["demos=y", "proposals=1"], "the gate ranks 2 or more"),
        ("mujoco_pick", ["demos=y", "world=[frames=false]"], "cannot be trained in dreams without"),
        ("mujoco_pick", ["demos=y", "world=[foundd=true]"], "no key 'foundd'"),
    ):
        with pytest.raises(UserError, match=said):
            read_loop(preset, ["policy=x", *overrides])


def test_a_loop_of_an_older_version_goes_on(tmp_path) -> None:
    config = read_loop("mujoco_pick", ["policy=x", "demos=y", f"out={tmp_path}"])
    claim_folder(tmp_path, config)
    path = tmp_path / "loop_config.json"
    old = json.loads(path.read_text())
    for key in ("gate", "gate_states", "proposals", "imitate", "chosen"):
        del old[key]
    path.write_text(json.dumps(old))
    claim_folder(tmp_path, config)
    with pytest.raises(UserError, match="proposals was 8, now 4"):
        claim_folder(
            tmp_path,
            read_loop("mujoco_pick", ["policy=x", "demos=y", "proposals=4", f"out={tmp_path}"]),
        )


def test_what_failed_and_what_would_help_is_said(hasty) -> None:
    solved, failed = episode_counts([hasty])
    assert solved + failed == 8 and solved > 0 and failed > 0
    assert episode_counts([hasty, hasty]) == (2 * solved, 2 * failed)
    config = read_loop(*SEEN)
    good = gate_text(ranking(0.95), config, [hasty])
    assert "AUROC within a state" in good and "passes" in good and "give demonstrations" not in good
    bad = gate_text(ranking(0.5), config, [hasty])
    assert "fails: it orders proposals no better than chance" in bad
    assert f"Of 8 recorded episodes {solved} are solved" in bad and "near and derail" in bad
    # With episodes enough of both kinds, something else is proposed.
    enough = gate_text(ranking(0.5), config, [hasty] * 100)
    assert "found_steps" in enough and "data=[FOLDER]" not in enough
    # Proposals that end alike say nothing of the model.
    for mean, said in ((0.0, "hardly ever solves"), (1.0, "Little is left to choose")):
        alike = gate_text(ranking(0.5, mean), config, [hasty])
        assert "says nothing" in alike and said in alike
    text = closed_text(ranking(0.5), config, [hasty])
    assert "rounds=4" in text and "gate=warn" in text and "200 more episodes" in text


def staged(monkeypatch, verdicts: list[dict]) -> list[str]:
    """A loop whose stages only say that they were reached; its gates find ``verdicts``."""
    reached: list[str] = []

    def note(name, result):
        def stage(config, *given, **_):
            reached.append(name)
            return result(reached.count(name) - 1)

        monkeypatch.setattr(loop, name, stage)

    note("_record_episodes", lambda k: [])
    note("_train_world", lambda k: f"world_{k}")
    note("measure_gate", lambda k: verdicts[k])
    note("record_chosen", lambda k: f"chosen_{k}")
    note(
        "imitate_chosen", lambda k: [RealEvaluation("x", 4, 8, 9), RealEvaluation(f"p{k}", 7, 8, 9)]
    )
    monkeypatch.setattr(loop, "episode_counts", lambda data: (5, 3))
    monkeypatch.setattr(
        LoopRecord,
        "add_round",
        lambda self, name, looks, data: self.content.setdefault("rounds", {}).__setitem__(
            name, [vars(e) for e in looks]
        ),
    )
    monkeypatch.setattr(loop, "_score", lambda *_: None)
    monkeypatch.setattr("embodyrl.dreams.gate.episode_counts", lambda data: (5, 3))
    return reached


def test_nothing_is_learned_from_a_model_that_fails(tmp_path, monkeypatch, capsys) -> None:
    given = ["policy=x", f"out={tmp_path}", "rounds=2"]
    reached = staged(monkeypatch, [ranking(0.5), ranking(0.5), ranking(0.95)])
    # The command ends with a status of its own, and says why.
    monkeypatch.setattr("embodyrl.storage.inputs.contents_of", lambda config: {})
    assert main(["world", "loop", "mujoco_pick_seen", *given]) == GateClosed.status == 3
    said = " ".join(capsys.readouterr().err.split())
    assert "No model of 2 rounds may be learned from" in said and "rounds=3" in said
    stages = ["_record_episodes", "_train_world", "measure_gate"]
    assert reached == stages * 2
    book = json.loads((tmp_path / "loop.json").read_text())
    assert [gate["passes"] for gate in book["gates"].values()] == [False, False]
    assert book["gate_steps"] == 200 and "rounds" not in book
    # One more round asks again, and measures nothing twice.
    del reached[:]
    monkeypatch.setattr(loop, "measure_gate", lambda *_: ranking(0.95))
    result = loop.run_loop(read_loop("mujoco_pick_seen", [*given, "rounds=3"]))
    assert (
        reached[-2:] == ["record_chosen", "imitate_chosen"] and reached.count("imitate_chosen") == 1
    )
    assert result["best"] == "p0" and list(result["rounds"]) == ["round_2"]
    assert result["chosen"]["round_2"]["solved"] == 5


def test_a_warning_is_enough_for_those_who_want_it_so(tmp_path, monkeypatch, capsys) -> None:
    reached = staged(monkeypatch, [ranking(0.5)])
    given = ["policy=x", f"out={tmp_path}", "rounds=1", "gate=warn"]
    result = loop.run_loop(read_loop("mujoco_pick_seen", given))
    assert result is not None and reached.count("imitate_chosen") == 1 and result["best"] == "p0"
    assert "no better than chance" in capsys.readouterr().out
    # With one proposal nothing is chosen, so there is no model and no gate.
    del reached[:]
    loop.run_loop(
        read_loop(
            "mujoco_pick_seen", ["policy=x", f"out={tmp_path / 'alone'}", "proposals=1", "rounds=1"]
        )
    )
    assert reached == ["record_chosen", "imitate_chosen"]


def test_a_dream_cannot_choose_for_an_expert(tmp_path) -> None:
    with pytest.raises(UserError, match="name one with --policy RUN"):
        choice = choice_by_dream("model")
        collect_dataset(env_config("mujoco", []), tmp_path / "x", num_episodes=1, choice=choice)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_way_and_again(tmp_path) -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "dream_rounds.py"
    command = [sys.executable, str(script), "--tiny", "--seeds", "0", "--out", str(tmp_path)]
    subprocess.run(command, check=True)
    path = tmp_path / "dream_rounds.json"
    seed = json.loads(path.read_text())["seeds"][0]
    dream, control = seed["parts"]["dream"], seed["parts"]["same_imitation"]
    assert len(dream["rounds"]) == 3 and "choice" in dream["rounds"][0]
    assert "choice" not in control["rounds"][0] and "gates" not in control
    assert dream["gates"]["round_0"]["real_steps"] > 0
    subprocess.run(command, check=True)
    again = json.loads(path.read_text())["seeds"][0]["parts"]
    assert again["dream"]["rounds"] == dream["rounds"]
    assert LoopConfig().gate == "refuse"
