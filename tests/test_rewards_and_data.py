r"""Section 4: final answers (F19, F20), reward functions, and what a data file may do wrong."""
import json
import math
import re

import pytest
import torch
from conftest import config, rr
from datasets import Dataset

RIGHT = [
    # thousands, currency
    ("#### 1,000", "1000"), ("#### 1,000", "#### 1,000"), (r"\boxed{$9{,}500}", "9500"),
    ("It costs $1,234.50!", "1234.5"), ("-$5", "-5"), (r"\boxed{1{,}234{,}567}", "1234567"),
    # signs
    ("#### -5", "-5"), ("#### +5", "5"), ("16-3=13", "13"), ("\u22125", "-5"), (r"\boxed{-7}", "-7"),
    # forms of a number
    ("18.0", "18"), ("18.", "18"), ("$18.00", "18"), ("**18**", "18"), ("18 eggs", "18"),
    ("1/2", "0.5"), (r"\frac{1}{2}", "0.5"), (r"\boxed{-\dfrac{1}{2}}", "-1/2"), ("50%", "50"),
    (r"\boxed{18\%}", "18"), ("-0", "0"), (".5", "1/2"), (r"\boxed{5\text{ cm}}", "5"),
    (r"$\boxed{x = 5}$", "5"), ("The answer is 90^\\circ", "90"), ("answer is 3/4.", "0.75"),
    # which answer it is: the last marker, else the last number
    ("18 eggs at $2", "2"), ("#### 5\nso far, but the answer is 6 after all. Not 9", "6"),
    (r"\boxed{12}, no, \boxed{13}. Check: 20", "13"), ("<answer>\n18\n</answer> as 9 * 2 = 18.", "18"),
    ("The answer is 18. I checked it 20 times.", "18"), ("answer is: **18** because 9 * 2", "18"),
    (r"The answer is $\boxed{\frac{3}{4}}$.", "0.75"), ("#### Step 2: add\nThe total is 7", "7"),
    (r"<answer>\boxed{5}</answer> 7", "5"), (r"\boxed{{{18}}}", "18"), ("3 + 4 = 7", "7"),
    ("The answer is 5 eggs + 13 eggs = 18 eggs", "18"), ("The answer is:\n\n18\n\nCheck: 20", "18"),
    ("####\n18\nThere are 3 ducks", "18"), ("#### 18 as 3 * 6 = 18", "18"),
    # LaTeX around a number, units, an en dash for a sign
    (r"The answer is \(18\).", "18"), (r"The final answer is \[18\]", "18"), ("\u20135", "-5"),
    (r"\boxed{\textbf{18}}", "18"), (r"\boxed{18\ \mathrm{km}}", "18"), (r"\frac{-1}{2}", "-0.5"),
    ("The answer is $18/week.", "18"),
]
WRONG = [
    ("15", "5"), ("180", "18"), ("<answer>1 2 3 4 5</answer>", "5"), ("1, 2", "12"),
    ("#### -5", "5"), ("5 - 3", "-3"), ("5-3", "-3"), ("0.3333", "1/3"), ("#### 1331 and 1728", "1728"),
    ("1728", "1331 and 1728"), (r"\boxed{3\pi}", "3"), (r"\boxed{2^{10}}", "10"), (r"\boxed{2x}", "2"),
    (r"\boxed{3\frac{1}{2}}", "31/2"), ("12,34", "1234"), ("9**9**9", "1"), ("NaN", "NaN"),
    ("abc", "xyz"), ("", "0"), ("1/0", "1"), ("inf", "inf"), ("1e1000000000", "1e1000000000"),
    ("1e3", "3"), ("#### 1e5", "1"), ("The answer is 1e5.", "1"), ("#### 5x", "5"), ("#### 2k", "2"),
    ("#### 3x + 2", "3"), ("#### 5 apples and 7 oranges", "5"), ("#### 5 plus 7", "5"),
    ("#### 5, then 7", "5"), (r"\boxed{x > 5}", "5"), ("\\boxed{\u221a5}", "5"),
    ("#### 3 to 5", "3"), ("#### 0x12", "0"), ("3\u20135", "-5"),
    ("The answer is 6 hours and 30 minutes", "6"), (r"\boxed{x=5 \text{ or } x=7}", "7"),
    (r"\boxed{x=5, y=7}", "7"), ("<answer>x = 5, y = 7</answer>", "7"), ("-$5", "5"),
    ("1" * 10_000, "1" * 10_000), ("#### 1" + "0" * 150, "1" + "0" * 99), ("8", ""),
]


@pytest.mark.parametrize("text, gold", RIGHT)
def test_right_answers_are_right(text, gold):
    """E2, E3, E6: what a completion says is the gold number, however it is written."""
    assert rr.same_answer(rr.extract_answer(text), gold)
    assert rr.accuracy([text], answer=[gold]) == [1.0]


@pytest.mark.parametrize("text, gold", WRONG, ids=lambda t: t[:20])
def test_wrong_answers_are_wrong(text, gold):
    """E5, E8: never by substring, no expression, no part of a list, no exponent, no 101 digits."""
    assert rr.same_answer(rr.extract_answer(text), gold) is False


def test_answers_come_back_as_written():
    """F19: the marked text or the last number, untouched; None where there is neither."""
    assert rr.extract_answer("so #### 1,000 ") == "1,000"
    assert rr.extract_answer(r"\boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert rr.extract_answer("he has 3 and $1,234.50!") == "1,234.50"
    assert rr.extract_answer("no idea") is None and rr.extract_answer("") is None
    assert not rr.same_answer(None, "5")


@pytest.mark.parametrize("text", [
    "1" * 100_000, "\\boxed{" * 20_000, "answer is " * 10_000, "#### " * 20_000, "<answer>" * 20_000,
    "{" * 100_000, "1,111" * 20_000, "\\boxed{" + "{a}" * 50_000, "1/" * 50_000, "-" * 100_000,
    "\\frac{" * 20_000, "\x00\ud800" * 1000, "answer is 1" + " and" * 30_000], ids=lambda t: t[:10])
def test_no_text_stalls_or_raises(text):
    """E8: 100k characters of the worst kind get a 0; a search that backtracks would take hours."""
    assert rr.accuracy([text], answer=["5"]) == [0.0]
    assert rr.same_answer("5", text) is False


# ---- reward functions ----------------------------------------------------------------------------

def test_missing_rewards_become_nan(monkeypatch):
    """B4: None and NaN are not 0; each function has its column."""
    monkeypatch.setattr(rr, "REWARD_FUNCS", {"a": lambda completions, **_: [None, 1, math.nan],
                                             "b": lambda completions, **_: [0.5, True, 2]})
    table = rr.score_completions(["a", "b"], ["x"] * 3, {})
    assert table.shape == (3, 2) and table.isnan().tolist() == [[True, False], [False] * 2, [True, False]]
    assert table[1].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("bad, match", [
    (lambda completions, **_: [1.0], "list of 1 for 4"), (lambda completions, **_: 1.0, "float for 4"),
    (lambda completions, **_: None, "NoneType"), (lambda completions, **_: ["a"] * 4, "no number"),
    (lambda completions, **_: torch.ones(4, 2), "Tensor of 4"), (lambda completions, **_: ["1"] * 4, "text"),
    (lambda completions, **_: [10**400] * 4, "too large"),
    (lambda completions, **_: 1 / 0, "ZeroDivisionError"),
    (lambda completions, **_: [1] * 5, "list of 5 for 4")])
def test_a_reward_function_that_returns_something_else_is_named(bad, match, monkeypatch):
    """B4: nothing is broadcast; the error has the function's name and the counts."""
    monkeypatch.setitem(rr.REWARD_FUNCS, "my_reward", bad)
    with pytest.raises(ValueError, match=f"my_reward.*{match}"):
        rr.score_completions(["my_reward"], ["x"] * 4, {})


def test_reward_functions_get_the_columns_of_the_data_by_keyword(monkeypatch):
    """The completions, prompt, answer and every other column, each as long as the completions."""
    seen = {}

    def spy(completions, **columns):
        seen.update(columns, completions=completions)
        return [0.0] * len(completions)

    monkeypatch.setitem(rr.REWARD_FUNCS, "spy", spy)
    problems = [dict(prompt="p", answer="1", level=3, prompt_ids=[1])] * 2
    rr.score_completions(["spy"], ["a", "b"], rr.columns(problems))
    assert seen == dict(completions=["a", "b"], prompt=["p"] * 2, answer=["1"] * 2, level=[3, 3])


THINK, ANSWER = "<think>2 < 3</think>", "<answer>a < b</answer>"


@pytest.mark.parametrize("text, reward", [
    (THINK + ANSWER, 1), (THINK + "\n" + ANSWER, 1), ("<think>\n\n</think> <answer>\n5\n</answer>\n", 1),
    (THINK + ANSWER + "<|im_end|>", 1), (THINK + ANSWER + "</s>\n<|endoftext|>", 1),
    ("so 5</think>" + ANSWER, 1), (THINK + ANSWER + ANSWER, 0), ("5", 0), ("", 0), (ANSWER, 0), (THINK, 0),
    (THINK + ANSWER + "!", 0), ("well " + THINK + ANSWER, 0), (THINK + "so " + ANSWER, 0),
    (THINK + THINK + ANSWER, 0), ("<think>" + ANSWER + "</think>" + ANSWER, 0), ("<think>" * 50_000, 0),
    (ANSWER * 20_000, 0), (" " * 100_000, 0)], ids=lambda t: str(t)[:40])
def test_the_format_reward(text, reward):
    """E7: an optional <think>, text, </think>, one <answer>...</answer>, then special tokens only."""
    assert rr.format_reward([text], answer=["5"]) == [reward]


def test_completions_are_decoded_whole_but_for_their_end_token(characters):
    """E7: a <think> that is a special token of the tokenizer stays; the end token goes; a completion
    cut at the limit keeps its last token."""
    characters.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    end = characters.eos_token_id
    rows = [characters(text)["input_ids"] for text in ("<think>1</think>", "1", "<think>")]
    completions = torch.tensor([rows[0] + rows[1], [*rows[1], end, 7, 7], [*rows[2], 12, end, 7]])
    mask = rr.completion_mask(completions, end)
    cut = torch.tensor([True, False, False])
    ids = torch.cat([torch.full((3, 2), 9), completions], 1)
    assert rr.decode(characters, ids, mask, cut) == ["<think>1</think>1", "1", "<think><pad>"]


def user_file(path, text):
    path.write_text(text)
    return str(path)


def test_a_users_reward_function_is_loaded_from_its_file(tmp_path):
    """path/to/file.py:function, with the file's own globals, beside those that are built in."""
    path = user_file(tmp_path / "mine.py", "import math\nSCALE = 2\n"
                     "def length(completions, level, **columns):\n"
                     "    return [math.floor(SCALE * len(c)) + l for c, l in zip(completions, level)]\n")
    c = config(reward_funcs=["accuracy", f"{path}:length"], reward_weights=[1.0, 0.5])
    table = rr.score_completions(c.reward_funcs, ["4", "55"], {"answer": ["4", "5"], "level": [1, 0]})
    assert table.tolist() == [[1, 3], [0, 4]]
    assert rr.rollout_rewards(table, c).tolist() == [2.5, 2.0]


@pytest.mark.parametrize("flags, match", [
    (dict(reward_funcs=["acuracy"]), "reward_funcs has acuracy.*no file ''.*accuracy, format or path"),
    (dict(reward_funcs=["no.py:f"]), "no.py:f.*no file 'no.py'"), (dict(reward_funcs=[]), "reward_funcs"),
    (dict(reward_funcs=["bad.py:f"]), "bad.py:f.*invalid syntax"),
    (dict(reward_funcs=["good.py:g"]), "good.py:g.*KeyError: 'g'"),
    (dict(reward_funcs=["good.py"]), "good.py.*no file ''"),
    (dict(reward_funcs=["accuracy", "accuracy"]), "different"),
    (dict(reward_weights=[1.0, 2.0]), "reward_weights.*one weight for each"),
    (dict(reward_weights=[math.nan]), "reward_weights"),
    (dict(reward_funcs=["good.py:f", "format"], loss_type="real"), "real takes its labels from one")])
def test_reward_functions_that_can_not_be_used_are_refused(flags, match, tmp_path, monkeypatch):
    """At start-up, with the function's name: missing file, syntax error, wrong count of weights."""
    monkeypatch.chdir(tmp_path)
    user_file(tmp_path / "bad.py", "def f(:")
    user_file(tmp_path / "good.py", "x = 1\ndef f(completions, **_):\n    return [1] * len(completions)\n")
    with pytest.raises(ValueError, match=match) as error:
        config(**flags)
    assert "\n" not in str(error.value)


def test_labels_come_from_accuracy_or_the_only_function():
    """REAL: the accuracy column untouched by weights, whatever else is scored; NaN stays NaN."""
    table = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, math.nan]], dtype=torch.float64)
    c = config(loss_type="real", reward_funcs=["format", "accuracy"], reward_weights=[9.0, 0.1],
               system="<think> <answer>")
    assert rr.rollout_rewards(table, c).tolist()[:2] == [0, 1] and rr.rollout_rewards(table, c)[2].isnan()
    c = config(loss_type="real", reward_funcs=["format"], reward_weights=[0.1], system="<think> <answer>")
    assert rr.rollout_rewards(table, c).tolist() == [1, 1, 0]
    c = config(reward_funcs=["format", "accuracy"], system="<think> <answer>")
    assert rr.rollout_rewards(table, c).tolist() == [1, 2, 0]


def test_a_format_that_the_system_prompt_never_asks_for_is_warned_of(recwarn):
    """A reward that nobody told the model about stays 0."""
    config(reward_funcs=["format"], system="Use <think></think> and <answer></answer>.")
    assert not recwarn.list
    with pytest.warns(UserWarning, match="--system does not ask for"):
        config(reward_funcs=["format"])


def test_without_accuracy_any_answer_will_do(tmp_path, characters):
    """Another function may want LaTeX, or nothing at all: no row is left out for its answer."""
    rows = [{"problem": f"q{i}", "solution": r"\boxed{\sqrt{2}}"} for i in range(20)]
    flags = dict(reward_funcs=["format"], system="")
    with pytest.warns(UserWarning):
        train, held_out = load(write(tmp_path / "d.jsonl", rows), characters, **flags)
        assert len(train) + len(held_out) == 20 and train[0]["answer"] == rows[0]["solution"]
        rows = [{"problem": f"q{i}"} for i in range(20)]
        assert load(write(tmp_path / "e.jsonl", rows), characters, **flags)[0]


# ---- data ----------------------------------------------------------------------------------------

ROWS = [{"question": f"What is {i} + {i}?", "answer": f"It is {i}+{i}.\n#### {2 * i}"} for i in range(30)]


def write(path, rows):
    """The rows in a file of the kind its name says."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        getattr(Dataset.from_list(rows), f"to_{path.suffix[1:]}")(str(path))
    return str(path)


@pytest.fixture
def characters():
    """A tokenizer of any letter and digit, a token a character."""
    tokenizer = rr.load_tokenizer(config())
    tokenizer.add_tokens([chr(c) for c in range(32, 127)])
    return tokenizer


def load(path, tokenizer, **flags):
    return rr.load_problems(config(model_name_or_path="x", dataset=path, **flags), tokenizer)


def golds(problems):
    return [rr.gold_answer(str(p["answer"])) for p in problems]


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
@pytest.mark.parametrize("name", ["question", "prompt"])
def test_local_files_of_every_kind_are_read(kind, name, tmp_path, characters, monkeypatch):
    """D5: without a network, whole, with the answer behind its marker and a tenth held out."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rows = [{name: row["question"], "answer": row["answer"], "id": i} for i, row in enumerate(ROWS)]
    train, held_out = load(write(tmp_path / f"data.{kind}", rows), characters)
    assert len(train) == 27 and len(held_out) == 3
    assert sorted(p["id"] for p in train + held_out) == list(range(30))
    assert golds(train) == [str(2 * p["id"]) for p in train]
    assert {p["answer"] for p in train} < {row["answer"] for row in rows}  # the column as it is
    assert characters.decode(train[0]["prompt_ids"]) == train[0]["prompt"]
    assert len(load(str(tmp_path / f"data.{kind}"), characters, eval_steps=0)[0]) == 30


TEMPLATE = ("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
            "{% if add_generation_prompt %}[assistant]{% endif %}"
            "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}")


@pytest.mark.parametrize("flags, start, end", [
    ({}, "[system]" + rr.CHECKPOINT_PRESET["system"], "[assistant]"), ({"system": ""}, "", "[assistant]"),
    ({"system": "Add."}, "[system]Add.", "[assistant]"),
    ({"enable_thinking": False, "system": ""}, "", "[assistant]<think></think>"),
    ({"enable_thinking": True, "system": ""}, "", "[assistant]")])
def test_prompts_go_through_the_chat_template(flags, start, end, tmp_path, characters):
    """System turn, user turn and the opening of the assistant's, where there is a template."""
    characters.chat_template = TEMPLATE
    train, _ = load(write(tmp_path / "d.jsonl", ROWS), characters, **flags)
    assert characters.decode(train[0]["prompt_ids"]) == f"{start}[user]{train[0]['prompt']}{end}"


def test_templates_that_do_not_fit_the_flags_are_an_error(tmp_path, characters):
    """A system turn or thinking asked for without a template, or refused by it: one line."""
    path = write(tmp_path / "d.jsonl", ROWS)
    for flags, match in (({"system": "Add."}, "no chat template"),
                         ({"enable_thinking": False}, "no such switch")):
        with pytest.raises(ValueError, match=match):
            load(path, characters, **flags)
    characters.chat_template = TEMPLATE.replace("enable_thinking", "other")
    with pytest.raises(ValueError, match="no such switch"):
        load(path, characters, enable_thinking=False)
    characters.chat_template = "{{ raise_exception('no system role') if messages[0].role == 'system' }}"
    with pytest.raises(ValueError, match="no system role.*set --system ''"):
        load(path, characters)


@pytest.mark.parametrize("row, prompt, gold", [
    ({"problem": "What?", "solution": r"As $1+1=2$, it is $\boxed{2}$ or so.", "level": 5}, "What?", "2"),
    ({"problem": "What?", "solution": "none", "answer": r"\frac{1}{2}"}, "What?", r"\frac{1}{2}"),
    ({"prompt": "Why?", "question": "What?", "problem": "Who?", "answer": 3}, "Why?", "3")])
def test_the_columns_of_numina_and_math(row, prompt, gold, tmp_path, characters):
    """prompt, question or problem; answer, else solution, whose last box is the gold answer; every
    column of the row goes to the reward functions as it is."""
    train, _ = load(write(tmp_path / "d.jsonl", [row] * 9), characters, eval_steps=0)
    assert train[0]["prompt"] == prompt and golds(train)[0] == gold
    assert rr.accuracy([f"#### {gold}"] * 9, **{
        k: v for k, v in rr.columns(train).items() if k == "answer"}) == [1.0] * 9
    assert {**rr.columns(train), **{k: [v] * 9 for k, v in row.items()}} == rr.columns(train)


def test_config_split_and_evaluation_set_are_passed_on(monkeypatch, tmp_path, characters):
    """Hub ids with the config and split asked for, main for GSM8K; test for evaluation; a local
    file is whichever split is named, slices too; without eval_dataset a slice is held out."""
    asked = []

    def hub(name, config_name=None, split=None):
        asked.append((name, config_name, split))
        return Dataset.from_list([{"question": f"{split} {row['question']}", "answer": row["answer"],
                                   "split": split} for row in ROWS])

    monkeypatch.setattr(rr, "load_dataset", hub)
    load("openai/gsm8k", characters)
    load("a/b", characters, dataset_config="c", dataset_split="train[:50]", eval_dataset="a/b")
    train, held_out = load("a/b", characters, dataset_config="c", eval_dataset="openai/gsm8k",
                           eval_samples=7)
    assert asked == [("openai/gsm8k", "main", "train"), ("a/b", "c", "train[:50]"),
                     ("a/b", "c", "test"), ("a/b", "c", "train"), ("openai/gsm8k", "main", "test")]
    assert len(train) == 30 and len(held_out) == 7
    assert {p["split"] for p in held_out} == {"test"} and {p["split"] for p in train} == {"train"}
    monkeypatch.undo()
    path = write(tmp_path / "d.jsonl", ROWS)
    train, held_out = load(path, characters, dataset_split="train[20:]", eval_dataset=path, eval_samples=3)
    assert len(train) + len({p["prompt"] for p in train} & {p["prompt"] for p in held_out}) <= 10
    assert len(held_out) == 3 and [p["prompt"] for p in held_out] != [row["question"] for row in ROWS[:3]]
    with pytest.raises(ValueError, match="eval_dataset no.jsonl.*no such file.*--eval_dataset"):
        load(path, characters, eval_dataset="no.jsonl")


def test_answers_that_are_no_number_are_left_out_and_counted(tmp_path, characters, capsys):
    """D5: the count and the first of them are shown; if no row is left it is an error."""
    bad = [{"question": "q", "answer": a} for a in (
        "1331 and 1728", "x", None, "it is 3\n#### five", "x=5, y=7", "#### 2 hours 30 minutes")]
    bad += [{"question": q, "answer": "5"} for q in ("", None, " ")]
    train, held_out = load(write(tmp_path / "d.jsonl", ROWS + bad), characters)
    assert len(train) + len(held_out) == 30
    out = capsys.readouterr().out
    assert "left out 9" in out and "1331 and 1728" in out
    with pytest.raises(ValueError, match="none can be used"):
        load(write(tmp_path / "bad.jsonl", bad), characters)


def test_long_prompts_are_left_out_never_cut(tmp_path, characters, capsys):
    """The count and the limit are shown; the others keep every token."""
    rows = ROWS + [{"question": "long " * 30, "answer": "5"}]
    train, held_out = load(write(tmp_path / "d.jsonl", rows), characters, max_prompt_length=100)
    assert len(train) + len(held_out) == 30
    assert all(characters.decode(p["prompt_ids"]) == p["prompt"] for p in train)
    assert "left out 1" in (out := capsys.readouterr().out) and "100" in out
    with pytest.raises(ValueError, match="none can be used"):
        load(write(tmp_path / "e.jsonl", rows), characters, max_prompt_length=3)


def test_gold_answers_may_be_numbers_and_zero(tmp_path, characters):
    """A JSON number is as good as text, and 0 is an answer like any other."""
    rows = [{"question": f"{i} minus {i}", "answer": 0} for i in range(20)]
    train, held_out = load(write(tmp_path / "zero.jsonl", rows), characters)
    assert len(train) + len(held_out) == 20 and set(golds(train)) == {"0"}


@pytest.mark.parametrize("content, match", [
    (None, "no such file"), ("", "empty"), ("\n\n", "data.jsonl"),
    ('{"a": 1, "b": 2}\n', "prompt, question or problem.*a, b"),
    ('{"question": "q", "reply": "2"}\n', "answer.*question, reply"), ("{not json", "can't be read")])
def test_bad_data_files_end_in_one_clear_line(content, match, tmp_path, characters):
    """D5: missing, empty, without a column (which it names), or not of its kind: one line each."""
    path = tmp_path / "data.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=match) as error:
        load(str(path), characters)
    assert "\n" not in str(error.value) and str(path) in str(error.value)


def test_a_problem_that_is_evaluated_on_is_trained_on_under_no_row(tmp_path, characters, capsys):
    """Rows that repeat a held-out prompt are left out and counted; so are those of an eval_dataset."""
    path = write(tmp_path / "d.jsonl", ROWS * 3)
    train, held_out = load(path, characters)
    assert not {p["prompt"] for p in train} & {p["prompt"] for p in held_out} and len(held_out) == 9
    assert re.search(r"left out \d+ problems that are evaluated on", capsys.readouterr().out)
    with pytest.raises(ValueError, match="too few"):
        load(path, characters, eval_dataset=path)


def test_the_held_out_problems_are_never_trained_on():
    """The sums: 512 are held out, none of them is among the 9,488 trained on, for every seed."""
    for seed in (0, 1):
        c = config(seed=seed)
        train, held_out = rr.load_problems(c, rr.load_tokenizer(c))
        assert len(held_out) == 512 and len(train) == 9488
        assert not {p["prompt"] for p in train} & {p["prompt"] for p in held_out}
