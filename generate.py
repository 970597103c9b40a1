"""Writes what follows from the code: the CRD, the manifest reference, the chart's CRD, rules, alerts and dashboards.

`--check` writes nothing and fails where a file has drifted.
"""

import argparse
import sys
from pathlib import Path

import yaml

from headframe_api.crd import build_crd
from headframe_api.reference import build_reference
from headframe_operator.permissions import RULES
from monitoring.alerts import alert_groups
from monitoring.extraction_jobs import extraction_jobs_dashboard
from monitoring.panels import to_json
from monitoring.workers import workers_dashboard

ROOT = Path(__file__).parent
CHART = ROOT / "charts/headframe"

_FROM_MODELS = "# Generated from the models in api/headframe_api by `make generate`; do not edit.\n"
_CRD_HEADER = """\
{{- /* Generated from the models in api/headframe_api by `make generate`; do not edit. */}}
{{- if .Values.crds.enabled }}
"""
_CRD_METADATA = """\
metadata:
  name: extractionjobs.headframe.dev
  labels:
    {{- include "headframe.labels" . | nindent 4 }}
  {{- if .Values.crds.keep }}
  annotations:
    helm.sh/resource-policy: keep
  {{- end }}
"""
_RULES = """\
{{{{- /* Generated from operator/headframe_operator/permissions.py by `make generate`; do not edit. */}}}}
{{{{- define "headframe.operatorRules" -}}}}
{rules}
{{{{- end }}}}
"""
_GENERATED = "# Generated from monitoring/alerts.py by `make generate`; do not edit.\n"


def generated_files() -> dict[Path, str]:
    """The content that each generated file must have, by its path."""
    return {
        ROOT / "crds/headframe.dev_extractionjobs.yaml": _FROM_MODELS + _dump(build_crd()),
        ROOT / "docs/manifest.md": build_reference((ROOT / "examples/full.yaml").read_text()),
        CHART / "templates/crd.yaml": _crd_template(),
        CHART / "templates/_operator-rules.tpl": _RULES.format(rules=_dump(list(RULES)).rstrip()),
        CHART / "files/alerts.yaml": _GENERATED + _dump(alert_groups()),
        CHART / "files/dashboards/extractionjobs.json": to_json(extraction_jobs_dashboard()),
        CHART / "files/dashboards/workers.json": to_json(workers_dashboard()),
    }


def drifted() -> list[Path]:
    """Generated files that differ from what the code says now."""
    return [path for path, text in generated_files().items() if not path.exists() or path.read_text() != text]


def _crd_template() -> str:
    crd = build_crd()
    name = crd["metadata"]["name"]
    head, tail = _dump(crd).split(f"metadata:\n  name: {name}\n")
    if "{{" in head + tail:
        raise ValueError("a description of the models holds {{, which Helm would run")
    return _CRD_HEADER + head + _CRD_METADATA + tail + "{{- end }}\n"


def _dump(document: object) -> str:
    return yaml.safe_dump(document, sort_keys=False, width=120, allow_unicode=True)


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
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
