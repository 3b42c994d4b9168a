"""`model.txt`: modules, output widths, parameters and FLOPs of a run's model."""

from __future__ import annotations

from torch import nn

from agent.update import Update


def parameters(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters() if param.requires_grad)


def model_summary(update: Update, flops: int) -> str:
    """One line a module, two levels deep, then totals.

    torchinfo and torchscan read one forward pass with tensors as inputs; an update takes a batch
    and runs parts of the model many times over, so the tree is walked here.
    """
    world = update.world
    lines = [f"{'module':40} {'parameters':>12}  weights"]
    for name, child in update.named_children():
        lines.append(f"{name:40} {parameters(child):12,}")
        for inner, module in child.named_children():
            shapes = ", ".join(str(tuple(p.shape)) for p in list(module.parameters())[:4])
            lines.append(f"  {name + '.' + inner:38} {parameters(module):12,}  {shapes}")
    lines += [
        f"trainable parameters      {parameters(update):,}",
        f"h {world.h}, x {world.core.hidden}, z {world.z}, embedding {world.encoder.out}",
        f"policy features ({update.config.behaviour.features}) {update.actor.inputs}",
        f"FLOPs of one update       {flops:,}",
    ]
    return "\n".join(lines) + "\n"
