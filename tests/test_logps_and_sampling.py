"""Section 3: log-probs, masks and samples (part (a) of the failures people really hit)."""
import copy
import math

import pytest
import torch
from conftest import config, rr, tiny_model
from tokenizers import Tokenizer, models
from transformers import (Gemma2Config, Gemma2ForCausalLM, GenerationConfig, GPT2Config,
                          GPT2LMHeadModel, PreTrainedTokenizerFast)

CHARACTERS = rr.load_tokenizer(config())


def tokenizer_for(pad="<pad>"):
    """24 tokens named t3, t4, ...; id 0 is <pad>, id 2 is <eos>, which may be the pad token too."""
    words = ["<pad>", "t1", "<eos>", *(f"t{i}" for i in range(3, 24))]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, "t1")),
        pad_token=pad, eos_token="<eos>")


def slow_logps(model, prompt, completion, temperature=1.0):
    """The oracle: one row, no padding, no mask, every logit, softmax written out."""
    logits = model(torch.tensor([prompt + completion])).logits[0].double() / temperature
    logp = torch.log(logits.exp() / logits.exp().sum(1, keepdim=True))
    return torch.stack([logp[len(prompt) + t - 1, token] for t, token in enumerate(completion)])


def padded(prompts, completions):
    """(ids, attention_mask) of left-padded prompts and completions of one length."""
    P = max(map(len, prompts))
    ids = [[0] * (P - len(p)) + p + c for p, c in zip(prompts, completions)]
    mask = [[0] * (P - len(p)) + [1] * (len(p) + len(c)) for p, c in zip(prompts, completions)]
    return torch.tensor(ids), torch.tensor(mask)


# ---- masks ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("eos", [2, [2], [5, 2], torch.tensor([2])])
def test_a_completion_ends_at_its_first_end_token(eos):
    """A1: decided by position; the end token counts and nothing behind it does, pad 0 or pad 2."""
    ids = torch.tensor([[7, 2, 9, 2, 0], [7, 8, 9, 9, 9], [2, 0, 0, 0, 0]])
    expected = [[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]
    assert rr.completion_mask(ids, eos).long().tolist() == expected
    assert rr.completion_mask(torch.tensor([[7, 2, 2, 2, 2]]), eos).sum() == 2
    assert rr.completion_mask(ids, eos).dtype == torch.bool


def test_several_end_tokens_and_none():
    """The first of any of them ends a completion; without one it runs to the limit."""
    ids = torch.tensor([[7, 5, 2, 9], [7, 2, 5, 9]])
    assert rr.completion_mask(ids, [2, 5]).sum(1).tolist() == [2, 2]
    assert rr.completion_mask(ids, []).all()


# ---- log-probs -----------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.7])
def test_log_probs_equal_a_full_pass_without_padding(kind, temperature):
    """A4, A6, A7: prompts of 1 to 5 tokens in one batch, at any temperature, to 1e-5."""
    model = tiny_model(kind)
    prompts, completions = [[5], [5, 6, 7, 8, 9], [9, 2]], [[4, 5, 6], [7, 2, 3], [8, 8, 8]]
    ids, mask = padded(prompts, completions)
    logp = rr.token_logps(model, ids, mask, 3, temperature)
    assert logp.shape == (3, 3) and logp.dtype == torch.float32
    for row, prompt, completion in zip(logp, prompts, completions):
        assert (row - slow_logps(model, prompt, completion, temperature)).abs().max() < 1e-5


def test_absolute_positions_are_counted_from_the_first_token_of_the_prompt():
    """A6: with learned positions (GPT-2) too, padding changes nothing."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=24, n_positions=32, n_embd=32, n_layer=2, n_head=4,
                                       initializer_range=0.3)).eval()
    ids, mask = padded([[5], [5, 6, 7, 8, 9]], [[4, 5, 6], [7, 2, 3]])
    logp = rr.token_logps(model, ids, mask, 3)
    assert (logp[0] - slow_logps(model, [5], [4, 5, 6])).abs().max() < 1e-5


def test_end_tokens_inside_the_prompt_are_tokens():
    """A2: a prompt that holds the end token, which is the pad token too, is attended to whole."""
    model, tokenizer = tiny_model(), tokenizer_for(pad="<eos>")
    ids, attention_mask, mask, _ = rr.sample(model, tokenizer, [[5, 2, 6, 7], [8]], config(), True)
    assert attention_mask[:, :4].tolist() == [[1, 1, 1, 1], [0, 0, 0, 1]]
    assert mask[:, 0].all()  # no row counts as finished before it starts
    logp = rr.token_logps(model, ids, attention_mask, mask.shape[1])
    slow = slow_logps(model, [5, 2, 6, 7], ids[0, 4:].tolist())
    assert (logp[0] - slow).abs().max() < 1e-5


def test_log_prob_at_a_temperature_by_hand():
    """A4: logits 2 and 0, token 0, temperature 0.5 give -0.01815, not -0.12693."""
    class Two(torch.nn.Module):
        def forward(self, input_ids, **kwargs):
            logits = torch.tensor([2.0, 0.0]).expand(*input_ids.shape, 2)
            return type("Output", (), {"logits": logits[:, -kwargs["logits_to_keep"]:]})

    ids = torch.zeros(1, 3, dtype=torch.long)
    logp, entropy = rr.token_logps(Two(), ids, torch.ones_like(ids), 2, 0.5, return_entropy=True)
    assert logp.tolist() == [pytest.approx([-0.01815] * 2, abs=1e-5)]
    p = 1 / (1 + math.exp(-4))
    assert entropy[0, 0].item() == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p), abs=1e-6)


def test_entropy_is_that_of_the_sampling_distribution():
    """Token by token -sum p log p at the temperature."""
    model = tiny_model()
    ids, mask = padded([[5, 6], [7]], [[4, 5, 6], [7, 2, 3]])
    _, entropy = rr.token_logps(model, ids, mask, 3, 0.7, return_entropy=True)
    p = (model(torch.tensor([[5, 6, 4, 5, 6]])).logits[0, 1:4].double() / 0.7).softmax(1)
    assert (entropy[0] + (p * p.log()).sum(1)).abs().max() < 1e-5


def test_logits_of_prompt_positions_are_not_computed():
    """C1: the output head sees T positions of a row."""
    model, seen = tiny_model(), []
    model.lm_head.register_forward_hook(lambda m, args, out: seen.append(args[0].shape[1]))
    rr.token_logps(model, torch.randint(3, 24, (2, 54)), torch.ones(2, 54), 4)
    assert seen == [4]


def test_the_log_softmax_is_cut_into_parts_for_a_large_vocabulary(monkeypatch):
    """Many small parts give what one gives."""
    model, ids = tiny_model(), torch.randint(3, 24, (6, 9))
    whole = rr.token_logps(model, ids, torch.ones_like(ids), 4, 0.9, return_entropy=True)
    monkeypatch.setattr(rr, "MAX_LOGITS", 24)
    parts = rr.token_logps(model, ids, torch.ones_like(ids), 4, 0.9, return_entropy=True)
    assert all((a - b).abs().max() < 1e-6 for a, b in zip(whole, parts))


@pytest.mark.parametrize("bf16", [False, True])
def test_before_the_first_update_the_reference_equals_the_policy_bit_for_bit(bf16):
    """Same precision, same batches: old and ref log-probs are equal and KL is exactly 0 (A9)."""
    c = config(bf16=bf16, micro_batch_size=3, prompts_per_rollout=4, num_generations=4)
    model, tokenizer = tiny_model(vocab_size=14, eos_token_id=13, pad_token_id=12,
                                  hidden_size=128, intermediate_size=384, head_dim=32), CHARACTERS
    reference = copy.deepcopy(model)
    problems = [dict(prompt="1+2=", answer="3", prompt_ids=tokenizer("1+2=")["input_ids"]),
                dict(prompt="10+20=", answer="30", prompt_ids=tokenizer("10+20=")["input_ids"])]
    rollout, metrics, _ = rr.collect_rollout(model, reference, tokenizer, problems, c)
    assert torch.equal(rollout.old_logp, rollout.ref_logp) and metrics["kl"] == 0
    assert rr.sequence_kl(rollout.old_logp, rollout.ref_logp, rollout.mask).abs().max() == 0
    assert rollout.old_logp.dtype == torch.float32
    again = rr.score(model, rollout, c)
    assert (again - rollout.old_logp).abs().max() < 1e-6


def test_log_softmax_is_taken_in_float32_under_bf16():
    """A9: bf16 logits are turned to float32 before they are normalised."""
    model, ids = tiny_model().bfloat16(), torch.randint(3, 24, (2, 8))
    logp = rr.token_logps(model, ids, torch.ones_like(ids), 4)
    logits = model(ids).logits[:, -5:-1].float()
    slow = logits.log_softmax(2).gather(2, ids[:, -4:, None]).squeeze(2)
    assert logp.dtype == torch.float32 and (logp - slow).abs().max() < 1e-5


def test_dropout_is_switched_off_at_load(tmp_path):
    """A8: a checkpoint with dropout 0.5 gives the same log-probs twice, even in train mode, and
    still has its own dropout in its config."""
    tiny_model("qwen2", attention_dropout=0.5).save_pretrained(tmp_path)
    model = rr.load_model(config(model_name_or_path=str(tmp_path)), tokenizer_for(), None).train()
    ids = torch.randint(3, 24, (2, 8))
    first, second = (rr.token_logps(model, ids, torch.ones_like(ids), 4) for _ in range(2))
    assert torch.equal(first, second) and model.config.attention_dropout == 0.5


# ---- sampling ------------------------------------------------------------------------------------

QWENS_DEFAULTS = dict(do_sample=True, top_k=20, top_p=0.8, repetition_penalty=1.1, temperature=0.7)


@pytest.mark.parametrize("defaults", [QWENS_DEFAULTS, dict(min_new_tokens=3, bad_words_ids=[[4]]), {}])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_samples_come_from_the_models_own_distribution(defaults, temperature):
    """First-token frequencies match softmax(logits / temperature), by a chi-squared test over the
    tokens (the rarest in one bin), whatever generation defaults the checkpoint has and keeps."""
    model = tiny_model(vocab_size=60, tie_word_embeddings=True)
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0, **defaults)
    torch.manual_seed(1)
    n, c = 20_000, config(temperature=temperature, max_completion_length=1)
    ids, *_ = rr.sample(model, tokenizer_for(), [[5, 4, 6]] * n, c)
    p = (model(torch.tensor([[5, 4, 6]])).logits[0, -1] / temperature).softmax(0).detach()
    counts, expected = torch.bincount(ids[:, -1], minlength=60), n * p
    rare = expected < 10
    counts, expected = (torch.cat([x[~rare], x[rare].sum()[None] + 1e-9]) for x in (counts, expected))
    chi2, freedom = ((counts - expected) ** 2 / expected).sum().item(), len(counts) - 1
    assert freedom > 25 and chi2 < freedom + 5 * math.sqrt(2 * freedom)
    assert model.generation_config.to_diff_dict().items() >= defaults.items()


def test_the_ids_that_are_scored_are_the_ids_that_were_sampled():
    """A11: a cut row has no end token added, an ended one keeps it inside its mask."""
    model = tiny_model(seed=3)
    torch.manual_seed(0)
    ids, attention_mask, mask, _ = rr.sample(model, tokenizer_for(), [[5, 6]] * 64,
                                          config(max_completion_length=3))
    ended = (ids[:, 2:] == 2).any(1)
    assert 0 < ended.sum() < 64 and ids.shape == (64, 5)
    assert (mask[~ended].sum(1) == 3).all()
    last = mask.sum(1) - 1
    assert (ids[:, 2:].gather(1, last[:, None])[ended] == 2).all()
    assert attention_mask.shape == ids.shape and mask.shape == (64, 3)


def test_sampling_in_parts_gives_whole_completions():
    """At most generation_batch_size completions at a time, of any remainder, in the order asked."""
    model, seen = tiny_model(), []
    model.register_forward_pre_hook(lambda m, args, kwargs: seen.append(len(kwargs["input_ids"])),
                                    with_kwargs=True)
    prompts = [[5], [6, 7, 8], [9, 9]] * 3
    c = config(generation_batch_size=4, max_completion_length=4)
    parts = rr.sample(model, tokenizer_for(), prompts, c, greedy=True)
    assert max(seen) == 4 and min(seen) >= 1
    whole = rr.sample(model, tokenizer_for(), prompts, config(max_completion_length=4), greedy=True)
    for a, b in zip(parts, whole):
        assert torch.equal(a, b)


def test_sampling_leaves_modes_and_settings_as_they_were():
    """A8: train or eval mode and the generation config survive, also when sampling fails."""
    model = tiny_model().train()
    before = model.generation_config
    rr.sample(model, tokenizer_for(), [[5]], config())
    assert model.training and model.generation_config is before
    with pytest.raises(Exception):
        rr.sample(model, tokenizer_for(), [[99]], config())  # no such token
    assert model.training and model.generation_config is before


def test_every_end_token_of_the_checkpoint_ends_a_completion():
    """Several ids in the generation config, and the tokenizer's own."""
    model = tiny_model()
    model.generation_config = GenerationConfig(eos_token_id=[7, 9])
    assert rr.end_token_ids(model, tokenizer_for()) == [2, 7, 9]
    torch.manual_seed(0)
    ids, _, mask, _ = rr.sample(model, tokenizer_for(), [[5]] * 200, config(max_completion_length=8))
    ends = torch.isin(ids[:, 1:], torch.tensor([2, 7, 9]))
    assert ends.any(0)[0] and (ends & mask).sum(1).max() == 1
    assert {2, 7, 9} <= set(ids[:, 1:][ends & mask].tolist())


@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])
def test_prompts_that_are_equal_are_read_once_when_sampling(kind):
    """The first pass sees each of neighbouring equal prompts once, of any length; greedy completions
    are those of prompts read one by one, and of a model whose cache can't be shared."""
    model, seen = tiny_model(kind), []
    model.base_model.register_forward_pre_hook(
        lambda m, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True)
    prompts = [[5, 6, 7, 8]] * 3 + [[9, 4]] * 2 + [[5, 6, 7, 8]]
    c = config(max_completion_length=6)
    ids = rr.sample(model, tokenizer_for(), prompts, c, greedy=True)[0]
    assert seen[0] == (3, 3) and all(n == (6, 1) for n in seen[1:])
    alone = [rr.sample(model, tokenizer_for(), [p], c, greedy=True)[0][0, len(p):] for p in prompts]
    for row, one in zip(ids[:, 4:], alone):
        assert torch.equal(row[:len(one)], one)


def test_prompts_that_only_look_equal_are_read_apart():
    """A2: [2, 5] and [5] are the same ids once padded with 2; their completions are not."""
    model, c = tiny_model(), config(max_completion_length=6)
    tokenizer = tokenizer_for("<eos>")
    prompts = [[2, 2, 5], [2, 5], [5], [5]]
    ids = rr.sample(model, tokenizer, prompts, c, greedy=True)[0][:, 3:]
    alone = [rr.sample(model, tokenizer, [p], c, greedy=True)[0][0, len(p):] for p in prompts]
    assert not torch.equal(alone[0], alone[2])
    for row, one in zip(ids, alone):
        assert torch.equal(row[:len(one)], one)


def test_models_that_scale_and_cap_their_logits_are_scored_as_they_sample():
    """Gemma 2 caps its logits and has sliding windows: log-probs equal the model's own logits, and
    its cache is not shared."""
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(Gemma2Config(
        vocab_size=24, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, final_logit_softcapping=2.0, sliding_window=4,
        initializer_range=0.5, eos_token_id=2, pad_token_id=0)).eval()
    ids = torch.randint(3, 24, (4, 12))
    with torch.no_grad():
        full = model(ids).logits
        assert full.abs().max() > 1.5
        expected = full[:, -6:-1].log_softmax(2).gather(2, ids[:, -5:, None])[..., 0]
        assert (rr.token_logps(model, ids, torch.ones_like(ids), 5) - expected).abs().max() < 1e-5
        assert rr.read_prompts(model, ids, torch.ones_like(ids)) is None
        rollout = rr.Rollout(ids, torch.ones_like(ids), torch.ones(4, 5, dtype=torch.bool),
                             torch.tensor([0, 0, 1, 1]), torch.zeros(4))
        rollout.ids[:2, :7], rollout.ids[2:, :7] = ids[0, :7], ids[2, :7]
        expected = rr.token_logps(model, rollout.ids, rollout.attention_mask, 5)
        assert (rr.score(model, rollout, config(micro_batch_size=3)) - expected).abs().max() < 1e-5
