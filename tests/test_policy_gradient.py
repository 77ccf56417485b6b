"""Section 2: two passes in micro-batches give the gradient of one big graph, and an unbiased one."""
import copy
import itertools

import pytest
import torch
from conftest import config, rr, tiny_model

CASES = [dict(loss_type=name, beta=0.3, kl_in_reward=False) for name in rr.METHODS] + [
    dict(loss_type=name, beta=0.0) for name in rr.METHODS] + [
    dict(loss_type="grpo", advantage_estimator="rloo", epsilon=0.05, epsilon_high=0.1, beta=0.1),
    dict(loss_type="rloo", advantage_estimator="reinforce_plus_plus", beta=0.2)]


def rollout_of(model, c, seed=0, sizes=(4, 3, 5)):
    """A rollout of random tokens for three prompts of 1, 3 and 4 tokens, left-padded, groups split
    over micro-batches, completions of 1 to 4 tokens, by an old policy that is not the new one."""
    g = torch.Generator().manual_seed(seed)
    B, P, T = sum(sizes), 4, 4
    group = torch.cat([torch.full((n,), i) for i, n in enumerate(sizes)])
    ids = torch.randint(3, 24, (B, P + T), generator=g)
    prompts = torch.randint(3, 24, (len(sizes), P), generator=g)
    ids[:, :P] = prompts[group]
    padding = torch.tensor([3, 1, 0])[group]
    attention_mask = (torch.arange(P + T) >= padding[:, None]).long()
    mask = torch.arange(T) < torch.randint(1, T + 1, (B, 1), generator=g)
    rewards = torch.cat([(torch.arange(n) < n // 2).double() for n in sizes])
    rollout = rr.Rollout(ids, attention_mask, mask, group, rewards)
    for name in ("old_logp", "ref_logp"):
        other = copy.deepcopy(model)
        with torch.no_grad():
            for p in other.parameters():
                p += 0.02 * torch.randn(p.shape, generator=g, dtype=p.dtype)
        setattr(rollout, name, rr.score(other, rollout, c))
    if not c.beta:
        rollout.ref_logp = None
    rollout.advantages = rr.rollout_advantages(rewards, rollout, c)
    return rollout


def big_graph_gradient(model, rollout, c):
    """The oracle: one forward pass with all logits, one loss, one backward pass through everything."""
    mask, T = rollout.attention_mask, rollout.mask.shape[1]
    logits = model(rollout.ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    logp = (logits[:, -T - 1:-1] / c.temperature).log_softmax(2).gather(2, rollout.ids[:, -T:, None])[..., 0]
    loss = rr.update_loss(logp, rollout, c)
    return loss.detach(), torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize("flags", CASES, ids=lambda f: "-".join(f"{v}" for v in f.values()))
@pytest.mark.parametrize("micro_batch_size", [1, 2, 5, 64])
@pytest.mark.parametrize("kind, whole, tolerance", [("qwen3", True, 1e-12), ("qwen3", False, 1e-6),
                                                    ("gpt2", False, 1e-12)])
def test_micro_batches_add_up_to_the_gradient_of_one_big_graph(flags, micro_batch_size, kind, whole,
                                                               tolerance):
    """In float64 to 1e-12, for every loss and micro-batch size, KL in the loss included (B13); with
    each prompt read once to 1e-6, since Qwen's norms and positions are computed in float32, and to
    1e-12 for a model that has none of these."""
    c = config(micro_batch_size=micro_batch_size, temperature=0.8, gradient_checkpointing=whole,
               num_generations=3, **flags)
    model = tiny_model(kind).double()
    rollout = rollout_of(model, c)
    loss, W = rr.loss_and_weights(rr.score(model, rollout, c), rollout, c)
    rr.policy_gradient(model, rollout, W, c)
    expected_loss, expected = big_graph_gradient(model, rollout, c)
    assert abs(loss - expected_loss) < tolerance
    assert max(g.abs().max() for g in expected) > 1e-3
    for p, g in zip(model.parameters(), expected):
        assert (p.grad - g).abs().max() < tolerance


@pytest.mark.parametrize("tied", [False, True])
def test_no_micro_batch_makes_a_gradient_of_the_whole_vocabulary_for_its_few_tokens(tied):
    """What an embedding gathers stays sparse until all of it is there; the result is dense, and that
    of the big graph, also where the head shares the weights."""
    c = config(micro_batch_size=2, num_generations=3)
    model = tiny_model(tie_word_embeddings=tied)
    rollout, seen = rollout_of(model, c), []
    embedding = model.get_input_embeddings()
    embedding.register_forward_hook(lambda module, _, out: seen.append(module.sparse))
    _, W = rr.loss_and_weights(rr.score(model, rollout, c), rollout, c)
    rr.policy_gradient(model, rollout, W, c)
    assert len(seen) > 4 and all(seen) and not embedding.sparse
    assert embedding.weight.grad.layout == torch.strided
    expected = big_graph_gradient(model, rollout, c)[1]
    for p, g in zip(model.parameters(), expected):
        assert (p.grad - g).abs().max() < 1e-5


@pytest.mark.parametrize("name", rr.METHODS)
def test_weights_are_the_derivative_by_finite_differences(name):
    """W = -dL/dlogp, measured by moving one log-prob at a time, in float64."""
    c = config(loss_type=name, beta=0.3, kl_in_reward=False)
    rollout = rollout_of(tiny_model().double(), c)
    logp = rollout.old_logp + 0.05 * torch.randn(
        rollout.old_logp.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    _, W = rr.loss_and_weights(logp, rollout, c)
    for i, t in itertools.product(range(0, 12, 2), range(4)):
        h = torch.zeros_like(logp)
        h[i, t] = 1e-6
        slope = (rr.update_loss(logp + h, rollout, c) - rr.update_loss(logp - h, rollout, c)) / 2e-6
        assert abs(W[i, t] + slope) < 1e-7


def test_the_shape_of_a_micro_batch_is_bounded_and_rows_without_weight_are_left_out():
    """No forward pass of scoring or training has more than micro_batch_size rows, and a prompt is
    read once for its group (not at all if it has one token, from which completions are scored)."""
    c = config(loss_type="rloo", beta=0, micro_batch_size=3)
    model, seen = tiny_model(), []
    rollout = rollout_of(model, c)
    model.base_model.layers[0].mlp.register_forward_pre_hook(
        lambda m, args: seen.append(tuple(args[0].shape[:2])))
    rr.score(model, rollout, c)
    assert [rows for rows, _ in seen] == [3, 1, 1, 3, 1, 3, 2] and max(n for _, n in seen) <= 4
    assert seen[2] == (1, 2) and seen[4] == (1, 3)  # prompts of 3 and 4 tokens, but for the last
    seen.clear()
    W = torch.zeros(12, 4)
    W[[1, 4, 5, 6, 11], 0] = 1.0
    rr.policy_gradient(model, rollout, W, c)
    assert [rows for rows, _ in seen] == [1, 1, 3, 1, 1]


@pytest.mark.parametrize("whole", [True, False])
def test_logits_are_computed_in_parts_and_not_kept_for_a_large_vocabulary(whole, monkeypatch):
    """C1: with Qwen's 151,936 tokens neither the output head nor anything that is saved for the
    backward pass is larger than MAX_LOGITS, however long the completions; gradients are the same."""
    model = tiny_model(vocab_size=151_936).double()
    c = config(loss_type="grpo", beta=0, micro_batch_size=2, gradient_checkpointing=whole)
    rollout = rollout_of(model, c, sizes=(2, 1, 2))
    W = torch.randn(5, 4) * rollout.mask
    rr.policy_gradient(model, rollout, W, c)
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    heads, saved = [], []
    model.lm_head.register_forward_hook(lambda m, args, out: heads.append(out.numel()))
    monkeypatch.setattr(rr, "MAX_LOGITS", 2 * 151_936)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        rr.policy_gradient(model, rollout, W, c)
    assert max(heads) <= 2 * 151_936 < sum(heads)
    weight = model.lm_head.weight.numel()
    assert not [n for n in saved if n > 2 * 151_936 and n != weight]
    assert all((p.grad - g).norm() < 1e-6 * g.norm() for p, g in zip(model.parameters(), expected))


def test_gradient_checkpointing_computes_layers_again_and_leaves_sampling_its_cache(tmp_path):
    """C3: every layer runs twice a micro-batch in training and once in scoring; gradients are equal;
    `generate` still feeds one token at a time, and gives the same tokens; eval mode is back."""
    out, gradients, tokens = tmp_path / "model", [], []
    tiny_model(vocab_size=14, eos_token_id=13, pad_token_id=12).save_pretrained(out)
    for flag in (False, True):
        c = config(model_name_or_path=str(out), micro_batch_size=5, gradient_checkpointing=flag, beta=0,
                   max_completion_length=8, bf16=False)
        tokenizer = rr.load_tokenizer(config())
        model, seen = rr.load_model(c, tokenizer, None), []
        rollout = rollout_of(tiny_model(), c)
        rollout.ids %= 12
        model.base_model.layers[0].mlp.register_forward_pre_hook(
            lambda m, args: seen.append(tuple(args[0].shape)))
        rr.score(model, rollout, c)
        scoring = len(seen)
        rr.policy_gradient(model, rollout, torch.ones(12, 4) * rollout.mask, c)
        assert len(seen) - scoring == (6 if flag else scoring) and not model.training
        gradients.append([p.grad for p in model.parameters()])
        seen.clear()
        tokens.append(rr.sample(model, tokenizer, [[1, 10, 2, 11]] * 4, c, greedy=True)[0])
        assert all(n == 1 for _, n, _ in seen[1:]) and len(seen) > 1
    assert all(a.isfinite().all() and (a - b).abs().max() < 1e-5 for a, b in zip(*gradients))
    assert torch.equal(*tokens)


@pytest.mark.parametrize("name", rr.METHODS)
def test_the_first_update_needs_no_first_pass_and_its_ratios_are_one(name):
    """With old_logp as log-probs, ratio/max is exactly 1 and no clip binds (A9)."""
    c = config(loss_type=name, beta=0)
    rollout = rollout_of(tiny_model(), c)
    _, W = rr.loss_and_weights(rollout.old_logp, rollout, c)
    metrics = rr.update_metrics(rollout.old_logp, rollout, W, c)
    assert metrics["ratio/max"] == 1.0 and not metrics.get("clip_ratio/region_mean", 0)


# ---- the step ------------------------------------------------------------------------------------

def state(model, optimizer):
    return [p.detach().clone() for p in model.parameters()], [
        v.clone() for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]


def equal(a, b):
    return all(torch.equal(x, y) for xs, ys in zip(a, b) for x, y in zip(xs, ys, strict=True))


@pytest.mark.parametrize("bad, reason", [(0.0, "skipped_no_signal"),
                                         (float("nan"), "skipped_non_finite"),
                                         (float("inf"), "skipped_non_finite")])
def test_an_update_without_signal_or_not_finite_touches_nothing(bad, reason):
    """Neither weights nor optimizer state move, though AdamW has momentum (D6); the next one does."""
    c = config(beta=0)
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rollout = rollout_of(model, c)
    good = torch.where(rollout.mask, 1.0, 0.0)
    norm, skipped = rr.optimizer_step(model, optimizer, rollout, torch.zeros(()), good, c)
    assert norm > 0 and skipped is None
    before = state(model, optimizer)
    W = torch.zeros_like(good)
    W[2, 0] = bad
    assert rr.optimizer_step(model, optimizer, rollout, torch.zeros(()), W, c)[1] == reason
    assert equal(before, state(model, optimizer))
    assert rr.optimizer_step(model, optimizer, rollout, torch.zeros(()), good, c)[1] is None
    assert not equal(before, state(model, optimizer))


def test_the_gradient_norm_is_that_before_clipping():
    """grad_norm is what the gradient was; what is applied has at most max_grad_norm."""
    norms = {}
    for limit in (0.0, 1e-3):
        model, c = tiny_model(), config(beta=0, max_grad_norm=limit)
        rollout = rollout_of(model, c)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        before = state(model, optimizer)[0]
        norms[limit], _ = rr.optimizer_step(model, optimizer, rollout, torch.zeros(()),
                                            rollout.mask.float(), c)
        moved = sum((a - b).detach().square().sum() for a, b in zip(before, model.parameters()))
        assert moved.sqrt().item() == pytest.approx(limit or norms[limit], rel=1e-2)
    assert norms[0.0] == norms[1e-3]


def test_small_steps_change_float32_weights():
    """C4: 0.02 minus 1e-6 is not 0.02, since weights are float32 also under autocast."""
    c = config(bf16=True, beta=0, learning_rate=1e-6)
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
    rollout = rollout_of(model, c)
    before = state(model, optimizer)[0]
    rr.optimizer_step(model, optimizer, rollout, torch.zeros(()), rollout.mask.float(), c)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    moved = [float((a != b).float().mean()) for a, b in zip(before, model.parameters())]
    assert min(moved) > 0.5


# ---- unbiased ------------------------------------------------------------------------------------

def expected_gradient(rewards, probs, K, loss_type, estimator):
    """Exact expectation of the policy gradient over all K-tuples of one-token completions, for a
    softmax over a few actions."""
    logits = probs.log().requires_grad_()
    total = torch.zeros_like(probs)
    for actions in itertools.product(range(len(probs)), repeat=K):
        actions = torch.tensor(actions)
        logp = logits.log_softmax(0)[actions][:, None]  # [K, 1]
        rollout = rr.Rollout(None, None, torch.ones(K, 1, dtype=torch.bool), torch.zeros(K),
                             rewards[actions], old_logp=logp.detach())
        c = config(loss_type=loss_type, advantage_estimator=estimator, scale_rewards="none", beta=0)
        rollout.advantages = rr.rollout_advantages(rewards[actions], rollout, c)
        _, W = rr.loss_and_weights(logp, rollout, c)
        total += probs[actions].prod() * torch.autograd.grad((W * logp).sum(), logits)[0]
    return total


@pytest.mark.parametrize("loss_type", ["rloo", "grpo"])
@pytest.mark.parametrize("K", [2, 3, 4])
def test_leave_one_out_is_unbiased_and_the_group_mean_shrinks_it(loss_type, K):
    """The expectation of RLOO's estimate is the exact gradient of the expected reward to 1e-12;
    with the mean of the whole group as the baseline it is (K - 1) / K times that."""
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    rewards = torch.tensor([0.0, 1.0, 0.4, -2.0], dtype=torch.float64)
    exact = probs * (rewards - (probs * rewards).sum())  # d E[r] / d logits
    loo = expected_gradient(rewards, probs, K, loss_type, "rloo")
    mean = expected_gradient(rewards, probs, K, loss_type, "grpo")
    assert (loo - exact).abs().max() < 1e-12
    assert (mean - exact * (K - 1) / K).abs().max() < 1e-12
