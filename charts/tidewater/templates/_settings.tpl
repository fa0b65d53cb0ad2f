{{/* The operator's settings file. */}}
{{- define "tidewater.settings" -}}
etcd:
  endpoints: {{ include "tidewater.etcdEndpoints" . }}
  prefix: {{ .Values.etcd.prefix }}
  secret: {{ .Values.etcd.secretName | quote }}
catalog:
  name: {{ .Values.catalog.name }}
  properties: {{- include "tidewater.catalogProperties" . | nindent 4 }}
catalogSecret: {{ include "tidewater.catalogSecret" . | quote }}
workerImage: {{ include "tidewater.image" (list . .Values.worker.image) }}
pipelineImage: {{ include "tidewater.image" (list . .Values.maintenance.image) }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
imagePullSecrets: {{ toJson .Values.image.pullSecrets }}
{{- $pool := deepCopy .Values.poolDefaults }}
{{- if not $pool.storage.storageClass }}
{{- $_ := unset $pool.storage "storageClass" }}
{{- end }}
poolDefaults: {{- toYaml $pool | nindent 2 }}
auth: {mode: {{ .Values.auth.mode }}, workerRole: tidewater-worker, reviewersBinding: tidewater-workers}
tls: {secretName: {{ .Values.tls.secretName | quote }}}
tables: {allowForeign: {{ .Values.tables.allowForeign }}}
networkPolicy: {enabled: {{ .Values.networkPolicy.enabled }}}
maintenance:
  {{- toYaml (merge (dict "role" "tidewater-pipeline") (omit .Values.maintenance "image")) | nindent 2 }}
intervals: {{- toYaml .Values.intervals | nindent 2 }}
clusterDomain: {{ .Values.clusterDomain }}
watchNamespaces: {{ toJson .Values.operator.watchNamespaces }}
logLevel: {{ .Values.operator.logLevel }}
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
{{ toYaml .Values.catalog.properties }}
{{- end -}}
{{- end }}
