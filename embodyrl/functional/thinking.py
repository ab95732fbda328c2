"""Thinking before acting: how likely a chain of latent thoughts and its end is.

Latent reasoning of adaptive length that is optimised together with the action is LAPO's idea
(LaST-R1, arXiv:2604.28192); the stopping distribution is PonderNet's (arXiv:2107.05407). A mind
begins in the state z_0 = 0 and has at most K thoughts. In each state z_j, j = 0 .. K-1, it makes one
choice:

    it stops                      with probability s_j
    it has the thought z_{j+1}    with density (1 - s_j) N(z_{j+1}; m_j, std_j^2)

After K thoughts it stops for certain. With T thoughts the log-probability of all choices is

    log p(z_1 .. z_T, T) = sum_{j < T} [log(1 - s_j) + log N(z_{j+1}; m_j, std_j^2)] + log s_T,

where the last term is absent for T = K. Everything here is a pure function of tensors.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from embodyrl.functional.flow import LOG_2PI


def log_stop_distribution(logits: Float[Tensor, "*b k"]) -> Float[Tensor, "*b k1"]:
    """The log-probabilities of having T = 0 .. K thoughts.

    Args:
        logits: of s_j, the probability of stopping in state z_j.
    """
    # It goes on in all states before, and stops in the one that counts.
    going = F.logsigmoid(-logits).cumsum(-1)
    before = F.pad(going, (1, 0))
    stops = F.pad(F.logsigmoid(logits), (0, 1))
    return before + stops


def thinking_log_prob(
    latents: Float[Tensor, "n k w"],
    count: Int[Tensor, " n"],
    mean: Float[Tensor, "n k w"],
    log_std: Float[Tensor, "n k w"],
    logits: Float[Tensor, "n k"],
) -> Float[Tensor, "n k"]:
    """The log-probability of the choice in each state z_0 .. z_{K-1}; 0 after the one to stop.

    Args:
        latents: z_1 .. z_K, of which the first T count.
        count: T.
        mean: m_j.
        log_std: log of std_j.
        logits: of s_j.
    """
    state = torch.arange(logits.shape[1], device=logits.device)
    goes_on = state < count[:, None]
    stops = state == count[:, None]
    density = -0.5 * ((latents - mean) / log_std.exp()) ** 2 - log_std - 0.5 * LOG_2PI
    thought = F.logsigmoid(-logits) + density.sum(-1)
    return torch.where(goes_on, thought, torch.where(stops, F.logsigmoid(logits), 0.0))


def thinking_cost(
    states: Float[Tensor, "n k w"],
    mean: Float[Tensor, "n k w"],
    log_std: Float[Tensor, "n k w"],
    logits: Float[Tensor, "n k"],
) -> Float[Tensor, " n"]:
    """What a chain of thoughts costs on average, in nats: one for each thought, and what it says.

    What the thought z_{j+1} says is KL(N(m_j, std_j^2) || N(z_j, 1)): a thought that says nothing
    leaves the state as it is, up to noise of unit variance. The cost draws the noise up to 1 where
    imitation does not need it to be smaller, and keeps thoughts and updates few.

    Args:
        states: z_0 .. z_{K-1}.
        mean: m_j.
        log_std: log of std_j.
        logits: of s_j.
    """
    variance = (2.0 * log_std).exp()
    said = 0.5 * ((mean - states) ** 2 + variance - 1.0 - 2.0 * log_std).sum(-1)
    # The probability of having the thought at all.
    reached = F.logsigmoid(-logits).cumsum(-1).exp()
    return (reached * (1.0 + said)).sum(-1)
