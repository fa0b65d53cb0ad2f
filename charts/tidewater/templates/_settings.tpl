{{/*
The operator's settings file. Blocks that came after the first release have a default here, too: an
upgrade with --reuse-values brings the values of the old chart, which has none of them.
*/}}
{{- define "tidewater.settings" -}}
etcd:
  endpoints: {{ include "tidewater.etcdEndpoints" . }}
  prefix: {{ .Values.etcd.prefix | quote }}
  secret: {{ .Values.etcd.secretName | quote }}
  takeOverFrom: {{ .Values.etcd.takeOverFrom | default "" | quote }}
catalog:
  name: {{ .Values.catalog.name | quote }}
  properties: {{- include "tidewater.catalogProperties" . | nindent 4 }}
catalogSecret: {{ include "tidewater.catalogSecret" . | quote }}
workerImage: {{ include "tidewater.image" (list . .Values.worker.image) | quote }}
pipelineImage: {{ include "tidewater.image" (list . .Values.maintenance.image) | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy | quote }}
imagePullSecrets: {{ toJson .Values.image.pullSecrets }}
{{- $pool := deepCopy .Values.poolDefaults }}
{{- if not $pool.storage.storageClass }}
{{- $_ := unset $pool.storage "storageClass" }}
{{- end }}
poolDefaults: {{- toYaml $pool | nindent 2 }}
pools: {allowedImages: {{ (.Values.pools | default dict).allowedImages | default list | toJson }}}
auth: {mode: {{ .Values.auth.mode | quote }}, workerRole: tidewater-worker, reviewersBinding: tidewater-workers}
tls: {secretName: {{ .Values.tls.secretName | quote }}}
tenants: {{- .Values.tenants | default dict | toYaml | nindent 2 }}
tables: {allowForeign: {{ .Values.tables.allowForeign }}}
networkPolicy: {enabled: {{ .Values.networkPolicy.enabled }}}
maintenance:
  {{- toYaml (merge (dict "role" "tidewater-pipeline") (omit .Values.maintenance "image")) | nindent 2 }}
intervals: {{- toYaml .Values.intervals | nindent 2 }}
watchNamespaces: {{ toJson .Values.operator.watchNamespaces }}
logLevel: {{ .Values.operator.logLevel | quote }}
{{- end }}

{{/* Where the tables are; ${NAME} comes from the catalog's Secret. */}}
{{- define "tidewater.catalogProperties" -}}
{{- if .Values.seaweedfs.enabled -}}
{{- $host := printf "http://tidewater-seaweedfs.%s.svc" .Release.Namespace -}}
type: rest
uri: {{ $host }}:8181
warehouse: s3://warehouse
credential: ${CATALOG_ACCESS_KEY}:${CATALOG_SECRET_KEY}
oauth2-server-uri: {{ $host }}:8181/v1/oauth/tokens
s3.endpoint: {{ $host }}:8333
s3.access-key-id: ${CATALOG_ACCESS_KEY}
s3.secret-access-key: ${CATALOG_SECRET_KEY}
s3.region: us-east-1
{{- else -}}
{{- range $name, $value := .Values.catalog.properties }}
{{- $plain := regexReplaceAll "\\$\\{[^}]*\\}" (toString $value) "" }}
{{- $secret := and (regexMatch "(?i)(secret|password|credential|token|access-key|account-key|connection-string|authorization)$" $name) (eq $plain (toString $value)) }}
{{- if or $secret (regexMatch "://[^/@]*:[^/@:]+@" $plain) }}
{{- fail (printf "catalog.properties.%s would stand in ConfigMaps, which anybody who views a namespace reads: put it in the Secret that catalog.secretName names, and write ${NAME} here for the key NAME of that Secret" $name) }}
{{- end }}
{{- end }}
{{- toYaml .Values.catalog.properties }}
{{- end -}}
{{- end }}
