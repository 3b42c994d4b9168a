"""Every setting of a run: its type, its default and one line of meaning.

The dataclasses are frozen: a configuration is resolved once (`configs/load.py`), printed, saved in
the run's folder and never changed. YAML presets hold differences only. A value of 0 or `auto` that
is described as automatic is replaced at start by `agent/auto.py`, which records what it chose.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal


def setting(default: Any, meaning: str) -> Any:
    """A field with a default and the line that `--help` prints for it."""
    if dataclasses.is_dataclass(default):
        return dataclasses.field(
            default_factory=type(default),
            metadata={"meaning": meaning},
        )
    return dataclasses.field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True)
class EnvConfig:
    count: int = setting(
        0, "environments stepped side by side, all ranks together; 0: by cores and RAM"
    )
    processes: Literal["auto", "yes", "no"] = setting(
        "auto", "one process per environment; auto: no for environments cheaper than a message"
    )
    repeat: int = setting(1, "simulator steps per action; env_step counts simulator steps")
    time_limit: int = setting(0, "cut episodes after this many actions; 0: the task's own limit")
    truncation: Literal["bootstrap", "terminal"] = setting(
        "bootstrap", "a time limit is not an end (value bootstrapped), or counts as one"
    )
    timeout: float = setting(120.0, "seconds after which a silent environment is restarted")
    restarts_per_hour: int = setting(10, "more restarts than this within an hour end the run")


@dataclass(frozen=True)
class ReplayConfig:
    capacity: int = setting(10_000_000, "steps kept, first in first out; all ranks together")
    ram_gb: float = setting(1.0, "RAM for decoded blocks, GB; of each rank")
    disk_gb: float = setting(
        0.0, "disk budget, GB, all ranks together; 0: what is free, less a reserve"
    )
    from_: str = setting("", "folder of another run or replay, sampled beside one's own, unchanged")
    online: bool = setting(
        True, "fresh windows are trained on once before uniform sampling; start stream: never"
    )
    start: Literal["zero", "stored", "stream"] = setting(
        "zero",
        "state a row starts from: the initial one; one kept every state_every steps, refreshed by "
        "training; or that of the row before it, each row following a stream (truncated BPTT)",
    )
    state_every: int = setting(
        0, "start stored: steps of an episode between states and between windows; 0: batch.length"
    )


@dataclass(frozen=True)
class BatchConfig:
    size: int = setting(16, "rows B of a batch, all ranks together; each has an equal share")
    length: int = setting(64, "steps T of a row: the longest dependency that can be learned")


@dataclass(frozen=True)
class LoopConfig:
    train_ratio: float = setting(32.0, "replayed steps per agent step; may be a fraction")
    fill: int = setting(
        0,
        "steps in the replay, resets and those of --replay.from included, before the first update, "
        "of all ranks; 0: one batch (size x length)",
    )
    mode: Literal["overlapped", "lockstep", "offline"] = setting(
        "overlapped",
        "acting beside learning; in turns: slower, but a run can be repeated; or no acting at all: "
        "updates on the steps of --replay.from, until --stop.updates",
    )
    lead: int = setting(2, "overlapped: updates that acting may be owed before it waits")


@dataclass(frozen=True)
class StopConfig:
    """A run ends at the limit that comes first."""

    steps: int = setting(10_000_000, "agent steps")
    updates: int = setting(0, "updates; 0: no limit")
    flops: float = setting(0.0, "training FLOPs, of the updates alone; 0: no limit")
    seconds: float = setting(0.0, "seconds, of all sittings together; 0: no limit")


@dataclass(frozen=True)
class ModelConfig:
    units: int = setting(256, "width of encoder, decoder and head layers")
    hidden: int = setting(256, "width of the layers inside prior, posterior and core inputs")
    depth: int = setting(16, "base channels of the image encoder and decoder")
    groups: int = setting(32, "categorical variables S of the latent z")
    classes: int = setting(16, "classes C of each of them")
    layers: int = setting(3, "layers of the vector encoder and decoder")
    conv: Literal["pool", "strided"] = setting(
        "pool", "5x5 convolutions with pooling and repeating, or 4x4 ones of stride 2 (faster)"
    )
    readout: int = setting(
        0,
        "width of h for prior and heads, by a linear layer; 0: as wide as the core's",
    )
    chunk: int = setting(
        0, "frames encoded and decoded at a time, again in the backward, to save memory; 0: all"
    )
    unimix: float = setting(0.01, "uniform share mixed into prior and posterior")
    posterior: Literal["auto", "parallel", "recurrent"] = setting(
        "auto", "q(z|o), or q(z|h,o) step by step; auto: recurrent for gru, else parallel"
    )


@dataclass(frozen=True)
class GRUConfig:
    deter: int = setting(2048, "width of h, which is also x")
    blocks: int = setting(8, "diagonal blocks of the recurrent matrices")


@dataclass(frozen=True)
class S3MConfig:
    layers: int = setting(3, "stacked state-space layers")
    state: int = setting(128, "complex states P of a layer")
    width: int = setting(256, "features of a layer")
    deter: int = setting(512, "width of h")
    blocks: int = setting(8, "HiPPO blocks whose spectrum the states share")
    discretisation: Literal["bilinear", "zoh"] = setting(
        "bilinear", "from continuous to discrete time"
    )
    initial: Literal["learned", "zeros"] = setting("learned", "state at the start of an episode")
    dt_min: float = setting(0.001, "smallest initial step: memory of about 1400 steps")
    dt_max: float = setting(0.1, "largest initial step: memory of about 14 steps")


@dataclass(frozen=True)
class TransformerConfig:
    layers: int = setting(4, "blocks")
    width: int = setting(256, "width of tokens and of h")
    heads: int = setting(4, "attention heads")
    window: int = setting(64, "steps that a block sees, its own included")
    ffn: int = setting(1024, "width inside the feed-forward")


@dataclass(frozen=True)
class RateConfig:
    layers: int = setting(4, "blocks")
    width: int = setting(256, "width of tokens and of h; x is tokens + 1 times as wide")
    heads: int = setting(4, "attention heads, those of the valve ca2 included")
    window: int = setting(32, "steps that a block sees, its own included")
    ffn: int = setting(1024, "width inside the feed-forward")
    segment: int = setting(16, "steps of an episode between two writes of the memory")
    tokens: int = setting(4, "memory tokens")
    attend: Literal["sliding", "segment"] = setting(
        "sliding", "a step sees its window, or of it the steps of its own segment alone"
    )
    valve: Literal["ca2", "none", "gate", "gru"] = setting(
        "ca2", "how new memory meets old: cross-attention, replacement, GTrXL's gate, a GRU cell"
    )
    x: Literal["committed", "provisional"] = setting(
        "committed", "memory in x: as last written, or as if the segment ended now (slower)"
    )
    initial: Literal["learned", "fixed"] = setting(
        "learned", "memory at the start of an episode; fixed: as drawn"
    )
    memory_grad: Literal["bptt", "detach"] = setting(
        "bptt", "gradient through written memory; detach: none, as released"
    )
    dropout_memory: float = setting(0.0, "dropout of what is written: what rewriting must repair")


@dataclass(frozen=True)
class RLTConfig:
    layers_enc: int = setting(2, "blocks of the encoder, which runs in parallel")
    layers_dec: int = setting(1, "blocks of the decoder, which runs step by step")
    width: int = setting(256, "width of tokens, h and x")
    heads: int = setting(4, "attention heads")
    window: int = setting(8, "steps that a decoder block sees, its own included")
    window_enc: int = setting(64, "steps that encoder blocks and the encoder memory cover")
    ffn: int = setting(1024, "width inside the feed-forward")
    alpha: float = setting(0.1, "scale of the register's part in the decoder's input")
    feedback: int = setting(
        1, "steps between updates of the register: 1 RLT-1, more RLT-2; 0: none, RLT-0"
    )


@dataclass(frozen=True)
class ElmurConfig:
    layers: int = setting(3, "layers")
    width: int = setting(256, "width of tokens, slots and h")
    heads: int = setting(4, "attention heads")
    window: int = setting(16, "steps that a layer attends to, its own included")
    ffn: int = setting(512, "width inside the feed-forwards of tokens and slots")
    segment: int = setting(16, "steps L between writes of a memory")
    slots: int = setting(8, "slots M of a memory")
    blend: float = setting(0.2, "share of the new content in a slot that was written before")
    attend: Literal["sliding", "segment"] = setting(
        "sliding", "the window passes the borders of segments, or stops there (as published)"
    )
    initial: Literal["learned", "fixed"] = setting("learned", "slots at the start of an episode")
    memory: Literal["per_layer", "shared"] = setting(
        "per_layer", "a memory a layer, or one that all read and the first layer writes"
    )
    write: Literal["lru", "fifo", "all"] = setting(
        "lru", "fill, then blend the oldest slot; replace the oldest; replace every slot"
    )
    bias: bool = setting(True, "bias of reads and writes by the time between slot and token")
    memory_grad: Literal["bptt", "detach"] = setting(
        "bptt", "gradients through written slots, or none (as published): the writer stays random"
    )
    dropout: float = setting(0.0, "dropout of what attention, read and feed-forward add to a token")
    dropout_attention: float = setting(0.0, "dropout of the weights of attention, read and write")
    dropout_memory: float = setting(0.0, "dropout of what is written: what refreshes must repair")


@dataclass(frozen=True)
class LossConfig:
    dyn: float = setting(1.0, "scale of KL(sg(posterior) || prior)")
    rep: float = setting(0.1, "scale of KL(posterior || sg(prior))")
    free: float = setting(1.0, "free nats of both KL terms")
    rec: float = setting(1.0, "scale of every reconstruction loss")
    reward: float = setting(1.0, "scale of the reward loss")
    cont: float = setting(1.0, "scale of the continue loss")
    policy: float = setting(1.0, "scale of the policy loss")
    value: float = setting(1.0, "scale of the value loss on imagined states")
    repval: float = setting(0.3, "scale of the value loss on replayed states")


@dataclass(frozen=True)
class BehaviourConfig:
    features: Literal["output", "hidden", "full"] = setting(
        "output", "what actor and critic read: (h, z), (x, z) or (h, x, z); x once where it is h"
    )
    feature_norm: bool = setting(True, "one RMSNorm on x before the first policy layer")
    layers: int = setting(3, "layers of actor and critic")
    horizon: int = setting(15, "imagined steps H")
    starts: int = setting(0, "imagine from this many last steps of each row; 0: from all")
    discount_horizon: float = setting(333.0, "discount is 1 - 1/this")
    lam: float = setting(0.95, "lambda of the lambda-return")
    entropy: float = setting(3e-4, "scale of the policy's entropy bonus")
    unimix: float = setting(0.01, "uniform share mixed into categorical policies")
    actor_grad: Literal["reinforce", "dynamics"] = setting(
        "reinforce", "score-function gradient, or back-propagation through the world model"
    )
    slow_rate: float = setting(0.02, "share of the critic copied into the slow critic an update")
    slow_reg: float = setting(1.0, "scale of the pull of the critic towards the slow critic")
    return_rate: float = setting(0.01, "rate of the return scale's moving percentiles")
    return_floor: float = setting(1.0, "smallest return scale")


@dataclass(frozen=True)
class OptimConfig:
    lr: float = setting(4e-5, "learning rate")
    actor_lr: float = setting(0.0, "learning rate of the actor; 0: the same")
    critic_lr: float = setting(0.0, "learning rate of the critic; 0: the same")
    warmup: int = setting(1000, "updates over which the learning rate rises from 0")
    agc: float = setting(0.3, "adaptive clipping: largest gradient norm over parameter norm")
    beta1: float = setting(0.9, "momentum")
    beta2: float = setting(0.999, "averaging of squared gradients")
    eps: float = setting(1e-20, "added to the root of squared gradients")
    nonfinite: Literal["stop", "skip"] = setting(
        "stop", "at a loss or gradient that is not finite end the run, or leave that update out"
    )


@dataclass(frozen=True)
class LogConfig:
    every: float = setting(10.0, "seconds between rows of metrics, more in a run of days")
    media_every: float = setting(
        600.0, "seconds between prediction and policy videos, more in a run of days; 0: never"
    )


@dataclass(frozen=True)
class EvalConfig:
    every: int = setting(0, "agent steps between evaluations in a process beside; 0: never")
    episodes: int = setting(20, "episodes of an evaluation, greedy and sampled actions each")


@dataclass(frozen=True)
class CheckpointConfig:
    every: float = setting(300.0, "seconds between checkpoints")


@dataclass(frozen=True)
class Config:
    """A whole run. Top-level fields are the short flags: `--task`, `--core`, ..."""

    task: str = setting("memory_maze_9x9", "environment: suite_name, for example gym_CartPole-v1")
    core: str = setting("s3m", "sequence core: elmur, gru, rate, rlt, s3m, transformer")
    size: str = setting("auto", "1m 12m 25m 50m 100m 200m 400m debug; auto: by device")
    preset: str = setting("", "named settings on top, comma separated: r2i, bsuite_small, ...")
    seed: int = setting(0, "every random number of the run derives from it")
    logdir: str = setting("", "folder of the run; empty: logs/<task>-<core>-s<seed>")
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "auto: cuda when there is one")
    precision: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", "auto: one update is timed each way at start and the faster kept"
    )
    compile: Literal["no", "yes"] = setting(
        "no", "compile the update, but for loops over T; needs a C++ compiler and minutes at start"
    )
    threads: int = setting(0, "CPU threads of the learner; 0: automatic")
    products: Literal["auto", "shipped"] = setting(
        "auto", "auto: MKL's fast path also where the processor is not Intel's; shipped: as it is"
    )
    env: EnvConfig = setting(EnvConfig(), "environments")
    replay: ReplayConfig = setting(ReplayConfig(), "replay buffer")
    batch: BatchConfig = setting(BatchConfig(), "batch shape")
    loop: LoopConfig = setting(LoopConfig(), "acting and learning")
    stop: StopConfig = setting(StopConfig(), "limits, of which the first ends the run")
    model: ModelConfig = setting(ModelConfig(), "world model")
    gru: GRUConfig = setting(GRUConfig(), "core gru (block GRU of DreamerV3)")
    s3m: S3MConfig = setting(S3MConfig(), "core s3m (state-space model of R2I)")
    transformer: TransformerConfig = setting(
        TransformerConfig(), "core transformer (a window and no memory, the control)"
    )
    rate: RateConfig = setting(RateConfig(), "core rate (memory tokens rewritten once a segment)")
    rlt: RLTConfig = setting(RLTConfig(), "core rlt (Recurrent Looped Transformer)")
    elmur: ElmurConfig = setting(
        ElmurConfig(), "core elmur (a window, and slots of memory in every layer)"
    )
    loss: LossConfig = setting(LossConfig(), "loss scales")
    behaviour: BehaviourConfig = setting(BehaviourConfig(), "actor and critic")
    optim: OptimConfig = setting(OptimConfig(), "optimiser (LaProp with adaptive clipping)")
    log: LogConfig = setting(LogConfig(), "metrics and media")
    eval: EvalConfig = setting(EvalConfig(), "evaluation on seeds that training never uses")
    checkpoint: CheckpointConfig = setting(CheckpointConfig(), "checkpoints")
