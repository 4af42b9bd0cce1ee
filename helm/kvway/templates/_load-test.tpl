{{/* What the Job of the load test runs, from whose content it has its name. */}}
{{- define "kvway.loadTest.pod" -}}
{{- $here := printf "%s://%s:%v" (include "kvway.scheme" .) (include "kvway.fullname" .) .Values.service.port -}}
{{- with .Values.loadTest -}}
metadata:
  labels:
    {{- include "kvway.labels" (list $ "load-test") | nindent 4 }}
spec:
  {{- include "kvway.podCommon" $ | nindent 2 }}
  automountServiceAccountToken: false
  restartPolicy: Never
  terminationGracePeriodSeconds: 90 # a test that is ended waits 60 s for answers, and writes what there is
  containers:
    - name: load
      image: {{ include "kvway.image" $ }}
      imagePullPolicy: {{ $.Values.image.pullPolicy }}
      workingDir: /tmp
      args:
        - load
        - {{ .scenario | quote }}
        - {{ printf "--url=%s" (.url | default $here) | quote }}
        {{- with .args }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- if or .apiKeySecret.name .caSecret }}
      env:
        {{- with .apiKeySecret }}
        {{- if .name }}
        - name: OPENAI_API_KEY
          valueFrom:
            secretKeyRef:
              name: {{ .name | quote }}
              key: {{ .key | quote }}
        {{- end }}
        {{- end }}
        {{- if .caSecret }}
        - name: SSL_CERT_FILE
          value: /etc/kvway/ca/ca.crt
        {{- end }}
      {{- end }}
      securityContext:
        {{- toYaml $.Values.securityContext | nindent 8 }}
      resources:
        {{- toYaml .resources | nindent 8 }}
      volumeMounts:
        - name: tmp
          mountPath: /tmp
        {{- if .caSecret }}
        - name: ca
          mountPath: /etc/kvway/ca
          readOnly: true
        {{- end }}
  volumes:
    - name: tmp
      emptyDir: {}
    {{- with .caSecret }}
    - name: ca
      secret:
        secretName: {{ . | quote }}
        items:
          - key: ca.crt
            path: ca.crt
    {{- end }}
{{- end -}}
{{- end -}}
