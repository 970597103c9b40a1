"""Builds container images without a registry: a base made by debootstrap, and the project's own Dockerfile on top of it.

Public base images cannot be pulled everywhere, so a Dockerfile takes its base as a build argument and gets ours in tests.
An image's tag is a digest of all that goes into it; what is built stays under `~/.cache/headframe/buildah`, so the same
inputs are never built twice.
"""

import hashlib
import json
import os
import shutil
import ssl
import subprocess
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from testbed.tools import CACHE, locked, need_root, system_tool

_BASE = {"suite": "bookworm", "variant": "minbase", "include": "ca-certificates,gpgv,python3,python3-venv"}
_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_CA_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"  # where Debian's programs look for it
_KEPT = 3  # images of one name; they share most layers, but a disk is finite
_STORE = CACHE / "buildah"
_COMPRESSED_BYTES = 100e6  # new layers are compressed in an OCI archive: quick for less, slow for more


def base_image(*packages: str) -> str:
    """A Debian with Python and perhaps more packages, made by debootstrap; return its name. About a minute the first time."""
    included = ",".join([_BASE["include"], *packages])
    name = f"localhost/testbed/debian:{_digest(repr((_BASE | {'include': included}, _PATH)))}"
    with locked(_STORE / "storage"):
        if not _exists(name):
            with TemporaryDirectory(dir=_STORE, prefix=".debian-") as folder:
                root = Path(folder) / "root"
                options = [f"--variant={_BASE['variant']}", f"--include={included}"]
                _run([system_tool("debootstrap"), *options, _BASE["suite"], root])
                for waste in ("var/cache/apt/archives", "var/lib/apt/lists"):
                    shutil.rmtree(root / waste)
                    (root / waste / "partial").mkdir(parents=True)
                _commit(name, root, command="bash")
    return name


def busybox_image() -> str:
    """A few hundred kilobytes: busybox and nothing else, for pods that wait or print; return its name. (Its wget crashes.)"""
    program = system_tool("busybox", "busybox-static")
    name = f"localhost/testbed/busybox:{_digest(_PATH + _digest_of_file(program))}"
    with locked(_STORE / "storage"):
        if not _exists(name):
            with TemporaryDirectory(dir=_STORE, prefix=".busybox-") as folder:
                binaries = Path(folder) / "root" / "bin"
                binaries.mkdir(parents=True)
                shutil.copy(program, binaries / "busybox")
                for applet in _run([program, "--list"]).split():
                    if applet != "busybox":
                        (binaries / applet).symlink_to("busybox")
                _commit(name, binaries.parent, command="sleep infinity")
    return name


def program_image(program: Path, path: str) -> str:
    """One statically linked program at `path` (without the first slash) and nothing else; return the image's name."""
    name = f"localhost/testbed/{program.name}:{_digest(path + _digest_of_file(program))}"
    with locked(_STORE / "storage"):
        if not _exists(name):
            with TemporaryDirectory(dir=_STORE, prefix=".program-") as folder:
                root = Path(folder) / "root"
                (root / path).parent.mkdir(parents=True)
                shutil.copy(program, root / path)
                _commit(name, root, command=f"/{path}")
    return name


def build_image(
    name: str,
    root: Path,
    *,
    dockerfile: str = "Dockerfile",
    paths: Sequence[str] = (".",),
    target: str | None = None,
    arguments: Mapping[str, str] | None = None,
) -> str:
    """Build a Dockerfile of the repository at `root` by buildah; return the image's full name, `localhost/NAME:DIGEST`.

    The context is what git would commit of `paths`, so no leftover of the working tree gets in, and a change elsewhere
    builds nothing. RUN steps share the host's network and trust its certificates, which do not stay in the image.
    """
    options = [f"--build-arg={key}={value}" for key, value in sorted((arguments or {}).items())]
    options += [f"--target={target}"] if target else []
    files = _files(root, [dockerfile, *paths])
    inputs = [(str(file), (root / file).stat().st_mode & 0o111, _digest_of_file(root / file)) for file in files]
    full_name = f"localhost/{name}:{_digest(repr((inputs, options)))}"
    with locked(_STORE / "storage"):
        if not _exists(full_name):
            _run([*_buildah("rm"), "--all"])  # what a build that failed or was killed left: gigabytes
            with TemporaryDirectory(dir=_STORE, prefix=".context-") as folder:
                context = Path(folder) / "context"
                for file in files:
                    (context / file).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(root / file, context / file)
                how = ["--layers", "--pull-never", "--network=host", _trust(), *options]
                _run([*_buildah("build"), *how, "--file", context / dockerfile, "--tag", full_name, context])
            for old in known_images(f"localhost/{name}")[_KEPT:]:
                _run([*_buildah("rmi"), old])
    return full_name


def known_images(repository: str) -> list[str]:
    """The images of one repository (`localhost/NAME`) that are built, the newest first."""
    listed = _run([*_buildah("images"), "--format={{.Name}}:{{.Tag}}"]).split()
    return [name for name in listed if name.startswith(f"{repository}:")]


@contextmanager
def saved_image(name: str, known: Path) -> Iterator[IO[bytes]]:
    """The image as an archive that containerd imports.

    `known` is the folder in which containerd keeps layers, uncompressed, under their SHA-256. Where only small layers are
    new, the archive holds nothing but them: gigabytes of dependencies are not read again for a change of our code.
    """
    manifest = json.loads(_run([*_buildah("inspect"), "--type=image", "--format={{.Manifest}}", name]))
    sizes = {layer["digest"].removeprefix("sha256:"): layer["size"] for layer in manifest["layers"]}
    if sum(size for digest, size in sizes.items() if not (known / digest).exists()) < _COMPRESSED_BYTES:
        with (
            TemporaryDirectory(dir=CACHE, prefix=".archive-") as folder,
            _archive_without(known, name, Path(folder)).open("rb") as archive,
        ):
            yield archive
        return
    whole = [*_buildah("push"), "--quiet", name, f"docker-archive:/dev/stdout:{name}"]
    with subprocess.Popen(whole, stdout=subprocess.PIPE, env=_environment()) as pushed:
        if pushed.stdout:
            yield pushed.stdout
    if pushed.returncode:
        raise RuntimeError(f"could not write {name} as an archive")


def _archive_without(known: Path, name: str, folder: Path) -> Path:
    """An OCI archive without the blobs in `known`: they are linked into the layout before, and left out of the archive."""
    layout, blobs = folder / "layout", folder / "layout/blobs/sha256"
    blobs.mkdir(parents=True)
    for blob in known.glob("*"):
        (blobs / blob.name).hardlink_to(blob)
    _run([*_buildah("push"), "--quiet", name, f"oci:{layout}:{name.rsplit(':', 1)[1]}"])
    with tarfile.open(folder / "image.tar", "w") as archive:
        for file in layout.rglob("*"):
            if file.is_file() and file.stat().st_nlink == 1:
                archive.add(file, file.relative_to(layout))
    return folder / "image.tar"


def _trust() -> str:
    """A mount for RUN steps: the host's certificates."""
    bundle = os.environ.get("SSL_CERT_FILE") or ssl.get_default_verify_paths().cafile or _CA_BUNDLE
    return f"--volume={bundle}:{_CA_BUNDLE}:ro"


def _files(root: Path, paths: Sequence[str]) -> list[Path]:
    """The files under `paths` that git tracks or would add, and that exist."""
    listed = _run(["git", "-C", root, "ls-files", "--cached", "--others", "--exclude-standard", "-z", "--", *paths])
    return sorted({Path(name) for name in listed.split("\0") if name and (root / name).is_file()})


def _commit(name: str, root: Path, command: str) -> None:
    container = _run([*_buildah("from"), "scratch"]).strip()
    try:
        _run([*_buildah("copy"), "--quiet", container, root, "/"])
        _run([*_buildah("config"), "--env", _PATH, "--cmd", command, container])
        _run([*_buildah("commit"), "--quiet", container, name])
    finally:
        _run([*_buildah("rm"), container])


def _exists(name: str) -> bool:
    result = subprocess.run(
        [*_buildah("inspect"), "--type=image", name], env=_environment(), capture_output=True, check=False
    )
    return result.returncode == 0


def _buildah(command: str) -> list[str]:
    need_root()
    store = [f"--root={_STORE / 'storage'}", f"--runroot={_STORE / 'run'}", "--storage-driver=overlay"]
    return ["nice", "-n", "10", str(system_tool("buildah")), *store, command]


def _environment() -> dict[str, str]:
    return os.environ | {"BUILDAH_ISOLATION": "chroot"}


def _run(command: Sequence[str | Path]) -> str:
    result = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
    if result.returncode != 0:
        words = " ".join(map(str, command))
        raise RuntimeError(f"`{words}` failed:\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}")
    return result.stdout


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _digest_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
