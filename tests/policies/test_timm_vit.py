"""OpenVLA's image encoders: transformers' own DINOv2 and SigLIP, and the published names."""

import re
from pathlib import Path

import torch
from vla_models import gen, stir

from embodyrl.policies.vla.openvla_io import build_openvla_net
from embodyrl.policies.vla.timm_vit import VisionTransformer, ViTSize

DINO = ViTSize(16, 3, 2, 32, 14, registers=4, scaled=True, pooled=False)
SIGLIP = ViTSize(24, 3, 2, 40, 14, registers=0, scaled=False, pooled=True)
# timm's names -> transformers' names, of a block.
DINO_NAMES = {
    "norm1": "norm1",
    "attn.proj": "attention.output.dense",
    "ls1.scale_factor": "layer_scale1.lambda1",
    "norm2": "norm2",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
    "ls2.scale_factor": "layer_scale2.lambda1",
}
SIGLIP_NAMES = {
    "norm1": "layer_norm1",
    "attn.proj": "self_attn.out_proj",
    "norm2": "layer_norm2",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}


def block(state, number, names, queries, prefix):
    """The weights of a block by transformers' names."""
    found = {}
    for name, value in state.items():
        start = f"blocks.{number}."
        if not name.startswith(start):
            continue
        name = name.removeprefix(start)
        if name.startswith("attn.qkv"):
            for part, where in zip(value.chunk(3), queries, strict=True):
                found[f"{prefix}{where}.{name.rpartition('.')[2]}"] = part
            continue
        key = next(k for k in names if name == k or name.startswith(f"{k}."))
        found[prefix + names[key] + name.removeprefix(key)] = value
    return found


def encoder(size):
    ours = VisionTransformer(size, 42)
    stir(ours, gen(3))
    return ours, torch.randn(2, 3, 42, 42, generator=gen(4))


def test_dinov2_is_transformers_own():
    from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersModel

    ours, images = encoder(DINO)
    config = Dinov2WithRegistersConfig(
        hidden_size=16, num_hidden_layers=3, num_attention_heads=2, mlp_ratio=2, image_size=42,
        patch_size=14, num_register_tokens=4,
    )  # fmt: skip
    theirs = Dinov2WithRegistersModel(config).eval()
    state = ours.state_dict()
    # Theirs has a position of the class token too.
    positions = torch.cat([torch.zeros(1, 1, 16), state["pos_embed"]], dim=1)
    given = {
        "embeddings.cls_token": state["cls_token"],
        "embeddings.register_tokens": state["reg_token"],
        "embeddings.position_embeddings": positions,
        "embeddings.mask_token": torch.zeros(1, 16),
        "embeddings.patch_embeddings.projection.weight": state["patch_embed.proj.weight"],
        "embeddings.patch_embeddings.projection.bias": state["patch_embed.proj.bias"],
        "layernorm.weight": state["norm.weight"],
        "layernorm.bias": state["norm.bias"],
    }
    queries = [f"attention.attention.{x}" for x in ("query", "key", "value")]
    for i in range(3):
        given |= block(state, i, DINO_NAMES, queries, f"encoder.layer.{i}.")
    theirs.load_state_dict(given)
    with torch.no_grad():
        hidden = theirs(images, output_hidden_states=True).hidden_states[-2]
        # One class token and four registers stand before the patches.
        torch.testing.assert_close(ours(images), hidden[:, 5:], rtol=1e-5, atol=1e-5)


def test_siglip_is_transformers_own():
    from transformers import SiglipVisionConfig, SiglipVisionModel

    ours, images = encoder(SIGLIP)
    # timm 0.9 has the exact GELU in SigLIP.
    config = SiglipVisionConfig(
        hidden_size=24, num_hidden_layers=3, num_attention_heads=2, intermediate_size=40,
        image_size=42, patch_size=14, hidden_act="gelu",
    )  # fmt: skip
    theirs = SiglipVisionModel(config).eval()
    state = ours.state_dict()
    prefix = next(iter(theirs.state_dict())).partition("embeddings.")[0]
    given = {
        f"{prefix}embeddings.patch_embedding.weight": state["patch_embed.proj.weight"],
        f"{prefix}embeddings.patch_embedding.bias": state["patch_embed.proj.bias"],
        f"{prefix}embeddings.position_embedding.weight": state["pos_embed"][0],
    }
    queries = [f"self_attn.{x}_proj" for x in "qkv"]
    for i in range(3):
        given |= block(state, i, SIGLIP_NAMES, queries, f"{prefix}encoder.layers.{i}.")
    missing, unknown = theirs.load_state_dict(given, strict=False)
    assert not unknown
    assert not [name for name in missing if "post_layernorm" not in name and "head" not in name]
    with torch.no_grad():
        hidden = theirs(images, output_hidden_states=True).hidden_states[-2]
        torch.testing.assert_close(ours(images), hidden, rtol=1e-5, atol=1e-5)


VIT = {
    "pos_embed": (1, 256, "w"),
    "patch_embed.proj.weight": ("w", 3, 14, 14),
    "patch_embed.proj.bias": ("w",),
    "blocks.#.norm1.weight": ("w",),
    "blocks.#.norm1.bias": ("w",),
    "blocks.#.attn.qkv.weight": ("3w", "w"),
    "blocks.#.attn.qkv.bias": ("3w",),
    "blocks.#.attn.proj.weight": ("w", "w"),
    "blocks.#.attn.proj.bias": ("w",),
    "blocks.#.norm2.weight": ("w",),
    "blocks.#.norm2.bias": ("w",),
    "blocks.#.mlp.fc1.weight": ("h", "w"),
    "blocks.#.mlp.fc1.bias": ("h",),
    "blocks.#.mlp.fc2.weight": ("w", "h"),
    "blocks.#.mlp.fc2.bias": ("w",),
    "norm.weight": ("w",),
    "norm.bias": ("w",),
}
ONLY_DINO = {
    "cls_token": (1, 1, "w"),
    "reg_token": (1, 4, "w"),
    "blocks.#.ls1.scale_factor": ("w",),
    "blocks.#.ls2.scale_factor": ("w",),
}
ONLY_SIGLIP = {
    "attn_pool.latent": (1, 1, "w"),
    "attn_pool.q.weight": ("w", "w"),
    "attn_pool.q.bias": ("w",),
    "attn_pool.kv.weight": ("2w", "w"),
    "attn_pool.kv.bias": ("2w",),
    "attn_pool.proj.weight": ("w", "w"),
    "attn_pool.proj.bias": ("w",),
    "attn_pool.norm.weight": ("w",),
    "attn_pool.norm.bias": ("w",),
    "attn_pool.mlp.fc1.weight": ("h", "w"),
    "attn_pool.mlp.fc1.bias": ("h",),
    "attn_pool.mlp.fc2.weight": ("w", "h"),
    "attn_pool.mlp.fc2.bias": ("w",),
}
LLAMA = {
    "model.embed_tokens.weight": (32064, 4096),
    "model.layers.#.self_attn.q_proj.weight": (4096, 4096),
    "model.layers.#.self_attn.k_proj.weight": (4096, 4096),
    "model.layers.#.self_attn.v_proj.weight": (4096, 4096),
    "model.layers.#.self_attn.o_proj.weight": (4096, 4096),
    "model.layers.#.mlp.gate_proj.weight": (11008, 4096),
    "model.layers.#.mlp.up_proj.weight": (11008, 4096),
    "model.layers.#.mlp.down_proj.weight": (4096, 11008),
    "model.layers.#.input_layernorm.weight": (4096,),
    "model.layers.#.post_attention_layernorm.weight": (4096,),
    "model.norm.weight": (4096,),
    "lm_head.weight": (32064, 4096),
}
PROJECTOR = {
    "projector.fc1.weight": (8704, 2176),
    "projector.fc1.bias": (8704,),
    "projector.fc2.weight": (4096, 8704),
    "projector.fc2.bias": (4096,),
    "projector.fc3.weight": (4096, 4096),
    "projector.fc3.bias": (4096,),
}


def listed(prefix, table, layers, sizes=None):
    """Names and shapes of a table, one row for each of the layers where it has a #."""
    found = {}
    for name, shape in table.items():
        numbers = range(layers) if "#" in name else range(1)
        fitted = tuple((sizes or {}).get(n, n) for n in shape)
        found |= {prefix + name.replace("#", str(i)): fitted for i in numbers}
    return found


def test_the_full_size_has_the_published_names_and_shapes():
    """openvla/openvla-7b: model.safetensors.index.json, whose total_size is 15,082,474,368 bytes."""
    dino = {"w": 1024, "2w": 2048, "3w": 3072, "h": 4096}
    siglip = {"w": 1152, "2w": 2304, "3w": 3456, "h": 4304}
    expected = (
        listed("vision_backbone.featurizer.", VIT | ONLY_DINO, 24, dino)
        | listed("vision_backbone.fused_featurizer.", VIT | ONLY_SIGLIP, 27, siglip)
        | listed("language_model.", LLAMA, 32)
        | PROJECTOR
    )
    config = {"text_config": {"model_type": "llama", "vocab_size": 32064, "pad_token_id": 32000}}
    with torch.device("meta"):
        net = build_openvla_net(config, Path("openvla-7b"), weights=False)
    ours = {name: tuple(value.shape) for name, value in net.state_dict().items()}
    assert ours == expected
    assert 2 * sum(value.numel() for value in net.state_dict().values()) == 15_082_474_368
    assert not [name for name in ours if re.search(r"inv_freq|gamma", name)]
