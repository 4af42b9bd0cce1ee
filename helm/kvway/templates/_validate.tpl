{{/* What values.schema.json cannot say: values that contradict each other. */}}
{{- define "kvway.validate" -}}
{{- $values := .Values -}}
{{- $server := $values.config.server -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" (include "kvway.fullname" .)) -}}
{{- fail (printf "a Service cannot be called %s, as this release's name makes it; set fullnameOverride to letters, digits and -" (include "kvway.fullname" .)) -}}
{{- end -}}
{{- $index := $values.config.index | default dict -}}
{{- $found := $values.config.discovery | default dict -}}
{{- if not (or $values.config.workers $found.kubernetes $found.dns $found.files $values.simulatedWorkers.enabled) -}}
{{- fail "there are no workers: list them in config.workers, find them with config.discovery, or try simulatedWorkers.enabled=true" -}}
{{- end -}}
{{- if or $index.password $index.sentinel_password (regexMatch "://[^/@]*:[^/@]*@" ($index.url | default "")) -}}
{{- fail "config.index: a password would lie readable in a ConfigMap; put it into a Secret and name that in redis.passwordSecret or redis.sentinelPasswordSecret" -}}
{{- end -}}
{{- if ($values.config.recorder | default dict).salt -}}
{{- fail "config.recorder.salt would lie readable in a ConfigMap; put it into a Secret and set KVWAY_RECORDER__SALT from it with env" -}}
{{- end -}}
{{- if not (and $server.port $server.admin_port) -}}
{{- fail "config.server.port and config.server.admin_port must be given: probes and Services lead there" -}}
{{- end -}}
{{- range list "host" "admin_host" -}}
{{- if regexMatch "^(127[.]|::1$|localhost$)" (get $server . | default "" | toString) -}}
{{- fail (printf "config.server.%s is %s, which the kubelet and Services do not reach; keep the admin port in with networkPolicy" . (get $server .)) -}}
{{- end -}}
{{- end -}}
{{- range $values.env -}}
{{- if regexMatch "^KVWAY_(SERVER__((ADMIN_)?(HOST|PORT)|DRAIN_S|TLS_CERT)|DISCOVERY__KUBERNETES)$" (.name | default "") -}}
{{- fail (printf "env sets %s past the chart, whose probes, Services, grace period and rights follow config; set it there" .name) -}}
{{- end -}}
{{- end -}}
{{- if eq (int $server.port) (int $server.admin_port) -}}
{{- fail (printf "config.server.port and config.server.admin_port are both %d; the admin port must be another one" (int $server.port)) -}}
{{- end -}}
{{- if and $values.service.nodePort (eq $values.service.type "ClusterIP") -}}
{{- fail "service.nodePort is for service.type NodePort or LoadBalancer" -}}
{{- end -}}
{{- if and (has $values.redis.mode (list "standalone" "sentinel" "cluster")) (not $values.redis.hosts) -}}
{{- fail (printf "redis.mode is %s, so redis.hosts must name where it is" $values.redis.mode) -}}
{{- end -}}
{{- if and (eq $values.redis.mode "standalone") (gt (len $values.redis.hosts) 1) -}}
{{- fail "redis.mode is standalone, so redis.hosts must name one server; for several write sentinel or cluster" -}}
{{- end -}}
{{- if and (eq $values.redis.mode "bundled") (or $values.redis.tls.enabled $values.redis.hosts $values.redis.username) -}}
{{- fail "redis.hosts, redis.username and redis.tls are for existing servers; set redis.mode to standalone, sentinel or cluster" -}}
{{- end -}}
{{- if and (or $values.redis.tls.caSecret $values.redis.tls.clientSecret) (not $values.redis.tls.enabled) -}}
{{- fail "redis.tls names Secrets, but redis.tls.enabled is false: nothing would be encrypted" -}}
{{- end -}}
{{- if and (eq $values.redis.mode "cluster") $values.redis.database -}}
{{- fail "redis.mode is cluster, and a cluster has no databases; leave redis.database at 0" -}}
{{- end -}}
{{- if and $values.redis.sentinelPasswordSecret.name (ne $values.redis.mode "sentinel") -}}
{{- fail "redis.sentinelPasswordSecret is for redis.mode sentinel; the servers' own password is redis.passwordSecret" -}}
{{- end -}}
{{- if and (eq $values.tokenizer.source "pvc") (not $values.tokenizer.pvc.claimName) -}}
{{- fail "tokenizer.source is pvc, so tokenizer.pvc.claimName must name the claim" -}}
{{- end -}}
{{- if and (eq $values.tokenizer.source "image") (not $values.tokenizer.image.reference) -}}
{{- fail "tokenizer.source is image, so tokenizer.image.reference must name the image" -}}
{{- end -}}
{{- if and (eq $values.tokenizer.source "download") (not $values.tokenizer.download.repositories) -}}
{{- fail "tokenizer.source is download, so tokenizer.download.repositories must name at least one" -}}
{{- end -}}
{{- $least := add $values.preStopSleepSeconds (ceil $server.drain_s) -}}
{{- if lt (include "kvway.gracePeriodSeconds" . | int) (int $least) -}}
{{- fail (printf "terminationGracePeriodSeconds would kill pods that still drain; it must be at least preStopSleepSeconds + config.server.drain_s = %d, or 0" $least) -}}
{{- end -}}
{{- if $values.autoscaling.enabled -}}
{{- if gt (int $values.autoscaling.minReplicas) (int $values.autoscaling.maxReplicas) -}}
{{- fail "autoscaling.minReplicas is above autoscaling.maxReplicas" -}}
{{- end -}}
{{- if not (or $values.autoscaling.targetCPUUtilizationPercentage $values.autoscaling.targetInFlightTokens) -}}
{{- fail "autoscaling has no target; set targetCPUUtilizationPercentage or targetInFlightTokens" -}}
{{- end -}}
{{- $resources := $values.resources | default dict -}}
{{- if and $values.autoscaling.targetCPUUtilizationPercentage (not (or ($resources.requests).cpu ($resources.limits).cpu)) -}}
{{- fail "autoscaling.targetCPUUtilizationPercentage is a share of resources.requests.cpu, which must be given" -}}
{{- end -}}
{{- end -}}
{{- if and $values.serviceMonitor.enabled $values.podMonitor.enabled -}}
{{- fail "serviceMonitor and podMonitor would both scrape every pod; enable one of them" -}}
{{- end -}}
{{- if and $values.httpRoute.enabled (not $values.httpRoute.parentRefs) -}}
{{- fail "httpRoute.enabled is set, so httpRoute.parentRefs must name a Gateway" -}}
{{- end -}}
{{- end -}}
