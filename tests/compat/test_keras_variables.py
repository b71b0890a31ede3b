"""What is borrowed of variables that a signature does not show."""

from __future__ import annotations

import keras
import pytest

from kerasmem.compat.keras_variables import give_value, has_value


def test_a_variable_without_a_value_is_known():
    with keras.StatelessScope():
        variable = keras.Variable(keras.initializers.Ones(), shape=(2,), dtype="float32")
        assert not has_value(variable)
        with pytest.raises(ValueError, match="stateless scope"):  # Keras's own refusal to give it one in here
            give_value(variable)
    assert has_value(variable)  # Keras gives it one where the scope ends
    give_value(variable)
