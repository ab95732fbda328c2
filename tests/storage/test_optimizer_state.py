"""Optimiser states that come from files: what does not fit is refused before a step is taken."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from embodyrl.storage.state_tree import load_optimizer


def stepped() -> torch.optim.Adam:
    """An optimiser of two parameters after one step."""
    parameters = [torch.nn.Parameter(torch.ones(size)) for size in (2, 3)]
    optimizer = torch.optim.Adam(parameters, lr=0.1)
    torch.cat(parameters).sum().backward()
    optimizer.step()
    return optimizer


def group(state: dict[str, Any], **changes: Any) -> None:
    state["param_groups"][0].update(changes)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: group(s, betas=(0.9, "x")), "betas"),
        (lambda s: group(s, lr="x"), "lr"),
        (lambda s: group(s, params=[0, "x"]), "numbered otherwise"),
        (lambda s: s["state"].update(x=s["state"].pop(1)), "not there"),
        (lambda s: s["state"][0].update(exp_avg=torch.ones(5)), "shape"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(
    change: Callable[[dict[str, Any]], None], says: str
) -> None:
    state = copy.deepcopy(stepped().state_dict())
    change(state)
    with pytest.raises(ValueError, match=says):
        load_optimizer(stepped(), state)


def test_a_state_that_fits_comes_back() -> None:
    state = copy.deepcopy(stepped().state_dict())
    optimizer = stepped()
    optimizer.step()
    load_optimizer(optimizer, state)
    assert optimizer.state_dict()["state"][1]["step"] == 1
