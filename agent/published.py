"""The weights that acting reads: copies, which the learner renews without either side waiting.

Three buffers. The learner writes into the one that is neither the latest nor in use, then names it
the latest. The actor announces that it will use the latest, and looks again whether it still is:
if so, the learner has seen the announcement before it chooses its next buffer. One thread publishes
and one takes; every shared variable is one integer, so no lock is needed.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from agent.update import Update


def left_out(update: Update) -> tuple[nn.Module, ...]:
    """The parts that acting does not need."""
    world = update.world
    return (world.decoder, world.prior, world.reward, world.cont, update.critic, update.slow)


def acting_copy(update: Update) -> Update:
    """A copy of what acting needs: encoder, core, posterior and actor; the rest is None."""
    # To `deepcopy`, what is in the memo has been copied already.
    return copy.deepcopy(update, {id(part): None for part in left_out(update)}).requires_grad_(
        False
    )


def acting_weights(update: Update) -> dict[str, Tensor]:
    """Copies on the CPU of the tensors that an `acting_copy` would hold, by name."""
    parts = [part.state_dict(keep_vars=True) for part in left_out(update)]
    without = {id(tensor) for part in parts for tensor in part.values()}
    return {
        name: tensor.detach().to("cpu", copy=True)
        for name, tensor in update.state_dict(keep_vars=True).items()
        if id(tensor) not in without
    }


class Published:
    """`publish` from the learner's thread, `take` from the actor's."""

    def __init__(self, update: Update, number: int):
        """`update` is the learner's, after `number` updates."""
        self.copies = [acting_copy(update) for _ in range(3)]
        self.numbers = [number] * 3
        self.latest = self.using = 0
        names = [name for name, _ in self.copies[0].named_parameters()]
        source = dict(update.named_parameters())
        self.source: list[nn.Parameter] = [source[name] for name in names]
        self.tensors = [list(each.parameters()) for each in self.copies]
        cuda = update.return_range.device.type == "cuda"
        self.written = [torch.cuda.Event() for _ in range(3)] if cuda else None

    @property
    def number(self) -> int:
        """Updates that the latest weights hold."""
        return self.numbers[self.latest]

    @torch.no_grad()
    def publish(self, number: int) -> None:
        """Copy the learner's weights, which hold `number` updates, with one call."""
        taken = (self.latest, self.using)
        free = next(index for index in range(3) if index not in taken)
        # On a GPU nothing reads the free buffer any more: `Actor.act` returns actions on the
        # host, so its stream has finished before the actor takes other weights.
        torch._foreach_copy_(self.tensors[free], self.source)
        if self.written:
            self.written[free].record()
        self.numbers[free] = number
        self.latest = free

    def take(self) -> tuple[Update, int]:
        """The latest weights and the updates they hold; theirs until the next `take`."""
        while True:
            latest = self.latest
            self.using = latest
            if self.latest == latest:
                break
        if self.written:
            self.written[latest].wait()
        return self.copies[latest], self.numbers[latest]
