{{- define "remora.name" -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "remora.selector" -}}
app.kubernetes.io/name: remora
app.kubernetes.io/instance: {{ include "remora.name" . }}
{{- end }}

{{- define "remora.labels" -}}
{{ include "remora.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* The args of the application: what the values say, then .Values.config over it. */}}
{{- define "remora.args" -}}
{{- $model := dict "path" .Values.model.path -}}
{{- if .Values.model.name }}{{ $_ := set $model "served_name" .Values.model.name }}{{ end -}}
{{- $gpus := int .Values.gpus.perReplica -}}
{{- $ranks := max 1 $gpus -}}
{{- $parallel := dict "cpus_per_rank" (divf (.Values.resources.worker.cpu | float64) $ranks) -}}
{{- $engine := dict -}}
{{- if $gpus }}
{{- $engine = dict "device" "cuda" -}}
{{- $_ := set $parallel "tp_size" $gpus -}}
{{- end -}}
{{- $args := dict "model" $model "engine" $engine "parallel" $parallel -}}
{{- if gt (int .Values.replicas.max) (int .Values.replicas.min) -}}
{{- $scaling := dict "min_replicas" (int .Values.replicas.min) "max_replicas" (int .Values.replicas.max) -}}
{{- if .Values.replicas.ttftSeconds }}{{ $_ := set $scaling "target_ttft_s" .Values.replicas.ttftSeconds }}{{ end -}}
{{- $_ := set $args "autoscaling" $scaling -}}
{{- else -}}
{{- $_ := set $parallel "num_replicas" (int .Values.replicas.max) -}}
{{- end -}}
{{- if .Values.secrets.apiKeys -}}
{{- $_ := set $args "api" (dict "api_key" "file:/etc/remora/keys/api-key" "admin_api_key" "file:/etc/remora/keys/admin-api-key") -}}
{{- end -}}
{{- toYaml (mergeOverwrite $args .Values.config) -}}
{{- end }}

{{/* What head and workers have in common. */}}
{{- define "remora.pod" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  fsGroup: 1000
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .Values.serviceAccountName }}
serviceAccountName: {{ . }}
{{- end }}
volumes:
  - name: cache
    {{- if .Values.cache.claim }}
    persistentVolumeClaim: {claimName: {{ .Values.cache.claim }}}
    {{- else }}
    emptyDir: {sizeLimit: {{ .Values.cache.size }}}
    {{- end }}
  - name: shm
    emptyDir: {medium: Memory, sizeLimit: {{ .Values.sharedMemory }}}
  {{- with .Values.secrets.apiKeys }}
  - name: keys
    secret: {secretName: {{ . }}}
  {{- end }}
  {{- with .Values.extraVolumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{- define "remora.container" -}}
image: {{ .Values.image.repository }}:{{ .Values.image.tag }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  capabilities: {drop: [ALL]}
{{- if or .Values.secrets.huggingFace .Values.extraEnv }}
env:
  {{- with .Values.secrets.huggingFace }}
  - name: HF_TOKEN
    valueFrom: {secretKeyRef: {name: {{ . }}, key: token}}
  {{- end }}
  {{- with .Values.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
livenessProbe:
  httpGet: {path: /api/local_raylet_healthz, port: agent}
  {{- include "remora.probe" . | nindent 2 }}
volumeMounts:
  - {name: cache, mountPath: /cache}
  - {name: shm, mountPath: /dev/shm}
  {{- if .Values.secrets.apiKeys }}
  - {name: keys, mountPath: /etc/remora/keys, readOnly: true}
  {{- end }}
  {{- with .Values.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{- define "remora.probe" -}}
initialDelaySeconds: 10
periodSeconds: {{ .Values.probes.periodSeconds }}
timeoutSeconds: {{ .Values.probes.timeoutSeconds }}
failureThreshold: {{ .Values.probes.failureThreshold }}
{{- end }}
