r"""Section 4: final answers (F19, F20), reward functions, and what a data file may do wrong."""
import json
import math

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
    ("#### 5, then 7", "5"), ("#### 3 to 5", "3"), ("#### 0x12", "0"), ("3\u20135", "-5"),
    ("The answer is 6 hours and 30 minutes", "6"), (r"\boxed{x=5 \text{ or } x=7}", "7"),
    (r"\boxed{x=5, y=7}", "7"), ("<answer>x = 5, y = 7</answer>", "7"), ("-$5", "5"), ("1" * 10_000, "1" * 10_000), ("#### 1" + "0" * 150, "1" + "0" * 99), ("8", ""),
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

def test_missing_rewards_become_nan():
    """B4: None and NaN are not 0; each function has its column."""
    table = rr.score_completions({"a": lambda completions, **_: [None, 1, math.nan],
                                  "b": lambda completions, **_: [0.5, True, 2]}, ["x"] * 3, {})
    assert table.shape == (3, 2) and table.isnan().tolist() == [[True, False], [False] * 2, [True, False]]
    assert table[1].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("bad, match", [
    (lambda completions, **_: [1.0], "list of 1 for 4"), (lambda completions, **_: 1.0, "float for 4"),
    (lambda completions, **_: None, "NoneType"), (lambda completions, **_: ["a"] * 4, "no number"),
    (lambda completions, **_: torch.ones(4, 2), "Tensor of 4"),
    (lambda completions, **_: [1] * 5, "list of 5 for 4")])
def test_a_reward_function_that_returns_something_else_is_named(bad, match):
    """B4: nothing is broadcast; the error has the function's name and the counts."""
    with pytest.raises(ValueError, match=f"my_reward.*{match}"):
        rr.score_completions({"my_reward": bad}, ["x"] * 4, {})


def test_reward_functions_get_the_columns_of_the_data_by_keyword():
    """The completions, prompt, answer and every other column, each as long as the completions."""
    seen = {}

    def spy(completions, **columns):
        seen.update(columns, completions=completions)
        return [0.0] * len(completions)

    problems = [dict(prompt="p", answer="1", level=3, ids=[1])] * 2
    rr.score_completions({"spy": spy}, ["a", "b"], rr.columns(problems))
    assert seen == dict(completions=["a", "b"], prompt=["p"] * 2, answer=["1"] * 2, level=[3, 3])


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


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
@pytest.mark.parametrize("name", ["question", "prompt"])
def test_local_files_of_every_kind_are_read(kind, name, tmp_path, characters, monkeypatch):
    """D5: without a network, whole, with the answer behind its marker and a tenth held out."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rows = [{name: row["question"], "answer": row["answer"], "id": i} for i, row in enumerate(ROWS)]
    train, held_out = load(write(tmp_path / f"data.{kind}", rows), characters)
    assert len(train) == 27 and len(held_out) == 3
    assert sorted(p["id"] for p in train + held_out) == list(range(30))
    assert all(p["answer"] == str(2 * p["id"]) for p in train)
    assert characters.decode(train[0]["ids"]) == train[0]["prompt"]
    assert len(load(str(tmp_path / f"data.{kind}"), characters, eval_steps=0)[0]) == 30


def test_prompts_go_through_the_chat_template(tmp_path, characters):
    """One user turn and the opening of the assistant's, where the tokenizer has a template."""
    characters.chat_template = ("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
                                "{% if add_generation_prompt %}[assistant]{% endif %}")
    train, _ = load(write(tmp_path / "d.jsonl", ROWS), characters)
    assert characters.decode(train[0]["ids"]) == f"[user]{train[0]['prompt']}[assistant]"


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
    assert all(characters.decode(p["ids"]) == p["prompt"] for p in train)
    assert "left out 1" in (out := capsys.readouterr().out) and "100" in out
    with pytest.raises(ValueError, match="none can be used"):
        load(write(tmp_path / "e.jsonl", rows), characters, max_prompt_length=3)


def test_gold_answers_may_be_numbers_and_zero(tmp_path, characters):
    """A JSON number is as good as text, and 0 is an answer like any other."""
    rows = [{"question": f"{i} minus {i}", "answer": 0} for i in range(20)]
    train, held_out = load(write(tmp_path / "zero.jsonl", rows), characters)
    assert len(train) + len(held_out) == 20 and {p["answer"] for p in train} == {"0"}


@pytest.mark.parametrize("content, match", [
    (None, "no such file"), ("", "empty"), ("\n\n", "data.jsonl"), ('{"a": 1, "b": 2}\n', "prompt or question.*a, b"),
    ('{"question": "q", "reply": "2"}\n', "answer.*question, reply"), ("{not json", "can't be read")])
def test_bad_data_files_end_in_one_clear_line(content, match, tmp_path, characters):
    """D5: missing, empty, without a column (which it names), or not of its kind: one line each."""
    path = tmp_path / "data.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=match) as error:
        load(str(path), characters)
    assert "\n" not in str(error.value) and str(path) in str(error.value)


def test_the_held_out_problems_are_never_trained_on():
    """The sums: 512 are held out, none of them is among the 9,488 trained on, for every seed."""
    for seed in (0, 1):
        c = config(seed=seed)
        train, held_out = rr.load_problems(c, rr.load_tokenizer(c))
        assert len(held_out) == 512 and len(train) == 9488
        assert not {p["prompt"] for p in train} & {p["prompt"] for p in held_out}
