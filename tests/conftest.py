"""Shared pieces of the tests: tiny random models, rollouts of random numbers, and the marks."""
import sys
from pathlib import Path

import pytest
import torch
from transformers import (GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM, Qwen3Config,
                          Qwen3ForCausalLM)

sys.path.insert(0, str(Path(__file__).parent.parent))
import rloo_real as rr  # noqa: E402


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: minutes of training; run with `pytest -m slow`")
    config.addinivalue_line("markers", "cuda: needs a CUDA GPU, skipped without one")


def pytest_collection_modifyitems(config, items):
    for item in items:
        if "slow" in item.keywords and "slow" not in (config.option.markexpr or ""):
            item.add_marker(pytest.mark.skip(reason="slow: run with `pytest -m slow`"))
        if "cuda" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU"))


SIZES = dict(vocab_size=24, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
             bos_token_id=None, eos_token_id=2, pad_token_id=0)


def tiny_model(kind="qwen3", seed=0, **changes):
    """A random model of two layers and 24 tokens, with weights large enough to have opinions."""
    torch.manual_seed(seed)
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(
            vocab_size=24, n_positions=64, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3,
            bos_token_id=None, eos_token_id=2, pad_token_id=0)).eval()
    classes = {"qwen3": (Qwen3Config, Qwen3ForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}
    config, model = classes[kind]
    return model(config(**{**SIZES, "initializer_range": 0.3, **changes})).eval()


def config(**flags):
    """A Config of the embedded preset on the CPU in float32, with some flags changed."""
    return rr.Config(**{"device": "cpu", "bf16": False, **flags})


def random_rollout(sizes=(4, 4), T=5, seed=0, shift=0.3, dtype=torch.float64):
    """(logp, rollout) of made-up numbers: groups of the given sizes, both labels in each, lengths
    from 1 to T, log-ratios of about `shift`, garbage behind the mask."""
    g = torch.Generator().manual_seed(seed)
    B = sum(sizes)
    lengths = torch.randint(1, T + 1, (B,), generator=g)
    mask = torch.arange(T) < lengths[:, None]
    old_logp = -3 * torch.rand(B, T, generator=g, dtype=dtype)
    logp = old_logp + shift * torch.randn(B, T, generator=g, dtype=dtype)
    ref_logp = old_logp + shift * torch.randn(B, T, generator=g, dtype=dtype)
    group = torch.cat([torch.full((n,), 7 * i + 3) for i, n in enumerate(sizes)])
    rewards = torch.cat([(torch.arange(n) < max(1, n // 3)).to(dtype) for n in sizes])
    rollout = rr.Rollout(ids=torch.zeros(B, T + 2, dtype=torch.long), mask=mask, group=group,
                         attention_mask=torch.ones(B, T + 2, dtype=torch.long), rewards=rewards,
                         old_logp=old_logp, ref_logp=ref_logp)
    return logp, rollout
