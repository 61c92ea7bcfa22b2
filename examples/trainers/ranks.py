"""Trains a T5 of transformers with plain PyTorch on any number of ranks; run it again to resume.

torchrun --nproc_per_node=2 examples/trainers/ranks.py TASK CACHE_DIR OUTPUT [STEPS]

Another number of ranks goes on with the same batches. OUTPUT.losses has the loss of each update.
"""

import itertools
import pathlib
import sys

import torch
import transformers
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import palimpsest

T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "dropout_rate": 0}


def main(task, cache_dir, output, steps="6"):
    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    batches = palimpsest.batches(
        task, cache_dir=cache_dir, batch_size=8, lengths={"inputs": 64, "targets": 18}
    )
    loader = palimpsest.torch.DataLoader(batches)
    size = batches.config["model"]["vocab_size"]
    config = transformers.T5Config(vocab_size=size, decoder_start_token_id=0, **T5)
    model = DistributedDataParallel(transformers.T5ForConditionalGeneration(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    parts = {"model": model.module, "optimizer": optimizer, "data": loader}
    if pathlib.Path(output).exists():
        for name, state in torch.load(output).items():
            parts[name].load_state_dict(state)
    for batch in itertools.islice(loader, int(steps) - loader.state):
        targets = (batch["labels"] != -100).sum()
        mean = model(**batch).loss
        distributed.all_reduce(targets_of_all := targets.clone())
        # DDP averages the gradients of ranks, whose rows have different numbers of targets.
        share = mean * targets / targets_of_all
        optimizer.zero_grad()
        (share * distributed.get_world_size()).backward()
        optimizer.step()
        distributed.all_reduce(loss := share.detach())
        if distributed.get_rank() == 0:
            torch.save({name: part.state_dict() for name, part in parts.items()}, output)
            with pathlib.Path(f"{output}.losses").open("a") as file:
                file.write(f"{loader.state} {loss.item():.6f}\n")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
