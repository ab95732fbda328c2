"""Tiny vision-language models of real architectures, loaded from disk."""

import math

import pytest
import torch

from embodyrl.errors import UserError
from embodyrl.world_models.reflectors.vlm import VLMConfig, VLMReflector

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {% for c in m['content'] %}{% if c['type'] == 'image' "
    "%}IMAGE{% else %}{{ c['text'] }}{% endif %} {% endfor %}{% endfor %}{% if "
    "add_generation_prompt %}assistant{% endif %}"
)
WORDS = [
    "user",
    "assistant",
    "Is",
    "it",
    "done",
    "now",
    "pick",
    "up",
    "the",
    "red",
    "blue",
    "block",
    "?",
    "yes",
    "no",
    "Yes",
    "No",
    "maybe",
]
QUESTION = "Is {instruction} done now ?"


def tokenizer(special: list[str], words: list[str] = WORDS):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<unk>", "<eos>", *special, *words])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<eos>",
        additional_special_tokens=special,
    )


def idefics3(folder, words: list[str] = WORDS) -> None:
    """What the first SmolVLM is."""
    from transformers import (
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3ImageProcessor,
        Idefics3Processor,
    )

    special = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    words_tokenizer = tokenizer(special, words)
    Idefics3Processor(
        Idefics3ImageProcessor(
            size={"longest_edge": 32}, max_image_size={"longest_edge": 32}, do_image_splitting=False
        ),
        words_tokenizer,
        image_seq_len=4,
        chat_template=TEMPLATE.replace("IMAGE", "<image>"),
    ).save_pretrained(folder)
    small = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    text = {"num_key_value_heads": 2, "vocab_size": len(words_tokenizer), "pad_token_id": 0}
    config = Idefics3Config(
        image_token_id=words_tokenizer.convert_tokens_to_ids("<image>"),
        vision_config={**small, "image_size": 32, "patch_size": 8},
        text_config={"model_type": "llama", **small, **text},
        scale_factor=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    Idefics3ForConditionalGeneration(config).save_pretrained(folder)


def qwen3_vl(folder, words: list[str] = WORDS) -> None:
    from transformers import (
        Qwen2VLImageProcessor,
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    special = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    words_tokenizer = tokenizer(special, words)
    Qwen3VLProcessor(
        Qwen2VLImageProcessor(
            patch_size=8,
            temporal_patch_size=2,
            merge_size=2,
            min_pixels=32 * 32,
            max_pixels=32 * 32,
        ),
        words_tokenizer,
        Qwen3VLVideoProcessor(),
        chat_template=TEMPLATE.replace("IMAGE", "<|vision_start|> <|image_pad|> <|vision_end|>"),
    ).save_pretrained(folder)
    ids = words_tokenizer.convert_tokens_to_ids(special)
    config = Qwen3VLConfig(
        image_token_id=ids[0],
        video_token_id=ids[1],
        vision_start_token_id=ids[2],
        vision_end_token_id=ids[3],
        vision_config={
            "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 8,
            "out_hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
        },
        text_config={
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 2, "head_dim": 16, "num_key_value_heads": 2,
            "vocab_size": len(words_tokenizer), "pad_token_id": 0,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2],
            },
        },
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3VLForConditionalGeneration(config).save_pretrained(folder)


@pytest.fixture(scope="module", params=[idefics3, qwen3_vl], ids=lambda make: make.__name__)
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param.__name__)
    request.param(path)
    return path


def make(folder, **changes) -> VLMReflector:
    settings = {
        "window": 3,
        "question": QUESTION,
        "image_size": 32,
        "dtype": "float32",
        "min_mass": 0.0,
    } | changes
    return VLMReflector(VLMConfig(str(folder), **settings))


def frames(n: int) -> torch.Tensor:
    noise = torch.randint(0, 256, (n, 3, 32, 32, 3), generator=torch.Generator().manual_seed(0))
    return noise.to(torch.uint8)


def test_probability_is_that_of_yes_among_yes_and_no(folder):
    reflector, pictures = make(folder), frames(1)
    prob = reflector.judge({"front": pictures}, ["the red block"])
    assert prob.shape == (1, 3) and prob.dtype == torch.float32 and ((prob > 0) & (prob < 1)).all()
    # By hand, of the second column: first frame, second frame, question.
    content = [{"type": "image", "image": pictures[0, k].permute(2, 0, 1)} for k in (0, 1)]
    content.append({"type": "text", "text": "Is the red block done now ?"})
    inputs = reflector.processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt",
    )  # fmt: skip
    with torch.no_grad():
        mass = reflector.model(**inputs).logits[0, -1].softmax(-1)
    vocabulary = reflector.processor.tokenizer.get_vocab()
    yes, no = (sum(mass[vocabulary[w]] for w in words) for words in (("yes", "Yes"), ("no", "No")))
    assert prob[0, 1].item() == pytest.approx((yes / (yes + no)).item(), abs=1e-5)


def test_a_row_is_judged_alike_alone_and_beside_a_longer_question(folder):
    pictures = frames(4)
    sentences = ["it", "the red block", "pick up the red block now pick up the blue block", "it"]
    together = make(folder).judge({"front": pictures}, sentences)
    small = make(folder, batch_size=5).judge({"front": pictures}, sentences)
    torch.testing.assert_close(together, small, atol=1e-5, rtol=0)
    for row in range(4):
        alone = make(folder).judge({"front": pictures[row : row + 1]}, [sentences[row]])
        torch.testing.assert_close(together[row], alone[0], atol=1e-5, rtol=0)
    assert together.std() > 1e-4


def test_only_new_frames_are_asked_about(folder):
    reflector, pictures = make(folder), frames(2)
    prob = reflector.judge({"front": pictures}, ["it"] * 2, new=1)
    assert prob[:, :2].isnan().all()
    torch.testing.assert_close(
        prob[:, 2], reflector.judge({"front": pictures}, ["it"] * 2)[:, 2], atol=1e-5, rtol=0
    )


def test_it_sees_the_pictures_that_it_is_asked_about(folder):
    """A few steps teach it to say yes to bright frames; that needs the pictures to reach it."""
    reflector = make(folder)
    grey = torch.tensor(
        [[20, 230, 20], [230, 20, 230], [20, 20, 230], [230, 230, 20]], dtype=torch.uint8
    )
    pictures = grey[:, :, None, None, None].expand(4, 3, 32, 32, 3)
    optimiser = torch.optim.Adam(reflector.model.parameters(), 3e-3)
    for _ in range(40):
        with torch.enable_grad():
            prob = VLMReflector.judge.__wrapped__(reflector, {"front": pictures}, ["it"] * 4)
            loss = torch.nn.functional.binary_cross_entropy(prob, (grey > 100).float())
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    prob = reflector.judge({"front": pictures}, ["it"] * 4)
    assert ((prob > 0.5) == (grey > 100)).all(), prob


def test_what_it_does_not_understand_is_nan(folder):
    assert make(folder, min_mass=0.9).judge({"front": frames(1)}, ["it"]).isnan().all()
    reflector = make(folder)
    with torch.no_grad():
        for parameter in reflector.model.lm_head.parameters():
            parameter.fill_(math.nan)
    assert reflector.judge({"front": frames(1)}, ["it"]).isnan().all()


def test_half_precision_is_near_single(folder):
    single, half = (make(folder, dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert half.model.dtype == torch.bfloat16
    pictures = {"front": frames(2)}
    difference = single.judge(pictures, ["it"] * 2) - half.judge(pictures, ["it"] * 2)
    assert difference.abs().max() < 0.05


def test_models_that_cannot_answer_are_refused(tmp_path):
    idefics3(tmp_path / "mute", [word for word in WORDS if word.lower() != "no"])
    with pytest.raises(UserError, match="no single token"):
        make(tmp_path / "mute")
    with pytest.raises(UserError, match="cannot be loaded"):
        make(tmp_path / "nothing")
    with pytest.raises(UserError, match="dtype"):
        VLMConfig("x", dtype="int8")
