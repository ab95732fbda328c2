"""Load a checkpoint, score it on initial states it never saw, and film an episode.

You learn: what a checkpoint needs to act (its config, an env, its weights), why a success rate has
an interval, and that an episode can be played twice: the policy acts on the simulator's state,
while a second env with a camera executes the same actions from the same initial state.

Costs: 20 s. Needs: demonstrate_and_imitate.py. Writes: runs/examples/episode.mp4 and episode.gif.
Prints: the success with its 95% Wilson interval, for few and for many episodes.
"""

from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image

from embodyrl.build import load_config, load_policy, make_env
from embodyrl.env import VecEnv
from embodyrl.functional.intervals import wilson
from embodyrl.policy import Policy
from embodyrl.rollouts.evaluation import evaluate
from embodyrl.storage.video import write_video

OUT = Path("runs/examples")
RUN = OUT / "imitation"


def film(env: VecEnv, camera: VecEnv, policy: Policy, init: int) -> torch.Tensor:
    """The frames (T, h, w, 3) of one episode."""
    obs = env.reset(init=[init])
    frames = [camera.reset(init=[init]).images["front"][0]]
    generator = torch.Generator().manual_seed(init)
    done = False
    while not done:
        chunk = policy.sample(obs, generator=generator, mode="eval").actions
        step = env.step(chunk)
        shown = [camera.step(action) for action in chunk.split(1, dim=1)]  # a frame per action
        frames += [one.obs.images["front"][0] for one in shown]
        obs, done = step.obs, bool(step.done)
    return torch.stack(frames)


def main() -> None:
    # A checkpoint knows its config. The evaluation split shares no initial state with training.
    config = load_config(str(RUN))
    env = make_env(replace(config.env, split="eval"))
    policy = load_policy(str(RUN), config.policy, env.spec, seed=0)

    # The more episodes, the narrower the interval.
    for count in (16, 64):
        result = evaluate(env, policy, range(count))
        low, high = wilson(result.successes, count)
        print(f"{result.successes}/{count} solved, 95% interval [{low:.2f}, {high:.2f}]")

    # The first episode that was solved, or the first of all.
    init = next((e.init for e in result.episodes if e.success), 0)
    one = replace(config.env, split="eval", num_envs=1, device="cpu")
    camera = make_env(replace(one, cameras=("front",), renderer="warp", image_size=128))
    frames = film(make_env(one), camera, policy, init)
    write_video(frames, OUT / "episode.mp4", fps=env.spec.control_hz)
    pictures = [Image.fromarray(frame.numpy()) for frame in frames]
    pictures[0].save(OUT / "episode.gif", save_all=True, append_images=pictures[1:], duration=40)
    print(f"{len(frames)} frames of initial state {init} are in {OUT / 'episode.mp4'} and .gif.")


if __name__ == "__main__":
    main()
