"""How fast a world model imagines, by the number of dreams and of sampling steps; its weights do not matter.

    python benchmarks/imagination_speed.py --seconds 2                    # CPU
    python benchmarks/imagination_speed.py --device cuda
    git clone https://github.com/eloialonso/diamond && python benchmarks/imagination_speed.py
    --diamond diamond

A latent frame is what one prediction gives, a chunk of five actions further. Writes
``imagination_speed.json``.

``--diamond`` measures DIAMOND (Alonso et al. 2024, arXiv:2405.12399) beside ours instead, and
writes only the file's ``beside_diamond``. Its own classes run, from a checkout that is no part of
this repository, with the config that comes with them and fresh weights, on 64x64 pictures as ours:

- DIAMOND predicts a picture per action, in ``sampling_steps`` steps of denoising (3 is its
  default).
- Ours predicts the latent of a picture per chunk of five actions: 0 ``sampling_steps`` give the
  mean, others a draw. With ``pictures`` it is decoded too; DIAMOND's always are pictures.

``frames_per_second`` counts the predictions of all dreams together, and ``actions_per_second`` the
actions that they follow, five times as many for ours. Asked for one action at a time ours costs the
same per frame, so frames compare picture with picture. Left out on both sides are the policy and
whether a dream is over (our success head, their reward and end model). ``precision`` is float32, as
DIAMOND is published, and bfloat16 by autocast where the machine is fast at it; memory formats are
each one's own. Nothing is compiled, which DIAMOND's trainer does by default (torch.compile). The
rows of a number of dreams take turns; each figure is the median of its ``--repeats`` turns.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from embodyrl.errors import UserError
from embodyrl.storage.provenance import git_commit, hardware, versions
from embodyrl.types import EnvSpec
from embodyrl.world_models.dream import Dream
from embodyrl.world_models.model import WorldModel
from embodyrl.world_models.nets.backbone import CONTEXT, ChunkTransformer
from embodyrl.world_models.nets.codec import FrameCodec
from embodyrl.world_models.nets.success import SuccessHead
from embodyrl.world_models.open_loop import measure_speed
from embodyrl.world_models.precision import use_bf16

SPEC = EnvSpec("speed", 1, 4, 7, "ee_delta_pos", 25.0, 40, {"front": (64, 64)})


def load_diamond(folder: Path, device: torch.device) -> dict[int, Callable[..., Any]]:
    """How DIAMOND samples a picture, as published, by its default config and in one step and in its three.

    Raises:
        UserError: it is not there.
    """
    agent = folder / "config" / "agent" / "default.yaml"
    if not (folder / "src" / "models" / "diffusion").is_dir() or not agent.is_file():
        raise UserError(
            f"{folder} is not a checkout of DIAMOND: it has no src/models/diffusion or no "
            "config/agent/default.yaml. `git clone https://github.com/eloialonso/diamond` makes "
            "one."
        )
    # Its denoiser takes two type hints from modules that import what only its trainer needs (wandb,
    # h5py, ...). Empty ones with just these hints stand in for them; all that computes is DIAMOND's
    # own.
    for module, hint in (("data", "Batch"), ("utils", "LossAndLogs")):
        sys.modules[module] = ModuleType(module)
        setattr(sys.modules[module], hint, Any)
    sys.path.insert(0, str(folder / "src"))
    theirs = importlib.import_module("models.diffusion")
    config: Any = OmegaConf.to_container(OmegaConf.load(agent)["denoiser"])
    inner = config.pop("inner_model")
    del config["_target_"], inner["_target_"]
    config = theirs.DenoiserConfig(
        inner_model=theirs.InnerModelConfig(**inner, num_actions=4), **config
    )
    denoiser = theirs.Denoiser(config).eval().to(device)
    return {
        s: theirs.DiffusionSampler(denoiser, theirs.DiffusionSamplerConfig(s)).sample
        for s in (1, 3)
    }


def their_step(
    frames: Tensor, actions: Tensor, sample: Callable[[Tensor, Tensor], tuple[Tensor, Any]]
) -> Tensor:
    """A new picture, which joins those that the next one follows from; as DIAMOND's ``WorldModelEnv.step``."""
    return torch.cat([frames[:, 1:], sample(frames, actions)[0][:, None]], dim=1)


def our_step(model: WorldModel, dream: Dream, actions: Tensor, steps: int, pictures: bool) -> Any:
    count = torch.full((len(actions),), model.horizon, device=model.device)
    after = model.imagine(
        dream, actions, count, sample=torch.randn_like(dream.latent) if steps else None, steps=steps
    )
    return model.frames(after) if pictures else after


def make_cases(
    model: WorldModel, samples: dict[int, Callable[..., Any]], n: int
) -> dict[tuple[str, int, bool], Any]:
    """One prediction for n dreams, by the model's name, the sampling steps, and whether pictures come out."""
    device = model.device
    latents = torch.randn(n, CONTEXT, 1, *model.codec.latent_shape, device=device)
    words = torch.zeros(n, model.success.config["word_dim"], device=device)
    dream = model.begin(latents, torch.zeros(n, SPEC.proprio_dim, device=device), words)
    given = model, dream, torch.zeros(n, model.horizon, SPEC.action_dim, device=device)
    cases: dict[tuple[str, int, bool], Any] = {
        ("ours", steps, pictures): partial(our_step, *given, steps, pictures)
        for pictures in (False, True)
        for steps in (0, 1, 3)
    }
    frames, actions = (
        torch.rand(n, 4, 3, 64, 64, device=device) * 2 - 1,
        torch.randint(4, (n, 4), device=device),
    )
    return cases | {
        ("diamond", s, True): partial(their_step, frames, actions, f) for s, f in samples.items()
    }


def calls_per_second(once: Callable[[], Any], seconds: float) -> float:
    """Over ``seconds``, or a call that takes longer."""
    began, times = time.perf_counter(), 0
    while not times or time.perf_counter() - began < seconds:
        once()
        times += 1
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return times / (time.perf_counter() - began)


def billions(once: Callable[[], Any]) -> float:
    """Floating-point operations of a call, in billions: two for a product that is added to a sum."""
    with FlopCounterMode(display=False) as counter:
        once()
    return counter.get_total_flops() / 1e9


@torch.no_grad()
def beside_diamond(model: WorldModel, a: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of both; see the module's docstring."""
    device, rows = model.device, []
    torch.backends.cuda.matmul.allow_tf32 = True  # as DIAMOND's trainer has it, for both
    samples = load_diamond(a.diamond, device)
    gflop = {case: billions(once) for case, once in make_cases(model, samples, 1).items()}
    precisions = (True, False) if use_bf16("auto", device) else (False,)
    for n in a.dreams:
        cases = make_cases(model, samples, n)
        turns: dict[Any, list[float]] = {(case, bf16): [] for case in cases for bf16 in precisions}
        for turn in range(a.repeats + 1):  # the first does not count
            for (case, bf16), rates in turns.items():
                with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                    rates.append(calls_per_second(cases[case], a.seconds if turn else 0.0))
        for (case, bf16), rates in turns.items():
            row = dict(
                zip(("dreams", "model", "sampling_steps", "pictures"), (n, *case), strict=True)
            )
            rate = statistics.median(rates[1:]) * n
            row |= {
                "precision": "bfloat16" if bf16 else "float32",
                "gflop_per_frame": round(gflop[case], 3),
            }
            row |= {
                "frames_per_second": rate,
                "actions_per_second": rate * (model.horizon if case[0] == "ours" else 1),
            }
            print(
                {k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}, flush=True
            )
            rows.append(row)
    return rows


def main() -> None:
    """Measures the embedded default, deterministic and stochastic, alone or beside DIAMOND."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dreams", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--diamond",
        type=Path,
        metavar="DIR",
        help="a checkout of DIAMOND, to be measured beside ours",
    )
    parser.add_argument("--repeats", type=int, default=3, help="turns of each row beside DIAMOND")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    device = torch.device(a.device)
    model = (
        WorldModel(FrameCodec(), ChunkTransformer(stochastic=True), SuccessHead(), SPEC)
        .eval()
        .to(device)
    )
    result: dict[str, Any] = {
        "bf16": use_bf16("auto", device),
        "device": a.device,
        "commit": git_commit(),
    }
    result |= {"versions": versions(), "hardware": hardware(), "threads": a.threads}
    kept = json.loads(a.out.read_text()) if a.out.exists() else {}
    if a.diamond:
        result |= {"seconds": a.seconds, "repeats": a.repeats, "load": os.getloadavg()[0]}
        result = kept | {"beside_diamond": {"rows": beside_diamond(model, a)} | result}
    else:
        with torch.autocast(device.type, torch.bfloat16, enabled=use_bf16("auto", device)):
            rows = measure_speed(model, a.dreams, a.seconds)
        for row in rows:
            print({k: round(v) for k, v in row.items()}, flush=True)
        result = {"rows": rows} | result | {k: v for k, v in kept.items() if k == "beside_diamond"}
    a.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
