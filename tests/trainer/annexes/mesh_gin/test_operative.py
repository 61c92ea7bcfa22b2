"""Operative configurations, which the T5 library wrote beside every checkpoint."""

import pytest

from tasks.terminal.command_line import UserError
from trainer.annexes.gin import recipe

# The experiments of Raffel et al. 2020, as their operative configurations bind them: noise mask,
# functions of inputs and targets, noise density, lengths of targets -> our task and its settings.
LENGTH = "mean_noise_span_length"
IID, SPANS, REGULAR = "iid_noise_mask", "random_spans_noise_mask", "regular_noise_mask"
UNIQUE = ("noise_span_to_unique_sentinel", "nonnoise_span_to_unique_sentinel")
OBJECTIVES = {
    "iid_10": (IID, *UNIQUE, 0.1, 103, "c4_iid_10_u_u", ()),
    "iid_15": (IID, *UNIQUE, 0.15, 192, "c4_iid_15_u_u", ()),
    "iid_25": (IID, *UNIQUE, 0.25, 256, "c4_iid_25_u_u", ()),
    "iid_50": (IID, *UNIQUE, 0.5, 512, "c4_iid_50_u_u", ()),
    "iid_20": (IID, *UNIQUE, 0.2, 256, "c4_iid_50_u_u", ("mask.noise_density=0.2",)),
    "dropped": (IID, "drop_noise_tokens", "drop_nonnoise_tokens", 0.15, 104, "c4_iid_15_d_d", ()),
    "masked": (IID, "noise_token_to_sentinel", None, 0.15, 512, "c4_iid_15_m_f", ()),
    "replaced": (
        *(IID, "noise_token_to_random_token_or_sentinel", None, 0.15, 512, "c4_iid_15_r10s90_f"),
        (),
    ),
    "shuffled": (IID, "permute_noise_tokens", None, 1.0, 512, "c4_deshuffling", ()),
    "regular": (REGULAR, *UNIQUE, 0.15, 160, "c4_regular_1_5_15_u_u", ()),
    "spans": (SPANS, *UNIQUE, 0.15, 114, "c4_span_corruption", (f"mask.{LENGTH}=4.0",)),
}
OF_MASKS = {
    REGULAR: "regular_noise_mask.min_span_length = 1\nregular_noise_mask.max_span_length = 5",
    SPANS: "random_spans_noise_mask.mean_noise_span_length = 4.0",
}
LAYERS = {
    "encoder": ("SelfAttention", "DenseReluDense"),
    "decoder": ("SelfAttention", "EncDecAttention", "DenseReluDense"),
}
STACK = """
{stack}/DenseReluDense.dropout_rate = %dropout_rate
{stack}/DenseReluDense.hidden_size = %d_ff
{stack}/LayerStack.norm_epsilon = 1e-06
{stack}/make_layer_stack.block_scope = True
{stack}/make_layer_stack.layers = [{layers}]
{stack}/make_layer_stack.num_layers = %num_layers
{stack}/SelfAttention.attention_kwargs = None
{stack}/SelfAttention.num_heads = %num_heads
{stack}/SelfAttention.key_value_size = %d_kv
{stack}/Unitransformer.d_model = %d_model
{stack}/Unitransformer.ensemble = None
{stack}/Unitransformer.input_full_attention = False
{stack}/Unitransformer.loss_denominator = None
{stack}/Unitransformer.loss_fn = None
{stack}/Unitransformer.positional_embedding = False
{stack}/Unitransformer.shared_embedding_and_softmax_weights = True
{stack}/Unitransformer.z_loss = 0.0001
"""


def operative(mask, inputs, targets, density, length, more="", joins=True, task="c4_v020"):
    """Returns an operative configuration: every argument of every configurable that ran."""
    steps = ["select_random_chunk", *["reduce_concat_tokens"] * joins]
    steps += ["split_tokens_to_inputs_length", "denoise"]
    stacks = "".join(
        STACK.format(
            stack=stack, layers=", ".join(f"@transformer_layers.{name}" for name in layers)
        )
        for stack, layers in LAYERS.items()
    )
    return f"""
import mesh_tensorflow.transformer.transformer_layers
import t5.data.sentencepiece_vocabulary
d_ff = 3072
d_kv = 64
d_model = 768
dropout_rate = 0.1
num_heads = 12
num_layers = 16
MIXTURE_NAME = '{task}_unsupervised'
model_parallelism = 2
tokens_per_batch = 65536
AdafactorOptimizer.decay_rate = None
denoise.inputs_fn = @preprocessors.{inputs}
denoise.targets_fn = {f"@preprocessors.{targets}" if targets else None}
denoise.noise_mask_fn = @preprocessors.{mask}
denoise.noise_density = {density}
{OF_MASKS.get(mask, "")}
get_sentencepiece_model_path.mixture_or_task_name = %MIXTURE_NAME
learning_rate_schedule_noam.linear_decay_fraction = 0.0
learning_rate_schedule_noam.multiplier = 1.0
learning_rate_schedule_noam.warmup_steps = 10000
make_bitransformer.decoder_name = 'decoder'
make_bitransformer.encoder_name = 'encoder'
mesh_train_dataset_fn.mixture_or_task_name = %MIXTURE_NAME
reduce_concat_tokens.feature_key = 'targets'
run.batch_size = ('tokens_per_batch', %tokens_per_batch)
run.ensemble_inputs = None
run.keep_checkpoint_max = None
run.learning_rate_schedule = @learning_rate_schedules.learning_rate_schedule_noam
run.mesh_shape = @mesh_tensorflow.transformer.utils.tpu_mesh_shape()
run.mode = 'train'
run.model_type = 'bitransformer'
run.optimizer = @optimize.AdafactorOptimizer
run.predict_fn = None
run.save_checkpoints_steps = 5000
run.sequence_length = {{'inputs': 512, 'targets': {length}}}
run.train_steps = 524288
run.variable_filter = None
run.vocabulary = @t5.data.sentencepiece_vocabulary.SentencePieceVocabulary()
SentencePieceVocabulary.extra_ids = 100
SentencePieceVocabulary.sentencepiece_model_file = \\
    @t5.models.mesh_transformer.get_sentencepiece_model_path()
serialize_num_microbatches.tokens_per_microbatch_per_replica = 2048
tpu_estimator_model_fn.outer_batch_size = 1
tpu_estimator_model_fn.tpu_summaries = False
tpu_mesh_shape.model_parallelism = %model_parallelism
tpu_mesh_shape.tpu_topology = %tpu_topology
unsupervised.preprocessors = [{", ".join(f"@preprocessors.{step}" for step in steps)}]
{stacks}
{more}
"""


def load(folder, text, *overrides):
    path = folder / "operative_config.gin"
    path.write_text(text)
    return recipe.load([str(path)], [], [], None, list(overrides))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_operative_configuration_is_read(name, tmp_path):
    *bound, task, settings = OBJECTIVES[name]
    config, origins, notes = load(tmp_path, operative(*bound, joins=name != "shuffled"))
    model = config.model
    assert (config.task, config.objective) == (task, settings)
    sizes = (model.family, model.emb_dim, model.mlp_dim, model.num_heads)
    assert sizes == ("t5_1_0", 768, 3072, 12)
    assert (model.num_encoder_layers, model.num_decoder_layers) == (16, 16)
    assert (model.head_dim, model.dropout_rate, model.dtype) == (64, 0.1, "bfloat16")
    assert (config.lengths.inputs, config.lengths.targets) == (512, bound[-1])
    assert (config.batch_size, config.train_steps, config.mesh.tensor) == (128, 524288, 2)
    assert (config.checkpoint.every_steps, config.checkpoint.keep) == (5000, None)
    assert config.tokens_per_microbatch_per_replica == 2048
    assert config.loss.normalizer == "num_total_target_tokens"
    assert config.optimizer.schedule == "constant * rsqrt_decay"
    assert "tpu_topology" in str(notes)
    assert "operative_config.gin:" in origins["checkpoint.keep"]


SHARED = "make_bitransformer.encoder_name = 'decoder'"
OTHER_STEPS = "unsupervised.preprocessors = [@preprocessors.select_random_chunk, @preprocessors.{}]"
WRONG = {
    "shared stacks": (SHARED, "encoder and decoder have parameters of their own"),
    "adapters": ("run.variable_filter = 'task_adapter'", "all parameters are trained"),
    "part of a corpus": (OTHER_STEPS.format("take"), "take is not supported"),
    "random lengths": (
        OTHER_STEPS.format("split_tokens_to_random_length"),
        "split_tokens_to_random_length is not supported",
    ),
    "a prefix that is dropped": (
        "denoise.noise_mask_fn = @preprocessors.random_prefix_noise_mask\n"
        "denoise.inputs_fn = @preprocessors.drop_noise_tokens\n"
        "denoise.targets_fn = @preprocessors.drop_nonnoise_tokens",
        "here inputs are drop_noise_tokens and targets drop_nonnoise_tokens of RandomPrefix",
    ),
    "another function": (
        "denoise.inputs_fn = @preprocessors.random_prefix_noise_mask",
        "random_prefix_noise_mask must be @noise_token_to_sentinel or",
    ),
    "a decoder": ("run.model_type = 'lm'", "a decoder-only model needs the language"),
    "two numbers of heads": (
        "decoder/SelfAttention.num_heads = 8\nencoder/SelfAttention.num_heads = 12",
        "decoder/SelfAttention.num_heads = 8 differs from encoder's 12",
    ),
    "other sublayers": (
        "encoder/make_layer_stack.layers = [@transformer_layers.DenseReluDense]",
        "must be @SelfAttention, @DenseReluDense in an encoder-decoder",
    ),
    "an initial checkpoint": (
        "tpu_estimator_model_fn.init_checkpoint = %init_checkpoint",
        "nothing sets the macro %init_checkpoint: set --init_from=VALUE, or --gin.init_checkpoint=",
    ),
    "no density": ("denoise.noise_density = 7.0", "noise_mask_fn: "),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_an_operative_configuration_lacks_is_named(case, tmp_path):
    more, says = WRONG[case]
    with pytest.raises(UserError) as error:
        load(tmp_path, operative(IID, *UNIQUE, 0.15, 192, more))
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    assert "operative_config.gin:" in str(error.value)


def test_flags_supply_what_is_missing(tmp_path):
    steps = operative(IID, *UNIQUE, 0.15, 192, OTHER_STEPS.format("take"))
    assert load(tmp_path, steps, "--task=c4_prefix_lm").config.task == "seqio:c4_v020_unsupervised"
    begun = operative(IID, *UNIQUE, 0.15, 192, WRONG["an initial checkpoint"][0])
    assert load(tmp_path, begun, "--init_from=hf:t5").config.init_from == "hf:t5"


def test_settings_of_data_that_do_not_apply_are_named(tmp_path):
    text = operative(IID, *UNIQUE, 0.15, 192, "take.num_examples = 1000")

    def told(*flags):
        return [note for subject, note in load(tmp_path, text, *flags).notes]

    (take,) = [note for note in told() if note.startswith("take.num_examples = 1000")]
    assert "set --data.take='1000 documents'" in take
    assert not [note for note in told() if note.endswith("no effect on this run")]
    # A task of a flag makes the objective of the files idle.
    idle = [note for note in told("--task=c4_prefix_lm") if note.endswith("no effect on this run")]
    assert [note.partition(" =")[0] for note in idle] == [
        *("denoise.inputs_fn", "denoise.targets_fn", "denoise.noise_mask_fn"),
        "denoise.noise_density",
    ]
    assert len(told()) == len(set(told()))
    unset = operative(IID, *UNIQUE, 0.15, 192, "take.num_examples = None")
    assert "take.num_examples" not in str(load(tmp_path, unset).notes)


def test_parts_of_c4_and_other_corpora_are_named(tmp_path):
    config, _, notes = load(
        tmp_path, operative(IID, *UNIQUE, 0.15, 192, task="c4_realnewslike_v020")
    )
    assert config.task == "c4_iid_15_u_u"
    assert "build its cache with --corpus=hf:allenai/c4:realnewslike" in str(notes)
    config, _, notes = load(tmp_path, operative(IID, *UNIQUE, 0.15, 192, task="wikipedia_books"))
    assert config.task == "seqio:wikipedia_books_unsupervised"
    assert "has no effect: wikipedia_books_unsupervised has its own" in str(notes)
