"""Parts from single projects, registered on import like parts from a user's module. No JAX."""

from trainer.zoo import march as march
from trainer.zoo import primer as primer
from trainer.zoo import sparse_layouts as sparse_layouts
from trainer.zoo import t5_experiments as t5_experiments
from trainer.zoo import t5gemma as t5gemma
from trainer.zoo import transient_global as transient_global
from trainer.zoo import windows as windows
