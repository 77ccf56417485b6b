"""The figures: the numbers behind the pictures, what a folder without them gets, and no pixels."""
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import rr
from transformers import HfArgumentParser

PLOTS = Path(__file__).parent.parent / "plots"
sys.path.insert(0, str(PLOTS))
import common  # noqa: E402
import curves  # noqa: E402
import gradient_weights  # noqa: E402
import measured_weights  # noqa: E402
import one_group  # noqa: E402
import weight_families  # noqa: E402

SCRIPTS = sorted(path for path in PLOTS.glob("*.py") if path.stem != "common")


def script(name, *args, cwd):
    """A script as a user starts it, from a folder that is not the repository, without a display."""
    return subprocess.run([sys.executable, PLOTS / f"{name}.py", *map(str, args)], cwd=cwd,
                          capture_output=True, text=True)


def message(main, *args):
    """What main ends with, which has to be one line."""
    with pytest.raises(SystemExit) as end:
        main(list(map(str, args)))
    assert isinstance(end.value.code, str) and "\n" not in end.value.code
    return end.value.code


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """{method: output folder} of real runs with several updates per rollout, at a learning rate
    that drives the policy far; every third completion counts as right, so that groups
    have a signal."""
    folders, warm_up = {}, rr.supervised_warm_up
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rr, "REWARD_FUNCS", {"accuracy": lambda completions, **_: [
            float(i % 3 == 0) for i in range(len(completions))]})
        patch.setattr(rr, "supervised_warm_up", lambda *args: warm_up(*args, steps=40))
        for method in common.METHODS:
            folders[method] = tmp_path_factory.mktemp("runs") / method
            rr.main(f"--device cpu --loss_type {method} --beta 0 --prompts_per_rollout 8 "
                    "--updates_per_rollout 2 --num_iterations 6 --max_steps 12 --eval_steps 0 "
                    f"--logging_steps 1 --learning_rate 2e-3 --log_weights_steps 1 5 8 9 10 11 12 "
                    f"--output_dir {folders[method]}".split())
    return folders


# ---- figure 1: the paper's figure 3 --------------------------------------------------------------

def test_the_curves_have_the_numbers_of_the_papers_figure():
    """Every number that is read off the paper's figure 3, from the losses that train."""
    numbers = gradient_weights.curves()
    at = lambda method, positive, s: float(np.interp(
        s, numbers["s"], numbers[method, positive][0]))
    for s, weight in [(-2.5, 0.0821), (0, 1), (math.log(1.2) - 1e-9, 1.2), (0.19, 0), (2.5, 0)]:
        assert at("grpo", True, s) == pytest.approx(weight, abs=1e-4)
    for s, weight in [(-2.5, 1.9475), (0, 0.4), (2.5, 0.0034)]:
        assert at("real", True, s) == pytest.approx(weight, abs=1e-4)
        assert at("real", False, -s) == pytest.approx(weight, abs=1e-4)
    for s, weight in [(-2.5, 0), (-0.23, 0), (math.log(0.8) + 1e-9, 0.8), (0, 1), (1.1, 3.0042),
                      (2.5, 12.1825)]:
        assert at("grpo", False, s) == pytest.approx(weight, abs=1e-4)


def test_reals_curves_are_bounded_monotone_and_mirrored_and_grpos_are_not():
    """REAL falls on right answers, stays below 1/tau and mirrors on wrong ones; GRPO's weight grows
    on both where the clip lets it through."""
    numbers = gradient_weights.curves()
    s, right, wrong = numbers["s"], numbers["real", True][0], numbers["real", False][0]
    assert (right.diff() < 0).all() and (wrong.diff() > 0).all()
    assert 0 < min(right.min(), wrong.min()) and max(right.max(), wrong.max()) < 2
    regular = torch.linspace(-2.5, 2.5, 11, dtype=torch.float64)
    assert torch.allclose(gradient_weights.real_curve(regular, 0.5, 4, 4, True),
                          gradient_weights.real_curve(-regular, 0.5, 4, 4, False), atol=1e-12)
    for positive, through in ((True, s < math.log(1.2)), (False, s > math.log(0.8))):
        grpo = numbers["grpo", positive][0]
        assert (grpo[through].diff() > 0).all() and (grpo[~through] == 0).all()
    assert numbers["grpo", False][0].max() > 12


@pytest.mark.parametrize("options", [
    {}, dict(tau=0.2, epsilon=0.4, advantage=2.5, right=1, wrong=7),
    dict(tau=2.0, right=3, wrong=2)])
def test_the_dots_lie_on_the_curves(options):
    """Automatic differentiation of the losses equals the closed forms F15 and F16, in any group."""
    numbers = gradient_weights.curves(**options)
    for method in ("grpo", "real"):
        for positive in (True, False):
            curve, dots = numbers[method, positive]
            assert curve.max() > 0.1 and (curve - dots).abs().max() < 1e-12


# ---- figure 2: families --------------------------------------------------------------------------

@pytest.mark.parametrize("size", [4, 8])
def test_the_total_push_follows_its_closed_forms(size):
    """With a share p right, on right and on wrong answers alike: GRPO 2 sqrt(p (1 - p)) (but for
    the 1e-4 of F6) and RLOO 4 p (1 - p); REAL n / (1 + n) of the n with
    that label; each relative to half."""
    pushes, n = weight_families.total_push(size), np.arange(size + 1)
    p, half = n / size, size // 2
    for right_or_wrong in range(2):
        assert pushes["grpo"][right_or_wrong] == pytest.approx(2 * np.sqrt(p * (1 - p)), abs=2e-4)
        assert pushes["rloo"][right_or_wrong] == pytest.approx(4 * p * (1 - p), abs=1e-12)
    real = n / (1 + n) * (1 + half) / half
    real[[0, size]] = 0  # one label only
    assert pushes["real"][0] == pytest.approx(real, abs=1e-12)
    assert pushes["real"][1] == pytest.approx(real[::-1], abs=1e-12)


def test_reals_family_moves_with_tau_and_with_the_group():
    """At s_bar = 0 with n right the weight is 1 / (tau (1 + n)): less the larger tau or n."""
    s = torch.zeros(1, dtype=torch.float64)
    for tau in (0.25, 0.5, 1.0):
        for n in range(1, 8):
            weight = gradient_weights.real_curve(s, tau, n, 8 - n, True)
            assert weight.item() == pytest.approx(1 / (tau * (1 + n)), abs=1e-12)


# ---- figure 3: measured weights ------------------------------------------------------------------

def test_measured_weights_lie_on_the_theoretical_curves(runs):
    """For a real run of each method, far off policy: every logged weight is on its method's curve,
    to 1e-4 in float32, on right and on wrong answers, clipped and not."""
    found = measured_weights.read_runs(runs.values())
    assert list(found) == ["grpo", "rloo", "real"]
    for method, (settings, x, measured, positive) in found.items():
        assert measured_weights.largest_distance(settings, x, measured, positive) < 1e-4
        for sign in (True, False):
            part = x[positive == sign]
            assert len(part) > 50 and part.std() > 0.1
            assert (measured[positive == sign] > 0.1).any()
            if method != "real":  # what the clip stops, on the side of that sign only
                stopped = part[measured[positive == sign] == 0]
                assert len(stopped) and (stopped > 0 if sign else stopped < 0).all()


def test_the_largest_distance_sees_a_wrong_weight(runs):
    """A weight that is one per cent off, and a token that should have been clipped, are found."""
    for settings, x, measured, positive in measured_weights.read_runs(runs.values()).values():
        i = measured.argmax()
        off = measured.clone()
        off[i] *= 1.01
        distance = measured_weights.largest_distance(settings, x, off, positive)
        assert distance == pytest.approx(0.01 * measured[i].item(), rel=0.01)


def rewrite(source, target, **changes):
    """A weights file with some arrays changed."""
    target.parent.mkdir()
    with np.load(source) as file:
        np.savez(target, **{**file, **changes})


def test_rows_that_have_no_advantage_or_no_competition_are_left_out(runs, tmp_path):
    """A = 0 (nothing to divide by) and C = NaN (a group with one label) are in no figure."""
    for method, name, value in (("grpo", "advantage", 0), ("real", "C", np.nan)):
        source = runs[method] / "weights-8.npz"
        with np.load(source) as file:
            values, mask = file[name].copy(), file["mask"]
        values[::2] = value
        rewrite(source, tmp_path / method / "weights-8.npz", **{name: values})
        _, x, measured, _ = measured_weights.read_weights(tmp_path / method / "weights-8.npz")
        assert len(x) == mask[1::2].sum() and measured.isfinite().all()


def test_weights_that_do_not_compare_are_refused_in_one_line(runs, tmp_path):
    """A KL in the loss is part of W, so no formula of a method holds; two clips have two curves."""
    source = runs["grpo"] / "weights-8.npz"
    rewrite(source, tmp_path / "kl" / "weights-8.npz", beta=0.1)
    assert "KL in its loss" in message(measured_weights.main, tmp_path / "kl")
    rewrite(source, tmp_path / "reward" / "weights-8.npz", beta=0.1, kl_in_reward=True)
    assert "grpo" in measured_weights.read_runs([tmp_path / "reward"])
    rewrite(source, tmp_path / "none" / "weights-8.npz", advantage=np.zeros(32, np.float32))
    assert "no completion" in message(measured_weights.main, tmp_path / "none")
    rewrite(source, tmp_path / "wide" / "weights-8.npz", epsilon=0.3)
    assert "differ in epsilon" in message(measured_weights.main, runs["grpo"], tmp_path / "wide")


def test_without_runs_the_scripts_start_one_of_each_method(runs, monkeypatch, tmp_path, capsys):
    """Both scripts that read runs make their own, with flags that the trainer takes."""
    for module in (measured_weights, curves):
        started = []

        def start(folder, *flags):
            config, = HfArgumentParser(rr.Config).parse_args_into_dataclasses(list(flags))
            started.append(config)
            return runs[config.loss_type]

        monkeypatch.setattr(module, "run_trainer", start)
        module.main(["--output", str(tmp_path / "figure.png")])
        assert [config.loss_type for config in started] == ["grpo", "rloo", "real"]
    out = capsys.readouterr().out
    distances = re.findall(r"(GRPO|RLOO|REAL): \d+ weights, the largest distance .* is (\S+)", out)
    assert len(distances) == 3 and all(float(d) < 1e-4 for _, d in distances)


# ---- one group -----------------------------------------------------------------------------------

@pytest.mark.parametrize("rewards, grpo, rloo, real", [
    ([1, 0, 0, 0], [1.4997, *[-0.4999] * 3], [1, *[-1 / 3] * 3], [1, -0.5, -0.5, -0.5]),
    ([1, 1, 0, 0], [0.8659, 0.8659, -0.8659, -0.8659], [2 / 3, 2 / 3, -2 / 3, -2 / 3],
     [2 / 3, 2 / 3, -2 / 3, -2 / 3]),
    ([1, 1, 1, 0], [*[0.4999] * 3, -1.4997], [*[1 / 3] * 3, -1], [0.5, 0.5, 0.5, -1])])
def test_one_group_on_policy_has_the_known_weights(rewards, grpo, rloo, real):
    """GRPO's W B |o|, RLOO's W B and REAL's W N |o|, for completions of different lengths."""
    lengths = [3, 1, 2, 7]
    parts = one_group.take_apart(rewards, [0.0] * 4, lengths)
    length = torch.tensor(lengths)
    assert (parts["grpo"][2] * 4 * length).tolist() == pytest.approx(grpo, abs=1e-4)
    assert (parts["rloo"][2] * 4).tolist() == pytest.approx(rloo, abs=1e-9)
    assert (parts["real"][2] * length).tolist() == pytest.approx(real, abs=1e-9)


def test_one_group_off_policy_by_hand():
    """Ratios of tokens and of completions, the clip, REAL's shares, each by its formula."""
    parts = one_group.take_apart([1, 0, 0, 1], [0.1, 0.5, -0.6, -1.0], [2, 3, 1, 2], tau=0.5)
    advantage, ratio, W = parts["grpo"]
    assert ratio.tolist() == pytest.approx(np.exp([0.1, 0.5, -0.6, -1.0]))
    a = math.sqrt(0.75)  # 0.5 over the sample std of 1 0 0 1
    assert advantage.tolist() == pytest.approx([a, -a, -a, a], abs=2e-4)
    assert W.tolist() == pytest.approx([a * math.exp(0.1) / 8, -a * math.exp(0.5) / 12, 0,
                                        a * math.exp(-1) / 8], abs=1e-4)
    advantage, ratio, W = parts["rloo"]
    assert ratio.tolist() == pytest.approx(np.exp([0.2, 1.5, -0.6, -2.0]))
    assert W.tolist() == pytest.approx([0, -math.exp(1.5) / 6, 0, math.exp(-2) / 6])
    right, share, W = parts["real"]
    e = np.exp([-0.2, 1.0, -1.2, 2.0])  # of a right answer minus its logit, over tau
    shares = [e[0] / (1 + e[0] + e[3]), e[1] / (1 + e[1] + e[2]), e[2] / (1 + e[1] + e[2]),
              e[3] / (1 + e[0] + e[3])]
    assert right.tolist() == [True, False, False, True] and share.tolist() == pytest.approx(shares)
    assert W.tolist() == pytest.approx(np.array(shares) / 0.5 / [2, 3, 1, 2] * [1, -1, -1, 1])


def test_the_table_of_one_group_is_aligned_and_marks_what_is_clipped(tmp_path, capsys):
    """At most 100 columns, the formulas' numbers on top, bars of the table under each other, and
    numbers that look like options are read as numbers."""
    one_group.main(["--rewards", "1,0,0,1", "--logits", "-1,0.5,-0.6,0.3", "--lengths",
                    "9,3,15,800", "--output", str(tmp_path / "figure.png")])
    *lines, wrote = capsys.readouterr().out.splitlines()
    assert wrote == f"wrote {tmp_path / 'figure.png'}" and len(lines) == 3 + 4 + 1
    assert max(map(len, lines)) <= 100
    bars = {tuple(bar.start() for bar in re.finditer(r" \| ", line)) for line in lines}
    assert len(bars) == 1 and len(bars.pop()) == 3
    numbers = re.findall(r"F\d+", lines[1])
    assert numbers == "F1 F12 F3 F6 F10 F14 F4 F11 F14 F13 F16 F14".split()
    assert [line.count("clipped") for line in lines] == [0, 0, 0, 0, 0, 2, 2, 0]
    one_group.main(["--rewards", "1,1", "--logits", "0,0", "--lengths", "1,1",
                    "--output", str(tmp_path / "figure.png")])
    assert "-0.0" not in capsys.readouterr().out  # no signal: plain zeros


@pytest.mark.parametrize("flags, words", [
    (["--rewards", "1,0"], "2 rewards, 4 logits and 4 lengths"),
    (["--rewards", "1", "--logits", "0", "--lengths", "3"], "two completions or more"),
    (["--rewards", "1,0,yes,0"], "rewards is 1,0,yes,0"),
    (["--logits", "0,nan,0,0"], "logits is 0,nan,0,0"),
    (["--lengths", "3,3,3,1.5"], "lengths is 3,3,3,1.5"),
    (["--lengths", "3,3,3,0"], "lengths are 3,3,3,0"),
    (["--tau", "0"], "tau is 0"), (["--tau", "x"], "--tau"), (["--epsilon", "1"], "epsilon 1")])
def test_a_group_that_is_none_is_refused_in_one_line(flags, words):
    """Unequal counts, no numbers, a completion without tokens or without another: what is wrong."""
    assert words in message(one_group.main, *flags)


# ---- curves of runs ------------------------------------------------------------------------------

def test_metrics_are_read_while_a_run_is_going_on(tmp_path):
    """An incomplete last line is left out; null, a missing KL and rows of evaluations are no
    numbers of a series, and a run without evaluations or with one row is drawn."""
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 0, "eval/pass@1": 0.5}\n{"step": 1, "reward": 0.25, "entropy": null}\n'
        '{"step": 2, "reward": 0.5, "entropy": 1.5}\n{"step": 3, "rew')
    rows = common.read_metrics(tmp_path)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert curves.series(rows, "reward") == ([1, 2], [0.25, 0.5])
    assert curves.series(rows, "entropy") == ([2], [1.5])
    assert curves.series(rows, "eval/pass@1") == ([0], [0.5])
    assert curves.series(rows, "kl") == ([], [])
    curves.main([str(tmp_path), "--output", str(tmp_path / "figure.svg")])
    assert "<svg" in (tmp_path / "figure.svg").read_text()


def test_the_moving_average_is_centred_and_shrinks_at_the_ends():
    """A straight line stays as it is up to its ends; one jump is spread over the window."""
    assert curves.moving_average([1, 2, 3, 4, 5], 5) == [1, 2, 3, 4, 5]
    assert curves.moving_average([0, 0, 9, 0, 0, 0], 3) == [0, 3, 3, 3, 0, 0]
    assert curves.moving_average([4, 7], 1) == [4, 7] and curves.moving_average([], 5) == []


def test_runs_are_labelled_by_their_folders(runs, tmp_path):
    """By name, by path where two have the same name; all metrics that are drawn are logged."""
    assert list(curves.read_runs(runs.values())) == ["grpo", "rloo", "real"]
    other = tmp_path / "grpo"
    other.mkdir()
    (other / "metrics.jsonl").write_text((runs["grpo"] / "metrics.jsonl").read_text())
    labels = list(curves.read_runs([runs["grpo"], other]))
    assert labels == [str(runs["grpo"]), str(other)]
    logged = {name for row in common.read_metrics(runs["real"]) for name in row}
    assert {name for names in curves.PANELS.values() for name in names
            if name != "kl" and not name.startswith("eval/")} <= logged  # beta is 0 here


# ---- every script --------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["gradient_weights", "weight_families", "measured_weights",
                                  "one_group", "curves"])
def test_a_script_writes_its_picture_from_any_folder(name, runs, tmp_path):
    """Started elsewhere, without a display, with a relative --output in a folder that is not there
    yet: the picture is written and named."""
    folders = list(runs.values()) if name in ("curves", "measured_weights") else []
    done = script(name, *folders, "--output", "new/picture.png", cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.splitlines()[-1] == "wrote new/picture.png"
    assert (tmp_path / "new/picture.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("name, words", [("curves", "metrics.jsonl"),
                                         ("measured_weights", "weights-STEP.npz")])
def test_a_folder_without_what_a_script_reads_gets_one_line(name, words, tmp_path):
    """No traceback: the script's name, the folder and what it lacks."""
    done = script(name, tmp_path, cwd=tmp_path)
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"{name}.py: {tmp_path} has no {words}")


def test_other_bad_input_gets_one_line_too(tmp_path):
    """A file without rows yet, an output that is no picture, a group with one label, no window."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "ev')
    assert "no rows yet" in message(curves.main, tmp_path)
    assert "not there" in message(curves.main, tmp_path / "not there")
    assert "--smooth" in message(curves.main, tmp_path, "--smooth", "0")
    assert "picture.gif" in message(one_group.main, "--output", tmp_path / "picture.gif")
    for group in ("8/8", "0/8", "4", "a/b", "4/8/2"):
        assert f"group is {group}" in message(gradient_weights.main, "--group", group)
    for flag, value in (("--tau", "0"), ("--epsilon", "1"), ("--advantage", "-1")):
        assert flag[2:] in message(gradient_weights.main, flag, value)
    assert "size is 3" in message(weight_families.main, "--size", "3")


def test_every_picture_is_beside_its_script_and_small():
    """Each script's first line is its command; its picture has its name and less than 200 kB."""
    for path in SCRIPTS:
        assert path.read_text().startswith(f'"""python plots/{path.name}')
        assert path.with_suffix(".png").stat().st_size < 200_000
