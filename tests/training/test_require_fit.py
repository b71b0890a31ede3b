"""`require_fit` refuses what cannot fit before it trains."""

from __future__ import annotations

import keras
import pytest

import kerasmem
from kerasmem.errors import DoesNotFitError

pytestmark = pytest.mark.usefixtures("loaded_python")


def test_require_fit_tells_what_is_missing():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(500_000)], name="wide")
    model.compile("adam", "mse")
    assert kerasmem.require_fit(model, batch_size=4, device="16GB").device.verdict == "fits"
    with pytest.raises(DoesNotFitError, match=r"'wide' at batch 4 needs .* by the estimate \(.*of 20.0 MiB available"):
        kerasmem.require_fit(model, batch_size=4, device="20MiB")
    with pytest.raises(DoesNotFitError, match=r"'wide' at batch 4,096 needs .* by the estimate \(.*of 1.00 GiB"):
        kerasmem.require_fit(model, batch_size=4096, device="1GiB")
