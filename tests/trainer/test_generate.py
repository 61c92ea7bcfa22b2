"""Tests of `trainer.generate` on runs with initial parameters."""

import json
import shutil
import time

import numpy as np
import pytest

from tasks import vocabulary
from tasks.terminal.command_line import UserError
from tasks.vocabulary import encode_with_sentinels
from tests.support import runs
from tests.trainer.huggingface.test_export import save_run
from trainer import generate
from trainer.config.decoding import Decoding
from trainer.exporting import exporting
from trainer.inference import prompts as prompts_module
from trainer.inference import text
from trainer.inference.generator import Generator

pytestmark = pytest.mark.processes  # whole runs

CHOICES = ["--max_new_tokens=6", "--method=sample", "--batch_size=1"]


@pytest.fixture(scope="module")
def run(text_cache, tmp_path_factory):
    folder = tmp_path_factory.mktemp("decoding") / "t5"
    return save_run(text_cache, folder, "t5_1_1_tiny", "--lengths.inputs=64")


@pytest.fixture(scope="module")
def spm(text_cache):
    return vocabulary.load(str(text_cache.parents[1] / "vocabulary"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("".join(f"The list <extra_id_0> number {n}.\n" for n in range(120)))
    return path


def command(run, prompts, output, *more):
    return [f"--model_dir={run}", f"--input={prompts}", f"--output={output}", *CHOICES, *more]


@pytest.fixture(scope="module")
def whole(run, prompts, tmp_path_factory):
    output = tmp_path_factory.mktemp("whole") / "out.jsonl"
    generate.main(command(run, prompts, output))
    return output.read_bytes()


def test_the_output_has_a_line_for_each_prompt_in_order(run, prompts, whole):
    lines = [json.loads(line) for line in whole.decode().splitlines()]
    assert [line["prompt"] for line in lines] == prompts.read_text().splitlines()
    generator = Generator(run, Decoding(max_new_tokens=6, method="sample", batch_size=1))
    place = 29
    (found,) = generator([generator.ids(lines[place]["prompt"])], [place])
    text, score = generator.text(found.ids), round(found.score, 4)
    expected = {"text": text, "ids": found.ids.tolist(), "score": score, "ended": found.ended}
    assert lines[place]["results"] == [expected]


def counting(results, firsts):
    """Returns `prompts_module.results`, which also notes the number of its first prompt."""

    def counted(generator, prompts, first, count):
        firsts.append(first)
        return results(generator, prompts, first, count)

    return counted


@pytest.mark.processes
def test_a_killed_command_goes_on(run, prompts, whole, tmp_path, capsys, monkeypatch):
    output = tmp_path / "out.jsonl"
    partial = tmp_path / "out.jsonl.partial"
    second = partial / "000001.jsonl"
    started = runs.start(runs.command("trainer.generate", *command(run, prompts, output)))
    deadline = time.monotonic() + 280
    while time.monotonic() < deadline and started.poll() is None:
        if second.exists():
            break
        time.sleep(0.001)
    started.kill()
    started.communicate()
    assert not output.exists()
    assert second.read_bytes() == b"".join(whole.splitlines(keepends=True)[8:16])
    assert not (partial / "000014.jsonl").exists()
    (partial / ".partial-0-000002.jsonl").write_bytes(b'{"prompt": "half a li')
    with pytest.raises(UserError, match="was written by a different command"):
        generate.main(command(run, prompts, output, "--seed=1"))
    firsts = []
    monkeypatch.setattr(prompts_module, "results", counting(prompts_module.results, firsts))
    generate.main(command(run, prompts, output))
    assert 16 <= firsts[0] < 120
    assert output.read_bytes() == whole
    assert not partial.exists()
    with pytest.raises(UserError, match="exists"):
        generate.main(command(run, prompts, output))


@pytest.mark.google
def test_output_in_a_bucket_is_continued(run, prompts, whole, gcs, tmp_path, monkeypatch):
    output = "gs://bucket/folder/out.jsonl"
    add, kept = prompts_module._Output.add, []

    def stopping(self, block, lines):
        if block == 3 and not kept:
            kept.append(block)
            raise KeyboardInterrupt
        add(self, block, lines)

    monkeypatch.setattr(prompts_module._Output, "add", stopping)
    with pytest.raises(KeyboardInterrupt):
        generate.main(command(run, prompts, output))
    folder = "folder/out.jsonl.partial"
    names = [f"{folder}/{block:06d}.jsonl" for block in range(3)]
    assert gcs.names() == [*names, f"{folder}/settings.json"]
    monkeypatch.setattr(prompts_module, "results", counting(prompts_module.results, kept))
    generate.main(command(run, prompts, output))
    assert kept[1] == 24  # the first prompt that was not there
    assert gcs.names() == ["folder/out.jsonl"]
    assert gcs.read("folder/out.jsonl") == whole


def test_lines_end_at_newlines_alone(tmp_path):
    texts = ["one\u2028line", "next\x85 line", "a\rb\x0cc"]
    path = tmp_path / "in.jsonl"
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    path.write_bytes("\r\n".join(lines).encode())
    assert prompts_module.read_prompts(str(path), "text") == texts
    path = tmp_path / "in.txt"
    path.write_bytes("\n".join(texts).encode() + b"\n")
    assert prompts_module.read_prompts(str(path), "text") == texts
    path = tmp_path / "half.jsonl"
    path.write_text('{"text": "a\\ud800b"}\n')
    for name, says in ((tmp_path, "is a folder: name a file"), (path, "has half a character")):
        with pytest.raises(UserError, match=says):
            prompts_module.read_prompts(str(name), "text")


def test_json_lines_are_read(run, tmp_path, capsys):
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text('{"source": "a list"}\n{"source": "the end"}\n')
    flags = command(run, path, output)
    with pytest.raises(UserError, match=r"line 1: no JSON object with 'text'"):
        generate.main(flags)
    generate.main([*flags, "--column=source", "--num_return_sequences=2"])
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["prompt"] for line in lines] == ["a list", "the end"]
    assert [len(line["results"]) for line in lines] == [2, 2]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "either --prompt or --input"),
        (["--prompt=a", "--input=b"], "either --prompt or --input"),
        (["--prompt=a", "--method=sample", f"--seed={10**20}"], "a 64-bit integer"),
        (["--input=b"], "belong together"),
        (["--prompt=a", "--top_k=3"], "--top_k has no effect with method 'greedy'"),
        (["--prompt=a", "--step=7"], "no checkpoint of step 7; it has 2"),
        (["--prompt=a <extra_id_300>"], "no <extra_id_300>: it has <extra_id_0> to <extra_id_99>"),
        (["--input=nowhere.txt", "--output=out"], "--input=nowhere.txt does not exist"),
    ],
)
def test_mistakes_are_one_line(run, flags, message, tmp_path):
    with pytest.raises(UserError, match=message):
        generate.main([f"--model_dir={run}", *flags])


def test_a_decoder_goes_on_from_a_prompt(text_cache, tmp_path, capsys):
    flags = ["--lengths.inputs=0", "--lengths.targets=64"]
    run = save_run(text_cache, tmp_path / "lm", "lm_tiny", *flags, task="python_docs_lm")
    generator = Generator(run, Decoding(max_new_tokens=4))
    # Its inputs have no EOS, unlike those of a T5.
    assert generator.ids("a list")[-1] != vocabulary.EOS_ID
    generate.main([f"--model_dir={run}", "--prompt=a list", "--max_new_tokens=4"])
    (found,) = generator([generator.ids("a list")])
    assert capsys.readouterr().out == generator.text(found.ids) + "\n"


def test_an_output_may_end_at_a_piece(run):
    whole = Generator(run, Decoding(max_new_tokens=6))
    prompt = whole.ids("The <extra_id_0> list")
    (found,) = whole([prompt])
    place = next(at for at, token in enumerate(found.ids) if token not in found.ids[:at])
    piece = whole.vocabulary.ids.pieces[found.ids[place]]
    (short,) = Generator(run, Decoding(max_new_tokens=6), end=piece)([prompt])
    assert (short.ids.tolist(), short.ended) == (found.ids[:place].tolist(), True)


def test_gaps_are_encoded_as_span_corruption_writes_them(spm):
    words = "the list of the functions"
    ids = spm.encode([words])[0].tolist()
    pieces = [spm.processor.id_to_piece(token) for token in ids]
    starts = [place for place, piece in enumerate(pieces) if piece.startswith("\u2581")]
    begin, end = starts[1], starts[2]
    expected = [*ids[:begin], spm.size - 1, *ids[end:]]
    assert encode_with_sentinels(spm, "the <extra_id_0> of the functions").tolist() == expected
    # No number of a sentinel has so many digits.
    assert spm.size - 1 not in encode_with_sentinels(spm, f"the <extra_id_{'0' * 5000}>").tolist()
    # Punctuation after a gap has no space before it.
    stop = spm.encode(["end."])[0].tolist()[-1]
    assert encode_with_sentinels(spm, "the <extra_id_0>.").tolist()[-1] == stop
    ids = np.array([*spm.encode(["a list"])[0], spm.size + 3], np.int32)
    assert text.decode(spm, ids) == "a list"
    assert text.spans(spm, np.array([spm.size - 1, *ids])) == {0: "a list"}


def test_a_run_speaks_without_its_cache(text_cache, tmp_path, capsys):
    cache = tmp_path / "caches" / text_cache.name
    shutil.copytree(text_cache, cache)
    made = save_run(cache, tmp_path / "model", "t5_1_1_tiny", "--lengths.inputs=64")
    words = [f"--model_dir={tmp_path}/moved", "--prompt=The <extra_id_0> list", "one more"]
    (tmp_path / "model").rename(tmp_path / "moved")
    generate.main([*words, "--max_new_tokens=4"])
    before = capsys.readouterr().out
    assert len(before.splitlines()) == 2
    shutil.rmtree(cache.parent)
    generate.main([*words, "--max_new_tokens=4"])
    said = capsys.readouterr()
    assert said.out == before
    assert "without its data: no cache for task" in said.err
    generate.main([*words, f"--vocabulary={text_cache.parents[1]}/vocabulary"])
    (tmp_path / "moved" / "sentencepiece.model").write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"sentencepiece.model is damaged: .*: restore it$"):
        generate.main(words)
    assert made == f"{tmp_path}/model"


@pytest.mark.torch
def test_an_export_of_a_run_without_its_cache_says_what_to_do(text_cache, tmp_path):
    cache = tmp_path / "caches" / text_cache.name
    shutil.copytree(text_cache, cache)
    made = save_run(cache, tmp_path / "model", "t5_1_1_tiny", "--lengths.inputs=64")
    shutil.rmtree(cache.parent)
    with pytest.raises(UserError, match="name its caches with --cache_dir"):
        exporting.export(made, str(tmp_path / "exported"))
