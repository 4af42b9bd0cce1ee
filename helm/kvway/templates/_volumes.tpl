{{/* What the gateway mounts: its configuration, Secrets, tokenizers, and one folder it may write to. */}}
{{- define "kvway.volumeMounts" -}}
- name: config
  mountPath: /etc/kvway/kvway.yaml
  subPath: kvway.yaml
  readOnly: true
- name: tmp
  mountPath: /tmp
{{- range include "kvway.secretVolumes" . | fromYamlArray }}
- name: {{ .name }}
  mountPath: {{ .mountPath }}
  readOnly: true
{{- end }}
{{- if ne .Values.tokenizer.source "none" }}
- name: tokenizers
  mountPath: {{ .Values.tokenizer.mountPath }}
  readOnly: true
  {{- if eq .Values.tokenizer.source "pvc" }}
  {{- with .Values.tokenizer.pvc.subPath }}
  subPath: {{ . }}
  {{- end }}
  {{- end }}
{{- end }}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "kvway.volumes" -}}
- name: config
  configMap:
    name: {{ include "kvway.fullname" . }}
- name: tmp
  emptyDir: {}
{{- range include "kvway.secretVolumes" . | fromYamlArray }}
- name: {{ .name }}
  secret:
    secretName: {{ .secretName }}
    defaultMode: 0444
    {{- with .items }}
    items:
      {{- toYaml . | nindent 6 }}
    {{- end }}
{{- end }}
{{- $tokenizer := .Values.tokenizer }}
{{- if ne $tokenizer.source "none" }}
- name: tokenizers
  {{- if eq $tokenizer.source "pvc" }}
  persistentVolumeClaim:
    claimName: {{ $tokenizer.pvc.claimName }}
    readOnly: true
  {{- else if eq $tokenizer.source "image" }}
  image:
    reference: {{ $tokenizer.image.reference }}
    pullPolicy: {{ $tokenizer.image.pullPolicy }}
  {{- else }}
  emptyDir: {}
  {{- end }}
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "kvway.secretVolumes" -}}
{{- $redis := ternary dict .Values.redis (eq .Values.redis.mode "none") -}}
{{- with .Values.tls.secretName }}
- name: tls
  secretName: {{ . }}
  mountPath: /etc/kvway/tls
{{- end }}
{{- if include "kvway.hasRedisPassword" . }}
- name: redis-password
  secretName: {{ $redis.passwordSecret.name }}
  mountPath: /etc/kvway/redis-password
  items:
    - key: {{ $redis.passwordSecret.key }}
      path: password
{{- end }}
{{- with $redis.sentinelPasswordSecret }}
{{- if .name }}
- name: sentinel-password
  secretName: {{ .name }}
  mountPath: /etc/kvway/sentinel-password
  items:
    - key: {{ .key }}
      path: password
{{- end }}
{{- end }}
{{- with ($redis.tls).caSecret }}
- name: redis-ca
  secretName: {{ . }}
  mountPath: /etc/kvway/redis-ca
{{- end }}
{{- with ($redis.tls).clientSecret }}
- name: redis-client
  secretName: {{ . }}
  mountPath: /etc/kvway/redis-client
{{- end }}
{{- range $number, $secret := .Values.secretFiles }}
- name: secret-{{ $number }} # names of volumes are shorter than those of Secrets, and have no dots
  secretName: {{ $secret.name }}
  mountPath: /etc/kvway/secrets/{{ $secret.name }}
{{- end }}
{{- end -}}
