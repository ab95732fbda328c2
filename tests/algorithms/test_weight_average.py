"""The average of weights: what it is in closed form, and who holds what when."""

import pytest
import torch

from embodyrl.algorithms.weight_average import WeightAverage


@pytest.mark.parametrize("decay", [0.0, 0.75])
def test_the_average_follows_the_trained_weights(decay):
    weights = torch.nn.Parameter(torch.tensor([1.0, 5.0]))
    memory = weights.data_ptr()
    average = WeightAverage([weights], decay)
    optimizer = torch.optim.SGD([weights], lr=1.0)
    expected = trained = torch.tensor([1.0, 5.0])
    for step in (1.0, 2.0):
        with average.trained():
            assert torch.equal(weights, trained)
            weights.grad = torch.full((2,), -step)
            optimizer.step()
        trained = trained + step
        expected = decay * expected + (1 - decay) * trained
        torch.testing.assert_close(weights.detach(), expected)
    # Compiled acting reads the same memory as before.
    assert weights.data_ptr() == memory and torch.equal(average.state_dict()[0], trained)


def test_a_step_that_fails_leaves_the_average():
    weights = torch.nn.Parameter(torch.ones(2))
    average = WeightAverage([weights], 0.5)
    with pytest.raises(ValueError, match="no step"), average.trained():
        weights.data.add_(3.0)
        raise ValueError("no step")
    assert torch.equal(weights.detach(), torch.ones(2))


def test_a_restored_average_goes_on_alike():
    first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    averages = [WeightAverage([first], 0.9), WeightAverage([second], 0.9)]
    with averages[0].trained():
        first.data.add_(1.0)
    second.data.copy_(first.data)
    averages[1].load_state_dict([x.clone() for x in averages[0].state_dict()])
    for average, weights in zip(averages, (first, second), strict=True):
        with average.trained():
            weights.data.mul_(2.0)
    assert torch.equal(first, second)
    torch.testing.assert_close(first.detach(), torch.full((2,), 0.9 * 1.1 + 0.1 * 4.0))
