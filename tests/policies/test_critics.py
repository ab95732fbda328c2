"""Values after each action: what they see, that the whole choice is valued as without them."""

import pytest
import torch

from embodyrl.errors import UserError
from embodyrl.policies.chooser import Chooser, ChooserConfig
from embodyrl.policies.critics import Critics
from embodyrl.types import EnvSpec

F, H, A, E, B = 4, 3, 2, 2, 5


def both():
    """Critics with values after each action, and without, of the same weights."""
    torch.manual_seed(0)
    each = Critics(F, H * A, E, 8, 2, "layer", prefixes=H)
    plain = Critics(F, H * A, E, 8, 2, "layer")
    plain.load_state_dict({k: v for k, v in each.state_dict().items() if k != "lengths"})
    return each, plain


def inputs(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, F, generator=generator), torch.rand(B, H, A, generator=generator) * 2 - 1


def test_a_whole_choice_is_valued_as_without_its_prefixes():
    each, plain = both()
    torch.nn.init.normal_(each.lengths)
    features, choice = inputs()
    assert torch.equal(each(features, choice), plain(features, choice))
    torch.testing.assert_close(
        each.after_each_action(features, choice)[..., -1], plain(features, choice)
    )
    assert plain.lengths is None and "lengths" not in dict(plain.named_parameters())


def test_a_prefix_is_a_choice_whose_other_actions_are_hidden_and_knows_its_length():
    each, plain = both()
    features, choice = inputs()
    for k in range(H):
        hidden = choice.clone()
        hidden[:, k + 1 :] = 0
        # Fresh embeddings of the length are 0.
        value = each.after_each_action(features, choice)[..., k]
        torch.testing.assert_close(value, plain(features, hidden))
    with torch.no_grad():
        each.lengths[:, 0] += torch.randn(E, 8)
    moved = each.after_each_action(features, choice) - torch.stack(
        [plain(features, choice * (torch.arange(H) <= k)[:, None]) for k in range(H)], dim=-1
    )
    assert (moved[..., 0].abs() > 1e-4).all() and (moved[..., 1:].abs() < 1e-5).all()


def test_a_value_hears_of_no_later_action():
    each, _ = both()
    torch.nn.init.normal_(each.lengths)
    features, choice = inputs()
    choice.requires_grad_()
    value = each.after_each_action(features, choice)
    for k in range(H):
        (slope,) = torch.autograd.grad(value[..., k].sum(), choice, retain_graph=True)
        assert (slope[:, : k + 1] != 0).any(-1).all() and not slope[:, k + 1 :].any()


def test_a_chunk_of_one_action_has_no_prefixes():
    spec = EnvSpec("test/arm", 4, A, 3, "torque", 25.0, 20, {})
    config = ChooserConfig(chooser_width=8, chooser_prefixes=True)
    assert Chooser(spec, 2, config).critics.lengths.shape == (2, 1, 8)
    with pytest.raises(UserError, match=r"policy\.chooser_prefixes .* one action"):
        Chooser(spec, 1, config)
