"""``embodyrl completion``, tried in a real shell."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from embodyrl.cli.completion import completion
from embodyrl.cli.main import build_parser


def completed(*words: str) -> list[str]:
    """What bash offers for the last word."""
    line = " ".join(f"'{word}'" for word in ("embodyrl", *words))
    script = completion("bash", build_parser()) + (
        f"\nCOMP_WORDS=({line}); COMP_CWORD={len(words)}; _embodyrl; printf '%s\\n' ${{COMPREPLY[@]}}"
    )
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=30, check=True
    )
    assert not done.stderr
    return done.stdout.split()


def test_commands_options_and_presets_are_completed() -> None:
    assert completed("tr") == ["train"]
    assert completed("world", "tr") == ["train", "trajectories"]
    assert completed("world", "trajectories", "w") == ["write"]
    assert completed("train", "mujoco_pick_pp") == ["mujoco_pick_ppo"]
    assert completed("train", "mujoco_pick_ppo", "run.seed=1", "--dr") == ["--dry-run"]
    assert completed("list", "pre") == ["presets"]
    assert "--episodes" in completed("collect", "--")
    assert "gymnasium" in completed("bench", "gym")


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_the_script_is_one_of_the_shell(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    text = completion(shell, build_parser())
    subprocess.run([shell, "-n"], input=text, text=True, timeout=30, check=True)
