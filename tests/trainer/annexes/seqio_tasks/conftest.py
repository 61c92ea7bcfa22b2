"""Documents and a vocabulary, as for the tests of pipelines."""

from tests.pipeline.conftest import documents as documents
from tests.pipeline.conftest import vocabulary as vocabulary
