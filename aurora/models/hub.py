"""Finds model folders in the local Hugging Face cache by model name, and computes digests of model files and routers."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from aurora.errors import BadInput, need
from aurora.io.files import check_ends, shipped
from aurora.io.model_configs import HUB_NAME

if TYPE_CHECKING:
    import torch

MODEL_FILES = {".json", ".safetensors"}  # what weights and answers depend on
ROUTER = re.compile(r"(^|\.)(gate|router)\.(\w+\.)?weight$")  # the name of a router's weights


def model_folder(name: str | Path, revision: str | None = None) -> Path:
    """Returns the local folder of a model, without any download.

    Args:
        name: the folder, the name of a shipped model, or the model's name in the local Hugging Face cache, such as "org/model".
        revision: branch, tag or commit of a cached model; None: the main branch.

    Raises:
        BadInput: if there is no such folder, and no such model in the cache.
        MissingDependency: if huggingface_hub is not installed.
    """
    if str(name) and os.path.exists(Path(name)):
        check_ends(*Path(name).glob("*"))
        return Path(name)
    if Path(name).name == str(name) != "" and (folder := shipped(f"models/{name}")).is_dir():
        return folder
    if HUB_NAME.fullmatch(str(name)):
        need("huggingface_hub")
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        try:
            return Path(snapshot_download(str(name), revision=revision, local_files_only=True))
        except (HFValidationError, LocalEntryNotFoundError):
            pass
    raise BadInput(f"{name or repr(name)}: no such folder, and no model of this name in the local hub cache")


def model_digest(model: str | Path) -> str:
    """Returns the sha256 of a model's configuration and weights, as hexadecimal digits. Files are read again once they change.

    Args:
        model: the model's folder, or its name in the local hub cache.

    Raises:
        BadInput: if there is no such model, or a file cannot be read.
    """
    folder = model_folder(model)
    try:
        paths = sorted(entry for entry in folder.iterdir() if entry.suffix in MODEL_FILES and entry.is_file())
        stats = [(path, path.stat()) for path in paths]
        return _digest_of(tuple((path, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns) for path, at in stats))
    except OSError as error:
        raise BadInput(f"{folder}: cannot be read: {error.strerror}") from None


@lru_cache(maxsize=8)
def _digest_of(files: tuple[tuple[Path, int, int, int, int], ...]) -> str:
    """The digest of files that have not changed: read again once an inode, a size or a time is another one."""
    digest = hashlib.sha256()
    for path, *_ in files:
        with path.open("rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def router_fingerprint(routers: Iterable[torch.Tensor]) -> str:
    """Returns SHA-256 digests of the router weights rounded to float32, bfloat16 and float16, joined by dots.

    Two loads of a model in different precisions share at least one digest, by which `aurora.types.model_identity.same_model`
    recognises them.

    Args:
        routers: the weights of the layers' routers, in sequence.
    """
    import torch

    precisions = (torch.float32, torch.bfloat16, torch.float16)
    hashes = [hashlib.sha256() for _ in precisions]
    for weight in routers:
        for sha, dtype in zip(hashes, precisions, strict=True):
            sha.update(weight.to("cpu", dtype).to(torch.float32).contiguous().numpy().tobytes())
    return ".".join(sha.hexdigest() for sha in hashes)
