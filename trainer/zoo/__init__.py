"""Parts of models from single projects, registered as those of a user's module are. No JAX.

Importing this package makes them values of the fields of `ModelConfig`.
"""

from trainer.zoo import march as march
from trainer.zoo import primer as primer
from trainer.zoo import sparse_layouts as sparse_layouts
from trainer.zoo import t5_experiments as t5_experiments
