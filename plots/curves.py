"""python plots/curves.py RUN [RUN ...]

Reward, pass@1, KL, entropy, weights and lengths of runs over their steps, from the metrics.jsonl in
their output folders; also while they are going on. Thick lines are moving averages, the faint lines
behind them what was logged. With no RUN it makes the embedded run of each method first, in a
temporary folder, a few minutes in all."""
import tempfile
from pathlib import Path

from common import COLORS, LINES, METHODS, options, plt, read_metrics, run_trainer, save, stop

PANELS = {  # title: the metrics in it, the second one thin
    "reward": ["reward"], "pass@1, greedy, held out": ["eval/pass@1"],
    "KL to the initial policy, nats": ["kl"], "entropy, nats": ["entropy"],
    "mean |W| on right (thin: wrong) answers": ["weights/right_mean", "weights/wrong_mean"],
    "tokens in a completion": ["completions/mean_length"]}
COLOR_CYCLE = [*COLORS.values(), "#CC79A7", "#D55E00", "#56B4E9", "#000000"]  # Okabe and Ito's
LINE_CYCLE = [*LINES.values(), ":"]

def series(rows, name):
    """(steps, values) of the rows that have a number under this name: evaluations have rows of
    their own, a KL is logged with beta only, null stands for what was not finite."""
    found = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in found], [value for _, value in found]

def moving_average(values, window):
    """The mean of the `window` values around each; at the ends, of as many as there are on both
    sides alike, so that no end is pulled towards the middle."""
    means = []
    for i in range(len(values)):
        reach = min(window // 2, i, len(values) - 1 - i)
        part = values[i - reach:i + reach + 1]
        means.append(sum(part) / len(part))
    return means

def draw(runs, window):
    """The figure, a panel for each entry of PANELS; runs is {label: rows of metrics.jsonl}."""
    figure, axes = plt.subplots(2, 3, figsize=(8.2, 4.9), sharex=True)
    for panel, (title, names) in zip(axes.flat, PANELS.items()):
        for i, (label, rows) in enumerate(runs.items()):
            color, line = COLOR_CYCLE[i % 7], LINE_CYCLE[i % 4]
            for name, width in zip(names, (1.8, 0.9)):
                steps, values = series(rows, name)
                if name.startswith("eval/"):  # few and exact: drawn as they are
                    panel.plot(steps, values, line, color=color, marker="o", ms=3.5)
                    continue
                panel.plot(steps, values, color=color, lw=0.8, alpha=0.25)
                panel.plot(steps, moving_average(values, window), line, color=color, lw=width)
        if not any(series(rows, name)[0] for rows in runs.values() for name in names):
            panel.text(0.5, 0.5, "not logged", transform=panel.transAxes, ha="center", color="0.5")
        panel.set_title(title, fontsize=9)
    for panel in axes[1]:
        panel.set_xlabel("optimizer step")
    handles = [plt.Line2D([], [], color=COLOR_CYCLE[i % 7], ls=LINE_CYCLE[i % 4], label=label)
               for i, label in enumerate(runs)]
    figure.legend(handles=handles, loc="outside upper center", ncols=4, handlelength=3)
    return figure

def read_runs(folders):
    """{label: rows}, labelled by the folder's name, by its path where two names are the same."""
    names = [Path(folder).resolve().name for folder in folders]
    return {name if names.count(name) == 1 else str(folder): read_metrics(folder)
            for name, folder in zip(names, folders)}

def main(argv=None):
    """Reads the options and the runs, draws, saves."""
    parser = options(__file__, __doc__)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="output folders of rloo_real.py")
    parser.add_argument("--smooth", type=int, default=5, help="rows in a moving average; 1: none")
    args = parser.parse_args(argv)
    if args.smooth < 1:
        stop(f"smooth is {args.smooth}; set --smooth to a number of rows, 1 or more")
    with tempfile.TemporaryDirectory() as folder:
        runs = read_runs(args.runs or [
            run_trainer(Path(folder, method), "--loss_type", method) for method in METHODS])
    save(draw(runs, args.smooth), args)

if __name__ == "__main__":
    main()
