"""Certificates for tests: a CA, and what it signs."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

__all__ = ["Authority"]

_YEAR = datetime.timedelta(days=365)


class Authority:
    """`issue` writes a certificate and its key (0600) as PEM files; `certificate` is the CA's."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._usable = x509.BasicConstraints(ca=True, path_length=None)
        self.certificate = directory / f"{name}.pem"
        made = self._sign(self._name, self._key, self._usable)
        self.certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str) -> tuple[Path, Path]:
        """(certificate, key), good for 127.0.0.1 and localhost."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        made = self._sign(subject, key, x509.BasicConstraints(ca=False, path_length=None))
        paths = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        paths[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
        paths[1].touch(mode=0o600)
        paths[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return paths

    def _sign(self, subject, key, usage):
        now = datetime.datetime.now(datetime.UTC)
        hosts = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _YEAR)
            .not_valid_after(now + _YEAR)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectAlternativeName(hosts), critical=False)
            .sign(self._key, hashes.SHA256())
        )
