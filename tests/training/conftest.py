"""Fixtures of the tests of training."""

from __future__ import annotations

import pytest


@pytest.fixture
def mixed_float16():
    """Models that are built have loss scaling."""
    import keras

    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy("float32")
