.PHONY: help
help: ## Print this list
	@awk -F ':.*## ' '/^[a-z\/]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# The tests use the server of RATELIMIT_TEST_DATABASE_URL, else throwaway ones. They ignore DATABASE_URL.
.PHONY: test
test: ## Run the tests of the library, its command, OpenTelemetry and gRPC: about 10 minutes on two cores
	@go run ./internal/runtests

.PHONY: test/library
test/library: ## Run the library's tests
	@go run ./internal/runtests .

.PHONY: test/otel
test/otel: ## Run the tests of the module for OpenTelemetry
	@go run ./internal/runtests otelratelimit

.PHONY: test/grpc
test/grpc: ## Run the tests of the module for gRPC
	@go run ./internal/runtests grpclimit

.PHONY: test/race
test/race: ## Run the tests of the library, of OpenTelemetry and of gRPC under the race detector, which needs a C compiler
	# Without tests that do one thing after the other and take the longest: tests of tests, comparisons with models, the doctor's.
	go test -race -timeout 40m -skip '^Test(Mistakes|Doctor|Roles$$|NothingThatOthersCreateIsRun$$)|Equal|Properties|NeverGrants|Calendar' ./...
	cd otelratelimit && go test -race -timeout 5m ./...
	cd grpclimit && go test -race -timeout 5m ./...

.PHONY: test/mistakes
test/mistakes: ## See whether tests notice mistakes in SQL, of which each is made on purpose
	go test -count=1 -timeout 20m -run '^TestMistakes' .

.PHONY: test/integration
test/integration: ## Run the tests with heavy dependencies; those in containers need a Docker engine
	@go run ./internal/runtests integration_test

.PHONY: test/matrix
test/matrix: ## Run the tests of the database on Postgres 14 to 18, or on those of POSTGRES="15 18"; needs npm
	LIBRARY='$(LIBRARY)' bash .ci/matrix $(POSTGRES)

.PHONY: test/role
test/role: ## Run the library's tests as a role that may do nothing but what an application needs
	# Those that are left out have databases, schemas and roles of their own.
	RATELIMIT_TEST_ROLE=pg_monitor go test -count=1 -timeout 40m -skip '^Test(Schema|WithSharesEverythingElse|NotPermitted|KeyThatTheEncodingRefuses|TakesOfSetsInAnotherOrderLockNothing)$$' .

# What cannot be as it is behind a proxy for shards, by the reason.
#   transactions of the caller, which a proxy refuses (AllowTx, a single connection, RLS02)
SHARDS_SKIP = Transaction|TestIsolationLevels|TestOldSnapshots|TestBan$$|TestDenialOfAllWritesNothing|TestDenialThatWritesIsSeen|TestHeldKeysOfFourLimiters
SHARDS_SKIP := $(SHARDS_SKIP)|TestHoldersOfSkippedRows|TestLimitersOnOneConnection|TestLooks|TestObserverOfSeveralLimits
SHARDS_SKIP := $(SHARDS_SKIP)|TestOneConnection|TestOwnPoolDecides|TestPgBouncer$$|TestPoliciesDecide|TestRefundForgetsTheDenial|TestRowsBeingMade
SHARDS_SKIP := $(SHARDS_SKIP)|TestSeveralPolicies$$|TestShadowThatFails|TestSmallPools|TestTriggerExample|TestTwentyLimiters|TestWaitingForSeveralRows
SHARDS_SKIP := $(SHARDS_SKIP)|TestWhatCannotBeRefunded|TestCrossingBatches|TestDecidingWithoutTheLock|TestRowDeleted|TestSetsBesideANewRow|TestSingleConnection|TestDenialsNeverChange|TestKeysHeldForGood
#   one statement that passes over locked rows of several shards (RLS01): its order of locking, and who it waits for
SHARDS_SKIP := $(SHARDS_SKIP)|TestAllSkipsRequests|TestSkippingHeldRows|TestLocking|TestRowsAreMadeAndLocked|TestCrossingRefunds|TestKeysBehindOne
SHARDS_SKIP := $(SHARDS_SKIP)|TestCallerLeavesWhile|TestCallerThatLeaves|TestLaneIsServed|TestRowThatVanishes|TestUpdatingByTid|TestClockIsReadAfter
SHARDS_SKIP := $(SHARDS_SKIP)|TestRowMadeAfter|TestWindowsOfTheCalendarThat|TestCallsWithoutALockTimeout|TestConnectionIsEnded|TestLockedTable|TestTakesAreTold|TestPgBouncerLosesItsServer|TestSetsThatLose|TestRowsOfTheLastYear|TestRefusedRequestsLock
SHARDS_SKIP := $(SHARDS_SKIP)|TestVanishedRows|TestReportsDoNotDeadlock
#   what a statement does to pages, plans and indexes, and the settings of its session, which is not the shard's
SHARDS_SKIP := $(SHARDS_SKIP)|TestPlans|TestDenialsWriteNothing|TestRefundWritesOnly|TestSettings|TestReadOnly|TestSQLPeeksWhere|TestStatementTimeout
SHARDS_SKIP := $(SHARDS_SKIP)|TestAllowAllWaitsForTheLog|TestPgBouncerHandsNoSettings
#   migrations, roles, encodings, names and texts of what a migrated database has
SHARDS_SKIP := $(SHARDS_SKIP)|TestMigrat|TestSchema|TestWithSharesEverythingElse|TestKeyThatTheEncoding|NeedsNothingBut|NeedNothingBut|TestNotPermitted|TestNameThat|TestMixedBatchWithARefused|Decoys|TestHelpers
SHARDS_SKIP := $(SHARDS_SKIP)|TestExamplesInComments|TestSQLNames|TestSQLRefuses|TestTakesFromRows|TestLargestTakes|TestRowsBeingMadeSpoil|TestTakesOfSets|TestSQLReadsPolicies|TestAllFunctionRefuses|TestCalendarWindowsAreThose
SHARDS_SKIP := $(SHARDS_SKIP)|TestFunctionsPass|TestFunctionsUnder|TestExpressionsAreInlined|TestMistakesIn|TestLeasesWithoutReports|FuzzDatabasePolicies
#   the table of policies, which is on the first shard: its triggers, its locks, its roles
SHARDS_SKIP := $(SHARDS_SKIP)|TestBansWaitForWriters|TestFarTimes|TestHistoryOfPolicies|TestPoliciesAreNotTruncated|TestPoliciesMissNothing
SHARDS_SKIP := $(SHARDS_SKIP)|TestPoliciesShare|TestPoliciesThat|TestPoliciesWakeUp|TestPoliciesWithoutTriggers|TestWritersOfPolicies|TestPoliciesOfApplications
SHARDS_SKIP := $(SHARDS_SKIP)|TestSequence|TestChangesOfPoliciesDo|TestSQLAllowsUnderThePolicyInForce|TestBanThatIsRefused|TestLargeIDs|TestSQLPassesOver
#   tests of proxies that are scripted, and of the text of this module
SHARDS_SKIP := $(SHARDS_SKIP)|Shard|TestSentinels|TestApplicationsClock

.PHONY: test/shards
test/shards: ## Run the library's tests, and those of histories, through a proxy with four shards; needs PL/Proxy
	RATELIMIT_TEST_SHARDS=4 go test -count=1 -timeout 40m -skip '$(SHARDS_SKIP)' .
	cd integration_test && RATELIMIT_TEST_SHARDS=4 go test -count=1 -timeout 40m -run 'Linearizable|JudgeOfMixes' ./faults

.PHONY: fuzz
fuzz: ## Run every fuzz target for some seconds
	@grep -rl '^func Fuzz' --include='*_test.go' . | while read -r file; do \
		for target in $$(sed -n 's/^func \(Fuzz[A-Za-z]*\)(.*/\1/p' "$$file"); do \
			case $$target in FuzzDatabase*) runs=3000 ;; *) runs=100000 ;; esac; \
			echo "$$target"; \
			(cd "$$(dirname "$$file")" && go test -run '^$$' -fuzz "^$$target\$$" -fuzztime $${runs}x -fuzzminimizetime 10x .) || exit 1; \
		done \
	done

.PHONY: test/faults
test/faults: ## Judge histories and kill the server, and processes, more often; ROUNDS=20 SEED=1 as a test has logged
	cd integration_test && ROUNDS=$(or $(ROUNDS),20) go test -v -count=1 -timeout 20m -run 'Linearizable|Killed|Forgotten|Leases' ./faults

.PHONY: bench
bench: ## Compare with other limiters, side by side; BENCH=quick takes 2 minutes, BENCH_ONLY=new is some workloads
	cd integration_test && go test -run '^$$' -bench '^BenchmarkSideBySide$$' -benchtime 1x -timeout 60m ./bench

# Only a soak of the full length is worth a new chart in docs/.
SOAK ?= 10m
SOAK_OUT ?= $(if $(filter 10m,$(SOAK)),$(CURDIR)/docs)

.PHONY: soak
soak: ## Run all at once on a server that keeps failing, for 10 minutes; SOAK=30s is shorter, SEED repeats one
	cd integration_test && SOAK='$(SOAK)' SOAK_OUT='$(abspath $(SOAK_OUT))' go test -v -count=1 -run '^TestSoak$$' -timeout 0 ./soak

.PHONY: sql
sql: ## Write the migrations from sql/, and on a Postgres what they make
	go run ./internal/gensql
	go test -count=1 -timeout 5m -run '^TestMade$$' ./internal/catalog -update

.PHONY: lint
lint: ## Run golangci-lint on all modules
	golangci-lint run ./...
	cd otelratelimit && golangci-lint run --config ../.golangci.yml ./...
	cd grpclimit && golangci-lint run --config ../.golangci.yml ./...
	cd integration_test && golangci-lint run --config ../.golangci.yml ./...

.PHONY: verify
verify: ## Check that files are formatted, generated ones current, and modules tidy
	@test -z "$$(gofmt -l .)" || { gofmt -l .; echo 'not formatted: run gofmt -w .'; exit 1; }
	go run ./internal/gensql -check
	go mod tidy -diff
	cd otelratelimit && go mod tidy -diff
	cd grpclimit && go mod tidy -diff
	cd integration_test && go mod tidy -diff

.PHONY: demo
demo: ## Show what the library does, on a throwaway Postgres, or on that of DATABASE_URL
	go run ./cmd/pgratelimit demo
