{{/* Labels of every object. */}}
{{- define "tidewater.labels" -}}
app.kubernetes.io/name: tidewater
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/part-of: tidewater
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{/* What the pods of a component are found by: (list $ "operator"). Never changes. */}}
{{- define "tidewater.selector" -}}
app.kubernetes.io/name: tidewater
app.kubernetes.io/instance: {{ (index . 0).Release.Name | quote }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* Labels of a component's pods: no version, or every upgrade would restart etcd and SeaweedFS. */}}
{{- define "tidewater.podLabels" -}}
{{ include "tidewater.selector" . }}
app.kubernetes.io/part-of: tidewater
{{- end }}

{{/* An image of ours: (list $ "tidewater-worker"). */}}
{{- define "tidewater.image" -}}
{{- $root := index . 0 -}}
{{- with $root.Values.image.registry }}{{ trimSuffix "/" . }}/{{ end -}}
{{ index . 1 }}:{{ $root.Values.image.tag | default $root.Chart.AppVersion }}
{{- end }}

{{/* Pod Security "restricted". */}}
{{- define "tidewater.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "tidewater.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "tidewater.catalogSecret" -}}
{{- if .Values.seaweedfs.enabled -}}
tidewater-catalog-credentials
{{- else -}}
{{ .Values.catalog.secretName }}
{{- end -}}
{{- end }}

{{- define "tidewater.etcdEndpoints" -}}
{{- if .Values.etcd.enabled -}}
{{ list (printf "http://tidewater-etcd.%s.svc:2379" .Release.Namespace) | toJson }}
{{- else -}}
{{ .Values.etcd.endpoints | toJson }}
{{- end -}}
{{- end }}

{{/* A claim of a StatefulSet: its storage values. */}}
{{- define "tidewater.claim" -}}
- metadata: {name: data}
  spec:
    accessModes: [ReadWriteOnce]
    {{- with .storageClass }}
    storageClassName: {{ . | quote }}
    {{- end }}
    resources: {requests: {storage: {{ .size | quote }}}}
{{- end }}

{{/* What happens to the volumes of a StatefulSet that is deleted. */}}
{{- define "tidewater.claimRetention" -}}
whenScaled: Retain
whenDeleted: {{ ternary "Delete" "Retain" .Values.uninstall.deleteData }}
{{- end }}
