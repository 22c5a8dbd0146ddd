"""Digests of models' files, by which hosts see that they have the same model."""

import hashlib
from pathlib import Path

from aurora.errors import BadInput
from aurora.models.hub import model_folder

MODEL_FILES = {".json", ".safetensors"}  # what weights and answers depend on


def model_digest(model: str | Path) -> str:
    """Returns the sha256 of a model's configuration and weights, as hexadecimal digits. All of its files are read.

    Args:
        model: the model's folder, or its name in the local hub cache.

    Raises:
        BadInput: if there is no such model, or a file cannot be read.
    """
    digest, folder = hashlib.sha256(), model_folder(model)
    try:
        for path in sorted(each for each in folder.iterdir() if each.suffix in MODEL_FILES and each.is_file()):
            with path.open("rb") as file:
                digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    except OSError as error:
        raise BadInput(f"{folder}: cannot be read: {error.strerror}") from None
    return digest.hexdigest()
