"""Writes what is generated from the models: the CRD and the manifest reference. `--check` fails where a file has drifted."""

import argparse
import sys
from pathlib import Path

import yaml

from headframe_api.crd import build_crd
from headframe_api.reference import build_reference

ROOT = Path(__file__).parent.parent


def generated_files() -> dict[Path, str]:
    """The content that each generated file must have, by its path."""
    header = "# Generated from the models in api/headframe_api by `make generate`; do not edit.\n"
    crd = yaml.safe_dump(build_crd(), sort_keys=False, width=120, allow_unicode=True)
    return {
        ROOT / "crds/headframe.dev_extractionjobs.yaml": header + crd,
        ROOT / "docs/manifest.md": build_reference((ROOT / "examples/full.yaml").read_text()),
    }


def drifted() -> list[Path]:
    """Generated files that differ from what the models say now."""
    return [path for path, text in generated_files().items() if not path.exists() or path.read_text() != text]


def main() -> int:
    """Write the files, or with --check only compare them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a file has drifted")
    if parser.parse_args().check:
        stale = [str(path.relative_to(ROOT)) for path in drifted()]
        if stale:
            print(f"generated files have drifted: {', '.join(stale)}; run make generate", file=sys.stderr)  # noqa: T201
        return 1 if stale else 0
    for path, text in generated_files().items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
