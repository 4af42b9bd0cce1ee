{{/* Init containers that download tokenizers, one per repository: never the weights. */}}
{{- define "kvway.tokenizerDownload" -}}
{{- $tokenizer := .Values.tokenizer -}}
{{- range $number, $repository := $tokenizer.download.repositories }}
- name: tokenizer-{{ $number }}
  image: {{ include "kvway.image" $ }}
  imagePullPolicy: {{ $.Values.image.pullPolicy }}
  command:
    - hf
    - download
    - {{ $repository | quote }}
    - --revision={{ $tokenizer.download.revision }}
    - --include=*.json
    - --include=*.jinja
    - --include=tokenizer.model*
    - --exclude=*.index.json
    - --local-dir={{ $tokenizer.mountPath }}/{{ $repository }}
  securityContext:
    {{- toYaml $.Values.securityContext | nindent 4 }}
  {{- with $tokenizer.download }}
  {{- if or .tokenSecret.name .env }}
  env:
    {{- if .tokenSecret.name }}
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef:
          {{- toYaml .tokenSecret | nindent 10 }}
    {{- end }}
    {{- with .env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  {{- end }}
  resources:
    {{- toYaml $.Values.resources | nindent 4 }}
  volumeMounts:
    - name: tokenizers
      mountPath: {{ $tokenizer.mountPath }}
    - name: tmp
      mountPath: /tmp
{{- end }}
{{- end -}}
