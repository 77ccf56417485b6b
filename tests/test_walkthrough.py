"""walkthrough.md against the file: its quotes, links, names, flags, commands, and every number in it.

    python tests/test_walkthrough.py --fix    # puts the line numbers of its links right
"""
import itertools
import math
import re
import shlex
import sys
from pathlib import Path

import pytest
import test_logps_and_sampling
import test_methods
import torch
from conftest import config, random_rollout, rr
from test_methods import GOLDEN, assert_close, numbers
from transformers import HfArgumentParser

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "walkthrough.md").read_text()
CODE = (ROOT / "rloo_real.py").read_text()
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PROSE = re.sub(r"<!-- dynamics:.*?-->", "", BLOCK.sub("", TEXT), flags=re.DOTALL)
LINK = re.compile(r"(?<!\\)\[([^\[\]]*)\]\(([^()\s]+)\)")
LINE = re.compile(r"\[`(\w+)`\]\(([\w/.]+\.py)#L(\d+)\)")

sys.path.insert(0, str(ROOT / "plots"))
import one_group  # noqa: E402


def blocks(kind):
    """The contents of the fenced blocks of this kind, in order."""
    return [body for name, body in BLOCK.findall(TEXT) if name == kind]


def commands(start):
    """The commands of the bash blocks that start with this, as lists of words."""
    lines = "".join(blocks("bash")).replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line.startswith(start)]


# ---- what the text refers to ---------------------------------------------------------------------

def line_of(name, path):
    """The line that defines a function, class or constant of a file; 0 where none does."""
    found = re.search(rf"^(?:(?:def|class) {name}\b|{name} = )", (ROOT / path).read_text(), re.MULTILINE)
    return (ROOT / path).read_text()[:found.start()].count("\n") + 1 if found else 0


def fixed(text):
    """The text with the line numbers of its links put right."""
    return LINE.sub(lambda m: f"[`{m[1]}`]({m[2]}#L{line_of(m[1], m[2])})", text)


def anchor(heading):
    """What GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_quoted_code_is_in_the_file_word_for_word():
    """Every block of Python is a run of whole lines of rloo_real.py, 2 to 15 of them, and none twice;
    REWARD_FUNCS is the only single line."""
    quotes = blocks("python")
    assert len(quotes) == len({*quotes}) >= 14
    for quote in quotes:
        assert f"\n{quote}" in CODE, quote
        assert 2 <= quote.count("\n") <= 15 or quote.startswith("REWARD_FUNCS")


def test_line_numbers_of_links_are_right():
    """Each points at the definition of the name it shows; --fix mends them."""
    assert len(LINE.findall(TEXT)) > 100
    assert fixed(TEXT) == TEXT


def test_links_and_images_lead_somewhere():
    """Files exist, anchors are headings of the text, and the web is the papers' and ms-swift's only;
    every picture of plots/ is shown."""
    anchors = {anchor(heading) for heading in re.findall(r"^#+ (.*)$", PROSE, re.MULTILINE)}
    for label, target in LINK.findall(PROSE):
        if target.startswith("https://"):
            assert re.match(r"https://(arxiv\.org/abs|github\.com/modelscope)/", target), target
        elif target.startswith("#"):
            assert target[1:] in anchors, target
        else:
            path, _, line = target.partition("#L")
            assert (ROOT / path).is_file() and (not line or LINE.match(f"[{label}]({target})")), target
    assert {*re.findall(r"!\[[^\]]+\]\((plots/\w+\.png)\)", PROSE)} == {
        f"plots/{path.name}" for path in ROOT.glob("plots/*.png")}


def test_sections_are_those_of_the_file():
    """The same numbers and titles, in the same order."""
    sections = re.findall(r"^# ---- (\d\. .*?|Config) -+$", CODE, re.MULTILINE)
    ours = re.findall(r"^## (\d\. .*|Config)$", TEXT, re.MULTILINE)
    assert ours == sections and len(ours) == 7


def test_every_test_that_is_named_exists():
    """With a link, except for patterns; so does every function of the file that is named as code."""
    tests = {name for path in ROOT.glob("tests/test_*.py")
             for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)}
    named = {*re.findall(r"\btest_\w+(?!\w|\.py)", PROSE)} - {p.stem for p in ROOT.glob("tests/*.py")}
    assert len(named) > 50 and named <= tests
    assert named == {name for name, _, _ in LINE.findall(TEXT) if name.startswith("test_")}


def test_every_flag_that_is_named_exists():
    """A --flag in the prose is one of Config, or an option that pytest or this test has."""
    flags = {*re.findall(r"--(\w+)", PROSE)}
    assert len(flags) > 25 and flags <= {*rr.Config.__dataclass_fields__}


def test_every_metric_that_is_named_is_logged():
    """The names in the table of section 5 stand in the file."""
    table = re.search(r"^\| metric \|.*?\n\n", TEXT, re.DOTALL | re.MULTILINE)[0]
    for name in re.findall(r"`([a-z_]+(?:/[\w@]+)?)[`*]", table):
        assert f'"{name}' in CODE or f'"{name.partition("/")[0]}/' in CODE, name


def test_the_maths_survives_markdown():
    """Dollars come in pairs on a line, and nothing inside them is what Markdown would take away: an
    underscore or star it could read as emphasis, a bare bar in a table, an unknown escape."""
    for line in PROSE.splitlines():
        line = re.sub(r"`[^`]*`", "", line)
        display = line.startswith("$$")
        formulas = [line.strip("$")] if display else re.findall(r"\$([^$]+)\$", line)
        assert line.count("$") == (4 if display else 2 * len(formulas)), line
        for formula in formulas:
            assert not re.search(r"[^\w]_[^\s{\\]|[})\]]_|\*|<|\\[^a-zA-Z]", formula), formula
            assert not (line.startswith("|") and re.search(r"(?<!\\)\|", formula)), line


def test_tables_have_one_cell_for_each_column():
    """A bar inside a cell would shift the rest of its row."""
    for table in re.findall(r"(?:^\|.*\n)+", PROSE, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}) == 1, table


# ---- commands ------------------------------------------------------------------------------------

def parse(words):
    """The Config of a command that starts with python rloo_real.py."""
    parsed, = HfArgumentParser(rr.Config).parse_args_into_dataclasses([*words[2:], "--device", "cpu"])
    return parsed


def test_commands_parse():
    """Every rloo_real.py command makes a Config; scripts and their options, tests and flags exist."""
    assert len([parse(words) for words in commands("python rloo_real.py")]) == 2
    for words in commands("python plots/"):
        source = (ROOT / words[1]).read_text() + (ROOT / "plots/common.py").read_text()
        assert all(f'"{word}"' in source for word in words if word.startswith("--")), words
        assert "--output" in words  # or the picture of the repository would be drawn over
    assert all((ROOT / w).is_file() for words in commands("python -m pytest") for w in words if "/" in w)
    assert len(commands("python")) == len(blocks("bash")) + 1  # one block has two
    for words in map(str.split, re.findall(r"`(python [^`]*)`", PROSE)):
        assert words[1] == "-m" or (ROOT / words[1]).is_file(), words


SAME_NAME = ["advantage_estimator", "kl_in_reward", "loss_type", "real_tau", "beta", "epsilon",
             "epsilon_high", "num_generations", "num_iterations", "temperature", "learning_rate",
             "max_completion_length", "num_train_epochs", "save_steps", "eval_steps", "warmup_ratio",
             "enable_thinking"]


@pytest.mark.parametrize("number, gpus", [(0, 8), (1, 2)])
def test_recipes_have_the_settings_of_ms_swift(number, gpus):
    """Each swift rlhf flag with a name of ours has the same value here, and the batch is the same:
    prompts of a rollout, one update for each."""
    recipe = [body for body in blocks("text") if body.startswith("swift rlhf")][number]
    theirs = dict(re.findall(r"--(\w+) (\S+)", recipe))
    words = commands("python rloo_real.py")[number]
    ours = {flag[2:]: value for flag, value in zip(words, words[1:]) if flag.startswith("--")}
    for name in SAME_NAME:
        assert name not in theirs or theirs[name] == ours[name], name
    completions = gpus * int(theirs["per_device_train_batch_size"]) * int(
        theirs["gradient_accumulation_steps"])
    c = parse(words)
    assert c.prompts_per_rollout * c.num_generations == completions and c.updates_per_rollout == 1
    assert ours.get("mask_truncated_completions", "false") == theirs.get("overlong_filter", "false")


def test_printed_tables_are_what_the_commands_print(tmp_path, capsys):
    """The blocks behind the commands of one_group.py, character by character."""
    printed = re.findall(r"```bash\n(python plots/one_group\.py[^\n]*)\n```\n\n```text\n(.*?)```", TEXT,
                         re.DOTALL)
    assert len(printed) == 2
    for command, output in printed:
        words = shlex.split(command)
        words[words.index("--output") + 1] = str(tmp_path / "picture.png")
        one_group.main(words[2:])
        assert capsys.readouterr().out.rpartition("wrote ")[0] == output


# ---- numbers in tables ---------------------------------------------------------------------------

def one_token(rewards, logp=None, **flags):
    """(loss, W [B]) of one group of completions of one token; logp is how much it has moved."""
    rewards = torch.tensor(rewards, dtype=torch.float64)
    n, old = len(rewards), torch.zeros(len(rewards), 1, dtype=torch.float64)
    r = rr.Rollout(None, None, torch.ones(n, 1, dtype=torch.bool), torch.zeros(n), rewards, old)
    c = config(beta=0.0, **flags)
    r.advantages = rr.rollout_advantages(rewards, r, c)
    loss, W = rr.loss_and_weights(old if logp is None else logp, r, c)
    return loss.item(), W[:, 0]


def batch(preset, *_):
    c = config(**({} if preset == "embedded" else {"model_name_or_path": "x"}))
    B = c.prompts_per_rollout * c.num_generations
    return [preset, c.prompts_per_rollout, c.num_generations, B, c.updates_per_rollout,
            B // c.updates_per_rollout, f"{c.micro_batch_size} at most"]


def expected_pull(probs, rewards, K, ref=None, **flags):
    """Exact expectation of sum W grad log pi for logits, over all K-tuples of one-token samples."""
    logits, total = probs.log().requires_grad_(), torch.zeros_like(probs)
    for actions in map(torch.tensor, itertools.product(range(len(probs)), repeat=K)):
        logp = logits.log_softmax(0)[actions][:, None]
        r = rr.Rollout(None, None, torch.ones(K, 1, dtype=torch.bool), torch.zeros(K), rewards[actions],
                       old_logp=logp.detach(), ref_logp=None if ref is None else ref.log()[actions][:, None])
        c = config(scale_rewards="none", **flags)
        r.advantages = rr.rollout_advantages(r.rewards, r, c)
        _, W = rr.loss_and_weights(logp, r, c)
        total += probs[actions].prod() * torch.autograd.grad((W * logp).sum(), logits)[0]
    return total


def unbiased(K, *_):
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    rewards = torch.tensor([0.0, 1.0, 0.4, -2.0], dtype=torch.float64)
    exact, row = probs * (rewards - (probs * rewards).sum()), [K]
    for estimator in ("rloo", "grpo"):
        ratio = expected_pull(probs, rewards, int(K), loss_type="rloo", beta=0,
                              advantage_estimator=estimator) / exact
        assert ratio.std() < 1e-12
        row.append(ratio.mean())
    return row


def on_policy(rewards, *_):
    r = [float(x) for x in rewards.split()]
    return [rewards, *[one_token(r, loss_type=name)[1] * B for name, B in
                       (("grpo", 4), ("rloo", 4), ("real", 1))]]


def tiny_std(rows):
    kl = torch.tensor([float(row[0]) for row in rows], dtype=torch.float64)
    a = [rr.compute_advantages(torch.ones(4).double(), torch.zeros(4), kl=kl, beta=0.001,
                               advantage_estimator=name) for name in ("rloo", "grpo")]
    return [[row[0], 1 - 0.001 * x, *y] for row, x, *y in zip(rows, kl, *a)]


def clip(ratio, *_):
    row, s = [ratio], torch.tensor([[math.log(float(ratio))]], dtype=torch.float64)
    for A in (1.0, -1.0):
        s.requires_grad_()
        loss = rr.grpo_loss(s, torch.zeros(1, 1), torch.tensor([A]), torch.ones(1, 1), 0.2, 0.28)
        row.append(rr.gradient_weights(loss, s))
    return row


def real_weights(s, *_):
    """Four right and four wrong of one token; the first of each is at s, which leaves C = 4."""
    row, x = [s], float(s)
    for A in (1.0, -1.0):
        logp = torch.tensor([[x]], dtype=torch.float64, requires_grad=True)
        loss = rr.grpo_loss(logp, torch.zeros(1, 1), torch.tensor([A]), torch.ones(1, 1))
        row.append(abs(rr.gradient_weights(loss, logp)))
    moved = torch.tensor([x, 0, 0, 0, x, 0, 0, 0], dtype=torch.float64)[:, None]
    W = one_token([1.0] * 4 + [0.0] * 4, moved, loss_type="real")[1]
    return [*row, W[0], -W[4]]


def make_up(n, *_):
    W = one_token([1.0] * int(n) + [0.0] * (8 - int(n)), loss_type="real")[1]
    return [n, W[0], -W[-1], W[W > 0].sum(), -W[W < 0].sum()]


def first_loss(method, *_):
    loss, W = one_token([1.0] * 3 + [0.0] * 5, loss_type=method)
    return [method, loss, W[0], W[-1]]


def kl_pull(rows):
    probs, ref = (torch.tensor([float(row[i]) for row in rows], dtype=torch.float64) for i in (1, 2))
    pulls = [expected_pull(probs, torch.zeros(3).double(), 2, ref, loss_type="rloo", beta=1.0,
                           kl_in_reward=where) for where in (True, False)]
    return [[*row[:3], *pull] for row, *pull in zip(rows, *pulls)]


def k3(logp, ref):
    """Value and slope."""
    x = torch.tensor(logp, dtype=torch.float64, requires_grad=True)
    value = rr.kl_k3(x, torch.tensor(ref))
    return value, torch.autograd.grad(value, x)[0]


def adamw(c, *_):
    row = [c]
    for limit in (math.inf, 1.0):
        weights = torch.zeros(2, requires_grad=True)
        optimizer = torch.optim.AdamW([weights], lr=0.01, weight_decay=0.0)
        for gradient in ([0.3, -0.1], [0.02, 0.04], [-0.2, 0.3]):
            weights.grad = torch.tensor(gradient) * float(c)
            torch.nn.utils.clip_grad_norm_([weights], limit)
            optimizer.step()
        row.append(weights)
    return row


def at_temperature(t):
    return rr.normalise(torch.tensor([[[2.0, 0.0]]]), torch.tensor([[0]]), t, False)[0]


def answers(text, _, gold, *__):
    found = rr.extract_answer(text.strip("`"))
    same = "yes" if rr.same_answer(found, gold.strip("`")) else "no"
    return [text, f"`{found}`" if found else "none", gold, same]


def labels(rewards, *_):
    r = [float(x) for x in rewards.split(", ")]
    W = one_token(r, loss_type="real")[1]
    return [rewards, *("".join("FT"[x] for x in row) for row in (
        [w > 0 for w in W], [x > 0 for x in r], [x > sum(r) / len(r) for x in r]))]


def memory(name, parameters, _, card):
    return [name, parameters, float(parameters) * 1e9 * 20 / 2**30, card]


def defaults(flag, _, *theirs):
    value = getattr(config(model_name_or_path="x"), flag.strip("`-"))
    return [flag, str(value), *theirs]


def by_row(function):
    return lambda rows: [function(*row) for row in rows]


TABLES = {"batch": by_row(batch), "unbiased": by_row(unbiased), "on-policy": by_row(on_policy),
          "tiny-std": tiny_std, "clip": by_row(clip), "real-weights": by_row(real_weights),
          "make-up": by_row(make_up), "first-loss": by_row(first_loss), "kl-pull": kl_pull,
          "adamw": by_row(adamw), "answers": by_row(answers),
          "labels": by_row(labels), "memory": by_row(memory),
          "defaults": by_row(defaults)}
NAMED = dict(re.findall(r"<!-- table: ([\w-]+) -->\n\|.*\n\|[-|]+\n((?:\|.*\n)+)", TEXT))


def agree(cell, expected):
    """A cell of text is the expected text; one of numbers rounds the expected ones, digit by digit."""
    if isinstance(expected, str):
        return cell == expected
    written, values = cell.split(", "), torch.as_tensor(expected).detach().double().flatten().tolist()
    return len(written) == len(values) and all(
        abs(float(w) - v) <= 0.5000001 * 10.0 ** -len(w.partition(".")[2]) and (float(w) or w[0] != "-")
        for w, v in zip(written, values))


@pytest.mark.parametrize("name", TABLES)
def test_the_numbers_of_a_table_are_those_of_the_functions(name):
    """Recomputed row by row, to the last digit shown."""
    rows = [row.strip("| ").split(" | ") for row in NAMED[name].splitlines()]
    for row, expected in zip(rows, TABLES[name](rows), strict=True):
        assert len(row) == len(expected)
        for cell, value in zip(row, expected):
            assert agree(cell, value), (cell, value)


def test_no_other_table_has_numbers():
    """A table with decimals has a name and is recomputed."""
    assert NAMED.keys() == TABLES.keys() and len(NAMED) == PROSE.count("<!-- table: ")
    for before, table in re.findall(r"(.*\n)\n?((?:^\|.*\n)+)", PROSE, re.MULTILINE):
        assert before.startswith("<!-- table: ") or not re.search(r"\d\.\d", table), table


# ---- numbers in prose ----------------------------------------------------------------------------

VALUES = {  # what has two decimals or more in a sentence, and how it comes about
    "0.25": lambda: 1 / 4, "1.4997": lambda: 0.75 / 0.5001, "-0.4999": lambda: -0.25 / 0.5001,
    "0.0001": lambda: 1e-4, "0.4750": lambda: one_token([1.0, 0, 0], torch.tensor(
        [[0.05], [0], [0]]).double(), loss_type="real")[1][0] * 0.5,
    "1.6487": lambda: math.exp(0.5), "4.4817": lambda: math.exp(3 * 0.5), "0.05": lambda: 0.05,
    "0.28": lambda: 0.28, "3.178": lambda: one_token([1.0] * 3 + [0.0] * 5, loss_type="real")[0],
    "120.693": lambda: one_token([0.0, 1.0], torch.tensor([[60.0], [0]]).double(), loss_type="real")[0],
    "1.1353": lambda: k3(-1.0, -3.0)[0], "0.8647": lambda: k3(-1.0, -3.0)[1],
    "-0.01815": lambda: at_temperature(0.5), "-0.12693": lambda: at_temperature(1.0),
    "0.001": lambda: rr.Config.beta, "0.01": lambda: 0.01, "0.02": lambda: 0.02, "-0.1": lambda: -0.1,
    "0.04": lambda: 0.04, "0.2222": lambda: 2 / 9, "2.61": lambda: next(
        d for d in torch.arange(2.5, 2.7, 0.0001) if d.exp() - d - 1 >= 10).item()}


def test_numbers_in_sentences_are_right():
    """Every decimal number of two digits or more outside tables, code and versions is recomputed."""
    prose = re.sub(r"^\|.*|1\.16\.0|`[^`]*`|\d{4}\.\d{5}", "", PROSE, flags=re.MULTILINE)
    found = {*re.findall(r"(?<![\w.])(?:(?<![\w)}]-)(?<! - )-)?\d+\.\d{2,}", prose)}
    assert len(found) > 12 and found <= VALUES.keys(), found - VALUES.keys()
    for number in found:
        assert agree(number, VALUES[number]()), number


def test_counts_in_sentences_are_right():
    """Steps of GSM8K, and the slope of k3 beyond the point where ms-swift's clamp stops it."""
    for updates, steps in ((1, "468 steps"), (2, "and 935 with 2")):
        c = config(model_name_or_path="x", updates_per_rollout=updates)
        assert str(rr.total_steps(7473, c)) in steps and steps in TEXT
    assert k3(-3.0, 0.0)[1] < -19


# ---- what the text claims and no other test shows ------------------------------------------------

@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("name", ["grpo", "rloo", "real"])
def test_w_of_each_token_is_the_formula_of_the_text(name, beta):
    """Off policy, in groups of 4, 3 and 5, one with one label, one completion masked: W by the table
    of section 1, plus what KL in the loss adds to it."""
    logp, r = random_rollout(sizes=(4, 3, 5), shift=0.4)
    r.rewards[4:7] = 1.0
    r.rewards[9], r.mask[9] = math.nan, False
    c = config(loss_type=name, beta=beta, kl_in_reward=False)
    r.advantages = rr.rollout_advantages(r.rewards, r, c)
    if not beta:
        r.ref_logp = None
    _, W = rr.loss_and_weights(logp, r, c)
    rows = [i for i in range(12) if i != 9]
    size = {i: int(r.mask[i].sum()) for i in rows}
    s = {i: (logp - r.old_logp)[i, :size[i]] for i in rows}
    divisor = {i: {"grpo": 11 * size[i], "rloo": 11, "real": sum(size.values())}[name] for i in rows}
    for i in rows:
        right = r.rewards[i] == 1
        if name == "real":
            peers = [j for j in rows if r.group[j] == r.group[i]]
            C = 1 + sum(math.exp((-1 if right else 1) * s[j].mean() / 0.5) for j in peers
                        if j != i and (r.rewards[j] == 1) == right)
            share = 1 / (1 + C * math.exp((1 if right else -1) * s[i].mean() / 0.5))
            mixed = len({float(r.rewards[j]) for j in peers}) == 2
            expected = (1 if right else -1) * mixed * share / 0.5 / 3 / size[i] * torch.ones(size[i]).double()
        else:
            ratio = (s[i] if name == "grpo" else s[i].sum() * torch.ones(size[i]).double()).exp()
            A = r.advantages[i]
            through = ratio <= 1.2 if A > 0 else ratio >= 0.8
            expected = A * ratio * through / divisor[i]
        if beta:
            expected = expected + beta * ((r.ref_logp - logp)[i, :size[i]].exp() - 1) / divisor[i]
        assert_close(W[i, :size[i]], expected, 1e-12)
    assert W[~r.mask].abs().max() == 0


def test_kl_in_the_reward_and_in_the_loss_pull_in_two_directions():
    """By exact enumeration: F8 in the reward pulls along -grad KL(pi || ref), F9 in the loss along
    -grad KL(ref || pi), to 1e-12, whatever the rewards add."""
    probs, ref = (torch.tensor(p, dtype=torch.float64) for p in ([0.7, 0.2, 0.1], [0.2, 0.3, 0.5]))
    logits = probs.log().requires_grad_()
    pi = logits.softmax(0)
    grads = [torch.autograd.grad(kl, logits, retain_graph=True)[0] for kl in (
        (pi * (pi / ref).log()).sum(), (ref * (ref / pi).log()).sum())]
    rewards = torch.tensor([1.0, 0.0, 0.3], dtype=torch.float64)
    reward_pull = expected_pull(probs, rewards, 2, loss_type="rloo", beta=0)
    for kl_in_reward, grad in zip((True, False), grads):
        pull = expected_pull(probs, rewards, 2, ref, loss_type="rloo", beta=0.1, kl_in_reward=kl_in_reward)
        assert_close(pull - reward_pull, -0.1 * grad, 1e-12)
    assert (grads[0] - grads[1]).abs().max() > 0.05


def test_a_constant_factor_cancels_in_adamw_unless_the_norm_is_clipped():
    """1000 times the gradient, the same weights to 1e-6; with the norm clipped at 1, others."""
    (_, one, one_clipped), (_, many, many_clipped) = adamw("1"), adamw("1000")
    assert_close(one.detach(), many.detach(), 1e-6)
    assert (one_clipped - many_clipped).abs().max() > 1e-3


def answer_dapo(logp, old_logp, advantages, mask, epsilon, epsilon_high):
    surrogate = rr.clipped_surrogate(rr.log_ratio(logp, old_logp, mask), advantages[:, None], epsilon,
                                     epsilon_high)
    return -rr.sum_tokens(surrogate, mask).sum() / mask.sum().clamp(min=1)


def answer_bce(logp, old_logp, rewards, group, mask, tau=0.5, threshold=0.5):
    s, right = rr.sequence_logit(logp, old_logp, mask) / tau, rewards >= threshold
    counts = mask.any(1) & ~rewards.isnan()
    peers = (group[:, None] == group) & counts
    mixed = counts & (peers & right).any(1) & (peers & ~right).any(1)
    loss = torch.nn.functional.softplus(torch.where(right, -s, s))
    return torch.where(mixed, loss, 0.0).sum() / mixed.sum().clamp(min=1)


@pytest.mark.parametrize("case", GOLDEN["losses"], ids=range(len(GOLDEN["losses"])))
def test_the_exercises_have_the_golden_numbers(case):
    """GSPO as the text has it, and the answers for DAPO and the BCE form: losses and gradients."""
    scope = vars(rr).copy()
    exec(next(b for b in blocks("py") if b.startswith("def gspo_loss")), scope)
    exec("METHODS = {\n" + next(b for b in blocks("py") if '"gspo": Method(' in b) + "}", scope)
    assert scope["METHODS"]["gspo"].estimator == "grpo"
    old, new = numbers(case["old_logps"]), numbers(case["new_logps"])
    mask, rewards = numbers(case["completion_mask"]).bool(), numbers(case["rewards"])
    logp, group = new.clone().requires_grad_(), torch.arange(len(rewards)) // case["num_generations"]
    ours = {"bce": answer_bce(logp, old, rewards, group, mask, tau=case["tau"])}
    if "gspo" in case["losses"]:
        A = numbers(case["advantages"])
        ours |= {"gspo": scope["gspo_loss"](logp, old, A, mask, 3e-4, 4e-4),
                 "dapo": answer_dapo(logp, old, A, mask, 0.2, 0.28)}
    for name, loss in ours.items():
        assert_close(loss.detach(), case["losses"][name]["loss"])
        assert_close(rr.gradient_weights(loss, logp), -numbers(case["losses"][name]["grad"]))


def test_an_entry_in_methods_is_all_that_the_proofs_need():
    """The tests that the exercise counts on run for whatever rr.METHODS holds."""
    source = "".join((ROOT / f"tests/test_{name}.py").read_text() for name in (
        "methods", "policy_gradient", "training"))
    found = {*re.findall(r'parametrize\("name", rr\.METHODS\)\n(?:@.*\n)*def (test_\w+)', source)}
    assert len(found) >= 11 and found >= {
        "test_weights_are_the_derivative_by_finite_differences",
        "test_the_first_update_needs_no_first_pass_and_its_ratios_are_one",
        "test_a_step_makes_right_answers_likelier_and_wrong_ones_less_likely",
        "test_masked_positions_have_no_influence", "test_the_order_of_rows_does_not_matter",
        "test_values_and_gradients_stay_finite_far_out",
        "test_an_update_without_counted_tokens_is_a_zero_that_can_go_back"}
    assert source.count("for name in rr.METHODS]") == 2  # CASES of the micro-batches


def test_the_broken_masks_of_the_exercise_are_noticed(monkeypatch):
    """By the test of the first end token, and by the test of what stands behind the mask."""
    whole = rr.completion_mask
    monkeypatch.setattr(rr, "completion_mask", lambda ids, ends: whole(ids, ends) & ~torch.isin(
        ids, torch.as_tensor(ends).to(ids)))
    with pytest.raises(AssertionError):
        test_logps_and_sampling.test_a_completion_ends_at_its_first_end_token(2)
    monkeypatch.setattr(rr, "sum_tokens", lambda x, mask: (x * mask).sum(1))
    with pytest.raises(AssertionError):
        test_methods.test_masked_positions_have_no_influence("grpo", math.nan)


if __name__ == "__main__" and sys.argv[1:] == ["--fix"]:
    (ROOT / "walkthrough.md").write_text(fixed(TEXT))
