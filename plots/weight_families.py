"""python plots/weight_families.py

What the REAL paper's figure hides. Left and middle: how REAL's weight on a right answer moves with
tau and with the number of right answers in its group (on a wrong answer it is the mirror image).
Right: the total push, the sum of |W| over the right and over the wrong answers of a group, on
policy, as the share of right answers goes from 0 to 1, each method relative to a group that is half
right: a constant factor is the learning rate's business, the shape of the curve is the method's."""
import torch
from common import COLORS, LINES, MARKERS, METHODS, NAMES, options, plt, save, stop
from gradient_weights import real_curve

from rloo_real import compute_advantages, gradient_weights, grpo_loss, real_loss, rloo_loss

SIZE = 8  # completions of a group, in the left two panels

def push(method, size):
    """(on right, on wrong) [size + 1]: sum of |W| over the completions, of one token each, in a
    group with 0 to `size` right, on policy."""
    pushes = []
    for right in range(size + 1):
        rewards = (torch.arange(size) < right).double()  # [B]
        group = torch.zeros(size, dtype=torch.long)
        logp = torch.zeros(size, 1, dtype=torch.float64, requires_grad=True)
        old_logp, mask = torch.zeros_like(logp), torch.ones(size, 1, dtype=torch.bool)
        if method == "real":
            loss = real_loss(logp, old_logp, rewards, group, mask)
        else:
            advantages = compute_advantages(rewards, group, advantage_estimator=method)
            loss = dict(grpo=grpo_loss, rloo=rloo_loss)[method](logp, old_logp, advantages, mask)
        W = gradient_weights(loss, logp)[:, 0].abs()
        pushes.append([W[:right].sum(), W[right:].sum()])
    return torch.tensor(pushes).T

def total_push(size=SIZE):
    """{method: (on right, on wrong)} [size + 1], divided by those of a group that is half right."""
    pushes = {m: push(m, size) for m in METHODS}
    return {m: p / p[:, size // 2, None] for m, p in pushes.items()}

def draw_family(axes, s, weights, labels):
    """REAL's weights [n] over s [n], one curve for each, dark to light; labels: (text, x, y)."""
    shades = plt.colormaps["Greens"](torch.linspace(1, 0.45, len(weights)).tolist())
    for weight, color in zip(weights, shades):
        axes.plot(s, weight, color=color)
    for text, x, y in labels:
        axes.text(x, y, text)
    axes.set(xlim=(-2.5, 2.5), xlabel=r"$\bar{s}$ of a right answer")

def draw_push(axes, size):
    """The total push of each method on right and on wrong answers over the share of right ones."""
    share, inside = torch.arange(size + 1) / size, slice(1, size)
    for method, (right, wrong) in total_push(size).items():
        style = dict(color=COLORS[method], ls=LINES[method], marker=MARKERS[method], ms=5)
        if method == "real":
            axes.plot(share[inside], right[inside], label="REAL, on right answers", **style)
            axes.plot(share[inside], wrong[inside], label="REAL, on wrong answers", mfc="white",
                      **style)
        else:
            axes.plot(share[inside], right[inside], label=f"{NAMES[method]}, on both", **style)
        axes.plot(share[::size], right[::size], "o", color="0.35", ms=5, clip_on=False)
    axes.set(xlabel="share of right answers in the group", xlim=(0, 1), ylim=(0, 1.25))
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "¼", "½", "¾", "1"])
    axes.legend(loc="lower center", fontsize=8.5)

def draw(size):
    """The figure: tau, the make-up of the group, the total push."""
    s, half = torch.linspace(-2.5, 2.5, 201, dtype=torch.float64), SIZE // 2
    figure, axes = plt.subplots(1, 3, figsize=(8.2, 3.3), width_ratios=[1, 1, 1.2])
    draw_family(axes[0], s, [real_curve(s, tau, half, half, True) for tau in (0.25, 0.5, 1)],
                [(rf"$\tau={tau:g}$", -2.4, y) for tau, y in ((0.25, 4.08), (0.5, 2.08), (1, 0.9))])
    axes[0].set(title=f"REAL, {half} of {SIZE} right", ylim=(0, 4.5), yticks=range(5),
                ylabel=r"gradient weight $|\partial J/\partial s|$")
    draw_family(axes[1], s, [real_curve(s, 0.5, n, SIZE - n, True) for n in range(1, SIZE)],
                [(f"1 of {SIZE} right", 0.15, 1.0), (f"{SIZE - 1} right", -2.15, 0.9)])
    axes[1].set(title=r"REAL, $\tau=0.5$", ylim=(0, 2.25), yticks=[0, 0.5, 1, 1.5, 2])
    draw_push(axes[2], size)
    axes[2].set(title=r"total push $\sum|W|$ (half right: 1)")
    return figure

def main(argv=None):
    """Reads the options, draws, saves."""
    parser = options(__file__, __doc__)
    parser.add_argument("--size", type=int, default=8, help="completions of a group, total push")
    args = parser.parse_args(argv)
    if args.size < 2 or args.size % 2:
        stop(f"size is {args.size}; set --size to an even number from 2 on")
    save(draw(args.size), args)

if __name__ == "__main__":
    main()
