"""Writes each converted checkpoint into its own folder."""

import dataclasses
import os

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from tasks.storage import files
from tasks.terminal.command_line import UserError
from tasks.vocabulary import Vocabulary
from trainer.annexes.conversion.sources import FLAG, Opened
from trainer.annexes.t5x import write
from trainer.checkpoints import metadata
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.checkpoints.layout import Parts
from trainer.checkpoints.tensors import held
from trainer.config import CONFIG_FILE, Config, VocabularyConfig, load_config, save_config
from trainer.data.run import Run
from trainer.engine.step import TrainState, zero_metrics
from trainer.exporting import folder
from trainer.exporting.folder import Arrays
from trainer.huggingface import configs, special_ids, tokenizer
from trainer.inference import trained_run
from trainer.initialization import init_from
from trainer.model.paths import tree_of
from trainer.model.spec import model_spec
from trainer.model.transformer import build_model
from trainer.optim.optimizer import optimizer_of
from trainer.setup import prepare

HUGGING_FACE, T5X, OURS = "huggingface", "t5x", "palimpsest"
FORMATS = (HUGGING_FACE, T5X, OURS)
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
# Origins in a converted run's configuration, which names the command as it was.
_ORIGINS = dict.fromkeys(("preset", "model.vocab_size"), "trainer.convert")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(folder.Settings):
    """The format of written checkpoints.

    `scanned` stacks layers, as T5X's `scalable_t5` does; `custom_code` allows a modelling file for
    a model that transformers lacks; `unverified` one whose logits are not compared.
    """

    format: str
    scanned: bool = False
    custom_code: bool = False
    task: str = ""
    cache_dir: str = ""
    unverified: bool = False


def refuse(opened: Opened, settings: Settings) -> None:
    """Raises UserError if the format lacks the model, or the vocabulary does not fit the model."""
    model, source, problems = opened.model.config, opened.source.path, []
    if settings.format == HUGGING_FACE:
        problems = [configs.refusal(model, settings.custom_code) or ""]
    if settings.format == T5X:
        problems = write.unsupported(model)
    for problem in filter(None, problems):
        raise UserError(f"{FLAG}={source} cannot be converted to {settings.format}: {problem}")
    vocabulary = settings.vocabulary
    if vocabulary and vocabulary.size > model.vocab_size:
        raise UserError(
            f"--vocabulary has {vocabulary.size} ids, but {source} has {model.vocab_size} "
            "embeddings"
        )
    run = opened.checkpoint.run if opened.checkpoint else None
    trained_on = run.get("vocabulary_sha256") if run else None
    if vocabulary and trained_on not in (None, vocabulary.record.sha256):
        raise UserError(
            f"{source} was trained with a vocabulary other than {vocabulary.name}: name the one in "
            "the folder of its cache"
        )
    if vocabulary and model.has_decoder:
        eos = vocabulary.special.eos
        special_ids.check_eos(opened.model.ids, source, model.vocab_size, eos, vocabulary.name)
    of_encoder = not model.has_decoder and settings.format == HUGGING_FACE
    if vocabulary and of_encoder and not settings.roles:
        raise UserError(
            "--vocabulary: only the run of an encoder-only model records which piece masks words; "
            "convert the run with trainer.export"
        )


def values(opened: Opened, dtype: str) -> Arrays:
    """Returns the parameters by name in `dtype`, layers unstacked."""
    flag = f"{FLAG}={opened.source.path}"
    return {
        name: init_from.sound(name, parts["value"].whole().astype(np.float32), flag).astype(
            DTYPES[dtype]
        )
        for name, parts in opened.parameters.items()
    }


def to_t5x(path: str, opened: Opened, arrays: Arrays, settings: Settings) -> str:
    """Writes `checkpoint_STEP` to a folder; returns a message about Adafactor's moments."""
    model = dataclasses.replace(opened.model.config, dtype="float32")
    parameters = {
        name: {**parts, "value": held(arrays[name])} for name, parts in opened.parameters.items()
    }
    plain = {name: {"value": parts["value"]} for name, parts in parameters.items()}

    def save(parameters: dict[str, Parts]) -> None:
        dtype = DTYPES[settings.dtype]
        write.write_parts(parameters, opened.step, model, path, settings.scanned, dtype=dtype)

    reset: object = "the source has none"
    if any(len(parts) > 1 for parts in parameters.values()):
        try:
            save(parameters)
            return _moments("")
        except write.OtherMoments as error:
            reset = error
    save(plain)
    return _moments(reset)


def _moments(reset: object) -> str:
    if reset:
        return f"Adafactor's moments start at 0: {reset}"
    return "Adafactor's moments are the source's"


def to_ours(path: str, run: Run, opened: Opened, arrays: Arrays, settings: Settings) -> str:
    """Writes a run's `checkpoint_STEP` to a folder; returns a message about Adafactor's moments.

    Moments are the source's, or 0; Adafactor's other settings are this trainer's defaults.
    """
    config = run.config
    spec = model_spec(config.model)
    optimizer = optimizer_of(config.optimizer, spec)
    found: dict[str, Parts] = {
        name: {**parts, "value": held(arrays[name])} for name, parts in opened.parameters.items()
    }
    params = jax.tree.map(jnp.asarray, tree_of(arrays))
    kept, reset = init_from.optimizer_state(config, opened.checkpoint, found)
    state = TrainState(
        step=jnp.asarray(opened.step, jnp.int32),
        params=params,
        opt_state=init_from.placed(kept, jax.jit(optimizer.init)(params)),
        metrics=zero_metrics(build_model(spec), config),
    )
    checkpoints = Checkpoints(path)
    checkpoints.save(opened.step, state, run)
    checkpoints.close()
    if settings.vocabulary and not settings.task:
        sha256 = settings.vocabulary.record.sha256
        metadata.update(checkpoints.path(opened.step), vocabulary_sha256=sha256)
    return _moments(reset)


def run_of(path: str, opened: Opened, settings: Settings) -> Run:
    """Returns a converted model's run, with data if `settings` name a task."""
    model = dataclasses.replace(opened.model.config, dtype="float32", attention="auto")
    config = Config(
        preset=opened.model.name,
        model=model,
        model_dir=path,
        task=settings.task,
        cache_dir=settings.cache_dir,
        train_steps=max(Config.train_steps, opened.step),
    )
    if settings.task:  # the task sets the lengths
        return prepare(config, dict(_ORIGINS))
    positions = opened.model.positions
    lengths = dataclasses.replace(
        config.lengths,
        inputs=positions if model.num_encoder_layers else None,
        targets=positions if model.num_decoder_layers else None,
    )
    vocabulary = config.vocabulary
    if settings.vocabulary:
        vocabulary = VocabularyConfig(extra_ids=settings.vocabulary.record.added_sentinels)
    config = dataclasses.replace(config, lengths=lengths, vocabulary=vocabulary)
    return trained_run.without_data(config)


def write_run_files(run: Run, vocabulary: Vocabulary | None) -> None:
    """Writes a converted run's config.json and vocabulary unless the folder has them."""
    config, folder = run.config, run.config.model_dir
    files.make_folder(folder)
    if vocabulary:
        files.write_bytes(os.path.join(folder, vocabulary.record.file_name), vocabulary.model)
        # tokenizer.json does not say which pieces have roles.
        if not (vocabulary.is_sentencepiece or vocabulary.is_registered):
            roles = {f"{role}_token": name for role, name in vocabulary.special_pieces().items()}
            files.write_json(os.path.join(folder, tokenizer.TOKENIZER_CONFIG), roles)
    if files.exists(os.path.join(folder, CONFIG_FILE)):
        before, origins = load_config(folder)
        if origins != _ORIGINS or (before.model, before.task) != (config.model, config.task):
            raise UserError(f"{folder} holds another run: name another folder with --to")
        if before.train_steps >= config.train_steps:
            return
    save_config(config, _ORIGINS, run.data.record if config.task else None)
