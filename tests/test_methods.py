"""Section 1 of rloo_real.py against public implementations, slow formulas and numbers by hand."""
import json
import math
from pathlib import Path

import pytest
import torch
from conftest import config, random_rollout, rr

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
nan, inf = math.nan, math.inf


def numbers(values):
    """A float64 tensor of nested lists in which null stands for NaN."""
    return torch.tensor([[nan if v is None else v for v in row] if isinstance(row, list)
                         else (nan if row is None else row) for row in values], dtype=torch.float64)


def assert_close(a, b, tolerance=1e-5):
    """Within the tolerance, absolute or relative, elementwise."""
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (a, b))
    assert a.shape == b.shape
    assert bool(((a - b).abs() <= tolerance * b.abs().clamp(min=1)).all()), (a - b).abs().max()


# ---- golden numbers of the public implementations ------------------------------------------------

@pytest.mark.parametrize("case", GOLDEN["advantages"], ids=lambda c: "-".join(
    map(str, (c["kind"], c["advantage_estimator"], c["scale_rewards"], c["num_generations"]))))
def test_advantages_equal_those_of_ms_swift(case):
    """F1 to F7 agree with ms-swift's compute_advantages on every golden case."""
    rewards = numbers(case["rewards_per_func"])
    kl = numbers(case["kl_values"]) if case["kl_in_reward"] and case["kl_values"] else None
    ours = rr.compute_advantages(
        rewards, torch.arange(len(rewards)) // case["num_generations"], kl=kl, beta=case["beta"],
        advantage_estimator=case["advantage_estimator"], scale_rewards=case["scale_rewards"],
        reward_weights=case["reward_weights"])
    assert_close(ours, numbers(case["advantages"]))


@pytest.mark.parametrize("case", GOLDEN["dynamic"], ids=lambda c: "-".join(
    map(str, (c["advantage_estimator"], c["scale_rewards"], len(c["rewards"])))))
def test_advantages_of_groups_of_different_sizes_equal_those_of_ms_swift(case):
    """Groups of any size, rows in any order: agrees with compute_advantages_dynamic."""
    first = [case["request_ids"].index(r) for r in dict.fromkeys(case["request_ids"])]
    prompts = [case["prompt_ids"][i] for i in first]
    group = torch.tensor([sorted(set(prompts)).index(p) for p in prompts])
    ours = rr.compute_advantages(numbers(case["rewards"])[first], group,
                                 advantage_estimator=case["advantage_estimator"],
                                 scale_rewards=case["scale_rewards"])
    assert_close(ours, numbers(case["advantages"])[first])


@pytest.mark.parametrize("case", GOLDEN["losses"], ids=range(len(GOLDEN["losses"])))
def test_losses_and_gradients_equal_those_of_the_papers_code(case):
    """real, grpo, the sequence KL and the token mean of k3 agree with the published code."""
    old, new, ref = (numbers(case[name]) for name in ("old_logps", "new_logps", "ref_logps"))
    mask, rewards = numbers(case["completion_mask"]).bool(), numbers(case["rewards"])
    group = torch.arange(len(rewards)) // case["num_generations"]
    logp = new.clone().requires_grad_()
    k3 = rr.METHODS["real"].mean_kl(rr.kl_k3(logp, ref), mask)
    ours = {"real": rr.real_loss(logp, old, rewards, group, mask, tau=case["tau"]),
            "grpo": rr.grpo_loss(logp, old, numbers(case["advantages"]), mask),
            "kl_k3_token_mean": k3}
    for name, loss in ((name, ours[name]) for name in ours if name in case["losses"]):
        assert_close(loss.detach(), case["losses"][name]["loss"])
        assert_close(rr.gradient_weights(loss, logp), -numbers(case["losses"][name]["grad"]))
    assert_close(rr.sequence_kl(old, ref, mask), numbers(case["seq_kl_old_ref"]))


# ---- advantages ----------------------------------------------------------------------------------

def test_the_standard_deviation_is_the_sample_one():
    """B1: r = 1 0 0 0 gives 1.4997 and -0.4999 with GRPO, 1 and -1/3 with RLOO."""
    r, group = torch.tensor([1., 0, 0, 0]), torch.zeros(4, dtype=torch.long)
    assert_close(rr.compute_advantages(r, group, advantage_estimator="grpo"),
          [1.4997, -.4999, -.4999, -.4999], 1e-4)
    assert_close(rr.compute_advantages(r, group), [1, -1 / 3, -1 / 3, -1 / 3])


def test_rloo_subtracts_the_mean_of_the_others():
    """F4 written out: each reward minus the mean of the other K - 1."""
    r = torch.rand(7, dtype=torch.float64)
    slow = [r[i] - (r.sum() - r[i]) / 6 for i in range(7)]
    assert_close(rr.compute_advantages(r, torch.zeros(7)), torch.stack(slow), 1e-12)


def test_a_reward_that_is_missing_is_left_out_of_everything():
    """B4: None, 1, 1, 1 gives four zeros; with more spread, what remains is a group of three."""
    group = torch.zeros(4)
    assert rr.compute_advantages(torch.tensor([nan, 1, 1, 1]), group).tolist() == [0, 0, 0, 0]
    for estimator in rr.SCALE_REWARDS:
        with_gap = rr.compute_advantages(torch.tensor([.2, nan, 1, 0]), group,
                                         advantage_estimator=estimator)
        assert_close(with_gap[[0, 2, 3]], rr.compute_advantages(
            torch.tensor([.2, 1, 0]), torch.zeros(3), advantage_estimator=estimator))
        assert with_gap[1] == 0


def test_a_missing_column_is_left_out_of_the_sum():
    """F1: a completion scored by one function of two has that function's reward."""
    rewards = torch.tensor([[1., nan], [1, 2], [nan, nan]], dtype=torch.float64)
    total = rr.total_reward(rewards, [2., 0.5])
    assert total[:2].tolist() == [2.0, 3.0] and total[2].isnan()


def test_kl_is_subtracted_before_the_baseline():
    """B7: one token, old -1, ref -3, beta 0.1, reward 1 gives 0.8; ten tokens of 0.1 give KL 1."""
    one = torch.ones(1, 1, dtype=torch.bool)
    kl = rr.sequence_kl(torch.tensor([[-1.]]), torch.tensor([[-3.]]), one)
    assert kl.item() == 2.0
    ten = rr.sequence_kl(torch.zeros(1, 10), torch.full((1, 10), -.1), torch.ones(1, 10))
    assert_close(ten, [1.0])
    a = rr.compute_advantages(torch.tensor([1., 1.]), torch.zeros(2), kl=torch.tensor([2., 0.]),
                              beta=0.1)  # R' = 0.8 and 1
    assert_close(a, [-0.2, 0.2])
    assert not rr.sequence_kl(torch.zeros(1, 1, requires_grad=True), one.float(), one).requires_grad


@pytest.mark.parametrize("estimator, scale", [
    (e, s) for e in rr.SCALE_REWARDS for s in rr.SCALES if (e, s) != ("reinforce_plus_plus", "gdpo")])
@pytest.mark.parametrize("size", [2, 3, 7, 8, 33])
def test_equal_rewards_give_exactly_zero(estimator, scale, size):
    """No rounding residue of the mean survives the division, whatever the reward and its weights."""
    for value in (0.1, 0.3, 1 / 3, 0.7, -1e-3, 1e6):
        rewards = torch.full((2 * size, 3), value, dtype=torch.float64)
        rewards[size:] = torch.rand(size, 1)
        group = torch.arange(2 * size) // size
        a = rr.compute_advantages(rewards, group, advantage_estimator=estimator, scale_rewards=scale,
                                  reward_weights=[0.1, 1.22, 0.45])
        assert a[:size].abs().max() == 0 and a[size:].abs().max() > 0


def test_rewards_that_differ_by_rounding_only_are_equal():
    """0.1 + 0.2 is 0.3, in float32 too, in whatever columns; GDPO adds up to 0 where R is the same."""
    for dtype in (torch.float32, torch.float64):
        rewards = torch.tensor([[.1, .2, 0], [.3, 0, 0], [0, .3, 0], [.1, .1, .1]], dtype=dtype)
        for estimator in rr.SCALE_REWARDS:
            a = rr.compute_advantages(rewards, torch.zeros(4), advantage_estimator=estimator)
            assert a.dtype == dtype and a.abs().max() == 0
        mirror = torch.tensor([[1, 0], [0, 1], [.3, .7], [.6, .4]], dtype=dtype)
        assert rr.compute_advantages(mirror, torch.zeros(4), scale_rewards="gdpo").abs().max() == 0


def test_advantages_refuse_choices_that_do_not_exist():
    """The function checks what the command line checks."""
    for bad in (dict(scale_rewards="std"), dict(advantage_estimator="gae"),
                dict(advantage_estimator="reinforce_plus_plus", scale_rewards="gdpo")):
        with pytest.raises(ValueError, match="does not go with"):
            rr.compute_advantages(torch.tensor([1., 0]), torch.zeros(2), **bad)


def test_a_group_of_one_has_no_advantage():
    """B3: nothing to compare with gives 0, not NaN."""
    for estimator in rr.SCALE_REWARDS:
        for scale in ("group", "batch", "none"):
            a = rr.compute_advantages(torch.tensor([1., 0, .5]), torch.tensor([0, 1, 1]),
                                      advantage_estimator=estimator, scale_rewards=scale)
            assert a[0] == 0 and a.isfinite().all()


def test_groups_are_told_apart_by_id_not_by_order():
    """B5: prompts P1 P2 P1 P2 with rewards 1 0 1 0 have no signal; any permutation permutes A."""
    r = torch.tensor([1., 0, 1, 0])
    assert rr.compute_advantages(r, torch.tensor([1, 2, 1, 2])).tolist() == [0, 0, 0, 0]
    assert rr.compute_advantages(r, torch.tensor([1, 1, 2, 2])).tolist() == [1, -1, 1, -1]
    r, group = torch.rand(12), torch.tensor([5, 5, 5, 9, 9, 9, 9, 2, 2, 2, 2, 2])
    order = torch.randperm(12)
    for estimator in rr.SCALE_REWARDS:
        a = rr.compute_advantages(r, group, advantage_estimator=estimator)
        assert_close(rr.compute_advantages(r[order], group[order], advantage_estimator=estimator), a[order])


# ---- KL ------------------------------------------------------------------------------------------

def test_k3_pulls_towards_the_reference():
    """B8: at -1 with reference -3 the value is 1.1353 and the derivative 0.8647; at -1, 0 and 0."""
    logp = torch.tensor([[-1., -1.]], dtype=torch.float64, requires_grad=True)
    k3 = rr.kl_k3(logp, torch.tensor([[-3., -1.]], dtype=torch.float64))
    assert_close(k3.detach(), [[1.1353, 0]], 1e-4)
    assert_close(torch.autograd.grad(k3.sum(), logp)[0], [[0.8647, 0]], 1e-4)


def test_kl_in_the_loss_is_averaged_as_the_method_averages():
    """grpo per completion, rloo summed over its tokens, real over all tokens; 2 and 1 tokens."""
    k3 = torch.tensor([[1., 3.], [5., 99.]])
    mask = torch.tensor([[True, True], [True, False]])
    means = {name: method.mean_kl(k3, mask).item() for name, method in rr.METHODS.items()}
    assert means["grpo"] == 3.5 and means["rloo"] == 4.5 and means["real"] == 3.0


# ---- losses by hand ------------------------------------------------------------------------------

def test_the_weights_on_policy_are_those_of_the_table():
    """formulas.md's table for G = 4 and one group: GRPO W B |o|, RLOO W B, REAL W N |o|."""
    table = {(1, 0, 0, 0): ([1.4997, -.4999, -.4999, -.4999], [1, -1 / 3, -1 / 3, -1 / 3],
                            [1, -.5, -.5, -.5]),
             (1, 1, 0, 0): ([.8659, .8659, -.8659, -.8659], [2 / 3, 2 / 3, -2 / 3, -2 / 3],
                            [2 / 3, 2 / 3, -2 / 3, -2 / 3]),
             (1, 1, 1, 0): ([.4999, .4999, .4999, -1.4997], [1 / 3, 1 / 3, 1 / 3, -1],
                            [.5, .5, .5, -1])}
    mask = torch.ones(4, 3, dtype=torch.bool)
    for rewards, expected in table.items():
        rewards, group = torch.tensor(rewards).double(), torch.zeros(4, dtype=torch.long)
        for name, scale, row in zip(("grpo", "rloo", "real"), (12, 4, 3), expected):
            rollout = rr.Rollout(None, None, mask, group, rewards, old_logp=torch.zeros(4, 3).double())
            c = config(loss_type=name)
            rollout.advantages = rr.rollout_advantages(rewards, rollout, c)
            _, W = rr.loss_and_weights(rollout.old_logp, rollout, c)
            assert_close(W * scale, torch.tensor(row)[:, None].expand(4, 3), 1e-4)


def test_the_clip_binds_on_one_side_for_each_sign():
    """B10: epsilon 0.2 low and 0.28 high, ratios 0.7, 1.25, 1.4, A = +1 and -1."""
    ratio = torch.tensor([.7, 1.25, 1.4] * 2, dtype=torch.float64)
    A = torch.tensor([1., 1, 1, -1, -1, -1], dtype=torch.float64)
    logp = ratio.log()[:, None].requires_grad_()
    mask, zeros = torch.ones(6, 1, dtype=torch.bool), torch.zeros(6, 1, dtype=torch.float64)
    for loss_fn in (rr.grpo_loss, rr.rloo_loss):
        losses = [loss_fn(logp[i:i + 1], zeros[:1], A[i:i + 1], mask[:1], 0.2, 0.28) for i in range(6)]
        assert_close(torch.stack(losses).detach(), [-.7, -1.25, -1.28, .8, 1.25, 1.4], 1e-12)
        dlogp = torch.autograd.grad(sum(losses), logp)[0].squeeze(1)
        assert_close(dlogp / ratio, [-1, -1, 0, 0, 1, 1], 1e-12)
    rollout = rr.Rollout(None, None, mask, torch.arange(6), (A > 0).double(), zeros, advantages=A)
    for name in ("grpo", "rloo"):
        metrics = rr.update_metrics(logp.detach(), rollout, torch.zeros(6, 1),
                                    config(loss_type=name, epsilon_high=0.28))
        assert_close([metrics[f"clip_ratio/{k}_mean"] for k in ("low", "high", "region")],
              [1 / 6, 1 / 6, 2 / 6])


def test_the_loss_of_the_first_step_is_zero_for_grpo_and_not_for_real():
    """B11: r = 1 1 1 0 0 0 0 0. GRPO: value 0, gradient not. REAL: log 4 + log 6."""
    rewards = torch.tensor([1., 1, 1, 0, 0, 0, 0, 0], dtype=torch.float64)
    group, mask = torch.zeros(8, dtype=torch.long), torch.ones(8, 2, dtype=torch.bool)
    logp = torch.full((8, 2), -1., dtype=torch.float64, requires_grad=True)
    A = rr.compute_advantages(rewards, group, advantage_estimator="grpo")
    loss = rr.grpo_loss(logp, logp.detach(), A, mask)
    assert abs(loss.item()) < 1e-12 and rr.gradient_weights(loss, logp).abs().sum() > 0.1
    s = torch.zeros(8, 1, dtype=torch.float64, requires_grad=True)
    loss = rr.real_loss(s, torch.zeros_like(s), rewards, group, mask[:, :1])
    assert_close(loss.detach(), math.log(4) + math.log(6), 1e-12)
    assert_close(torch.autograd.grad(loss, s)[0][:, 0], [-.5] * 3 + [1 / 3] * 5, 1e-12)


@pytest.mark.parametrize("name", rr.METHODS)
def test_a_step_makes_right_answers_likelier_and_wrong_ones_less_likely(name):
    """B12: W > 0 on every token of a right answer, W < 0 on every token of a wrong one."""
    _, rollout = random_rollout(shift=0)
    c = config(loss_type=name, beta=0)
    rollout.ref_logp = None
    rollout.advantages = rr.rollout_advantages(rollout.rewards, rollout, c)
    _, W = rr.loss_and_weights(rollout.old_logp, rollout, c)
    right = (rollout.rewards > 0)[:, None]
    assert (W[rollout.mask & right] > 0).all() and (W[rollout.mask & ~right] < 0).all()
    assert_close(rr.gradient_weights(rr.grpo_loss(x := torch.tensor([[-1.]], requires_grad=True),
                                           x.detach(), torch.tensor([2.]), torch.ones(1, 1)), x), [[2.]])


def test_rloo_has_one_weight_for_all_tokens_of_a_completion():
    """B15: r = 1 0, 1 and 3 tokens: every W is A/2, not divided by the length; and no overflow."""
    mask = torch.tensor([[True, False, False], [True, True, True]])
    logp = torch.full((2, 3), -1., requires_grad=True)
    loss = rr.rloo_loss(logp, logp.detach(), torch.tensor([1., -1.]), mask)
    assert_close(rr.gradient_weights(loss, logp), [[.5, 0, 0], [-.5, -.5, -.5]])
    s = torch.ones(1, 100, requires_grad=True)
    for A in (-1., 1.):
        loss = rr.rloo_loss(s, torch.zeros(1, 100), torch.tensor([A]), torch.ones(1, 100))
        assert loss.isfinite() and rr.gradient_weights(loss, s).isfinite().all()


def test_real_does_not_overflow():
    """B16: a wrong answer at s = 60, a right one at 0, tau 0.5: 120 + log 2, gradients 2 and -1."""
    s = torch.tensor([[60.], [0.]], requires_grad=True)
    ones, group = torch.ones(2, 1, dtype=torch.bool), torch.zeros(2, dtype=torch.long)
    loss = rr.real_loss(s, torch.zeros(2, 1), torch.tensor([0., 1.]), group, ones)
    assert_close(loss.detach(), 120 + math.log(2), 1e-6)
    assert_close(torch.autograd.grad(loss, s)[0], [[2.], [-1.]], 1e-6)


def test_real_drops_groups_with_one_label_and_still_counts_them():
    """B17: groups 1 0 and 1 1 at s = 0 give log 2; one-sided groups alone a 0 that can go back."""
    s = torch.zeros(4, 1, dtype=torch.float64, requires_grad=True)
    ones, group = torch.ones(4, 1, dtype=torch.bool), torch.tensor([0, 0, 1, 1])
    loss = rr.real_loss(s, s.detach(), torch.tensor([1., 0, 1, 1]), group, ones)
    assert_close(loss.detach(), math.log(2), 1e-12)
    loss = rr.real_loss(s, s.detach(), torch.tensor([1., 1, 0, 0]), group, ones)
    assert loss.item() == 0 and torch.autograd.grad(loss, s)[0].abs().max() == 0


@pytest.mark.parametrize("rewards, labels", [((1, 1, .1, .1), "TTFF"), ((1, .5, 0), "TTF"),
                                             ((1, 1, -1, -1), "TTFF"), ((.1, .1, .1), "FFF")])
def test_reals_labels_come_from_a_threshold(rewards, labels):
    """B19: right means reward >= 0.5, whatever the other rewards are; one label only is dropped."""
    s = torch.zeros(len(rewards), 1, dtype=torch.float64, requires_grad=True)
    loss = rr.real_loss(s, s.detach(), torch.tensor(rewards), torch.zeros(len(rewards)),
                        torch.ones(len(rewards), 1, dtype=torch.bool))
    W = rr.gradient_weights(loss, s)[:, 0].tolist()
    if "T" in labels and "F" in labels:
        assert "".join("T" if w > 0 else "F" for w in W) == labels
    else:
        assert W == [0] * len(labels)


def test_real_keeps_unscored_and_masked_completions_out_of_both_labels():
    """NaN rewards and empty masks change no other weight and no divisor."""
    s = torch.randn(6, 2, dtype=torch.float64)
    rewards, group = torch.tensor([1., 0, 0, nan, 1, nan]), torch.tensor([0, 0, 0, 0, 0, 1])
    mask = torch.ones(6, 2, dtype=torch.bool)
    mask[4] = False
    full, part = s.clone().requires_grad_(), s[:3].clone().requires_grad_()
    loss = rr.real_loss(full, torch.zeros_like(s), rewards, group, mask)
    alone = rr.real_loss(part, torch.zeros_like(part), rewards[:3], group[:3], mask[:3])
    assert_close(loss.detach(), alone.detach(), 1e-12)
    W = rr.gradient_weights(loss, full)
    assert_close(W[:3], rr.gradient_weights(alone, part), 1e-12)
    assert W[3:].abs().max() == 0


def slow_update_loss(name, logp, r, beta, tau=0.5, epsilon=0.2):
    """F9 to F13 with loops over lists, as on paper; the loss of an update with KL in the loss."""
    rows = [i for i in range(len(logp)) if r.mask[i].any()]
    tokens = {i: [t for t in range(logp.shape[1]) if r.mask[i, t]] for i in rows}
    s = {i: [float(logp[i, t] - r.old_logp[i, t]) for t in tokens[i]] for i in rows}
    k3 = {i: [math.exp(d) - d - 1 for d in (float(r.ref_logp[i, t] - logp[i, t]) for t in tokens[i])]
          for i in rows}

    def clipped(log_rho, A):
        rho = math.exp(log_rho)
        return min(rho * A, min(max(rho, 1 - epsilon), 1 + epsilon) * A)

    if name == "grpo":
        return sum(-sum(clipped(x, float(r.advantages[i])) for x in s[i]) / len(s[i])
                   + beta * sum(k3[i]) / len(s[i]) for i in rows) / len(rows)
    if name == "rloo":
        return sum(-clipped(sum(s[i]), float(r.advantages[i])) + beta * sum(k3[i])
                   for i in rows) / len(rows)
    groups, loss = {int(r.group[i]) for i in rows}, 0.0
    for g in groups:
        s_bar = {i: sum(s[i]) / len(s[i]) for i in rows if r.group[i] == g}
        right = [x for i, x in s_bar.items() if r.rewards[i] >= 0.5]
        wrong = [x for i, x in s_bar.items() if r.rewards[i] < 0.5]
        if right and wrong:
            loss += math.log(1 + sum(math.exp(-x / tau) for x in right))
            loss += math.log(1 + sum(math.exp(x / tau) for x in wrong))
    return loss / len(groups) + beta * sum(map(sum, k3.values())) / sum(map(len, k3.values()))


@pytest.mark.parametrize("name", ["grpo", "rloo", "real"])
@pytest.mark.parametrize("beta", [0.001, 0.5])
@pytest.mark.parametrize("excluded", [[], [5], [0, 1, 2, 3]])
def test_the_loss_of_an_update_is_the_formula_on_paper(name, beta, excluded):
    """Groups of 4, 3 and 5, ratios within and beyond the clip, completions masked out or not."""
    logp, rollout = random_rollout(sizes=(4, 3, 5), shift=0.4)
    rollout.mask[excluded] = False
    rollout.advantages = torch.randn(12, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    ours = rr.update_loss(logp, rollout, config(loss_type=name, beta=beta, kl_in_reward=False))
    assert ours.item() == pytest.approx(slow_update_loss(name, logp, rollout, beta), abs=1e-12)
    without = rr.update_loss(logp, rollout, config(loss_type="rloo", beta=beta, kl_in_reward=True))
    assert without.item() == pytest.approx(slow_update_loss("rloo", logp, rollout, 0), abs=1e-12)


# ---- what holds for every method -----------------------------------------------------------------

def loss_and_weights(name, logp, rollout, **flags):
    c = config(loss_type=name, **flags)
    if rollout.advantages is None:
        rollout.advantages = rr.rollout_advantages(rollout.rewards, rollout, c)
    return rr.loss_and_weights(logp, rollout, c)


@pytest.mark.parametrize("name", rr.METHODS)
@pytest.mark.parametrize("garbage", [nan, inf, -inf, 1e30])
def test_masked_positions_have_no_influence(name, garbage):
    """Whatever stands behind the mask, in any cached matrix, the loss and W stay the same."""
    logp, rollout = random_rollout()
    rollout.mask[5] = False  # an excluded completion
    loss, W = loss_and_weights(name, logp, rollout, kl_in_reward=False, beta=0.1)
    dirty = rollout[torch.arange(8)]
    hidden = ~rollout.mask
    dirty.old_logp = rollout.old_logp.masked_fill(hidden, garbage)
    dirty.ref_logp = rollout.ref_logp.masked_fill(hidden, -garbage)
    dirty_loss, dirty_W = loss_and_weights(name, logp.masked_fill(hidden, garbage), dirty,
                                           kl_in_reward=False, beta=0.1)
    assert torch.equal(loss, dirty_loss) and torch.equal(W, dirty_W)
    assert W[hidden].abs().max() == 0 and W[rollout.mask].abs().min() > 0


@pytest.mark.parametrize("name", rr.METHODS)
def test_the_order_of_rows_does_not_matter(name):
    """A permutation of the completions permutes W and leaves the loss alone."""
    logp, rollout = random_rollout(sizes=(4, 3, 5))
    loss, W = loss_and_weights(name, logp, rollout, kl_in_reward=False)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    loss2, W2 = loss_and_weights(name, logp[order], rollout[order], kl_in_reward=False)
    assert_close(loss2, loss, 1e-12)
    assert_close(W2, W[order], 1e-12)


@pytest.mark.parametrize("name", rr.METHODS)
@pytest.mark.parametrize("logp, old", [(-1e4, -1.), (-1., -1e4), (-1e4, -1e4)])
def test_values_and_gradients_stay_finite_far_out(name, logp, old):
    """Log-probs down to -1e4 on either side, for right and wrong answers, in float32."""
    _, rollout = random_rollout(dtype=torch.float32)
    rollout.old_logp = torch.full_like(rollout.old_logp, old)
    for far in (rollout.rewards > 0, rollout.rewards < 1):
        moved = torch.where(far[:, None], logp, rollout.old_logp)
        loss, W = loss_and_weights(name, moved, rollout, kl_in_reward=False, beta=0.1)
        assert loss.isfinite() and W.isfinite().all()


@pytest.mark.parametrize("name", rr.METHODS)
def test_an_update_without_counted_tokens_is_a_zero_that_can_go_back(name):
    """B14: everything masked: loss 0, gradient exactly 0, no NaN."""
    logp, rollout = random_rollout()
    rollout.mask = torch.zeros_like(rollout.mask)
    loss, W = loss_and_weights(name, logp, rollout, kl_in_reward=False)
    assert loss == 0 and W.abs().max() == 0


def test_denominators_leave_out_what_is_masked():
    """B14: a masked completion counts in no mean: 25 tokens with loss 1 average to 1, not 0.83."""
    mask = torch.ones(6, 5, dtype=torch.bool)
    mask[5] = False
    assert rr.mean_completions(rr.mean_tokens(torch.ones(6, 5), mask), mask) == 1
    s = torch.zeros(6, 5)
    A = torch.full((6,), -1.)
    assert rr.grpo_loss(s, s, A, mask) == 1 and rr.rloo_loss(s, s, A, mask) == 1


def test_advantages_of_zero_give_exactly_nothing():
    """A = 0 gives loss 0 and W 0 even where the ratio would overflow."""
    s = torch.tensor([[0., 50.], [1e4, -1e4]], requires_grad=True)
    for loss_fn in (rr.grpo_loss, rr.rloo_loss):
        loss = loss_fn(s, torch.zeros(2, 2), torch.zeros(2), torch.ones(2, 2, dtype=torch.bool))
        assert loss == 0 and rr.gradient_weights(loss, s).abs().max() == 0


# ---- closed forms of the weights -----------------------------------------------------------------

def test_grpos_weight_is_its_closed_form():
    """F15 is |W| of grpo_loss times B |o|, for both signs of A, through the clip and beyond."""
    s = torch.linspace(-2.5, 2.5, 101, dtype=torch.float64)[:, None].requires_grad_()
    for A in (1.0, -1.0, 0.4):
        A = torch.full((101,), A, dtype=torch.float64)
        loss = rr.grpo_loss(s, torch.zeros_like(s), A, torch.ones(101, 1), 0.2, 0.28)
        W = rr.gradient_weights(loss, s)[:, 0] * 101
        assert_close(W.abs(), rr.grpo_weight(s.detach()[:, 0], A, 0.2, 0.28), 1e-12)
    points = [(-2.5, 1, .0821), (0, 1, 1), (.1823, 1, 1.2), (.2, 1, 0), (-.3, -1, 0),
              (-.2231, -1, .8), (1.1, -1, 3.004), (21, -1, 0)]  # the last: clamped, no gradient
    for s, A, weight in points:
        assert_close(rr.grpo_weight(torch.tensor(s), torch.tensor(A)), weight, 1e-3)


def test_reals_weight_is_its_closed_form():
    """F16 is |W| of real_loss times |o| times the number of groups, with C+ and C- from the others."""
    logp, rollout = random_rollout(sizes=(5, 3, 6), shift=1.0)
    for tau in (0.25, 0.5, 1.0):
        x = logp.clone().requires_grad_()
        loss = rr.real_loss(x, rollout.old_logp, rollout.rewards, rollout.group, rollout.mask, tau)
        W = rr.gradient_weights(loss, x)
        s_bar = rr.sequence_logit(logp, rollout.old_logp, rollout.mask)
        for i in range(14):
            right = bool(rollout.rewards[i] >= 0.5)
            others = [j for j in range(14) if j != i and rollout.group[j] == rollout.group[i]
                      and bool(rollout.rewards[j] >= 0.5) == right]
            C = 1 + sum(math.exp((-s_bar[j] if right else s_bar[j]) / tau) for j in others)
            weight = rr.real_weight(s_bar[i], tau, C, right) / rollout.mask[i].sum() / 3
            assert_close(W[i, 0].abs(), weight, 1e-12)
            assert 0 < rr.real_weight(s_bar[i], tau, C, right) < 1 / tau


def test_reals_weight_at_the_points_of_the_papers_figure():
    """tau 0.5, C = 4: 1.947 at -2.5, 0.4 at 0, 0.0034 at 2.5; wrong answers are the mirror image."""
    s = torch.tensor([-2.5, 0.0, 2.5])
    assert_close(rr.real_weight(s, 0.5, 4, True), [1.947, 0.4, 0.0034], 1e-3)
    assert_close(rr.real_weight(-s, 0.5, 4, False), [1.947, 0.4, 0.0034], 1e-3)
    assert rr.real_weight(0, 0.5, 1.6, True) == pytest.approx(1 / 1.3)  # an integer s_bar
    many = rr.real_weight(torch.linspace(-200, 200, 999), 0.5, torch.tensor(4.), torch.tensor(True))
    assert many.isfinite().all() and (many.diff() <= 0).all() and many.max() <= 2


# ---- the choices ---------------------------------------------------------------------------------

@pytest.mark.parametrize("flags, estimator, scale, kl_in_reward", [
    ({}, "rloo", "none", True), ({"loss_type": "grpo"}, "grpo", "group", False),
    ({"loss_type": "real"}, None, "none", False),
    ({"loss_type": "grpo", "advantage_estimator": "rloo"}, "rloo", "none", True),
    ({"advantage_estimator": "reinforce_plus_plus"}, "reinforce_plus_plus", "batch", True),
    ({"loss_type": "grpo", "kl_in_reward": True}, "grpo", "group", True),
    ({"loss_type": "rloo", "kl_in_reward": False}, "rloo", "none", False)])
def test_defaults_follow_the_method(flags, estimator, scale, kl_in_reward):
    """The section "Choices and their defaults", row by row."""
    c = config(**flags)
    assert (c.advantage_estimator, c.scale_rewards, c.kl_in_reward) == (estimator, scale, kl_in_reward)


def test_choices_that_contradict_are_refused_or_reported():
    """REAL with KL in the reward and gdpo with reinforce_plus_plus: errors. The rest: warnings."""
    with pytest.raises(ValueError, match="kl_in_reward"):
        config(loss_type="real", kl_in_reward=True)  # B20
    with pytest.raises(ValueError, match="gdpo"):
        config(advantage_estimator="reinforce_plus_plus", scale_rewards="gdpo")
    with pytest.warns(UserWarning, match="scale_rewards"):
        assert config(loss_type="real", scale_rewards="group").scale_rewards == "none"
    with pytest.warns(UserWarning, match="gdpo"):
        assert config(scale_rewards="gdpo").kl_in_reward is False


def test_reals_labels_are_raw_even_with_a_large_kl():
    """B20: KL 30 at beta 0.04 on the second of r = 1 1 0 0 leaves its label right."""
    logp, rollout = random_rollout(sizes=(4,), shift=0)
    rollout.rewards = torch.tensor([1., 1, 0, 0], dtype=torch.float64)
    rollout.ref_logp = rollout.old_logp - 30 * (torch.arange(4) == 1)[:, None]
    _, W = loss_and_weights("real", logp, rollout, beta=1e-9)
    assert [bool(w > 0) for w in W[:, 0]] == [True, True, False, False]
