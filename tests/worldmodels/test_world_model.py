"""World model: acting equals training, resets, shapes, and what each setting changes."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from agent.auto import fake_batch
from agent.update import Update
from configs.load import resolve
from envs.env import Space
from worldmodels.bench import sequence_parameters
from worldmodels.cores import CORES
from worldmodels.decoder import RepeatConv, interleave
from worldmodels.encoder import MaxPool
from worldmodels.world_model import WorldModel

OBS = {
    "image": Space("image", (32, 32, 3)),
    "vector": Space("vector", (3,)),
    "kind": Space("discrete", (2,), (3, 4)),
}
ACT = Space("discrete", (1,), (5,))


KINDS = [
    *("gru parallel 0", "gru recurrent 0", "s3m parallel 0", "s3m recurrent 0"),
    *("gru recurrent 24", "s3m parallel 24"),
]


@pytest.fixture(params=KINDS)
def world(request, tiny):
    torch.manual_seed(0)
    core, posterior, readout = request.param.split()
    flags = ("--core", core, "--model.posterior", posterior, "--model.readout", readout)
    return WorldModel(tiny(*flags), OBS, ACT)


def batch_of(world, tiny, rows=2, length=7):
    update = Update(tiny("--core", "gru"), OBS, ACT)
    batch = fake_batch(update, rows, length)
    batch["is_first"][0, 3] = batch["is_first"][1, 0] = True
    batch["encoded"] = update.policy.encode(batch["action"])
    return batch


def test_acting_gives_the_latents_of_training_on_uint8_images(world, tiny):
    batch = batch_of(world, tiny)
    noise = world.noise(2, 7, generator=torch.Generator().manual_seed(0))
    obs = {key: batch[key] for key in OBS}
    with torch.no_grad():
        out, _ = world.observe(
            world.encoder(obs), batch["encoded"], batch["is_first"], world.initial(2), noise
        )
        carry = world.initial(2)
        for t in range(7):
            now = {key: value[:, t] for key, value in obs.items()}
            latents, carry = world.step(now, batch["is_first"][:, t], carry, noise[:, t])
            carry["action"] = batch["encoded"][:, t]
            expected = {"hz": torch.cat([out["h"], out["z"]], -1)[:, t], "x": out["x"][:, t]}
            torch.testing.assert_close(latents, expected, atol=1e-5, rtol=1e-5)


def test_convolving_a_repeated_image_needs_no_repeated_image():
    torch.manual_seed(0)
    conv = RepeatConv(3, 2).double()
    torch.nn.init.normal_(conv.bias)
    image = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    repeated = F.interpolate(image, scale_factor=2, mode="nearest")
    expected = F.conv2d(repeated, conv.weight, conv.bias, padding=2)
    torch.testing.assert_close(interleave(conv(image)), expected)


def test_pooling_that_keeps_less_has_the_same_values_and_gradients():
    torch.manual_seed(0)
    image = torch.randn(2, 3, 6, 8).contiguous(memory_format=torch.channels_last).requires_grad_()
    weight = torch.randn(2, 3, 3, 4)
    ours = torch.autograd.grad((MaxPool.apply(image) * weight).sum(), image)
    theirs = torch.autograd.grad((F.max_pool2d(image, 2) * weight).sum(), image)
    torch.testing.assert_close(MaxPool.apply(image), F.max_pool2d(image, 2))
    torch.testing.assert_close(ours, theirs)


def test_strided_convolutions_replace_pooled_ones(tiny):
    obs = {"image": OBS["image"]}
    image = torch.randint(0, 256, (2, 1, 32, 32, 3), dtype=torch.uint8)
    kernels, shapes = {}, {}
    for conv in ("pool", "strided"):
        world = WorldModel(tiny("--core", "gru", "--model.conv", conv), obs, ACT)
        convs = [*world.encoder.convs, *world.decoder.convs, world.decoder.leave]
        kernels[conv] = {layer.kernel_size for layer in convs}
        embed = world.encoder({"image": image})
        h, z = torch.randn(2, 1, world.core.out), torch.randn(2, 1, world.z)
        shapes[conv] = embed.shape, world.decoder(h, z)["image"].shape
    assert kernels == {"pool": {(5, 5)}, "strided": {(4, 4)}}
    assert shapes["pool"] == shapes["strided"]
    assert shapes["pool"][1] == image.shape


@pytest.mark.parametrize("chunk", ["1", "4", "100"])
def test_chunks_change_memory_and_nothing_else(tiny, chunk):
    torch.manual_seed(0)
    worlds = [WorldModel(tiny("--core", "gru", "--model.chunk", n), OBS, ACT) for n in ("0", chunk)]
    worlds[1].load_state_dict(worlds[0].state_dict())
    batch = batch_of(worlds[0], tiny)
    batch["action"], noise = batch["encoded"], worlds[0].noise(2, 7)
    grads, saved = [], [0, 0]
    for index, world in enumerate(worlds):

        def count(value, index=index):
            saved[index] += value.numel()
            return value

        with torch.autograd.graph.saved_tensors_hooks(count, lambda value: value):
            losses, _ = world.losses(batch, world.initial(2), noise)
        sum(loss.sum() for loss in losses.values()).backward()
        grads.append([param.grad for param in world.parameters()])
    for one, other in zip(*grads, strict=True):  # sums of float32 in another order
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(one.abs().max()))
    assert saved[1] < 0.7 * saved[0]


def test_nothing_before_is_first_reaches_what_follows(world, tiny):
    batch = batch_of(world, tiny)
    noise = world.noise(2, 7, generator=torch.Generator().manual_seed(0))
    results = []
    for change in (False, True):
        obs = {key: batch[key].clone() for key in OBS}
        action = batch["encoded"].clone()
        if change:
            obs["vector"][0, :3] += 5
            obs["image"][0, :3] //= 2
            action[0, :3] = 1 - action[0, :3]
        with torch.no_grad():
            results.append(
                world.observe(
                    world.encoder(obs), action, batch["is_first"], world.initial(2), noise
                )[0]
            )
    for key in ("h", "x", "post"):
        torch.testing.assert_close(results[0][key][0, 3:], results[1][key][0, 3:])
        assert not torch.allclose(results[0][key][0, :3], results[1][key][0, :3])


def test_losses_are_batch_by_time_and_train_every_parameter(world, tiny):
    batch = batch_of(world, tiny)
    batch = {**batch, "action": batch.pop("encoded")}
    losses, _ = world.losses(batch, world.initial(2), world.noise(2, 7))
    assert set(losses) == {"dyn", "rep", "reward", "cont", "rec/image", "rec/vector", "rec/kind"}
    assert all(loss.shape == (2, 7) for loss in losses.values())
    torch.nn.init.normal_(world.reward[-1].weight)  # zero at the start, which hides its inputs
    losses, _ = world.losses(batch, world.initial(2), world.noise(2, 7))
    losses["dyn"] = losses["dyn"] * 1.0
    sum(loss.sum() for loss in losses.values()).backward()
    zero = [
        name
        for name, param in world.named_parameters()
        if param.grad is None or not param.grad.abs().sum()
    ]
    # Free nats may hold back the prior at the start: nothing else may be without a gradient.
    assert all(name.startswith("prior.") for name in zero), zero


@pytest.mark.parametrize("conv", ["pool", "strided"])
@pytest.mark.parametrize(
    "shape",
    [(64, 96, 3), (84, 84, 1), (63, 64, 3), (100, 100, 4), (16, 16, 3), (48, 80, 6), (10, 10, 3)],
)
def test_images_of_any_size_are_reconstructed_in_their_shape(tiny, shape, conv):
    world = WorldModel(tiny("--model.conv", conv), {"image": Space("image", shape)}, ACT)
    embed = world.encoder({"image": torch.zeros(2, 3, *shape, dtype=torch.uint8)})
    assert embed.shape == (2, 3, world.encoder.out)
    image = world.decoder(torch.zeros(2, 3, world.core.out), torch.zeros(2, 3, world.z))["image"]
    assert image.shape == (2, 3, *shape)
    assert image.min() >= 0
    assert image.max() <= 1


def test_images_of_one_task_may_differ_in_size_and_channels(tiny):
    shapes = {"map": (10, 10, 1), "view": (40, 24, 3), "wide": (8, 50, 4)}
    world = WorldModel(tiny(), {key: Space("image", shape) for key, shape in shapes.items()}, ACT)
    obs = {
        key: torch.randint(0, 256, (2, 3, *shape), dtype=torch.uint8)
        for key, shape in shapes.items()
    }
    embed = world.encoder(obs)
    for key in shapes:  # the corner that another image's size would cut off is seen
        changed = {**obs, key: obs[key].clone()}
        changed[key][..., -1, -1, -1] = 255 - changed[key][..., -1, -1, -1]
        assert (world.encoder(changed) != embed).any()
    predicted = world.decoder(torch.zeros(2, 3, world.core.out), torch.zeros(2, 3, world.z))
    assert {key: value.shape[2:] for key, value in predicted.items()} == shapes
    assert set(world.decoder.losses(predicted, obs)) == {f"rec/{key}" for key in shapes}


def test_the_recurrent_posterior_is_refused_for_a_core_without_markov_context(tiny, monkeypatch):
    from worldmodels.gru import GRU

    monkeypatch.setattr(GRU, "markov", False)
    with pytest.raises(ValueError, match=r"gru is not one: set model\.posterior parallel"):
        WorldModel(tiny("--core", "gru"), OBS, ACT)


def test_unknown_core_lists_the_known_ones(tiny):
    config = dataclasses.replace(tiny(), core="lstm")
    with pytest.raises(ValueError, match="unknown core 'lstm'; known: gru, s3m"):
        WorldModel(config, OBS, ACT)


@pytest.mark.parametrize("size", ["1m", "12m"])
def test_sizes_give_every_core_the_parameters_of_gru_within_five_percent(size):
    counts = {}
    for core in CORES:
        config = resolve(["--core", core, "--size", size, "--model.depth", "2"])
        counts[core] = sequence_parameters(WorldModel(config, {"vector": OBS["vector"]}, ACT))
    assert all(abs(n / counts["gru"] - 1) < 0.05 for n in counts.values()), counts
