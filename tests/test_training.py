"""Sections 5 and 6: whole runs, what they leave behind, batch arithmetic, and bad input."""
import copy
import dataclasses
import json
import math
import re
import socket
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from conftest import config, rr, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

SCRIPT = Path(__file__).parent.parent / "rloo_real.py"
FAST = ["--device", "cpu", "--eval_samples", "16", "--eval_steps", "2", "--logging_steps", "1",
        "--prompts_per_rollout", "4", "--num_generations", "4"]
TIMES = re.compile("_time|tokens_per_second|peak_memory")


WARM = {}  # seed: (weights, random state) after the warm-up, which so is done once in all tests


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(flag, value, ...) -> (model, rows of metrics.jsonl, output folder), after a short warm-up.

    Every other completion counts as right, so that every group has a signal."""
    monkeypatch.setattr(rr, "REWARD_FUNCS", {
        "accuracy": lambda completions, **_: [float(i % 2) for i in range(len(completions))]})
    warm_up, count = rr.supervised_warm_up, iter(range(100))

    def warm_up_once(model, tokenizer, problems):
        seed = torch.initial_seed()
        if seed not in WARM:
            warm_up(model, tokenizer, problems, steps=100)
            WARM[seed] = copy.deepcopy(model.state_dict()), torch.get_rng_state()
        model.load_state_dict(WARM[seed][0])
        torch.set_rng_state(WARM[seed][1])

    monkeypatch.setattr(rr, "supervised_warm_up", warm_up_once)

    def start(*flags):
        out = tmp_path / f"run{next(count)}"
        model = rr.main([*FAST, "--output_dir", str(out), *map(str, flags)])
        return model, [json.loads(line) for line in open(out / "metrics.jsonl")], out
    return start


def steps(rows, timeless=False):
    """The rows of steps, of evaluations none; without what a clock measured."""
    return [{k: v for k, v in row.items() if not (timeless and TIMES.search(k))}
            for row in rows if "loss" in row]


def command(*flags, cwd):
    """The script as a user starts it."""
    return subprocess.run([sys.executable, SCRIPT, *map(str, flags)], cwd=cwd, text=True,
                          capture_output=True)


def spied_rollouts(monkeypatch):
    """A list that fills with what `collect_rollout` returns."""
    rollouts, collect = [], rr.collect_rollout
    monkeypatch.setattr(rr, "collect_rollout", lambda *a: rollouts.append(collect(*a)) or rollouts[-1])
    return rollouts


# ---- a run and what it leaves behind -------------------------------------------------------------

METRICS = {
    "step", "loss", "learning_rate", "reward", "reward_std", "frac_reward_zero_std", "frac_all_right",
    "frac_all_wrong", "kl", "entropy", "ratio/max", "grad_norm", "weights/right_mean",
    "weights/right_max", "weights/wrong_mean", "weights/wrong_max", "completions/mean_length",
    "completions/min_length", "completions/max_length", "completions/clipped_ratio", "num_tokens",
    "tokens_per_second", "step_time", "generate_time", "score_time", "update_time",
    "skipped_no_signal", "skipped_non_finite", "unscored", "rewards/accuracy/mean"}
CLIP = {"clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"}


@pytest.mark.parametrize("name", rr.METHODS)
def test_a_run_logs_every_metric_and_leaves_a_model_that_loads(name, run, capsys):
    """All metrics of formulas.md in every row, clip ratios where there is a clip; config.json with
    every flag as used; a model and tokenizer for from_pretrained; the closing table."""
    model, rows, out = run("--loss_type", name, "--max_steps", 5)
    rows, evals = steps(rows), [row for row in rows if "eval/pass@1" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["step"] for row in evals] == [0, 2, 4, 5]
    for row in rows:
        assert METRICS <= row.keys() and (CLIP <= row.keys()) == bool(rr.METHODS[name].estimator)
        assert None not in row.values()
        assert row["frac_all_right"] + row["frac_all_wrong"] == row["frac_reward_zero_std"]
    assert rows[0]["kl"] == 0 and rows[0]["ratio/max"] == 1 and rows[-1]["kl"] > 0
    saved = json.loads((out / "config.json").read_text())
    assert saved.keys() == {f.name for f in dataclasses.fields(rr.Config)}
    assert saved["loss_type"] == name and saved["learning_rate"] == 2e-4 and saved["seed"] == 0
    assert dataclasses.asdict(rr.Config(**saved)) == saved
    loaded = AutoModelForCausalLM.from_pretrained(out / "model")
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters()))
    assert AutoTokenizer.from_pretrained(out / "model")("1+2=")["input_ids"] == [1, 10, 2, 11]
    text = capsys.readouterr().out
    assert "before   after" in text and "pass@1 (greedy)" in text and str(out / "model") in text
    assert "16 held out" in text and "4 prompts x 4 completions" in text
    assert re.search(r"prompt   '\d+\+\d+=', answer '\d+'", text)


def test_the_same_seed_gives_the_same_run_and_another_seed_another(run):
    """D2: metrics (times aside) and weights are equal bit for bit."""
    (a, rows_a, _), (b, rows_b, _) = (run("--max_steps", 4, "--seed", 1) for _ in range(2))
    assert steps(rows_a, timeless=True) == steps(rows_b, timeless=True)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters()))
    _, rows_c, _ = run("--max_steps", 4, "--seed", 2)
    assert steps(rows_a, timeless=True) != steps(rows_c, timeless=True)


def test_micro_batches_and_evaluations_do_not_change_a_run(run):
    """Memory and curiosity only: the same rewards and losses, to the rounding of float32."""
    _, rows, _ = run("--max_steps", 4)
    _, small, _ = run("--max_steps", 4, "--micro_batch_size", 3)
    _, eager, _ = run("--max_steps", 4, "--eval_steps", 1)
    _, rare, _ = run("--max_steps", 4, "--eval_steps", 4)
    assert steps(rows, timeless=True) == steps(rare, timeless=True)
    assert steps(rows, timeless=True) == steps(eager, timeless=True)
    for a, b in zip(steps(rows), steps(small)):
        assert a["reward"] == b["reward"]
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-4)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3, abs=1e-5)


def test_without_kl_there_is_no_reference(run, monkeypatch):
    """beta 0: none is made, and there is no KL to log."""
    collect = rr.collect_rollout

    def spy(model, reference, *args):
        assert reference is None
        return collect(model, reference, *args)

    monkeypatch.setattr(rr, "collect_rollout", spy)
    _, rows, _ = run("--max_steps", 2, "--beta", 0)
    assert len(steps(rows)) == 2 and all("kl" not in row for row in rows)


@pytest.mark.parametrize("bf16", ["false", "true"])
def test_a_run_starts_with_a_reference_equal_bit_for_bit(bf16, run, monkeypatch):
    """Every log-prob of the first rollout; freezing the reference's weights is enough to break it."""
    rollouts, collect = [], rr.collect_rollout

    def spy(*args):
        rollouts.append(collect(*args)[0])
        return collect(*args)

    monkeypatch.setattr(rr, "collect_rollout", spy)
    run("--max_steps", 1, "--bf16", bf16, "--num_generations", 8)
    assert torch.equal(rollouts[0].old_logp, rollouts[0].ref_logp)


def test_the_reference_never_changes(run, monkeypatch):
    """KL is measured against the policy as it was before the first step, all along."""
    references, collect = [], rr.collect_rollout

    def spy(model, reference, *args):
        references.append([p.clone() for p in reference.parameters()])
        return collect(model, reference, *args)

    monkeypatch.setattr(rr, "collect_rollout", spy)
    model, _, _ = run("--max_steps", 6)
    assert len(references) == 3
    assert all(torch.equal(a, b) for a, b in zip(references[0], references[2]))
    assert not all(torch.equal(a, b) for a, b in zip(references[0], model.parameters()))


def test_later_updates_of_a_rollout_see_a_policy_that_has_moved(run):
    """D7: the first update of a rollout has ratio exactly 1; the second and later passes do not."""
    _, rows, _ = run("--max_steps", 8, "--num_iterations", 2, "--learning_rate", 1e-3)
    ratios = [row["ratio/max"] for row in steps(rows)]
    assert ratios[0] == ratios[4] == 1.0 and 1.0 not in ratios[1:4] + ratios[5:]


def test_rewards_that_are_all_equal_leave_the_weights_alone(run, monkeypatch):
    """No signal in any group: no step is applied, all are counted (known-failures, at the top)."""
    monkeypatch.setattr(rr, "REWARD_FUNCS", {"accuracy": lambda completions, **_: [0.7] * len(completions)})
    for name in rr.METHODS:
        _, rows, out = run("--max_steps", 3, "--loss_type", name, "--beta", 0)
        start = run("--max_steps", 0, "--beta", 0)[2]
        assert steps(rows)[-1]["skipped_no_signal"] == 3 and steps(rows)[-1]["grad_norm"] == 0
        a, b = (AutoModelForCausalLM.from_pretrained(o / "model") for o in (out, start))
        assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters()))


def test_a_reward_that_is_not_finite_spoils_one_step_only(run, monkeypatch):
    """D6: an infinite reward at the second rollout: two updates skipped and counted, the run goes
    on, nothing in the weights is NaN."""
    calls = iter(range(100))

    def burst(completions, **_):
        inf = next(calls) == 5  # two of each evaluation, one of the first rollout before it
        return [math.inf if inf and i % 4 == 0 else float(i % 2) for i in range(len(completions))]

    monkeypatch.setattr(rr, "REWARD_FUNCS", {"accuracy": burst})
    model, rows, _ = run("--max_steps", 6)
    assert [row["skipped_non_finite"] for row in steps(rows)] == [0, 0, 1, 2, 2, 2]
    assert steps(rows)[-1]["grad_norm"] > 0
    assert all(p.isfinite().all() for p in model.parameters())


def test_unscored_completions_are_counted_and_excluded(run, monkeypatch):
    """B4: None is in no statistic: of 0, None, 1, 1 per prompt the mean reward is 2/3."""
    monkeypatch.setattr(rr, "REWARD_FUNCS", {
        "accuracy": lambda completions, **_: [(0, None, 1, 1)[i % 4] for i in range(len(completions))]})
    rollouts = spied_rollouts(monkeypatch)
    for name in rr.METHODS:
        _, rows, _ = run("--max_steps", 2, "--loss_type", name)
        assert steps(rows)[-1]["unscored"] == 4 and steps(rows)[-1]["skipped_non_finite"] == 0
        assert steps(rows)[-1]["reward"] == pytest.approx(2 / 3)
    for rollout, *_ in rollouts:
        gap = torch.arange(16) % 4 == 1
        assert not rollout.mask[gap].any() and rollout.mask[~gap][:, 0].all()


@pytest.mark.parametrize("name", rr.METHODS)
def test_masked_truncated_completions_count_for_nothing(name, run, monkeypatch):
    """Out of mask, rewards, labels, baselines and statistics; their share is logged all the same,
    and W of the others is what it is without them."""
    rollouts = spied_rollouts(monkeypatch)
    rows = steps(run("--max_steps", 1, "--loss_type", name, "--mask_truncated_completions", "true",
                     "--max_completion_length", 3, "--updates_per_rollout", 1, "--num_generations", 8)[1])
    rollout, _, samples = rollouts[0]
    ended = (rollout.ids[:, -3:] == 13).any(1)  # the embedded model's <eos>
    assert 0 < ended.sum() < len(ended) and rows[0]["unscored"] == 0
    assert rows[0]["completions/clipped_ratio"] == pytest.approx(1 - ended.float().mean().item())
    assert torch.equal(rollout.mask.any(1), ended) and torch.equal(rollout.rewards.isnan(), ~ended)
    parity = torch.arange(32) % 2
    assert rows[0]["reward"] == pytest.approx(parity[ended].float().mean().item())
    assert rows[0]["rewards/accuracy/mean"] == rows[0]["reward"]
    length = rollout.mask.sum(1)[ended].float().mean().item()
    assert rows[0]["completions/mean_length"] == pytest.approx(length)
    loss, weights = rr.loss_and_weights(rollout.old_logp, rollout, config(loss_type=name))
    alone = rollout[ended]
    if alone.advantages is not None:
        alone.advantages = rr.rollout_advantages(alone.rewards[:, None], alone, config(loss_type=name))
    loss_alone, weights_alone = rr.loss_and_weights(alone.old_logp, alone, config(loss_type=name))
    assert (weights[ended] - weights_alone).abs().max() < 1e-6 and not weights[~ended].any()
    assert abs(loss - loss_alone) < 1e-5


def test_a_run_that_is_only_cut_short_warns_once(run, monkeypatch):
    """D4: most completions truncated and no spread in any group; not where there is a spread, and
    also where all of them are masked."""
    with pytest.warns(UserWarning, match="max_completion_length 1 ") as caught:
        warnings.simplefilter("default")
        monkeypatch.setitem(rr.REWARD_FUNCS, "accuracy", lambda completions, **_: [0.0] * len(completions))
        run("--max_steps", 6, "--max_completion_length", 1, "--eval_steps", 0)
    assert len([w for w in caught if "most completions" in str(w.message)]) == 1
    with pytest.warns(UserWarning, match="max_completion_length 1 "):
        rows = run("--max_steps", 1, "--max_completion_length", 1, "--eval_steps", 0,
                   "--mask_truncated_completions")[1]
    assert rows[0]["completions/clipped_ratio"] == 1 and rows[0]["skipped_no_signal"] == 1
    monkeypatch.setitem(rr.REWARD_FUNCS, "accuracy", lambda completions, **_: [
        float(i % 2) for i in range(len(completions))])
    with warnings.catch_warnings(record=True) as caught:
        run("--max_steps", 1, "--max_completion_length", 1, "--eval_steps", 0)
    assert not [w for w in caught if "most completions" in str(w.message)]


@pytest.mark.parametrize("name", rr.METHODS)
def test_completions_are_logged_with_all_that_was_made_of_them(name, run, monkeypatch):
    """The first of each rollout, whole groups first, once: every reward, advantage or label, and the
    sequence logit of the last pass: not 0 in a second one, 0 where there is only one."""
    rollouts = spied_rollouts(monkeypatch)
    _, _, out = run("--max_steps", 8, "--loss_type", name, "--log_completions", 6,
                    "--num_iterations", 2, "--updates_per_rollout", 2)
    rows = [json.loads(line) for line in open(out / "completions.jsonl")]
    assert [row["step"] for row in rows] == [4] * 6 + [8] * 6
    for i, row in enumerate(rows[:6]):
        rollout, mask = rollouts[0][0], rollouts[0][0].mask
        assert re.fullmatch(r"\d+\+\d+=", row["prompt"]) and row["length"] == mask[i].sum()
        assert row["answer"] == str(sum(map(int, row["prompt"][:-1].split("+"))))
        assert row["rewards/accuracy"] == i % 2
        assert row["truncated"] == (row["length"] == 5 and 13 not in rollout.ids[i, -5:])
        assert row["sequence_logit"] != 0
        if rr.METHODS[name].estimator is None:
            assert row["label"] == ("wrong", "right")[i % 2]
        else:
            assert row["advantage"] == rollout.advantages[i].item() and abs(row["advantage"]) > 0.1
    assert rows[0]["prompt"] == rows[3]["prompt"] != rows[4]["prompt"] == rows[5]["prompt"]
    out = run("--max_steps", 1, "--loss_type", name, "--updates_per_rollout", 1)[2]
    rows = [json.loads(line) for line in open(out / "completions.jsonl")]
    assert len(rows) == 8 and all(row["sequence_logit"] == 0 for row in rows)
    assert not (run("--max_steps", 1, "--log_completions", 0)[2] / "completions.jsonl").exists()


def test_several_rewards_in_a_run(run, capsys, tmp_path):
    """A weighted sum for rloo; for real only the labels count, the rest is logged and said so."""
    (tmp_path / "mine.py").write_text("def third(completions, prompt, answer, **_):\n"
                                      "    return [i % 3 - 1 for i in range(len(completions))]\n")
    flags = ("--reward_funcs", "accuracy", f"{tmp_path}/mine.py:third", "--max_steps", 1)
    row = steps(run(*flags, "--reward_weights", 1, 3)[1])[0]
    assert row["rewards/accuracy/mean"] == 0.5 and row["rewards/third/mean"] == pytest.approx(-1 / 16)
    assert row["reward"] == pytest.approx(0.5 - 3 / 16)
    assert "without effect" not in capsys.readouterr().out
    row = steps(run(*flags, "--loss_type", "real")[1])[0]
    assert row["rewards/third/mean"] == pytest.approx(-1 / 16) and row["reward"] == 0.5
    assert "accuracy + " in (text := capsys.readouterr().out) and "third (logged, without effect)" in text


def test_labels_in_the_log_are_those_of_the_loss(run, monkeypatch):
    """A reward of exactly the threshold is right, also where float32 can't hold it; None is neither."""
    monkeypatch.setitem(rr.REWARD_FUNCS, "accuracy", lambda completions, **_: [
        (0.7, None, 0.1, 0.7)[i % 4] for i in range(len(completions))])
    _, rows, out = run("--max_steps", 1, "--loss_type", "real", "--reward_threshold", 0.7, "--eval_steps", 0)
    labels = [json.loads(line)["label"] for line in open(out / "completions.jsonl")]
    assert labels == ["right", None, "wrong", "right"] * 2 and rows[0]["weights/right_max"] > 0


def test_a_reward_that_never_scores_does_not_break_a_run(run, monkeypatch, capsys):
    """Nothing to learn and nothing to average: null in the rows, nan in the table, no traceback."""
    monkeypatch.setitem(rr.REWARD_FUNCS, "accuracy", lambda completions, **_: [None] * len(completions))
    for name in rr.METHODS:
        _, rows, _ = run("--max_steps", 1, "--loss_type", name)
        assert rows[0]["eval/pass@1"] is None and steps(rows)[0]["skipped_no_signal"] == 1
        assert "nan" in capsys.readouterr().out


def test_a_users_function_is_tried_before_the_model_is_loaded(tmp_path):
    """One that takes no other columns is named, with what it would get, and nothing is left behind."""
    (tmp_path / "mine.py").write_text("def strict(completions):\n    return [1.0] * len(completions)\n")
    done = command("--reward_funcs", "mine.py:strict", "--output_dir", "out", cwd=tmp_path)
    assert done.returncode == 1 and "mine.py:strict raised TypeError" in done.stderr
    assert "prompt" in done.stderr and "Traceback" not in done.stderr and not (tmp_path / "out").exists()


def test_what_a_run_says_at_its_start(run, capsys):
    """D7: prompts x completions, micro-batches, updates, all steps, sampling, parameters, memory."""
    run("--max_steps", 1, "--beta", 0, "--temperature", 0.7, "--micro_batch_size", 3)
    text = capsys.readouterr().out
    for line in ("0.6M parameters", "0.01 GiB for weights, gradients, AdamW;", "4 prompts x 4 completions",
                 "temperature 0.7, no top-k, top-p or penalty; ends at <eos>", "micro-batches of 3",
                 "2 in each of 1 passes", "1 steps in all", "16 held out", "rewards  accuracy;"):
        assert line in text


def test_a_checkpoint_that_can_not_be_used_ends_in_one_line(tmp_path):
    """No weights, or a tokenizer with more tokens than embeddings: a line, and no run left behind."""
    out = tmp_path / "tokenizer"
    rr.load_tokenizer(config()).save_pretrained(out)
    tiny_model(vocab_size=10, eos_token_id=2).save_pretrained(tmp_path / "small")
    rr.load_tokenizer(config()).save_pretrained(tmp_path / "small")
    (tmp_path / "d.jsonl").write_text("".join(
        json.dumps({"prompt": f"1+{i}=", "answer": str(1 + i)}) + "\n" for i in range(20)))
    for name, match in (("tokenizer", "can't be loaded"), ("small", "14 tokens and fewer embeddings")):
        done = command("--model_name_or_path", name, "--dataset", "d.jsonl", "--output_dir", f"o-{name}",
                       cwd=tmp_path)
        assert done.returncode == 1 and match in done.stderr and "Traceback" not in done.stderr
        assert not [*(tmp_path / f"o-{name}").iterdir()]


CODE = """open({marker!r}, "w").close()
from transformers import Qwen2Config, Qwen2ForCausalLM
class MyConfig(Qwen2Config):
    model_type = "mine"
class MyModel(Qwen2ForCausalLM):
    config_class = MyConfig
"""


def test_code_of_a_checkpoint_runs_only_where_asked(tmp_path, monkeypatch):
    """A folder with code of its own: a line without --trust_remote_code and nothing run; with it
    the model is that of the code."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder, marker = tmp_path / "remote", tmp_path / "it-ran"
    tiny_model("qwen2", vocab_size=14, eos_token_id=13, pad_token_id=12).save_pretrained(folder)
    rr.load_tokenizer(config()).save_pretrained(folder)
    (folder / "mine.py").write_text(CODE.format(marker=str(marker)))
    saved = json.loads((folder / "config.json").read_text()) | {
        "model_type": "mine", "architectures": ["MyModel"],
        "auto_map": {"AutoConfig": "mine.MyConfig", "AutoModelForCausalLM": "mine.MyModel"}}
    (folder / "config.json").write_text(json.dumps(saved))
    (tmp_path / "d.jsonl").write_text("".join(
        json.dumps({"prompt": f"1+{i}=", "answer": str(1 + i)}) + "\n" for i in range(20)))
    flags = ("--model_name_or_path", "remote", "--dataset", "d.jsonl", "--max_steps", 1, "--device", "cpu",
             "--max_completion_length", 3, "--num_generations", 2, "--prompts_per_rollout", 2)
    done = command(*flags, cwd=tmp_path)
    assert done.returncode == 1 and "remote can't be loaded" in done.stderr and not marker.exists()
    assert "trust_remote_code" in done.stderr and "Traceback" not in done.stderr
    done = command(*flags, "--trust_remote_code", "true", cwd=tmp_path)
    assert done.returncode == 0 and marker.exists(), done.stderr


def test_wrong_answers_get_no_reward_in_a_run(run, monkeypatch):
    """The reward of a run is `accuracy`, on the answers it samples: 0, 1 or between, not constant."""
    monkeypatch.setattr(rr, "REWARD_FUNCS", {"accuracy": rr.accuracy})
    _, rows, _ = run("--max_steps", 6, "--num_generations", 16, "--prompts_per_rollout", 16)
    rewards = [row["reward"] for row in steps(rows)]
    assert 0 < max(rewards) < 1 and all(r * 256 == int(r * 256) for r in rewards)


def test_learning_rates_are_those_of_the_schedule(run):
    """Warm-up over a share of the steps, then constant, or linear down; logged as used."""
    flags = ["--max_steps", 4, "--learning_rate", 1e-3, "--warmup_ratio", 0.5, "--eval_steps", 0]
    _, rows, _ = run(*flags, "--lr_scheduler_type", "constant")
    constant = [row["learning_rate"] for row in steps(rows)]
    _, rows, _ = run(*flags, "--lr_scheduler_type", "linear")
    linear = [row["learning_rate"] for row in steps(rows)]
    assert constant == pytest.approx([0, 5e-4, 1e-3, 1e-3])
    assert linear == pytest.approx([0, 5e-4, 1e-3, 5e-4])


def test_evaluating_only_and_switching_evaluation_off(run):
    """max_steps 0 evaluates and trains nothing; eval_steps 0 never evaluates, save_steps saves."""
    _, rows, out = run("--max_steps", 0)
    assert [set(row) for row in rows] == [{"step", "eval/pass@1", "eval/reward"}]
    _, rows, out = run("--max_steps", 3, "--eval_steps", 0, "--save_steps", 2)
    assert len(rows) == 3 and all("loss" in row for row in rows)
    assert {p.name for p in out.iterdir()} == {
        "config.json", "metrics.jsonl", "completions.jsonl", "model", "checkpoint-2", "checkpoint-3"}
    AutoModelForCausalLM.from_pretrained(out / "checkpoint-2")


def test_bf16_autocast_trains_float32_weights(run):
    """--bf16 true on the CPU: KL is exactly 0 before the first step, and every method steps."""
    for name in rr.METHODS:
        model, rows, _ = run("--max_steps", 3, "--bf16", "true", "--loss_type", name)
        assert steps(rows)[0]["kl"] == 0 and steps(rows)[0]["ratio/max"] == 1
        assert all(row["grad_norm"] > 0 for row in steps(rows)) and steps(rows)[-1]["kl"] > 0
        assert all(p.dtype == torch.float32 for p in model.parameters())


def test_the_embedded_run_opens_no_connection(run, monkeypatch):
    """No network is needed or tried."""
    monkeypatch.setattr(socket.socket, "connect", lambda *a: pytest.fail("a connection was opened"))
    run("--max_steps", 1)


def test_a_second_run_never_overwrites_the_first(tmp_path, monkeypatch):
    """Without --output_dir each run has a new folder; a folder that holds a run is refused."""
    monkeypatch.chdir(tmp_path)
    configs = [config(loss_type=name) for name in ("real", "real", "grpo")]
    for c in configs:
        rr.make_output_dir(c)
    assert [c.output_dir for c in configs] == ["runs/real-1", "runs/real-2", "runs/grpo-1"]
    (tmp_path / "old" / "model").mkdir(parents=True)
    (tmp_path / "runs" / "real-1" / "config.json").touch()
    for name in ("runs/real-1", "old"):
        with pytest.raises(ValueError, match=f"{name} holds a run"):
            rr.make_output_dir(config(output_dir=name))


# ---- batch arithmetic ----------------------------------------------------------------------------

@pytest.mark.parametrize("flags, total", [
    (dict(updates_per_rollout=1), 3), (dict(updates_per_rollout=2), 5),
    (dict(updates_per_rollout=2, num_iterations=3), 15), (dict(updates_per_rollout=1, max_steps=7), 7),
    (dict(updates_per_rollout=2, num_train_epochs=2), 10), (dict(max_steps=0), 0)])
def test_the_number_of_steps(flags, total):
    """D7: 5 prompts, 2 a rollout: 3 rollouts an epoch, the last with one prompt and one update."""
    c = config(**{"prompts_per_rollout": 2, "max_steps": -1, **flags})
    assert rr.total_steps(5, c) == total


def test_an_epoch_has_every_prompt_once_in_an_order_of_its_own():
    """The last rollout of an epoch is smaller, none is dropped or repeated; the seed decides."""
    problems = [dict(n=i) for i in range(5)]

    def epochs(seed):
        batches = rr.prompt_batches(problems, config(prompts_per_rollout=2, seed=seed))
        return [[(e, [p["n"] for p in b]) for e, b in (next(batches) for _ in range(3))]
                for _ in range(2)]
    first, second = epochs(0)
    assert [len(b) for _, b in first] == [2, 2, 1] and {e for e, _ in second} == {1}
    orders = [sum((b for _, b in epoch), []) for epoch in (first, second)]
    assert all(sorted(order) == list(range(5)) for order in orders) and orders[0] != orders[1]
    assert epochs(0) == [first, second] != epochs(1)


def test_updates_are_whole_groups():
    """Every completion once a pass, groups never split, at most as many parts as groups."""
    group = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 4, 4])[torch.randperm(10)]
    parts = rr.update_rows(group, config(updates_per_rollout=3, num_iterations=2))
    assert len(parts) == 6 and torch.equal(torch.cat(parts[:3]).sort()[0], torch.arange(10))
    sets = [set(group[p].tolist()) for p in parts[:3]]
    assert sum(map(len, sets)) == 5 and set.union(*sets) == {0, 1, 2, 3, 4}
    assert len(rr.update_rows(torch.zeros(4), config(updates_per_rollout=3))) == 1


# ---- bad input -----------------------------------------------------------------------------------

@pytest.mark.parametrize("flags, match", [
    (dict(num_generations=1), "num_generations is 1.*2 or more"),
    (dict(temperature=0.0), "temperature is 0"), (dict(temperature=-1.0), "temperature"),
    (dict(temperature=math.nan), "temperature is nan"), (dict(real_tau=0.0), "real_tau"),
    (dict(loss_type="ppo"), "loss_type is ppo.*grpo, rloo, real"),
    (dict(advantage_estimator="gae"), "reinforce_plus_plus"), (dict(scale_rewards="std"), "gdpo"),
    (dict(lr_scheduler_type="cosine"), "constant, linear"), (dict(beta=-0.1), "beta"),
    (dict(prompts_per_rollout=0), "prompts_per_rollout"), (dict(micro_batch_size=0), "micro_batch"),
    (dict(prompts_per_rollout=2, updates_per_rollout=3), "updates_per_rollout is 3.*2 or less"),
    (dict(generation_batch_size=0), "generation_batch_size"), (dict(max_steps=-2), "max_steps"),
    (dict(max_steps=0, eval_steps=0), "max_steps"), (dict(dataset="x.jsonl"), "model_name_or_path"),
    (dict(learning_rate=math.inf), "learning_rate"), (dict(warmup_ratio=5.0), "warmup_ratio is 5"),
    (dict(reward_threshold=math.nan), "reward_threshold"), (dict(seed=2**80), "seed"),
    (dict(device="tpu9"), "device is tpu9"),
    (dict(loss_type="real", kl_in_reward=True), "kl_in_reward")])
def test_bad_flags_are_refused_with_their_value(flags, match):
    """One line of ValueError that names the flag, its value and what to set (B3 among them)."""
    with pytest.raises(ValueError, match=match) as error:
        config(**flags)
    assert "\n" not in str(error.value) and "set " in str(error.value)


def test_a_small_rollout_fits_the_presets_updates():
    """One prompt a rollout is fine without touching updates_per_rollout."""
    assert config(prompts_per_rollout=1).updates_per_rollout == 1
    assert config().updates_per_rollout == 2


@pytest.mark.parametrize("flags, match", [
    (["--num_generations", 1], "num_generations is 1"), (["--loss_type", "ppo"], "loss_type is ppo"),
    (["--no_such_flag", 1], "no_such_flag"), (["--num_generations", 2.5], "num_generations.*2.5"),
    (["--model_name_or_path", "nowhere/", "--dataset", "x.jsonl"], "nowhere/"),
    (["--output_dir", "old"], "old holds a run")])
def test_the_command_line_ends_bad_input_in_one_line(flags, match, tmp_path, monkeypatch):
    """No traceback, an exit status that is not 0, and nothing left behind."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").touch()
    done = command(*flags, cwd=tmp_path)
    assert done.returncode == 1 and re.search(match, done.stderr)
    assert "Traceback" not in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["old"]


# ---- long runs and GPUs --------------------------------------------------------------------------

@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", rr.METHODS)
def test_the_embedded_run_learns(name, seed, tmp_path):
    """Greedy pass@1 and the sampled reward both rise by at least 0.15."""
    done = command("--loss_type", name, "--seed", seed, "--output_dir", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in open(tmp_path / "out" / "metrics.jsonl")]
    first, *_, last = [row for row in rows if "eval/pass@1" in row]
    for key in ("eval/pass@1", "eval/reward"):
        assert last[key] - first[key] >= 0.15, (first, last)


@pytest.mark.cuda
@pytest.mark.parametrize("name", rr.METHODS)
def test_cuda_runs_in_bf16_with_kl_zero_at_the_start(name, run):
    """The three methods on a GPU: bf16 by default, KL exactly 0, ratio 1, peak memory logged."""
    model, rows, out = run("--device", "cuda", "--loss_type", name, "--max_steps", 4)
    rows = steps(rows)
    assert json.loads((out / "config.json").read_text())["bf16"] is True
    assert rows[0]["kl"] == 0 and rows[0]["ratio/max"] == 1
    assert all(row["peak_memory_gb"] > 0 and row["grad_norm"] > 0 for row in rows)
    assert all(p.is_cuda and p.dtype == torch.float32 for p in model.parameters())
