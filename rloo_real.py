"""GRPO, RLOO and REAL: reinforcement learning of a language model with verifiable rewards.

The idea that holds this file together. A method is a scalar loss L on one matrix: logp [B, T], the
log-probs of the sampled tokens. The network enters only through it, so by the chain rule

    grad J  =  sum_{i,t} W[i,t] * grad log pi(o_{i,t}),       W = -dL/dlogp       [B, T]

and a method *is* its W. On policy, for completion i with |o| tokens:

    --loss_type   what it makes of the rewards                              W of each token
    grpo          A = (R - mean) / std of the group, a ratio per token      A / (B |o|)
    rloo          A = R - mean of the others, a ratio per completion        A / B
    real          labels, right or wrong; n of the group have the same  +-1 / ((1 + n) tau N |o|)

One loop serves them all: sample, score, take W, then run the network again a few rows at a time and
back-propagate -(W * logp).sum(). Nothing is approximated: every micro-batch size gives the gradient
of the whole batch, also for REAL, whose loss ties the completions of a prompt together.

    python rloo_real.py                      # no GPU, no network: a tiny Qwen3 learns to add
    python rloo_real.py --loss_type real     # the same with REAL; --help lists every flag
    python rloo_real.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dataset openai/gsm8k
                                             # grade-school maths on one CUDA GPU

Shapes: N prompts, G completions of each (the RLOO paper's K), B = N G completions, P prompt tokens,
T completion tokens, V vocabulary. Log-probs are natural logs, float32, at sampling temperature.

Papers: Back to Basics (RLOO, arXiv 2402.14740), Rewards as Labels (REAL, 2602.05630), DeepSeekMath
(GRPO, 2402.03300). F1 to F20 number the formulas; ms-swift's documents write most of them out.
"""
import contextlib, copy, dataclasses, errno, hashlib, inspect, itertools, json, math, os
import random, re, runpy, shlex, shutil, signal, sys, time, traceback, warnings
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Callable

import datasets
import numpy as np
import torch
import torch.nn.functional as F
from datasets import load_dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import (AutoModelForCausalLM, AutoTokenizer, DynamicCache, GenerationConfig,
                          HfArgumentParser, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM,
                          get_scheduler, set_seed)
from transformers.cache_utils import DynamicLayer
from transformers.utils.logging import disable_progress_bar

# ---- Config -------------------------------------------------------------------------------------
# One flag per line. A `step` is an optimizer step everywhere. None: see the two presets.

EMBEDDED_PRESET = dict(
    system="", max_completion_length=5, updates_per_rollout=2, micro_batch_size=128,
    learning_rate=2e-4, warmup_ratio=0.0, lr_scheduler_type="linear", max_steps=500,
    logging_steps=20, eval_steps=100, eval_samples=512, save_steps=0)
CHECKPOINT_PRESET = dict(
    dataset="openai/gsm8k", system="Reason step by step and put the final answer in \\boxed{}.",
    max_completion_length=512, updates_per_rollout=1, micro_batch_size=2, learning_rate=1e-6,
    warmup_ratio=0.05, lr_scheduler_type="constant", max_steps=-1, logging_steps=1, eval_steps=50,
    eval_samples=128, save_steps=100)

def flag(default, text, allowed=None):  # such as "2 or more", "0 to 1" or "these, words"
    return field(default=default, metadata={"help": text, "metavar": allowed})

@dataclass
class Config:
    # method
    loss_type: str = flag("rloo", "grpo, rloo or real")
    advantage_estimator: str | None = flag(None, "by the method", "grpo, rloo, reinforce_plus_plus")
    kl_in_reward: bool | None = flag(None, "or in the loss; default: false for grpo and real")
    scale_rewards: str | None = flag(None, "default: by the estimator", "group, batch, none, gdpo")
    beta: float = flag(0.001, "weight of KL to the initial policy; 0: no reference", "0 or more")
    epsilon: float = flag(0.2, "ratios are clipped at 1 - epsilon (grpo, rloo)", "0 or more")
    epsilon_high: float | None = flag(None, "and at 1 + this; default: epsilon", "0 or more")
    real_tau: float = flag(0.5, "REAL's temperature; weights stay below 1 / tau", "0.01 or more")
    reward_threshold: float = flag(0.5, "a reward of at least this is a right answer")
    # model and data
    model_name_or_path: str | None = flag(None, "hub id or folder; default: the embedded model")
    trust_remote_code: bool = flag(False, "run the Python code that comes with a checkpoint")
    dataset: str | None = flag(None, "hub id or .jsonl .json .csv .parquet file")
    dataset_config: str | None = flag(None, "of a hub id; default: main for openai/gsm8k")
    dataset_split: str = flag("train", "may be a slice: train[:1000]")
    eval_dataset: str | None = flag(None, "hub id (its test split) or file; default: held out")
    system: str | None = flag(None, "system turn of the chat template; '' for none")
    enable_thinking: bool | None = flag(None, "passed to the chat template where it is set")
    max_prompt_length: int = flag(512, "tokens; longer ones are left out, never cut", "1 or more")
    # rewards
    reward_funcs: list[str] | None = flag(None, "accuracy (default), format, file.py:function")
    reward_weights: list[float] | None = flag(None, "one for each function; default: 1")
    mask_truncated_completions: bool = flag(False, "completions without an end count for nothing")
    # sampling
    num_generations: int = flag(8, "G, completions of each prompt", "2 or more")
    temperature: float = flag(1.0, "of sampling and of every log-prob", "0.01 or more")
    max_completion_length: int | None = flag(None, "tokens", "1 or more")
    generation_batch_size: int | None = flag(None, "sampled at a time; default: all", "1 or more")
    # batch arithmetic
    prompts_per_rollout: int = flag(16, "N, prompts sampled together", "1 or more")
    updates_per_rollout: int | None = flag(None, "steps in a pass, by whole groups", "1 or more")
    num_iterations: int = flag(1, "passes over each rollout", "1 or more")
    micro_batch_size: int | None = flag(None, "in a forward pass; for memory only", "1 or more")
    # optimization
    gradient_checkpointing: bool = flag(False, "compute activations twice instead of keeping them")
    learning_rate: float | None = flag(None, "AdamW's, at its peak", "0 or more")
    warmup_ratio: float | None = flag(None, "share of steps in which the rate rises", "0 to 1")
    lr_scheduler_type: str | None = flag(None, "after that; linear: to 0", "constant, linear")
    max_grad_norm: float = flag(1.0, "longer gradients are scaled to it; 0: never", "0 or more")
    max_steps: int | None = flag(None, "-1: by num_train_epochs; 0: only evaluate", "-1 or more")
    num_train_epochs: int = flag(1, "passes over the prompts where max_steps is -1", "1 or more")
    # run
    device: str | None = flag(None, "cuda, mps or cpu; default: the first available")
    bf16: bool | None = flag(None, "bfloat16 autocast; weights stay float32; on where a GPU has it")
    seed: int = flag(0, "random seed", "0 or more")
    output_dir: str | None = flag(None, "folder of this run; default: a new one under runs/")
    logging_steps: int | None = flag(None, "steps between rows of metrics.jsonl", "1 or more")
    eval_steps: int | None = flag(None, "steps between evaluations; 0: none at all", "0 or more")
    eval_samples: int | None = flag(None, "evaluated on; held out: a tenth at most", "1 or more")
    log_completions: int = flag(8, "of each rollout, written to completions.jsonl", "0 or more")
    log_weights_steps: list[int] | None = flag(None, "steps that write their W to weights-STEP.npz")
    save_steps: int | None = flag(None, "steps between checkpoints; 0: at the end", "0 or more")
    save_total_limit: int | None = flag(None, "newest to keep; default: all", "1 or more")
    resume_from_checkpoint: str | None = flag(None, "folder checkpoint-STEP of a run, or latest")

    def __post_init__(self):
        """Fills what was left None, then refuses what can't run: ValueError, one line."""
        preset = dict(CHECKPOINT_PRESET if self.model_name_or_path else EMBEDDED_PRESET)
        preset["updates_per_rollout"] = min(preset["updates_per_rollout"], self.prompts_per_rollout)
        device = self.device or str(torch.accelerator.current_accelerator(True) or "cpu")
        bf16 = device.startswith("cuda") and torch.cuda.is_bf16_supported(including_emulation=False)
        for name, value in dict(preset, device=device, bf16=bf16, epsilon_high=self.epsilon,
                                reward_funcs=["accuracy"]).items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        check_values(self)
        fill_method(self)
        load_rewards(self)
        check_together(self)

# ---- 1. The methods -----------------------------------------------------------------------------

SCALE_REWARDS = {"grpo": "group", "rloo": "none", "reinforce_plus_plus": "batch"}  # F6, defaults
SCALES = ["group", "batch", "none", "gdpo"]

def compute_advantages(rewards_per_func, group, *, advantage_estimator="rloo", scale_rewards=None,
                       reward_weights=None, kl=None, beta=0.0) -> Tensor:
    """Advantages [B] of a whole rollout, from rewards [B, F], one column a function, or [B].

    F1  R_i  = sum_f w_f r_if, over the functions that scored completion i (the others gave NaN)
    F2  R'_i = R_i - beta KL_i, with kl [B] from F8: KL in the reward, before any baseline
    F3  grpo                 A_i = R'_i - mean of the group, then F6 by the group
    F4  rloo                 A_i = R'_i - mean of the other K - 1 = K/(K-1) (R'_i - mean of all K)
    F5  reinforce_plus_plus  A_i = R'_i - mean of the group, then F6 by the batch
    F6  A_i / (std + 1e-4), sample std over the "group" or the "batch": of R', for F5 of A
    F7  scale_rewards "gdpo" replaces all of this: `gdpo_advantages`

    A completion that nothing scored has advantage 0 and is in no statistic. Equal R' in a group
    give exactly 0. Source: ms-swift's RLOO page, "Difference 1" and "2"; F5 to F7 from its code."""
    scale = scale_rewards or SCALE_REWARDS.get(advantage_estimator)
    require(advantage_estimator in SCALE_REWARDS and scale in SCALES and
            (advantage_estimator, scale) != ("reinforce_plus_plus", "gdpo"),
            f"advantage_estimator {advantage_estimator} does not go with scale_rewards "
            f"{scale_rewards}; see F3 to F7")
    rewards, group = torch.as_tensor(rewards_per_func), torch.as_tensor(group)
    device, dtype = group.device, torch.promote_types(rewards.dtype, torch.float32)
    rewards, group = rewards.detach().cpu().double(), group.cpu()  # few numbers, exact anywhere
    rewards = rewards.reshape(len(group), -1)  # [B, F]
    if scale == "gdpo":
        return gdpo_advantages(rewards, group, reward_weights).to(dtype).to(device)  # F7
    reward = total_reward(rewards, reward_weights)  # [B], F1
    if kl is not None:
        reward = reward - beta * torch.as_tensor(kl).detach().cpu().double()  # F2
    advantages, _, size = group_stats(reward, group)  # F3, F5
    if advantage_estimator == "rloo":
        advantages = advantages * size / (size - 1).clamp(min=1)  # F4
    if scale != "none":  # F6
        spread = advantages if advantage_estimator == "reinforce_plus_plus" else reward
        _, std, _ = group_stats(spread, group if scale == "group" else torch.zeros_like(group))
        advantages = advantages / (std + 1e-4)
    return torch.where(reward.isnan(), 0.0, advantages).to(dtype).to(device)

def total_reward(rewards, reward_weights=None) -> Tensor:
    """R [B], F1: weighted sum of the columns of rewards [B, F] that aren't NaN; NaN if all are."""
    weights = 1.0 if reward_weights is None else torch.as_tensor(reward_weights).to(rewards)
    return torch.where(rewards.isnan().all(1), torch.nan, (rewards * weights).nansum(1))

def group_stats(x, group) -> tuple[Tensor, Tensor, Tensor]:
    """x - mean, sample std (n - 1) and n, each [B], over the rows of x [B] of the row's group.

    NaN rows are no members. Where all members are equal, the first two are exactly 0: the rounding
    residue of a mean, divided by a tiny std, would become an advantage."""
    peers = torch.where(group[:, None] == group, x, torch.nan)  # [B, B]
    equal = torch.isclose(peers, x[:, None], rtol=1e-7, atol=1e-12)  # but for rounding
    gaps = torch.where(equal, 0.0, x[:, None] - peers)
    size, deviation = (~gaps.isnan()).sum(1), gaps.nanmean(1)
    variance = (gaps - deviation[:, None]).square().nansum(1) / (size - 1).clamp(min=1)
    return deviation, variance.sqrt(), size

def gdpo_advantages(rewards, group, reward_weights=None) -> Tensor:
    """A [B], F7: each column of rewards [B, F] standardised within its group, added up with the
    weights, standardised over the batch (it is centred already, since every group is).
    Source: GDPO, arXiv 2601.05242."""
    stats = [group_stats(column, group) for column in rewards.T]
    scores = torch.stack([deviation / (std + 1e-8) for deviation, std, _ in stats], 1)  # [B, F]
    total = total_reward(scores, reward_weights)
    total = torch.where(total.abs() < 1e-6, 0.0, total)  # scores are of order 1: rounding again
    _, std, _ = group_stats(total, torch.zeros_like(group))
    return torch.where(total.isnan(), 0.0, total / (std + 1e-8))

MAX_LOG_RATIO = 20.0  # exp never sees more: values and gradients stay finite

def log_ratio(logp, old_logp, mask) -> Tensor:
    """s [B, T] = log pi_theta(o_t) - log pi_old(o_t); 0 where masked, whatever stands there: no
    value and no gradient comes from a masked position, even if it holds NaN."""
    return torch.where(mask.bool(), logp - old_logp, 0.0)

def sum_tokens(x, mask):  # [B, T] -> [B], over the counted tokens of each completion
    return torch.where(mask.bool(), x, 0.0).sum(1)

def mean_tokens(x, mask):  # [B, T] -> [B], 0 for a completion without a counted token
    return sum_tokens(x, mask) / mask.sum(1).clamp(min=1)

def mean_completions(x, mask):  # [B] -> scalar, over the completions with a counted token
    return torch.where(mask.any(1), x, 0.0).sum() / mask.any(1).sum().clamp(min=1)

def sequence_kl(old_logp, ref_logp, mask) -> Tensor:
    """KL_i [B] = sum_t (log pi_old - log pi_ref), F8, nats: one sample, so it may be negative.

    A number without gradient for the reward (F2). Source: ms-swift's RLOO page, "Difference 2"."""
    return sum_tokens(old_logp - ref_logp, mask).detach()

def kl_k3(logp, ref_logp) -> Tensor:
    """k3 [B, T] = exp(d) - d - 1 with d = log pi_ref - log pi_theta, F9, nats, never negative.

    Goes into the loss, with gradient. Source: DeepSeekMath, eq. 4."""
    d = (ref_logp - logp).clamp(max=MAX_LOG_RATIO)
    return d.exp() - d - 1

def clip(ratio, epsilon, epsilon_high):
    return ratio.clamp(1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high))

def clipped_surrogate(s, advantages, epsilon, epsilon_high) -> Tensor:
    """min(rho A, clip(rho, 1 - epsilon, 1 + epsilon_high) A) with rho = exp(s), elementwise."""
    ratio = s.clamp(max=MAX_LOG_RATIO).exp()
    return torch.minimum(ratio * advantages, clip(ratio, epsilon, epsilon_high) * advantages)

def grpo_loss(logp, old_logp, advantages, mask, epsilon=0.2, epsilon_high=None) -> Tensor:
    """Scalar -J, F10: J = mean_i 1/|o_i| sum_t min(rho_t A_i, clip(rho_t) A_i), rho_t = exp(s_t).

    One ratio per token, divided by the completion's length. Source: DeepSeekMath, eq. 3 without its
    KL; with RLOO advantages it is ms-swift's RLOO."""
    s = log_ratio(logp, old_logp, mask)  # [B, T]
    surrogate = clipped_surrogate(s, advantages[:, None], epsilon, epsilon_high)
    return -mean_completions(mean_tokens(surrogate, mask), mask)

def rloo_loss(logp, old_logp, advantages, mask, epsilon=0.2, epsilon_high=None) -> Tensor:
    """Scalar -J, F11: J = mean_i min(rho_i A_i, clip(rho_i) A_i), rho_i = exp(sum_t s_t).

    One ratio per completion, not divided by its length: REINFORCE of the RLOO paper, clipped as
    in TRL."""
    s = sum_tokens(logp - old_logp, mask)  # [B]
    return -mean_completions(clipped_surrogate(s, advantages, epsilon, epsilon_high), mask)

def sequence_logit(logp, old_logp, mask) -> Tensor:
    """s_bar [B] = 1/|o| sum_t s_t, F12: how much more likely a completion has become, per token."""
    return mean_tokens(logp - old_logp, mask)

def real_loss(logp, old_logp, rewards, group, mask, tau=0.5, threshold=0.5) -> Tensor:
    """Scalar L, F13: the mean over groups of

        log(1 + sum_right exp(-s_bar/tau)) + log(1 + sum_wrong exp(s_bar/tau))

    Right: raw reward [B] >= threshold. NaN or fully masked is neither. A group with one label adds
    0 and still counts in the mean. The 1 is the paper's anchor, a logit of 0 in each logsumexp.
    Source: ms-swift's REAL page."""
    s = sequence_logit(logp, old_logp, mask) / tau  # [B]
    member = (group.unique()[:, None] == group) & mask.any(1) & ~rewards.isnan()  # [N, B]
    right, wrong = member & (rewards >= threshold), member & (rewards < threshold)
    right_loss = F.pad(torch.where(right, -s, -torch.inf), (0, 1)).logsumexp(1)  # [N], pad is 0
    wrong_loss = F.pad(torch.where(wrong, s, -torch.inf), (0, 1)).logsumexp(1)
    both = right.any(1) & wrong.any(1)
    return torch.where(both, right_loss + wrong_loss, 0.0).sum() / member.any(1).sum().clamp(min=1)

def gradient_weights(loss, logp) -> Tensor:
    """W [B, T] = -dL/dlogp, F14, of a scalar loss computed from logp, which requires grad; 0 where
    masked."""
    return -torch.autograd.grad(loss, logp)[0]

def grpo_weight(s, advantage, epsilon=0.2, epsilon_high=None) -> Tensor:
    """|W_GRPO|, F15, elementwise: |A e^s| where the clip lets the gradient through, else 0.

    Through: e^s <= 1 + epsilon_high for A > 0; e^s >= 1 - epsilon for A < 0, where nothing bounds
    it (but the clamp of s, which lets no gradient through beyond MAX_LOG_RATIO)."""
    s, advantage = torch.as_tensor(s), torch.as_tensor(advantage)
    ratio = s.clamp(max=MAX_LOG_RATIO).exp()
    beyond = advantage * (ratio - clip(ratio, epsilon, epsilon_high)) > 0
    return torch.where(beyond | (s > MAX_LOG_RATIO), 0.0, (advantage * ratio).abs())

def real_weight(s_bar, tau, c, positive) -> Tensor:
    """|W_REAL|, F16, elementwise: 1/tau 1/(1 + C e^(s_bar/tau)); a wrong answer's s_bar is negated.

    C = 1 + the sum of e^(-s_bar/tau), for wrong answers e^(s_bar/tau), over the *other* completions
    of that label: 1/tau times a softmax share among them and one fixed 0, hence below 1/tau."""
    s_bar = torch.as_tensor(s_bar) * 1.0
    s_bar = torch.where(torch.as_tensor(positive).bool(), s_bar, -s_bar)
    # 1 / (1 + C e^x) = sigmoid(-x - log C), which can't overflow
    return torch.sigmoid(-s_bar / tau - torch.as_tensor(c, dtype=s_bar.dtype).log()) / tau

def real_competition(s_bar, rewards, group, mask, tau=0.5, threshold=0.5) -> Tensor:
    """C [B] of F16, from s_bar [B] and what else `real_loss` takes; NaN where its weight is 0,
    since the completion doesn't count or its group has one label."""
    right, counts = rewards >= threshold, mask.any(1) & ~rewards.isnan()
    peers = (group[:, None] == group) & counts  # [B, B]
    same = right[:, None] == right
    others = peers & same & ~torch.eye(len(group), dtype=torch.bool, device=group.device)
    x = (torch.where(right, -s_bar, s_bar) / tau).clamp(max=MAX_LOG_RATIO)
    c = 1 + torch.where(others, x.exp(), 0.0).sum(1)
    return torch.where(counts & (peers & ~same).any(1), c, torch.nan)

@dataclass(frozen=True)
class Method:
    loss: Callable  # (logp [B, T], rollout, config) -> scalar to minimise
    estimator: str | None  # default advantage_estimator; None: takes rewards and has no clip
    ratio: Callable  # (logp, old_logp, mask) -> its log-ratio, of tokens [B, T] or completions [B]
    mean_kl: Callable  # (k3 [B, T], mask) -> scalar: KL in the loss, averaged like the loss

def clipped(loss):
    return lambda logp, r, c: loss(logp, r.old_logp, r.advantages, r.mask, c.epsilon,
                                   c.epsilon_high)

METHODS = {  # the only place that tells methods apart
    "grpo": Method(clipped(grpo_loss), estimator="grpo", ratio=log_ratio,
                   mean_kl=lambda k3, mask: mean_completions(mean_tokens(k3, mask), mask)),
    "rloo": Method(clipped(rloo_loss), estimator="rloo",
                   ratio=lambda logp, old_logp, mask: sum_tokens(logp - old_logp, mask),
                   mean_kl=lambda k3, mask: mean_completions(sum_tokens(k3, mask), mask)),
    "real": Method(lambda logp, r, c: real_loss(logp, r.old_logp, r.rewards, r.group, r.mask,
                                                c.real_tau, c.reward_threshold),
                   estimator=None, ratio=sequence_logit,
                   mean_kl=lambda k3, mask: sum_tokens(k3, mask).sum() / mask.sum().clamp(min=1)),
}

# ---- 2. Policy gradient -------------------------------------------------------------------------

@dataclass
class Rollout:
    """Prompts, completions and all that is cached about them once; nothing here has a gradient."""
    ids: Tensor  # [B, P+T] left-padded prompts, then completions
    attention_mask: Tensor  # [B, P+T] false on the prompts' padding
    mask: Tensor  # [B, T] the tokens that count: F17; none where nothing could be scored
    group: Tensor  # [B] id of the prompt
    rewards: Tensor  # [B] raw R (F1), NaN: could not be scored
    old_logp: Tensor | None = None  # [B, T] of the policy that sampled
    ref_logp: Tensor | None = None  # [B, T] of the initial policy; None when beta is 0
    advantages: Tensor | None = None  # [B]; None where the method takes rewards

    def map(self, change):
        return Rollout(**{k: v if v is None else change(v) for k, v in vars(self).items()})

    def __getitem__(self, rows):
        return self.map(lambda value: value[rows])

def rollout_rewards(rewards_per_func, config) -> Tensor:
    """R [B], F1; for a method that takes rewards as labels the column of `label_function`."""
    if config.advantage_estimator is None:
        return rewards_per_func[:, config.reward_funcs.index(label_function(config))]
    return total_reward(rewards_per_func, config.reward_weights)

def rollout_advantages(rewards_per_func, rollout, config) -> Tensor | None:
    """Advantages [B] of a whole rollout as config asks; None where the method takes rewards."""
    if config.advantage_estimator is None:
        return None
    kl = (sequence_kl(rollout.old_logp, rollout.ref_logp, rollout.mask)
          if config.kl_in_reward and rollout.ref_logp is not None else None)
    advantages = compute_advantages(
        rewards_per_func, rollout.group.cpu(), advantage_estimator=config.advantage_estimator,
        scale_rewards=config.scale_rewards, reward_weights=config.reward_weights, kl=kl,
        beta=config.beta)
    return advantages.to(rollout.rewards)

def update_loss(logp, rollout, config) -> Tensor:
    """Scalar that one update minimises: the method's loss, plus beta KL unless in the reward."""
    method = METHODS[config.loss_type]
    loss = method.loss(logp, rollout, config)
    if config.kl_in_reward or rollout.ref_logp is None:
        return loss
    return loss + config.beta * method.mean_kl(kl_k3(logp, rollout.ref_logp), rollout.mask)

def loss_and_weights(logp, rollout, config) -> tuple[Tensor, Tensor]:
    """(loss, W [B, T]) of one update, from log-probs alone: the network is not run."""
    logp = logp.detach().requires_grad_()
    loss = update_loss(logp, rollout, config)
    return loss.detach(), gradient_weights(loss, logp)

def policy_gradient(model, rollout, weights, config):
    """Adds the gradient of -sum W log pi to every .grad, in micro-batches: the pass with a graph.

    W is a constant by now, so the parts add up to the gradient of `update_loss` exactly, however
    they are cut. Rows without weight add nothing and are left out."""
    model.train(config.gradient_checkpointing)  # in eval mode `transformers` would skip it
    rows = weights.any(1).nonzero().flatten()
    for rows, part, cache in micro_batches(model, rollout, rows, config):
        logp = rollout_logps(model, part, config, cache=cache)  # [b, t], t of the longest
        torch.where(part.mask, -weights[rows, :logp.shape[1]] * logp, 0.0).sum().backward()
    model.eval()

def optimizer_step(model, optimizer, rollout, loss, weights, config) -> tuple[float, str | None]:
    """(gradient norm before clipping, None or the counter that says why the step was skipped)."""
    if not (loss + weights.sum()).isfinite():
        return math.nan, "skipped_non_finite"
    if not weights.any():
        return 0.0, "skipped_no_signal"  # AdamW would still move, by its momentum
    policy_gradient(model, rollout, weights, config)
    norm = nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm or math.inf)
    if norm.isfinite():
        optimizer.step()
    optimizer.zero_grad()
    return norm.item(), None if norm.isfinite() else "skipped_non_finite"

# ---- 3. Log-probs and sampling ------------------------------------------------------------------

MAX_LOGITS = 2**25  # at a time: 128 MiB of float32
CACHE = ("cache" if "cache" in inspect.signature(Qwen3ForCausalLM.forward).parameters
         else "past_key_values")  # what `transformers` before 5.24 calls it

def completion_mask(completion_ids, eos_token_ids) -> Tensor:
    """Bool [B, T], F17: true up to and including the first end token, of one id or several.

    By position, never by comparing with the pad id, which often is an end token itself."""
    ends = torch.isin(completion_ids, torch.as_tensor(eos_token_ids).to(completion_ids))
    return ends.cumsum(1) - ends.long() == 0  # no end token before this one

def has_body(model):  # one that gives hidden states, under a head that gives logits
    return getattr(model, "base_model", model) is not model

def token_positions(attention_mask):  # as `generate` counts them: from the first token of a prompt
    return (attention_mask.long().cumsum(1) - 1).clamp(min=0)

def run_body(model, ids, attention_mask, cache=None):
    """What the body makes of ids [B, n], the last n of the tokens that attention_mask [B, m] marks;
    the m - n before them are in the cache."""
    return model.base_model(input_ids=ids, attention_mask=attention_mask, **{CACHE: cache},
                            position_ids=token_positions(attention_mask)[:, -ids.shape[1]:],
                            use_cache=cache is not None)

def run_head(model, outputs, start, end):
    """Logits [B, end - start, V] of these positions, scaled and capped as the model does it: its
    own forward runs, with a body that returns what it has computed already."""
    part = type(outputs)({**outputs,
                          "last_hidden_state": outputs.last_hidden_state[:, start:end]})
    body, ids = model.base_model, part.last_hidden_state.new_zeros(1, 1, dtype=torch.long)
    body.forward = lambda *_, **__: part
    try:
        return model(input_ids=ids).logits
    finally:
        del body.forward

def normalise(logits, targets, temperature, return_entropy):
    """(log pi [B, n] of targets by logits [B, n, V]; entropy [B, n] with return_entropy)."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits if temperature == 1 else logits / temperature
    log_norm = logits.logsumexp(2)
    logp = logits.gather(2, targets[..., None]).squeeze(2) - log_norm
    if not return_entropy:
        return (logp,)
    return logp, log_norm - (logits.softmax(2) * logits).sum(2)

def head_logps(model, outputs, start, targets, *options):
    """`normalise` of the logits at the positions from start on."""
    return normalise(run_head(model, outputs, start, start + targets.shape[1]), targets, *options)

def token_logps(model, ids, attention_mask, num_completion_tokens, temperature=1.0,
                return_entropy=False, cache=None):
    """log pi [B, T] of the last T = num_completion_tokens tokens of ids [B, P+T], F18, nats.

    Of softmax(logits / temperature), in float32; with return_entropy also the policy's entropy
    [B, T]. Each token is scored by the position before it; no other logits are computed, and never
    more than MAX_LOGITS are kept. cache: of all prompt tokens but the last (`micro_batches`)."""
    T = num_completion_tokens
    if has_body(model):
        inputs = ids[:, :-1] if cache is None else ids[:, -T - 1:-1]
        outputs = run_body(model, inputs, attention_mask[:, :-1], cache)
        first = outputs.last_hidden_state.shape[1] - T
        size = max(1, MAX_LOGITS // (len(ids) * model.config.get_text_config().vocab_size))
        run = head_logps
        if size < T and torch.is_grad_enabled():  # backward computes the logits again
            run = partial(checkpoint, head_logps, use_reentrant=False, preserve_rng_state=False)
        parts = [run(model, outputs, first + i, targets, temperature, return_entropy)
                 for i, targets in zip(range(0, T, size), ids[:, -T:].split(size, 1))]
        values = tuple(torch.cat(part, 1) for part in zip(*parts))
    else:  # all logits at once
        logits = model(input_ids=ids, attention_mask=attention_mask, use_cache=False,
                       position_ids=token_positions(attention_mask), logits_to_keep=T + 1).logits
        values = normalise(logits[:, :-1], ids[:, -T:], temperature, return_entropy)
    return values if return_entropy else values[0]

def read_prompts(model, ids, attention_mask):
    """The keys and values of ids [n, P]; None where the model's are not a plain cache, or where
    gradient checkpointing excludes one."""
    cache = DynamicCache(config=model.config)
    if (not ids.numel() or model.training or not has_body(model) or
            any(type(layer) is not DynamicLayer for layer in cache.layers)):
        return None
    run_body(model, ids, attention_mask, cache)
    return cache

def expand(cache, rows):
    """A new cache with these rows of each layer; gradients flow through."""
    cache = copy.copy(cache)
    cache.layers = [copy.copy(layer) for layer in cache.layers]
    cache.batch_select_indices(rows)
    return cache

def micro_batches(model, rollout, rows, config):
    """Yields (rows, their part of the rollout without padding, cache): at most micro_batch_size
    completions, and the keys and values of their prompts, each read once for its whole group.

    Those are cut off the graph. When the micro-batches that use them have been back-propagated,
    what they gathered goes on through the prompts: the exact gradient, in two stages."""
    size, embedding = config.micro_batch_size, model.get_input_embeddings()
    # its gradient has the rows of the tokens read, not V rows every time; MPS has no sparse tensors
    embedding.sparse = model.device.type != "mps"
    for groups in rollout.group[rows].unique().split(max(1, size // config.num_generations)):
        block = rows[torch.isin(rollout.group[rows], groups)]
        block = block[rollout.mask[block].sum(1).argsort(stable=True)]
        prompt = torch.searchsorted(groups, rollout.group[block])  # [b], its place in groups
        first = torch.stack([block[prompt == i][0] for i in range(len(groups))])
        P = rollout.ids.shape[1] - rollout.mask.shape[1]
        used = rollout.attention_mask[first, :P].sum(1).max()  # the longest prompt
        prefix, states = slice(P - used, P - 1), []  # completions are scored from the last one on
        with autocast(config):
            cache = read_prompts(model, rollout.ids[first, prefix],
                                 rollout.attention_mask[first, prefix])
        for layer in cache.layers if cache else []:
            states += [layer.keys, layer.values]
            layer.keys, layer.values = (x.detach().requires_grad_(x.requires_grad)
                                        for x in states[-2:])
        for i in torch.arange(len(block), device=rows.device).split(size):
            part = rollout[block[i]]
            T = max(1, int(part.mask.sum(1).max()))
            part = dataclasses.replace(
                part, ids=part.ids[:, P - used:P + T], mask=part.mask[:, :T],
                attention_mask=part.attention_mask[:, P - used:P + T])
            yield block[i], part, cache and expand(cache, prompt[i])
        if states and states[0].requires_grad:
            torch.autograd.backward(states, [
                x.grad for layer in cache.layers for x in (layer.keys, layer.values)])
    embedding.sparse = False
    if embedding.weight.grad is not None:  # sparse still, where no head shares the weights
        embedding.weight.grad = embedding.weight.grad.to_dense()

def autocast(config):
    return torch.autocast(torch.device(config.device).type, torch.bfloat16, enabled=config.bf16)

def rollout_logps(model, rollout, config, return_entropy=False, cache=None):
    """`token_logps` of a rollout, in the precision of the run."""
    with autocast(config):
        return token_logps(model, rollout.ids, rollout.attention_mask, rollout.mask.shape[1],
                           config.temperature, return_entropy, cache)

@torch.no_grad()
def score(model, rollout, config, return_entropy=False):
    """`rollout_logps` without a graph, a micro-batch at a time; 0 behind the longest completion of
    each. Policy and reference see the same batches, so before the first update they agree to the
    last bit."""
    dtype = torch.promote_types(model.dtype, torch.float32)
    values = torch.zeros(1 + return_entropy, *rollout.mask.shape, dtype=dtype,
                         device=rollout.mask.device)
    every = torch.arange(len(rollout.ids), device=rollout.ids.device)
    for rows, part, cache in micro_batches(model, rollout, every, config):
        T = part.mask.shape[1]
        parts = rollout_logps(model, part, config, return_entropy, cache)
        values[:, rows, :T] = torch.stack(parts) if return_entropy else parts
    return tuple(values) if return_entropy else values[0]

def read_once(model, ids, attention_mask) -> dict:
    """For `generate`: the cache of prompts [B, P] of which equal neighbours are read once."""
    both = torch.cat([ids, attention_mask], 1)  # the pad token may stand in a prompt
    rows = torch.unique_consecutive(both, dim=0, return_inverse=True)[1]
    first = rows.diff(prepend=rows.new_tensor([-1])).nonzero()[:, 0]
    cache = len(first) < len(ids) and read_prompts(model, ids[first, :-1],
                                                   attention_mask[first, :-1])
    return {CACHE: expand(cache, rows)} if cache else {}

def end_token_ids(model, tokenizer) -> list[int]:
    """Every id that ends a completion: the checkpoint's generation config may name several."""
    ids = model.generation_config.eos_token_id
    ids = {*(ids if isinstance(ids, list) else [ids]), tokenizer.eos_token_id} - {None}
    return sorted(ids)

@torch.no_grad()
def sample(model, tokenizer, prompts, config, greedy=False) -> tuple[Tensor, ...]:
    """(ids [B, P+T], attention_mask [B, P+T], mask [B, T], truncated [B]): one completion of each
    of B prompts; truncated: cut at the limit, without an end token.

    Drawn from softmax(logits / temperature) without any filter, or greedily. `generate` fills what
    its config leaves open from the checkpoint's (top_p, repetition_penalty, ...), then from
    defaults (top_k 50). So the checkpoint's is set aside meanwhile; top_k 0 is no filter."""
    ends, pad = end_token_ids(model, tokenizer), tokenizer.pad_token_id
    drawing = {} if greedy else dict(do_sample=True, temperature=config.temperature, top_k=0)
    ours = GenerationConfig(max_new_tokens=config.max_completion_length, eos_token_id=ends or None,
                            pad_token_id=pad, **drawing)
    batch = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    ids, attention_mask = (batch[k].to(model.device) for k in ("input_ids", "attention_mask"))
    size = config.generation_batch_size or len(ids)
    checkpoints, model.generation_config = model.generation_config, ours
    try:
        with autocast(config):
            parts = [model.generate(i, attention_mask=m, generation_config=ours,
                                    **read_once(model, i, m))[:, ids.shape[1]:]
                     for i, m in zip(ids.split(size), attention_mask.split(size))]
    finally:
        model.generation_config = checkpoints
    T = max(part.shape[1] for part in parts)
    completions = torch.cat([F.pad(part, (0, T - part.shape[1]), value=pad) for part in parts])
    truncated = ~torch.isin(completions, completions.new_tensor(ends)).any(1)
    return (torch.cat([ids, completions], 1), F.pad(attention_mask, (0, T), value=1),
            completion_mask(completions, ends), truncated)

# ---- 4. Prompts and rewards ---------------------------------------------------------------------

FILE_TYPES = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}

# Explicit answers. Every repeat is bounded, so that no text takes long to search.
_braces = r"[^{}]{0,200}"
for _ in range(3):  # braces within braces
    _braces = rf"[^{{}}]{{0,200}}(?:{{{_braces}}}[^{{}}]{{0,200}}){{0,9}}"
# a number with all that belongs to it, to the end of the sentence or line, or to a reason
_run = r"\d(?:(?![.!?;](?:\s|$)|\s(?:because|since|as)\b)[^\n]){0,300}"
MARKERS = [re.compile(pattern, re.IGNORECASE) for pattern in (
    rf"\\(?:boxed|fbox) ?{{({_braces})}}",
    r"<answer>([^<]{0,500})</answer>",
    rf"####\s{{0,9}}((?:\\[a-z]+|[^\w\n]){{0,20}}{_run})",  # no word before it: not a heading
    rf"answer is[:\s]{{0,9}}((?:(?![.!?;]\s)[^\d\n]){{0,40}}{_run})")]
_digits = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?"
NUMBER = re.compile(  # with its sign, but a minus behind a number or a bracket is none: 5 - 3
    r"(?:(?<![\d)}\]])(?<![\d)}\]] )[-+\u2212\u2013](?:\\?\$)?)?"
    rf"(?:\\[dt]?frac ?{{-?{_digits}}} ?{{{_digits}}}|{_digits}(?:/{_digits})?)", re.IGNORECASE)

def marked_answer(text) -> str | None:
    """What the last explicit marker of text holds, as written, or None."""
    found = [match for marker in MARKERS for match in marker.finditer(text)]
    return max(found, key=lambda match: match.start())[1].strip(" :\t\n") if found else None

def gold_answer(text) -> str:
    """The answer that a row of data states: behind its last marker, else the whole text."""
    return marked_answer(text) or text.rpartition("####")[2].strip()

def extract_answer(text) -> str | None:
    """A completion's final answer as written, F19: the marked one, else the last number or None."""
    marked = marked_answer(text)
    numbers = NUMBER.findall(text) if marked is None else [marked]
    return numbers[-1] if numbers else None

def read_number(text) -> Fraction | None:
    """The one number that text states, exactly; None for none, several, an expression, 1e5, or
    over 100 digits. Units, currency, percent signs and all before the last = are ignored."""
    text = re.sub("[\u2212\u2013]", "-", text).replace("{,}", ",")
    for pattern, plain in ((r"\\[,!]|\\?[$\u20ac\u00a3](?=[-+.\d\\])", ""),
                           (r"[*$%]|\\[][()$% ;]|\^? ?{?\\circ}?", " "),
                           (r"\\(?:text|mathrm|mbox)(?:bf)? ?{([^{}]*)}", r" \1 ")):
        text = re.sub(pattern, plain, text)
    equation, _, text = text.rpartition("=")
    numbers = list(NUMBER.finditer(text))
    if len(numbers) != 1 or sum(map(str.isdigit, text)) > 100:
        return None
    before, number, after = text[:numbers[0].start()], numbers[0][0], text[numbers[0].end():]
    if (re.search(r",(?!\d{3})|;|\b(?:and|or)\b", equation) or "e" in number.lower() or
            re.search(r"[\\^\u221a<>\u2260\u2264\u2265]|[\w/]$|[-+]\s*$", before) or
            re.search(r"[\\^]|^\w|^/(?![a-z]{2})", after)):
        return None  # part of a list or of an expression: x = 1 or x = 2, 1e5, 2x, 3\pi, 5 -
    top, _, bottom = re.sub(r"[{},]|\\[dt]?frac ?", "", number.replace("}", "/", 1)).partition("/")
    try:
        return Fraction(top) / Fraction(bottom or 1)
    except ZeroDivisionError:
        return None

def same_answer(prediction, gold) -> bool:
    """Whether both state the same number exactly, F20; False where either can't be read."""
    values = [read_number(gold_answer(text)) for text in (prediction or "", gold or "")]
    return None not in values and values[0] == values[1]

def accuracy(completions, answer, **columns) -> list[float]:
    """1.0 for each completion whose final answer is the number of the gold answer, else 0.0."""
    return [float(same_answer(extract_answer(c), str(a))) for c, a in zip(completions, answer)]

_inside = r"(?:(?!</?(?:think|answer)>).)*"
FORMAT = re.compile(rf"(?:\s*<think>)?{_inside}</think>\s*<answer>{_inside}</answer>"
                    r"(?:\s|<\|[^<>|]*\|>|</s>|<eos>|<pad>)*", re.DOTALL)

def format_reward(completions, **columns) -> list[float]:
    """1.0 for <think>...</think><answer>...</answer> and nothing else, else 0.0. The first tag may
    be missing, since a template can end with it."""
    return [float(bool(FORMAT.fullmatch(completion))) for completion in completions]

REWARD_FUNCS = {"accuracy": accuracy, "format": format_reward}  # and those `load_rewards` finds

def label_function(config) -> str:
    """The function that tells right from wrong: accuracy, or else the first."""
    return "accuracy" if "accuracy" in config.reward_funcs else config.reward_funcs[0]

def short_names(reward_funcs) -> list[str]:
    """The functions as they are logged: without the path of their file."""
    return [name.rpartition(":")[2] for name in reward_funcs]

def own_functions(reward_funcs) -> list[str]:
    """Those that are code of the user: file.py:function."""
    return [name for name in reward_funcs if ":" in name]

def score_completions(reward_funcs, completions, columns) -> Tensor:
    """Rewards [B, F] of B completions by the functions of these names; NaN for None or NaN.

    Each is called with the completions and the problems' columns by keyword. Raises ValueError,
    with the function's name, for anything but a list of B numbers or None."""
    table = []
    for name in reward_funcs:
        try:
            values = REWARD_FUNCS[name](completions=completions, **columns)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            raise ValueError(
                f"reward function {name} raised {type(error).__name__}: {error} ({place.filename}, "
                f"line {place.lineno}); it gets completions, {', '.join(columns)}") from error
        size = f" of {len(values)}" if hasattr(values, "__len__") else ""
        require(isinstance(values, (list, tuple)) and len(values) == len(completions),
                f"reward function {name} returned a {type(values).__name__}{size} for "
                f"{len(completions)} completions; return a list of numbers or None")
        with explain(f"reward function {name} returned no number", "return numbers or None"):
            require(not any(isinstance(value, str) for value in values), "text")
            table.append([math.nan if value is None else float(value) for value in values])
    return torch.tensor(table, dtype=torch.float64).T

def load_rows(flag, name, config_name=None, split="train") -> list[dict]:
    """Rows of a local file or a hub data set, or ValueError; for the embedded model every sum of
    two numbers below 100."""
    if name is None:
        return [{"prompt": f"{a}+{b}=", "answer": str(a + b)}
                for a in range(100) for b in range(100)]
    path, kind = Path(name), FILE_TYPES.get(Path(name).suffix)
    with explain(f"{flag} {name} can't be read",
                 f"set --{flag} to a hub id or a file with the ending {' '.join(FILE_TYPES)}, and "
                 "name --dataset_config and --dataset_split if need be"):
        if not kind:
            default = "main" if name == "openai/gsm8k" else None
            return [*load_dataset(name, config_name or default, split=split)]
        require(path.is_file(), "there is no such file")
        require(path.stat().st_size, "the file is empty")
        files = {re.match(r"\w*", split)[0]: name}  # a file is whichever split is asked for
        return [*load_dataset(kind, data_files=files, split=split)]

def encode_prompt(tokenizer, prompt, config) -> list[int]:
    """Token ids of a prompt: system and user turn of the chat template, or as it is without one."""
    if not tokenizer.chat_template:
        return tokenizer(prompt)["input_ids"]
    turns = [{"role": "system", "content": config.system}, {"role": "user", "content": prompt}]
    thinking = {} if config.enable_thinking is None else {"enable_thinking": config.enable_thinking}
    with explain(f"system is {config.system!r}, but the chat template fails", "set --system ''"):
        return tokenizer.apply_chat_template(  # some refuse a system turn
            turns if config.system else turns[1:], **thinking, return_dict=True,
            add_generation_prompt=True)["input_ids"]

def usable_problems(tokenizer, config, flag, *names) -> list[dict]:
    """The usable rows of `load_rows`, in an order that no seed changes, each with its own columns,
    prompt, answer and prompt_ids. Prints what is left out: prompts that are too long and, where
    `accuracy` is asked, answers that it can't read. ValueError where a column or every row goes."""
    rows, graded = load_rows(flag, *names), "accuracy" in config.reward_funcs
    has = rows[0] if rows else {}
    prompt_column = next((n for n in ("prompt", "question", "problem") if n in has), None)
    answer_column = next((n for n in ("answer", "solution") if n in has), None)
    require(prompt_column and (answer_column or not graded),
            f"{flag} {names[0]} needs a column prompt, question or problem, and for accuracy one "
            f"answer or solution, but has {', '.join(has)}; rename one")
    problems, unreadable, too_long = [], [], []
    for row in rows:
        prompt, answer = row[prompt_column], row.get(answer_column)
        gold = gold_answer(str(answer))
        if not (isinstance(prompt, str) and prompt.strip()) or graded and read_number(gold) is None:
            unreadable.append(f"{prompt} -> {gold}"[-80:])
            continue
        ids = encode_prompt(tokenizer, prompt, config)
        (problems if len(ids) <= config.max_prompt_length else too_long).append(
            {**row, "prompt": prompt, "answer": answer, "prompt_ids": ids})
    left_out = " and ".join(f"{len(part)} problems {why}" for part, why in (
        (unreadable, f"without a text to ask and one number for an answer, like {unreadable[:1]}"),
        (too_long, f"longer than --max_prompt_length {config.max_prompt_length} tokens")) if part)
    if left_out:
        say(f"{flag}: left out {left_out}")
    require(problems, f"{flag} {names[0]} has {len(rows)} rows and none can be used: {left_out}; "
                      f"set --{flag} to another")
    order = torch.randperm(len(problems), generator=torch.Generator().manual_seed(0))
    return [problems[i] for i in order]

def load_problems(config, tokenizer) -> tuple[list[dict], list[dict]]:
    """(problems to train on, those to evaluate on: of eval_dataset, or held out), none in both."""
    c, load = config, partial(usable_problems, tokenizer, config)
    require(c.enable_thinking is None or "enable_thinking" in str(tokenizer.chat_template),
            f"enable_thinking is {c.enable_thinking}, but the model's chat template has no such "
            "switch; leave --enable_thinking out")
    require(tokenizer.chat_template or c.system in ("", CHECKPOINT_PRESET["system"]),
            f"system is {c.system!r}, but the model has no chat template; leave --system out and "
            "write it into the prompts")
    problems = load("dataset", c.dataset, c.dataset_config, c.dataset_split)
    if not c.eval_steps:
        return problems, []
    if c.eval_dataset:
        same = c.dataset_config if c.eval_dataset == c.dataset else None
        held_out = load("eval_dataset", c.eval_dataset, same, "test")[:c.eval_samples]
    else:
        size = min(c.eval_samples, len(problems) // 10)
        held_out, problems = problems[:size], problems[size:]
    prompts = {p["prompt"] for p in held_out}
    kept = [p for p in problems if p["prompt"] not in prompts]
    if len(kept) < len(problems):
        say(f"left out {len(problems) - len(kept)} problems that are evaluated on too")
    require(kept and (held_out or c.max_steps != 0),
            f"dataset {c.dataset} has {len(problems)} problems, too few to train and evaluate on "
            "different ones; set --dataset to another, or --eval_steps 0")
    return kept, held_out

def decode(tokenizer, ids, mask, truncated) -> list[str]:
    """The text of each completion, without its end token; ids [B, P+T], the others as `sample`'s.

    Tokens that the tokenizer calls special stay: some write <think> with one."""
    lengths = mask.sum(1) - (~truncated).long()
    return tokenizer.batch_decode(
        [row[:n].tolist() for row, n in zip(ids[:, -mask.shape[1]:], lengths)])

def columns(problems) -> dict[str, list]:
    """What a reward function gets by keyword: the problems' columns."""
    names = problems[0].keys() - {"prompt_ids", "completions"}
    return {name: [p[name] for p in problems] for name in names}

# ---- 5. Bookkeeping -----------------------------------------------------------------------------

def printable(text) -> str:
    """Without control characters, which data, models and paths may hold: they are written out."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)

def first_line(error) -> str:
    return printable(str(error).strip().partition("\n")[0])

def say(text):
    """Prints a line of the run; does not mind when its reader is gone, as `tee` is after Ctrl-C."""
    try:
        print(printable(text), flush=True)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")

def require(condition, message):
    """ValueError unless the condition holds; the message: what is wrong, its value, what to set."""
    if not condition:
        raise ValueError(message)

@contextlib.contextmanager
def explain(what, remedy):
    """Makes a ValueError of whatever libraries and users raise inside: what, why, the remedy."""
    try:
        yield
    except Exception as error:
        error = error.__cause__ or error
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise ValueError(f"{what} ({reason}); {remedy}") from error

def check_values(c):
    """ValueError for a flag that is not what its line in `Config` allows; NaN never is."""
    for f in dataclasses.fields(c):
        value, allowed = getattr(c, f.name), f.metadata["metavar"]
        if value is None or allowed is None:
            continue
        words = allowed.replace(",", "").split()
        fits = (value in words if isinstance(value, str) else
                float(words[0]) <= value <= (2**62 if words[-1] == "more" else float(words[-1])))
        require(fits, f"{f.name} is {value}; set --{f.name} to {allowed}")

def fill_method(c):
    """Fills the choices that follow from loss_type, and warns of those that have no effect."""
    require(c.loss_type in METHODS,
            f"loss_type is {c.loss_type}; set --loss_type to one of {', '.join(METHODS)}")
    if METHODS[c.loss_type].estimator is None:
        for name in ("advantage_estimator", "scale_rewards"):
            if getattr(c, name) not in (None, "none"):
                warnings.warn(f"{name} {getattr(c, name)} is ignored: {c.loss_type} has none")
        c.advantage_estimator, c.scale_rewards = None, "none"
    else:
        c.advantage_estimator = c.advantage_estimator or METHODS[c.loss_type].estimator
        c.scale_rewards = c.scale_rewards or SCALE_REWARDS[c.advantage_estimator]
    if c.kl_in_reward is None:
        c.kl_in_reward = c.advantage_estimator not in (None, "grpo")
    if c.scale_rewards == "gdpo" and c.kl_in_reward:
        warnings.warn("gdpo standardises every reward by itself: KL goes into the loss instead")
        c.kl_in_reward = False

def load_rewards(c):
    """Loads the reward functions of users; ValueError for what can't be loaded."""
    for name in c.reward_funcs:
        path, _, function = name.rpartition(":")
        if name not in REWARD_FUNCS:
            with explain(f"reward_funcs has {name}, which can't be loaded",
                         "set it to accuracy, format or path/to/file.py:function"):
                require(Path(path).is_file(), f"there is no file {path!r}")
                REWARD_FUNCS[name] = runpy.run_path(path)[function]
    if "format" in c.reward_funcs and not ("<think>" in c.system and "<answer>" in c.system):
        warnings.warn("the format reward wants <think>...</think><answer>...</answer>, which "
                      "--system does not ask for")

def check_together(c):
    """ValueError for flags that don't go together."""
    names, weights = {*short_names(c.reward_funcs)}, c.reward_weights
    rules = (
        ("updates_per_rollout", c.updates_per_rollout <= c.prompts_per_rollout,
         f"but a rollout has only prompts_per_rollout {c.prompts_per_rollout} groups to share out; "
         f"set --updates_per_rollout to {c.prompts_per_rollout} or less"),
        ("max_steps", c.max_steps or c.eval_steps,
         "which only evaluates, but eval_steps is 0, never; set one of them"),
        ("dataset", c.model_name_or_path or not (c.dataset or c.eval_dataset),
         "but the embedded model knows sums only; set --model_name_or_path too"),
        ("kl_in_reward", c.advantage_estimator or not c.kl_in_reward,
         f"but {c.loss_type} takes rewards as labels, which KL would flip; set it to false"),
        ("scale_rewards", c.scale_rewards != "gdpo" or c.advantage_estimator in ("grpo", "rloo"),
         "which reinforce_plus_plus can't use; set --advantage_estimator to grpo or rloo"),
        ("reward_threshold", math.isfinite(c.reward_threshold), "set it to a number"),
        ("reward_funcs", 0 < len(names) == len(c.reward_funcs), "set it to different names"),
        ("reward_weights", not weights or np.isfinite(weights).sum() == len(weights) == len(names),
         f"set it to one weight for each of {', '.join(c.reward_funcs)}"),
        ("reward_funcs", c.advantage_estimator or len(names) == 1 or "accuracy" in c.reward_funcs,
         f"but {c.loss_type} takes its labels from one function; set it to one, or add accuracy"))
    for name, holds, why in rules:
        require(holds, f"{name} is {getattr(c, name)}, {why}")
    with explain(f"device is {c.device}, which can't be used", "set --device to cuda, mps or cpu"):
        torch.empty(0, device=c.device)

def make_output_dir(config):
    """Makes the folder of this run; ValueError if it can't, or if another run is in there."""
    free = (f"runs/{config.loss_type}-{n}" for n in itertools.count(1))
    config.output_dir = config.output_dir or next(name for name in free if not Path(name).exists())
    path, resumed = Path(config.output_dir), config.resume_from_checkpoint
    ours = resumed and path.resolve() == Path(resumed).resolve().parent
    require(ours or not any((path / name).exists() for name in ("config.json", *LOGS, "model")),
            f"output_dir {path} holds a run already; set --output_dir to a new folder, or, where "
            "it has a checkpoint, --resume_from_checkpoint to latest")
    with explain(f"output_dir {path} can't be written to", "set --output_dir to another"):
        path.mkdir(parents=True, exist_ok=True)
        require(os.access(path, os.W_OK), "it is not yours to write")

MAX_FAILURES = 5  # steps in a row that are not finite
LOGS = ("metrics.jsonl", "completions.jsonl")
HARMLESS = {"output_dir", "resume_from_checkpoint", "logging_steps", "log_completions",
            "log_weights_steps", "save_steps", "save_total_limit", "micro_batch_size",
            "generation_batch_size", "gradient_checkpointing", "device", "dataset",
            "eval_dataset"}  # what a resumed run may change, the data in name only

@dataclass
class Progress:
    """How far a run has come: with model and optimizer all that a stopped one needs to go on."""
    step: int = 0
    number: int = 0  # of the rollout
    updates: int = 0  # of the rollout's so far
    moved: bool = False  # whether one of them changed the weights: old_logp is not theirs any more
    rollout: Rollout | None = None
    metrics: dict = field(default_factory=dict)  # of the rollout
    samples: list = field(default_factory=list)  # of the rollout, for completions.jsonl
    logits: Tensor | None = None  # [B] of the rollout in the last update of each completion
    counts: dict = field(default_factory=lambda: dict.fromkeys(
        ("num_tokens", "unscored", "skipped_no_signal", "skipped_non_finite"), 0))
    failures: int = 0  # steps in a row that were not finite
    data: str = ""  # changes with any prompt or answer
    stop: int = 0  # the signal that asks for an end
    optimizer: dict | None = None  # its state, from a checkpoint
    schedule: dict | None = None

    def begin(self, rollout, metrics, samples):
        self.rollout, self.metrics, self.samples = rollout, metrics, samples
        self.updates, self.moved, self.logits = 0, False, torch.zeros_like(rollout.rewards)
        for name in ("num_tokens", "unscored"):
            self.counts[name] += metrics.pop(name)

    def note(self, skipped, rows, logits):  # an update of rows; skipped: as in `optimizer_step`
        self.step, self.updates, self.logits[rows] = self.step + 1, self.updates + 1, logits
        self.moved = self.moved or skipped is None
        self.failures = self.failures + 1 if skipped == "skipped_non_finite" else 0
        if skipped:
            self.counts[skipped] += 1

def due(step, every, last) -> bool:
    """At each multiple of every, unless that is 0, and at the last step."""
    return step == last or every > 0 and step % every == 0

def save_folder(path, model, tokenizer, state=None, logs=()):
    """Fills a folder, which gets its name when all of it is on the disk: a crash at any moment
    leaves what was complete before. ValueError where there is no room."""
    part = path.with_name(f".{path.name}.part")
    try:
        with explain(f"{path} can't be written",
                     "make room on the disk, and set --save_total_limit to need less"):
            part.mkdir()
            model.save_pretrained(part)
            tokenizer.save_pretrained(part)
            if state:
                torch.save(state, part / "state.pt")
            for log in logs:
                shutil.copy(log, part)
            for file in part.iterdir():
                with open(file, "rb+") as written:
                    os.fsync(written)
            if path.exists():
                remove(path)
            part.rename(path)
    finally:
        shutil.rmtree(part, ignore_errors=True)

def remove(path):  # renamed first, so that no half of it stands under its name
    shutil.rmtree(path.rename(path.with_name(f".{path.name}.old")))

def save_checkpoint(config, model, tokenizer, optimizer, schedule, progress):
    """Writes checkpoint-STEP: model, tokenizer, everything else in state.pt, the logs so far."""
    out = Path(config.output_dir)
    state = {**vars(progress), "rollout": vars(progress.rollout), "stop": 0, "flags": vars(config),
             "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
    save_folder(out / f"checkpoint-{progress.step}", model, tokenizer, state,
                [out / name for name in LOGS if (out / name).exists()])
    for path in checkpoints(out)[:-(config.save_total_limit or 2**62)]:
        remove(path)

def checkpoints(*folders) -> list[Path]:
    """The complete checkpoints in these folders, oldest first."""
    found = [state.parent for folder in folders
             for state in Path(folder).glob("checkpoint-*/state.pt")]
    return sorted(found, key=lambda path: ((path / "state.pt").stat().st_mtime_ns,
                                           int(path.name.partition("-")[2])))

def load_checkpoint(path) -> tuple[dict, Progress]:
    """(the run's flags, its progress); ValueError for what isn't a checkpoint."""
    with explain(f"resume_from_checkpoint {path} can't be read",
                 "set it to a run's checkpoint-STEP, or to latest"):
        state = torch.load(Path(path, "state.pt"), map_location="cpu", weights_only=True)
        flags, rollout = state.pop("flags"), Rollout(**state.pop("rollout"))
        require(flags.keys() == Config.__dataclass_fields__.keys(), "it is of another version")
        return flags, Progress(**state, rollout=rollout)

def resume(config, model, optimizer, schedule, progress):
    """Puts everything back where the checkpoint has it, the logs included."""
    path, out, p = Path(config.resume_from_checkpoint), Path(config.output_dir), progress
    with explain(f"resume_from_checkpoint {path} can't be read or is of another model",
                 "set it to a run's checkpoint-STEP"):
        saved = AutoModelForCausalLM.from_pretrained(
            path, trust_remote_code=config.trust_remote_code, dtype=torch.float32)
        model.load_state_dict(saved.state_dict())
        optimizer.load_state_dict(p.optimizer)
        schedule.load_state_dict(p.schedule)
    p.optimizer = p.schedule = None
    p.rollout, p.logits = p.rollout.map(lambda v: v.to(model.device)), p.logits.to(model.device)
    for leftover in (*out.glob(".checkpoint-*"), *out.glob(".model.*")):  # of a killed save
        shutil.rmtree(leftover)
    for name in LOGS:
        (out / name).unlink(missing_ok=True)
        if (path / name).exists():
            shutil.copy(path / name, out)

def check_progress(progress, problems, held_out, config):
    """ValueError where a checkpoint is of other data, or beyond the steps that are asked for."""
    text = repr([[(p["prompt_ids"], p["answer"]) for p in part] for part in (problems, held_out)])
    data, steps = hashlib.sha256(text.encode()).hexdigest(), total_steps(len(problems), config)
    path = config.resume_from_checkpoint
    require(progress.data in ("", data), f"dataset {config.dataset} has changed since the "
            f"checkpoint {path}; put it back, or start a new run")
    require(progress.step <= steps, f"max_steps is {steps}, but {path} is at step {progress.step} "
            "already; set --max_steps higher")
    progress.data = data

def how_to_go_on(config) -> str:
    """The command, with the flags that let code run, which no checkpoint may ask for by itself."""
    kept, words = checkpoints(config.output_dir), ["python", "rloo_real.py"]
    if not kept:
        return "there is no checkpoint yet"
    if config.trust_remote_code:
        words += ["--trust_remote_code", "true"]
    if own_functions(config.reward_funcs):
        words += ["--reward_funcs", *config.reward_funcs]
    return "go on with: " + shlex.join([*words, "--resume_from_checkpoint", str(kept[-1])])

def stop_at_signals(progress):
    """The first Ctrl-C or SIGTERM asks for an end after the step, a second one ends at once."""
    def handle(number, frame):
        progress.stop = number
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)
        with contextlib.suppress(OSError):
            os.write(2, b"stopping after this step\n")  # print is not safe here
    signal.signal(signal.SIGINT, handle)
    signal.signal(signal.SIGTERM, handle)

@torch.no_grad()
def rollout_metrics(rollout, truncated, entropy, config) -> dict:
    """What a rollout was like; its rewards are raw, before any KL."""
    scored = ~rollout.rewards.isnan()
    rewards, group = rollout.rewards[scored], rollout.group[scored]
    lengths = rollout.mask.sum(1)[scored].float()
    groups = [rewards[group == g] for g in group.unique()]
    equal = [bool(r[0] >= config.reward_threshold) for r in groups if r.min() == r.max()]
    N = len(groups) or math.nan
    metrics = {
        "reward": rewards.mean(), "reward_std": rewards.std() if len(rewards) > 1 else math.nan,
        "frac_reward_zero_std": len(equal) / N, "frac_all_right": sum(equal) / N,
        "frac_all_wrong": (len(equal) - sum(equal)) / N,
        "completions/mean_length": lengths.mean(),
        "completions/min_length": min(lengths.tolist(), default=0),
        "completions/max_length": max(lengths.tolist(), default=0),
        "completions/clipped_ratio": truncated.float().mean(),
        "entropy": entropy[rollout.mask].mean()}
    if rollout.ref_logp is not None:
        metrics["kl"] = kl_k3(rollout.old_logp, rollout.ref_logp)[rollout.mask].mean()
    if metrics["completions/clipped_ratio"] > 0.5 and not metrics["frac_reward_zero_std"] < 1:
        warnings.warn("most completions are cut at max_completion_length "
                      f"{config.max_completion_length} and no prompt has different rewards, so "
                      "nothing is learned; set --max_completion_length higher")
    return {name: float(value) for name, value in metrics.items()}

@torch.no_grad()
def update_metrics(logp, rollout, weights, config) -> dict:
    """What an update did: its largest ratio, how often the clip was active, the size of W."""
    method, r = METHODS[config.loss_type], rollout
    s = method.ratio(logp, r.old_logp, r.mask).reshape(len(logp), -1)  # [B, T or 1]
    counted = r.mask if s.shape == logp.shape else r.mask.any(1, keepdim=True)
    ratio = s.clamp(max=MAX_LOG_RATIO).exp()[counted]
    metrics = {"ratio/max": max(ratio.tolist(), default=1)}
    if method.estimator:
        A = r.advantages[:, None].expand_as(s)[counted]
        bound = A * (ratio - clip(ratio, config.epsilon, config.epsilon_high)) > 0
        for name, part in (("low", A < 0), ("high", A > 0), ("region", A != 0)):
            metrics[f"clip_ratio/{name}_mean"] = (bound & part).float().mean()
    for name, label in (("right", r.rewards >= config.reward_threshold),
                        ("wrong", r.rewards < config.reward_threshold)):
        size = weights.abs()[r.mask & label[:, None]]
        metrics[f"weights/{name}_mean"] = size.sum() / max(len(size), 1)
        metrics[f"weights/{name}_max"] = max(size.tolist(), default=0)
    if logp.is_cuda:
        metrics["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 2**30
    return {name: float(value) for name, value in metrics.items()}

def log_rows(rows, config, name="metrics.jsonl"):
    """Appends rows to a file of the run; a number that is not finite becomes null."""
    lines = [json.dumps({key: None if isinstance(value, float) and not math.isfinite(value) else
                         value for key, value in row.items()}) + "\n" for row in rows]
    if lines:
        with open(f"{config.output_dir}/{name}", "a") as file:
            file.write("".join(lines))

def log_weights(step, logp, rollout, weights, config):
    """Writes what the update of this step weighed to weights-STEP.npz: arrays, nothing pickled.

    s, W, mask [B, T]; s_bar, length, reward, right, advantage, group and C (F16) [B], where NaN
    stands for none; N groups and B completions that count; every flag that is a number or text."""
    r, s_bar = rollout, sequence_logit(logp, rollout.old_logp, rollout.mask)
    tau, threshold, counts = config.real_tau, config.reward_threshold, r.mask.any(1)
    arrays = dict(
        s=log_ratio(logp, r.old_logp, r.mask), W=weights, mask=r.mask, s_bar=s_bar,
        length=r.mask.sum(1), reward=r.rewards, right=r.rewards >= threshold, group=r.group,
        advantage=torch.full_like(s_bar, math.nan) if r.advantages is None else r.advantages,
        C=real_competition(s_bar, r.rewards, r.group, r.mask, tau, threshold),
        B=counts.sum(), N=r.group[counts].unique().numel())
    flags = {k: v for k, v in vars(config).items() if isinstance(v, (int, float, str))}
    np.savez(f"{config.output_dir}/weights-{step}.npz", **flags, step=step,
             **{name: torch.as_tensor(array).cpu() for name, array in arrays.items()})

def log_step(row, logp, rollout, weights, progress, config, steps):
    """The row of an update, every logging_steps and at the end; what was skipped, always."""
    step, norm = row["step"], row["grad_norm"]
    if step in (config.log_weights_steps or ()):
        log_weights(step, logp, rollout, weights, config)
    if due(step, config.logging_steps, steps):
        log_rows([row | update_metrics(logp, rollout, weights, config)], config)
        kl = f"  kl {row['kl']:.4f}" if "kl" in row else ""
        say(f"step {step:>4}/{steps}  reward {row['reward']:.3f}  no signal "
            f"{row['frac_reward_zero_std']:.2f}  length {row['completions/mean_length']:.1f}{kl}  "
            f"grad {norm:.3f}  {row['tokens_per_second']:.0f} tok/s")
        if progress.samples and step // config.logging_steps % 10 == 1:  # now and then
            prompt, text, answer, *_ = progress.samples[0].values()
            say(f"    {prompt[-60:]!r} -> {text[-200:]!r}, right: {answer!r}")
    if progress.failures:
        size = weights.abs().max()
        cause = f"loss {row['loss']}, largest weight {size}, gradient norm {norm}"
        say(f"step {step} skipped, it was not finite: {cause}")
        require(progress.failures < MAX_FAILURES, f"{MAX_FAILURES} steps in a row were not finite, "
                f"at last with {cause}; set --learning_rate lower, and look at the rewards")

def print_start(config, model, tokenizer, problems, held_out):
    """What is about to run, so that a wrong number is seen before it costs an hour."""
    c, steps, size = config, total_steps(len(problems), config), model.num_parameters()
    rewards = [name if c.advantage_estimator or name == label_function(c) else
               f"{name} (logged, without effect)" for name in c.reward_funcs]
    weights = f", weights {c.reward_weights}" if c.reward_weights and c.advantage_estimator else ""
    cut = "; truncated completions count for nothing" * c.mask_truncated_completions
    kept = "weights, gradients, AdamW" + " and reference" * bool(c.beta)
    held = f"of {c.eval_dataset}" if c.eval_dataset else "held out"
    ends = " ".join(tokenizer.convert_ids_to_tokens(end_token_ids(model, tokenizer)))
    first, answer = tokenizer.decode(problems[0]["prompt_ids"]), str(problems[0]["answer"])
    source = (f"advantages {c.advantage_estimator}, scaled by {c.scale_rewards}"
              if c.advantage_estimator else "labels")
    say(f"""method   {c.loss_type} from {source}
KL       in the {'reward' if c.kl_in_reward else 'loss'}, beta {c.beta}
rewards  {' + '.join(rewards)}{weights}; right from {c.reward_threshold} on{cut}
model    {c.model_name_or_path or 'embedded Qwen3'}, {size / 1e6:.1f}M parameters
device   {c.device}, {'bfloat16 autocast' if c.bf16 else 'float32'}
memory   {size * (20 if c.beta else 16) / 2**30:.2f} GiB for {kept}; activations come on top
data     {c.dataset or 'sums'}, {len(problems)} problems, {len(held_out)} {held}
rollout  {c.prompts_per_rollout} prompts x {c.num_generations} completions
sampling temperature {c.temperature}, no top-k, top-p or penalty; ends at {ends}
updates  {c.updates_per_rollout} in each of {c.num_iterations} passes, {steps} steps in all
at most  {c.max_completion_length} tokens a completion, micro-batches of {c.micro_batch_size}
rate     {c.learning_rate}, {c.lr_scheduler_type} after {c.warmup_ratio:.0%} warm-up
gradient norm at most {c.max_grad_norm}, seed {c.seed}
every    {c.logging_steps} steps a row, {c.eval_steps} an evaluation, {c.save_steps} a checkpoint
prompt   {first!r}, answer {gold_answer(answer)!r}
output   {c.output_dir}
""")

def print_end(config, held_out):
    rows = [json.loads(line) for line in open(f"{config.output_dir}/metrics.jsonl")]
    rows = [row for row in rows if "eval/pass@1" in row]
    if rows:
        say(f"\n{len(held_out):>6} held-out problems     before   after")
        for name, key in (("pass@1 (greedy) ", "eval/pass@1"), ("reward (sampled)", "eval/reward")):
            before, after = (math.nan if rows[i][key] is None else rows[i][key] for i in (0, -1))
            say(f"{name}          {before:9.3f}{after:8.3f}")
    say(" ".join(["wrote", *sorted(map(str, Path(config.output_dir).glob("[!.]*")))]))

# ---- 6. Training --------------------------------------------------------------------------------

def from_pretrained(kind, config, **options):
    """The model or tokenizer of model_name_or_path; ValueError where it can't be had."""
    with explain(f"model_name_or_path {config.model_name_or_path} can't be loaded",
                 "set it to the hub id or folder of a causal language model; one that brings code "
                 "of its own, which you trust, needs --trust_remote_code true"):
        return kind.from_pretrained(config.model_name_or_path, **options,
                                    trust_remote_code=config.trust_remote_code)

def load_tokenizer(config):
    """The checkpoint's tokenizer, or the embedded model's: one token per character."""
    if name := config.model_name_or_path:
        tokenizer = from_pretrained(AutoTokenizer, config)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        require(tokenizer.pad_token, f"model_name_or_path {name} has a tokenizer with neither a "
                "pad nor an end token; set one in its tokenizer_config.json")
        return tokenizer
    vocabulary = {c: i for i, c in enumerate([*"0123456789+=", "<pad>", "<eos>"])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>",
        model_input_names=["input_ids", "attention_mask"])

def load_model(config, tokenizer, problems):
    """The policy, in float32 and without dropout: a checkpoint, or the embedded model warmed up."""
    set_seed(config.seed)
    if name := config.model_name_or_path:
        model = from_pretrained(AutoModelForCausalLM, config, dtype=torch.float32)
        require(len(tokenizer) <= model.get_input_embeddings().num_embeddings,
                f"model_name_or_path {name} has a tokenizer of {len(tokenizer)} tokens and fewer "
                "embeddings; set it to another")
    else:
        model = Qwen3ForCausalLM(Qwen3Config(
            vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=64,
            tie_word_embeddings=True, initializer_range=0.06, bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id))
        supervised_warm_up(model, tokenizer, problems)  # on the CPU: the same model everywhere
    for module in model.modules():  # so that every pass sees the same network, in whatever mode
        for key, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in key or isinstance(module, nn.Dropout)):
                setattr(module, key, 0.0)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.to(config.device).eval()

def supervised_warm_up(model, tokenizer, problems, steps=250, batch_size=64, learning_rate=1e-3):
    """Teaches the embedded model some sums, by cross-entropy on their answers."""
    optimizer = optim.AdamW(model.parameters(), lr=learning_rate)
    equals = tokenizer.convert_tokens_to_ids("=")
    for _ in tqdm(range(steps), desc="supervised warm-up", leave=False, disable=None):
        chosen = [problems[i] for i in torch.randint(len(problems), (batch_size,))]
        batch = tokenizer([p["prompt"] + p["answer"] + tokenizer.eos_token for p in chosen],
                          padding=True, return_tensors="pt").to(model.device)
        question = completion_mask(batch["input_ids"], equals)  # up to the equals sign
        answer = batch["attention_mask"].bool() & ~question
        model(**batch, labels=torch.where(answer, batch["input_ids"], -100)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

def reseed(config, *purpose):
    """Sets every random state by the run's seed and what it is for: rollouts draw the same whether
    the run evaluates or not, and was stopped or not."""
    set_seed(random.Random(repr((config.seed, *purpose))).getrandbits(32))

def sample_and_judge(model, tokenizer, problems, config, reward_funcs, greedy=False):
    """(what `sample` gives, the texts, rewards [B, F]) of one completion of each problem."""
    start = time.perf_counter()
    sampled = sample(model, tokenizer, [p["prompt_ids"] for p in problems], config, greedy)
    ids, _, mask, truncated = sampled
    texts = decode(tokenizer, ids, mask, truncated)
    seconds = time.perf_counter() - start
    return sampled, texts, score_completions(reward_funcs, texts, columns(problems)), seconds

def collect_rollout(model, reference, tokenizer, problems, config):
    """(`Rollout` of G completions of each problem, its metrics, its first samples for the log)."""
    problems = [p for p in problems for _ in range(config.num_generations)]  # [B]
    (ids, attention_mask, mask, truncated), texts, table, generate_time = sample_and_judge(
        model, tokenizer, problems, config, config.reward_funcs)
    lengths, start = mask.sum(1).tolist(), time.perf_counter()
    unscored = rollout_rewards(table, config).isnan().sum().item()
    if config.mask_truncated_completions:
        table[truncated.cpu()] = math.nan
    rewards = rollout_rewards(table, config).float().to(ids.device)
    rollout = Rollout(ids, attention_mask, mask & ~rewards.isnan()[:, None], rewards=rewards,
                      group=torch.arange(len(ids), device=ids.device) // config.num_generations)
    rollout.old_logp, entropy = score(model, rollout, config, return_entropy=True)
    if reference is not None:
        rollout.ref_logp = score(reference, rollout, config)
    rollout.advantages = rollout_advantages(table, rollout, config)
    names = [f"rewards/{name}" for name in short_names(config.reward_funcs)]
    first = problems[:config.log_completions]
    log = {"prompt": [tokenizer.decode(p["prompt_ids"]) for p in first], "completion": texts,
           "answer": [gold_answer(str(p["answer"])) for p in first],
           **dict(zip(names, table.T.tolist())), "length": lengths, "truncated": truncated.tolist()}
    if rollout.advantages is None:  # labels, of no completion that doesn't count
        log["label"] = [None if r.isnan() else "right" if r >= config.reward_threshold else "wrong"
                        for r in rewards.cpu()]
    else:
        log["advantage"] = rollout.advantages.tolist()
    samples = [dict(zip(log, row)) for row in zip(*log.values())]
    return rollout, rollout_metrics(rollout, truncated, entropy, config) | {
        **{f"{name}/mean": r.nanmean().item() for name, r in zip(names, table.T)},
        "num_tokens": sum(lengths), "unscored": unscored,
        "tokens_per_second": sum(lengths) / generate_time, "generate_time": generate_time,
        "score_time": time.perf_counter() - start}, samples

def evaluate(model, tokenizer, problems, config, step):
    """Logs pass@1 (greedy) and the sampled reward by `label_function`, of one completion each.
    Every evaluation draws the same random numbers."""
    if not problems:
        return
    size, row = config.prompts_per_rollout * config.num_generations, {"step": step}
    for name, greedy in (("eval/pass@1", True), ("eval/reward", False)):
        reseed(config, "evaluation")
        rewards = torch.cat([
            sample_and_judge(model, tokenizer, problems[i:i + size], config,
                             [label_function(config)], greedy)[2]
            for i in tqdm(range(0, len(problems), size), desc=name, leave=False, disable=None)])
        rewards = rewards[~rewards.isnan()]
        values = rewards >= config.reward_threshold if greedy else rewards
        row[name] = values.double().mean().item()
    log_rows([row], config)
    say(f"step {step:>4}  pass@1 {row['eval/pass@1']:.3f}  reward {row['eval/reward']:.3f}  "
        "held out")

def prompt_batches(problems, config):
    """Yields (epoch, the problems of a rollout) for ever. Each epoch has every problem once, in an
    order of its own; its last rollout is smaller where prompts_per_rollout doesn't divide them."""
    for epoch in itertools.count():
        generator = torch.Generator().manual_seed(config.seed + epoch)
        order = torch.randperm(len(problems), generator=generator)
        for rows in order.split(config.prompts_per_rollout):
            yield epoch, [problems[i] for i in rows]

def update_rows(group, config) -> list[Tensor]:
    """The rows of each update over a rollout: its groups, never cut, in updates_per_rollout parts
    (fewer where there are fewer groups), num_iterations times over."""
    ids = group.unique()
    parts = ids.tensor_split(min(config.updates_per_rollout, len(ids)))
    return [torch.isin(group, part).nonzero().flatten() for part in parts] * config.num_iterations

def total_steps(num_problems, config) -> int:
    """Optimizer steps of the run: max_steps, or those of num_train_epochs where that is -1."""
    if config.max_steps >= 0:
        return config.max_steps
    rollouts = torch.arange(num_problems).split(config.prompts_per_rollout)
    return config.num_train_epochs * sum(len(update_rows(groups, config)) for groups in rollouts)

def make_optimizer(model, steps, config):
    """AdamW without weight decay, and the schedule of its learning rate."""
    optimizer = optim.AdamW(model.parameters(), config.learning_rate, weight_decay=0, fused=True)
    kind = {"constant": "constant_with_warmup", "linear": "linear"}[config.lr_scheduler_type]
    return optimizer, get_scheduler(kind, optimizer, round(config.warmup_ratio * steps), steps)

def train(config, model, tokenizer, problems, held_out=(), progress=None):
    """The policy, trained from the model the run began with: sample, score, weigh, step, log."""
    reference = copy.deepcopy(model) if config.beta else None  # frozen weights might round anew
    p, steps = progress or Progress(), total_steps(len(problems), config)
    optimizer, schedule = make_optimizer(model, steps, config)
    if p.optimizer:
        resume(config, model, optimizer, schedule, p)
    else:
        evaluate(model, tokenizer, held_out, config, 0)
    ended = time.perf_counter()
    for epoch, batch in itertools.islice(prompt_batches(problems, config), p.number, None):
        if p.rollout is None:
            if p.step >= steps:
                break
            reseed(config, "rollout", p.number)
            p.begin(*collect_rollout(model, reference, tokenizer, batch, config))
        for rows in update_rows(p.rollout.group, config)[p.updates:][:steps - p.step]:
            part, start = p.rollout[rows], time.perf_counter()
            logp = score(model, part, config) if p.moved else part.old_logp
            loss, weights = loss_and_weights(logp, part, config)
            norm, skipped = optimizer_step(model, optimizer, part, loss, weights, config)
            p.note(skipped, rows, sequence_logit(logp, part.old_logp, part.mask))
            row = {"step": p.step, "epoch": epoch, "loss": loss.item(), "grad_norm": norm,
                   "learning_rate": schedule.get_last_lr()[0], **p.metrics, **p.counts,
                   "update_time": time.perf_counter() - start,
                   "step_time": time.perf_counter() - ended}
            schedule.step()
            log_step(row, logp, part, weights, p, config, steps)
            if due(p.step, config.eval_steps, steps):
                evaluate(model, tokenizer, held_out, config, p.step)
            if p.stop or due(p.step, config.save_steps, steps):
                save_checkpoint(config, model, tokenizer, optimizer, schedule, p)
            if p.stop and p.step < steps:
                say(f"stopped after step {p.step}; {how_to_go_on(config)}")
                sys.exit(128 + p.stop)
            ended = time.perf_counter()
        log_rows([{"step": p.step, **sample, "sequence_logit": logit}
                  for sample, logit in zip(p.samples, p.logits.tolist())], config, LOGS[1])
        p.rollout, p.number = None, p.number + 1
    return model

def read_flags(argv) -> tuple[Config, Progress]:
    """The flags of a run, and how far it has come. A resumed run takes those of its checkpoint, and
    only what doesn't change its course may be given another value."""
    parser = HfArgumentParser(Config, description=__doc__.partition("\n")[0])
    parser.error, flags, progress = partial(require, False), {}, Progress()
    given = parser.parse_args(argv)
    path = given.resume_from_checkpoint
    if path == "latest":
        found = checkpoints(*[given.output_dir] if given.output_dir else Path("runs").glob("*"))
        require(found, "resume_from_checkpoint is latest, but there is no checkpoint in "
                       f"{given.output_dir or 'runs'}; set --output_dir to the run's folder")
        path = str(found[-1])
    if path:
        flags, progress = load_checkpoint(path)
        code = own_functions(flags["reward_funcs"])
        require(not code or given.reward_funcs, f"resume_from_checkpoint {path} wants to run {code}"
                "; if you trust this code, repeat --reward_funcs")
        require(not flags["trust_remote_code"] or given.trust_remote_code,
                f"resume_from_checkpoint {path} is of a run that trusted the code of "
                f"{flags['model_name_or_path']}; if you do, repeat --trust_remote_code true")
        parser.set_defaults(**flags | {"output_dir": str(Path(path).resolve().parent)})
    config = Config(**vars(parser.parse_args(argv)) | {"resume_from_checkpoint": path})
    if flags and short_names(flags["reward_funcs"]) == short_names(config.reward_funcs):
        flags["reward_funcs"] = config.reward_funcs  # the same, maybe by another path
    flat = config.lr_scheduler_type == "constant" and config.warmup_ratio == 0
    free = HARMLESS | ({"max_steps", "num_train_epochs"} if flat else set())
    changed = [f"{name} {value} -> {getattr(config, name)}" for name, value in flags.items()
               if name not in free and getattr(config, name) != value]
    require(not changed, f"resume_from_checkpoint {path} is of a run with other flags "
                         f"({', '.join(changed)}); leave them out, or start a new run")
    return config, progress

def main(argv=None):
    """Parses flags and loads data (bad input exits with one line), then trains."""
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    warnings.filterwarnings("ignore", ".*gradient_checkpointing_enable")  # renamed in 5.24
    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")  # a skipped first step
    disable_progress_bar()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # its errors are raised as well
    model = None
    try:
        config, progress = read_flags(argv)
        tokenizer = load_tokenizer(config)
        problems, held_out = load_problems(config, tokenizer)
        check_progress(progress, problems, held_out, config)
        if own := own_functions(config.reward_funcs):
            score_completions(own, [""], columns(problems[:1]))  # tried before it counts
        make_output_dir(config)
        model = load_model(config, tokenizer, problems)
        Path(config.output_dir, "config.json").write_text(json.dumps(vars(config), indent=2) + "\n")
        stop_at_signals(progress)
        print_start(config, model, tokenizer, problems, held_out)
        train(config, model, tokenizer, problems, held_out, progress)
        save_folder(Path(config.output_dir, "model"), model, tokenizer)
        print_end(config, held_out)
        return model
    except (ValueError, OSError, torch.OutOfMemoryError) as error:
        line = first_line(error)
        if isinstance(error, torch.OutOfMemoryError):
            line += ("; set --micro_batch_size and --generation_batch_size lower, or "
                     "--gradient_checkpointing true")
        if model:
            if getattr(error, "errno", None) == errno.ENOSPC:
                line += f"; make room for {config.output_dir}, or set --output_dir to another"
            line = f"after step {progress.step}: {line}; {how_to_go_on(config)}"
        sys.exit(f"rloo_real.py: {line}")
    except KeyboardInterrupt:  # before the first step
        sys.exit(128 + signal.SIGINT)

if __name__ == "__main__":
    main()
