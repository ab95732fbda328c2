"""Masked discrete diffusion: paths that are enumerated, and how often they are drawn."""

import itertools
import math

import pytest
import torch

from embodyrl.errors import UserError
from embodyrl.functional.masked_diffusion import (
    MASKED,
    MaskedPath,
    MaskedSteps,
    draw_path,
    draw_tokens,
    log_plackett_luce,
    masked_at_random,
    score_path,
)

WORDS = 2


def network(places: int, words: int = WORDS):
    """Logits by a table: one row for each state, with other numbers at every place."""
    size = (words + 1) ** places
    table = torch.randn(size, places, words, generator=torch.Generator().manual_seed(1)) * 1.5

    def logits_of(tokens):
        base = (words + 1) ** torch.arange(places)
        return table[((tokens + 1) * base).sum(1)]

    return logits_of, table


def every_path(steps: MaskedSteps, words: int = WORDS):
    """All orders of all places and all tokens, one path after the other."""
    states = [([[MASKED] * steps.places], [])]
    for k, count in enumerate(steps.counts):
        grown = []
        for tokens, ranks in states:
            now = tokens[-1]
            free = [i for i in range(steps.places) if k >= steps.draft or now[i] == MASKED]
            for places in itertools.permutations(free, count):
                for drawn in itertools.product(range(words), repeat=count):
                    after, rank = list(now), [MASKED] * steps.places
                    for r, (i, word) in enumerate(zip(places, drawn, strict=True)):
                        after[i], rank[i] = word, r
                    grown.append(([*tokens, after], [*ranks, rank]))
        states = grown
    return MaskedPath(torch.tensor([t for t, _ in states]), torch.tensor([r for _, r in states]))


@pytest.mark.parametrize(
    "steps",
    [
        MaskedSteps(3, 1),
        MaskedSteps(3, 2, temperature=0.5),
        MaskedSteps(3, 3),
        MaskedSteps(2, 2, edits=1, edited=1),
        MaskedSteps(2, 1, edits=2, edited=2, temperature=2.0),
    ],
)
def test_the_probabilities_of_all_paths_sum_to_one(steps):
    logits_of, _ = network(steps.places)
    path = every_path(steps)
    logprob, entropy = score_path(logits_of, steps, path)
    assert logprob.shape == (len(path.tokens), steps.num_steps)
    assert float(logprob.sum(1).exp().sum()) == pytest.approx(1.0, abs=1e-5)
    assert bool((entropy > 0).all()) and float(entropy.max()) <= math.log(WORDS) + 1e-6


def test_a_draft_and_an_edit_have_the_probability_that_the_words_say():
    steps = MaskedSteps(2, 2, edits=1, edited=1, temperature=0.5)
    logits_of, table = network(2)
    table = table.log_softmax(-1)
    # Place 1 says 0, then place 0 says 1, then place 0 is edited and says 0.
    path = MaskedPath(
        torch.tensor([[[-1, -1], [-1, 0], [1, 0], [0, 0]]]),
        torch.tensor([[[-1, 0], [0, -1], [0, -1]]]),
    )
    nothing, draft = table[0], table[3]  # states (-1, -1) and (-1, 0)
    confidence = [draft[0, 1], nothing[1, 0]]
    first = torch.stack([nothing[0].max(), nothing[1].max()]) / 0.5
    edit = -torch.stack(confidence) / 0.5
    expected = [
        first.log_softmax(0)[1] + nothing[1, 0],
        draft[0, 1],
        edit.log_softmax(0)[0] + draft[0, 0],
    ]
    logprob, entropy = score_path(logits_of, steps, path)
    torch.testing.assert_close(logprob[0], torch.stack(expected))
    spread = [-(p.exp() * p).sum() for p in (nothing[1], draft[0], draft[0])]
    torch.testing.assert_close(entropy[0], torch.stack(spread).mean())


def test_paths_are_drawn_as_often_as_their_probability_says():
    steps = MaskedSteps(2, 2, edits=1, edited=1, temperature=0.7)
    logits_of, _ = network(2)
    n = 40_000
    uniform = torch.rand(n, 3, 2, 2, generator=torch.Generator().manual_seed(0)).clamp_min(1e-7)
    drawn = draw_path(logits_of, steps, uniform, noise_free=False)
    paths = every_path(steps)
    expected = score_path(logits_of, steps, paths)[0].sum(1).exp()
    key = lambda p: torch.cat([p.tokens.flatten(1), p.ranks.flatten(1)], dim=1)  # noqa: E731
    index = {tuple(row): i for i, row in enumerate(key(paths).tolist())}
    seen = torch.zeros(len(expected))
    for row in key(drawn).tolist():
        seen[index[tuple(row)]] += 1 / n
    error = (expected * (1 - expected) / n).sqrt()
    assert float(((seen - expected).abs() / error).max()) < 4.5  # of 64 paths


def test_without_noise_the_confident_places_come_first_and_the_doubtful_are_edited():
    logits = torch.tensor([[[0.0, 1.0], [3.0, 0.0], [0.0, 2.0]]])
    steps = MaskedSteps(3, 3, edits=1, edited=2)
    path = draw_path(lambda t: logits, steps, torch.full((1, 4, 2, 3), 0.5), noise_free=True)
    assert path.tokens[0].tolist() == [
        [-1, -1, -1], [-1, 0, -1], [-1, 0, 1], [1, 0, 1], [1, 0, 1]
    ]  # fmt: skip
    assert path.ranks[0, 3].tolist() == [0, -1, 1]


def test_the_gradient_also_teaches_the_order():
    """The gradient of a path's log-probability has the mean 0 over all paths."""
    steps = MaskedSteps(2, 2, edits=1, edited=1)
    _, table = network(2)
    table.requires_grad_()
    path = every_path(steps)
    logits_of = lambda tokens: table[((tokens + 1) * torch.tensor([1, 3])).sum(1)]  # noqa: E731
    total = score_path(logits_of, steps, path)[0].sum(1)
    (score,) = torch.autograd.grad((total.detach().exp() * total).sum(), table)
    torch.testing.assert_close(score, torch.zeros_like(score), atol=1e-5, rtol=0)


def test_plackett_luce_is_a_product_of_shares():
    score = torch.tensor([[1.0, 2.0, 0.5, -1.0]])
    weight = score[0].exp()
    a = weight[2] / weight.sum()
    b = weight[0] / (weight.sum() - weight[2])
    logprob = log_plackett_luce(score, torch.tensor([[2, 0]]))
    assert float(logprob.exp()) == pytest.approx(float(a * b), rel=1e-5)
    whole = log_plackett_luce(score, torch.tensor([[3, 1, 0, 2]]))
    assert torch.isfinite(whole).all()


@pytest.mark.parametrize(("places", "draft"), [(20, 4), (20, 20), (7, 5), (8, 1)])
def test_every_draft_step_reveals_something_and_fewer_at_first(places, draft):
    counts = MaskedSteps(places, draft, edits=2, edited=3).counts
    assert sum(counts[:draft]) == places and min(counts) >= 1 and counts[draft:] == [3, 3]
    if (places, draft) == (20, 4):
        assert counts[:4] == [2, 4, 6, 8]


def test_more_steps_than_places_are_refused():
    with pytest.raises(UserError, match=r"20 tokens.*21 steps"):
        MaskedSteps(20, 21)
    with pytest.raises(UserError, match="edits of 5 tokens"):
        MaskedSteps(4, 2, edits=1, edited=5)


def test_imitation_masks_a_share_of_what_is_known():
    g = torch.Generator().manual_seed(0)
    n, length = 4000, 6
    tokens = torch.arange(length).expand(n, -1)
    known = (torch.arange(length) < 4).expand(n, -1)
    given, asked = masked_at_random(tokens, known, torch.rand(n, 1 + length, generator=g))
    assert bool((given[:, 4:] == MASKED).all()) and not asked[:, 4:].any()
    assert bool(((given == MASKED) == (asked | ~known)).all())
    assert bool((given[:, :4][~asked[:, :4]] == tokens[:, :4][~asked[:, :4]]).all())
    # Counts 1 to 4 are ceil(4 cos(pi u / 2)), each place as often as the others.
    share = [float((asked.sum(1) == m).float().mean()) for m in range(1, 5)]
    edges = [2 / math.pi * math.acos(m / 4) for m in range(5)]
    for m in range(4):
        assert share[m] == pytest.approx(edges[m] - edges[m + 1], abs=0.03)
    each = asked[:, :4].float().mean(0)
    assert float(each.max() - each.min()) < 0.05


def test_tokens_invert_the_distribution_function():
    logits = torch.tensor([[[0.2, 0.5, 0.3]]]).log().expand(1, 4, 3)
    uniform = torch.tensor([[0.1, 0.3, 0.69, 0.71]])
    assert draw_tokens(logits, uniform).tolist() == [[0, 1, 1, 2]]
    assert draw_tokens(logits, None).tolist() == [[1, 1, 1, 1]]
