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
  env:
    - name: HF_HOME
      value: /tmp/huggingface
    {{- with $tokenizer.download.tokenSecret }}
    {{- if .name }}
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef:
          {{- toYaml . | nindent 10 }}
    {{- end }}
    {{- end }}
    {{- with $tokenizer.download.env }}
    {{- toYaml . | nindent 4 }}
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
