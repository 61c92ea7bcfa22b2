"""Tests the export of a run to a folder that transformers loads, and when it is rejected."""

import json
import os
import re
import resource
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants

from tasks.cache.filtered import ExcludeRecord, FilterRecord
from tasks.storage import seal
from tasks.terminal.command_line import UserError
from tests.support.cases import rows
from tests.support.parameters import slow_unless
from tests.support.processes import started
from tests.support.runs import TASK, config_of, flags_of
from tests.support.servers.hub_uploads import TOKEN, HubUploadServer
from tests.support.small_tokenizers import without_sentinels
from trainer import evaluate, export
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.config import load_config, save_config
from trainer.config.from_flags import build_config
from trainer.engine.cost import parameter_count
from trainer.engine.program import Program
from trainer.exporting import card, exporting
from trainer.huggingface import load, model_config, names, parity, tokenizer, weights
from trainer.reporting.metrics import MetricsWriter
from trainer.setup import prepare
from vocab.train import add_sentinels

pytestmark = pytest.mark.torch


def save_run(text_cache, folder, preset, *flags, task=TASK, lengths=(None, 18)):
    """Writes the files of a run of two updates, with initial parameters, and returns its folder."""
    more = ("--train_steps=2", "--metrics.tensorboard=false", *flags)
    given = flags_of(text_cache, folder, *more, task=task, lengths=lengths)
    config, origins = build_config(preset, given)
    run = prepare(config, origins)
    Path(folder).mkdir()
    save_config(run.config, origins, run.data.keep_vocabulary(str(folder)))
    MetricsWriter(run.config, 0).write(2, "validation", {"loss": 6.25})
    checkpoints = Checkpoints(str(folder))
    checkpoints.save(2, Program(run).initial_state(), run)
    checkpoints.close()
    return str(folder)


@pytest.fixture(scope="module")
def run(text_cache, tmp_path_factory):
    folder = tmp_path_factory.mktemp("export") / "t5"
    flags = ["--lengths.inputs=64", "--model.dtype=bfloat16", "--model.scan_layers=true"]
    return save_run(text_cache, folder, "t5_1_1_tiny", *flags)


@pytest.fixture(scope="module")
def folder(run):
    """Returns an export of a scanned bfloat16 model, in shards, written by the command."""
    output = f"{run}_exported"
    flags = ["--max_shard_size=20KB", "--license=apache-2.0", "--language=en,ro"]
    flags += ["--base_model=google/t5-v1_1-small", "--datasets=owner/prose"]
    assert export.main([f"--model_dir={run}", f"--output={output}", *flags]) == 0
    return Path(output)


def test_an_export_has_the_files_of_hugging_face_and_equal_parameters(folder, run):
    found = {path.name for path in folder.iterdir()}
    shards = {name for name in found if name.startswith("model-")}
    assert len(shards) > 1
    assert found - shards == {
        *("config.json", "generation_config.json", "model.safetensors.index.json"),
        *("tokenizer.json", "tokenizer_config.json", "spiece.model", "README.md"),
        "conversion.json",
    }
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in folder.iterdir())
    written = json.loads((folder / "config.json").read_text())
    assert (
        written.items()
        >= {
            "model_type": "t5",
            "feed_forward_proj": "gated-gelu",
            "tie_word_embeddings": False,
            "vocab_size": 768,  # 700 ids, rounded up like T5's
        }.items()
    )
    assert written["architectures"] == ["T5ForConditionalGeneration"]
    ids = {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    assert json.loads((folder / "generation_config.json").read_text()) == ids
    assert [path.name for path in folder.parent.iterdir() if path.name.startswith(".")] == []
    config = load_config(run)[0].model
    assert model_config(str(folder)).vocab_size == config.vocab_size
    tensors = names.to_tensors(load(str(folder), config), config, "t5")
    for name, array in weights.read(str(folder)).items():
        np.testing.assert_array_equal(tensors[name], array)


@pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")
def test_a_finished_export_is_uploaded_as_it_is(folder, run, monkeypatch, capsys):
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    flags = [f"--model_dir={run}", f"--output={folder}", "--push_to=an/owner"]
    with HubUploadServer() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        assert export.main(flags) == 0
        with pytest.raises(UserError, match="is a conversion with step 2: name another"):
            export.main([*flags, "--step=1"])
    printed = capsys.readouterr().out
    assert f"{folder}: step 2 is there already" in printed
    assert f"uploaded   {server.url}/an/owner/tree/step_2" in printed
    held = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert server.branches["an/owner"] == {"main": held, "step_2": held}
    _, _, first, rest = server.commits[0]
    assert first == "Step 2 of t5_1_1_tiny on python_docs_span_corruption"
    assert "updates: 2 of 4 rows\noptimizer: adafactor" in rest


def test_the_card_describes_training_and_data(folder, run, text_cache):
    import yaml

    card = re.sub(" +", " ", (folder / "README.md").read_text())
    assert "adafactor, schedule constant * rsqrt_decay, learning rate 0.01 from" in card
    manifest = json.loads((text_cache / "manifest.json").read_text())
    for text in (
        f"| parameters | {parameter_count(load_config(run)[0].model):,} |",
        "| updates | 2 of 4 rows |",
        f"| corpus tokens seen | {2 * 4 * 70} |",
        "python_docs_span_corruption",
        "mask.noise_density 0.15, mask.mean_noise_span_length 3.0",
        manifest["plan"]["corpus"]["spec"],
        manifest["plan"]["vocabulary"]["sha256"],
        "cache manifest, sha256",
        "| validation loss | 6.25 |",
        "largest difference",
        "same most likely token at 100.0000%",
    ):
        assert text in card, text
    _, metadata, _ = (folder / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(metadata) == {
        "library_name": "transformers", "pipeline_tag": "text2text-generation",
        "tags": ["pretraining", "palimpsest"], "license": "apache-2.0", "language": ["en", "ro"],
        "datasets": ["owner/prose"], "base_model": "google/t5-v1_1-small",
    }  # fmt: skip


def test_the_data_sets_of_the_hub_are_named(run, monkeypatch):
    config, origins = load_config(run)
    prepared = prepare(config, origins)
    assert card._hub_data_sets(prepared.data) == []
    corpus = prepared.data.tasks[0].manifest.plan.corpus
    monkeypatch.setitem(corpus, "spec", "hf:owner/prose:en@1234")
    assert card._hub_data_sets(prepared.data) == ["owner/prose"]
    corpus["spec"] = "fasta2:a spec of a format that is gone"
    assert card._hub_data_sets(prepared.data) == []


TINY = {"emb_dim": 16, "num_heads": 2, "head_dim": 8, "mlp_dim": 32, "num_encoder_layers": 2}


@pytest.mark.parametrize("preset", ["bert_tiny", "roberta_base", "modernbert_base"])
def test_an_encoder_fills_masks(text_cache, tmp_path, preset):
    from transformers import pipeline

    masked = {"task": "python_docs_masked_lm", "lengths": (64, 64)}
    sizes = [f"--model.{name}={value}" for name, value in TINY.items()]
    run = save_run(text_cache, tmp_path / "run", preset, *sizes, **masked)
    exporting.export(run, f"{tmp_path}/bert")
    assert 'pipeline_tag: "fill-mask"' in (tmp_path / "bert" / "README.md").read_text()
    fill = pipeline("fill-mask", model=str(tmp_path / "bert"))
    mask = fill.tokenizer.mask_token
    ids = fill.tokenizer(f"The {mask} returns").input_ids
    # As in training: the class token, the text, EOS.
    assert (ids[0], ids[-1], ids.count(699)) == (698, 1, 1)
    assert len(fill(f"The {mask} returns a list.")) == 5
    assert ("token_type_ids" in fill.tokenizer("a", "b")) == (preset == "bert_tiny")


def test_transformers_generates_for_a_sentinel(folder):
    import torch
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    inputs = tokenizer("Return the <extra_id_0> of the list.", return_tensors="pt")
    assert 699 in inputs["input_ids"][0].tolist()
    made = model.generate(**inputs, max_new_tokens=4, min_new_tokens=4)[0].tolist()
    assert len(made) == 5
    assert made[0] == 0
    # Decoding is greedy: each token is the best one after its predecessors.
    logits = model(**inputs, decoder_input_ids=torch.tensor([made[:-1]])).logits[0]
    logits[:, 1] = -np.inf  # EOS, which was not allowed yet
    assert logits.argmax(-1).tolist()[:4] == made[1:]


def test_nothing_is_written_if_logits_or_tokenizers_differ(run, tmp_path, monkeypatch, capsys):
    # Reverses the table of relative positions.
    def reversed_table(params, config, kind, pad, to_tensors=names.to_tensors):
        tensors = to_tensors(params, config, kind, pad)
        name = "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        tensors[name] = tensors[name][::-1] + 1.0 * np.arange(32)[:, None]
        return tensors

    flags = [f"--model_dir={run}", f"--output={tmp_path}/output"]
    with monkeypatch.context() as patch:
        patch.setattr(names, "to_tensors", reversed_table)
        assert export.main(flags) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "transformers computes different logits: largest difference" in error
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(tokenizer, "compare", lambda *_: tokenizer.Match(200, ["some text"] * 30))
    assert export.main(flags) == 1
    assert "SentencePiece give different ids for 30 of 200 texts" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_mistakes_are_named(run, folder, tmp_path):
    def assert_rejected(match, **changes):
        arguments = {"model_dir": run, "output": f"{tmp_path}/new", **changes}
        with pytest.raises(UserError, match=match):
            exporting.export(**arguments)
        assert list(tmp_path.iterdir()) == []

    assert_rejected(r"t5_exported exists: name another", output=str(folder))
    assert_rejected("give a local folder", output="gs://bucket/model")
    assert_rejected("holds no run", model_dir=str(tmp_path))
    outer = str(Path(run).parent)
    assert_rejected(f"{outer} holds no run .*: name the run, {outer}/", model_dir=outer)
    whole = f"{run}/checkpoint_2 holds no run .*: name the run, {run}; --step or --steps chooses"
    assert_rejected(whole, model_dir=f"{run}/checkpoint_2")
    assert_rejected("no checkpoint of step 7; it has 2", step=7)
    for size in ("much", "5", "-5GB", "0GB", "nanGB"):
        assert_rejected(f"max_shard_size={size}: use a size", max_shard_size=size)
    assert_rejected("no vocabulary at", vocabulary_path=str(tmp_path))


def test_a_limit_on_the_size_of_files_is_named(run, tmp_path):
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, unlimited[1]))
    try:
        with pytest.raises(OSError, match=f"File too large: '{tmp_path}/new'"):
            exporting.export(run, f"{tmp_path}/new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert list(tmp_path.iterdir()) == []


def test_a_vocabulary_of_another_size_or_a_missing_package_is_named(
    run, tmp_path, text_cache, monkeypatch
):
    longer = tmp_path / "longer.model"
    model = (text_cache / "sentencepiece.model").read_bytes()
    longer.write_bytes(add_sentinels(without_sentinels(model), 101))
    with pytest.raises(UserError, match="has 701 ids, but the model was trained on 700"):
        exporting.export(run, f"{tmp_path}/new", vocabulary_path=str(longer))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install .*\[huggingface\]'"):
        exporting.export(run, f"{tmp_path}/new")


PREFIX = "python_docs_decoder_prefix_lm"


@pytest.fixture(scope="module")
def prefix_run(text_cache, tmp_path_factory):
    """Returns a run of a decoder-only model with prefixes visible in both directions."""
    folder = tmp_path_factory.mktemp("export") / "lm"
    return save_run(text_cache, folder, "lm_tiny", "--lengths.targets=40", task=PREFIX)


def test_a_model_unknown_to_transformers_is_rejected(prefix_run, tmp_path):
    with pytest.raises(UserError, match="has no counterpart in transformers; --custom_code writes"):
        exporting.export(prefix_run, f"{tmp_path}/lm")


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["lm_tiny", *rows("PRESETS_OF_CUSTOM_CODE")])
def test_custom_code_runs_a_model_unknown_to_transformers(text_cache, prefix_run, tmp_path, preset):
    if preset != "lm_tiny":
        flags = ["--lengths.targets=40"]
        prefix_run = save_run(text_cache, tmp_path / "run", preset, *flags, task=PREFIX)
    # In separate processes, since transformers copies the modelling file and imports the copy.
    environment = {"HF_HOME": f"{tmp_path}/home", "JAX_PLATFORMS": "cpu"}
    flags = f"--model_dir={prefix_run}", f"--output={tmp_path}/lm", "--custom_code"
    made = python(environment, "-m", "trainer.export", *flags)
    assert made.returncode == 0, made.stderr
    assert "same most likely token at 100.0000%" in made.stdout
    program = f"""
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("{tmp_path}/lm", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{tmp_path}/lm", trust_remote_code=True)
inputs = tokenizer(["The function", "Return"], return_tensors="pt", padding=True,
                   padding_side="left")
made = model.generate(**inputs, max_new_tokens=5, min_new_tokens=5)
print(type(model).__name__, list(made.shape), inputs.input_ids[0, 0].item())
loss = model(**inputs, labels=inputs.input_ids).loss
loss.backward()
print(model.model.relative_attention_bias.weight.grad.abs().sum().item() > 0)
"""
    used = python(environment, "-c", program)
    assert used.returncode == 0, used.stderr
    name, rest = used.stdout.split(maxsplit=1)
    assert name == "PalimpsestForCausalLM"
    assert rest.endswith("0\nTrue\n")


# Prints, of a folder: ids with padding, logits of each row's last token, and generated ids.
USED = """
import json
import sys
import torch
import transformers
from transformers import AutoTokenizer
kind, folder = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = getattr(transformers, kind).from_pretrained(folder, trust_remote_code=True).eval()
inputs = tokenizer(["The function returns <extra_id_0>", "ok"], return_tensors="pt", padding=True)
inputs.pop("token_type_ids", None)
start = {"decoder_input_ids": torch.zeros((2, 1), dtype=int)}
more = start if kind == "AutoModelForSeq2SeqLM" else {}
with torch.no_grad():
    logits = model(**inputs, **more).logits[0, -1]
made = inputs.input_ids
if kind != "AutoModelForMaskedLM":
    made = model.generate(**inputs, max_new_tokens=4, min_new_tokens=4)
values = [transformers.__version__[0], inputs.input_ids.tolist(), made.tolist(), logits.tolist()]
print(json.dumps(values))
"""


@pytest.mark.slow
def test_exports_load_in_both_majors_of_transformers(text_cache, run, prefix_run, tmp_path):
    """Installs transformers 4.57 into a temporary folder, so it needs a package index."""
    older = tmp_path / "older"
    packages = ("transformers==4.57.3", "huggingface_hub==0.36.2", "tokenizers==0.22.2")
    made = python({}, "-m", "pip", "install", "-q", "--no-deps", f"--target={older}", *packages)
    assert made.returncode == 0, made.stderr
    masked = {"task": "python_docs_masked_lm", "lengths": (64, 64)}
    causal = {"task": "python_docs_autoregressive_lm", "lengths": (None, 40)}
    runs = {
        "AutoModelForSeq2SeqLM": run,
        "AutoModelForMaskedLM": save_run(text_cache, tmp_path / "b", "bert_tiny", **masked),
        "AutoModelForCausalLM": save_run(text_cache, tmp_path / "l", "llama_tiny", **causal),
    }
    folders = [(kind, f"{tmp_path}/{kind}") for kind in runs]
    for kind, folder in folders:
        exporting.export(runs[kind], folder)
    folders.append(("AutoModelForCausalLM", f"{tmp_path}/custom"))
    flags = (f"--model_dir={prefix_run}", f"--output={tmp_path}/custom", "--custom_code")
    environment = {"HF_HOME": f"{tmp_path}/home", "JAX_PLATFORMS": "cpu", "USE_TF": "0"}
    assert python(environment, "-m", "trainer.export", *flags).returncode == 0
    for kind, folder in folders:
        both = [
            python({**environment, "PYTHONPATH": path}, "-c", USED, kind, folder)
            for path in (str(older), "")
        ]
        assert [used.returncode for used in both] == [0, 0], (kind, both[0].stderr)
        older_values, newer_values = (json.loads(used.stdout) for used in both)
        assert (older_values[0], newer_values[0]) == ("4", "5")
        assert older_values[1:3] == newer_values[1:3]
        assert older_values[3] == pytest.approx(newer_values[3], abs=1e-4)
        assert "padding_side" not in both[0].stderr


def python(environment, *arguments):
    return started(*arguments, env={**os.environ, **environment})


def test_llama_is_exported_only_without_prefixes(text_cache, tmp_path):
    flags = ["--lengths.targets=40"]
    prefix = save_run(text_cache, tmp_path / "prefix", "llama_tiny", *flags, task=PREFIX)
    with pytest.raises(UserError, match="LlamaForCausalLM attends to earlier positions only"):
        exporting.export(prefix, f"{tmp_path}/other")
    causal = "python_docs_autoregressive_lm"
    llama = save_run(text_cache, tmp_path / "lm", "llama_tiny", *flags, task=causal)
    step, found, _ = exporting.export(llama, f"{tmp_path}/llama")
    assert (step, found.rows) == (2, 16)
    assert found.difference <= parity.TOLERANCE
    used = python({"JAX_PLATFORMS": "cpu"}, "-W", "error::UserWarning", "-c", f"""
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("{tmp_path}/llama")
model = AutoModelForCausalLM.from_pretrained("{tmp_path}/llama")
inputs = tokenizer(["The function returns", "The"], return_tensors="pt", padding=True)
both = model.generate(**inputs, max_new_tokens=4, min_new_tokens=4)
alone = tokenizer("The", return_tensors="pt")
assert both[1, -4:].tolist() == model.generate(
    **alone, max_new_tokens=4, min_new_tokens=4)[0, -4:].tolist()
""")  # fmt: skip
    assert used.returncode == 0, used.stderr
    assert "padding_side" not in used.stderr
    assert "warn" not in used.stderr.lower()


@pytest.mark.parametrize("attention", slow_unless({"cudnn"}, ["dot_product", "cudnn"]))
def test_a_run_with_fast_attention_leaves_its_gpu(text_cache, tmp_path, attention, capsys):
    """Its parameters do not depend on the implementation of attention, so any machine will do."""
    flags = "--lengths.inputs=64", "--model.dtype=bfloat16"
    folder = Path(save_run(text_cache, tmp_path / "run", "t5_1_1_tiny", *flags))
    # cuDNN cannot run here, so the run is made without it.
    written, _ = seal.opened(json.loads((folder / "config.json").read_text()))
    written["config"]["model"]["attention"] = attention
    (folder / "config.json").write_text(json.dumps(written))

    assert export.main([f"--model_dir={folder}", f"--output={tmp_path}/hf"]) == 0
    evaluate.main([f"--model_dir={folder}"])
    assert "perplexity" in capsys.readouterr().out

    # And the way back.
    fast = f"--model.attention={attention}", "--model.dtype=bfloat16", "--model.dropout_rate=0"
    model = config_of("--model.vocab_size=768", *fast).model
    assert load(str(tmp_path / "hf"), model).keys() >= {"encoder", "decoder"}


def test_the_card_says_what_caches_leave_out():
    rules = FilterRecord("length", "length", 1, "16", {"min_words": 10, "max_words": None})
    assert card._filter(rules) == "length (min_words 10)"
    listed = ExcludeRecord("0123456789abcdef", "ids", 1200, 0)
    assert card._list(listed) == "1,200 documents (sha256 0123456789ab)"


def test_the_card_has_the_run_s_own_evaluation_beside_those_of_other_splits(tmp_path):
    run = {"step": 2, "split": "validation", "metrics": {"loss": 6.25}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(run) + "\n")
    later = {"checkpoints": {"2": {"train": {"loss": 5.5}}, "1": {"validation": {"loss": 9.0}}}}
    (tmp_path / "evaluation.json").write_text(json.dumps(later))
    rows = card._evaluation(str(tmp_path), 2)
    assert rows == [("validation loss", "6.25"), ("train loss", "5.5")]


def test_a_run_without_validation_is_compared_on_its_training_rows(run, monkeypatch):
    prepared = exporting._open_run(run, None, False)
    held_out = exporting._rows(prepared)
    evaluation = prepared.data.evaluation

    def without(split, batch_size):
        if split == "validation":
            raise UserError("no text in split validation")
        return evaluation(split, batch_size)

    monkeypatch.setattr(prepared.data, "evaluation", without)
    found = exporting._rows(prepared)
    assert len(found) == len(held_out)
    assert not np.array_equal(found[0]["encoder_input_tokens"], held_out[0]["encoder_input_tokens"])
