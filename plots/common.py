"""What the figure scripts share: the way to the trainer, options, style, saving. Draws nothing."""
import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import matplotlib

if "--show" not in sys.argv:
    matplotlib.use("Agg")  # no display needed
import matplotlib.pyplot as plt
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # rloo_real.py stands there

METHODS = ["grpo", "rloo", "real"]
NAMES = dict(grpo="GRPO", rloo="RLOO", real="REAL")
COLORS = dict(grpo="#0072B2", rloo="#E69F00", real="#009E73")  # Okabe and Ito's: for every eye
LINES = dict(grpo="-", rloo="--", real="-.")  # and for a printer without colours
MARKERS = dict(grpo="o", rloo="s", real="^")

plt.rcParams.update({
    "figure.constrained_layout.use": True, "figure.constrained_layout.w_pad": 0.08,
    "savefig.dpi": 160, "font.size": 9, "axes.titlesize": 10,
    "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.alpha": 0.25, "grid.linewidth": 0.6, "lines.linewidth": 1.8,
    "legend.frameon": False, "mathtext.fontset": "cm"})

def stop(message):
    """Ends the script with one line."""
    sys.exit(f"{Path(sys.argv[0]).name}: {message}")

def options(script, doc):
    """A parser with --output and --show; the first line of doc is the script's command."""
    parser = argparse.ArgumentParser(description=doc.strip().partition("\n")[2].strip(),
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = stop
    parser.add_argument("--output", type=picture, default=str(Path(script).with_suffix(".png")),
                        help="picture to write: .png, .svg or .pdf; default: beside the script")
    parser.add_argument("--show", action="store_true", help="open a window too")
    return parser

def picture(name):
    """name, if a picture can be written there: found out before anything is run for it."""
    if Path(name).suffix not in (".png", ".svg", ".pdf"):
        stop(f"output is {name}; set --output to a name that ends in .png, .svg or .pdf")
    try:
        os.makedirs(Path(name).parent, exist_ok=True)
        open(name, "ab").close()
        Path(name).stat().st_size or os.unlink(name)  # it was not there before
    except OSError as error:
        stop(f"output {name} can't be written ({error.strerror}); set --output to another")
    return name

def save(figure, args):
    """Writes the picture, and opens a window if that is asked."""
    metadata = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    figure.savefig(args.output, metadata=metadata[Path(args.output).suffix])
    if args.output.endswith(".png"):  # 256 colours are enough, in a third of the bytes
        Image.open(args.output).convert("RGB").quantize(256).save(args.output, optimize=True)
    print("wrote", args.output)
    if args.show:
        plt.show()
    plt.close(figure)

def run_trainer(folder, *flags, quiet=False):
    """Runs rloo_real.py into folder, which it makes, in a process of its own; returns folder."""
    command = [sys.executable, str(ROOT / "rloo_real.py"), "--output_dir", str(folder), *flags]
    if not quiet:
        print("running", "rloo_real.py", *flags, flush=True)
    run = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if run.returncode:
        last = run.stderr.strip().rpartition("\n")[2] or "no message"
        stop(f"{folder} failed: {last}")
    return folder

def read_metrics(folder):
    """The rows of a run's metrics.jsonl; a line that is still being written is left out."""
    path = Path(folder, "metrics.jsonl")
    if not path.is_file():
        stop(f"{folder} has no metrics.jsonl; give the --output_dir of a run of rloo_real.py")
    lines = path.read_text().split("\n")[:-1]  # what follows the last newline is incomplete
    try:
        rows = [json.loads(line) for line in lines if line]
    except ValueError as error:
        stop(f"{path} has a line that is no JSON ({error}); remove it")
    if not rows:
        stop(f"{path} has no rows yet; wait for the first step of the run")
    return rows
