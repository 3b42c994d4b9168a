"""Core `rlt`: the Recurrent Looped Transformer (Zhang, Feng and Qin 2026, sections 2 and B).

    e_t = encoder(u)_t                                   causal, a window of attention
    r   = RMSNorm(s)                                     s: the register, s* where an episode starts
    v_t = e_t + alpha * sigmoid(W_g [e_t; r] + b_g) * (W_s r)
    y_t = decoder(v_t)                                   h_t = RMSNorm(y_t), x_t = y_t

A decoder block attends to the last W decoder positions, then to the encoder memory (keys and values
of e, one projection for all blocks). The register is y_{t-1} (`feedback` 1, RLT-1), or y at the end
of the last complete chunk of `feedback` steps, counted from the start of the episode (RLT-2), or
there is none and the decoder runs in parallel (0, RLT-0).

Ours: the encoder memory is a window too, as large as the encoder's, so that a step of acting does
not cost more with age; positions are biases by distance.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from worldmodels.attention import CrossAttention, Pair, append, clean
from worldmodels.attention_loop import LoopWindow
from worldmodels.core import SequenceCore, State
from worldmodels.layers import Enter, Linear, RMSNorm, init_weight
from worldmodels.products import LoopProduct
from worldmodels.transformer import Block, since_first
from worldmodels.uncompiled import uncompiled


class DecoderBlock(Block):
    def __init__(self, width: int, heads: int, window: int, window_enc: int, hidden: int):
        super().__init__(width, heads, window, hidden)
        self.cross_norm = RMSNorm(width)
        self.cross = CrossAttention(width, heads, window_enc)


class LoopedBlock:
    """A decoder block in a loop over T: `block(value)` is (B, D) of the next step."""

    def __init__(self, block: DecoderBlock, cache: Pair, memory: Pair, near: Tensor, far: Tensor):
        """cache (B, W-1, H, d) before the loop, memory (B, W_E-1 + T, H, d), reaches (B, T)."""
        self.block = block
        layers = (block.attention.qkv, block.attention.out, block.cross.query, block.cross.out)
        layers += (block.feed[1], block.feed[3])
        self.products = [LoopProduct(layer.weight) for layer in layers]
        self.own = LoopWindow(block.attention, cache, near)
        self.memory = LoopWindow(block.cross, memory, far)

    def __call__(self, value: Tensor) -> Tensor:
        block = self.block
        qkv, out, query, cross_out, enter, leave = self.products
        value = value + out(self.own(qkv(block.norm(value))))
        value = value + cross_out(self.memory(query(block.cross_norm(value))))
        norm, wide, act, narrow = block.feed
        hidden = act(enter(norm(value)) + wide.bias)
        return value + (leave(hidden) + narrow.bias)


def packed(pairs: list[Pair]) -> Tensor:
    """Keys and values of each layer, (B, L, H, d), as one (B, layers, 2, L, H, d)."""
    return torch.stack([torch.stack(pair, 1) for pair in pairs], 1)


def unpacked(cache: Tensor) -> list[Pair]:
    return [(layer[:, 0], layer[:, 1]) for layer in cache.unbind(1)]


class RLT(SequenceCore):
    markov = False

    def __init__(
        self,
        z: int,
        action: int,
        layers_enc: int,
        layers_dec: int,
        width: int,
        heads: int,
        window: int,
        window_enc: int,
        ffn: int,
        alpha: float,
        feedback: int,
    ):
        """Widths: flat z, action, `width` of tokens, h and x, `ffn` inside the feed-forward.

        `window` of the decoder and `window_enc` of encoder and memory count the step itself.
        """
        super().__init__()
        if feedback < 0 or layers_dec < 1:
            raise ValueError(
                f"rlt.feedback {feedback} must not be negative, and rlt.layers_dec {layers_dec} "
                f"must be at least 1"
            )
        self.out = self.hidden = width
        self.heads, self.window, self.window_enc = heads, window, window_enc
        self.grain = math.lcm(window, window_enc)
        self.alpha, self.feedback, self.segment = alpha, feedback, max(1, feedback)
        self.enter = Enter(z, action, width)
        self.encoder = nn.ModuleList(
            Block(width, heads, window_enc, ffn) for _ in range(layers_enc)
        )
        self.memory_norm = RMSNorm(width)
        self.memory = nn.Linear(width, 2 * width, bias=False)
        init_weight(self.memory.weight, width)
        self.decoder = nn.ModuleList(
            DecoderBlock(width, heads, window, window_enc, ffn) for _ in range(layers_dec)
        )
        self.leave = RMSNorm(width)
        if feedback:
            self.start = nn.Parameter(torch.zeros(width))
            nn.init.normal_(self.start)
            self.register_norm = RMSNorm(width)
            self.gate = Linear(width, width)  # the part of W_g that reads e_t, and b_g
            self.read = nn.Linear(width, 2 * width, bias=False)  # its other part, and W_s
            for weight, inputs in zip(self.read.weight.chunk(2), (2 * width, width), strict=True):
                init_weight(weight, inputs)
            init_weight(self.gate.weight, 2 * width)

    def initial(self, batch: int, age: Tensor | None = None) -> State:
        """`age` sets the phase of chunks; the windows start empty and s is that of a start."""
        weight, shape = self.leave.weight, (self.heads, self.out // self.heads)
        zeros = torch.zeros(batch, device=weight.device, dtype=torch.int32)
        layers = {
            "encoder": (len(self.encoder) + 1, 2, self.window_enc - 1),  # the memory is the last
            "decoder": (len(self.decoder), 2, self.window - 1),
        }
        state = {key: weight.new_zeros(batch, *lead, *shape) for key, lead in layers.items()}
        if self.feedback:
            state["s"] = self.start.expand(batch, -1)
        return {**state, "known": zeros, "age": zeros if age is None else age.to(zeros)}

    def remember(self, encoded: Tensor) -> Pair:
        """Keys and values (..., H, d) of the encoder memory, finite, for e (..., D)."""
        parts = self.memory(self.memory_norm(encoded)).unflatten(-1, (2, self.heads, -1))
        return clean(parts[..., 0, :, :]), clean(parts[..., 1, :, :])

    def merge(self, encoded: Tensor, gate: Tensor, read: Tensor) -> Tensor:
        """v_t of e_t (..., D), `self.gate` of it, and `self.read` (..., 2 D) of the register."""
        other, value = read.chunk(2, -1)
        return encoded + self.alpha * torch.sigmoid(gate + other) * value

    def merged(self, encoded: Tensor, s: Tensor) -> Tensor:
        return self.merge(encoded, self.gate(encoded), self.read(self.register_norm(s)))

    def completes(self, age: Tensor) -> Tensor:
        """Whether the steps of `age` (...) are the last of their chunks, as (..., 1)."""
        return ((age + 1) % self.feedback == 0)[..., None]

    def reaches(self, known: Tensor) -> tuple[Tensor, Tensor]:
        """Of the decoder and of the encoder, where `known` steps of the episode came before."""
        return known.clamp(max=self.window - 1), known.clamp(max=self.window_enc - 1)

    def state(self, encoder: list[Pair], decoder: list[Pair], known: Tensor, age: Tensor) -> State:
        """The state, but for s, after a step that had these `known` and `age` (B,)."""
        dtype = self.leave.weight.dtype
        known = (known + 1).clamp(max=max(self.window, self.window_enc) - 1)
        caches = {"encoder": packed(encoder).to(dtype), "decoder": packed(decoder).to(dtype)}
        return {**caches, "known": known, "age": age + 1}

    def step(
        self, u: Tensor, is_first: Tensor | None, state: State, prepared: Any = None
    ) -> tuple[Tensor, Tensor, State]:
        known, age, s = state["known"], state["age"], state.get("s")
        if is_first is not None:
            known, age = (torch.where(is_first, 0, count) for count in (known, age))
            if self.feedback:
                s = torch.where(is_first[:, None], self.start, s)
        near, far = self.reaches(known)
        value, encoder, decoder = self.enter(u), [], []
        *caches, memory = unpacked(state["encoder"])
        for block, cache in zip(self.encoder, caches, strict=True):
            attended, pair = block.attention.step(block.norm(value), cache, far)
            value = block.add(value, attended)
            encoder.append(pair)
        key, val = self.remember(value)
        memory = append(memory, (key[:, None], val[:, None]))
        encoder.append((memory[0][:, 1:], memory[1][:, 1:]))
        if self.feedback:
            value = self.merged(value, s)
        for block, cache in zip(self.decoder, unpacked(state["decoder"]), strict=True):
            attended, pair = block.attention.step(block.norm(value), cache, near)
            value = value + attended
            value = block.add(value, block.cross.step(block.cross_norm(value), memory, far))
            decoder.append(pair)
        after = self.state(encoder, decoder, known, age)
        if self.feedback:
            after["s"] = torch.where(self.completes(age), value, s)
        return self.leave(value), value, after

    @uncompiled  # unrolled over T, the graph would take too long to compile
    def scan(
        self, u: Tensor, is_first: Tensor, state: State, plan: Any = None
    ) -> tuple[Tensor, Tensor, State, State]:
        length = u.shape[1]
        known, age = (since_first(is_first, state[name]) for name in ("known", "age"))
        near, far = self.reaches(known)
        value, encoder = self.enter(u), []
        *caches, memory = unpacked(state["encoder"])
        for block, cache in zip(self.encoder, caches, strict=True):
            attended, pair = block.attention.scan(block.norm(value), cache, far)
            value = block.add(value, attended)
            encoder.append(pair)
        memory = append(memory, self.remember(value))
        encoder.append(memory)
        caches = unpacked(state["decoder"])
        if self.feedback:
            blocks = [
                LoopedBlock(block, cache, memory, near, far)
                for block, cache in zip(self.decoder, caches, strict=True)
            ]
            value, s = self.loop(value, is_first, self.completes(age), state["s"], blocks)
            decoder = [block.own.pair() for block in blocks]
        else:
            decoder = []
            for block, cache in zip(self.decoder, caches, strict=True):
                attended, pair = block.attention.scan(block.norm(value), cache, near)
                value = value + attended
                value = block.add(value, block.cross.scan(block.cross_norm(value), memory, far))
                decoder.append(pair)
        kept = (
            [(key[:, length:], val[:, length:]) for key, val in pairs]
            for pairs in (encoder, decoder)
        )
        after = self.state(*kept, known[:, -1], age[:, -1])
        context = {"encoder": packed(encoder), "decoder": packed(decoder)}
        context.update(known=known, age=age)
        if self.feedback:
            after["s"], context["s"] = s[:, -1], s
        return self.leave(value), value, after, context

    def loop(
        self,
        encoded: Tensor,
        is_first: Tensor,
        completes: Tensor,
        s: Tensor,
        blocks: list[LoopedBlock],
    ) -> tuple[Tensor, Tensor]:
        """y and, after each step, the register, both (B, T, D), for e (B, T, D) and s (B, D)."""
        read, outputs, registers = LoopProduct(self.read.weight), [], []
        # unbind, not indexing: the gradient of one index is as large as the whole batch.
        parts = (encoded, self.gate(encoded), is_first[..., None], completes)
        for token, gate, first, ends in zip(*(part.unbind(1) for part in parts), strict=True):
            s = torch.where(first, self.start, s)
            value = self.merge(token, gate, read(self.register_norm(s)))
            for block in blocks:
                value = block(value)
            s = torch.where(ends, value, s)
            outputs.append(value)
            registers.append(s)
        return torch.stack(outputs, 1), torch.stack(registers, 1)

    def imagine(self, context: State, last: int | None = None) -> RLTRoll:
        """Rolls from the `last` steps of each row; keys and values of the rows are shared."""
        return RLTRoll(self, context, last or context["known"].shape[1])

    def flops(self, batch: int, length: int) -> int:
        layers = [self.enter[0], self.memory]
        layers += [self.gate, self.read] if self.feedback else []
        for block in (*self.encoder, *self.decoder):
            layers += [block.attention.qkv, block.attention.out, block.feed[1], block.feed[3]]
        windows = [self.window_enc] * len(self.encoder)
        for block in self.decoder:
            layers += [block.cross.query, block.cross.out]
        looped = [self.window, self.window_enc] * len(self.decoder)
        if not self.feedback:
            windows, looped = windows + looped, []
        # In parallel W queries see 2 W keys; in the loop one query sees W.
        keys = sum(2 * window * (-(-length // window) * window) for window in windows)
        keys += length * sum(looped)
        per_step = sum(layer.weight.numel() for layer in layers)
        return 2 * batch * (length * per_step + 2 * self.out * keys)


class RLTRoll:
    """Continuations of the last K steps of each row: `step(u)` takes (B*K, U).

    The keys and values of the rows are shared; each continuation has those of its imagined steps
    and a register.
    """

    def __init__(self, core: RLT, context: State, last: int):
        self.core, self.last, self.taken = core, last, 0
        self.known, self.age = (context[name][:, -last:] for name in ("known", "age"))
        self.s = context["s"][:, -last:].detach() if core.feedback else None
        keep = {"encoder": core.window_enc - 1 + last, "decoder": core.window - 1 + last}
        encoder, decoder = (
            unpacked(context[name].detach()[:, :, :, -length:]) for name, length in keep.items()
        )
        *self.encoder, self.memory = [(shared, []) for shared in encoder]
        self.decoder = [(shared, []) for shared in decoder]

    def step(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """h and x (B*K, D) of one more step."""
        core = self.core
        self.taken += 1
        near, far = core.reaches(self.known + self.taken)
        value = core.enter(u).unflatten(0, (-1, self.last))
        for block, windows in zip(core.encoder, self.encoder, strict=True):
            value = block.add(value, block.attention.imagine(block.norm(value), *windows, far))
        self.memory[1].append(core.remember(value))
        if core.feedback:
            value = core.merged(value, self.s)
        for block, windows in zip(core.decoder, self.decoder, strict=True):
            value = value + block.attention.imagine(block.norm(value), *windows, near)
            value = block.add(
                value, block.cross.imagine(block.cross_norm(value), *self.memory, far)
            )
        if core.feedback:
            self.s = torch.where(core.completes(self.age + self.taken), value, self.s)
        return core.leave(value).flatten(0, 1), value.flatten(0, 1)
