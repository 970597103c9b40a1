{{- /* Generated from operator/headframe_operator/permissions.py by `make generate`; do not edit. */}}
{{- define "headframe.operatorRules" -}}
- apiGroups:
  - headframe.dev
  resources:
  - extractionjobs
  verbs:
  - list
  - watch
  - delete
- apiGroups:
  - headframe.dev
  resources:
  - extractionjobs/status
  verbs:
  - patch
- apiGroups:
  - batch
  resources:
  - jobs
  verbs:
  - list
  - watch
  - create
  - patch
  - delete
- apiGroups:
  - ''
  resources:
  - pods
  verbs:
  - list
  - watch
- apiGroups:
  - ''
  resources:
  - events
  verbs:
  - list
  - create
- apiGroups:
  - kueue.x-k8s.io
  resources:
  - workloads
  verbs:
  - list
  - patch
{{- end }}
