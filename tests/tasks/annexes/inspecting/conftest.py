"""Builds, as for the tests of pipelines."""

from tests.pipeline.conftest import build as build
from tests.pipeline.conftest import cache as cache
from tests.pipeline.conftest import corpus as corpus
from tests.pipeline.conftest import documents as documents
from tests.pipeline.conftest import flags as flags
from tests.pipeline.conftest import vocabulary as vocabulary
