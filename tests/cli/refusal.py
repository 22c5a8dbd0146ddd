"""What every refusal looks like."""

import re


def refused(result, *patterns):
    """One sentence on the error stream, exit code 2, no traceback, nothing on the output."""
    code, out, err = result
    assert code == 2
    assert err.startswith("aurora: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert "wrote" not in out
    for pattern in patterns:
        assert re.search(pattern, err), err
