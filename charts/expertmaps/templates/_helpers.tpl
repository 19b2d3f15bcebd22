{{- define "expertmaps.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "expertmaps.fullname" -}}
{{- $name := include "expertmaps.name" . }}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains $name .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "expertmaps.selectorLabels" -}}
app.kubernetes.io/name: {{ include "expertmaps.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "expertmaps.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 }}
{{ include "expertmaps.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "expertmaps.operatorAccount" -}}
{{- default (printf "%s-operator" (include "expertmaps.fullname" .)) .Values.serviceAccounts.operator.name }}
{{- end }}

{{/* One watched namespace a line; the release's own if none is named. */}}
{{- define "expertmaps.namespaces" -}}
{{- range (default (list .Release.Namespace) .Values.watchNamespaces | uniq | sortAlpha) }}
{{ . }}
{{- end }}
{{- end }}

{{/* An image: expects a dict of image and chart. */}}
{{- define "expertmaps.image" -}}
{{- if .image.digest }}
{{- printf "%s@%s" .image.repository .image.digest }}
{{- else }}
{{- printf "%s:%s" .image.repository (default .chart.AppVersion .image.tag) }}
{{- end }}
{{- end }}

{{- define "expertmaps.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- end }}
