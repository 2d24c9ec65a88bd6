{{- define "diag.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride }}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) }}
{{- default $full .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "diag.ownLabels" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "diag.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{ include "diag.ownLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- /* Labels of the pods in which the exporter runs. */}}
{{- define "diag.scrapedLabels" -}}
{{- if eq .Values.mode "sidecar" }}{{ toYaml .Values.sidecar.podLabels }}{{ else }}{{ include "diag.ownLabels" . }}{{ end }}
{{- end }}

{{- /* The address of a runbook, of a list: the base and the page. */}}
{{- define "diag.runbook" -}}
{{- $base := index . 0 | trimSuffix "/" }}{{ $page := index . 1 }}
{{- ternary (replace "{page}" $page $base) (printf "%s/%s.md" $base $page) (contains "{page}" $base) }}
{{- end }}

{{- define "diag.metadata" -}}
name: {{ include "diag.fullname" . }}
namespace: {{ .Release.Namespace }}
labels:
  {{- include "diag.labels" . | nindent 2 }}
{{- end }}

{{- /* What the schema cannot say: values that are right alone and wrong together. */}}
{{- define "diag.checks" -}}
{{- range $name := concat .Values.disabledIncidents (keys .Values.severityOverrides) }}
{{- if not (contains (printf "incident: %s\n" $name) ($.Files.Get "files/diag.rules.yaml")) }}
{{- fail (printf "disabledIncidents, severityOverrides: there is no incident %q; diag incidents lists them" $name) }}
{{- end }}
{{- end }}
{{- if and .Values.siteLabels (not (has .Values.monitor.kind (list "PodMonitor" "ServiceMonitor"))) }}
{{- fail "siteLabels: only a PodMonitor or ServiceMonitor of the chart writes them; set instance in the relabelings of your scrape job" }}
{{- end }}
{{- $url := urlParse .Values.vllm.url }}
{{- if and (eq .Values.mode "standalone") (has $url.hostname (list "127.0.0.1" "localhost" "::1")) }}
{{- fail "vllm.url: in mode standalone no vLLM runs at 127.0.0.1; name the Service of vLLM, such as http://vllm.inference:8000" }}
{{- end }}
{{- if and .Values.networkPolicy.enabled (ne .Values.mode "standalone") }}
{{- fail "networkPolicy.enabled: only in mode standalone; in mode sidecar it would cut off vLLM's own port, in mode daemonset the host's network ignores it" }}
{{- end }}
{{- if and (eq .Values.mode "sidecar") (has .Values.monitor.kind (list "PodMonitor" "ServiceMonitor")) (not .Values.sidecar.podLabels) }}
{{- fail "sidecar.podLabels is empty: name the labels by which Prometheus finds vLLM's pods, or set monitor.kind to None" }}
{{- end }}
{{- if and (eq .Values.mode "sidecar") (eq .Values.monitor.kind "ServiceMonitor") .Values.sidecar.namespaces }}
{{- fail "monitor.kind: a Service selects pods of its own namespace only; install the chart into the namespace of vLLM, or use PodMonitor" }}
{{- end }}
{{- end }}
