"""Files that only one process writes."""

import pytest

from aurora.errors import BadInput
from aurora.io.files import open_locked


def test_a_file_is_open_once_at_a_time(tmp_path):
    path = tmp_path / "file"
    with open_locked(path):
        with pytest.raises(BadInput, match="file: another run writes it"):
            open_locked(path)
        path.unlink()
        with open_locked(path) as other:  # a new file
            other.write(b"x")
    with open_locked(path) as again:
        assert again.tell() == 1
    with pytest.raises(BadInput, match="no/file: cannot be written: No such file or directory"):
        open_locked(tmp_path / "no" / "file")
