"""Models in memory on tasks of lm-evaluation-harness: a task of our own, since none needs the hub."""

import json
import random
import sys
from functools import partial

import pytest
import torch

import howlinear
import tiny
from conftest import need
from howlinear import blocks, evaluate, swapped
from howlinear.export.install import install_maps
from howlinear.linear.affine import Affine

TASK = """
task: little
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
  cache_dir: {cache}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - metric: acc
"""


@pytest.fixture(scope="module")
def questions():
    """Words are tokens: three of them ask, one to three answer."""
    rng = random.Random(0)

    def words(n):
        return " ".join(f"w{rng.randrange(3, 50)}" for _ in range(n))

    return [
        {
            "question": words(3),
            "choices": [words(1 + c % 3) for c in range(4)],
            "answer": rng.randrange(4),
        }
        for _ in range(24)
    ]


@pytest.fixture(scope="module")
def folder(questions, tmp_path_factory):
    made = tmp_path_factory.mktemp("tasks")
    (made / "data.jsonl").write_text("\n".join(map(json.dumps, questions)))
    (made / "little.yaml").write_text(TASK.format(data=made / "data.jsonl", cache=made / "cache"))
    return made


@pytest.fixture
def manager(folder, monkeypatch):
    need("lm_eval", "accelerate")
    from lm_eval.tasks import TaskManager

    # lists what is installed on the machine, a second each time
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
    return TaskManager(include_path=str(folder), include_defaults=False)


def word_tokenizer():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(3, 50))]
    made = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token="</s>"))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")


def likelihoods(model, question, choices):
    """log p of each answer, by hand: one window at a time."""
    found = []
    for choice in choices:
        ids = torch.tensor([[int(w[1:]) for w in f"{question} {choice}".split()]])
        with torch.no_grad():
            logp = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        each = logp.gather(1, ids[0, 1:, None])[:, 0]
        found.append(float(each[-len(choice.split()) :].sum()))
    return torch.tensor(found)


def replaced(model):
    block = blocks(model)[1]
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(block.d_out, block.d_in, generator=g)
    return {block: Affine(weight, torch.randn(block.d_out, generator=g), block.d_in)}


def of_harness(found):
    """The likelihoods (questions, choices) that the harness worked out."""
    samples = sorted(found["samples"]["little"], key=lambda s: s["doc_id"])
    return torch.tensor([[float(r[0]) for r in s["filtered_resps"]] for s in samples])


def test_scores_are_those_worked_out_by_hand(manager, questions):
    model, tokenizer = tiny.model("llama"), word_tokenizer()
    found = evaluate(model, ["little"], tokenizer, task_manager=manager, batch_size=5)
    want = torch.stack([likelihoods(model, q["question"], q["choices"]) for q in questions])
    torch.testing.assert_close(of_harness(found), want, rtol=1e-4, atol=1e-4)
    right = [int(row.argmax()) == q["answer"] for row, q in zip(want, questions, strict=True)]
    assert found["results"]["little"]["acc,none"] == pytest.approx(sum(right) / len(right))
    assert found["config"]["batch_size"] == 5


def test_a_swap_shows_and_is_gone_afterwards(manager):
    model, tokenizer = tiny.model("llama"), word_tokenizer()

    def run():
        return of_harness(evaluate(model, ["little"], tokenizer, task_manager=manager, limit=6))

    before, maps = run(), replaced(model)
    with swapped(model, maps):
        inside = run()
    assert len(before) == 6
    assert (inside - before).abs().max() > 0.1
    assert torch.equal(run(), before)
    install_maps(model, maps)
    torch.testing.assert_close(run(), inside)


def test_neither_model_nor_tokenizer_is_changed(manager):
    model, tokenizer = tiny.model("llama").train(), word_tokenizer()
    assert tokenizer.pad_token is None
    evaluate(model, ["little"], tokenizer, task_manager=manager, limit=2)
    assert model.training
    assert tokenizer.pad_token is None


def test_options_reach_the_wrapper_and_the_harness(manager):
    model, tokenizer = tiny.model("llama"), word_tokenizer()
    options = {"task_manager": manager, "num_fewshot": 0, "log_samples": False}
    found = evaluate(model, ["little"], tokenizer, limit=2, max_length=32, **options)
    assert "samples" not in found
    assert found["n-samples"]["little"]["effective"] == 2
    with pytest.raises(TypeError, match="surprise"):
        evaluate(model, ["little"], tokenizer, surprise=1, **options)


def test_encoder_decoders_answer_too(manager):
    """Under a model type that the harness does not know, as after an export."""
    model = tiny.model("t5")
    model.config.model_type = "howlinear_t5"
    found = evaluate(model, ["little"], word_tokenizer(), task_manager=manager, limit=2)
    assert of_harness(found).isfinite().all()


def test_tasks_of_ones_own_by_their_folder(folder, manager, monkeypatch):
    only = partial(type(manager), include_defaults=False)  # to index all the others takes long
    monkeypatch.setattr("lm_eval.tasks.TaskManager", only)
    options = {"include_path": folder, "limit": 2}
    found = evaluate(tiny.model("llama"), ["little"], word_tokenizer(), **options)
    assert 0 <= found["results"]["little"]["acc,none"] <= 1
    with pytest.raises(ValueError, match=r"^unknown task litle: see `lm-eval ls tasks`"):
        evaluate(tiny.model("llama"), ["litle"], word_tokenizer(), include_path=str(folder))


@pytest.mark.parametrize(
    ("name", "tasks", "options", "told"),
    [
        ("bert", ["little"], {}, "BertForMaskedLM does not predict the next token"),
        ("llama", "little", {}, r"tasks is 'little', expected a list"),
        ("llama", [], {}, r"tasks is \[\], expected a list"),
        ("llama", ["little"], {"include_path": "x"}, "include_path or task_manager, not both"),
        ("llama", ["little"], {"tokenizer": None}, "no tokenizer found for LlamaForCausalLM at ''"),
    ],
)
def test_mistakes_are_one_line(manager, name, tasks, options, told):
    given = {"tokenizer": word_tokenizer(), "task_manager": manager} | options
    with pytest.raises(ValueError, match=told) as caught:
        evaluate(tiny.model(name), tasks, **given)
    assert "\n" not in str(caught.value)


def test_without_the_harness_one_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ValueError, match=r"pip install lm-eval accelerate") as caught:
        howlinear.evaluate(tiny.model("llama"), ["arc_easy"])
    assert "\n" not in str(caught.value)
