"""A run's configuration: typed fields, presets, and stored files. Invalid values are `Rejected`."""

from trainer.config.data import DataConfig, LengthsConfig, MixingConfig, VocabularyConfig
from trainer.config.evaluation import (
    BEST_METRICS,
    LOWER_IS_BETTER,
    CheckpointConfig,
    EvaluationConfig,
    PlateauConfig,
    StoppingConfig,
)
from trainer.config.loss import NORMALIZERS, LossConfig
from trainer.config.mesh import MeshConfig
from trainer.config.optimizer import OptimizerConfig
from trainer.config.processes import ProcessesConfig
from trainer.config.resuming import changes, config_changes
from trainer.config.run import Config, MetricsConfig
from trainer.config.stored import (
    CONFIG_FILE,
    as_batches,
    as_stored,
    load_config,
    load_record,
    save_config,
    stored_config,
    stored_model,
)

__all__ = [
    "BEST_METRICS",
    "CONFIG_FILE",
    "LOWER_IS_BETTER",
    "NORMALIZERS",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "EvaluationConfig",
    "LengthsConfig",
    "LossConfig",
    "MeshConfig",
    "MetricsConfig",
    "MixingConfig",
    "OptimizerConfig",
    "PlateauConfig",
    "ProcessesConfig",
    "StoppingConfig",
    "VocabularyConfig",
    "as_batches",
    "as_stored",
    "changes",
    "config_changes",
    "load_config",
    "load_record",
    "save_config",
    "stored_config",
    "stored_model",
]
