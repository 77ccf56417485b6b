"""python plots/training_dynamics.py

What the weights do to training, the paper's figure 4 on a laptop: entropy, validation pass@1,
reward and the share of groups solved entirely, for GRPO, RLOO and REAL, on policy, on stale
rollouts, and on stale ones at a rate too high for all. Drawn from the summary beside this script.
--run makes it anew: 27 runs of the embedded model, each method at its own learning rate, and up to
12 more, at GRPO's where the own is another: what a rate does must not pass for what a method does.
--tune searches for those rates, in 27 runs.
A run takes less than a minute on a CPU core; finished ones are kept.
"""
import json
import shutil
import statistics
from pathlib import Path

import common
import numpy as np
from common import COLORS, LINES, MARKERS, METHODS, NAMES, ROOT, plt
from tqdm import tqdm

SUMMARY = Path(__file__).with_suffix(".json")
STALE = dict(  # the paper's four updates of each rollout, four times over
    updates_per_rollout=4, num_iterations=4, max_steps=960, eval_steps=64)
SETTINGS = {
    "on policy": dict(  # every step on a rollout of its own
        updates_per_rollout=1, num_iterations=1, max_steps=240, eval_steps=20),
    "stale": STALE, "stale, fast": STALE}
EVERYWHERE = dict(beta=0.0, real_tau=0.5, logging_steps=1, eval_samples=512, device="cpu")
SEEDS, TUNING_SEED = [0, 1, 2], 100
RATES = {  # the same for all methods; more steps on each rollout want smaller ones
    "on policy": [5e-5, 1e-4, 2e-4, 4e-4], "stale": [6.25e-6, 1.25e-5, 2.5e-5, 5e-5, 1e-4],
    "stale, fast": [1e-4]}  # too fast for all three: where clips and weights matter
PANELS = {"entropy": "entropy (nats)", "eval/pass@1": "pass@1, held out", "reward": "reward",
          "frac_all_right": "groups all right"}
ALSO = ["clip_ratio/region_mean", "ratio/max"]  # in the summary and the printed table, not drawn

def train(folder, flags):
    """Runs the trainer into the folder, unless a finished run with these flags is there."""
    if finished(folder, flags):
        return
    shutil.rmtree(folder, ignore_errors=True)
    common.run_trainer(folder, *(f"--{name}={value}" for name, value in flags.items()), quiet=True)

def finished(folder, flags):
    """Whether the folder holds the model, the last row and the flags of such a run."""
    if not Path(folder, "model").is_dir():
        return False
    used = json.loads(Path(folder, "config.json").read_text())
    return (all(used[name] == value for name, value in flags.items())
            and common.read_metrics(folder)[-1]["step"] == flags["max_steps"])

def train_all(runs, jobs):
    """Does the jobs (setting, method, rate, seed), one after the other; returns their metrics."""
    metrics = {}
    for setting, method, rate, seed in (bar := tqdm(jobs, unit="run")):
        kind = setting.partition(",")[0].replace(" ", "-")
        folder = Path(runs, f"{kind}-{method}-{rate:g}-{seed}")
        bar.set_description(folder.name)
        train(folder, EVERYWHERE | SETTINGS[setting] | dict(
            loss_type=method, learning_rate=rate, seed=seed))
        metrics[setting, method, rate, seed] = common.read_metrics(folder)
    return metrics

def final(rows):
    """Means over the last three evaluations and the last 40 steps; a rate is chosen by pass@1."""
    passed = [row["eval/pass@1"] for row in rows if "eval/pass@1" in row][-3:]
    entropy = [row["entropy"] for row in rows if "entropy" in row][-40:]
    return {"pass@1": round(statistics.fmean(passed), 4),
            "entropy": round(statistics.fmean(entropy), 4)}

def tune(runs):
    """One run per setting, method and rate; returns {setting: {method: {rate: its end}}}."""
    jobs = [(s, m, rate, TUNING_SEED) for s in SETTINGS for m in METHODS for rate in RATES[s]]
    table = {s: {m: {} for m in METHODS} for s in SETTINGS}
    for (s, m, rate, _), rows in train_all(runs, jobs).items():
        table[s][m][f"{rate:g}"] = final(rows)
    return table

def best(table):
    """The rate whose run ended with the highest pass@1."""
    return float(max(table, key=lambda rate: table[rate]["pass@1"]))

def windows(rows, key, width):
    """(step, value) points: means over every `width` steps; an evaluation stands alone in its."""
    ends = range(0, rows[-1]["step"] + 1, width)
    parts = [[row for row in rows if end - width < row["step"] <= end and key in row]
             for end in ends]
    return [[statistics.fmean(row[name] for row in part) for name in ("step", key)]
            for part in parts if part]

def curves(seeds, key, width):
    """{method: a metric's curve} from {method: rows of each seed}: step, mean, lowest and highest.

    A seed sets the warmed-up model that all methods start from, and that start spreads the seeds
    more than anything later. `band` is what is left without it: the lowest and highest after each
    seed's mean over the methods is moved to the mean of all seeds."""
    points = {m: np.array([windows(rows, key, width) for rows in runs])
              for m, runs in seeds.items()}  # [seeds, points, 2]
    points = {m: p for m, p in points.items() if p.size}  # REAL has no clip
    shared = np.mean([p[..., 1] for p in points.values()], 0)  # [seeds, points]
    found = {}
    for m, p in points.items():
        paired = p[..., 1] - shared + shared.mean(0)
        found[m] = {"step": p[0, :, 0].tolist()} | {name: x.round(4).tolist() for name, x in dict(
            mean=p[..., 1].mean(0), low=p[..., 1].min(0), high=p[..., 1].max(0),
            band_low=paired.min(0), band_high=paired.max(0)).items()}
    return found

def run(runs, tuning):
    """The runs of the figure, each method at its best rate, and the control: every method at
    GRPO's. Returns {setting: its summary}."""
    own = {s: {m: best(tuning[s][m]) for m in METHODS} for s in SETTINGS}
    same = {s: dict.fromkeys(METHODS, own[s]["grpo"]) for s in SETTINGS}
    jobs = [(s, m, rates[s][m], seed) for rates in (own, same)
            for s in SETTINGS for m in METHODS for seed in SEEDS]
    metrics = train_all(runs, list(dict.fromkeys(jobs)))  # each once

    def summary(s, rates):
        return {key: curves({m: [metrics[s, m, rates[s][m], seed] for seed in SEEDS]
                             for m in METHODS}, key, SETTINGS[s]["eval_steps"])
                for key in [*PANELS, *ALSO]}
    return {s: dict(flags=EVERYWHERE | flags, rates=own[s], curves=summary(s, own),
                    same_rate=summary(s, same)) for s, flags in SETTINGS.items()}

def caption(summary):
    """What the picture shows, for below it."""
    lines = [
        f"Lines: mean of {len(summary['seeds'])} seeds. Bands: lowest to highest seed, without "
        "what a seed's start does to all methods alike.",
        "A point averages the steps since the one before; pass@1 is greedy. No KL, tau 0.5."]
    for name, setting in summary["settings"].items():
        flags = setting["flags"]
        updates = flags["updates_per_rollout"] * flags["num_iterations"]
        rates = ", ".join(f"{NAMES[m]} {short(rate)}" for m, rate in setting["rates"].items())
        lines.append(f"{name}: {flags['max_steps']} steps, {updates} on each rollout; "
                     f"learning rates {rates}")
    return "\n".join(lines)

def short(rate):
    """2e-4 for 0.0002."""
    return np.format_float_scientific(rate, trim="-", exp_digits=1)

def draw(summary):
    """The figure: a row per setting, a column per metric."""
    settings = summary["settings"]
    figure, axes = plt.subplots(len(settings), len(PANELS), sharex="row", sharey="col",
                                figsize=(9, 7.2), squeeze=False)
    for row, (name, setting) in zip(axes, settings.items()):
        for ax, key in zip(row, PANELS):
            for m in METHODS:
                draw_curve(ax, m, setting["curves"][key][m])
                if setting["rates"][m] != setting["rates"]["grpo"]:
                    c = setting["same_rate"][key][m]
                    ax.plot(c["step"], c["mean"], ":", color=COLORS[m], lw=1.6, zorder=3)
        row[0].set_ylabel(name, fontsize=11, fontweight="bold")
    for top, bottom, title in zip(axes[0], axes[-1], PANELS.values()):
        top.set_title(title)
        bottom.set_xlabel("optimizer step")
    handles = axes[0][0].get_legend_handles_labels()[0]
    handles.append(plt.Line2D([], [], ls=":", lw=1.6, color="0.3",
                              label="the same at GRPO's learning rate"))
    figure.legend(handles=handles, loc="outside upper center", ncols=4, handlelength=3.2)
    figure.supxlabel(caption(summary), fontsize=8.5)
    return figure

def draw_curve(ax, m, c):
    """One method's mean and band."""
    ax.fill_between(c["step"], c["band_low"], c["band_high"], color=COLORS[m], alpha=0.2, lw=0)
    ax.plot(c["step"], c["mean"], LINES[m], color=COLORS[m], label=NAMES[m],
            marker=MARKERS[m], markersize=3.5, markevery=(METHODS.index(m), 3))

def print_tables(summary):
    """The tuning table, then where the curves end and how often the clip was active."""
    for name, table in summary["tuning"].items():
        print(f"\n{name}, seed {summary['tuning_seed']}: pass@1 and entropy at the end, by rate")
        for m, ends in table.items():
            cells = [f"{short(float(rate))}: {end['pass@1']:.3f} {end['entropy']:.2f}"
                     for rate, end in ends.items()]
            print(f"  {NAMES[m]}", *cells, f"best {short(best(ends))}", sep="   ")
    for name, setting in summary["settings"].items():
        for at, part in (("each at its own rate", "curves"), ("all at GRPO's rate", "same_rate")):
            print(f"\n{name}, {at}: last point, mean (band); clipped in all steps")
            print(" " * 8 + "".join(f"{title:<24}" for title in PANELS.values()) + "clipped")
            for m in METHODS:
                curves = {key: of.get(m) for key, of in setting[part].items()}
                ends = [[curves[key][x][-1] for x in ("mean", "band_low", "band_high")]
                        for key in PANELS]
                clip = curves["clip_ratio/region_mean"]
                print(f"  {NAMES[m]}  " + "".join("{:.3f} ({:.3f} to {:.3f})  ".format(*end)
                                                  for end in ends)
                      + (f"{np.mean(clip['mean']):.3f}" if clip else "no clip"))

def main():
    parser = common.options(__file__, __doc__)
    parser.add_argument("--run", action="store_true", help="do the runs that are missing")
    parser.add_argument("--tune", action="store_true", help="search the learning rates first")
    parser.add_argument("--runs", default=str(ROOT / "runs" / "dynamics"), help="their folder")
    args = parser.parse_args()
    summary = json.loads(SUMMARY.read_text()) if SUMMARY.exists() else {}
    if args.tune:
        summary |= dict(tuning_seed=TUNING_SEED, tuning=tune(args.runs))
    if args.run:
        if "tuning" not in summary:
            common.stop(f"{SUMMARY} has no learning rates; add --tune")
        summary |= dict(seeds=SEEDS, settings=run(args.runs, summary["tuning"]))
    if args.tune or args.run:
        SUMMARY.write_text(json.dumps(summary) + "\n")
    if "settings" not in summary:
        common.stop(f"{SUMMARY} has no curves; add --run")
    print_tables(summary)
    common.save(draw(summary), args)

if __name__ == "__main__":
    main()
