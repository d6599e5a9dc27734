-- +goose Up
CREATE TABLE application (id bigint);

-- +goose Down
DROP TABLE application;
