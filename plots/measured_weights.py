"""python plots/measured_weights.py

The gradient weights of real runs over their formulas. Reads the weights-STEP.npz that a run with
--log_weights_steps 8 16 ... and --beta 0 writes (several updates per rollout, so that s spreads):

    python plots/measured_weights.py RUN [RUN ...]

With no RUN it makes a short one for each method itself, in a temporary folder. Scales that put
practice and theory on one axis: GRPO |W| B |o| / |A| over s_t of a token; RLOO |W| B / |A| over the
sum of s_t; REAL |W| N |o| over s_bar + tau ln(C/4) of a right and s_bar - tau ln(C/4) of a wrong
completion, which puts every group on the curve of C = 4. The distances it prints are of all of
them, the picture has the axes of the paper's figure."""
import tempfile
from pathlib import Path

import numpy as np
import torch
from common import COLORS, MARKERS, METHODS, NAMES, options, plt, run_trainer, save, stop

from rloo_real import grpo_weight, real_weight

RUN_FLAGS = ("--beta 0 --updates_per_rollout 4 --num_iterations 4 --max_steps 48 --eval_steps 0 "
             "--learning_rate 5e-4 --log_weights_steps").split()
RUN_STEPS = [str(s) for s in range(1, 49) if (s - 1) % 16 >= 8]  # the last two of four passes
AXES = dict(grpo=(r"$|W|\,B\,|o|\,/\,|A|$", "$s_t$"), rloo=(r"$|W|\,B\,/\,|A|$", r"$\sum s_t$"),
            real=(r"$|W|\,N\,|o|$", r"$\bar{s}\pm\tau\,\ln(C/4)$"))  # weight, position

def theory(x, positive, settings):
    """The method's closed form (F15 for A = +-1, F16 for C = 4) at x [n]."""
    if settings["loss_type"] == "real":
        return real_weight(x, settings["real_tau"], 4.0, positive)
    return grpo_weight(x, torch.where(torch.as_tensor(positive), 1.0, -1.0), settings["epsilon"],
                       settings["epsilon_high"])

def read_weights(path):
    """(settings, x [n], measured weight [n], positive [n]) of the counted tokens of a
    weights-STEP.npz, scaled as above; rows with no advantage, or with no C, are left out."""
    with np.load(path, allow_pickle=False) as file:
        d = {name: torch.from_numpy(file[name]) if file[name].ndim else file[name].item()
             for name in file.files}
    settings = {n: d[n] for n in ("loss_type", "epsilon", "epsilon_high", "real_tau")}
    if d["beta"] > 0 and not d["kl_in_reward"]:
        stop(f"{path} has a KL in its loss and so in its W; set --beta 0 or --kl_in_reward true")
    size = d["W"].abs()  # [B, T]
    if d["loss_type"] == "real":
        keep, positive = ~d["C"].isnan(), d["right"]
        shift = d["real_tau"] * (d["C"] / 4).log()
        x = (d["s_bar"] + torch.where(positive, shift, -shift))[:, None]
        size = size * d["N"] * d["length"][:, None]
    else:
        keep, positive = d["advantage"] != 0, d["advantage"] > 0
        x, size = d["s"], size * d["B"] / d["advantage"].abs()[:, None]
        if d["loss_type"] == "grpo":
            size = size * d["length"][:, None]
        else:
            x = x.sum(1, keepdim=True)
    counted = d["mask"] & keep[:, None]
    return (settings, x.expand_as(size)[counted], size[counted],
            positive[:, None].expand_as(size)[counted])

def read_runs(folders):
    """{method: (settings, x [n], measured [n], positive [n])} of all weights files in folders."""
    found = {}
    for folder in folders:
        paths = sorted(Path(folder).glob("weights-*.npz"))
        if not paths:
            stop(f"{folder} has no weights-STEP.npz; run rloo_real.py with --log_weights_steps")
        for path in paths:
            try:
                settings, *arrays = read_weights(path)
            except Exception as error:  # numpy and zipfile raise many kinds
                stop(f"{path} can't be read ({error}); remove it")
            found.setdefault(settings["loss_type"], []).append((settings, arrays))
    for method, parts in found.items():
        if not any(len(x) for _, (x, _, _) in parts):
            stop(f"no completion of the runs of {method} has an advantage, or both labels around "
                 "it; log other steps")
        if any(settings != parts[0][0] for settings, _ in parts):
            stop(f"the runs of {method} differ in epsilon, epsilon_high or real_tau; give those "
                 "with the same ones")
    return {method: (found[method][0][0], *map(torch.cat, zip(*(a for _, a in found[method]))))
            for method in METHODS if method in found}

def largest_distance(settings, x, measured, positive):
    """How far the measured weights [n] are at most from the closed form."""
    return (measured - theory(x, positive, settings)).abs().max().item()

def draw(runs):
    """The figure: a column for each method, right answers above and wrong ones below."""
    figure, axes = plt.subplots(2, len(runs), figsize=(8.2, 5), squeeze=False, sharex=True,
                                sharey=True)
    s = torch.linspace(-2.5, 2.5, 2001)
    for column, (method, (settings, x, measured, positive)) in zip(axes.T, runs.items()):
        for panel, sign in zip(column, (True, False)):
            rows = positive == sign
            panel.plot(s, theory(s, sign, settings), color="black", lw=1)
            panel.plot(x[rows], measured[rows], MARKERS[method], ms=5, mfc="none", alpha=0.6,
                       mec=COLORS[method], rasterized=True)
            if above := (measured[rows] > 3).sum():
                panel.text(-2.3, 2.7, f"{above} above 3,\nup to {measured[rows].max():.1f}",
                           va="top")
        column[0].set_title(f"{NAMES[method]}: {AXES[method][0]}")
        column[1].set_xlabel(AXES[method][1])
    axes[0, 0].set(ylabel="right answers ($A>0$)", xlim=(-2.5, 2.5), ylim=(-0.05, 3))
    axes[1, 0].set_ylabel("wrong answers ($A<0$)")
    figure.suptitle("Lines: formulas. Marks: tokens of a run (RLOO and REAL: a completion's tokens "
                    "share one mark)", fontsize=9)
    return figure

def main(argv=None):
    """Reads the options and the runs, prints the largest distances, draws, saves."""
    parser = options(__file__, __doc__)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="output folders of rloo_real.py")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        runs = read_runs(args.runs or [
            run_trainer(Path(folder, m), "--loss_type", m, *RUN_FLAGS, *RUN_STEPS)
            for m in METHODS])
    for method, run in runs.items():
        print(f"{NAMES[method]}: {len(run[1])} weights, the largest distance to the formula is "
              f"{largest_distance(*run):.1e}")
    save(draw(runs), args)

if __name__ == "__main__":
    main()
