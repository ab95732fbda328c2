"""Train a reflector, a network that says from pictures whether the task is solved, and use it.

You learn: how recorded frames get labels, that a reflector sees a window of frames and the
instruction, and how good its judgements are on episodes that it did not learn from. A reflector
gives the reward where there is no simulator to ask: in dreams, and on a robot.

Costs: 65 s. Needs: record_and_replay.py; pip install 'embodyrl[wm]'.
Writes: runs/examples/reflector. Prints: its score, and its judgement along an episode.
Options: --quick trains for a shorter time.
"""

import sys
from pathlib import Path

import numpy as np
import torch

from embodyrl.functional.held_out import auroc
from embodyrl.world_models.reflectors.folder import load_reflector, save_reflector
from embodyrl.world_models.reflectors.labelled_episodes import load_episodes
from embodyrl.world_models.reflectors.score import judge_episodes
from embodyrl.world_models.reflectors.train_reflector import TrainConfig, train_on_episodes
from embodyrl.world_models.reflectors.trained import TrainedReflector

OUT = Path("runs/examples")
STEPS = 20 if "--quick" in sys.argv else 400


def main() -> None:
    # A frame is labelled by the reward that led to it. Whole episodes are held out.
    episodes = load_episodes(OUT / "pictures")
    learned, held_out = episodes.split(held_out=0.25)
    print(f"{len(learned)} frames to learn from, {learned.label.mean():.0%} of them solved")

    # Binary cross-entropy on windows of three frames: the episode's first and the last two. No
    # frame is asked about another colour (swap_words), because there is only one block.
    torch.manual_seed(0)
    reflector = TrainedReflector({"front": (32, 32)}, window=3)
    train_on_episodes(learned, TrainConfig(steps=STEPS, swap_words=()), reflector)
    save_reflector(reflector, OUT / "reflector")

    # Use it: the probability of every held-out frame that the task is solved.
    reflector = load_reflector(OUT / "reflector")
    probability = judge_episodes(reflector, held_out)
    print(f"held-out AUROC {auroc(probability, held_out.label):.2f} (0.5 is chance, 1 perfect)")
    for solved in (True, False):
        mean = probability[held_out.label == solved].mean()
        print(f"mean probability of frames with solved={solved}: {mean:.2f}")

    # The last frames of an episode that is solved.
    frames = np.flatnonzero(held_out.episode == held_out.numbers[held_out.solved][-1])
    for frame in frames[-20:]:
        label = "solved" if held_out.label[frame] else "not yet"
        print(f"{label:8} {probability[frame]:.2f} {'#' * int(40 * probability[frame])}")


if __name__ == "__main__":
    main()
