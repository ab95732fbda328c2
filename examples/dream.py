"""Train a tiny world model on recorded episodes, and dream: the same actions, imagined and real.

You learn: how a world model is trained, that a dream is an env like any other (reset, step), and
how to start one from what a real env shows. A model this small is blurred after a few chunks; see
the documentation on world models for one that policies can be trained in.

Costs: 135 s. Needs: record_and_replay.py; pip install 'embodyrl[wm]'.
Writes: runs/examples/world (the model) and runs/examples/dream.png, real above, dreamt below.
Prints: how far the dream's pictures and proprioception are from the real ones, chunk by chunk.
Options: --quick trains for a shorter time.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image

from embodyrl.build import make_env
from embodyrl.data.load_demonstrations import load_demonstrations
from embodyrl.world_models.config import WorldModelConfig, WorldTrainConfig
from embodyrl.world_models.env import WorldModelEnv
from embodyrl.world_models.train import train_world

OUT = Path("runs/examples")
STEPS = 30 if "--quick" in sys.argv else 400


def main() -> None:
    # First the codec (pictures to latents and back), then the dynamics in these latents.
    model = train_world(
        WorldTrainConfig(
            data=(str(OUT / "pictures"),),
            out=str(OUT / "world"),
            channels=32,
            width=64,
            layers=2,
            state=False,  # dream of pictures alone, not of the simulator's state
            batch_size=32,
            codec_steps=2 * STEPS,
            steps=STEPS,
            inverse_steps=STEPS // 4,
            held_out=0.25,
            max_false_positives=1.0,  # accept whatever its success head is worth
            threads=1,
        )
    )

    # The dream, and the env that it is a dream of, both from the same observation.
    config = WorldModelConfig(model=str(model), num_envs=1, device="cpu")
    dream = WorldModelEnv(config)
    real = make_env(replace(config.for_evaluation("train"), terminate_on_success=False))
    data = load_demonstrations(OUT / "pictures", horizon=5, keep="all")
    seen = real.reset(init=[int(data.init[0])])
    imagined = dream.dream_from(seen)

    # Both execute the recorded actions of the first episode.
    pairs = [torch.cat([seen.images["front"][0], imagined.images["front"][0]])]
    for first in range(0, 30, 5):
        chunk = data.actions[None, first : first + 5]
        seen, imagined = real.step(chunk).obs, dream.step(chunk).obs
        pixels = [obs.images["front"][0] for obs in (seen, imagined)]
        error = (pixels[0].float() - pixels[1].float()).abs().mean()
        away = (seen.proprio - imagined.proprio)[0, :3].norm()
        print(f"after {first + 5:2} actions: pixels {error:.1f} of 255, hand {away:.3f} m apart")
        pairs.append(torch.cat(pixels))
    picture = Image.fromarray(torch.cat(pairs, dim=1).numpy())
    picture.resize((len(pairs) * 96, 192), Image.Resampling.NEAREST).save(OUT / "dream.png")
    print(f"Real above, dreamt below: {OUT / 'dream.png'}.")


if __name__ == "__main__":
    main()
