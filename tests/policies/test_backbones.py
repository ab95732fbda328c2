"""``token_vla`` on a Qwen3-VL: its prompt is the model's own, and every algorithm can train it."""

import numpy as np
import pytest
import torch
from vla_models import SENTENCES, SPEC, gen, observation, stir

from embodyrl.algorithms.sft import SFT, SFTConfig
from embodyrl.build import make_policy
from embodyrl.checks import check_policy
from embodyrl.data.demonstrations import Demonstrations
from embodyrl.errors import UserError
from embodyrl.policies.vla.make_small import make_small_smolvla
from embodyrl.policies.vla.make_small_qwen import IMAGE, make_small_qwen3_vl
from embodyrl.policies.vla.tokens import TokenVLAConfig

pytest.importorskip("lerobot.policies", reason="the extra vla is not installed")


@pytest.fixture(scope="module")
def vlm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen")
    sizes = {"width": 32, "layers": 2, "heads": 2, "vision_layers": 2, "patch_size": 4}
    return make_small_qwen3_vl(folder, SENTENCES, **sizes)


def make(vlm, **settings):
    given = {"random_weights": True, "image_size": 16, "horizon": 2, "bins": 8, "critic_width": 16}
    return make_policy(TokenVLAConfig(vlm=str(vlm), **given | settings), SPEC, 0)


def test_the_prompt_is_the_model_s_own(vlm):
    """Keys and values of every layer are those of transformers' forward pass of the same prompt."""
    from transformers import Qwen2VLImageProcessor

    policy = make(vlm)
    stir(policy, gen())
    obs = observation()
    with torch.no_grad():
        ours = policy.encode(obs)
    text = policy.tokenizer(list(obs.instruction), padding=True, return_tensors="pt")
    n, cameras = len(obs), len(SPEC.cameras)
    # The prompt as transformers wants it: a placeholder for each token of an image.
    pad, _, begin, end = policy.tokenizer.convert_tokens_to_ids([*IMAGE])
    one = torch.tensor([begin, *[pad] * 4, end])
    images = one.repeat(cameras).expand(n, -1)
    ids = torch.cat([images, text["input_ids"]], dim=1)
    mask = torch.cat([torch.ones_like(images), text["attention_mask"]], dim=1)
    # Its own processor, of pictures that are resized as ours are.
    processor = Qwen2VLImageProcessor(
        patch_size=4, temporal_patch_size=2, merge_size=2, do_resize=False, do_rescale=False,
        image_mean=[0.0] * 3, image_std=[1.0] * 3,
    )  # fmt: skip
    names = list(SPEC.cameras)
    pictures = [policy.backbone._pixels(obs.images[c])[i] for i in range(n) for c in names]
    seen = processor(pictures, return_tensors="pt", input_data_format="channels_first")
    with torch.no_grad():
        theirs = policy.vlm(
            input_ids=ids, attention_mask=mask, mm_token_type_ids=(ids == pad).int(),
            use_cache=True, **seen,
        ).past_key_values  # fmt: skip
    length = ids.shape[1]
    real = mask.bool()
    assert len(theirs.layers) == 2 and (~real).any()
    for a, b in zip(ours.cache.layers, theirs.layers, strict=True):
        for x, y in ((a.keys, b.keys), (a.values, b.values)):
            x, y = x.transpose(1, 2)[:, :length], y.transpose(1, 2)
            torch.testing.assert_close(x[real], y[real], atol=1e-5, rtol=1e-4)
    # The same without what inner layers add is another one: the test would see it.
    assert policy.vlm.visual.deepstack_visual_indexes == [0]


def test_positions_are_the_model_s_own_and_go_on_after_them(vlm):
    policy = make(vlm)
    backbone, cameras = policy.backbone, len(SPEC.cameras)
    pad, _, begin, end = policy.tokenizer.convert_tokens_to_ids([*IMAGE])
    ids = torch.tensor([*[begin, *[pad] * 4, end] * cameras, 7, 8, 9, 7, 7])[None].repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    grid = torch.tensor([[1, 4, 4]]).repeat(2 * cameras, 1)
    theirs, fewer = policy.vlm.get_rope_index(
        ids, (ids == pad).int(), image_grid_thw=grid, attention_mask=mask
    )
    ours = backbone._positions(mask)
    for row in range(2):
        assert torch.equal(ours[:, row, mask[row].bool()], theirs[:, row, mask[row].bool()])
    # A further token has the position after the last one: the count of tokens, and their offset.
    places = [int(ours[:, row, mask[row].bool()].max()) + 1 for row in range(2)]
    assert places == (mask.sum(1) + fewer[:, 0]).tolist()
    seen = []
    policy.vlm.language_model.rotary_emb.register_forward_hook(
        lambda module, given, out: seen.append(given[1])
    )
    context = policy.encode(observation())
    policy.logits(context, torch.zeros(3, 8, dtype=torch.long))
    last, after = seen
    # The last token of a prompt is that of proprioception.
    assert torch.equal(after[:, :, 0], last[:, :, -1] + 1) and len(context.mask) == 3


@pytest.mark.parametrize("decoding", ["parallel", "autoregressive", "masked"])
def test_it_keeps_the_promises_of_a_policy(vlm, decoding):
    policy = make(vlm, decoding=decoding)
    stir(policy, gen())
    check_policy(policy, observation(), SPEC)
    obs = observation()
    sample = policy.sample(obs, generator=gen(), mode="train")
    with torch.no_grad():
        again = policy.evaluate(obs, sample.trace)
    torch.testing.assert_close(again.logprob, sample.logprob, atol=1e-5, rtol=1e-5)


def test_imitation_learns_what_a_picture_says(vlm):
    """What is shown depends on the colour of the picture alone, so the whole way to it must learn."""
    n, camera = 16, next(iter(SPEC.cameras))
    colour = torch.arange(n) % 2
    images = {name: np.zeros((n, *size, 3), np.uint8) for name, size in SPEC.cameras.items()}
    images[camera] += (200 * colour).numpy().astype(np.uint8)[:, None, None, None]
    proprio = torch.zeros(n, SPEC.proprio_dim) + 0.01 * torch.randn(n, 1, generator=gen())
    actions = (colour * 1.6 - 0.8).float()[:, None].expand(n, SPEC.action_dim)
    zeros = torch.zeros(n, dtype=torch.long)
    demos = Demonstrations(1, images, proprio, actions, torch.arange(n), zeros, [SENTENCES[0]])
    policy = make(vlm, horizon=1, train_vision=True)
    algorithm = SFT(SFTConfig(lr=3e-3, steps_per_iteration=60, batch_size=16), policy)
    for _ in range(2):
        row = algorithm.update(demos, progress=0.0, generator=gen())
    assert row["loss"] < 1.0  # of the second half; it began at log 8
    obs = demos.batch(torch.arange(n))[0]
    done = algorithm.result.sample(obs, generator=gen(), mode="eval").actions[:, 0]
    assert (done.sign() == actions.sign()).all()


def test_weights_of_low_precision_are_trained_in_full(vlm, tmp_path):
    """Published weights are bfloat16. Beside full precision they would not run."""
    from transformers import AutoConfig, AutoModel

    policy = make(vlm)
    policy.tokenizer.save_pretrained(tmp_path)
    AutoModel.from_config(AutoConfig.from_pretrained(vlm)).bfloat16().save_pretrained(tmp_path)
    loaded = make(tmp_path, random_weights=False)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    check_policy(loaded, observation(), SPEC)


def test_what_it_cannot_take_is_refused(vlm, tmp_path):
    with pytest.raises(
        UserError, match=r"a token of every 8 x 8 pixels.*multiple of 8, for ex.*16"
    ):
        make(vlm, image_size=20)
    small = make_small_smolvla(tmp_path / "smol", SENTENCES, width=16, layers=2, heads=2,
                               vision_layers=1, image_size=16, patch_size=4, max_dim=8)  # fmt: skip
    with pytest.raises(UserError, match="takes images of 16 x 16 pixels alone"):
        make(small / "vlm", image_size=32)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match="is a llama, and token_vla supports SmolVLM and Qwen3-VL"):
        make(tmp_path / "other")
