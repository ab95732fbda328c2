"""Record episodes with pictures, failures too, and replay one of them in the env.

You learn: what a LeRobot data set holds, and that a recording can be replayed: the initial state's
number and the actions are all that the simulator needs. World models and success classifiers
(``dream.py``, ``judge_frames.py``) learn from such data, and need failures as well as successes.

Costs: 60 s. Writes: runs/examples/pictures (the data set) and runs/examples/replayed.png.
Prints: what the data set holds, and how far the replay is from the recording.
Needs: pip install 'embodyrl[data]'. Options: --quick records fewer episodes.
"""

import sys
from pathlib import Path

import torch
from PIL import Image

from embodyrl.build import make_env
from embodyrl.config import env_config
from embodyrl.data.collect import collect_dataset
from embodyrl.data.load_demonstrations import load_demonstrations

OUT = Path("runs/examples")
EPISODES = 16 if "--quick" in sys.argv else 60
ENV = ["env.task=push", "env.image_size=32", "env.num_envs=12", "env.terminate_on_success=false"]
ENV += ["env.device=cpu"]  # pictures are looked at here


def main() -> None:
    # A noisy expert fails now and then. Ten steps past success show what solved looks like.
    config = env_config("mujoco", ENV)
    if not (OUT / "pictures").exists():
        options = {"noise": 0.8, "keep_failures": True, "past_success": 10}
        collect_dataset(config, OUT / "pictures", num_episodes=EPISODES, **options)

    # Frames of all episodes lie one after the other; ``end`` tells them apart.
    data = load_demonstrations(OUT / "pictures", horizon=1, keep="all")
    ends = data.end.unique().tolist()
    solved = int(data.success[[end - 1 for end in ends]].sum())
    print(f"{data.num_episodes} episodes, {solved} of them solved, {len(data)} frames")
    for name in ("actions", "proprio", "privileged", "reward"):
        print(f"  {name:12} {tuple(getattr(data, name).shape)}")
    print(f"  {'front':12} {data.images['front'].shape} {data.images['front'].dtype}")

    # Replay the first episode: the same initial state, the same actions.
    env = make_env(env_config("mujoco", [*ENV, "env.num_envs=1"]))
    obs = env.reset(init=[int(data.init[0])])
    worst = 0.0
    replayed = []
    for frame in range(ends[0]):
        worst = max(worst, float((obs.proprio[0] - data.proprio[frame]).abs().max()))
        replayed.append(obs.images["front"][0])
        obs = env.step(data.actions[frame].view(1, 1, -1)).obs
    print(f"The replay strays from the recorded proprioception by {worst:.1e} at the most.")

    # Above what was recorded, below the replay; they differ by the video's compression alone.
    moments = torch.linspace(0, ends[0] - 1, 8).long().tolist()
    recorded = torch.cat([torch.from_numpy(data.images["front"][t]) for t in moments], dim=1)
    again = torch.cat([replayed[t] for t in moments], dim=1)
    picture = Image.fromarray(torch.cat([recorded, again]).numpy())
    picture.resize((8 * 96, 2 * 96), Image.Resampling.NEAREST).save(OUT / "replayed.png")
    print(f"Compare {OUT / 'replayed.png'}.")


if __name__ == "__main__":
    main()
