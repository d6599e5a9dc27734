-- +goose Up
ALTER TABLE application ADD COLUMN more bigint;

-- +goose Down
ALTER TABLE application DROP COLUMN more;
