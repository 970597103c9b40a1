{{- /* The operator's environment: operator/headframe_operator/settings.py. */}}
{{- define "headframe.settings" -}}
- name: HEADFRAME_OPERATOR_WORKER_IMAGE
  value: {{ include "headframe.image" (dict "image" .Values.worker.image "version" .Chart.AppVersion) | quote }}
- name: HEADFRAME_OPERATOR_IMAGE_PULL_POLICY
  value: {{ .Values.worker.image.pullPolicy }}
{{- with .Values.namespaces }}
- name: HEADFRAME_OPERATOR_NAMESPACES
  value: {{ join "," . | quote }}
{{- end }}
{{- with .Values.worker.defaults }}
- name: HEADFRAME_OPERATOR_WORKER_DEFAULTS
  value: {{ toJson . | quote }}
{{- end }}
- name: HEADFRAME_OPERATOR_GPU_RESOURCE
  value: {{ .Values.worker.gpuResource | quote }}
- name: HEADFRAME_OPERATOR_CPU_STAGE_RESOURCES
  value: {{ toJson .Values.worker.cpuStageResources | quote }}
- name: HEADFRAME_OPERATOR_POD_USER_ID
  value: {{ .Values.worker.userId | toString | replace "<nil>" "" | quote }}
- name: HEADFRAME_OPERATOR_TERMINATION_GRACE_SECONDS
  value: {{ .Values.worker.terminationGraceSeconds | quote }}
- name: HEADFRAME_OPERATOR_SHARED_MEMORY
  value: {{ .Values.worker.sharedMemory | quote }}
{{- range $name, $value := .Values.settings }}
- name: HEADFRAME_OPERATOR_{{ $name | snakecase | upper }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}
