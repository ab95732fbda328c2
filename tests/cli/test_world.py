"""``embodyrl world ... --help``: every example is a command that would start."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from embodyrl.cli.main import build_parser, main
from embodyrl.config import compose, env_config
from embodyrl.dreams.loop_config import read_loop
from embodyrl.storage.config_section import build_section
from embodyrl.world_models.config import WorldTrainConfig


def examples(verb: str, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """The words of every example in the help of ``embodyrl world VERB``, without ``embodyrl``."""
    with pytest.raises(SystemExit) as stop:
        main(["world", *verb.split(), "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out.split("examples:")[1].replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("embodyrl ")]
    return [line.split()[1:] for line in lines]


TRAJECTORIES = ["trajectories", "trajectories train", "trajectories write"]


@pytest.mark.parametrize("verb", ["", "train", "eval", "play", "loop", "reflect", *TRAJECTORIES])
def test_the_parser_takes_every_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = examples(verb, capsys)
    assert found
    for words in found:
        arguments, rest = build_parser().parse_known_args(words)
        assert arguments.command == words[0]
        assert all("=" in word for word in rest), words


@pytest.mark.parametrize("verb", ["", "train"])
def test_the_train_examples_are_valid_settings(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [words for words in examples(verb, capsys) if words[:2] == ["world", "train"]]
    assert found
    for words in found:
        overrides = build_parser().parse_args(words).overrides
        assert build_section("world", WorldTrainConfig, OmegaConf.from_dotlist(overrides)).data


@pytest.mark.parametrize("verb", ["", "loop"])
def test_the_loop_examples_would_start(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = [words for words in examples(verb, capsys) if words[:2] == ["world", "loop"]]
    assert found
    for words in found:
        arguments = build_parser().parse_args(words)
        config = read_loop(arguments.preset, arguments.overrides)
        assert config.policy == "runs/sft"
        env_config(config.env, config.env_overrides)
        learns = (config.dream, config.dream_overrides)
        compose(*(learns if config.dream else (config.imitate, config.imitate_overrides)))
        build_section("world", WorldTrainConfig, OmegaConf.from_dotlist(list(config.world)))
