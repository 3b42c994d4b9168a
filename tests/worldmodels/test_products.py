"""Products in a loop: the values and gradients of plain layers, with one weight gradient."""

import pytest
import torch

from worldmodels.products import LoopProduct, multiply

STEPS, ROWS = 5, 3


def run(product, start):
    value, seen = start, []
    for _ in range(STEPS):
        value = torch.tanh(product(value).flatten(1))
        seen.append(value)
    return torch.stack(seen).square().sum()


@pytest.mark.parametrize("shape", [(6, 6), (3, 2, 2)], ids=["dense", "blocks"])
def test_values_and_gradients_are_those_of_plain_products(shape):
    torch.manual_seed(0)
    weight = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    start = torch.randn(ROWS, 6, dtype=torch.float64, requires_grad=True)
    plain = run(lambda value: multiply(value, weight), start)
    expected = torch.autograd.grad(plain, (weight, start))
    looped = run(LoopProduct(weight), start)
    torch.testing.assert_close(looped, plain)
    looped.backward()
    torch.testing.assert_close((weight.grad, start.grad), expected)


def test_a_second_backward_through_a_kept_graph_gives_the_same_gradient():
    weight = torch.eye(4, requires_grad=True)
    loss = run(LoopProduct(weight), torch.ones(1, 4))
    first = torch.autograd.grad(loss, weight, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(loss, weight), first)


def test_a_backward_for_inputs_alone_adds_nothing_to_the_next_one():
    weight, start = torch.eye(4, requires_grad=True), torch.ones(1, 4, requires_grad=True)
    loss = run(LoopProduct(weight), start)
    expected = torch.autograd.grad(run(LoopProduct(weight), start), weight)
    torch.autograd.grad(loss, start, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(loss, weight), expected)


def test_a_frozen_weight_keeps_nothing():
    product = LoopProduct(torch.eye(4))
    run(product, torch.ones(1, 4, requires_grad=True)).backward()
    assert not product.pairs


def test_a_weight_that_a_loss_does_not_reach_has_no_gradient():
    weight = torch.eye(4, requires_grad=True)
    product = LoopProduct(weight)
    value = torch.ones(1, 4, requires_grad=True)
    product(value)
    value.sum().backward()
    assert weight.grad is None


def test_under_autocast_the_product_is_bfloat16_and_the_gradient_float32():
    weight = torch.eye(4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = LoopProduct(weight)(torch.full((2, 4), 0.5))
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    assert weight.grad.dtype == torch.float32
    torch.testing.assert_close(weight.grad, torch.full((4, 4), 1.0))
