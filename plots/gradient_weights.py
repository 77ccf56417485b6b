"""python plots/gradient_weights.py

How hard GRPO and REAL push one token of a right and of a wrong answer, by how much more likely the
policy has made it since it was sampled: the REAL paper's figure 3 (arXiv 2602.05630). The curves
are derivatives of the losses that train, taken by automatic differentiation on real groups; the
dots on them are the closed forms (F15, F16)."""
import math

import torch
from common import COLORS, LINES, MARKERS, options, plt, save, stop

from rloo_real import gradient_weights, grpo_loss, grpo_weight, real_loss, real_weight

def grpo_curve(s, advantage, epsilon):
    """|dJ/ds| [n] of grpo_loss for completions of one token with log-ratio s [n]: |W| B |o|."""
    logp = s[:, None].clone().requires_grad_()  # [n, 1]; old_logp is 0, so that logp is s
    mask = torch.ones_like(logp, dtype=torch.bool)
    loss = grpo_loss(logp, torch.zeros_like(logp), torch.full_like(s, advantage), mask, epsilon)
    return gradient_weights(loss, logp)[:, 0].abs() * len(s)

def real_curve(s, tau, right, wrong, positive):
    """|dJ/ds| [n] of real_loss for one completion with log-ratio s [n] in a group of `right` right
    and `wrong` wrong ones, the others at 0, in n groups, one for each point: |W| N |o|."""
    n, size = len(s), right + wrong
    logp = torch.zeros(n, size, dtype=s.dtype)
    swept = 0 if positive else size - 1  # right completions come first
    logp[:, swept] = s
    logp = logp.reshape(-1, 1).requires_grad_()  # [n * size, 1]
    mask = torch.ones_like(logp, dtype=torch.bool)
    rewards = (torch.arange(size) < right).to(s).repeat(n)
    group = torch.arange(n).repeat_interleave(size)
    loss = real_loss(logp, torch.zeros_like(logp), rewards, group, mask, tau)
    return gradient_weights(loss, logp).reshape(n, size)[:, swept].abs() * n

def curves(tau=0.5, epsilon=0.2, advantage=1.0, right=4, wrong=4, points=501):
    """{"s": [n], (method, positive): (by autodiff [n], closed form [n])}; s from -2.5 to 2.5, with
    the two sides of each clip, so that the jump there is upright."""
    edges = [math.log(edge) + d for edge in (1 + epsilon, 1 - epsilon) for d in (-1e-9, 1e-9)]
    s = torch.cat([torch.linspace(-2.5, 2.5, points, dtype=torch.float64),
                   torch.tensor(edges, dtype=torch.float64)]).sort().values
    result = {"s": s}
    for positive in (True, False):
        A, c = (advantage, right) if positive else (-advantage, wrong)  # C = 1 + c - 1: others at 0
        result["grpo", positive] = grpo_curve(s, A, epsilon), grpo_weight(s, A, epsilon)
        result["real", positive] = (real_curve(s, tau, right, wrong, positive),
                                    real_weight(s, tau, c, positive))
    return result

def draw_panel(axes, numbers, positive, args):
    """One panel of the figure: curves, dots, the clip, and where GRPO's weight goes wrong."""
    s, sign, edge = numbers["s"], "+" if positive else "-", args.epsilon * (1 if positive else -1)
    formulas = dict(
        grpo=r"GRPO  $|A\,e^{s}|$",
        real=r"REAL  $\dfrac{1}{\tau}\;\dfrac{1}{1+C_%s\,e^{%s\bar{s}/\tau}}$" % (
            sign, sign.strip("+")))
    quarters = (4 * s - (4 * s).round()).abs() < 1e-6
    for method, label in formulas.items():
        autodiff, closed = numbers[method, positive]
        axes.plot(s, autodiff, LINES[method], color=COLORS[method])
        dots = quarters & (closed <= 3)
        axes.plot(s[dots], closed[dots], MARKERS[method], color=COLORS[method], ms=5, mec="white",
                  mew=0.6, clip_on=False)
        axes.plot([], [], LINES[method], marker=MARKERS[method], color=COLORS[method], label=label)
    grpo, real = numbers["grpo", positive][0], numbers["real", positive][0]
    axes.fill_between(s, grpo, real, color="0.5", alpha=0.2, lw=0, where=(
        (real > grpo) & (s < math.log(1 + edge)) if positive else grpo > real))
    axes.axvline(math.log(1 + edge), color="0.3", lw=1, ls=":")
    axes.annotate(rf"clip, $s=\ln {1 + edge:g}$", (math.log(1 + edge), 2.8),
                  (5 if positive else -5, 0), textcoords="offset points", va="top",
                  ha="left" if positive else "right")
    axes.set(title=rf"{'Right' if positive else 'Wrong'} answer: $r={positive:d},\ A={sign}"
             rf"{args.advantage:g}$", xlim=(-2.5, 2.5), ylim=(0, 3),
             xlabel="relative log-probability $s$")
    axes.legend(loc="center right" if positive else "center left", handlelength=1.8,
                bbox_to_anchor=(1.02 if positive else -0.02, 0.62), labelspacing=1)

def draw(numbers, args):
    """The figure, with a panel for right and one for wrong answers."""
    figure, axes = plt.subplots(1, 2, figsize=(8.2, 3.8), sharey=True)
    for panel, positive in zip(axes, (True, False)):
        draw_panel(panel, numbers, positive, args)
    axes[0].set_ylabel(r"gradient weight $|\partial J/\partial s|$")
    there = (numbers["s"] + 1.62).abs().argmin()
    low, high = sorted(numbers[method, True][0][there].item() for method in ("grpo", "real"))
    height = (low + high) / 2 if high - low > 1 else high + 0.5  # in the region if it has room
    axes[0].text(-1.62, height, "gradient\nmisassignment:\nthe unlikely\nget the least",
                 ha="center", va="center")
    axes[1].text(1.76, 2.36, "gradient\ndomination:\nGRPO's weight\nhas no bound", ha="center",
                 va="center")
    figure.suptitle(rf"Lines: derivatives of the losses. Dots: closed forms. $\tau={args.tau:g}$, "
                    rf"$\epsilon={args.epsilon:g}$, group with {args.group} right, others at "
                    rf"$\bar s=0$", fontsize=9)
    return figure

def main(argv=None):
    """Reads the options, draws, saves."""
    parser = options(__file__, __doc__)
    parser.add_argument("--tau", type=float, default=0.5, help="REAL's temperature")
    parser.add_argument("--epsilon", type=float, default=0.2, help="GRPO's clip")
    parser.add_argument("--advantage", type=float, default=1.0, help="A is this, and minus this")
    parser.add_argument("--group", default="4/8", help="RIGHT/ALL completions of REAL's group")
    args = parser.parse_args(argv)
    right, _, size = args.group.partition("/")
    if not (right.isdecimal() and size.isdecimal() and 0 < int(right) < int(size)):
        stop(f"group is {args.group}; set --group to RIGHT/ALL with both labels in it, as 4/8")
    if not (args.tau > 0 and args.advantage > 0 and 0 < args.epsilon < 1):
        stop(f"tau is {args.tau}, advantage {args.advantage}, epsilon {args.epsilon}; set all of "
             "them above 0, and epsilon below 1")
    numbers = curves(args.tau, args.epsilon, args.advantage, int(right), int(size) - int(right))
    save(draw(numbers, args), args)

if __name__ == "__main__":
    main()
