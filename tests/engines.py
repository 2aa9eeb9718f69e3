"""The engines under test: named in an environment variable, jax in a process of its own."""

import os

ENGINES = os.environ.get("FUNCACC_TEST_ENGINES", "eager,xla").split(",")
