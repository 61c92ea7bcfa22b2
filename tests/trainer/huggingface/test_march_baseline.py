"""MARCH's first baseline is transformers' T5: its logits, and a step of torch's AdamW."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.trainer.huggingface.conftest import random_batch, random_params
