// Package service is the rate limit service: one process that answers Envoy and others, and asks Postgres.
package service
