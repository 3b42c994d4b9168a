"""Two-hot, symlog, KL and samples on numbers worked out by hand."""

import math

import pytest
import torch
import torch.nn.functional as F

from worldmodels import latent
from worldmodels.dists import (
    SparseCrossEntropy,
    make_bins,
    symexp,
    symlog,
    twohot_loss,
    twohot_losses,
    twohot_mean,
)
from worldmodels.layers import NORM_EPS, FusedNorm
from worldmodels.s3m import Below

BINS = make_bins()


def test_symexp_undoes_symlog():
    value = torch.tensor([-100.0, -0.5, 0.0, 3.0, 1e4])
    torch.testing.assert_close(symexp(symlog(value)), value)
    assert symlog(torch.tensor(math.e - 1)).item() == pytest.approx(1.0)


def test_bins_are_255_symmetric_and_reach_symexp_of_20():
    assert len(BINS) == 255
    assert torch.equal(BINS, -BINS.flip(0))
    assert BINS[127] == 0
    assert BINS[-1].item() == pytest.approx(math.exp(20) - 1, rel=1e-6)


def test_equal_logits_mean_exactly_zero():
    assert twohot_mean(torch.zeros(3, 255), BINS).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("target", [0.0, 0.05, -3.0, 1234.5])
def test_the_best_logits_for_a_target_have_it_as_mean(target):
    target = torch.tensor([target])
    logits = torch.zeros(1, 255, requires_grad=True)
    (grad,) = torch.autograd.grad(twohot_loss(logits, target, BINS).sum(), logits)
    # Gradient of cross-entropy at equal logits: 1/255 minus the two-hot weights.
    weights = 1 / 255 - grad
    assert (weights > 1e-4).sum() <= 2
    assert (weights * BINS).sum().item() == pytest.approx(target.item(), rel=1e-3, abs=1e-3)


def test_loss_of_a_target_on_a_bin_is_minus_its_log_probability():
    logits = torch.zeros(255)
    logits[127] = math.log(254.0)  # probability 1/2 on the bin of 0
    assert twohot_loss(logits, torch.tensor(0.0), BINS).item() == pytest.approx(math.log(2))


def test_losses_of_several_targets_add_with_their_scales():
    logits = torch.randn(4, 255, generator=torch.Generator().manual_seed(0))
    one, two = torch.tensor([0.3, -2.0, 0.0, 70.0]), torch.tensor([0.3, 5.0, -0.01, 1.0])
    expected = twohot_loss(logits, one, BINS) + 0.5 * twohot_loss(logits, two, BINS)
    both = twohot_losses(logits, [(one, 1.0), (two, 0.5)], BINS)
    torch.testing.assert_close(both, expected)


def test_cross_entropy_is_that_of_log_softmax_and_so_is_its_gradient():
    random = torch.Generator().manual_seed(0)
    logits = 40 * torch.randn(3, 7, dtype=torch.float64, generator=random)
    logits.requires_grad_()
    index = torch.tensor([[0, 1], [3, 3], [6, 2]])  # a class may be named twice
    weight = torch.rand(3, 2, dtype=torch.float64, generator=random)
    dense = torch.zeros(3, 7, dtype=torch.float64).scatter_add_(-1, index, weight)
    expected = -(dense * logits.log_softmax(-1)).sum(-1)
    torch.testing.assert_close(SparseCrossEntropy.apply(logits, index, weight), expected)
    assert torch.autograd.gradcheck(
        lambda value: SparseCrossEntropy.apply(value, index, weight), logits
    )


def test_target_beyond_the_bins_counts_as_the_last_one():
    logits = torch.zeros(255)
    assert twohot_loss(logits, torch.tensor(1e12), BINS).item() == pytest.approx(math.log(255))


def test_kl_by_hand():
    # Two groups: (1/2, 1/2) against (1/4, 3/4), and equal ones.
    p = torch.tensor([[0.5, 0.5], [0.3, 0.7]]).log()
    q = torch.tensor([[0.25, 0.75], [0.3, 0.7]]).log()
    expected = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert latent.kl(p, q).item() == pytest.approx(expected)
    assert latent.kl(p, p).item() == pytest.approx(0)


def test_free_nats_floor_the_loss_and_stop_its_gradient():
    post = torch.randn(1, 1, 2, 3, requires_grad=True)
    prior = torch.randn(1, 1, 2, 3, requires_grad=True)
    post_logp, prior_logp = latent.mixed_log_probs(post, 0.01), latent.mixed_log_probs(prior, 0.01)
    dyn, rep = latent.kl_losses(post_logp, prior_logp, free=100.0)
    assert dyn.item() == rep.item() == 100.0
    grads = torch.autograd.grad(dyn.sum() + rep.sum(), [post, prior])
    assert all((grad == 0).all() for grad in grads)
    dyn, rep = latent.kl_losses(post_logp, prior_logp, free=0.0)
    assert torch.autograd.grad(dyn.sum(), post, allow_unused=True, retain_graph=True)[0] is None
    assert torch.autograd.grad(rep.sum(), prior, allow_unused=True)[0] is None


def test_uniform_share_bounds_every_probability():
    logp = latent.mixed_log_probs(torch.tensor([1000.0, 0.0, 0.0, 0.0]), 0.01)
    torch.testing.assert_close(logp.exp(), torch.tensor([0.9925, 0.0025, 0.0025, 0.0025]))


def test_samples_are_one_hot_follow_the_probabilities_and_pass_gradients():
    logits = torch.tensor([0.1, 0.2, 0.7]).log().requires_grad_()
    logp = latent.mixed_log_probs(logits.expand(20000, 3), 0.0)
    random = torch.Generator().manual_seed(0)
    z = latent.sample(logp.exp(), latent.exponential_like(logp, random))
    assert set(z.detach().sum(-1).round(decimals=5).tolist()) == {1.0}
    torch.testing.assert_close(z.mean(0), torch.tensor([0.1, 0.2, 0.7]), atol=0.02, rtol=0)
    (grad,) = torch.autograd.grad(z[:, 0].mean(), logits)
    # d p_0 / d logits of a softmax: p_0 (1 - p_0), -p_0 p_1, -p_0 p_2
    torch.testing.assert_close(grad, torch.tensor([0.09, -0.02, -0.07]))


def test_entropy_of_a_fair_coin_is_log_two():
    assert latent.entropy(torch.tensor([[0.5, 0.5]]).log()).item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("silu", [False, True])
def test_fused_norm_is_rms_norm_then_silu_with_its_gradients(silu):
    torch.manual_seed(0)
    value = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    expected = F.rms_norm(value, (5,), weight, NORM_EPS)
    expected = F.silu(expected) if silu else expected
    torch.testing.assert_close(FusedNorm.apply(value, weight, silu), expected)
    assert torch.autograd.gradcheck(lambda *args: FusedNorm.apply(*args, silu), (value, weight))


def test_a_damping_beyond_its_bound_comes_back_and_goes_no_further():
    value = torch.tensor([-0.5, 0.2, 0.2], requires_grad=True)
    bounded = Below.apply(value, -0.1)
    assert bounded.tolist() == pytest.approx([-0.5, -0.1, -0.1])
    (bounded * torch.tensor([-1.0, 1.0, -1.0])).sum().backward()
    assert value.grad.tolist() == [-1.0, 1.0, 0.0]  # descent lowers the second, keeps the third
