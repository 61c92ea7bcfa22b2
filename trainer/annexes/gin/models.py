"""Gin files that describe the model of a checkpoint, and need not describe a run."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import field
from trainer.model.config import ModelConfig

# Settings that a run requires but model-only gin files lack; models do not depend on them.
_OF_A_RUN = ("--task=none", "--model_dir=none", "--train_steps=10000")
_T5X_RUN = "t5x/configs/runs/pretrain.gin"
_T5X_BINDINGS = ("DROPOUT_RATE=0.0", "TASK_FEATURE_LENGTHS={'inputs': 512, 'targets': 114}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelGin:
    """Gin files, for checkpoints of T5X and Mesh TensorFlow without config.gin beside them."""

    FLAG: ClassVar[str] = "--gin_file"
    # What T5X and Mesh TensorFlow leave beside checkpoints.
    BESIDE: ClassVar[tuple[str, ...]] = ("config.gin", "operative_config.gin")

    gin_file: tuple[str, ...] = field(
        (), "a gin file of the model; may be repeated", metavar="FILE", repeated=True
    )
    gin_search_paths: tuple[str, ...] = field(
        (),
        "folders to search for gin files and for the files that they include",
        metavar="DIR,DIR",
        repeated=True,
    )
    gin_param: tuple[str, ...] = field(
        (),
        "binding that overrides the files; --gin.NAME=VALUE does the same",
        metavar="NAME=VALUE",
        repeated=True,
        aliases=("gin.*",),
    )

    @property
    def files(self) -> tuple[str, ...]:
        if self.gin_param and not self.gin_file:
            raise UserError(f"--gin.{self.gin_param[0]} needs a --gin_file")
        return self.gin_file

    def model(self, files: Sequence[str]) -> ModelConfig:
        try:
            return self._model(files)
        except UserError as error:
            try:
                return self._model([_T5X_RUN, *files], *_T5X_BINDINGS)
            except UserError:
                raise error from None

    def _model(self, files: Sequence[str], *bindings: str) -> ModelConfig:
        from trainer.annexes.gin import recipe

        search = [path for paths in self.gin_search_paths for path in paths.split(",")]
        flags = [*bindings, *self.gin_param]
        return recipe.load(files, search, flags, None, _OF_A_RUN).config.model
