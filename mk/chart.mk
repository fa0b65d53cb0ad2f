# The Helm chart. `helm` is needed here and by `make e2e`, nowhere else.

CHART := charts/tidewater
# The oldest Kubernetes that the chart is for.
CHART_KUBE := --kube-version 1.29.0

.PHONY: chart
chart: crds ## Lint, render and package the chart into build/ (needs helm)
	@for values in "" "--values $(CHART)/examples/production.yaml"; do \
	  helm lint --strict --quiet $(CHART) $(CHART_KUBE) $$values; \
	  helm template tidewater $(CHART) $(CHART_KUBE) $$values >/dev/null; \
	done
	@mkdir -p build
	@helm package $(CHART) --destination build
