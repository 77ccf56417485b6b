"""Section 5: runs that are stopped, killed or hit by a fault, and what is left of them."""
import json
import multiprocessing
import os
import pickle
import random
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import config, rr, tiny_model
from safetensors.torch import load_file

SCRIPT = Path(__file__).parent.parent / "rloo_real.py"
SHAPE = ["--device", "cpu", "--loss_type", "rloo", "--prompts_per_rollout", 3, "--num_generations", 4,
         "--updates_per_rollout", 2, "--num_iterations", 2, "--max_completion_length", 4,
         "--micro_batch_size", 5, "--learning_rate", 1e-3, "--logging_steps", 1, "--log_completions", 2,
         "--eval_samples", 2, "--eval_steps", 4, "--lr_scheduler_type", "linear", "--max_steps", 14]
CLOCK = re.compile("_time|tokens_per_second|peak_memory")
REWARD = """
def luck(completions, prompt, **columns):
    return [float(sum(map(ord, c)) % 2) for c in completions]
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a tiny checkpoint, seven problems to train on (an epoch is rollouts of 3, 3 and 1,
    which are 4 + 4 + 2 updates), two to evaluate on, and a reward by luck that gives signals."""
    folder = tmp_path_factory.mktemp("place")
    tiny_model(vocab_size=14, eos_token_id=13, pad_token_id=12).save_pretrained(folder / "tiny")
    rr.load_tokenizer(config()).save_pretrained(folder / "tiny")
    for name, numbers in (("sums", range(7)), ("others", (7, 8))):
        (folder / f"{name}.jsonl").write_text("".join(
            json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in numbers))
    (folder / "rewards.py").write_text(REWARD)
    return folder


def flags(place, out, *more):
    return [str(f) for f in (
        *SHAPE, "--model_name_or_path", place / "tiny", "--dataset", place / "sums.jsonl",
        "--eval_dataset", place / "others.jsonl",
        "--reward_funcs", f"{place}/rewards.py:luck", "--output_dir", out, *more)]


def again(place, path, *more):
    """Flags that resume; code that a checkpoint wants to run has to be named anew."""
    return [str(f) for f in ("--resume_from_checkpoint", path, "--reward_funcs",
                             f"{place}/rewards.py:luck", *more)]


def rows(out, name="metrics"):
    """The rows of a log, without what a clock measured."""
    return [{k: v for k, v in json.loads(line).items() if not CLOCK.search(k)}
            for line in open(out / f"{name}.jsonl")]


def assert_same_run(a, b):
    """The same logs and the same final weights, bit for bit."""
    for name in ("metrics", "completions"):
        assert rows(a, name) == rows(b, name)
    x, y = (load_file(out / "model" / "model.safetensors") for out in (a, b))
    assert x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x)


@pytest.fixture(scope="module")
def whole(place):
    """An uninterrupted run that saved after each step."""
    rr.main(flags(place, place / "whole", "--save_steps", 1))
    steps = [row["step"] for row in rows(place / "whole") if "loss" in row]
    epochs = {row["epoch"] for row in rows(place / "whole") if "loss" in row}
    assert steps == [*range(1, 15)] and epochs == {0, 1}
    return place / "whole"


# ---- resuming ------------------------------------------------------------------------------------

def test_a_run_resumed_after_any_step_is_the_run_that_was_never_stopped(place, whole, tmp_path):
    """Metrics, samples and weights, bit for bit: from the middle of an epoch, between two updates of
    a rollout, from its last update, and from the end; into a new folder."""
    for step in range(1, 15):
        out = tmp_path / str(step)
        rr.main(again(place, f"{whole}/checkpoint-{step}", "--output_dir", out))
        assert_same_run(whole, out)


@pytest.mark.parametrize("more", [("--loss_type", "real", "--beta", 0), ("--loss_type", "grpo"),
                                  ("--lr_scheduler_type", "constant", "--warmup_ratio", 0.3),
                                  ("--mask_truncated_completions", True, "--temperature", 0.7)])
def test_other_methods_and_schedules_resume_alike(more, place, tmp_path):
    """Also with the reference gone, a schedule in its warm-up, and rewards that are NaN."""
    rr.main(flags(place, tmp_path / "a", "--save_steps", 3, *more))
    out = tmp_path / "b"
    rr.main(again(place, f"{tmp_path}/a/checkpoint-3", "--output_dir", out))
    assert_same_run(tmp_path / "a", out)


def test_the_embedded_model_resumes_with_the_reference_it_began_with(tmp_path, monkeypatch):
    """The warm-up is done again, for the KL; then the weights of the checkpoint replace it."""
    warm_up = rr.supervised_warm_up
    monkeypatch.setattr(rr, "supervised_warm_up", lambda *a: warm_up(*a, steps=120))
    rr.main(["--output_dir", str(tmp_path / "a"), "--max_steps", "5", "--save_steps", "2",
             "--prompts_per_rollout", "12", "--eval_steps", "0", "--logging_steps", "1", "--device", "cpu"])
    rr.main(["--resume_from_checkpoint", str(tmp_path / "a" / "checkpoint-4"),
             "--output_dir", str(tmp_path / "b")])
    assert_same_run(tmp_path / "a", tmp_path / "b")
    assert rows(tmp_path / "b")[-1]["kl"] > 0


def test_latest_is_the_newest_complete_checkpoint_of_the_folder(place, whole, tmp_path, monkeypatch, capsys):
    """Half a checkpoint counts for nothing, a finished run is left as it is, and without a folder the
    newest run under runs/ is meant."""
    out = tmp_path / "runs" / "x"
    shutil.copytree(whole, out)
    for step in range(9, 15):
        shutil.rmtree(out / f"checkpoint-{step}")
    shutil.rmtree(out / "model")
    (out / ".checkpoint-9.part").mkdir()
    (out / ".checkpoint-9.part" / "state.pt").write_text("half")
    (out / "metrics.jsonl").open("a").write('{"step": 9, "lo')
    monkeypatch.chdir(tmp_path)
    rr.main(again(place, "latest"))
    assert_same_run(whole, out)
    weights = (out / "model" / "model.safetensors").read_bytes()
    rr.main(again(place, "latest", "--output_dir", "runs/x"))
    assert_same_run(whole, out)
    assert (out / "model" / "model.safetensors").read_bytes() == weights
    with pytest.raises(SystemExit, match="there is no checkpoint in empty"):
        rr.main(["--resume_from_checkpoint", "latest", "--output_dir", "empty"])


def test_flags_of_a_resumed_run(place, whole, tmp_path, capsys):
    """What would change its course is refused with the list; logging, saving and memory are free, and
    max_steps where no schedule hangs on it."""
    resume = again(place, f"{whole}/checkpoint-12", "--output_dir")
    with pytest.raises(SystemExit, match=r"learning_rate 0.001 -> 0.01, seed 0 -> 3\)"):
        rr.main([*resume, str(tmp_path / "a"), "--seed", "3", "--learning_rate", "0.01"])
    with pytest.raises(SystemExit, match="max_steps 14 -> 20"):
        rr.main([*resume, str(tmp_path / "a"), "--max_steps", "20"])
    assert not (tmp_path / "a").exists()
    rr.main([*resume, str(tmp_path / "a"), "--logging_steps", "2", "--micro_batch_size", "3",
             "--save_steps", "1", "--save_total_limit", "1", "--log_weights_steps", "13"])
    assert {p.name for p in (tmp_path / "a").iterdir()} == {
        "checkpoint-14", "completions.jsonl", "config.json", "metrics.jsonl", "model", "weights-13.npz"}
    assert json.loads((tmp_path / "a" / "config.json").read_text())["logging_steps"] == 2
    constant = flags(place, tmp_path / "b", "--lr_scheduler_type", "constant", "--warmup_ratio", 0)
    rr.main([*constant, "--max_steps", "6"])
    rr.main([*constant, "--max_steps", "14", "--resume_from_checkpoint", "latest"])
    rr.main(flags(place, tmp_path / "c", "--lr_scheduler_type", "constant", "--warmup_ratio", 0))
    x, y = (load_file(tmp_path / n / "model" / "model.safetensors") for n in "bc")
    assert all(torch.equal(x[k], y[k]) for k in x)
    with pytest.raises(SystemExit, match="max_steps is 5, but .*checkpoint-14 is at step 14"):
        rr.main([*constant, "--max_steps", "5", "--resume_from_checkpoint", "latest"])


def test_only_the_newest_checkpoints_are_kept(place, tmp_path):
    """save_total_limit counts the final one too."""
    rr.main(flags(place, tmp_path / "a", "--save_steps", 3, "--save_total_limit", 2))
    kept = {p.name for p in (tmp_path / "a").glob("*checkpoint*")} | {
        p.name for p in (tmp_path / "a").glob(".*")}
    assert kept == {"checkpoint-12", "checkpoint-14"}


def test_a_folder_is_never_a_pattern_of_other_folders(place, tmp_path):
    """A limit of one checkpoint in s[12] deletes nothing in s1, and latest finds it there."""
    for name in ("s1", "s[12]"):
        rr.main(flags(place, tmp_path / name, "--save_steps", 2, "--max_steps", 4,
                      "--save_total_limit", 2 if name == "s1" else 1))
    assert len(rr.checkpoints(tmp_path / "s1")) == 2 and len(rr.checkpoints(tmp_path / "s[12]")) == 1
    rr.main(again(place, "latest", "--output_dir", tmp_path / "s[12]"))


def test_a_checkpoint_runs_no_code_that_was_not_asked_for(place, whole, tmp_path):
    """The file of a reward function, and the code of a model, are named on the command line."""
    with pytest.raises(SystemExit, match="wants to run .*rewards.py:luck.*repeat --reward_funcs"):
        rr.main(["--resume_from_checkpoint", f"{whole}/checkpoint-12", "--output_dir", str(tmp_path / "a")])
    shutil.copytree(whole / "checkpoint-12", tmp_path / "checkpoint-12")
    state = torch.load(tmp_path / "checkpoint-12" / "state.pt", weights_only=True)
    state["flags"]["trust_remote_code"] = True
    torch.save(state, tmp_path / "checkpoint-12" / "state.pt")
    with pytest.raises(SystemExit, match="repeat --trust_remote_code true"):
        rr.main(again(place, tmp_path / "checkpoint-12", "--output_dir", tmp_path / "a"))


def test_ctrl_c_saves_also_when_the_reader_of_the_output_is_gone(place, whole, tmp_path):
    """In a pipe to `tee`, Ctrl-C ends tee as well: nobody reads what is printed from then on."""
    out = tmp_path / "a"
    child = subprocess.Popen([sys.executable, SCRIPT, *flags(place, out)], text=True, cwd=tmp_path,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    for line in child.stdout:
        if line.startswith("step    2/"):
            child.stdout.close()
            child.send_signal(signal.SIGINT)
            break
    assert child.wait() == 128 + signal.SIGINT
    saved, = rr.checkpoints(out)
    rr.main(again(place, saved))
    assert_same_run(whole, out)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_save_after_the_current_step(number, place, whole, tmp_path):
    """A line says what was saved and how to go on; doing so gives the run that was never stopped."""
    out = tmp_path / "a"
    child = subprocess.Popen([sys.executable, SCRIPT, *flags(place, out)], text=True, cwd=tmp_path,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for line in child.stdout:
        if line.startswith("step    3/"):
            child.send_signal(number)
            break
    text, errors = child.communicate()
    assert child.returncode == 128 + number and "Traceback" not in errors
    command = re.search(r"^stopped after step (\d+); go on with: python rloo_real.py (.*)$", text, re.M)
    assert 3 <= int(command[1]) < 14
    rr.main(shlex.split(command[2]))
    assert_same_run(whole, out)


# ---- killed at any moment ------------------------------------------------------------------------

def child(argv, event, nth, after):
    """A run that kills itself before or after the nth call of an event; counts them where nth is 0."""
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    places = dict(rename=(Path, "rename"), mkdir=(Path, "mkdir"), fsync=(os, "fsync"), copy=(shutil, "copy"),
                  state=(torch, "save"), weights=(rr.AutoModelForCausalLM.__base__, "from_pretrained"),
                  log=(rr, "log_rows"), step=(rr, "optimizer_step"), remove=(rr, "remove"),
                  rollout=(rr, "collect_rollout"), rmtree=(shutil, "rmtree"), score=(rr, "score"))
    counts = dict.fromkeys(places, 0)

    def watch(name, call):
        def watched(*args, **kwargs):
            counts[name] += 1
            die = name == event and counts[name] == nth
            if die and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            value = call(*args, **kwargs)
            if die:
                os.kill(os.getpid(), signal.SIGKILL)
            return value
        return watched

    for name, (owner, attribute) in places.items():
        if name != "weights":
            setattr(owner, attribute, watch(name, getattr(owner, attribute)))
    rr.main(argv)
    if not nth:
        Path(event).write_text(json.dumps(counts))


def in_child(*arguments):
    """The exit code of `child`, in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rloo_real", "torch", "transformers", "datasets"])
    process = context.Process(target=child, args=arguments)
    process.start()
    process.join()
    return process.exitcode


@pytest.fixture(scope="module")
def counted(place):
    """(an uninterrupted run in a child, how often each event happened in it)."""
    out = place / "counted"
    assert in_child(flags(place, out, "--save_steps", 2, "--save_total_limit", 2), str(place / "counts"), 0,
                    False) == 0
    return out, json.loads((place / "counts").read_text())


def kill_and_resume(place, counted, out, event, nth, after):
    """Kills a run, resumes what is left of it until it ends, and compares."""
    start = flags(place, out, "--save_steps", 2, "--save_total_limit", 2)
    assert in_child(start, event, nth, after) == -signal.SIGKILL
    for log in (*out.glob("metrics.jsonl"), *out.glob("completions.jsonl")):
        assert log.read_text()[-1:] in ("", "\n")  # whole lines at any moment
    saved = rr.checkpoints(out)
    if saved:
        assert in_child(again(place, "latest", "--output_dir", out), "", -1, False) == 0
    else:
        shutil.rmtree(out, ignore_errors=True)
        assert in_child(start, "", -1, False) == 0
    assert_same_run(counted[0], out)
    assert len(rr.checkpoints(out)) == 2 and not [*out.glob(".*")]
    return bool(saved)


@pytest.mark.parametrize("event, nth, after", [("state", 2, False), ("rename", 3, False), ("step", 6, True)])
def test_a_run_killed_while_saving_and_training_goes_on_as_if_nothing_had_happened(
        event, nth, after, place, counted, tmp_path):
    """SIGKILL inside a save, between a folder and its name, and after a step that was not saved."""
    assert kill_and_resume(place, counted, tmp_path / "a", event, nth, after)


@pytest.mark.slow
def test_sixty_kills_lose_nothing(place, counted, tmp_path):
    """SIGKILL before and after calls of every kind that writes, moves, deletes, steps or samples."""
    moments = [(event, nth, after) for event, n in counted[1].items() for nth in range(1, n + 1)
               for after in (False, True)]
    chosen = random.Random(0).sample(moments, 60)
    resumed = [kill_and_resume(place, counted, tmp_path / str(i), *moment) for i, moment in enumerate(chosen)]
    print(f"{len(moments)} moments, {len(resumed)} kills, {sum(resumed)} resumed from a checkpoint")
    assert sum(resumed) > 30


# ---- faults from outside -------------------------------------------------------------------------

BROKEN = """
def luck(completions, prompt, **columns):
    luck.calls = getattr(luck, "calls", 0) + (len(completions) > 1)
    if luck.calls > 3:
        raise KeyError("units")
    return [float(sum(map(ord, c)) % 2) for c in completions]
"""


def failing(*argv):
    """The one line that a run ends with."""
    with pytest.raises(SystemExit) as stopped:
        rr.main([*map(str, argv)])
    assert isinstance(stopped.value.code, str) and "\n" not in stopped.value.code
    return stopped.value.code


def test_a_reward_function_that_raises_is_named_with_its_step_and_line(place, tmp_path):
    """What was saved before is there, and goes on once the function is mended."""
    mine = tmp_path / "mine.py"
    mine.write_text(BROKEN)
    start = flags(place, tmp_path / "a", "--save_steps", 3, "--reward_funcs", f"{mine}:luck",
                  "--eval_steps", 0)
    line = failing(*start)
    assert line.startswith("rloo_real.py: after step 10: ")
    assert f"{mine}:luck raised KeyError: 'units'" in line
    assert f"{mine}, line 5" in line and f"--resume_from_checkpoint {tmp_path}/a/checkpoint-9" in line
    mine.write_text(REWARD)
    rr.REWARD_FUNCS.pop(f"{mine}:luck")
    rr.main([*start, "--resume_from_checkpoint", "latest"])
    rr.REWARD_FUNCS.pop(f"{mine}:luck")
    rr.main(flags(place, tmp_path / "b", "--reward_funcs", f"{mine}:luck", "--eval_steps", 0))
    assert_same_run(tmp_path / "a", tmp_path / "b")


def test_a_full_disk_under_the_log_ends_in_one_line(place, tmp_path):
    """/dev/full takes nothing, as a full disk does; the checkpoint from before goes on elsewhere."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    start = flags(place, tmp_path / "a", "--save_steps", 2, "--max_steps", 4)
    rr.main(start)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for out in (tmp_path / "a", ):
        shutil.rmtree(out / "checkpoint-4")
        shutil.rmtree(out / "model")
    copied = shutil.copy

    def fill_up(source, target):
        copied(source, target)
        if Path(target) == tmp_path / "a":
            (tmp_path / "a" / Path(source).name).unlink()
            (tmp_path / "a" / Path(source).name).symlink_to("/dev/full")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "copy", fill_up)
        line = failing(*start, "--resume_from_checkpoint", "latest")
    assert "after step 3: [Errno 28] No space left on device; make room for" in line
    assert "checkpoint-2" in line
    rr.main(again(place, f"{tmp_path}/a/checkpoint-2", "--output_dir", tmp_path / "c"))
    assert_same_run(tmp_path / "b", tmp_path / "c")


@pytest.mark.parametrize("kilobytes", [1, 20, 60, 110])
def test_a_checkpoint_that_does_not_fit_leaves_the_one_before_whole(kilobytes, place, tmp_path):
    """The kernel refuses to write beyond a limit, somewhere in each of its files; one line, and the
    last checkpoint goes on."""
    start = flags(place, tmp_path / "a", "--save_steps", 2)
    save, limits = rr.save_checkpoint, resource.getrlimit(resource.RLIMIT_FSIZE)

    def save_with_little_room(*arguments):
        if arguments[-1].step == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (kilobytes * 1024, limits[1]))
        try:
            save(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rr, "save_checkpoint", save_with_little_room)
        line = failing(*start)
    assert "checkpoint-4 can't be written (" in line and "make room on the disk" in line
    assert [path.name for path in rr.checkpoints(tmp_path / "a")] == ["checkpoint-2"]
    assert not [*(tmp_path / "a").glob(".*")]
    rr.main([*start, "--resume_from_checkpoint", "latest"])
    assert (tmp_path / "a" / "model").exists()


def test_an_output_folder_that_can_not_be_written_is_refused_before_a_model_is_loaded(place, tmp_path):
    """A file where a folder should be."""
    (tmp_path / "file").write_text("")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rr, "load_model", None)
        line = failing(*flags(place, tmp_path / "file" / "run"))
    assert f"output_dir {tmp_path}/file/run can't be written to" in line and "--output_dir" in line


class Payload:
    """A pickle that would make a file."""
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("fault", ["empty", "cut", "pickle", "other", "version", "weights", "gone",
                                   "foreign"])
def test_a_broken_or_foreign_checkpoint_is_refused_in_one_line(fault, place, whole, tmp_path):
    """Nothing is unpickled, and what is there is left as it was."""
    bad = tmp_path / "checkpoint-6"
    shutil.copytree(whole / "checkpoint-6", bad)
    state = (bad / "state.pt").read_bytes()
    loaded = torch.load(bad / "state.pt", weights_only=True)
    if fault == "empty":
        (bad / "state.pt").write_bytes(b"")
    elif fault == "cut":
        (bad / "state.pt").write_bytes(state[:len(state) // 2])
    elif fault == "pickle":
        (bad / "state.pt").write_bytes(pickle.dumps(Payload(tmp_path / "opened")))
    elif fault == "other":
        torch.save({"model": {}}, bad / "state.pt")
    elif fault == "version":
        loaded["flags"]["another"] = 1
        torch.save(loaded, bad / "state.pt")
    elif fault == "weights":
        weights = (bad / "model.safetensors").read_bytes()
        (bad / "model.safetensors").write_bytes(weights[:len(weights) // 2])
    elif fault == "gone":
        shutil.rmtree(bad)
    else:
        tiny_model(vocab_size=14, hidden_size=16).save_pretrained(bad)
    line = failing(*again(place, bad, "--output_dir", tmp_path / "out"))
    assert str(bad) in line and ("can't be read" in line or "can't be loaded" in line)
    assert not (tmp_path / "opened").exists()
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def test_data_that_changed_since_the_save_are_refused(place, whole, tmp_path):
    """One answer is enough."""
    data = (place / "sums.jsonl").read_text()
    try:
        (place / "sums.jsonl").write_text(data.replace('"3"', '"4"'))
        line = failing(*again(place, whole / "checkpoint-6", "--output_dir", tmp_path / "out"))
    finally:
        (place / "sums.jsonl").write_text(data)
    assert "sums.jsonl has changed since the checkpoint" in line and not (tmp_path / "out").exists()


def test_out_of_memory_names_the_flags_that_lower_it(place, tmp_path, monkeypatch):
    """torch's own error, raised in the place of a kernel that finds no room."""
    step, calls = rr.policy_gradient, []

    def greedy(*arguments):
        calls.append(1)
        if len(calls) == 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore")
        step(*arguments)

    monkeypatch.setattr(rr, "policy_gradient", greedy)
    line = failing(*flags(place, tmp_path / "a", "--save_steps", 1))
    assert "CUDA out of memory. Tried to allocate 2.00 GiB; set --micro_batch_size" in line
    assert "--gradient_checkpointing true" in line and f"{tmp_path}/a/checkpoint-" in line


# ---- numerical trouble ---------------------------------------------------------------------------

@pytest.mark.parametrize("trouble", ["reward", "loss", "gradient"])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(trouble, place, tmp_path,
                                                                  monkeypatch, capsys):
    """D6: number and cause are printed, and the weights are those from before; the next one counts."""
    mine = tmp_path / "mine.py"
    mine.write_text(REWARD)
    weights, gradient, calls = rr.loss_and_weights, rr.policy_gradient, []
    before = {}

    def poisoned(logp, rollout, c):
        loss, W = weights(logp, rollout, c)
        calls.append(1)
        if len(calls) != 2:
            return loss, W
        if trouble == "loss":
            return loss * torch.nan, W
        return loss, W * torch.inf if trouble == "reward" else W

    def poisoned_gradient(model, rollout, W, c):
        gradient(model, rollout, W, c)
        if len(calls) == 2 and trouble == "gradient":
            next(model.parameters()).grad[0] = torch.nan

    step = rr.optimizer_step

    def watched(model, *arguments):
        old = [p.clone() for p in model.parameters()]
        value = step(model, *arguments)
        before[len(calls)] = all(torch.equal(a, b) for a, b in zip(old, model.parameters()))
        return value

    monkeypatch.setattr(rr, "loss_and_weights", poisoned)
    monkeypatch.setattr(rr, "policy_gradient", poisoned_gradient)
    monkeypatch.setattr(rr, "optimizer_step", watched)
    rr.main(flags(place, tmp_path / "a", "--max_steps", 4, "--loss_type", "real", "--eval_steps", 0))
    found = rows(tmp_path / "a")
    assert [row["skipped_non_finite"] for row in found] == [0, 1, 1, 1]
    assert before[2] and not before[4]
    assert re.search(r"^step 2 skipped, it was not finite: .*(nan|inf)", capsys.readouterr().out, re.M)


def test_five_such_steps_in_a_row_stop_the_run(place, tmp_path, monkeypatch):
    """Not four and one; the message says what was not finite, and the last checkpoint is good."""
    weights, calls = rr.loss_and_weights, []

    def poisoned(*arguments):
        loss, W = weights(*arguments)
        calls.append(1)
        return (loss, W) if len(calls) in (1, 2, 7) else (loss * torch.nan, W)

    monkeypatch.setattr(rr, "loss_and_weights", poisoned)
    mine = tmp_path / "mine.py"
    mine.write_text("def turns(completions, **c):\n    return [i % 2 for i, _ in enumerate(completions)]")
    line = failing(*flags(place, tmp_path / "a", "--save_steps", 2, "--max_steps", 40,
                          "--reward_funcs", f"{mine}:turns"))
    assert "after step 12: 5 steps in a row were not finite, at last with loss nan" in line
    assert "--learning_rate" in line and "checkpoint-10" in line
    assert all(v.isfinite().all() for v in
               load_file(tmp_path / "a" / "checkpoint-10" / "model.safetensors").values())
    assert rows(tmp_path / "a")[-1]["skipped_non_finite"] == 9


# ---- what models and data files may hold ---------------------------------------------------------

def test_no_text_of_a_model_or_a_file_reaches_the_terminal_raw(place, tmp_path, capsys):
    """Escapes in prompts, answers, column names and errors are written out; lone surrogates too."""
    red = "\x1b[31m\x9b31m\u202e"
    rows_ = [{"prompt": f"{i}+1={red}", "answer": str(i + 1), f"note{red}": 1} for i in range(6)]
    rows_.append({"prompt": f"x{red}", "answer": f"none{red}", f"note{red}": 1})
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_))
    mine = tmp_path / "mine.py"
    mine.write_text("def luck(completions, **c):\n    return [float(len(x) % 2) for x in completions]\n"
                    "def fail(completions, **c):\n    raise ValueError('\\x1b[31m\\ud800')\n")
    data = ["--dataset", tmp_path / "d.jsonl", "--eval_steps", 0, "--max_steps", 1]
    rr.main(flags(place, tmp_path / "a", *data, "--reward_funcs", "accuracy"))
    lines = [failing(*flags(place, tmp_path / "b", *data, "--reward_funcs", f"{mine}:fail"))]
    (tmp_path / "d.jsonl").write_text("".join(
        json.dumps({"text": 1, f"note{red}": 1}) + "\n" for row in rows_))
    lines.append(failing(*flags(place, tmp_path / "b", *data)))
    output = capsys.readouterr()
    for text in (output.out, output.err, *lines):
        assert not any(c in text for c in "\x1b\x9b\u202e") and "\ud800" not in text
    assert "\\x1b[31m" in output.out and all("\\x1b[31m" in line for line in lines)


@pytest.mark.parametrize("content", [
    b'{"prompt": "1+1=", "answer": "2\\u0000"}\n', b'{"prompt": "\\ud800 1+1=", "answer": "2"}\n',
    b'{"prompt": "1+1=\xff\xfe", "answer": "2"}\n', b'{"prompt": "1+1=", "answer": "\xff2"}\n',
    b'{"prompt": "' + b"1" * 10**7 + b'", "answer": "2"}\n',
    b'{"prompt": "1+1=", "answer": "' + b"2 " * 5 * 10**6 + b'"}\n'],
    ids=["NUL", "surrogate", "invalid prompt", "invalid answer", "10 MB prompt", "10 MB answer"])
def test_odd_rows_are_used_or_left_out_or_refused_in_one_line(content, place, tmp_path, capsys):
    """Never a traceback, never a hang."""
    good = b"".join(b'{"prompt": "%d+1=", "answer": "%d"}\n' % (i, i + 1) for i in range(5))
    (tmp_path / "d.jsonl").write_bytes(good + content)
    try:
        rr.main(flags(place, tmp_path / "a", "--dataset", tmp_path / "d.jsonl", "--max_steps", 1,
                      "--reward_funcs", "accuracy", "--eval_steps", 0))
    except SystemExit as stopped:
        assert re.fullmatch("rloo_real.py: dataset .*", stopped.code)
        assert "--dataset" in stopped.code


@pytest.mark.cuda
def test_on_cuda_a_resumed_run_differs_by_rounding_only(place, tmp_path):
    """Losses and weights to 1e-3: kernels may add up in another order from run to run."""
    rr.main(flags(place, tmp_path / "a", "--save_steps", 3, "--device", "cuda"))
    rr.main(again(place, f"{tmp_path}/a/checkpoint-3", "--output_dir", tmp_path / "b"))
    x, y = (load_file(tmp_path / n / "model" / "model.safetensors") for n in "ab")
    assert all(torch.allclose(x[k], y[k], atol=1e-3) for k in x)
