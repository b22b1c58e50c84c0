"""The museum's page of the site."""

from __future__ import annotations

import sys

import pytest

from bfc_tools.museum.collection import all_cases


def test_the_page_has_every_case():
    pytest.importorskip("sphinx")
    sys.modules.pop("museum", None)
    from museum import given_up, museum

    page = museum({"pytorch#193400": all_cases()["pytorch#193400"]})
    assert page.count("<tbody") == 1
    assert page.count("data:image/png") == 2
    assert "14,060 MiB" in page
    assert given_up().startswith("<table>")
