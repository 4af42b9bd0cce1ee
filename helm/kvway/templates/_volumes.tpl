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
  subPath: {{ . | quote }}
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
    secretName: {{ .secretName | quote }}
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
    claimName: {{ $tokenizer.pvc.claimName | quote }}
    readOnly: true
  {{- else if eq $tokenizer.source "image" }}
  image:
    reference: {{ $tokenizer.image.reference | quote }}
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
  secretName: {{ . | quote }}
  mountPath: /etc/kvway/tls
{{- end }}
{{- if include "kvway.hasRedisPassword" . }}
- name: redis-password
  secretName: {{ $redis.passwordSecret.name | quote }}
  mountPath: /etc/kvway/redis-password
  items:
    - key: {{ $redis.passwordSecret.key | quote }}
      path: password
{{- end }}
{{- with $redis.sentinelPasswordSecret }}
{{- if .name }}
- name: sentinel-password
  secretName: {{ .name | quote }}
  mountPath: /etc/kvway/sentinel-password
  items:
    - key: {{ .key | quote }}
      path: password
{{- end }}
{{- end }}
{{- with ($redis.tls).caSecret }}
- name: redis-ca
  secretName: {{ . | quote }}
  mountPath: /etc/kvway/redis-ca
{{- end }}
{{- with ($redis.tls).clientSecret }}
- name: redis-client
  secretName: {{ . | quote }}
  mountPath: /etc/kvway/redis-client
{{- end }}
{{- range $number, $secret := .Values.secretFiles }}
- name: secret-{{ $number }} # names of volumes are shorter than those of Secrets, and have no dots
  secretName: {{ $secret.name | quote }}
  mountPath: /etc/kvway/secrets/{{ $secret.name }}
{{- end }}
{{- end -}}
