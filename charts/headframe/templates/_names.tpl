{{- define "headframe.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "headframe.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 53 | trimSuffix "-" }}
{{- else if contains (include "headframe.name" .) .Release.Name }}
{{- .Release.Name | trunc 53 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "headframe.name" .) | trunc 53 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "headframe.labels" -}}
{{ include "headframe.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "headframe.selector" -}}
app.kubernetes.io/name: {{ include "headframe.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{- /* The labels that the operator gives to its workers. */}}
{{- define "headframe.workerSelector" -}}
app.kubernetes.io/name: headframe
app.kubernetes.io/component: worker
app.kubernetes.io/managed-by: headframe-operator
{{- end }}

{{- define "headframe.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "headframe.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- required "serviceAccount.name: name an existing ServiceAccount, or set serviceAccount.create" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- /* image: a dict of registry, repository, tag, digest; version: what an empty tag stands for. */}}
{{- define "headframe.image" -}}
{{- with .image.registry }}{{ . }}/{{ end }}{{ .image.repository }}
{{- if .image.digest }}@{{ .image.digest }}{{ else }}:{{ default .version .image.tag }}{{ end }}
{{- end }}

{{- define "headframe.testLabels" -}}
{{- include "headframe.labels" . | replace "app.kubernetes.io/component: operator" "app.kubernetes.io/component: test" }}
{{- end }}

{{- /* The variable in which every pod of the namespace finds the Service's address. */}}
{{- define "headframe.serviceHost" -}}
{{- printf "%s_SERVICE_HOST" (include "headframe.fullname" .) | upper | replace "-" "_" }}
{{- end }}
