"""A canary for each private part that is borrowed: one line says which is gone or changed."""

from __future__ import annotations

import pytest

from kerasmem.compat.borrowing import Borrowed, NotAvailableError, all_borrowed

ALL = all_borrowed()


@pytest.mark.parametrize("borrowed", ALL, ids=lambda each: f"{each.module}:{each.name}")
def test_it_is_there(borrowed):
    pytest.importorskip(borrowed.module.partition(".")[0])
    assert borrowed.exists()


def test_a_part_that_is_gone_is_named():
    gone = Borrowed("json:dumped", feature="an example")
    assert not gone.exists()
    with pytest.raises(NotAvailableError, match=r"an example does not work with json, which lacks json\.dumped"):
        gone.get()
