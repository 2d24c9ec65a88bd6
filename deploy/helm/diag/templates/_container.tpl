{{- define "diag.image" -}}
{{- $repository := required "image.repository is empty: build deploy/Containerfile, push the image, and name it here" .Values.image.repository }}
{{- with .Values.image.digest }}{{ $repository }}@{{ . }}{{ else }}{{ $repository }}:{{ default .Chart.AppVersion .Values.image.tag }}{{ end }}
{{- end }}

{{- /* Not empty where the exporter reads a log. */}}
{{- define "diag.log" -}}
{{- if and .Values.log.file (or (eq .Values.mode "sidecar") (and (eq .Values.mode "daemonset") .Values.log.hostPath)) -}}
/log/{{ .Values.log.file }}
{{- end }}
{{- end }}

{{- define "diag.listen" -}}
{{- $host := ternary "$(HOST_IP)" .Values.listen (eq .Values.mode "daemonset") }}
{{- printf "%s:%v" (ternary (printf "[%s]" $host) $host (contains ":" $host)) .Values.port }}
{{- end }}

{{- define "diag.containerSecurityContext" -}}
{{- $context := deepCopy .Values.containerSecurityContext }}
{{- if .Values.ptrace }}
{{- $capabilities := dict "add" (list "SYS_PTRACE") "drop" (list "ALL") }}
{{- $context = mergeOverwrite $context (dict "runAsNonRoot" false "runAsUser" 0 "runAsGroup" 0 "capabilities" $capabilities) }}
{{- end }}
{{- toYaml $context }}
{{- end }}

{{- define "diag.container" -}}
name: diag
image: {{ include "diag.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
args:
  - exporter
  - --vllm
  - {{ .Values.vllm.url | quote }}
  {{- with include "diag.log" . }}
  - --log
  - {{ . }}
  - --log-timezone
  - {{ $.Values.log.timezone }}
  {{- end }}
  - --listen
  - {{ include "diag.listen" . | quote }}
  {{- with .Values.extraArgs }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
ports:
  - name: diag-metrics
    containerPort: {{ .Values.port }}
{{- with include "diag.env" . | trim }}
env:
  {{- . | nindent 2 }}
{{- end }}
resources:
  {{- toYaml .Values.resources | nindent 2 }}
securityContext:
  {{- include "diag.containerSecurityContext" . | nindent 2 }}
livenessProbe:
  {{- toYaml .Values.livenessProbe | nindent 2 }}
{{- if ne .Values.mode "sidecar" }}
readinessProbe:
  {{- toYaml .Values.readinessProbe | nindent 2 }}
{{- end }}
{{- with include "diag.mounts" . | trim }}
volumeMounts:
  {{- . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "diag.env" -}}
{{- if eq .Values.mode "daemonset" }}
- name: HOST_IP
  valueFrom: {fieldRef: {fieldPath: status.hostIP}}
{{- end }}
{{- if ne .Values.mode "standalone" }}
- name: NVIDIA_VISIBLE_DEVICES
  value: all
- name: NVIDIA_DRIVER_CAPABILITIES
  value: utility
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "diag.mounts" -}}
{{- if include "diag.log" . }}
- name: vllm-log
  mountPath: /log
  readOnly: true
{{- end }}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "diag.volumes" -}}
{{- if include "diag.log" . }}
- name: vllm-log
  {{- if eq .Values.mode "sidecar" }}
  emptyDir: {sizeLimit: {{ .Values.log.sizeLimit }}}
  {{- else }}
  hostPath: {path: {{ .Values.log.hostPath }}, type: Directory}
  {{- end }}
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* What vLLM's own container gets: where it writes its log, and probes that tell a hang from a long step. Only an
answer of 503 counts: a sidecar that is being restarted answers nothing, nor does an image without curl. */}}
{{- define "diag.vllm" -}}
{{- if include "diag.log" . }}
volumeMounts:
  - name: vllm-log
    mountPath: /log
{{- end }}
{{- if .Values.sidecar.probes }}
livenessProbe:
  {{- include "diag.probe" (dict "port" .Values.port "path" "livez") | nindent 2 }}
  failureThreshold: 3
readinessProbe:
  {{- include "diag.probe" (dict "port" .Values.port "path" "readyz") | nindent 2 }}
{{- end }}
{{- end }}

{{- define "diag.probe" -}}
exec:
  command: [sh, -c, 'test 503 != "$(curl -s -m 4 -o /dev/null -w "%{http_code}" http://127.0.0.1:{{ .port }}/{{ .path }})"']
periodSeconds: 10
timeoutSeconds: 5
{{- end }}

{{- define "diag.annotations" -}}
{{- if eq .Values.monitor.kind "Annotations" }}
prometheus.io/scrape: "true"
prometheus.io/port: {{ .Values.port | quote }}
prometheus.io/path: /metrics
{{- end }}
{{- end }}
