"""Returns, policy distributions and the optimiser on numbers worked out by hand."""

import math

import pytest
import torch
from torch import nn

from agent.counters import updates_due
from agent.optim import LaProp
from agent.policy import BoundedNormal, Categorical
from agent.returns import lambda_return, percentile_range
from configs.schema import OptimConfig

tensor = torch.tensor


def test_lambda_return_by_hand():
    # discount 0.9, lambda 0.5: R_1 = 2 + 0.9 * 10 = 11; R_0 = 1 + 0.9 (0.5 * 4 + 0.5 * 11) = 7.75
    live = tensor([0.9, 0.9])
    returns = lambda_return(tensor([1.0, 2.0]), live, tensor([4.0, 10.0]), 0.5)
    torch.testing.assert_close(returns, tensor([7.75, 11.0]))


def test_lambda_zero_is_one_step_and_one_is_monte_carlo():
    reward, live, boot = tensor([1.0, 2.0, 3.0]), tensor([0.5, 0.5, 0.5]), tensor([4.0, 6.0, 8.0])
    torch.testing.assert_close(lambda_return(reward, live, boot, 0.0), reward + live * boot)
    # 3 + 4 = 7; 2 + 3.5 = 5.5; 1 + 2.75 = 3.75
    torch.testing.assert_close(lambda_return(reward, live, boot, 1.0), tensor([3.75, 5.5, 7.0]))


def test_a_terminal_step_stops_the_return_and_a_truncation_bootstraps_it():
    reward, boot, mix = tensor([1.0, 5.0]), tensor([100.0, 100.0]), tensor([0.0, 0.95])
    # The first arrival ends the episode: nothing after its reward counts.
    terminal = lambda_return(reward, tensor([0.0, 0.9]), boot, mix)
    assert terminal[0].item() == pytest.approx(1.0)
    # Cut by a time limit: the value is bootstrapped, the next episode's reward is not used.
    truncated = lambda_return(reward, tensor([0.9, 0.9]), boot, mix)
    assert truncated[0].item() == pytest.approx(91.0)


def test_percentiles_are_those_of_numpy():
    value = torch.arange(101.0)
    assert percentile_range(value[torch.randperm(101)]).tolist() == [5.0, 95.0]
    low, high = percentile_range(tensor([[0.0, 1.0]]))
    assert low.item() == pytest.approx(0.05)
    assert high.item() == pytest.approx(0.95)


def test_first_update_of_laprop_is_the_learning_rate_against_the_sign():
    param = nn.Parameter(tensor([3.0, -4.0]))
    optimizer = LaProp([("a.w", param)], OptimConfig(lr=0.1, warmup=0))
    param.grad = tensor([0.6, -0.8])  # norm 1 is under 0.3 * 5: not clipped
    optimizer.step()
    torch.testing.assert_close(param.data, tensor([2.9, -3.9]))


def test_two_updates_of_laprop_by_hand_with_clipping_and_warm_up():
    param = nn.Parameter(tensor([4.0]))
    config = OptimConfig(lr=1.0, warmup=2, agc=0.5, beta1=0.5, beta2=0.5)
    optimizer = LaProp([("a.w", param)], config)
    # Gradient 10 over 0.5 * 4: clipped to 2. v = 2, corrected 4, scaled gradient 1.
    # m = 0.5, corrected 1, half of the learning rate: 4 - 0.5.
    param.grad = tensor([10.0])
    optimizer.step()
    assert param.item() == pytest.approx(3.5)
    # Gradient 1 over 0.5 * 3.5 stays. v = 0.5 * 2 + 0.5 = 1.5, corrected by 0.75: 2.
    # Scaled 1 / sqrt(2) = 0.70711; m = 0.25 + 0.35355, corrected by 0.75: 0.80474.
    param.grad = tensor([1.0])
    optimizer.step()
    assert param.item() == pytest.approx(3.5 - 0.804738, abs=1e-5)


def test_actor_and_critic_may_have_their_own_rates():
    params = {name: nn.Parameter(tensor([1.0])) for name in ("world.w", "actor.w", "critic.w")}
    config = OptimConfig(lr=0.1, actor_lr=0.2, critic_lr=0.3, warmup=0)
    optimizer = LaProp(list(params.items()), config)
    for param in params.values():
        param.grad = tensor([0.1])
    optimizer.step()
    values = [round(param.item(), 5) for param in params.values()]
    assert values == [0.9, 0.8, 0.7]


def test_several_categorical_numbers_add_up():
    policy = Categorical((2, 3), unimix=0.0)
    logits = tensor([[0.0, 0.0, 0.0, 0.0, 0.0]])
    action = policy.encode(tensor([[1, 2]]))
    assert action.tolist() == [[0, 1, 0, 0, 1]]
    logp, entropy = policy.log_prob_entropy(logits, action)
    assert logp.item() == pytest.approx(-math.log(6))
    assert entropy.item() == pytest.approx(math.log(6))
    assert policy.decode(action).tolist() == [[1, 2]]


def test_bounded_normal_by_hand():
    policy = BoundedNormal(1)
    out = tensor([[0.0, -2.0]])  # mean 0, standard deviation 0.9 * 0.5 + 0.1 = 0.55
    assert policy.sample(out, tensor([[2.0]])).item() == pytest.approx(1.1)
    logp, entropy = policy.log_prob_entropy(out, tensor([[0.0]]))
    constant = math.log(0.55) + 0.5 * math.log(2 * math.pi)
    assert logp.item() == pytest.approx(-constant)
    assert entropy.item() == pytest.approx(constant + 0.5)
    raw = tensor([[1.6, -3.2, 0.25]], requires_grad=True)
    taken = policy.taken(raw)
    assert taken.tolist() == [[1.0, -1.0, 0.25]]
    taken.sum().backward()
    assert raw.grad.tolist() == [[0.625, 0.3125, 1.0]]


@pytest.mark.parametrize("ratio", [0.3, 1.0, 32.0, 64.0, 100.7])
@pytest.mark.parametrize("envs", [1, 3, 7])
def test_updates_follow_the_train_ratio_exactly(ratio, envs):
    done = 0
    for step in range(0, 10000, envs):
        done += updates_due(step, ratio, 1024) - done
        assert abs(done * 1024 - step * ratio) <= 1024
