"""A lighthouse for members."""

import pytest


@pytest.fixture
def lighthouse():
    from aurora.elastic.lighthouse import Lighthouse

    with Lighthouse() as found:
        yield found
