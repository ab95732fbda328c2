"""A small OpenVLA with weights, in the layout of the published checkpoints."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from vla_models import SENTENCES, SPEC, gen, stir

from embodyrl.build import make_policy
from embodyrl.policies.vla.make_small_openvla import make_small_openvla
from embodyrl.policies.vla.openvla import OpenVLAConfig
from embodyrl.policies.vla.openvla_oft import OpenVLAOFTConfig

ACTION = {"q01": [-0.5, -0.4, -0.3, 0.0], "q99": [0.5, 0.6, 0.7, 1.0]}
ACTION["mask"] = [True, True, True, False]
PROPRIO = {"q01": [-1.0] * 6, "q99": [1.2] * 6}
STATISTICS = {"toy": {"action": ACTION, "proprio": PROPRIO}}
TWO_CAMERAS = replace(SPEC, cameras={"front": (24, 32), "wrist": (28, 28)})
TINY = {"width": 16, "layers": 2, "heads": 2, "vision_width": 8}


def architecture(folder: Path, statistics=STATISTICS) -> Path:
    """The JSON files alone."""
    return make_small_openvla(folder, SENTENCES, statistics=statistics, **TINY)


def make(folder, spec=SPEC, **settings):
    config = OpenVLAConfig(pretrained=str(folder), critic_width=8, **settings)
    return make_policy(config, spec, 0)


def make_oft(folder, spec=TWO_CAMERAS, **settings):
    return make_policy(OpenVLAOFTConfig(pretrained=str(folder), horizon=2, **settings), spec, 0)


def write_weights(net, folder: Path, shards: int = 2) -> None:
    """The network's weights in bfloat16, in safetensors files and their index."""
    state = {k: v.to(torch.bfloat16).contiguous() for k, v in net.state_dict().items()}
    names = {
        k: f"model-{i * shards // len(state) + 1:05}-of-{shards:05}.safetensors"
        for i, k in enumerate(state)
    }
    for file in set(names.values()):
        save_file({k: v for k, v in state.items() if names[k] == file}, folder / file)
    index = {"metadata": {"total_size": 0}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def published(folder: Path) -> Path:
    """An OpenVLA."""
    policy = make(architecture(folder), random_weights=True)
    stir(policy, gen(1))
    write_weights(policy.net, folder)
    return folder


def oft_before(folder: Path):
    """The policy that ``published_oft`` writes."""
    policy = make_oft(architecture(folder), random_weights=True)
    stir(policy, gen(2))
    return policy


def published_oft(folder: Path) -> Path:
    """An OpenVLA-OFT: its parts are saved by torch, and the statistics lie apart."""
    policy = oft_before(folder)
    write_weights(policy.net, folder, shards=1)
    # Trained on several GPUs, the names of the head's weights start with "module.".
    head = {f"module.{k}": v.bfloat16() for k, v in policy.action_head.state_dict().items()}
    torch.save(head, folder / "action_head--500_checkpoint.pt")
    torch.save(
        policy.proprio_projector.state_dict(), folder / "proprio_projector--500_checkpoint.pt"
    )
    config = json.loads((folder / "config.json").read_text())
    statistics = config.pop("norm_stats")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "dataset_statistics.json").write_text(json.dumps(statistics))
    return folder
