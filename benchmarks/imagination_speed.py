"""How fast a world model imagines, by the number of dreams and of sampling steps; its weights do not matter.

    python benchmarks/imagination_speed.py --seconds 2                    # CPU
    python benchmarks/imagination_speed.py --device cuda

A latent frame is what one prediction gives, a chunk of five actions further. Writes ``imagination_speed.json``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from embodyrl.provenance import git_commit, hardware, versions
from embodyrl.types import EnvSpec
from embodyrl.world_models.backbone import ChunkTransformer
from embodyrl.world_models.codec import FrameCodec
from embodyrl.world_models.evaluate import speed
from embodyrl.world_models.model import WorldModel, use_bf16
from embodyrl.world_models.success import SuccessHead

SPEC = EnvSpec("speed", 1, 4, 7, "ee_delta_pos", 25.0, 40, {"front": (64, 64)})


def main() -> None:
    """Measures the embedded default, deterministic and stochastic."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dreams", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    device = torch.device(a.device)
    model = WorldModel(FrameCodec(), ChunkTransformer(stochastic=True), SuccessHead(), SPEC).eval().to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=use_bf16("auto", device)):
        rows = speed(model, a.dreams, a.seconds)
    for row in rows:
        print({k: round(v) for k, v in row.items()}, flush=True)
    about = {"commit": git_commit(), "versions": versions(), "hardware": hardware(), "threads": a.threads}
    a.out.write_text(
        json.dumps({"rows": rows, "bf16": use_bf16("auto", device), "device": a.device, **about}, indent=1)
    )


if __name__ == "__main__":
    main()
