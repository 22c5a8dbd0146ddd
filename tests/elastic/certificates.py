"""Certificates of the hosts of a run, as users make them."""

import subprocess
import threading
from pathlib import Path
from tempfile import mkdtemp

from aurora.elastic.host_connection import Certificate, load_certificate

_made: dict[str, Path] = {}
_making = threading.Lock()


def certificate_file(name: str = "run") -> Path:
    """Returns a file with a certificate and its key; the same one for the same name."""
    with _making:
        if name not in _made:
            file = Path(mkdtemp(prefix="aurora-certificate-")) / f"{name}.pem"
            command = ["openssl", "req", "-x509", "-newkey", "ed25519", "-nodes", "-days", "30", "-subj", "/CN=aurora"]
            subprocess.run([*command, "-keyout", file, "-out", file], check=True, capture_output=True)
            _made[name] = file
        return _made[name]


def certificate(name: str = "run") -> Certificate:
    """Returns a certificate; the same one for the same name."""
    return load_certificate(str(certificate_file(name)))
