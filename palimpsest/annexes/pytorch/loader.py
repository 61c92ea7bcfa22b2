"""Batches for training loops in PyTorch: `palimpsest.torch.DataLoader`.

    batches = palimpsest.batches("mine_span_corruption", cache_dir="cache", batch_size=128)
    for batch in palimpsest.torch.DataLoader(batches, workers=2):
        model(**batch).loss.backward()

The batches of all ranks together are the trainer's, for any number of ranks and workers.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from palimpsest.annexes.pytorch.tensors import FORMS
from tasks.terminal import extras
from tasks.terminal.command_line import UserError, nearest
from tasks.terminal.flag_fields import shown
from trainer.config import config_changes, stored_config
from trainer.data.run_batches import Batches, whole

with extras.needed("palimpsest.torch", "huggingface"):
    import torch
    from torch import distributed
    from torch.utils import data

__all__ = ["DataLoader", "seq2seq"]


class DataLoader:
    """Batches as dicts of tensors, in the place of a `torch.utils.data.DataLoader`.

    Iteration begins at `state`, the number of batches taken, and `state_dict` and
    `load_state_dict` are torchdata's StatefulDataLoader's: a state of any number of ranks and
    workers can be loaded by any other.

    Attributes:
      batches: the batches of all ranks.
      form: "transformers", arguments of its models; "flat", a decoder's rows as one, for flash
        attention; "features", T5X's names. `palimpsest.annexes.pytorch.tensors` lists the tensors.
      rank, world_size: the part of each batch to give; None is torch.distributed's, or all of it.
      workers: processes that make batches; 0 makes them in this one.
      pin_memory: whether tensors are in memory from which GPUs copy them at once.
      prefetch: batches that each worker makes ahead.

    Other attributes come from the torch DataLoader that reads `batches` one by one. Raises
    UserError unless `world_size` divides the batch.
    """

    def __init__(
        self,
        batches: Batches,
        form: str = "transformers",
        rank: int | None = None,
        world_size: int | None = None,
        workers: int = 0,
        pin_memory: bool = False,
        prefetch: int = 2,
    ):
        if not isinstance(batches, Batches):
            raise UserError(f"batches is {shown(batches)}: it must be palimpsest.batches(…)")
        if form not in [*FORMS]:
            raise UserError(
                f"form={form}{nearest(str(form), FORMS)}: it is one of {', '.join(FORMS)}"
            )
        workers, prefetch = whole("workers", workers), whole("prefetch", prefetch)
        if workers < 0 or prefetch < 1:
            raise UserError("workers must be 0 or more, and prefetch 1 or more")
        if (rank is None) is not (world_size is None):
            raise UserError("give both rank and world_size, or neither")
        if rank is None or world_size is None:
            joined = distributed.is_available() and distributed.is_initialized()
            ranks = (distributed.get_rank(), distributed.get_world_size()) if joined else (0, 1)
            rank, world_size = ranks
        self._batches, self._state = batches.shard(rank, world_size), batches.state
        self._loader: Any = data.DataLoader(
            _Rows(self._batches, form),
            batch_sampler=_Turns(self),
            collate_fn=_only,
            num_workers=workers,
            pin_memory=pin_memory,
            prefetch_factor=prefetch if workers else None,
        )

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self._batches.again:
            self.state = 0
        for batch in self._loader:
            if isinstance(batch, UserError):
                raise batch
            self.state += 1
            yield batch

    @property
    def state(self) -> int:
        """The number of batches taken: the index of the next."""
        return self._state

    @state.setter
    def state(self, taken: int) -> None:
        self._batches.state = taken
        self._state = self._batches.state

    def state_dict(self) -> dict[str, Any]:
        """Returns the state and the settings on which the batches depend."""
        return {"state": self.state, "config": self._batches.config}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a state; raises UserError if its batches so far were not these."""
        try:
            taken, before = state["state"], dict(state["config"])
        except (KeyError, TypeError, ValueError) as error:
            raise UserError("the state is not what DataLoader.state_dict returned") from error
        now = dict(self._batches.config)
        caches = [each.pop("caches", None) for each in (before, now)]
        splits = [each.pop("split", None) for each in (before, now)]
        was, is_now = stored_config(before, "state"), stored_config(now, "batches")
        differ = config_changes(was, is_now, whole("state", taken))
        if caches[0] != caches[1]:
            differ.append("the caches have other plans")
        if splits[0] != splits[1]:
            differ.append(f"split was {splits[0]}, is {splits[1]}")
        if differ:
            raise UserError(f"the state is of other batches: {'; '.join(differ)}")
        self.state = taken

    def explain(self, k: int, row: int) -> list[Any]:
        """Returns the documents of one of this rank's rows; see `Batches.explain`."""
        return self._batches.explain(k, row)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)


class _Rows(data.Dataset[dict[str, Any] | UserError]):
    """A rank's rows of each batch, as tensors."""

    def __init__(self, batches: Batches, form: str):
        self._batches, self._form = batches, form

    def __getitem__(self, k: int) -> dict[str, Any] | UserError:
        try:
            made = FORMS[self._form](self._batches[k])
        except UserError as error:  # torch would add a worker's traceback to its text
            return error
        return {name: torch.from_numpy(array) for name, array in made.items()}


class _Turns:
    """The indices of the batches that are left, each a batch of one."""

    def __init__(self, loader: DataLoader):
        self._loader = loader

    def __iter__(self) -> Iterator[list[int]]:
        k = self._loader.state
        batches = self._loader._batches
        while k < batches.length_or(k + 1):
            yield [k]
            k += 1

    def __len__(self) -> int:
        return len(self._loader) - self._loader.state


def _only(batches: list[Any]) -> Any:
    """Returns the one batch of a list."""
    return batches[0]


def seq2seq(model: Any, batch: Mapping[str, Any]) -> Any:
    """Returns the output of an encoder-decoder of transformers, also for packed rows.

    Its models take one mask for the encoder and for the attention to it, and packed rows need two.
    """
    if "cross_attention_mask" not in batch:
        return model(**batch)
    masks = {"attention_mask": batch["attention_mask"]}
    states = model.get_encoder()(input_ids=batch["input_ids"], **masks)
    others = ("decoder_input_ids", "decoder_attention_mask", "labels")
    given = {name: batch[name] for name in others}
    return model(encoder_outputs=states, attention_mask=batch["cross_attention_mask"], **given)
