"""A certificate authority of the test run: servers and clients trust it and nothing else."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from testbed.tools import system_tool


@dataclass(frozen=True)
class KeyPair:
    """A PEM certificate and its private key."""

    certificate: Path
    key: Path


class CertificateAuthority:
    """Makes itself a root in `folder`, and signs certificates by it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._openssl = system_tool("openssl")
        self.certificate = folder / "ca.crt"
        self._key = folder / "ca.key"
        usage = ["-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign,cRLSign"]
        self._run("req", "-x509", *self._new_key(self._key), "-subj", "/CN=testbed", *usage, "-out", self.certificate)

    def issue(
        self, name: str, *, addresses: tuple[str, ...] = (), hosts: tuple[str, ...] = (), organization: str = ""
    ) -> KeyPair:
        """A certificate for `name`; with addresses or hosts it also serves TLS at them."""
        pair = KeyPair(self._folder / f"{name}.crt", self._folder / f"{name}.key")
        subject = f"/O={organization}/CN={name}" if organization else f"/CN={name}"
        alternatives = ",".join([f"DNS:{host}" for host in (name, *hosts)] + [f"IP:{address}" for address in addresses])
        extensions = [
            "-addext", f"subjectAltName={alternatives}",
            "-addext", "basicConstraints=critical,CA:FALSE",
            "-addext", "keyUsage=critical,digitalSignature",
            "-addext", "extendedKeyUsage=serverAuth,clientAuth",
        ]  # fmt: skip
        signer = ["-CA", str(self.certificate), "-CAkey", str(self._key)]
        self._run(
            "req", "-x509", *self._new_key(pair.key), "-subj", subject, *extensions, *signer, "-out", pair.certificate
        )
        return pair

    def key(self, name: str) -> KeyPair:
        """A bare signing key; `certificate` holds its public half."""
        pair = KeyPair(self._folder / f"{name}.pub", self._folder / f"{name}.key")
        self._run("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", pair.key)
        self._run("ec", "-in", pair.key, "-pubout", "-out", pair.certificate)
        return pair

    @staticmethod
    def _new_key(path: Path) -> list[str]:
        curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        return [*curve, "-nodes", "-days", "7", "-keyout", str(path)]

    def _run(self, *arguments: str | Path) -> None:
        subprocess.run([self._openssl, *arguments], check=True, capture_output=True)
