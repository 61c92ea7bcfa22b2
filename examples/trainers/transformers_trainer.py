"""Pretrains a T5 or a Llama of transformers on a mixture of tasks; run it again to resume.

python examples/trainers/transformers_trainer.py t5 MIXTURE CACHE_DIR OUTPUT [STEPS]

OUTPUT/steps.txt has a line for each update: its number, the SHA-256 of its batch, its loss.
"""

import hashlib
import pathlib
import sys

import transformers

import palimpsest

T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "dropout_rate": 0}
LLAMA = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
MODELS = {
    "t5": lambda size: transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=size, decoder_start_token_id=0, **T5)
    ),
    "llama": lambda size: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=size, num_attention_heads=4, **LLAMA)
    ),
}
# Models whose batches have the same features.
PRESETS = {"t5": "t5_1_1_small", "llama": "llama_1b"}


class Trainer(transformers.Trainer):
    """transformers' Trainer on the batches of a cache, which are its `train_dataset`."""

    def get_train_dataloader(self):
        return palimpsest.torch.DataLoader(self.train_dataset, workers=1)

    def training_step(self, model, inputs, *others):
        digest = hashlib.sha256(inputs["input_ids"].numpy().tobytes()).hexdigest()
        loss = super().training_step(model, inputs, *others)
        with (pathlib.Path(self.args.output_dir) / "steps.txt").open("a") as file:
            file.write(f"{self.state.global_step + 1} {digest} {loss.item():.6f}\n")
        return loss


def main(model, mixture, cache_dir, output, steps="10"):
    batches = palimpsest.batches(
        mixture,
        cache_dir=cache_dir,
        preset=PRESETS[model],
        batch_size=8,
        lengths={"inputs": 64, "targets": 64} if model == "t5" else {"targets": 64},
        train_steps=int(steps),
    )
    transformers.set_seed(0)
    size = batches.config["model"]["vocab_size"]
    arguments = transformers.TrainingArguments(
        output, max_steps=int(steps), save_steps=3, learning_rate=1e-3, report_to=[],
        lr_scheduler_type="constant", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(MODELS[model](size), arguments, train_dataset=batches)
    # Its state is written last: a checkpoint without it was cut by a kill.
    whole = [state.parent for state in pathlib.Path(output).glob("checkpoint-*/trainer_state.json")]
    last = max(whole, key=lambda folder: int(folder.name.rpartition("-")[2]), default=None)
    pathlib.Path(output).mkdir(exist_ok=True)
    trainer.train(resume_from_checkpoint=last and str(last))


if __name__ == "__main__":
    main(*sys.argv[1:])
