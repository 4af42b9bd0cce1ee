{{/* kvway.yaml: what the chart knows, under what `config` says. */}}
{{- define "kvway.config" -}}
{{- $config := dict -}}
{{- range list "kvway.config.redis" "kvway.config.tls" "kvway.config.models" -}}
{{- $config = mustMergeOverwrite $config (include . $ | fromYaml) -}}
{{- end -}}
{{- $config = mustMergeOverwrite $config (deepCopy .Values.config) -}}
{{- $simulated := include "kvway.config.simulatedWorkers" . | fromYamlArray -}}
{{- $_ := set $config "workers" (concat (.Values.config.workers | default list) $simulated) -}}
{{- toYaml $config -}}
{{- end -}}

{{- define "kvway.config.redis" -}}
{{- $redis := .Values.redis -}}
{{- if ne $redis.mode "none" -}}
index:
  backend: redis
  url: {{ include "kvway.redisUrl" . | quote }}
  {{- with $redis.username }}
  username: {{ . | quote }}
  {{- end }}
  {{- if $redis.passwordSecret.name }}
  password_file: /etc/kvway/redis-password/password
  {{- end }}
  {{- if $redis.sentinelPasswordSecret.name }}
  sentinel_password_file: /etc/kvway/sentinel-password/password
  {{- end }}
  {{- if $redis.tls.caSecret }}
  tls_ca: /etc/kvway/redis-ca/ca.crt
  {{- end }}
  {{- if $redis.tls.clientSecret }}
  tls_cert: /etc/kvway/redis-client/tls.crt
  tls_key: /etc/kvway/redis-client/tls.key
  {{- end }}
{{- end -}}
{{- end -}}

{{- define "kvway.redisUrl" -}}
{{- $redis := .Values.redis -}}
{{- $scheme := ternary "rediss" "redis" $redis.tls.enabled -}}
{{- $hosts := join "," $redis.hosts -}}
{{- if eq $redis.mode "bundled" -}}
redis://{{ include "kvway.fullname" . }}-valkey:6379/{{ $redis.database }}
{{- else if eq $redis.mode "sentinel" -}}
{{ $scheme }}+sentinel://{{ $hosts }}/{{ $redis.sentinelService }}/{{ $redis.database }}
{{- else if eq $redis.mode "cluster" -}}
{{ $scheme }}+cluster://{{ $hosts }}
{{- else -}}
{{ $scheme }}://{{ $hosts }}/{{ $redis.database }}
{{- end -}}
{{- end -}}

{{- define "kvway.config.tls" -}}
{{- if .Values.tls.secretName -}}
server:
  tls_cert: /etc/kvway/tls/tls.crt
  tls_key: /etc/kvway/tls/tls.key
{{- end -}}
{{- end -}}

{{- define "kvway.config.models" -}}
{{- $tokenizer := .Values.tokenizer -}}
{{- $repositories := ternary $tokenizer.download.repositories list (eq $tokenizer.source "download") -}}
{{- if $repositories -}}
models:
  {{- range $repositories }}
  {{ ternary "*" . (eq (len $repositories) 1) | quote }}:
    tokenizer: {{ printf "%s/%s" $tokenizer.mountPath . | quote }}
  {{- end }}
{{- else if .Values.simulatedWorkers.enabled -}}
models:
  {{ .Values.simulatedWorkers.model | quote }}:
    source: engine
{{- end -}}
{{- end -}}

{{- define "kvway.config.simulatedWorkers" -}}
{{- if .Values.simulatedWorkers.enabled -}}
{{- $name := printf "%s-sim" (include "kvway.fullname" .) -}}
{{- range $number := until (int .Values.simulatedWorkers.replicas) }}
{{- $host := printf "%s-%d.%s" $name $number $name }}
- name: sim-{{ $number }}
  url: http://{{ $host }}:8000
  kv_events:
    endpoint: tcp://{{ $host }}:5557
    replay_endpoint: tcp://{{ $host }}:5558
{{- end -}}
{{- end -}}
{{- end -}}
