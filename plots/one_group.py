"""python plots/one_group.py --rewards 1,0,0,0 --logits 0,0,0,0 --lengths 3,3,3,3

One group of completions taken apart: what GRPO, RLOO and REAL make of its rewards, and the weight W
of each token of each completion, as a table and as bars. A logit is a completion's mean log-ratio
per token, s_bar (F12): 0 on policy, above 0 where the policy has come to favour it; here each of
its tokens has just that log-ratio. W compares within a method: a constant factor is the business of
the learning rate."""
import math
import sys

import torch
from common import COLORS, METHODS, NAMES, options, plt, save, stop

from rloo_real import (compute_advantages, gradient_weights, grpo_loss, real_competition, real_loss,
                       real_weight, rloo_loss, sequence_logit)

def take_apart(rewards, logits, lengths, tau=0.5, epsilon=0.2):
    """{method: (advantage or whether right [G], ratio or share [G], W of each token [G])} of a
    group with rewards [G], logits [G] (s_bar) and lengths [G] in tokens."""
    rewards, logits = (torch.tensor(x, dtype=torch.float64) for x in (rewards, logits))
    lengths = torch.tensor(lengths)
    mask = torch.arange(lengths.max()) < lengths[:, None]  # [G, T]
    logp = torch.where(mask, logits[:, None], 0.0).requires_grad_()  # old_logp is 0
    old_logp, group, parts = torch.zeros_like(logp), torch.zeros_like(lengths), {}
    for method, loss, log_ratio in (("grpo", grpo_loss, logits),
                                    ("rloo", rloo_loss, logits * lengths)):
        advantages = compute_advantages(rewards, group, advantage_estimator=method)
        loss = loss(logp, old_logp, advantages, mask, epsilon)
        parts[method] = advantages, log_ratio.exp(), gradient_weights(loss, logp)[:, 0]
    s_bar, right = sequence_logit(logp, old_logp, mask).detach(), rewards >= 0.5
    c = real_competition(s_bar, rewards, group, mask, tau)  # NaN where all have one label
    W = gradient_weights(real_loss(logp, old_logp, rewards, group, mask, tau), logp)[:, 0]
    parts["real"] = right, real_weight(s_bar, tau, c, right).nan_to_num() * tau, W
    return parts

def decimals(x, n):
    """x with n decimals, without a minus before a zero."""
    return f"{round(float(x), n) + 0.0:.{n}f}"

def table(rewards, logits, lengths, parts):
    """The table's lines: the formulas' numbers, a line for each completion, and the sums."""
    row = ("{:>2} {:>6} {:>4} {:>6} | {:>7} {:>7} {:>8} | {:>7} {:>7} {:>8} | {:>5} {:>6} {:>8}"
           .format)
    lines = [row(*[""] * 5, "GRPO", "", "", "RLOO", "", "", "REAL", ""),
             row("", "F1", "", "F12", "F3, F6", "F10", "F14", "F4", "F11", "F14", "F13", "F16",
                 "F14"),
             row("", "reward", "|o|", "s_bar", *["A", "ratio", "W"] * 2, "label", "share", "W")]
    for i, reward in enumerate(rewards):
        cells = [i + 1, f"{reward:g}", lengths[i], f"{logits[i]:.3g}"]
        for advantage, ratio, W in (parts["grpo"], parts["rloo"]):
            clipped = W[i] == 0 and advantage[i] * ratio[i] != 0
            cells += [decimals(advantage[i], 4), decimals(ratio[i], 4) if ratio[i] < 99 else "> 99",
                      "clipped" if clipped else decimals(W[i], 5)]
        right, share, W = parts["real"]
        cells += ["right" if right[i] else "wrong", decimals(share[i], 4), decimals(W[i], 5)]
        lines.append(row(*cells))
    sums = [decimals((torch.tensor(lengths) * parts[m][2]).sum(), 5) for m in METHODS]
    lines.append(f"{'sum of |o| W':>21} | {sums[0]:>24} | {sums[1]:>24} | {sums[2]:>21}")
    return [line.rstrip() for line in lines]

def draw(parts):
    """The figure: W of each completion as a bar, a panel for each method; wrong ones hatched."""
    figure, axes = plt.subplots(1, 3, figsize=(8.2, 2.8))
    for panel, method in zip(axes, METHODS):
        W, right = parts[method][2].tolist(), parts["real"][0].tolist()
        bars = panel.bar([str(i + 1) for i in range(len(W))], W, width=0.7, lw=1,
                         edgecolor=COLORS[method], hatch=["" if r else "///" for r in right],
                         color=[COLORS[method] if r else "white" for r in right])
        if len(W) <= 8:
            seen = [w if abs(w) > 0.005 * max(map(abs, W)) else 0 for w in W]
            panel.bar_label(bars, [f"{w:.3g}".replace("-", "\N{minus sign}") for w in seen],
                            padding=2, fontsize=8)
        panel.axhline(0, color="black", lw=0.8)
        panel.use_sticky_edges = False
        panel.margins(y=0.14)
        panel.grid(axis="x", visible=False)
        panel.set(title=NAMES[method], xlabel="completion (hatched: wrong)")
    axes[0].set_ylabel("$W$ of each token")
    return figure

def numbers(name, text, kind):
    """The list of numbers in text; stops where it is none."""
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError:
        values = [math.nan]
    if not all(map(math.isfinite, values)):
        stop(f"{name} is {text}; set --{name} to numbers with commas between, one a completion"
             + (", whole ones" if kind is int else ""))
    return values

def main(argv=None):
    """Reads the options, prints the table, draws, saves."""
    parser = options(__file__, __doc__)
    parser.add_argument("--rewards", default="1,0,0,0", help="from 0.5 on: a right answer")
    parser.add_argument("--logits", default="0,0,0,0", help="s_bar, mean log-ratio per token, nats")
    parser.add_argument("--lengths", default="3,3,3,3", help="counted tokens")
    parser.add_argument("--tau", type=float, default=0.5, help="REAL's temperature")
    parser.add_argument("--epsilon", type=float, default=0.2, help="the clip of GRPO and RLOO")
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args([f" {a}" if a[:1] == "-" and a[1:2] in "0123456789." else a
                              for a in argv])  # -1,0 is a value, though it looks like an option
    rewards, logits = (numbers(n, getattr(args, n).strip(), float) for n in ("rewards", "logits"))
    lengths = numbers("lengths", args.lengths.strip(), int)
    if not len(rewards) == len(logits) == len(lengths) >= 2:
        stop(f"there are {len(rewards)} rewards, {len(logits)} logits and {len(lengths)} lengths; "
             "give as many of each, two completions or more")
    if min(lengths) < 1:
        stop(f"lengths are {args.lengths.strip()}; a completion has 1 token or more")
    if not (args.tau > 0 and 0 <= args.epsilon < 1):
        stop(f"tau is {args.tau}, epsilon {args.epsilon}; set tau above 0 and epsilon from 0 to "
             "below 1")
    parts = take_apart(rewards, logits, lengths, args.tau, args.epsilon)
    print(*table(rewards, logits, lengths, parts), sep="\n")
    save(draw(parts), args)

if __name__ == "__main__":
    main()
