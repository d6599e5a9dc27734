# MODULES are the folders of all modules.
MODULES := $(patsubst %/,%,$(dir $(wildcard go.mod */go.mod cmd/*/go.mod)))

.PHONY: help test test/thorough test/race test/mistakes test/integration test/matrix test/shards test/faults fuzz bench soak sql lint verify release demo
help: ## Print this list
	@awk -F ':.*## ' '/^[a-z\/]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# The tests use the server at RATELIMIT_TEST_DATABASE_URL, or else throwaway servers. They ignore DATABASE_URL.
# RATELIMIT_TEST_ROUNDS=20 makes random tests run twenty times as many rounds.
test: ## Run the tests of the library, its command, OpenTelemetry, gRPC and the service, or of the modules MODULE=". grpclimit"
	@go run ./internal/runtests $(MODULE)

test/thorough: ## Run the tests of many combinations, which "make test" leaves out
	@go run ./internal/runtests -thorough $(MODULE)

test/race: ## Run the tests of the library and its service modules under the race detector; needs a C compiler
	bash .ci/race

test/mistakes: ## Check that tests notice deliberate mistakes, most of them in SQL
	go test -count=1 -timeout 20m -run '^TestMistakes' ./sql ./internal/engine ./internal/keeper ./internal/model ./cleanup
	cd service && go test -count=1 -timeout 20m -run '^TestMistakes' ./internal/envoy

test/integration: ## Run the tests with heavy dependencies; tests in containers need a Docker engine
	@go run ./internal/runtests integration_test

test/matrix: ## Run the tests that depend on the version of Postgres, on 14 to 18 or POSTGRES="15 18"; LIBRARY=. runs all; needs npm
	LIBRARY='$(LIBRARY)' bash .ci/matrix $(POSTGRES)

test/shards: ## Run the tests of proxies for shards, and those of decisions through two shards; needs PL/Proxy
	bash .ci/shards

test/door: ## Run the library's tests and the histories through a service, which asks Postgres
	RATELIMIT_TEST_DOOR=1 go test -count=1 -vet=off -timeout 20m .
	cd integration_test && RATELIMIT_TEST_DOOR=1 go test -count=1 -timeout 20m -run 'MixesAreLinearizable' ./faults

test/faults: ## Judge histories, and kill the server and processes, in many rounds; ROUNDS=20; SEED repeats a logged seed
	cd integration_test && ROUNDS=$(or $(ROUNDS),20) go test -v -count=1 -timeout 20m -run 'Linearizable|Killed|Forgotten|Leases' ./faults

fuzz: ## Run every fuzz target for a few seconds; ROUNDS=10 runs ten times as long
	bash .ci/fuzz

bench: ## Compare with other limiters; BENCH=quick takes 2 minutes, BENCH_ONLY=new runs a part
	cd integration_test && go test -run '^$$' -bench '^BenchmarkSideBySide$$' -benchtime 1x -timeout 60m ./bench

# Only a soak with SOAK=10m writes a new chart in docs/.
SOAK ?= 10m
SOAK_OUT ?= $(if $(filter 10m,$(SOAK)),$(CURDIR)/docs)
soak: ## Run all kinds of calls on a server that keeps failing, for 10 minutes or SOAK=30s; SEED repeats a soak
	cd integration_test && SOAK='$(SOAK)' SOAK_OUT='$(abspath $(SOAK_OUT))' go test -v -count=1 -run '^TestSoak$$' -timeout 0 ./soak

sql: ## Write the migrations from sql/, and the list of what they create in Postgres
	go run ./internal/gensql
	go test -count=1 -timeout 5m -run '^TestMade$$' ./internal/catalog -update

lint: ## Run golangci-lint on all modules
	@for module in $(MODULES); do (cd $$module && golangci-lint run --config '$(CURDIR)/.golangci.yml' ./...) || exit 1; done

verify: ## Check that files are formatted, generated files are current, and modules are tidy
	@test -z "$$(gofmt -l .)" || { gofmt -l .; echo 'not formatted: run gofmt -w .'; exit 1; }
	go run ./internal/gensql -check
	bash .ci/tidy -diff

release: ## Check all files, write VERSION=v0.1.0 into all modules, and print how to publish them
	@go run ./internal/release '$(VERSION)'

demo: ## Show what the library does, on a throwaway Postgres or on the server at DATABASE_URL
	go run ./cmd/pgratelimit demo
