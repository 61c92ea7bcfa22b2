"""Answers to flags of other trainers, which people type out of habit.

The names are those of transformers, nanoT5, T5X, Mesh T5, MaxText, Megatron and SentencePiece.
"""

import difflib
import functools
from collections.abc import Collection

from tasks import annexes

# Names -> the flags that take their place: the first group, between "|", that the command has.
_INSTEAD = {
    "output output_dir out_dir out output_path output_file output_prefix output_cache_dir save "
    "save_dir checkpoint_dir model_prefix base_output_directory run_dir run_name logdir "
    "log_dir": "output | model_dir | cache_dir",
    "model model_name model_name_or_path pretrained_model ckpt checkpoint checkpoint_path "
    "load_parameters_path init_checkpoint": "init_from preset | model_dir",
    "config_name model_type model_size architecture arch": "preset",
    "input inputs input_file input_files data data_path data_dir dataset dataset_name "
    "dataset_path train_file train_data train_data_path text_file corpus_file files "
    "hf_path": "corpus | task cache_dir",
    "tokenizer_name tokenizer_path tokenizer_model tokenizer_type vocab vocab_file vocab_path "
    "spm_path sentencepiece sp_model tokenizer": "vocabulary | vocabulary.model_file",
    "lr learning_rate max_lr peak_lr base_lr": "optimizer.learning_rate",
    "lr_scheduler lr_scheduler_type lr_decay_style scheduler lr_schedule": "optimizer.schedule",
    "warmup warmup_steps num_warmup_steps lr_warmup_iters lr_warmup_steps "
    "warmup_iters warmup_ratio lr_warmup_fraction warmup_steps_fraction": "optimizer.warmup_steps",
    "lr_decay_iters lr_decay_steps learning_rate_schedule_"
    "steps": "optimizer.decay_steps optimizer.steps_per_cycle",
    "min_lr lr_min": "optimizer.minimum_learning_rate optimizer.final_fraction",
    "optim optimizer_name optimizer_type opt_type": "optimizer.name",
    "adam_beta1 beta1 adam_b1": "optimizer.beta1",
    "adam_beta2 beta2 adam_b2": "optimizer.beta2",
    "adam_epsilon adam_eps eps": "optimizer.epsilon",
    "wd weight_decay": "optimizer.weight_decay",
    "clip_grad max_grad_norm grad_clip gradient_clipping "
    "gradient_clipping_threshold": "optimizer.clip_norm",
    "max_steps steps total_steps num_steps train_iters max_iters iters num_train_steps "
    "training_steps": "train_steps",
    "per_device_train_batch_size train_batch_size global_batch_size bs "
    "per_device_batch_size": "batch_size",
    "micro_batch_size grad_acc gradient_accumulation_steps accumulation_steps grad_accum "
    "accumulate_grad_batches": "microbatches",
    "per_device_eval_batch_size eval_batch_size": "evaluation.batch_size | batch_size",
    "save_steps save_every save_interval save_period checkpoint_period "
    "save_freq": "checkpoint.every_steps",
    "save_total_limit keep max_to_keep": "checkpoint.keep",
    "metric_for_best_model load_best_model_at_end best_metric": "checkpoint.best_metric",
    "eval_steps eval_every eval_interval eval_period eval_freq eval_strategy "
    "evaluation_strategy": "evaluation.every_steps",
    "eval_iters eval_batches": "evaluation.batches",
    "logging_steps log_every log_interval log_period log_freq": "metrics.every_steps",
    "report_to": "metrics.wandb metrics.tensorboard",
    "wandb wandb_project": "metrics.wandb",
    "profiler enable_profiler profile": "profile_steps",
    "tensorboard tensorboard_dir": "metrics.tensorboard",
    "metric metrics": "evaluation.metrics | metrics",
    "max_length length max_new_tokens max_tokens max_decode_length max_gen_len "
    "num_tokens": "max_new_tokens | lengths.inputs lengths.targets | row_tokens",
    "seq_length seq_len max_seq_length max_seq_len sequence_length block_size context_length "
    "encoder_seq_length max_source_length max_input_length n_ctx input_length "
    "max_target_length": "lengths.inputs lengths.targets | row_tokens | max_new_tokens",
    "decoder_seq_length max_output_length": "lengths.targets | max_new_tokens",
    "num_layers n_layer n_layers layers depth num_hidden_layers base_num_decoder_layers "
    "encoder_num_layers": "model.num_encoder_layers model.num_decoder_layers",
    "num_decoder_layers decoder_num_layers": "model.num_decoder_layers",
    "hidden_size d_model dim n_embd emb_dim base_emb_dim model_dim width": "model.emb_dim",
    "d_ff ffn_hidden_size mlp_dim intermediate_size base_mlp_dim": "model.mlp_dim",
    "num_heads n_head n_heads heads num_attention_heads base_num_query_heads": "model.num_heads",
    "d_kv head_dim kv_channels": "model.head_dim",
    "num_key_value_heads base_num_kv_heads num_query_groups": "model.num_kv_heads",
    "max_position_embeddings": "model.max_positions",
    "position_embedding_type": "model.position",
    "normalization": "model.norm",
    "swiglu activation act_fn": "model.mlp_activations",
    "dropout dropout_rate hidden_dropout attention_dropout": "model.dropout_rate",
    "vocab_size padded_vocab_size": "model.vocab_size",
    "dtype precision bf16 fp16 fp32 mixed_precision half weight_dtype torch_dtype": "model.dtype",
    "gradient_checkpointing recompute remat remat_policy recompute_activations activation_"
    "checkpointing": "model.remat",
    "attention flash_attention use_flash_attn attn_implementation attention_"
    "type": "model.attention",
    "noise_density mlm_probability mask_prob mean_noise_span_length": "objective",
    "tensor_model_parallel_size tp tensor_parallelism ici_tensor_"
    "parallelism": "mesh.tensor",
    "fsdp ici_fsdp_parallelism zero_stage sharding_strategy": "mesh.fsdp",
    "dp data_parallel_size ici_data_parallelism dcn_data_parallelism": "mesh.data",
    "threshold similarity jaccard jaccard_threshold": "min_similarity",
    "num_hashes num_perm b r": "bands rows",
    "ngram_size n": "ngram | num_return_sequences",
    "module_import tasks_module": "task_module",
    "seqio_additional_cache_dirs additional_task_cache_dirs": "cache_dir",
    "append_eod": "separator",
    "limit": "examples",
    "cache_dir": "cache",
    "num_proc num_workers worker_count n_jobs jobs processes nproc preprocessing_num_workers "
    "threads num_threads dataloader_num_workers": "workers | data.threads",
    "beams beam_size": "num_beams",
    "p nucleus": "top_p",
    "k": "top_k",
    "do_sample sample": "method",
    "text": "prompt",
    "prompt": "text",
    "dir path folder cache": "cache | cache_dir | model_dir",
    "model_path run": "model_dir",
    "random_seed rng_seed data_seed": "seed",
    "shards num_shards shard_size": "shard_bytes",
    "eval_split dataset_split": "split",
    "symbols user_symbols special_tokens control_symbols": "user_defined_symbols",
    "normalization_rule_name normalizer": "normalization",
    "repo push hub hub_model_id push_to_hub repo_id": "push_to",
}  # fmt: skip

# Names -> (a flag of the commands that the answer is for, or ""; the answer).
_ANSWERS = {
    "resume resume_from resume_from_checkpoint resume_run restart continue auto_resume restore "
    "load_checkpoint load force overwrite overwrite_output_dir overwrite_cache": (
        "", "the same command resumes; nothing is overwritten: for a new start name a new folder"
    ),
    "epochs num_epochs num_train_epochs n_epochs max_epochs train_epochs train_samples": (
        "train_steps", "give --train_steps; a run's first lines say how many an epoch takes"
    ),
    "device devices gpu gpus n_gpus num_gpus nproc_per_node accelerator no_cuda use_cpu cpu cuda "
    "tpu use_tpu use_gpu hardware": (
        "", "JAX uses the accelerators that it finds; the environment variable JAX_PLATFORMS=cpu, "
        "cuda or tpu chooses"
    ),
    "config config_file conf cfg yaml json params hparams": (
        "preset", "settings are flags"
    ),
    "do_train do_eval do_predict train eval mode evaluate": (
        "", "training, evaluation and generation are commands: trainer.pretrain, trainer.finetune, "
        "trainer.evaluate, trainer.generate"
    ),
    "column text_column split json_keys field text_field": (
        "corpus", "write it into the corpus: --corpus='json:FILE?column=NAME&split=train'"
    ),
    "model_dir runs run_dir": ("run_a", "name both runs without a flag: RUN_A RUN_B"),
    "streaming": ("corpus", "a corpus hf:OWNER/NAME is streamed"),
    "shuffle": ("row_tokens", "a run shuffles the windows, by its --seed"),
    "pad_id eos_id unk_id bos_id": (
        "character_coverage", "the ids are T5's: 0 for padding, 1 for EOS, 2 for unknown text"
    ),
    "input_sentence_size shuffle_input_sentence max_sentence_length hard_vocab_limit "
    "train_extremely_large_corpus": (
        "character_coverage", "the words of the whole corpus are counted: nothing is drawn or cut"
    ),
    "push_to_hub hub_model_id": ("train_steps", "trainer.export --push_to uploads a trained model"),
    "local_rank node_rank master_addr master_port num_nodes nnodes": (
        "processes.count", "give --processes.coordinator, --processes.count and --processes.index"
    ),
    "version": ("", "palimpsest --version prints it"),
    "debug quiet silent verbosity log_level logging_level v": (
        "", "a command prints its errors in one line each"
    ),
}  # fmt: skip
# Their groups of flags -> ours.
_GROUPS = {"optim": "optimizer", "opt": "optimizer", "eval": "evaluation", "logging": "metrics"}
# Their groups whose flags may have any place here.
_ANYWHERE = ("", "optim", "optimizer", "model", "data", "training")
# A lower similarity proposes flags that mean something else.
_CLOSE = 0.79
# Flags named for a group.
_SHOWN = 4


def hint(word: str, known: Collection[str]) -> str:
    """Returns advice in brackets for an unknown flag, typed as "--name" or "name", or "".

    `known` holds the names of the command's flags.
    """
    name = word.removeprefix("--").replace("-", "_")
    if name.removeprefix("no_") in known and name.startswith("no_"):
        return f" (did you mean --{name[3:]}=false?)"
    found = _instead(name, known)
    if not found and (answer := _answer(name, known)):
        return f" ({answer})"
    if not found and (group := [each for each in known if each.startswith(f"{name}.")]):
        more = ", …" * (len(group) > _SHOWN)
        return f" (it is a group: {', '.join(f'--{each}' for each in group[:_SHOWN])}{more})"
    found = found or _similar(name, known)
    return f" (did you mean {' or '.join(f'--{each}' for each in found)}?)" if found else ""


def _instead(name: str, known: Collection[str]) -> list[str]:
    """Returns the flags that do what another trainer's flag of this name does, or have its name."""
    group, _, last = name.rpartition(".")
    if (ours := f"{_GROUPS.get(group)}.{last}") in known:
        return [ours]
    for each in (name, last) if group in _ANYWHERE else (name,):
        groups = _table().get(each, "")
    for flags in groups.split("|"):
        if here := [each for each in flags.split() if each in known]:
            return here
    return [each for each in sorted(known) if each.rpartition(".")[2] == name]


def _answer(name: str, known: Collection[str]) -> str:
    for names, (needed, answer) in _ANSWERS.items():
        if name in names.split() and (not needed or needed in known):
            return answer + annexes.advice(names.split()[0])
    return ""


def _similar(name: str, known: Collection[str]) -> list[str]:
    """Returns the flag that may have been misspelled, if its group is as similar as its name."""

    def similarity(flag: str) -> float:
        pairs = zip(flag.rpartition("."), name.rpartition("."), strict=True)
        return min(difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs)

    ends = {each.rpartition(".")[2]: each for each in sorted(known)} if "." not in name else {}
    best = max([*known, *ends], key=similarity, default="")
    return (
        [ends.get(best, best) if best not in known else best] if similarity(best) > _CLOSE else []
    )


@functools.cache
def _table() -> dict[str, str]:
    return {name: flags for names, flags in _INSTEAD.items() for name in names.split()}
