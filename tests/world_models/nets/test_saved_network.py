"""Networks are saved in diffusers' format, which diffusers itself writes and reads here."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from torch import nn

from embodyrl.errors import UserError
from embodyrl.world_models.nets.saved_network import SavedNetwork, load_part, record_arguments


class Small(SavedNetwork):
    """Weights, a buffer that is saved, and one that the arguments give."""

    @record_arguments
    def __init__(self, width: int, layout: tuple[tuple[str, int], ...] = (), *, deep: bool = False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2 + deep))
        self.register_buffer("scale", torch.full((width,), 2.0))
        self.register_buffer("numbers", torch.tensor([n for _, n in layout]), persistent=False)


class Wider(Small):
    """A subclass with arguments of its own."""

    @record_arguments
    def __init__(self, half: int):
        super().__init__(2 * half)


class OfDiffusers(ModelMixin, ConfigMixin):
    """The same, as diffusers would have it."""

    @register_to_config
    def __init__(self, width: int, layout: tuple = (), deep: bool = False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2 + deep))
        self.register_buffer("scale", torch.full((width,), 2.0))
        self.register_buffer("numbers", torch.tensor([n for _, n in layout]), persistent=False)


CLASSES = {"Small": __name__}
LAYOUT = (("hand", 3), ("object", 7))
WEIGHTS = "diffusion_pytorch_model.safetensors"


def same(a: nn.Module, b: nn.Module) -> bool:
    first, second = (
        {**n.state_dict(), **dict(n.named_buffers()), **dict(n.named_parameters())} for n in (a, b)
    )
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def rename(folder: Path, name: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "_class_name": name}))


@pytest.mark.parametrize("files", [{}, {"max_shard_size": "1KB"}], ids=["one file", "several"])
def test_what_diffusers_saved_is_read_bit_for_bit(files, tmp_path) -> None:
    old = OfDiffusers(16, LAYOUT, deep=True)
    old.save_pretrained(tmp_path, **files)
    assert (tmp_path / f"{WEIGHTS}.index.json").is_file() == bool(files)
    rename(tmp_path, "Small")
    before = torch.get_rng_state()
    net = load_part(tmp_path, CLASSES)
    assert same(net, old) and not net.training
    assert torch.equal(torch.get_rng_state(), before)  # loading draws nothing
    assert net.config == {"width": 16, "layout": [["hand", 3], ["object", 7]], "deep": True}


@pytest.mark.parametrize("files", [{}, {"max_file": "1KB"}], ids=["one file", "several"])
def test_diffusers_reads_what_is_saved_here(files, tmp_path) -> None:
    net = Small(16, LAYOUT, deep=True)
    net.save_pretrained(tmp_path, **files)
    assert (tmp_path / f"{WEIGHTS}.index.json").is_file() == bool(files)
    assert same(load_part(tmp_path, CLASSES), net)
    rename(tmp_path, "OfDiffusers")
    both: Any = OfDiffusers.from_pretrained(tmp_path, output_loading_info=True)
    loaded, found = both
    assert same(loaded, net) and not found["missing_keys"] + found["unexpected_keys"]


def test_saving_again_leaves_no_file_of_before(tmp_path) -> None:
    Small(16).save_pretrained(tmp_path, max_file="1KB")
    Small(16).save_pretrained(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"config.json", WEIGHTS}


def test_the_config_holds_the_arguments_and_is_copied(tmp_path) -> None:
    net = Small(16, deep=True)
    assert net.config == {"width": 16, "layout": (), "deep": True} and net.config.width == 16
    assert not hasattr(net.config, "depth")
    copied = copy.deepcopy(net)
    assert copied.config == net.config and same(copied, net)
    assert (net.device.type, net.double().dtype) == ("cpu", torch.float64)
    wider = Wider(8)
    assert wider.config == {"half": 8}
    wider.save_pretrained(tmp_path)
    assert same(Wider.from_pretrained(tmp_path), wider)


def test_what_does_not_fit_is_refused_in_words(tmp_path) -> None:
    def refused(words: str) -> None:
        with pytest.raises(UserError, match=words):
            load_part(tmp_path, CLASSES)

    net = Small(16)
    refused("config.json names none of Small")
    net.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())

    def change(**settings: object) -> None:
        (tmp_path / "config.json").write_text(json.dumps({**config, **settings}))

    change(_class_name="Large")
    refused("names none of Small")
    change(height=3)  # an argument that the class does not take
    refused("damaged, or of another version.*height")
    change(width=8)
    refused("damaged, or of another version.*size mismatch")
    change(deep=True)
    refused("its weights and its config do not agree on layers.2")
    change()
    weights = tmp_path / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-100])
    refused("damaged, or of another version")
    # Without safetensors there are no weights, whatever else lies there.
    weights.rename(tmp_path / "diffusion_pytorch_model.bin")
    refused("damaged, or of another version")


def test_dreams_and_world_models_need_no_diffusers_and_no_transformers(tmp_path) -> None:
    code = f"""
import sys
import embodyrl.dreams.play, embodyrl.dreams.loop, embodyrl.world_models.train
import embodyrl.world_models.reflectors.trained
from pathlib import Path
from embodyrl.world_models.model_files import PARTS
from embodyrl.world_models.nets.codec import FrameCodec
from embodyrl.world_models.nets.saved_network import load_part
FrameCodec(channels=16).save_pretrained({str(tmp_path)!r})
load_part(Path({str(tmp_path)!r}), PARTS["codec"])
print(sorted({{"diffusers", "transformers", "accelerate"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stdout + done.stderr
