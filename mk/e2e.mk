# Images and the end-to-end tests on a real kind cluster. The same commands work on a laptop with
# docker, kind, kubectl and helm; KIND_NODE_IMAGE names a node image where kind's default cannot be had.

# One tag for all images, from git: v0.1.0-3-g1a2b3c4, or 1a2b3c4 before the first release.
# Asked once, at the start: git may move on while the images are built.
ifndef TAG
TAG := $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
endif
REVISION := $(shell git rev-parse HEAD 2>/dev/null || echo unknown)
DOCKER ?= docker
CLUSTER ?= tidewater
E2E_ARGS ?=
IMAGE_NAMES := operator worker pipeline
E2E := PYTHONPATH=tests/lib $(BIN)/python -m e2e.run

.PHONY: images
images: ## Build the images with one tag from git (TAG=name)
	@for name in $(IMAGE_NAMES); do \
	  $(DOCKER) build --quiet --force-rm -f Dockerfile.$$name -t tidewater-$$name:$(TAG) \
	    --build-arg VERSION=$(TAG) --build-arg REVISION=$(REVISION) . >/dev/null; \
	  $(DOCKER) image inspect --format '{{.Size}}' tidewater-$$name:$(TAG) \
	    | awk -v name=tidewater-$$name:$(TAG) '{printf "%-40s %4d MB\n", name, $$1 / 1000000}'; \
	done

.PHONY: cluster
cluster: setup images ## Start a kind cluster with the images and the chart (CLUSTER=tidewater)
	@$(E2E) up --cluster $(CLUSTER) --tag $(TAG)

.PHONY: cluster-down
cluster-down: setup ## Delete the cluster of `make cluster`
	@$(E2E) down --cluster $(CLUSTER)

.PHONY: e2e
e2e: setup images ## End-to-end tests on kind or KUBECONFIG's cluster (K=name, E2E_KEEP=1)
	@$(E2E) test --cluster $(CLUSTER)-e2e --tag $(TAG) \
	  $(if $(K),--select '$(K)') $(if $(E2E_KEEP),--keep) -- $(E2E_ARGS)
