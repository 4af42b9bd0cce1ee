{{- define "kvway.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* Short enough for what is put behind it, and for the names of a StatefulSet's pods. */}}
{{- define "kvway.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- default $full .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* What never changes of an object's labels. Call with (list . "component"). */}}
{{- define "kvway.selectorLabels" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "kvway.name" $root | quote }}
app.kubernetes.io/instance: {{ $root.Release.Name | quote }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "kvway.labels" -}}
{{- $root := index . 0 -}}
{{ include "kvway.selectorLabels" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "kvway.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "kvway.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "kvway.fullname" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{/* How long a pod may take to end: load balancers first, then the running requests, then a margin. */}}
{{- define "kvway.gracePeriodSeconds" -}}
{{- $least := add .Values.preStopSleepSeconds (ceil .Values.config.server.drain_s) 15 -}}
{{- .Values.terminationGracePeriodSeconds | default $least | int -}}
{{- end -}}

{{/* What the public port speaks: a certificate is that of the chart, or one that `config` names. */}}
{{- define "kvway.scheme" -}}
{{- ternary "https" "http" (not (empty (or .Values.tls.secretName .Values.config.server.tls_cert))) -}}
{{- end -}}

{{/* Discovery that asks the API server of this cluster. */}}
{{- define "kvway.kubernetesSources" -}}
{{- $here := list -}}
{{- range (.Values.config.discovery | default dict).kubernetes -}}
{{- if not .api_url -}}{{- $here = append $here . -}}{{- end -}}
{{- end -}}
{{- toYaml $here -}}
{{- end -}}

{{- define "kvway.hasRedisPassword" -}}
{{- if and (ne .Values.redis.mode "none") .Values.redis.passwordSecret.name }}true{{ end -}}
{{- end -}}

{{/* Fields that all pods of the chart have in common. */}}
{{- define "kvway.podCommon" -}}
enableServiceLinks: false
securityContext:
  {{- toYaml .Values.podSecurityContext | nindent 2 }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
