"""The numbers behind the training-dynamics figure: its summary, how it is made, what is redone."""
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "plots"))
import training_dynamics as dynamics  # noqa: E402

SUMMARY = json.loads(dynamics.SUMMARY.read_text())
CURVES = [(setting, method, key) for setting in dynamics.SETTINGS for method in dynamics.METHODS
          for key in dynamics.PANELS]


def write_run(folder, rows, model=True, **flags):
    """A folder as the trainer leaves it, with made-up rows."""
    (folder / "model" if model else folder).mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(flags))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def trainer(monkeypatch):
    """Stands in for the trainer: notes the folders it is started for and writes two steps there."""
    started = []

    def start(command, **_):
        folder = Path(command[command.index("--output_dir") + 1])
        flags = dict(argument[2:].split("=") for argument in command if "=" in argument)
        assert not folder.exists()
        started.append(folder.name)
        write_run(folder, [{"step": 1}, {"step": 2}],
                  **{name: json.loads(value) if value[0].isdigit() else value
                     for name, value in flags.items()})
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(dynamics.common.subprocess, "run", start)
    return started


@pytest.mark.parametrize("setting, method, key", CURVES)
def test_every_panel_has_a_mean_within_its_band_up_to_the_last_step(setting, method, key):
    """24 curves: the mean is within the band, the band no wider than the seeds; shares and rewards
    lie in [0, 1]."""
    flags, curves = (SUMMARY["settings"][setting][k] for k in ("flags", "curves"))
    curve = curves[key][method]
    step, mean, low, high, band_low, band_high = (
        np.array(curve[name]) for name in ("step", "mean", "low", "high", "band_low", "band_high"))
    assert len(step) == len(mean) and (np.diff(step) > 0).all()
    assert (low <= mean).all() and (mean <= high).all()
    assert (band_low <= mean).all() and (mean <= band_high).all()
    assert np.mean(band_high - band_low) < np.mean(high - low)
    assert flags["max_steps"] - flags["eval_steps"] < step[-1] <= flags["max_steps"]
    assert low.min() >= 0 and high.max() <= (3 if key == "entropy" else 1)


def test_the_summary_is_of_the_settings_in_the_script_and_small():
    """Three seeds, other than the tuning seed; the flags that --run would use; below 150 kB."""
    assert SUMMARY["seeds"] == dynamics.SEEDS and len(set(dynamics.SEEDS)) == 3
    assert SUMMARY["tuning_seed"] == dynamics.TUNING_SEED not in dynamics.SEEDS
    for name, flags in dynamics.SETTINGS.items():
        assert SUMMARY["settings"][name]["flags"] == dynamics.EVERYWHERE | flags
    assert dynamics.SUMMARY.stat().st_size < 150_000


@pytest.mark.parametrize("setting", dynamics.SETTINGS)
@pytest.mark.parametrize("method", dynamics.METHODS)
def test_each_method_runs_at_the_best_rate_of_its_tuning_table(setting, method):
    """The rate of the runs is the argmax of the table, which has every rate of the grid, and a
    rate on either side of it."""
    table = SUMMARY["tuning"][setting][method]
    assert list(map(float, table)) == dynamics.RATES[setting]
    rate = SUMMARY["settings"][setting]["rates"][method]
    if len(table) > 1:  # "stale, fast" has one rate for all
        assert min(dynamics.RATES[setting]) < rate < max(dynamics.RATES[setting])
    assert table[f"{rate:g}"]["pass@1"] == max(end["pass@1"] for end in table.values())


def test_stale_runs_are_stale_and_on_policy_runs_are_not():
    """On policy every ratio is 1 and no clip binds; stale, ratios move and clips bind. REAL has
    no clip."""
    fresh, stale = (SUMMARY["settings"][setting]["curves"] for setting in ("on policy", "stale"))
    for method in dynamics.METHODS:
        assert set(fresh["ratio/max"][method]["low"] + fresh["ratio/max"][method]["high"]) == {1}
        assert min(stale["ratio/max"][method]["low"]) > 1
    assert set(fresh["clip_ratio/region_mean"]) == {"grpo", "rloo"}
    for method in ("grpo", "rloo"):
        assert max(fresh["clip_ratio/region_mean"][method]["high"]) == 0
        assert np.mean(stale["clip_ratio/region_mean"][method]["mean"]) > 0.005


def rows_of(factor):
    """Four steps with reward 1, 2, 3, 4 and three evaluations of 0.1, all times the factor."""
    rows = [{"step": step, "reward": factor * step} for step in range(1, 5)]
    rows += [{"step": step, "eval/pass@1": factor / 10} for step in (0, 2, 4)]
    return sorted(rows, key=lambda row: row["step"])


def test_a_curve_averages_windows_of_steps_and_then_seeds():
    """Two seeds, the second doubled, windows of two steps: rewards 1.5 and 3.5, then 3 and 7; the
    evaluations at 0, 2 and 4 stay as they are; a metric no run has gives no curve."""
    seeds = {"grpo": [rows_of(1), rows_of(2)]}
    curve = dynamics.curves(seeds, "reward", 2)["grpo"]
    assert (curve["step"], curve["mean"]) == ([1.5, 3.5], [2.25, 5.25])
    assert (curve["low"], curve["high"]) == ([1.5, 3.5], [3, 7])
    curve = dynamics.curves(seeds, "eval/pass@1", 2)["grpo"]
    assert (curve["step"], curve["mean"]) == ([0, 2, 4], [0.15] * 3)
    assert (curve["low"], curve["high"]) == ([0.1] * 3, [0.2] * 3)


def test_the_band_leaves_out_what_a_seed_does_to_every_method():
    """Seed 2 is 10 above seed 1 for both methods, which differ by 2 and 4: bands of half that."""
    def rows(value):
        return [{"step": 1, "reward": value}]

    found = dynamics.curves({"grpo": [rows(0), rows(10)], "real": [rows(2), rows(14)]}, "reward", 1)
    assert found["grpo"]["band_low"] == [4.5] and found["grpo"]["band_high"] == [5.5]
    assert found["real"]["band_low"] == [7.5] and found["real"]["band_high"] == [8.5]
    assert found["grpo"]["low"] == [0] and found["grpo"]["high"] == [10]


def test_a_metric_that_a_method_does_not_have_gives_it_no_curve():
    """The clip ratio of REAL."""
    clips = [[{"step": 1, "clip_ratio/region_mean": 0.25}]]
    found = dynamics.curves({"grpo": clips, "real": [rows_of(1)]}, "clip_ratio/region_mean", 1)
    assert list(found) == ["grpo"] and found["grpo"]["mean"] == [0.25]


def test_a_rate_is_chosen_by_the_mean_of_the_last_three_evaluations():
    """Evaluations 0.9, 0.1, 0.2, 0.3 count 0.2; the entropy is of the last 40 steps; the highest
    pass@1 of the table wins, whatever its entropy."""
    rows = [{"step": i, "eval/pass@1": x} for i, x in enumerate((0.9, 0.1, 0.2, 0.3))]
    rows += [{"step": i, "entropy": 9 if i < 10 else 0.5} for i in range(50)]
    assert dynamics.final(rows) == {"pass@1": 0.2, "entropy": 0.5}
    ends = {"5e-05": 0.3, "0.0001": 0.5, "0.0002": 0.4}
    assert dynamics.best({rate: {"pass@1": x, "entropy": -x} for rate, x in ends.items()}) == 1e-4


def test_finished_runs_are_skipped_and_others_done_again(tmp_path, trainer):
    """A run without its model, with fewer steps or with other flags is removed and redone."""
    flags, rows = dict(learning_rate=1e-4, max_steps=2), [{"step": 1}, {"step": 2}]
    write_run(tmp_path / "finished", rows, **flags)
    write_run(tmp_path / "without-model", rows, model=False, **flags)
    write_run(tmp_path / "short", rows[:1], **flags)
    write_run(tmp_path / "other-rate", rows, **flags | dict(learning_rate=2e-4))
    names = ["finished", "without-model", "short", "other-rate", "new"]
    for _ in range(2):
        for name in names:
            dynamics.train(tmp_path / name, flags)
    assert trainer == names[1:]


def test_each_run_of_the_figure_is_done_once(tmp_path, monkeypatch, trainer):
    """Two kinds of rollouts, three methods, three seeds: 18 runs where all rates are one. REAL at
    half of GRPO's rate runs at both, 3 more each, and RLOO at GRPO's does not run again."""
    monkeypatch.setattr(dynamics, "finished", lambda folder, flags: False)
    monkeypatch.setattr(dynamics.common, "read_metrics", lambda folder: [
        {"step": 960, **dict.fromkeys([*dynamics.PANELS, *dynamics.ALSO], 0.5)}])
    tables = dict.fromkeys(dynamics.METHODS, {"0.0002": {"pass@1": 0.2}})
    settings = dynamics.run(tmp_path / "one", dict.fromkeys(dynamics.SETTINGS, tables))
    assert len(set(trainer)) == 18
    assert {"on-policy-grpo-0.0002-0", "stale-real-0.0002-2"} <= set(trainer)
    assert settings["stale"]["rates"] == dict.fromkeys(dynamics.METHODS, 2e-4)
    trainer.clear()
    tables = tables | {"real": {"0.0001": {"pass@1": 0.2}}}
    dynamics.run(tmp_path / "two", dict.fromkeys(dynamics.SETTINGS, tables))
    assert len(set(trainer)) == 24


def test_a_run_that_fails_ends_the_script_with_its_last_line(tmp_path, monkeypatch):
    """One line: the folder and what the trainer said."""
    monkeypatch.setattr(dynamics.common.subprocess, "run", lambda *_, **__: SimpleNamespace(
        returncode=1, stderr="Traceback\nValueError: no rate\n"))
    with pytest.raises(SystemExit, match="grpo failed: ValueError: no rate$"):
        dynamics.train(tmp_path / "grpo", dict(max_steps=2))


def test_the_figure_is_drawn_from_the_summary_alone(tmp_path, monkeypatch, capsys):
    """No run is started; a picture is written; the caption has the seeds, steps and rates."""
    monkeypatch.setattr(dynamics.common.subprocess, "run", None)
    monkeypatch.setattr(sys, "argv", ["training_dynamics.py", "--output", str(tmp_path / "a.png")])
    dynamics.main()
    assert (tmp_path / "a.png").stat().st_size > 10_000
    assert "stale" in capsys.readouterr().out
    text = dynamics.caption(SUMMARY)
    assert "mean of 3 seeds. Bands: lowest to highest seed" in text
    assert [dynamics.short(rate) for rate in (2e-4, 1.25e-5)] == ["2e-4", "1.25e-5"]
    for setting in SUMMARY["settings"].values():
        assert f"{setting['flags']['max_steps']} steps" in text
        for method, rate in setting["rates"].items():
            assert f"{dynamics.NAMES[method]} {dynamics.short(rate)}" in text
